"""The training state, one step of it, and what is measured on it. Everything is stacked over workers: `[N, ...]`."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import mesh
from decjax.train import wire


class State(NamedTuple):
    """What training carries from step to step; everything else is a function of (seed, worker, step)."""

    params: Any  # [N, ...] float32 masters
    opt_state: Any  # [N, ...]


class Method(NamedTuple):
    """What happens to gradients and parameters: reduce, gossip or local.

    Attributes:
        tx: the transformation; its update takes `phase`.
        phase: `phase(step)` -> the static phase of a step, or None to trace it.
        num_bytes: `num_bytes(params, phase) -> (N,)`, the declared bytes that each worker sends.
    """

    tx: optax.GradientTransformationExtraArgs
    phase: Callable[[int], int | None]
    num_bytes: Callable[[Any, int | None], np.ndarray]


def init(model_init: Callable, tx: optax.GradientTransformation, workers: mesh.Workers, seed: int) -> State:
    """The initial state: the same parameters on every worker."""
    params = workers.stack(jax.jit(model_init)(jax.random.key(seed)))
    opt_state = workers.jit(tx.init, in_axes=(0,))(params)
    return State(params, opt_state)


def abstract(model_init: Callable, tx: optax.GradientTransformation, workers: mesh.Workers, seed: int) -> State:
    """Shapes, dtypes and shardings of `init`'s result, without its arrays."""
    shapes = jax.eval_shape(lambda: init(model_init, tx, workers, seed))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=workers.stacked), shapes)


class Program(NamedTuple):
    """A compiled step of one phase."""

    run: Callable  # (state, batch, step) -> (state, loss_N)
    sent_N: np.ndarray  # bytes that each worker sends


def make_step(gradients: Callable, method: Method, workers: mesh.Workers, seed: int) -> Callable[..., Program]:
    """Joins a gradient source and a method into one fused executable per phase.

    Args:
        gradients: `gradients(params, batch, key) -> (loss, grads)` of one worker; no collectives inside.
        method: what happens to the gradient.
        workers: where the workers live.
        seed: keys are fold_in(fold_in(seed, worker), step).

    Returns:
        `program(phase, state, batch, step) -> Program`, compiled once per phase. The state is donated. Bytes are those of
        the compiled collectives. They are the declared ones where workers are simulated and nothing is sent, and where the
        phase is traced and the program holds all of them.
    """
    def worker_step(state, batch, step, phase):
        worker_key = jax.random.fold_in(jax.random.key(seed), mesh.worker_index(workers.axis_name))
        loss, grads = gradients(state.params, batch, jax.random.fold_in(worker_key, step))
        params = state.params
        if workers.on_cpu:
            # CPU devices overlap nothing within one executable. An exchange that starts before the gradient only blocks
            # threads which others need for computing: it costs a third of a small step, after the gradient a tenth.
            grads, params = jax.lax.optimization_barrier((grads, params))
        updates, opt_state = method.tx.update(grads, state.opt_state, params, phase=phase)
        return State(optax.apply_updates(params, updates), opt_state), loss

    compiled: dict[int | None, Program] = {}

    def program(phase, state, batch, step):
        if phase not in compiled:
            step_of_phase = workers.jit(functools.partial(worker_step, phase=phase), (0, 0, None), donate_argnums=(0,))
            executable = step_of_phase.lower(state, batch, step).compile()
            if workers.simulated or phase is None:
                sent_N = method.num_bytes(one_worker(state.params), phase)
            else:
                sent_N = wire.bytes_sent(executable.as_text(), workers.num_workers)
            compiled[phase] = Program(executable, sent_N)
        return compiled[phase]

    return program


def one_worker(tree: Any) -> Any:
    """Shapes and dtypes of one worker's share of a stacked tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


def mean_over_workers(params: Any) -> Any:
    """The averaged model, x̄ = (1/N) Σ x_i in float32 at least; integers are taken from worker 0."""
    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[0]
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)).mean(axis=0)
    return jax.tree.map(mean, params)


def consensus_distance(params: Any) -> jax.Array:
    """Ξ = sqrt( (1/N) Σ_i ‖x_i − x̄‖² ) of stacked parameters, a float32 scalar."""
    floating = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    deviations = [x.astype(mean.dtype) - mean for x, mean in zip(floating, mean_over_workers(floating))]
    return jnp.sqrt(sum((jnp.sum(d**2) / len(d) for d in deviations), jnp.zeros(())))


def resize(state: State, fresh: State, num_workers: int) -> State:
    """Carries a host-side state of N replicas over to N' workers.

    New worker j stands for the replicas i with ⌊i N'/N⌋ = j: it takes their average if workers were removed, and a copy of
    replica ⌊j N/N'⌋ if workers were added. Integers (step counters) are copied. What belongs to edges between workers, the
    states of mixers and reducers, starts afresh.

    Args:
        state: NumPy leaves of shape (N, ...).
        fresh: an initial state for N' workers, from which mixer and reducer states come.
        num_workers: N'.

    Returns:
        NumPy leaves of shape (N', ...).
    """
    def spread(x):
        n = len(x)
        if num_workers >= n:
            return x[np.arange(num_workers) * n // num_workers]
        groups = np.arange(n) * num_workers // n
        members = [x[groups == j] for j in range(num_workers)]
        if not np.issubdtype(x.dtype, np.floating):
            return np.stack([own[0] for own in members])
        return np.stack([own.mean(axis=0, dtype=np.promote_types(x.dtype, np.float32)) for own in members]).astype(x.dtype)

    resized = jax.tree.map(spread, state)
    fresh_parts = {name: getattr(fresh.opt_state, name) for name in ("mixer", "reducer") if hasattr(fresh.opt_state, name)}
    if fresh_parts:
        resized = resized._replace(opt_state=resized.opt_state._replace(**fresh_parts))
    return resized
