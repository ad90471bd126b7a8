"""Products of a few rows with a large weight matrix, bound by reading the weights."""

from specjax.kernels.small_matmul.api import small_matmul

__all__ = ["small_matmul"]
