"""launch/slurm.py on a real Slurm of four nodes on this machine: what Debian packages, started by tests/slurm_box.sh.

One run is told to stop in every way that Slurm knows, and ends with the same numbers as one that nobody disturbed.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

from launch import place
from tests.tiny_runs import assert_equal_states

ROOT = pathlib.Path(__file__).resolve().parent.parent
BOX = ROOT / "tests/slurm_box.sh"
NODES, TIMEOUT_S = 4, 900
STEPS, LOG, SAVE = 100_000, 500, 5000
CONFIG = (
    "--config=configs/quadratics.py:workers=2,simulate=false,topology=complete",
    f"--config.steps={STEPS}",
    f"--config.log_every={LOG}",
    f"--config.checkpoint.every={SAVE}",
    f"--config.eval.every={STEPS}",
)
TELL = """
    import json, os, pathlib, sys
    given = dict(argument.lstrip("-").partition("=")[::2] for argument in sys.argv[1:])
    path = pathlib.Path(given["workdir"], f"{os.environ['SLURM_PROCID']}.json")
    path.write_text(json.dumps(dict(os.environ)))
"""


def why_not():
    """What keeps Slurm from running here, or nothing."""
    if missing := [tool for tool in ("slurmctld", "slurmd", "sbatch", "munged", "unshare") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found; Debian has them in slurm-wlm and munge"
    if os.geteuid() != 0:
        return f"user id {os.geteuid()}: the box's daemons need root"
    tried = subprocess.run(["unshare", "-m", "mount", "--bind", "/etc/hosts", "/etc/hosts"], capture_output=True, text=True)
    return tried.stderr.strip()


pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=reason or "Slurm works")


def free_ports(number):
    """The first of so many free ones."""
    for first in range(21000, 30000, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise OSError("no free ports")


@pytest.fixture(scope="module")
def box():
    """A cluster; gives its folder."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm-"))  # Short: a socket's path has 107 characters at most.
    before = dict(os.environ)
    try:
        subprocess.run([BOX, "up", str(NODES), folder, str(free_ports(NODES + 1))], check=True, timeout=120)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        os.environ["JAX_PLATFORMS"] = "cpu"
        yield folder
    finally:
        subprocess.run([BOX, "down", folder], check=False, timeout=120)
        os.environ.clear()
        os.environ.update(before)


def slurm(*command_line):
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(workdir, *options, passed=CONFIG):
    """The number of the job."""
    line = [sys.executable, "-m", "launch.slurm", *options, "--", *passed, f"--workdir={workdir}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return re.search(r"Submitted batch job (\d+); file and logs are in ", done.stdout)[1]


def field(job, name):
    return re.search(rf"\b{name}=(\S*)", slurm("scontrol", "show", "job", "--details", str(job)))[1]


def logs(workdir):
    return "\n".join(f"== {path}\n{path.read_text()}" for path in sorted((workdir / "slurm").glob("*.log")))


def wait_for(condition, workdir):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, logs(workdir) + slurm("squeue") + slurm("sinfo")
        time.sleep(0.2)


def step(workdir):
    """The last one that was logged."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return next((json.loads(line)["step"] for line in reversed(lines) if line.endswith("\n")), 0)


def runs_on(job, workdir, restarts):
    """Waits until a job that came back has trained on; gives the step."""

    def runs():
        if field(job, "JobState") == "PENDING":  # Slurm lets a job that came back wait for two minutes.
            subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True)
        return field(job, "JobState") == "RUNNING" and int(field(job, "Restarts")) == restarts

    wait_for(runs, workdir)
    before = step(workdir)
    wait_for(lambda: step(workdir) > before, workdir)
    return step(workdir)


@pytest.fixture(scope="module")
def story(box, tmp_path_factory):
    """A run of two nodes: its time ends, it is requeued, told to save, and loses a node."""
    workdir = tmp_path_factory.mktemp("slurm") / "run"
    job = submit(workdir, "--nodes=2", "--time=60", "--save_s=120", "--exclude=n4")
    at = [runs_on(job, workdir, 0)]
    hours, minutes, _ = map(int, field(job, "RunTime").split(":"))
    slurm(
        "scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 2}"
    )  # In two minutes at most: the signal is due.
    wait_for(lambda: int(field(job, "Restarts")) == 1, workdir)
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    at.append(runs_on(job, workdir, 1))
    slurm("scontrol", "requeue", job)
    at.append(runs_on(job, workdir, 2))
    slurm("scancel", "--signal=TERM", job)
    at.append(runs_on(job, workdir, 3))
    nodes = slurm("scontrol", "show", "hostnames", field(job, "NodeList")).split()
    os.kill(int((box / f"slurmd-{nodes[1]}.pid").read_text()), 9)
    at.append(runs_on(job, workdir, 4))
    after = slurm("scontrol", "show", "hostnames", field(job, "NodeList")).split()
    wait_for(lambda: field(job, "JobState") == "COMPLETED", workdir)
    return workdir, job, at, nodes, after


def test_a_run_survives_all_that_slurm_does_to_it(story):
    workdir, job, at, nodes, after = story
    assert at == sorted(at) and json.loads((workdir / "summary.json").read_text())["steps"] == STEPS
    assert nodes[1] not in after and "n4" not in nodes + after
    told = (workdir / "slurm" / f"{job}.0.log").read_text()
    saved = [int(found) for found in re.findall(r"interrupted by SIGTERM; saved step (\d+)", told)]
    continued = [int(found) for found in re.findall(r"continuing from step (\d+)", told)]
    assert len(continued) == 4 and len(saved) >= 2 and set(saved) <= set(continued), told
    assert (workdir / "slurm" / f"{job}.1.log").exists() and not (workdir / "slurm" / f"{job}.2.log").exists()


def test_it_ends_with_the_numbers_of_a_run_that_nobody_disturbed(story, tmp_path):
    line = [sys.executable, "-m", "launch.local", "--num_processes=2", "--", *CONFIG, f"--workdir={tmp_path / 'run'}"]
    subprocess.run(line, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
    assert_equal_states(story[0], tmp_path / "run", STEPS)
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (story[0], tmp_path / "run")]
    ours, theirs = ([(row["step"], row["kind"], row["loss"]) for row in run if row["kind"] == "train"] for run in rows)
    assert ours == theirs and len({step for step, *_ in ours}) == STEPS // LOG


def test_a_job_that_is_cancelled_does_not_come_back(box, tmp_path):
    job = submit(tmp_path, "--nodes=2", "--time=60")
    runs_on(job, tmp_path, 0)
    slurm("scancel", job)
    wait_for(lambda: not slurm("squeue", "-h", "-j", job), tmp_path)
    assert field(job, "JobState") == "CANCELLED" and field(job, "Restarts") == "0"


def test_a_job_that_another_takes_the_place_of_comes_back(box, tmp_path):
    job = submit(tmp_path, "--nodes=2", "--time=60")
    runs_on(job, tmp_path, 0)
    urgent = slurm(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 5"
    ).strip()
    wait_for(lambda: field(urgent, "JobState") == "COMPLETED", tmp_path)
    at = runs_on(job, tmp_path, 1)
    slurm("scancel", job)
    assert re.search(r"saved step \d+", (tmp_path / "slurm" / f"{job}.0.log").read_text()) and at > LOG
    wait_for(lambda: not slurm("squeue", "-h", "-j", job), tmp_path)


@pytest.mark.parametrize("tasks, options", [(1, []), (8, []), (8, ["--sbatch=--gpus-per-task=1"]), (2, [])], ids=str)
def test_tasks_see_all_gpus_of_their_nodes(box, tmp_path, monkeypatch, tasks, options):
    """As Slurm itself tells tasks of them; files that exist stand for the GPUs."""
    (tmp_path / "tell.py").write_text(textwrap.dedent(TELL))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    per_node = ["--gpus_per_node=8"] if not options else []
    job = submit(tmp_path, "--nodes=2", *per_node, f"--tasks_per_node={tasks}", "--time=5", "--module=tell", *options, passed=[])
    wait_for(lambda: field(job, "JobState") == "COMPLETED", tmp_path)
    found = {}
    for index in range(2 * tasks):
        told = json.loads((tmp_path / f"{index}.json").read_text())
        where = place.told(told)
        assert (where.num_processes, where.process_index, where.on_node) == (2 * tasks, index, tasks)
        seen = told["CUDA_VISIBLE_DEVICES"].split(",")
        chosen = place.device_ids(where, told)
        found.setdefault(told["SLURMD_NODENAME"], []).extend(seen if chosen is None else [seen[gpu] for gpu in chosen])
        place.check_devices(where, told, 8 // tasks, "gpu")
    assert [sorted(gpus) for gpus in found.values()] == [[str(gpu) for gpu in range(8)]] * 2
