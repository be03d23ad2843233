"""What `experiments.related` measures of each system: one figure each, in seconds, from decjax's parts themselves."""

import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from decjax import gossip, mesh, placement, topology
from decjax.channel import Channel
from decjax.codecs import entropy
from decjax.models import compress
from experiments import dssfn

WORLD = pathlib.Path(__file__).resolve().parent.parent / "configs/links/worldwide.json"
WORKERS = 8
MATRIX = (6, 5)  # the shape of what workers mix


def mixed(make, x_NxIxJ: np.ndarray, steps: int) -> np.ndarray:
    """The path of matrices that are only mixed, [steps, N, I, J], in float64; `make(channel)` is the mixer."""
    workers = mesh.simulated_workers(len(x_NxIxJ))
    with jax.enable_x64(True):
        mixer = make(Channel(workers.axis))

        def whole(x_IxJ):
            def step(carry, t):
                params, state = carry
                params, state = gossip.mix_due(mixer, params, state, None, t)
                return (params, state), params

            return jax.lax.scan(step, (x_IxJ, mixer.init(jnp.zeros_like(x_IxJ))), jnp.arange(steps))[1]

        return np.asarray(workers.jit(whole, (0,))(x_NxIxJ)).swapaxes(0, 1)


def start(seed: int = 0) -> np.ndarray:
    """What workers have before they mix."""
    return np.random.default_rng(seed).normal(size=(WORKERS, *MATRIX))


def distance(x: np.ndarray, mean: np.ndarray) -> float:
    """The largest difference from a mean."""
    return float(np.abs(x - mean).max())


# -- Oracles: `measure(smoke)` gives the figure -----------------------------------------------------------------------


def push_sum(smoke: bool) -> float:
    """Distance from the mean after many rounds of push-sum with four bits, γ = 1, on a directed graph."""
    graph, x = topology.make("directed_exponential", WORKERS), start()
    path = mixed(lambda channel: gossip.push_sum(graph, channel, codec="int4", gamma=1.0), x, 100 if smoke else 300)
    return distance(path[-1], x.mean(axis=0))


def power_gossip(smoke: bool) -> float:
    """How far the mean of all workers drifts with messages of one column."""
    graph, x = topology.make("ring", WORKERS), start()
    path = mixed(lambda channel: gossip.power_gossip(graph, rank=1, channel=channel), x, 50 if smoke else 300)
    return distance(path.mean(axis=1), x.mean(axis=0))


def consensus_control(smoke: bool) -> float:
    """What is left of the distance to the neighbours' mean after a step that may take as many rounds as it needs, with ρ = ¼."""
    graph, x = topology.make("ring", WORKERS), start()
    path = mixed(lambda channel: gossip.consensus_control(graph, channel, target=0.25, rounds=64), x, 1)
    W = graph.matrix(0)

    def apart(x_NxIxJ: np.ndarray) -> float:
        return float(np.sqrt(np.square(x_NxIxJ - np.tensordot(W, x_NxIxJ, 1)).sum(axis=(1, 2)).mean()))

    return apart(path[-1]) / apart(x)


def accelerated(smoke: bool) -> float:
    """Disagreement after twelve accelerated rounds on a ring of 16, ÷ that after twelve plain ones; inf unless accelerated rounds are
    refused on the sun graphs, which vary in time."""
    graph, x = topology.make("ring", 16), np.random.default_rng(0).normal(size=(16, *MATRIX))
    try:
        gossip.accelerated(topology.make("sun", 16), rounds=12)
        return float("inf")
    except ValueError:
        pass
    left = [
        np.linalg.norm(mixed(lambda channel, make=make: make(graph, channel, rounds=12), x, 1)[-1] - x.mean(axis=0))
        for make in (gossip.accelerated, gossip.exact)
    ]
    return float(left[0] / left[1])


def dt_fm(smoke: bool) -> float:
    """Seconds of an iteration's messages where the genetic search puts eight pipelines of eight stages, ÷ the mean of random layouts."""
    network = placement.Network(placement.load(WORLD), placement.Job(8, 8, gradient_bytes=3e8, activation_bytes=3e7))
    random_s = [network.seconds(placement.random_layout(network, np.random.default_rng(seed))) for seed in range(20)]
    return placement.genetic(network, trials=50 if smoke else 1000).seconds / float(np.mean(random_s))


def dt_fm_256(smoke: bool) -> float:
    """The same for 16 pipelines of 16 stages, on four times as many devices in each region; the search has less than a minute."""
    content = json.loads(WORLD.read_text())
    content["regions"] = {region: 4 * count for region, count in content["regions"].items()}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "links.json"
        path.write_text(json.dumps(content))
        network = placement.Network(placement.load(path), placement.Job(16, 16, gradient_bytes=3e8, activation_bytes=3e7))
    random_s = [network.seconds(placement.random_layout(network, np.random.default_rng(seed))) for seed in range(5)]
    return placement.genetic(network, trials=30 if smoke else 10**6, seconds=50).seconds / float(np.mean(random_s))


def layer_wise(smoke: bool) -> float:
    """The largest difference in accuracy, over layers, between workers on a ring and one worker with all examples, in percent."""
    with jax.enable_x64(True):
        one, _, ring = dssfn.compare(dssfn.Sizes(layers=1 if smoke else 5), rounds=30, seed=0).values()
    return 100 * max(abs(a - b) for a, b in zip(one.accuracy, ring.accuracy))


def gaussian_rate(smoke: bool) -> float:
    """The largest relative difference of the estimated bits from the entropy of quantized Gaussians, over steps from σ/20 to 2σ."""
    x = np.random.default_rng(0).normal(0.3, 1.7, 50_000 if smoke else 500_000)
    worst = 0.0
    for step in (0.085, 0.34, 1.7, 3.4):
        levels = np.rint(x / step)
        exact = entropy.empirical_bits(levels)
        worst = max(worst, abs(entropy.gaussian_bits(levels, step, 0.3, 1.7).mean() / exact - 1))
    return worst


def full_rank(smoke: bool) -> float:
    """The largest relative error of parameters that are compressed at full rank, which is none but for rounding."""
    params = {"w": start().reshape(-1, MATRIX[1]).astype(np.float32)}
    found = compress.make("low_rank(fraction=1)")(params).params["w"]
    return float(np.abs(found - params["w"]).max() / np.abs(params["w"]).max())
