"""Measured times of a step, an exchange and a codec on the available devices, as profiles for `decjax.costmodel`.

profiling    what is timed, and the profile that is computed from it
exchanges    the exchanges among it
rounds       how it is timed
silence      programs without their messages
"""

from decjax.measure.exchanges import TimedExchange
from decjax.measure.profiling import Form, Measured, check, form, measure, prepare, sizes_up_to_model

__all__ = ["Form", "Measured", "TimedExchange", "check", "form", "measure", "prepare", "sizes_up_to_model"]
