"""DiLoCo: each worker takes H optimizer steps on its own, then all take one outer step along their average change.

python -m examples.diloco
python -m examples.diloco --every=32
"""

from absl import app, flags
from flax import nnx
import jax
import numpy as np
import optax
from sklearn import datasets

import decjax

WORKERS = flags.DEFINE_integer("workers", 4, "Number of workers, one device each.")
EVERY = flags.DEFINE_integer("every", 16, "H, steps from one outer step to the next.")
STEPS = flags.DEFINE_integer("steps", 256, "Training steps, a multiple of --every.")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", WORKERS.value)  # only for CPUs; accelerators keep their number of devices
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    rng = np.random.default_rng(0)

    def make_batch(worker):
        index = rng.integers(1500, size=32)  # the last 297 images are for validation
        return images[index], labels[index]

    graph, params = nnx.split(Net(nnx.Rngs(0)))

    def loss_fn(params, batch):
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), y).mean()

    workers = decjax.make_workers(WORKERS.value)
    reducer = decjax.reduce.every(decjax.reduce.mean(), EVERY.value)  # averages in every H-th step
    outer = optax.sgd(0.7, momentum=0.5, nesterov=True)
    tx = decjax.local_updates(optax.adamw(1e-3), reducer, outer)

    def train_step(params, state, batch, *, phase):  # of one worker
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state, loss

    take_step = decjax.make_step(train_step, workers, reducer)  # of all workers
    mb = [reducer.num_bytes(params, workers.num_workers, reducer.phase(step))[0] / 1e6 for step in range(EVERY.value)]
    print(f"a worker sends {max(mb):.3f} MB in each outer step, and {sum(mb) / EVERY.value:.4f} MB per step on average")
    params = workers.stack(params)
    state = workers.jit(tx.init, (0,))(params)
    for step in range(STEPS.value):
        batch = workers.build(make_batch)
        params, state, loss_N = take_step(step, params, state, batch)
        if (step + 1) % 64 == 0:
            print(f"step {step + 1}  loss {loss_N.mean():.4f}")

    model = nnx.merge(graph, jax.tree.map(lambda x: x[0], params))  # the replicas are equal after an outer step
    print(f"validation accuracy {(model(images[1500:]).argmax(axis=1) == labels[1500:]).mean():.3f}")


if __name__ == "__main__":
    app.run(main)
