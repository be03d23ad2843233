"""The runs of a sweep: which they are, where they are, and how far each is."""

from collections.abc import Container, Mapping
import contextlib
import fcntl
import functools
import itertools
import json
import os
import pathlib
import time
from typing import Any, BinaryIO, NamedTuple, NoReturn

import jax

from decjax import config as parts
from decjax import files, registry
from decjax.errors import ConfigError
from launch import command, config_file, train_flags

TABULATED = ("eval_loss", "local_eval_loss_min", "local_eval_loss_max", "time_s", "bytes_per_step_per_worker")  # of a summary


class Reached(NamedTuple):
    """How far a run that has begun is."""

    step: int  # of the last row of its metrics; 0: there is none yet
    steps: int
    loss: float | None  # of that row
    age_s: float  # how long ago it last wrote something


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
        """Contents of `summary.json`, or None while the run is not finished: launch.train mends a damaged one."""
        try:
            summary = files.read_json(self.directory / "summary.json")
        except ValueError:
            return None
        return summary if summary.keys() >= set(TABULATED) else None

    def reached(self) -> Reached | None:
        """How far the run is; None if it has not begun."""
        metrics, step, loss = self.directory / "metrics.jsonl", 0, None
        try:
            steps = files.read_json(self.directory / "config.json")["steps"]
            changed_s = max(path.stat().st_mtime for path in (self.log, metrics, self.directory) if path.exists())
            if row := last_line(metrics, '{"step"'):
                step, loss = (json.loads(row)[name] for name in ("step", "loss"))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Reached(step, steps, loss, time.time() - changed_s)

    def taken(self) -> BinaryIO | None:
        """A file that keeps others from running the member, as long as it is open here or in a process that inherits it; None while
        somebody else has it."""
        self.directory.mkdir(exist_ok=True)
        held = (self.directory / ".member").open("wb")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.close()
            return None
        return held


def last_line(path: pathlib.Path, start: str = "", behind: int = 0) -> str:
    """The last whole line of a file that begins with `start`, or nothing; `behind` so many bytes."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(behind, path.stat().st_size - 10_000))
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    return next((line.strip() for line in reversed(lines) if line.strip() and line.endswith("\n") and line.startswith(start)), "")


def parse_sweep(text: str) -> dict[str, list[str]]:
    """Reads `key=value,value;key=value`."""
    swept: dict[str, list[str]] = {}
    for part in text.split(";"):
        key, equals, values = (piece.strip() for piece in part.partition("="))
        if not key or not equals:
            raise command.UserError(f"sweep: {part.strip()!r} is not key=value,value; write as in 'topology=ring,torus;seed=0,1'")
        if key in swept:
            raise command.UserError(f"sweep: key {key!r} stands twice; list all its values once, after commas")
        swept[key] = [value.strip() for value in registry.split(values)]
        if "" in swept[key]:
            raise command.UserError(f"sweep: {part.strip()!r} has an empty value; write as in 'seed=0,1'")
        if len(set(swept[key])) < len(swept[key]):
            raise command.UserError(f"sweep: {part.strip()!r} has a value twice, and each makes a run; leave one out")
    return swept


def sweep_of(module, path: str, argument: str) -> str:
    """The sweep that the config file itself defines."""
    if hasattr(module, "get_sweep"):
        return module.get_sweep(argument)
    if hasattr(module, "SWEEP"):
        return module.SWEEP
    raise command.UserError(
        f"no --sweep is given and {path} defines none; write --sweep='seed=0,1', or get_sweep(arg) in the config"
    )


def check_apart(config: str, swept: dict[str, list[str]], extra: list[str]) -> None:
    """Refuse a key of the sweep that --config sets as well, and options behind `--` that each run gets from the sweep."""
    inside = {part.partition("=")[0].strip(): part.strip() for part in registry.split(config.partition(":")[2])}
    for key, values in swept.items():
        if key in inside:
            _refuse_twice(key, values, "--config", inside[key])
    for option in ("config", "workdir"):
        if config_file.given(option, extra) is not None:
            raise command.UserError(f"--{option} behind --: each run gets its own from the sweep; write it before --")


def _refuse_twice(key: str, values: list[str], where: str, other: str) -> NoReturn:
    raise command.UserError(
        f"sweep: {key} is set by the sweep, '{key}={','.join(values)}', and in {where}, '{other}'; leave it out of {where}"
    )


def command_line(config: str, values: Mapping[str, str], keys: Container[str]) -> list[str]:
    """The options of launch.train that set these values: keys of the shorthand in its text, others as fields."""
    path, _, argument = config.partition(":")
    shorthand = ",".join(filter(None, [argument, *(f"{key}={value}" for key, value in values.items() if key in keys)]))
    fields = [f"--config.{key}={value}" for key, value in values.items() if key not in keys]
    return [f"--config={path}:{shorthand}" if shorthand else f"--config={path}", *fields]


def expand(config: str, swept: dict[str, list[str]], keys: Container[str], workdir: pathlib.Path, extra: list[str]) -> list[Member]:
    """The runs: the product of all values, the last key fastest.

    Args:
        config: as `configs/lm.py:smoke`.
        swept: the values of each key.
        keys: of the config's shorthand; other keys are fields.
        workdir: of the sweep.
        extra: arguments for every run.
    """
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
    try:
        spec = train_flags.check(member.arguments, num_processes)
        if spec.workers and resolve:
            jax.config.update("jax_platforms", "cpu")  # Accelerators are for the runs.
            parts.resolve(spec.document)
    except (command.UserError, ConfigError) as error:
        raise command.UserError(f"{member.name}: {error}") from error


def check_values(members: list[Member], config: str, swept: dict[str, list[str]], keys: Container[str], extra: list[str]) -> None:
    """Refuse a sweep in which an option behind `--` overrides a value of the sweep, and one with two equal runs.

    Configs are compared as launch.train reads them, so the spelling of options does not matter.
    """

    @functools.cache
    def fields(*options: str) -> dict[str, Any] | None:
        try:
            return train_flags.fields(train_flags.read(options).config)
        except command.UserError:  # A combination of values that is not a run of the sweep.
            return None

    def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
        return {path for path in one.keys() | other.keys() if one.get(path, KeyError) != other.get(path, KeyError)}

    texts = [value for _, value in config_file.fields(extra)]
    seen: dict[str, Member] = {}
    for member in members:
        options = command_line(config, member.values, keys)
        named, trained = fields(*options), fields(*options, *extra)
        assert named is not None and trained is not None  # `check` has read them.
        overridden = differing(named, trained)
        for key, values in swept.items() if overridden else ():
            own, words = member.values[key], _words(key, member.values[key])
            # The fields that a value sets are those that change with it. A single value is left out instead, or replaced by a text
            # behind `--`.
            others = [value for value in values if value != own] or [None, *texts]
            for value in others:
                changed = {**member.values, key: value}
                other = fields(*command_line(config, {k: v for k, v in changed.items() if v is not None}, keys))
                set_here = differing(named, other) if other else set()
                spelled_out = {path for path in set_here if str(named.get(path)) in words}
                if set_here and (set_here <= overridden or spelled_out & overridden):
                    path = min(spelled_out & overridden or set_here)
                    _refuse_twice(key, values, "the options behind --", f"--config.{path}={trained.get(path)}")
        if (same := seen.setdefault(json.dumps(trained, sort_keys=True), member)) is not member:
            raise command.UserError(f"sweep: {same.name} and {member.name} are the same run; leave one out")


def _words(key: str, value: str) -> set[str]:
    """The words of a value of the sweep: its text, and in call form its name and the values of its options."""
    with contextlib.suppress(ValueError):
        name, options = registry.parse(key, value)
        return {value, name, *map(str, options.values())}
    return {value}


def claim(workdir: pathlib.Path, config: str, extra: list[str]) -> None:
    """Makes `workdir` the home of this config's sweeps; refuses another's: skipping its finished runs would mix two experiments."""
    now = {"config": config, "arguments": extra}
    path = workdir / "sweep.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not path.exists():  # Tasks of a job array come at the same time, and none may read half a file.
            files.write_whole(path, json.dumps(now) + "\n", shared=True)
        before = files.read_json(path)
    except (OSError, ValueError) as error:
        raise command.UserError(f"workdir {str(workdir)!r} cannot be used ({error}); choose another --workdir") from error
    if before != now:
        raise command.UserError(f"{workdir} holds a sweep of another config ({json.dumps(before)}); choose another --workdir")
