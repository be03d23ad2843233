"""Metadata of a checkpoint: checksums, and the name, dtype and shape of each array, to verify the state when it is read."""

import functools
import json
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from decjax import codecs
from decjax.errors import CheckpointError

VERSION = 3  # Version 2 lacks step and arrays; version 1 also lacks the version, and has weaker checksums.


def _mixed(word: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer, a bijection of uint32 in which every bit of the input affects every bit of the result."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> shift)) * jnp.uint32(factor)
    return word ^ (word >> 16)


@functools.partial(jax.jit, static_argnames="version")
def checksums(state: Any, version: int = VERSION) -> jax.Array:
    """Return a checksum of each array in `state`, uint32 [arrays]: Σ_i mixed(word_i ⊕ mixed(i)) mod 2³².

    Orbax's files have no checksums. A sum does not depend on the order, so each device sums its own shards; words are mixed first, so that
    several changes do not cancel. Checkpoints of version 1 have Σ_i (2i + 1) · word_i, in which two flipped signs cancel.
    """

    def one(x):
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32))
        words, index = words.astype(jnp.uint32), jax.lax.iota(jnp.uint32, words.size).reshape(words.shape)
        return jnp.sum(words * (2 * index + 1) if version == 1 else _mixed(words ^ _mixed(index)), dtype=jnp.uint32)

    return jnp.stack([one(x) for x in jax.tree.leaves(state)])


def extra_checksum(extra: dict[str, Any]) -> int:
    """Return the checksum of a checkpoint's metadata; in version 2 of the counters only."""
    checksum_names = ("checksums", "counters_checksum")
    covered = {name: value for name, value in extra.items() if name not in checksum_names}
    return zlib.crc32(json.dumps(extra["counters"] if extra["version"] == 2 else covered, sort_keys=True).encode())


def arrays_of(state: Any) -> dict[str, list]:
    """Return the dtype and shape of each array of a state by its name in a checkpoint, such as {"params.w": ["float32", 4, 300]}.

    Raises:
        CheckpointError: if the state cannot be saved: two arrays would have the same name, or one holds typed PRNG keys.
    """
    arrays: dict[str, list] = {}
    for path, x in ocp.tree.to_flat_dict(state).items():
        name = ".".join(map(str, path))
        if not hasattr(x, "dtype"):
            continue
        if name in arrays:
            raise CheckpointError(f"two arrays of the state are called {name!r} in a checkpoint; use names without dots")
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise CheckpointError(
                f"{name} has dtype {x.dtype}, which checkpoints cannot hold; keep jax.random.key_data(key) instead"
            )
        arrays[name] = [np.dtype(x.dtype).name, *x.shape]
    return arrays


def _shown(array: list | None) -> str:
    return f"{array[0]}{array[1:]}" if array else "missing"


def difference(there: dict[str, list], here: dict[str, list]) -> str:
    """Return how the first different array of two states differs; empty if there is none."""
    for name in [*here, *(there.keys() - here.keys())]:
        if (saved := there.get(name)) != (present := here.get(name)):
            return f"{name} is {_shown(saved)} there and {_shown(present)} here"
    return ""


def fix(there: dict[str, list], here: dict[str, list]) -> str:
    """Return the fix for two different states, for an error message."""
    if difference(_without_width(there), _without_width(here)):
        return "use the model, optimizer, method and number of workers that saved it"
    return f"set JAX_ENABLE_X64={int(not jax.config.jax_enable_x64)}"  # pyright: ignore[reportAttributeAccessIssue]


def _without_width(arrays: dict[str, list]) -> dict[str, list]:
    """Return the arrays as without JAX_ENABLE_X64."""
    return {name: [dtype.replace("64", "32"), *shape] for name, (dtype, *shape) in arrays.items()}


def per_worker(arrays: dict[str, list]) -> dict[str, list]:
    return {name: [dtype, *shape[1:]] for name, (dtype, *shape) in arrays.items()}


_finite = jax.jit(codecs.finite)


def finite(state: Any) -> bool:
    """Return whether all floating-point values of a state are finite; each device checks its shards. A collective."""
    return bool(_finite(state))
