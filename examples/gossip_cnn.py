"""Gossip on a small CNN: each worker has its own part of scikit-learn's digits and averages parameters with neighbors.

python -m examples.gossip_cnn
python -m examples.gossip_cnn --topology=ring --steps=300
"""

from absl import app, flags
from flax import nnx
import jax
import numpy as np
import optax
from sklearn import datasets

import decjax

WORKERS = flags.DEFINE_integer("workers", 8, "Number of workers, one device each.")
TOPOLOGY = flags.DEFINE_string("topology", "one_peer_exponential", "Communication graph.")
STEPS = flags.DEFINE_integer("steps", 200, "Training steps.")


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.out = nnx.Linear(2 * 2 * 32, 10, rngs=rngs)

    def __call__(self, x):  # [B, 8, 8, 1]
        x = nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.out(x.reshape(x.shape[0], -1))


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", WORKERS.value)  # only for CPUs; accelerators keep their number of devices
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    shards = np.array_split(np.arange(1500), WORKERS.value)  # the last 297 images are for validation
    rng = np.random.default_rng(0)

    def make_batch(worker):
        index = rng.choice(shards[worker], 32)
        return images[index], labels[index]

    graph, params = nnx.split(CNN(nnx.Rngs(0)))

    def loss_fn(params, batch):
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), y).mean()

    workers = decjax.make_workers(WORKERS.value)
    mixer = decjax.gossip.exact(decjax.topology.make(TOPOLOGY.value, workers.num_workers))
    tx = decjax.decentralize(optax.adamw(3e-3), mixer)

    def train_step(params, state, batch, *, phase):  # of one worker
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state, loss

    take_step = decjax.make_step(train_step, workers, mixer)  # of all workers
    params = workers.stack(params)
    state = workers.jit(tx.init, (0,))(params)
    for step in range(1, STEPS.value + 1):
        batch = workers.build(make_batch)
        params, state, loss_N = take_step(step, params, state, batch)
        if step % 50 == 0:
            print(f"step {step}  loss {loss_N.mean():.4f}")

    def accuracy(params):
        return (nnx.merge(graph, params)(images[1500:]).argmax(axis=1) == labels[1500:]).mean()

    average = jax.tree.map(lambda x: x.mean(axis=0), params)
    first = jax.tree.map(lambda x: x[0], params)
    print(f"validation accuracy: averaged model {accuracy(average):.3f}, model of worker 0 {accuracy(first):.3f}")


if __name__ == "__main__":
    app.run(main)
