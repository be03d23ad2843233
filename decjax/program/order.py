"""One order for the collectives of a program on CPU devices, enforced by data dependencies.

All devices that run a program must start its collectives in the same order, or they deadlock. The compilers of GPUs and TPUs fix one
schedule for all devices. The CPU runtime starts whatever has its operands. It orders the collectives of one computation, and in a
program that was just compiled also those in the bodies of loops and branches; in a program loaded from the compilation cache it does
not order the latter. So here a loop or branch whose body has collectives waits for the collectives before it, and those after it wait
for it, by data that they need:

    waits      x becomes select(done, 1, x), where `done` is a boolean that depends on earlier results and is always false
    body       `done` is passed in as an operand, or with the carry of a loop, and returned depending on the body's collectives

What is sent does not change, and a program without such bodies is not changed at all. `optimization_barrier` would have no effect:
the CPU compiler drops it before it decides what depends on what.

Collectives that the compiler itself inserts for tensor-parallel groups cannot be ordered from here. Processes with such groups on CPU
devices therefore write no programs into the compilation cache.
"""

from collections.abc import Callable, Sequence
import functools

import jax
from jax.extend import core
import jax.numpy as jnp

from decjax.program import jaxpr


def in_order(fn: Callable) -> Callable:
    """Return the same function of one device, with its collectives forced to run in the order in which they were traced."""

    @functools.wraps(fn)
    def ordered(*args):
        traced = jaxpr.trace(fn, *args)
        program = traced.program
        if _has_bodies(program):
            results = _Order().run(program, traced.consts, jax.tree.leaves(args))
        else:
            results = jaxpr.piece(traced, program.invars, program.eqns, program.outvars)(args)
        shapes, tree = jax.tree.flatten(traced.result)
        return tree.unflatten(  # Results that are constants are Python numbers.
            x if isinstance(x, jax.Array) else jnp.asarray(x, like.dtype) for x, like in zip(results, shapes, strict=True)
        )

    return ordered


def _has_bodies(program: core.Jaxpr) -> bool:
    """Return whether a loop or a branch sends something."""
    return any(
        jaxpr.communicates(eqn) if eqn.primitive.name in _RUN else any(map(_has_bodies, core.jaxprs_in_params(eqn.params)))
        for eqn in program.eqns
    )


def _done(x: jax.Array) -> jax.Array:
    """Return a boolean computed from `x` that is always false, which the compiler cannot see."""
    first = jax.lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    first = first.real if jnp.iscomplexobj(first) else first
    narrow = first.dtype == bool or first.dtype.itemsize == 1
    bits = first.astype("uint8") if narrow else jax.lax.bitcast_convert_type(first, f"uint{8 * first.dtype.itemsize}")
    return (bits | 1) == 0


def _wait(x: jax.Array, done: jax.Array | None) -> jax.Array:
    return x if done is None or not _has_values(x) else jax.lax.select(done, jnp.ones_like(x), jnp.asarray(x))


def _has_values(x: jax.Array) -> bool:
    return jnp.size(x) > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


class _Order:
    """Runs equations, and keeps what the next collectives have to wait for."""

    def __init__(self, done: jax.Array | None = None):
        self.body = done  # `done` of the last loop or branch, or of what precedes the first; None: nothing to wait for.
        self.since: list[jax.Array] = []  # `done` of the collectives after it, which wait for it but not for each other.

    @property
    def done(self) -> jax.Array:
        """A boolean, always false, that depends on all collectives so far."""
        return functools.reduce(jnp.logical_or, self.since, jnp.zeros((), bool) if self.body is None else self.body)

    def run(self, program: core.Jaxpr, consts: Sequence[jax.Array], args: Sequence[jax.Array]) -> list[jax.Array]:
        return jaxpr.interpret(program, consts, args, self._apply)

    def _apply(self, eqn: core.JaxprEqn, args: list[jax.Array]) -> Sequence[jax.Array]:
        name, programs = eqn.primitive.name, list(core.jaxprs_in_params(eqn.params))
        if not jaxpr.communicates(eqn):
            return jaxpr.bind(eqn, args)
        if name in _RUN:
            self.body, *results = _RUN[name](eqn.params, self.done, args)
            self.since = []
            return results
        if name != "shard_map" and len(programs) == 1:  # jax.jit, jax.checkpoint, a function with a gradient of its own
            (consts,) = (getattr(param, "consts", ()) for param in eqn.params.values() if hasattr(param, "eqns"))
            return self.run(programs[0], consts, args)
        results = jaxpr.bind(eqn, [_wait(x, self.body) for x in args])
        self.since += [_done(x) for x in results if _has_values(x)]
        return results


def _run(closed, done, args):
    order = _Order(done)
    results = order.run(closed.jaxpr, closed.consts, args)
    return order.done, *results


def _scan(params, done, args):
    if "ft_in" in params:  # jax 0.12
        consts, carry, xs = map(list, params["ft_in"].update(args).unpack())
    else:
        n, m = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, carry, xs = args[:n], args[n:m], args[m:]

    def body(carry, xs):
        done, *results = _run(params["jaxpr"], carry[0], [*consts, *carry[1:], *xs])
        return (done, *results[: len(carry) - 1]), results[len(carry) - 1 :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(body, (done, *carry), xs, **options)
    return *carry, *ys


def _while(params, done, args):
    n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    tested, consts, carry = args[:n], args[n:m], args[m:]
    return jax.lax.while_loop(
        lambda carry: _run(params["cond_jaxpr"], carry[0], [*tested, *carry[1:]])[1],
        lambda carry: _run(params["body_jaxpr"], carry[0], [*consts, *carry[1:]]),
        (done, *carry),
    )


def _cond(params, done, args):
    index, *operands = args
    branches = [lambda done, *operands, closed=closed: _run(closed, done, operands) for closed in params["branches"]]
    return jax.lax.switch(index, branches, done, *operands)


_RUN = {"scan": _scan, "while": _while, "cond": _cond}
