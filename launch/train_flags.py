"""The flags of launch.train, and how launchers parse and check them before they start processes."""

from collections.abc import Sequence
import functools
import json
import pathlib
import re
from typing import NamedTuple

from absl import flags
import ml_collections
from ml_collections import config_flags

from decjax import config as parts
from decjax.config import ConfigError
from launch import command, config_file

# The launcher sets most of these on launch.train.
LAUNCHER_FLAGS = ("elastic", "chaos", "num_processes", "coordinator", "process_index", "standby")

flags.disclaim_key_flags()  # --help shows the flags with those of the module that calls `define`.


class Holders(NamedTuple):
    """The flags of launch.train."""

    config: flags.FlagHolder
    workdir: flags.FlagHolder[str | None]
    resume_from: flags.FlagHolder[str | None]
    placement: flags.FlagHolder[str | None]
    tracker: flags.FlagHolder[str | None]
    profile: flags.FlagHolder[range | None]
    peak_flops: flags.FlagHolder[float | None]


class Steps(flags.ArgumentParser):
    """The parser of a flag whose value is a range of steps, START:STOP."""

    def parse(self, argument: str | range) -> range:
        if isinstance(argument, range):
            return argument
        steps = range(*map(int, argument.split(":"))) if re.fullmatch(r"\d{1,9}:\d{1,9}", argument) else range(0)
        if not steps:
            raise ValueError("it must be START:STOP, two whole numbers, the first one less")
        return steps

    def flag_type(self) -> str:
        return "START:STOP"


def define(values: flags.FlagValues = flags.FLAGS, argv: Sequence[str] | None = None) -> Holders:
    """Define the flags of launch.train.

    Args:
        values: in which the flags are defined.
        argv: the command line, in which each --config.FIELD becomes a flag too; None: that of this process.
    """

    text = functools.partial(flags.DEFINE_string, default=None, flag_values=values)
    return Holders(
        config_flags.DEFINE_config_file(
            "config",
            None,
            "Config file, with an optional shorthand after a colon: configs/lm.py:workers=4,smoke.",
            flag_values=values,
            sys_argv=None if argv is None else list(argv),
        ),
        text("workdir", help="Directory of the run: config, metrics, checkpoints, summary."),
        text("resume_from", help="Start from the newest checkpoint of another run, with any number of workers."),
        text(
            "placement",
            help="Placement of stages and workers on devices: a file written by launch.place; default: JAX's device order.",
        ),
        flags.DEFINE_enum(
            "tracker",
            None,
            ["wandb"],
            "Further destination of metrics: wandb, after `pip install wandb`; WANDB_MODE=offline keeps them on this machine.",
            flag_values=values,
        ),
        flags.DEFINE(
            Steps(),
            "profile",
            None,
            "Trace steps START:STOP, from START to STOP - 1, with JAX's profiler into WORKDIR/profile.",
            flag_values=values,
        ),
        flags.DEFINE_float(
            "peak_flops",
            None,
            "Peak FLOP/s of a device, for the utilization (MFU) in the metrics; default: that of known GPUs and TPUs in bf16.",
            lower_bound=1.0,
            flag_values=values,
        ),
    )


def read(arguments: Sequence[str]) -> flags.FlagValues:
    """Parse a command line of launch.train, including its config; raise a UserError if launch.train would refuse it."""
    argv = ["launch.train", *arguments]
    values = flags.FlagValues()
    command.add_common(values)
    define(values, argv)
    problem = "is an option of the launcher, not of a run"
    command.check(
        *(
            (config_file.value_of(option, arguments) is None, f"--{option} {problem}", "put it before --, or leave it out")
            for option in LAUNCHER_FLAGS
        )
    )
    command.options_only(command.parsed(argv, values)[1:])
    return values


def check(arguments: Sequence[str], num_processes: int = 1) -> parts.RunSpec:
    """Check a command line of launch.train for a run with `num_processes`; return its spec."""
    values = read(arguments)
    workdir = command.folder("workdir", values.workdir)
    if values.resume_from is not None:
        from decjax.train.workdir import steps_saved  # Importing it takes a second.

        has_saved = steps_saved(workdir) or steps_saved(pathlib.Path(values.resume_from))
        problem = f"--resume_from={values.resume_from} has no checkpoint"
        command.check((has_saved, problem, "give the --workdir of a run that has saved one"))
    spec = spec_of(values)
    devices = spec.devices_of_worker * (spec.workers or max(1, num_processes // spec.devices_of_worker))
    problem = f"{devices} devices must be divided evenly among the processes"
    command.check(
        (
            devices % num_processes == 0 or spec.simulate,
            f"workers={spec.workers} on {num_processes} processes: {problem}",
            f"start {devices} processes, or another divisor of {devices}",
        )
    )
    return spec


def spec_of(values: flags.FlagValues) -> parts.RunSpec:
    """Return the spec of the config of parsed flags."""
    try:
        return parts.read(values.config)
    except ConfigError as error:
        command.refuse(str(error))


def fields(config: ml_collections.ConfigDict) -> dict[str, object]:
    """Return the fields of a config by path, with references resolved."""

    def walk(path: str, value: object):
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from walk(f"{path}.{name}" if path else name, inner)
        else:
            yield path, value

    return dict(walk("", json.loads(config.to_json_best_effort())))
