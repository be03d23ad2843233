"""Workers of several devices (fsdp): trajectories, shards that codecs see, what is sent between and within workers, refusals."""

import functools
import pathlib
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import lm
import decjax
from decjax import config as parts
from decjax import gossip, mesh, optim, registry, topology
from decjax.errors import CheckpointError
from decjax.mesh import workers as workers_lib
from decjax.program import hlo
from tests import fsdp_training
from tests.fsdp_training import CODED, PLAIN, SHAPES, Training, cut, muon, per_shard, start, train
from tests.runs import trainer_of
from tests.tiny_runs import assert_equal_states, forget_after, launch, prepare, rows, text  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYOUTS = [(2, 4), (4, 2)]  # workers, devices of each


def close(found, expected, rtol=1e-5):
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=rtol * np.abs(x).max() + 1e-7, err_msg=name)


# -- Trajectories -----------------------------------------------------------------------------------------------------

# With four workers.
FOUR = ("all-reduce", "awc", "atc", "nodes", "tracking", "DiLoCo", "MuLoCo", "streaming DiLoCo")


def check_trajectory(N, L, method, steps=fsdp_training.STEPS):
    training = Training(N, L, PLAIN[method])
    found = training.run(steps)
    close(found, train(N, 1, method, steps=steps))
    assert np.abs(found["up"] - start()["up"]).max() > 1e-3, "nothing was trained"
    for x in jax.tree.leaves((training.params, training.state)):
        part = x.addressable_shards[0].data.size * N
        assert part == x.size // L or x.size < N * 4096, f"{x.shape} is whole on each device"


@pytest.mark.parametrize("method", ["all-reduce", "awc"])
def test_trajectories_are_those_of_one_device_per_worker(method):
    check_trajectory(2, 4, method, steps=20)


@pytest.mark.parametrize("N, L, method", [*((2, 4, method) for method in PLAIN), *((4, 2, method) for method in FOUR)])
def test_more_trajectories(N, L, method):
    # Muon makes all directions equally large, so that rounding errors grow.
    check_trajectory(N, L, method, steps=20 if method == "Muon" else fsdp_training.STEPS)


@pytest.mark.parametrize("N, L", LAYOUTS)
@pytest.mark.parametrize("method", CODED)
def test_trajectories_with_codecs_are_those_of_codes_of_shards(N, L, method):
    close(train(N, L, method), train(N, 1, method, of=functools.partial(per_shard, L=L)))


# -- What codecs see --------------------------------------------------------------------------------------------------


def noise(shape_of, worker, step):
    rng = np.random.default_rng((worker, step, 7))
    return {name: 0.1 * rng.normal(size=x.shape).astype(np.float32) for name, x in shape_of.items()}


def repeated(workers, fn, init, params, changes, steps=4):
    """Apply `fn(params, state, change) -> (params, state)` on all workers; return parameters [N, …] after each step."""
    stacked = workers.stack(params)
    state = workers.jit(init, (0,))(stacked)
    program, seen = workers.jit(fn, (0, 0, 0)), []
    for step in range(steps):
        batch = workers.place(
            jax.tree.map(lambda *x: np.stack(x), *(changes(worker, step) for worker in range(workers.num_workers)))
        )
        stacked, state = program(stacked, state, batch)
        seen.append(workers.fetch(stacked))
    return seen


def check_by_shard(part, act, N, L, rtol=1e-6):
    """Check that `act(part, params, state, change)` does the same on the devices of a worker as on one shard after the other."""
    params = jax.tree.map(np.asarray, start())
    found, expected = (
        repeated(workers, functools.partial(act, one), one.init, params, functools.partial(noise, params))
        for workers, one in (
            (mesh.make_workers(N, devices_per_worker=L), part),
            (mesh.make_workers(N, simulate=True), per_shard(part, L)),
        )
    )
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs, rtol)


MIXERS = {
    "exact(codec=int8)": {},
    "exact(codec=qsgd)": {},
    "choco(codec=int4)": {},
    "choco(codec=low_rank(rank=2))": dict(rtol=1e-4),
    "deepsqueeze(codec=topk(fraction=0.1))": {},
    "beer(codec=int8)": {},
}


@pytest.mark.parametrize("text", MIXERS)
def test_mixers_encode_the_shard_of_each_device(text):
    name, options = registry.parse("mixer", text)
    mixer = registry.make("mixer", name, topology=topology.make("ring", 4), **options)

    def act(mixer, params, state, change):
        return gossip.mix(mixer, jax.tree.map(jnp.add, params, change), state, 0, 0)

    check_by_shard(mixer, act, 4, 2, **MIXERS[text])


REDUCERS = {
    "codec(codec=int8,form='gather')": {},
    "codec(codec=int4,form='shards')": {},
    "codec(codec=qsgd,form='gather')": {},
    "codec(codec=topk(fraction=0.1),error='ef21')": {},
    "powersgd(rank=2)": dict(rtol=1e-4),
    "powersgd_one_sided(rank=2)": dict(rtol=1e-4),
}


@pytest.mark.parametrize("text", REDUCERS)
def test_reducers_encode_the_shard_of_each_device(text):
    name, options = registry.parse("reducer", text)

    def act(reducer, params, state, change):
        average, state = reducer.reduce(change, state, 0)
        return jax.tree.map(jnp.add, params, average), state

    check_by_shard(registry.make("reducer", name, **options), act, 2, 4, **REDUCERS[text])


@pytest.mark.parametrize("text", ["codec(codec=int8)", "powersgd(rank=2)"])
def test_a_gradient_that_is_not_finite_in_one_shard_leaves_all_memories_unchanged(text):
    name, options = registry.parse("reducer", text)
    reducer, workers = registry.make("reducer", name, **options), mesh.make_workers(2, devices_per_worker=4)
    stacked = workers.stack(start())
    reduced = workers.jit(reducer.reduce, (0, 0))
    _, state = reduced(workers.shard(stacked), workers.jit(reducer.init, (0,))(stacked))
    bad = jax.tree.map(jnp.copy, stacked) | {"up": stacked["up"].at[1, 3, 100].set(jnp.nan)}
    average, after = reduced(workers.shard(bad), state)
    assert not any(np.isfinite(x).any() for x in jax.tree.leaves(workers.fetch(average)))
    before, after = (dict(jax.tree.leaves_with_path(workers.fetch(tree))) for tree in (state, after))
    for path, x in before.items():
        if "step" not in jax.tree_util.keystr(path):
            np.testing.assert_array_equal(after[path], x, err_msg=str(path))


# -- What is sent -----------------------------------------------------------------------------------------------------

SMALL = 64  # bytes of scales and flags


def collectives(executable, L):
    """The large collectives of a program (between workers, within a worker)."""
    found = [c for c in hlo.collectives(executable.as_text(), 8) if c.groups and c.num_bytes > SMALL]
    crosses = lambda c: any(len({device // L for device in group}) > 1 for group in c.groups)
    return [c for c in found if crosses(c)], [c for c in found if not crosses(c)]


def kinds(found):
    return sorted((c.kind, c.num_bytes // SMALL) for c in found)


class Even(Training):
    """Training whose arrays are all divided."""

    def start(self):
        return start({name: SHAPES[name] for name in ("up", "down")})

    def loss(self, params, batch):
        return super().loss(params | {"bias": 0.0, "scale": 0.0, "odd": 0.0}, batch)


def check_exchange(N, L, method):
    """Check that each device sends what its shard takes, to the same places of other workers, and that nothing is gathered for it."""
    make = PLAIN.get(method) or functools.partial(CODED[method], of=lambda part: part)
    training, declared = Even(N, L, make), make(N)
    shard = jax.eval_shape(lambda tree: cut(tree, L, 0), training.workers.one_device(training.params))
    sent_of = lambda step: declared.num_bytes(shard, declared.phase(step))[0]
    step = next(step for step in range(12) if sent_of(step))
    between, within = collectives(training.compiled(step)[0], L)
    sent = np.sum([c.sent(8) for c in between], axis=0)
    np.testing.assert_allclose(sent, sent_of(step), rtol=0.02, atol=2 * SMALL)
    assert all(len({device % L for device in group}) == 1 for c in between for group in c.groups)
    alone = Even(N, L, lambda N: optim.Local(muon if method.startswith("Mu") else optax.sgd(0.1), num_workers=N))
    none, expected = collectives(alone.compiled(0)[0], L)
    assert not none
    if method != "streaming DiLoCo":  # Its fragments are cut across shards, so it gathers them within a worker.
        assert kinds(within) == kinds(expected)


QUICK = ("all-reduce", "awc", "int8")


@pytest.mark.parametrize("N, L", LAYOUTS)
@pytest.mark.parametrize("method", QUICK)
def test_each_device_sends_its_shard_and_nothing_is_gathered_for_it(N, L, method):
    check_exchange(N, L, method)


@pytest.mark.parametrize("N, L", LAYOUTS)
@pytest.mark.parametrize("method", [method for method in (*PLAIN, *CODED) if method not in (*QUICK, "traced phase")])
def test_more_exchanges(N, L, method):
    check_exchange(N, L, method)


def sent_in_loops(batch_size):
    """What devices of a worker send in the loops over layers: (kind, bytes) of each collective."""
    fields = {"model.width": 64, "model.hidden": 128, "model.context": 16}
    config = lm.get_config(f"smoke,topology=ring,workers=2,fsdp=4,batch_size={batch_size}")
    config.update_from_flattened_dict(fields)
    trainer = trainer_of(config)
    (executable,) = trainer.program(trainer.abstract, trainer.batch(0), 0).executables
    module = hlo.Module(executable.as_text())
    loops = [instruction for instruction in module.entry if instruction.opcode == "while"]
    return kinds(hlo.collectives([inner for loop in loops for inner in module.below(loop)], 8))


def test_devices_of_a_worker_gather_parameters_and_do_not_send_activations():
    found = sent_in_loops(8)
    assert {kind for kind, _ in found} >= {"all-gather", "all-reduce"} and found == sent_in_loops(16)


# -- Layouts and refusals ---------------------------------------------------------------------------------------------


def device(number, process, slice_index=None) -> Any:
    known = {} if slice_index is None else {"slice_index": slice_index}
    return types.SimpleNamespace(id=number, process_index=process, platform="gpu", device_kind="fake", **known)


def test_workers_lie_within_hosts():
    alternating = [device(i, i % 2) for i in range(8)]
    hosts = [d.process_index for d in workers_lib._by_network(alternating, 4)]
    assert hosts == [0] * 4 + [1] * 4
    assert list(workers_lib._not_together(workers_lib._by_network(alternating, 4), 4)) == []
    assert list(workers_lib._not_together(workers_lib._by_network(alternating, 8), 8)) == []  # A worker of two hosts.
    (refusal,) = list(workers_lib._not_together(alternating, 4))[:1]
    assert refusal.startswith(
        "4 devices per worker (fsdp): those of worker 0 would be on 2 hosts or slices, and 1 of 4 devices can"
    )
    uneven = [device(i, i // 6) for i in range(12)]
    assert any("use a number that divides 6" in line for line in workers_lib._not_together(workers_lib._by_network(uneven, 4), 4))


def test_a_worker_may_be_on_more_hosts_than_necessary_where_this_is_allowed(monkeypatch):
    monkeypatch.setattr(workers_lib, "_network", lambda device: device.id // 6)
    with pytest.raises(ValueError, match="worker 1 would be on 2 hosts or slices, .* set across_hosts"):
        decjax.make_workers(2, devices_per_worker=4)
    assert decjax.make_workers(2, devices_per_worker=4, across_hosts=True).fsdp == 4


def test_processes_of_one_host_are_one_network():
    assert list(workers_lib._not_together([device(i, i, slice_index=i // 4) for i in range(8)], 4)) == []


@pytest.mark.parametrize(
    "argument, message",
    [
        ("workers=2,fsdp=2,stages=2", "fsdp=2 needs stages=1 and tensor=1; use either fsdp, or stages and tensor"),
        ("workers=2,fsdp=2,tensor=2", "fsdp=2 needs stages=1 and tensor=1"),
        ("workers=2,fsdp=2,engine=split", "fsdp=2 needs engine 'fused'; leave engine out"),
        (
            "workers=2,fsdp=2,mixer=push_sum",
            "fsdp=2 needs a mixer that acts on shards; use mixer 'exact', 'choco', 'beer', 'deepsqueeze', or fsdp=1",
        ),
        ("workers=2,fsdp=2,mixer=dcd,topology=ring", "fsdp=2 needs a mixer that acts on shards"),
        (
            "workers=2,fsdp=2,method=allreduce,reducer=gravac",
            "fsdp=2 needs a reducer that acts on shards; use reducer .*'mean'.*, or fsdp=1",
        ),
        (
            "workers=2,fsdp=4,batch_size=4",
            "fsdp=4 does not divide the 2 examples of a worker's .micro.batch; use a batch_size of a",
        ),
        ("workers=4,fsdp=4,batch_size=16", "workers=4 of 4 devices but there are 8 devices; use workers=2"),
        ("workers=1,method=local,fsdp=16,batch_size=16", "workers=1 of 16 devices but there are 8 devices; use fsdp=8 at most"),
    ],
)
def test_refused_configs(argument, message):
    with pytest.raises(parts.ConfigError, match=message):
        trainer_of(lm.get_config(f"smoke,{argument}"))


def test_refused_parts_of_an_own_loop():
    workers = decjax.make_workers(2, devices_per_worker=4)
    mixer = registry.make("mixer", "push_sum", topology=topology.make("directed_exponential", 2))
    with pytest.raises(ValueError, match="mixer 'push_sum' needs whole arrays, and the 4 devices of a worker divide them; use one"):
        workers.jit(decjax.decentralize(optax.sgd(0.1), mixer).init, (0,))(workers.stack(start()))
    with pytest.raises(ValueError, match="4 devices per worker .fsdp. with stages=2 and tensor=1"):
        decjax.make_workers(1, devices_per_worker=4, stages=2)


# -- Runs -------------------------------------------------------------------------------------------------------------

RUN = {"model.width": 64, "model.hidden": 64, "model.heads": 2, "clip_norm": 0.5, "eval.every": 6, "batch_size": 16}
GOSSIP = "topology=ring,workers=2"


@pytest.fixture(scope="module")
def plain(launch):
    return launch(f"{GOSSIP},fsdp=4", **RUN)[0]


def trained(workdir):
    return [row["loss"] for row in rows(workdir) + rows(workdir, "eval")]


def test_a_run_is_that_of_simulated_workers(launch, plain):
    simulated, _ = launch(f"{GOSSIP},fsdp=4,simulate", **RUN)
    np.testing.assert_allclose(trained(plain), trained(simulated), rtol=1e-5)
    distances = [[row["consensus_distance"] for row in rows(workdir)] for workdir in (plain, simulated)]
    np.testing.assert_allclose(*distances, rtol=1e-4)
    assert rows(plain)[-1]["bytes_sent_per_worker"] == pytest.approx(rows(simulated)[-1]["bytes_sent_per_worker"], rel=0.01)


@pytest.mark.parametrize("argument", [GOSSIP, "workers=2,method=allreduce"])
def test_devices_of_a_worker_divide_the_master_copy_and_send_shards_of_its_rounding(argument):
    fields = {"model.width": 64, "model.hidden": 64, "model.heads": 2, "model.depth": 1, "batch_size": 16}
    configs = [lm.get_config(f"smoke,{argument},fsdp=4,param_dtype=bfloat16{more}") for more in ("", ",simulate")]
    found = []
    for config in configs:
        config.update_from_flattened_dict(fields)
        trainer = trainer_of(config)
        state = trainer.init()
        for step in range(3):
            program = trainer.program(state, trainer.batch(step), step)
            state, loss_N = trainer.take(program, state, trainer.batch(step), step)
        found.append((state.params, np.asarray(loss_N), program))
    (params, losses, program), (expected, expected_losses, _) = found
    for x in jax.tree.leaves(params):
        assert x.dtype == np.float32 and (x.addressable_shards[0].data.size == x.size // 8 or x.size < 2 * 4096)
    between, _ = collectives(program.executables[0], 4)
    shard = sum(x.size for x in jax.tree.leaves(params)) / 2 / 4
    assert sum(c.sent(8).max() for c in between) == pytest.approx(2 * shard, rel=0.02)  # bytes; all-reduce of two sends as many
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-3)
    # AdamW's first steps follow the sign of the gradient, which a rounding of values near zero changes.
    away = lambda x, y: np.linalg.norm(np.asarray(x) - np.asarray(y)) / (np.linalg.norm(y) + 1e-6)
    assert max(map(away, *map(jax.tree.leaves, (params, expected)))) < 2**-8


def test_a_run_continues_with_another_number_of_devices_per_worker(launch, plain, tmp_path):
    continued, outcome = launch(f"{GOSSIP},fsdp=2", workdir=forget_after(plain, 4, tmp_path / "run"), **RUN)
    assert not outcome.already_finished
    np.testing.assert_allclose(trained(continued), trained(plain), rtol=1e-5)


def test_a_coded_run_continues_bit_for_bit(launch, tmp_path):
    argument = f"{GOSSIP},fsdp=4,mixer=choco,codec=int4,consensus_every=6"
    whole, _ = launch(argument, **RUN)
    resumed, _ = launch(argument, workdir=forget_after(whole, 4, tmp_path / "run"), **RUN)
    assert_equal_states(whole, resumed)
    with pytest.raises(CheckpointError, match="holds other arrays"):
        launch(argument.replace("fsdp=4", "fsdp=2"), workdir=forget_after(whole, 4, tmp_path / "other"), **RUN)
    started, outcome = launch(argument.replace("fsdp=4", "fsdp=2"), resume_from=whole, **RUN | {"steps": 16})
    assert outcome.step == 16 and rows(started)[0]["step"] == 16


def in_processes(argument, text, workdir, *options, **fields):
    """Train in four processes with two devices each."""
    fields = (
        {"steps": 12, "model.depth": 1, "model.context": 16, "log_every": 4, "checkpoint.every": 4, "data.path": text}
        | RUN
        | fields
    )
    flags = [f"--config.{name}={value}" for name, value in (fields | {"eval.num_windows": 5, "data.sample_bytes": 2}).items()]
    config = [f"--config=configs/lm.py:smoke,{argument}", f"--workdir={workdir}", *options]
    command = [sys.executable, "-m", "launch.local", "--num_processes=4", "--", *config, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return trained(workdir)


def test_workers_of_two_processes_continue_the_run_of_one(plain, text, tmp_path):
    found = in_processes(f"{GOSSIP},fsdp=4", text, forget_after(plain, 4, tmp_path / "run"))
    np.testing.assert_allclose(found, trained(plain), rtol=1e-5)


def test_another_number_of_workers_of_other_devices_starts_from_divided_averages(prepare, plain, text, tmp_path):
    """In one process and in four; each device holds half of the averaged model of a worker of two devices."""
    argument = "topology=ring,workers=4,fsdp=2"
    run = prepare(argument, resume_from=plain, **RUN | {"steps": 16})
    assert run.done == 12
    average = run.trainer.average(run.state)
    assert {x.size // x.addressable_shards[0].data.size for x in jax.tree.leaves(average) if x.size >= 4096} == {2}
    assert run.trainer.measure(average)["loss"] == pytest.approx(rows(plain, "eval")[-1]["loss"], rel=1e-5)
    run.train()
    found = in_processes(argument, text, tmp_path / "run", f"--resume_from={plain}", steps=16)
    np.testing.assert_allclose(found, trained(run.workdir), rtol=1e-5)
