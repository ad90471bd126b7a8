"""Products of a few rows with a large weight matrix, bound by reading the weights."""

from specjax.kernels.small_matmul.api import row_sums, small_matmul

__all__ = ["row_sums", "small_matmul"]
