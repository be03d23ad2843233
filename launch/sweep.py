"""Trains every combination of some values, one run after the other, and tabulates what came out.

    python -m launch.sweep --config=configs/lm.py:smoke --sweep='topology=ring,torus;seed=0,1' --workdir=sweeps/graphs

Keys of the config's shorthand (topology, workers, optimizer …) go into its argument, every other key is a field of the
config: `optimizer.learning_rate=1e-3,4e-3`. Without --sweep the config file's own is taken: a function
`get_sweep(argument)` or a constant `SWEEP` with the same text. What stands behind `--` goes to every run. Each run has
its own directory below --workdir, named by its values. The same command skips what is finished and continues the rest.
"""

import itertools
import json
import os
import pathlib
import statistics
import time
from typing import NamedTuple

from absl import flags
from ml_collections import config_flags
import rich.console
import rich.markup
import rich.table

from decjax import registry
from launch import command, config_file, processes

_CONFIG = flags.DEFINE_string("config", None, "Config file, with an optional shorthand after a colon.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the sweep; each run has its own below.", required=True)
_SWEEP = flags.DEFINE_string("sweep", None, "'key=value,value;key=value,value'; none: the config file's own.")

TABULATED = ("eval_loss", "local_eval_loss_min", "local_eval_loss_max", "time_s", "bytes_per_step_per_worker")  # of a summary
SEED = "seed"  # the key whose values make the spread


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


# -- What to run ------------------------------------------------------------------------------------------------------


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


def check(member: Member, get_config) -> None:
    """Reads the run's config just as launch.train will, and refuses it with the config's own complaint."""
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
    except (flags.Error, ValueError, AttributeError, KeyError, TypeError, OSError) as error:
        raise command.UserError(f"{member.name}: {command.one_line(error)}") from error


def claim(workdir: pathlib.Path, config: str, extra: list[str]) -> None:
    """Makes `workdir` the home of this config's sweeps; refuses another's: skipping its finished runs would mix two experiments."""
    now = {"config": config, "arguments": extra}
    path = workdir / "sweep.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(json.dumps(now) + "\n")
        before = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise command.UserError(f"workdir {str(workdir)!r} cannot be used ({error}); choose another --workdir") from error
    if before != now:
        raise command.UserError(f"{workdir} holds a sweep of another config ({json.dumps(before)}); choose another --workdir")


# -- Running ----------------------------------------------------------------------------------------------------------


def run(member: Member, caught: list, console: rich.console.Console) -> int:
    """Trains one member, or continues it; a caught signal is forwarded once and a second one ends it at once."""
    member.directory.mkdir(exist_ok=True)
    with member.log.open("ab") as log, console.status("starting …") as status:
        process = processes.start(processes.python(processes.TRAIN, member.arguments), stdout=log, stderr=log)
        child = processes.Child(process, log)
        try:
            processes.wait([child], caught, lambda: status.update(rich.markup.escape(last_line(member.log))))
        finally:
            process.kill()  # Nothing stays behind, whatever happens here.
    return process.returncode


def last_line(path: pathlib.Path, start: str = "") -> str:
    """The last line of a file that begins with `start`, or nothing."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 10_000))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip() and line.startswith(start)), "")


def run_all(members: list[Member], caught: list, console: rich.console.Console) -> int:
    """Runs what is not finished; returns the number of failures."""
    failures = 0
    for number, member in enumerate(members, start=1):
        if caught:
            break
        title = f"[{number}/{len(members)}] {member.name}"
        if member.summary():
            console.print(f"{title}: already finished", markup=False)
            continue
        console.print(f"{title}: running", markup=False)
        begun = time.monotonic()
        code = run(member, caught, console)
        summary = member.summary()
        if caught and not summary:
            break
        if code == 0 and summary:
            console.print(f"{title}: eval_loss {summary['eval_loss']:.4f} after {time.monotonic() - begun:.0f} s", markup=False)
            continue
        failures += 1
        reason = last_line(member.log, "error:") or f"error: {last_line(member.log)}"
        console.print(f"{title}: FAILED, it {processes.how_it_ended(code)}; {reason}\n    all it said: {member.log}", markup=False)
    return failures


# -- The table --------------------------------------------------------------------------------------------------------


def mean_and_spread(values: list[float], digits: int) -> str:
    """`mean ± sample standard deviation`; without the latter where all values are the same."""
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(set(values)) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def tabulate(members: list[Member]) -> rich.table.Table:
    """One row per setting, over its seeds."""
    keys = [key for key in members[0].values if key != SEED]
    settings: dict[tuple, list[dict | None]] = {}
    for member in members:
        settings.setdefault(tuple(member.values[key] for key in keys), []).append(member.summary())
    table = command.table(*(key.rpartition(".")[2] for key in keys), words=len(keys))
    table.caption = (
        "mean ± sample standard deviation over n finished runs; "
        "local spread: best to worst worker's own evaluation loss; MB/step: sent per worker"
    )
    for header in ("n", "eval_loss", "local spread", "time, s", "MB/step"):
        table.add_column(header, justify="right", overflow="fold")
    for setting, summaries in settings.items():
        done = [summary for summary in summaries if summary]
        table.add_row(
            *map(rich.markup.escape, setting),
            f"{len(done)}" + (f"/{len(summaries)}" if len(done) < len(summaries) else ""),
            mean_and_spread([summary["eval_loss"] for summary in done], 4),
            mean_and_spread([summary["local_eval_loss_max"] - summary["local_eval_loss_min"] for summary in done], 4),
            mean_and_spread([summary["time_s"] for summary in done], 0),
            mean_and_spread([summary["bytes_per_step_per_worker"] / 1e6 for summary in done], 3),
        )
    return table


def main(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        command.fail(f"unexpected argument {argv[0]!r}; options of launch.train go behind --")
    workdir = command.folder("workdir", _WORKDIR.value)
    path, _, argument = _CONFIG.value.partition(":")
    module = config_file.load_module(path)
    swept = parse_sweep(sweep_of(module, path, argument) if _SWEEP.value is None else _SWEEP.value)
    check_apart(_CONFIG.value, swept, argv)
    members = expand(_CONFIG.value, swept, getattr(module, "KEYS", ()), workdir, argv)
    for member in members:
        check(member, module.get_config)
    claim(workdir, _CONFIG.value, argv)

    console = rich.console.Console(highlight=False, soft_wrap=True)
    with processes.caught_signals() as caught:
        failures = run_all(members, caught, console)
    console.print(tabulate(members), soft_wrap=False)
    if caught:
        again = processes.same_command("launch.sweep")
        console.print(f"interrupted by {caught[0].name}; the same command continues:\n  {again}", markup=False)
        return 128 + caught[0]
    if failures:
        console.print(f"{failures} of {len(members)} runs failed; the same command tries them again", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    command.run(main, errors=(config_file.ConfigFileError, OSError))
