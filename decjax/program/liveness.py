"""The peak memory of a program without its arguments, estimated from its jaxpr as a compiler would reserve it.

Equations run in the order of the jaxpr. A result is in memory from its equation to its last use, unless it is fused: results of
elementwise operations whose users are all elementwise or reductions are recomputed by these users, which keep its inputs alive
instead. An elementwise operation may write to the memory of an input that it is the last to use, and a loop to that of its carry. A
loop holds its stacked results from its start, and in addition what one iteration needs.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from decjax.program.jaxpr import COLLECTIVES, num_bytes

LOOPS = {"scan", "while", "cond"}
WRITTEN = LOOPS | COLLECTIVES | {"dot_general", "conv_general_dilated", "gather", "sort", "top_k", "cumsum"}
WRITTEN |= {"fft", "qr", "eigh", "svd", "cholesky", "triangular_solve", "random_bits", "threefry2x32"}
ONCE = {
    "exp",
    "exp2",
    "log",
    "log1p",
    "expm1",
    "tanh",
    "logistic",
    "sin",
    "cos",
    "pow",
    "div",
    "sqrt",
    "rsqrt",
    "erf",
}  # not recomputed

Bytes = Callable[[core.Var], float]
Value = Any  # an argument, a `_Result`, or None for a literal


class _Result:
    """A variable in one call of a program: programs that are called twice have equal variables in both calls."""

    def __init__(self, variable: core.Var):
        self.aval = variable.aval


class _Equation(NamedTuple):
    name: str
    inputs: list[Value]
    results: list[Value]
    params: dict[str, Any]


def peak_bytes(
    program: core.Jaxpr,
    kept: Bytes = num_bytes,
    num_inputs: int | None = None,
    num_results: int | None = None,
    num_constants: int | None = None,
) -> float:
    """Return the peak memory of a program in bytes, without its arguments.

    Args:
        program: the jaxpr.
        kept: the bytes that a device keeps of a variable. It has the others, too, while an operation that is not elementwise takes
            or makes the variable.
        num_inputs: arguments in memory; the others are slices of larger arrays, as in a loop. None: all.
        num_results: results that need memory of their own; the others are written to arrays that exist. None: all.
        num_constants: of a loop's body: arguments that are the same in all iterations. What follows from them alone is computed
            once, before the loop. None: not a loop.
    """
    equations, results = _flat(program)
    hoisted: set[Value] = set()
    if num_constants is not None:
        equations, hoisted = _without_constants(equations, program.invars[:num_constants])
    ends, slices = set(results[:num_results]), set() if num_inputs is None else set(program.invars[num_inputs:])
    stored = _stored(equations, ends, slices)
    sources = {None: set()} | {value: {value} & stored for value in slices}
    read = lambda values: set().union(*(sources.get(value, {value}) for value in values))
    for equation in equations:
        sources |= {value: {value} if value in stored else read(equation.inputs) for value in equation.results}
    wanted = stored.union(results)
    runs = [equation for equation in equations if not wanted.isdisjoint(equation.results)]
    first: dict[Value, int] = {}
    last: dict[Value, int] = dict.fromkeys(ends, len(runs))
    for time, equation in enumerate(runs):
        for value in read(equation.inputs):
            first.setdefault(value, time)
            last[value] = max(last.get(value, 0), time)
    live: dict[Value, float] = {}
    peak = 0.0
    for time, equation in enumerate(runs):
        inputs = read(equation.inputs)
        live |= {value: kept(value) for value in inputs & slices if first[value] == time}
        overwritten = inputs if _reads_fused(equation.name) else read(_overwritten(equation))
        live = {value: size for value, size in live.items() if value not in overwritten or last[value] > time}
        made = stored.intersection(equation.results)
        live |= {value: kept(value) for value in made}
        is_whole = not _reads_fused(equation.name) and equation.name not in LOOPS
        others = sum(num_bytes(value) - kept(value) for value in made | inputs) if is_whole else 0.0
        peak = max(peak, sum(live.values()) + others + _inner(equation, kept))
        live = {value: size for value, size in live.items() if last.get(value, time) > time}
    return peak + sum(map(kept, hoisted))


def _flat(program: core.Jaxpr) -> tuple[list[_Equation], list[Value]]:
    """Return the equations of a program and of those that it calls, and its results."""
    equations: list[_Equation] = []

    def call(body: core.Jaxpr, arguments: Sequence[Value]) -> list[Value]:
        values: dict[Any, Value] = dict(zip(body.invars, arguments, strict=True))
        look_up = lambda atoms: [None if isinstance(atom, core.Literal) else values.get(atom, atom) for atom in atoms]
        for equation in body.eqns:
            name, inputs, inner = equation.primitive.name, look_up(equation.invars), list(core.jaxprs_in_params(equation.params))
            if name not in LOOPS and len(inner) == 1 and len(inner[0].invars) == len(inputs):
                made = call(inner[0], inputs)
            else:
                made = [_Result(variable) for variable in equation.outvars]
                equations.append(_Equation(name, inputs, made, equation.params))
            values |= zip(equation.outvars, made, strict=True)
        return look_up(body.outvars)

    return equations, call(program, program.invars)


def _stored(equations: list[_Equation], ends: set[Value], slices: set[Value]) -> set[Value]:
    """Return the values that are written to memory; the others are recomputed wherever they are used."""
    makers = {value: equation.name for equation in equations for value in equation.results}
    users = collections.defaultdict(list)
    for equation in equations:
        for value in equation.inputs:
            users[value].append(equation.name)
    stored = set(ends)
    for value in (*slices, *makers):
        name, used_by = makers.get(value, ""), users[value]
        if not _elementwise(name) or not all(map(_reads_fused, used_by)) or (len(used_by) > 1 and name in ONCE):
            stored.add(value)
    return stored


def _without_constants(equations: list[_Equation], constants: Sequence[Value]) -> tuple[list[_Equation], set[Value]]:
    """Return the equations that a loop repeats, and what they use of those that depend on nothing but `constants`."""
    constant, varying = {None, *constants}, []
    for equation in equations:
        if constant.issuperset(equation.inputs):
            constant.update(equation.results)
        else:
            varying.append(equation)
    return varying, {value for equation in varying for value in equation.inputs if value in constant} - {None, *constants}


def _overwritten(equation: _Equation) -> list[Value]:
    """Return the inputs of an operation whose memory may become that of its results."""
    if _updates(equation.name):
        return equation.inputs[:1]
    if equation.name == "scan":
        start = equation.params["num_consts"]
        return equation.inputs[start : start + equation.params["num_carry"]]
    return equation.inputs[-len(equation.results) :] if equation.name == "while" else []


def _inner(equation: _Equation, kept: Bytes) -> float:
    """Return what an iteration of a loop, or a branch, needs."""
    params = equation.params
    if equation.name == "scan":
        consts, carry = params["num_consts"], params["num_carry"]
        return peak_bytes(params["jaxpr"].jaxpr, kept, consts + carry, carry, consts)
    if equation.name == "while":
        return peak_bytes(params["body_jaxpr"].jaxpr, kept)
    return max((peak_bytes(branch.jaxpr, kept) for branch in params["branches"]), default=0.0) if equation.name == "cond" else 0.0


def _reduces(name: str) -> bool:
    return name.startswith(("reduce_", "arg")) and name != "reduce_precision"


def _reads_fused(name: str) -> bool:
    """Whether an operation can read what elementwise ones compute without memory for it."""
    return name not in WRITTEN and not _updates(name)


def _updates(name: str) -> bool:
    return name.startswith("scatter") or name == "dynamic_update_slice"


def _elementwise(name: str) -> bool:
    return _reads_fused(name) and not _reduces(name)
