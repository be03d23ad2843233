"""Bytes that a compiled program sends, read from its HLO.

Each device sends, for a buffer of b bytes and groups of g devices:

    collective-permute            b               self-edges excluded; only sources send
    all-reduce                    2 (g−1)/g · b
    reduce-scatter, all-gather    (g−1)/g · b
    all-to-all                    (g−1)/g · b

A collective in a loop counts once, unless its name has the scope `runs=n`, with which `decjax.pipeline` says how often a loop over
ticks sends along each permutation, or, with n = 0, that a branch is taken only seldom and is counted elsewhere. A collective in a branch
that only some pipeline stages take has the scope `stages=…`, which `bytes_by_axis` reads. That function leaves out messages within
tensor-parallel groups: they are in loops over layers and in passes that a stage runs in some ticks only, and the text does not say how
often.
"""

from collections.abc import Iterable
import math
import re
from typing import NamedTuple

import numpy as np

from decjax import mesh
from decjax.hlo.program import COLLECTIVES, COUNTED, Instruction, Program, arrays, integers

AXES = ("worker", "stage")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'[^']+',?)*)\}"
)
_RUNS = re.compile(r"\bruns=(\d+)")
_STAGES = re.compile(r"\bstages=([\d,]+)")


class Collective(NamedTuple):
    """One collective of a compiled program."""

    kind: str  # HLO name, as "collective-permute"
    groups: tuple[tuple[int, ...], ...]  # worker indices; for a permute, the pairs (source, target) without self-edges
    num_bytes: int  # of the full buffer: the operand of a permute or an all-reduce, before a scatter, after a gather
    runs: int = 1  # how often it runs
    stages: tuple[int, ...] | None = None  # pipeline stages that take the branch it is in; None: it is in no such branch

    def sent(self, num_workers: int) -> np.ndarray:
        """Bytes that each worker sends, float64 of shape (N,)."""
        sent_N = np.zeros(num_workers)
        for group in self.groups:
            if self.kind == "collective-permute":
                sent_N[group[0]] += self.runs * self.num_bytes
            else:
                passes = 2 if self.kind == "all-reduce" else 1
                sent_N[list(group)] += self.runs * passes * (len(group) - 1) / len(group) * self.num_bytes
        return sent_N


def _array_bytes(shape: str) -> int:
    """Bytes of all arrays in an HLO shape without layouts."""

    def bits(dtype):
        return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])

    return sum(math.ceil(math.prod(dims) * bits(dtype) / 8) for dtype, dims in arrays(shape))


def _payload(shape: str, kind: str, started: bool) -> int:
    """Bytes of a collective's operands (permute) or results (the others), from its result shape.

    A synchronous operation and all-reduce-start return the results; the other `-start` halves return
    (operands, results, contexts…), where several operands are a tuple of their own.
    """
    shape = re.sub(r"\{[^}]*\}", "", shape)
    if not started or (kind == "all-reduce" and not shape.startswith("((")):
        return _array_bytes(shape)
    operands, results, *_ = re.findall(r"\([^()]*\)|\w+\[[\d,]*\]", shape[1:-1])
    return _array_bytes(operands if kind == "collective-permute" else results)


def _iota(dims: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    """0, 1, 2, … as an array of these dimensions, transposed if an order is given."""
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


def collectives(hlo: str | Iterable[Instruction], num_workers: int) -> list[Collective]:
    """The collectives of a compiled program, in the order of its text.

    Args:
        hlo: `compiled.as_text()`, or instructions of it. Of asynchronous collectives the `-start` halves count.
        num_workers: N, the number of partitions.

    Raises:
        ValueError: if the groups of a collective cannot be read, or its bytes not be counted.
    """
    if isinstance(hlo, str):
        hlo = [instruction for body in Program(hlo).computations.values() for instruction in body]
    return [found for instruction in hlo if (found := _collective(instruction, num_workers))]


def _collective(instruction: Instruction, num_workers: int) -> Collective | None:
    line, kind = instruction.line, instruction.kind
    if kind not in COLLECTIVES:
        return None
    if kind not in COUNTED:
        raise ValueError(f"cannot count the bytes of {kind!r}: {line.strip()[:80]}")
    num_bytes = _payload(instruction.shape, kind, started=instruction.opcode != kind)
    runs = math.prod(map(int, _RUNS.findall(line)))
    stages = integers(match[1]) if (match := _STAGES.search(line)) else None
    if kind == "collective-permute":
        pairs = [integers(pair) for pair in re.findall(r"\{([\d,]+)\}", _PAIRS.findall(line)[0])]
        return Collective(kind, tuple(pair for pair in pairs if pair[0] != pair[1]), num_bytes, runs, stages)
    groups = _groups(line, num_workers)
    return Collective(kind, groups, num_bytes * (len(groups[0]) if kind == "reduce-scatter" else 1), runs, stages)


def bytes_sent(hlo: str, num_workers: int) -> np.ndarray:
    """Bytes that each worker sends when the program runs once, float64 of shape (N,)."""
    return sum((collective.sent(num_workers) for collective in collectives(hlo, num_workers)), np.zeros(num_workers))


def bytes_by_axis(hlo: str, workers: mesh.Workers) -> dict[str, np.ndarray]:
    """Bytes that each worker sends in one run, to other workers ("worker") and between its stages ("stage"): float64 (N,) each."""
    return {axis: sent_NxS.sum(axis=1) for axis, sent_NxS in bytes_by_stage(hlo, workers).items()}


def bytes_by_stage(hlo: str, workers: mesh.Workers) -> dict[str, np.ndarray]:
    """As `bytes_by_axis`, by the stage of the sending devices: float64 of shape (N, S) each."""
    assert workers.mesh is not None
    devices = workers.mesh.size
    sizes = workers.num_workers, workers.mesh.devices.shape[2], workers.mesh.devices.shape[3]
    stage_of = np.unravel_index(np.arange(devices), sizes)[1]
    sent = {axis: np.zeros(devices) for axis in AXES}
    for collective in collectives(hlo, devices):
        taken = range(sizes[1]) if collective.stages is None else collective.stages
        groups = [list(group) for group in collective.groups if len(group) > 1 and stage_of[group[0]] in taken]
        members = np.unravel_index(groups or [[0]], sizes)
        crossed = [axis for axis, index in zip(AXES, members) if (index != index[:, :1]).any()]  # None: a tensor-parallel group.
        if crossed:
            sent[crossed[0]] += collective._replace(groups=tuple(map(tuple, groups))).sent(devices)
    return {axis: per_device.reshape(*sizes[:2], -1).sum(axis=2) for axis, per_device in sent.items()}
