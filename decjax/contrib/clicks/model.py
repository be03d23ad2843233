"""A deep learning recommendation model (DLRM) of clicks.

Letters: F numbers of an example, T tables, V_t rows of a table, D width of the vectors, U = T + 1.
"""

from collections.abc import Callable
import dataclasses
import functools
import itertools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from decjax import registry
from decjax.options import Count, Natural
from decjax.typing import PyTree


class Perceptron(nnx.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, sizes: list[int], rngs: nnx.Rngs):
        self.layers = nnx.List(nnx.Linear(inputs, out, rngs=rngs) for inputs, out in itertools.pairwise(sizes))

    def __call__(self, x_BxF: jax.Array) -> list[jax.Array]:
        """Return the output of each layer, before any ReLU."""
        outputs = []
        for layer in self.layers:
            outputs.append(layer(jax.nn.relu(outputs[-1]) if outputs else x_BxF))
        return outputs


class Dense(nnx.Module):
    """The whole model except its tables."""

    def __init__(self, features: int, tables: int, width: int, hidden: list[int], rngs: nnx.Rngs):
        self.bottom = Perceptron([features, *hidden, width], rngs)
        self.top = Perceptron([width + tables * (tables + 1) // 2, *hidden, 1], rngs)

    def __call__(self, numbers_BxF: jax.Array, vectors_BxTxD: jax.Array) -> dict[str, list[jax.Array]]:
        """Return the output of each layer of both perceptrons."""
        bottom = self.bottom(numbers_BxF)
        own_BxD = jax.nn.relu(bottom[-1])
        all_BxUxD = jnp.concatenate([own_BxD[:, None], vectors_BxTxD], axis=1)
        products_BxUxU = jnp.einsum("bud,bvd->buv", all_BxUxD, all_BxUxD)
        above, below = np.triu_indices(all_BxUxD.shape[1], 1)
        return {"bottom": bottom, "top": self.top(jnp.concatenate([own_BxD, products_BxUxU[:, above, below]], axis=1))}


@dataclasses.dataclass(frozen=True)
class ClickModel:
    """A DLRM as pure functions; those of the tables are separate, since workers may divide the tables among them.

    Attributes:
        features: F.
        sizes: V_t of each table.
        width: D.
        hidden: units of each hidden layer of both perceptrons.
    """

    features: int
    sizes: tuple[int, ...]
    width: int
    hidden: tuple[int, ...]

    def _module(self, rngs: nnx.Rngs) -> Dense:
        return Dense(self.features, len(self.sizes), self.width, [*self.hidden], rngs)

    @functools.cached_property
    def _graph(self) -> nnx.GraphDef:
        return nnx.graphdef(nnx.eval_shape(lambda: self._module(nnx.Rngs(0))))

    def init(self, key: jax.Array) -> PyTree:
        """Return {"dense": parameters of the perceptrons, "tables": E_t by t, each {"embedding": [V_t, D]}}.

        The initial values of a table are uniform in ±1/√V_t.
        """
        dense, tables = map(nnx.Rngs, jax.random.split(key))
        drawn = (jax.random.uniform(tables.params(), (V, self.width), jnp.float32, -(V**-0.5), V**-0.5) for V in self.sizes)
        return {
            "dense": nnx.to_pure_dict(nnx.state(self._module(dense), nnx.Param)),
            "tables": {t: {"embedding": table_VxD} for t, table_VxD in enumerate(drawn)},
        }

    def lookup(self, tables: PyTree, indices_BxT: jax.Array) -> jax.Array:
        """Return vectors_BxTxD of params["tables"]."""
        return jnp.stack([jnp.take(tables[t]["embedding"], indices_BxT[:, t], axis=0) for t in range(len(self.sizes))], axis=1)

    def _layers(self, dense: PyTree, numbers_BxF: jax.Array, vectors_BxTxD: jax.Array) -> dict[str, list[jax.Array]]:
        return nnx.merge(self._graph, nnx.State(dense))(numbers_BxF, vectors_BxTxD)

    def logits(self, dense: PyTree, numbers_BxF: jax.Array, vectors_BxTxD: jax.Array) -> jax.Array:
        """Return logits_B, with params["dense"]."""
        return self._layers(dense, numbers_BxF, vectors_BxTxD)["top"][-1][:, 0]

    def outputs(self, params: PyTree, numbers_BxF: jax.Array, indices_BxT: jax.Array) -> dict[str, jax.Array]:
        """Return the output of each layer and the rows that are read of each table; see `contrib.compress.HasOutputs`."""
        vectors_BxTxD = self.lookup(params["tables"], indices_BxT)
        layers = self._layers(params["dense"], numbers_BxF, vectors_BxTxD)
        dense = {f"dense/{name}/layers/{k}/kernel": y_BxJ for name, own in layers.items() for k, y_BxJ in enumerate(own)}
        return dense | {f"tables/{t}/embedding": vectors_BxTxD[:, t] for t in range(len(self.sizes))}


@registry.register("model", "dlrm")
def dlrm(*, width: Count = 8, hidden: Count = 32, depth: Natural = 1) -> Callable[[int, tuple[int, ...]], ClickModel]:
    """DLRM: a perceptron of the numbers, a table for each categorical feature, dot products of all pairs, and a perceptron of these.

        v_t = E_t[c_t],  v_0 = relu(bottom(x))                the vector of each category, and of the numbers
        logit = top(v_0, ⟨v_s, v_t⟩ for all s < t)

    The model is `build(features, sizes)`, which the task calls.

    Args:
        width: D, of the vectors.
        hidden: units of each hidden layer of both perceptrons.
        depth: hidden layers of each.

    Reference: Naumov et al. 2019, arXiv 1906.00091.
    """
    return lambda features, sizes: ClickModel(features, tuple(sizes), width, (hidden,) * depth)
