"""Splits a program at the points where it waits for messages, so that all else is computed while they are sent.

An exchange is split into parts that share no computation, such as its buckets, and each part into encoding, sending and decoding, so
that links are busy with one part while others are encoded and decoded. The update that uses what they bring is split into what needs
none of them, computed meanwhile, and what each part completes when it arrives. In decentralized Adam's update the moments and the
direction need no message; the mixing and the weight decay of a parameter need the message with that parameter.

The split follows the data flow of the traced program, so it works for any method; where every result depends on every message there
is a single part. The functions are those of one worker. They are traced once, inside a mapped function, where axis names are defined,
and what is cut out of them is to be called inside one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend

from decjax import jaxprs
from decjax.mesh import order

Parts = tuple[tuple[int, ...], ...]


class Traced(NamedTuple):
    """A traced function: its program, and the shapes of its result."""

    closed: Any
    result: Any

    @property
    def program(self) -> Any:
        return self.closed.jaxpr


def trace(fn: Callable, *args: Any) -> Traced:
    """The program of `fn(*args)`, whose arguments are arrays or shapes."""
    return Traced(*jax.make_jaxpr(fn, return_shape=True)(*args))


def parts(exchange: Traced, most: int) -> Parts:
    """Groups the leaves of an exchange's result into parts of about equal bytes whose computations have no equation in common.

    Args:
        exchange: as `trace` gives it.
        most: how many parts at most.

    Returns:
        Positions in the flattened result, each in exactly one part; one empty part if there is no result.
    """
    program = exchange.program
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


def only(exchange: Traced, leaves: Iterable[int]) -> Traced:
    """The program that computes these leaves of the flattened result, as a list."""
    chosen, outvars = jax.tree.leaves(exchange.result), exchange.program.outvars
    program = exchange.program.replace(outvars=[outvars[leaf] for leaf in leaves])
    return Traced(jaxprs.close(program, exchange.closed.consts), [chosen[leaf] for leaf in leaves])


class CutExchange(NamedTuple):
    """An exchange, cut at its messages; `args` are all of its arguments.

    Attributes:
        encode: args -> what is computed before the first message, as far as the other two need it.
        travel: (args, encoded) -> what arrives; it computes only what a later message needs.
        decode: (args, encoded, arrived) -> the flattened result.
    """

    encode: Callable
    travel: Callable
    decode: Callable


def cut_at_messages(exchange: Traced) -> CutExchange:
    """The functions that compute, one after the other, what the exchange does."""
    closed, program = exchange.closed, exchange.program
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
    coded, heard = _passed(before, [*between, *after], program.outvars), _passed(between, after, program.outvars)
    encode = _program(closed, program.invars, before, coded)
    travel = _program(closed, [*program.invars, *coded], between, heard)
    decode = _program(closed, [*program.invars, *coded, *heard], after, program.outvars)
    return CutExchange(
        lambda args: encode(*jax.tree.leaves(args)),
        lambda args, encoded: travel(*jax.tree.leaves(args), *encoded),
        lambda args, encoded, arrived: decode(*jax.tree.leaves(args), *encoded, *arrived),
    )


def _passed(equations, later, outvars) -> list:
    """The results of equations that later ones use, or that are results of the program."""
    computed = {variable for equation in equations for variable in equation.outvars}
    wanted = _variables([*(atom for equation in later for atom in equation.invars), *outvars])
    return [variable for variable in dict.fromkeys(wanted) if variable in computed]


def divide(update: Traced, num_known: int, cut: Parts) -> tuple[Callable, list[Callable]]:
    """Divides `update(known, received)` by the last part of `received` that its values depend on.

    Args:
        update: combines what is known with what is received.
        num_known: leaves of `known`.
        cut: the parts of `received`, from `parts`.

    Returns:
        (prepare, completions). `prepare(known)` computes what needs no part, and gives for each part the values that its completion
        needs. The completion of a part, given (known, these values, *arrived parts, this one the last), computes the leaves of the
        update that can then be computed, as a dict from positions in the flattened result; the first has those that need no part.
    """
    closed, program = update.closed, update.program
    given, arriving = program.invars[:num_known], program.invars[num_known:]
    waits_for = {arriving[leaf]: number for number, leaves in enumerate(cut, 1) for leaf in leaves}
    for equation in program.eqns:
        if latest := max((waits_for.get(variable, 0) for variable in _variables(equation.invars)), default=0):
            waits_for |= dict.fromkeys(equation.outvars, latest)
    is_late = [any(variable in waits_for for variable in equation.outvars) for equation in program.eqns]
    early = [equation for equation, late in zip(program.eqns, is_late) if not late]
    computed = {variable for equation in early for variable in equation.outvars}
    completed_by = [max(1, waits_for.get(atom, 0)) if _variables([atom]) else 1 for atom in program.outvars]
    completions, prepared = [], []
    for number in range(1, len(cut) + 1):
        leaves = [leaf for leaf, completed in enumerate(completed_by) if completed == number]
        atoms = [program.outvars[leaf] for leaf in leaves]
        late = [program.eqns[index] for index in _behind(program, atoms) if is_late[index]]
        needed = _variables([*atoms, *(atom for equation in late for atom in equation.invars)])
        prepared.append([variable for variable in dict.fromkeys(needed) if variable in computed])
        here = [arriving[leaf] for part in cut[:number] for leaf in part]
        completions.append(_completion(leaves, _program(closed, [*given, *here, *prepared[-1]], late, atoms)))
    run = _program(closed, given, early, [variable for variables in prepared for variable in variables])

    def prepare(known):
        values = iter(run(*jax.tree.leaves(known)))
        return [[next(values) for _ in variables] for variables in prepared]

    return prepare, completions


def _completion(leaves: Sequence[int], run: Callable) -> Callable:
    return lambda known, prepared, *arrived: dict(zip(leaves, run(*jax.tree.leaves((known, arrived)), *prepared), strict=True))


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
    return jax.extend.core.jaxpr_as_fun(jaxprs.close(program, closed.consts))


def _variables(atoms) -> list:
    return [atom for atom in atoms if not isinstance(atom, jax.extend.core.Literal)]
