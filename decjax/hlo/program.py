"""A compiled program as computations of instructions, read from its text."""

from collections.abc import Iterator
import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(?P<name>[\w.-]+) = (?P<shape>.+?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$")
_END_OF_OPERANDS = re.compile(r"\)(?:,|$)")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"\b(?:calls|body|to_apply|\w+_computations?)=(\{[^}]*\}|%[\w.-]+)")


class Instruction(NamedTuple):
    """One line of a program.

    Attributes:
        name: without "%".
        shape: of the result, layouts included.
        opcode: as "all-reduce-start".
        operands: names.
        called: computations that it runs, but for the condition of a loop.
        line: all of its text.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    line: str


class Program:
    """The computations of a module.

    Args:
        hlo: `compiled.as_text()`, or some lines of it.

    Attributes:
        computations: instructions by the name of their computation, in the order of the text.
        entry: instructions of the program itself.
        instructions: all of them by name.
    """

    def __init__(self, hlo: str):
        body: list[Instruction] = []
        self.entry = body
        self.computations = {"": body}
        for line in hlo.splitlines():
            if match := _COMPUTATION.match(line):
                body = self.computations[match["name"]] = []
                if match["entry"]:
                    self.entry = body
            elif match := _INSTRUCTION.match(line):
                operands = _NAME.findall(_END_OF_OPERANDS.split(match["rest"], maxsplit=1)[0])
                called = _NAME.findall(" ".join(_CALLED.findall(line)))
                body.append(Instruction(match["name"], match["shape"], match["opcode"], tuple(operands), tuple(called), line))
        self.instructions = {instruction.name: instruction for body in self.computations.values() for instruction in body}

    def below(self, instruction: Instruction) -> Iterator[Instruction]:
        """All instructions that one of them runs."""
        for name in instruction.called:
            for inner in self.computations[name]:
                yield inner
                yield from self.below(inner)
