"""Networks of devices that are not alike: latency and bandwidth of every pair, both ways, and the devices' speed and memory.

A file is JSON. Either it has the matrices, from row to column, whose diagonals do not count:

    {"source": "measured with launch.calibrate", "latency_s": [[0, 0.01], [0.02, 0]], "bandwidth_Bps": [[0, 1e8], [5e7, 0]],
     "devices": ["rome", "oslo"], "flops": [1e13, 4e13], "memory_bytes": [8e9, 24e9]}

or regions with a number of devices each, and the links between them, the same both ways unless the other way is given too:

    {"source": "…", "regions": {"Oregon": 8, "Tokyo": 8}, "within": {"latency_s": 0.01, "bandwidth_Bps": 2.5e8},
     "between": [{"from": "Oregon", "to": "Tokyo", "latency_s": 0.096, "bandwidth_Bps": 6.5e7}]}

or connections to a network that is itself no bottleneck, such as homes: i sends to j at the lower of i's upload and j's download rate,
after both latencies:

    {"source": "…", "connections": [{"name": "cable", "count": 4, "latency_s": 0.01, "upload_Bps": 5e6, "download_Bps": 6e7}]}

Regions and connections may have "flops" and "memory_bytes" of one of their devices.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
from typing import Any

import numpy as np

from decjax.costmodel import profile
from decjax.costmodel.files import read_object
from decjax.files import write_whole
from decjax.options import shown

MAX_DEVICES = 4096


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
        for field in ("latency_s", "bandwidth_Bps"):
            object.__setattr__(self, field, _matrix(field, getattr(self, field), positive=field == "bandwidth_Bps"))
        N = self.num_devices
        if self.bandwidth_Bps.shape != (N, N):
            raise ValueError(f"bandwidth_Bps is {_by(self.bandwidth_Bps)} and latency_s {_by(self.latency_s)}; they must be alike")
        object.__setattr__(self, "names", tuple(self.names) or tuple(map(str, range(N))))
        if len(self.names) != N or len(set(self.names)) != N:
            raise ValueError(f"devices: {len(set(self.names))} different names for {N} devices; give each its own, or none")
        for name in self.names:
            profile.check_text("devices", name)
        for field in ("flops", "memory_bytes"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, _vector(field, getattr(self, field), N))

    @property
    def num_devices(self) -> int:
        """N."""
        return len(self.latency_s)

    def seconds(self, num_bytes: float) -> np.ndarray:
        """Seconds of a message from row to column, [N, N]; the diagonal is zero."""
        times = num_bytes / self.bandwidth_Bps
        times += self.latency_s
        np.fill_diagonal(times, 0)
        return times

    def take(self, devices: Sequence[int]) -> "Links":
        """The links between some of the devices, in the order that is given."""
        rows = list(devices)
        if rows == list(range(self.num_devices)):
            return self
        each = {name: None if (had := getattr(self, name)) is None else had[rows] for name in ("flops", "memory_bytes")}
        pairs = np.ix_(rows, rows)
        return Links(
            self.latency_s[pairs], self.bandwidth_Bps[pairs], tuple(self.names[i] for i in rows), **each, source=self.source
        )

    def save(self, path: str | os.PathLike) -> None:
        """Writes them as a file of matrices."""
        each = {name: values.tolist() for name in _DEVICE if (values := getattr(self, name)) is not None}
        matrices = {"latency_s": self.latency_s.tolist(), "bandwidth_Bps": self.bandwidth_Bps.tolist()}
        write_whole(path, json.dumps({"source": self.source, "devices": list(self.names), **matrices, **each}) + "\n")


def _by(matrix: np.ndarray) -> str:
    return " × ".join(map(str, matrix.shape))


def _matrix(field: str, value: Any, positive: bool) -> np.ndarray:
    """[N, N] floats; the diagonal is replaced, as it does not count."""
    try:
        matrix = _floats(value)
    except (TypeError, OverflowError):
        raise ValueError(f"{field} must be a matrix of numbers, with rows of the same length") from None
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not 2 <= len(matrix) <= MAX_DEVICES:
        raise ValueError(f"{field} is {_by(matrix)}; it must be N × N, for 2 to {MAX_DEVICES} devices")
    if (matrix.diagonal() != (diagonal := 1.0 if positive else 0.0)).any():
        matrix = matrix.copy() if matrix is value else matrix
        np.fill_diagonal(matrix, diagonal)
    low, high = (1 / profile.LARGEST if positive else 0.0), profile.LARGEST
    if not (matrix.min() >= low and matrix.max() <= high):
        i, j = np.argwhere(~((matrix >= low) & (matrix <= high)))[0]
        raise ValueError(f"{field}[{i}][{j}]={matrix[i, j]:g} must be {'above' if positive else 'at least'} 0 and at most {high:g}")
    return matrix


def _floats(value: Any) -> np.ndarray:
    """Nested lists of numbers as an array; a TypeError for anything else, also for what NumPy would take for a number."""
    if isinstance(value, np.ndarray) and value.dtype == float:
        return value
    array = np.array(value, object)
    if not all(issubclass(kind, int | float) and kind is not bool for kind in set(map(type, array.flat))):
        raise TypeError
    return array.astype(float)


def _vector(field: str, value: Any, N: int) -> np.ndarray:
    try:
        vector = _floats(value)
    except (TypeError, OverflowError):
        raise ValueError(f"{field} must be a list of numbers, one for each device") from None
    if vector.shape != (N,) or not (bool((vector > 0).all()) and bool((vector <= profile.LARGEST).all())):
        raise ValueError(f"{field} must be {N} numbers above 0, one for each device; got {shown(value)}")
    return vector


# -- Files ------------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike) -> Links:
    """The links of a file, in one of the forms above.

    Raises:
        ValueError: of one line, for a file that cannot be read or holds an impossible value.
    """
    content = read_object(path)
    forms = [name for name in _READ if name in content]
    try:
        if len(forms) != 1:
            raise ValueError(f"it must have one of {', '.join(_READ)}, and has {' and '.join(forms) or 'none of them'}")
        return _READ[forms[0]](content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _fields(what: str, given: Any, needed: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """A JSON object's fields; refused unless it has all that are needed and no others."""
    if not isinstance(given, dict):
        raise ValueError(f"{what}: {shown(given)} must be a JSON object with {', '.join(needed)}")
    for name in needed:
        if name not in given:
            raise ValueError(f"{what}: {name} is missing; the fields are {', '.join((*needed, *optional))}")
    for name in given:
        if name not in (*needed, *optional):
            raise ValueError(f"{what}: {shown(name)} is unknown; the fields are {', '.join((*needed, *optional))}")
    return given


_DEVICE = ("flops", "memory_bytes")


def _of_matrices(content: dict[str, Any]) -> Links:
    given = _fields("the file", content, ("latency_s", "bandwidth_Bps"), ("source", "devices", *_DEVICE))
    return Links(
        given["latency_s"],
        given["bandwidth_Bps"],
        _names(given.get("devices", [])),
        given.get("flops"),
        given.get("memory_bytes"),
        str(given.get("source", "")),
    )


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"devices: {shown(value)} must be a list of names")
    return tuple(value)


def _of_regions(content: dict[str, Any]) -> Links:
    given = _fields("the file", content, ("regions", "within", "between"), ("source", *_DEVICE))
    if not isinstance(given["regions"], dict) or not given["regions"]:
        raise ValueError("regions must be a JSON object of names and numbers of devices")
    regions, counts = list(given["regions"]), list(given["regions"].values())
    _check_counts({f"regions: {region}": count for region, count in given["regions"].items()})
    numbers = ("latency_s", "bandwidth_Bps")
    found = {(region, region): _fields("within", given["within"], numbers) for region in regions}
    if not isinstance(given["between"], list):
        raise ValueError("between must be a list of JSON objects")
    listed = [_fields("between", link, ("from", "to", *numbers)) for link in given["between"]]
    for region in (link[end] for link in listed for end in ("from", "to")):
        if region not in regions:
            raise ValueError(f"between: {shown(region)} is no region; the regions are {', '.join(regions)}")
    given_once: dict[tuple[str, str], dict[str, Any]] = {}
    for link in listed:
        if given_once.setdefault((link["from"], link["to"]), link) != link:
            raise ValueError(
                f"between: the link from {link['from']} to {link['to']} is given twice, with other numbers; leave one out"
            )
    found |= {(link["to"], link["from"]): link for link in listed} | {(link["from"], link["to"]): link for link in listed}
    for here in regions:
        for there in regions:
            if (here, there) not in found:
                raise ValueError(f"between: the link from {here} to {there} is missing")
    which = [regions.index(region) for region, count in zip(regions, counts) for _ in range(count)]
    latency_s, bandwidth_Bps = (
        np.array([[_number(found[here, there], field) for there in regions] for here in regions])[np.ix_(which, which)]
        for field in numbers
    )
    names = tuple(f"{region} {i}" for region, count in zip(regions, counts) for i in range(count))
    each = {field: np.full(len(which), _number(given, field)) for field in _DEVICE if field in given}
    return Links(latency_s, bandwidth_Bps, names, **each, source=str(given.get("source", "")))


def _of_connections(content: dict[str, Any]) -> Links:
    given = _fields("the file", content, ("connections",), ("source",))
    if not isinstance(given["connections"], list) or not given["connections"]:
        raise ValueError("connections must be a list of JSON objects")
    needed = ("name", "count", "latency_s", "upload_Bps", "download_Bps")
    kinds = [_fields("connections", kind, needed, _DEVICE) for kind in given["connections"]]
    _check_counts({f"connections: {kind['name']}: count": kind["count"] for kind in kinds})
    homes = [kind for kind in kinds for _ in range(kind["count"])]
    latency_s, upload_Bps, download_Bps = (np.array([_number(home, field) for home in homes]) for field in needed[2:])
    names = tuple(f"{kind['name']} {i}" for kind in kinds for i in range(kind["count"]))
    each = {}
    for field in _DEVICE:
        if some := [home for home in homes if field in home]:
            if len(some) < len(homes):
                raise ValueError(f"connections: {field} must be given for all or for none")
            each[field] = np.array([_number(home, field) for home in homes])
    latencies_s, bandwidth_Bps = latency_s[:, None] + latency_s[None], np.minimum(upload_Bps[:, None], download_Bps[None])
    np.fill_diagonal(latencies_s, 0.0)
    np.fill_diagonal(bandwidth_Bps, 1.0)
    return Links(latencies_s, bandwidth_Bps, names, **each, source=str(given.get("source", "")))


def _check_counts(counts: Mapping[str, Any]) -> None:
    for what, count in counts.items():
        profile.check_count(what, count, 1, high=MAX_DEVICES)
    if sum(counts.values()) > MAX_DEVICES:
        raise ValueError(f"{sum(counts.values())} devices together; there may be at most {MAX_DEVICES}")


def _number(fields: Mapping[str, Any], name: str) -> float:
    return profile.check_number(name, fields[name], positive=name != "latency_s")


_READ = {"latency_s": _of_matrices, "regions": _of_regions, "connections": _of_connections}
