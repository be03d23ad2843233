"""Shared by tests of compressed gossip: N workers with a quadratic each, mixed while they descend, in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import decjax
from decjax import gossip, optim, registry
from decjax import topology as topology_lib
from decjax.channel import Channel
from decjax.contrib import corrections
from decjax.contrib import mixers as contrib_mixers
from tests.stand_ins import four_bits

N, P, STEPS, LR = 8, 17, 60, 0.05
MATRIX = (4, 3)  # the shape of the first of P values; the others are a vector
MODES = ("devices", "simulated")
_rng = np.random.default_rng(0)
H = _rng.normal(size=(N, P, P)) / np.sqrt(P) + np.eye(P)
H = np.einsum("nji,njk->nik", H, H) / 4
B = _rng.normal(size=(N, P))
X0 = _rng.normal(size=P)


def gradients(x_NxP):
    return np.einsum("nij,nj->ni", H, x_NxP) - B


@functools.cache
def workers(mode, local_size=1):
    return decjax.make_workers(N, local_size=local_size, simulate=mode == "simulated")


def tree(x_P, shape=MATRIX):
    """A matrix, or a stack of them, and a vector."""
    return {"matrix": x_P[: math.prod(shape)].reshape(shape), "vector": x_P[math.prod(shape) :]}


def flat(params):
    return jnp.concatenate([params["matrix"].ravel(), params["vector"]])


def scanned(one_step, mixer, steps):
    """Run `one_step(carry, phase) -> (carry, out)` over all steps, a whole period at a time: one compilation for all phases."""
    period = len(mixer.phases)
    assert mixer.phases.start == 0

    def whole_period(carry, _):
        outs = []
        for phase in range(period):
            carry, out = one_step(carry, phase)
            outs.append(out)
        return carry, jnp.stack(outs)

    def run(carry):
        carry, outs = jax.lax.scan(whole_period, carry, length=-(-steps // period))
        return carry, outs.reshape(-1, *outs.shape[2:])

    return run


def trajectory(make_mixer, order="awc", mode="devices", wrap=optim.decentralize, local_size=1, shape=MATRIX):
    """Return x_{STEPS+1 x N x P} of SGD on heterogeneous quadratics."""
    w = workers(mode, local_size)
    with jax.enable_x64(True):
        mixer = make_mixer(Channel(w.axis))
        tx = wrap(optax.sgd(LR), mixer, order)

        def whole(x_P, h_PxP, b_P):
            def one_step(carry, phase):
                params, state = carry
                updates, state = tx.update(tree(h_PxP @ flat(params) - b_P, shape), state, params, phase=phase)
                params = optax.apply_updates(params, updates)
                return (params, state), flat(params)

            start = tree(x_P, shape)
            return scanned(one_step, mixer, STEPS)((start, tx.init(start)))[1]

        path = np.asarray(w.jit(whole, (0, 0, 0))(np.tile(X0, (N, 1)), H, B))
        assert path.dtype == np.float64
    return np.concatenate([np.tile(X0, (1, N, 1)), path.transpose(1, 0, 2)[:STEPS]])


def mixed(make_mixer, x_NxP, steps, mode="devices", local_size=1, shape=MATRIX):
    """Return the path of parameters that are only mixed, x_{steps x N x P}, and of push-sum's weights, y_{steps x N}."""
    w = workers(mode, local_size)
    with jax.enable_x64(True):
        mixer = make_mixer(Channel(w.axis))

        def whole(x_P):
            def one_step(carry, phase):
                params, state = gossip.mix(mixer, *carry, phase, 0)
                weight = state.weight if isinstance(state, contrib_mixers.PushSumState) else 1.0
                return (params, state), jnp.append(flat(params), weight)

            # Memories start equal on all workers.
            return scanned(one_step, mixer, steps)((tree(x_P, shape), mixer.init(tree(0 * x_P, shape))))[1]

        path = np.asarray(w.jit(whole, (0,))(x_NxP)).transpose(1, 0, 2)[:steps]
    return path[..., :-1], path[..., -1]


def order_of(name):
    """Return the order that a mixer requires; "awc" if any."""
    return registry.part("mixer", name.partition(",")[0]).traits.get("order") or "awc"


def wrapper(name):
    return corrections.track if name == "beer" else optim.decentralize


def mixers(codec=None):
    """Every mixer over every kind of graph that it accepts: name -> axis name -> mixer."""

    def make(build, graph, **options):
        graph_options = {"hierarchical": dict(local_size=2), "alternating_exponential_ring": dict(local_size=2)}.get(graph, {})
        topology = topology_lib.make(graph, N, **graph_options)
        return lambda channel: build(topology, channel=channel, **options)

    codec = codec or four_bits(stochastic=True)
    return {
        "exact": make(gossip.exact, "one_peer_exponential", codec=codec),
        "accelerated": make(contrib_mixers.accelerated, "ring", rounds=2),
        "consensus_control": make(contrib_mixers.consensus_control, "ring", rounds=3),
        "delayed": make(contrib_mixers.delayed, "one_peer_exponential", delay=2),
        "choco": make(gossip.choco, "one_peer_exponential", codec=codec),
        "choco, two rounds": make(gossip.choco, "ring", codec=codec, rounds=2),
        "choco, idle workers": make(gossip.choco, "line", codec=codec),
        "choco, nodes": make(gossip.choco, "hierarchical", codec=codec),
        "deepsqueeze": make(gossip.deepsqueeze, "random_matching", codec=codec),
        "deepsqueeze, nodes": make(gossip.deepsqueeze, "alternating_exponential_ring", codec=codec),
        "dcd": make(gossip.dcd, "exponential", codec=codec),
        "beer": make(gossip.beer, "torus", codec=codec),
        "push_sum": make(contrib_mixers.push_sum, "random_digraph", codec=codec),
        "push_sum, nodes": make(contrib_mixers.push_sum, "alternating_exponential_ring", codec=codec),
        "relay": make(contrib_mixers.relay, "double_binary_tree"),
        "overlap_push_sum": make(contrib_mixers.overlap_push_sum, "random_digraph"),
        "power_gossip": make(contrib_mixers.power_gossip, "ring", rank=2),
        "power_gossip, idle workers": make(contrib_mixers.power_gossip, "line", rank=1),
    }
