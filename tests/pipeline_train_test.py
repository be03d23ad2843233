"""Pipelines in the loop: resuming, simulation, gossip between pipelines, another number of them, and invalid configs."""

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import lm
from decjax import gossip, mesh, train
from decjax.contrib import layouts
from tests.runs import run_of, spec_of, trainer_of

STEPS = 12
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Run a config in a new or an existing directory and return (workdir, outcome)."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 101, 4000, dtype=np.uint8).tobytes())

    def launch(argument, workdir=None, resume_from=None, **fields):
        config = lm.get_config(f"smoke,{argument}")
        config.update_from_flattened_dict(
            {
                "data.path": str(text),
                "steps": STEPS,
                "model.width": 8,
                "model.hidden": 8,
                "model.heads": 2,
                "model.context": 8,
                "log_every": 2,
                "eval.every": 6,
                "eval.num_windows": 5,
                "checkpoint.every": 4,
                "checkpoint.keep": 9,
                "data.sample_bytes": 2,
            }
            | fields
        )
        workdir = workdir or tmp_path_factory.mktemp("run")
        return workdir, run_of(config, workdir, resume_from).train()

    return launch


def rows(workdir, kind="train"):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if row["kind"] == kind]


def losses(workdir, kind="train"):
    return [row["loss"] for row in rows(workdir, kind)]


def saved_state(workdir, step=STEPS):
    path = (workdir / "checkpoints" / str(step) / "state").absolute()
    return ocp.StandardCheckpointer().restore(path)


GOSSIP = "topology=one_peer_exponential,optimizer=accum_adamw,workers=4"
PIPELINE = "stages=2,microbatches=4,tied"


@pytest.fixture(scope="module")
def reference(launch):
    """Decentralized AccumAdamW between four pipelines of two stages."""
    return launch(f"{GOSSIP},{PIPELINE}")[0]


def test_resume_is_bit_exact(launch, reference, tmp_path):
    part = tmp_path / "run"
    shutil.copytree(reference, part)
    for step in (8, STEPS):
        shutil.rmtree(part / "checkpoints" / str(step))
    (part / "summary.json").unlink()
    launch(f"{GOSSIP},{PIPELINE}", workdir=part)
    whole, resumed = saved_state(reference), saved_state(part)
    assert {x.shape[:2] for x in jax.tree.leaves(whole)} == {(4, 2)}
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    assert losses(part) == losses(reference)


def test_gossip_between_pipelines_is_gossip_between_whole_models(launch, reference):
    """Evaluation, distance to consensus and bytes included: a tied table, which two stages hold, is sent by both."""
    whole, outcome = launch(f"{GOSSIP},tied,microbatches=4")
    for kind in ("train", "eval"):
        np.testing.assert_allclose(losses(reference, kind), losses(whole, kind), rtol=2e-4)
        np.testing.assert_allclose(
            [row["consensus_distance"] for row in rows(reference, kind)],
            [row["consensus_distance"] for row in rows(whole, kind)],
            rtol=2e-2,
        )
    assert losses(whole, "eval")[-1] < losses(whole)[0]
    summary = json.loads((reference / "summary.json").read_text())
    assert summary["num_params"] == outcome.summary["num_params"]
    width, vocabulary = 8, 256
    extra = 4 * (vocabulary * width + width)  # The table and the last norm, which all stages hold.
    assert summary["bytes_per_step_per_worker"] == outcome.summary["bytes_per_step_per_worker"] + extra


def test_simulated_pipelines_follow_the_same_trajectory(launch, reference):
    simulated, _ = launch(f"{GOSSIP},{PIPELINE},simulate")
    np.testing.assert_allclose(losses(simulated), losses(reference), rtol=2e-4)
    assert [r["bytes_sent_per_worker"] for r in rows(simulated)] == [r["bytes_sent_per_worker"] for r in rows(reference)]


def test_split_exchanges_take_the_same_steps(launch, reference):
    split, _ = launch(f"{GOSSIP},{PIPELINE},engine=split")
    np.testing.assert_allclose(losses(split), losses(reference), rtol=2e-4)


def test_another_number_of_pipelines(launch, reference, tmp_path):
    target, outcome = launch(f"{GOSSIP.replace('workers=4', 'workers=2')},{PIPELINE}", resume_from=reference, steps=STEPS + 4)
    assert outcome.step == STEPS + 4 and losses(target)[-1] < losses(reference)[0]
    with pytest.raises(train.CheckpointError, match="stages: 2 there, 4 here.*start with the same"):
        launch(
            f"{GOSSIP.replace('workers=4', 'workers=2')},stages=4,microbatches=4,tied",
            resume_from=reference,
            workdir=tmp_path / "never",
            steps=STEPS + 4,
        )


def break_exchange(monkeypatch, hit):
    """The defect: zeros arrive."""
    intact = mesh.Axis.exchange
    monkeypatch.setattr(mesh.Axis, "exchange", lambda axis, x, pairs: intact(axis, x, pairs) * (not hit(axis, x, pairs)))


def test_broken_messages_between_stages_are_refused_before_training(launch, monkeypatch, tmp_path):
    break_exchange(monkeypatch, lambda axis, x, pairs: axis == mesh.STAGES)
    with pytest.raises(train.TrainingError, match="stage 1 did not receive the uint8 values of stage 0; refusing to train"):
        launch(f"method=local,workers=1,{PIPELINE}", workdir=tmp_path)


@pytest.mark.parametrize("simulate", [False, True])
def test_the_check_sees_every_permutation_of_stages_and_type(simulate, monkeypatch):
    w, ends = mesh.make_workers(2, stages=4, simulate=simulate), ((0, 3), (3, 0))
    chain = ((0, 1), (1, 2), (2, 3))
    gossip.check_stage_exchange(w, [chain, ends])
    break_exchange(monkeypatch, lambda axis, x, pairs: pairs == ends and x.dtype == np.uint32)
    gossip.check_stage_exchange(w, [chain])
    with pytest.raises(RuntimeError, match="stage 3 did not receive the uint32 values of stage 0"):
        gossip.check_stage_exchange(w, [chain, ends])


@pytest.mark.parametrize(
    "argument", ["", "schedule=interleaved,forward=int8,backward=low_rank(rank=1)", "forward=int8", "autoencoder=2"]
)
def test_every_permutation_of_a_gradient_is_among_those_that_are_checked(argument, monkeypatch):
    config = lm.get_config(f"smoke,simulate,workers=1,method=local,stages=4,microbatches=4,tied,{argument}")
    setup, used, intact = trainer_of(config).setup, set(), mesh.Axis.exchange
    monkeypatch.setattr(mesh.Axis, "exchange", lambda axis, x, pairs: used.add(tuple(pairs)) or intact(axis, x, pairs))
    w, source = setup.workers, setup.source
    params = jax.eval_shape(lambda: w.stack(setup.start(jax.random.key(0))))
    state = jax.eval_shape(w.map(source.init, (0,)), params)
    gradient = w.map(lambda params, state, tokens: source.gradient(params, state, tokens, jax.random.key(0)), (0, 0, 0))
    tokens = setup.task.examples(setup.spec.batch_per_worker)
    jax.eval_shape(gradient, params, state, jax.ShapeDtypeStruct((1, 4, *tokens.shape), tokens.dtype))
    assert ((0, 3), (3, 0)) in used and len(used) > 3 and used <= set(source.permutations)


@pytest.mark.parametrize(
    "argument, axes",
    [
        ("reducer=powersgd,rank=1,compressed=1,tied,fused", "stages=2,tensor=2,schedule=interleaved"),
        ("reducer=codec,codec=int8", "stages=2"),
    ],
)
def test_reducers_average_between_pipelines(launch, argument, axes):
    """Like simulated pipelines; with three axes, two workers of two stages of two devices."""
    run, outcome = launch(f"method=allreduce,{argument},workers=2,microbatches=2,{axes}")
    simulated, _ = launch(f"method=allreduce,{argument},workers=2,microbatches=2,{axes.replace('tensor=2,', '')},simulate")
    np.testing.assert_allclose(losses(run), losses(simulated), rtol=2e-3)
    assert losses(run)[-1] < losses(run)[0] and outcome.summary["bytes_per_step_per_worker"] > 0


@pytest.mark.parametrize("bandwidth_Bps, stages", [(1e12, None), (1e8, "1"), (1e6, "4")])
def test_the_cost_model_chooses_who_compresses(tmp_path, bandwidth_Bps, stages):
    """No stage on fast links, which is refused; all stages on slow ones; in between the first one, which finishes last."""
    profile = tmp_path / "cluster.json"
    link = dict(latency_s=0.0, bandwidth_Bps=bandwidth_Bps)
    profile.write_text(json.dumps(dict(name="box", num_nodes=8, workers_per_node=1, intra=link, inter=link, flops=1e9)))
    config = lm.get_config("smoke,method=allreduce,reducer=powersgd,rank=1,compressed=auto,stages=4,microbatches=4,workers=2")
    config.update_from_flattened_dict({"reducer.cluster": str(profile), "model.width": 32})
    if stages is None:
        with pytest.raises(train.ConfigError, match="no stage gains from reducer 'powersgd'; use reducer 'mean'"):
            spec_of(config)
    else:
        assert spec_of(config).averaging.stages == stages


@pytest.mark.parametrize(
    "keys, backward, forward",
    [
        (
            "backward=low_rank(rank=4),forward=int8(block=32)",
            (4 * 4 * (64 + 32) / (64 * 32 * 4), "epilogue"),
            ((1 + 4 / 32) / 4, "always"),
        ),
        ("autoencoder=8", (8 / 32, "always"), (8 / 32, "always")),
        ("", (1, "always"), (1, "always")),
    ],
)
def test_the_cost_model_knows_what_travels_between_stages(tmp_path, monkeypatch, keys, backward, forward):
    """One device's half of a microbatch's rows, 64 of 128: 4 sequences of 32."""
    profile, asked = tmp_path / "cluster.json", []
    link = dict(latency_s=0.0, bandwidth_Bps=1e6)
    profile.write_text(json.dumps(dict(name="box", num_nodes=8, workers_per_node=1, intra=link, inter=link, flops=1e9)))
    config = lm.get_config(
        "smoke,method=allreduce,reducer=powersgd,rank=1,compressed=auto,stages=2,tensor=2,microbatches=2,workers=2"
        + (f",{keys}" if keys else "")
    )
    config.update_from_flattened_dict({"reducer.cluster": str(profile), "model.width": 32, "batch_size": 16})
    choose = layouts.choose_compressed_stages
    monkeypatch.setattr(layouts, "choose_compressed_stages", lambda *args: asked.append(args) or choose(*args))
    assert spec_of(config).averaging.stages
    ((*_, layout, traffic),) = asked
    assert (layout.tensor, traffic.backward.when, traffic.forward.when) == (2, backward[1], forward[1])
    assert (traffic.backward.ratio, traffic.forward.ratio) == pytest.approx((backward[0], forward[0]))


@pytest.mark.parametrize(
    "argument, fields, complaint",
    [
        ("stages=2", {"model.depth": 3}, "depth=3 layers do not divide evenly into stages=2; use depth=2 or 4"),
        ("stages=2,workers=8", {}, "workers=8 of stages=2 x tensor=1 but there are 8 devices; use workers=4"),
        ("stages=4,tensor=4,method=local", {"model.heads": 4}, "but there are 8 devices; use stages x tensor <= 8"),
        (
            "stages=4,microbatches=2,schedule=interleaved",
            {},
            "microbatches=2 with schedule 'interleaved': must be a multiple of stages=4",
        ),
        (
            "stages=2,microbatches=4",
            {"batch_size": 24},
            "microbatches=4 does not divide a worker's batch of 6 examples; use one of",
        ),
        ("stages=2,microbatches=0", {"batch_size": 8}, "microbatches=0"),
        ("stages=2,chunks=2", {}, "chunks=2, stages=2 with schedule '1f1b'"),
        ("remat", {}, "pipeline.remat=True has no effect with pipeline.stages=1; leave it out"),
        ("schedule=interleaved", {}, "pipeline.schedule='interleaved' has no effect with pipeline.stages=1"),
        ("stages=2", {"pipeline.layers": "1;1"}, "pipeline.layers='1;1' must read like"),
        ("stages=2", {"pipeline.layers": "2,1"}, "layers=2,1: must be 2 numbers"),
        ("stages=2,tensor=2", {"model.heads": 1}, "tensor=2 does not divide model.heads=1"),
        ("tensor=2,simulate", {}, "tensor=2 with simulate"),
        ("stages=0", {}, "stages=0"),
        ("fused", {}, "pipeline.fused_embedding=True has no effect with pipeline.stages=1"),
        ("autoencoder=4", {}, "pipeline.autoencoder=4 has no effect with pipeline.stages=1"),
        ("stages=2,autoencoder=9", {}, "autoencoder=9 must be at least 0 and at most 8"),
        ("stages=2,fused,method=allreduce", {}, "fused_embedding=True needs a tied embedding"),
        (
            "stages=2,tied,fused",
            {},
            "fused_embedding=True with method 'decentralized', which does not average the gradients of a tied table",
        ),
        ("stages=2,tied,fused,method=onebit_adam", {}, "fused_embedding=True with method 'onebit_adam', which does not average"),
        ("stages=2,compressed=1", {}, "compressed=1 has no effect with method 'decentralized'"),
        ("stages=2,compressed=1,method=allreduce", {}, "compressed=1 has no effect with .* choose a part that has stages"),
        ("stages=2,compressed=1,method=allreduce,reducer=gravac", {}, "compressed=1 has no effect with"),
        ("compressed=1,method=allreduce,reducer=powersgd", {}, "reducer.stages='1' has no effect with pipeline.stages=1"),
        ("stages=2,compressed=3,method=allreduce,reducer=powersgd", {}, "must be a number from 1 to stages=2, 'auto', or empty"),
        ("stages=2,compressed=auto,method=allreduce,reducer=powersgd,rank=1", {}, "'auto' needs reducer.cluster, a profile"),
    ],
)
def test_impossible_pipelines_are_refused_with_the_reason(launch, argument, fields, complaint, tmp_path):
    with pytest.raises((train.ConfigError, ValueError), match=complaint) as error:
        launch(argument, workdir=tmp_path / "never", **fields)
    assert "\n" not in str(error.value) and not (tmp_path / "never").exists()
