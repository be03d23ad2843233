"""A worker's function, split at its messages: the pieces between them are compiled for this process's devices, and the messages go
through a `Stream`.

Compiled pieces are cached by their program text. After a change of the membership the functions are traced again, and only pieces that
have changed are compiled.
"""

from collections.abc import Callable, Sequence
import contextvars
from typing import Any, NamedTuple

import jax
from jax.extend import core
import numpy as np

from decjax import jaxprs
from decjax.elastic import collectives
from decjax.mesh import order
from decjax.mesh.axis import Axis

NAME = "member"
_index: contextvars.ContextVar[Any] = contextvars.ContextVar("index")


class MemberAxis(Axis):
    """The worker axis of a function that is traced for one member; its index is an argument of the program."""

    @property
    def index(self) -> jax.Array:
        return _index.get()

    def indexed(self, fn: Callable) -> Callable:
        def with_index(index, *args):
            token = _index.set(index)
            try:
                return fn(*args)
            finally:
                _index.reset(token)

        return with_index

    @property
    def _simulated(self) -> bool:
        return False


MEMBERS = MemberAxis(NAME)


class Segment(NamedTuple):
    """Equations between two layers of messages, and the second layer."""

    equations: list[Any]
    messages: list[Any]


class Program:
    """A function of one worker, compiled as a program of this member.

    Args:
        fn: of one worker, with collectives along `MEMBERS`.
        size: the number of workers.
        compiled: compiled pieces by their text, to which new ones are added.
        like: arrays or shapes of the arguments.

    Raises:
        ValueError: if a loop or a branch contains messages.
    """

    def __init__(self, fn: Callable, size: int, compiled: dict[str, Any], *like: Any):
        traced = jax.make_jaxpr(MEMBERS.indexed(fn), axis_env=[(NAME, size)], return_shape=True)
        closed, self.out_info = traced(jax.ShapeDtypeStruct((), np.int32), *like)
        _check(closed.jaxpr)
        self._inputs, self._outputs = closed.jaxpr.invars, closed.jaxpr.outvars
        self._tree = jax.tree.structure(self.out_info)
        segments = _segments(closed.jaxpr)
        self._steps = [self._compile(closed, k, segments, compiled) for k in range(len(segments))]
        self._messages = [segment.messages for segment in segments]

    @property
    def num_messages(self) -> int:
        return sum(map(len, self._messages))

    def _compile(self, closed, k, segments, compiled) -> tuple[Any, list, list]:
        """Compile the equations of segment k; return (program, its input variables, its output variables)."""
        equations = segments[k].equations
        results = {variable for equation in equations for variable in equation.outvars}
        later = [*segments[k].messages, *(e for segment in segments[k + 1 :] for e in (*segment.equations, *segment.messages))]
        used = [atom for equation in later for atom in equation.invars] + list(self._outputs)
        outputs = [v for v in dict.fromkeys(_variables(used)) if v in results]
        needed = dict.fromkeys(v for equation in equations for v in _variables(equation.invars) if v not in results)
        consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        inputs = [v for v in needed if v not in consts]
        constvars = [v for v in needed if v in consts]
        program = closed.jaxpr.replace(constvars=constvars, invars=inputs, eqns=equations, outvars=outputs)
        piece = jaxprs.close(program, [consts[v] for v in constvars])
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs]
        lowered = jax.jit(core.jaxpr_as_fun(piece)).lower(*shapes)
        text = lowered.as_text()
        if text not in compiled:
            compiled[text] = lowered.compile()
        return compiled[text], inputs, outputs

    def __call__(self, channel: collectives.Stream | None, index: int, *args: Any) -> Any:
        """Return the function's result on worker `index`, whose messages go through `channel`."""
        values: dict[Any, Any] = dict(zip(self._inputs, [np.int32(index), *jax.tree.leaves(args)], strict=True))

        def value(atom):
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for (run, inputs, outputs), messages in zip(self._steps, self._messages, strict=True):
            values |= dict(zip(outputs, run(*(values[v] for v in inputs)), strict=True))
            for equation in messages:
                assert channel is not None
                results = collectives.run(channel, equation.primitive.name, equation.params, *map(value, equation.invars))
                values |= dict(zip(equation.outvars, map(jax.device_put, results), strict=True))
        return jax.tree.unflatten(self._tree, [value(atom) for atom in self._outputs])


def _check(program: Any) -> None:
    for equation in program.eqns:
        if equation.primitive.name not in collectives.COLLECTIVES and order.communicates(equation):
            raise ValueError(
                f"a {equation.primitive.name} of this method contains messages, so it cannot be split at them; run it without --elastic"
            )


def _segments(program: Any) -> list[Segment]:
    """The equations, grouped by the number of layers of messages that they depend on."""
    layer: dict[Any, int] = {}
    segments: list[Segment] = [Segment([], [])]
    for equation in _used(program):
        at = max((layer.get(v, 0) for v in _variables(equation.invars)), default=0)
        is_message = equation.primitive.name in collectives.COLLECTIVES
        while len(segments) <= at + is_message:
            segments.append(Segment([], []))
        (segments[at].messages if is_message else segments[at].equations).append(equation)
        layer |= dict.fromkeys(equation.outvars, at + is_message)
    return segments


def _used(program: Any) -> list[Any]:
    """The equations that the outputs depend on."""
    needed, used = set(_variables(program.outvars)), []
    for equation in reversed(program.eqns):
        if needed.intersection(equation.outvars):
            needed.update(_variables(equation.invars))
            used.append(equation)
    return used[::-1]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]
