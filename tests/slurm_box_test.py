"""launch/slurm.py on a real Slurm with four nodes on this machine, installed from Debian packages and started by
tests/slurm_box.sh.

One run is stopped in every way that Slurm has, and must give the same numbers as an undisturbed run. It is paced
(experiments/paced.py) until all events have happened, so that they always fit into it, however slow the machine is.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from experiments.crashes import last_state
from launch import ranks
from tests import commands
from tests.commands import ROOT
from tests.local_test import command_lines
from tests.tiny_runs import rows

BOX = ROOT / "tests/slurm_box.sh"
NODES, TIMEOUT_S = 4, 300
STEPS, LOG = 1500, 3  # at least ten minutes while it waits, and seconds when it does not
CONFIG = (
    "--config=experiments/paced.py:workers=2,simulate=false,topology=complete",
    f"--config.steps={STEPS}",
    f"--config.log_every={LOG}",
    f"--config.checkpoint.every={STEPS // 5}",
    f"--config.eval.every={STEPS}",
)
WAIT_S = 0.4  # of a step


def why_not():
    """Return why Slurm does not run here, or nothing."""
    if missing := [tool for tool in ("slurmctld", "slurmd", "sbatch", "munged", "unshare") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found; Debian has them in slurm-wlm and munge"
    if os.geteuid() != 0:
        return f"user id {os.geteuid()}: the box's daemons need root"
    tried = subprocess.run(["unshare", "-m", "mount", "--bind", "/etc/hosts", "/etc/hosts"], capture_output=True, text=True)
    return tried.stderr.strip()


pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason or "Slurm works")


def free_ports(number):
    """Return the first of so many free ones."""
    for first in range(21000, 30000, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("no free ports")


@pytest.fixture(scope="module")
def box():
    """Start a cluster; yield its directory."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm-"))  # short, because a socket's path has at most 107 characters
    try:
        subprocess.run([BOX, "up", str(NODES), folder, str(free_ports(NODES + 1))], check=True, timeout=120)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
            yield folder
    finally:
        subprocess.run([BOX, "down", folder], check=False, timeout=120)


def slurm(*command_line):
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(workdir, *options, passed=CONFIG, **environment):
    """Return the number of the job."""
    given = {"SLURM_CONF": os.environ["SLURM_CONF"], "JAX_PLATFORMS": "cpu"} | environment
    done = commands.run("launch.slurm", *options, "--", *passed, f"--workdir={workdir}", **given)
    assert done.returncode == 0, done.stderr
    return re.search(r"Submitted batch job (\d+); file and logs are in ", done.stdout)[1]


def paced(slowly):
    """Return the arguments of a run whose steps wait while a file exists."""
    return (*CONFIG, f"--config.data.waits_for={slowly}", f"--config.data.wait_s={WAIT_S}")


def field(job, name):
    return re.search(rf"\b{name}=(\S*)", slurm("scontrol", "show", "job", "--details", str(job)))[1]


def nodes_of(job):
    return slurm("scontrol", "show", "hostnames", field(job, "NodeList")).split()


def logs(workdir):
    return "\n".join(f"== {path}\n{path.read_text()}" for path in sorted((workdir / "slurm").glob("*.log")))


def task(workdir, index):
    """Return the process id of a task of a run."""
    for process, line in command_lines().items():
        if "-m launch.train" in line and str(workdir) in line and "srun" not in line:
            found = pathlib.Path(f"/proc/{process}/environ").read_text().split("\0")
            if f"SLURM_PROCID={index}" in found:
                return process
    raise LookupError(index)


def wait_for(condition, workdir):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, logs(workdir) + slurm("squeue") + slurm("sinfo")
        time.sleep(0.2)


def wait_until(job, state, workdir):
    wait_for(lambda: field(job, "JobState") == state, workdir)


def step(workdir):
    """Return the last logged step."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return next((json.loads(line)["step"] for line in reversed(lines) if line.endswith("\n")), 0)


def runs_on(job, workdir, restarts):
    """Wait until a job that has been requeued so many times has continued training; return the step."""
    wait_for(lambda: field(job, "JobState") == "RUNNING" and int(field(job, "Restarts")) == restarts, workdir)
    before = step(workdir)
    wait_for(lambda: step(workdir) > before, workdir)
    return step(workdir)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same run, undisturbed; return a function that waits for its end."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    line = [sys.executable, "-m", "launch.local", "--num_processes=2", "--", *CONFIG, f"--workdir={workdir}"]
    with subprocess.Popen(line, cwd=ROOT, env=os.environ | commands.SERVER, stdout=subprocess.DEVNULL) as run:

        def ended():
            assert run.wait(TIMEOUT_S) == 0
            return workdir

        yield ended


@pytest.fixture(scope="module")
def story(box, undisturbed, tmp_path_factory):
    """A run of two nodes. Its time ends; it is requeued, told to save, and preempted; it loses a node; and finally it is left
    alone.
    """
    workdir = tmp_path_factory.mktemp("slurm") / "run"
    (slowly := workdir.parent / "slowly").touch()
    job = submit(workdir, "--nodes=2", "--time=60", "--save_s=120", "--exclude=n4", passed=paced(slowly))
    at = [runs_on(job, workdir, 0)]
    hours, minutes, _ = map(int, field(job, "RunTime").split(":"))
    # Slurm checks every 30 seconds which jobs have less than save_s left.
    slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 2}")
    wait_for(lambda: field(job, "Restarts") == "1", workdir)
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    at.append(runs_on(job, workdir, 1))
    slurm("scontrol", "requeue", job)
    at.append(runs_on(job, workdir, 2))
    slurm("scancel", "--signal=TERM", job)
    at.append(runs_on(job, workdir, 3))
    other = slurm("sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_until(other.strip(), "COMPLETED", workdir)
    at.append(runs_on(job, workdir, 4))
    lost = nodes_of(job)[0]
    os.kill(int((box / f"slurmd-{lost}.pid").read_text()), 9)
    at.append(runs_on(job, workdir, 5))
    nodes = nodes_of(job)
    slowly.unlink()
    wait_until(job, "COMPLETED", workdir)
    return workdir, job, at, lost, nodes


def test_a_run_survives_all_that_slurm_does_to_it(story):
    workdir, job, at, lost, nodes = story
    assert at == sorted(at) and json.loads((workdir / "summary.json").read_text())["steps"] == STEPS
    assert lost not in nodes
    told = (workdir / "slurm" / f"{job}.0.log").read_text()
    saved = [int(found) for found in re.findall(r"interrupted by SIGTERM; saved step (\d+)", told)]
    continued = [int(found) for found in re.findall(r"continuing from step (\d+)", told)]
    assert len(continued) == 5 and len(saved) >= 4 and set(saved) <= set(continued), told
    assert (workdir / "slurm" / f"{job}.1.log").exists() and not (workdir / "slurm" / f"{job}.2.log").exists()


def test_it_ends_with_the_numbers_of_a_run_that_nobody_disturbed(story, undisturbed):
    workdir, other = story[0], undisturbed()
    assert last_state(workdir) == last_state(other)
    ours, theirs = ([(row["step"], row["loss"]) for row in rows(run)] for run in (workdir, other))
    assert ours == theirs and [step for step, _ in ours] == list(range(LOG, STEPS + 1, LOG))


def test_after_the_death_of_a_task_another_job_goes_on_and_once_cancelled_none_does(box, tmp_path):
    workdir = tmp_path / "run"
    (slowly := tmp_path / "slowly").touch()
    job = submit(workdir, "--nodes=2", "--time=60", passed=paced(slowly))
    runs_on(job, workdir, 0)
    os.kill(task(workdir, 1), signal.SIGKILL)
    wait_until(job, "FAILED", workdir)
    assert "exit code 137; failed nodes: none; failure 1 of at most 4" in logs(workdir)
    (job,) = slurm("squeue", "-h", "-o", "%i").split()
    runs_on(job, workdir, 0)
    slurm("scancel", job)
    wait_for(lambda: not slurm("squeue", "-h"), workdir)
    assert field(job, "JobState") == "CANCELLED" and field(job, "Restarts") == "0"


def test_a_sweep_is_a_job_array(box, tmp_path):
    options = ["--nodes=1", "--cpus_per_task=1", "--time=60", "--array=0-2%2"]
    sweep = ["--config=configs/quadratics.py:smoke,workers=2", "--sweep=seed=0,1,2"]
    job = submit(tmp_path, *options, passed=sweep)
    wait_for(lambda: not slurm("squeue", "-h", "-j", job), tmp_path)
    done = commands.run("launch.sweep", "--table", *sweep, f"--workdir={tmp_path}", COLUMNS="120")
    finished = [path.parent.name for path in sorted(tmp_path.glob("*/summary.json"))]
    assert finished == ["seed=0", "seed=1", "seed=2"] and done.returncode == 0, logs(tmp_path)


@pytest.mark.parametrize("tasks, options", [(1, []), (8, []), (8, ["--sbatch=--gpus-per-task=1"]), (2, [])], ids=str)
def test_tasks_see_all_gpus_of_their_nodes(box, tmp_path, tasks, options):
    """As Slurm announces GPUs to tasks; the devices do not exist and are never opened."""
    gpus = [] if options else ["--gpus_per_node=8"]
    line = ["--nodes=2", *gpus, f"--tasks_per_node={tasks}", "--time=5", "--module=tests.tell_environment", *options]
    job = submit(tmp_path, *line, passed=[], JAX_PLATFORMS="")
    wait_until(job, "COMPLETED", tmp_path)
    found = {}
    for index in range(2 * tasks):
        told = json.loads((tmp_path / f"{index}.json").read_text())
        where = ranks.from_environment(told)
        assert (where.num_processes, where.process_index, where.on_node) == (2 * tasks, index, tasks)
        seen = told["CUDA_VISIBLE_DEVICES"].split(",")
        chosen = ranks.device_ids(where, told)
        found.setdefault(told["SLURMD_NODENAME"], []).extend(seen if chosen is None else [seen[gpu] for gpu in chosen])
        ranks.check_devices(where, told, 8 // tasks, "gpu")
    assert [sorted(gpus) for gpus in found.values()] == [[str(gpu) for gpu in range(8)]] * 2
