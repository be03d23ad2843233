"""Sums of a tensor-parallel group that travel coded: the product "coded"."""

from decjax.contrib.tensor_sums.sums import SCOPE, CodedSums, product

__all__ = ["SCOPE", "CodedSums", "product"]
