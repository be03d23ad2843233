"""Inputs of the cost model: a cluster, a workload, and how compute times vary.

A *profile* is one JSON object: the fields of `Cluster`, and optionally a measured `Workload` under "workload". It is measured
(launch.calibrate), fitted to timings (`fit`) or written by hand from datasheets. Names of fields end in their unit; `_Bps` is bytes per
second, not bits: 25 Gbit/s are 25e9/8 = 3.125e9.

    {"name": "hosts", "num_nodes": 4, "workers_per_node": 1,
     "intra": {"latency_s": 2e-6, "bandwidth_Bps": 5e9}, "inter": {"latency_s": 1e-3, "bandwidth_Bps": 2.5e7},
     "full_duplex_pairs": true,
     "workload": {"forward_s": 0.1, "backward_s": [0.2], "num_bytes": [2.4e7], "jitter": {"kind": "normal", "scale_s": 0.01}}}
"""

from collections.abc import Iterable
import dataclasses
import math
from typing import Annotated, Literal, cast

import numpy as np

from decjax.options import Natural, Range, Share, check, check_choice, checked_class, shown

LARGEST = 1e18
Amount = Annotated[float, Range(0, LARGEST)]
Rate = Annotated[float, Range(1 / LARGEST, LARGEST)]  # Numbers outside are mistakes, and would overflow.
Size = Annotated[int, Range(1, 2**40)]
MAX_BUCKETS = 256


def exactly(number: int) -> object:
    """Return the annotation of one whole number."""
    return Annotated[int, Range(number, number)]


def check_text(what: str, value: str) -> None:
    """Refuse anything but text that a terminal can show: control characters could rewrite the screen."""
    check(what, value, str)
    if not value.isprintable():
        raise ValueError(f"{what}={shown(value)} must be text without control characters; remove them")


def check_divides(what: str, value: int, parts: str, divisor: int) -> None:
    """Refuse a number that does not divide into parts."""
    if value % divisor:
        raise ValueError(f"{what}={value} does not divide into {parts}; use a multiple of {divisor}")


def check_number(what: str, value: float | None, allowed: object = Amount) -> float:
    """Return a value as a float; refuse anything but a number in the range of an annotation."""
    check(what, value, allowed)
    return float(cast(float, value))


def as_numbers(what: str, values: Iterable[float], allowed: object = Amount) -> tuple[float, ...]:
    """Return a sequence of numbers as a tuple of floats; refuse anything else."""
    check(what, values, Iterable[float])
    return tuple(check_number(f"{what}[{index}]", value, allowed) for index, value in enumerate(values))


@checked_class
@dataclasses.dataclass(frozen=True)
class Link:
    """A kind of link: a message of b bytes takes α + b/β seconds.

    Args:
        latency_s: α ≥ 0, seconds.
        bandwidth_Bps: β > 0, bytes per second in one direction.
    """

    latency_s: Amount
    bandwidth_Bps: Rate


@checked_class
@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of workers. Each L consecutive workers share a node and its NIC: worker i is on node i div L.

    Args:
        name: shown in tables.
        num_nodes: number of nodes.
        workers_per_node: L, workers on each node.
        intra: the link of *one worker* to the others of its node (NVLink, PCIe, shared memory).
        inter: the NIC of *one node*: all that its workers send to other nodes at the same time shares `bandwidth_Bps`.
        full_duplex_pairs: False if two workers that exchange with each other send one after the other, which takes twice the time,
            as JAX's permutations over gloo do; decjax's exchanges between CPU processes send both ways at once.
        all_reduce_efficiency: fraction of the bandwidth that reductions over a group reach, in (0, 1].
        hierarchical_all_reduce: True where reductions over several nodes reduce inside nodes first, so that 2(m−1)/m of the
            bytes leave each of m nodes; False where one ring runs through all n workers, with 2(n−1)/n, as with gloo.
        codec_Bps: bytes of parameters that a worker encodes and decodes per second: one number for all codecs, or one for
            each by name; None: codecs take no time.
        flops: floating-point operations per second that a worker sustains, to estimate compute times; None: unknown.
        memory_bytes: memory of a worker; None: unknown.
        devices_per_worker: devices that divide the arrays of a worker; all other numbers are those of a whole worker. See `grouped`.
    """

    name: str
    num_nodes: Size
    workers_per_node: Size
    intra: Link
    inter: Link
    full_duplex_pairs: bool = True
    all_reduce_efficiency: Share = 1.0
    hierarchical_all_reduce: bool = False
    codec_Bps: Rate | dict[str, Rate] | None = None
    flops: Rate | None = None
    memory_bytes: Rate | None = None
    devices_per_worker: Size = 1

    def __post_init__(self):
        check_text("name", self.name)
        for codec, rate_Bps in self.codec_Bps.items() if isinstance(self.codec_Bps, dict) else ():
            check(f"codec_Bps[{codec!r}]", rate_Bps, Rate)

    @property
    def num_workers(self) -> int:
        """N, the number of workers on all nodes."""
        return self.num_nodes * self.workers_per_node

    @property
    def bottleneck(self) -> Link:
        """The links between nodes, or those inside if there is one node."""
        return self.inter if self.num_nodes > 1 else self.intra

    def at_bandwidth(self, bandwidth_Bps: float) -> "Cluster":
        """Return the cluster with another bandwidth of its `bottleneck`."""
        name = "inter" if self.num_nodes > 1 else "intra"
        return dataclasses.replace(self, **{name: dataclasses.replace(self.bottleneck, bandwidth_Bps=bandwidth_Bps)})

    def codec_rate(self, codec: str = "") -> float | None:
        """Return the bytes of parameters per second that a worker encodes and decodes; None: it takes no time.

        Raises:
            ValueError: if the profile has a speed for each codec, but none for this one.
        """
        if not isinstance(self.codec_Bps, dict):
            return self.codec_Bps
        check_choice(f"cluster {self.name!r} has speeds of some codecs only: codec", codec, tuple(self.codec_Bps))
        return self.codec_Bps[codec]

    def coding_s(self, num_bytes: float, codec: str = "") -> float:
        """Return the seconds that a worker takes to encode and decode `num_bytes` of parameters."""
        rate_Bps = self.codec_rate(codec)
        return num_bytes / rate_Bps if rate_Bps else 0.0

    def resize(self, num_workers: int) -> "Cluster":
        """Return the cluster with another number of nodes, or one smaller node; refuse workers that do not fill whole nodes."""
        check("workers", num_workers, Size)
        per_node = min(self.workers_per_node, num_workers)
        if num_workers % per_node:
            fits = num_workers // per_node * per_node
            raise ValueError(f"workers={num_workers} do not fill nodes of {per_node} workers; use {fits} or {fits + per_node}")
        return dataclasses.replace(self, num_nodes=num_workers // per_node, workers_per_node=per_node)


@checked_class
@dataclasses.dataclass(frozen=True)
class Jitter:
    """How the compute time of a worker's step varies around its nominal value C.

    It varies independently over steps and, except for a trace of workers that were timed `together`, over workers.

        constant     C
        normal       max(0, C + s Z)                         Z standard normal
        exponential  C + s E                                 E standard exponential: mean C + s
        lognormal    C exp(σZ − σ²/2), σ² = ln(1 + (s/C)²)   mean C, standard deviation s
        trace        drawn with replacement from the compute times `trace_s`; C is not used

    Args:
        kind: one of the above.
        scale_s: s, seconds; 0 for "constant" and "trace".
        trace_s: measured compute times of forward and backward, seconds; for "trace" only.
        together: M, of how many workers the trace has times that belong together: M after one another are those of one step. They are
            drawn as a group, and dealt to the workers at random; so workers that share cores are not all slow at once.
        slow_workers: number of workers, the first ones, that are slow in every step.
        slow_factor: factor ≥ 1 by which these take longer.
    """

    kind: Literal["constant", "normal", "exponential", "lognormal", "trace"] = "constant"
    scale_s: Amount = 0.0
    trace_s: tuple[Amount, ...] = ()
    together: Size = 1
    slow_workers: Natural = 0
    slow_factor: Annotated[float, Range(1, LARGEST)] = 1.0

    def __post_init__(self):
        object.__setattr__(self, "trace_s", as_numbers("trace_s", self.trace_s))
        is_trace, values = self.kind == "trace", len(self.trace_s)
        fits = {
            "scale_s": not self.scale_s or self.kind not in ("constant", "trace"),
            "trace_s": is_trace == bool(values),
            "together": values % self.together == 0 and (is_trace or self.together == 1),
        }
        if name := next((name for name, is_right in fits.items() if not is_right), None):
            raise ValueError(
                f"jitter kind {self.kind!r} with {values} values in trace_s: {name}={shown(getattr(self, name))} does not fit; 'trace' "
                "needs trace_s, whose length `together` divides, other kinds have neither, and 'constant' and 'trace' have no scale_s"
            )

    @property
    def is_deterministic(self) -> bool:
        """Whether each worker takes the same time in every step."""
        return self.kind == "constant" or (self.kind != "trace" and self.scale_s == 0) or len(set(self.trace_s)) == 1

    def mean_s(self, nominal_s: float) -> float | None:
        """Return the mean compute time of all workers; None where it has no formula."""
        if self.kind == "normal" or (self.slow_workers and self.slow_factor != 1):
            return None
        return float(np.mean(self.trace_s)) if self.kind == "trace" else nominal_s + self.scale_s * (self.kind == "exponential")

    def sample(self, rng: np.random.Generator, nominal_s: float, shape: tuple[int, ...]) -> np.ndarray:
        """Return random compute times in seconds, of shape [..., N], for a nominal C = `nominal_s` > 0."""
        if self.kind == "trace":
            times_s = self._drawn(rng, shape)
        elif self.kind == "normal":
            times_s = np.maximum(0.0, nominal_s + self.scale_s * rng.standard_normal(shape))
        elif self.kind == "exponential":
            times_s = nominal_s + self.scale_s * rng.standard_exponential(shape)
        elif self.kind == "lognormal":
            variance = math.log1p((self.scale_s / nominal_s) ** 2)
            times_s = nominal_s * np.exp(math.sqrt(variance) * rng.standard_normal(shape) - variance / 2)
        else:
            times_s = np.full(shape, nominal_s)
        times_s[..., : self.slow_workers] *= self.slow_factor
        return times_s

    def _drawn(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return steps of the trace, [..., N]: enough groups of `together` workers, each in a random order."""
        steps_RxM = np.reshape(self.trace_s, (-1, self.together))
        drawn = rng.choice(steps_RxM, (*shape[:-1], -(-shape[-1] // self.together)))  # [..., groups, M]
        return rng.permuted(drawn, axis=-1).reshape(*shape[:-1], -1)[..., : shape[-1]]


@checked_class
@dataclasses.dataclass(frozen=True)
class Compressed:
    """A measured compressed form of a workload's messages.

    Args:
        name: shown in tables.
        num_workers: number of workers among which it was measured.
        topology: name of the topology for gossip; empty: gradients are averaged over all workers.
        ratio: bytes that workers send ÷ bytes of the same exchange without compression.
        coding_s: seconds per step that a worker takes to compress and decompress.
        latencies: how many times the latency of the uncompressed exchange it takes: 2 for two sums one after the other; ½ for a
            gather, which is half of a sum.
    """

    name: str
    num_workers: Annotated[int, Range(2, 2**40)]
    topology: str
    ratio: Rate
    coding_s: Amount
    latencies: Amount = 1.0

    def __post_init__(self):
        check_text("name", self.name)
        check_text("topology", self.topology)


@checked_class
@dataclasses.dataclass(frozen=True)
class Workload:
    """One worker's iteration without communication. Buckets are in the order in which their gradients are computed.

    Args:
        forward_s: F, seconds of the forward pass.
        backward_s: B_b, seconds of the backward pass from bucket b − 1 until bucket b is ready.
        num_bytes: bytes of each bucket's parameters, as they travel uncompressed.
        optimizer_s: seconds of the optimizer, all buckets together.
        combine_s: additional seconds of computing in a step with messages, all buckets together, such as averaging received
            parameters with the worker's own.
        beside_s: additional seconds of an exchange that runs while the gradient is computed, since both need the same cores.
        jitter: how F + Σ B_b varies.
        compressed: measured compressed forms of its messages.
    """

    forward_s: Amount
    backward_s: tuple[Amount, ...]
    num_bytes: tuple[Amount, ...]
    optimizer_s: Amount = 0.0
    combine_s: Amount = 0.0
    jitter: Jitter = Jitter()
    compressed: tuple[Compressed, ...] = ()
    beside_s: Amount = 0.0

    def __post_init__(self):
        for name in ("backward_s", "num_bytes"):
            object.__setattr__(self, name, as_numbers(name, getattr(self, name)))
        if len(self.num_bytes) != len(self.backward_s) or not 1 <= len(self.num_bytes) <= MAX_BUCKETS:
            raise ValueError(
                f"backward_s has {len(self.backward_s)} buckets and num_bytes {len(self.num_bytes)}; give both one number for each of "
                f"1 to {MAX_BUCKETS} buckets"
            )
        check("forward_s + backward_s", self.compute_s, Rate)

    @property
    def compute_s(self) -> float:
        """C = F + Σ B_b, nominal seconds of forward and backward."""
        return self.forward_s + sum(self.backward_s)

    @property
    def total_bytes(self) -> float:
        """Bytes of all parameters."""
        return sum(self.num_bytes)

    def one_bucket(self) -> "Workload":
        """Return the workload with all parameters in one message."""
        return dataclasses.replace(self, backward_s=(sum(self.backward_s),), num_bytes=(self.total_bytes,))
