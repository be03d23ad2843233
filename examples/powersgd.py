"""PowerSGD: the all-reduce of gradients sends two thin factors of each matrix instead of the matrix.

python -m examples.powersgd
python -m examples.powersgd --rank=0     # plain all-reduce
"""

from absl import app, flags
from flax import nnx
import jax
import numpy as np
import optax
from sklearn import datasets

import decjax

WORKERS = flags.DEFINE_integer("workers", 4, "Number of workers, one device each.")
RANK = flags.DEFINE_integer("rank", 4, "Rank of the factors; 0: uncompressed all-reduce.")
STEPS = flags.DEFINE_integer("steps", 200, "Training steps.")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden1 = nnx.Linear(64, 256, rngs=rngs)
        self.hidden2 = nnx.Linear(256, 256, rngs=rngs)
        self.out = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden2(nnx.relu(self.hidden1(x)))))


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
    reducer = decjax.reduce.powersgd(rank=RANK.value) if RANK.value else decjax.reduce.mean()
    tx = decjax.synchronize(optax.adamw(1e-3), reducer)  # averages the gradients before AdamW

    def train_step(params, state, batch, *, phase):  # of one worker
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params, phase=phase)  # no psum: the reducer averages
        return optax.apply_updates(params, updates), state, loss

    take_step = decjax.make_step(train_step, workers, reducer)  # of all workers
    print(f"a worker sends {reducer.num_bytes(params, workers.num_workers)[0] / 1e6:.3f} MB per step")
    params = workers.stack(params)
    state = workers.jit(tx.init, (0,))(params)
    for step in range(STEPS.value):
        batch = workers.build(make_batch)
        params, state, loss_N = take_step(step, params, state, batch)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}  loss {loss_N.mean():.4f}")

    model = nnx.merge(graph, jax.tree.map(lambda x: x[0], params))  # all replicas are equal
    print(f"validation accuracy {(model(images[1500:]).argmax(axis=1) == labels[1500:]).mean():.3f}")


if __name__ == "__main__":
    app.run(main)
