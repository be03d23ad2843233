"""Slices of a traced program, and its interpretation equation by equation.

An exchange is split into parts that share no computation, such as its buckets, and each part into encoding, sending and decoding, so
that links are busy with one part while others are encoded and decoded. The update that uses what arrives is split into what needs no
message, which is computed meanwhile, and what each part completes when it arrives. In decentralized Adam, for example, the moments
and the direction need no message; the mixing and the weight decay of a parameter need the message with that parameter.

Slices follow the data flow, so they work for any method; where every result depends on every message there is a single part. A function
is that of one worker. It is traced inside a mapped function, where axis names are defined, and its slices are called inside one.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
import contextlib
import math
from typing import NamedTuple

import jax
from jax.core import ShapedArray, eval_jaxpr
from jax.extend import core
import jax.numpy as jnp

from decjax.typing import PyTree

Run = Callable[..., list[jax.Array]]  # a slice, from `piece`
Parts = tuple[tuple[int, ...], ...]
Apply = Callable[[core.JaxprEqn, list[jax.Array]], Sequence[jax.Array]]

HOPS = {"psum": 1.0, "ppermute": 0.0, "all_gather": 0.5, "all_to_all": 0.5, "reduce_scatter": 0.5}  # collective -> hops ÷ a sum's
COLLECTIVES = frozenset((*HOPS, "pmax", "pmin", "pbroadcast", "ragged_all_to_all"))


class Traced(NamedTuple):
    """A traced function: its program, the values of the program's constants, and the shapes of its result."""

    program: core.Jaxpr
    consts: Sequence[jax.Array]
    result: PyTree


def trace(fn: Callable, *args: PyTree, axes: Sequence[tuple[Hashable, int]] = ()) -> Traced:
    """Trace `fn(*args)`, whose arguments are arrays or shapes, with (name, size) of axes that are not defined around it."""
    closed, result = jax.make_jaxpr(fn, axis_env=axes, return_shape=True)(*args)
    return Traced(closed.jaxpr, closed.consts, result)


def shape(variable: core.Var) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a variable."""
    assert isinstance(variable.aval, ShapedArray)
    return jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)


def variables(atoms: Iterable[core.Var | core.Literal]) -> list[core.Var]:
    """Return the atoms that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def needed(equations: Iterable[core.JaxprEqn], outvars: Iterable[core.Var | core.Literal]) -> list[core.Var]:
    """Return the variables of which these equations and results are made, each once, in order of first use."""
    return list(dict.fromkeys(variables([*(atom for equation in equations for atom in equation.invars), *outvars])))


def results(equations: Iterable[core.JaxprEqn]) -> set[core.Var]:
    """Return the variables that these equations compute."""
    return {variable for equation in equations for variable in equation.outvars}


def passed(equations: Iterable[core.JaxprEqn], later: Iterable[core.JaxprEqn], outvars: Iterable) -> list[core.Var]:
    """Return the results of equations that later ones need, or that are among the program's results."""
    computed = results(equations)
    return [variable for variable in needed(later, outvars) if variable in computed]


def behind(program: core.Jaxpr, atoms: Iterable) -> list[int]:
    """Return the positions of all equations from which these values are computed."""
    wanted, found = set(variables(atoms)), []
    for index in reversed(range(len(program.eqns))):
        if wanted.intersection(program.eqns[index].outvars):
            wanted.update(variables(program.eqns[index].invars))
            found.append(index)
    return found[::-1]


def piece(traced: Traced, invars: Sequence[core.Var], equations: Sequence[core.JaxprEqn], outvars: Sequence) -> Run:
    """Return a function of pytrees, whose leaves are `invars`, that computes `outvars` by these equations.

    It holds only the constants that they need, so that equal pieces compile to equal programs.
    """
    free = set(needed(equations, outvars)).difference(invars)
    consts = {v: const for v, const in zip(traced.program.constvars, traced.consts, strict=True) if v in free}
    program = traced.program.replace(constvars=list(consts), invars=invars, eqns=equations, outvars=outvars)

    def run(*args):
        with jax.debug_nans(False):  # As `jaxpr_as_fun` does: some of JAX's own operations pass through NaN.
            return eval_jaxpr(program, list(consts.values()), *jax.tree.leaves(args))

    return run


def flops(program: core.Jaxpr) -> float:
    """Return the floating-point operations of matrix products and convolutions: two for each product of two numbers.

    The body of a loop of unknown length counts once, and of a conditional the most expensive branch.
    """
    return float(sum(map(_flops, program.eqns)))


def _flops(eqn: core.JaxprEqn) -> float:
    name, params = eqn.primitive.name, eqn.params
    inner = [flops(program) for program in core.jaxprs_in_params(params)]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left, _ = map(shape, variables(eqn.invars))
        return 2 * shape(eqn.outvars[0]).size * math.prod(left.shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        _, kernel = map(shape, variables(eqn.invars))
        return 2 * shape(eqn.outvars[0]).size * kernel.size / kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    return max(inner, default=0.0) if name == "cond" else params.get("length", 1) * sum(inner)


def received_bytes(program: core.Jaxpr) -> float:
    """Return the bytes that the collectives of a program receive; of a conditional, those of the branch with most."""
    total = 0.0
    for eqn in program.eqns:
        inner = [received_bytes(body) for body in core.jaxprs_in_params(eqn.params)]
        is_message = eqn.primitive.name in COLLECTIVES
        total += sum(map(num_bytes, eqn.outvars)) if is_message else max(inner, default=0.0)
    return total


def num_bytes(variable: core.Var) -> float:
    """Return the bytes of a variable."""
    return float(shape(variable).size * shape(variable).dtype.itemsize)


# -- Interpretation ---------------------------------------------------------------------------------------------------


class Values(dict[core.Var, PyTree]):
    """Values of the variables of a program: arrays or numbers."""

    def read(self, atoms: Iterable) -> list[jax.Array]:
        """Return the values of variables and literals."""
        return [atom.val if isinstance(atom, core.Literal) else self[atom] for atom in atoms]


def bind(eqn: core.JaxprEqn, args: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Compute an equation."""
    results = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


def interpret(program: core.Jaxpr, consts: Sequence[jax.Array], args: Sequence[jax.Array], apply: Apply) -> list[jax.Array]:
    """Return a program's results, computing `apply(equation, its arguments)` instead of each equation, under its name scope."""
    values = Values(zip((*program.constvars, *program.invars), (*consts, *args), strict=True))
    for eqn in program.eqns:
        scope = str(eqn.source_info.name_stack)
        with jax.named_scope(scope) if scope else contextlib.nullcontext(), eqn.ctx.manager:
            values.update(zip(eqn.outvars, apply(eqn, values.read(eqn.invars)), strict=True))
    return values.read(program.outvars)


# -- Messages ---------------------------------------------------------------------------------------------------------


def communicates(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is a collective, or has one in a program within it."""
    inner = (eqn for body in core.jaxprs_in_params(eqn.params) for eqn in body.eqns)
    return eqn.primitive.name in COLLECTIVES or any(map(communicates, inner))


def silent(fn: Callable, index: Callable[[], jax.Array], sums: list[float] | None = None) -> Callable:
    """Return a worker's function without its messages, to time what the worker computes; its results have no meaning.

    Each collective is replaced by its own input, in the shape of its result. Collectives in branches and loops are not replaced.

    Args:
        fn: to be called inside a mapped function, where axis names are defined.
        index: returns the worker's index.
        sums: a list to which, when the function is traced, the number of hops of every collective ÷ that of a sum is appended.
    """

    def run(*args):
        traced = trace(fn, *args)
        # A zero that the compiler cannot see; otherwise it would see that what arrives is what was sent, and decode it only once.
        zero = index() >> 20

        def apply(eqn, given):
            if (hops := HOPS.get(eqn.primitive.name)) is None:
                return bind(eqn, given)
            if sums is not None:
                sums.append(hops)
            return [_echo(x, shape(variable).shape, zero) for x, variable in zip(given, eqn.outvars, strict=True)]

        return jax.tree.unflatten(
            jax.tree.structure(traced.result), interpret(traced.program, traced.consts, jax.tree.leaves(args), apply)
        )

    return run


def _echo(x: jax.Array, shape: tuple[int, ...], zero: jax.Array) -> jax.Array:
    """Return `x` repeated to a shape, in rows that the compiler cannot see to be equal; otherwise it would decode only one."""
    if shape == x.shape:
        return x + zero.astype(x.dtype)
    return jnp.resize(x, shape) + zero.astype(x.dtype) * jax.lax.broadcasted_iota(x.dtype, shape, 0)


def parts(exchange: Traced, most: int) -> Parts:
    """Group the leaves of an exchange's result into parts of about equal bytes whose computations have no equation in common.

    Args:
        exchange: from `trace`.
        most: the maximum number of parts.

    Returns:
        Positions in the flattened result, each in exactly one part; one empty part if there is no result.
    """
    program, num_bytes = exchange.program, [x.size * x.dtype.itemsize for x in jax.tree.leaves(exchange.result)]
    clusters: list[tuple[set[int], list[int]]] = []  # (equations, leaves)
    for leaf, atom in enumerate(program.outvars):
        equations, leaves = set(behind(program, [atom])), [leaf]
        for cluster in [cluster for cluster in clusters if cluster[0] & equations]:
            clusters.remove(cluster)
            equations, leaves = equations | cluster[0], leaves + cluster[1]
        clusters.append((equations, leaves))
    grouped, goal, filled = [[] for _ in range(most)], max(1, sum(num_bytes)) / most, 0
    for leaves in sorted(sorted(leaves) for _, leaves in clusters):
        size = sum(num_bytes[leaf] for leaf in leaves)
        grouped[min(most - 1, int((filled + size / 2) / goal))] += leaves
        filled += size
    return tuple(tuple(leaves) for leaves in grouped if leaves) or ((),)


def only(exchange: Traced, leaves: Iterable[int]) -> Traced:
    """Return the program that computes these leaves of the flattened result, as a list."""
    shapes, outvars = jax.tree.leaves(exchange.result), exchange.program.outvars
    program = exchange.program.replace(outvars=[outvars[leaf] for leaf in leaves])
    return exchange._replace(program=program, result=[shapes[leaf] for leaf in leaves])


class CutExchange(NamedTuple):
    """An exchange, cut at its messages; `args` are all of its arguments.

    Attributes:
        encode: args -> what is computed before the first message, as far as the other two need it.
        travel: (args, encoded) -> what arrives; it computes only what a later message needs.
        decode: (args, encoded, arrived) -> the flattened result.
    """

    encode: Run
    travel: Run
    decode: Run


def cut_at_messages(exchange: Traced) -> CutExchange:
    """Return the functions that compute, one after the other, what the exchange does."""
    program = exchange.program
    used = behind(program, program.outvars)
    messages = {index for index in used if communicates(program.eqns[index])}
    for_messages = set(behind(program, results(program.eqns[index] for index in messages)))
    waiting: set[core.Var] = set()
    before, between, after = [], [], []
    for index in used:
        equation = program.eqns[index]
        waits = index in messages or not waiting.isdisjoint(variables(equation.invars))
        waiting.update(equation.outvars if waits else ())
        (between if waits and index in for_messages else after if waits else before).append(equation)
    coded, arriving = passed(before, [*between, *after], program.outvars), passed(between, after, program.outvars)
    return CutExchange(
        piece(exchange, program.invars, before, coded),
        piece(exchange, [*program.invars, *coded], between, arriving),
        piece(exchange, [*program.invars, *coded, *arriving], after, program.outvars),
    )


def divide(update: Traced, num_known: int, cut: Parts) -> tuple[Callable, list[Callable]]:
    """Divide `update(known, received)` by the last part of `received` on which its values depend.

    Args:
        update: combines what is known with what is received.
        num_known: leaves of `known`.
        cut: the parts of `received`, from `parts`.

    Returns:
        (prepare, completions). `prepare(known)` computes what needs no part, and returns for each part the values that its completion
        needs. The completion of a part takes (known, these values, *arrived parts, this one the last) and computes the leaves of the
        update that are then complete, as a dict from positions in the flattened result; the first has those that need no part.
    """
    program = update.program
    known, arriving = program.invars[:num_known], program.invars[num_known:]
    waits_for = {arriving[leaf]: number for number, leaves in enumerate(cut, 1) for leaf in leaves}
    for equation in program.eqns:
        if latest := max((waits_for.get(variable, 0) for variable in variables(equation.invars)), default=0):
            waits_for |= dict.fromkeys(equation.outvars, latest)
    is_late = [any(variable in waits_for for variable in equation.outvars) for equation in program.eqns]
    early = [equation for equation, late in zip(program.eqns, is_late) if not late]
    completed_by = [max((1, *(waits_for.get(variable, 0) for variable in variables([atom])))) for atom in program.outvars]
    completions, prepared = [], []
    for number in range(1, len(cut) + 1):
        leaves = [leaf for leaf, completed in enumerate(completed_by) if completed == number]
        atoms = [program.outvars[leaf] for leaf in leaves]
        late = [program.eqns[index] for index in behind(program, atoms) if is_late[index]]
        prepared.append(passed(early, late, atoms))
        arrived = [arriving[leaf] for part in cut[:number] for leaf in part]
        run = piece(update, [*known, *prepared[-1], *arrived], late, atoms)
        completions.append(lambda *args, leaves=leaves, run=run: dict(zip(leaves, run(*args), strict=True)))
    run = piece(update, known, early, [variable for variables in prepared for variable in variables])

    def prepare(known):
        values = iter(run(known))
        return [[next(values) for _ in variables] for variables in prepared]

    return prepare, completions
