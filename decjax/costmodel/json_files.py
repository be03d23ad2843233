"""Profiles and workloads as JSON files, whose fields are those of the dataclasses in `profile`.

A file that cannot be read or has an invalid value is refused by a one-line ValueError: the file, the value and what is allowed.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os
import re
import typing
from typing import TypeVar

from decjax import files
from decjax.costmodel.profile import Cluster, Workload
from decjax.options import check, shown

T = TypeVar("T")


@contextlib.contextmanager
def located(where: str | os.PathLike) -> Iterator[None]:
    """Let a ValueError begin with the file or field that it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def read(cls: type[T], content: object, where: str) -> T:
    """Make a dataclass from a JSON object, with the dataclasses that its fields hold, alone or in lists.

    Fields that would be Python keywords end in an underscore, which their names in the file lack.
    """
    assert dataclasses.is_dataclass(cls)
    declared = {field.name.rstrip("_"): field for field in dataclasses.fields(cls)}
    fields: dict[str, object] = content if isinstance(content, dict) else {}
    unknown = [name for name in fields if name not in declared]
    needed = [name for name, field in declared.items() if field.default is field.default_factory is dataclasses.MISSING]
    missing = [name for name in needed if name not in fields]
    if unknown or missing or fields is not content:
        problem = f"unknown field {shown(unknown[0])}" if unknown else f"field {missing[0]!r} is missing" if missing else ""
        problem = problem if fields is content else f"{shown(content)} must be a JSON object"
        raise ValueError(f"{where}: {problem}; the fields are {', '.join(declared)}")
    hints = {name.rstrip("_"): hint for name, hint in typing.get_type_hints(cls).items()}
    values = {declared[name].name: _value(hints[name], value, f"{where}: {name}") for name, value in fields.items()}
    with located(where):
        return cls(**values)


def _value(hint: object, value: object, where: str) -> object:
    """Return a field's value; JSON objects become dataclasses where the hint is one, or a tuple of one."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read(hint, value, where)
    item = (*typing.get_args(hint), None)[0]
    if typing.get_origin(hint) is tuple and dataclasses.is_dataclass(item) and isinstance(item, type):
        check(where, value, list)
        return tuple(read(item, each, where) for each in typing.cast(list, value))
    return value


def read_object(path: str | os.PathLike) -> dict[str, object]:
    """Return the JSON object in a file."""
    with located(f"{path} cannot be read{' as JSON' * os.path.isfile(path)}"):
        return files.read_json(path)


def load(path: str | os.PathLike) -> tuple[Cluster, Workload | None]:
    """Return the cluster of a profile and the workload measured on it, None if it has none."""
    content = read_object(path)
    workload = content.pop("workload", None)
    return (read(Cluster, content, str(path)), None if workload is None else read(Workload, workload, f"{path}: workload"))


def load_workload(path: str | os.PathLike) -> Workload:
    """Return the workload of a JSON file with the fields of a `Workload`."""
    return read(Workload, read_object(path), str(path))


def save(path: str | os.PathLike, cluster: Cluster, workload: Workload | None = None) -> None:
    """Write a profile that `load` reads back unchanged; replace an existing file in one atomic step."""
    content = dataclasses.asdict(cluster)
    if workload is not None:
        content["workload"] = dataclasses.asdict(workload)
    text = re.sub(r"\[[^][{}]*\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(content, indent=2))
    files.write_whole(path, text + "\n")  # Lists of numbers stay on one line.
