"""Inputs of the cost model: a cluster, a workload, and how compute times vary. Plain data, with a JSON form.

A *profile* is one JSON object: the fields of `Cluster`, and optionally a measured `Workload` under "workload". It is measured
(launch.calibrate), fitted to timings (`fit`) or written by hand from datasheets. Names of fields end in their unit; `_Bps` is
bytes per second, not bits.

    {"name": "box", "num_nodes": 4, "workers_per_node": 1,
     "intra": {"latency_s": 2e-6, "bandwidth_Bps": 5e9}, "inter": {"latency_s": 1e-3, "bandwidth_Bps": 2.5e7},
     "full_duplex_pairs": true,
     "workload": {"forward_s": 0.1, "backward_s": [0.2], "num_bytes": [2.4e7], "jitter": {"kind": "normal", "scale_s": 0.01}}}
"""

import dataclasses
import math
from typing import Any

import numpy as np

from decjax.options import shown

JITTERS = ("constant", "normal", "exponential", "lognormal", "trace")
LARGEST = 1e18  # positive numbers lie between 1/LARGEST and LARGEST: others are mistakes, and would overflow
MAX_BUCKETS = 256


def check_number(what: str, value: Any, *, low: float = 0.0, positive: bool = False, fix: str = "") -> float:
    """`value` as a float; ValueError unless it is a number ≥ low (> low if `positive`) within `LARGEST`."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not (value > low if positive else value >= low):
        bound = f"{'above' if positive else 'at least'} {low:g}"
        raise ValueError(f"{what}={shown(value)} must be a number {bound}" + (f"; {fix}" if fix else ""))
    if not (value == 0 or 1 / LARGEST <= abs(value) <= LARGEST):
        raise ValueError(f"{what}={shown(value)} must be between {1 / LARGEST:g} and {LARGEST:g}; check its unit")
    return float(value)


def check_count(what: str, value: Any, low: int, fix: str = "", high: int = 2**40) -> None:
    """Raises ValueError unless `value` is a whole number from `low` to `high`."""
    is_count = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_count or not low <= value <= high:
        bound = f"of at most {high}" if is_count and value > high else f"of at least {low}"
        raise ValueError(f"{what}={shown(value)} must be a whole number {bound}" + (f"; {fix}" if fix else ""))


def check_type(what: str, value: Any, kind: type, must: str) -> None:
    """Raises ValueError, saying what it `must` be, unless `value` is of that type."""
    if not isinstance(value, kind):
        raise ValueError(f"{what}={shown(value)} must be {must}")


def check_text(what: str, value: Any) -> None:
    """Raises ValueError unless `value` is text that a terminal can show: control characters could rewrite the screen."""
    check_type(what, value, str, "text")
    if not value.isprintable():
        raise ValueError(f"{what}={shown(value)} must be text without control characters; remove them")


@dataclasses.dataclass(frozen=True)
class Link:
    """A kind of link: a message of b bytes takes α + b/β seconds.

    Args:
        latency_s: α ≥ 0, seconds.
        bandwidth_Bps: β > 0, bytes per second in one direction.
    """

    latency_s: float
    bandwidth_Bps: float

    def __post_init__(self):
        check_number("latency_s", self.latency_s)
        check_number("bandwidth_Bps", self.bandwidth_Bps, positive=True, fix="25 Gbit/s are 25e9/8 = 3.125e9 bytes/s")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of workers. Each L consecutive workers share a node and its NIC: worker i is on node i div L.

    Args:
        name: shown in tables.
        num_nodes: number of nodes.
        workers_per_node: L, workers on each node.
        intra: the link of *one worker* to the others of its node (NVLink, PCIe, shared memory).
        inter: the NIC of *one node*: all that its workers send to other nodes at the same time shares `bandwidth_Bps`.
        full_duplex_pairs: False where two workers that exchange with each other take turns, and so twice the time, as with a raw
            permutation over gloo; decjax's own exchanges between CPU processes do not.
        all_reduce_efficiency: fraction of the bandwidth that reductions over a group reach, in (0, 1].
        hierarchical_all_reduce: True where reductions over several nodes reduce inside nodes first, so that 2(m−1)/m of the
            bytes leave each of m nodes; False where one ring runs through all n workers, with 2(n−1)/n.
        codec_Bps: bytes of parameters that a worker encodes and decodes per second: one number for all codecs, or one for
            each by name; None: codecs take no time.
        flops: floating-point operations per second that a worker sustains, to estimate compute times; None: unknown.
        memory_bytes: memory of a worker; None: unknown.
    """

    name: str
    num_nodes: int
    workers_per_node: int
    intra: Link
    inter: Link
    full_duplex_pairs: bool = True
    all_reduce_efficiency: float = 1.0
    hierarchical_all_reduce: bool = False
    codec_Bps: float | dict[str, float] | None = None
    flops: float | None = None
    memory_bytes: float | None = None

    def __post_init__(self):
        check_text("name", self.name)
        check_count("num_nodes", self.num_nodes, 1)
        check_count("workers_per_node", self.workers_per_node, 1)
        check_type("intra", self.intra, Link, "a Link with latency_s and bandwidth_Bps")
        check_type("inter", self.inter, Link, "a Link with latency_s and bandwidth_Bps")
        check_type("full_duplex_pairs", self.full_duplex_pairs, bool, "true or false; false where a swap takes turns")
        check_type("hierarchical_all_reduce", self.hierarchical_all_reduce, bool, "true or false; false for gloo")
        check_number("all_reduce_efficiency", self.all_reduce_efficiency, positive=True)
        if self.all_reduce_efficiency > 1:
            raise ValueError(
                f"all_reduce_efficiency={self.all_reduce_efficiency} must be at most 1; "
                "raise bandwidth_Bps instead if the links are faster"
            )
        by_codec = self.codec_Bps if isinstance(self.codec_Bps, dict) else {"": self.codec_Bps}
        rates = {"codec_Bps" + (f"[{codec!r}]" if codec else ""): rate_Bps for codec, rate_Bps in by_codec.items()}
        for name, value in {"flops": self.flops, "memory_bytes": self.memory_bytes, **rates}.items():
            if value is not None:
                check_number(name, value, positive=True, fix="leave it out if it is unknown")

    @property
    def num_workers(self) -> int:
        """N, the number of workers on all nodes."""
        return self.num_nodes * self.workers_per_node

    def codec_rate(self, codec: str = "") -> float | None:
        """Bytes of parameters per second that a worker encodes and decodes; None: it takes no time. ValueError if it is not known."""
        if not isinstance(self.codec_Bps, dict):
            return self.codec_Bps
        if codec not in self.codec_Bps:
            raise ValueError(
                f"codec {codec!r}: the profile {self.name!r} has a speed for each codec, but none for this one; use one of "
                f"{', '.join(self.codec_Bps)}"
            )
        return self.codec_Bps[codec]

    def coding_s(self, num_bytes: float, codec: str = "") -> float:
        """Seconds that a worker takes to encode and decode `num_bytes` of parameters."""
        rate_Bps = self.codec_rate(codec)
        return num_bytes / rate_Bps if rate_Bps else 0.0

    def resize(self, num_workers: int) -> "Cluster":
        """The same cluster with another number of nodes, or one smaller node; ValueError unless the workers fill whole nodes."""
        check_count("workers", num_workers, 1)
        per_node = min(self.workers_per_node, num_workers)
        if num_workers % per_node:
            fits = num_workers // per_node * per_node
            raise ValueError(f"workers={num_workers} do not fill nodes of {per_node} workers; use {fits} or {fits + per_node}")
        return dataclasses.replace(self, num_nodes=num_workers // per_node, workers_per_node=per_node)


@dataclasses.dataclass(frozen=True)
class Jitter:
    """How the compute time of a worker's step varies around its nominal value C, independently over steps and, but for a trace of workers
    that were timed `together`, over workers.

        constant     C
        normal       max(0, C + s Z)                         Z standard normal
        exponential  C + s E                                 E standard exponential: mean C + s
        lognormal    C exp(σZ − σ²/2), σ² = ln(1 + (s/C)²)   mean C, standard deviation s
        trace        drawn with replacement from the compute times `trace_s`; C is not used

    Args:
        kind: one of the above.
        scale_s: s, seconds.
        trace_s: measured compute times of forward and backward, seconds.
        together: M, of how many workers the trace has times that belong together: M after one another are those of one step. They are
            drawn as a whole, and dealt to the workers at random; so workers that share cores are not all slow at once.
        slow_workers: number of workers, the first ones, that are slow in every step.
        slow_factor: factor ≥ 1 by which these take longer.
    """

    kind: str = "constant"
    scale_s: float = 0.0
    trace_s: tuple[float, ...] = ()
    together: int = 1
    slow_workers: int = 0
    slow_factor: float = 1.0

    def __post_init__(self):
        if self.kind not in JITTERS:
            raise ValueError(f"jitter kind {shown(self.kind)} is unknown; choose from {', '.join(JITTERS)}")
        check_number("scale_s", self.scale_s)
        object.__setattr__(self, "trace_s", _numbers("trace_s", self.trace_s))
        if (self.kind == "trace") != bool(self.trace_s):
            raise ValueError(
                f"jitter kind {self.kind!r} with {len(self.trace_s)} values in trace_s: kind 'trace' needs them, "
                "and no other kind takes them"
            )
        check_count("together", self.together, 1)
        if len(self.trace_s) % self.together or (self.together > 1 and self.kind != "trace"):
            raise ValueError(
                f"together={self.together} must divide the number of values in trace_s, which is {len(self.trace_s)}; leave it out if "
                "workers vary by themselves"
            )
        if (self.kind in ("constant", "trace")) and self.scale_s:
            raise ValueError(
                f"jitter kind {self.kind!r} has no scale_s, got {self.scale_s}; use 'normal', 'exponential' or 'lognormal'"
            )
        check_count("slow_workers", self.slow_workers, 0)
        check_number("slow_factor", self.slow_factor, low=1.0)

    @property
    def is_deterministic(self) -> bool:
        """Whether each worker takes the same time in every step."""
        return self.kind == "constant" or (self.kind != "trace" and self.scale_s == 0) or len(set(self.trace_s)) == 1

    @property
    def is_uniform(self) -> bool:
        """Whether all workers draw from the same distribution."""
        return self.slow_workers == 0 or self.slow_factor == 1

    def sample(self, rng: np.random.Generator, nominal_s: float, shape: tuple[int, ...]) -> np.ndarray:
        """Random compute times in seconds, of shape [..., N], for a nominal C = `nominal_s` > 0."""
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
        """Steps of the trace, [..., N]: as many groups of `together` workers as it takes, each in an order of its own."""
        steps_RxM = np.reshape(self.trace_s, (-1, self.together))
        drawn = rng.choice(steps_RxM, (*shape[:-1], -(-shape[-1] // self.together)))  # [..., groups, M]
        return rng.permuted(drawn, axis=-1).reshape(*shape[:-1], -1)[..., : shape[-1]]


def _numbers(what: str, values: Any) -> tuple[float, ...]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise ValueError(f"{what}={shown(values)} must be a list of numbers")
    return tuple(check_number(f"{what}[{index}]", value) for index, value in enumerate(values))


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
    num_workers: int
    topology: str
    ratio: float
    coding_s: float
    latencies: float = 1.0

    def __post_init__(self):
        check_text("name", self.name)
        check_text("topology", self.topology)
        check_count("num_workers", self.num_workers, 2)
        check_number("ratio", self.ratio, positive=True)
        check_number("coding_s", self.coding_s)
        check_number("latencies", self.latencies)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One worker's iteration without communication. Buckets are in the order in which their gradients are computed.

    Args:
        forward_s: F, seconds of the forward pass.
        backward_s: B_b, seconds of the backward pass from bucket b − 1 until bucket b is ready.
        num_bytes: bytes of each bucket's parameters, as they travel uncompressed.
        optimizer_s: seconds of the optimizer, all buckets together.
        combine_s: seconds to combine arrived parameters with the worker's own, all buckets together, and for what else a step with
            messages computes.
        beside_s: seconds that an exchange takes longer while the gradient is computed, since both need the same cores.
        jitter: how F + Σ B_b varies.
        compressed: compressed forms of its messages that were measured.
    """

    forward_s: float
    backward_s: tuple[float, ...]
    num_bytes: tuple[float, ...]
    optimizer_s: float = 0.0
    combine_s: float = 0.0
    jitter: Jitter = Jitter()
    compressed: tuple[Compressed, ...] = ()
    beside_s: float = 0.0

    def __post_init__(self):
        for name in ("forward_s", "optimizer_s", "combine_s", "beside_s"):
            check_number(name, getattr(self, name))
        for name in ("backward_s", "num_bytes"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if not self.num_bytes or len(self.num_bytes) != len(self.backward_s):
            raise ValueError(
                f"backward_s has {len(self.backward_s)} buckets and num_bytes {len(self.num_bytes)}; "
                "both need one number per bucket, and at least one"
            )
        if len(self.num_bytes) > MAX_BUCKETS:
            raise ValueError(
                f"num_bytes has {len(self.num_bytes)} buckets; join some, {MAX_BUCKETS} are the most that are simulated"
            )
        check_number("forward_s + backward_s", self.compute_s, positive=True)
        check_type("jitter", self.jitter, Jitter, "a Jitter, such as Jitter('normal', scale_s=0.01)")

    @property
    def compute_s(self) -> float:
        """C = F + Σ B_b, nominal seconds of forward and backward."""
        return self.forward_s + sum(self.backward_s)

    @property
    def total_bytes(self) -> float:
        """Bytes of all parameters."""
        return sum(self.num_bytes)

    def one_bucket(self) -> "Workload":
        """The same workload with all parameters in one message."""
        return dataclasses.replace(self, backward_s=(sum(self.backward_s),), num_bytes=(self.total_bytes,))
