"""Predictions for Optimus-CC's models: bounds that must hold, and the command."""

import os
import pathlib
import subprocess
import sys

import pytest

from experiments import optimus_runtime as optimus

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("size", list(optimus.MODELS))
def test_each_part_gains_and_no_more_than_what_it_replaces(size):
    baseline, cb, fused, selective = optimus.predict(size).values()
    times_s = [p.time_s for p in (baseline, cb, fused, selective)]
    assert times_s == sorted(times_s, reverse=True) and len(set(times_s)) == 4
    assert 0 < baseline.boundary_s - cb.boundary_s < baseline.boundary_s
    # A ring of 2N holders on equal NICs: V(2N − 1)/N bytes instead of V(3N − 2)/N, N = 4.
    assert fused.embedding_bytes / baseline.embedding_bytes == pytest.approx(7 / 10)
    assert selective.workers_s < baseline.workers_s / 2
    # 6 of 48 messages at 1/41.7 or 1/48 of the bytes; the busiest middle stage sends 32, two or one of them compressed.
    ratio = {"2.5b": 16 * (1024 + 1920) / (1024 * 1920), "8.3b": 1 / 48}[size]
    in_the_middle = max(16 + 16 - compressed * (1 - ratio) for compressed in (2, 3))
    assert cb.boundary_bytes / baseline.boundary_bytes == pytest.approx(in_the_middle / 32)


def run(*args):
    return subprocess.run(
        [sys.executable, "-m", "experiments.optimus_runtime", *args],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )


def test_slower_nics_gain_more():
    def speedup(**options):
        times_s = [p.time_s for p in optimus.predict("2.5b", **options).values()]
        return times_s[0] / times_s[-1]

    assert 1 < speedup() < speedup(nic=0.25)


def test_the_table_says_predicted():
    result = run("--nic=0.5", "--blocking")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].strip() == "predicted; messages between stages travel between the passes" and sum(
        "CB+FE+SC" in line for line in lines
    ) == len(optimus.MODELS)


def test_mistakes_are_one_line():
    result = run("--nic=2")
    assert (
        result.returncode == 2
        and result.stderr == "error: --nic=2 must be above 0 and at most 1; 0.5 is half of the datasheet's rate\n"
    )
