"""Mixing parameters over a topology: x_i <- Σ_j W_ij x_j, and its variations.

A `Mixer` is an exchange, which needs no gradient, and a combine. The split is what lets communication hide behind
computation: the exchange of the carried parameters may run while the gradient is taken (order "awc"), and the combine
joins the two. Both take a static `phase`, which says which round of the topology is due, so that every phase compiles to
its own program and none holds a conditional.

    exact          z = W^{tR+R−1} … W^{tR} x             R rounds a step; R = 1 is plain gossip
    accelerated    z_{r+1} = (1+η) W z_r − η z_{r−1}     static symmetric graphs only
    every          mix in every p-th step                local updates in between
    damp           W' = γ W + (1−γ) I                    γ constant or a schedule

Parameters travel in a few flat buckets. Weighted sums are formed in at least float32, and cast back.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets
from decjax import codecs
from decjax import mesh
from decjax.topology import Round, Topology

LOCAL = -1  # The phase of a step that does not mix.


class Mixer(NamedTuple):
    """How parameters are exchanged and combined.

    Attributes:
        init: `init(params) -> state`.
        exchange: `exchange(params, state, phase) -> received`; the only part that communicates.
        combine: `combine(params, received, state, phase, step) -> (mixed, state)`; cheap and local. `step` counts all
            steps, also those that do not mix, as an int or a traced int32.
        phase: `phase(step) -> phase`, for an int (static) or a traced int32 step.
        phases: all values that `phase` takes, a contiguous range.
        num_bytes: `num_bytes(params, phase) -> (N,)` bytes that each worker sends, the declared formula.
        num_workers: N.
    """

    init: Callable[[Any], Any]
    exchange: Callable[[Any, Any, int], Any]
    combine: Callable[[Any, Any, Any, int, Any], tuple[Any, Any]]
    phase: Callable[[Any], Any]
    phases: range
    num_bytes: Callable[[Any, int], np.ndarray]
    num_workers: int


def mix(mixer: Mixer, params: Any, state: Any, phase: int, step: Any) -> tuple[Any, Any]:
    """One whole mixing step: exchange, then combine."""
    return mixer.combine(params, mixer.exchange(params, state, phase), state, phase, step)


def _own_weight(weights: tuple[float, ...], group_size: int, axis_name: mesh.AxisName, dtype) -> Any:
    """This worker's entry of per-node weights; a plain float where all are equal, which saves the look-up."""
    if len(set(weights)) == 1:
        return weights[0]
    return jnp.asarray(weights, dtype)[mesh.worker_index(axis_name) // group_size]


def mix_round(x_P: jax.Array, round_: Round, axis_name: mesh.AxisName, codec: codecs.Codec | None = None) -> jax.Array:
    """Applies one round to a flat array: (Wx)_i for W = W_nodes ⊗ J_L/L.

    With a codec C, messages between nodes are C(x_j), and what it distorts is mixed as differences, which keeps the mean:

        x_i <- x_i + Σ_j W_ij (C(x_j) − C(x_i))

    With L > 1, members of a node average by reduce-scatter, exchange their share with the same member of other nodes,
    and gather: a joint mean of two nodes takes P values out of a node, not L·P.

    Args:
        x_P: this worker's values; P divisible by L.
        round_: the round; with a codec, of a doubly stochastic W.
        axis_name: the worker axis.
        codec: the form of messages between nodes; None: exact.

    Returns:
        The mixed values, same shape and dtype.
    """
    L = round_.group_size
    if not round_.shifts and set(round_.self_weights) == {1.0}:
        return mesh.group_mean(x_P, L, axis_name)
    share = mesh.scatter_mean(x_P, L, axis_name)
    dtype = jnp.promote_types(x_P.dtype, jnp.float32)
    message = codec.encode(share, (), None) if codec else share
    distorted = codec.decode(message, share.shape, dtype) if codec else 0
    own_weight = 1.0 if codec else _own_weight(round_.self_weights, L, axis_name, dtype)
    mixed = own_weight * share.astype(dtype)
    for shift in round_.shifts:
        pairs = [(source * L + k, target * L + k) for source, target in shift.pairs for k in range(L)]
        arrived = jax.tree.map(lambda x: mesh.exchange(x, pairs, axis_name), message)
        values = codec.decode(arrived, share.shape, dtype) if codec else arrived.astype(dtype)
        mixed += _own_weight(shift.weights, L, axis_name, dtype) * (values - distorted)
    return mesh.gather(mixed.astype(x_P.dtype), L, axis_name)


def _sent_bytes(round_: Round, layout: buckets.Layout, codec: codecs.Codec | None = None) -> np.ndarray:
    if codec is None:
        return round_.volume() * layout.num_bytes
    L = round_.group_size
    inside = 2 * (L - 1) / L
    messages_N = (round_.volume() - inside) * L
    return sum(inside * bucket.num_bytes + messages_N * codec.num_bytes((bucket.size // L,), bucket.dtype)
               for bucket in layout.buckets)


def _layout(params: Any, topology: Topology, bucket_bytes: int) -> buckets.Layout:
    multiple_of = math.lcm(*(round_.group_size for round_ in topology.rounds))
    return buckets.layout(params, bucket_bytes=bucket_bytes, multiple_of=multiple_of)


def _check_rounds(rounds: int) -> None:
    if rounds < 1:
        raise ValueError(f"mixing rounds={rounds}: at least one round is needed; method 'local' does not communicate")


def exact(topology: Topology, *, rounds: int = 1, axis_name: mesh.AxisName = mesh.WORKER,
          bucket_bytes: int = buckets.BUCKET_BYTES, codec: codecs.Codec | None = None) -> Mixer:
    """Plain gossip: step t applies rounds tR … tR + R − 1 of the topology, x_i <- Σ_j W_ij x_j each.

    Args:
        topology: who talks to whom.
        rounds: R, rounds per step.
        axis_name: the worker axis, as in `Workers.axis_name`.
        bucket_bytes: size of the flat messages in bytes; 0 sends every array by itself.
        codec: the form of messages between nodes; None: as they are. Means inside a node stay exact. See `mix_round`.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if R < 1, or a codec is given and no worker sends a message.
    """
    _check_rounds(rounds)
    if codec and not any(round_.shifts for round_ in topology.rounds):
        raise ValueError(f"topology {topology.name!r} has no messages that a codec could encode, it averages over all workers; "
                         "use a graph such as 'one_peer_exponential', or no codec")
    num_phases = topology.period // math.gcd(topology.period, rounds)

    def due(phase):
        return [topology.rounds[(phase * rounds + r) % topology.period] for r in range(rounds)]

    def exchange(params, state, phase):
        del state
        layout = _layout(params, topology, bucket_bytes)
        vectors = layout.pack(params)
        for round_ in due(phase):
            vectors = [mix_round(x_P, round_, axis_name, codec) for x_P in vectors]
        return layout.unpack(vectors, like=params)

    def num_bytes(params, phase):
        layout = _layout(params, topology, bucket_bytes)
        return sum(_sent_bytes(round_, layout, codec) for round_ in due(phase))

    return Mixer(lambda params: (), exchange, lambda params, received, state, phase, step: (received, state),
                 lambda step: step % num_phases, range(num_phases), num_bytes, topology.num_workers)


def accelerated(topology: Topology, *, rounds: int, axis_name: mesh.AxisName = mesh.WORKER,
                bucket_bytes: int = buckets.BUCKET_BYTES) -> Mixer:
    """Accelerated gossip on a static symmetric graph: z_{r+1} = (1+η) W z_r − η z_{r−1}, with z_0 = z_{−1} = x.

    η = (1 − √(1−β²)) / (1 + √(1−β²)), β the second largest modulus of W's eigenvalues. The mean is preserved, and over
    many rounds disagreement shrinks by about √η a round instead of β. Over few rounds it may grow: whether R are enough is
    checked on W's own eigenvalues.

    Args:
        topology: a graph of period 1 with symmetric W.
        rounds: R ≥ 1, rounds per step.
        axis_name: the worker axis.
        bucket_bytes: size of the flat messages in bytes.

    Returns:
        The `Mixer`.

    Raises:
        ValueError: if the graph varies in time or W is not symmetric, where the recursion stalls or diverges, or if R plain
            rounds contract at least as well on this graph.

    Reference:
        Liu and Morse 2011, "Accelerated linear iterations for distributed averaging".
    """
    _check_rounds(rounds)
    if topology.period != 1 or not topology.is_symmetric:
        kind = f"varies over a period of {topology.period}" if topology.period != 1 else "is not symmetric"
        raise ValueError(f"accelerated gossip needs a static symmetric graph, but topology {topology.name!r} {kind}; "
                         "use 'ring', 'torus' or 'hypercube', or plain rounds")
    W_NxN = topology.matrix(0)
    # Eigenvalues of disagreement: of W without that of the mean.
    eigenvalues = np.linalg.eigvalsh(W_NxN - np.full_like(W_NxN, 1 / topology.num_workers))
    beta = min(np.abs(eigenvalues).max(), 1.0)
    root = math.sqrt(1 - beta**2)
    eta = (1 - root) / (1 + root)
    before = now = np.ones_like(eigenvalues)
    for _ in range(rounds):
        before, now = now, (1 + eta) * eigenvalues * now - eta * before
    if np.abs(now).max() >= beta**rounds:
        raise ValueError(f"accelerated gossip contracts by {np.abs(now).max():.3g} over rounds={rounds} on topology "
                         f"{topology.name!r}, plain rounds by {beta**rounds:.3g}; use more rounds, or plain ones")
    plain = exact(topology, rounds=rounds, axis_name=axis_name, bucket_bytes=bucket_bytes)

    def exchange(params, state, phase):
        del state, phase
        layout = _layout(params, topology, bucket_bytes)

        def accelerate(x_P):
            before = now = x_P.astype(jnp.promote_types(x_P.dtype, jnp.float32))
            for _ in range(rounds):
                before, now = now, (1 + eta) * mix_round(now.astype(x_P.dtype), topology.rounds[0], axis_name) - eta * before
            return now.astype(x_P.dtype)

        return layout.unpack([accelerate(x_P) for x_P in layout.pack(params)], like=params)

    return plain._replace(exchange=exchange)


def every(mixer: Mixer, period: int) -> Mixer:
    """Mixes in steps p−1, 2p−1, …; the others are local and send nothing.

    Args:
        mixer: what to do in a mixing step.
        period: p ≥ 1 steps.

    Returns:
        The `Mixer`; p = 1 returns `mixer` itself.

    Raises:
        ValueError: if p < 1.

    Reference:
        Zhang et al. 2020, adaptive serverless learning (Adam with gossip in every p-th step, order "atc").
    """
    if period < 1:
        raise ValueError(f"mixing every={period} steps: must be at least 1")
    if period == 1:
        return mixer

    def exchange(params, state, phase):
        return () if phase == LOCAL else mixer.exchange(params, state, phase)

    def combine(params, received, state, phase, step):
        return (params, state) if phase == LOCAL else mixer.combine(params, received, state, phase, step)

    def phase(step):
        due = mixer.phase(step // period)
        mixes = (step + 1) % period == 0
        return jnp.where(mixes, due, LOCAL) if isinstance(step, jax.Array) else (due if mixes else LOCAL)

    def num_bytes(params, phase):
        return np.zeros(mixer.num_workers) if phase == LOCAL else mixer.num_bytes(params, phase)

    return mixer._replace(exchange=exchange, combine=combine, phase=phase, num_bytes=num_bytes,
                          phases=range(LOCAL, mixer.phases.stop))


def damp(mixer: Mixer, strength: float | Callable[[jax.Array], jax.Array]) -> Mixer:
    """Mixes with strength γ: x_i <- γ (Wx)_i + (1−γ) x_i.

    Args:
        mixer: gives Wx.
        strength: γ in [0, 1], or a schedule `step -> γ`. γ = (lr / lr_max)^p follows a learning-rate schedule.

    Returns:
        The `Mixer`; a constant γ = 1 returns `mixer` itself.

    Raises:
        ValueError: if a constant γ is outside [0, 1].
    """
    if not callable(strength):
        if not 0 <= strength <= 1:
            raise ValueError(f"mixing strength={strength} must lie in [0, 1]; 1 is full mixing")
        if strength == 1:
            return mixer

    def combine(params, received, state, phase, step):
        mixed, state = mixer.combine(params, received, state, phase, step)
        gamma = strength(step) if callable(strength) else strength

        def damped(x, y):
            return (x + gamma * (y - x)).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else y

        return jax.tree.map(damped, params, mixed), state

    return mixer._replace(combine=combine)


def check_exchange(workers: mesh.Workers, topology: Topology) -> None:
    """Sends worker indices through every round and compares with the expected mix, before any training.

    A compiler defect on some GPU builds returns zeros for permutations with several cycles; training on such data goes
    wrong silently. Each round mixes the one-hot vector of the worker's index, so that row i of W must arrive at worker i.

    Args:
        workers: where the workers live.
        topology: the schedule to be checked.

    Raises:
        RuntimeError: naming the phase and the worker that received something else.
    """
    n = workers.num_workers

    def probe(phase):
        def rows(index):
            # Nodes average shares of equal size, so pad the one-hot vector to a multiple of the group.
            size = -(-n // topology.rounds[phase].group_size) * topology.rounds[phase].group_size
            own = (jnp.arange(size) == index).astype(jnp.float32)
            return mix_round(own, topology.rounds[phase], workers.axis_name)[:n]
        return workers.map(rows, in_axes=(0,))

    phases = range(topology.period)
    index = workers.build(lambda worker: np.int32(worker))
    arrived = workers.fetch(jax.jit(lambda index: [probe(phase)(index) for phase in phases])(index))
    for phase in phases:
        wrong_N = np.abs(arrived[phase] - topology.matrix(phase)).max(axis=1) > 1e-5
        if wrong_N.any():
            raise RuntimeError(
                f"the exchange is broken on this backend: in phase {phase} of topology {topology.name!r} worker "
                f"{np.flatnonzero(wrong_N)[0]} did not receive its neighbours' values; refusing to train on wrong data "
                "(try another jax or driver version, or topology 'complete')")
