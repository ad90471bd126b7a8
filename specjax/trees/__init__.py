"""Shapes of drafts."""
