"""The training state, stacked over workers (leaves [N, …], with stages [N, S, …]), and the average and distance of replicas."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import gossip, mesh
from decjax.optim.memories import completed, lasting
from decjax.typing import PyTree


class State(NamedTuple):
    """What training carries from step to step; everything else is a function of (seed, worker, step).

    Attributes:
        params: every worker's parameters, float32, leaves [N, …].
        opt_state: every worker's optimizer state, with that of mixers and reducers, leaves [N, …].
        source: state of the gradient source, such as batch statistics, leaves [N, …].
    """

    params: PyTree
    opt_state: PyTree
    source: PyTree = ()


def mean_over_workers(params: PyTree, weight_N: jax.Array | np.ndarray | None = None) -> PyTree:
    """Return the averaged model x̄ = (1/N) Σ_i x_i, with weights Σ_i y_i x_i / Σ_i y_i, in float32 at least; integers are worker 0's."""

    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[0]
        return jnp.average(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=0, weights=weight_N)

    return jax.tree.map(mean, params)


def averaged(state: State, mixer: gossip.Mixer | None, num_axes: int = 1) -> PyTree:
    """Return the averaged model of a state with `num_axes` leading axes (2 with stages), weighted if its mixer has weights."""
    if not (mixer and mixer.weight):
        return mean_over_workers(state.params)
    one = mixer.weight
    weight = jax.vmap(one) if num_axes == 1 else jax.vmap(lambda mixer_S: jax.vmap(one)(mixer_S)[0])
    return mean_over_workers(state.params, weight(state.opt_state.mixer))


def consensus(state: State, mixer: gossip.Mixer | None, workers: mesh.Workers) -> State:
    """Return the state with every replica replaced by the average, and the mixer's state restarted accordingly."""
    restart = workers.map(mixer.restart, (0, 0)) if mixer else None
    return replaced(state, averaged(state, mixer, workers.num_axes), restart)


def replaced(state: State, mean: PyTree, restart: Callable[[PyTree, PyTree], PyTree] | None) -> State:
    """Return the state with every replica replaced by `mean`, and the mixer's state by `restart(params, state)`."""
    params = jax.tree.map(lambda x, m: jnp.broadcast_to(m.astype(x.dtype), x.shape), state.params, mean)
    if restart is None:
        return state._replace(params=params)
    restarted = restart(params, state.opt_state.mixer)
    return state._replace(params=params, opt_state=state.opt_state._replace(mixer=restarted))


def consensus_distance(params: PyTree) -> jax.Array:
    """Return the consensus distance Ξ = sqrt( (1/N) Σ_i ‖x_i − x̄‖² ) of stacked parameters, a float32 scalar."""
    floating = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    deviations = [x.astype(mean.dtype) - mean for x, mean in zip(floating, mean_over_workers(floating))]
    return jnp.sqrt(sum((jnp.sum(d**2) / len(d) for d in deviations), jnp.zeros(())))


def kept(state: State, source_lasts: bool) -> dict[str, PyTree]:
    """Return the parts of a state that are kept when a run continues with another number of workers; see `optim.memories`."""
    parts = {"params": state.params, "opt_state": lasting(state.opt_state)}
    return parts | {"source": state.source} if source_lasts else parts


def resize(state: dict[str, PyTree], num_workers: int, weight_N: np.ndarray | None = None) -> dict[str, PyTree]:
    """Return the parts of a state that N' workers keep, from those of N replicas; leaves are [N', …] and [N, …].

    With fewer workers, new worker j gets the average of the replicas i with ⌊i N'/N⌋ = j; with more, a copy of replica ⌊j N/N'⌋.
    Integers (step counters) are copied.

    Args:
        state: the parts that `kept` returns.
        num_workers: N'.
        weight_N: weights y_i of the replicas, whose average is Σ_i y_i x_i / Σ_i y_i. Averages of parameters are then weighted, and
            all new parameters are shifted by the same amount, so that their unweighted mean is that average; None: y_i = 1.
    """

    def spread(x, weights=None):
        n = len(x)
        if num_workers >= n:
            return x[np.arange(num_workers) * n // num_workers]
        members = [np.flatnonzero(np.arange(n) * num_workers // n == j) for j in range(num_workers)]
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.stack([x[replicas[0]] for replicas in members])
        weights = np.ones(n) if weights is None else np.asarray(weights)
        return jnp.stack([_average(x[replicas], weights[replicas]) for replicas in members]).astype(x.dtype)

    def spread_weighted(x):
        new = spread(x, weight_N)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return new
        return (new + (_average(x, weight_N) - _average(new))).astype(x.dtype)

    spread_all = {name: jax.tree.map(spread, part) for name, part in state.items()}
    if weight_N is not None:
        spread_all["params"] = jax.tree.map(spread_weighted, state["params"])
    return spread_all


def _average(x: jax.Array, weights: np.ndarray | None = None) -> jax.Array:
    """Return the weighted mean over the first axis, in float32 at least; that of equal values is the value, bit for bit."""
    wide = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.average(wide, axis=0, weights=weights)
    return mean + jnp.average(wide - mean, axis=0, weights=weights)  # The second term is what rounding has lost.


def resumed(kept: dict[str, PyTree], fresh: State) -> State:
    """Return the whole state, from the parts that `kept` returns and a freshly initialized state for all others."""
    return State(kept["params"], completed(kept["opt_state"], fresh.opt_state), kept.get("source", fresh.source))
