"""Fits of a cluster's numbers to measured times, which `decjax.measure` takes.

A message of b bytes takes α + b/β; straight lines through measured times give both. Lines are fitted to *relative* errors, so
that small messages, which determine α, count as much as large ones.
"""

from collections.abc import Sequence
import dataclasses
import typing
from typing import Annotated, Literal

import numpy as np

from decjax.costmodel.profile import Cluster, Jitter, Link, Rate, Size, as_numbers
from decjax.options import Range, check, checked_class

MAX_TRACE, LEAST_STEPS = 200, 20  # how many measured times are kept, or times of as many whole steps if these are more
STEADY = 0.02  # coefficient of variation below which compute times count as constant
Kind = Literal["shift", "pair", "all_reduce", "codec"]
Scope = Literal["intra", "inter"]


@checked_class
@dataclasses.dataclass(frozen=True)
class Measurement:
    """One timed exchange.

    Args:
        kind: "shift" (every worker sends one message, one way), "pair" (two workers exchange), "all_reduce" (over
            `num_workers`) or "codec" (encode and decode `num_bytes` of parameters).
        num_bytes: bytes of each worker's message or buffer.
        time_s: seconds.
        scope: "inter" if messages leave the node, one per node at a time; else "intra".
        num_workers: workers that take part; used for "all_reduce".
        codec: name of the codec, for kind "codec"; empty: all codecs.
    """

    kind: Kind
    num_bytes: Rate
    time_s: Rate
    scope: Scope = "inter"
    num_workers: Annotated[int, Range(2, 2**40)] = 2
    codec: str = ""


def fit_line(num_bytes: Sequence[float], time_s: Sequence[float]) -> Link:
    """Return the link t = α + b/β fitted to messages of b bytes, by least squares of relative errors, with α ≥ 0.

    Raises:
        ValueError: if there are not two sizes of messages, of which larger ones take longer.
    """
    x, y = np.asarray(num_bytes, float), np.asarray(time_s, float)
    if len(set(x.tolist())) < 2:
        raise ValueError(f"links need shifts or pairs with messages of at least two sizes, got {sorted(set(x.tolist()))} bytes")
    alpha, slope = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones(len(y)), rcond=None)[0]
    if alpha < 0:
        alpha, slope = 0.0, (x / y).sum() / ((x / y) ** 2).sum()
    if slope <= 0:
        raise ValueError("larger messages do not take longer in these measurements; measure larger ones")
    return Link(float(alpha), float(1 / slope))


def pace(times_NxK: np.ndarray) -> float:
    """Return the mean seconds per step of N workers that take K steps without waiting, until the first of them is done."""
    ends_NxK = np.cumsum(times_NxK, axis=1)
    until_s, before_NxK = ends_NxK[:, -1].min(), ends_NxK - times_NxK
    done_NxK = np.clip((until_s - before_NxK) / times_NxK, 0, 1)  # A step under way counts by its share.
    return float(until_s / done_NxK.sum(axis=1).mean())


def own_share(times_NxR: np.ndarray, pace_s: float) -> float:
    """Return κ in [0, 1]: how much of its lead over the slowest a worker keeps where it does not wait for others.

        κ = (m − p) / (m − t)

    with t the mean time of a worker, m that of the slowest of N that start together, and p the time per step of workers that do
    not wait. With separate cores a worker continues as soon as it is done, so p = t and κ = 1. If workers share cores, those that are
    done early leave theirs to the others, which then finish sooner; without waiting all take as long as the slowest, p = m and κ = 0.

    Args:
        times_NxR: seconds of N workers in R steps that they began together.
        pace_s: p, from `pace`.
    """
    slowest_s, mean_s = times_NxR.max(axis=0).mean(), times_NxR.mean()
    return float(np.clip((slowest_s - pace_s) / (slowest_s - mean_s), 0, 1)) if slowest_s > mean_s else 1.0


def shared(times_NxR: np.ndarray, share: float) -> np.ndarray:
    """Return times with only a `share` κ of the lead over the slowest: t'_ir = m_r − κ (m_r − t_ir), m_r = max_i t_ir."""
    slowest_R = times_NxR.max(axis=0)
    return slowest_R - share * (slowest_R - times_NxR)


def fit_jitter(times_NxR: np.ndarray) -> Jitter:
    """Return the distribution of measured compute times, [N, R]: constant if workers hardly differ within a step, else a trace of steps.

    A trace of many steps is reduced to about `MAX_TRACE` times with the same mean, and the same mean of the slowest worker's times.
    """
    times = np.sort(np.asarray(times_NxR, float), axis=0)
    check("the number of compute times", times.size, Size)
    as_numbers("times_NxR", times.ravel(), Rate)
    if (times - times.mean(axis=0)).std() <= STEADY * times.mean():
        return Jitter()
    most = max(MAX_TRACE // len(times), LEAST_STEPS)
    if times.shape[1] > most:  # Means of equal slices keep the mean, and do not lose the largest values.
        slices = np.array_split(times[:, times[-1].argsort()], most, axis=1)
        times = np.stack([part.mean(axis=1) for part in slices], axis=1)
    return Jitter("trace", trace_s=tuple(times.T.ravel().tolist()), together=len(times))


def line_of(measurements: Sequence[Measurement], kind: str, scope: str) -> Link | None:
    """Return the link fitted to one kind of exchange in one scope; None if it was not measured."""
    chosen = [m for m in measurements if m.kind == kind and m.scope == scope]
    return fit_line([m.num_bytes for m in chosen], [m.time_s for m in chosen]) if chosen else None


def fit_cluster(measurements: Sequence[Measurement], *, name: str, num_nodes: int, workers_per_node: int) -> Cluster:
    """Fit a cluster's profile to timed exchanges.

    One-way shifts of at least two sizes give α and β of a scope; where there are none, pairs do. If pairs take more than 1.5 times as
    long per byte as shifts, links are half-duplex. α is the smaller one of the two fits, since times of large messages determine it
    to milliseconds only. All-reduces give the efficiency: expected ÷ measured time per byte, at most 1. A scope that was not measured
    gets the links of the other. Throughputs of codecs are medians, by name if they have one.

    Raises:
        ValueError: if neither shifts nor pairs were measured.
    """
    links, full_duplex = {}, True
    for scope in typing.get_args(Scope):
        shift, pair = line_of(measurements, "shift", scope), line_of(measurements, "pair", scope)
        if shift and pair and shift.bandwidth_Bps > 1.5 * pair.bandwidth_Bps:
            full_duplex = False
        links[scope] = Link(min(shift.latency_s, pair.latency_s), shift.bandwidth_Bps) if shift and pair else shift or pair
    inter = links["inter"] or links["intra"] or fit_line((), ())  # which refuses that there is no measurement
    intra = links["intra"] or inter
    efficiency = _efficiency([m for m in measurements if m.kind == "all_reduce"], intra, inter)
    return Cluster(
        name,
        num_nodes,
        workers_per_node,
        intra,
        inter,
        full_duplex_pairs=full_duplex,
        all_reduce_efficiency=efficiency,
        codec_Bps=_throughput([m for m in measurements if m.kind == "codec"]),
    )


def _efficiency(all_reduces: Sequence[Measurement], intra: Link, inter: Link) -> float:
    """Return the median of expected ÷ measured time per byte, at most 1."""
    ratios = []
    for m in all_reduces:
        link = inter if m.scope == "inter" else intra
        hops = 2 * (m.num_workers - 1)
        wire_s = hops / m.num_workers * m.num_bytes / link.bandwidth_Bps
        # The measured time without the latency of all hops, but at least a tenth of it.
        ratios.append(wire_s / max(m.time_s - hops * link.latency_s, m.time_s / 10))
    return float(min(1.0, np.median(ratios))) if ratios else 1.0


def _throughput(codecs: Sequence[Measurement]) -> float | dict[str, float] | None:
    """Return the bytes per second: by codec where they have names, else one number; None if none was measured."""
    by_name = {
        codec: float(np.median([m.num_bytes / m.time_s for m in codecs if m.codec == codec]))
        for codec in dict.fromkeys(m.codec for m in codecs)
    }
    return by_name.get("") if set(by_name) <= {""} else by_name
