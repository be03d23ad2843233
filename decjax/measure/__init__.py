"""Measured times of a step, an exchange and a codec on the available devices, as profiles for `decjax.costmodel`.

profiling    what is timed, and the profile that is computed from it
timing       how it is timed, and the exchanges
"""

from decjax.measure.profiling import Form, Measured, check, form, measure, prepare, sizes_up_to_model
from decjax.measure.timing import TimedExchange

__all__ = ["Form", "Measured", "TimedExchange", "check", "form", "measure", "prepare", "sizes_up_to_model"]
