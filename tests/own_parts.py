"""One part of each kind, as a project outside of decjax would write them: a single file."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decjax import codecs, gossip, optim, reduce, registry, tasks
from decjax import topology as graphs
from decjax.channel import Channel


@registry.register("model", "line")
def line(*, degree: int = 2):
    """A polynomial y = Σ a_k x^k."""

    def init(key):
        return {"a_K": 0.1 * jax.random.normal(key, (degree + 1,))}

    def apply(params, x_B):
        return sum(a * x_B**k for k, a in enumerate(params["a_K"]))

    return init, apply


class Points(tasks.Task, name="points"):
    """Fits y = 1 + 2x."""

    models = ("line",)

    model: tuple
    noise: float = 0.1

    @property
    def metrics(self):
        return {"loss": ""}

    def init(self, key):
        return self.model[0](key)

    def measure(self, params, variables, examples):
        error_B = (self.model[1](params, examples["x"]) - examples["y"]) ** 2
        return {"loss": error_B}, jnp.ones_like(error_B)

    def loss(self, params, variables, batch, key):
        return self.measure(params, variables, batch)[0]["loss"].mean(), variables

    def examples(self, batch_size):
        row = jax.ShapeDtypeStruct((batch_size,), jnp.float32)
        return {"x": row, "y": row}

    def draw(self, rng, count):
        x = rng.uniform(-1, 1, count).astype(np.float32)
        return {"x": x, "y": (1 + 2 * x + self.noise * rng.normal(size=count)).astype(np.float32)}

    def load(self, num_workers, batch_size, seed):
        return tasks.Data(
            lambda worker, step: self.draw(np.random.default_rng((seed, worker, step)), batch_size),
            lambda limit: self.draw(np.random.default_rng(seed), 32),
            "points",
        )


@registry.register("topology", "wheel")
def wheel(num_workers):
    """Everyone sends half to the next worker."""
    W_NxN = (np.eye(num_workers) + np.roll(np.eye(num_workers), 1, axis=0)) / 2
    return graphs.from_matrices([W_NxN])


class Halves(codecs.Codec, name="halves"):
    """Multiples of 1/steps, as 16-bit numbers."""

    steps: int = 64

    def encode(self, x, state, key):
        return jnp.round(x * self.steps).astype(jnp.int16)

    def decode(self, message, shape, dtype):
        return (message / self.steps).astype(dtype).reshape(shape)

    def num_bytes(self, shape, dtype):
        return 2 * int(np.prod(shape))

    def delta(self, shape):
        return 0.9


@registry.register("mixer", "lazy", needs="any graph")
def lazy(topology: graphs.Topology, channel: Channel = Channel(), *, share: float = 0.5):
    """Plain gossip, partially applied."""
    return gossip.damp(gossip.exact(topology, channel), share)


class Twice(reduce.mean, name="twice"):
    """The mean, scaled."""

    exact = False

    scale: float = 2.0

    def reduce(self, grads, state, phase=0):
        averaged, state = super().reduce(grads, state, phase)
        return jax.tree.map(lambda g: self.scale * g, averaged), state


@registry.register("optimizer", "plain")
def plain(learning_rate, *, sign: bool = False):
    """x ← x − αg."""
    return optax.chain(optax.scale_by_sign() if sign else optax.identity(), optax.scale_by_learning_rate(learning_rate))


@registry.register("schedule", "constant")
def constant(steps, *, learning_rate: float = 0.1):
    """The same in every step."""
    return optax.constant_schedule(learning_rate)


class Solo(optim.Wrapping, name="solo"):
    """No worker communicates."""

    num_workers: int
    slower: float = 1.0

    def init(self, params):
        return self.optimizer.init(params)

    def update(self, grads, state, params, *, phase=None, received=None, **extra):
        updates, state = self.optimizer.update(grads, state, params)
        return jax.tree.map(lambda u: self.slower * u, updates), state

    def phase(self, step):
        return 0

    def num_bytes(self, params, phase):
        return np.zeros(self.num_workers)
