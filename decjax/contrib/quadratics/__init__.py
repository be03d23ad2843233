"""A sum of quadratics with known optimum, to test convergence: task "quadratics"."""

from decjax.contrib.quadratics.task import Examples, Quadratics

__all__ = ["Examples", "Quadratics"]
