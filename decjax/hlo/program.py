"""The computations and instructions of a compiled program, read from its text."""

from collections.abc import Iterator
import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(?P<name>[\w.-]+) = (?P<shape>.+?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$")
_END_OF_OPERANDS = re.compile(r"\)(?:,|$)")
_NAME = re.compile(r"%([\w.-]+)")
_ARRAY = re.compile(r"(pred|[a-z]+[0-9]+[a-z0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(r"\b(?:calls|body|to_apply|\w+_computations?)=(\{[^}]*\}|%[\w.-]+)")

COUNTED = ("collective-permute", "all-reduce", "reduce-scatter", "all-gather", "all-to-all")  # whose bytes `wire` counts
COLLECTIVES = (*COUNTED, "collective-broadcast", "ragged-all-to-all")


class Instruction(NamedTuple):
    """One instruction, a line of the program."""

    name: str  # without "%"
    shape: str  # of the result, layouts included
    opcode: str  # such as "all-reduce-start"
    operands: tuple[str, ...]  # names of instructions
    called: tuple[str, ...]  # names of the computations that it runs, without the condition of a loop
    line: str  # the whole text

    @property
    def kind(self) -> str:
        """The opcode without "-start"."""
        return self.opcode.removesuffix("-start")


def integers(text: str) -> tuple[int, ...]:
    """The whole numbers in a text that separates them by commas."""
    return tuple(int(digits) for digits in text.split(",") if digits)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dimensions) of all arrays in an HLO shape such as "f32[8,4]{1,0}" or "(f32[8], u32[])"."""
    return [(dtype, integers(dims)) for dtype, dims in _ARRAY.findall(shape)]


class Program:
    """A program's instructions, by computation and by name.

    Args:
        hlo: `compiled.as_text()`, or some lines of it.

    Attributes:
        computations: the instructions of each computation by its name, in the order of the text.
        entry: the instructions of the entry computation.
        instructions: all instructions by name.
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
        """All instructions in the computations that an instruction runs, at any depth."""
        for name in instruction.called:
            for inner in self.computations[name]:
                yield inner
                yield from self.below(inner)
