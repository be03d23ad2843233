"""Measures how long a step, an exchange and a codec take on the devices at hand, as profiles for `decjax.costmodel`.

calibrate    what is timed, and the profile that is computed from it
exchanges    the exchanges among it
links        the link of every pair of workers
rounds       how it is timed
silence      programs without their messages
"""

from decjax.measure.calibrate import Form, Measured, check, form, measure, prepare, sizes_up_to_model
from decjax.measure.exchanges import TimedExchange

__all__ = ["Form", "Measured", "TimedExchange", "check", "form", "measure", "prepare", "sizes_up_to_model"]
