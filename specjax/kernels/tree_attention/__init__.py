"""Attention of tree nodes to the cached prefix and to their own ancestors."""

from specjax.kernels.tree_attention.api import tree_attention

__all__ = ["tree_attention"]
