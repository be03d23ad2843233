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
from decjax import gossip, mesh, optim, reduce, registry, topology
from decjax.contrib import corrections
from decjax.contrib.outer import GossipDiLoCo, StreamingDiLoCo
from decjax.errors import CheckpointError
from decjax.mesh import workers as workers_lib
from decjax.program import hlo
from tests.runs import trainer_of
from tests.tiny_runs import assert_equal_states, forget_after, launch, prepare, rows, text  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = 20
LAYOUTS = [(2, 4), (4, 2)]  # workers, devices of each
SHAPES = {"up": (64, 128), "down": (128, 64), "bias": (128,), "odd": (5, 7), "scale": ()}


def start():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {name: 0.1 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SHAPES.items())}


def loss(params, batch):
    x_BxD, y_BxD = batch
    hidden = jnp.tanh(x_BxD @ params["up"] + params["bias"]) @ params["down"]
    return jnp.mean((hidden * (1 + params["scale"]) - y_BxD) ** 2) + jnp.sum((params["odd"] - x_BxD.mean()) ** 2)


def examples(worker, step):
    x_BxD = np.random.default_rng((worker, step)).normal(size=(8, 64)).astype(np.float32)
    return x_BxD, np.sin(x_BxD + worker)


class Training:
    """A few steps of an own loop with a transformation that communicates."""

    def __init__(self, N, L, make, schedule=None):
        self.workers = mesh.make_workers(N, devices_per_worker=L)
        method = make(N)
        self.tx, self.phase = method.tx, method.phase
        self.params = self.workers.stack(start())
        self.state = self.workers.jit(self.tx.init, (0,))(self.params)
        self.programs = {}

    def _step(self, params, state, batch, *, phase):
        grads = jax.grad(loss)(params, batch)
        updates, state = self.tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state

    def compiled(self, step):
        phase, batch = self.phase(step), self.workers.build(lambda worker: examples(worker, step))
        if phase not in self.programs:
            jitted = self.workers.jit(functools.partial(self._step, phase=phase), (0, 0, 0))
            self.programs[phase] = jitted.lower(self.params, self.state, batch).compile()
        return self.programs[phase], batch

    def run(self, steps=STEPS):
        for step in range(steps):
            program, batch = self.compiled(step)
            self.params, self.state = jax.block_until_ready(program(self.params, self.state, batch))
        return self.workers.fetch(self.params)


def close(found, expected, rtol=1e-5):
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=0, atol=rtol * np.abs(x).max() + 1e-7, err_msg=name)


# -- Trajectories -----------------------------------------------------------------------------------------------------

inner = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.3, momentum=0.9))
muon = registry.make("optimizer", "muon", learning_rate=0.01)
ring = lambda N: topology.make("ring", N)
one_peer = lambda N: topology.make("one_peer_exponential", N)
METHODS = {
    "all-reduce": lambda N: optim.AllReduce(inner, reduce.mean(), N),
    "stale all-reduce": lambda N: optim.AllReduce(inner, reduce.mean(), N, stale=True),
    "awc": lambda N: optim.Decentralized(inner, gossip.exact(one_peer(N))),
    "atc, every second step, damped": lambda N: optim.Decentralized(
        inner, gossip.exact(ring(N)), order="atc", every=2, strength=0.7
    ),
    "nodes": lambda N: optim.Decentralized(inner, gossip.exact(topology.make("hierarchical", N, local_size=2))),
    "traced phase": lambda N: optim.Decentralized(inner, gossip.exact(one_peer(N)), static_phase=False),
    "tracking": lambda N: corrections.Tracking(inner, gossip.exact(ring(N))),
    "DiLoCo": lambda N: optim.DiLoCo(inner, reduce.mean(), N, every=5),
    "MuLoCo": lambda N: optim.DiLoCo(muon, reduce.mean(), N, every=5),
    "streaming DiLoCo": lambda N: StreamingDiLoCo(inner, reduce.mean(), N, every=6, fragments=2, delay=2),
    "gossip DiLoCo": lambda N: GossipDiLoCo(inner, gossip.exact(ring(N)), every=5),
    "Muon": lambda N: optim.AllReduce(muon, reduce.mean(), N),
}
FOUR = ("all-reduce", "awc", "nodes", "tracking", "MuLoCo", "streaming DiLoCo")  # with four workers


def check_trajectory(N, L, method):
    training = Training(N, L, METHODS[method])
    found = training.run()
    close(found, Training(N, 1, METHODS[method]).run())
    assert np.abs(found["up"] - start()["up"]).max() > 1e-3, "nothing was trained"
    for x in jax.tree.leaves((training.params, training.state)):
        part = x.addressable_shards[0].data.size * N
        assert part == x.size // L or x.size < N * 4096, f"{x.shape} is whole on each device"


@pytest.mark.parametrize("method", ["all-reduce", "awc"])
def test_trajectories_are_those_of_one_device_per_worker(method):
    check_trajectory(2, 4, method)


@pytest.mark.parametrize("N, L, method", [*((2, 4, method) for method in list(METHODS)[1:]), *((4, 2, method) for method in FOUR)])
def test_more_trajectories(N, L, method):
    check_trajectory(N, L, method)


# -- What codecs see --------------------------------------------------------------------------------------------------


def cut(tree, L, place):
    """The shard of the device at a place: of the longest axis that L divides, else of the padded values."""

    def of(x):
        axes = [axis for axis, size in enumerate(x.shape) if size % L == 0]
        if not axes:
            return np.pad(x.ravel(), (0, -x.size % L)).reshape(L, -1)[place]
        axis = max(axes, key=lambda axis: x.shape[axis])
        return np.split(x, L, axis)[place]

    return jax.tree.map(of, tree)


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


def check_by_shard(N, L, fn, init, monkeypatch, rtol=1e-6):
    params = jax.tree.map(np.asarray, start())
    found = repeated(mesh.make_workers(N, devices_per_worker=L), fn, init, params, functools.partial(noise, params))
    for place in range(L):
        monkeypatch.setattr(mesh, "own_shard_key", functools.partial(jax.random.fold_in, data=place))
        changes = lambda worker, step: cut(noise(params, worker, step), L, place)
        expected = repeated(mesh.make_workers(N, simulate=True), fn, init, cut(params, L, place), changes)
        for step, x in enumerate(expected):
            for worker in range(N):
                own = {name: x[worker] for name, x in found[step].items()}
                close(cut(own, L, place), {name: x[worker] for name, x in x.items()}, rtol)


MIXERS = {
    "exact(codec=int8)": {},
    "exact(codec=qsgd)": {},
    "choco(codec=int4)": {},
    "choco(codec=low_rank(rank=2))": dict(rtol=1e-4),
    "deepsqueeze(codec=topk(fraction=0.1))": {},
    "beer(codec=int8)": {},
}


@pytest.mark.parametrize("text", MIXERS)
def test_mixers_encode_the_shard_of_each_device(text, monkeypatch):
    N, L = 4, 2
    name, options = registry.parse("mixer", text)
    mixer = registry.make("mixer", name, topology=topology.make("ring", N), **options)

    def fn(params, state, change):
        return gossip.mix(mixer, jax.tree.map(jnp.add, params, change), state, 0, 0)

    check_by_shard(N, L, fn, mixer.init, monkeypatch, **MIXERS[text])


REDUCERS = {
    "codec(codec=int8,form='gather')": {},
    "codec(codec=int4,form='shards')": {},
    "codec(codec=qsgd,form='gather')": {},
    "codec(codec=topk(fraction=0.1),error='ef21')": {},
    "powersgd(rank=2)": dict(rtol=1e-4),
    "powersgd_one_sided(rank=2)": dict(rtol=1e-4),
}


@pytest.mark.parametrize("text", REDUCERS)
def test_reducers_encode_the_shard_of_each_device(text, monkeypatch):
    N, L = 2, 4
    name, options = registry.parse("reducer", text)
    reducer = registry.make("reducer", name, **options)

    def fn(params, state, change):
        average, state = reducer.reduce(change, state, 0)
        return jax.tree.map(jnp.add, params, average), state

    check_by_shard(N, L, fn, reducer.init, monkeypatch, **REDUCERS[text])


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

EVEN = {name: SHAPES[name] for name in ("up", "down")}


def collectives(executable, L):
    """The collectives of a program (between workers, within a worker)."""
    found = [c for c in hlo.collectives(executable.as_text(), 8) if c.groups]
    crosses = lambda c: any(len({device // L for device in group}) > 1 for group in c.groups)
    return [c for c in found if crosses(c)], [c for c in found if not crosses(c)]


def kinds(found):
    return sorted((c.kind, c.num_bytes) for c in found)


class Even(Training):
    """Training whose arrays are all divided."""

    def _step(self, params, state, batch, *, phase):
        grads = jax.grad(lambda params: loss(params | {"bias": 0.0, "scale": 0.0, "odd": 0.0}, batch))(params)
        updates, state = self.tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("N, L", LAYOUTS)
@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize("codec, bytes_per_value", [(None, 4), ("int8", 1)])
def test_each_device_sends_its_shard_and_gossip_adds_nothing_within_a_worker(N, L, order, codec, bytes_per_value, monkeypatch):
    monkeypatch.setitem(globals(), "SHAPES", EVEN)
    make = lambda N: optim.Decentralized(optax.adam(0.01), gossip.exact(ring(N), codec=codec), order=order)
    gossiping, alone = (
        Even(N, L, method).compiled(0)[0] for method in (make, lambda N: optim.Local(optax.adam(0.01), num_workers=N))
    )
    between, within = collectives(gossiping, L)
    assert {c.kind for c in between} == {"collective-permute"}
    sent = np.sum([c.sent(8) for c in between], axis=0)
    size = sum(np.prod(shape) for shape in EVEN.values())
    values = (1 if N == 2 else 2) * size / L
    assert (sent == sent[0]).all() and bytes_per_value * values <= sent[0] <= 1.02 * bytes_per_value * values + 64
    assert all(source % L == target % L for c in between for source, target in c.groups)
    between, expected = collectives(alone, L)
    assert not between and kinds(within) == kinds(expected)


def test_an_all_reduce_adds_up_shards(monkeypatch):
    monkeypatch.setitem(globals(), "SHAPES", EVEN)
    program = Even(2, 4, METHODS["all-reduce"]).compiled(0)[0]
    between, _ = collectives(program, 4)
    large = [c for c in between if c.num_bytes > 64]
    assert {c.kind for c in large} == {"all-reduce"}
    assert sum(c.num_bytes for c in large) == 4 * sum(np.prod(shape) for shape in EVEN.values()) / 4


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


def test_processes_train_as_one_does(launch, plain, text, tmp_path):
    """Two workers of two processes with two devices each."""
    fields = {"steps": 12, "model.depth": 1, "model.context": 16, "log_every": 4, "checkpoint.every": 4, "data.path": text} | RUN
    flags = [f"--config.{name}={value}" for name, value in (fields | {"eval.num_windows": 5, "data.sample_bytes": 2}).items()]
    config = f"--config=configs/lm.py:smoke,{GOSSIP},fsdp=4"
    command = [sys.executable, "-m", "launch.local", "--num_processes=4", "--", config, f"--workdir={tmp_path / 'run'}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(trained(tmp_path / "run"), trained(plain), rtol=1e-5)
