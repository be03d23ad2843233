"""Which parts of an optimizer's state stay valid when a run continues with another number of workers, and which states communicate.

State that belongs to edges between workers, such as a mixer's copies of its neighbours' parameters, is meaningless for another
number of workers and starts afresh. Its fields are marked with `transient` where the state's type is defined. All other state, also
that of other libraries' optimizers, is averaged or copied.
"""

from collections.abc import Callable
import functools
from typing import Any, TypeVar

import jax
import optax

_FIELDS: dict[type, frozenset[str]] = {}
_COMMUNICATING: set[type] = set()
_LEAVE_UPDATES = {"MaskedState", "PartitionState", "InjectStatefulHyperparamsState"}
T = TypeVar("T")


def communicating(kind: type[T]) -> type[T]:
    """Class decorator that marks the state of a transformation which exchanges something with other workers."""
    _COMMUNICATING.add(kind)
    return kind


def communicates(state: Any) -> bool:
    """Whether a state is that of a transformation marked with `communicating`."""
    return type(state) in _COMMUNICATING


def is_communicating(tree: Any) -> bool:
    """Whether a tree holds the state of a transformation that communicates."""
    return any(map(communicates, jax.tree.leaves(tree, is_leaf=communicates)))


def check_outermost(tree: Any) -> None:
    """Raise a ValueError for a state in which another transformation of optax skips, or changes, the updates of one that communicates.

    What comes before it in a chain only sees gradients, and masks and hyperparameters leave its update as it is.
    """
    for state in jax.tree.leaves(tree, is_leaf=_changes_mixing):
        if _changes_mixing(state):
            around = _kind(next(filter(_is_optax, state[::-1])) if type(state) is tuple else state)
            within = _kind(next(filter(communicates, jax.tree.leaves(state, is_leaf=communicates))))
            raise ValueError(
                f"a transformation ({around}) around one that communicates ({within}) would also skip or scale what workers exchange; "
                "put it inside, as decentralize(optax.chain(clip, adamw), mixer)"
            )


def _changes_mixing(state: Any) -> bool:
    if type(state) is tuple:  # Of a chain, or a tuple of the caller's own.
        held = [is_communicating(part) for part in state]
        return any(is_optax and any(held[:i]) for i, is_optax in enumerate(map(_is_optax, state)))
    return _is_optax(state) and _kind(state) not in _LEAVE_UPDATES and is_communicating(state)


def _is_optax(state: Any) -> bool:
    return hasattr(state, "_fields") and type(state).__module__.startswith("optax.")


def _kind(state: Any) -> str:
    return type(state).__name__


def transient(*fields: str) -> Callable[[type[T]], type[T]]:
    """Class decorator that marks fields of a NamedTuple as not to be kept for another number of workers: `@transient("mixer")`.

    Raises:
        ValueError: if the class has no such field.
    """

    def mark(kind):
        if unknown := set(fields) - set(kind._fields):
            raise ValueError(f"{kind.__name__} has no field {min(unknown)!r}; it has {', '.join(kind._fields)}")
        _FIELDS[kind] = frozenset(fields)
        return kind

    return mark


def lasting(state: Any) -> Any:
    """An optimizer state without its `transient` fields; a tuple that had some becomes a dict of its other fields."""
    if not isinstance(state, tuple):
        return state
    if not hasattr(state, "_fields"):
        return tuple(map(lasting, state))
    named: Any = state
    marked = _FIELDS.get(type(state), frozenset())
    kept = {name: lasting(part) for name, part in named._asdict().items() if name not in marked}
    return kept if marked else type(state)(**kept)


def completed(lasting_part: Any, fresh: Any) -> Any:
    """The whole state again, from `lasting(state)` and, for the fields that it lacks, a freshly initialized state."""
    if isinstance(lasting_part, dict) and hasattr(fresh, "_fields"):
        return fresh._replace(**{name: completed(part, getattr(fresh, name)) for name, part in lasting_part.items()})
    if not isinstance(lasting_part, tuple):
        return lasting_part
    parts = tuple(map(completed, lasting_part, fresh))
    return type(lasting_part)(*parts) if hasattr(lasting_part, "_fields") else parts


def init_memory(init: Callable[[Any], Any], params: Any) -> Any:
    """`init(params)`, the state of a mixer or reducer; 0, or () for no state, when `optax.tree.map_params` calls.

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


@functools.cache
def _placeholder() -> type:
    """The type of the placeholder that `optax.tree.map_params` passes to `init`; optax does not export it."""
    seen = []
    optax.tree.map_params(lambda params: seen.append(type(params)) or (), lambda x: x, ())
    return seen[0]
