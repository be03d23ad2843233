"""Profiles and workloads as JSON files; for their fields see `profile`.

A file that cannot be read, or holds an impossible value, raises a ValueError of one line: the file, the value, the constraint and
the fix.
"""

import dataclasses
import json
import os
import re
from typing import Any

from decjax import files
from decjax.costmodel.profile import Cluster, Compressed, Jitter, Link, Workload, shown

NESTED = {"intra": Link, "inter": Link, "jitter": Jitter}  # fields that are JSON objects


def _build(cls, fields: Any, where: str):
    """An instance of a dataclass from a JSON object, nested ones included."""
    known = {field.name: field for field in dataclasses.fields(cls)}
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: {shown(fields)} must be a JSON object with {', '.join(known)}")
    for name in fields:
        if name not in known:
            raise ValueError(f"{where}: unknown field {shown(name)}; the fields are {', '.join(known)}")
    for name, field in known.items():
        if name not in fields and field.default is dataclasses.MISSING:
            raise ValueError(f"{where}: field {name!r} is missing; the fields are {', '.join(known)}")
    values = {name: _build(NESTED[name], value, f"{where}: {name}") if name in NESTED else value for name, value in fields.items()}
    if "compressed" in fields:
        if not isinstance(fields["compressed"], list):
            raise ValueError(f"{where}: compressed={shown(fields['compressed'])} must be a list of JSON objects")
        values["compressed"] = tuple(_build(Compressed, form, f"{where}: compressed") for form in fields["compressed"])
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """The JSON object that a file holds; ValueError if there is none."""
    try:
        return files.read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); give a file such as one of configs/clusters") from error


def load(path: str | os.PathLike) -> tuple[Cluster, Workload | None]:
    """The cluster of a profile file, and the workload that was measured on it, None if there is none; ValueError as said above."""
    content = read_json(path)
    workload = content.pop("workload", None)
    return (_build(Cluster, content, str(path)), None if workload is None else _build(Workload, workload, f"{path}: workload"))


def load_workload(path: str | os.PathLike) -> Workload:
    """The workload of a JSON file that holds the fields of a `Workload` only; ValueError as for `load`."""
    return _build(Workload, read_json(path), str(path))


def save(path: str | os.PathLike, cluster: Cluster, workload: Workload | None = None) -> None:
    """Writes a profile that `load` reads back unchanged; an existing file is replaced in one atomic step."""
    content = dataclasses.asdict(cluster)
    if workload is not None:
        content["workload"] = dataclasses.asdict(workload)
    text = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(content, indent=2))
    files.write_whole(path, text + "\n")  # Lists of numbers stay on one line.
