"""Averages of coded messages: every worker sends C(x_i) to all others, and remembers what the message lost.

    x_i = β e_i + g_i;     averaged = (1/N) Σ_j C(x_j);     e_i = x_i − C(x_i)

    β = 1, any contractive codec                error feedback: Σ sent + e = Σ g              (Stich et al. 2018, arXiv 1809.07599)
    β = 0.999, top-k of a chunked DCT, then     DeMo: e is the momentum, from which the       (Peng et al. 2024, arXiv 2411.19870)
      the sign of the average                   fast components are taken out as they are sent
    β = 0.95, 2-bit top-k of a chunk, on the    SparseLoCo                                    (Sarfi et al. 2025, arXiv 2508.15706)
      change of H local steps

A sum cannot be coded, so messages are gathered: a worker sends (N−1) messages' bytes, which is less than all-reduce where the
codec is smaller than 2/N of the gradient. All messages of a step, of whatever types, travel as one array of bytes.

`gravac` chooses between codecs while it runs. With gain(θ) = E‖C_θ(x)‖² / E‖x‖², it starts without a codec and climbs a ladder
of ever stronger ones as long as (steps per second) · gain grows; when the gain of the rung in use drops below a threshold, it
goes back a rung. Reference: Tyagi and Swany 2023, arXiv 2305.12201.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import buckets
from decjax import codecs
from decjax import mesh
from decjax.reduce import reducer as reducer_lib


class CodedState(NamedTuple):
    """State of `coded`; one entry for each message."""

    error: tuple[jax.Array, ...]  # e_P, this worker's own
    codec: tuple[Any, ...]  # states of the codec
    count: jax.Array  # int32 scalar, messages so far: random codecs draw by it


class GravacState(NamedTuple):
    """State of `gravac`; all but the errors and the codecs' states is the same on all workers."""

    error: tuple[jax.Array, ...]  # e_P, this worker's own
    codec: tuple[tuple[Any, ...], ...]  # states of each rung's codec
    count: jax.Array  # int32 scalar, steps so far
    usage: jax.Array  # int32 [rungs], steps so far on each rung; 0 is without a codec
    rung: jax.Array  # int32 scalar, the one in use
    settled: jax.Array  # bool scalar: it climbs no more
    energy_sent: jax.Array  # Σ E‖C(x)‖² since the window began
    energy: jax.Array  # Σ E‖x‖² since the window began
    score: jax.Array  # (steps per second) · gain of the rung below


def coded(codec: codecs.Codec, *, decay: float = 1.0, feedback: bool = True, seed: int = 0,
          axis_name: mesh.AxisName = mesh.WORKER, bucket_bytes: int = buckets.BUCKET_BYTES) -> reducer_lib.Reducer:
    """The average of coded gradients, gathered from all workers, with memory of what messages lose; see the module's equations.

    Args:
        codec: the form of the messages.
        decay: β in (0, 1], of the memory.
        feedback: False forgets what messages lose, which takes an unbiased codec.
        seed: of a random codec's draws, which are functions of (seed, worker, step).
        axis_name: the worker axis.
        bucket_bytes: size of the flat vectors that are coded, in bytes; codecs of matrices get each array by itself.

    Returns:
        The `Reducer`.

    Raises:
        ValueError: if the decay is out of range or the codec does not bear the use.

    Example:
        >>> tx = decjax.synchronize(optax.adamw(1e-3), decjax.reduce.coded(decjax.codecs.make("int8")))

    Reference:
        arXiv 1809.07599; see the module for others.
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay={decay} of the error memory: must be more than 0 and at most 1, which forgets nothing")
    if feedback:
        _need_contraction(codec)
    elif codec.traits.unbiased is None:
        raise ValueError(f"codec {codec.name!r} is biased, and its errors would add up; use feedback=True")
    cut = _Cut(codec.traits.matrix, bucket_bytes)

    def init(params):
        vectors = cut.vectors(params)
        error = tuple(jnp.zeros_like(x) for x in vectors) if feedback else ()
        return CodedState(error, tuple(codec.init(x.shape, x.dtype) for x in vectors), jnp.zeros((), jnp.int32))

    def reduce(grads, state, phase=0):
        del phase
        vectors = cut.vectors(grads)
        if feedback:
            vectors = [decay * e + x for e, x in zip(state.error, vectors)]
        key = _key(seed, state.count, axis_name) if codec.traits.random else None
        finite = jnp.stack([jnp.isfinite(x).all() for x in vectors]).all()
        means, own, codec_state, finite_N = _gathered(codec, vectors, state.codec, key, finite.astype(jnp.uint8), axis_name)
        error = tuple(x - sent for x, sent in zip(vectors, own)) if feedback else ()
        finite = (finite_N == 1).all()
        new = CodedState(error, codec_state, state.count)
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
        means = [jnp.where(finite, x, jnp.nan) for x in means]
        return cut.tree(means, grads), new._replace(count=state.count + 1)

    def num_bytes(params, num_workers, phase=0):
        del phase
        message = sum(codec.num_bytes(x.shape, x.dtype) for x in jax.eval_shape(cut.vectors, params))
        return np.full(num_workers, float((num_workers - 1) * (message + 1)))

    return reducer_lib.Reducer(init, reduce, num_bytes)


def gravac(ladder: Sequence[codecs.Codec], *, window: int = 50, threshold: float = 0.5, improvement: float = 0.0,
           speed: Sequence[float] = (), seed: int = 0, axis_name: mesh.AxisName = mesh.WORKER,
           bucket_bytes: int = buckets.BUCKET_BYTES) -> reducer_lib.Reducer:
    """The average of gradients, coded as strongly as their gain allows; see the module.

    After every window of steps on a rung, with gain = Σ E‖C(x)‖² / Σ E‖x‖² over it: below the threshold, one rung down, for
    good; else, unless settled, one rung up, if speed · gain has grown by more than `improvement` since the rung below, and else
    back there, for good. All rungs are branches of one program, of which all workers take the same.

    Args:
        ladder: codecs from the mildest to the strongest. Rung 0, without a codec, comes before them.
        window: steps on a rung before it is judged.
        threshold: ε in [0, 1], the least gain.
        improvement: ω ≥ 0, relative.
        speed: steps per second on each rung, with 0, relative to one another; `decjax.runtime` predicts them. Empty: 1 ÷ bytes,
            as where communication takes all the time.
        seed: of random codecs' draws.
        axis_name: the worker axis.
        bucket_bytes: as in `coded`.

    Returns:
        The `Reducer`. Its phases are the rungs, and its state decides on them: `usage(state)` counts the steps on each.

    Raises:
        ValueError: if the ladder is empty, a codec is not contractive, or an option is out of range.

    Reference:
        arXiv 2305.12201. The paper measures steps per second as it goes; inside a program there is no clock, so they are given.
    """
    ladder = tuple(ladder)
    if not ladder:
        raise ValueError("GraVAC needs a ladder of at least one codec, from the mildest to the strongest")
    for codec in ladder:
        _need_contraction(codec)
    if window < 1:
        raise ValueError(f"GraVAC window={window} steps: must be at least 1")
    if not 0 <= threshold <= 1:
        raise ValueError(f"GraVAC threshold={threshold}: a gain, must lie between 0 and 1")
    if not improvement >= 0:
        raise ValueError(f"GraVAC improvement={improvement}: must be at least 0")
    num_rungs = len(ladder) + 1
    if speed and (len(speed) != num_rungs or min(speed) <= 0):
        raise ValueError(f"GraVAC speed={tuple(speed)}: needs {num_rungs} positive values, one without a codec and one for each")
    cut = _Cut(any(codec.traits.matrix for codec in ladder), bucket_bytes)

    def init(params):
        vectors = cut.vectors(params)
        states = tuple(tuple(codec.init(x.shape, x.dtype) for x in vectors) for codec in ladder)
        dtype = jnp.result_type(jnp.float32, *vectors)
        zero, count = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
        return GravacState(tuple(jnp.zeros_like(x) for x in vectors), states, count, jnp.zeros(num_rungs, jnp.int32), count,
                           jnp.zeros((), bool), zero, zero, zero)

    def reduce(grads, state, phase=None):
        del phase
        vectors = [e + x for e, x in zip(state.error, cut.vectors(grads))]
        energy = _energy(vectors).astype(state.energy.dtype)

        def without_codec(vectors, states):
            values = [energy[None], *(x.ravel().astype(energy.dtype) for x in vectors)]
            joint = mesh.mean(jnp.concatenate(values), axis_name)
            ends = np.cumsum([1, *(x.size for x in vectors)])
            means = [joint[start:end].reshape(x.shape).astype(x.dtype)
                     for start, end, x in zip(ends, ends[1:], vectors)]
            return means, [jnp.zeros_like(x) for x in vectors], states, jnp.stack([joint[0], joint[0]])

        def with_codec(k, vectors, states):
            codec = ladder[k]
            key = _key(seed, state.count, axis_name) if codec.traits.random else None
            own_energy = lambda own: jnp.stack([_energy(own).astype(energy.dtype), energy])
            means, own, codec_state, energies_Nx2 = _gathered(codec, vectors, states[k], key, own_energy, axis_name)
            error = [x - sent for x, sent in zip(vectors, own)]
            return means, error, (*states[:k], codec_state, *states[k + 1:]), energies_Nx2.mean(axis=0)

        branches = [without_codec, *(functools.partial(with_codec, k) for k in range(len(ladder)))]
        means, error, states, (sent, full) = jax.lax.switch(state.rung, branches, vectors, state.codec)

        new = _judged(state._replace(error=tuple(error), codec=states, energy_sent=state.energy_sent + sent,
                                     energy=state.energy + full, usage=state.usage.at[state.rung].add(1)), grads)
        finite = jnp.isfinite(full)  # A mean over all workers, and so the same on all.
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
        # A step that is lost has been sent all the same.
        new = new._replace(count=state.count + 1, usage=state.usage.at[state.rung].add(1))
        return cut.tree([jnp.where(finite, x, jnp.nan) for x in means], grads), new

    def _judged(state, like):
        """The rung of the next step."""
        num_workers = jax.lax.axis_size(axis_name)
        rates = speed or [1 / max(1, num_bytes(like, num_workers, rung)[0]) for rung in range(num_rungs)]
        rate = jnp.asarray(np.divide(rates, max(rates)), state.score.dtype)[state.rung]
        gain = jnp.where(state.energy > 0, state.energy_sent / jnp.where(state.energy > 0, state.energy, 1), 1)
        score = rate * gain
        over = state.usage.sum() % window == 0
        drops = (gain < threshold) & (state.rung > 0)
        stalls = ~state.settled & (state.rung > 0) & (score <= (1 + improvement) * state.score)
        climbs = ~(drops | stalls | state.settled) & (state.rung < num_rungs - 1)
        step = jnp.where(drops | stalls, -1, jnp.where(climbs, 1, 0))
        judged = state._replace(rung=state.rung + step, settled=state.settled | ~climbs, score=score,
                                energy=jnp.zeros_like(state.energy), energy_sent=jnp.zeros_like(state.energy))
        return jax.tree.map(lambda new, old: jnp.where(over, new, old), judged, state)

    def num_bytes(params, num_workers, phase=None):
        if phase is None:
            return np.zeros(num_workers)  # Only the state knows.
        vectors = jax.eval_shape(cut.vectors, params)
        itemsize = jnp.result_type(jnp.float32, *vectors).itemsize
        if phase == 0:
            values = 1 + sum(x.size for x in vectors)
            return np.full(num_workers, 2 * (num_workers - 1) / num_workers * itemsize * values)
        message = sum(ladder[phase - 1].num_bytes(x.shape, x.dtype) for x in vectors)
        return np.full(num_workers, float((num_workers - 1) * (message + 2 * itemsize)))

    return reducer_lib.Reducer(init, reduce, num_bytes, lambda step: None, range(num_rungs), lambda state: state.usage)


# ---------------------------------------------------------------------------------------------------------------------
# Messages
# ---------------------------------------------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """How a tree is cut into the arrays that are coded: flat buckets, or its own arrays for codecs of matrices."""

    matrix: bool
    bucket_bytes: int

    def _layout(self, tree):
        return buckets.layout(tree, bucket_bytes=0 if self.matrix else self.bucket_bytes)

    def vectors(self, tree) -> list[jax.Array]:
        """The arrays, in float32 at least."""
        layout = self._layout(tree)
        vectors = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in layout.pack(tree)]
        if self.matrix:
            vectors = [x.reshape(layout.shapes[bucket.leaves[0]]) for x, bucket in zip(vectors, layout.buckets)]
        return vectors

    def tree(self, vectors, like) -> Any:
        """The inverse."""
        layout = self._layout(like)
        return layout.unpack([x.ravel().astype(bucket.dtype) for x, bucket in zip(vectors, layout.buckets)], like=like)


def _need_contraction(codec: codecs.Codec) -> None:
    if codec.traits.contractive is None:
        raise ValueError(f"codec {codec.name!r} is not contractive, so the memory of its errors may grow without bound; use a "
                         "contractive one, such as int8 or a top-k, or `coded` with feedback=False if it is unbiased")


def _key(seed: int, count: jax.Array, axis_name: mesh.AxisName) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), mesh.worker_index(axis_name)), count)


def _energy(vectors: list[jax.Array]) -> jax.Array:
    return sum((jnp.sum(x**2) for x in vectors), jnp.zeros(()))


def _gathered(codec, vectors, states, key, header, axis_name):
    """Sends every worker's messages and a header to all.

    Args:
        codec: the codec.
        vectors: arrays to send.
        states: the codec's, one for each.
        key: for random codecs, else None.
        header: a small array, or a function of what the own messages decode to that gives one.
        axis_name: the worker axis.

    Returns:
        (means of what all messages decode to, what the own ones decode to, the codec's states, [N, ...] headers of all).
    """
    def decode(messages):
        return [codec.decode(message, x.shape, x.dtype) for message, x in zip(messages, vectors)]

    messages = [codec.encode(x, state, None if key is None else jax.random.fold_in(key, k))
                for k, (x, state) in enumerate(zip(vectors, states))]
    own = decode(messages)
    header = header(own) if callable(header) else header
    sent = (messages, header)
    joint_NxB = mesh.all_gather(_as_bytes(sent), axis_name)

    def add(sums, joint):
        messages, header = _from_bytes(joint, sent)
        return [total + x for total, x in zip(sums, decode(messages))], header

    # One worker's messages after the other's: in the same order everywhere, and in the memory of one.
    sums, headers = jax.lax.scan(add, [jnp.zeros_like(x) for x in vectors], joint_NxB)
    codec_states = tuple(codec.advance(state, message) for state, message in zip(states, messages))
    return [total / len(joint_NxB) for total in sums], own, codec_states, headers


def _as_bytes(tree: Any) -> jax.Array:
    """All arrays of a tree as one array of bytes."""
    return jnp.concatenate([jax.lax.bitcast_convert_type(x, jnp.uint8).ravel() for x in jax.tree.leaves(tree)])


def _from_bytes(joint: jax.Array, like: Any) -> Any:
    """The inverse."""
    leaves, treedef = jax.tree.flatten(like)
    found, start = [], 0
    for x in leaves:
        width = x.dtype.itemsize
        part = joint[start:start + x.size * width].reshape(*x.shape, *([width] if width > 1 else []))
        found.append(jax.lax.bitcast_convert_type(part, x.dtype))
        start += x.size * width
    return treedef.unflatten(found)
