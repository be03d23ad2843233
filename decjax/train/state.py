"""The training state and what is measured on it. Everything is stacked over workers: `[N, ...]`, with stages `[N, S, ...]`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import gossip, mesh


class State(NamedTuple):
    """What training carries from step to step; everything else is a function of (seed, worker, step)."""

    params: Any  # [N, ...] float32 masters
    opt_state: Any  # [N, ...]
    source: Any = ()  # [N, ...] what the gradient source remembers


class Method(NamedTuple):
    """What happens to gradients and parameters: reduce, gossip or local.

    Attributes:
        tx: the transformation; its update takes `phase`, and `received` where there is an `exchange`.
        phase: `phase(step)` -> the static phase of a step, or None to trace it.
        num_bytes: `num_bytes(params, phase) -> (N,)`, the declared bytes that each worker sends.
        exchange: `exchange(params, opt_state, phase) -> received`, all communication of the step, where it needs nothing of
            the step's gradient; None where it does, or where there is none.
        usage: `usage(opt_state) -> [phases]` steps so far in each of `phases`, where the phase is None because the state decides
            on it; the bytes are then those of that many steps of each. None otherwise.
        phases: what `usage` counts.
        mixer: of a method whose state has a `mixer` field; None otherwise. It says how workers are averaged.
    """

    tx: optax.GradientTransformationExtraArgs
    phase: Callable[[int], int | None]
    num_bytes: Callable[[Any, int | None], np.ndarray]
    exchange: Callable[[Any, Any, int], Any] | None = None
    usage: Callable[[Any], jax.Array] | None = None
    phases: range = range(0)
    mixer: gossip.Mixer | None = None


def no_source(params: Any) -> tuple[()]:
    """The state of a gradient source that remembers nothing."""
    del params
    return ()


def init(
    model_init: Callable,
    tx: optax.GradientTransformation,
    workers: mesh.Workers,
    seed: int,
    source_init: Callable[[Any], Any] = no_source,
) -> State:
    """The initial state: the same parameters on every worker; `model_init(key)` gives leaves [S, ...] with stages."""
    return start(jax.jit(model_init)(jax.random.key(seed)), tx, workers, source_init)


def start(
    params: Any, tx: optax.GradientTransformation, workers: mesh.Workers, source_init: Callable[[Any], Any] = no_source
) -> State:
    """The initial state from given parameters of one model."""
    params = workers.stack(params)
    return State(params, workers.jit(tx.init, in_axes=(0,))(params), workers.jit(source_init, in_axes=(0,))(params))


def abstract(
    model_init: Callable,
    tx: optax.GradientTransformation,
    workers: mesh.Workers,
    seed: int,
    source_init: Callable[[Any], Any] = no_source,
) -> State:
    """Shapes, dtypes and shardings of `init`'s result, without its arrays."""
    shapes = jax.eval_shape(lambda: init(model_init, tx, workers, seed, source_init))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, workers.shardings(shapes)
    )


def one_device(tree: Any, workers: mesh.Workers) -> Any:
    """Shapes and dtypes of one worker's, or stage's, share of a stacked tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[workers.num_axes :], x.dtype), tree)


def mean_over_workers(params: Any, weight_N: jax.Array | None = None) -> Any:
    """The averaged model, x̄ = (1/N) Σ x_i or Σ y_i x_i / Σ y_i, in float32 at least; integers are taken from worker 0."""

    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[0]
        return jnp.average(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=0, weights=weight_N)

    return jax.tree.map(mean, params)


def averaged(state: State, mixer: gossip.Mixer | None, num_axes: int = 1) -> Any:
    """The averaged model of a state of `num_axes` leading axes, with the weights of its mixer: those of stages are equal."""
    if not (mixer and mixer.weight):
        return mean_over_workers(state.params)
    weight = jax.vmap(mixer.weight) if num_axes == 1 else jax.vmap(lambda mixer_S: jax.vmap(mixer.weight)(mixer_S)[0])
    return mean_over_workers(state.params, weight(state.opt_state.mixer))


def consensus(state: State, mixer: gossip.Mixer | None, workers: mesh.Workers) -> State:
    """The state in which every replica is the average, and the mixer knows."""
    mean = averaged(state, mixer, workers.num_axes)
    params = jax.tree.map(lambda x, m: jnp.broadcast_to(m.astype(x.dtype), x.shape), state.params, mean)
    if not (mixer and mixer.restart):
        return state._replace(params=params)
    restarted = workers.map(mixer.restart, (0, 0))(params, state.opt_state.mixer)
    return state._replace(params=params, opt_state=state.opt_state._replace(mixer=restarted))


def consensus_distance(params: Any) -> jax.Array:
    """Ξ = sqrt( (1/N) Σ_i ‖x_i − x̄‖² ) of stacked parameters, a float32 scalar."""
    floating = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    deviations = [x.astype(mean.dtype) - mean for x, mean in zip(floating, mean_over_workers(floating))]
    return jnp.sqrt(sum((jnp.sum(d**2) / len(d) for d in deviations), jnp.zeros(())))


# What belongs to edges between workers or stages, and the gradient that a stale all-reduce has not applied yet.
FLEETING = ("mixer", "reducer", "pending", "tracker", "gradient", "source")


def lasting(state: Any) -> Any:
    """What outlives a change of workers: the state without its `FLEETING` fields; what held some becomes a dict."""
    if not isinstance(state, tuple):
        return state
    if not hasattr(state, "_fields"):
        return tuple(map(lasting, state))
    kept = {name: lasting(part) for name, part in state._asdict().items() if name not in FLEETING}
    return type(state)(**kept) if len(kept) == len(state) else kept


def resize(state: State, fresh: State, num_workers: int, weight_N: np.ndarray | None = None) -> State:
    """Carries a host-side state of N replicas over to N' workers.

    New worker j stands for the replicas i with ⌊i N'/N⌋ = j: it takes their average if workers were removed, and a copy of
    replica ⌊j N/N'⌋ if workers were added. Integers (step counters) are copied. What is not `lasting` starts afresh.

    Args:
        state: NumPy leaves of shape (N, ...); whole, or what is lasting of it.
        fresh: an initial state for N' workers, from which the rest comes.
        num_workers: N'.
        weight_N: y_i of the replicas, whose average is Σ_i y_i x_i / Σ_i y_i: those of parameters are weighted, too, and all new
            parameters are moved alike, so that their plain mean is what the weighted one was; None: y_i = 1.

    Returns:
        NumPy leaves of shape (N', ...).
    """

    def spread(x, weights=None):
        n = len(x)
        if num_workers >= n:
            return x[np.arange(num_workers) * n // num_workers]
        members = [np.flatnonzero(np.arange(n) * num_workers // n == j) for j in range(num_workers)]
        if not np.issubdtype(x.dtype, np.floating):
            return np.stack([x[own[0]] for own in members])
        # In float64 the mean of equal values is that value, so that equal replicas stay equal.
        weights = np.ones(n) if weights is None else np.asarray(weights, np.float64)
        return np.stack([np.average(x[own], axis=0, weights=weights[own]) for own in members]).astype(x.dtype)

    def spread_weighted(x):
        new = spread(x, weight_N)
        if not np.issubdtype(x.dtype, np.floating):
            return new
        return (new + (np.average(x, axis=0, weights=weight_N) - new.mean(axis=0, dtype=np.float64))).astype(x.dtype)

    def complete(old, new):
        if isinstance(old, dict) and hasattr(new, "_fields"):
            return new._replace(**{name: complete(part, getattr(new, name)) for name, part in old.items()})
        if not isinstance(old, tuple):
            return old
        parts = tuple(map(complete, old, new))
        return type(old)(*parts) if hasattr(old, "_fields") else parts

    kept = lasting(state)
    spread_all = {name: jax.tree.map(spread, part) for name, part in kept.items()}
    if weight_N is not None:
        spread_all["params"] = jax.tree.map(spread_weighted, kept["params"])
    return complete(spread_all, fresh)
