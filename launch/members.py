"""The runs of a sweep: which they are, where they are, and how far each is."""

import fcntl
import itertools
import json
import os
import pathlib
import time
from typing import Any, BinaryIO, NamedTuple

from absl import flags
import jax
from ml_collections import config_flags

from decjax import config as parts
from decjax import files, registry
from decjax.errors import ConfigError
from launch import command, config_file

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
            summary = json.loads((self.directory / "summary.json").read_text())
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) and summary.keys() >= set(TABULATED) else None

    def reached(self) -> Reached | None:
        """How far the run is; None if it has not begun."""
        metrics, step, loss = self.directory / "metrics.jsonl", 0, None
        try:
            steps = json.loads((self.directory / "config.json").read_text())["steps"]
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
    """Refuses a key of the sweep that --config, or what stands behind `--`, sets as well: only one of them could count."""
    inside = {part.partition("=")[0].strip(): part.strip() for part in registry.split(config.partition(":")[2])}
    behind = {path: f"--config.{path}={value}" for path, value in config_file.fields(extra)}
    for key, values in swept.items():
        for where, given in (("--config", inside), ("the options behind --", behind)):
            if key in given:
                raise command.UserError(
                    f"sweep: {key} is set by the sweep, '{key}={','.join(values)}', and in {where}, '{given[key]}'; leave it out of {where}"
                )


def expand(config: str, swept: dict[str, list[str]], keys, workdir: pathlib.Path, extra: list[str]) -> list[Member]:
    """The runs: the product of all values, the last key fastest.

    Args:
        config: as `configs/lm.py:smoke`.
        swept: the values of each key.
        keys: of the config's shorthand; other keys are fields.
        workdir: of the sweep.
        extra: arguments for every run.
    """
    path, _, argument = config.partition(":")
    members = []
    for combination in itertools.product(*swept.values()):
        values = dict(zip(swept, combination, strict=True))
        pairs = {key: f"{key}={value}" for key, value in values.items()}
        shorthand = ",".join(filter(None, [argument, *(pair for key, pair in pairs.items() if key in keys)]))
        directory = workdir / ",".join(pairs.values()).replace(os.sep, "%2F")
        fields = [f"--config.{pair}" for key, pair in pairs.items() if key not in keys]
        arguments = [f"--config={path}:{shorthand}" if shorthand else f"--config={path}", *fields, *extra]
        members.append(Member(values, directory, [*arguments, f"--workdir={directory}"]))
    return members


def check(member: Member, get_config, resolve: bool) -> None:
    """Reads the run's config just as launch.train will, and refuses it with the config's own complaint.

    With `resolve` it also builds the parts, if the number of workers is given: otherwise the devices of the run decide.
    """
    try:  # The flag's parser would bury what the config file says.
        problem = config_file.misplaced(get_config(*member.arguments[0].partition(":")[2:]), member.arguments)
    except Exception as error:  # Whatever a config file does wrong.
        raise command.UserError(f"{member.name}: {error}") from error
    if problem:
        raise command.UserError(f"{member.name}: {problem}")
    argv = ["launch.train", *(argument for argument in member.arguments if argument.startswith("--config"))]
    parsed = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, flag_values=parsed, sys_argv=argv)
    try:
        parsed(argv)
        config: Any = parsed["config"].value
        if parts.read(config).workers and resolve:
            jax.config.update("jax_platforms", "cpu")  # Accelerators are for the runs.
            parts.resolve(config)
    except (flags.Error, ConfigError, ValueError, AttributeError, KeyError, TypeError, OSError) as error:
        raise command.UserError(f"{member.name}: {command.one_line(error)}") from error


def claim(workdir: pathlib.Path, config: str, extra: list[str]) -> None:
    """Makes `workdir` the home of this config's sweeps; refuses another's: skipping its finished runs would mix two experiments."""
    now = {"config": config, "arguments": extra}
    path = workdir / "sweep.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not path.exists():  # Tasks of a job array come at the same time, and none may read half a file.
            files.write_whole(path, json.dumps(now) + "\n", shared=True)
        before = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise command.UserError(f"workdir {str(workdir)!r} cannot be used ({error}); choose another --workdir") from error
    if before != now:
        raise command.UserError(f"{workdir} holds a sweep of another config ({json.dumps(before)}); choose another --workdir")
