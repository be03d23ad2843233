"""Coded messages between stages: a dense low-rank reference with lazy error propagation, memories on both sides, and bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import codecs, mesh, models, pipeline, registry, schedules
from decjax.contrib.probe import Probed
from decjax.pipeline import boundary as boundary_lib
from decjax.pipeline import ticks as table_lib
from decjax.program import hlo

pytestmark = pytest.mark.usefixtures("quick_compilation")
B, T, D, M = 2, 4, 6, 4
I, J = B * T, D
SCHEDULE = schedules.make("1f1b", 3, M)  # On link 1 → 0 the last two of four gradients are compressed.
SEND = {
    kind: [send for sends in SCHEDULE.sends for send in sends if send.kind == kind and send.source == source]
    for kind, source in (("B", 1), ("F", 0))
}


class Ends:
    """Both ends of a link in one state, without a pipeline: a message is received immediately."""

    def __init__(self, boundary, dtype="float32"):
        self.like = jax.ShapeDtypeStruct((B, T, D), dtype)
        self.boundary, self.state = boundary, boundary.init(self.like, SCHEDULE)
        self._finish = jax.jit(boundary.finish)

    @functools.cached_property
    def _transfer(self):
        def transfer(x, state, tokens_BxT1, microbatch, key, label):
            place = boundary_lib.Place(self.like, jnp.int32(1), microbatch, jnp.int32(0), tokens_BxT1, key)
            if label not in self.boundary.transfers:
                return x, x, state
            message, state = self.boundary.transfers[label].send(x, state, place)
            return message, *self.boundary.transfers[label].receive(message, state, place)

        return jax.jit(transfer, static_argnums=5)

    def send(self, x, microbatch=0, kind="B", compress=True, tokens=None):
        tokens_BxT1 = np.zeros((B, T + 1), np.int32) if tokens is None else tokens
        self.message, received, self.state = self._transfer(
            jnp.asarray(x, self.like.dtype),
            self.state,
            tokens_BxT1,
            np.int32(microbatch),
            jax.random.key(microbatch),
            (kind, compress),
        )
        return np.asarray(received, np.float32)

    def iteration(self, xs):
        """Send one iteration's gradients in schedule order; return what arrives."""
        received = [
            self.send(x, send.microbatch, "B", self.boundary.compresses(send)) for x, send in zip(xs, SEND["B"], strict=True)
        ]
        self.state = self._finish(self.state)
        return received

    @property
    def error(self):
        return np.asarray(self.state["B"].sender.error[0])


def gradients(iterations, seed=0):
    """Slowly changing arrays [iterations, M, B, T, D]."""
    random = np.random.default_rng(seed)
    steps = random.normal(size=(iterations * M, B, T, D))
    return (random.normal(size=(B, T, D)) * 3 + np.cumsum(0.3 * steps, axis=0)).reshape(iterations, M, B, T, D).astype(np.float32)


# -- Lazy error propagation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["carry", "flush", "reset"])
def test_low_rank_with_lazy_errors_follows_its_equations(error):
    """Against the equations in NumPy: A = g + e, P = orth(A Q), Q = Aᵀ P, e = A − P Qᵀ; and the sum is conserved."""
    ends = Ends(pipeline.coded(codecs.low_rank(rank=2), error=error))
    q_JxR, e_IxJ = np.asarray(ends.state["B"].sender.codec[0], np.float64).T, np.zeros((I, J))
    arrived, given, lost = 0, 0, 0
    for xs in gradients(5):
        received = ends.iteration(xs)
        for j, (x, y) in enumerate(zip(xs, received)):
            g_IxJ = x.reshape(I, J).astype(np.float64)
            if j < 2:
                expected = g_IxJ + e_IxJ if error == "flush" else g_IxJ
                e_IxJ = np.zeros((I, J)) if error == "flush" else e_IxJ
            else:
                a_IxJ = g_IxJ + e_IxJ
                p_IxR = np.linalg.qr(a_IxJ @ q_JxR)[0]
                q_JxR = a_IxJ.T @ p_IxR
                expected = p_IxR @ q_JxR.T
                e_IxJ = a_IxJ - expected
            np.testing.assert_allclose(y.reshape(I, J), expected, rtol=1e-4, atol=1e-4)
        arrived, given = arrived + sum(received), given + xs.sum(axis=0)
        if error == "reset":
            lost, e_IxJ = lost + e_IxJ, np.zeros((I, J))
        np.testing.assert_allclose(ends.error.reshape(I, J), e_IxJ, atol=1e-4)
        np.testing.assert_allclose((arrived + ends.error).reshape(I, J) + lost, given.reshape(I, J), atol=2e-3)
    assert np.linalg.norm(e_IxJ if error != "reset" else lost) > 0.1  # something is lost to compression


@pytest.mark.parametrize(
    "codec, dtype",
    [("low_rank(rank=2,values=bfloat16)", "bfloat16"), ("topk(fraction=0.2,values=int8)", "float32"), ("qsgd", "float32")],
)
def test_what_is_flushed_arrives_once(codec, dtype):
    """The sum of received values plus e equals the sum of the gradients, including casts of factors and activations."""
    ends = Ends(pipeline.coded(registry.make("codec", codec), error="flush"), dtype)
    arrived = given = 0
    for xs in gradients(6):
        xs = np.asarray(jnp.asarray(xs, dtype), np.float32)
        arrived, given = arrived + sum(ends.iteration(xs)), given + xs.sum(axis=0)
        np.testing.assert_allclose(arrived + ends.error, given, atol=1e-4)
    error = ends.error
    assert np.abs(error).max() > 1e-3
    arrived, given = arrived + ends.send(xs[0], 0, "B", False), given + xs[0]
    # What the dtype of an uncompressed message cannot represent is kept as error.
    assert np.abs(ends.error).max() <= (np.abs(xs[0] + error).max() * 2.0**-8 if dtype == "bfloat16" else 0)
    np.testing.assert_allclose(arrived + ends.error, given, atol=1e-4)


def test_factors_are_sent_in_the_type_that_is_asked_for():
    codec = codecs.low_rank(rank=2, values=codecs.bfloat16())
    ends = Ends(pipeline.coded(codec), "bfloat16")
    x = np.asarray(jnp.asarray(gradients(1)[0, 0], "bfloat16"), np.float32)
    y = ends.send(x)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in ends.message.items()} == {
        "p": ((I, 2), np.dtype("uint16")),
        "q": ((2, J), np.dtype("uint16")),
    }
    assert codecs.message_bytes(ends.message) == codec.num_bytes((I, J), "bfloat16") == 2 * 2 * (I + J)
    assert ends.error.dtype == np.float32
    np.testing.assert_array_equal(ends.error, x - y)


def test_zeros_and_infinities_poison_nothing():
    """After a zero or non-finite gradient, messages are as accurate as before."""
    x = np.linalg.qr(np.random.default_rng(0).normal(size=(I, 2)))[0] @ np.random.default_rng(1).normal(size=(2, J)) * 3
    x = x.reshape(B, T, D).astype(np.float32)
    ends = Ends(pipeline.coded(codecs.low_rank(rank=2)))
    np.testing.assert_array_equal(ends.send(0 * x), 0)
    np.testing.assert_allclose(ends.send(x), x, atol=1e-5)  # rank 2, so one message is exact
    for bad in (np.inf, np.nan):
        before = jax.tree.map(np.asarray, ends.state)
        assert not np.isfinite(ends.send(np.where(x == x[0, 0, 0], bad, x))).all()
        jax.tree.map(np.testing.assert_array_equal, ends.state, before)
    np.testing.assert_allclose(ends.send(2 * x), 2 * x, atol=1e-4)


# -- Other memories ---------------------------------------------------------------------------------------------------


def test_both_ends_hold_the_same_estimate():
    """EF21: a constant message arrives with an error that shrinks by at least √(1 − δ) per message."""
    ends, x = Ends(pipeline.coded(codecs.topk(fraction=0.25), error="ef21")), gradients(1)[0, 0]
    misses = [np.linalg.norm(ends.send(x) - x) for _ in range(5)]
    sender, receiver = ends.state["B"]
    np.testing.assert_array_equal(sender.error, receiver)
    assert all(after <= 0.75**0.5 * before + 1e-6 for before, after in zip([np.linalg.norm(x), *misses], misses))
    ends.send(np.full_like(x, np.nan))
    jax.tree.map(np.testing.assert_array_equal, ends.state["B"], boundary_lib.Ends(sender, receiver))


def samples(*starts):
    return np.array([[start + t for t in range(T + 1)] for start in starts], np.int32)


def test_a_sample_seen_again_costs_a_smaller_error():
    """AQ-SGD: changes of a sample are small, and so are their errors; an unknown or evicted sample starts from zero."""
    ends = Ends(pipeline.coded(forward=codecs.int4(), forward_error="samples", slots=1024))
    x, other = gradients(1)[0, :2]
    alone = Ends(pipeline.coded(forward=codecs.int4())).send(x, 0, "F")

    def same():
        sender, receiver = ends.state["F"]
        np.testing.assert_array_equal(sender.value_KxP, receiver.value_KxP)
        np.testing.assert_array_equal(sender.tag_K, receiver.tag_K)
        return receiver

    first = ends.send(x, 0, "F", tokens=samples(0, 7))
    np.testing.assert_array_equal(first, alone)
    ends.send(other, 1, "F", tokens=samples(20, 40))
    assert (np.asarray(same().tag_K) > 0).sum() == 4
    swapped = (1.01 * x)[::-1]  # the same samples in another order
    again = ends.send(swapped, 2, "F", tokens=samples(7, 0))
    change = np.abs(first - x).max() + 0.01 * np.abs(x).max()  # the lost part and the new part
    assert (
        np.abs(again - swapped).max() <= 1.001 * change / (2 * 7) < 0.1 * np.abs(first - x).max()
    )  # half a quantization step of ±7
    before = same()
    assert not np.isfinite(ends.send(np.full_like(x, np.inf), 0, "F", tokens=samples(0, 7))).any()
    jax.tree.map(np.testing.assert_array_equal, same(), before)

    ends = Ends(pipeline.coded(forward=codecs.int4(), forward_error="samples", slots=1))
    ends.send(x, 0, "F", tokens=samples(0, 7))
    np.testing.assert_allclose(
        same().value_KxP[0], alone[1].ravel(), rtol=1e-6
    )  # of two samples that share a slot, the last one is kept
    np.testing.assert_array_equal(ends.send(x, 0, "F", tokens=samples(20, 40)), alone)


def test_gradients_go_where_top_k_sent_activations():
    forward = codecs.topk(fraction=0.25)
    ends = Ends(pipeline.coded(codecs.bfloat16(), forward, when="always", reuse_indices=True))
    xs, k = gradients(2), 12
    places = [ends.send(x, j, "F") != 0 for j, x in enumerate(xs[0])]
    assert codecs.message_bytes(ends.message) == forward.num_bytes((I, J), "float32") == k * (4 + 1)
    arrived = 0
    for j in (2, 0, 3, 1):  # indices within the microbatch
        y = ends.send(xs[1, j], j, "B")
        arrived += y
        assert codecs.message_bytes(ends.message) == 2 * k
        np.testing.assert_array_equal(y != 0, places[j])
    np.testing.assert_allclose(arrived + ends.error, xs[1].sum(axis=0), atol=1e-4)


def test_a_probe_compares_errors_with_changes():
    ends = Ends(Probed(pipeline.coded(codecs.low_rank(rank=1))))
    before = error = None
    for xs in gradients(3):
        for x, send in zip(xs, SEND["B"], strict=True):
            compress = ends.boundary.compresses(send)
            ends.send(x, send.microbatch, "B", compress)
            if compress:
                if before is not None:
                    expected = np.sum(error * (before - x)) / np.linalg.norm(error) / np.linalg.norm(before - x)
                    np.testing.assert_allclose(ends.state.cosine_CxM[0, send.microbatch], expected, atol=1e-5)
                before, error = x, np.asarray(ends.state.boundary["B"].sender.error[0])
    assert np.isnan(ends.state.cosine_CxM[0, :2]).all() and np.isfinite(ends.state.cosine_CxM[0, 2:]).all()


# -- Schedules and bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, S, C", [("1f1b", 2, 1), ("1f1b", 4, 1), ("1f1b", 8, 1), ("gpipe", 4, 1), ("interleaved", 4, 2)])
def test_compressed_messages_of_an_iteration(name, S, C):
    schedule = schedules.make(name, S, 2 * S, C)
    for when in ("epilogue", "always"):
        table = table_lib.tabulate(schedule, pipeline.coded(codecs.identity(), when=when).compresses, True)
        count = sum(
            runs * len(message.pairs)
            for messages, runs in zip(table.patterns, table.runs)
            for message in messages
            if message.label == ("B", True)
        )
        every = 2 * S * (S * C - 1)
        assert count == (
            every
            if when == "always" or name == "gpipe"
            else S * (S - 1) // 2
            if C == 1
            else sum(send.in_epilogue for sends in schedule.sends for send in sends if send.kind == "B")
        )
        assert count < every or when == "always" or name == "gpipe"


VOCABULARY, WIDTH, CONTEXT, DEPTH = 16, 8, 6, 4


@functools.cache
def model():
    return models.decoder_lm(
        vocabulary=VOCABULARY, context=CONTEXT, width=WIDTH, hidden=8, heads=2, depth=DEPTH, divide=mesh.divide
    )


def tokens(step, batch):
    start_Bx1 = np.random.default_rng(step).integers(0, VOCABULARY, (batch, 1))
    return ((start_Bx1 + np.arange(CONTEXT + 1)) % VOCABULARY).astype(np.int32)


class Pipe:
    """One worker's pipeline with one sequence per microbatch, or one per tensor-parallel device."""

    def __init__(self, boundary, S, name="1f1b", C=1, microbatches=4, T=1, batch=0):
        self.workers, self.batch = mesh.make_workers(1, stages=S, tensor=T, divided=model().divided), batch or T * microbatches
        self.division = pipeline.divide(model().parts, S, C)
        self.of = pipeline.Pipeline(
            self.division, schedules.make(name, S, microbatches, C), remat=True, boundary=boundary or pipeline.Boundary()
        )
        self.state = self.workers.jit(self.of.init, (0,))(self.build(0))
        self.params = self.workers.stack(jax.jit(lambda: self.division.split(model().init(jax.random.key(0))))())

    @functools.cached_property
    def step(self):
        def step(params, state, batch, rate):
            loss, grads, state = self.of.gradient(params, state, batch, jax.random.key(0))
            return loss, jax.tree.map(lambda x, g: x - rate * g, params, grads), state

        arguments = self.params, self.state, self.build(0), np.float32(0)
        return self.workers.jit(step, (0, 0, 0, None)).lower(*arguments).compile()

    def build(self, step):
        return self.workers.build(lambda worker: tokens(step, self.batch))

    def train(self, steps, rate=0.3):
        losses = []
        for step in range(steps):
            loss, self.params, self.state = self.step(self.params, self.state, self.build(step), np.float32(rate))
            losses.append(self.workers.fetch_first(loss).item())
        return losses


@pytest.mark.parametrize(
    "S, name, C, options",
    [
        (4, "1f1b", 1, dict(backward="low_rank(rank=2)")),
        (2, "interleaved", 2, dict(backward="low_rank(rank=2,values=bfloat16)", forward="int8")),
        (2, "gpipe", 1, dict(backward="identity", forward="topk(fraction=0.25)", when="always", reuse_indices=True)),
    ],
)
def test_bytes_in_the_compiled_program_are_those_of_the_codecs(S, name, C, options):
    given = {key: registry.make("codec", value) if key in ("backward", "forward") else value for key, value in options.items()}
    pipe = Pipe(pipeline.coded(**given), S, name, C)
    sent = hlo.bytes_by_axis(pipe.step.as_text(), pipe.workers.sizes)["stage"].item()
    dense, links_, schedule = CONTEXT * WIDTH * 4, S * C - 1, schedules.make(name, S, 4, C)
    critical = sum(send.in_epilogue for sends in schedule.sends for send in sends if send.kind == "B")
    assert critical == S * (S - 1) // 2 or name != "1f1b"
    loss = 2 * (S - 1) * 4  # summed over stages
    if S == 4:
        expected = dense / (CONTEXT * WIDTH / (2 * (CONTEXT + WIDTH)))
        assert sent - loss == (4 * 2 * links_ - critical) * dense + critical * expected
    elif name == "interleaved":
        expected = 2 * 2 * (CONTEXT + WIDTH)
        int8 = given["forward"].num_bytes((CONTEXT, WIDTH), "float32")
        assert sent - loss == (4 * links_ - critical) * dense + critical * expected + 4 * links_ * int8
    else:
        assert sent - loss == 4 * links_ * 12 * ((4 + 1) + 4)


@pytest.mark.usefixtures("users_generator")
def test_full_rank_and_identity_are_no_compression():
    """25 steps with every message coded in both directions; bit-exact where nothing is computed."""
    plain = Pipe(None, 2).train(25)
    same = Pipe(pipeline.coded(codecs.identity(), codecs.identity(), when="always"), 2).train(25)
    codec = codecs.low_rank(rank=CONTEXT)
    full = Pipe(pipeline.coded(codec, codec, when="always", forward_error="ef21"), 2).train(25)
    assert plain[-1] < 0.7 * plain[0] and same == plain
    np.testing.assert_allclose(full, plain, rtol=1e-4)


# -- Tensor-parallel groups -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch, options",
    [
        (0, dict(backward="low_rank(rank=2)", forward="int8(block=16,rounding=stochastic)")),
        (4, dict(backward="low_rank(rank=2,values=bfloat16)", error="flush", forward="topk(fraction=0.75)")),
        (
            0,
            dict(
                backward="int8(block=16)", when="always", error="ef21", forward="int4(block=16)", forward_error="samples", slots=16
            ),
        ),
        (0, dict(backward="bfloat16", forward="topk(fraction=0.75)", when="always", reuse_indices=True)),
    ],
)
def test_each_device_of_a_group_codes_and_sends_its_own_part(batch, options):
    """K = 2 devices: each holds the codec state of its half of the rows, 6 of 12, or 3 of a single sequence's 6. The second step
    does not recompile.
    """
    given = {key: registry.make("codec", value) if key in ("backward", "forward") else value for key, value in options.items()}
    pipe = Pipe(pipeline.coded(**given), 2, T=2, batch=batch)
    losses = pipe.train(3, rate=0.05)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    rows = 6 * (pipe.batch // 4) // 2
    coded = {"backward": 4 if options.get("when") == "always" else 1, "forward": 4}  # 4 microbatches
    sent = {
        name: count * given[name].num_bytes((rows, WIDTH), "float32") + (4 - count) * rows * WIDTH * 4
        for name, count in coded.items()
    }
    if "reuse_indices" in options:
        sent["backward"] = 4 * 2 * 36  # three quarters of 48 values, whose indices both ends have
    loss = 2 * (2 - 1) * 4 * 2  # summed over stages, on both devices
    assert hlo.bytes_by_axis(pipe.step.as_text(), pipe.workers.sizes)["stage"].item() == 2 * sum(sent.values()) + loss
    for leaf, sharding in zip(*map(jax.tree.leaves, (pipe.state, pipe.workers.shardings(pipe.state))), strict=True):
        assert leaf.shape[:3] == (1, 2, 2) and leaf.addressable_data(0).shape[:3] == (1, 1, 1)
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    first, second = np.asarray(pipe.state.of_each_device["B"].sender.error)[0, 1]
    assert first.size == rows * WIDTH and np.abs(first).max() > 0 and np.abs(second).max() > 0 and (first != second).any()


def test_full_rank_is_no_compression_on_groups_of_devices_either():
    """25 steps; the parts of a message, joined, equal the message that one device would send."""
    alone = Pipe(None, 2, batch=8).train(25)
    plain = Pipe(None, 2, T=2).train(25)
    codec = codecs.low_rank(rank=CONTEXT)
    full = Pipe(pipeline.coded(codec, codec, when="always", forward_error="ef21"), 2, T=2).train(25)
    assert plain[-1] < 0.7 * plain[0]
    np.testing.assert_allclose(plain, alone, rtol=1e-4)
    np.testing.assert_allclose(full, plain, rtol=1e-4)


def test_ends_agree_on_every_link_of_an_interleaved_schedule():
    """Both ends keep estimates: those of chunk c of a stage match the previous or next chunk at the other end."""
    S, C = 2, 2
    boundary = pipeline.coded(codecs.topk(fraction=0.3), codecs.int4(), error="ef21", forward_error="samples", slots=16)
    pipe = Pipe(boundary, S, "interleaved", C)
    losses = pipe.train(3)
    assert np.isfinite(losses).all()
    state = pipe.workers.fetch(pipe.state)
    place = {v: (0, v % S, v // S) for v in range(S * C)}
    forward = jax.tree.map(lambda x: x.reshape(1, S, C, 16, *x.shape[3:]), [end._replace(codec=()) for end in state["F"]])
    for v in range(S * C - 1):
        np.testing.assert_array_equal(state["B"].sender.error[place[v + 1]], state["B"].receiver[place[v]])
        assert np.abs(state["B"].receiver[place[v]]).max() > 0
        jax.tree.map(
            np.testing.assert_array_equal,
            *(jax.tree.map(lambda x, at=at: x[at], end) for end, at in zip(forward, (place[v], place[v + 1]))),
        )
        assert (forward[0].tag_K[place[v]] > 0).any()
