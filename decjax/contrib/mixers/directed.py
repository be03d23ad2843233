"""Push-sum: gossip on directed graphs, with or without a codec, and with messages that arrive one step late (OSGP)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs
from decjax.buckets import is_floating, of_floating
from decjax.codecs import Codec
from decjax.gossip.choco import Estimates
from decjax.gossip.coded import Compensated, CompressedState
from decjax.gossip.mixer import Gossip, Mixer
from decjax.gossip.requirements import CONTRACTIVE, SINGLE_WORKERS
from decjax.gossip.rounds import is_mean, member_pairs, num_messages, own_weight, pull
from decjax.registry import Requirement
from decjax.topology import Round, is_column_stochastic
from decjax.typing import PyTree

COLUMN_STOCHASTIC = Requirement(
    "topology",
    "a column-stochastic graph",
    is_column_stochastic,
    "use 'directed_exponential', 'random_digraph' or another one whose W has columns that sum to one",
)


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


class OverlapPushSumState(NamedTuple):
    """State of `overlap_push_sum`.

    Attributes:
        weight: y_i, a scalar of the parameters' dtype, float32 or wider.
        sent: w½_i of the step before, which is on its way to the neighbors, for each bucket; zeros at first.
        sent_weight: y_i of the step before; 0 at first.
        arrived: within a step (w_ii, Σ_j w_ij w½_j, Σ_j w_ij y_j), the last two of the step before; () between steps.
    """

    weight: jax.Array
    sent: tuple
    sent_weight: jax.Array
    arrived: tuple = ()


class OverlapPushSum(Gossip, name="overlap_push_sum"):
    """Overlapped stochastic gradient push (OSGP): push-sum with messages that arrive one step after they were sent.

        w½_i = y_i z_i + u_i        u_i the optimizer's step at z_i
        w_i <- a_ii w½_i + Σ_j a⁻_ij w½⁻_j      y_i <- a_ii y_i + Σ_j a⁻_ij y⁻_j      z_i = w_i / y_i

    a_ij are the entries of W, which may vary in time, and ⁻ marks values of the step before: the message that worker j sent after its
    last step. It travels during the whole step of worker i, as parameters do in order "awc" of other mixers; there they are mixed
    with i's own from before the step, here with those from after it. The sum of y over workers and of y in transit stays N.

    Reference: Assran et al. 2019, "Stochastic gradient push", arXiv 1811.10792, algorithm 2 with τ = 1.
    """

    order = "awc"
    weights = True
    messages = "parameters and a weight, a step late"
    memory = "1 copy and a weight"
    source = "arXiv 1811.10792"
    requires = (COLUMN_STOCHASTIC, SINGLE_WORKERS)

    def _arriving(self, phase: int) -> Round:
        """Return the round along which the messages of the step before travel."""
        return self.topology.round(phase - 1)

    def init(self, params: PyTree) -> OverlapPushSumState:
        sent = tuple(jnp.zeros(bucket.size, bucket.dtype) for bucket in self.layout(params).buckets)
        return OverlapPushSumState(jnp.ones((), weight_dtype(params)), sent, jnp.zeros((), weight_dtype(params)))

    def exchange(self, params: PyTree, state: OverlapPushSumState, phase: int) -> tuple[PyTree, OverlapPushSumState]:
        axis, round_, total = self.channel.axis, self._arriving(phase), None
        for shift in round_.shifts:
            pairs = member_pairs(shift, 1)
            weight = own_weight(shift.weights, 1, axis, state.weight.dtype)
            arrived = [axis.exchange(x, pairs).astype(state.weight.dtype) * weight for x in (*state.sent, state.sent_weight)]
            total = arrived if total is None else [old + new for old, new in zip(total, arrived)]
        if total is None:
            total = [jnp.zeros(x.shape, state.weight.dtype) for x in (*state.sent, state.sent_weight)]
        own = jnp.asarray(own_weight(self.topology.round(phase).self_weights, 1, axis, state.weight.dtype), state.weight.dtype)
        return params, state._replace(arrived=(own, tuple(total[:-1]), total[-1]))

    @property
    def settle(self):
        return self._settled

    def _settled(self, mixed: PyTree, stepped: PyTree, state: OverlapPushSumState) -> tuple[PyTree, OverlapPushSumState]:
        layout, (own, values, weight) = self.layout(mixed), state.arrived
        before, after = layout.pack(mixed), layout.pack(stepped)
        half = [(state.weight - 1) * z + x for z, x in zip(before, after)]
        new_weight = own * state.weight + weight
        z = [(own * w + arrived) / new_weight for w, arrived in zip(half, values)]
        sent = tuple(w.astype(x.dtype) for w, x in zip(half, state.sent))
        return layout.unpack(z, like=stepped), OverlapPushSumState(new_weight, sent, state.weight)

    def num_bytes(self, params: PyTree, phase: int) -> np.ndarray:
        return num_messages(self._arriving(phase)) * (self.layout(params).num_bytes + weight_dtype(params).itemsize)

    @property
    def weight(self):
        return lambda state: state.weight
