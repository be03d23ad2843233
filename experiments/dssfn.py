"""A network learned layer by layer, without gradients: each layer is a least-squares problem that workers solve by ADMM and gossip.

    python -m experiments.dssfn

dSSFN (arXiv 2009.13982): layer l computes y_l = relu(W_l y_{l−1}), with W_l = [V O_l; R_l]: R_l is random and the same on all workers,
V = [I; −I], and O_l solves

    min_O Σ_m ‖T_m − O Y_m‖²   subject to ‖O‖ ≤ ε = 2Q (Frobenius, Q classes)

over the features Y_m of worker m's own examples, by ADMM with consensus. An iteration of worker m, with step size μ:

    O_m ← (T_m Y_mᵀ + (Z − Λ_m)/μ) (Y_m Y_mᵀ + I/μ)^−1,    Z ← P_ε(mean_m (O_m + Λ_m)),    Λ_m ← Λ_m + O_m − Z

The mean is the only communication: exact, or `--rounds` rounds of gossip over a ring by `decjax.gossip`'s mixers. Because the problem is
convex, workers learn the same as one worker with all examples; the table compares them. scikit-learn's digits, divided between the
workers at random; a quarter is for testing.
"""

from collections.abc import Callable
from typing import NamedTuple

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from decjax import gossip, mesh, topology
from decjax.channel import Channel
from decjax.contrib.images import DATASETS
from experiments import script

FLAGS = flags.FLAGS

CLASSES = 10
TESTED = 4  # One of four examples is for testing.


class Sizes(NamedTuple):
    """Sizes of the network and of the training."""

    workers: int = 8
    layers: int = 5
    random: int = 200  # rows of R_l
    iterations: int = 100  # of ADMM in each layer
    mu: float = 10.0


class Data(NamedTuple):
    """Examples as columns."""

    images_MxDxE: np.ndarray  # of M workers
    targets_MxQxE: np.ndarray  # one-hot
    test_DxE: np.ndarray
    test_E: np.ndarray  # classes


def load(workers: int, seed: int) -> Data:
    """Return the digits, the same number for each worker."""
    images = DATASETS["digits"].read("")
    order = np.random.default_rng(seed).permutation(len(images.labels_E))
    pixels = images.images_ExHxWxC.reshape(len(order), -1)[order] / 16.0
    labels, test = images.labels_E[order], len(order) // TESTED
    each = (len(order) - test) // workers
    own = [slice(test + m * each, test + (m + 1) * each) for m in range(workers)]
    return Data(
        np.stack([pixels[part].T for part in own]),
        np.stack([np.eye(CLASSES)[labels[part]].T for part in own]),
        pixels[:test].T,
        labels[:test],
    )


Mean = Callable[[np.ndarray], np.ndarray]  # [M, …] -> each worker's estimate of the mean, [M, …]


def exact_mean(x: np.ndarray) -> np.ndarray:
    """Return the exact mean, as by an all-reduce."""
    return np.broadcast_to(x.mean(axis=0), x.shape)


def gossip_mean(graph: topology.Topology, rounds: int) -> Mean:
    """Return the mean by so many rounds of gossip over a graph."""
    workers = mesh.simulated_workers(graph.num_workers)
    mixer = gossip.exact(graph, Channel(workers.axis), rounds=rounds)
    mix = workers.jit(lambda x: gossip.mix(mixer, x, (), 0, 0)[0], (0,))
    return lambda x: np.asarray(mix(jnp.asarray(x)))


def projected(x: np.ndarray, radius: float) -> np.ndarray:
    """Return P_ε: each worker's matrix, scaled to the radius if its norm is larger."""
    return x * np.minimum(1.0, radius / np.maximum(np.linalg.norm(x, axis=(1, 2), keepdims=True), 1e-30))


def solve(features_MxFxE: np.ndarray, targets_MxQxE: np.ndarray, mean: Mean, sizes: Sizes) -> np.ndarray:
    """Return O of every worker after the iterations, [M, Q, F]."""
    gram = features_MxFxE @ features_MxFxE.transpose(0, 2, 1) + np.eye(features_MxFxE.shape[1]) / sizes.mu
    inverse, cross = np.linalg.inv(gram), targets_MxQxE @ features_MxFxE.transpose(0, 2, 1)
    z = dual = np.zeros_like(cross)
    for _ in range(sizes.iterations):
        own = (cross + (z - dual) / sizes.mu) @ inverse
        z = projected(mean(own + dual), 2 * CLASSES)
        dual = dual + own - z
    return z


def scaled(features: np.ndarray) -> np.ndarray:
    """Scale each example's features to unit length."""
    return features / np.maximum(np.linalg.norm(features, axis=-2, keepdims=True), 1e-30)


class Learned(NamedTuple):
    """Results of a network after each of its layers."""

    accuracy: list[float]  # on the test, of worker 0
    spread: list[float]  # the largest difference of a worker's O from the mean, over the norm of the mean


def learn(data: Data, mean: Mean, sizes: Sizes, seed: int) -> Learned:
    """Learn layer by layer. The first O is linear in the pixels."""
    rng, learned = np.random.default_rng(seed + 1), Learned([], [])
    y, test = scaled(data.images_MxDxE), scaled(data.test_DxE)
    for _ in range(sizes.layers + 1):
        output = solve(y, data.targets_MxQxE, mean, sizes)
        center = output.mean(axis=0)
        learned.accuracy.append(float(((output[0] @ test).argmax(axis=0) == data.test_E).mean()))
        learned.spread.append(float(np.linalg.norm(output - center, axis=(1, 2)).max() / np.linalg.norm(center)))
        random = rng.uniform(-1, 1, (sizes.random, y.shape[1]))
        y = grow(output, random, y)
        test = grow(output[0], random, test)
    return learned


def grow(output: np.ndarray, random: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the features of the next layer, relu of [O y; −O y; R y]."""
    found = output @ y
    return scaled(np.maximum(np.concatenate([found, -found, random @ y], axis=-2), 0.0))


def compare(sizes: Sizes, rounds: int, seed: int) -> dict[str, Learned]:
    """Train one worker with all examples, workers with an exact mean, and workers on a ring."""
    data = load(sizes.workers, seed)
    pooled = data._replace(
        images_MxDxE=np.concatenate(data.images_MxDxE, axis=1)[None], targets_MxQxE=np.concatenate(data.targets_MxQxE, axis=1)[None]
    )
    ring = topology.make("ring", sizes.workers)
    return {
        "one worker, all examples": learn(pooled, exact_mean, sizes, seed),
        "exact average": learn(data, exact_mean, sizes, seed),
        f"ring, {rounds} rounds": learn(data, gossip_mean(ring, rounds), sizes, seed),
    }


def tabulate(found: dict[str, Learned]) -> script.Table:
    """Return a row for each way to average, a column for each layer."""
    layers = len(next(iter(found.values())).accuracy)
    table = script.table("accuracy, %", *(f"layer {k}" if k else "linear" for k in range(layers)), "workers differ by")
    for name, learned in found.items():
        table.add_row(name, *(f"{100 * accuracy:.1f}" for accuracy in learned.accuracy), f"{max(learned.spread):.1e}")
    return table


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    sizes = Sizes(FLAGS.workers, FLAGS.layers, FLAGS.random, FLAGS.iterations)
    script.show(tabulate(compare(sizes, FLAGS.rounds, FLAGS.seed)))


if __name__ == "__main__":
    flags.DEFINE_integer("workers", Sizes().workers, "Number of workers, M.", lower_bound=3, upper_bound=64)
    flags.DEFINE_integer("layers", Sizes().layers, "Layers after the linear one.", lower_bound=0)
    flags.DEFINE_integer("random", Sizes().random, "Random features of a layer.", lower_bound=1)
    flags.DEFINE_integer("iterations", Sizes().iterations, "Iterations of ADMM in a layer.", lower_bound=1)
    flags.DEFINE_integer("rounds", 30, "Rounds of gossip over the ring in an iteration.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of the random features and of the division of examples.")
    script.run(main, (ValueError,))
