"""1-bit Adam and 0/1 Adam, which average compressed momenta: methods "onebit_adam" and "zero_one_adam"."""

from decjax.contrib.onebit.onebit_adam import OnebitAdam, OnebitAdamState, scale_by_onebit_adam
from decjax.contrib.onebit.zero_one_adam import ZeroOneAdam

__all__ = ["OnebitAdam", "OnebitAdamState", "ZeroOneAdam", "scale_by_onebit_adam"]
