"""The gradient source of a model whose embedding tables are divided among the workers, while all else is data parallel.

Worker n owns the tables t with t mod N = n, whole. In each step, with B examples per worker,

    c        row numbers of each worker's examples       all-to-all, as they are         to the owners
    v        vectors E_t[c_t]                            all-to-all, within bounds       to the workers of the examples
    g        B ∂F_i/∂v, each example's own gradient      all-to-all, within bounds       back to the owners
    ∂F/∂E_t  (1/NB) Σ g over the examples of all workers with that row

where F = (1/N) Σ_i F_i is the mean loss over all workers. So a table's gradient is complete at its owner and is not averaged; those of
all else are averaged as in any data-parallel run, and without compression the run is the undivided one up to rounding. A worker's
tables are one array of rows, padded to the longest of all workers'.

Nothing here is differentiated through a collective: loss and gradients are taken with respect to the vectors that have arrived.

References: Naumov et al. 2019, arXiv 1906.00091 (tables divided as wholes); Feng et al. 2024, arXiv 2407.04272 (bounds).
"""

from collections.abc import Sequence
import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import mesh, reduce, registry
from decjax.options import Natural, Range
from decjax.pipeline.bounds import BoundedLink, Decay, bounds_of
from decjax.pipeline.shares import TABLES, Shares
from decjax.pipeline.source import Source
from decjax.typing import PyTree


class Exchanged(NamedTuple):
    """State of a worker's exchanged vectors. Entry 0 is of vectors, entry 1 of their gradients.

    Attributes:
        step: how many steps were taken, an int32 scalar; bounds follow from it.
        raw_2: steps in which these went as they are, since a bound would not have held, int32.
        worst_2xP: the last step's largest |v − v̂| ÷ bound in what this worker sent, of each table slot. For vectors slots are this
            worker's own tables; for gradients the largest over all owners.
    """

    step: jax.Array
    raw_2: jax.Array
    worst_2xP: jax.Array


def check(spec: Any) -> None:
    """Raise a ValueError for a `RunSpec` whose options divided tables do not support: only gradients of a table's rows may change them."""
    if spec.method.name != "allreduce" or spec.method.options.get("stale"):
        refused = "stale" if spec.method.name == "allreduce" else f"method {spec.method.name!r}"
        raise ValueError(
            f"divided tables with {refused}: they need gradients that are averaged in every step; use method 'allreduce' without stale, or "
            "leave config.source out"
        )
    values = {"pipeline.stages": spec.pipeline.stages, "pipeline.microbatches": spec.pipeline.microbatches, "tensor": spec.tensor}
    for what, value in values.items():
        if value > 1:
            raise ValueError(f"{what}={value} with divided tables, which need a batch's lookups in one program; use {what}=1")
    options = spec.source.options
    if not (options["forward"] or options["backward"]):
        for name, option in registry.part("source", "divided_tables").options.items():
            if options[name] != option.default:
                raise ValueError(
                    f"source.{name}={options[name]!r} changes nothing without bounds; use bound=0.02 or gradient_bound=0.01"
                )
    if (within := spec.source.options["within"]) > spec.steps:
        raise ValueError(
            f"source.within={within} is more than steps={spec.steps}, so the bounds are never reached; use at most {spec.steps}"
        )
    if spec.optimizer and not is_elementwise(
        registry.make("optimizer", spec.optimizer.name, learning_rate=lambda step: 1e-3, **spec.optimizer.options)
    ):
        raise ValueError(
            f"optimizer {spec.optimizer.name!r} with divided tables: its update of shared parameters would depend on a worker's tables; "
            "use an elementwise one, such as 'adamw'"
        )


def is_elementwise(optimizer: optax.GradientTransformation) -> bool:
    """Return whether the update of a parameter depends on its own gradient and value only, as tried on a matrix and a vector."""

    def second_update(first: float) -> jax.Array:
        """The update of all values but the first of each array, whose gradients are `first`."""
        params = {"matrix": jnp.ones((2, 2)), "vector": jnp.full(3, 0.5)}
        grads = {"matrix": jnp.array([[first, -0.2], [0.1, 0.4]]), "vector": jnp.array([first, 0.2, 0.3])}
        state, updates = optimizer.init(params), params
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
        return jnp.concatenate([x.ravel()[1:] for x in jax.tree.leaves(updates)])

    return bool((second_update(0.3) == second_update(7.0)).all())


@registry.register("source", "divided_tables", check=check, reducer=lambda reducer: with_own_tables(reducer), divided=True)
def of_tables(
    task: Any,
    axis: mesh.Axis,
    num_workers: int,
    batch_size: int,
    clips: bool = False,
    *,
    forward: str = "",
    backward: str = "",
    bits: Annotated[int, Range(2, 12)] = 8,
    outliers: Annotated[int, Range(1, 256)] = 2,
    start: Annotated[float, Range(1)] = 1.0,
    within: Natural = 0,
    decay: Literal["stepwise", "linear", "exponential"] = "stepwise",
) -> Source:
    """The gradient source of a model with divided embedding tables.

    Args:
        task: with the model's tables.
        axis: of the workers.
        num_workers: N.
        batch_size: B, examples of a worker.
        clips: whether the norm of the gradient is needed.
        forward: bounds of vectors, see `bounds_of`; empty: uncompressed.
        backward: bounds of each example's own gradient of them; empty: uncompressed.
        bits: of each coded value.
        outliers: how many values in a group of 256 a message has room for beyond those that the bits hold.
        start: k; see `Decay`.
        within: S.
        decay: the shape.

    Raises:
        ValueError: if the task has no tables, or an option is out of range or cannot be read.
    """
    lookups = task.lookups
    if lookups is None:
        raise ValueError(
            "source 'divided_tables' divides a model's embedding tables, and this task has none; leave it out, or use task 'clicks'"
        )
    links = tuple(BoundedLink(bits, outliers, bool(text)) for text in (forward, backward))
    usual = [text or "1" for text in (forward, backward)]
    bounds = [bounds_of(text, f"source.{what}", len(lookups.sizes)) for what, text in zip(("forward", "backward"), usual)]
    shares = Shares(tuple(lookups.sizes), num_workers)
    form = _Divided(lookups, axis, shares, links, np.stack(bounds), Decay(start, within, decay))
    size = batch_size * lookups.width
    sent = [link.num_bytes(num_workers, shares.slots, size) for link in links]  # Also refuses impossible bits.
    more_2 = np.array([link.more_bytes(num_workers, shares.slots, size) for link in links], np.float32)
    return Source(
        form.gradient,
        form.init,
        norm=form.norm,
        lasts=False,
        deal=shares.deal,
        gather=shares.gather,
        num_bytes=sum(sent)
        + (num_workers - 1) * shares.slots * batch_size * 4
        + (mesh.mean_bytes(1, jnp.float32, num_workers) if clips else 0),
        more_bytes=lambda state: state.raw_2 @ more_2,
    )


@dataclasses.dataclass(frozen=True)
class _Divided:
    """The functions of `of_tables`, of one worker."""

    lookups: Any
    axis: mesh.Axis
    shares: Shares
    links: Sequence[BoundedLink]  # of vectors, of gradients
    bounds_2xT: np.ndarray
    decay: Decay

    def init(self, params):
        del params
        return Exchanged(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros((2, self.shares.slots)))

    def gradient(self, params, state, batch, key):
        """`Source.gradient`."""
        shares, axis = self.shares, self.axis
        rows_RxD, dense = params[TABLES], {name: part for name, part in params.items() if name != TABLES}
        bounds_2xNxP = [jnp.maximum(shares.by_owner(e_T), 1e-30) * self.decay(state.step) for e_T in self.bounds_2xT]
        ours_2xNxP = [jnp.broadcast_to(e_NxP[axis.index], e_NxP.shape) for e_NxP in bounds_2xNxP]

        asked_NxPxB = axis.all_to_all(shares.by_owner(self.lookups.indices(batch), axis=1).astype(jnp.int32))
        first_P, held_P = (jnp.asarray(x_NxP)[axis.index] for x_NxP in (shares.first_NxP, shares.held_NxP))
        place_NxPxB = first_P[:, None] + asked_NxPxB
        found_NxPxBxD = jnp.where(held_P[:, None, None], rows_RxD[place_NxPxB], 0)
        arrived_NxPxBxD, vectors = self.links[0].send(found_NxPxBxD, ours_2xNxP[0], bounds_2xNxP[0], axis)

        vectors_BxTxD = shares.by_table(arrived_NxPxBxD).swapaxes(0, 1)
        loss = lambda dense, vectors_BxTxD: self.lookups.loss(dense, vectors_BxTxD, batch, key)
        value, (grads, grads_BxTxD) = jax.value_and_grad(loss, argnums=(0, 1))(dense, vectors_BxTxD)

        B = len(grads_BxTxD)
        back_NxPxBxD, gradients = self.links[1].send(shares.by_owner(B * grads_BxTxD, axis=1), bounds_2xNxP[1], ours_2xNxP[1], axis)
        back_NxPxBxD = jnp.where(held_P[:, None, None], back_NxPxBxD, 0)
        summed_RxD = jnp.zeros_like(rows_RxD).at[place_NxPxB].add(back_NxPxBxD)
        told = (vectors, gradients)
        raw_2 = state.raw_2 + jnp.stack([each.is_raw for each in told])
        state = Exchanged(state.step + 1, raw_2, jnp.stack([each.worst_P for each in told]))
        return value, grads | {TABLES: summed_RxD / (shares.num_workers * B)}, state

    def norm(self, grads):
        """The ℓ2 norm of the whole gradient: of this worker's copy of all else, and of the tables of all workers."""
        rest = {name: part for name, part in grads.items() if name != TABLES}
        return jnp.sqrt(optax.global_norm(rest) ** 2 + self.axis.sum(jnp.square(grads[TABLES]).sum()))


def with_own_tables(reducer: reduce.Reducer) -> reduce.Reducer:
    """A reducer that averages all gradients but those of divided tables, which are complete at their owners."""
    return _WithOwnTables(reducer.channel, reducer=reducer)


class _WithOwnTables(reduce.WrappedReducer):
    def init(self, params):
        return super().init(_rest(params))

    def reduce(self, grads, state, phase=None):
        averaged, state = super().reduce(_rest(grads), state, phase)
        return averaged | {TABLES: grads[TABLES]}, state

    def num_bytes(self, params, num_workers, phase=None):
        return super().num_bytes(_rest(params), num_workers, phase)


def _rest(tree: PyTree) -> PyTree:
    return {name: part for name, part in tree.items() if name != TABLES}
