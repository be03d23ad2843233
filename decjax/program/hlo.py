"""A compiled program, read from its HLO text: its instructions, the bytes that it sends, and collectives without a fixed order.

Each device sends, for a buffer of b bytes and groups of g devices:

    collective-permute            b               self-edges excluded; only sources send
    all-reduce                    2 (g−1)/g · b
    reduce-scatter, all-gather    (g−1)/g · b
    all-to-all                    (g−1)/g · b

A collective in a loop or branch counts once, unless it was traced within `counted`. `bytes_by_axis` and `bytes_by_stage` leave out
messages within tensor-parallel groups: they are in loops over layers and in passes that a stage runs in some ticks only, and the text
does not say how often.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import math
import re
from typing import NamedTuple

import jax
import numpy as np

AXES = ("worker", "stage")
COUNTED = ("collective-permute", "all-reduce", "reduce-scatter", "all-gather", "all-to-all")
COLLECTIVES = (*COUNTED, "collective-broadcast", "ragged-all-to-all")

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(?P<name>[\w.-]+) = (?P<shape>.+?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$")
_END_OF_OPERANDS = re.compile(r"\)(?:,|$)")
_NAME = re.compile(r"%([\w.-]+)")
_ARRAY = re.compile(r"(pred|[a-z]+[0-9]+[a-z0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(r"\b(?:calls|body|to_apply|\w+_computations?)=(\{[^}]*\}|%[\w.-]+)")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'[^']+',?)*)\}"
)


def text(executable: jax.stages.Compiled) -> str:
    """Return the HLO text of a compiled program."""
    if (hlo := executable.as_text()) is None:
        raise ValueError(f"the compiler of {jax.default_backend()!r} returns no HLO text, so this program cannot be read")
    return hlo


def device_bytes(executable: jax.stages.Compiled) -> int:
    """Return the memory that a device needs to run a compiled program, with arguments and results."""
    if (held := executable.memory_analysis()) is None:
        raise ValueError(f"the compiler of {jax.default_backend()!r} does not tell how much memory this program needs")
    return held.argument_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes + held.temp_size_in_bytes


# -- Instructions -----------------------------------------------------------------------------------------------------


class Instruction(NamedTuple):
    """One instruction, a line of the text."""

    name: str  # without "%"
    shape: str  # of the result, layouts included
    opcode: str  # such as "all-reduce-start"
    operands: tuple[str, ...]  # names of instructions
    called: tuple[str, ...]  # names of the computations that it runs, without the condition of a loop
    line: str

    @property
    def kind(self) -> str:
        """The opcode without "-start"."""
        return self.opcode.removesuffix("-start")


class Module:
    """The instructions of a program, or of some lines of its text.

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
        """Iterate over the instructions of the computations that an instruction runs, at any depth."""
        for name in instruction.called:
            for inner in self.computations[name]:
                yield inner
                yield from self.below(inner)


def integers(digits: str) -> tuple[int, ...]:
    """Return integers separated by commas."""
    return tuple(int(number) for number in digits.split(",") if number)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return (dtype, dimensions) of all arrays in an HLO shape such as "f32[8,4]{1,0}" or "(f32[8], u32[])"."""
    return [(dtype, integers(dims)) for dtype, dims in _ARRAY.findall(shape)]


# -- Collectives ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted(*, runs: int = 1, stages: Sequence[int] | None = None) -> Iterator[None]:
    """Trace collectives in a scope that says how often they run; it is part of their names in the compiled program.

    Args:
        runs: how often a branch or loop body is executed; 0 for a rare branch whose bytes are counted elsewhere.
        stages: the pipeline stages that take the branch; None: all.
    """
    with jax.named_scope(f"runs={runs}" if stages is None else f"stages={','.join(map(str, stages))}"):
        yield


def _counts(line: str) -> tuple[int, tuple[int, ...] | None]:
    """Read (runs, stages) from the scopes of `counted`; nested runs multiply."""
    stages = re.search(r"\bstages=([\d,]+)", line)
    return math.prod(map(int, re.findall(r"\bruns=(\d+)", line))), integers(stages[1]) if stages else None


class Collective(NamedTuple):
    """One collective of a compiled program; for `runs` and `stages` see `counted`."""

    kind: str  # such as "collective-permute"
    groups: tuple[tuple[int, ...], ...]  # worker indices; for a permute, the pairs (source, target) without self-edges
    num_bytes: int  # of the full buffer: the operand of a permute or an all-reduce, before a scatter, after a gather
    runs: int = 1
    stages: tuple[int, ...] | None = None

    def sent(self, num_workers: int) -> np.ndarray:
        """Return the bytes that each worker sends, float64 of shape (N,)."""
        sent_N, permutes = np.zeros(num_workers), self.kind == "collective-permute"
        passes = 2 if self.kind == "all-reduce" else 1
        for group in self.groups:
            share = 1 if permutes else passes * (len(group) - 1) / len(group)
            sent_N[list(group[:1] if permutes else group)] += self.runs * share * self.num_bytes
        return sent_N


def collectives(hlo: str | Iterable[Instruction], num_workers: int) -> list[Collective]:
    """Return the collectives of a compiled program, in the order of its text.

    Args:
        hlo: from `text`, or instructions of it. Of asynchronous collectives the `-start` halves count.
        num_workers: N, the number of partitions.

    Raises:
        ValueError: if the groups of a collective cannot be read, or its bytes not be counted.
    """
    if isinstance(hlo, str):
        hlo = [instruction for body in Module(hlo).computations.values() for instruction in body]
    return [_collective(instruction, num_workers) for instruction in hlo if instruction.kind in COLLECTIVES]


def _collective(instruction: Instruction, num_workers: int) -> Collective:
    line, kind = instruction.line, instruction.kind
    if kind not in COUNTED:
        raise ValueError(f"cannot count the bytes of {kind!r}: {line.strip()[:80]}")
    num_bytes = _payload(instruction.shape, kind, started=instruction.opcode != kind)
    if kind == "collective-permute":
        pairs = map(integers, re.findall(r"\{([\d,]+)\}", _PAIRS.findall(line)[0]))
        groups = tuple(pair for pair in pairs if pair[0] != pair[1])
    else:
        groups = _groups(line, num_workers)
    return Collective(kind, groups, num_bytes * (len(groups[0]) if kind == "reduce-scatter" else 1), *_counts(line))


def _payload(shape: str, kind: str, started: bool) -> int:
    """Return the bytes of a collective's operands (permute) or results (the others), from its result shape.

    A synchronous operation and all-reduce-start return the results; the other `-start` halves return
    (operands, results, contexts…), where several operands are a tuple of their own.
    """
    shape = re.sub(r"\{[^}]*\}", "", shape)
    if started and (kind != "all-reduce" or shape.startswith("((")):
        operands, results, *_ = re.findall(r"\([^()]*\)|\w+\[[\d,]*\]", shape[1:-1])
        shape = operands if kind == "collective-permute" else results
    bits = lambda dtype: 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return sum(math.ceil(math.prod(dims) * bits(dtype) / 8) for dtype, dims in arrays(shape))


def _iota(dims: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    """Return 0, 1, 2, … as an array of these dimensions, transposed if an order is given."""
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(order) if order else ids


def _groups(line: str, num_workers: int) -> tuple[tuple[int, ...], ...]:
    if match := _IOTA_GROUPS.search(line):
        shape, dims, order = (integers(part or "") for part in match.groups())
        return tuple(map(tuple, _iota(dims, order).reshape(shape).tolist()))
    if match := _MESH_GROUPS.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        over, names = re.findall(r"'([^']+)'", match[4]), list(sizes)
        order = [names.index(name) for name in (*(name for name in names if name not in over), *over)]
        devices = _iota(integers(match[2] or "") or tuple(sizes.values()), integers(match[3] or ""))
        ids = devices.reshape(*sizes.values()).transpose(order)
        return tuple(map(tuple, ids.reshape(-1, math.prod(sizes[name] for name in over)).tolist()))
    if match := _GROUPS.search(line):
        groups = tuple(integers(group) for group in re.findall(r"\{([\d,]+)\}", match[1]))
        return groups or (tuple(range(num_workers)),)
    raise ValueError(f"cannot read the replica groups of this HLO line: {line.strip()}")


def routes(stablehlo: str) -> list[tuple[str, str]]:
    """Return (kind, groups) of the permutations and all-reduces of a lowered program that is not compiled yet."""
    return re.findall(r"stablehlo\.(collective_permute|all_reduce)\b.*?(?:source_target_pairs|replica_groups) = (.*?>)", stablehlo)


# -- Bytes ------------------------------------------------------------------------------------------------------------


def bytes_sent(hlo: str, num_workers: int) -> np.ndarray:
    """Return the bytes that each worker sends when the program runs once, float64 of shape (N,)."""
    return sum((collective.sent(num_workers) for collective in collectives(hlo, num_workers)), np.zeros(num_workers))


def bytes_by_axis(hlo: str, sizes: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Return `bytes_by_stage`, summed over stages: float64 of shape (N,) each."""
    return {axis: sent_NxS.sum(axis=1) for axis, sent_NxS in bytes_by_stage(hlo, sizes).items()}


def bytes_by_stage(hlo: str, sizes: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Return the bytes that devices send in one run, to other workers ("worker") and to other stages of their worker ("stage").

    Args:
        hlo: from `text`.
        sizes: (N, S, T), the numbers of workers, of stages of a worker, and of devices of a stage.

    Returns:
        Sums over the devices of a stage, float64 of shape (N, S) each.
    """
    devices = math.prod(sizes)
    stage_of = np.unravel_index(np.arange(devices), sizes)[1]
    sent = {axis: np.zeros(devices) for axis in AXES}
    for collective in collectives(hlo, devices):
        taken = range(sizes[1]) if collective.stages is None else collective.stages
        groups = [list(group) for group in collective.groups if len(group) > 1 and stage_of[group[0]] in taken]
        members = np.unravel_index(groups or [[0]], sizes)
        crossed = [axis for axis, index in zip(AXES, members) if (index != index[:, :1]).any()]  # None: a tensor-parallel group.
        if crossed:
            sent[crossed[0]] += collective._replace(groups=tuple(map(tuple, groups))).sent(devices)
    return {axis: per_device.reshape(sizes).sum(axis=2) for axis, per_device in sent.items()}


# -- Order ------------------------------------------------------------------------------------------------------------


def unordered(hlo: str) -> list[tuple[str, str]]:
    """Return pairs of instructions, by name, whose collectives devices may start in different orders, which would be a deadlock.

    Neither instruction of a pair depends on the other, both are in one computation, and at least one is a loop, a branch or a call.
    The CPU runtime orders the collectives of one computation itself; see `decjax.program.order`.
    """
    module = Module(hlo)
    return [pair for instructions in module.computations.values() for pair in _pairs(module, instructions)]


def _pairs(module: Module, instructions: list[Instruction]) -> list[tuple[str, str]]:
    needs: dict[str, set[str]] = {}  # For each instruction those with collectives that it depends on.
    senders: dict[str, bool] = {}  # For each instruction with collectives, whether they are in a body that it runs.
    pairs = []
    computation = {instruction.name: instruction for instruction in instructions}
    for instruction in instructions:
        needs[instruction.name] = set().union(*(needs[name] for name in _sources(instruction, computation)))
        inside = any(inner.kind in COLLECTIVES for inner in module.below(instruction))
        if inside or instruction.kind in COLLECTIVES:
            free = [name for name in senders if name not in needs[instruction.name] and (inside or senders[name])]
            pairs += [(name, instruction.name) for name in free]
            needs[instruction.name].add(instruction.name)
            senders[instruction.name] = inside
    return pairs


def _sources(instruction: Instruction, computation: dict[str, Instruction]) -> tuple[str, ...]:
    """Return the operands that an instruction waits for; of a tuple's element only that element, since tuples wait for none."""
    if instruction.opcode != "get-tuple-element":
        return instruction.operands
    operand = computation[instruction.operands[0]]
    while operand.opcode == "get-tuple-element" and (sources := _sources(operand, computation)) != operand.operands:
        operand = computation[sources[0]]
    if operand.opcode != "tuple":
        return (operand.name,)
    return (operand.operands[int(instruction.line.partition("index=")[2].split(",")[0])],)
