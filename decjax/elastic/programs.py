"""A worker's function, split at its messages: the pieces between them are compiled for this process's devices, and the messages go
through a `Stream`.

Compiled pieces are cached by their program text. After a change of the membership the functions are traced again, and only pieces that
have changed are compiled.
"""

from collections.abc import Callable
import contextvars
from typing import NamedTuple

import jax
from jax.extend import core
import numpy as np

from decjax.elastic import collectives
from decjax.mesh.axis import Axis
from decjax.program import jaxpr
from decjax.typing import PyTree

NAME = "member"
_index: contextvars.ContextVar[jax.Array] = contextvars.ContextVar("index")


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

    equations: list[core.JaxprEqn]
    messages: list[core.JaxprEqn]


class _Piece(NamedTuple):
    """A compiled segment, and the messages after it."""

    run: jax.stages.Compiled
    inputs: list[core.Var]
    outputs: list[core.Var]
    messages: list[core.JaxprEqn]


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

    def __init__(self, fn: Callable, size: int, compiled: dict[str, jax.stages.Compiled], *like: PyTree):
        index = jax.ShapeDtypeStruct((), np.int32)
        traced = jaxpr.trace(MEMBERS.indexed(fn), index, *like, axes=[(NAME, size)])
        self.out_info, self._program = traced.result, traced.program
        segments = _segments(traced.program)
        self._pieces = [_compile(traced, segment, segments[k + 1 :], compiled) for k, segment in enumerate(segments)]
        self.num_messages = sum(len(segment.messages) for segment in segments)

    def __call__(self, channel: collectives.Stream | None, index: int, *args: PyTree) -> PyTree:
        """Return the function's result on worker `index`, whose messages go through `channel`."""
        values = jaxpr.Values(zip(self._program.invars, [np.int32(index), *jax.tree.leaves(args)], strict=True))
        for piece in self._pieces:
            values.update(zip(piece.outputs, piece.run(*values.read(piece.inputs)), strict=True))
            for equation in piece.messages:
                assert channel is not None
                results = collectives.run(channel, equation.primitive.name, equation.params, *values.read(equation.invars))
                values.update(zip(equation.outvars, map(jax.device_put, results), strict=True))
        return jax.tree.unflatten(jax.tree.structure(self.out_info), values.read(self._program.outvars))


def _compile(traced: jaxpr.Traced, segment: Segment, later: list[Segment], compiled: dict[str, jax.stages.Compiled]) -> _Piece:
    equations, after = segment.equations, [*segment.messages, *(e for each in later for e in (*each.equations, *each.messages))]
    outputs = jaxpr.passed(equations, after, traced.program.outvars)
    known = jaxpr.results(equations).union(traced.program.constvars)
    inputs = [variable for variable in jaxpr.needed(equations, []) if variable not in known]
    lowered = jax.jit(jaxpr.piece(traced, inputs, equations, outputs)).lower(*map(jaxpr.shape, inputs))
    text = lowered.as_text()
    if text not in compiled:
        compiled[text] = lowered.compile()
    return _Piece(compiled[text], inputs, outputs, segment.messages)


def _segments(program: core.Jaxpr) -> list[Segment]:
    """Group the equations by the number of layers of messages that they depend on."""
    layer: dict[core.Var, int] = {}
    segments = [Segment([], [])]
    for equation in (program.eqns[index] for index in jaxpr.behind(program, program.outvars)):
        at = max((layer.get(variable, 0) for variable in jaxpr.variables(equation.invars)), default=0)
        is_message = equation.primitive.name in collectives.COLLECTIVES
        if not is_message and jaxpr.communicates(equation):
            raise ValueError(
                f"a {equation.primitive.name} of this method contains messages, so it cannot be split at them; run it without --elastic"
            )
        while len(segments) <= at + is_message:
            segments.append(Segment([], []))
        (segments[at].messages if is_message else segments[at].equations).append(equation)
        layer |= dict.fromkeys(equation.outvars, at + is_message)
    return segments
