"""Node classification on parts of a graph with uneven local steps: against a dense reference, the division of nodes, and refused
configs.
"""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import nodes as nodes_config
from decjax import config, mesh, optim, reduce, registry
from decjax.channel import Channel
from decjax.contrib.graphs import data as graphs
from decjax.contrib.graphs import gcn, uneven
from decjax.contrib.graphs import partition as graph_partition
from tests import outer
from tests.runs import run_of
from tests.tiny_runs import assert_equal_states, forget_after

GRAPH = "blocks(communities=3,nodes=8,inside=0.5,between=0.2,features=4,noise=1.0)"
N, STEPS, EVERY, TAKEN, LR, MOMENTUM, SEED = 4, 24, 5, (5, 3, 1, 4), 0.3, 0.8, 7
PACE = ",".join(map(str, TAKEN))
pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def task(partition="random", graph=GRAPH, **options):
    return registry.make("task", "nodes", model=gcn(hidden=5), graph=graph, partition=partition, **options)


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if np.issubdtype(x.dtype, np.floating) else np.asarray(x), tree)


START = wide(task().init(jax.random.key(3)))

# -- The dense reference: a matrix for the graph, gradients by hand -----------------------------------------------------


def dense_graph():
    known = graphs.load(GRAPH)
    a_VxV = np.zeros((24, 24))
    for (u, v), strength in zip(known.edges_Ex2, known.strength_E):
        a_VxV[v, u] = strength
    assert (a_VxV == a_VxV.T).all() and a_VxV.sum() > 60
    trained = np.ones(24, bool)
    trained[np.random.default_rng(0).permutation(24)[:6]] = False
    return a_VxV, np.float64(known.features_VxD), known.labels_V, trained


def normalized(a_VxV):
    root_V = 1 / np.sqrt(1 + a_VxV.sum(axis=1))
    return root_V[:, None] * (a_VxV + np.eye(len(a_VxV))) * root_V


def forward(params, s_VxV, x_VxD):
    first, second = params["layers"][0], params["layers"][1]
    h_VxF = np.maximum(s_VxV @ x_VxD @ first["linear"]["kernel"] + first["bias"], 0)
    return h_VxF, s_VxV @ h_VxF @ second["linear"]["kernel"] + second["bias"]


def gradient(params, a_VxV, x_VxD, labels_V, counted_V):
    s_VxV = normalized(a_VxV)
    h_VxF, logits_VxK = forward(params, s_VxV, x_VxD)
    p_VxK = np.exp(logits_VxK) / np.exp(logits_VxK).sum(axis=1, keepdims=True)
    d_VxK = (p_VxK - np.eye(3)[labels_V]) * counted_V[:, None] / counted_V.sum()
    back_VxF = s_VxV.T @ d_VxK @ params["layers"][1]["linear"]["kernel"].T * (h_VxF > 0)
    first = {"linear": {"kernel": (s_VxV @ x_VxD).T @ back_VxF}, "bias": back_VxF.sum(axis=0)}
    second = {"linear": {"kernel": (s_VxV @ h_VxF).T @ d_VxK}, "bias": d_VxK.sum(axis=0)}
    return {"layers": {0: first, 1: second}}


def dense_path(partition):
    """SGD with momentum on N workers, each with the rows and columns of its own nodes; the mean of all after every round."""
    a_VxV, x_VxD, labels_V, trained = dense_graph()
    part_V = graph_partition.divide(partition, graphs.load(GRAPH), N, SEED)
    params, momentum = [START] * N, [jax.tree.map(np.zeros_like, START)] * N
    path = []
    for t in range(STEPS):
        for i in range(N):
            if t % EVERY >= TAKEN[i]:
                continue
            own = part_V == i
            g = gradient(params[i], a_VxV[np.ix_(own, own)], x_VxD[own], labels_V[own], trained[own])
            momentum[i] = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum[i], g)
            params[i] = jax.tree.map(lambda x, m: x - LR * m, params[i], momentum[i])
        if (t + 1) % EVERY == 0:
            params = [jax.tree.map(lambda *x: np.mean(x, axis=0), *params)] * N
        path.append(jax.tree.map(lambda *x: np.stack(x), *params))
    return path


@functools.cache
def trained_path(partition, mode):
    """The same with the task, the method and a mesh; one program for the steps of a round, one for its end."""
    workers = mesh.make_workers(N, simulate=mode == "simulated")
    made, data = task(partition), task(partition).load(N, 1, SEED)
    batches = wide(jax.tree.map(lambda *x: np.stack(x), *(data.batch(worker, 0) for worker in range(N))))
    with jax.enable_x64(True):
        channel = Channel(workers.axis)
        how = uneven.TMA(optax.sgd(LR, MOMENTUM), reduce.mean(channel), N, channel=channel, every=EVERY, pace=PACE)

        def step(params, state, batch, *, phase):
            grads = jax.grad(lambda params: made.loss(params, (), batch, None)[0])(params)
            updates, state = how.tx.update(grads, state, params, phase=phase)
            return optax.apply_updates(params, updates), state

        programs = {phase: workers.jit(functools.partial(step, phase=phase), (0, 0, 0)) for phase in map(how.phase, range(EVERY))}
        params = workers.stack(jax.tree.map(jnp.asarray, START))
        state = workers.jit(how.tx.init, (0,))(params)
        path = []
        for t in range(STEPS):
            params, state = programs[how.phase(t)](params, state, batches)
            path.append(jax.tree.map(np.asarray, params))
        assert all(program._cache_size() == 1 for program in programs.values()), "a second call recompiled"
    return path


@pytest.mark.parametrize("mode", ("devices", "simulated"))
def test_training_is_the_dense_reference(mode):
    for found, expected in zip(trained_path("random", mode), dense_path("random"), strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-11), found, expected)


def test_the_whole_graph_is_judged():
    a_VxV, x_VxD, labels_V, trained = dense_graph()
    _, logits_VxK = forward(START, normalized(a_VxV), x_VxD)
    sums, weight_B = task().measure(START, (), task().load(N, 1, SEED).validation(0))
    right = (logits_VxK.argmax(axis=1) == labels_V)[~trained]
    assert task().load(2, 1, 0).fingerprint == task().load(N, 1, SEED).fingerprint, "a run may go on with other workers"
    assert weight_B == 6 and sums["accuracy"] == right.sum()
    nll_V = np.log(np.exp(logits_VxK).sum(axis=1)) - logits_VxK[np.arange(24), labels_V]
    np.testing.assert_allclose(sums["loss"], nll_V[~trained].sum(), rtol=1e-5)


# -- Uneven steps -------------------------------------------------------------------------------------------------------


def test_even_steps_are_local_sgd_bit_for_bit():
    H, rate = 4, 0.1
    local, _, plain = outer.trajectory(
        lambda channel: optim.DiLoCo(
            outer.adam(rate), reduce.mean(channel), outer.N, every=H, outer_learning_rate=1.0, outer_momentum=0.0
        )
    )
    for pace in ("even", "4,4", "spread(slowest=1.0)"):
        even, _, made = outer.trajectory(
            lambda channel: uneven.TMA(outer.adam(rate), reduce.mean(channel), outer.N, channel=channel, every=H, pace=pace)
        )
        np.testing.assert_array_equal(even, local)
        assert made.every == plain.every and [*map(made.phase, range(9))] == [*map(plain.phase, range(9))]
        params = outer.tree(jnp.zeros(outer.P))
        for phase in made.phase(0), made.phase(H - 1):
            np.testing.assert_array_equal(made.num_bytes(params, phase), plain.num_bytes(params, phase))

    def selected(channel):
        """with a selection between old and new values, whose program rounds elsewhere"""
        own = uneven.uneven_steps(outer.adam(rate), (H,) * outer.N, H, channel.axis)
        return optim.DiLoCo(own, reduce.mean(channel), outer.N, every=H, outer_learning_rate=1.0, outer_momentum=0.0)

    np.testing.assert_allclose(outer.trajectory(selected)[0], local, rtol=0, atol=1e-13)


def test_slow_workers_stand_still():
    path, state, _ = outer.trajectory(
        lambda channel: uneven.TMA(outer.adam(0.1), reduce.mean(channel), 4, channel=channel, every=6, pace="6,2")
    )
    moved = (path[1:] != path[:-1]).any(axis=-1)  # [steps, N]
    for t in range(len(moved)):
        np.testing.assert_array_equal(moved[t], [True, t % 6 < 2 or t % 6 == 5] * 2)
    assert (state.inner.step == len(moved)).all()
    (adam,) = (part for part in jax.tree.leaves(state.inner.inner, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu"))
    np.testing.assert_array_equal(adam.count, [24, 8, 24, 8])


def test_a_spread_reaches_from_the_slowest_share_to_all_steps():
    steps = uneven.steps_of_round("spread(slowest=0.5,seed=3)", 10, 6)
    assert sorted(steps) == [5, 6, 7, 8, 9, 10] and steps == uneven.steps_of_round("spread(slowest=0.5,seed=3)", 10, 6)
    assert steps != uneven.steps_of_round("spread(slowest=0.5,seed=4)", 10, 6) and uneven.steps_of_round("spread", 10, 1) == (10,)
    assert min(uneven.steps_of_round("spread(slowest=0.01)", 10, 6)) == 1


# -- Who gets which nodes -----------------------------------------------------------------------------------------------


@functools.cache
def apart():
    return graphs.load("blocks(nodes=20,inside=0.5,between=0.02)")


def cut(graph, part_V):
    return (part_V[graph.edges_Ex2[:, 0]] != part_V[graph.edges_Ex2[:, 1]]).mean()


@pytest.mark.parametrize("partition", ("random", "min_cut", "super(clusters=4)"))
@pytest.mark.parametrize("parts", (1, 3, 4))
def test_parts_are_of_equal_size_and_functions_of_the_seed(partition, parts):
    part_V = graph_partition.divide(partition, apart(), parts, 5)
    sizes = np.bincount(part_V, minlength=parts)
    assert len(part_V) == sizes.sum() == 80 and np.ptp(sizes) <= 1 + (7 if "super" in partition else 0)
    np.testing.assert_array_equal(part_V, graph_partition.divide(partition, apart(), parts, 5))
    same = (part_V == graph_partition.divide(partition, apart(), parts, 6)).all()
    assert same == (parts == 1 or partition == "min_cut")


def test_min_cut_finds_communities_and_random_cuts_what_it_must():
    graph = apart()
    cuts = {name: cut(graph, graph_partition.divide(name, graph, 4, 0)) for name in ("random", "super(clusters=4)", "min_cut")}
    part_V = graph_partition.divide("min_cut", graph, 4, 0)
    assert cuts["min_cut"] == cut(graph, graph.labels_V) and len(set(zip(part_V, graph.labels_V))) == 4
    assert cuts["min_cut"] < cuts["super(clusters=4)"] < cuts["random"] and abs(cuts["random"] - 3 / 4) < 0.08


def test_a_part_is_a_union_of_clusters_in_super():
    graph = apart()
    cluster_V = graph_partition.divide("min_cut", graph, 12, 0)
    part_V = graph_partition.divide("super(clusters=3)", graph, 4, 0)
    assert all(len(set(part_V[cluster_V == cluster])) == 1 for cluster in range(12))
    assert np.unique(list(set(zip(cluster_V, part_V))), axis=0)[:, 1].tolist().count(0) == 3


def test_targets_are_drawn_from_the_own_nodes_that_are_trained_on():
    few, whole = task(targets=2).load(N, 3, SEED), task().load(N, 1, SEED)
    seen = np.zeros_like(whole.batch(1, 0).weight_BxV[0])
    for step in range(20):
        weight_BxV = few.batch(1, step).weight_BxV
        assert (weight_BxV.sum(axis=1) == 2).all()
        seen += weight_BxV.sum(axis=0)
    np.testing.assert_array_equal(seen > 0, whole.batch(1, 0).weight_BxV[0] > 0)
    graph = graphs.load(GRAPH)
    np.testing.assert_allclose(whole.facts()["kept_edges"], 1 - cut(graph, graph_partition.divide("random", graph, N, SEED)))


def test_the_karate_club_is_the_real_one():
    karate = graphs.load("karate")
    assert len(karate.labels_V) == 34 and karate.labels_V.sum() == 17 and len(karate.edges_Ex2) == 2 * 78
    assert karate.strength_E.sum() == 2 * 231


# -- Whole runs, and what is refused ------------------------------------------------------------------------------------


def test_a_run_learns_and_continues_bit_for_bit(tmp_path):
    given = "workers=4,simulate,steps=60,optimizer=adamw,partition=super(clusters=4)"
    made = nodes_config.get_config(given)
    made.checkpoint.every = 20
    made.data.targets = 8
    run_of(made, tmp_path / "run").train()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_accuracy"] > 0.6 and 0 < summary["kept_edges"] < 1
    again = forget_after(tmp_path / "run", 40, tmp_path / "again")
    run_of(made, again).train()
    assert_equal_states(tmp_path / "run", again, 60)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(graph="cora"), "graph='cora' is unknown; use one of blocks, karate"),
        (dict(graph="karate(noise=1.0)"), "graph 'karate.noise=1.0.' has no option 'noise'; leave it out, it has no options"),
        (dict(graph="blocks(size=5)"), "has no option 'size'; use communities, nodes"),
        (dict(graph="blocks(nodes=0)"), "nodes=0 must be at least 1"),
        (dict(graph="blocks(communities=1)"), "communities=1 must be at least 2"),
        (dict(graph="blocks(inside=1.5)"), "inside=1.5 must be at least 0 and at most 1"),
        (dict(graph="blocks(noise=-1.0)"), "noise=-1.0 must be at least 0"),
        (dict(graph="blocks(nodes=5000)"), "at most 4096"),
        (dict(graph="blocks(nodes=ten)"), "nodes='ten' must be a whole number"),
        (dict(graph="blocks(nodes="), "must read like"),
        (dict(partition="metis"), "partition='metis' is unknown; use one of random, min_cut, super"),
        (dict(partition="random(seed=1)"), "has no option 'seed'; leave it out, it has no options"),
        (dict(partition="super(clusters=a)"), "clusters='a' must be a whole number"),
        (dict(targets=-1), "targets=-1 must be at least 0"),
        (dict(validation=1.0), "validation=1.0 must be more than 0 and less than 1"),
    ],
)
def test_impossible_graphs_and_partitions_are_refused(options, message):
    with pytest.raises(ValueError, match=message) as error:
        task(**{"graph": GRAPH, **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "partition, workers, message",
    [
        ("random", 25, "25 workers are more than the graph's 24 nodes; use at most 24"),
        ("min_cut", 25, "25 workers are more than the graph's 24 nodes; use at most 24"),
        ("super(clusters=9)", 4, "clusters=9: 36 clusters for 4 workers, and the graph has 24 nodes; use clusters=1 to 6"),
        ("super(clusters=0)", 4, "clusters=0 must be at least 1"),
        ("random", 24, "of 24 has no node to train on; use fewer workers"),
    ],
)
def test_more_parts_than_there_can_be_are_refused(partition, workers, message):
    with pytest.raises(ValueError, match=message) as error:
        task(partition).load(workers, 1, 0)
    assert "\n" not in str(error.value)


def test_targets_that_are_all_nodes_are_refused():
    """Nothing would be sampled: a worker has 24 ÷ 4 nodes, some of them held out."""
    with pytest.raises(ValueError, match="targets=24 has no effect: a worker has at most . nodes to train on") as error:
        task(targets=24).load(N, 1, SEED)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "pace, message",
    [
        ("10,7,x", "pace '10,7,x' must read like .*; or numbers, as pace='10,7,5'"),
        ("", "pace '' must read like .*; or numbers"),
        ("6,7", "an entry of pace '6,7'=7 must be at least 1 and at most 6"),
        ("6,0", "an entry of pace '6,0'=0 must be at least 1 and at most 6"),
        ("1,2,3,4,5", "the number of entries of pace '1,2,3,4,5'=5 must be at least 1 and at most 4"),
        ("slow", "pace='slow' is unknown; use one of even, spread; or numbers"),
        ("even(seed=1)", "has no option 'seed'; leave it out, it has no options"),
        ("spread(fastest=2)", "has no option 'fastest'; use slowest, seed"),
        ("spread(slowest=0.0)", "slowest=0.0 must be more than 0 and at most 1"),
        ("spread(slowest=half)", "slowest='half' must be a number"),
        ("spread(seed=-1)", "seed=-1 must be at least 0"),
    ],
)
def test_impossible_paces_are_refused_when_the_config_is_resolved(pace, message):
    made = nodes_config.get_config("workers=4,simulate,every=6")
    made.method.pace = pace
    with pytest.raises(config.ConfigError, match=message) as error:
        config.resolve(made)
    assert "\n" not in str(error.value)


def test_models_without_layers_or_units_are_refused():
    with pytest.raises(ValueError, match="hidden=0 must be at least 1"):
        gcn(hidden=0)
    with pytest.raises(ValueError, match="depth=0 must be at least 1"):
        gcn(depth=0)


def test_a_command_with_too_many_workers_ends_in_one_line(tmp_path):
    given = "--config=configs/nodes.py:graph=karate,workers=40,simulate,smoke"
    ended = subprocess.run(
        [sys.executable, "-m", "launch.train", given, f"--workdir={tmp_path}"], capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].endswith("40 workers are more than the graph's 34 nodes; use at most 34")
