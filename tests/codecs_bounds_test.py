"""What codecs guarantee value by value, and their building blocks."""

import functools
import math

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decjax import codecs, noise
from decjax.codecs import bits, sparse
from decjax.codecs import codec as codec_lib

pytestmark = pytest.mark.usefixtures("quick_compilation")


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
    """The bounds in the docstrings."""
    if name in ("bfloat16", "float16"):
        digits, least = {"bfloat16": (8, 1e-38), "float16": (11, 3e-8)}[name]
        return np.abs(x_P) * 2.0**-digits + least
    block = 4 if name == "zfp" else 256
    blocks = np.pad(x_P, (0, -len(x_P) % block)).reshape(-1, block)
    largest_P = np.repeat(np.abs(blocks).max(axis=1), block)[: len(x_P)]
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


ERROR_BOUNDED = [
    (1e-3, 8, np.float32),
    (0.37, 12, np.float32),
    (1e3, 2, np.float32),
    (1e-3, 8, np.float16),
    (1e-3, 8, jnp.bfloat16),
]


@pytest.mark.parametrize("e, width, dtype", ERROR_BOUNDED)
@hypothesis.given(x_P=VALUES, scale=st.sampled_from([1.0, 1e-3, 1e-6, 1e-7]))
@hypothesis.settings(max_examples=40, deadline=None)
def test_the_error_bound_holds_always(e, width, dtype, x_P, scale):
    x_P = np.clip(x_P * np.float32(scale), -6e4, 6e4).astype(dtype)
    back = np.asarray(round_trip("bounded", bound=e, bits_per_value=width)(x_P))
    assert (np.abs(back.astype(np.float64) - x_P.astype(np.float64)) <= e).all()


@pytest.mark.parametrize("e, width, dtype", ERROR_BOUNDED)
def test_the_error_bound_holds_where_roundings_are_worst(e, width, dtype):
    """Values around the midpoint between two codes, over the whole range and beyond it."""
    middles = (np.arange(-(2**width), 2**width) + 0.5) * 2 * e
    x_P = np.concatenate(
        [np.nextafter(middles.astype(np.float32), side) for side in (-np.inf, 0, np.inf)]
        + [np.random.default_rng(0).uniform(-1, 1, 200_000) * e * 2**width]
    ).astype(dtype)
    back = np.asarray(round_trip("bounded", bound=e, bits_per_value=width)(x_P))
    assert (np.abs(back.astype(np.float64) - x_P.astype(np.float64)) <= e).all()


def test_only_groups_with_too_many_outliers_are_sent_raw():
    x_P = np.zeros(512, np.float32)
    x_P[[0, 2]], x_P[[1, 3, 5]] = 7, 7  # value p belongs to group p mod 2
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


@pytest.mark.parametrize(
    "shape, k, dtype",
    [
        ((1000,), 3, "float32"),
        ((5, 700), 4, "float32"),
        ((700,), 300, "float32"),
        ((65,), 1, "float32"),
        ((2, 20_001), 5000, "float32"),
        ((140_003,), 900, "float32"),
        ((140_003,), 900, "bfloat16"),
        ((140_003,), 900, "float64"),
    ],
)
def test_the_largest_are_those_of_a_sort(shape, k, dtype):
    """Many bfloat16 values are equal; any of them is a correct choice."""
    with jax.enable_x64(dtype == "float64"):
        x = jnp.abs(jnp.asarray(np.random.default_rng(k).normal(size=shape), dtype)).at[..., 5:9].set(jnp.inf).at[..., 9:].min(3)
        chosen = jax.jit(sparse.largest, static_argnums=1)(x, k)
        assert (np.diff(np.sort(chosen, axis=-1), axis=-1) > 0).all()
        np.testing.assert_array_equal(np.sort(jnp.take_along_axis(x, chosen, axis=-1)), np.sort(jax.lax.top_k(x, k)[0], axis=-1))


def test_the_largest_of_zeros_are_any():
    chosen = sparse.largest(jnp.zeros(20_000).at[19_999].set(1e-40), 40)
    assert len(set(chosen.tolist())) == 40 and chosen.min() >= 0 and chosen.max() < 20_000


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
    u_KxP = np.asarray(
        jax.vmap(lambda key: noise.uniform((n,), noise.words(key)))(jax.random.split(jax.random.key(0), 4)), np.float64
    )
    assert (u_KxP >= 0).all() and (u_KxP < 1).all()
    counts = np.stack([np.histogram(u_P, 256, (0, 1))[0] for u_P in u_KxP])
    assert (np.square(counts - n / 256).sum(axis=1) / (n / 256) < 255 + 5 * math.sqrt(2 * 255)).all()
    centered = u_KxP - 0.5
    pairs = [
        (centered[0], centered[1]),
        (centered[0, 1:], centered[0, :-1]),
        (centered[2, 64:], centered[2, :-64]),
        (centered[1, 7:], centered[3, :-7]),
    ]
    assert all(abs(12 * (a * b).mean()) < 5 / math.sqrt(n) for a, b in pairs)
    np.testing.assert_array_equal(
        noise.uniform((9,), noise.words(jax.random.PRNGKey(5))), noise.uniform((9,), noise.words(jax.random.key(5)))
    )


@pytest.mark.parametrize("limit", [1, 3, 100, 3 * 2**14, 2**16])
def test_whole_numbers_below_a_limit_are_equally_likely(limit):
    """With only 16 random bits, every third number below 3·2¹⁴ would be drawn twice as often as the others."""
    n, seed = 2**16, noise.words(jax.random.key(1))
    drawn_P = np.asarray(noise.below(limit, (n,), seed), np.int64)
    np.testing.assert_array_equal(drawn_P, np.asarray(noise.bits((n,), seed), np.int64) * limit >> 32)
    for kinds in (3, 64):
        sizes = np.bincount(np.arange(limit) % kinds, minlength=kinds)
        expected = n / limit * sizes[sizes > 0]
        counts = np.bincount(drawn_P % kinds, minlength=kinds)[sizes > 0]
        assert (np.square(counts - expected) / expected).sum() < len(expected) - 1 + 5 * math.sqrt(2 * len(expected))


@pytest.mark.parametrize("name, dtype", [("bfloat16", jnp.bfloat16), ("float16", jnp.float16)])
def test_compilers_do_not_take_a_cast_for_none(name, dtype):
    x_P = np.random.default_rng(0).normal(size=240).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: x - round_trip(name)(x))(x_P), x_P - x_P.astype(dtype).astype(np.float32))


def test_groupwise_selection_keeps_nearly_the_energy_of_top_k():
    """The figures in `sparse`: 1 % of normally distributed values."""
    x_P = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    kept = {name: np.square(round_trip(name)(x_P)).sum() / np.square(x_P).sum() for name in ("topk", "block_topk")}
    assert kept["topk"] == pytest.approx(0.084, abs=0.002) and kept["block_topk"] == pytest.approx(0.077, abs=0.002)


# -- Low rank ---------------------------------------------------------------------------------------------------------


def power_steps(codec, matrices, state):
    """Return the relative error of every message."""

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
    codec = codecs.make("dct", fraction=0.25, values=values)
    assert codec.contractive == contractive
    if contractive:  # a quarter of the coefficients, each in int8
        assert codec.delta((64, 64)) == 0.25 * codecs.make(values).delta((1024,))


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
    # A scale whose square overflows float32 makes no difference, nor do a zero or an infinite matrix in between.
    tiny, state = power_steps(codec, [np.float32(1e-18) * a_IxJ] * 3, state)
    bad = [np.zeros((20, 30)), np.full((20, 30), np.inf), a_IxJ[:, :1] * np.ones(30)]
    with np.errstate(invalid="ignore"):
        _, state = power_steps(codec, [a_IxJ.astype(np.float32) for a_IxJ in bad], state)
    errors, _ = power_steps(codec, [a_IxJ] * 12, state)
    assert max(tiny[-1], errors[-1]) == pytest.approx(best, rel=1e-2)


@pytest.mark.parametrize(
    "shape, matrix",
    [((), None), ((5,), None), ((1, 5), None), ((4, 6), (4, 6)), ((3, 3, 8, 16), (72, 16)), ((64, 4, 16), (64, 64))],
)
def test_tensors_are_seen_as_nearly_square_matrices(shape, matrix):
    assert codecs.matrix_shape(shape) == matrix
