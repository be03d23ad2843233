"""A deep learning recommendation model (DLRM) of clicks: numbers and categories of an example, and the chance that it is clicked.

    v_t = E_t[c_t],  v_0 = bottom(x)                         the vector of each category, and of the numbers
    logit = top(v_0, ⟨v_s, v_t⟩ for all s < t)               of a multilayer perceptron, as bottom is one

Each categorical feature t has a table E_t of a vector for each of its categories. Letters: F numbers of an example, T tables, V_t
rows of a table, D width of the vectors.

Reference: Naumov et al. 2019, arXiv 1906.00091.
"""

from collections.abc import Callable
import itertools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from decjax import registry
from decjax.options import Count, Natural


class ClickModel(NamedTuple):
    """A model of clicks as pure functions, of which the tables' part stands apart, since workers may share the tables out.

    A registered factory takes a model's options and returns `build(features, sizes) -> ClickModel`, which the task calls.

    Attributes:
        init: `init(key) -> params`, {"dense": those of the perceptrons, "tables": E_t by t, each {"embedding": [V_t, D]}}.
        lookup: `lookup(tables, indices_BxT) -> vectors_BxTxD`, from params["tables"].
        logits: `logits(dense, numbers_BxF, vectors_BxTxD) -> logits_B`, from params["dense"].
        sizes: V_t, rows of each table.
        width: D, of the vectors.
        outputs: `outputs(params, numbers_BxF, indices_BxT)`, what each layer puts out, and what is read of each table; see
            `contrib.compress.HasOutputs`.
    """

    init: Callable[[jax.Array], Any]
    lookup: Callable[[Any, jax.Array], jax.Array]
    logits: Callable[[Any, jax.Array, jax.Array], jax.Array]
    sizes: tuple[int, ...]
    width: int
    outputs: Callable[[Any, jax.Array, jax.Array], dict[str, jax.Array]]


Build = Callable[[int, tuple[int, ...]], ClickModel]  # (F, sizes of the tables), which the task knows


class Perceptron(nnx.Module):
    """Linear layers with ReLU between them, and behind the last one where `active` says so."""

    def __init__(self, sizes: list[int], active: bool, rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(inputs, out, rngs=rngs) for inputs, out in itertools.pairwise(sizes))
        self.active = active

    def outputs(self, x_BxF):
        """What each layer puts out, before any ReLU."""
        found = []
        for layer in self.layers:
            found.append(layer(jax.nn.relu(found[-1]) if found else x_BxF))
        return found

    def __call__(self, x_BxF):
        last = self.outputs(x_BxF)[-1]
        return jax.nn.relu(last) if self.active else last


class Dense(nnx.Module):
    """All of the model but its tables."""

    def __init__(self, features: int, tables: int, width: int, hidden: list[int], rngs: nnx.Rngs):
        self.bottom = Perceptron([features, *hidden, width], True, rngs)
        self.top = Perceptron([width + tables * (tables + 1) // 2, *hidden, 1], False, rngs)

    def top_inputs(self, own_BxD, vectors_BxTxD):
        """What the upper perceptron sees: the vector of the numbers, and the products of all pairs."""
        all_BxUxD = jnp.concatenate([own_BxD[:, None], vectors_BxTxD], axis=1)
        products_BxUxU = jnp.einsum("bud,bvd->buv", all_BxUxD, all_BxUxD)
        above, below = np.triu_indices(all_BxUxD.shape[1], 1)
        return jnp.concatenate([own_BxD, products_BxUxU[:, above, below]], axis=1)

    def outputs(self, numbers_BxF, vectors_BxTxD):
        """What each layer of both perceptrons puts out."""
        bottom = self.bottom.outputs(numbers_BxF)
        return {"bottom": bottom, "top": self.top.outputs(self.top_inputs(jax.nn.relu(bottom[-1]), vectors_BxTxD))}

    def __call__(self, numbers_BxF, vectors_BxTxD):
        return self.top(self.top_inputs(self.bottom(numbers_BxF), vectors_BxTxD))[:, 0]


class Embeddings(nnx.Module):
    """A table for each categorical feature, with initial values uniform in ±1/√V_t."""

    def __init__(self, sizes: tuple[int, ...], width: int, rngs: nnx.Rngs):
        self.tables = nnx.List(nnx.Embed(size, width, embedding_init=_uniform, rngs=rngs) for size in sizes)

    def __call__(self, indices_BxT):
        return jnp.stack([table(indices_BxT[:, t]) for t, table in enumerate(self.tables)], axis=1)


def _uniform(key, shape, dtype=jnp.float32, **unused):
    del unused  # Newer versions of Flax give a sharding.
    limit = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -limit, limit)


def _by_path(found: dict[str, list[jax.Array]], vectors_BxTxD: jax.Array) -> dict[str, jax.Array]:
    """Outputs by the path of their weight."""
    layers = {f"dense/{name}/layers/{k}/kernel": y_BxJ for name, own in found.items() for k, y_BxJ in enumerate(own)}
    return layers | {f"tables/{t}/embedding": vectors_BxTxD[:, t] for t in range(vectors_BxTxD.shape[1])}


@registry.register("model", "dlrm")
def dlrm(*, width: Count = 8, hidden: Count = 32, depth: Natural = 1) -> Build:
    """DLRM: a perceptron of the numbers, a table for each categorical feature, dot products of all pairs, and a perceptron of these.

    Args:
        width: D, of the vectors.
        hidden: units of each hidden layer of both perceptrons.
        depth: hidden layers of each.

    Reference: Naumov et al. 2019, arXiv 1906.00091.
    """

    def build(features, sizes):
        dense = lambda rngs: Dense(features, len(sizes), width, [hidden] * depth, rngs)
        tables = lambda rngs: Embeddings(sizes, width, rngs)
        graphs = {name: nnx.graphdef(nnx.eval_shape(lambda: made(nnx.Rngs(0)))) for name, made in (("d", dense), ("t", tables))}
        lookup = lambda tables, indices_BxT: nnx.merge(graphs["t"], nnx.State({"tables": tables}))(indices_BxT)

        def init(key):
            own = jax.random.split(key)
            parts = [nnx.to_pure_dict(nnx.state(made(nnx.Rngs(key)), nnx.Param)) for made, key in zip((dense, tables), own)]
            return {"dense": parts[0], "tables": parts[1]["tables"]}

        def outputs(params, numbers_BxF, indices_BxT):
            vectors_BxTxD = lookup(params["tables"], indices_BxT)
            return _by_path(nnx.merge(graphs["d"], nnx.State(params["dense"])).outputs(numbers_BxF, vectors_BxTxD), vectors_BxTxD)

        return ClickModel(
            init,
            lookup,
            lambda params, numbers_BxF, vectors_BxTxD: nnx.merge(graphs["d"], nnx.State(params))(numbers_BxF, vectors_BxTxD),
            tuple(sizes),
            width,
            outputs,
        )

    return build
