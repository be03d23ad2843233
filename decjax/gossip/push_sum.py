"""Push-sum: gossip on directed graphs, with or without a codec."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs, registry
from decjax import topology as topology_lib
from decjax.buckets import is_floating, of_floating
from decjax.channel import Channel
from decjax.gossip import fits
from decjax.gossip.choco import estimates
from decjax.gossip.coded import CodedGossip, CompressedState, checked_channel, coded_channel
from decjax.gossip.exact import differences
from decjax.gossip.mixer import Mixer
from decjax.gossip.rounds import due, is_mean, num_messages, pull
from decjax.topology import Topology


class PushSumState(NamedTuple):
    """State of `push_sum`.

    Attributes:
        weight: y_i, a scalar of the parameters' dtype, float32 or wider.
        values: state of the gossip of w_i = y_i z_i.
    """

    weight: jax.Array
    values: CompressedState


@registry.register(
    "mixer",
    "push_sum",
    weights=True,
    needs="column-stochastic graph, contractive codec",
    messages="compressed changes, a weight",
    memory="a weight; with a codec as choco",
)
def push_sum(
    topology: Topology,
    channel: Channel = Channel(),
    *,
    codec: codecs.Codec | str | None = None,
    gamma: float | None = None,
    rounds: int = 1,
) -> Mixer:
    """Push-sum: gossip on directed graphs, where only columns of W sum to one, with a weight y_i that corrects for it.

        w_i = y_i z_i     c_i = C(w_i − x̂_i)     x̂_i <- x̂_i + c_i
        w_i <- w_i + γ (Σ_j a_ij x̂_j − x̂_i)     y_i <- y_i + γ (Σ_j a_ij y_j − y_i)     z_i <- w_i / y_i

    a_ij are the entries of W. The parameters are z, at which gradients are computed; workers agree on Σ_i w_i / Σ_i y_i. A step u of
    the optimizer is added to w_i, and so to z_i as u / y_i. γ < 1 replaces W by γ W + (1−γ) I, for w and y alike. y is sent exactly,
    one number a message. On a time-varying graph there are estimates x̂ for each round of the period.

    Args:
        topology: column-stochastic; it may vary in time.
        channel: how parameters travel.
        codec: C, contractive; None: w travels as it is, and nothing is remembered.
        gamma: γ in (0, 1]; None: 1 without a codec or for one that keeps 0.9 of the energy of noise, else half of what it keeps.
        rounds: R ≥ 1, rounds per step.

    References: Taheri et al. 2020, "Quantized decentralized stochastic learning over directed graphs", arXiv 2002.09964; Assran et
    al. 2019, "Stochastic gradient push", arXiv 1811.10792.
    """
    if not topology_lib.is_column_stochastic(topology):
        raise ValueError(
            "mixer 'push_sum' keeps the sum over workers, so columns of W have to sum to one, and those of "
            f"topology {topology.name!r} do not; use 'directed_exponential' or 'random_digraph'"
        )
    wire = checked_channel(topology, channel, codec) if codec else coded_channel(topology, channel, codecs.identity())
    fits.check_contractive("push_sum", wire.codec)
    gamma = fits.strength("push_sum", gamma, wire.codec if codec else None)
    scheme = estimates(gamma) if codec else differences(gamma)
    return _PushSum(CodedGossip(topology, wire, scheme, rounds), gamma).mixer()


@dataclasses.dataclass(frozen=True)
class _PushSum:
    """The functions of the mixer: gossip of w_i = y_i z_i, and of y_i."""

    values: CodedGossip
    gamma: float

    def _rounds(self, phase: int) -> list[topology_lib.Round]:
        return [self.values.topology.rounds[index] for index in due(self.values.topology, self.values.rounds, phase)]

    def init(self, params: Any) -> PushSumState:
        return PushSumState(jnp.ones((), _weight_dtype(params)), self.values.init(params))

    def exchange(self, params: Any, state: PushSumState, phase: int) -> tuple[Any, PushSumState]:
        mixed, values = self.values.exchange(_scaled(params, state.weight), state.values, phase)
        weight, axis = state.weight, self.values.wire.channel.axis
        for round_ in self._rounds(phase):
            if not is_mean(round_):
                weight = weight + self.gamma * pull(codecs.identity(), weight, weight, round_, axis)
        return _scaled(mixed, 1 / weight), PushSumState(weight, values)

    def settle(self, mixed: Any, stepped: Any, state: PushSumState) -> tuple[Any, PushSumState]:
        return of_floating(lambda x, z: z + (x - z) / state.weight, stepped, mixed), state

    def mixer(self) -> Mixer:
        values = self.values.mixer()

        def num_bytes(params: Any, phase: int) -> np.ndarray:
            sent = sum(map(num_messages, self._rounds(phase)))
            return values.num_bytes(params, phase) + jnp.dtype(_weight_dtype(params)).itemsize * sent

        # No restart: neighbours hold estimates of y_i z_i, which are not equal where z_i are; and if y_i were set to 1, the change of w
        # would have to be sent.
        own = {"init": self.init, "exchange": self.exchange, "settle": self.settle, "num_bytes": num_bytes}
        return values._replace(**own, restart=None, weight=lambda state: state.weight)


def _scaled(params: Any, factor: jax.Array) -> Any:
    return of_floating(lambda x: x * factor, params)


def _weight_dtype(params: Any) -> Any:
    return jnp.result_type(jnp.float32, *(x.dtype for x in jax.tree.leaves(params) if is_floating(x)))
