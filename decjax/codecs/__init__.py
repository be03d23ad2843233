"""Message formats: codecs that encode an array as a smaller message, and decode it. `Codec` says what a codec is.

`feedback` adds to any codec a memory of what its messages lost; `bits` packs numbers of few bits into bytes.
"""

import functools

from decjax import options as option_types
from decjax import registry
from decjax.codecs import feedback
from decjax.codecs.blocks import Float8E4M3 as float8_e4m3
from decjax.codecs.blocks import Float8E5M2 as float8_e5m2
from decjax.codecs.blocks import Int2 as int2
from decjax.codecs.blocks import Int4 as int4
from decjax.codecs.blocks import Int8 as int8
from decjax.codecs.blocks import Integers as integers
from decjax.codecs.blocks import Qsgd as qsgd
from decjax.codecs.blocks import ScaledSign as scaled_sign
from decjax.codecs.blocks import Ternary as ternary
from decjax.codecs.codec import (
    Codec,
    Reshaped,
    WrappedCodec,
    finite,
    matrix_shape,
    message_bytes,
    of_any_shape,
    seen_shape,
    working_dtype,
)
from decjax.codecs.factors import LowRank as low_rank
from decjax.codecs.factors import revived
from decjax.codecs.scalar import BFloat16 as bfloat16
from decjax.codecs.scalar import Float16 as float16
from decjax.codecs.scalar import Identity as identity
from decjax.codecs.scalar import Natural as natural
from decjax.codecs.scalar import Sign as sign
from decjax.codecs.sparse import BlockTopk as block_topk
from decjax.codecs.sparse import Randomk as randomk
from decjax.codecs.sparse import Threshold as threshold
from decjax.codecs.sparse import Topk as topk

__all__ = ["Codec", "Reshaped", "WrappedCodec", "feedback", "make", "names"]
__all__ += ["identity", "bfloat16", "float16", "sign", "natural"]
__all__ += ["int8", "int4", "int2", "integers", "qsgd", "ternary", "float8_e4m3", "float8_e5m2", "scaled_sign"]
__all__ += ["topk", "threshold", "block_topk", "randomk", "low_rank"]
__all__ += ["finite", "matrix_shape", "message_bytes", "of_any_shape", "revived", "seen_shape", "working_dtype"]


def names() -> tuple[str, ...]:
    """Return the names of all codecs that `make` builds."""
    return registry.names("codec")


@functools.partial(option_types.checked, called="codecs.make")
def make(name: str | Codec, **options: object) -> Codec:
    """Return the codec of a name.

    Args:
        name: one of `names()`, or a call form such as "topk(fraction=0.01,values=int4)"; a codec is returned unchanged.
        **options: those of the codec. An option that is a codec itself, such as `values` of top-k, may be given by name.

    Raises:
        ValueError: for an unknown name or option, or a bad option value.

    Examples:
        >>> make("topk", fraction=0.01, values="int4").num_bytes((1000,), "float32")
        29
    """
    return registry.make("codec", name, **options)
