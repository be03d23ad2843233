"""Profiles and workloads as JSON files; for their fields see `profile`.

A file that cannot be read or has an invalid value raises a one-line ValueError: the file, the value, the constraint and the fix.
"""

import dataclasses
import json
import os
import re
from typing import Any

from decjax import files
from decjax.costmodel.profile import Cluster, Compressed, Jitter, Link, Workload
from decjax.options import shown

NESTED = {"intra": Link, "inter": Link, "jitter": Jitter}  # fields that are JSON objects


def _build(cls, fields: Any, where: str):
    """Make a dataclass from a JSON object, including nested ones."""
    declared = {field.name: field for field in dataclasses.fields(cls)}
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: {shown(fields)} must be a JSON object with {', '.join(declared)}")
    for name in fields:
        if name not in declared:
            raise ValueError(f"{where}: unknown field {shown(name)}; the fields are {', '.join(declared)}")
    for name, field in declared.items():
        if name not in fields and field.default is dataclasses.MISSING:
            raise ValueError(f"{where}: field {name!r} is missing; the fields are {', '.join(declared)}")
    values = {name: _build(NESTED[name], value, f"{where}: {name}") if name in NESTED else value for name, value in fields.items()}
    if "compressed" in fields:
        if not isinstance(fields["compressed"], list):
            raise ValueError(f"{where}: compressed={shown(fields['compressed'])} must be a list of JSON objects")
        values["compressed"] = tuple(_build(Compressed, form, f"{where}: compressed") for form in fields["compressed"])
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def read_object(path: str | os.PathLike) -> dict[str, Any]:
    """Return the JSON object in a file; raise a ValueError that names the file."""
    try:
        return files.read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); give a file such as one of configs/clusters") from error


def load(path: str | os.PathLike) -> tuple[Cluster, Workload | None]:
    """Return the cluster of a profile and the workload measured on it, None if it has none; raise a ValueError as described above."""
    content = read_object(path)
    workload = content.pop("workload", None)
    return (_build(Cluster, content, str(path)), None if workload is None else _build(Workload, workload, f"{path}: workload"))


def load_workload(path: str | os.PathLike) -> Workload:
    """Return the workload of a JSON file with the fields of a `Workload`; raise a ValueError as `load` does."""
    return _build(Workload, read_object(path), str(path))


def save(path: str | os.PathLike, cluster: Cluster, workload: Workload | None = None) -> None:
    """Write a profile that `load` reads back unchanged; replace an existing file in one atomic step."""
    content = dataclasses.asdict(cluster)
    if workload is not None:
        content["workload"] = dataclasses.asdict(workload)
    text = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(content, indent=2))
    files.write_whole(path, text + "\n")  # Lists of numbers stay on one line.
