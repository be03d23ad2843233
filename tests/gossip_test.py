"""Mixers against the dense matrix: the distributed program computes W x, on devices and simulated."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decjax
from decjax import codecs, gossip, mesh, reduce
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.contrib import mixers
from decjax.program import hlo

N = 8
NODE_OPTIONS = {"alternating_exponential_ring": dict(local_size=2), "hierarchical": dict(local_size=2)}
MODES = ("devices", "simulated")
DOUBLY_STOCHASTIC = [name for name in topology_lib.names() if name not in ("random_digraph", "erdos_renyi_digraph")]


@functools.cache
def workers(mode, local_size=1):
    return decjax.make_workers(N, local_size=local_size, simulate=mode == "simulated")


def stacked_tree():
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(N, 3, 5)).astype(np.float32),
        "scalar": rng.normal(size=(N,)).astype(np.float32),
        "b": rng.normal(size=(N, 7)).astype(np.float32),
        "count": np.arange(N, dtype=np.int32),
    }


def dense(W_NxN, tree):
    return {name: x if x.dtype == np.int32 else np.einsum("ij,j...->i...", W_NxN, x.astype(np.float64)) for name, x in tree.items()}


def assert_trees_close(actual, expected, atol=2e-6):
    for name in expected:
        np.testing.assert_allclose(np.asarray(actual[name]), expected[name], atol=atol, rtol=0)


def run(mode, mixer, tree, phases, local_size=1):
    """Mix `tree` once per phase, from the same start; one compilation for all."""
    w = workers(mode, local_size)

    def each(params):
        return [gossip.mix(mixer, params, mixer.init(params), phase, 0)[0] for phase in phases]

    return w.fetch(jax.jit(w.map(each, in_axes=(0,)))(tree))


@pytest.mark.parametrize("name", DOUBLY_STOCHASTIC)
def test_every_topology_mixes_as_its_matrix_says(name):
    topology = topology_lib.make(name, N, **NODE_OPTIONS.get(name, {}))
    tree = stacked_tree()
    for mode in MODES:
        mixer = gossip.exact(topology, channel=Channel(workers(mode).axis))
        for phase, mixed in enumerate(run(mode, mixer, tree, mixer.phases)):
            assert_trees_close(mixed, dense(topology.matrix(phase), tree))


@pytest.mark.parametrize("name", ["ring", "alternating_exponential_ring", "complete"])
@pytest.mark.parametrize("bucket_bytes", [0, 64])
def test_mix_does_not_depend_on_the_buckets(name, bucket_bytes):
    topology = topology_lib.make(name, N, **NODE_OPTIONS.get(name, {}))
    tree = stacked_tree()
    mixer = gossip.exact(topology, Channel(bucket_bytes=bucket_bytes))
    assert_trees_close(run("devices", mixer, tree, [0], local_size=2)[0], dense(topology.matrix(0), tree))


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["ring", "one_peer_exponential", "alternating_exponential_ring"])
def test_mixing_with_a_codec_keeps_the_mean_and_sends_what_it_declares(name, codec):
    """x_i + Σ_j W_ij (C(x_j) − C(x_i)): within the codec's error of W x, with the mean of x."""
    topology = topology_lib.make(name, N, **NODE_OPTIONS.get(name, {}))
    tree = {"w": np.random.default_rng(2).normal(size=(N, 600)).astype(np.float32)}
    w = workers("devices", 2)
    mixer = gossip.exact(topology, codec=codecs.make(codec))
    for phase, mixed in enumerate(run("devices", mixer, tree, mixer.phases, local_size=2)):
        np.testing.assert_allclose(mixed["w"], topology.matrix(phase) @ tree["w"], atol=0.05)
        np.testing.assert_allclose(np.mean(mixed["w"], axis=0), tree["w"].mean(axis=0), atol=1e-6)
    program = jax.jit(w.map(lambda x: mixer.exchange(x, mixer.init(x), 0), in_axes=(0,))).lower(tree).compile()
    one = {"w": jax.ShapeDtypeStruct((600,), np.float32)}
    np.testing.assert_allclose(hlo.bytes_sent(program.as_text(), N), mixer.num_bytes(one, 0))


def test_given_matrices_mix():
    rng = np.random.default_rng(1)
    W_NxN = rng.random((N, N)) * (rng.random((N, N)) < 0.4) + np.eye(N)
    for _ in range(1000):  # doubly stochastic
        W_NxN /= W_NxN.sum(axis=0)
        W_NxN /= W_NxN.sum(axis=1, keepdims=True)
    tree = stacked_tree()
    for mode in MODES:
        mixer = gossip.exact(topology_lib.from_matrices([W_NxN]), channel=Channel(workers(mode).axis))
        assert_trees_close(run(mode, mixer, tree, [0])[0], dense(W_NxN, tree))


@pytest.mark.parametrize("mode", MODES)
def test_rounds_per_step_follow_the_schedule(mode):
    topology = topology_lib.make("one_peer_exponential", N)  # period 3
    mixer = gossip.exact(topology, rounds=2, channel=Channel(workers(mode).axis))
    tree = stacked_tree()
    for step, mixed in enumerate(run(mode, mixer, tree, [mixer.phase(step) for step in range(6)])):
        W_NxN = topology.matrix(2 * step + 1) @ topology.matrix(2 * step)
        assert_trees_close(mixed, dense(W_NxN, tree))


@pytest.mark.parametrize("mode", MODES)
def test_accelerated_gossip_is_the_chebyshev_recursion_and_beats_plain_rounds(mode):
    topology = topology_lib.make("ring", N)
    W_NxN, rounds = topology.matrix(0), 6
    beta = sorted(np.abs(np.linalg.eigvalsh(W_NxN)))[-2]
    eta = (1 - np.sqrt(1 - beta**2)) / (1 + np.sqrt(1 - beta**2))
    before, now = np.eye(N), np.eye(N)
    for _ in range(rounds):
        before, now = now, (1 + eta) * W_NxN @ now - eta * before
    tree = stacked_tree()
    mixer = mixers.accelerated(topology, rounds=rounds, channel=Channel(workers(mode).axis))
    assert_trees_close(run(mode, mixer, tree, [0])[0], dense(now, tree), atol=1e-5)
    J = np.full((N, N), 1 / N)
    plain = np.linalg.norm(np.linalg.matrix_power(W_NxN, rounds) - J, 2)
    assert np.linalg.norm(now - J, 2) < plain / 2


@pytest.mark.parametrize("name", ["one_peer_exponential", "directed_ring", "exponential", "one_peer_ring"])
def test_accelerated_gossip_refuses_where_it_would_stall(name):
    with pytest.raises(ValueError, match="needs a (static|symmetric) graph"):
        mixers.accelerated(topology_lib.make(name, N), rounds=3)


@pytest.mark.parametrize("name, n", [("torus", 64), ("hypercube", 64)])
def test_accelerated_gossip_refuses_too_few_rounds(name, n):
    with pytest.raises(ValueError, match="more rounds"):
        mixers.accelerated(topology_lib.make(name, n), rounds=1)


@pytest.mark.parametrize("name, n", [("complete", N), ("ring", 2)])
def test_accelerated_gossip_refuses_where_a_round_is_exact(name, n):
    with pytest.raises(ValueError, match=f"does not average exactly, got topology '{name}'; use mixer 'exact'"):
        mixers.accelerated(topology_lib.make(name, n))


def test_every_and_damp():
    topology = topology_lib.make("one_peer_ring", N)
    tree = stacked_tree()
    mixer = gossip.damp(gossip.every(gossip.exact(topology), 3), 0.25)
    phases = [mixer.phase(step) for step in range(12)]
    assert phases == [-1, -1, 0, -1, -1, 1] * 2 and set(phases) == set(mixer.phases)
    assert [int(mixer.phase(jnp.int32(step))) for step in range(12)] == phases
    local, first, second = run("devices", mixer, tree, [-1, 0, 1])
    assert_trees_close(local, tree)
    for phase, mixed in enumerate((first, second)):
        assert_trees_close(mixed, dense(0.25 * topology.matrix(phase) + 0.75 * np.eye(N), tree))


def test_damp_follows_a_schedule():
    topology = topology_lib.make("ring", N)
    mixer = gossip.damp(gossip.exact(topology), lambda step: 1 / (1.0 + step))
    tree = stacked_tree()

    def three(params):
        state = mixer.init(params)
        for step in range(3):
            params, state = gossip.mix(mixer, params, state, 0, step)
        return params

    w = workers("devices")
    expected = functools.reduce(
        lambda x, step: dense(topology.matrix(0) / (1 + step) + np.eye(N) * (1 - 1 / (1 + step)), x), range(3), tree
    )
    assert_trees_close(w.fetch(jax.jit(w.map(three, in_axes=(0,)))(tree)), expected)


@pytest.mark.parametrize("graph", ["line", "double_binary_tree"])
def test_a_single_worker_relays_nothing(graph):
    w = mesh.make_workers(1, simulate=True)
    mixer = mixers.relay(topology_lib.make(graph, 1), Channel(w.axis))
    step = lambda x: gossip.mix(mixer, x, mixer.init(x), 0, 0)[0]
    np.testing.assert_array_equal(w.jit(step, (0,))(jnp.ones((1, 3))), 1)


@pytest.mark.parametrize(
    "build", [gossip.choco, gossip.dcd, gossip.deepsqueeze, gossip.beer, functools.partial(gossip.exact, codec="int8")]
)
def test_codecs_on_one_worker_advise_what_is_accepted(build):
    with pytest.raises(ValueError, match="or a single worker, got topology 'ring'; use .* mixer 'exact' without a codec"):
        build(topology_lib.make("ring", 1))
    assert gossip.exact(topology_lib.make("ring", 1)).num_workers == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3, N])
def test_means_in_float16_do_not_overflow(mode, size):
    """The sums exceed 65504, the largest value of float16."""
    w = mesh.make_workers(size if N % size else N, simulate=mode == "simulated")
    x_NxP = np.tile(np.float16([40000, -65504, 1e-4]), (w.num_workers, 1))
    whole = w.jit(lambda x_P: [w.axis.group_mean(x_P, size), w.axis.scatter_mean(jnp.tile(x_P, size), size)], (0,))(x_NxP)
    for found in whole:
        assert found.dtype == jnp.float16
        np.testing.assert_allclose(np.unique(found), np.float16([-65504, 1e-4, 40000]), rtol=1e-3)


def test_hierarchical_gossip_and_all_reduce_in_float16_do_not_overflow():
    w = workers("devices")
    channel, params = Channel(w.axis), jax.ShapeDtypeStruct((8,), jnp.float16)
    mixer, reducer = gossip.exact(topology_lib.make("hierarchical", N, local_size=2), channel), reduce.mean(channel)
    steps = (
        (lambda x: mixer.exchange(x, (), 0)[0], mixer.num_bytes(params, 0)),
        (lambda x: reducer.reduce(x, ())[0], reducer.num_bytes(params, N)),
    )
    for step, declared_N in steps:
        program = w.jit(step, (0,)).lower(np.full((N, 8), 40000, np.float16)).compile()
        np.testing.assert_allclose(program(np.full((N, 8), 40000, np.float16)), 40000, rtol=1e-3)
        np.testing.assert_allclose(hlo.bytes_sent(program.as_text(), N), declared_N, rtol=1e-12)


def test_sixteen_bit_parameters_are_averaged_in_float32():
    topology = topology_lib.make("ring", N)
    x = (np.random.default_rng(0).normal(size=(N, 50))).astype(jnp.bfloat16)
    expected = dense(topology.matrix(0), {"x": np.asarray(x, np.float32)})["x"].astype(np.float32)
    mixed = run("devices", gossip.exact(topology), {"x": x}, [0])[0]["x"]
    assert mixed.dtype == jnp.bfloat16
    # One rounding of the exact mean: half a unit in the last of 8 bits, plus a small margin for the sum's own error.
    np.testing.assert_allclose(mixed.astype(np.float32), expected, rtol=2**-8 * 1.02, atol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        lambda t: gossip.exact(t, rounds=0),
        lambda t: gossip.every(gossip.exact(t), 0),
        lambda t: gossip.every(mixers.overlap_push_sum(t), 2),
        lambda t: gossip.damp(gossip.exact(t), 1.5),
        lambda t: gossip.damp(gossip.exact(t), -0.1),
    ],
)
def test_impossible_options_are_refused(bad):
    with pytest.raises(ValueError, match="must|use every=1"):
        bad(topology_lib.make("ring", N))


@pytest.mark.parametrize("name", DOUBLY_STOCHASTIC)
def test_declared_bytes_are_those_of_the_compiled_program(name):
    topology = topology_lib.make(name, N, **NODE_OPTIONS.get(name, {}))
    mixer, w = gossip.exact(topology), workers("devices", 2)
    one = {"a": jax.ShapeDtypeStruct((16, 4), jnp.float32), "b": jax.ShapeDtypeStruct((24,), jnp.float32)}
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((N, *x.shape), x.dtype), one)
    for phase in mixer.phases:

        def exchange(params, phase=phase):
            return mixer.exchange(params, (), phase)

        text = jax.jit(w.map(exchange, in_axes=(0,))).lower(stacked).compile().as_text()
        np.testing.assert_allclose(hlo.bytes_sent(text, N), mixer.num_bytes(one, phase))


def test_exchange_check_passes_on_every_topology_and_catches_a_broken_one():
    for name in ("one_peer_exponential", "alternating_exponential_ring", "torus"):
        for mode in MODES:
            gossip.check_exchange(workers(mode), topology_lib.make(name, N, **NODE_OPTIONS.get(name, {})))

    class Lying(topology_lib.Topology):
        """Declares another matrix than its rounds execute, like a compiler defect."""

        def matrix(self, phase):
            W_NxN = super().matrix(phase)
            return np.roll(W_NxN, 1, axis=1) if phase == 1 else W_NxN

    honest = topology_lib.make("one_peer_exponential", N)
    lying = Lying(**{f.name: getattr(honest, f.name) for f in dataclasses.fields(honest)})
    with pytest.raises(RuntimeError, match="phase 1.*worker 0"):
        gossip.check_exchange(workers("devices"), lying)


@pytest.mark.parametrize("name", ["ring", "one_peer_exponential"])
def test_a_message_of_several_arrays_arrives_as_one(name, monkeypatch):
    """Like between CPU processes: the bytes of all arrays in one collective, shifted or swapped, every array bit-equal."""
    monkeypatch.setattr(mesh.axis, "between_cpu_processes", lambda: True)
    w, rng = workers("devices"), np.random.default_rng(0)
    message = {
        "payload": rng.integers(-128, 128, (N, 3, 5), np.int8),
        "scale": rng.normal(size=(N, 3)).astype(np.float32),
        "half": rng.normal(size=(N, 2, 4)).astype(np.float16),
    }
    for round_ in topology_lib.make(name, N).rounds:
        for shift in round_.shifts:
            fn = w.map(lambda tree, pairs=shift.pairs: w.axis.exchange_tree(tree, pairs), in_axes=(0,))
            program = jax.jit(fn).lower(message).compile()
            assert len(re.findall(r" (?:collective-permute|all-reduce)(?:-start)?\(", program.as_text())) == 1
            arrived = program(message)
            for part, sent in message.items():
                for source, target in shift.pairs:
                    np.testing.assert_array_equal(arrived[part][target], sent[source])


@pytest.mark.parametrize("mode", MODES)
def test_exchange_check_sees_every_permutation_and_type(mode, monkeypatch):
    """The defect zeroes what it affects: values of some dtypes, or permutations of a kind that a full round never uses."""
    w, topology, intact = workers(mode), topology_lib.make("ring", N), mesh.Axis.exchange
    power = mixers.power_gossip(topology, rank=1, channel=Channel(w.axis))
    gossip.check_exchange(w, topology, power.permutations)
    matchings = [set(pairs) for pairs in power.permutations]

    def zeroed(hit):
        monkeypatch.setattr(mesh.Axis, "exchange", lambda axis, x, pairs: intact(axis, x, pairs) * (not hit(x, pairs)))

    zeroed(lambda x, pairs: x.dtype == np.uint16)
    with pytest.raises(RuntimeError, match="did not receive the uint16 values of worker"):
        gossip.check_exchange(w, topology)
    zeroed(lambda x, pairs: set(pairs) in matchings)
    gossip.check_exchange(w, topology)  # the ring's own two shifts are intact
    with pytest.raises(RuntimeError, match="did not receive the uint8 values of worker"):
        gossip.check_exchange(w, topology, power.permutations)
