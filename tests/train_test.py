"""The whole loop on a tiny model: evaluation, simulation, methods, refused configs."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decjax
from decjax import mesh, train
from decjax.errors import OutOfMemory, translating_out_of_memory
from decjax.train import evaluate
from decjax.train import state as state_lib
from tests.tiny_runs import RICH, STEPS, assert_equal_states, launch, losses, prepare, reference, rows, text  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_run_directory_holds_what_it_promises(reference):
    config = json.loads((reference / "config.json").read_text())
    assert config["workers"] == 8 and config["optimizer"]["name"] == "accum_adamw"
    summary = json.loads((reference / "summary.json").read_text())
    num_bytes = 4 * summary["num_params"]
    assert summary["steps"] == STEPS and summary["bytes_per_step_per_worker"] == num_bytes
    assert summary["local_eval_loss_min"] <= summary["local_eval_loss_mean"] <= summary["local_eval_loss_max"]
    assert [row["step"] for row in rows(reference)] == [4, 6, 8, 12]
    assert [row["step"] for row in rows(reference, "eval")] == [6, 12]
    for row in rows(reference) + rows(reference, "eval"):
        assert row["loss_min"] <= row["loss"] <= row["loss_max"] or row["kind"] == "eval"
        assert row["bytes_sent_per_worker"] == row["step"] * num_bytes and row["tokens_per_s"] > 0 and row["time_s"] > 0
    assert losses(reference)[-1] < losses(reference)[0]
    assert list((reference / "tensorboard").iterdir())


def test_evaluation_and_logging_do_not_disturb_training(launch, reference):
    other, _ = launch("optimizer=accum_adamw", **RICH | {"eval.every": 1, "log_every": 1, "checkpoint.every": 12})
    assert_equal_states(reference, other)


def test_simulated_workers_follow_the_same_trajectory(launch, reference):
    simulated, outcome = launch("optimizer=accum_adamw,simulate,workers=8", **RICH)
    np.testing.assert_allclose(losses(simulated), losses(reference), rtol=2e-5)
    assert [r["bytes_sent_per_worker"] for r in rows(simulated)] == [r["bytes_sent_per_worker"] for r in rows(reference)]


@pytest.mark.parametrize("backend, loops", [("cpu", True), ("gpu", False)])
def test_simulated_workers_compute_one_after_the_other_on_a_cpu_only(backend, loops, monkeypatch):
    def fn(x_PxP, y_P, given):
        return {"product": x_PxP @ y_P, "given": given + x_PxP.sum()}

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    workers, args = mesh.simulated_workers(3), (jnp.arange(48.0).reshape(3, 4, 4), jnp.ones((3, 4)), jnp.ones(2))
    mapped, batched = (workers.map(each, (0, 0, None)) for each in (mesh.one_by_one(fn), fn))
    jax.tree.map(np.testing.assert_array_equal, mapped(*args), batched(*args))
    assert ("scan[" in str(jax.make_jaxpr(mapped)(*args))) == loops


@pytest.mark.parametrize("method, factor", [("local", 0), ("allreduce", 14 / 8), ("topology=ring,order=atc", 2)])
def test_every_method_runs_in_the_same_loop_and_simulates(launch, method, factor):
    argument = method if "=" in method else f"method={method}"
    steps = {"steps": 20, "log_every": 1, "eval.every": 20, "checkpoint.every": 20}
    devices, outcome = launch(argument, **steps)
    simulated, _ = launch(argument + ",simulate,workers=8", **steps)
    np.testing.assert_allclose(losses(devices), losses(simulated), rtol=3e-5)
    for run in (devices, simulated):
        summary = json.loads((run / "summary.json").read_text())
        np.testing.assert_allclose(summary["bytes_per_step_per_worker"], factor * 4 * summary["num_params"], rtol=1e-12)


def test_traced_phase_takes_the_same_steps(launch, reference):
    traced, _ = launch("optimizer=accum_adamw", **RICH, **{"method.static_phase": False})
    np.testing.assert_allclose(losses(reference), losses(traced), rtol=1e-5)


def test_consensus_every_replaces_replicas_and_counts_its_bytes(launch):
    run, outcome = launch("topology=ring", consensus_every=4, log_every=2)
    distances = {row["step"]: row["consensus_distance"] for row in rows(run)}
    # float32 means of equal sums differ in the last bit at most.
    assert distances[4] < 1e-5 and distances[8] < 1e-5 and distances[6] > 1e-4
    num_bytes = 4 * outcome.summary["num_params"]
    np.testing.assert_allclose(rows(run)[1]["bytes_sent_per_worker"], 4 * 2 * num_bytes + 2 * 7 / 8 * num_bytes)
    assert "every 4 steps" in outcome.summary["protocol"]


def test_consensus_in_the_first_and_last_steps(launch):
    run, outcome = launch("topology=ring", consensus_first=2, consensus_last=1, log_every=1)
    distances = [row["consensus_distance"] for row in rows(run)]
    assert len(distances) == STEPS and all((distance < 1e-5) == (k in (0, 1, STEPS - 1)) for k, distance in enumerate(distances))
    assert outcome.summary["protocol"].endswith("in the first 2 steps, in the last 1 steps")


@pytest.mark.parametrize("argument", ["topology=ring,mixer=dcd,codec=int8", "topology=random_digraph,mixer=push_sum"])
def test_consensus_of_mixers_that_own_the_parameters(launch, argument):
    run, _ = launch(argument, consensus_every=4, log_every=2)
    distances = {row["step"]: row["consensus_distance"] for row in rows(run)}
    assert distances[4] < 1e-5 and distances[8] < 1e-5 and distances[6] > 1e-4


def test_two_hundred_and_fifty_six_simulated_workers(launch):
    run, outcome = launch(
        "topology=ring,simulate,workers=256", steps=2, batch_size=256, **{"schedule.warmup_steps": 0, "eval.every": 2}
    )
    assert outcome.step == 2 and np.isfinite(outcome.summary["eval_loss"])


def test_evaluation_is_the_mean_over_all_windows():
    w = decjax.make_workers(8)
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 9, (13, 5)).astype(np.int32)  # divides neither by workers nor by batch
    params = {"a": rng.normal(size=(8, 9)).astype(np.float32)}

    def measure(params, variables, tokens_BxT1):
        """A window counts by its first token."""
        nll = params["a"][tokens_BxT1[:, 1:]] ** 2 + params["a"][tokens_BxT1[:, :-1]]
        weight_B = 1.0 + tokens_BxT1[:, 0]
        return {"loss": weight_B * nll.mean(axis=1), "shifted": weight_B * variables["b"]}, weight_B

    variables = {"b": rng.normal(size=8).astype(np.float32)}
    models = params, variables
    average = jax.tree.map(lambda x: x.mean(axis=0), models)
    given = jax.device_put((models, average), (w.stacked, w.replicated))
    result = evaluate.make_evaluate(measure, w, windows, batch_size=2)(*given)
    alone = evaluate.make_evaluate(measure, w, windows, batch_size=2, local=False)(*given)
    assert alone.averaged == result.averaged and not alone.local

    def dense(a):
        nll_W = (a[windows[:, 1:]] ** 2 + a[windows[:, :-1]]).mean(axis=1)
        return np.average(nll_W, weights=1 + windows[:, 0])

    np.testing.assert_allclose(result.averaged["loss"], dense(params["a"].mean(axis=0)), rtol=1e-5)
    np.testing.assert_allclose(result.local["loss"], [dense(a) for a in params["a"]], rtol=1e-5)
    np.testing.assert_allclose(result.averaged["shifted"], variables["b"].mean(), rtol=1e-5)
    np.testing.assert_allclose(result.local["shifted"], variables["b"], rtol=1e-5)


def test_consensus_distance_is_the_root_mean_square_deviation():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 3, 2)), rng.normal(size=(8,))
    flat = np.concatenate([x.reshape(8, -1), y[:, None]], axis=1)
    expected = np.sqrt(((flat - flat.mean(axis=0)) ** 2).sum() / 8)
    params = {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32), "n": jnp.arange(8)}
    np.testing.assert_allclose(state_lib.consensus_distance(params), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "argument, fields, complaint",
    [
        ("mixer=accelerated", {}, "needs a static graph"),
        ("", {"method.every": 0}, "every=0"),
        ("topology=ring(k=", {}, "must read like"),
        ("topology=ring(colour=3)", {}, "colour"),
        ("topology=random_digraph(degree=2)", {}, "doubly stochastic"),
        ("optimizer=accum_adamw", {"optimizer.window": 0}, "window"),
        ("", {"schedule.warmup_steps": 99}, "warmup_steps=99 must be at least 0 and less than steps=12; use 1"),
        ("", {"log_every": 0}, "log_every=0"),
        ("", {"data.partition": "sorted"}, "iid, contiguous"),
        ("", {"local_size": 3}, "local_size=3"),
        ("", {"model.heads": 3}, "heads=3"),
        ("", {"method.order": "sync"}, "awc, atc"),
    ],
)
def test_impossible_configs_are_refused_with_the_reason(launch, argument, fields, complaint, tmp_path):
    with pytest.raises(train.ConfigError, match=complaint) as error:
        launch(argument, workdir=tmp_path / "never", **fields)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "never").exists(), "nothing is written for an impossible config"


def test_a_model_that_memory_cannot_hold_is_refused_before_anything_is_written(prepare, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    with pytest.raises(train.ConfigError, match="8 workers of .*M parameters need at least .* GB .* use fewer workers") as error:
        prepare(workdir=tmp_path / "never")
    assert "\n" not in str(error.value) and not (tmp_path / "never").exists()


def test_a_lack_of_memory_is_one_line():
    with pytest.raises(OutOfMemory, match="out of memory .* use a smaller model, batch_size") as error, translating_out_of_memory():
        jnp.zeros(2**48, jnp.uint8).block_until_ready()
    assert "\n" not in str(error.value)
    with pytest.raises(RuntimeError, match="of another kind"), translating_out_of_memory():
        raise RuntimeError("of another kind")


def test_the_summary_is_written_before_the_sample(prepare, tmp_path):
    def show(*given):
        raise ValueError("no sample")

    run = prepare(workdir=tmp_path / "run", steps=3)
    setup = run.trainer.setup
    object.__setattr__(setup.task, "show", show)
    with pytest.raises(ValueError, match="no sample"):
        run.train()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3
