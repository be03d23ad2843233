"""The reducer "demo"."""

from typing import Literal

from decjax import codecs
from decjax.options import Share
from decjax.reduce.coded import CodedMean


class Demo(CodedMean, name="demo"):
    """DeMo: the average of the largest cosine coefficients of a momentum; use an optimizer that takes the sign of it.

    `CodedMean` with the defaults of Peng et al. 2024, arXiv 2411.19870.
    """

    optimizer = "sign"
    needs = "contractive or unbiased codec, optimizer sign"
    messages = "cosine coefficients"
    memory = "1 copy"

    codec: codecs.Codec | str = "dct"
    form: Literal["auto", "gather", "shards"] = "gather"
    decay: Share = 0.999
