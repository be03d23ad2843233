"""A pipelined model takes the steps of the undivided one: every mesh layout, every schedule; and the executor's tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decjax import codecs, costmodel, mesh, models, pipeline, reduce, schedules
from decjax.channel import Channel
from decjax.contrib import layouts
from decjax.optim import AllReduce, clip_by_global_norm
from decjax.pipeline import executor
from decjax.pipeline import ticks as table_lib
from decjax.program import hlo
from decjax.train import engine
from decjax.train.step import Step
from tests import runs

pytestmark = pytest.mark.usefixtures("quick_compilation")
BATCH, M, CONTEXT, VOCABULARY, DEPTH, STEPS = 16, 4, 6, 16, 8, 20


@functools.cache
def model(tied=False, depth=DEPTH, heads=2):
    return models.decoder_lm(
        vocabulary=VOCABULARY, context=CONTEXT, width=8, hidden=8, heads=heads, depth=depth, tied=tied, divide=mesh.divide
    )


def init(model, key):
    """No parameter is zero or one, so that every one has an effect from the first step."""
    params = model.init(key)
    leaves, tree = jax.tree.flatten(params)
    keys = tree.unflatten(list(jax.random.split(jax.random.key(1), len(leaves))))
    return jax.tree.map(lambda x, key: x + 0.2 * jax.random.normal(key, x.shape), params, keys)


def tokens(step):
    """Counting from any start, in ones or in threes: a learnable sequence."""
    start_Bx1, stride_Bx1 = np.random.default_rng(step).integers(0, [[[VOCABULARY]], [[2]]], (2, BATCH, 1))
    return ((start_Bx1 + (1 + 2 * stride_Bx1) * np.arange(CONTEXT + 1)) % VOCABULARY).astype(np.int32)


def optimizer(norm):
    """Clips in every step, so that the norm matters."""
    return optax.chain(clip_by_global_norm(0.5, norm), optax.adamw(0.02, weight_decay=0.1))


@functools.cache
def start(tied, depth, runs=(), autoencoder=0):
    """The initial parameters of every layout, with autoencoders between groups of layers."""
    whole = completed(tied, depth, runs, autoencoder)
    return jax.tree.map(np.asarray, jax.jit(functools.partial(init, whole))(jax.random.key(0)))


def completed(tied, depth, runs, autoencoder):
    """The model, with autoencoders between groups of layers."""
    whole = model(tied, depth)
    return pipeline.divide(whole.parts, len(runs), layers=runs, autoencoder=autoencoder).complete(whole) if autoencoder else whole


@functools.cache
def one_device(tied, depth=DEPTH, runs=(), autoencoder=0):
    """Return (losses, final parameters) of one device that sees the whole batch."""
    whole, tx = completed(tied, depth, runs, autoencoder), optimizer(optax.global_norm)
    params = start(tied, depth, runs, autoencoder)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda params: whole.nll(params, batch, None).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for number in range(STEPS):
        params, opt_state, loss = step(params, opt_state, tokens(number))
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, params)


def source_of(model, S, batch_size, *, schedule, microbatches, remat, boundary=pipeline.Boundary(), **options):
    """Return the gradient of a model in S stages."""
    batch = jax.ShapeDtypeStruct((batch_size, CONTEXT + 1), jnp.int32)
    division = pipeline.divide(model.parts, S, **options)
    return pipeline.Staged(division, schedule=schedule, microbatches=microbatches, remat=remat, batch=batch, boundary=boundary)


def train(
    N,
    S,
    T,
    name,
    C=1,
    *,
    tied=False,
    remat=False,
    layers=(),
    microbatches=M,
    depth=DEPTH,
    simulate=False,
    autoencoder=0,
    fused=False,
):
    """Return (losses, final parameters of every worker, program) of a layout, with the library's own engine."""
    whole = model(tied, depth)
    workers = mesh.make_workers(N, stages=S, tensor=T, simulate=simulate, divided=whole.divided)
    if S > 1:
        options = dict(chunks=C, layers=layers, autoencoder=autoencoder, fused_embedding=fused)
        source = source_of(whole, S, BATCH // N, schedule=name, microbatches=microbatches, remat=remat, **options)
    else:
        source = pipeline.Whole(lambda params, variables, batch, key: (whole.nll(params, batch, key).mean(), variables))
    reducer = reduce.mean(channel=Channel(workers.axis))
    reducer = pipeline.with_tied_table(reducer, source.division, channel=Channel(workers.axis)) if S > 1 else reducer
    method = AllReduce(optimizer(source.norm), reducer, N)
    program = engine.compile_per_phase(Step(source.gradient, method, workers, 0))
    params = start(tied, depth, source.division.layers if autoencoder else (), autoencoder)
    state = runs.start(source.split(params), method, workers, source.init)
    losses = []
    for number in range(STEPS):
        batch = workers.build(lambda worker: tokens(number)[worker::N])
        due = program(0, state, batch, np.int32(number))
        state, loss = due.run(state, batch, np.int32(number))
        losses.append(workers.fetch_first(loss).mean())
    params = workers.fetch(state.params)
    if S > 1 and tied:
        np.testing.assert_array_equal(params["table_VxD"][:, 0], params["table_VxD"][:, -1])
    return losses, jax.jit(jax.vmap(source.join))(params), due


def check(losses, params, tied, depth=DEPTH):
    expected, final = one_device(tied, depth)
    assert expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=5e-5)
    # Adam divides by a root that may be tiny: elements may differ more than losses, but by less than a step.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, np.broadcast_to(y, x.shape), rtol=2e-2, atol=2e-3), params, final)


# Pairs of stages, tensor-parallel devices, schedules and options, instead of all combinations.
LAYOUTS = [
    (8, 1, 1, "1f1b", 1, dict(microbatches=2)),
    (4, 1, 2, "1f1b", 1, dict(tied=True)),
    (4, 2, 1, "gpipe", 1, dict(tied=True)),
    (2, 4, 1, "1f1b", 1, dict(remat=True)),
    (2, 4, 1, "interleaved", 2, dict(tied=True, remat=True)),
    (1, 8, 1, "1f1b", 1, dict(tied=True, remat=True, microbatches=16)),
    (1, 8, 1, "interleaved", 2, dict(microbatches=8, depth=16)),
    (2, 2, 2, "1f1b", 1, dict(tied=True, fused=True)),
    (2, 2, 2, "interleaved", 2, dict()),
    (1, 4, 2, "gpipe", 1, dict(tied=True, remat=True)),
    (2, 3, 1, "1f1b", 1, dict(tied=True, layers=(1, 3, 4))),
    (1, 2, 1, "interleaved", 2, dict(layers=(1, 3, 2, 2))),
]


@pytest.mark.parametrize(
    "N, S, T, name, C, options", LAYOUTS, ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value)
)
def test_every_layout_and_schedule_is_one_device(N, S, T, name, C, options):
    losses, params, _ = train(N, S, T, name, C, **options)
    check(losses, params, options.get("tied", False), options.get("depth", DEPTH))


def test_simulated_stages_take_the_same_steps():
    losses, params, _ = train(2, 2, 1, "interleaved", 2, tied=True, simulate=True, fused=True)
    check(losses, params, True)


@pytest.mark.parametrize(
    "S, T, name, C, runs, remat", [(2, 1, "interleaved", 2, (2, 2, 2, 2), False), (2, 2, "1f1b", 1, (5, 3), True)]
)
def test_autoencoders_between_stages_are_those_of_the_whole_model(S, T, name, C, runs, remat):
    """Trained jointly, with the gradients that one device computes; the learned directions are six of eight."""
    losses, params, _ = train(2, S, T, name, C, tied=True, remat=remat, layers=runs, autoencoder=6)
    expected, _ = one_device(True, runs=runs, autoencoder=6)
    assert expected[-1] < 0.7 * expected[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)  # with fewer directions, Adam amplifies rounding tenfold in three steps
    encoder_NxUxDxR = params["autoencoder"]["encoder_DxR"]
    before = start(True, DEPTH, runs, 6)["autoencoder"]["encoder_DxR"]
    assert np.abs(encoder_NxUxDxR[0] - before).max() > 0.05


def test_an_autoencoder_of_full_width_changes_nothing_at_first():
    whole = model()
    full = pipeline.divide(whole.parts, 4, autoencoder=8).complete(whole)
    params = full.init(jax.random.key(0))
    params["head"]["kernel"] = jax.random.normal(jax.random.key(1), params["head"]["kernel"].shape)
    expected, found = (of.nll(params, tokens(0), None) for of in (whole, full))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    narrow = pipeline.divide(whole.parts, 4, autoencoder=4).complete(whole)
    codes = narrow.init(jax.random.key(0))["autoencoder"]
    np.testing.assert_allclose(codes["decoder_RxD"] @ codes["encoder_DxR"], np.broadcast_to(np.eye(4), (3, 4, 4)), atol=1e-5)


# -- Tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize(
    "name, S, C", [("gpipe", 4, 1), ("1f1b", 4, 1), ("1f1b", 8, 1), ("interleaved", 2, 2), ("interleaved", 4, 3)]
)
def test_what_waits_in_a_slot_is_there_when_it_is_read(name, S, C, remat):
    """Execute the tables with labels instead of arrays."""
    schedule = schedules.make(name, S, 2 * S, C)
    table = table_lib.tabulate(schedule, lambda send: send.in_epilogue, remat)
    boxes = {kind: [[None] * table.slots[kind] for _ in range(S)] for kind in table.slots}
    for t, row in enumerate(schedule.ticks):
        at = {name: column[t] for name, column in table.columns.items()}
        for s, op in enumerate(row):
            if op is None:
                continue
            v, label = schedule.virtual(s, op.chunk), (op.microbatch, op.chunk)
            is_backward, is_last = op.kind == "B", v == schedule.num_virtual - 1
            assert at["op"][s] == (
                table_lib.BACKWARD if is_backward else table_lib.IDLE if remat and is_last else table_lib.FORWARD
            )
            assert (at["microbatch"][s], at["chunk"][s]) == label
            if (not is_backward or remat) and v > 0:
                assert boxes["input"][s][at["input"][s]] == label
            if is_backward and not is_last:
                assert boxes["gradient"][s][at["gradient"][s]] == label
            if not remat and is_last:
                if is_backward:
                    assert boxes["input"][s][at["input"][s]] == ("y", *label)
                else:
                    boxes["input"][s][at["input"][s]] = ("y", *label)
            if not remat and is_backward:
                assert boxes["kept"][s][at["kept"][s]] == label
            if not remat and not is_backward:
                boxes["kept"][s][at["kept"][s]] = label
        sends = {(send.kind, send.target): (send.microbatch, send.target_chunk) for send in schedule.sends[t]}
        arriving = {(send.kind, send.target): (send.in_epilogue, send.microbatch, send.target_chunk) for send in schedule.sends[t]}
        for s in range(S):
            for kind, name in (("F", "input"), ("B", "gradient")):
                slot = at[f"next_{name}"][s]
                assert (slot != table_lib.NOWHERE) == ((kind, s) in sends)
                if slot != table_lib.NOWHERE:
                    boxes[name][s][slot] = sends[kind, s]
                arrives = at[f"{kind} label"][s], at[f"{kind} microbatch"][s], at[f"{kind} chunk"][s]
                compress, *where = arriving.get((kind, s), (False, 0, 0))
                assert arrives == (table.labels.index((kind, compress)) if (kind, s) in arriving else table_lib.NOWHERE, *where)
        assert [label != table_lib.NOWHERE for label in at["sent"]] == [
            s in {send.source for send in schedule.sends[t]} for s in range(S)
        ]
        pairs = {(message.label[0], pair) for message in table.patterns[table.pattern[t]] for pair in message.pairs}
        assert pairs == {(send.kind, (send.source, send.target)) for send in schedule.sends[t]}


@pytest.mark.parametrize("remat", [True, False])
def test_slots_of_1f1b_do_not_grow_with_microbatches(remat):
    tables = [table_lib.tabulate(schedules.make("1f1b", 4, count), lambda send: False, remat) for count in (8, 64)]
    assert tables[0].slots == tables[1].slots and max(tables[0].slots.values()) <= 4
    assert len(tables[0].patterns) == len(tables[1].patterns)


# -- The compiled program ---------------------------------------------------------------------------------------------


def compiled(S, name, microbatches, C=1, *, remat=False, tied=False, boundary=pipeline.Boundary(), depth=DEPTH, autoencoder=0):
    """The gradient of one worker, one sequence per microbatch."""
    workers, whole = mesh.make_workers(1, stages=S), model(tied, depth)
    division = pipeline.divide(whole.parts, S, C, autoencoder=autoencoder)
    of = pipeline.Pipeline(division, schedules.make(name, S, microbatches, C), remat=remat, boundary=boundary)
    whole = division.complete(whole)
    params = jax.eval_shape(lambda: jax.tree.map(lambda x: x[None], division.split(whole.init(jax.random.key(0)))))
    batch = jax.ShapeDtypeStruct((1, S, microbatches, CONTEXT + 1), jnp.int32)
    return workers, workers.jit(lambda params, batch: of.gradient(params, of.init(batch), batch), (0, 0)).lower(
        params, batch
    ).compile()


@pytest.mark.parametrize("remat", [True, False])
def test_memory_of_1f1b_does_not_grow_with_microbatches(remat):
    few, many = (compiled(2, "1f1b", count, remat=remat)[1].memory_analysis().temp_size_in_bytes for count in (8, 64))
    activation = CONTEXT * 8 * 4  # one more per microbatch would be 56
    gpipe = compiled(2, "gpipe", 64, remat=remat)[1].memory_analysis().temp_size_in_bytes
    assert many - few < 16 * activation and gpipe - many > 48 * activation, (few, many, gpipe)


@pytest.mark.parametrize(
    "name, S, C, tied, autoencoder", [("1f1b", 4, 1, True, 0), ("interleaved", 2, 2, False, 0), ("interleaved", 2, 2, False, 3)]
)
def test_stages_send_an_activation_for_every_link_and_microbatch(name, S, C, tied, autoencoder):
    workers, program = compiled(S, name, M, C, tied=tied, autoencoder=autoencoder)
    sent = hlo.bytes_by_axis(program.as_text(), workers.sizes)
    activation = CONTEXT * (autoencoder or 8) * 4
    table = VOCABULARY * 8 * 4
    loss = S * 2 * (S - 1) / S * 4  # summed over stages
    assert sent["stage"] == 2 * M * (S * C - 1) * activation + (2 * table if tied else 0) + loss
    assert sent["worker"] == 0


@pytest.mark.parametrize("N, S, T, ratio", [(1, 2, 2, 1.0), (2, 2, 1, 1.0), (2, 2, 2, 0.5)])
def test_the_cost_model_tells_what_a_device_of_the_program_sends(N, S, T, ratio):
    """Between stages, uncompressed or coded to half of the bytes, and between workers."""
    whole, workers = model(), mesh.make_workers(N, stages=S, tensor=T, divided=model().divided)
    boundary = pipeline.coded(codecs.bfloat16(), codecs.bfloat16(), when="always") if ratio < 1 else pipeline.Boundary()
    source = source_of(whole, S, BATCH // N, schedule="1f1b", microbatches=M, remat=True, boundary=boundary)
    reducer = reduce.mean(channel=Channel(workers.axis))
    method = AllReduce(optax.sgd(0.1), reducer, N)
    state = runs.shapes(lambda: runs.start(source.split(whole.init(jax.random.key(0))), method, workers, source.init), workers)
    batch = jax.ShapeDtypeStruct((N, S, BATCH // N, CONTEXT + 1), jnp.int32, sharding=workers.stacked)
    program = engine.whole_step(Step(source.gradient, method, workers, 0), 0).lower(state, batch, np.int32(0)).compile()
    sent = {axis: sent_NxS / T for axis, sent_NxS in hlo.bytes_by_stage(program.as_text(), workers.sizes).items()}

    layout = layouts.DeviceLayout(N, S, T, microbatches=M, remat="stages")
    transformer = layouts.Transformer(DEPTH, 8, 2, VOCABULARY, CONTEXT, BATCH, hidden=8)
    link = costmodel.Link(0.0, 1e9)
    cluster = costmodel.Cluster("devices", N * S * T, 1, link, link)
    coded = layouts.Boundary(ratio)
    predicted = layouts.predict_layout(
        cluster,
        layouts.work(transformer, layout, 1e9),
        layout,
        layouts.Traffic(costmodel.all_reduce(N), backward=coded, forward=coded),
    )
    loss = 2 * (S - 1) / S * 4  # summed over stages
    np.testing.assert_allclose(sent["stage"] - loss, predicted.boundary_bytes)
    # The cost model leaves out the norms of queries and keys, and assumes replicated norms; the program, which packs all gradients,
    # sends parts of them.
    layers, width, head = DEPTH // S, 8, 4
    known, all_norms = layers * 2 * width + width, layers * 2 * (width + head) + width
    np.testing.assert_allclose(sent["worker"], predicted.workers_bytes + 2 * (N - 1) / N * 4 * (all_norms / T - known))


def test_parameters_are_not_kept_for_the_backward_pass():
    whole = model()
    division = pipeline.divide(whole.parts, 2)
    stage = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], division.split(whole.init(jax.random.key(0)))))
    weights = {x.shape[1:] for x in jax.tree.leaves(stage["blocks"]) if x.ndim > 3}
    kept = []

    def trace(params, batch):
        kept.extend(executor._Passes(division, params, batch, division.activation(1, CONTEXT), False).kept)
        return batch

    workers = mesh.make_workers(1, stages=2)
    jax.eval_shape(
        workers.map(trace, (0, 0)),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, 2, *x.shape), x.dtype), stage),
        jax.ShapeDtypeStruct((1, 2, M, 1, CONTEXT + 1), jnp.int32),
    )
    assert kept and weights and not weights & {x.shape for x in kept}


# -- What travels between stages --------------------------------------------------------------------------------------


def counting():
    """Messages of twice the value; counts sends and receives by (kind, compressed)."""

    def count(state, what):
        return state | {what: state.get(what, 0) + 1}

    kinds = [f"{way} {kind} {compress}" for way in ("sent", "received") for kind in "FB" for compress in (False, True)]

    def transfer(kind, compress):
        return pipeline.Transfer(
            lambda x, state, place: ({"double": 2 * x}, count(state, f"sent {kind} {compress}")),
            lambda message, state, place: (message["double"] / 2, count(state, f"received {kind} {compress}")),
        )

    class Counting(pipeline.Boundary):
        @property
        def transfers(self):
            return {(kind, compress): transfer(kind, compress) for kind in "FB" for compress in (False, True)}

        def init(self, like, schedule):
            return dict.fromkeys(kinds, jnp.int32(0))

        def compresses(self, send):
            return send.in_epilogue

    return Counting()


@pytest.mark.usefixtures("users_generator")
@pytest.mark.parametrize("S", [2, 4])
def test_epilogue_messages_are_compressed_once_each(S):
    workers, whole = mesh.make_workers(1, stages=S), model()
    division = pipeline.divide(whole.parts, S)
    of = pipeline.Pipeline(division, schedules.make("1f1b", S, 8), remat=True, boundary=counting())
    plain = pipeline.Pipeline(division, schedules.make("1f1b", S, 8), remat=True)
    params = workers.stack(division.split(start(False, DEPTH)))
    batch = workers.build(lambda worker: tokens(0))

    def compiled(gradient):
        return workers.jit(gradient, (0, 0)).lower(params, batch).compile()(params, batch)

    loss, grads, state = compiled(lambda params, batch: of.gradient(params, of.init(batch), batch))
    expected = compiled(lambda params, batch: plain.gradient(params, (), batch))
    jax.tree.map(np.testing.assert_array_equal, (loss, grads), expected[:2])  # doubling and halving are exact
    total = {what: int(np.sum(x)) for what, x in state.items()}
    for way in ("sent", "received"):
        assert total[f"{way} B True"] == S * (S - 1) // 2
        assert total[f"{way} B False"] == 8 * (S - 1) - S * (S - 1) // 2
        assert total[f"{way} F False"] == 8 * (S - 1) and total[f"{way} F True"] == 0


# -- Divisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied, autoencoder", [(False, 0), (True, 3)])
@pytest.mark.parametrize("S, C, layers", [(2, 1, ()), (4, 2, ()), (2, 2, (1, 3, 2, 2)), (3, 1, (5, 1, 2))])
def test_join_is_the_inverse_of_split_and_norms_agree(S, C, layers, tied, autoencoder):
    division = pipeline.divide(model(tied).parts, S, C, layers, autoencoder=autoencoder)
    params = jax.jit(functools.partial(init, division.complete(model(tied))))(jax.random.key(0))
    stacked = division.split(params)
    assert all(len(x) == S for x in jax.tree.leaves(stacked))
    jax.tree.map(np.testing.assert_array_equal, division.join(stacked), params)
    workers = mesh.make_workers(1, stages=S, simulate=True)
    norms = workers.jit(division.global_norm, (0,))(jax.tree.map(lambda x: x[None], stacked))
    np.testing.assert_allclose(norms, np.broadcast_to(optax.global_norm(params), (1, S)), rtol=1e-6)


@pytest.mark.parametrize(
    "make, complaint",
    [
        (lambda parts: pipeline.divide(parts, 3), "depth=8 layers do not divide evenly into stages=3; use depth=6 or 9"),
        (lambda parts: pipeline.divide(parts, 2, 8), "into stages=2 x chunks=8; use depth=16, or"),
        (lambda parts: pipeline.divide(parts, 2, 1, (3, 4)), "layers=3,4: must be 2 numbers.* add up to depth=8"),
        (lambda parts: pipeline.divide(parts, 2, autoencoder=9), "autoencoder=9 must be at least 0 and at most 8"),
        (lambda parts: pipeline.divide(parts, 2, fused_embedding=True), "fused_embedding=True needs a tied embedding"),
        (lambda parts: pipeline.divide(parts, 2, 1, (8, 0)), "at least 1 each"),
        (lambda parts: pipeline.divide(parts, 1), "stages=1 must be at least 2"),
        (lambda parts: pipeline.Pipeline(pipeline.divide(parts, 2), schedules.make("1f1b", 4, 4), remat=False), "is for"),
        (
            lambda parts: mesh.make_workers(4, stages=2, tensor=2),
            "workers=4 of stages=2 x tensor=2 but there are 8 devices; use workers=2",
        ),
        (lambda parts: mesh.make_workers(1, stages=16), "use stages x tensor <= 8"),
        (lambda parts: mesh.make_workers(1, stages=0), "stages=0"),
        (lambda parts: mesh.make_workers(1, tensor=0), "tensor=0"),
        (lambda parts: mesh.make_workers(2, tensor=2, simulate=True), "tensor=2 with simulate"),
    ],
)
def test_impossible_divisions_are_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        make(model().parts)
    assert "\n" not in str(error.value)
