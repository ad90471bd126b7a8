"""Data: prompts, text and tokens."""
