"""The task "quadratics": a sum of quadratics whose optimum, heterogeneity, noise and condition are known, to check convergence.

    f_i(x) = ½ (x − x*)ᵀ H_i (x − x*) − ζ u_iᵀ (x − x*),    Σ u_i = 0,  mean ‖u_i‖² = 1
    f(x) = mean f_i(x) = ½ (x − x*)ᵀ H (x − x*)

H and H_i are diagonal: the eigenvalues of H are spaced geometrically from 1/κ to 1, those of H_i differ from them by less than two
thirds. The gradient of one example is ∇f_i(x) − σ ξ with E‖ξ‖² = 1. So ζ² is the mean of ‖∇f_i(x*)‖² over the workers, and σ²/B the
variance of the gradient of a batch of B.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decjax import registry
from decjax.tasks.task import Data, Metric, Task

MAX_DIMENSION = 10**6


class Examples(NamedTuple):
    """Examples, each a quadratic ½ Σ_k h_k (x_k − t_k)² of curvature h and target t; the one for validation is f(x) − f(x*)."""

    curvature_BxP: Any
    target_BxP: Any


@registry.register("task", "quadratics", models=(), evaluated_once=True)
def quadratics(
    model: None = None, *, dimension: int = 64, heterogeneity: float = 1.0, noise: float = 1.0, condition: float = 10.0
) -> Task:
    """Minimizes a sum of noisy quadratics, one per worker, whose optimum `x*` is known.

    Metrics are `f(x) − f(x*)`, as "loss", and the squared distance from `x*`.

    Args:
        model: None; the parameters are x.
        dimension: P, of x, at most 10⁶.
        heterogeneity: ζ ≥ 0, the root of the mean squared norm of the workers' gradients at the optimum.
        noise: σ ≥ 0, the standard deviation of the gradient of one example.
        condition: κ ≥ 1, the condition number of the Hessian of the sum.

    Raises:
        ValueError: if an option lies outside its range.
    """
    if not 1 <= dimension <= MAX_DIMENSION:
        raise ValueError(f"task dimension={dimension} must lie between 1 and {MAX_DIMENSION}")
    for name, value, least in (("heterogeneity", heterogeneity, 0), ("noise", noise, 0), ("condition", condition, 1)):
        if not least <= value <= 1e6:
            raise ValueError(f"task {name}={value} must lie between {least} and 1e6")

    def loss(params, variables, batch, key):
        return measure(params, variables, batch)[0]["loss"].mean(), variables

    def measure(params, variables, examples):
        away_BxP = params["x"][None] - examples.target_BxP
        loss_B = 0.5 * (examples.curvature_BxP * away_BxP**2).sum(axis=-1)
        return {"loss": loss_B, "distance": (away_BxP**2).sum(axis=-1)}, jnp.ones_like(loss_B)

    return Task(
        init=lambda key: {"x": jnp.zeros(dimension)},
        loss=loss,
        measure=measure,
        metrics={"loss": Metric(), "distance": Metric()},
        examples=lambda batch_size: Examples(*[jax.ShapeDtypeStruct((batch_size, dimension), jnp.float32)] * 2),
        units=(("x", -1),),
        load=functools.partial(_load, dimension=dimension, heterogeneity=heterogeneity, noise=noise, condition=condition),
    )


def _load(num_workers, batch_size, seed, dimension, heterogeneity, noise, condition) -> Data:
    # The optimum does not depend on N, so that a run may continue with more workers.
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
