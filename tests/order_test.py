"""Collectives of a program on CPU devices have one order, whether it was compiled or loaded from the compilation cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import mesh
from decjax.program import hlo, order

N = 4
RING = [(worker, (worker + 1) % N) for worker in range(N)]
pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def workers():
    return mesh.make_workers(N)


def total(x):
    return jax.lax.psum(x, mesh.WORKERS.name)


def passed_on(x):
    return jax.lax.ppermute(x, mesh.WORKERS.name, RING)


@jax.custom_vjp
def summed(x):
    return total(x - 1)


summed.defvjp(lambda x: (summed(x), None), lambda _, g: (g,))


def in_bodies(x, step):
    """Collectives in every kind of JAX body, none of which needs another's result."""

    @jax.jit
    def tick(carry, row):
        return passed_on(2 * carry + 1), row + 1

    found = {"flat": total(x.astype(jnp.bfloat16)), "bits": passed_on(x > 0), "small": passed_on(x.astype(jnp.int8))}
    found["scan"] = jax.lax.scan(tick, x, x, reverse=True, unroll=2)
    found["while"] = jax.lax.while_loop(lambda c: c[0] < step, lambda c: (c[0] + 1, passed_on(c[1])), (0, x))
    found["cond"] = jax.lax.cond(step > 2, total, lambda x: 2 * x, x)
    found["nested"] = jax.lax.scan(lambda c, _: (jax.lax.cond(step > 2, total, passed_on, c), ()), x, length=3)[0]
    found["remat"] = jax.checkpoint(lambda x: jax.lax.scan(tick, x, x)[0])(x)
    found["custom"] = summed(x)
    with hlo.counted(runs=3):
        found["last"] = jax.lax.all_gather(3 * x, mesh.WORKERS.name)
    return found


def flat(x, step):
    del step
    return [total(x), passed_on(x + 1), jax.lax.scan(lambda c, _: (c @ c, ()), x, length=3)[0]]


def compiled(fn):
    """Return its text and its integer results, which no compiler rounds."""
    x = workers().build(lambda worker: np.random.default_rng(worker).integers(-9, 9, (8, 8)).astype(np.float32))
    program = workers().jit(fn, (0, None)).lower(x, 3).compile()
    return program.as_text(), jax.tree.map(np.asarray, program(x, 3))


def test_bodies_wait_for_what_is_sent_before_them_and_bits_stay(monkeypatch):
    text, found = compiled(in_bodies)
    assert not hlo.unordered(text)
    assert 'runs=3/all_gather"' in text  # scopes remain: bytes are counted by them
    monkeypatch.setattr(order, "in_order", lambda fn: fn)
    text, expected = compiled(in_bodies)
    assert len(hlo.unordered(text)) > 6
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, expected)


def test_a_program_without_collectives_in_bodies_is_left_alone(monkeypatch):
    def instructions(text):
        return [line.split(", metadata")[0] for line in text.splitlines() if " = " in line]

    text, _ = compiled(flat)
    monkeypatch.setattr(order, "in_order", lambda fn: fn)
    assert instructions(text) == instructions(compiled(flat)[0])


PROGRAM = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%a, %b)
}

%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[], f32[8]) parameter(0)
  %x.1 = f32[8] get-tuple-element(%arg), index=1
  %i.1 = s32[] get-tuple-element(%arg), index=0
  %sent.1 = f32[8] collective-permute(%x.1), source_target_pairs={{0,1},{1,0}}
  ROOT %next = (s32[], f32[8]) tuple(%i.1, %sent.1)
}

ENTRY %main (x: f32[8], y: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %y = f32[8] parameter(1)
  %zero = s32[] constant(0)
  %sum = f32[8] all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
  %other = f32[8] all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  %both = (f32[8], f32[8]) tuple(%sum, %x)
  %one = f32[8] get-tuple-element(%both), index=INDEX
  %start = (s32[], f32[8]) tuple(%zero, %one)
  %loop = (s32[], f32[8]) while(%start), condition=%test, body=%body
  %received = f32[8] get-tuple-element(%loop), index=1
  ROOT %last = f32[8] all-gather(%received), replica_groups={{0,1}}, dimensions={0}
}
"""


@pytest.mark.parametrize("index, found", [(0, [("other", "loop")]), (1, [("sum", "loop"), ("other", "loop")])])
def test_the_checker_follows_elements_of_tuples_and_lets_collectives_beside_each_other_be(index, found):
    assert hlo.unordered(PROGRAM.replace("INDEX", str(index))) == found
