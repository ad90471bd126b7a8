"""Sweeps: which fields of a run vary, who runs which trial, what each is measured to be, and the report."""
