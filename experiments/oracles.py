"""What `experiments.related` measures of each system: one figure each, from decjax's parts themselves or from short runs."""

import functools
import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import gossip, mesh, optim, reduce, registry, topology
from decjax.channel import Channel
from decjax.codecs import entropy
from decjax.contrib import compress, placement
from decjax.contrib.gravac import gravac
from decjax.contrib.subnetworks import ist
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


def trained(shorthands: dict[str, str], pool: trials.Pool | None = None, **fields: Any) -> dict[str, trials.Trial]:
    """Finished runs of a tiny language model by name, from shorthands of configs/lm.py; a pool makes them, or one of their own."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="decjax-related-"))
    usual = {"data.sample_bytes": 0, "eval.local": False, "log_every": 1, "checkpoint.every": 10**6} | fields
    made = {name: trials.Trial(folder / name, f"configs/lm.py:{each}", tuple(usual.items())) for name, each in shorthands.items()}
    if not all((pool or trials.Pool()).make(made.values())):
        raise ValueError(f"a run in {folder} diverged")
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
        method = ist(optax.sgd(rate), reduce.mean(channel), WORKERS, channel, (("x", -1),), every=1)

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


def discrepancy(partition: str, seed: int) -> float:
    """(1/N) Σ_i ‖∇L_i − ∇L‖² ÷ ‖∇L‖², of a graph of four communities that is divided between four workers: L_i is the loss of a worker's
    own nodes, with the edges between them, and L that of all nodes that are trained on, with all edges. At new parameters."""
    task = _nodes(f"blocks(seed={seed})", partition)
    params, gradient = task.init(jax.random.key(seed)), _gradient_of_nodes()
    flat = lambda batch: np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient(params, batch))])
    data, whole = task.load(4, 1, seed), flat(task.load(1, 1, seed).batch(0, 0))
    return float(np.mean([np.sum((flat(data.batch(worker, 0)) - whole) ** 2) for worker in range(4)]) / np.sum(whole**2))


def _nodes(graph: str, partition: str) -> Any:
    return registry.make("task", "nodes", model=registry.make("model", "gcn"), graph=graph, partition=partition)


@functools.cache
def _gradient_of_nodes() -> Any:
    """Of any graph with as many features and classes, so that equal shapes are compiled once."""
    task = _nodes("blocks", "random")
    return jax.jit(jax.grad(lambda params, batch: task.loss(params, (), batch, None)[0]))


def node_partitions(smoke: bool) -> float:
    """The discrepancy of gradients where nodes are dealt out at random, ÷ that where few edges are cut, each a mean over seeds; inf unless
    that of random clusters is less than the latter."""
    seeds = range(1 if smoke else 3)
    random, clusters, cut = (
        np.mean([discrepancy(partition, seed) for seed in seeds]) for partition in ("random", "super", "min_cut")
    )
    return float(random / cut) if clusters < cut else float("inf")


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


def shared_places(smoke: bool) -> float:
    """The loss after training with a fifth of the activations' values and the gradients at their places, ÷ that with a sixth of each
    at places of its own, which is as many bytes; both evaluated as they were trained."""
    stages, steps = (2, 40) if smoke else (4, 400)
    layout = f"workers=2,simulate,stages={stages},microbatches={stages},method=allreduce,steps={steps}"
    always = {"boundary.when": "always", "boundary.error": "none", "model.context": 64}
    sixth, fifth = "topk(fraction=0.1667)", "topk(fraction=0.2)"
    run = functools.partial(trained, **always)
    own = run({"own": f"{layout},forward={sixth},backward={sixth}"})["own"]
    shared = run({"shared": f"{layout},forward={fifth},backward=identity"}, **{"boundary.reuse_indices": True})["shared"]
    return float(shared.summary()["eval_loss_coded"] / own.summary()["eval_loss_coded"])


def gravac_drop(smoke: bool) -> float:
    """Steps from a drop of the gain until GraVAC is a rung lower, ÷ its window; the most over the places of the drop in a window. inf if
    it climbs again. Gradients have a few large values, and then none."""
    window, last = 5, 4

    def after(drop: int) -> float:
        rungs = _rungs(lambda step: (step < drop, step), drop + 12 * window, window)
        left = np.flatnonzero(rungs[drop:] < last)
        return left[0] / window if rungs[drop] == last and (rungs[drop + left[0] :] < last).all() else float("inf")

    return max(after(7 * window + at) for at in range(2 if smoke else window))


def gravac_delay(smoke: bool) -> float:
    """Steps on a rung that takes three times as long as no compression, by the clocks of workers that differ, ÷ the window of GraVAC; inf
    unless it then stays on the rung below for good."""
    window, slow = 5, 3
    seconds = np.array([1.0, 0.5, 0.3, 3.0, 0.1])
    rungs = _rungs(lambda step: (True, step), (10 if smoke else 30) * window, window, seconds)
    left = np.flatnonzero(rungs == slow)
    return len(left) / window if len(left) and (rungs[left[-1] + 1 :] == slow - 1).all() else float("inf")


def _rungs(kind: Any, steps: int, window: int, step_s: np.ndarray | None = None) -> np.ndarray:
    """The rung of GraVAC in each step, for four workers; `kind(step)` says whether gradients have a few large values, and their seed.

    With `step_s`, the seconds of a step on each rung, speed is measured, by clocks of which each worker's differs by up to a half.
    """
    state, average, observe = _ladder(window, "" if step_s is None else "measured")
    found = []
    for step in range(steps):
        has_peaks, seed = kind(step)
        g_NxP = np.random.default_rng(seed).normal(size=(4, 2048)).astype(np.float32) * (0.01 if has_peaks else 1.0)
        g_NxP[:, ::128] += 10 * has_peaks
        found.append(int(state.rung[0]))
        _, state = average(g_NxP, state)
        if step_s is not None and (step + 1) % window == 0:
            state = observe(state, jnp.asarray(step_s[found[-1]] * np.linspace(0.5, 1.5, 4), jnp.float32))
    return np.array(found)


@functools.cache
def _ladder(window: int, speed: str) -> tuple[Any, Any, Any]:
    """Return (initial state, compiled average, compiled `observe`) of GraVAC on a ladder of four codecs."""
    workers = mesh.simulated_workers(4)
    ladder = "bfloat16; int8; int4; topk(fraction=0.05)"
    reducer = gravac(Channel(workers.axis), ladder=ladder, window=window, speed=speed)
    state = workers.jit(reducer.init, (0,))(jnp.zeros((4, 2048)))
    return state, workers.jit(reducer.reduce, (0, 0)), workers.jit(reducer.observe, (0, 0))


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

    pool = trials.Pool()

    def loss(given):
        kind, seed = given
        all_messages = {"boundary.when": "always", "boundary.error": "none"} if kind == "uniform" else {}
        fields = {"seed": seed, "eval.every": 10**6, "schedule.learning_rate": 6e-3} | all_messages
        return trained({kind: f"{THREE_AXES},steps={steps}{ways[kind]}"}, pool, **fields)[kind].summary()["eval_loss"]

    keys = [(kind, seed) for seed in seeds for kind in ways]
    found = dict(zip(keys, pool.map(loss, keys), strict=True))
    return {kind: np.array([found[kind, seed] / found["none", seed] - 1 for seed in seeds]) for kind in ways}
