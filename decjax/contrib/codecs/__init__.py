"""Codecs that few runs need, and what an entropy coder behind a codec would save.

smooth   blocks of neighboring values: codec "zfp"
error    errors within a bound: codec "bounded"
entropy  bits per value behind an entropy coder
"""

from decjax.contrib.codecs.error import Bounded as bounded
from decjax.contrib.codecs.smooth import Zfp as zfp

__all__ = ["bounded", "zfp"]
