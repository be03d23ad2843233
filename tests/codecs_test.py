"""The contract of every codec: what is decoded, its error, the bytes sent, and what is stored."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import codecs, mesh
from decjax.program import hlo

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Halves(codecs.Codec):
    """A user's own codec: sends every second value, even and odd ones in turn."""

    linear = True
    state_key = "edge"

    def encode(self, x, state, key):
        flat = jnp.pad(x.ravel(), (0, x.size % 2)).reshape(-1, 2)
        return {"half": jnp.where(state, flat[:, 1], flat[:, 0]), "odd": state}

    def decode(self, message, shape, dtype):
        places = jax.nn.one_hot(message["odd"], 2, dtype=dtype)
        return (message["half"].astype(dtype)[:, None] * places).ravel()[: math.prod(shape)].reshape(shape)

    def num_bytes(self, shape, dtype):
        return 1 + -(-math.prod(shape) // 2) * jnp.dtype(dtype).itemsize

    def init(self, shape, dtype):
        return jnp.uint8(0)

    def advance(self, state, message):
        return 1 - state


VARIANTS = {
    "int8 stochastic": lambda: codecs.make("int8", rounding="stochastic"),
    "int4 stochastic": lambda: codecs.make("int4", rounding="stochastic"),
    "integers 5": lambda: codecs.make("integers", bits=5, block=16),
    "int2 block 8": lambda: codecs.make("int2", block=8),
    "qsgd 1": lambda: codecs.make("qsgd", levels=1, block=8),
    "topk 0.2 int8": lambda: codecs.make("topk", fraction=0.2, values="int8"),
    "block_topk 3": lambda: codecs.make("block_topk", fraction=0.1, k=3),
    "randomk unbiased": lambda: codecs.make("randomk", fraction=0.25, unbiased=True),
    "dct chunk 5": lambda: codecs.make("dct", fraction=0.2, chunk=5),
    "zfp 13": lambda: codecs.make("zfp", rate=13),
    "bounded 12": lambda: codecs.make("bounded", bits_per_value=12, outliers=0),
    "bounded static": lambda: codecs.make("bounded", bound=0.01, raw=False, group=16),
    "halves": Halves,
    "contracted qsgd": lambda: codecs.feedback.Contracted(codecs.make("qsgd", levels=1)),
}
ALL = (*codecs.names(), *VARIANTS)
SHAPE = (30, 76)  # two whole blocks of 1024 values, or eight of 256, and part of another
SIZE = math.prod(SHAPE)
TRIALS = 256


@functools.cache
def make(name):
    return VARIANTS[name]() if name in VARIANTS else codecs.make(name)


def transfer(codec, x, state, key):
    message = codec.encode(x, state, key if codec.random else None)
    return message, codec.decode(message, x.shape, x.dtype), codec.advance(state, message)


@functools.cache
def many(name):
    """Compiled once for all tests, over TRIALS arrays at a time."""
    return jax.jit(jax.vmap(functools.partial(transfer, make(name)), in_axes=(0, None, 0)))


def samples() -> np.ndarray:
    """Arrays that are hard for some codec: [TRIALS, *SHAPE]."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(TRIALS, SIZE))
    x[1::8] **= 3
    x[2::8] = rng.uniform(-1, 1, x[2::8].shape)
    x[3::8] = np.sign(x[3::8])
    x[4::8] = np.eye(SIZE)[rng.integers(SIZE, size=len(x[4::8]))] * 3
    x[5::8] = np.where(np.arange(SIZE) % 40 == 0, 1, 1 / 14)  # half an int4 quantization step in all values but one
    x[6::8] = np.sin(np.arange(SIZE) / 7 + rng.uniform(0, 9, (len(x[6::8]), 1)))
    x[7::8] *= np.repeat(10.0 ** rng.integers(-6, 6, (len(x[7::8]), SHAPE[0])), SHAPE[1], axis=1)  # every block differs
    return x.reshape(TRIALS, *SHAPE).astype(np.float32)


KEYS = jax.random.split(jax.random.key(3), TRIALS)


def energy(x):
    return np.square(np.asarray(x, np.float64)).reshape(len(x), -1).sum(axis=1)


# -- The table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_error_is_as_small_as_declared(name):
    codec, x = make(name), samples()
    _, back, _ = many(name)(x, codec.init(SHAPE, np.float32), KEYS)
    assert back.dtype == np.float32 and back.shape == x.shape
    share = energy(x - back) / energy(x)
    if (delta := codec.delta(SHAPE)) is not None:
        assert 0 < delta <= 1
        if codec.random or codec.state_key:  # only in the mean
            assert share.mean() <= 1 - delta + 4 * share.std() / TRIALS**0.5
        else:
            assert (share <= (1 - delta) * (1 + 1e-4) + 1e-11).all()
    if (omega := codec.omega(SIZE)) is not None:
        assert share.mean() <= omega * (1 + 1e-4) + 4 * share.std() / TRIALS**0.5


@pytest.mark.parametrize("name", ALL)
def test_any_size_and_type_arrives(name):
    """Scalars, empty arrays, and sizes that do not fill a block are decoded as accurately as declared."""
    codec, rng = make(name), np.random.default_rng(2)
    with jax.enable_x64(True):
        cases = [
            jnp.asarray(rng.normal(size=shape), dtype)
            for shape, dtype in (
                ((), "float32"),
                ((1,), "bfloat16"),
                ((0,), "float32"),
                ((3, 0), "bfloat16"),
                ((7,), "float64"),
                ((257,), "float32"),
                ((13, 20), "float16"),
            )
        ]
        states = [codec.init(x.shape, x.dtype) for x in cases]
        backs = jax.jit(lambda xs: [transfer(codec, x, state, KEYS[0])[1] for x, state in zip(xs, states)])(cases)
        for x, back in zip(cases, backs):
            assert (back.shape, back.dtype) == (x.shape, x.dtype) and np.isfinite(back).all()
            error, length = (
                energy(np.asarray(back, np.float64)[None] - np.asarray(x, np.float64))[0],
                energy(np.asarray(x)[None])[0],
            )
            rounding = float(jnp.finfo(x.dtype).eps)
            if codec.unbiased:  # one draw: a multiple of the expected error
                assert error <= 10 * (codec.omega(x.size) + 0.1) * length
            elif codec.contractive and not codec.random and not codec.state_key:
                assert error <= (1 - codec.delta(x.shape) + 4 * rounding) * length, (x.shape, x.dtype)
            elif codec.contractive:
                assert error <= (1 + 4 * rounding) * length


@pytest.mark.parametrize("name", [name for name in ALL if make(name).unbiased])
def test_the_mean_over_keys_is_right(name):
    codec, x = make(name), np.asarray(samples()[:2].mean(axis=0))
    repeated = np.broadcast_to(x, (TRIALS, *SHAPE))
    _, back, _ = many(name)(repeated, codec.init(SHAPE, np.float32), KEYS)
    error = np.asarray(back, np.float64) - x
    assert energy(error.mean(axis=0)[None]) <= 1.6 * energy(error).mean() / TRIALS + 1e-12 * energy(x[None])
    along = (error * x).sum(axis=(1, 2))
    assert abs(along.mean()) <= 5 * along.std() / TRIALS**0.5 + 1e-6 * energy(x[None])


@pytest.mark.parametrize("name", ALL)
def test_many_at_once_are_one_after_the_other(name):
    codec, x = make(name), samples()
    state = codec.init(SHAPE, np.float32)
    batch = many(name)(x, state, KEYS)
    one = jax.jit(functools.partial(transfer, codec))
    for i in (0, 7):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
            jax.tree.map(lambda y: y[i], batch[1:]),
            one(x[i], state, KEYS[i])[1:],
        )
        for arrays in zip(jax.tree.leaves(batch[0]), jax.tree.leaves(one(x[i], state, KEYS[i])[0])):
            assert arrays[0][i].shape == arrays[1].shape and arrays[0].dtype == arrays[1].dtype


@pytest.mark.parametrize("name", ALL)
def test_messages_have_the_declared_bytes_for_any_shape_and_type(name):
    codec = make(name)
    with jax.enable_x64(True):
        for shape in ((), (0,), (7,), (257,), (70_000,), (3, 0), (9, 5), (2, 3, 40)):
            for dtype in map(jnp.dtype, ("bfloat16", "float64") if shape else ("float16", "bfloat16", "float32", "float64")):
                x = jax.ShapeDtypeStruct(shape, dtype)
                state = jax.eval_shape(lambda: codec.init(shape, dtype))
                message, back, after = jax.eval_shape(functools.partial(transfer, codec), x, state, KEYS[0])
                assert codecs.message_bytes(message) == codec.num_bytes(shape, dtype), (shape, dtype)
                assert (back.shape, back.dtype) == (shape, dtype)
                assert jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, after) in (True, ())
                assert jax.eval_shape(lambda m: codec.decode(m, shape, jnp.float32), message).dtype == jnp.float32
                assert not any(leaf.dtype == bool for leaf in jax.tree.leaves(message))


@pytest.mark.parametrize("name", ALL)
def test_messages_travel_in_the_declared_bytes(name):
    """What two workers send each other in a compiled program, by permutes and by a gather: nothing is widened or padded."""
    codec, workers = make(name), mesh.make_workers(2, devices=jax.devices()[:2])
    axis = workers.axis

    def swap(x, state, key):
        message = codec.encode(x, state, key if codec.random else None)
        arrived = jax.tree.map(lambda leaf: axis.exchange(leaf, [(0, 1), (1, 0)]), message)
        gathered = jax.tree.map(lambda leaf: axis.all_gather(leaf), message)
        return codec.decode(arrived, x.shape, x.dtype), jax.vmap(lambda each: codec.decode(each, x.shape, x.dtype))(gathered)

    shape, dtypes = (9, 5), ("float32", "bfloat16")
    states = [codec.init(shape, dtype) for dtype in dtypes]
    stacked = workers.stack(([jnp.ones(shape, dtype) for dtype in dtypes], states))
    program = jax.jit(workers.map(lambda xs, states, keys: [swap(*each) for each in zip(xs, states, keys)], (0, 0, None)))
    text = program.lower(*stacked, list(KEYS[:2])).compile().as_text()  # equal keys would produce equal seeds
    found = hlo.collectives(text, 2)
    assert {collective.kind for collective in found} == {"collective-permute", "all-gather"}
    declared = sum(codec.num_bytes(shape, dtype) for dtype in dtypes)
    for kind in ("collective-permute", "all-gather"):
        sent_N = sum(collective.sent(2) for collective in found if collective.kind == kind)
        np.testing.assert_array_equal(sent_N, [declared, declared], err_msg=kind)


@pytest.mark.parametrize("name", ALL)
def test_zeros_and_bad_numbers_do_no_lasting_harm(name):
    codec, x = make(name), samples()
    state = codec.init(SHAPE, np.float32)
    x[0], x[1, 2, 3], x[2, 2, 3], x[3, 1, 1] = 0, np.inf, np.nan, -np.inf
    message, back, after = many(name)(x, state, KEYS)
    if name != "sign":  # it has no code for zero
        np.testing.assert_array_equal(back[0], np.zeros(SHAPE))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    if codec.state_key == "tensor":  # unchanged
        jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[1], old), after, state)
    if name != "sign" and "randomk" not in name and "halves" not in name:  # it need not, or cannot, be sent
        assert not np.isfinite(back[1:4]).all(axis=(1, 2)).any()
    for i in range(4 if codec.state_key else 0):  # the next message is as accurate as any
        assert np.isfinite(many(name)(samples(), jax.tree.map(lambda leaf: leaf[i], after), KEYS)[1]).all()


@pytest.mark.parametrize("name", [name for name in ALL if make(name).linear])
def test_linear_codecs_are_linear(name):
    codec, x = make(name), samples()
    state, key = codec.init(SHAPE, np.float32), jnp.broadcast_to(KEYS[0], (TRIALS,))
    sums = 2 * x[0] - 3 * x[1]
    back = many(name)(np.concatenate([x[:2], sums[None], x[3:]]), state, key)[1]
    np.testing.assert_allclose(back[2], 2 * back[0] - 3 * back[1], atol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_error_feedback_returns_what_the_message_lost(name):
    """x == ĉ + e at the first step, and Σ sent + e_T = Σ g after many, in float64."""
    codec = make(name)
    feedback = codecs.feedback.residual(codec)
    shape, steps = (4, 12), 20
    with jax.enable_x64(True):
        grads = np.random.default_rng(1).normal(size=(steps, *shape))

        def step(memory, given):
            grad, key = given
            message, memory = feedback.encode(grad, memory, key if codec.random else None)
            return memory, (codec.decode(message, shape, grad.dtype), memory.error)

        memory, (sent, errors) = jax.jit(lambda: jax.lax.scan(step, feedback.init(shape, jnp.float64), (grads, KEYS[:steps])))()
        assert sent.dtype == errors.dtype == np.float64
        scale = np.abs(errors).max() + np.abs(grads).max()  # 'sign' alone lets it grow
        np.testing.assert_allclose(sent[0] + errors[0], grads[0], atol=1e-14 * scale)
        np.testing.assert_allclose(sent.sum(axis=0) + memory.error, grads.sum(axis=0), atol=1e-13 * scale)


# -- Mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("zip", {}, "codec 'zip' is unknown; use one of .*, int8"),
        ("int8", {"width": 3}, "codec 'int8' has no option 'width'; use block, rounding"),
        ("natural", {"block": 3}, "codec 'natural' has no option 'block'; leave it out, it has no options"),
        ("int8", {"block": 100}, "block=100 must be at least 8 and a multiple of 8"),
        ("int8", {"block": "large"}, "block='large' must be a whole number; the default is 256"),
        ("topk", {"fraction": None}, "fraction=None must be a value such as 0.01"),
        ("topk", {"fraction": True}, "fraction=True must be a number"),
        ("topk", {"values": None}, "values=None must be a value such as 'identity'"),
        ("int8", {"block": codecs.make("int4")}, "must be a whole number; the default is 256"),
        ("int4", {"rounding": "up"}, "rounding='up' is unknown; use one of nearest, stochastic"),
        ("integers", {"bits": 1}, "bits=1 must be at least 2 and at most 8"),
        ("float8_e4m3", {"block": 0}, "block=0 must be at least 1"),
        ("scaled_sign", {"block": 0}, "block=0 must be at least 1"),
        ("qsgd", {"levels": 0}, "levels=0 must be at least 1 and at most 127"),
        ("topk", {"k": 0}, "codec 'topk': k=0 must be at least 1"),
        ("topk", {"fraction": 0}, "fraction=0 must be more than 0 and at most 1"),
        (
            "topk",
            {"values": "qsgd"},
            "needs a codec of values without state, key or matrices, got values 'qsgd'; use one such as 'int8'",
        ),
        ("dct", {"values": "low_rank"}, "a codec of values without state, key or matrices, got values 'low_rank'"),
        ("topk", {"values": 8}, "codec 'topk': values=8 must be a word; the default is 'identity'"),
        ("block_topk", {"k": 0}, "k=0 must be at least 1"),
        ("block_topk", {"fraction": 1e-6}, "=1000000 values exceeds 4096; use a larger fraction"),
        ("randomk", {"fraction": 1e-6}, "fraction=1e-06 must be at least 1.52587890625e-05"),
        ("threshold", {"multiple": -1}, "multiple=-1 must be at least 0"),
        ("low_rank", {"rank": 0}, "rank=0 must be at least 1"),
        ("dct", {"chunk": 0}, "chunk=0 must be at least 1"),
        ("zfp", {"rate": 3}, "rate=3 must be at least 4 and at most 24"),
        ("bounded", {"bound": 0.0}, "bound=0.0 must be at least 1e-30"),
        ("bounded", {"bits_per_value": 16}, "bits_per_value=16 must be at least 2 and at most 12"),
        ("bounded", {"outliers": -1}, "outliers=-1 must be at least 0"),
        ("bounded", {"outliers": 300}, "outliers=300 must be from 0 to group=256 with raw=True"),
        ("int8(block=8,block=16)", {}, "option block is given twice; leave one out"),
        ("int8(block=8)", {"block": 16}, "option block is given twice; leave one out"),
    ],
)
def test_mistakes_name_the_value_and_the_fix(name, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        codecs.make(name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: codecs.make("low_rank", rank=8).init((4, 100), np.float32),
            r"rank=8 exceeds 4, the smaller side of \(4, 100\) as a 4x100 matrix; use rank=4 or less",
        ),
        (
            lambda: codecs.make("qsgd").encode(jnp.ones(3), (), None),
            "this codec draws random numbers, but key=None; pass a jax.random key",
        ),
        (
            lambda: codecs.feedback.ef21(codecs.make("topk"), storage=codecs.make("int8")),
            "ef21: storage='int8' must be None, since receivers hold the same memory",
        ),
        (
            lambda: codecs.feedback.residual(codecs.make("topk"), storage=codecs.make("low_rank")),
            "cannot be stored by codec 'low_rank'",
        ),
        (
            lambda: codecs.feedback.residual(codecs.make("topk"), storage=codecs.make("sign")),
            "'sign'; use one without state and matrices that is",
        ),
        (lambda: codecs.feedback.residual(codecs.make("topk"), decay=0), "decay=0 must be more than 0 and at most 1"),
        (lambda: codecs.feedback.momentum(codecs.make("topk"), beta=1), "beta=1 must be at least 0 and less than 1"),
    ],
)
def test_wrong_uses_name_the_value_and_the_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call()
