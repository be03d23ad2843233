"""A worker's function cut at its messages: what is computed between them is compiled for this process's devices alone, and the
messages go through a `Stream`.

Compiled pieces are kept by what they compute. After a change of the membership the functions are traced anew, and a piece that comes
out the same, as most do, is not compiled again.
"""

from collections.abc import Callable, Sequence
import contextvars
from typing import Any, NamedTuple

import jax
from jax.extend import core
import numpy as np

from decjax.elastic import collectives
from decjax.mesh import order
from decjax.mesh.axis import Axis

NAME = "member"
_index: contextvars.ContextVar[Any] = contextvars.ContextVar("index")


class MemberAxis(Axis):
    """The worker axis of a function that is traced for one member alone: its index is an argument of the program."""

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
    """Equations between two layers of messages, and the messages that follow."""

    equations: list[Any]
    messages: list[Any]


class Program:
    """A function of one worker as a program of this member.

    Args:
        fn: of one worker, with collectives along `MEMBERS`.
        size: the number of workers.
        compiled: what is compiled already, by its text; new pieces are added.
        like: arrays or shapes of the arguments.

    Raises:
        ValueError: if a loop or a branch has messages in it.
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
        """(compiled, variables that it takes, variables that it gives) of what is computed before the messages of segment k."""
        equations = segments[k].equations
        made = {variable for equation in equations for variable in equation.outvars}
        later = [*segments[k].messages, *(e for segment in segments[k + 1 :] for e in (*segment.equations, *segment.messages))]
        used = [atom for equation in later for atom in equation.invars] + list(self._outputs)
        gives = [v for v in dict.fromkeys(_variables(used)) if v in made]
        needed = dict.fromkeys(v for equation in equations for v in _variables(equation.invars) if v not in made)
        consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        takes = [v for v in needed if v not in consts]
        own_consts = [v for v in needed if v in consts]
        program = closed.jaxpr.replace(constvars=own_consts, invars=takes, eqns=equations, outvars=gives)
        piece = core.ClosedJaxpr(program, [consts[v] for v in own_consts])
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in takes]
        lowered = jax.jit(core.jaxpr_as_fun(piece)).lower(*shapes)
        text = lowered.as_text()
        if text not in compiled:
            compiled[text] = lowered.compile()
        return compiled[text], takes, gives

    def __call__(self, channel: collectives.Stream | None, index: int, *args: Any) -> Any:
        """The function's result; `channel` carries its messages, `index` is this worker's."""
        values: dict[Any, Any] = dict(zip(self._inputs, [np.int32(index), *jax.tree.leaves(args)], strict=True))

        def value(atom):
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for (run, takes, gives), messages in zip(self._steps, self._messages, strict=True):
            values |= dict(zip(gives, run(*(values[v] for v in takes)), strict=True))
            for equation in messages:
                assert channel is not None
                found = collectives.run(channel, equation.primitive.name, equation.params, *map(value, equation.invars))
                values |= dict(zip(equation.outvars, map(jax.device_put, found), strict=True))
        return jax.tree.unflatten(self._tree, [value(atom) for atom in self._outputs])


def _check(program: Any) -> None:
    for equation in program.eqns:
        if equation.primitive.name not in collectives.COLLECTIVES and order.communicates(equation):
            raise ValueError(
                f"a {equation.primitive.name} of this method has messages in it, so what it computes cannot be told apart from them; "
                "run it without --elastic"
            )


def _segments(program: Any) -> list[Segment]:
    """Equations by the number of layers of messages that they depend on."""
    layer: dict[Any, int] = {}
    found: list[Segment] = [Segment([], [])]
    for equation in _used(program):
        at = max((layer.get(v, 0) for v in _variables(equation.invars)), default=0)
        is_message = equation.primitive.name in collectives.COLLECTIVES
        while len(found) <= at + is_message:
            found.append(Segment([], []))
        (found[at].messages if is_message else found[at].equations).append(equation)
        layer |= dict.fromkeys(equation.outvars, at + is_message)
    return found


def _used(program: Any) -> list[Any]:
    wanted, found = set(_variables(program.outvars)), []
    for equation in reversed(program.eqns):
        if wanted.intersection(equation.outvars):
            wanted.update(_variables(equation.invars))
            found.append(equation)
    return found[::-1]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]
