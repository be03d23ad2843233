"""Splits a program at the points where it waits for messages, so that all else is computed while they are sent.

An exchange is split into parts that share no computation, such as its buckets, and each part into encoding, sending and decoding, so
that links are busy with one part while others are encoded and decoded. The update that uses what they bring is split into what needs
none of them, computed meanwhile, and what each part completes when it arrives. In decentralized Adam's update the moments and the
direction need no message; the mixing and the weight decay of a parameter need the message with that parameter.

The split follows the data flow of the traced program, so it works for any method; where every result depends on every message there
is a single part. The functions are those of one worker, and are traced inside a mapped function, where axis names are defined.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend

from decjax.mesh import order

Parts = tuple[tuple[int, ...], ...]


def parts(fn: Callable, *args: Any, most: int) -> Parts:
    """Groups the leaves of `fn(*args)` into parts of about equal bytes whose computations have no equation in common.

    Args:
        fn: the exchange.
        *args: its arguments, arrays or shapes.
        most: how many parts at most.

    Returns:
        Positions in the flattened result, each in exactly one part; one empty part if there is no result.
    """
    program = jax.make_jaxpr(fn)(*args).jaxpr
    clusters: list[tuple[set[int], list[int]]] = []  # (equations, leaves)
    for leaf, atom in enumerate(program.outvars):
        equations, leaves = set(_behind(program, [atom])), [leaf]
        for cluster in [cluster for cluster in clusters if cluster[0] & equations]:
            clusters.remove(cluster)
            equations, leaves = equations | cluster[0], leaves + cluster[1]
        clusters.append((equations, leaves))
    num_bytes = [atom.aval.size * atom.aval.dtype.itemsize for atom in program.outvars]
    found, goal, filled = [[] for _ in range(most)], max(1, sum(num_bytes)) / most, 0
    for leaves in sorted(sorted(leaves) for _, leaves in clusters):
        own = sum(num_bytes[leaf] for leaf in leaves)
        found[min(most - 1, int((filled + own / 2) / goal))] += leaves
        filled += own
    return tuple(tuple(leaves) for leaves in found if leaves) or ((),)


def only(fn: Callable, leaves: Iterable[int]) -> Callable:
    """A function that computes only these leaves of `fn`'s flattened result."""

    def chosen(*args):
        found = jax.tree.leaves(fn(*args))
        return [found[leaf] for leaf in leaves]

    return chosen


def encode(fn: Callable, *args: Any) -> list[jax.Array]:
    """The values that `fn(*args)` computes before its first message: those that `travel` and `decode` need."""
    closed, (early, _, _), (sent, _) = _cut_at_messages(fn, args)
    return _program(closed, closed.jaxpr.invars, early, sent)(*jax.tree.leaves(args))


def travel(fn: Callable, sent: Sequence[jax.Array], *args: Any) -> list[jax.Array]:
    """What arrives by the messages of `fn(*args)`, given the result of `encode`; it computes only what a later message needs."""
    closed, (_, between, _), (coded, arrived) = _cut_at_messages(fn, args)
    return _program(closed, [*closed.jaxpr.invars, *coded], between, arrived)(*jax.tree.leaves(args), *sent)


def decode(fn: Callable, arrived: Sequence[jax.Array], sent: Sequence[jax.Array], *args: Any) -> list[jax.Array]:
    """The flattened result of `fn(*args)`, given the results of `travel` and `encode`."""
    closed, (_, _, late), (coded, heard) = _cut_at_messages(fn, args)
    run = _program(closed, [*closed.jaxpr.invars, *coded, *heard], late, closed.jaxpr.outvars)
    return run(*jax.tree.leaves(args), *sent, *arrived)


def _cut_at_messages(fn, args):
    """(traced `fn`, its equations before, with and after the messages, the results of the first two that later ones use)."""
    closed = jax.make_jaxpr(fn)(*args)
    program = closed.jaxpr
    used = _behind(program, program.outvars)
    messages = [index for index in used if order.communicates(program.eqns[index])]
    for_messages = set(_behind(program, [variable for index in messages for variable in program.eqns[index].outvars]))
    waiting: set[Any] = set()
    before, between, after = [], [], []
    for index in used:
        equation = program.eqns[index]
        waits = index in messages or not waiting.isdisjoint(_variables(equation.invars))
        waiting.update(equation.outvars if waits else ())
        (between if waits and index in for_messages else after if waits else before).append(equation)
    passed = _passed(before, [*between, *after], program.outvars), _passed(between, after, program.outvars)
    return closed, (before, between, after), passed


def _passed(equations, later, outvars) -> list:
    """The results of equations that later ones use, or that are results of the program."""
    computed = {variable for equation in equations for variable in equation.outvars}
    wanted = _variables([*(atom for equation in later for atom in equation.invars), *outvars])
    return [variable for variable in dict.fromkeys(wanted) if variable in computed]


def before(fn: Callable, known: Any, received: Any, cut: Parts) -> list[list[jax.Array]]:
    """The values of `fn(known, received)` that can be computed from `known` alone: for every part those that `after` needs.

    Args:
        fn: combines what is known with what is received.
        known: arrays.
        received: shapes and dtypes of what is received.
        cut: the parts of `received`, from `parts`.
    """
    closed, given, _, early, finals = _divide(fn, known, received, cut)
    run = _program(closed, given, early, [variable for _, _, prepared in finals for variable in prepared])
    values = iter(run(*jax.tree.leaves(known)))
    return [[next(values) for _ in prepared] for _, _, prepared in finals]


def after(
    fn: Callable, known: Any, prepared: Sequence[jax.Array], arrived: Sequence[Sequence[jax.Array]], received: Any, cut: Parts
) -> dict[int, jax.Array]:
    """The leaves of `fn(known, received)` that can be computed once a further part has arrived.

    Args:
        fn, known, received, cut: as in `before`.
        prepared: the result of `before` for this part.
        arrived: all parts that have arrived, this one the last.

    Returns:
        A dict from positions in the flattened result to leaves. Leaves that need no part come with the first.
    """
    closed, given, arriving, _, finals = _divide(fn, known, received, cut)
    leaves, late, variables = finals[len(arrived) - 1]
    here = [arriving[leaf] for part in cut[: len(arrived)] for leaf in part]
    run = _program(closed, [*given, *here, *variables], late, [closed.jaxpr.outvars[leaf] for leaf in leaves])
    return dict(zip(leaves, run(*jax.tree.leaves((known, arrived)), *prepared), strict=True))


def _divide(fn, known, received, cut):
    """Traces `fn` and sorts its equations by the last part that they depend on.

    Returns:
        (traced `fn`, its variables for `known`, those for `received`, early equations, finals). Early equations need no part;
        finals holds for each part the leaves that it completes, their equations, and the results of early equations that these use.
    """
    closed = jax.make_jaxpr(fn)(known, received)
    program, num_known = closed.jaxpr, len(jax.tree.leaves(known))
    given, arriving = program.invars[:num_known], program.invars[num_known:]
    waits_for = {arriving[leaf]: number for number, leaves in enumerate(cut, 1) for leaf in leaves}
    for equation in program.eqns:
        if latest := max((waits_for.get(variable, 0) for variable in _variables(equation.invars)), default=0):
            waits_for |= dict.fromkeys(equation.outvars, latest)
    is_late = [any(variable in waits_for for variable in equation.outvars) for equation in program.eqns]
    early = [equation for equation, late in zip(program.eqns, is_late) if not late]
    computed = {variable for equation in early for variable in equation.outvars}
    completed_by = [max(1, waits_for.get(atom, 0)) if _variables([atom]) else 1 for atom in program.outvars]
    finals = []
    for number in range(1, len(cut) + 1):
        leaves = [leaf for leaf, completed in enumerate(completed_by) if completed == number]
        atoms = [program.outvars[leaf] for leaf in leaves]
        late = [program.eqns[index] for index in _behind(program, atoms) if is_late[index]]
        needed = _variables([*atoms, *(atom for equation in late for atom in equation.invars)])
        finals.append((leaves, late, [variable for variable in dict.fromkeys(needed) if variable in computed]))
    return closed, given, arriving, early, finals


def _behind(program, atoms) -> list[int]:
    """Positions of all equations from which these values are computed."""
    wanted, found = set(_variables(atoms)), []
    for index in reversed(range(len(program.eqns))):
        if wanted.intersection(program.eqns[index].outvars):
            wanted.update(_variables(program.eqns[index].invars))
            found.append(index)
    return found[::-1]


def _program(closed, invars, equations, outvars) -> Callable:
    program = closed.jaxpr.replace(invars=invars, eqns=equations, outvars=outvars)
    return jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(program, closed.consts))


def _variables(atoms) -> list:
    return [atom for atom in atoms if not isinstance(atom, jax.extend.core.Literal)]
