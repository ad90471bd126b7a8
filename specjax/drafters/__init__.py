"""Drafters: one module each, exporting `Config` and `build(config, target, architecture) -> Drafter`.

A drafter made of another one has a field `inner`, the fields of that one, and is built from `Parts` in place
of an architecture: with a field `source` they have a model of their own, with `verify` a rule.
"""
