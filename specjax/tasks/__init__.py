"""What a config may ask for, one task a module: `FIELDS`, `validate(config)` and `run(options)`."""
