"""Measuring: methods compared on the same prompts, their metrics and their tables."""
