"""The systems of related papers: the command that runs each, and a figure whose value or bound is known beforehand.

`experiments.related` prints the figures. They are computed from decjax's parts or from short runs.
"""

from collections.abc import Callable, Mapping
import functools
import json
import pathlib
import statistics
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs import clicks
from decjax import config, gossip, mesh, models, optim, reduce, registry, topology
from decjax import train as training
from decjax.channel import Channel
from decjax.contrib import compress, mixers, placement
from decjax.contrib.clicks import dlrm
from decjax.contrib.codecs import entropy
from decjax.contrib.compress import features
from decjax.contrib.gravac import GravacState, gravac
from decjax.contrib.subnetworks import IndependentSubnetworks
from decjax.pipeline import autoencoder
from decjax.principal import principal
from decjax.tasks.task import Task
from experiments import dssfn, trials

WORLD = pathlib.Path(__file__).resolve().parent.parent / "configs/links/worldwide.json"
WORKERS = 8
MATRIX = (6, 5)  # the shape of what workers mix
PLACED = "depth=24,width=2048,heads=16,vocabulary=50257,context=2048"  # the model that DT-FM places
CODED = "lm.py:smoke,steps=200,method=allreduce,workers=2,stages=2,tensor=2,reducer=codec,codec=zfp(rate=7)"
BOUNDED = "bound=0.02,gradient_bound=0.01,start=4"  # Bounds of embedding tables fall to these within half of the steps.


class Row(NamedTuple):
    """A system of a paper."""

    name: str
    source: str  # arXiv number
    command: str  # that runs it
    oracle: str  # definition of its figure
    measure: Callable[[bool], float]  # the figure; True: quickly
    most: float  # its upper bound


ROWS: list[Row] = []


def system(name: str, source: str, most: float, command: str) -> Callable[[Callable[[bool], float]], Callable[[bool], float]]:
    """Return the decorator of `measure(smoke)`, a figure that is at most `most`; the first line of its docstring defines it."""

    def enter(measure: Callable[[bool], float]) -> Callable[[bool], float]:
        oracle = (measure.__doc__ or "").splitlines()[0].removesuffix(".")
        ROWS.append(Row(name, source, command, oracle[0].lower() + oracle[1:], measure, most))
        return measure

    return enter


def train(config: str) -> str:
    """Return the command of `launch.train` with a config file, its shorthand and further flags."""
    return f"launch.train --config=configs/{config} --workdir=WORKDIR"


def mixed(make: Callable[[Channel], gossip.Mixer], x_NxIxJ: np.ndarray, steps: int) -> np.ndarray:
    """Return the path of matrices that are only mixed, [steps, N, I, J], in float64."""
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
    """Return the matrices of the workers before they mix."""
    return np.random.default_rng(seed).normal(size=(WORKERS, *MATRIX))


def distance(x: np.ndarray, mean: np.ndarray) -> float:
    """Return the largest difference from a mean."""
    return float(np.abs(x - mean).max())


def trained(
    runs: Mapping[str, tuple[str, Mapping[str, object]]], config: str = "configs/lm.py", pool: trials.Pool | None = None
) -> dict[str, trials.Trial]:
    """Train tiny runs, named and given as shorthands and fields of a config file; a pool makes them, by default its own."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="decjax-related-"))
    common = {"data.sample_bytes": 0} if config == "configs/lm.py" else {}
    common |= {"eval.local": False, "log_every": 1, "checkpoint.every": 10**6}
    made = {
        name: trials.Trial(folder / name, f"{config}:{shorthand}", tuple({**common, **fields}.items()))
        for name, (shorthand, fields) in runs.items()
    }
    if not all((pool or trials.Pool()).make(made.values())):
        raise trials.Broken(f"a run in {folder} diverged")
    return made


@system("DT-FM", "2206.01288", 0.65, f"launch.place --links=configs/links/worldwide.json --stages=8 --model={PLACED},batch=64")
def dt_fm(smoke: bool) -> float:
    """Message time of 64 devices worldwide ÷ mean of random layouts."""
    network = placement.Network(placement.load(WORLD), placement.Job(8, 8, gradient_bytes=3e8, activation_bytes=3e7))
    random_s = [network.seconds(placement.random_layout(network, np.random.default_rng(seed))) for seed in range(20)]
    return placement.genetic(network, trials=50 if smoke else 1000).seconds / float(np.mean(random_s))


@system(
    "DT-FM, 256 devices", "2206.01288", 0.65, f"launch.place --links=LINKS --stages=16 --search_s=50 --model={PLACED},batch=256"
)
def dt_fm_256(smoke: bool) -> float:
    """The same for 256 devices, in less than a minute."""
    content = json.loads(WORLD.read_text())
    content["regions"] = {region: 4 * count for region, count in content["regions"].items()}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "links.json"
        path.write_text(json.dumps(content))
        network = placement.Network(placement.load(path), placement.Job(16, 16, gradient_bytes=3e8, activation_bytes=3e7))
    random_s = [network.seconds(placement.random_layout(network, np.random.default_rng(seed))) for seed in range(5)]
    return placement.genetic(network, trials=30 if smoke else 10**6, seconds=50).seconds / float(np.mean(random_s))


@system("dSSFN", "2009.13982", 1.0, "experiments.dssfn")
def layer_wise(smoke: bool) -> float:
    """Difference in accuracy between a ring with 30 rounds and one worker with all examples, percentage points."""
    with jax.enable_x64(True):
        one, _, ring = dssfn.compare(dssfn.Sizes(layers=1 if smoke else 5), rounds=30, seed=0).values()
    return 100 * max(abs(a - b) for a, b in zip(one.accuracy, ring.accuracy))


@system("quantized push-sum", "2002.09964", 1e-12, train("quadratics.py:mixer=push_sum,codec=int4,topology=directed_exponential"))
def push_sum(smoke: bool) -> float:
    """Distance from the mean, four bits, γ = 1."""
    graph, x = topology.make("directed_exponential", WORKERS), start()
    path = mixed(lambda channel: mixers.push_sum(graph, channel, codec="int4", gamma=1.0), x, 100 if smoke else 300)
    return distance(path[-1], x.mean(axis=0))


@system("PowerGossip", "2008.01425", 1e-12, train("lm.py:mixer=power_gossip,rank=1,steps=500"))
def power_gossip(smoke: bool) -> float:
    """Drift of the mean, rank 1."""
    graph, x = topology.make("ring", WORKERS), start()
    path = mixed(lambda channel: mixers.power_gossip(graph, rank=1, channel=channel), x, 50 if smoke else 300)
    return distance(path.mean(axis=1), x.mean(axis=0))


@system("consensus control", "2102.04828", 0.25, train("quadratics.py:mixer=consensus_control,topology=ring"))
def consensus_control(smoke: bool) -> float:
    """Distance after a mixing step ÷ before it; ρ = 0.25."""
    graph, x = topology.make("ring", WORKERS), start()
    path = mixed(lambda channel: mixers.consensus_control(graph, channel, target=0.25, rounds=64), x, 1)
    W = graph.matrix(0)

    def apart(x_NxIxJ: np.ndarray) -> float:
        return float(np.sqrt(np.square(x_NxIxJ - np.tensordot(W, x_NxIxJ, 1)).sum(axis=(1, 2)).mean()))

    return apart(path[-1]) / apart(x)


@system("MC-DSGT", "2211.00533", 0.5, train("quadratics.py:method=mc_dsgt,mixer=accelerated(rounds=12),topology=ring"))
def accelerated(smoke: bool) -> float:
    """Disagreement after 12 accelerated rounds ÷ 12 plain ones; refused on sun graphs."""
    graph, x = topology.make("ring", 16), np.random.default_rng(0).normal(size=(16, *MATRIX))
    try:
        mixers.accelerated(topology.make("sun", 16), rounds=12)
        return float("inf")
    except ValueError:
        pass
    left = [
        np.linalg.norm(mixed(lambda channel, make=make: make(graph, channel, rounds=12), x, 1)[-1] - x.mean(axis=0))
        for make in (mixers.accelerated, gossip.exact)
    ]
    return float(left[0] / left[1])


@system("FCGS", "2410.08017", 0.02, "none: bytes behind an entropy coder are estimated, by decjax.contrib.codecs.entropy")
def gaussian_rate(smoke: bool) -> float:
    """Deviation of the estimated bits from the entropy of matched Gaussians, relative."""
    x = np.random.default_rng(0).normal(0.3, 1.7, 50_000 if smoke else 500_000)
    worst = 0.0
    for step in (0.085, 0.34, 1.7, 3.4):
        levels = np.rint(x / step)
        exact = entropy.empirical_bits(levels)
        worst = max(worst, abs(entropy.gaussian_bits(levels, step, 0.3, 1.7).mean() / exact - 1))
    return worst


@system(
    "Ravnest",
    "2401.01728",
    1e-4,
    train(
        "lm.py:workers=2,stages=4,microbatches=2,delay=1,steps=300,method=diloco(every=10,outer_learning_rate=1.0,outer_momentum=0.0)"
    ),
)
def ravnest(smoke: bool) -> float:
    """Nothing late, an average every step: deviation of the loss from synchronous SGD's, relative."""
    layout = f"workers=2,simulate,stages=2,microbatches=2,smoke,steps={10 if smoke else 40},optimizer=sgd"
    mean = "method=diloco(every=1,outer_learning_rate=1.0,outer_momentum=0.0)"
    unclipped = {"clip_norm": 0.0}
    made = trained({"apart": (f"{layout},{mean}", unclipped), "synchronous": (f"{layout},method=allreduce", unclipped)})
    apart, synchronous = (np.array([row["loss"] for row in run.rows("train")]) for run in made.values())
    return float(np.abs(apart / synchronous - 1).max())


@system("independent subnetwork training", "1910.02120", 0.1, train("digits.py:method=ist,every=25,model=mlp"))
def subnetworks(smoke: bool) -> float:
    """Distance from its known fixed point on a quadratic, ÷ that point's from the optimum."""
    P, rounds, rate = 16, 4_000 if smoke else 40_000, 0.002
    root = np.random.default_rng(0).normal(size=(P, P)) / np.sqrt(P)
    L, b = root @ root.T + np.eye(P), np.random.default_rng(1).normal(size=P)
    together = (P / WORKERS - 1) / (P - 1)  # the probability that two units have the same worker
    fixed = np.linalg.solve(np.diag(np.diag(L)) + together * (L - np.diag(np.diag(L))), b)
    workers = mesh.simulated_workers(WORKERS)
    with jax.enable_x64(True):
        channel = Channel(workers.axis)
        method = IndependentSubnetworks(
            optax.sgd(rate), reduce.mean(channel), WORKERS, channel=channel, units=(("x", -1),), every=1
        )

        def whole(x):
            def step(carry, _):
                params, state = carry
                assert method.view is not None
                grads = {"x": L @ method.view(params, state)["x"] - b}
                updates, state = method.tx.update(grads, state, params, phase=0)
                params = jax.tree.map(jnp.add, params, updates)
                return (params, state), params["x"]

            path = jax.lax.scan(step, ({"x": x}, method.tx.init({"x": x})), None, rounds)[1]
            return path[rounds // 2 :].mean(axis=0)

        settled = np.asarray(workers.jit(whole, (0,))(np.tile(fixed, (WORKERS, 1))))[0]
    return float(np.linalg.norm(settled - fixed) / np.linalg.norm(np.linalg.solve(L, b) - fixed))


@system("RandomTMA and SuperTMA", "2305.09887", 0.2, train("nodes.py:partition=super"))
def node_partitions(smoke: bool) -> float:
    """Discrepancy of gradients, nodes at random ÷ few edges cut; that of random clusters lies below few edges cut."""
    seeds = range(1 if smoke else 3)
    random, clusters, cut = (
        np.mean([discrepancy(partition, seed) for seed in seeds]) for partition in ("random", "super", "min_cut")
    )
    return float(random / cut) if clusters < cut else float("inf")


def discrepancy(partition: str, seed: int) -> float:
    """(1/N) Σ_i ‖∇L_i − ∇L‖² ÷ ‖∇L‖², of a graph of four communities that is divided between four workers: L_i is the loss of a worker's
    own nodes, with the edges between them, and L that of all nodes that are trained on, with all edges. At new parameters."""
    task = _nodes(f"blocks(seed={seed})", partition)
    params, gradient = task.init(jax.random.key(seed)), _gradient_of_nodes()
    flat = lambda batch: np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient(params, batch))])
    data, whole = task.load(4, 1, seed), flat(task.load(1, 1, seed).batch(0, 0))
    return float(np.mean([np.sum((flat(data.batch(worker, 0)) - whole) ** 2) for worker in range(4)]) / np.sum(whole**2))


def _nodes(graph: str, partition: str) -> Task:
    return registry.make("task", "nodes", model=registry.make("model", "gcn"), graph=graph, partition=partition)


@functools.cache
def _gradient_of_nodes() -> Callable:
    """Return the gradient of any graph with as many features and classes, so that equal shapes are compiled once."""
    task = _nodes("blocks", "random")
    return jax.jit(jax.grad(lambda params, batch: task.loss(params, (), batch, None)[0]))


@system("adaptive serverless learning", "2008.10422", 0.1, train("digits.py:order=atc,every=4"))
def adaptive_serverless(smoke: bool) -> float:
    """Noise floor ~ N^a of Adam with gossip every 4 steps: distance of a from −1."""
    floors = {N: _floor(N, seeds=2 if smoke else 8) for N in (4, 64)}
    return abs(np.log(floors[64] / floors[4]) / np.log(64 / 4) + 1)


def _floor(num_workers: int, seeds: int, steps: int = 3000, size: int = 16) -> float:
    """Return the squared distance of the workers' mean from the optimum of ½ ‖x‖² whose gradients have noise of deviation 1;
    a mean over the second half of the steps and over seeds."""
    workers = mesh.simulated_workers(num_workers)
    mixer = gossip.every(gossip.exact(topology.make("one_peer_exponential", num_workers), Channel(workers.axis)), 4)
    tx = optim.decentralize(optax.adam(0.01, b2=0.999), mixer, "atc")

    def whole(x, key):
        def step(carry, key):
            params, state = carry
            updates, state = tx.update(params + jax.random.normal(key, params.shape), state, params)
            params = jax.tree.map(jnp.add, params, updates)
            return (params, state), workers.axis.mean(params)

        path = jax.lax.scan(step, (x, tx.init(x)), jax.random.split(key, steps))[1]
        return jnp.square(path[steps // 2 :]).sum(axis=-1).mean()

    run = workers.jit(whole, (0, 0))
    found = [run(jnp.zeros((num_workers, size)), jax.random.split(jax.random.key(seed), num_workers)) for seed in range(seeds)]
    return float(np.mean(found))


@system("hybrid MPI compression", "2409.02423", 0.01, train(f"{CODED} --config.schedule.learning_rate=6e-3"))
def hybrid(smoke: bool) -> float:
    """Deviation of the loss with only gradients coded from that with none coded, relative; three seeds."""
    return float(np.abs(_excess(smoke)["hybrid"].mean()))


@functools.cache
def _excess(smoke: bool) -> dict[str, np.ndarray]:
    """For each way of coding, how much higher the loss on held-out text is than with none, relative; one value for each seed."""
    # Seven bits are the fewest with which the reducer's memory of errors stays bounded. In few steps, where a small change makes a large
    # difference, only codecs that are far apart can be told apart.
    seeds, steps, between, within = (range(1), 40, 12, 4) if smoke else (range(3), 200, 7, 7)
    few = f"zfp(rate={within})"
    hybrid = f",reducer=codec,codec=zfp(rate={between})"
    ways = {"none": "", "hybrid": hybrid, "uniform": f"{hybrid},backward={few},forward={few},tensor_codec={few}"}

    fields = {"eval.every": 10**6, "schedule.learning_rate": 6e-3}
    of_kind = {kind: {"boundary.when": "always", "boundary.error": "none"} if kind == "uniform" else {} for kind in ways}
    axes = f"smoke,method=allreduce,workers=2,stages=2,tensor=2,steps={steps}"
    runs = {f"{kind}{seed}": (axes + ways[kind], {"seed": seed, **fields, **of_kind[kind]}) for seed in seeds for kind in ways}
    found = {name: run.summary()["eval_loss"] for name, run in trained(runs).items()}
    return {kind: np.array([found[f"{kind}{seed}"] / found[f"none{seed}"] - 1 for seed in seeds]) for kind in ways}


@system(
    "hybrid MPI compression, naive",
    "2409.02423",
    0.2,
    train(
        f"{CODED},backward=zfp(rate=7),forward=zfp(rate=7),tensor_codec=zfp(rate=7) --config.boundary.when=always "
        "--config.boundary.error=none --config.schedule.learning_rate=6e-3"
    ),
)
def uniform(smoke: bool) -> float:
    """The loss increase of the row above ÷ that with the codec on all three axes."""
    naive = float(_excess(smoke)["uniform"].mean())
    return hybrid(smoke) / naive if naive > 0 else float("inf")


@system("learned autoencoder", "2301.02654", 1e-4, train("lm.py:stages=2,workers=4,microbatches=2,autoencoder=16,steps=300"))
def boundary_autoencoder(smoke: bool) -> float:
    """Deviation of each token's loss at full width from that without a codec, relative."""
    width = 16 if smoke else 64
    model = models.decoder_lm(width=width, hidden=2 * width, depth=4, context=32)
    layers, tokens = (1, 1, 1, 1), jax.random.randint(jax.random.key(1), (4, 33), 0, 256)
    assert model.parts is not None
    wide = autoencoder.insert(model, layers, width)
    params = jax.jit(wide.init)(jax.random.key(0))
    params["head"]["kernel"] = (
        jax.random.normal(jax.random.key(2), params["head"]["kernel"].shape) / width**0.5
    )  # It starts at zero.
    whole = np.asarray(model.nll(params, tokens, None))
    principal_params = jax.jit(functools.partial(autoencoder.fit, model.parts, layers=layers, tokens_PxBxT1=tokens[None]))(params)
    nll = jax.jit(lambda params: wide.nll(params, tokens, None))
    return max(float(np.abs(np.asarray(nll(start)) / whole - 1).max()) for start in (params, principal_params))


@system(
    "activations and gradients",
    "2401.07788",
    1.0,
    train(
        "lm.py:workers=2,stages=4,microbatches=2,method=allreduce,forward=topk(fraction=0.2),backward=identity,steps=300 "
        "--config.boundary.reuse_indices=True --config.boundary.error=none"
    ),
)
def shared_places(smoke: bool) -> float:
    """Loss with gradients at the activations' entries ÷ at their own, equal bytes.

    A fifth of the activations with the gradients at their places, against a sixth of each with indices of its own.
    """
    stages, steps = (2, 40) if smoke else (4, 400)
    layout = f"workers=2,simulate,stages={stages},microbatches={stages},method=allreduce,steps={steps}"
    always = {"boundary.when": "always", "boundary.error": "none", "model.context": 64}
    sixth, fifth = "topk(fraction=0.1667)", "topk(fraction=0.2)"
    own = f"{layout},forward={sixth},backward={sixth}"
    shared = f"{layout},forward={fifth},backward=identity"
    made = trained({"own": (own, always), "shared": (shared, always | {"boundary.reuse_indices": True})})
    return float(made["shared"].summary()["eval_loss_coded"] / made["own"].summary()["eval_loss_coded"])


@system("GraVAC", "2305.12201", 2.0, train("lm.py:method=allreduce,reducer=gravac,steps=500"))
def gravac_drop(smoke: bool) -> float:
    """Steps after a drop of the gain until it is a rung lower for good, ÷ window.

    The largest over the positions of the drop in a window; inf if it climbs again. Gradients have a few large values, and then none.
    """
    window, last = 5, 4

    def after(drop: int) -> float:
        rungs = _rungs(lambda step: (step < drop, step), drop + 12 * window, window)
        left = np.flatnonzero(rungs[drop:] < last)
        return left[0] / window if rungs[drop] == last and (rungs[drop + left[0] :] < last).all() else float("inf")

    return max(after(7 * window + at) for at in range(2 if smoke else window))


def _rungs(kind: Callable[[int], tuple[bool, int]], steps: int, window: int, step_s: np.ndarray | None = None) -> np.ndarray:
    """Return the rung of GraVAC in each step, for four workers; `kind(step)` is (gradients have a few large values, their seed).

    With `step_s`, the seconds of a step on each rung, speed is measured, by clocks that differ by up to a half between workers."""
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
def _ladder(window: int, speed: str) -> tuple[GravacState, Callable, Callable]:
    """Return (initial state, compiled average, compiled `observe`) of GraVAC on a ladder of four codecs."""
    workers = mesh.simulated_workers(4)
    ladder = "bfloat16; int8; int4; topk(fraction=0.05)"
    reducer = gravac(Channel(workers.axis), ladder=ladder, window=window, speed=speed)
    state = workers.jit(reducer.init, (0,))(jnp.zeros((4, 2048)))
    return state, workers.jit(reducer.reduce, (0, 0)), workers.jit(reducer.observe, (0, 0))


@system(
    "GraVAC, measured speed", "2305.12201", 1.0, train("lm.py:model=lstm,method=allreduce,reducer=gravac(speed=measured),steps=300")
)
def gravac_delay(smoke: bool) -> float:
    """One rung is made slow: windows until it is left for the rung below, where it stays.

    The rung takes three times as long as no compression, by the clocks of workers that differ; inf if it is not left for good.
    """
    window, slow = 5, 3
    seconds = np.array([1.0, 0.5, 0.3, 3.0, 0.1])
    rungs = _rungs(lambda step: (True, step), (10 if smoke else 30) * window, window, seconds)
    left = np.flatnonzero(rungs == slow)
    return len(left) / window if len(left) and (rungs[left[-1] + 1 :] == slow - 1).all() else float("inf")


@system("dual-level DLRM compression", "2407.04272", 1.0, train("clicks.py:bound=0.02,gradient_bound=0.01,start=4,within=400"))
def worst(smoke: bool) -> float:
    """Largest error of a lookup or gradient ÷ its table's bound, all steps."""
    steps = 20 if smoke else 200
    spec = config.resolve(clicks.get_config(f"simulate,workers=8,{BOUNDED},steps={steps},within={steps // 2}"))
    trainer = training.Trainer(spec)
    state, found = trainer.init(), 0.0
    for step in range(steps):
        state, _ = trainer.step(state, trainer.batch(step), step)
        found = max(found, float(np.max(jax.device_get(state.source.worst_2xP))))
    return found


@system(
    "dual-level DLRM compression, loss", "2407.04272", 1.0, train("clicks.py:bound=0.02,gradient_bound=0.01,start=4,within=400")
)
def beyond_noise(smoke: bool) -> float:
    """Difference in log-loss from that without bounds, in deviations of 3 seeds."""
    steps = 40 if smoke else 600
    ways = {"bounded": f"{BOUNDED},within={steps // 2}", "plain": "divided"}
    runs = {
        f"{way}{seed}": (f"workers=8,{shorthand},steps={steps}", {"seed": seed, "eval.every": steps, "log_every": steps})
        for way, shorthand in ways.items()
        for seed in range(3)
    }
    made = trained(runs, "configs/clicks.py")
    bounded, plain = ([made[f"{way}{seed}"].summary()["eval_loss"] for seed in range(3)] for way in ways)
    return abs(statistics.mean(bounded) - statistics.mean(plain)) / statistics.stdev(plain)


@system("transformer compression", "2402.05964", 1e-5, "launch.compress --workdir=WORKDIR")
def full_rank(smoke: bool) -> float:
    """Error at full rank, relative."""
    params = {"w": start().reshape(-1, MATRIX[1]).astype(np.float32)}
    found = compress.make("low_rank(fraction=1)")(params).params["w"]
    return float(np.abs(found - params["w"]).max() / np.abs(params["w"]).max())


@system("unified low-rank compression of click models", "2405.18146", 1e-4, "experiments.low_rank_clicks --out=WORKDIR")
def low_rank_clicks(smoke: bool) -> float:
    """Deviation of the outputs' error from the sum of discarded eigenvalues, relative; full rank exact.

    The largest difference over layers and tables of a DLRM at half the rank; inf unless outputs are exact in all their directions.
    """
    model, M = dlrm(width=8, hidden=16)(4, (50, 20, 5)), 256 if smoke else 4096
    params = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    numbers_MxF = jax.random.normal(jax.random.key(1), (M, 4))
    indices_MxT = jax.random.randint(jax.random.key(2), (M, 3), 0, jax.numpy.array((50, 20, 5)))
    outputs = model.outputs
    assert outputs
    seen = jax.jit(lambda params: outputs(params, numbers_MxF, indices_MxT))
    before = {name: np.asarray(y_MxJ, np.float64) for name, y_MxJ in seen(params).items()}
    for y_MxJ in before.values():
        E_JxJ = np.asarray(principal(jax.numpy.asarray(y_MxJ, jax.numpy.float32), y_MxJ.shape[1])[0])
        if np.abs(y_MxJ @ E_JxJ @ E_JxJ.T - y_MxJ).max() > 1e-5 * np.abs(y_MxJ).max():
            return float("inf")
    worst = 0.0
    for path, weight in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        R = -(-min(weight.shape) // 2)
        if name not in before or weight.shape[1] == R:
            continue
        small, _ = features.project(params, {name: before[name]}, 0.5)
        lost = np.square(np.asarray(seen(small)[name]) - before[name]).sum() / M
        discarded = np.linalg.eigvalsh(np.cov(before[name].T, bias=True))[:-R].sum()
        worst = max(worst, abs(lost / discarded - 1))
    return worst
