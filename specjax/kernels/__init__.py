"""Kernels, each beside its reference."""
