"""Gossip in a hand-written optax loop: each worker fits a small MLP to data of its own and averages parameters with neighbors.

python -m examples.own_loop
python -m examples.own_loop --workers=4 --topology=ring
"""

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np
import optax

import decjax

WORKERS = flags.DEFINE_integer("workers", 8, "Number of workers, one device each.")
TOPOLOGY = flags.DEFINE_string("topology", "one_peer_exponential", "Communication graph.")
STEPS = flags.DEFINE_integer("steps", 300, "Training steps.")


def predict(params, x_BxD):
    return jnp.tanh(x_BxD @ params["up"]) @ params["down"]


def loss_fn(params, batch):
    x_BxD, y_B = batch
    return jnp.mean((predict(params, x_BxD) - y_B) ** 2)


def make_batch(worker, step):
    """Return the batch of one worker: inputs [16, 4], and the sine of their sums."""
    x_BxD = np.random.default_rng((worker, step)).normal(size=(16, 4)).astype(np.float32)
    return x_BxD, np.sin(x_BxD.sum(axis=1))


def main(argv):
    del argv
    jax.config.update("jax_num_cpu_devices", WORKERS.value)  # only for CPUs; accelerators keep their number of devices
    workers = decjax.make_workers(WORKERS.value)
    mixer = decjax.gossip.exact(decjax.topology.make(TOPOLOGY.value, workers.num_workers))
    tx = decjax.decentralize(optax.adamw(1e-2), mixer)

    def train_step(params, state, batch, *, phase):  # of one worker
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state, loss

    take_step = decjax.make_step(train_step, workers, mixer)  # of all workers

    initial = {"up": 0.5 * jax.random.normal(jax.random.key(0), (4, 32)), "down": jnp.zeros(32)}
    params = workers.stack(initial)  # arrays [N, ...], one copy per worker
    state = workers.jit(tx.init, (0,))(params)
    for step in range(STEPS.value):
        batch = workers.build(lambda worker: make_batch(worker, step))
        params, state, loss_N = take_step(step, params, state, batch)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}  loss {loss_N.mean():.4f}  worst worker {loss_N.max():.4f}")

    average = jax.tree.map(lambda x: x.mean(axis=0), params)
    print(f"averaged model: loss {loss_fn(average, make_batch(0, STEPS.value)):.4f}")


if __name__ == "__main__":
    app.run(main)
