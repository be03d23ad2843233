"""What `experiments.related` measures of each system: one figure each, from decjax's parts themselves or from short trainings."""

import functools
import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import gossip, mesh, models, optim, placement, reduce, topology
from decjax.channel import Channel
from decjax.codecs import entropy
from decjax.models import compress
from decjax.optim import subnetworks as subnetworks_lib
from decjax.pipeline import autoencoder
from experiments import dssfn, trials

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


def trained(shorthands: dict[str, str], **fields: Any) -> dict[str, trials.Trial]:
    """Finished trainings of a tiny language model by name, from shorthands of configs/lm.py."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="decjax-related-"))
    usual = {"data.sample_bytes": 0, "eval.local": False, "log_every": 1, "checkpoint.every": 10**6} | fields
    made = {name: trials.Trial(folder / name, f"configs/lm.py:{each}", tuple(usual.items())) for name, each in shorthands.items()}
    if not all(trials.together(trials.train, made.values())):
        raise ValueError(f"a training in {folder} diverged")
    return made


def losses(made: trials.Trial) -> np.ndarray:
    """The training loss of every step."""
    return np.array([row["loss"] for row in made.rows("train")])


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


def ravnest(smoke: bool) -> float:
    """The largest relative difference in loss between pipelines whose parameters are averaged in every step, with no gradient late, and
    synchronous data parallelism, both with SGD."""
    layout = f"workers=2,simulate,stages=2,microbatches=2,smoke,steps={10 if smoke else 40},optimizer=sgd"
    mean = "method=diloco(every=1,outer_learning_rate=1.0,outer_momentum=0.0)"
    apart, synchronous = trained({"apart": f"{layout},{mean}", "synchronous": f"{layout},method=allreduce"}, clip_norm=0.0).values()
    return float(np.abs(losses(apart) / losses(synchronous) - 1).max())


def subnetworks(smoke: bool) -> float:
    """How far independent subnetworks settle from their known fixed point on a quadratic, ÷ how far that is from the optimum."""
    P, rounds, rate = 16, 4_000 if smoke else 40_000, 0.002
    root = np.random.default_rng(0).normal(size=(P, P)) / np.sqrt(P)
    L, b = root @ root.T + np.eye(P), np.random.default_rng(1).normal(size=P)
    together = (P / WORKERS - 1) / (P - 1)  # the probability that two units have the same worker
    fixed = np.linalg.solve(np.diag(np.diag(L)) + together * (L - np.diag(np.diag(L))), b)
    workers = mesh.simulated_workers(WORKERS)
    with jax.enable_x64(True):
        channel = Channel(workers.axis)
        method = subnetworks_lib.ist(optax.sgd(rate), reduce.mean(channel), WORKERS, channel, (("x", -1),), every=1)

        def whole(x):
            def step(carry, _):
                params, state = carry
                assert method.view is not None
                grads = {"x": L @ method.view(params, state)["x"] - b}
                updates, state = method.tx.update(grads, state, params, phase=0)
                params: Any = optax.apply_updates(params, updates)
                return (params, state), params["x"]

            path = jax.lax.scan(step, ({"x": x}, method.tx.init({"x": x})), None, rounds)[1]
            return path[rounds // 2 :].mean(axis=0)

        settled = np.asarray(workers.jit(whole, (0,))(np.tile(fixed, (WORKERS, 1))))[0]
    return float(np.linalg.norm(settled - fixed) / np.linalg.norm(np.linalg.solve(L, b) - fixed))


def adaptive_serverless(smoke: bool) -> float:
    """How far the exponent of the noise floor of Adam with gossip in every fourth step is from −1, from N = 4 to 64."""
    floors = {N: _floor(N, seeds=2 if smoke else 8) for N in (4, 64)}
    return abs(np.log(floors[64] / floors[4]) / np.log(64 / 4) + 1)


def _floor(num_workers: int, seeds: int, steps: int = 3000, size: int = 16) -> float:
    """The squared distance of the workers' mean from the optimum of ½ ‖x‖², whose gradients have noise of deviation 1 in each coordinate;
    a mean over the second half of the steps and over seeds."""
    workers = mesh.simulated_workers(num_workers)
    mixer = gossip.every(gossip.exact(topology.make("one_peer_exponential", num_workers), Channel(workers.axis)), 4)
    tx = optim.decentralize(optax.adam(0.01, b2=0.999), mixer, "atc")

    def whole(x, key):
        def step(carry, key):
            params, state = carry
            updates, state = tx.update(params + jax.random.normal(key, params.shape), state, params)
            params: Any = optax.apply_updates(params, updates)
            return (params, state), workers.axis.mean(params)

        path = jax.lax.scan(step, (x, tx.init(x)), jax.random.split(key, steps))[1]
        return jnp.square(path[steps // 2 :]).sum(axis=-1).mean()

    run = workers.jit(whole, (0, 0))
    found = [run(jnp.zeros((num_workers, size)), jax.random.split(jax.random.key(seed), num_workers)) for seed in range(seeds)]
    return float(np.mean(found))


def boundary_autoencoder(smoke: bool) -> float:
    """The largest relative difference of a model's loss, token by token, that autoencoders of full width make."""
    width = 16 if smoke else 64
    model = models.decoder_lm(width=width, hidden=2 * width, depth=4, context=32)
    wide = autoencoder.insert(model, (1, 1, 1, 1), width)
    params, tokens = wide.init(jax.random.key(0)), jax.random.randint(jax.random.key(1), (4, 33), 0, 256)
    one, other = (np.asarray(each.nll(params, tokens, None)) for each in (model, wide))
    return float(np.abs(one / other - 1).max())


def shared_places(smoke: bool) -> float:
    """The loss after training with a fifth of the activations' values and the gradients at their places, ÷ that with a sixth of each
    at places of its own, which is as many bytes; both evaluated as they were trained."""
    layout = f"workers=2,simulate,stages=4,microbatches=4,method=allreduce,steps={100 if smoke else 400}"
    always = {"boundary.when": "always", "boundary.error": "none", "model.context": 64}
    sixth, fifth = "topk(fraction=0.1667)", "topk(fraction=0.2)"
    run = functools.partial(trained, **always)
    own = run({"own": f"{layout},forward={sixth},backward={sixth}"})["own"]
    shared = run({"shared": f"{layout},forward={fifth},backward=identity"}, **{"boundary.reuse_indices": True})["shared"]
    return float(shared.summary()["eval_loss_coded"] / own.summary()["eval_loss_coded"])


def hybrid(smoke: bool) -> float:
    """How much higher the loss is with coded gradients between workers and all else exact, relative; a mean over seeds."""
    return float(np.abs(_excess(smoke)["hybrid"].mean()))


def uniform(smoke: bool) -> float:
    """`hybrid` ÷ the same with that codec on all three axes; inf if that costs nothing."""
    naive = float(_excess(smoke)["uniform"].mean())
    return hybrid(smoke) / naive if naive > 0 else float("inf")


THREE_AXES = "smoke,method=allreduce,workers=2,stages=2,tensor=2"


@functools.cache
def _excess(smoke: bool) -> dict[str, np.ndarray]:
    """For each way of coding, how much higher the loss on held-out text is than with none, relative; one value for each seed."""
    # Seven bits are the fewest with which the reducer's memory of errors stays bounded. In few steps, where a small change makes a large
    # difference, only codecs that are far apart can be told apart.
    seeds, steps, between, within = (range(1), 40, 12, 4) if smoke else (range(3), 200, 7, 7)
    few = f"zfp(rate={within})"
    hybrid = f",reducer=codec,codec=zfp(rate={between})"
    ways = {"none": "", "hybrid": hybrid, "uniform": f"{hybrid},backward={few},forward={few},tensor_codec={few}"}

    def loss(given):
        kind, seed = given
        all_messages = {"boundary.when": "always", "boundary.error": "none"} if kind == "uniform" else {}
        fields = {"seed": seed, "eval.every": 10**6, "schedule.learning_rate": 6e-3} | all_messages
        return trained({kind: f"{THREE_AXES},steps={steps}{ways[kind]}"}, **fields)[kind].summary()["eval_loss"]

    keys = [(kind, seed) for seed in seeds for kind in ways]
    found = dict(zip(keys, trials.together(loss, keys), strict=True))
    return {kind: np.array([found[kind, seed] / found["none", seed] - 1 for seed in seeds]) for kind in ways}
