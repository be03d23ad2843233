"""Schedules: of lines as accelerators print them, and the work in a program compiled here."""

import jax
import jax.numpy as jnp
import pytest

from decjax.contrib import overlap

N = 4
FORWARD, BACKWARD = (
    'metadata={op_name="jit(step)/jvp()/while/body/dot_general"}',
    'metadata={op_name="jit(step)/transpose(jvp())/while/body/dot_general"}',
)
FLOPS = 2 * 3 * 5 * 7  # of each of the products below
F = f"%f = f32[3,5]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {FORWARD}"
B = f"%g = f32[3,5]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {BACKWARD}"
PERMUTE = "f32[8]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}"
START = "%s = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}"
DONE = "%d = f32[8]{0} collective-permute-done(%s)"


def computation(head, *lines):
    return "\n".join([f"{head} {{", *(f"  {line}" for line in lines), "}", ""])


def read(*entry, below="", a="f32[3,7]{1,0}", b="f32[7,5]{1,0}"):
    """The schedule of a module whose entry computation has these lines."""
    parameters = (f"%a = {a} parameter(0)", f"%b = {b} parameter(1)", "%x = f32[8]{0} parameter(2)", "%p = pred[] parameter(3)")
    return overlap.read(
        "HloModule jit_step, is_scheduled=true, entry_computation_layout={()}\n\n"
        + below
        + "\n"
        + computation("ENTRY %main (a: f32[]) -> f32[]", *parameters, *entry),
        N,
    )


def places(schedule):
    """Return (asynchronous, inside, started, finished, hidden) of every transfer."""
    return [tuple(transfer[1:]) for transfer in schedule.in_flight]


@pytest.mark.parametrize(
    "entry, place",
    [
        ((START, F, B, DONE), (True, "", 0, 1, 1)),
        ((F, START, B, DONE), (True, "", 1, 1, 0.5)),
        ((START, F, DONE, B), (True, "", 0, 0, 0.5)),
        ((F, B, START, DONE), (True, "", 1, 1, 0)),
        ((F, f"%s = {PERMUTE}", B), (False, "", 1, 0, 0)),
        ((START + ', backend_config={"collective_backend_config":{"is_sync":true}}', F, B, DONE), (False, "", 0, 0, 0)),
    ],
    ids=[
        "around both",
        "around the backward pass",
        "around the forward pass",
        "behind both",
        "synchronous",
        "declared synchronous",
    ],
)
def test_what_stands_between_start_and_done(entry, place):
    assert places(read(*entry)) == [place]


def test_each_done_belongs_to_its_start():
    other = [line.replace("%s", "%s.1").replace("%d", "%d.1") for line in (START, DONE)]
    assert [place[-1] for place in places(read(START, F, other[0], B, other[1], DONE))] == [1, 0.5]


def test_a_collective_in_a_branch_is_waited_for():
    below = computation("%mix (q: f32[8]) -> f32[8]", "%q = f32[8]{0} parameter(0)", f"ROOT %r = {PERMUTE.replace('%x', '%q')}")
    below += computation("%stay (y: f32[8]) -> f32[8]", "ROOT %y = f32[8]{0} parameter(0)")
    conditional = "%c = f32[8]{0} conditional(%p, %x, %x), branch_computations={%stay, %mix}"
    assert places(read(F, conditional, B, below=below)) == [(False, "conditional", 1, 0, 0)]


def test_a_collective_in_an_asynchronous_wrapper():
    below = computation(
        "%wrapped (q: f32[8]) -> f32[2]",
        "%q = f32[8]{0} parameter(0)",
        "ROOT %r = f32[2]{0} reduce-scatter(%q), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add",
    )
    below = computation("%add (i: f32[], j: f32[]) -> f32[]", "%i = f32[] parameter(0)", "ROOT %j = f32[] parameter(1)") + below
    schedule = read(
        "%s = ((f32[8]{0}), f32[2]{0}) async-start(%x), calls=%wrapped", F, B, "%d = f32[2]{0} async-done(%s)", below=below
    )
    assert places(schedule) == [(True, "async-start", 0, 1, 1)]
    assert schedule.in_flight[0].collective.kind == "reduce-scatter"


@pytest.mark.parametrize("known", ["", ', backend_config={"known_trip_count":{"n":"6"}}'], ids=["TPU", "GPU"])
def test_the_body_of_a_loop_counts_as_often_as_it_runs(known):
    below = computation("%body (t: s32[]) -> s32[]", "ROOT %t = s32[] parameter(0)", F.replace("%f", "%h"))
    below += computation(
        "%condition (u: s32[]) -> pred[]",
        "%u = s32[] parameter(0)",
        "%n = s32[]{:T(128)} constant(6)",
        "ROOT %less = pred[]{:T(512)} compare(%u, %n), direction=LT",
    )
    loop = f"%w = s32[] while(%i), condition=%condition, body=%body, {FORWARD}{known}"
    schedule = read(F, START, loop, B, DONE, below=below)
    assert (schedule.forward_flops, schedule.backward_flops) == (7 * FLOPS, FLOPS)
    assert places(schedule) == [(True, "", 1 / 7, 1, 7 / 8)]


@pytest.mark.parametrize(
    "line, a, b, flops",
    [
        (
            '(f32[3,5]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
            '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
            "f32[3,7]{1,0}",
            "f32[7,5]{1,0}",
            FLOPS,
        ),
        (
            "f32[2,3,5]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}",
            "f32[2,3,7]{2,1,0}",
            "f32[2,7,5]{2,1,0}",
            2 * FLOPS,
        ),
        ("bf16[3,5]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_oi->bf", "bf16[3,7]{1,0}", "bf16[5,7]{1,0}", FLOPS),
        ("f32[3,5]{1,0} convolution(%a, %b), dim_labels=fb_io->bf", "f32[7,3]{1,0}", "f32[7,5]{1,0}", FLOPS),
        # Two batch axes of sizes 2 and 4, as a TPU compiler writes them.
        (
            "f32[2,4,3,5]{3,2,1,0} convolution(%a, %b), window={size=2x4 stride=1x3 lhs_dilate=2x4}, dim_labels=0b1f_0o1i->01bf",
            "f32[2,3,4,7]{3,2,1,0}",
            "f32[2,5,4,7]{3,2,1,0}",
            8 * FLOPS,
        ),
        (
            "f32[2,4,3,5]{3,2,1,0} convolution(%a, %b), window={size=2x4 stride=2x4 pad=1_1x3_3 lhs_dilate=1x3 rhs_reversal=1x1}, "
            "dim_labels=0b1f_01io->01bf",
            "f32[2,3,4,7]{3,2,1,0}",
            "f32[2,4,7,5]{3,2,1,0}",
            8 * FLOPS,
        ),
    ],
    ids=["cuBLAS", "batches", "transposed", "of a weight's gradient", "dilated", "padded"],
)
def test_products(line, a, b, flops):
    schedule = read(f"%f = {line}, {FORWARD}", B, f"%u = {line}", a=a, b=b)  # of neither pass: not counted
    assert schedule.forward_flops == flops


def test_the_work_of_a_program_compiled_here():
    """Three layers of 8 x 8 weights under `scan`, four rows: the backward pass takes two products for each forward one."""

    def loss(w_LxDxD, x_BxD):
        return jax.lax.scan(lambda x_BxD, w_DxD: (jnp.tanh(x_BxD @ w_DxD), None), x_BxD, w_LxDxD)[0].sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(jnp.ones((3, 8, 8)), jnp.ones((4, 8))).compile()
    assert overlap.read(compiled.as_text(), 1) == (3 * 2 * 4 * 8 * 8, 2 * 3 * 2 * 4 * 8 * 8, ())


def test_what_has_no_order_or_no_passes_is_refused():
    lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4)))
    with pytest.raises(ValueError, match="has no schedule"):
        overlap.read(lowered.as_text(dialect="hlo"), 1)
    with pytest.raises(ValueError, match="no matrix products in its forward or its backward pass"):
        overlap.read(lowered.compile().as_text(), 1)
