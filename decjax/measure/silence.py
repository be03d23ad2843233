"""Programs without their messages, to time what a worker computes.

Each collective is replaced by its own input, in the shape of its result. The program then takes the time of its computing, however
slow the links are; its result has no meaning.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from decjax import jaxprs, mesh

SUMS = {"psum": 1.0, "ppermute": 0.0, "all_gather": 0.5, "all_to_all": 0.5, "reduce_scatter": 0.5}  # collective -> hops ÷ a sum's


def silent(fn: Callable[..., Any], axis: mesh.Axis, sums: list[float] | None = None) -> Callable[..., Any]:
    """One worker's function `fn` with every collective replaced by its own input.

    Args:
        fn: to be called inside a mapped function, where axis names are defined; collectives in branches and loops are not replaced.
        axis: the worker axis.
        sums: a list to which, when the function is traced, the number of hops of every collective ÷ that of a sum is appended.
    """

    def run(*args):
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        program = closed.jaxpr
        values = dict(zip((*program.constvars, *program.invars), (*closed.consts, *jax.tree.leaves(args))))
        # A zero that the compiler cannot know; otherwise it would see that what arrives is what was sent, and decode it only once.
        zero = axis.index >> 20
        for equation in program.eqns:
            variables = [atom for atom in equation.invars if not isinstance(atom, jax.extend.core.Literal)]
            given = [values[variable] for variable in variables]
            if (name := equation.primitive.name) in SUMS:
                results = [_heard(x, variable.aval, zero) for x, variable in zip(given, equation.outvars, strict=True)]
                if sums is not None:
                    sums.append(SUMS[name])
            else:
                alone = program.replace(constvars=[], invars=variables, eqns=[equation], outvars=equation.outvars)
                results = jax.extend.core.jaxpr_as_fun(jaxprs.close(alone, []))(*given)
            values |= dict(zip(equation.outvars, results, strict=True))
        results = [atom.val if isinstance(atom, jax.extend.core.Literal) else values[atom] for atom in program.outvars]
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def _heard(x: jax.Array, like: Any, zero: jax.Array) -> jax.Array:
    """`x` repeated to the shape of another array, in rows that the compiler cannot know to be equal; otherwise it would decode only one."""
    if (shape := like.shape) == x.shape:
        return x + zero.astype(x.dtype)
    return jnp.resize(x, shape) + zero.astype(x.dtype) * jax.lax.broadcasted_iota(x.dtype, shape, 0)
