"""Training with coded messages between stages: resuming, reports, simulation, and refused configs."""

import json
import shutil

import jax
import numpy as np
import pytest

from configs import lm
from decjax import train
from decjax.config import ConfigError
from tests.runs import run_of, spec_of

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 101, 4000, dtype=np.uint8).tobytes())

    def launch(argument, workdir=None, **fields):
        config = lm.get_config(f"smoke,{argument}")
        config.update_from_flattened_dict(
            {
                "data.path": str(text),
                "steps": 8,
                "model.width": 8,
                "model.hidden": 8,
                "model.heads": 2,
                "model.context": 8,
                "log_every": 2,
                "eval.every": 4,
                "eval.num_windows": 5,
                "checkpoint.every": 4,
                "checkpoint.keep": 9,
                "data.sample_bytes": 2,
            }
            | fields
        )
        workdir = workdir or tmp_path_factory.mktemp("run")
        run = run_of(config, workdir)
        outcome = run.train()
        rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return workdir, jax.tree.map(np.asarray, run.state), rows, outcome.summary

    return launch


CODED = "workers=2,stages=2,microbatches=2,backward=low_rank(rank=1),forward=int8(block=16,rounding=stochastic)"


@pytest.fixture(scope="module")
def reference(launch):
    """Gossip between two pipelines, each with its own compression errors."""
    return launch(CODED)


def assert_resume_is_bit_exact(launch, run, part, argument, **fields):
    """Repeat the second half of a run's steps; return the state after them."""
    workdir, state, rows, _ = run
    shutil.copytree(workdir, part)
    shutil.rmtree(part / "checkpoints" / "8")
    (part / "summary.json").unlink()
    _, resumed, again, _ = launch(argument, workdir=part, **fields)
    jax.tree.map(np.testing.assert_array_equal, resumed, state)
    counted = [
        [{name: value for name, value in row.items() if name not in ("time_s", "tokens_per_s")} for row in of]
        for of in (again, rows)
    ]
    assert counted[0] == counted[1]
    return resumed


def test_resume_is_bit_exact(launch, reference, tmp_path):
    assert_resume_is_bit_exact(launch, reference, tmp_path / "run", CODED)


@pytest.mark.parametrize(
    "argument, fields, remembered",
    [
        (
            "backward=int4,forward=int8",
            {"error": "ef21", "forward_error": "samples", "slots": 64},
            lambda state: (state["B"].receiver, state["B"].sender.error, state["F"].sender.value_KxP, state["F"].receiver.tag_K),
        ),
        (
            "backward=int4,forward=topk(fraction=0.3)",
            {"error": "flush", "reuse_indices": True, "forward_error": "carry"},
            lambda state: (state["B"].sender.error, state["where"].receiver, state["F"].sender.error),
        ),
    ],
)
def test_resume_is_bit_exact_whatever_is_remembered(launch, tmp_path, argument, fields, remembered):
    argument = f"simulate,workers=1,method=local,stages=2,microbatches=2,{argument}"
    fields = {f"boundary.{name}": value for name, value in fields.items()}
    state = assert_resume_is_bit_exact(launch, launch(argument, **fields), tmp_path / "run", argument, **fields)
    assert all(np.any(memory) for memory in remembered(state.source))


def test_resume_is_bit_exact_where_each_device_has_its_own_errors(launch, tmp_path):
    coded = CODED.replace("workers=2,stages=2", "workers=1,method=allreduce,stages=2,tensor=2")
    workdir, state, rows, summary = launch(coded, workdir=tmp_path / "run")
    error = state.source.of_each_device["B"].sender.error
    assert error.shape == (1, 2, 2, 1, 1, 8, 8) and (np.abs(error[0, 1]).max(axis=(1, 2, 3, 4)) > 0).all()
    assert 0 < abs(summary["eval_loss_coded"] - summary["eval_loss"]) < 0.1
    shutil.rmtree(workdir / "checkpoints" / "8")
    (workdir / "summary.json").unlink()
    _, resumed, again, _ = launch(coded, workdir=workdir)
    jax.tree.map(np.testing.assert_array_equal, resumed, state)
    assert [row["loss"] for row in again][-len(rows) :] == [row["loss"] for row in rows]


def test_bytes_and_the_loss_with_codecs_are_reported(reference):
    _, state, rows, summary = reference
    error_NxS = np.abs(state.source["B"].sender.error).max(axis=(2, 3, 4, 5))
    assert (error_NxS[:, 1] > 0).all() and (error_NxS[:, 0] == 0).all() and error_NxS[0, 1] != error_NxS[1, 1]
    forward, steady, epilogue, sums = 2 * (128 + 128 // 16 * 4), 16 * 8 * 4, 4 * (16 + 8), 2 * 2 * 4  # the sums of loss and norm
    per_step = forward + steady + epilogue + sums
    assert summary["bytes_between_stages_per_step_per_worker"] == per_step
    assert rows[-1]["bytes_between_stages_per_worker"] == 8 * per_step
    assert 0 < abs(summary["eval_loss_coded"] - summary["eval_loss"]) < 0.1
    assert rows[-1]["loss_coded"] == summary["eval_loss_coded"]


def test_simulated_pipelines_remember_the_same(launch, reference):
    _, state, rows, _ = reference
    _, simulated, simulated_rows, _ = launch(f"{CODED},simulate")
    np.testing.assert_allclose([row["loss"] for row in simulated_rows], [row["loss"] for row in rows], rtol=2e-3)
    error, other = (of.source["B"].sender.error for of in (state, simulated))
    assert np.linalg.norm(error - other) < 0.1 * np.linalg.norm(error)


@pytest.mark.parametrize(
    "argument, fields, complaint",
    [
        (
            "stages=2,backward=low_rank(rank=9)",
            {},
            "low_rank rank=9 exceeds 8, the smaller side of .16, 8. as a 16x8 matrix; use rank=8",
        ),
        (
            "stages=2,backward=low_rank(rank=8)",
            {},
            "boundary.backward=.* makes messages of 1.5 times the bytes of the uncompressed float32",
        ),
        ("stages=2,forward=topk(fraction=1)", {}, "boundary.forward=.* makes messages of 1.25 times"),
        ("stages=2,forward=fp8", {}, "codec 'fp8' is unknown; use one of "),
        ("stages=2,forward=bounded", {}, "needs codecs with messages of a fixed size, got forward 'bounded'"),
        ("stages=2,backward=float16", {}, "codec 'float16' is neither contractive nor unbiased"),
        ("stages=2,backward=int8", {"boundary.error": "samples"}, "boundary.error='samples' is unknown; use one of carry, flush"),
        ("stages=2,backward=int8", {"boundary.when": "never"}, "boundary.when='never' is unknown; use one of epilogue, always"),
        (
            "stages=2,forward=int8",
            {"boundary.forward_error": "samples"},
            "slots=0 with forward_error='samples': slots store samples",
        ),
        ("stages=2,forward=int8", {"boundary.slots": 4}, "slots=4 with forward_error='none': slots store samples"),
        (
            "stages=2,forward=int8,backward=int8",
            {"boundary.reuse_indices": True},
            "with reuse_indices, .*, got forward 'int8'; use forward=topk",
        ),
        (
            "stages=2,forward=topk,backward=low_rank",
            {"boundary.reuse_indices": True},
            "with reuse_indices, got backward 'low_rank'; use backward=identity",
        ),
        (
            "stages=2,tensor=4,backward=int8",
            {"model.heads": 4, "model.context": 7, "workers": 1, "batch_size": 2},
            "tensor=4 does not divide the 14 tokens of a microbatch.*use microbatches of a multiple of 4 sequences",
        ),
        (
            "stages=2,tensor=2,forward=int8",
            {"boundary.forward_error": "samples", "boundary.slots": 8, "batch_size": 2},
            "forward_error='samples' with tensor=2 and microbatches of 1 sequences.*use microbatches of a multiple of 2",
        ),
        (
            "stages=2,microbatches=2,backward=int8",
            {"boundary.error": "flush", "boundary.when": "always"},
            "error='flush' with schedule '1f1b'",
        ),
        (
            "stages=2,microbatches=2,backward=int8,schedule=gpipe",
            {"boundary.error": "flush"},
            "error='flush' with schedule 'gpipe'",
        ),
    ],
)
def test_impossible_boundaries_are_refused_with_the_reason(launch, argument, fields, complaint, tmp_path):
    with pytest.raises(train.ConfigError, match=complaint) as error:
        launch(f"method=allreduce,workers=2,{argument}", workdir=tmp_path / "never", **fields)
    assert "\n" not in str(error.value) and not (tmp_path / "never").exists()


@pytest.mark.parametrize("key", ["forward", "backward"])
def test_keys_without_a_pipeline_are_refused(key):
    with pytest.raises(ConfigError, match=f"boundary.{key}='int8' has no effect with pipeline.stages=1; leave it out"):
        spec_of(lm.get_config(f"{key}=int8"))
