"""Submit a run to Slurm: write a readable batch file and pass it to sbatch.

    python -m launch.slurm --nodes=4 --gpus_per_node=8 --time=04:00:00 -- --config=configs/lm.py --workdir=runs/slurm

Options after `--` are passed to each `python -m launch.train`. Each node has one task, which drives all of its GPUs;
`--tasks_per_node=8` starts one task per GPU. Before the time limit the tasks save, and the job is queued again until the run is
finished; if a node fails, a new job continues without it. The file and one log per task are in WORKDIR/slurm. `--dry_run` prints the
file and submits nothing. With `--array=0-7`, options after `--` are passed to `python -m launch.sweep`, and each task of the job
array runs one member.
"""

import contextlib
import itertools
import pathlib
import re
import shlex
import shutil
import subprocess

from absl import flags

from decjax import config as parts
from decjax import files
from decjax.errors import ConfigError
from launch import batch_file, command, config_file, processes, sweep, train_flags
from launch.batch_file import Job

SWEEP = "launch.sweep"
_TIME = re.compile(r"(?:(?P<d>\d{1,9})-)?(?P<a>\d{1,9})(?::(?P<b>\d{1,9}))?(?::(?P<c>\d{1,9}))?", re.ASCII)
_TASKS = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", re.ASCII)  # of a job array, as 0-7:2
_NODES = re.compile(r"[\w.,\[\]-]*", re.ASCII)
_WORKDIR = re.compile(r"(?!-)[^\s%'\"$\\]+")
_LINE = re.compile(r"([^\x00-\x1f\x7f]*[^\x00-\x1f\x7f\\])?")
_LEAST_S = 60  # Slurm may send a signal this much early.


def seconds(time: str) -> int | None:
    """Return the seconds of a time limit in Slurm's format: 90 (minutes), 90:00, 01:30:00, 1-12, 1-12:30, 1-12:30:00; None: invalid."""
    if not (match := _TIME.fullmatch(time)):
        return None
    a, b, c = (int(match[name] or 0) for name in "abc")
    if max(b, c) > 59 or (match["d"] and a > 23):
        return None
    if match["d"]:
        return ((int(match["d"]) * 24 + a) * 60 + b) * 60 + c
    return (a * 60 + b) * 60 + c if match["c"] else a * 60 + b


def last_task(array: str) -> int | None:
    """Return the largest index of a job array; None if it is invalid."""
    tasks, percent, limit = array.partition("%")
    ranges = [_TASKS.fullmatch(part) for part in tasks.split(",")]
    last = [int(part[2] or part[1]) for part in ranges if part and int(part[1]) <= int(part[2] or part[1]) and int(part[3] or 1)]
    is_valid = len(last) == len(ranges) and (not percent or re.fullmatch("[1-9][0-9]{0,8}", limit))
    return max(last) if is_valid else None


def check(job: Job) -> None:
    """Refuse a job that Slurm or each of its tasks would refuse, before it waits in the queue."""
    gpus, tasks, time, workdir, array = job.gpus_per_node, job.tasks_per_node, job.time, str(job.folder.parent), job.array
    limit_s, in_format = seconds(time), "must be in Slurm's format"
    late = f"more than 0 and a minute less than --time={time}, since Slurm may send the signal a minute early"
    texts = {option: getattr(job, option) for option in ("name", "setup", "container", "sbatch")}
    one_line = "must be one line without control characters or a backslash at its end"
    command.check(
        (
            gpus % tasks == 0,
            f"--tasks_per_node={tasks}: must divide --gpus_per_node={gpus}",
            f"use 1, or {gpus} for one task per GPU",
        ),
        (
            limit_s is not None,
            f"--time={time}: {in_format}, with minutes and seconds ≤ 59, and hours after days ≤ 23",
            "write 1-12:00:00",
        ),
        (0 < job.save_s <= (limit_s or 0) - _LEAST_S, f"--save_s={job.save_s}: must be {late}", "choose a longer --time"),
        (
            re.fullmatch(_WORKDIR, workdir),
            f"workdir {workdir!r}: Slurm allows no spaces, quotes, $ or %, and no - first",
            "choose another",
        ),
        (re.fullmatch(_NODES, job.exclude), f"--exclude={job.exclude}: must be names of nodes", "write them as n3,n[7-9]"),
        (array or job.module != SWEEP, "--array is missing: a task of a job array runs a member of the sweep", "give --array=0-7"),
        (not array or last_task(array) is not None, f"--array={array}: {in_format}", "write 0-7, or 0-7%2 for two at a time"),
        (
            not array or tasks * job.nodes == 1,
            f"--array with {tasks * job.nodes} tasks: a member of a sweep has one",
            "use --nodes=1 --tasks_per_node=1",
        ),
        *((re.fullmatch(_LINE, text), f"--{option}={text!r}: {one_line}", "remove them") for option, text in texts.items()),
    )
    for option in ("container", "sbatch"):
        with command.refusing(f"--{option}={texts[option]!r}", "close the quote, or leave it out"):
            words = shlex.split(texts[option])
    for word, (name, short) in itertools.product(words, batch_file.own_options().items()):  # Those of sbatch.
        if word.partition("=")[0] == name or re.match(f"{short}([0-9=]|$)", word):
            command.refuse(f"--sbatch={word}: launch.slurm sets {name} itself; use its own options, which --help lists")
    if job.setup and shutil.which("bash"):
        done = subprocess.run(["bash", "-n", "-c", job.setup], capture_output=True, text=True, check=False)
        if done.returncode or done.stderr:  # An unterminated here-document is only a warning.
            command.refuse(f"--setup={job.setup!r}: invalid shell ({' '.join(done.stderr.split())}); correct it")


def check_members(job: Job) -> None:
    """Refuse a sweep that launch.sweep would refuse, and a job array with more tasks than the sweep has runs."""
    chosen = flags.FlagValues()
    command.add_common(chosen)
    sweep.define(chosen)
    extra = command.parsed([SWEEP, *job.arguments], chosen)[1:]
    num_runs = len(sweep.planned(chosen, extra, resolve=False))
    if (last_task(job.array) or 0) >= num_runs:
        command.refuse(f"--array={job.array}: the sweep has {num_runs} runs; use --array=0-{num_runs - 1}, or a part of it")


def placed(job: Job) -> Job:
    """Return the job with `local_size` set to the workers of a node; refuse a config that does not fit the number of devices."""
    config = train_flags.read(job.arguments).config
    spec = parts.read(config)
    devices = job.nodes * (job.gpus_per_node or job.tasks_per_node)
    if job.gpus_per_node and not spec.simulate and spec.workers * spec.devices_of_worker not in (0, devices):
        per_worker = spec.devices_of_worker
        problem = f"config.workers={spec.workers} on {job.nodes} nodes × {job.gpus_per_node} GPUs: all GPUs must belong to workers"
        command.refuse(f"{problem}, each with {per_worker}", f"use workers={devices // per_worker}, or leave it out")
    local_size, rest = divmod(spec.workers or devices // spec.devices_of_worker, job.nodes)
    has_local_size = any("local_size" in word for word in job.arguments)
    if job.nodes > 1 and local_size > 1 and not rest and not spec.simulate and not has_local_size:
        config.local_size = local_size
        with contextlib.suppress(ConfigError):  # The topology may not allow it.
            parts.resolve(config, devices)
            return job._replace(arguments=[*job.arguments, f"--config.local_size={local_size}"])
        config.local_size = spec.local_size
    parts.resolve(config, devices)
    return job


def submit(job: Job) -> None:
    """Write the batch file and pass it to sbatch, which prints the number of the job."""
    if not shutil.which("sbatch"):
        command.refuse("sbatch not found: this machine has no Slurm; use --dry_run to print the file, or launch.local to run here")
    job.folder.mkdir(parents=True, exist_ok=True)
    files.write_whole(job.file, batch_file.text(job))
    done = subprocess.run(["sbatch", str(job.file)], capture_output=True, text=True, check=False)
    if done.returncode:
        command.refuse(f"sbatch refused {job.file}: {' '.join(done.stderr.split())}")
    print(f"{done.stdout.strip()}; file and logs are in {job.folder}")


def main(argv: list[str]) -> None:
    chosen = flags.FLAGS
    module = chosen.module or (SWEEP if chosen.array else processes.TRAIN)
    # With GPUs the number of devices does not follow from the number of processes.
    processes.check(module, argv, 1 if chosen.gpus_per_node else max(1, chosen.nodes * chosen.tasks_per_node))
    workdir = processes.required("workdir", argv)
    fields = [name for name in Job._fields if name in chosen and name not in ("name", "module")]
    job = Job(
        chosen.name or pathlib.Path(workdir).name,
        pathlib.Path(workdir) / "slurm",
        argv,
        processes.same_command("launch.slurm"),
        module,
    )._replace(**{name: chosen[name].value for name in fields})
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
    defaults = Job._field_defaults

    def number(name: str, least: int, help_text: str) -> None:
        flags.DEFINE_integer(name, defaults[name], help_text, lower_bound=least)

    def text(name: str, help_text: str, required: bool = False) -> None:
        flags.DEFINE_string(name, None if required else defaults.get(name), help_text, required=required)

    flags.DEFINE_integer("nodes", None, "Nodes of the job.", required=True, lower_bound=1)
    number("gpus_per_node", 0, "GPUs per node, all of which are used; 0: run on CPUs.")
    number("tasks_per_node", 1, "Processes per node, among which its GPUs are divided.")
    number("cpus_per_task", 0, "CPUs per process; 0: the job has exclusive nodes.")
    text("time", "Time limit, such as 04:00:00; the job is queued again until the run is finished.", required=True)
    number("save_s", 1, "Seconds before the time limit at which the tasks save.")
    number("retries", 0, "Number of failures of tasks or nodes after which the run continues.")
    text("exclude", "Nodes not to use, such as n3,n[7-9].")
    text("array", "Members of the sweep to run, such as 0-7, or 0-7%2 for two at a time.")
    text("setup", "Line of shell to run first, such as '. .venv/bin/activate'.")
    text("container", "Start of the container: a command before python, or options of srun.")
    text("sbatch", "Further options of sbatch, such as '--partition=gpu --account=me'.")
    text("name", "Name of the job; default: the last part of --workdir.")
    flags.DEFINE_string("module", None, "Module to run instead of launch.train.")
    flags.DEFINE_boolean("dry_run", False, "Print the batch file without submitting it.")
    command.run(main, errors=(ConfigError, config_file.ConfigFileError))
