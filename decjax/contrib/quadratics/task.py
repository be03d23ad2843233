"""The task "quadratics": a sum of quadratics with known optimum, heterogeneity, noise and condition number, to test convergence.

    f_i(x) = ½ (x − x*)ᵀ H_i (x − x*) − ζ u_iᵀ (x − x*),    Σ u_i = 0,  mean ‖u_i‖² = 1
    f(x) = mean f_i(x) = ½ (x − x*)ᵀ H (x − x*)

H and H_i are diagonal: the eigenvalues of H are spaced geometrically from 1/κ to 1, those of H_i differ from them by less than two
thirds. The gradient of one example is ∇f_i(x) − σ ξ with E‖ξ‖² = 1. So ζ² is the mean of ‖∇f_i(x*)‖² over the workers, and σ²/B the
variance of the gradient of a batch of B.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax.options import Range
from decjax.tasks.task import Data, Task
from decjax.typing import PyTree


class Examples(NamedTuple):
    """Quadratics ½ Σ_k h_k (x_k − t_k)² of curvature h and target t; the validation example is f(x) − f(x*)."""

    curvature_BxP: PyTree
    target_BxP: PyTree


class Quadratics(Task, name="quadratics"):
    """Minimizes a sum of noisy quadratics, one per worker, whose optimum `x*` is known.

    Metrics are `f(x) − f(x*)`, as "loss", and the squared distance from `x*`.

    Attributes:
        model: None; the parameters are x.
        dimension: P, of x.
        heterogeneity: ζ, the root of the mean squared norm of the workers' gradients at the optimum.
        noise: σ, the standard deviation of the gradient of one example.
        condition: κ, the condition number of the Hessian of the sum.
    """

    evaluated_once = True

    model: None = None
    dimension: Annotated[int, Range(1, 10**6)] = 64
    heterogeneity: Annotated[float, Range(0, 1e6)] = 1.0
    noise: Annotated[float, Range(0, 1e6)] = 1.0
    condition: Annotated[float, Range(1, 1e6)] = 10.0

    @property
    def units(self) -> tuple[tuple[str, int], ...]:
        return (("x", -1),)

    @property
    def metrics(self) -> dict[str, str]:
        return {"loss": "", "distance": ""}

    def init(self, key: jax.Array) -> PyTree:
        return {"x": jnp.zeros(self.dimension)}

    def loss(self, params: PyTree, variables: PyTree, batch: Examples, key: jax.Array | None) -> tuple[jax.Array, PyTree]:
        return self.measure(params, variables, batch)[0]["loss"].mean(), variables

    def measure(self, params: PyTree, variables: PyTree, examples: Examples) -> tuple[dict[str, jax.Array], jax.Array]:
        away_BxP = params["x"][None] - examples.target_BxP
        loss_B = 0.5 * (examples.curvature_BxP * away_BxP**2).sum(axis=-1)
        return {"loss": loss_B, "distance": (away_BxP**2).sum(axis=-1)}, jnp.ones_like(loss_B)

    def examples(self, batch_size: int) -> Examples:
        return Examples(*[jax.ShapeDtypeStruct((batch_size, self.dimension), jnp.float32)] * 2)

    def load(self, num_workers: int, batch_size: int, seed: int) -> Data:
        dimension, heterogeneity, noise, condition = self.dimension, self.heterogeneity, self.noise, self.condition
        # The optimum does not depend on N, so that a run can continue with more workers.
        optimum_P = np.random.default_rng((seed, 0)).normal(size=dimension)
        rng = np.random.default_rng((seed, num_workers))
        curvature_P = np.geomspace(1 / condition, 1, dimension)
        spread_NxP = rng.uniform(-1 / 3, 1 / 3, (num_workers, dimension))
        curvature_NxP = curvature_P * (1 + spread_NxP - spread_NxP.mean(axis=0))
        u_NxP = rng.normal(size=(num_workers, dimension))
        u_NxP -= u_NxP.mean(axis=0)
        u_NxP /= max(1e-12, np.sqrt((u_NxP**2).sum(axis=1).mean()))

        def examples(curvature_P, pull_BxP):
            target_BxP = optimum_P + pull_BxP / curvature_P
            return Examples(np.broadcast_to(np.float32(curvature_P), target_BxP.shape), np.float32(target_BxP))

        def batch(worker, step):
            xi_BxP = np.random.default_rng((seed, num_workers, worker, step)).normal(size=(batch_size, dimension)) / dimension**0.5
            return examples(curvature_NxP[worker], heterogeneity * u_NxP[worker] + noise * xi_BxP)

        return Data(
            batch=batch,
            validation=lambda limit: examples(curvature_P, np.zeros((1, dimension))),
            fingerprint=f"quadratics({dimension=}, {heterogeneity=}, {noise=}, {condition=}), {seed=}",
        )
