"""DCD-PSGD: compressed steps travel, and neighbours hold exact copies of each other's parameters."""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decjax import buckets, codecs, registry
from decjax.channel import Channel, Coded
from decjax.gossip import fits
from decjax.gossip.coded import checked_channel, num_bytes
from decjax.gossip.mixer import Mixer
from decjax.gossip.rounds import pull
from decjax.topology import Round, Topology


class ReplicaState(NamedTuple):
    """State of `dcd`; the parameters are x⁻_i plus the decoded message.

    Attributes:
        count: int32 scalar, messages so far.
        codec: the codec's state for each bucket.
        message: for each bucket what the next exchange sends.
        known: x⁻_i, the parameters of this worker that its neighbours hold, for each bucket.
        drift: d_i = Σ_j w_ij x⁻_j − x⁻_i, for each bucket.
    """

    count: jax.Array
    codec: tuple
    message: tuple
    known: tuple
    drift: tuple


@registry.register(
    "mixer",
    "dcd",
    topology="ring",
    needs="static doubly stochastic graph, fine codec",
    messages="compressed steps",
    memory="2 copies, a message",
)
def dcd(topology: Topology, channel: Channel = Channel(), *, codec: codecs.Codec | str = "int8") -> Mixer:
    """DCD-PSGD: compressed steps travel, and neighbours hold exact copies of each other's parameters.

        x½_i = Σ_j w_ij x_j + u_i     c_i = C(x½_i − x_i)     x_i <- x_i + c_i

    A worker changes its parameters by its decoded message, so its neighbours can do the same with their copy. u_i is the optimizer's
    step, computed at x_i in order "awc", where c_i travels while the next gradient is computed; in order "atc" the parameters
    between steps are Σ_j w_ij x_j. What the codec loses of a step is lost for good, so it must lose little.

    Args:
        topology: static and doubly stochastic, with one worker to a node.
        channel: how parameters travel.
        codec: C; it has to keep at least 0.9 of the energy of noise.

    Reference: Tang et al. 2018, "Communication compression for decentralized training", arXiv 1803.06443, algorithm 1.
    """
    wire = checked_channel(topology, channel, codec)
    fits.check_doubly_stochastic("dcd", topology)
    if topology.period > 1 or wire.group_size > 1:
        kind = "varies in time" if topology.period > 1 else f"has nodes of {wire.group_size} workers"
        raise ValueError(
            "mixer 'dcd' needs a static graph of single workers, whose neighbours hear of every step, but "
            f"topology {topology.name!r} {kind}; use 'ring' or 'exponential', or mixer 'choco'"
        )
    if (kept := fits.typical_contraction(wire.codec)) < fits.FINE:
        raise ValueError(
            f"mixer 'dcd' never sends what its codec loses, and {wire.codec.name!r} keeps {kept:.2g} of the energy "
            f"of noise, less than {fits.FINE}; use 'int8', or mixer 'choco'"
        )
    replicas = _Replicas(wire, topology.rounds[0])
    return Mixer(
        init=replicas.init,
        exchange=replicas.exchange,
        phase=lambda step: 0 * step,
        phases=range(1),
        settle=replicas.settle,
        num_bytes=lambda params, phase: num_bytes(wire, topology, [0], params),
        num_workers=topology.num_workers,
        restart=lambda average, state: replicas.init(average, state.count),
    )


@dataclasses.dataclass(frozen=True)
class _Replicas:
    """The functions of the mixer."""

    wire: Coded
    round_: Round

    def _encoded(self, layout: buckets.Layout, vectors: Sequence[jax.Array], states: tuple, count: jax.Array) -> tuple:
        forms = self.wire.codecs(layout)
        return tuple(form.encode(x_P, states[b], self.wire.key(count, b)) for b, (form, x_P) in enumerate(zip(forms, vectors)))

    def _decoded(self, layout: buckets.Layout, messages: tuple, like: tuple) -> list[jax.Array]:
        return [form.decode(m, x_P.shape, x_P.dtype) for form, m, x_P in zip(self.wire.codecs(layout), messages, like)]

    def init(self, params: Any, count: Any = 0) -> ReplicaState:
        layout, count = self.wire.layout(params), jnp.asarray(count, jnp.int32)
        known = tuple(layout.pack(params, wide=True))
        nothing = tuple(map(jnp.zeros_like, known))
        states = self.wire.init(layout, known)
        return ReplicaState(count + 1, states, self._encoded(layout, nothing, states, count), known, nothing)

    def exchange(self, params: Any, state: ReplicaState, phase: int) -> tuple[Any, ReplicaState]:
        layout, axis = self.wire.layout(params), self.wire.channel.axis
        steps = self._decoded(layout, state.message, state.known)
        parts = zip(self.wire.codecs(layout), state.drift, state.message, steps)
        drift = tuple(d + pull(form, message, c, self.round_, axis) for form, d, message, c in parts)
        known = tuple(x + c for x, c in zip(state.known, steps))
        states = tuple(map(self.wire.codec.advance, state.codec, state.message))
        mixed = layout.unpack([x + d for x, d in zip(layout.pack(params, wide=True), drift)], params)
        return mixed, state._replace(codec=states, known=known, drift=drift)

    def settle(self, mixed: Any, stepped: Any, state: ReplicaState) -> tuple[Any, ReplicaState]:
        """Encodes the optimizer's step as the next message, and changes the parameters by what is decoded from it."""
        layout = self.wire.layout(stepped)
        steps = [x - known for x, known in zip(layout.pack(stepped, wide=True), state.known)]
        message = self._encoded(layout, steps, state.codec, state.count)
        moved = [known + c for known, c in zip(state.known, self._decoded(layout, message, state.known))]
        return layout.unpack(moved, stepped), state._replace(count=state.count + 1, message=message)
