"""Text of a Slurm batch file, for launch.slurm."""

import pathlib
import re
import shlex
import sys
from typing import NamedTuple

from launch import processes


class Job(NamedTuple):
    """Job of a batch file; its other fields are flags of launch.slurm.

    Attributes:
        folder: of the file `job.sh` and the logs.
        arguments: of every task.
        typed: command line that created the job.
    """

    name: str
    folder: pathlib.Path
    arguments: list[str]
    typed: str = ""
    module: str = processes.TRAIN
    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int = 1
    cpus_per_task: int = 0
    time: str = "01:00:00"
    save_s: int = 180
    retries: int = 3
    exclude: str = ""
    array: str = ""
    setup: str = ""
    container: str = ""
    sbatch: str = ""

    @property
    def file(self) -> pathlib.Path:
        return self.folder / "job.sh"

    @property
    def log(self) -> str:
        """Prefix of the logs' names in Slurm's patterns."""
        return f"{self.folder}/{'%A_%a' if self.array else '%j'}"


def text(job: Job) -> str:
    """Return a readable file for sbatch."""
    typed = job.typed.replace("\n", "\n# ")
    header = ["#!/bin/bash", f"# Written by: {typed}", *(f"#SBATCH {line}" for line in _options(job))]
    setup = [*([job.setup] if job.setup else []), "export DECJAX_LAUNCHER=1 PYTHONUNBUFFERED=1"]
    setup += ["export JAX_ENABLE_PREEMPTION_SERVICE=false  # it would swallow a SIGTERM before training has begun"]
    compiled = shlex.quote(f"{job.folder}/compiled")
    setup += [f"export JAX_COMPILATION_CACHE_DIR={compiled}  # a requeued job does not compile again"]
    return "\n\n".join("\n".join(block) for block in (header, setup, _start(job), _end(job))) + "\n"


def _options(job: Job) -> list[str]:
    """Return the options of sbatch, one per line."""
    further: list[str] = []
    for word in shlex.split(job.sbatch):
        before = f"{further.pop()} " if further and not word.startswith("-") else ""  # `--partition gpu` is one option.
        further.append(before + _for_sbatch(word))
    return [
        _for_sbatch(f"--job-name={job.name}"),
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.tasks_per_node}",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *([f"--cpus-per-task={job.cpus_per_task}"] if job.cpus_per_task else ["--exclusive", "--mem=0"]),
        f"--time={job.time}",
        f"--signal=TERM@{job.save_s}",
        "--requeue",
        "--open-mode=append",
        _for_sbatch(f"--output={job.log}.log"),
        *([f"--array={job.array}"] if job.array else []),
        *([f"--exclude={job.exclude}"] if job.exclude else []),
        *further,
    ]


def own_options() -> dict[str, str]:
    """Return the options of sbatch that launch.slurm sets, with their short forms: {"--nodes": "-N"}."""
    short = {"job-name": "J", "nodes": "N", "cpus-per-task": "c", "time": "t", "output": "o", "array": "a", "exclude": "x"}
    options = _options(Job("job", pathlib.Path("job"), [], cpus_per_task=1, exclude="node", array="0"))
    names = (option.partition("=")[0].removeprefix("--") for option in options)
    return {f"--{name}": f"-{short.get(name, name)}" for name in names if name != "requeue"}


def _for_sbatch(word: str) -> str:
    """Quote a word for sbatch's lines of options, in which `#` begins a comment."""
    if re.fullmatch(r"[\w@%+=:,./~\[\]-]+", word):
        return word
    escaped = re.sub(r'(["\\])', r"\\\1", word)
    return f'"{escaped}"'


def _in_shell(word: str) -> str:
    """Quote a word for the shell so that only variables are expanded, on the node."""
    if "$" not in word:
        return shlex.quote(word)
    escaped = re.sub(r'(["\\`])', r"\\\1", word)
    return f'"{escaped}"'


def _start(job: Job) -> list[str]:
    """Return the lines that run the tasks; srun waits for all, since tasks end within a minute after they lose contact with another."""
    container = " ".join(map(_in_shell, shlex.split(job.container)))
    in_srun = container.startswith("-")
    cpus = f"--cpus-per-task={job.cpus_per_task}" if job.cpus_per_task else "--cpu-bind=none"
    python = "python" if container or job.setup else shlex.quote(sys.executable)
    program = f"{'' if in_srun or not container else f'{container} '}{python} -m {shlex.quote(job.module)}"
    index = ['--index="$SLURM_ARRAY_TASK_ID"'] if job.array else []
    output = shlex.quote(f"--output={job.log}.%t.log")
    return [
        f"srun --kill-on-bad-exit=0 --wait=90 {cpus} --open-mode=append {output} \\",
        *([f"    {container} \\"] if in_srun else []),
        " \\\n        ".join([f"    {program}", *index, *map(shlex.quote, job.arguments)]),
        "code=$?",
    ]


def _end(job: Job) -> list[str]:
    """Return the lines that handle the exit code of the tasks."""
    gpus = f"! command -v nvidia-smi || [ $(nvidia-smi --list-gpus | wc -l) -ge {job.gpus_per_node} ]"
    check, array = gpus if job.gpus_per_node else "true", ' --array="$SLURM_ARRAY_TASK_ID"' if job.array else ""
    return f"""\
case $code in 0 | 2 | 4) exit "$code" ;; esac  # finished, invalid command, or diverged
# A canceled job is not restarted.
[ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --states=RUNNING | wc -l)" -gt 0 ] || exit "$code"
# Saved before the time limit or after scancel --signal=TERM: requeue.
if [ "$code" -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; exit "$code"; fi

# A task failed or stopped answering: a new job continues from the last checkpoint without failed nodes.
healthy() {{ timeout 60 srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" sh -c '{check}' >/dev/null 2>&1 </dev/null; }}
failed=$(for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do {{ healthy "$node" || echo "$node"; }} & done; wait)
export DECJAX_TRIES=$((${{DECJAX_TRIES:-0}} + 1)) DECJAX_EXCLUDE=${{DECJAX_EXCLUDE:-{job.exclude}}}
for node in $failed; do DECJAX_EXCLUDE=${{DECJAX_EXCLUDE:+$DECJAX_EXCLUDE,}}$node; done
echo "exit code $code; failed nodes: ${{failed:-none}}; failure $DECJAX_TRIES of at most {job.retries + 1}" >&2
[ "$DECJAX_TRIES" -gt {job.retries} ] && exit "$code"
sbatch{array} ${{DECJAX_EXCLUDE:+--exclude="$DECJAX_EXCLUDE"}} {shlex.quote(str(job.file))} || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
""".splitlines()
