"""Commands as users run them: programs of all kinds leave no order of collectives open, and run when they come from the cache."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from decjax.hlo import order

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_S = 600
STEPS = ["--config.steps=4", "--config.schedule.warmup_steps=1"]
FORMS = [
    "workers=2,stages=2,microbatches=4,schedule=1f1b,backward=int8,forward=int8,tied",
    "workers=2,stages=2,microbatches=2,method=allreduce,reducer=powersgd,remat",
    "workers=4,mixer=choco,codec=int8",
    "workers=4,mixer=power_gossip",
    "workers=4,method=allreduce,reducer=demo",
    "workers=4,method=diloco,every=2",
]
# The compiler's own collectives, of which the order is open.
DIVIDED = ["workers=2,tensor=2"]


def losses(form, folder, dump=None):
    """Of a run of a few steps, whose programs go through a cache in the folder."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    flags = {"XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text"} if dump else {}
    workdir = folder / ("compiled" if dump else "loaded")
    command = [sys.executable, "-m", "launch.train", f"--config=configs/lm.py:smoke,{form}", f"--workdir={workdir}", *STEPS]
    done = subprocess.run(
        command, cwd=ROOT, env=kept | cache | flags, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line)["loss"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("form", FORMS + DIVIDED)
def test_a_run_from_a_warm_cache_is_the_same(form, tmp_path):
    compiled = losses(form, tmp_path, dump=tmp_path / "programs")
    assert compiled == losses(form, tmp_path)
    programs = {path.name: path.read_text() for path in (tmp_path / "programs").glob("*after_optimizations.txt")}
    assert any("all-reduce" in text or "collective-permute" in text for text in programs.values())
    if form not in DIVIDED:
        assert not {name: pairs for name, text in programs.items() if (pairs := order.unordered(text))}
