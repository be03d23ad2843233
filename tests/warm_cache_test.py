"""Commands as users run them: programs of all kinds leave no order of collectives open, and run when loaded from the cache.

Runs of one kind share two processes: one compiles, and one loads the programs from the cache.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from decjax.program import hlo
from tests import several_runs

GOSSIP = "topology=one_peer_exponential,optimizer=accum_adamw"
DEVICES = "digits:simulate=false,workers=4"
FORMS = {
    "gossip": [
        f"workers=4,{GOSSIP}",
        f"{DEVICES},{GOSSIP},engine=split",
        f"{DEVICES},mixer=choco,codec=int8",
        f"{DEVICES},mixer=beer,codec=int8,engine=split",
        f"{DEVICES},mixer=power_gossip",
    ],
    "averages": [
        f"{DEVICES},method=allreduce,stale",
        "workers=4,method=allreduce,reducer=demo",
        f"{DEVICES},method=diloco,every=2",
        f"{DEVICES},method=streaming_diloco,every=4",
    ],
    "pipelines": [
        f"workers=2,{GOSSIP},stages=2,microbatches=4,tied",
        f"workers=2,{GOSSIP},stages=2,microbatches=4,tied,engine=split",
        "workers=2,stages=2,microbatches=4,schedule=1f1b,backward=int8,forward=int8,tied",
        "workers=2,stages=2,microbatches=2,method=allreduce,reducer=powersgd,remat",
    ],
    # The compiler's own collectives, whose order is open; their programs are not cached (`mesh.make_workers`).
    "divided": ["workers=2,tensor=2"],
}


def losses(forms, folder, name, dump=None):
    """Run a few steps of each form in one process, with a compilation cache in the directory."""
    (text := folder / "text.txt").write_bytes(np.random.default_rng(0).integers(97, 101, 4000, dtype=np.uint8).tobytes())
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    flags = {"XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text"} if dump else {}
    command = [sys.executable, "-m", "tests.several_runs", f"--text={text}", f"--into={folder / name}", *forms]
    done = subprocess.run(
        command,
        cwd=several_runs.ROOT,
        env=kept | cache | flags,
        capture_output=True,
        text=True,
        timeout=several_runs.TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = lambda index: map(json.loads, (folder / name / str(index) / "metrics.jsonl").read_text().splitlines())
    return {form: [row["loss"] for row in rows(index)] for index, form in enumerate(forms)}


@pytest.mark.parametrize("kind", FORMS)
def test_runs_from_a_warm_cache_are_the_same(kind, tmp_path):
    forms = FORMS[kind]
    programs, cache = tmp_path / "programs", lambda: {path.name for path in (tmp_path / "cache").glob("*-cache")}
    compiled, kept = losses(forms, tmp_path, "compiled", dump=programs), cache()
    assert losses(forms, tmp_path, "loaded") == compiled
    assert cache() == kept  # nothing was compiled again
    assert bool(kept) == (kind != "divided")
    texts = {path.name: path.read_text() for path in programs.glob("*after_optimizations.txt")}
    assert any("all-reduce" in text or "collective-permute" in text for text in texts.values())
    if kind != "divided":
        assert not {name: pairs for name, text in texts.items() if (pairs := hlo.unordered(text))}
