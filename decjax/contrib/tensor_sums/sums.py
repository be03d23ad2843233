"""Products whose sums travel coded between the devices of a tensor-parallel group.

A half layer begins with a kernel divided by columns and ends with one divided by rows, so that two sums over the K devices of a group
are needed, whatever the codec C:

    kernel divided by rows, forward         y  = Σ_k C(x_k W_k)         Megatron's operator g
    kernel divided by columns, backward     dx = Σ_k C(dy_k W_kᵀ)       Megatron's operator f

All other passes need no message. The terms are added up in float32. There are two forms, of which the one that sends less is taken:

    gather    every device gets all messages                                     each sends its message K−1 times
    shards    device k adds up the k-th of K parts of the rows, and sends        each sends 2(K−1)/K of a message
              the sum on, coded once more

With two devices both send the same, so it is "gather", whose sums are coded once. All devices decode the same bytes in the same order,
and so hold the same sums, bit for bit. Derivatives are those of the exact sum: what a message loses counts as a constant.

What messages lose is not remembered. The next message of a half layer belongs to other tokens, to which the error of these does not
belong. Sums of the embedding and of the output layer, which are divided by vocabulary, are not coded.

Reference: Xu et al. 2024, arXiv 2409.02423 (a codec for each axis); Shoeybi et al. 2019, arXiv 1909.08053, section 3 (f and g).
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs, mesh, registry
from decjax.reduce import messages

WIDE = np.float32  # in which terms are encoded and added up
SCOPE = "group_sum"  # in the names of the messages of a compiled program


class CodedSums(registry.Part, kind="product", name="coded"):
    """A `models.layers.Product` whose sums over a tensor-parallel group travel coded, forward and backward.

    Attributes:
        codec: C, without state and random numbers, with messages of a fixed size.
    """

    codec: codecs.Codec | str = "int8"

    def __post_init__(self):
        faults = {
            "has messages of varying size": not self.coder.static_bytes,
            "keeps a state from one message to the next": self.coder.state_key,
            "draws random numbers": self.coder.random,
        }
        for fault in (fault for fault, present in faults.items() if present):
            raise ValueError(
                f"tensor_codec={self.coder.name!r} {fault}, and the sums within a layer have none; use one such as 'zfp(rate=16)' or 'int8'"
            )

    @functools.cached_property
    def coder(self) -> codecs.Codec:
        """The codec itself."""
        return registry.make("codec", self.codec)

    def __call__(self, x_RxF: jax.Array, kernel_FxG: jax.Array, axis: int) -> jax.Array:
        """Return x @ kernel, where the devices of a group hold the kernel divided along `axis`."""
        return product(self.contract)(x_RxF, kernel_FxG, axis)

    def contract(self, x_RxF: jax.Array, kernel_FxG: jax.Array) -> jax.Array:
        """Return the sum of the devices' products of columns of x and rows of the kernel; without a group, the plain product."""
        if mesh.tensor_size() == 1:
            return x_RxF @ kernel_FxG
        feedback = codecs.feedback.memoryless(codecs.of_any_shape(self.coder))

        def on_device(x_RxF, kernel_FxG):
            return _total(feedback, jnp.matmul(x_RxF, kernel_FxG, preferred_element_type=WIDE)).astype(x_RxF.dtype)

        return mesh.each_part(on_device, (x_RxF, kernel_FxG), (1, 0))

    def num_bytes(self, shape: tuple[int, int], num_devices: int) -> int:
        """Return the bytes that each of K devices sends for the sum of R×G values; uncoded it is 2(K−1)/K of theirs."""
        return min(_forms(self.coder, shape, num_devices).values())


def product(contract: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array, int], Any]:
    """Return the `models.layers.Product` whose sums are made by `contract(x, kernel)`, forward and backward."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
    def multiply(x_RxF, kernel_FxG, axis):
        return contract(x_RxF, kernel_FxG) if axis == 0 else x_RxF @ kernel_FxG

    def forward(x_RxF, kernel_FxG, axis):
        return multiply(x_RxF, kernel_FxG, axis), (x_RxF, kernel_FxG)

    def backward(axis, kept, d_RxG):
        x_RxF, kernel_FxG = kept
        return d_RxG @ kernel_FxG.T if axis == 0 else contract(d_RxG, kernel_FxG.T), x_RxF.T @ d_RxG

    multiply.defvjp(forward, backward)
    return multiply


def _forms(codec: codecs.Codec, shape: tuple[int, int], num_devices: int) -> dict[str, int]:
    """Bytes that a device sends in each form; "gather" comes first, so that it is taken where both are equal."""
    (rows, columns), codec = shape, codecs.of_any_shape(codec)
    part = (-(-rows // num_devices), columns)
    return {
        "gather": (num_devices - 1) * codec.num_bytes(shape, WIDE),
        "shards": 2 * (num_devices - 1) * codec.num_bytes(part, WIDE),
    }


@jax.named_scope(SCOPE)
def _total(feedback: codecs.feedback.Feedback, term_RxG: jax.Array) -> jax.Array:
    """On one device: the sum of the terms of all devices of the group."""
    (R, G), K = term_RxG.shape, mesh.tensor_size()
    forms = _forms(feedback.codec, (R, G), K)
    key = jax.random.key(0)  # Codecs that draw are refused.
    if min(forms, key=lambda form: forms[form]) == "gather":
        (mean_RxG,), *_ = messages.gathered(feedback, [term_RxG], _nothing(feedback), key, _no_header, mesh.GROUP)
        return K * mean_RxG
    parts_KxPxG = jnp.pad(term_RxG, ((0, -R % K), (0, 0))).reshape(K, -1, G)
    sides = _nothing(feedback), _nothing(feedback)
    (mean_KxPxG,), *_ = messages.sharded(feedback, [parts_KxPxG], *sides, key, _no_header, mesh.GROUP)
    return K * mean_KxPxG.reshape(-1, G)[:R]


def _nothing(feedback: codecs.feedback.Feedback) -> messages.Side:
    """What is remembered between messages."""
    return messages.Side((feedback.init((1,), WIDE),), ((),))


def _no_header(decoded: list[jax.Array]) -> jax.Array:
    return jnp.zeros(0, jnp.uint8)
