"""GraVAC: codes as strong as their gain allows.

With gain(θ) = E‖C_θ(x)‖² / E‖x‖² of what workers send, x = g + e, it starts without a codec and climbs a ladder of ever
stronger ones as long as (steps per second) · gain grows; when the gain of the rung in use drops below a threshold, it goes back
a rung. Messages are averaged shard by shard, so that their bytes follow the codec's whatever the number of workers; see
`decjax.reduce.messages`. The error memories of workers and owners belong to all rungs; without a codec, both are sent out.

Reference: Tyagi and Swany 2023, arXiv 2305.12201.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import codecs, mesh
from decjax.channel import Channel
from decjax.reduce import messages
from decjax.reduce import reducer as reducer_lib


class GravacState(NamedTuple):
    """State of `gravac`; all but the errors and the codecs' states is the same on all workers."""

    error: tuple[jax.Array, ...]  # [N, …], this worker's own
    owner_error: tuple[jax.Array, ...]  # […], of the shard that this worker owns
    codec: tuple[tuple[Any, Any], ...]  # states of each rung's codec, at workers and at owners
    count: jax.Array  # int32 scalar, steps so far
    usage: jax.Array  # int32 [rungs], steps so far on each rung; 0 is without a codec
    rung: jax.Array  # int32 scalar, the one in use
    settled: jax.Array  # bool scalar: it climbs no more
    energy_sent: jax.Array  # Σ E‖C(x)‖² since the window began
    energy: jax.Array  # Σ E‖x‖² since the window began
    score: jax.Array  # (steps per second) · gain of the rung below


def gravac(
    channel: Channel = Channel(),
    *,
    ladder: Sequence[codecs.Codec],
    window: int = 50,
    threshold: float = 0.5,
    improvement: float = 0.0,
    speed: Sequence[float] = (),
) -> reducer_lib.Reducer:
    """The average of gradients, coded as strongly as their gain allows; see the module.

    After every window of steps on a rung, with gain = Σ E‖C(x)‖² / Σ E‖x‖² over it: below the threshold, one rung down, for
    good; else, unless settled, one rung up, if speed · gain has grown by more than `improvement` since the rung below, and else
    back there, for good. All rungs are branches of one program, of which all workers take the same.

    Args:
        channel: see `coded`.
        ladder: codecs from the mildest to the strongest. Rung 0, without a codec, comes before them.
        window: steps on a rung before it is judged.
        threshold: ε in [0, 1], the least gain.
        improvement: ω ≥ 0, relative.
        speed: steps per second on each rung, with 0, relative to one another; `decjax.runtime` predicts them. Empty: 1 ÷ bytes,
            as where communication takes all the time.

    Returns:
        The `Reducer`. Its phases are the rungs, and its state decides on them: `usage(state)` counts the steps on each. Its
        `init` is called inside a function that is mapped over workers.

    Raises:
        ValueError: if the ladder is empty, a codec does not fit, or an option is out of range; from `num_bytes`, if a rung does
            not send less than the one below.

    Reference:
        arXiv 2305.12201. The paper measures steps per second as it goes; inside a program there is no clock, so they are given.
    """
    ladder = tuple(ladder)
    if not ladder:
        raise ValueError("GraVAC needs a ladder of at least one codec, from the mildest to the strongest")
    for codec in ladder:
        messages.check(codec)
    if window < 1:
        raise ValueError(f"GraVAC window={window} steps: must be at least 1")
    if not 0 <= threshold <= 1:
        raise ValueError(f"GraVAC threshold={threshold}: a gain, must lie between 0 and 1")
    if not improvement >= 0:
        raise ValueError(f"GraVAC improvement={improvement}: must be at least 0")
    num_rungs = len(ladder) + 1
    if speed and (len(speed) != num_rungs or min(speed) <= 0):
        raise ValueError(f"GraVAC speed={tuple(speed)}: needs {num_rungs} positive values, one without a codec and one for each")
    ends = [codecs.feedback.residual(codecs.of_any_shape(codecs.feedback.contractive(codec))) for codec in ladder]

    def cut_of(num_workers=None):
        return messages.Cut(ladder, channel.bucket_bytes, num_workers or channel.axis.size)

    def init(params):
        cut = cut_of()
        sides = [(messages.worker_side(end, cut, params).memory, messages.owner_side(end, cut, params).memory) for end in ends]
        error, owner_error = (tuple(memory.error for memory in side) for side in sides[0])
        states = tuple(tuple(tuple(memory.codec for memory in side) for side in rung) for rung in sides)
        zero, none = jnp.zeros((), jnp.result_type(jnp.float32, *error)), jnp.zeros((), jnp.int32)
        return GravacState(
            error=error,
            owner_error=owner_error,
            codec=states,
            count=none,
            usage=jnp.zeros(num_rungs, jnp.int32),
            rung=none,
            settled=jnp.zeros((), bool),
            energy_sent=zero,
            energy=zero,
            score=zero,
        )

    def without_codec(arrays, state):
        targets = [e + x for e, x in zip(state.error, arrays)]
        energy = _energy(targets, state)
        index, num_workers = channel.axis.index, channel.axis.size
        targets = [x.at[index].add(num_workers * e) for x, e in zip(targets, state.owner_error)]
        joint = channel.axis.mean(jnp.concatenate([energy[None], *(x.ravel().astype(energy.dtype) for x in targets)]))
        ends = np.cumsum([1, *(x.size for x in targets)])
        means = [joint[start:end].reshape(x.shape).astype(x.dtype) for start, end, x in zip(ends, ends[1:], targets)]
        error, owner_error = (jax.tree.map(jnp.zeros_like, x) for x in (state.error, state.owner_error))
        return means, error, owner_error, state.codec, jnp.stack([joint[0], joint[0]])

    def with_codec(k, arrays, state):
        worker, owner = (
            messages.Side(tuple(codecs.feedback.Memory(own, e, ()) for own, e in zip(states, errors)), ((),) * len(arrays))
            for states, errors in zip(state.codec[k], (state.error, state.owner_error))
        )
        energy = _energy([e + x for e, x in zip(state.error, arrays)], state)
        means, worker, owner, energies_Nx2 = messages.sharded(
            ends[k],
            arrays,
            worker,
            owner,
            messages.noise_key(channel, state.count),
            lambda own: jnp.stack([_energy(own, state), energy]),
            channel.axis,
        )
        error, owner_error = (tuple(memory.error for memory in side.memory) for side in (worker, owner))
        states = tuple(tuple(memory.codec for memory in side.memory) for side in (worker, owner))
        return means, error, owner_error, (*state.codec[:k], states, *state.codec[k + 1 :]), energies_Nx2.mean(axis=0)

    def reduce(grads, state, phase=None):
        del phase
        cut = cut_of()
        branches = [without_codec, *(functools.partial(with_codec, k) for k in range(len(ladder)))]
        means, error, owner_error, states, (sent, full) = jax.lax.switch(state.rung, branches, cut.arrays(grads), state)
        new = _judged(
            state._replace(
                error=error,
                owner_error=owner_error,
                codec=states,
                energy_sent=state.energy_sent + sent,
                energy=state.energy + full,
                usage=state.usage.at[state.rung].add(1),
            ),
            grads,
        )
        finite = jnp.isfinite(sent) & jnp.isfinite(full) & codecs.finite(means)  # The same on all workers.
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
        # A step that is lost has been sent all the same.
        new = new._replace(count=state.count + 1, usage=state.usage.at[state.rung].add(1))
        return cut.tree([jnp.where(finite, x, jnp.nan) for x in means], grads), new

    def _judged(state, like):
        """The rung of the next step."""
        sent = rung_bytes(like, channel.axis.size)
        rates = speed or [1 / max(1, each) for each in sent]
        rate = jnp.asarray(np.divide(rates, max(rates)), state.score.dtype)[state.rung]
        gain = jnp.where(state.energy > 0, state.energy_sent / jnp.where(state.energy > 0, state.energy, 1), 1)
        score = rate * gain
        over = state.usage.sum() % window == 0
        drops = (gain < threshold) & (state.rung > 0)
        stalls = ~state.settled & (state.rung > 0) & (score <= (1 + improvement) * state.score)
        climbs = ~(drops | stalls | state.settled) & (state.rung < num_rungs - 1)
        step = jnp.where(drops | stalls, -1, jnp.where(climbs, 1, 0))
        judged = state._replace(
            rung=state.rung + step,
            settled=state.settled | ~climbs,
            score=score,
            energy=jnp.zeros_like(state.energy),
            energy_sent=jnp.zeros_like(state.energy),
        )
        return jax.tree.map(lambda new, old: jnp.where(over, new, old), judged, state)

    def rung_bytes(params, num_workers):
        cut = cut_of(num_workers)
        shapes = cut.shapes(params)
        itemsize = jnp.result_type(jnp.float32, *(x.dtype for x in shapes)).itemsize
        dense = mesh.mean_bytes(1 + num_workers * sum(x.size for x in shapes), np.dtype(f"float{8 * itemsize}"), num_workers)
        return [dense, *(messages.num_bytes(end.codec, cut, params, num_workers, 2 * itemsize) for end in ends)]

    def num_bytes(params, num_workers, phase=None):
        sent = rung_bytes(params, num_workers)
        for below, above, codec in zip(sent, sent[1:], ladder):
            if num_workers > 1 and above >= below:
                raise ValueError(
                    f"GraVAC's rung {codec.name!r} sends {above:.0f} bytes a step, and the one below it {below:.0f}; "
                    "use a ladder from the mildest codec to the strongest, as 'bfloat16; int8; int4'"
                )
        return np.zeros(num_workers) if phase is None else np.full(num_workers, sent[phase])  # Only the state knows.

    return reducer_lib.Reducer(init, reduce, num_bytes, lambda step: None, range(num_rungs), lambda state: state.usage)


def _energy(arrays: list[jax.Array], state: GravacState) -> jax.Array:
    return sum((jnp.sum(x**2) for x in arrays), jnp.zeros(())).astype(state.energy.dtype)
