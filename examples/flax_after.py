"""Data-parallel training with Flax NNX and optax: each of four nodes averages parameters with another one in every step.

JAX_NUM_CPU_DEVICES=8 python -m examples.flax_after
"""

import time

from absl import app, flags
from flax import nnx
import jax
import numpy as np
import optax
from sklearn import datasets

import decjax

BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Examples per device and step.")
STEPS = flags.DEFINE_integer("steps", 200, "Training steps.")
WIDTH = flags.DEFINE_integer("width", 128, "Hidden units of a layer.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0; Slurm sets it.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", 1, "Number of processes.")
PROCESS_INDEX = flags.DEFINE_integer("process_index", None, "Index of this process; Slurm sets it.")


class Net(nnx.Module):
    def __init__(self, width, rngs):
        self.hidden1 = nnx.Linear(64, width, rngs=rngs)
        self.hidden2 = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden2(nnx.relu(self.hidden1(x)))))


def main(argv):
    del argv
    if NUM_PROCESSES.value > 1:
        jax.distributed.initialize(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_INDEX.value)
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)

    def examples(step, part, size):
        index = np.random.default_rng((step, part)).integers(1500, size=size)  # the last 297 images are for validation
        return images[index], labels[index]

    graph, params = nnx.split(Net(WIDTH.value, nnx.Rngs(0)))
    workers = decjax.make_workers(4, devices_per_worker=jax.device_count() // 4)
    mixer = decjax.gossip.exact(decjax.topology.make("one_peer_exponential", workers.num_workers))
    tx = decjax.decentralize(optax.adamw(1e-3), mixer)

    def loss_fn(params, batch):
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), y).mean()

    def train_step(params, state, batch, *, phase):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state, loss

    take_step = decjax.make_step(train_step, workers, mixer)
    params = workers.stack(params)
    state = workers.jit(tx.init, (0,))(params)
    start = time.perf_counter()
    for step in range(1, STEPS.value + 1):
        batch = workers.build(lambda worker: examples(step, worker, BATCH_SIZE.value * workers.fsdp))
        params, state, loss = take_step(step, params, state, batch)
        if step % 50 == 0:
            mean_loss, ms = float(loss.mean()), 1000 * (time.perf_counter() - start) / 50
            if jax.process_index() == 0:
                print(f"step {step}  loss {mean_loss:.4f}  {ms:.1f} ms per step", flush=True)
            start = time.perf_counter()

    model = nnx.merge(graph, jax.tree.map(lambda x: x.mean(axis=0), workers.fetch(params)))
    if jax.process_index() == 0:
        print(f"validation accuracy {(model(images[1500:]).argmax(axis=1) == labels[1500:]).mean():.3f}")


if __name__ == "__main__":
    app.run(main)
