"""Which parts of an optimizer's state are kept when a run continues with another number of workers, and which states communicate.

State of edges between workers, such as a mixer's copies of its neighbors' parameters, is reset for another number of workers. Its
fields are marked with `transient` where the state's type is defined. All other state, also that of other libraries' optimizers, is
averaged or copied.
"""

from collections.abc import Callable
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from decjax.typing import PyTree

_FIELDS: dict[type, frozenset[str]] = {}
_COMMUNICATING: set[type] = set()
_LEAVE_UPDATES = {"MaskedState", "PartitionState", "InjectStatefulHyperparamsState"}
T = TypeVar("T")


def communicating(kind: type[T]) -> type[T]:
    """Mark the state of a transformation that communicates with other workers; a class decorator."""
    _COMMUNICATING.add(kind)
    return kind


def communicates(state: PyTree) -> bool:
    """Whether a state is that of a transformation marked with `communicating`."""
    return type(state) in _COMMUNICATING


def is_communicating(tree: PyTree) -> bool:
    """Whether a tree holds the state of a transformation that communicates."""
    return any(map(communicates, jax.tree.leaves(tree, is_leaf=communicates)))


def check_outermost(tree: PyTree) -> None:
    """Raise a ValueError for a state in which another transformation of optax skips or changes the updates of one that communicates.

    Transformations before it in a chain see only gradients; masks and injected hyperparameters leave its updates unchanged.
    """
    for state in jax.tree.leaves(tree, is_leaf=_changes_mixing):
        if _changes_mixing(state):
            around = _kind(next(filter(_is_optax, state[::-1])) if type(state) is tuple else state)
            within = _kind(next(filter(communicates, jax.tree.leaves(state, is_leaf=communicates))))
            raise ValueError(
                f"a transformation ({around}) around one that communicates ({within}) would also skip or scale what workers exchange; "
                "put it inside, as decentralize(optax.chain(clip, adamw), mixer)"
            )


def _changes_mixing(state: PyTree) -> bool:
    if type(state) is tuple:  # of a chain, or a tuple of the caller
        held = [is_communicating(part) for part in state]
        return any(is_optax and any(held[:i]) for i, is_optax in enumerate(map(_is_optax, state)))
    return _is_optax(state) and _kind(state) not in _LEAVE_UPDATES and is_communicating(state)


def _is_optax(state: PyTree) -> bool:
    return hasattr(state, "_fields") and type(state).__module__.startswith("optax.")


def _kind(state: PyTree) -> str:
    return type(state).__name__


def transient(*fields: str) -> Callable[[type[T]], type[T]]:
    """Mark fields of a NamedTuple as reset for another number of workers, as `@transient("mixer")`; a class decorator.

    Raises:
        ValueError: if the class has no such field.
    """

    def mark(kind):
        if unknown := set(fields) - set(kind._fields):
            raise ValueError(f"{kind.__name__} has no field {min(unknown)!r}; it has {', '.join(kind._fields)}")
        _FIELDS[kind] = frozenset(fields)
        return kind

    return mark


def lasting(state: PyTree) -> PyTree:
    """Return an optimizer state without its `transient` fields; a tuple that had some becomes a dict of its other fields."""
    if not hasattr(state, "_fields"):
        return tuple(map(lasting, state)) if isinstance(state, tuple) else state
    marked = _FIELDS.get(type(state), frozenset())
    kept = {name: lasting(part) for name, part in state._asdict().items() if name not in marked}
    return kept if marked else type(state)(**kept)


def completed(lasting_part: PyTree, fresh: PyTree) -> PyTree:
    """Return the whole state, from `lasting(state)` and a freshly initialized state for the fields that it lacks."""
    if isinstance(lasting_part, dict) and hasattr(fresh, "_fields"):
        return fresh._replace(**{name: completed(part, getattr(fresh, name)) for name, part in lasting_part.items()})
    if not isinstance(lasting_part, tuple):
        return lasting_part
    parts = tuple(map(completed, lasting_part, fresh))
    return type(lasting_part)(*parts) if hasattr(lasting_part, "_fields") else parts


def init_memory(init: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """Return `init(params)`, the state of a mixer or reducer; 0, or () for no state, when `optax.tree.map_params` calls.

    That function calls `init` with a placeholder, to find the fields of a state that are shaped like the parameters. Mixers and
    reducers keep their state in buckets, whose number a placeholder does not determine, so their state is shown as one field of
    another shape, to which `transform_non_params` is applied as a whole.
    """
    if not isinstance(params, _placeholder()):
        return init(params)
    try:
        return () if init(params) == () else 0
    except ValueError:  # `init` needs arrays or a worker axis, so there is a state.
        return 0


def increment(step: jax.Array) -> jax.Array:
    """Return the next step's number; the largest int32 stays."""
    return jnp.asarray(optax.safe_increment(step))


def transformation(
    init: Callable[..., PyTree], update: Callable[..., PyTree], *, moves: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation of two functions, for parameters of any types.

    Both functions see only the inexact leaves; the updates of others, such as counters and masks, leave them unchanged. The fields
    of the state keep the types from `init`, also where gradients are wider than parameters, except for `inner`, the state of the
    wrapped optimizer.

    Args:
        init: `init(params) -> state`.
        update: as in any transformation with extra arguments.
        moves: whether it moves the parameters in addition to the updates of `inner`, as mixing does.

    Raises:
        ValueError: from `init`, if it moves parameters of which the optimizer has a second copy.
    """

    def init_floating(params):
        state = init(_floating(params, params))
        if moves:
            _check_no_copy(getattr(state, "inner", ()))
        return state

    def update_floating(updates, state, params=None, **extra):
        whole = updates if params is None else params
        if all(map(_is_stepped, jax.tree.leaves(whole))):
            updates, after = update(updates, state, params, **extra)
            return updates, _kept(after, state)
        treedef = jax.tree.structure(whole)
        is_whole = lambda node: jax.tree.structure(node) == treedef
        seen = lambda tree: jax.tree.map(lambda x: _floating(whole, x) if is_whole(x) else x, tree, is_leaf=is_whole)
        extra |= {"received": seen(extra["received"])} if "received" in extra else {}
        updates, after = update(seen(updates), state, seen(params), **extra)
        updates = jax.tree.map(lambda x, u: jnp.zeros_like(x) if u is None else u, whole, updates)
        return updates, _kept(after, state)

    return optax.GradientTransformationExtraArgs(init_floating, update_floating)


def _check_no_copy(inner: PyTree) -> None:
    """Raise a ValueError for an optimizer with a second copy of the parameters, which would not be mixed."""
    has_copy = lambda node: isinstance(node, optax.contrib.ScheduleFreeState)
    if any(map(has_copy, jax.tree.leaves(inner, is_leaf=has_copy))):
        raise ValueError(
            "optimizer schedule_free keeps a copy of the parameters, z, which is not mixed with them and so drifts apart between "
            "workers; use method 'allreduce', or another optimizer such as 'adamw'"
        )


def _is_stepped(x: PyTree) -> bool:
    """Whether updates move a leaf. They would move complex arrays, too, which the channel refuses where they are averaged."""
    return not hasattr(x, "dtype") or jnp.issubdtype(x.dtype, jnp.inexact)


def _floating(like: PyTree, tree: PyTree) -> PyTree:
    """Return the tree without the leaves that updates do not move in `like`."""
    return jax.tree.map(lambda x, y: y if _is_stepped(x) else None, like, tree)


def _kept(new: PyTree, old: PyTree) -> PyTree:
    """Return a new state with the types of the old one, except for `inner`."""
    same = lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype)
    fields = {name: getattr(new, name) for name in getattr(new, "_fields", ()) if name != "inner"}
    return (
        new._replace(**{name: jax.tree.map(same, value, getattr(old, name)) for name, value in fields.items()}) if fields else new
    )


@functools.cache
def _placeholder() -> type:
    """Return the type of the placeholder that `optax.tree.map_params` passes to `init`; optax does not export it."""
    seen = []
    optax.tree.map_params(lambda params: seen.append(type(params)) or (), lambda x: x, ())
    return seen[0]
