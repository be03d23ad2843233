"""Measures how long a step, an exchange and a codec take on the devices at hand, as profiles for `decjax.costmodel`.

calibrate    what is timed, and the profile that is computed from it
rounds       how it is timed
silence      programs without their messages
"""

from decjax.measure.calibrate import Form, Measured, TimedExchange, check, form, measure, prepare

__all__ = ["Form", "Measured", "TimedExchange", "check", "form", "measure", "prepare"]
