"""Verification rules: one module each, exporting `verify`, `LOSSLESS` and the proposal `LAWS` it may judge."""
