"""Chooses the implementation for the device at hand; today the reference serves all of them."""

from specjax.kernels.tree_attention.reference import tree_attention

__all__ = ["tree_attention"]
