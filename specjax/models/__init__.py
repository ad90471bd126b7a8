"""Target and draft models."""
