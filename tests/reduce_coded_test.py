"""Reducers of coded messages against dense NumPy references, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import codecs, reduce
from decjax.channel import Channel
from decjax.contrib.demo import Demo
from decjax.contrib.gravac import gravac
from decjax.program import hlo
from tests.reducers import (
    MODES,
    STEPS,
    DenseShards,
    N,
    Runner,
    all_close,
    assert_equal_replicas,
    flat,
    gradients,
    mean_of,
    workers,
    x64,
)
from tests.stand_ins import dense_top, dithered, one_bit, top

CODES = {"top": (top(7), dense_top(7)), "one bit": (one_bit(), lambda x: np.abs(x).mean() * np.where(x >= 0, 1, -1))}
residual, momentum, ef21, none = (getattr(codecs.feedback, name) for name in ("residual", "momentum", "ef21", "none"))
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("name", CODES)
@x64
def test_coded_is_the_dense_reference(name, decay, mode):
    """x = βe + g; averaged = mean C(x); e = x − C(x), of all arrays packed together; with β = 1, Σ sent + e = Σ g."""
    codec, code = CODES[name]
    run = Runner(functools.partial(reduce.coded, codec=codec, error=functools.partial(residual, decay=decay), form="gather"), mode)
    e = sent = 0.0
    for step in range(STEPS):
        out = run(gradients(step))
        assert_equal_replicas(out)
        x = decay * e + flat(gradients(step))
        messages = np.stack([code(row) for row in x])
        e, sent = x - messages, sent + messages
        np.testing.assert_allclose(flat(out)[0], messages.mean(axis=0), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(run.state.worker.memory[0].error, e, rtol=1e-6, atol=1e-9)
    if decay == 1:
        np.testing.assert_allclose(sent + e, sum(flat(gradients(step)) for step in range(STEPS)), atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CODES)
@x64
def test_shards_are_the_dense_reference(name, mode):
    """With error feedback on both sides, Σ averaged + e_owner + mean e = Σ mean g."""
    codec, code = CODES[name]
    run = Runner(functools.partial(reduce.coded, codec=codec, form="shards"), mode)
    size = flat(gradients(0)).shape[1]
    e = np.zeros((N, size + -size % N))
    dense, total = DenseShards(), 0.0
    for step in range(STEPS):
        out = run(gradients(step))
        assert_equal_replicas(out)
        x = e + np.pad(flat(gradients(step)), [(0, 0), (0, -size % N)])
        sent, averaged = dense(x, code)
        e, total = x - sent, total + averaged
        np.testing.assert_allclose(flat(out)[0], averaged[:size], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(np.asarray(run.state.worker.memory[0].error).reshape(N, -1), e, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(run.state.owner.memory[0].error, dense.owner, rtol=1e-6, atol=1e-9)
    expected = sum(flat(gradients(step)).mean(axis=0) for step in range(STEPS))
    np.testing.assert_allclose((total + dense.owner.ravel() + e.mean(axis=0))[:size], expected, atol=1e-9)
    assert np.abs(total[:size] - expected).max() > 0.3, "without the errors nothing would be tested"


@pytest.mark.parametrize("form", ["gather", "shards"])
@x64
def test_ef21_finds_what_stays(form):
    """The estimate of a constant mean becomes exact, though every message is a few of its values."""
    run = Runner(functools.partial(reduce.coded, codec=top(7), error=ef21, form=form))
    errors = []
    for _ in range(STEPS):
        out = run(gradients(0))
        assert_equal_replicas(out)
        errors.append(np.abs(flat(out) - flat(mean_of(gradients(0)))).max())
    assert errors[0] > 0.5 and errors[-1] < 1e-9


@pytest.mark.parametrize("form", ["gather", "shards"])
@x64
def test_momentum_is_taken_before_anything_is_lost(form):
    """Σ averaged + memory of owners + mean memory of workers = Σ mean v."""
    run = Runner(functools.partial(reduce.coded, codec=top(7), error=functools.partial(momentum, beta=0.5), form=form))
    v = expected = total = 0.0
    for step in range(STEPS):
        total += flat(run(gradients(step)))[0]
        v = 0.5 * v + flat(gradients(step)).mean(axis=0)
        expected += v
    kept = np.asarray(run.state.worker.memory[0].error).mean(axis=0).ravel()
    kept = kept + (np.asarray(run.state.owner.memory[0].error).ravel() if form == "shards" else 0)
    np.testing.assert_allclose(total + kept[: total.size], expected, atol=1e-9)


@pytest.mark.parametrize("storage", [None, codecs.make("int8")], ids=["in full", "in 8 bits"])
def test_errors_of_shards_stay_bounded(storage):
    """Over 3,000 steps, on both sides."""
    w = workers("simulated")
    memory = functools.partial(residual, storage=storage)
    reducer = reduce.coded(codec=one_bit(), error=memory, form="shards", channel=Channel(w.axis))
    like = {"w": jnp.ones(64)}

    def length(side):
        error = side.memory[0].error
        return jnp.linalg.norm(error) if storage is None else jnp.abs(error["scales"]).max()

    def worker(worker_key):
        def step(state, t):
            _, state = reducer.reduce({"w": 0.3 + jax.random.normal(jax.random.fold_in(worker_key, t), (64,))}, state)
            return state, jnp.stack([length(state.worker), length(state.owner)])

        return jax.lax.scan(step, reducer.init(like), jnp.arange(3000))[1]

    norms_NxTx2 = np.asarray(w.jit(worker, in_axes=(0,))(jax.random.split(jax.random.key(0), N)))
    early, late = norms_NxTx2[:, 100:600].mean(axis=(0, 1)), norms_NxTx2[:, 2500:].mean(axis=(0, 1))
    assert (late < 1.2 * early).all() and (early > 0).all(), (early, late)


@pytest.mark.parametrize("form", ["gather", "shards"])
def test_unbiased_codes_need_no_memory(form):
    run = Runner(functools.partial(reduce.coded, codec=dithered(), error=none, form=form), dtype=np.float32)
    outs = [run(gradients(0)) for _ in range(400)]
    assert not any(memory.error for memory in run.state.worker.memory)
    all_close(jax.tree.map(lambda *x: np.mean(x, axis=0), *outs), mean_of(gradients(0)), atol=0.12)


def test_unbiased_codes_with_a_memory_are_contracted():
    """The errors of a codec with ω = 9, which could grow, are all delivered in the end."""
    codec = codecs.make("randomk", fraction=0.1, unbiased=True)
    run = Runner(functools.partial(reduce.coded, codec=codec, form="gather"), dtype=np.float32)
    sent = sum(flat(run(gradients(0)))[0] for _ in range(200)) / 200
    np.testing.assert_allclose(sent, flat(gradients(0)).mean(axis=0), atol=0.5)


def test_draws_follow_the_seed():
    runs = [
        Runner(functools.partial(reduce.coded, codec=dithered(), error=none), dtype=np.float32, seed=seed) for seed in (0, 0, 1)
    ]
    outs = [flat(run(gradients(0))) for run in runs]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert (outs[0] != outs[2]).any()


@pytest.mark.parametrize("form", ["gather", "shards"])
@x64
def test_matrices_too_small_for_a_codec_travel_as_values(form):
    """Rank 3 makes "w" smaller, but neither the thin matrix nor vectors, which are sent uncompressed."""
    rng = np.random.default_rng(0)
    grads = {"w": rng.normal(size=(N, 40, 16)), "thin": rng.normal(size=(N, 2, 32)), "bias": rng.normal(size=(N, 5))}
    run = Runner(functools.partial(reduce.coded, codec=codecs.make("low_rank", rank=3), form=form), like=grads)
    sent = 0.0
    for step in range(30):
        out = run(grads)
        assert_equal_replicas(out)
        sent = sent + out["w"][0]
        for name in ("thin", "bias"):
            np.testing.assert_allclose(out[name][0], grads[name].mean(axis=0), atol=1e-12)
    assert np.abs(sent / 30 - grads["w"].mean(axis=0)).max() < 0.4 < np.abs(out["w"][0] - grads["w"].mean(axis=0)).max()
    measured_N = hlo.bytes_sent(run.program(0).as_text(), N)
    np.testing.assert_allclose(run.reducer.num_bytes(run.like, N), measured_N, rtol=1e-12)


def memory_of(state):
    return (state.worker, state.owner) if isinstance(state, reduce.CodedState) else (state.error, state.owner_error, state.codec)


MAKERS = {
    "gathered": functools.partial(reduce.coded, codec=top(7), form="gather"),
    "shards": functools.partial(reduce.coded, codec=one_bit(), form="shards"),
    "ef21": functools.partial(reduce.coded, codec=top(7), form="shards", error=functools.partial(ef21, beta=0.5)),
    "8 bits": functools.partial(reduce.coded, codec=top(7), error=functools.partial(residual, storage=codecs.make("int8"))),
    "gravac": functools.partial(gravac, ladder=[top(9), top(4)], window=1),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_codes_recover_from_a_gradient_that_is_not_finite(name, bad):
    run, other = (Runner(MAKERS[name], dtype=np.float32) for _ in range(2))
    zeros = jax.tree.map(np.zeros_like, gradients(0))
    for step in range(6):
        if step == 3:
            poisoned = gradients(99)
            poisoned["a"][1, 2, 3] = bad
            before = jax.tree.map(np.asarray, memory_of(run.state))
            assert not np.isfinite(run(poisoned)["a"]).any()
            jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, memory_of(run.state)))
        if step == 4:
            run(zeros), other(zeros)
        all_close(run(gradients(step)), other(gradients(step)), rtol=0, atol=0)


def test_a_message_that_overflows_leaves_all_memory_as_it_was():
    """1e6 is finite, but infinite in float16, which is contractive below 65504."""

    class Half(codecs.WrappedCodec):
        def delta(self, shape):
            return 0.99

    run = Runner(functools.partial(reduce.coded, codec=Half(codecs.make("float16")), form="shards"), dtype=np.float32)
    run(gradients(0))
    before = jax.tree.map(np.asarray, memory_of(run.state))
    assert not np.isfinite(run(jax.tree.map(lambda x: 1e6 * x, gradients(1)))["a"]).any()
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, memory_of(run.state)))


@pytest.mark.parametrize(
    "name, factory", [("momentum", functools.partial(momentum, beta=0.5)), ("ef21", functools.partial(ef21, beta=0.5))]
)
def test_a_memory_by_name_is_that_of_its_factory(name, factory):
    options = dict(codec="topk(fraction=0.2)", form="gather")
    named = Runner(functools.partial(reduce.coded, error=name, momentum=0.5, **options), dtype=np.float32)
    built = Runner(functools.partial(reduce.coded, error=factory, **options), dtype=np.float32)
    for step in range(3):
        jax.tree.map(np.testing.assert_array_equal, named(gradients(step)), built(gradients(step)))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: reduce.coded(codec=codecs.make("sign")), "codec 'sign' is neither contractive nor unbiased"),
        (lambda: reduce.coded(codec=codecs.make("bounded")), "codec 'bounded' has messages of varying size, so .*use 'int8' or"),
        (lambda: reduce.coded(codec=top(3), error=none), "codec 'top' is biased, and without a memory its errors would add up"),
        (
            lambda: reduce.coded(codec=top(3), error=functools.partial(residual, decay=0.0)),
            "decay=0.0 must be more than 0 and at most 1",
        ),
        (lambda: reduce.coded(error="memory"), "error='memory' is unknown; use one of residual, momentum, ef21, none"),
        (
            lambda: reduce.coded(error="none", storage="int8"),
            "storage='int8' has no effect with error='none'; .* use error='residual' or",
        ),
        (lambda: reduce.coded(error="ef21", decay=0.9), "decay=0.9 has no effect with error='ef21'; .* use error='residual'"),
        (lambda: Demo(momentum=0.5), "momentum=0.5 has no effect with error='residual'; .* use error='momentum' or"),
        (lambda: reduce.coded(codec="int8(block=8,block=16)"), "option block is given twice; leave one out"),
        (lambda: reduce.coded(codec=top(3), form="ring"), "form='ring' is unknown; use one of auto, gather, shards"),
        (
            lambda: reduce.coded(codec=codecs.make("int8"), form="gather").num_bytes({"w": jnp.ones(10**4)}, 8),
            "'int8' in form 'gather' sends .* plain all-reduce among 8 workers 70000; use form 'shards', which sends",
        ),
        (
            lambda: reduce.coded(codec=codecs.make("identity")).num_bytes({"w": jnp.ones(10**4)}, 8),
            "use a codec of fewer bytes, or",
        ),
        (
            lambda: reduce.coded(codec=top(3)).init({"w": jnp.ones(9)}),
            r"is not mapped here: call this in a function mapped over workers",
        ),
    ],
)
def test_impossible_codes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
