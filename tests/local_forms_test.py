"""Compressed messages and pipelines between real processes: the steps are those of as many devices of one process.

Both at once, gossip and all-reduce: each run costs every process its compilation.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import several_runs

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_S = 600
PIPELINES = "workers=2,stages=2,microbatches=2"
RUNS = [f"mixer=choco,codec=int8,tied,{PIPELINES}", f"method=allreduce,reducer=codec(codec=int8,form=shards),{PIPELINES}"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder of what four processes have done, folder of what one has done)."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 101, 4000, dtype=np.uint8).tobytes())
    together = subprocess.run(
        [
            sys.executable,
            "-m",
            "launch.local",
            f"--num_processes={several_runs.NUM_DEVICES}",
            "--module=tests.several_runs",
            "--",
            f"--text={text}",
            f"--into={folder / 'together'}",
            *RUNS,
        ],
        cwd=ROOT,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )  # In the cache nobody would find a program: all compile at once.
    assert together.returncode == 0, together.stderr
    several_runs.take(RUNS, str(text), folder / "alone")
    return folder / "together", folder / "alone"


@pytest.mark.parametrize("index", range(len(RUNS)), ids=RUNS)
def test_processes_and_devices_have_the_same_trajectory(runs, index):
    """In every step, and bytes between workers and stages as well."""
    together, alone = ([json.loads(line) for line in (run / str(index) / "metrics.jsonl").read_text().splitlines()] for run in runs)
    assert len(together) == 6  # Five steps and the evaluation.
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"time_s", "tokens_per_s", "kind"}:
            np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-4, atol=1e-6, err_msg=key)
    assert together[-1]["loss"] < together[0]["loss"]
