"""Verification rules, one a module: `verify`, `LOSSLESS` and the proposal `LAWS` that it may judge."""
