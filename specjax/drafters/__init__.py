"""Drafters: one module each, exporting `Config` and `build(config, target, architecture) -> Drafter`."""
