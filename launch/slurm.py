"""Submits a run to Slurm: writes a batch file that a person can read, and hands it to sbatch.

    python -m launch.slurm --nodes=4 --gpus_per_node=8 --time=04:00:00 -- --config=configs/lm.py --workdir=runs/slurm

What stands behind `--` goes to every `python -m launch.train`. Each node has one task, which drives all of its GPUs;
`--tasks_per_node=8` starts a task a GPU. Before the time limit the tasks save, and the job goes back into the queue until the run
is finished; if a node fails, a new job goes on without it. The file and the logs, one a task, are in WORKDIR/slurm. `--dry_run`
prints the file and submits nothing. With `--array=0-7`, what stands behind `--` goes to `python -m launch.sweep`, of which each task
of the job array runs one member.
"""

import contextlib
import pathlib
import re
import shlex
import shutil
import subprocess
from typing import Any

from absl import flags

from decjax import config as parts
from decjax import files
from decjax.errors import ConfigError
from launch import batch_file, command, config_file, processes, sweep, train_flags

SWEEP = "launch.sweep"
_TIME = re.compile(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?", re.ASCII)  # of a job array, as 0-7:2
_NODES = re.compile(r"[\w.,\[\]-]+", re.ASCII)
_LEAST_S = 60  # how much earlier than asked Slurm may send a signal


def seconds(time: str) -> int:
    """Of a time limit as Slurm writes it: 90 (minutes), 90:00, 01:30:00, 1-12, 1-12:30, 1-12:30:00."""
    if not (found := _TIME.fullmatch(time)):
        raise command.UserError(f"--time={time}: must be as Slurm writes it, as 04:00:00 or 1-12:00:00")
    a, b, c = (int(found[name] or 0) for name in "abc")
    if max(b, c) > 59 or (found["d"] and a > 23):
        raise command.UserError(
            f"--time={time}: minutes and seconds must be at most 59, and hours after days at most 23; write it as 1-12:00:00"
        )
    if found["d"]:
        return ((int(found["d"]) * 24 + a) * 60 + b) * 60 + c
    return (a * 60 + b) * 60 + c if found["c"] else a * 60 + b


def last_task(array: str) -> int:
    """The largest index of a job array."""
    tasks, percent, most = array.partition("%")
    found = [_TASKS.fullmatch(part) for part in tasks.split(",")]
    last = [int(part[2] or part[1]) for part in found if part and int(part[1]) <= int(part[2] or part[1]) and int(part[3] or 1)]
    if len(last) < len(found) or (percent and not (most.isdecimal() and int(most))):
        raise command.UserError(f"--array={array}: must be as Slurm writes it, as 0-7, or 0-7%2 for two at a time")
    return max(last)


def check(job: batch_file.Job) -> None:
    """Refuses what Slurm or every task would refuse, before it waits in the queue."""
    for option, value, least in (
        ("nodes", job.nodes, 1),
        ("gpus_per_node", job.gpus_per_node, 0),
        ("tasks_per_node", job.tasks_per_node, 1),
        ("cpus_per_task", job.cpus_per_task, 0),
        ("retries", job.retries, 0),
    ):
        if value < least:
            raise command.UserError(f"--{option}={value}: must be at least {least}")
    if job.gpus_per_node % job.tasks_per_node:
        raise command.UserError(
            f"--tasks_per_node={job.tasks_per_node}: must divide --gpus_per_node={job.gpus_per_node}; "
            f"use 1, or {job.gpus_per_node} for a task a GPU"
        )
    if not 0 < job.save_s <= seconds(job.time) - _LEAST_S:
        raise command.UserError(
            f"--save_s={job.save_s}: must be more than 0, and a minute less than --time={job.time}, since Slurm may send the signal "
            "a minute early; choose a longer --time"
        )
    if re.search(r"^-|[\s%'\"$\\]", str(job.folder)):
        raise command.UserError(
            f"workdir {str(job.folder.parent)!r}: Slurm takes no spaces, quotes, $ and % in it, and no - at its beginning; choose another"
        )
    if job.exclude and not _NODES.fullmatch(job.exclude):
        raise command.UserError(f"--exclude={job.exclude}: must be names of nodes; write them as n3,n[7-9]")
    if job.array:
        last_task(job.array)
    if job.array and job.nodes * job.tasks_per_node > 1:
        raise command.UserError(
            f"--array with {job.nodes * job.tasks_per_node} tasks: a member of a sweep has one; use --nodes=1 --tasks_per_node=1"
        )
    for option in ("name", "setup", "container", "sbatch"):
        if re.search(r"[\x00-\x1f\x7f]|\\$", text := getattr(job, option)):
            raise command.UserError(
                f"--{option}={text!r}: must be one line without control characters or a backslash at its end; remove them"
            )
    for option in ("container", "sbatch"):
        try:
            shlex.split(text := getattr(job, option))
        except ValueError as error:
            raise command.UserError(f"--{option}={text!r}: {error}; close the quote, or leave it out") from error
    if job.setup and shutil.which("bash"):
        done = subprocess.run(["bash", "-n", "-c", job.setup], capture_output=True, text=True, check=False)
        if done.returncode:
            raise command.UserError(f"--setup={job.setup!r}: not a line of shell ({' '.join(done.stderr.split())}); correct it")


def check_members(job: batch_file.Job) -> None:
    """Refuses a sweep that launch.sweep would refuse, and a job array with more tasks than the sweep has runs."""
    chosen = flags.FlagValues()
    command.add_common(chosen)
    sweep.define(chosen)
    extra = command.parsed([SWEEP, *job.arguments], chosen)[1:]
    found, last = len(sweep.planned(chosen, extra, resolve=False)), last_task(job.array)
    if last >= found:
        raise command.UserError(f"--array={job.array}: the sweep has {found} runs; use --array=0-{found - 1}, or a part of it")


def placed(job: batch_file.Job) -> batch_file.Job:
    """The job of a training run, with `local_size`, the workers of a node, filled in where there are several nodes; refused where the
    config cannot run on so many devices."""
    config = train_flags.read(job.arguments).config
    spec = parts.read(config)
    devices = job.nodes * (job.gpus_per_node or job.tasks_per_node)
    if job.gpus_per_node and not spec.simulate and spec.workers * spec.devices_of_worker not in (0, devices):
        raise command.UserError(
            f"config.workers={spec.workers} on {job.nodes} nodes × {job.gpus_per_node} GPUs: every GPU must belong to a worker, "
            f"which has {spec.devices_of_worker} here; use workers={devices // spec.devices_of_worker}, or leave it out"
        )
    each, rest = divmod(spec.workers or devices // spec.devices_of_worker, job.nodes)
    if job.nodes > 1 and each > 1 and not rest and not spec.simulate and not any("local_size" in word for word in job.arguments):
        config.local_size = each
        with contextlib.suppress(ConfigError):  # Of a topology that cannot be divided so.
            parts.resolve(config, devices)
            return job._replace(arguments=[*job.arguments, f"--config.local_size={each}"])
        config.local_size = spec.local_size
    parts.resolve(config, devices)
    return job


def submit(job: batch_file.Job) -> None:
    """Writes the batch file and hands it to sbatch, which tells the job's number."""
    if not shutil.which("sbatch"):
        raise command.UserError("sbatch not found: this machine has no Slurm; --dry_run prints the file, launch.local runs here")
    job.folder.mkdir(parents=True, exist_ok=True)
    files.write_whole(job.file, batch_file.text(job))
    done = subprocess.run(["sbatch", str(job.file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise command.UserError(f"sbatch refused {job.file}: {' '.join(done.stderr.split())}")
    print(f"{done.stdout.strip()}; file and logs are in {job.folder}")


def main(argv: list[str]) -> None:
    chosen = flags.FLAGS
    module = chosen.module or (SWEEP if chosen.array else processes.TRAIN)
    if module == SWEEP and not chosen.array:
        raise command.UserError("--array is missing: each task of a job array runs one member of the sweep, as in --array=0-7")
    if module == SWEEP and argv and not argv[0].startswith("-"):
        raise command.UserError(f"unexpected argument {argv[0]!r}; options of {SWEEP} go behind --")
    on_cpu = not chosen.gpus_per_node  # Otherwise a process may have several GPUs.
    processes.check(module, argv, max(1, chosen.nodes * chosen.tasks_per_node) if on_cpu else 1)
    workdir = config_file.value_of("workdir", argv)
    if not workdir:
        raise command.UserError("--workdir is missing behind --; the batch file and the logs go there")
    options: dict[str, Any] = {name: chosen[name].value for name in batch_file.Job._fields if name in chosen and name != "module"}
    options["name"] = chosen.name or pathlib.Path(workdir).name
    job = batch_file.Job(
        folder=pathlib.Path(workdir) / "slurm",
        arguments=argv,
        typed=processes.same_command("launch.slurm"),
        module=module,
        **options,
    )
    check(job)
    if module == SWEEP:
        check_members(job)
    elif module == processes.TRAIN:
        job = placed(job)
    if chosen.dry_run:
        print(batch_file.text(job), end="")
    else:
        submit(job)


if __name__ == "__main__":
    usual = batch_file.Job._field_defaults
    flags.DEFINE_integer("nodes", None, "Nodes of the job.", required=True)
    flags.DEFINE_integer(
        "gpus_per_node", usual["gpus_per_node"], "GPUs of each node, all of which are used; 0: it runs on the CPU."
    )
    flags.DEFINE_integer("tasks_per_node", usual["tasks_per_node"], "Processes on each node, among which its GPUs are divided.")
    flags.DEFINE_integer("cpus_per_task", usual["cpus_per_task"], "CPUs of each process; 0: the job has whole nodes.")
    flags.DEFINE_string("time", None, "Time limit, as 04:00:00; the job comes back until the run is finished.", required=True)
    flags.DEFINE_integer("save_s", usual["save_s"], "Seconds before the time limit at which the tasks are told to save.")
    flags.DEFINE_integer("retries", usual["retries"], "How many failures of tasks or nodes a run survives.")
    flags.DEFINE_string("exclude", usual["exclude"], "Nodes that the job must not have, as n3,n[7-9].")
    flags.DEFINE_string("array", usual["array"], "Members of the sweep behind --, as 0-7, or 0-7%2 for two at a time.")
    flags.DEFINE_string("setup", usual["setup"], "A line of shell before everything, as '. .venv/bin/activate'.")
    flags.DEFINE_string("container", usual["container"], "What starts the container: a command before python, or options of srun.")
    flags.DEFINE_string("sbatch", usual["sbatch"], "More options of sbatch, as '--partition=gpu --account=me'.")
    flags.DEFINE_string("name", None, "Of the job; the last part of --workdir without it.")
    flags.DEFINE_string("module", None, "What every task runs instead of launch.train.")
    flags.DEFINE_boolean("dry_run", False, "Print the batch file, and submit nothing.")
    command.run(main, errors=(ConfigError, config_file.ConfigFileError))
