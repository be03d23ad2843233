"""Point-to-point messages: what an array looks like on the wire. See `decjax.codecs.codec` for what a codec is.

    bfloat16    x rounded: 16 bits a value
    int8        round(127 x / s) with s = max |x| over a block of 256 values: 8 bits a value, and 1/8 for the scales
"""

from typing import Any

from decjax.codecs.blocks import int8
from decjax.codecs.cast import bfloat16
from decjax.codecs.codec import Codec, Traits, message_bytes

CODECS = {"bfloat16": bfloat16, "int8": int8}


def names() -> tuple[str, ...]:
    """All names that `make` takes."""
    return tuple(CODECS)


def make(name: str, **options: Any) -> Codec:
    """The codec of that name.

    Raises:
        ValueError: naming the codecs there are.
    """
    if name not in CODECS:
        raise ValueError(f"codec {name!r} is unknown; use one of {', '.join(CODECS)}")
    return CODECS[name](**options)
