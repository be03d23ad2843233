"""Bytes on the wire, read from compiled HLO.

Per worker, for a payload of b bytes (the full buffer) and groups of g:

    collective-permute            b               self-edges excluded; only sources send
    all-reduce                    2 (g−1)/g · b
    reduce-scatter, all-gather    (g−1)/g · b
    all-to-all                    (g−1)/g · b
"""

import math
import re
from typing import NamedTuple

import numpy as np

_KINDS = ("collective-permute", "all-reduce", "reduce-scatter", "all-gather", "all-to-all")
_OPERATION = re.compile(rf" = (?P<shape>.+?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+[0-9]*[a-z0-9]*)\[(?P<dims>[0-9,]*)\]")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
        kind: HLO name, as "collective-permute".
        groups: worker indices; for a permute, the pairs (source, target) without self-edges.
        num_bytes: the full buffer: of the operand for a permute or an all-reduce, before a scatter, after a gather.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    num_bytes: int

    @property
    def group_size(self) -> int:
        """Most workers that take part in one group; 1 if nothing is sent."""
        return max((len(group) for group in self.groups), default=1)

    def sent(self, num_workers: int) -> np.ndarray:
        """Bytes that each worker sends, float64 of shape (N,)."""
        sent_N = np.zeros(num_workers)
        for group in self.groups:
            if self.kind == "collective-permute":
                sent_N[group[0]] += self.num_bytes
            else:
                passes = 2 if self.kind == "all-reduce" else 1
                sent_N[list(group)] += passes * (len(group) - 1) / len(group) * self.num_bytes
        return sent_N


def _integers(text: str) -> list[int]:
    return [int(digits) for digits in text.split(",") if digits]


def _sizes(shape: str) -> list[int]:
    """Bytes of each array in an HLO shape, as "f32[8,4]{1,0}" or "(f32[8]{0}, u32[])"."""
    sizes = []
    for match in _ARRAY.finditer(re.sub(r"\{[^}]*\}", "", shape)):
        bits = 8 if match["dtype"] == "pred" else int(re.search(r"\d+", match["dtype"])[0])
        sizes.append(math.ceil(math.prod(_integers(match["dims"])) * bits / 8))
    return sizes


def _groups(line: str, num_workers: int) -> tuple[tuple[int, ...], ...]:
    if match := _IOTA_GROUPS.search(line):
        shape, dims, order = (_integers(part or "") for part in match.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        ids = ids.transpose(order) if order else ids
        return tuple(tuple(group) for group in ids.reshape(shape).tolist())
    groups = re.findall(r"\{([\d,]+)\}", match[1]) if (match := _GROUPS.search(line)) else []
    return tuple(tuple(_integers(group)) for group in groups) or (tuple(range(num_workers)),)


def collectives(hlo: str, num_workers: int) -> list[Collective]:
    """Reads the collectives of a compiled program, in the order of its text.

    Args:
        hlo: `compiled.as_text()`, synchronous or asynchronous form (the `-start` halves count, the `-done` halves do not).
        num_workers: N, the number of partitions.

    Returns:
        One `Collective` per operation. A collective in a loop body counts once.
    """
    found = []
    for line in hlo.splitlines():
        if not (match := _OPERATION.search(line)):
            continue
        sizes, kind, started = _sizes(match["shape"]), match["kind"], bool(match["start"])
        if kind == "collective-permute":
            pairs = [tuple(_integers(pair)) for pair in re.findall(r"\{([\d,]+)\}", _PAIRS.search(line)[1])]
            # An asynchronous permute returns (operand, result, contexts…).
            num_bytes = sizes[0] if started else sum(sizes)
            found.append(Collective(kind, tuple(pair for pair in pairs if pair[0] != pair[1]), num_bytes))
            continue
        groups = _groups(line, num_workers)
        num_bytes = sum(sizes)
        if started and kind in ("all-gather", "reduce-scatter"):  # (operands…, results…)
            num_bytes = sum(sizes[len(sizes) // 2:])
        if kind == "reduce-scatter":
            num_bytes *= len(groups[0])
        found.append(Collective(kind, groups, num_bytes))
    return found


def bytes_sent(hlo: str, num_workers: int) -> np.ndarray:
    """Bytes that each worker sends when the program runs once, float64 of shape (N,)."""
    return sum((collective.sent(num_workers) for collective in collectives(hlo, num_workers)), np.zeros(num_workers))
