"""Push-sum: gossip on directed graphs, with or without a codec."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs
from decjax.buckets import is_floating, of_floating
from decjax.codecs import Codec
from decjax.gossip.choco import Estimates
from decjax.gossip.coded import Compensated, CompressedState
from decjax.gossip.mixer import Mixer
from decjax.gossip.requirements import COLUMN_STOCHASTIC, CONTRACTIVE
from decjax.gossip.rounds import is_mean, num_messages, pull
from decjax.typing import PyTree


class PushSumState(NamedTuple):
    """State of `push_sum`.

    Attributes:
        weight: y_i, a scalar of the parameters' dtype, float32 or wider.
        values: state of the gossip of w_i = y_i z_i.
    """

    weight: jax.Array
    values: CompressedState


class PushSum(Estimates, name="push_sum"):
    """Push-sum: gossip on directed graphs, where only columns of W sum to one, with a weight y_i that corrects for it.

        w_i = y_i z_i     c_i = C(w_i − x̂_i)     x̂_i <- x̂_i + c_i
        w_i <- w_i + γ (Σ_j a_ij x̂_j − x̂_i)     y_i <- y_i + γ (Σ_j a_ij y_j − y_i)     z_i <- w_i / y_i

    a_ij are the entries of W, which may vary in time. The parameters are z, at which gradients are computed; workers agree on
    Σ_i w_i / Σ_i y_i. A step u of the optimizer is added to w_i, and so to z_i as u / y_i. γ < 1 replaces W by γ W + (1−γ) I, for w
    and y alike. y is sent exactly, one number a message. On a time-varying graph there are estimates x̂ for each round of the period.

    Attributes:
        codec: C, contractive; None: w travels uncompressed, and nothing is remembered.
        gamma: γ in (0, 1]; None: 1 without a codec or for one that keeps 0.9 of the energy of noise, else half of what it keeps.
        rounds: R ≥ 1, rounds per step.

    References: Taheri et al. 2020, "Quantized decentralized stochastic learning over directed graphs", arXiv 2002.09964; Assran et
    al. 2019, "Stochastic gradient push", arXiv 1811.10792.
    """

    weights = True
    messages = "compressed changes, a weight"
    memory = "a weight; with a codec as choco"
    requires = (COLUMN_STOCHASTIC, CONTRACTIVE)

    codec: Codec | str | None = None

    # Neighbors hold estimates of y_i z_i, which are not equal where z_i are; and setting y_i to 1 would require sending w's change.
    restart = Mixer.restart

    @property
    def per_round(self) -> bool:
        return bool(self.codec)

    def remember(self, x: jax.Array, row_sum: float | jax.Array) -> PyTree:
        return super().remember(x, row_sum) if self.codec else ()

    def encoded(self, x: jax.Array, memory: PyTree) -> jax.Array:
        return super().encoded(x, memory) if self.codec else x

    def merge(self, x: jax.Array, c: jax.Array, pulled: jax.Array, memory: PyTree) -> tuple[jax.Array, PyTree]:
        return super().merge(x, c, pulled, memory) if self.codec else Compensated.merge(self, x, c, pulled, memory)

    def init(self, params: PyTree) -> PushSumState:
        return PushSumState(jnp.ones((), weight_dtype(params)), super().init(params))

    def exchange(self, params: PyTree, state: PyTree, phase: int) -> tuple[PyTree, PyTree]:
        mixed, values = super().exchange(_scaled(params, state.weight), state.values, phase)
        weight, axis = state.weight, self.channel.axis
        for round_ in self.rounds_due(phase):
            if not is_mean(round_):
                weight = weight + self.strength * pull(codecs.identity(), weight, weight, round_, axis)
        return _scaled(mixed, 1 / weight), PushSumState(weight, values)

    @property
    def settle(self):
        return lambda mixed, stepped, state: (of_floating(lambda x, z: z + (x - z) / state.weight, stepped, mixed), state)

    @property
    def weight(self):
        return lambda state: state.weight

    def num_bytes(self, params: PyTree, phase: int) -> np.ndarray:
        sent = sum(map(num_messages, self.rounds_due(phase)))
        return super().num_bytes(params, phase) + weight_dtype(params).itemsize * sent


def _scaled(params: PyTree, factor: jax.Array) -> PyTree:
    return of_floating(lambda x: x * factor, params)


def weight_dtype(params: PyTree) -> np.dtype:
    """Return the type of the weights."""
    return jnp.result_type(jnp.float32, *(x.dtype for x in jax.tree.leaves(params) if is_floating(x)))
