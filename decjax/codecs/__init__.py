"""Point-to-point messages: what an array looks like on the wire. See `decjax.codecs.codec` for what a codec is.

    cast       identity, bfloat16, float16, float8_e4m3, float8_e5m2    narrower floats
    blocks     int8, int4, int2, integers, qsgd, ternary                whole numbers and a scale per block
    bitwise    sign, scaled_sign, natural                               1 bit or 9 bits a value
    sparse     topk, block_topk, randomk, threshold                     a few values and where they belong
    low_rank   low_rank                                                 two thin matrices
    dct        dct                                                      a few cosine coefficients of each chunk
    zfp        zfp                                                      any number of bits a value, for smooth arrays
    bounded    bounded                                                  no value is off by more than e

`feedback` wraps any of them with a memory of what messages lost, `trees` applies one to a whole pytree, `noise` draws the random
numbers.
"""

import inspect
import numbers
from typing import Any

from decjax.codecs import feedback
from decjax.codecs.bitwise import natural, scaled_sign, sign
from decjax.codecs.blocks import int2, int4, int8, integers, qsgd, ternary
from decjax.codecs.bounded import bounded
from decjax.codecs.cast import bfloat16, float8_e4m3, float8_e5m2, float16, identity
from decjax.codecs.codec import Codec, Traits, finite, matrix_shape, message_bytes, of_any_shape, seen_shape, working_dtype
from decjax.codecs.dct import dct
from decjax.codecs.low_rank import low_rank, revived
from decjax.codecs.sparse import block_topk, randomk, threshold, topk
from decjax.codecs.trees import TreeCodec, on_tree
from decjax.codecs.zfp import zfp

CODECS = {
    make.__name__: make
    for make in (
        identity,
        bfloat16,
        float16,
        float8_e4m3,
        float8_e5m2,
        int8,
        int4,
        int2,
        integers,
        qsgd,
        ternary,
        natural,
        sign,
        scaled_sign,
        topk,
        block_topk,
        randomk,
        threshold,
        low_rank,
        dct,
        zfp,
        bounded,
    )
}


def names() -> tuple[str, ...]:
    """All names that `make` takes."""
    return tuple(CODECS)


def options(name: str) -> dict[str, Any]:
    """The options of a codec and their defaults.

    Raises:
        ValueError: naming the codecs there are.
    """
    if name not in CODECS:
        raise ValueError(f"codec {name!r} is unknown; use one of {', '.join(CODECS)}")
    return {option: parameter.default for option, parameter in inspect.signature(CODECS[name]).parameters.items()}


def make(name: str, **given: Any) -> Codec:
    """The codec of that name.

    Args:
        name: one of `names()`.
        given: its options. Where one is a codec itself, such as `values` of top-k, its name will do.

    Example:
        codecs.make("topk", fraction=0.01, values="int4")

    Raises:
        ValueError: naming the value, what is allowed and what to do, in one line.
    """
    known = options(name)
    for option in given:
        if option not in known:
            raise ValueError(
                f"codec {name!r} has no option {option!r}; " + (f"use {', '.join(known)}" if known else "it has none, leave it out")
            )
    for option, value in given.items():
        if isinstance(known[option], Codec):
            if not isinstance(value, str | Codec):
                raise ValueError(f"codec {name!r} option {option}={value!r} must be a codec or the name of one, such as 'int8'")
            given = given | {option: make(value) if isinstance(value, str) else value}
        elif isinstance(value, Codec) or isinstance(value, str) != isinstance(known[option], str):
            raise ValueError(f"codec {name!r} option {option}={value!r}: give a value such as {known[option]!r}")
        elif type(known[option]) is float and (not isinstance(value, numbers.Real) or isinstance(value, bool)):
            raise ValueError(f"codec {name!r} option {option}={value!r} must be a number, such as {known[option]}")
        elif type(known[option]) is int and type(value) is not int:
            raise ValueError(f"codec {name!r} option {option}={value!r} must be a whole number, such as {known[option]}")
    return CODECS[name](**given)
