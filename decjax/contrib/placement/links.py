"""Networks of different devices: latency and bandwidth of every pair, both ways, and the devices' speed and memory.

A file is JSON. It has matrices, from row to column, whose diagonals do not count:

    {"source": "measured with launch.calibrate", "latency_s": [[0, 0.01], [0.02, 0]], "bandwidth_Bps": [[0, 1e8], [5e7, 0]],
     "devices": ["rome", "oslo"], "flops": [1e13, 4e13], "memory_bytes": [8e9, 24e9]}

or regions with a number of devices each, and the links between them, the same both ways unless the other way is given too:

    {"source": "…", "regions": {"Oregon": 8, "Tokyo": 8}, "within": {"latency_s": 0.01, "bandwidth_Bps": 2.5e8},
     "between": [{"from": "Oregon", "to": "Tokyo", "latency_s": 0.096, "bandwidth_Bps": 6.5e7}]}

or connections to a network that is no bottleneck itself, such as those of homes: i sends to j at the lower of i's upload and j's
download rate, after both latencies:

    {"source": "…", "connections": [{"name": "cable", "count": 4, "latency_s": 0.01, "upload_Bps": 5e6, "download_Bps": 6e7}]}

Regions and connections may have "flops" and "memory_bytes" of one of their devices.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
from typing import Annotated, Any

import numpy as np

from decjax.costmodel.json_files import located, read, read_object
from decjax.costmodel.profile import LARGEST, Amount, Link, Rate, check_text
from decjax.files import write_whole
from decjax.options import Range, check, check_choice, checked_class, shown

MAX_DEVICES = 4096
Number = Annotated[int, Range(1, MAX_DEVICES)]  # of devices


@dataclasses.dataclass(frozen=True)
class Links:
    """The links of N devices: a message of b bytes from i to j takes α_ij + b/β_ij seconds.

    Args:
        latency_s: α, [N, N], seconds; the diagonal does not count.
        bandwidth_Bps: β, [N, N], bytes per second.
        names: of the devices; (): their numbers.
        flops: floating-point operations per second that each sustains, [N]; None: all the same.
        memory_bytes: of each, [N]; None: enough.
        source: where the numbers are from.

    Raises:
        ValueError: for an impossible value: what, where, the constraint.
    """

    latency_s: np.ndarray
    bandwidth_Bps: np.ndarray
    names: tuple[str, ...] = ()
    flops: np.ndarray | None = None
    memory_bytes: np.ndarray | None = None
    source: str = ""

    def __post_init__(self):
        N = len(self.latency_s)
        check("the number of devices", N, Annotated[int, Range(2, MAX_DEVICES)])
        object.__setattr__(self, "latency_s", _array("latency_s", self.latency_s, (N, N), 0.0))
        object.__setattr__(self, "bandwidth_Bps", _array("bandwidth_Bps", self.bandwidth_Bps, (N, N), 1 / LARGEST))
        for field, values in _of_devices(self).items():
            object.__setattr__(self, field, _array(field, values, (N,), 1 / LARGEST))
        object.__setattr__(self, "names", tuple(self.names) or tuple(map(str, range(N))))
        for name in self.names:
            check_text("devices", name)
        if len(self.names) != N or len(set(self.names)) != N:
            raise ValueError(f"devices: {len(set(self.names))} different names for {N} devices; give each its own, or none")

    @property
    def num_devices(self) -> int:
        """N."""
        return len(self.latency_s)

    def seconds(self, num_bytes: float) -> np.ndarray:
        """Return the seconds of a message from row to column, [N, N]; the diagonal is zero."""
        times = num_bytes / self.bandwidth_Bps
        times += self.latency_s
        np.fill_diagonal(times, 0)
        return times

    def take(self, devices: Sequence[int]) -> "Links":
        """Return the links between some of the devices, in the given order."""
        rows = list(devices)
        if rows == list(range(self.num_devices)):
            return self
        arrays, pairs = {name: values[rows] for name, values in _of_devices(self).items()}, np.ix_(rows, rows)
        return Links(
            self.latency_s[pairs], self.bandwidth_Bps[pairs], tuple(self.names[i] for i in rows), **arrays, source=self.source
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write them as a file of matrices."""
        arrays = {name: values.tolist() for name, values in _of_devices(self).items()}
        matrices = {"latency_s": self.latency_s.tolist(), "bandwidth_Bps": self.bandwidth_Bps.tolist()}
        write_whole(path, json.dumps({"source": self.source, "devices": list(self.names), **matrices, **arrays}) + "\n")


def _of_devices(described: object) -> dict[str, Any]:
    """Return `flops` and `memory_bytes` of links or a file, those that it has."""
    return {name: values for name in ("flops", "memory_bytes") if (values := getattr(described, name)) is not None}


def _array(field: str, value: np.ndarray | list, shape: tuple[int, ...], low: float) -> np.ndarray:
    """Return nested lists of numbers from `low` to `LARGEST` as an array; diagonals of matrices do not count and are replaced."""
    array = value if isinstance(value, np.ndarray) and value.dtype == float else np.array(value, object)
    # NumPy would convert other types, too. Rows of different lengths are lists here.
    is_wrong = array.dtype == object and not {*map(type, array.flat)} <= {int, float}
    if is_wrong or array.shape != shape:
        raise ValueError(f"{field}={shown(value)} must be {' × '.join(map(str, shape))} numbers for {shape[0]} devices; correct it")
    if len(shape) == 2 and (array.diagonal() != (diagonal := 1.0 if low else 0.0)).any():
        array = array.copy() if array is value else array
        np.fill_diagonal(array, diagonal)
    with np.errstate(invalid="ignore"):  # NaN is refused.
        is_outside = ~((array >= low) & (array <= LARGEST))
    if is_outside.any():
        index = tuple(np.argwhere(is_outside)[0])
        check(field + "".join(f"[{i}]" for i in index), array.item(index), Annotated[float, Range(low, LARGEST)])
    return array.astype(float, copy=False)


# -- Files ------------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike) -> Links:
    """Return the links of a file, in one of the forms above.

    Raises:
        ValueError: of one line, for a file that cannot be read or holds an impossible value.
    """
    content, forms = read_object(path), {"latency_s": MatricesFile, "regions": RegionsFile, "connections": ConnectionsFile}
    matches = [name for name in forms if name in content]
    with located(path):
        if len(matches) != 1:
            raise ValueError(f"it must have one of {', '.join(forms)}, and has {' and '.join(matches) or 'none of them'}")
    document = read(forms[matches[0]], content, str(path))
    with located(path):
        return document.links()


@checked_class
@dataclasses.dataclass(frozen=True)
class MatricesFile:
    """A file with the links of all pairs; for its fields see `Links`."""

    latency_s: list
    bandwidth_Bps: list
    devices: list[str] = dataclasses.field(default_factory=list)
    flops: list | None = None
    memory_bytes: list | None = None
    source: str = ""

    def links(self) -> Links:
        """Return the links that the file describes."""
        arrays = {name: np.array(values, object) for name, values in _of_devices(self).items()}
        latency_s, bandwidth_Bps = np.array(self.latency_s, object), np.array(self.bandwidth_Bps, object)
        return Links(latency_s, bandwidth_Bps, tuple(self.devices), **arrays, source=self.source)


@checked_class
@dataclasses.dataclass(frozen=True)
class Between:
    """The link from one region to another."""

    from_: str
    to: str
    latency_s: Amount
    bandwidth_Bps: Rate


@checked_class
@dataclasses.dataclass(frozen=True)
class RegionsFile:
    """A file with regions, the number of devices in each, and the links between them."""

    regions: dict[str, Number]
    within: Link
    between: tuple[Between, ...]
    source: str = ""
    flops: Rate | None = None
    memory_bytes: Rate | None = None

    def links(self) -> Links:
        """Return the links that the file describes."""
        listed: dict[tuple[str, str], set[Link]] = {}
        for link in self.between:
            for region in (link.from_, link.to):
                check_choice("between: region", region, tuple(self.regions))
            listed.setdefault((link.from_, link.to), set()).add(Link(link.latency_s, link.bandwidth_Bps))
        _check_counts({f"regions: {region}": count for region, count in self.regions.items()})

        def link_of(here: str, there: str) -> Link:
            links = listed.get((here, there)) or listed.get((there, here)) or ({self.within} if here == there else set())
            if len(links) != 1:
                raise ValueError(f"between: the link from {here} to {there} has {len(links)} different values; give it once")
            return next(iter(links))

        links_RxR = [[link_of(here, there) for there in self.regions] for here in self.regions]
        region_N = np.repeat(np.arange(len(self.regions)), list(self.regions.values()))
        values_RxRx2 = np.array([[(link.latency_s, link.bandwidth_Bps) for link in row] for row in links_RxR], float)
        latency_s, bandwidth_Bps = np.moveaxis(values_RxRx2[np.ix_(region_N, region_N)], -1, 0)
        names = tuple(f"{region} {i}" for region, count in self.regions.items() for i in range(count))
        arrays = {name: np.full(len(names), value, float) for name, value in _of_devices(self).items()}
        return Links(latency_s, bandwidth_Bps, names, **arrays, source=self.source)


@checked_class
@dataclasses.dataclass(frozen=True)
class Connection:
    """The connections of `count` devices to a network that is no bottleneck itself."""

    name: str
    count: Number
    latency_s: Amount
    upload_Bps: Rate
    download_Bps: Rate
    flops: Rate | None = None
    memory_bytes: Rate | None = None


@checked_class
@dataclasses.dataclass(frozen=True)
class ConnectionsFile:
    """A file with the connections of devices to a network."""

    connections: tuple[Connection, ...]
    source: str = ""

    def links(self) -> Links:
        """Return the links that the file describes."""
        _check_counts({f"connections: {kind.name}: count": kind.count for kind in self.connections})
        names = tuple(f"{kind.name} {i}" for kind in self.connections for i in range(kind.count))

        def of_devices(field: str) -> np.ndarray | None:
            values = [getattr(kind, field) for kind in self.connections for _ in range(kind.count)]
            if None in values and {*values} != {None}:
                raise ValueError(f"connections: {field} must be given for all or for none")
            return None if None in values else np.array(values, float)

        latency_s, upload_Bps, download_Bps = map(of_devices, ("latency_s", "upload_Bps", "download_Bps"))
        assert latency_s is not None and upload_Bps is not None and download_Bps is not None
        latencies_s, bandwidth_Bps = latency_s[:, None] + latency_s, np.minimum(upload_Bps[:, None], download_Bps)
        return Links(latencies_s, bandwidth_Bps, names, of_devices("flops"), of_devices("memory_bytes"), self.source)


def _check_counts(counts: dict[str, int]) -> None:
    for what, count in (*counts.items(), ("the number of devices", sum(counts.values()))):
        check(what, count, Number)
