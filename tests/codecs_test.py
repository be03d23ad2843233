"""The contract that every codec keeps: what comes back, how far off it is, how many bytes travelled, what is remembered."""

import functools
import math

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import codecs
from decjax import mesh
from decjax.codecs import bits
from decjax.codecs import codec as codec_lib
from decjax.codecs import noise
from decjax.codecs import sparse
from decjax.train import wire

pytestmark = pytest.mark.usefixtures("quick_compilation")


def halves() -> codecs.Codec:
    """A user's own codec: every second value is sent, the even ones and the odd ones in turn."""
    def encode(x, odd, key):
        flat = jnp.pad(x.ravel(), (0, x.size % 2)).reshape(-1, 2)
        return {"half": jnp.where(odd, flat[:, 1], flat[:, 0]), "odd": odd}

    def decode(message, shape, dtype):
        places = jax.nn.one_hot(message["odd"], 2, dtype=dtype)
        return (message["half"].astype(dtype)[:, None] * places).ravel()[:math.prod(shape)].reshape(shape)

    return codecs.Codec(
        name="halves", encode=encode, decode=decode,
        num_bytes=lambda shape, dtype: 1 + -(-math.prod(shape) // 2) * jnp.dtype(dtype).itemsize,
        init=lambda shape, dtype: jnp.uint8(0), advance=lambda odd, message: 1 - odd,
        traits=codecs.Traits(linear=True, state_key="edge"))


VARIANTS = {
    "int8 stochastic": lambda: codecs.make("int8", rounding="stochastic"), "int4 stochastic": lambda: codecs.make("int4", rounding="stochastic"),
    "integers 5": lambda: codecs.make("integers", bits=5, block=16), "int2 block 8": lambda: codecs.make("int2", block=8),
    "qsgd 1": lambda: codecs.make("qsgd", levels=1, block=8), "topk 0.2 int8": lambda: codecs.make("topk", fraction=0.2, values="int8"),
    "block_topk 3": lambda: codecs.make("block_topk", fraction=0.1, k=3), "randomk unbiased": lambda: codecs.make("randomk", fraction=0.25, unbiased=True),
    "dct chunk 5": lambda: codecs.make("dct", fraction=0.2, chunk=5), "zfp 13": lambda: codecs.make("zfp", rate=13),
    "bounded 12": lambda: codecs.make("bounded", bits_per_value=12, outliers=0),
    "bounded static": lambda: codecs.make("bounded", bound=0.01, raw=False, group=16), "halves": halves,
    "contracted qsgd": lambda: codecs.feedback.contracted(codecs.make("qsgd", levels=1)),
}
ALL = (*codecs.names(), *VARIANTS)
SHAPE = (6, 40)
SIZE = math.prod(SHAPE)
TRIALS = 256


@functools.cache
def make(name):
    return VARIANTS[name]() if name in VARIANTS else codecs.make(name)


def transfer(codec, x, state, key):
    message = codec.encode(x, state, key if codec.traits.random else None)
    return message, codec.decode(message, x.shape, x.dtype), codec.advance(state, message)


@functools.cache
def many(name):
    """Compiled once for all tests: TRIALS arrays at once."""
    return jax.jit(jax.vmap(functools.partial(transfer, make(name)), in_axes=(0, None, 0)))


def samples() -> np.ndarray:
    """Arrays that are hard for one codec or another: [TRIALS, *SHAPE]."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(TRIALS, SIZE))
    x[1::8] **= 3
    x[2::8] = rng.uniform(-1, 1, x[2::8].shape)
    x[3::8] = np.sign(x[3::8])
    x[4::8] = np.eye(SIZE)[rng.integers(SIZE, size=len(x[4::8]))] * 3
    x[5::8] = np.where(np.arange(SIZE) % 40 == 0, 1, 1 / 14)  # Half a step of int4 in all but one.
    x[6::8] = np.sin(np.arange(SIZE) / 7 + rng.uniform(0, 9, (len(x[6::8]), 1)))
    x[7::8] *= 10.0 ** rng.integers(-6, 6, (len(x[7::8]), 1))
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
    if (delta := codec.traits.contractive) is not None:
        assert 0 < delta(SHAPE) <= 1
        if codec.traits.random or codec.traits.state_key != "none":  # In the mean only.
            assert share.mean() <= 1 - delta(SHAPE) + 4 * share.std() / TRIALS**0.5
        else:
            assert (share <= (1 - delta(SHAPE)) * (1 + 1e-4) + 1e-11).all()
    if (omega := codec.traits.unbiased) is not None:
        assert share.mean() <= omega(SIZE) * (1 + 1e-4) + 4 * share.std() / TRIALS**0.5


@pytest.mark.parametrize("name", ALL)
def test_any_size_and_type_arrives(name):
    """Scalars, nothing at all, and sizes that fill no block: what arrives is as near as declared."""
    codec, rng = make(name), np.random.default_rng(2)
    with jax.enable_x64(True):
        cases = [jnp.asarray(rng.normal(size=shape), dtype) for shape, dtype in (
            ((), "float32"), ((1,), "bfloat16"), ((0,), "float32"), ((3, 0), "bfloat16"), ((7,), "float64"), ((257,), "float32"),
            ((13, 20), "float16"))]
        states = [codec.init(x.shape, x.dtype) for x in cases]
        backs = jax.jit(lambda xs: [transfer(codec, x, state, KEYS[0])[1] for x, state in zip(xs, states)])(cases)
        for x, back in zip(cases, backs):
            assert (back.shape, back.dtype) == (x.shape, x.dtype) and np.isfinite(back).all()
            error, length = energy(np.asarray(back, np.float64)[None] - np.asarray(x, np.float64))[0], energy(np.asarray(x)[None])[0]
            rounding = float(jnp.finfo(x.dtype).eps)
            if codec.traits.unbiased:  # One draw: a multiple of what is expected.
                assert error <= 10 * (codec.traits.unbiased(x.size) + 0.1) * length
            elif codec.traits.contractive and not codec.traits.random and codec.traits.state_key == "none":
                assert error <= (1 - codec.traits.contractive(x.shape) + 4 * rounding) * length, (x.shape, x.dtype)
            elif codec.traits.contractive:
                assert error <= (1 + 4 * rounding) * length


@pytest.mark.parametrize("name", [name for name in ALL if make(name).traits.unbiased])
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
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), jax.tree.map(lambda y: y[i], batch[1:]),
                     one(x[i], state, KEYS[i])[1:])
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
    axis = workers.axis_name

    def swap(x, state, key):
        message = codec.encode(x, state, key if codec.traits.random else None)
        arrived = jax.tree.map(lambda leaf: mesh.exchange(leaf, [(0, 1), (1, 0)], axis), message)
        gathered = jax.tree.map(lambda leaf: mesh.all_gather(leaf, axis), message)
        return codec.decode(arrived, x.shape, x.dtype), jax.vmap(lambda each: codec.decode(each, x.shape, x.dtype))(gathered)

    shape, dtypes = (9, 5), ("float32", "bfloat16")
    states = [codec.init(shape, dtype) for dtype in dtypes]
    stacked = workers.stack(([jnp.ones(shape, dtype) for dtype in dtypes], states))
    program = jax.jit(workers.map(lambda xs, states, keys: [swap(*each) for each in zip(xs, states, keys)], (0, 0, None)))
    hlo = program.lower(*stacked, list(KEYS[:2])).compile().as_text()  # Of equal keys equal seeds would travel once.
    found = wire.collectives(hlo, 2)
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
    if name != "sign":  # Which knows no zero.
        np.testing.assert_array_equal(back[0], np.zeros(SHAPE))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    if codec.traits.state_key == "tensor":  # As it was.
        jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[1], old), after, state)
    if name != "sign" and "randomk" not in name and "halves" not in name:  # Which need not send it, or cannot.
        assert not np.isfinite(back[1:4]).all(axis=(1, 2)).any()
    for i in range(4 if codec.traits.state_key != "none" else 0):  # The message after it is as good as any.
        assert np.isfinite(many(name)(samples(), jax.tree.map(lambda leaf: leaf[i], after), KEYS)[1]).all()


@pytest.mark.parametrize("name", [name for name in ALL if make(name).traits.linear])
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
            message, memory = feedback.encode(grad, memory, key if codec.traits.random else None)
            return memory, (codec.decode(message, shape, grad.dtype), memory.error)

        memory, (sent, errors) = jax.jit(lambda: jax.lax.scan(step, feedback.init(shape, jnp.float64), (grads, KEYS[:steps])))()
        assert sent.dtype == errors.dtype == np.float64
        scale = np.abs(errors).max() + np.abs(grads).max()  # 'sign' alone lets it grow.
        np.testing.assert_allclose(sent[0] + errors[0], grads[0], atol=1e-14 * scale)
        np.testing.assert_allclose(sent.sum(axis=0) + memory.error, grads.sum(axis=0), atol=1e-13 * scale)


# -- Bounds, value by value -------------------------------------------------------------------------------------------

VALUES = hnp.arrays(np.float32, 700, elements=st.floats(-1e6, 1e6, width=32))


@functools.cache
def round_trip(name, **options):
    codec = codecs.make(name, **options)

    @jax.jit
    def both(x):
        return codec.decode(codec.encode(x, (), None), x.shape, x.dtype)

    return both


def bound(name, x_P):
    """What the docstrings promise."""
    if name in ("bfloat16", "float16"):
        digits, least = {"bfloat16": (8, 1e-38), "float16": (11, 3e-8)}[name]
        return np.abs(x_P) * 2.0**-digits + least
    block = 4 if name == "zfp" else 256
    blocks = np.pad(x_P, (0, -len(x_P) % block)).reshape(-1, block)
    largest_P = np.repeat(np.abs(blocks).max(axis=1), block)[:len(x_P)]
    if name.startswith("float8"):
        digits, span = {"float8_e4m3": (4, 448 * 2.0**9), "float8_e5m2": (3, 57344 * 2.0**16)}[name]
        return np.maximum(np.abs(x_P) * 2.0**-digits, largest_P / span / 2)
    return largest_P * {"int8": 1 / 254, "int4": 1 / 14, "int2": 1 / 2, "zfp": 60 * 2.0**-8}[name]


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int8", "int4", "int2", "zfp"])
@hypothesis.given(x_P=VALUES)
@hypothesis.settings(max_examples=40, deadline=None)
def test_errors_stay_within_the_bound(name, x_P):
    x_P = np.clip(x_P, -6e4, 6e4) if name == "float16" else x_P
    back = np.asarray(round_trip(name)(x_P), np.float64)
    assert (np.abs(back - x_P) <= bound(name, x_P.astype(np.float64)) * (1 + 1e-4) + 1e-35).all()


ERROR_BOUNDED = [(1e-3, 8, np.float32), (0.37, 12, np.float32), (1e3, 2, np.float32), (1e-3, 8, np.float16), (1e-3, 8, jnp.bfloat16)]


@pytest.mark.parametrize("e, width, dtype", ERROR_BOUNDED)
@hypothesis.given(x_P=VALUES, scale=st.sampled_from([1.0, 1e-3, 1e-6, 1e-7]))
@hypothesis.settings(max_examples=40, deadline=None)
def test_the_error_bound_holds_always(e, width, dtype, x_P, scale):
    x_P = np.clip(x_P * np.float32(scale), -6e4, 6e4).astype(dtype)
    back = np.asarray(round_trip("bounded", bound=e, bits_per_value=width)(x_P))
    assert (np.abs(back.astype(np.float64) - x_P.astype(np.float64)) <= e).all()


@pytest.mark.parametrize("e, width, dtype", ERROR_BOUNDED)
def test_the_error_bound_holds_where_roundings_are_worst(e, width, dtype):
    """Next to the middle between two numbers, over the whole range, and beyond it."""
    middles = (np.arange(-2**width, 2**width) + 0.5) * 2 * e
    x_P = np.concatenate([np.nextafter(middles.astype(np.float32), side) for side in (-np.inf, 0, np.inf)]
                         + [np.random.default_rng(0).uniform(-1, 1, 200_000) * e * 2**width]).astype(dtype)
    back = np.asarray(round_trip("bounded", bound=e, bits_per_value=width)(x_P))
    assert (np.abs(back.astype(np.float64) - x_P.astype(np.float64)) <= e).all()


def test_only_groups_with_too_many_outliers_are_sent_raw():
    x_P = np.zeros(512, np.float32)
    x_P[[0, 2]], x_P[[1, 3, 5]] = 7, 7  # Value p belongs to group p mod 2.
    message = codecs.make("bounded", outliers=2).encode(x_P, (), None)
    np.testing.assert_array_equal(bits.unpack(message["overflow"], 1, 2), [0, 1])
    assert np.count_nonzero(message["raw"]) == 3


# -- Parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 22, 24])
@pytest.mark.parametrize("size", [0, 13])
def test_packing_is_dense_and_exact(width, size):
    codes = np.random.default_rng(width).integers(0, 2**width, size, dtype=np.uint32)
    packed = jax.jit(lambda codes: bits.pack(codes, width))(codes)
    assert packed.dtype == np.uint8 and packed.size == bits.packed_bytes(size, width) == math.ceil(size * width / 8)
    np.testing.assert_array_equal(jax.jit(lambda packed: bits.unpack(packed, width, size))(packed), codes)


@pytest.mark.parametrize("shape, k, dtype", [
    ((1000,), 3, "float32"), ((5, 700), 4, "float32"), ((700,), 300, "float32"), ((65,), 1, "float32"), ((2, 20_001), 5000, "float32"),
    ((140_003,), 900, "float32"), ((140_003,), 900, "bfloat16"), ((140_003,), 900, "float64")])
def test_the_largest_are_those_of_a_sort(shape, k, dtype):
    """Of bfloat16 many are equal, and any of these will do."""
    with jax.enable_x64(dtype == "float64"):
        x = jnp.abs(jnp.asarray(np.random.default_rng(k).normal(size=shape), dtype)).at[..., 5:9].set(jnp.inf).at[..., 9:].min(3)
        chosen = jax.jit(sparse.largest, static_argnums=1)(x, k)
        assert (np.diff(np.sort(chosen, axis=-1), axis=-1) > 0).all()
        np.testing.assert_array_equal(np.sort(jnp.take_along_axis(x, chosen, axis=-1)), np.sort(jax.lax.top_k(x, k)[0], axis=-1))


def test_the_largest_of_zeros_are_any():
    chosen = sparse.largest(jnp.zeros(20_000).at[19_999].set(1e-40), 40)
    assert len(set(chosen.tolist())) == 40 and 0 <= chosen.min() and chosen.max() < 20_000


def test_the_first_set_bits():
    words = np.random.default_rng(0).integers(0, 2**32, 50, dtype=np.uint32) * (np.arange(50) % 3 > 0).astype(np.uint32)
    positions = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    for k in (1, len(positions)):
        np.testing.assert_array_equal(jax.jit(bits.first_set, static_argnums=1)(words, k), positions[:k])


def test_the_magnitude_of_a_row_is_not_a_number_if_one_of_its_values_is_none():
    for columns in (1, 24, 48, 256):
        x = np.random.default_rng(columns).normal(size=(5, columns)).astype(np.float32)
        x[0, -1], x[1, 0], x[2, -1], x[3] = np.nan, np.inf, -np.inf, 0
        expected = np.where(np.isfinite(x).all(axis=1), np.abs(x).max(axis=1), np.nan)
        np.testing.assert_array_equal(codec_lib.magnitude(jnp.asarray(x))[:, 0], expected)


def test_noise_is_uniform_and_keys_are_independent():
    n = 2**16
    u_KxP = np.asarray(jax.vmap(lambda key: noise.uniform((n,), noise.words(key)))(jax.random.split(jax.random.key(0), 4)), np.float64)
    assert (0 <= u_KxP).all() and (u_KxP < 1).all()
    counts = np.stack([np.histogram(u_P, 256, (0, 1))[0] for u_P in u_KxP])
    assert (np.square(counts - n / 256).sum(axis=1) / (n / 256) < 255 + 5 * math.sqrt(2 * 255)).all()
    centered = u_KxP - 0.5
    pairs = [(centered[0], centered[1]), (centered[0, 1:], centered[0, :-1]), (centered[2, 64:], centered[2, :-64]),
             (centered[1, 7:], centered[3, :-7])]
    assert all(abs(12 * (a * b).mean()) < 5 / math.sqrt(n) for a, b in pairs)
    np.testing.assert_array_equal(noise.uniform((9,), noise.words(jax.random.PRNGKey(5))), noise.uniform((9,), noise.words(jax.random.key(5))))


@pytest.mark.parametrize("name, dtype", [("bfloat16", jnp.bfloat16), ("float16", jnp.float16)])
def test_compilers_do_not_take_a_cast_for_none(name, dtype):
    x_P = samples()[0].ravel()
    np.testing.assert_array_equal(jax.jit(lambda x: x - round_trip(name)(x))(x_P), x_P - x_P.astype(dtype).astype(np.float32))


def test_groupwise_selection_keeps_nearly_the_energy_of_top_k():
    """The figures of `sparse`: 1 % of normal values."""
    x_P = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    kept = {name: energy(np.asarray(round_trip(name)(x_P))[None])[0] / energy(x_P[None])[0] for name in ("topk", "block_topk")}
    assert kept["topk"] == pytest.approx(0.084, abs=0.002) and kept["block_topk"] == pytest.approx(0.077, abs=0.002)


# -- Low rank ---------------------------------------------------------------------------------------------------------


def power_steps(codec, matrices, state):
    """Relative error of every message."""
    @jax.jit
    def step(a_IxJ, state):
        message = codec.encode(a_IxJ, state, None)
        return codec.decode(message, a_IxJ.shape, a_IxJ.dtype), codec.advance(state, message)

    errors = []
    for a_IxJ in matrices:
        back, state = step(a_IxJ, state)
        errors.append(np.linalg.norm(np.asarray(a_IxJ) - back) / np.linalg.norm(a_IxJ))
    return errors, state


@pytest.mark.parametrize("values, contractive", [("sign", False), ("float16", False), ("int8", True)])
def test_dct_is_as_contractive_as_its_values(values, contractive):
    delta = codecs.make("dct", fraction=0.25, values=values).traits.contractive
    assert (delta is not None) == contractive
    if contractive:  # A quarter of the coefficients, and of those what int8 keeps.
        assert delta((64, 64)) == 0.25 * codecs.make(values).traits.contractive((1024,))


@pytest.mark.parametrize("rest", [0.0, 1e-12, np.nan, np.inf])
def test_columns_that_say_nothing_begin_anew(rest):
    found_JxR, fresh_JxR = np.float32([[3, rest], [-6, 0], [0, 0]]), np.float32([[7, 8]] * 3)
    revived_JxR = jax.jit(codecs.revived)(found_JxR, fresh_JxR)
    expected_JxR = np.stack([found_JxR[:, 0] / 6 if np.isfinite(rest) else fresh_JxR[:, 0], fresh_JxR[:, 1]], axis=1)
    np.testing.assert_allclose(revived_JxR, expected_JxR, rtol=1e-6)


def test_low_rank_warms_up_to_the_best_approximation():
    rng = np.random.default_rng(0)
    left, right = np.linalg.qr(rng.normal(size=(20, 20)))[0], np.linalg.qr(rng.normal(size=(30, 20)))[0]
    values = 2.0 ** -np.arange(20)
    a_IxJ = (left * values @ right.T).astype(np.float32)
    best = math.sqrt(np.square(values[3:]).sum() / np.square(values).sum())
    codec = codecs.make("low_rank", rank=3)
    errors, state = power_steps(codec, [a_IxJ] * 12, codec.init((20, 30), jnp.float32))
    assert errors[-1] == pytest.approx(best, rel=1e-3) and (np.diff(errors) < 1e-6).all() and errors[0] > 1.5 * best
    full = codecs.make("low_rank", rank=20)
    assert power_steps(full, [a_IxJ], full.init((20, 30), jnp.float32))[0][0] < 1e-6
    # A scale whose square is no float32 makes no difference, nor do a zero matrix and an infinite one in between.
    tiny, state = power_steps(codec, [np.float32(1e-18) * a_IxJ] * 3, state)
    bad = [np.zeros((20, 30)), np.full((20, 30), np.inf), a_IxJ[:, :1] * np.ones(30)]
    with np.errstate(invalid="ignore"):
        _, state = power_steps(codec, [a_IxJ.astype(np.float32) for a_IxJ in bad], state)
    errors, _ = power_steps(codec, [a_IxJ] * 12, state)
    assert max(tiny[-1], errors[-1]) == pytest.approx(best, rel=1e-2)


@pytest.mark.parametrize("shape, matrix", [((), None), ((5,), None), ((1, 5), None), ((4, 6), (4, 6)), ((3, 3, 8, 16), (72, 16)),
                                           ((64, 4, 16), (64, 64))])
def test_tensors_are_seen_as_nearly_square_matrices(shape, matrix):
    assert codecs.matrix_shape(shape) == matrix


# -- Error feedback ---------------------------------------------------------------------------------------------------


def run_feedback(feedback, grads, keys=None):
    """Memory after all steps, and messages decoded at every step."""
    shape = grads.shape[1:]

    def step(memory, given):
        grad, key = given
        message, memory = feedback.encode(grad, memory, key)
        return memory, (feedback.codec.decode(message, shape, grad.dtype), memory.error)

    keys = jax.random.split(jax.random.key(0), len(grads)) if keys is None else keys
    run = jax.jit(lambda: jax.lax.scan(step, feedback.init(shape, grads.dtype), (grads, keys)))
    return jax.tree.map(np.asarray, run())


GRADS = np.random.default_rng(4).normal(size=(60, 30)) + 1


def test_decayed_error_is_the_momentum_of_demo():
    with jax.enable_x64(True):
        _, (sent, errors) = run_feedback(codecs.feedback.residual(codecs.make("topk", fraction=0.1), decay=0.9), GRADS)
    m = np.zeros(30)
    for grad, c, e in zip(GRADS, sent, errors):
        m = 0.9 * m + grad
        top = np.argsort(-np.abs(m))[:3]
        np.testing.assert_allclose(c, np.where(np.isin(np.arange(30), top), m, 0))
        m[top] = 0
        np.testing.assert_allclose(e, m)


def test_momentum_is_taken_before_anything_is_lost():
    with jax.enable_x64(True):
        memory, (sent, _) = run_feedback(codecs.feedback.momentum(codecs.make("scaled_sign"), beta=0.5), GRADS)
    v, total = np.zeros(30), np.zeros(30)
    for grad in GRADS:
        v = 0.5 * v + grad
        total += v
    np.testing.assert_allclose(sent.sum(axis=0) + memory.error, total, atol=1e-10)
    np.testing.assert_allclose(memory.momentum, v)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_ef21_holds_the_same_at_both_ends_and_finds_a_constant(beta):
    with jax.enable_x64(True):
        grads = np.broadcast_to(GRADS[0], (200, 30)).copy()
        grads[50, 3], grads[60] = np.nan, 0
        feedback = codecs.feedback.ef21(codecs.make("topk", fraction=0.1), beta)
        memory, (sent, errors) = run_feedback(feedback, grads)
        estimate = jnp.zeros(30)
        for arrived, held in zip(sent, errors):
            estimate = feedback.receive(estimate, arrived)
            np.testing.assert_allclose(estimate, held, atol=1e-12)
    np.testing.assert_allclose(estimate, GRADS[0], atol=1e-9)


@pytest.mark.parametrize("wrap", [codecs.feedback.residual, codecs.feedback.momentum, codecs.feedback.ef21])
@pytest.mark.parametrize("codec", ["topk", "low_rank", "int4"])
def test_a_bad_gradient_leaves_all_memory_as_it_was(wrap, codec):
    feedback = wrap(codecs.make(codec))
    grads = np.ones((3, 6, 8), np.float32) + np.arange(8, dtype=np.float32)
    grads[1, 0, 0] = np.inf
    before, _ = run_feedback(feedback, grads[:1])
    after, _ = run_feedback(feedback, grads[:2])
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run_feedback(feedback, grads)[0]))


def test_both_ends_of_ef21_agree_where_the_message_does_not_tell():
    """Random-k may leave out the value that is not finite."""
    grads = np.ones((40, 30), np.float32)
    grads[::3, 4] = np.nan
    feedback = codecs.feedback.ef21(codecs.make("randomk", fraction=0.2))
    _, (sent, errors) = run_feedback(feedback, grads)
    estimate = jnp.zeros(30)
    for arrived, held in zip(sent, errors):
        estimate = feedback.receive(estimate, arrived)
        np.testing.assert_array_equal(estimate, held)
    assert np.isfinite(estimate).all() and np.abs(estimate).max() > 0.5


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_error_memory_in_8_bits_stays_bounded_and_loses_little(rounding):
    codec, storage = codecs.make("topk", fraction=0.1), codecs.make("int8", rounding=rounding)
    grads = np.random.default_rng(0).normal(size=(2000, 100)).astype(np.float32) + np.linspace(0, 1, 100, dtype=np.float32)
    memory, (sent, errors) = run_feedback(codecs.feedback.residual(codec, storage=storage), grads)
    assert codecs.message_bytes(memory.error) == storage.num_bytes((100,), np.float32) < 0.3 * 400
    _, (exact, exact_errors) = run_feedback(codecs.feedback.residual(codec), grads)
    length = np.linalg.norm(errors["scales"], axis=1) * 127
    largest = np.abs(exact_errors).max(axis=1)
    assert length[1000:].max() < 1.5 * largest[1000:].max()
    np.testing.assert_allclose(sent.mean(axis=0), exact.mean(axis=0), atol=0.05)


# -- Trees ------------------------------------------------------------------------------------------------------------


def model_tree(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {"w": (20, 30), "v": (20, 30), "b": (30,), "scale": (), "empty": (0, 3), "thin": (100, 2)}
    tree = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return tree | {"half": rng.normal(size=9).astype(np.float16), "count": np.int32(7)}


@pytest.mark.parametrize("name, options, arrays", [
    ("int8", {}, 2), ("topk", {}, 4), ("int4", {"rounding": "stochastic"}, 2), ("low_rank", {"rank": 3}, 2), ("dct", {}, 4),
    ("identity", {}, 2)])
def test_many_small_tensors_become_few_messages(name, options, arrays):
    codec, tree = codecs.make(name, **options), model_tree()
    on_tree = codecs.on_tree(codec, tree, join_bytes=200)
    state = on_tree.init()
    message = jax.jit(on_tree.encode)(tree, state, jax.random.key(1))
    assert codecs.message_bytes(message) == on_tree.num_bytes and len(message) <= arrays
    back = jax.jit(on_tree.decode)(message, tree)
    assert jax.tree.map(lambda x, y: (np.shape(x), x.dtype) == (np.shape(y), y.dtype), tree, back) == jax.tree.map(lambda x: True, tree)
    assert back["count"] == 7
    if name in ("identity", "int8"):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=0.02), tree, back)
    after = on_tree.advance(state, message)
    if name == "low_rank":  # Matrices by themselves, as without a tree; what is thin or a vector arrives as it is.
        alone = codec.decode(codec.encode(tree["w"], codec.init((20, 30), np.float32), None), (20, 30), np.float32)
        np.testing.assert_allclose(back["w"], alone, atol=1e-5)
        np.testing.assert_array_equal(back["b"], tree["b"])
        np.testing.assert_array_equal(back["half"], tree["half"])
        assert any(np.abs(new - old).max() > 0.1 for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state)))
    else:
        assert jax.tree.leaves(after) == []


# -- Mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, options, message", [
    ("zip", {}, "codec 'zip' is unknown; use one of identity, bfloat16"),
    ("int8", {"width": 3}, "codec 'int8' has no option 'width'; use block, rounding"),
    ("natural", {"block": 3}, "codec 'natural' has no option 'block'; it has none, leave it out"),
    ("int8", {"block": 100}, "block=100 must be a positive multiple of 8"),
    ("int8", {"block": "large"}, "option block='large': give a value such as 256"),
    ("int4", {"rounding": "up"}, "rounding='up' is unknown; use one of nearest, stochastic"),
    ("integers", {"bits": 1}, "bits=1 must be a whole number from 2 to 8; 'sign' sends 1 bit"),
    ("float8_e4m3", {"block": 0}, "block=0 must be at least 1"),
    ("scaled_sign", {"block": 0}, "block=0 must be at least 1"),
    ("qsgd", {"levels": 0}, "levels=0 must be a whole number from 1 to 127"),
    ("topk", {"k": 0}, "topk k=0 must be a whole number of at least 1; k=1 sends one value"),
    ("topk", {"fraction": 0}, r"fraction=0 must lie in \(0, 1\]; 0.01 sends one value of a hundred"),
    ("topk", {"values": "qsgd"}, "values='qsgd': values take a codec without state, key or matrices; try 'int8'"),
    ("dct", {"values": "low_rank"}, "values='low_rank': values take a codec without"),
    ("block_topk", {"k": 0}, "k=0 must be at least 1"),
    ("block_topk", {"fraction": 1e-6}, "groups may have 4096 values; use a larger fraction"),
    ("randomk", {"fraction": 1e-6}, "at least one of 65536 is sent"),
    ("threshold", {"multiple": -1}, "multiple=-1 must be at least 0"),
    ("low_rank", {"rank": 0}, "rank=0 must be at least 1"),
    ("dct", {"chunk": 0}, "chunk=0 must be at least 1"),
    ("zfp", {"rate": 3}, "rate=3 must be a whole number of bits from 4 to 24"),
    ("bounded", {"bound": 0.0}, "bound=0.0 must be a positive number"),
    ("bounded", {"bits_per_value": 16}, "bits_per_value=16 must be a whole number from 2 to 12"),
    ("bounded", {"outliers": -1}, "outliers=-1: a group has 1 to 65536 values"),
])
def test_mistakes_name_the_value_and_the_fix(name, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        codecs.make(name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call, message", [
    (lambda: codecs.make("low_rank", rank=8).init((4, 100), np.float32),
     r"rank=8 exceeds 4, the smaller side of \(4, 100\) as a 4x100 matrix; use rank=4 or less"),
    (lambda: codecs.make("qsgd").encode(jnp.ones(3), (), None), "this codec draws random numbers, but key=None; pass a jax.random key"),
    (lambda: codecs.feedback.ef21(codecs.make("topk"), storage=codecs.make("int8")), "ef21 with storage='int8': its memory is held by receivers"),
    (lambda: codecs.feedback.residual(codecs.make("topk"), storage=codecs.make("low_rank")), "cannot be stored by codec 'low_rank'"),
    (lambda: codecs.feedback.residual(codecs.make("topk"), decay=0), r"decay=0 must lie in \(0, 1\]"),
    (lambda: codecs.feedback.momentum(codecs.make("topk"), beta=1), r"beta=1 must lie in \[0, 1\)"),
    (lambda: codecs.feedback.contracted(codecs.make("topk")), "codec 'topk' is biased, and need not be contracted"),
])
def test_wrong_uses_name_the_value_and_the_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call()
