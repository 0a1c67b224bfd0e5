"""What sinusoidal positions must do: be the waves of the paper, see distances only, and be added to
each row where it stands."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite

suite = Suite("positions.sinusoidal")

TABLE, FORWARD, BACKWARD = "sinusoidal_table", "sinusoidal_forward", "sinusoidal_backward"

widths = st.sampled_from([1, 2, 3, 5, 8, 13])
bases = st.sampled_from([10000.0, 500.0, 2.0])
integers = st.sampled_from(["int64", "int32", "uint8", "uint32"])
# leading axes of x and of the positions, N, W
SHAPES = (
    ((2,), (), 5, 4),
    ((2,), (2,), 3, 7),
    ((2, 3), (3,), 4, 1),
    ((2, 3), (2, 1), 2, 6),
    ((), (), 1, 1),
    ((0,), (), 3, 4),
    ((2,), (2,), 0, 5),
)
shapes = st.sampled_from(SHAPES)


def wave(p: int, channel: int, width: int, base: float) -> float:
    """One entry of the table by the formula."""
    angle = p * base ** (-2 * (channel // 2) / width)
    return math.cos(angle) if channel % 2 else math.sin(angle)


def waves(positions: Array, width: int, base: float = 10000.0) -> Array:
    """The whole table, entry by entry."""
    table = np.zeros((*positions.shape, width))
    for *at, channel in np.ndindex(table.shape):
        table[(*at, channel)] = wave(int(positions[tuple(at)]), channel, width, base)
    return table


def case(shape, seed: int) -> tuple[Array, Array]:
    """x, and positions that are in no order."""
    leading, of_positions, n, width = shape
    positions = np.random.default_rng([seed, 11]).integers(0, 90, (*of_positions, n))
    return normal((*leading, n, width), seed), positions


# ---- the table -----------------------------------------------------------------------------------


@suite.property(TABLE, width=widths, base=bases, seed=seeds, integer=integers)
def each_channel_is_its_wave(target, width, base, seed, integer):
    """Eq. 7.18 and Eq. 7.19 entry by entry, for even and odd widths and positions of any integer
    type, in any order and number of axes."""
    rng = np.random.default_rng(seed)
    for shape in ((7,), (2, 3), (), (0,)):
        positions = np.asarray(rng.integers(0, 200, shape)).astype(integer)
        got = target.sinusoidal_table(positions, width, base=base)
        assert_close(got, waves(positions, width, base), what="table")


@suite.property(TABLE)
def the_first_rows_are_known(target):
    """Eq. 7.18 and Eq. 7.19 by hand, base 10000 unless another is given: position 0 is 0, 1, 0, 1,
    …, and position 1 starts with sin 1, cos 1; with width 4 the second pair has 1/100."""
    got = target.sinusoidal_table(np.arange(2), 4)
    one = [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)]
    assert_close(got, np.array([[0, 1, 0, 1], one]), what="width 4")
    got = target.sinusoidal_table(np.array([0, 3]), 3)
    last = math.sin(3 * 10000 ** (-2 / 3))
    assert_close(got, np.array([[0, 1, 0], [math.sin(3), math.cos(3), last]]), what="width 3")


@suite.property(TABLE, half=st.integers(1, 9), base=bases, start=st.sampled_from([0, 5, 100]))
def similarity_depends_on_the_distance_alone(target, half, base, start):
    """P_p · P_q = Σ_i cos((p - q) ω_i) of Eq. 7.18, the same wherever the two stand and whichever
    is first; with itself every row has W/2. Even widths: a lone sine has no such law."""
    positions = start + np.arange(8)
    table = target.sinusoidal_table(positions, 2 * half, base=base)
    apart = positions[:, None] - positions
    omega = [base ** (-i / half) for i in range(half)]
    expected = sum(np.cos(apart * w) for w in omega)
    assert_close(table @ table.T, expected, what="P · P")


@suite.property(TABLE, width=widths, base=bases, step=st.sampled_from([1, 7, -3]))
def a_step_turns_each_pair(target, width, base, step):
    """P_{p+k} is P_p turned by k ω_i, pair by pair (Eq. 7.18, Eq. 7.19): the turn does not depend
    on p, so one matrix takes every position to the one k further."""
    positions = np.arange(4, 10)
    here = target.sinusoidal_table(positions, width, base=base)
    there = target.sinusoidal_table(positions + step, width, base=base)
    for i in range(width // 2):
        angle = step * base ** (-2 * i / width)
        c, s = math.cos(angle), math.sin(angle)
        sine, cosine = here[:, 2 * i], here[:, 2 * i + 1]
        expected = np.stack([sine * c + cosine * s, cosine * c - sine * s], axis=1)
        assert_close(there[:, 2 * i : 2 * i + 2], expected, what=f"pair {i}")


@suite.property(TABLE, start=st.sampled_from([2049, 30_000, 2**17 + 1]))
def tables_are_exact_far_out(target, start):
    """In float64 throughout: at position 30 000 an angle in float32 is off by a thousandth."""
    positions = start + np.arange(3)
    got = target.sinusoidal_table(positions, 6)
    assert got.dtype == np.float64, f"got dtype {got.dtype}"
    # a frequency is rounded to 2⁻⁵³, and the position multiplies that
    assert_close(got, waves(positions, 6), tolerance=4 * start * 2.0**-53, what="table")


# ---- added to a text -----------------------------------------------------------------------------


@suite.property(FORWARD, shape=shapes, seed=seeds, base=bases)
def each_row_gets_the_waves_of_its_position(target, shape, seed, base):
    """Eq. 7.20: x plus the waves, once and unscaled, for positions that all rows of the batch share
    and for those of each."""
    x, positions = case(shape, seed)
    out, _ = target.sinusoidal_forward(x, positions, base=base)
    expected = x + np.broadcast_to(waves(positions, x.shape[-1], base), x.shape)
    assert_close(out, expected)


@suite.property(FORWARD, seed=seeds, past=st.sampled_from([1, 4, 9]))
def decoding_goes_on_where_the_text_ends(target, seed, past):
    """Eq. 7.20 token by token, at past, past + 1, …, is what the whole text gets at once."""
    x = normal((2, past + 2, 6), seed)
    whole, _ = target.sinusoidal_forward(x, np.arange(past + 2))
    for p in range(past, past + 2):
        step, _ = target.sinusoidal_forward(x[:, p : p + 1], np.array([p]))
        assert_close(step, whole[:, p : p + 1], what=f"token {p}")


@suite.property(FORWARD, seed=seeds)
def padding_on_the_left_moves_nothing(target, seed):
    """Two rows, one padded by two tokens on its left: with its own positions that row's tokens get
    what they would get alone.

    https://github.com/unslothai/unsloth/issues/3699
    """
    x = normal((2, 4, 5), seed)
    out, _ = target.sinusoidal_forward(x, np.array([[0, 1, 2, 3], [0, 0, 0, 1]]))
    alone, _ = target.sinusoidal_forward(x[1:, 2:], np.arange(2))
    assert_close(out[1:, 2:], alone, what="the padded row")


@suite.property(FORWARD, BACKWARD, shape=shapes, seed=seeds)
def sinusoidal_backward_is_the_derivative(target, shape, seed):
    """Eq. 7.20 against the complex step: the cotangent goes on as it came."""
    x, positions = case(shape, seed)
    out, cache = target.sinusoidal_forward(x, positions)
    dout = cotangent(out, seed)
    assert_gradients(
        lambda x: target.sinusoidal_forward(x, positions)[0],
        {"x": target.sinusoidal_backward(dout, cache)},
        {"x": x},
        dout,
    )


# ---- numbers -------------------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, seed=seeds, dtype=dtypes)
def narrow_arrays_are_rounded_once(target, seed, dtype):
    """Narrow x stays narrow, and the waves are not rounded before they are added; where the sum is
    small that would be most of it."""
    positions = np.arange(2000, 2009)
    exact = waves(positions, 8)
    # x near -P: what is left of the two shows how each was rounded
    x = (normal((9, 8), seed, 0.01) - exact).astype(DTYPES[dtype])
    out, cache = target.sinusoidal_forward(x, positions)
    assert_rounded_once(out, x.astype(np.float64) + exact, dtype, what="out")
    assert target.sinusoidal_backward(out, cache).dtype == x.dtype, "dx has another dtype"


@suite.property(TABLE, FORWARD, BACKWARD, shape=shapes, seed=seeds)
def arguments_are_left_alone(target, shape, seed):
    """No array of the caller is modified, no result is a view of one, and calls do not know of each
    other."""
    x, positions = case(shape, seed)
    before = x.copy(), positions.copy()
    first = target.sinusoidal_table(positions, 4, base=10.0).copy()
    other = target.sinusoidal_table(positions + 1, 4, base=10.0)
    other += 1
    again = target.sinusoidal_table(positions, 4, base=10.0)
    assert np.array_equal(first, again), "the table depends on an earlier call"
    out, cache = target.sinusoidal_forward(x, positions)
    dout = cotangent(out, seed)
    untouched = dout.copy()
    dx = target.sinusoidal_backward(dout, cache)
    dx += 1
    assert np.array_equal(dout, untouched), "the gradient is a view of the cotangent"
    assert not np.shares_memory(out, x), "the output is a view of x"
    for name, now, then in zip(("x", "positions"), (x, positions), before, strict=True):
        assert np.array_equal(now, then), f"{name} was modified"
