"""Programs without their messages: what a worker computes by itself.

A collective gives the worker what it has put in, in the shape of what would arrive. So a program takes the time that computing
takes, whatever the links are like; its result means nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from decjax import mesh

SUMS = {"psum": 1.0, "ppermute": 0.0, "all_gather": 0.5, "all_to_all": 0.5, "reduce_scatter": 0.5}  # collective -> of a sum's hops


def silent(fn: Callable[..., Any], axis: mesh.Axis, sums: list[float] | None = None) -> Callable[..., Any]:
    """`fn` of one worker, in which the worker hears itself.

    Args:
        fn: to be called inside a mapped function, where axis names are known; collectives in branches and loops are left alone.
        axis: the worker axis.
        sums: gets, when the function is traced, the hops of every collective ÷ those of a sum.
    """

    def run(*args):
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        program = closed.jaxpr
        values = dict(zip((*program.constvars, *program.invars), (*closed.consts, *jax.tree.leaves(args))))
        # Zero, which the compiler does not know: else it would see that what arrives is what was sent, and decode one of them.
        zero = axis.index >> 20
        for equation in program.eqns:
            variables = [atom for atom in equation.invars if not isinstance(atom, jax.extend.core.Literal)]
            given = [values[variable] for variable in variables]
            if (name := equation.primitive.name) in SUMS:
                results = [_heard(x, variable.aval.shape, zero) for x, variable in zip(given, equation.outvars, strict=True)]
                if sums is not None:
                    sums.append(SUMS[name])
            else:
                alone = program.replace(constvars=[], invars=variables, eqns=[equation], outvars=equation.outvars)
                results = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(alone, []))(*given)
            values |= dict(zip(equation.outvars, results, strict=True))
        results = [atom.val if isinstance(atom, jax.extend.core.Literal) else values[atom] for atom in program.outvars]
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def _heard(x: jax.Array, shape: tuple[int, ...], zero: jax.Array) -> jax.Array:
    """`x` in another shape, as rows of which the compiler does not know that they are equal: else it would decode one of them."""
    if shape == x.shape:
        return x + zero.astype(x.dtype)
    return jnp.resize(x, shape) + zero.astype(x.dtype) * jax.lax.broadcasted_iota(x.dtype, shape, 0)
