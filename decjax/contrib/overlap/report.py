"""What is computed while a message travels, read from the schedule of a compiled step.

Compilers of GPUs and TPUs split a collective into a start and a done, and fix the order of all instructions of a program. The
instructions between the two are executed while the message travels. Work is counted in floating-point operations of matrix
products, including those in loops. Their names show their pass: `jvp` the forward pass, its transpose the backward pass.
"""

import functools
import math
import re
from typing import NamedTuple

import numpy as np

from decjax.program.hlo import Collective, Instruction, Module, arrays, collectives

_CONDITION = re.compile(r"\bcondition=%([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LIMIT = re.compile(r" s32\[\]\S* constant\((\d+)\)")
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:s=\{([\d,]+)\}|ensions":\[([\d,"]+)\])')
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")


class InFlight(NamedTuple):
    """The position of one collective in the schedule of a step."""

    collective: Collective
    asynchronous: bool  # whether it has a start and a done; if not, the program waits for it
    inside: str  # opcode of the instruction whose branch or body holds it, such as "conditional"; empty for the program itself
    started: float  # share of the forward pass before the start: 0 if the start comes first
    finished: float  # share of the backward pass before the done: 1 if the done comes last
    hidden: float  # share of both passes between start and done


class Overlap(NamedTuple):
    """The schedule of a compiled step."""

    forward_flops: int  # operations of the forward pass's matrix products, on one worker
    backward_flops: int  # those of the backward pass
    in_flight: tuple[InFlight, ...]  # all collectives, in the order of their starts


def read(hlo: str, num_workers: int) -> Overlap:
    """Return the positions of all collectives of a step in its schedule.

    Args:
        hlo: text of a compiled step that takes a gradient by `jax.grad`.
        num_workers: N, the number of partitions.

    Raises:
        ValueError: if the program has no schedule, or no matrix products in one of its passes.
    """
    if "is_scheduled=true" not in hlo.partition("\n")[0]:
        raise ValueError("the program has no schedule; use the text of a compiled program")
    module = Module(hlo)
    work = _Work(module)
    work_Ix2 = np.array([work(instruction) for instruction in module.entry])
    total = work_Ix2.sum(axis=0)
    if not total.all():
        raise ValueError(
            "the program has no matrix products in its forward or its backward pass, so the overlap cannot be computed"
        )
    before_Ix2 = np.cumsum(work_Ix2, axis=0) - work_Ix2
    in_flight = []
    for start, instruction in enumerate(module.entry):
        done = _done(module.entry, start)
        shares = (before_Ix2[start, 0] / total[0], before_Ix2[done, 1] / total[1], work_Ix2[start + 1 : done].sum() / total.sum())
        for inside, instructions in (("", [instruction]), (instruction.opcode, module.below(instruction))):
            sent = collectives(instructions, num_workers)
            in_flight += [InFlight(collective, done > start, inside, *map(float, shares)) for collective in sent]
    return Overlap(int(total[0]), int(total[1]), tuple(in_flight))


def _done(entry: list[Instruction], start: int) -> int:
    """Return the position at which the program waits for what starts at `start`; `start` itself if it is synchronous."""
    instruction = entry[start]
    if not instruction.opcode.endswith("-start") or '"is_sync":true' in instruction.line:
        return start
    done = instruction.kind + "-done"
    return next(position for position, later in enumerate(entry) if later.opcode == done and instruction.name in later.operands)


class _Work:
    """The operations of the matrix products of a program."""

    def __init__(self, module: Module):
        self.module = module
        self._work_of = functools.cache(self._work_of)

    def __call__(self, instruction: Instruction) -> np.ndarray:
        """Return the operations of the matrix products in an instruction, (forward, backward)."""
        work = self._trips(instruction) * sum((self._work_of(name) for name in instruction.called), np.zeros(2))
        if "jvp(" in instruction.line:
            work[int("transpose(jvp(" in instruction.line)] += self._flops(instruction)
        return work

    def _work_of(self, computation: str) -> np.ndarray:
        return sum((self(instruction) for instruction in self.module.computations[computation]), np.zeros(2))

    def _trips(self, instruction: Instruction) -> int:
        if instruction.opcode != "while":
            return 1
        if trips := _TRIPS.search(instruction.line):
            return int(trips[1])
        condition = self.module.computations[_CONDITION.findall(instruction.line)[0]]
        (limit,) = (int(match[1]) for tested in condition if (match := _LIMIT.search(tested.line)))
        return limit

    def _flops(self, instruction: Instruction) -> int:
        """Return 2 · results · products summed in each; 0 for instructions other than matrix products."""
        if labels := _LABELS.search(instruction.line):
            return self._convolution_flops(instruction, *labels.groups())
        if contracted := _CONTRACTED.search(instruction.line):  # dot, or a call of cuBLAS
            dims = self._dims(instruction.operands[0])
            axes = map(int, re.findall(r"\d+", contracted[0]))
            return 2 * math.prod(self._dims(instruction.name)) * math.prod(dims[axis] for axis in axes)
        return 0

    def _convolution_flops(self, instruction: Instruction, image: str, kernel: str, result: str) -> int:
        """Return the operations of a TPU's matrix product: a convolution whose batches may be spatial axes, mostly of padding."""
        image_dims, kernel_dims, result_dims = map(self._dims, (*instruction.operands[:2], instruction.name))
        window = _WINDOW.search(instruction.line)
        options = dict(part.split("=") for part in window[1].split()) if window else {}
        flops = 2 * kernel_dims[kernel.index("i")] * result_dims[result.index("b")] * result_dims[result.index("f")]
        for axis in range(len(image) - 2):
            flops *= _taps(
                image_dims[image.index(str(axis))],
                result_dims[result.index(str(axis))],
                {name: option.split("x")[axis] for name, option in options.items() if name != "rhs_reversal"},
            )
        return flops

    def _dims(self, name: str) -> tuple[int, ...]:
        """Return the dimensions of an instruction's result, or of the first of several."""
        return arrays(self.module.instructions[name].shape)[0][1]


def _taps(image_size: int, result_size: int, option: dict[str, str]) -> int:
    """Return how often, along one axis of a convolution, the kernel meets a value of the image instead of padding."""
    of = lambda name: int(option.get(name, 1))
    low, _, _ = option.get("pad", "0_0").partition("_")
    offset = np.arange(of("size")) * of("rhs_dilate") - int(low)
    index, between = np.divmod(np.arange(result_size)[:, None] * of("stride") + offset, of("lhs_dilate"))
    return int(((between == 0) & (index >= 0) & (index < image_size)).sum())
