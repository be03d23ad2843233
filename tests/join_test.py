"""Processes find each other from the cluster's environment, without flags: variables of `srun` and Open MPI 4, set by hand; and
with a real `mpirun`, where there is one.
"""

import os
import shutil
import subprocess
import sys

import jax
import pytest

from launch import command, join
from launch.processes import free_port
from tests.commands import ROOT

PROCESSES = 2
# The variables read by launch/join.py and jax.distributed.
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": f"{PROCESSES}",
    "SLURM_PROCID": "{}",
    "SLURM_LOCALID": "{}",
}
MPI = {
    "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": f"{PROCESSES}",
    "OMPI_COMM_WORLD_RANK": "{}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{}",
}


@pytest.mark.parametrize(
    "variables, flags",
    [
        (SLURM | {"SLURM_STEP_NUM_TASKS": f"{PROCESSES}"}, []),
        (MPI, []),
        (SLURM, ["--coordinator=auto", f"--num_processes={PROCESSES}"]),  # as in Kubernetes: only jax.distributed reads it
    ],
    ids=["srun", "mpirun", "auto"],
)
def test_processes_join_by_what_the_cluster_tells_them(tmp_path, variables, flags):
    line = [sys.executable, "-m", "launch.train", "--config=configs/quadratics.py:workers=2,simulate=false,smoke"]
    line += [f"--workdir={tmp_path / 'run'}", *flags]
    shared = os.environ | {"JAX_COORDINATOR_PORT": str(free_port()), "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            line,
            cwd=ROOT,
            env=shared | {name: value.format(index) for name, value in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(PROCESSES)
    ]
    told = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert "2 workers on 2 cpu devices" in told[0][0] and "averaged model after 20 steps" in told[0][0]
    assert "averaged model" not in told[1][0]


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun; Debian has it in openmpi-bin")
def test_mpirun_needs_no_flags(tmp_path):
    start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", f"{PROCESSES}", sys.executable, "-m", "launch.train"]
    done = subprocess.run(
        [*start, "--config=configs/quadratics.py:workers=2,simulate=false,smoke", f"--workdir={tmp_path / 'run'}"],
        cwd=ROOT,
        env=os.environ | {"JAX_COORDINATOR_PORT": str(free_port()), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "2 workers on 2 cpu devices" in done.stdout and done.stdout.count("averaged model after 20 steps") == 1


@pytest.mark.parametrize(
    "error, code, said",
    [
        (
            ValueError("UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer"),
            join.LOST_CONTACT,
            "lost contact with another",
        ),
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed"), join.LOST_CONTACT, "lost contact with another"),
        (ValueError("workers=0"), command.USER_ERROR, "error: workers=0\n"),
        (KeyError("loss"), 1, "Traceback"),
    ],
)
def test_a_process_leaves_at_once_and_says_why(monkeypatch, capsys, error, code, said):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", sys.exit)  # the real one would end this process
    with pytest.raises(SystemExit) as left, join.leaving_at_once((ValueError,), "run the same command again"):
        raise error
    assert left.value.code == code and said in capsys.readouterr().err
