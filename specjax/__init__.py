"""Speculative sampling in JAX: every drafter, every verification rule and every tree under one contract."""
