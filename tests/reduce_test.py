"""Reducers against dense NumPy references written as the papers state them, in float64, and what any reducer promises."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lm
from decjax import codecs
from decjax import mesh
from decjax import reduce
from decjax.train import wire

N, STEPS = 4, 50
MODES = ("devices", "simulated")
SHAPES = {"a": (6, 5), "b": (6, 5), "c": (2, 3, 8), "bias": (5,), "scale": ()}
pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def workers(mode="devices"):
    return mesh.make_workers(N, simulate=mode == "simulated")


def gradients(step, seed=0):
    """Of every worker [N, ...]: a common part that changes slowly, and a part of one's own."""
    rng = np.random.default_rng((seed, step))
    common = np.random.default_rng(seed)
    return {name: np.cos(0.05 * step) * common.normal(size=shape) + 0.5 * rng.normal(size=(N, *shape))
            for name, shape in SHAPES.items()}


class Runner:
    """A reducer on stacked gradients, compiled once per phase."""

    def __init__(self, make, mode="devices", dtype=np.float64, like=None):
        w = self.workers = workers(mode)
        self.reducer = make(axis_name=w.axis_name)
        self.dtype, self.compiled = dtype, {}
        like = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], dtype), gradients(0) if like is None else like)
        self.like = like
        self.state = w.jit(self.reducer.init, in_axes=(0,))(w.stack(like))

    def program(self, phase):
        if phase not in self.compiled:
            stacked = self.workers.stack(self.like)
            run = self.workers.jit(functools.partial(self.reducer.reduce, phase=phase), in_axes=(0, 0))
            self.compiled[phase] = run.lower(stacked, self.state).compile()
        return self.compiled[phase]

    def __call__(self, grads_N, step=10**6):
        grads_N = jax.tree.map(lambda x: jax.device_put(np.asarray(x, self.dtype), self.workers.stacked), grads_N)
        out, self.state = self.program(reduce.due_phase(self.reducer, self.reducer.phase(step)))(grads_N, self.state)
        return jax.tree.map(np.asarray, out)


def x64(test):
    @functools.wraps(test)
    def with_x64(*args, **kwargs):
        with jax.enable_x64(True):
            return test(*args, **kwargs)
    return with_x64


def assert_equal_replicas(tree_N):
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)), tree_N)


def all_close(one, other, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), one, other)


def mean_of(grads_N):
    return jax.tree.map(lambda x: np.broadcast_to(x.mean(axis=0), x.shape), grads_N)


# -- PowerSGD ---------------------------------------------------------------------------------------------------------


VIEWS = {"a": (6, 5), "b": (6, 5), "c": (6, 8)}


class DensePowerSGD:
    """Algorithms 1 and 2 of arXiv 1905.13727, with every worker's own residual."""

    def __init__(self, state, rank):
        self.rank = rank
        self.q = [np.asarray(q[0], np.float64) for q in state.factor]
        self.e = {name: np.zeros((N, *view)) for name, view in VIEWS.items()}

    def __call__(self, grads_N):
        out = mean_of(grads_N)
        for k, (name, view) in enumerate(VIEWS.items()):
            a = grads_N[name].reshape(N, *view) + self.e[name]
            p, _ = np.linalg.qr(np.mean([m @ self.q[k] for m in a], axis=0))
            own = [m.T @ p for m in a]
            self.q[k] = np.mean(own, axis=0)
            self.e[name] = np.stack([m - p @ q.T for m, q in zip(a, own)])
            out[name] = np.broadcast_to((p @ self.q[k].T).reshape(SHAPES[name]), (N, *SHAPES[name]))
        return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rank", [1, 2])
@x64
def test_powersgd_is_the_dense_reference(mode, rank):
    run = Runner(functools.partial(reduce.powersgd, rank, gate=2.0), mode)
    dense = DensePowerSGD(run.state, rank)
    for step in range(STEPS):
        out = run(gradients(step))
        assert_equal_replicas(out)
        all_close(out, dense(gradients(step)), rtol=1e-6, atol=1e-9)
    for e, expected in zip(run.state.error, dense.e.values()):
        np.testing.assert_allclose(e, expected, rtol=1e-6, atol=1e-9)


@x64
def test_powersgd_of_full_rank_is_the_mean():
    run = Runner(functools.partial(reduce.powersgd, 8, gate=np.inf))
    for step in range(5):
        all_close(run(gradients(step)), mean_of(gradients(step)), atol=1e-12)


@pytest.mark.parametrize("wire_dtype", [None, "bfloat16", "float16"])
def test_powersgd_delivers_everything_in_the_end(wire_dtype):
    """Σ sent + e = Σ g on the mean over workers; narrow messages lose the rounding of their mean and nothing else."""
    run = Runner(functools.partial(reduce.powersgd, 1, gate=2.0, wire_dtype=wire_dtype), dtype=np.float32)
    sent, total = (jax.tree.map(lambda x: np.zeros(x.shape[1:]), gradients(0)) for _ in range(2))
    for step in range(STEPS):
        out = run(gradients(step))
        assert_equal_replicas(out)
        sent = jax.tree.map(lambda s, x: s + x[0], sent, out)
        total = jax.tree.map(lambda s, x: s + x.mean(axis=0), total, gradients(step))
    error = {name: np.asarray(e).mean(axis=0).reshape(SHAPES[name]) for name, e in zip(VIEWS, run.state.error)}
    for name in VIEWS:
        np.testing.assert_allclose(sent[name] + error[name], total[name], atol=1e-4 if wire_dtype is None else 0.2)
        assert np.abs(total[name] - sent[name]).max() > 0.3, "without the error nothing would be tested"


def test_powersgd_errors_stay_bounded():
    """Over 3,000 steps; the residual of the average, as in PyTorch's hook, would grow like √t."""
    w = workers("simulated")
    reducer = reduce.powersgd(1, gate=np.inf, axis_name=w.axis_name)
    common = jax.random.normal(jax.random.key(1), (4, 4))

    def worker(worker_key):
        def step(state, t):
            grads = {"w": common + jax.random.normal(jax.random.fold_in(worker_key, t), (4, 4))}
            _, state = reducer.reduce(grads, state)
            return state, jnp.linalg.norm(state.error[0])
        return jax.lax.scan(step, reducer.init({"w": common}), jnp.arange(3000))[1]

    norms_NxT = np.asarray(w.jit(worker, in_axes=(0,))(jax.random.split(jax.random.key(0), N)))
    early, late = norms_NxT[:, 100:600].mean(), norms_NxT[:, 2500:].mean()
    assert late < 1.1 * early, (early, late)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@x64
def test_powersgd_recovers_from_a_gradient_that_is_not_finite(bad):
    run, other = (Runner(functools.partial(reduce.powersgd, 2, gate=2.0)) for _ in range(2))
    for step in range(6):
        if step == 3:
            poisoned = gradients(99)
            poisoned["a"][1, 2, 3] = bad
            before = jax.tree.map(np.asarray, run.state)
            out = run(poisoned)
            assert not np.isfinite(out["a"]).any(), "what is not finite must not look as if it were"
            jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, run.state))
        all_close(run(gradients(step)), other(gradients(step)), rtol=0, atol=0)


@x64
def test_powersgd_recovers_from_gradients_of_zeros():
    run = Runner(functools.partial(reduce.powersgd, 2, gate=2.0))
    zeros = jax.tree.map(np.zeros_like, gradients(0))
    run(zeros)
    assert not any(np.asarray(q).any() for q in run.state.factor), "with Q = 0, A Q is zero for ever"
    rank_two = jax.tree.map(np.zeros_like, zeros)
    rng = np.random.default_rng(3)
    for name, (I, J) in VIEWS.items():
        product = rng.normal(size=(I, 2)) @ rng.normal(size=(2, J))
        rank_two[name] = np.broadcast_to(product.reshape(SHAPES[name]), rank_two[name].shape)
    all_close(run(rank_two), rank_two, atol=1e-9)


def test_powersgd_gates_arrays_that_would_not_get_smaller():
    like = {"square": (9, 9), "flat": (2, 40), "vector": (40,)}
    like = {name: jnp.zeros(shape) for name, shape in like.items()}
    assert len(reduce.powersgd(4).init(like).error) == 1  # (9 + 9) 4 < 81
    assert len(reduce.powersgd(1).init(like).error) == 2
    assert len(reduce.powersgd(4, gate=0.8).init(like | {"large": jnp.zeros((20, 20))}).error) == 1


@pytest.mark.parametrize("options, message", [
    (dict(rank=0), "rank=0: must be at least 1"), (dict(gate=0.0), "gate=0.0: must be positive"),
    (dict(rank=99), "rank=99 makes no array smaller: the smaller sides of the matrices are at most 6; use a rank of at most 3")])
def test_impossible_powersgd_is_refused(options, message):
    like = jax.tree.map(lambda x: x[0], gradients(0))
    with pytest.raises(ValueError, match=message):
        reduce.powersgd(**options).init(like)


# -- Coded messages ---------------------------------------------------------------------------------------------------


def top(k):
    """The k largest values of an array, and where they are."""
    def encode(x, state, key):
        _, index = jax.lax.top_k(jnp.abs(x.ravel()), min(k, x.size))
        return {"index": index.astype(jnp.uint16), "values": x.ravel()[index]}

    def decode(message, shape, dtype):
        return jnp.zeros(np.prod(shape, dtype=int), dtype).at[message["index"]].set(message["values"]).reshape(shape)

    return codecs.Codec(name=f"top {k}", encode=encode, decode=decode, 
                        num_bytes=lambda shape, dtype: min(k, int(np.prod(shape))) * (2 + jnp.dtype(dtype).itemsize),
                        traits=codecs.Traits(contractive=lambda shape: k / np.prod(shape)))


def one_bit():
    """Signs, eight to a byte, times the mean magnitude."""
    def encode(x, state, key):
        bits = jnp.pad(x.ravel() >= 0, (0, -x.size % 8)).reshape(-1, 8)
        return (bits * 2 ** jnp.arange(8)).sum(axis=1).astype(jnp.uint8), jnp.abs(x).mean()

    def decode(message, shape, dtype):
        packed, scale = message
        bits = (packed[:, None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
        return (scale * (2 * bits.astype(dtype) - 1)).ravel()[:np.prod(shape, dtype=int)].reshape(shape)

    return codecs.Codec(name="one bit", encode=encode, decode=decode,
                        num_bytes=lambda shape, dtype: -(-int(np.prod(shape)) // 8) + jnp.dtype(dtype).itemsize,
                        traits=codecs.Traits(contractive=lambda shape: 1 / np.prod(shape)))


def dithered():
    """Whole numbers, rounded up or down at random: unbiased, and too coarse to be contractive."""
    return codecs.Codec(name="dithered", encode=lambda x, state, key: jnp.floor(x + jax.random.uniform(key, x.shape)).astype(jnp.int8),
                        decode=lambda message, shape, dtype: message.astype(dtype), num_bytes=lambda shape, dtype: int(np.prod(shape)),
                        traits=codecs.Traits(unbiased=lambda size: float(size), random=True))


def numpy_top(k):
    def code(x):
        kept = np.zeros_like(x)
        largest = np.argsort(-np.abs(x.ravel()), kind="stable")[:k]
        kept.ravel()[largest] = x.ravel()[largest]
        return kept
    return code


CODES = {"top": (top(7), numpy_top(7)), "one bit": (one_bit(), lambda x: np.abs(x).mean() * np.where(x >= 0, 1, -1))}


residual, momentum, ef21, none = (getattr(codecs.feedback, name) for name in ("residual", "momentum", "ef21", "none"))
flat = lambda grads: np.concatenate([x.reshape(N, -1) for x in jax.tree.leaves(grads)], axis=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("name", CODES)
@x64
def test_coded_is_the_dense_reference(name, decay, mode):
    """x = βe + g; averaged = mean C(x); e = x − C(x), of all arrays joined; with β = 1, Σ sent + e = Σ g."""
    codec, code = CODES[name]
    run = Runner(functools.partial(reduce.coded, codec, feedback=functools.partial(residual, decay=decay), form="gather"), mode)
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


class DenseShards:
    """Every worker's vector as N shards, which workers code, and whose owners average them and code the mean."""

    def __init__(self):
        self.owner = 0.0

    def __call__(self, x, code):
        """Vectors of all workers [N, P] -> (what they sent [N, P], the average [P]); what owners keep is `owner`."""
        size = x.shape[1]
        sent = np.stack([[code(shard) for shard in row] for row in np.pad(x, [(0, 0), (0, -size % N)]).reshape(N, N, -1)])
        wanted = self.owner + sent.mean(axis=0)
        averaged = np.stack([code(shard) for shard in wanted])
        self.owner = wanted - averaged
        return sent.reshape(N, -1)[:, :size], averaged.ravel()[:size]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CODES)
@x64
def test_shards_are_the_dense_reference(name, mode):
    """With error feedback on both sides, Σ averaged + e_owner + mean e = Σ mean g."""
    codec, code = CODES[name]
    run = Runner(functools.partial(reduce.coded, codec, form="shards"), mode)
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
    """The estimate of a constant mean becomes exact, though every message is a few values of it."""
    run = Runner(functools.partial(reduce.coded, top(7), feedback=ef21, form=form))
    errors = []
    for _ in range(STEPS):
        out = run(gradients(0))
        assert_equal_replicas(out)
        errors.append(np.abs(flat(out) - flat(mean_of(gradients(0)))).max())
    assert errors[0] > 0.5 and errors[-1] < 1e-9


@pytest.mark.parametrize("form", ["gather", "shards"])
@x64
def test_momentum_is_taken_before_anything_is_lost(form):
    """Σ averaged + what owners and, on average, workers keep = Σ mean v."""
    run = Runner(functools.partial(reduce.coded, top(7), feedback=functools.partial(momentum, beta=0.5), form=form))
    v = expected = total = 0.0
    for step in range(STEPS):
        total += flat(run(gradients(step)))[0]
        v = 0.5 * v + flat(gradients(step)).mean(axis=0)
        expected += v
    kept = np.asarray(run.state.worker.memory[0].error).mean(axis=0).ravel()
    kept = kept + (np.asarray(run.state.owner.memory[0].error).ravel() if form == "shards" else 0)
    np.testing.assert_allclose(total + kept[:total.size], expected, atol=1e-9)


@pytest.mark.parametrize("storage", [None, codecs.make("int8")], ids=["in full", "in 8 bits"])
def test_errors_of_shards_stay_bounded(storage):
    """Over 3,000 steps, on both sides."""
    w = workers("simulated")
    memory = functools.partial(residual, storage=storage)
    reducer = reduce.coded(one_bit(), feedback=memory, form="shards", axis_name=w.axis_name)
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
    run = Runner(functools.partial(reduce.coded, dithered(), feedback=none, form=form), dtype=np.float32)
    outs = [run(gradients(0)) for _ in range(400)]
    assert not any(memory.error for memory in run.state.worker.memory)
    all_close(jax.tree.map(lambda *x: np.mean(x, axis=0), *outs), mean_of(gradients(0)), atol=0.12)


def test_unbiased_codes_with_a_memory_are_contracted():
    """What the codec would amplify, of ω = 9, arrives in the end all the same."""
    codec = codecs.make("randomk", fraction=0.1, unbiased=True)
    run = Runner(functools.partial(reduce.coded, codec, form="gather"), dtype=np.float32)
    sent = sum(flat(run(gradients(0)))[0] for _ in range(200)) / 200
    np.testing.assert_allclose(sent, flat(gradients(0)).mean(axis=0), atol=0.5)


def test_draws_follow_the_seed():
    runs = [Runner(functools.partial(reduce.coded, dithered(), feedback=none, seed=seed), dtype=np.float32) for seed in (0, 0, 1)]
    outs = [flat(run(gradients(0))) for run in runs]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert (outs[0] != outs[2]).any()


@pytest.mark.parametrize("form", ["gather", "shards"])
@x64
def test_matrices_too_small_for_a_codec_travel_as_values(form):
    """Rank 3 makes "w" smaller, and neither the thin matrix nor vectors, which arrive as they are."""
    rng = np.random.default_rng(0)
    grads = {"w": rng.normal(size=(N, 40, 16)), "thin": rng.normal(size=(N, 2, 32)), "bias": rng.normal(size=(N, 5))}
    run = Runner(functools.partial(reduce.coded, codecs.make("low_rank", rank=3), form=form), like=grads)
    sent = 0.0
    for step in range(30):
        out = run(grads)
        assert_equal_replicas(out)
        sent = sent + out["w"][0]
        for name in ("thin", "bias"):
            np.testing.assert_allclose(out[name][0], grads[name].mean(axis=0), atol=1e-12)
    assert np.abs(sent / 30 - grads["w"].mean(axis=0)).max() < 0.4 < np.abs(out["w"][0] - grads["w"].mean(axis=0)).max()
    measured_N = wire.bytes_sent(run.program(0).as_text(), N)
    np.testing.assert_allclose(run.reducer.num_bytes(run.like, N), measured_N, rtol=1e-12)


def memory_of(state):
    return (state.worker, state.owner) if isinstance(state, reduce.CodedState) else (state.error, state.owner_error, state.codec)


MAKERS = {
    "gathered": functools.partial(reduce.coded, top(7), form="gather"),
    "shards": functools.partial(reduce.coded, one_bit(), form="shards"),
    "ef21": functools.partial(reduce.coded, top(7), form="shards", feedback=functools.partial(ef21, beta=0.5)),
    "8 bits": functools.partial(reduce.coded, top(7), feedback=functools.partial(residual, storage=codecs.make("int8"))),
    "gravac": functools.partial(reduce.gravac, [top(9), top(4)], window=1)}


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
    """1e6 is finite, and infinite in float16, which is contractive below 65504."""
    half = dataclasses.replace(codecs.make("float16"), traits=codecs.Traits(contractive=lambda shape: 0.99))
    run = Runner(functools.partial(reduce.coded, half, form="shards"), dtype=np.float32)
    run(gradients(0))
    before = jax.tree.map(np.asarray, memory_of(run.state))
    assert not np.isfinite(run(jax.tree.map(lambda x: 1e6 * x, gradients(1)))["a"]).any()
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, memory_of(run.state)))


class DenseGravac:
    """The ladder as the module's docstring says, of top-k codes."""

    def __init__(self, ks, speed, window, threshold):
        self.codes = [lambda x: x, *map(numpy_top, ks)]
        self.speed, self.window, self.threshold = speed, window, threshold
        self.rung, self.settled, self.below, self.steps, self.e = 0, False, 0.0, 0, 0.0
        self.sums, self.shards = np.zeros(2), DenseShards()

    def __call__(self, g):
        x = self.e + g
        messages, averaged = self.shards(x, self.codes[self.rung])
        self.e = x - messages
        self.sums += (messages**2).sum(), (x**2).sum()
        self.steps += 1
        if self.steps % self.window == 0:
            gain = self.sums[0] / self.sums[1]
            score = self.speed[self.rung] * gain
            if self.rung and gain < self.threshold or not self.settled and self.rung and score <= self.below:
                self.rung, self.settled = self.rung - 1, True
            elif not self.settled and self.rung + 1 < len(self.codes):
                self.rung, self.below = self.rung + 1, score
            else:
                self.settled = True
            self.sums[:] = 0
        return averaged


@pytest.mark.parametrize("speed, threshold, last", [((1, 9, 81, 729), 0.0, 3), ((1, 9, 81, 729), 0.6, 1), ((1, 2, 2.1, 4), 0.0, 1)],
                         ids=["climbs", "falls back", "stops"])
@pytest.mark.parametrize("mode", MODES)
@x64
def test_gravac_is_the_dense_reference(mode, speed, threshold, last):
    ks = (15, 6, 4)  # Of 29 values in a shard.
    run = Runner(functools.partial(reduce.gravac, [top(k) for k in ks], window=4, speed=speed, threshold=threshold), mode)
    dense = DenseGravac(ks, speed, 4, threshold)
    padded = lambda grads: np.pad(flat(grads), [(0, 0), (0, 1)])  # 115 values are 4 shards of 29.
    used = np.zeros(4)
    for step in range(STEPS):
        used[dense.rung] += 1
        out = run(gradients(step))
        np.testing.assert_allclose(flat(out)[0], dense(padded(gradients(step)))[:-1], rtol=1e-6, atol=1e-9)
        assert_equal_replicas(out)
    assert np.asarray(run.state.rung).tolist() == [last] * N == [dense.rung] * N
    np.testing.assert_array_equal(run.reducer.usage(run.state), np.tile(used, (N, 1)))
    assert len(run.compiled) == 1


def test_gravac_climbs_the_default_ladder_and_falls_back_when_the_gain_drops():
    """All rungs keep a few large values; of normal values, a rung of 5 % above the default ones keeps a quarter of the energy."""
    defaults = [codecs.make(name.strip()) for name in lm.get_config().reducer.ladder.split(";")]
    rng = np.random.default_rng(0)
    like = {"w": np.zeros((N, 2048), np.float32)}
    run = Runner(functools.partial(reduce.gravac, [*defaults, codecs.make("topk", fraction=0.05)], window=4), like=like, dtype=np.float32)
    sent_on = np.array([run.reducer.num_bytes(run.like, N, rung)[0] for rung in run.reducer.phases])
    rungs, usage = [], [np.zeros(5)]
    for step in range(40):
        grads = {"w": rng.normal(size=(N, 2048)) * (1 if step >= 22 else 0.01)}
        if step < 22:
            grads["w"][:, ::128] += 10
        rungs.append(int(run.state.rung[0]))
        assert_equal_replicas(run(grads))
        usage.append(np.asarray(run.reducer.usage(run.state))[0])
    assert rungs[:20] == np.repeat(range(5), 4).tolist() and set(rungs[28:]) == {3}
    assert (np.diff(sent_on) < 0).all() and sent_on[3] < 0.15 * sent_on[0]
    np.testing.assert_array_equal(np.diff(usage, axis=0) @ sent_on, sent_on[rungs])


def test_gravac_delivers_everything_in_the_end():
    """Over climbing and falling back: Σ averaged + what owners and, on average, workers keep = Σ mean g."""
    run = Runner(functools.partial(reduce.gravac, [top(9), top(4)], window=5, threshold=0.7), dtype=np.float32)
    total = sum(flat(run(gradients(step)))[0] for step in range(30))
    assert (np.asarray(run.reducer.usage(run.state))[0] > 0).sum() > 1
    kept = np.asarray(run.state.error[0]).mean(axis=0).ravel() + np.asarray(run.state.owner_error[0]).ravel()
    expected = sum(flat(gradients(step)).mean(axis=0) for step in range(30))
    np.testing.assert_allclose(total + kept[:total.size], expected, atol=1e-4)


def test_gravac_sends_what_the_rung_in_use_declares():
    """The program holds all rungs as branches; its collectives add up to the declared bytes of all."""
    run = Runner(functools.partial(reduce.gravac, [codecs.make("int8"), top(3)]), dtype=np.float32)
    declared = sum(run.reducer.num_bytes(run.like, N, rung) for rung in run.reducer.phases)
    np.testing.assert_allclose(wire.bytes_sent(run.program(None).as_text(), N), declared, rtol=1e-12)
    assert not run.reducer.num_bytes(run.like, N, None).any()


@pytest.mark.parametrize("make, message", [
    (lambda: reduce.coded(codecs.make("sign")), "codec 'sign' is neither contractive nor unbiased"),
    (lambda: reduce.coded(codecs.make("bounded")), "codec 'bounded' has messages of varying size, .*use 'int8', or"),
    (lambda: reduce.coded(top(3), feedback=none), "codec 'top 3' is biased, and without a memory its errors would add up"),
    (lambda: reduce.coded(top(3), feedback=functools.partial(residual, decay=0.0)), r"decay=0.0 must lie in \(0, 1\]"),
    (lambda: reduce.coded(top(3), form="ring"), "form='ring' of coded messages is unknown; use one of auto, gather, shards"),
    (lambda: reduce.coded(codecs.make("int8"), form="gather").num_bytes({"w": jnp.ones(10**4)}, 8),
     "'int8' in form 'gather' sends .* plain all-reduce among 8 workers 70000; use form 'shards', which sends"),
    (lambda: reduce.coded(codecs.make("identity")).num_bytes({"w": jnp.ones(10**4)}, 8), "use a codec of fewer bytes, or"),
    (lambda: reduce.coded(top(3)).init({"w": jnp.ones(9)}), r"is not there: call this from a function mapped over workers"),
    (lambda: reduce.gravac([codecs.make("int4"), codecs.make("int8")]).num_bytes({"w": jnp.ones(10**4)}, 8),
     "GraVAC's rung 'int8' sends .*; use a ladder from the mildest"),
    (lambda: reduce.gravac([]), "needs a ladder of at least one codec"),
    (lambda: reduce.gravac([codecs.make("sign")]), "codec 'sign' is neither contractive"),
    (lambda: reduce.gravac([top(3)], window=0), "window=0 steps: must be at least 1"),
    (lambda: reduce.gravac([top(3)], threshold=2.0), "threshold=2.0: a gain, must lie between 0 and 1"),
    (lambda: reduce.gravac([top(3)], speed=(1.0,)), "needs 2 positive values")])
def test_impossible_codes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -- Reducers of reducers ---------------------------------------------------------------------------------------------


@x64
def test_start_at_leaves_the_later_reducer_alone_until_then():
    run = Runner(lambda **options: reduce.start_at(reduce.coded(top(7), **options), 3, reduce.mean(**options)))
    other = Runner(functools.partial(reduce.coded, top(7)))
    assert [run.reducer.phase(step) for step in range(5)] == [0, 0, 0, 1, 1] and run.reducer.phases == range(2)
    for step in range(6):
        expected = mean_of(gradients(step)) if step < 3 else other(gradients(step))
        all_close(run(gradients(step), step), expected, atol=1e-12)


def test_every_averages_in_every_third_step():
    reducer = reduce.every(reduce.start_at(reduce.powersgd(1), 1, reduce.mean()), 3)
    assert [reducer.phase(step) for step in range(9)] == [-1, -1, 0, -1, -1, 1, -1, -1, 1] and reducer.phases == range(-1, 2)
    grads = {"w": jnp.ones((9, 9))}
    state = reducer.init(grads)
    same, same_state = reducer.reduce(grads, state, reduce.LOCAL)
    assert same is grads and same_state is state and not reducer.num_bytes(grads, N, reduce.LOCAL).any()


def test_phases_of_a_ladder_pass_through():
    w = workers("simulated")
    reducer = reduce.every(reduce.start_at(reduce.gravac([top(3)], axis_name=w.axis_name), 1, reduce.mean()), 2)
    assert [reducer.phase(step) for step in range(5)] == [-1, 0, -1, None, -1] and reducer.phases == range(-1, 3)
    grads = {"w": jnp.ones(99)}
    state = w.jit(reducer.init, in_axes=(0,))(w.stack(grads))
    np.testing.assert_array_equal(reducer.usage(jax.tree.map(lambda x: x[0], state)), [0, 0, 0, 0])
    assert reducer.num_bytes(grads, N, 2)[0] == 3 * (2 * 3 * 6 + 8)


@pytest.mark.parametrize("make, message", [
    (lambda: reduce.every(reduce.mean(), 0), "every=0 steps: must be at least 1"),
    (lambda: reduce.start_at(reduce.powersgd(), -1, reduce.mean()), "start=-1: must be at least 0"),
    (lambda: reduce.due_phase(reduce.every(reduce.mean(), 2), None), r"2 phases: give update\(…, phase=")])
def test_impossible_reducers_of_reducers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -- Contract of every reducer ----------------------------------------------------------------------------------------

REDUCERS = {
    "mean": reduce.mean,
    "powersgd": functools.partial(reduce.powersgd, 2, gate=2.0),
    "powersgd after the mean": lambda **options: reduce.start_at(reduce.powersgd(2, gate=2.0, **options), 2, reduce.mean(**options)),
    "every third": lambda **options: reduce.every(reduce.start_at(reduce.coded(top(7), **options), 1, reduce.mean(**options)), 3),
    "powersgd, bfloat16": functools.partial(reduce.powersgd, 2, gate=2.0, wire_dtype="bfloat16"),
    "int8": functools.partial(reduce.coded, codecs.make("int8")),
    "int8, gathered": functools.partial(reduce.coded, codecs.make("int8"), form="gather"),
    "top": functools.partial(reduce.coded, top(1), bucket_bytes=0, feedback=functools.partial(residual, decay=0.9)),
    "one bit": functools.partial(reduce.coded, one_bit(), form="gather"),
    "low rank": functools.partial(reduce.coded, codecs.make("low_rank", rank=1), form="gather"),
    "ef21": functools.partial(reduce.coded, top(7), feedback=functools.partial(ef21, beta=0.5), form="shards"),
    "dithered": functools.partial(reduce.coded, dithered(), feedback=none),
}


@pytest.mark.parametrize("name", REDUCERS)
def test_declared_bytes_are_those_of_the_program(name):
    run = Runner(REDUCERS[name], dtype=np.float32)
    for phase in run.reducer.phases:
        measured_N = wire.bytes_sent(run.program(phase).as_text(), N)
        np.testing.assert_allclose(run.reducer.num_bytes(run.like, N, phase), measured_N, rtol=1e-12)
        assert (measured_N > 0).all() == (phase != reduce.LOCAL)


@pytest.mark.parametrize("name", REDUCERS)
def test_simulated_workers_take_the_same_steps(name):
    with jax.enable_x64(True):
        runs = [Runner(REDUCERS[name], mode) for mode in MODES]
        for step in range(8):
            one, other = (run(gradients(step), step) for run in runs)
            if runs[0].reducer.phase(step) != reduce.LOCAL:
                assert_equal_replicas(one)
            all_close(one, other, rtol=1e-6, atol=1e-9)
        all_close(*(run.state for run in runs), rtol=1e-6, atol=1e-9)
