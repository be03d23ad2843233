"""DeMo, decoupled momentum: reducer "demo", whose codec is "dct", and optimizer "sign".

codec    the largest cosine coefficients of chunks of an array
reducer  the average of compressed momenta
step     the optimizer
"""

from decjax.contrib.demo.codec import Dct
from decjax.contrib.demo.reducer import Demo
from decjax.contrib.demo.step import sign_descent

__all__ = ["Dct", "Demo", "sign_descent"]
