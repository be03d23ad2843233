"""The runs of a sweep: their options, directories and progress."""

from collections.abc import Container, Mapping
import contextlib
import fcntl
import functools
import itertools
import json
import math
import os
import pathlib
import time
import types
from typing import BinaryIO, NamedTuple, NoReturn

import jax

from decjax import config as parts
from decjax import files, registry
from decjax.errors import ConfigError
from launch import command, config_file, train_flags

TABULATED = ("eval_loss", "local_eval_loss_min", "local_eval_loss_max", "time_s", "bytes_per_step_per_worker")  # of a summary
MOST_RUNS = 10_000  # of a sweep, each of which is checked before the first begins


class Progress(NamedTuple):
    """How far a run is."""

    step: int  # of the last row of metrics; 0: there is no row yet
    steps: int
    loss: float | None  # of that row
    age_s: float  # since the run last wrote a file


class Member(NamedTuple):
    """One run of the sweep."""

    values: dict[str, str]
    directory: pathlib.Path
    arguments: list[str]  # of launch.train

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def log(self) -> pathlib.Path:
        return self.directory / "train.log"

    def summary(self) -> dict | None:
        """Return the contents of `summary.json`; None if it is missing or damaged, so that launch.train has to run."""
        try:
            summary = files.read_json(self.directory / "summary.json")
        except ValueError:
            return None
        return summary if all(isinstance(summary.get(name), int | float) for name in TABULATED) else None

    def progress(self) -> Progress | None:
        """Return how far the run is; None if it has not started."""
        metrics, step, loss = self.directory / "metrics.jsonl", 0, None
        try:
            steps = files.read_json(self.directory / "config.json")["steps"]
            changed_s = max(path.stat().st_mtime for path in (self.log, metrics, self.directory) if path.exists())
            if row := last_line(metrics, '{"step"'):
                step, loss = (float(json.loads(row)[name]) for name in ("step", "loss"))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Progress(int(step), steps, loss, time.time() - changed_s)

    def lock(self) -> BinaryIO | None:
        """Lock the member until the returned file is closed, here and in processes that inherit it; None if it is locked already."""
        self.directory.mkdir(exist_ok=True)
        files.check_regular(self.directory / ".member")
        file = (self.directory / ".member").open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file


def last_line(path: pathlib.Path, start: str = "", offset: int = 0) -> str:
    """Return the last complete line of a file that begins with `start`, from byte `offset` on; empty if there is none."""
    if not path.exists():
        return ""
    with files.open_regular(path) as file:
        file.seek(max(offset, path.stat().st_size - 10_000))
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    return next((line.strip() for line in reversed(lines) if line.strip() and line.endswith("\n") and line.startswith(start)), "")


def parse_sweep(text: str) -> dict[str, list[str]]:
    """Parse `key=value,value;key=value`."""
    swept: dict[str, list[str]] = {}
    for part in (part.strip() for part in text.split(";")):
        key, equals, joined = (piece.strip() for piece in part.partition("="))
        values = [value.strip() for value in registry.split(joined)]
        command.check(
            (key and equals, f"sweep: {part!r} is not key=value,value", "write as in 'topology=ring,torus;seed=0,1'"),
            (key not in swept, f"sweep: key {key!r} is given twice", "list all its values once, after commas"),
            ("" not in values, f"sweep: {part!r} has an empty value", "write as in 'seed=0,1'"),
            (len({*values}) == len(values), f"sweep: {part!r} has a value twice, which makes two equal runs", "leave one out"),
        )
        swept[key] = values
    return swept


def sweep_of(module: types.ModuleType, path: str, argument: str) -> str:
    """Return the sweep that the config file itself defines."""
    try:
        text = module.get_sweep(argument) if hasattr(module, "get_sweep") else getattr(module, "SWEEP", None)
    except (Exception, SystemExit) as error:
        command.refuse(f"get_sweep of {path} failed ({error!r})", "correct it, or give --sweep='seed=0,1'")
    fix = "write --sweep='seed=0,1', or get_sweep(arg) in the config"
    command.check(
        (text is not None, f"no --sweep is given and {path} defines none", fix),
        (isinstance(text, str), f"the sweep of {path} is {registry.shown(text)}", "it must be a text such as 'seed=0,1'"),
    )
    return str(text)


def check_apart(config: str, swept: dict[str, list[str]], extra: list[str]) -> None:
    """Refuse a key of the sweep that --config sets as well, and options behind `--` that each run gets from the sweep."""
    inside = {part.partition("=")[0].strip(): part.strip() for part in registry.split(config.partition(":")[2])}
    for key in swept.keys() & inside.keys():
        _refuse_twice(key, swept[key], "--config", inside[key])
    command.check(
        *(
            (config_file.value_of(option, extra) is None, f"--{option} behind --: each run gets its own", "write it before --")
            for option in ("config", "workdir")
        )
    )


def _refuse_twice(key: str, values: list[str], where: str, other: str) -> NoReturn:
    command.refuse(
        f"sweep: {key} is set by the sweep, '{key}={','.join(values)}', and in {where}, '{other}'", f"leave it out of {where}"
    )


def command_line(config: str, values: Mapping[str, str], keys: Container[str]) -> list[str]:
    """Return the options of launch.train that set these values: shorthand keys in --config, others as fields."""
    path, _, argument = config.partition(":")
    shorthand = ",".join(filter(None, [argument, *(f"{key}={value}" for key, value in values.items() if key in keys)]))
    fields = [f"--config.{key}={value}" for key, value in values.items() if key not in keys]
    return [f"--config={path}:{shorthand}" if shorthand else f"--config={path}", *fields]


def expand(config: str, swept: dict[str, list[str]], keys: Container[str], workdir: pathlib.Path, extra: list[str]) -> list[Member]:
    """Return one member per combination of values; the last key varies fastest.

    Args:
        config: as `configs/lm.py:smoke`.
        swept: the values of each key.
        keys: of the config's shorthand; other keys are fields.
        workdir: of the sweep.
        extra: further options of every run.
    """
    count = math.prod(map(len, swept.values()))
    command.check(
        (count <= MOST_RUNS, f"sweep: its values make {count} runs; there may be at most {MOST_RUNS}", "use fewer values")
    )
    members = []
    for combination in itertools.product(*swept.values()):
        values = dict(zip(swept, combination, strict=True))
        directory = workdir / ",".join(f"{key}={value}" for key, value in values.items()).replace(os.sep, "%2F")
        members.append(Member(values, directory, [*command_line(config, values, keys), *extra, f"--workdir={directory}"]))
    return members


def check(member: Member, num_processes: int, resolve: bool) -> None:
    """Check the run's command line as launch.train does, with the same errors.

    With `resolve` also build the parts, if the number of workers is given; otherwise it depends on the devices of the run.
    """
    with command.refusing(member.name, errors=(command.UserError, ConfigError)):
        spec = train_flags.check(member.arguments, num_processes)
        if spec.workers and resolve:
            jax.config.update("jax_platforms", "cpu")  # Accelerators are for the runs.
            parts.resolve(spec.document)


def check_values(members: list[Member], config: str, swept: dict[str, list[str]], keys: Container[str], extra: list[str]) -> None:
    """Refuse a sweep in which an option behind `--` overrides a value of the sweep, and one with two equal runs.

    Configs are compared as launch.train reads them, so the spelling of options does not matter.
    """

    @functools.cache
    def read(*options: str) -> dict[str, object]:
        try:
            return train_flags.fields(train_flags.read(options).config)
        except command.UserError:  # A value that a field cannot have.
            return {}

    typed = [value for _, value in config_file.fields(extra)]
    runs: dict[str, Member] = {}
    for member in members:
        options = command_line(config, member.values, keys)
        swept_fields, all_fields = read(*options), read(*options, *extra)
        overridden = _differing(swept_fields, all_fields)
        for key, values in swept.items() if overridden else ():
            # A value sets the fields that change with it. A single value is compared with none, and with those behind `--`.
            others = [member.values | {key: value} for value in (values if len(values) > 1 else typed)]
            if len(values) == 1:
                others.append({name: value for name, value in member.values.items() if name != key})
            for other in others:
                fields = _differing(swept_fields, read(*command_line(config, other, keys)) or swept_fields)
                named = {path for path in fields if str(swept_fields.get(path)) in _words(key, member.values[key])} & overridden
                if named or (fields and fields <= overridden):
                    path = min(named or fields)
                    _refuse_twice(key, values, "the options behind --", f"--config.{path}={all_fields.get(path)}")
        same = runs.setdefault(json.dumps(all_fields, sort_keys=True), member)
        command.check((same is member, f"sweep: {same.name} and {member.name} are the same run", "leave one out"))


def _differing(one: dict[str, object], other: dict[str, object]) -> set[str]:
    """Return the paths of the fields in which two configs differ."""
    return {path for path in one.keys() | other.keys() if one.get(path, KeyError) != other.get(path, KeyError)}


def _words(key: str, value: str) -> set[str]:
    """Return a value of the sweep as text; in call form also its name and the values of its options."""
    with contextlib.suppress(ValueError):
        name, options = registry.parse(key, value)
        return {value, name, *map(str, options.values())}
    return {value}


def claim(workdir: pathlib.Path, config: str, extra: list[str]) -> None:
    """Reserve `workdir` for sweeps of this config; refuse that of another config, whose finished runs would be skipped."""
    now, path = {"config": config, "arguments": extra}, workdir / "sweep.json"
    with command.refusing(f"workdir {str(workdir)!r} cannot be used", "choose another --workdir", (OSError, ValueError)):
        workdir.mkdir(parents=True, exist_ok=True)
        if not path.exists():  # Tasks of a job array may write it at the same time.
            files.write_whole(path, json.dumps(now) + "\n", shared=True)
        before = files.read_json(path)
    command.check((before == now, f"{workdir} holds a sweep of another config ({json.dumps(before)})", "choose another --workdir"))
