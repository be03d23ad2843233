"""Reducers and local updates in the loop: resuming, bytes, another number of workers, and invalid configs."""

import json
import shutil

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from configs import lm
from decjax import reduce, train
from decjax.contrib import onebit
from decjax.pipeline import stateless
from decjax.program import hlo
from decjax.train import engine
from decjax.train import state as state_lib
from decjax.train.step import Step
from tests.runs import run_of, spec_of, trainer_of

N, STEPS = 4, 8
pytestmark = pytest.mark.usefixtures("quick_compilation")
METHODS = {
    "powersgd": ("method=allreduce,reducer=powersgd,rank=1", {"reducer.start": 2}),
    "one-sided": ("method=allreduce,reducer=powersgd_one_sided(rank=1,iterations=3)", {"reducer.start": 2}),
    "codec": ("method=allreduce,reducer=codec,codec=int8", {}),
    "low rank": ("method=allreduce,reducer=codec(form=gather),codec=low_rank(rank=1)", {}),
    "ef21": ("method=allreduce,reducer=codec(error=ef21),codec=int4(rounding=stochastic)", {}),
    "8-bit memory": ("method=allreduce,reducer=codec(error=momentum,storage=int8),codec=int4", {}),
    "demo": ("method=allreduce,reducer=demo,codec=int8", {}),
    "onebit_adam": ("method=onebit_adam,codec=int8", {"reducer.start": 3}),
    "gravac": ("method=allreduce,reducer=gravac", {"reducer.window": 2}),
    "diloco": ("method=diloco,reducer=powersgd,rank=1,every=3", {"reducer.start": 1}),
    "sparseloco": ("method=sparseloco,codec=int8,every=3", {}),
    "slowmo": ("method=slowmo,reducer=codec,codec=int4,every=3", {"method.reset": True}),
    "slowmo_gossip": ("method=slowmo_gossip,mixer=choco,codec=int8,topology=ring,every=3", {}),
    "gossip_diloco": ("method=gossip_diloco,mixer=choco,codec=int8,topology=ring,every=3", {}),
    "noloco": ("method=noloco,every=3", {}),
    "streaming": ("method=streaming_diloco,every=4", {"method.fragments": 2}),
    "dion": ("method=allreduce,reducer=dion,rank=2", {}),
    "zero_one_adam": ("method=zero_one_adam,codec=int8", {"reducer.start": 3, "method.refresh": 1, "method.doubling": 1}),
    "stale powersgd": ("method=allreduce,reducer=powersgd,rank=1,stale", {}),
}


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 123, 4000, dtype=np.uint8).tobytes())

    def configured(argument, fields, mode="simulate"):
        config = lm.get_config(f"smoke,workers={N},steps={STEPS},{argument}" + (",simulate" if mode == "simulate" else ""))
        config.update_from_flattened_dict(
            {
                "data.path": str(text),
                "model.depth": 1,
                "model.width": 8,
                "model.hidden": 8,
                "model.heads": 1,
                "model.context": 8,
                "log_every": 2,
                "eval.every": STEPS,
                "eval.num_windows": 2,
                "checkpoint.every": 4,
                "checkpoint.keep": 9,
                "data.sample_bytes": 1,
            }
            | fields
        )
        return config

    return configured


def saved_state(workdir):
    path = (workdir / "checkpoints" / str(STEPS) / "state").absolute()
    return [np.asarray(x) for x in jax.tree.leaves(ocp.StandardCheckpointer().restore(path))]


# The others are in resume_methods_test.
@pytest.mark.parametrize("name", ["one-sided", "ef21", "8-bit memory", "gravac", "diloco", "stale powersgd"])
def test_resume_is_bit_exact_and_bytes_go_on(configured, tmp_path, name):
    config = configured(*METHODS[name])
    run = run_of(config, tmp_path / "whole")
    run.train()
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / str(STEPS))
    (tmp_path / "part" / "summary.json").unlink()
    outcome = train.Run(run.trainer, tmp_path / "part").train()  # which has compiled its programs
    assert outcome.step == STEPS
    for a, b in zip(saved_state(tmp_path / "whole"), saved_state(tmp_path / "part"), strict=True):
        np.testing.assert_array_equal(a, b)
    summaries = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("whole", "part")]
    assert summaries[0]["bytes_per_step_per_worker"] == summaries[1]["bytes_per_step_per_worker"] > 0
    if name == "gravac":
        used = next(x for x in saved_state(tmp_path / "whole") if x.shape == (N, 4) and x.dtype == np.int32)[0]
        assert used.sum() == STEPS and (used > 0).sum() > 1
        trainer = run.trainer
        params = jax.eval_shape(trainer.setup.start, jax.random.key(0))
        per_step = [trainer.method.num_bytes(params, rung)[0] for rung in trainer.method.phases]
        assert summaries[0]["bytes_per_step_per_worker"] == used @ per_step / STEPS


@pytest.mark.parametrize("name", METHODS)
def test_declared_bytes_are_those_of_the_compiled_step(configured, name):
    trainer = trainer_of(configured(*METHODS[name], mode="devices"))
    state, method = trainer.abstract, trainer.method
    one = trainer.workers.one_device(state.params)
    gradients = lambda params, batch, key: (0.0 * jax.tree.leaves(params)[0].sum(), params)
    program = engine.compile_per_phase(Step(stateless(gradients), method, trainer.workers, 0))
    for phase in dict.fromkeys(map(method.phase, range(STEPS))):
        step = program(phase, state, trainer.batch(0), np.int32(0))
        measured_N = hlo.bytes_sent(step.executables[0].as_text(), N)
        declared = sum(method.num_bytes(one, p) for p in (method.phases if phase is None else [phase]))
        np.testing.assert_allclose(measured_N, declared, rtol=1e-12)
        assert (measured_N > 0).all() == (phase != reduce.SILENT)


def test_local_steps_differ_and_outer_steps_agree(configured, tmp_path):
    config = configured("method=diloco,every=2", {"log_every": 1})
    run_of(config, tmp_path / "run").train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    distance = {row["step"]: row["consensus_distance"] for row in rows if row["kind"] == "train"}
    assert all(distance[step] < 1e-6 for step in (2, 4, 6)) and all(distance[step] > 1e-5 for step in (3, 5, 7))


def test_errors_begin_afresh_for_another_number_of_workers():
    """Wherever the reducer's memories are in the optimizer's state."""
    reducer = reduce.start_at(reduce.powersgd(rank=1), 1, reduce.mean())
    tx = optax.chain(onebit.scale_by_onebit_adam(reducer), optax.scale(-1))
    params = {"w": np.ones((9, 9), np.float32)}

    def stacked(n, value):
        return state_lib.State(*jax.tree.map(lambda x: np.full((n, *x.shape), value, x.dtype), (params, tx.init(params))))

    resized = state_lib.resumed(state_lib.resize(state_lib.kept(stacked(4, 2), True), 2), stacked(2, 7))
    assert {int(x.ravel()[0]) for x in jax.tree.leaves(resized.opt_state[0].reducer)} == {7}
    assert {int(x.ravel()[0]) for x in jax.tree.leaves((resized.params, resized.opt_state[0].mu))} == {2}


@pytest.mark.parametrize(
    "argument, fields, message",
    [
        (
            "reducer=powersgd",
            {},
            r"reducer=powersgd has no effect with method=decentralized; leave it out, or use method=allreduce\|",
        ),
        ("mixer=choco,codec=int8,rank=2", {}, "rank=2 has no effect with method 'decentralized' and mixer 'choco'"),
        ("method=allreduce,codec=int8", {}, "codec=int8 has no effect with method 'allreduce' and reducer 'mean'"),
        ("method=allreduce,reducer=powersgd,rank=0", {}, "rank=0 must be at least 1"),
        ("method=allreduce,reducer=powersgd,rank=99", {}, "rank=99 makes no array smaller"),
        ("method=allreduce,reducer=powersgd(wire_dtype=int8)", {}, "reducer.wire_dtype='int8' must be a floating-point type"),
        ("method=allreduce,reducer=powersgd(wire_dtype=narrow)", {}, "reducer.wire_dtype='narrow' must be a floating-point type"),
        ("method=allreduce,reducer=codec(codec=zip)", {}, "codec 'zip' is unknown; use one of"),
        ("method=allreduce,reducer=codec", {"reducer.codec": ""}, "codec"),
        ("method=allreduce,reducer=codec", {"reducer.codec": "int8(block=128"}, "must read like 'name'"),
        ("method=allreduce,reducer=codec(codec=int8(width=3))", {}, "codec 'int8.*width"),
        ("method=allreduce,reducer=codec(decay=1.5)", {}, "decay=1.5"),
        ("method=allreduce,reducer=codec(error=memory)", {}, "memory'.* use one of residual"),
        ("method=allreduce,reducer=codec(error=none,storage=int8)", {}, "storage"),
        ("method=allreduce,reducer=codec(error=ef21,storage=int8)", {}, "storage"),
        ("method=allreduce,reducer=codec(form=tree)", {}, "form='tree' is unknown"),
        ("method=allreduce,reducer=codec,codec=bounded", {}, "codec 'bounded' has messages of varying size"),
        ("method=allreduce,reducer=codec,codec=identity", {}, "codec 'identity' in form .*; use a codec of fewer bytes"),
        ("method=diloco,every=3,reducer=codec,codec=identity", {}, "codec 'identity' in form"),
        ("method=allreduce,reducer=gravac(ladder='int8; bfloat16')", {}, "rung 'bfloat16' sends"),
        ("method=allreduce,reducer=sum", {}, "reducer 'sum' is unknown; use one of "),
        ("method=allreduce,reducer=powersgd", {"reducer.start": -1}, "reducer.start=-1 must be at least 0"),
        ("method=onebit_adam,optimizer=sgdm", {}, "optimizer=sgdm has no effect with method=onebit_adam"),
        ("method=onebit_adam,stale", {}, "stale=True has no effect with method 'onebit_adam'"),
        ("method=onebit_adam", {"reducer.start": 0}, "1-bit Adam needs warm steps.* reducer.start, of at least 1"),
        (
            "method=allreduce,reducer=gravac",
            {"reducer.window": 8},
            "reducer.window=8 after .* does not end within steps=8.*use a shorter window",
        ),
        ("method=allreduce,reducer=gravac", {"reducer.ladder": ""}, "ladder"),
        ("method=diloco,every=0", {}, "(every|period)=0.* must be at least 1"),
        ("method=diloco", {"method.outer_momentum": 1.0}, "outer_momentum=1.0 must be at least 0 and less than 1"),
        ("method=allreduce,reducer=mean(codec=int8)", {}, "reducer 'mean' has no option 'codec'; leave it out, it has no options"),
        ("method=allreduce,reducer=powersgd(storage=int8)", {}, "reducer 'powersgd' has no option 'storage'; use rank"),
        ("method=allreduce,reducer=codec(wire_dtype=bfloat16)", {}, "reducer 'codec' has no option 'wire_dtype'; use codec"),
        (
            "method=gossip_diloco,every=4",
            {"consensus_last": 2},
            "consensus_last=2: method 'gossip_diloco' would separate the replicas",
        ),
        ("method=noloco,every=4", {"consensus_every": 2}, "consensus_every=2: method 'noloco' would separate the replicas"),
        ("method=diloco", {"method.outer_learning_rate": 0.0}, "outer_learning_rate=0.0 must be more than 0"),
        ("codec=int8(block=128)(block=64)", {}, "must read like 'name'"),
        ("codec=int8(block=128) + f(block=64)", {}, "must read like 'name'"),
        ("method=diloco,every=9", {}, "method.every=9 is more than steps=8, so nothing would be exchanged; use at most 8"),
        ("every=9", {}, "method.every=9 is more than steps=8"),
        (
            "method=diloco,every=4,reducer=powersgd",
            {"reducer.start": 2},
            "reducer.start=2 is not reached in steps=8.*use less than 2",
        ),
        ("method=diloco,every=4,reducer=powersgd,rank=99", {}, "rank=99 makes no array smaller"),
        ("mixer=power_gossip,rank=99", {}, "rank=99"),
        ("codec=topk(k=2.5),mixer=choco", {}, "k=2.5 must be a whole number"),
        ("codec=qsgd(levels=7.0)", {}, "levels=7.0 must be a whole number"),
        ("method=diloco,stale", {}, "stale=True has no effect with method 'diloco'"),
    ],
)
def test_impossible_configs_are_refused_in_one_line(configured, argument, fields, message):
    with pytest.raises((train.ConfigError, ValueError), match=message) as error:
        spec_of(configured(argument, fields))
    assert "\n" not in str(error.value)


def test_sparse_local_updates_may_have_any_reducer(configured):
    """Its own reducer is only the default."""
    usual, other = (spec_of(configured(f"method=sparseloco,every=4{key}", {})) for key in ("", ",reducer=powersgd,rank=1"))
    assert usual.reducer.name == "codec" and "block_topk" in usual.reducer.options["codec"]
    assert other.reducer.name == "powersgd"
