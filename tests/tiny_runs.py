"""Runs of a tiny language model, as fixtures of the files that import them, and the contents of their directories."""

import json
import shutil

import jax
import numpy as np
import pytest

from configs import lm
from tests.runs import run_of

STEPS = 12


RICH = {"optimizer.window": 3, "method.strength_power": 1.0, "clip_norm": 0.5, "eval.every": 6}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(2, 7)).astype(np.uint8)) for _ in range(40)]
    path.write_bytes(b" ".join(words[i] for i in rng.integers(0, 40, 4000)))
    return str(path)


@pytest.fixture(scope="module")
def prepare(text, tmp_path_factory):
    """Return the run of a config in a new or an existing directory, before its first step."""

    def prepare(argument="", workdir=None, resume_from=None, **fields):
        # A period of two: the shortest with phases to keep track of.
        given = "smoke" if "method=" in argument or "topology=" in argument else "smoke,topology=one_peer_ring"
        config = lm.get_config(",".join(filter(None, (given, argument))))
        fields = {
            "data.path": text,
            "steps": STEPS,
            "model.depth": 1,
            "model.width": 8,
            "model.hidden": 8,
            "model.heads": 1,
            "model.context": 16,
            "log_every": 4,
            "eval.every": STEPS,
            "eval.num_windows": 5,
            "checkpoint.every": 4,
            "checkpoint.keep": 10,
            "data.sample_bytes": 2,
        } | fields
        config.update_from_flattened_dict(fields)
        return run_of(config, workdir or tmp_path_factory.mktemp("run"), resume_from)

    return prepare


@pytest.fixture(scope="module")
def launch(prepare):
    """Run a config in a new or an existing directory and return (workdir, outcome)."""

    def launch(*given, **fields):
        run = prepare(*given, **fields)
        return run.workdir, run.train()

    return launch


@pytest.fixture(scope="module")
def reference(launch):
    """Decentralized AccumAdamW with damped mixing: every kind of state. The checkpoint at 4 is inside a window."""
    return launch("optimizer=accum_adamw", **RICH)[0]


def rows(workdir, kind="train"):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if row["kind"] == kind]


def losses(workdir):
    return [row["loss"] for row in rows(workdir)]


def forget_after(workdir, step, into):
    """Return a copy of a run as it was when it had just saved `step`, with metrics slightly ahead, as after a crash."""
    shutil.copytree(workdir, into)
    for saved in (into / "checkpoints").iterdir():
        if saved.name.isdigit() and int(saved.name) > step:
            shutil.rmtree(saved)
    (into / "summary.json").unlink()
    with (into / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "kind": "tr')  # cut in the middle of a line
    return into


def saved_state(workdir, step=STEPS):
    """Return all arrays of a checkpoint, whatever its structure."""
    import orbax.checkpoint as ocp

    path = (workdir / "checkpoints" / str(step) / "state").absolute()
    return [np.asarray(x) for x in jax.tree.leaves(ocp.StandardCheckpointer().restore(path))]


def assert_equal_states(one, other, step=STEPS):
    for a, b in zip(saved_state(one, step), saved_state(other, step), strict=True):
        np.testing.assert_array_equal(a, b)
