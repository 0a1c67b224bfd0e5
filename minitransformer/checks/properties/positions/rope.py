"""What rotary positions must do: turn pairs by their angles and nothing else, see distances only,
and stretch to longer texts as the four recipes say."""

import cmath
import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite

suite = Suite("positions.rope")

TABLES, FORWARD, BACKWARD = "rope_tables", "rope_forward", "rope_backward"

# leading axes, N, D, r: whole and partial, odd D, nothing at all
SHAPES = (
    ((2, 3), 5, 8, 8),
    ((2, 2), 3, 7, 4),
    ((), 2, 2, 2),
    ((1,), 1, 6, 2),
    ((3,), 4, 11, 10),
    ((0, 2), 3, 4, 4),
    ((2,), 0, 4, 2),
)
shapes = st.sampled_from(SHAPES)
layouts = st.sampled_from(["interleaved", "half"])
bases = st.sampled_from([10000.0, 500000.0, 10.0])
shifts = st.sampled_from([1, 2, 7, 100, -3])
factors = st.sampled_from([1.0, 2.0, 3.5, 16.0])
# trained at 16, 64, 4096: YaRN's ramp inside the pairs, or cut off at the first or the last
trained = st.sampled_from([16, 64, 512, 4096, 2**17])


def pairs(layout: str, rotary: int) -> list[tuple[int, int]]:
    """The channels that turn together, pair by pair."""
    if layout == "half":
        return [(i, i + rotary // 2) for i in range(rotary // 2)]
    return [(2 * i, 2 * i + 1) for i in range(rotary // 2)]


def as_complex(x: Array, layout: str, rotary: int) -> Array:
    """Each pair of channels as one complex number."""
    turned = np.zeros((*x.shape[:-1], rotary // 2), complex)
    for i, (a, b) in enumerate(pairs(layout, rotary)):
        turned[..., i] = x[..., a] + 1j * x[..., b]
    return turned


def case(shape, seed: int) -> tuple[Array, Array, int]:
    """x (*B, N, D), positions (N,) that are not in order, and the rotary width."""
    leading, n, width, rotary = shape
    positions = np.random.default_rng([seed, 3]).integers(0, 50, n)
    return normal((*leading, n, width), seed), positions, rotary


def angles(target, width: int, **options) -> Array:
    """The frequencies that a target turns by, read off its tables at a position so small that no
    angle passes π."""
    cos, sin = target.rope_tables(np.array([0.5]), width, **options)
    return 2 * np.arctan2(sin[0], cos[0])


# ---- the rotation --------------------------------------------------------------------------------


@suite.property(TABLES, FORWARD, shape=shapes, seed=seeds, layout=layouts, base=bases)
def each_pair_turns_by_its_angle(target, shape, seed, layout, base):
    """Eq. 7.1 and Eq. 7.2 in complex numbers, pair by pair: z e^{ipθ}, θ = base^{-2i/r}, with r the
    rotary width even where the head is wider."""
    x, positions, rotary = case(shape, seed)
    out, _ = target.rope_forward(
        x, *target.rope_tables(positions, rotary, base=base), layout=layout
    )
    assert out.shape == x.shape
    expected = x.copy()
    for i, (a, b) in enumerate(pairs(layout, rotary)):
        theta = math.exp(-2 * i / rotary * math.log(base))
        for row, p in enumerate(positions.tolist()):
            z = (x[..., row, a] + 1j * x[..., row, b]) * cmath.exp(1j * p * theta)
            expected[..., row, a], expected[..., row, b] = z.real, z.imag
    assert_close(out, expected)


@suite.property(TABLES, FORWARD, seed=seeds, layout=layouts, shift=shifts, base=bases)
def scores_depend_on_the_distance_alone(target, seed, layout, shift, base):
    """R_m q · R_n k is the same when both move on by as much; another distance gives another
    score."""
    q, k = normal((5, 6), seed), normal((7, 6), seed ^ 1)

    def scores(m, n):
        q_, _ = target.rope_forward(q, *target.rope_tables(m, 6, base=base), layout=layout)
        k_, _ = target.rope_forward(k, *target.rope_tables(n, 6, base=base), layout=layout)
        return q_ @ k_.T

    m, n = np.arange(5) + 2, np.arange(7)
    here = scores(m, n)
    assert_close(scores(m + shift, n + shift), here, 1e-11, what="scores after a common shift")
    assert np.abs(scores(m + 1, n) - here).max() > 1e-6, "the distance does not matter"


@suite.property(TABLES, FORWARD, seed=seeds, layout=layouts, shape=shapes)
def rotations_keep_lengths_and_compose(target, seed, layout, shape):
    """‖R_p x‖ = ‖x‖ pair by pair, R_0 x = x bit for bit, and R_a R_b x = R_{a+b} x."""
    x, a, rotary = case(shape, seed)
    b = a[::-1] + 11

    def turned(y, p):
        return target.rope_forward(y, *target.rope_tables(p, rotary), layout=layout)[0]

    assert np.array_equal(turned(x, 0 * a), x), "position 0 turns"
    before, after = (np.abs(as_complex(y, layout, rotary)) for y in (x, turned(x, a)))
    assert_close(after, before, what="lengths of the pairs")
    assert_close(turned(turned(x, a), b), turned(x, a + b), what="two rotations")


@suite.property(TABLES, FORWARD, seed=seeds, layout=layouts)
def channels_behind_the_rotary_width_do_not_move(target, seed, layout):
    """With r < D the head's first r channels turn as if they were alone; the others are what they
    were, bit for bit, whatever they hold."""
    x, positions = normal((2, 5, 9), seed), np.arange(1, 6)
    x[:, 2, 7], x[:, 3, 8] = np.nan, -np.inf
    tables = target.rope_tables(positions, 6)
    out, _ = target.rope_forward(x, *tables, layout=layout)
    assert np.array_equal(out[..., 6:], x[..., 6:], equal_nan=True), "the tail moved"
    alone, _ = target.rope_forward(x[..., :6].copy(), *tables, layout=layout)
    assert np.array_equal(out[..., :6], alone)
    assert not np.array_equal(alone, x[..., :6]), "nothing turned"


@suite.property(TABLES, FORWARD, seed=seeds, layout=layouts)
def positions_may_differ_by_batch_row(target, seed, layout):
    """Positions (B, N), as with padding on the left: each row turns by its own, for all heads."""
    x = normal((2, 3, 4, 6), seed)
    positions = np.array([[0, 0, 0, 1], [5, 6, 7, 9]])
    cos, sin = target.rope_tables(positions, 6)
    assert cos.shape == sin.shape == (2, 4, 3)
    out, _ = target.rope_forward(x, cos[:, None], sin[:, None], layout=layout)
    for row in range(2):
        for head in range(3):
            alone = target.rope_tables(positions[row], 6)
            expected, _ = target.rope_forward(x[row, head], *alone, layout=layout)
            assert_close(out[row, head], expected, what=f"row {row}, head {head}")


@suite.property(TABLES, FORWARD, BACKWARD, shape=shapes, seed=seeds, layout=layouts)
def rope_backward_is_the_derivative(target, shape, seed, layout):
    """Eq. 7.3 against the complex step, and as an inverse: turned and turned back is x."""
    x, positions, rotary = case(shape, seed)
    cos, sin = target.rope_tables(positions, rotary)
    out, cache = target.rope_forward(x, cos, sin, layout=layout)
    dout = cotangent(out, seed)
    assert_gradients(
        lambda x: target.rope_forward(x, cos, sin, layout=layout)[0],
        {"x": target.rope_backward(dout, cache)},
        {"x": x},
        dout,
    )
    assert_close(target.rope_backward(out, cache), x, what="turned back")


@suite.property(TABLES, FORWARD, BACKWARD, seed=seeds, layout=layouts, factor=factors)
def the_derivative_keeps_a_magnitude(target, seed, layout, factor):
    """Eq. 7.3 with tables that also stretch, as YaRN's do: the stretch is in the gradient too."""
    x = normal((2, 3, 4), seed)
    cos, sin = target.rope_tables(np.array([0, 3, 8]), 4)
    cos, sin = (1 + factor) * cos, (1 + factor) * sin
    out, cache = target.rope_forward(x, cos, sin, layout=layout)
    dout = cotangent(out, seed)
    assert_gradients(
        lambda x: target.rope_forward(x, cos, sin, layout=layout)[0],
        {"x": target.rope_backward(dout, cache)},
        {"x": x},
        dout,
    )


# ---- numbers -------------------------------------------------------------------------------------


@suite.property(TABLES, position=st.sampled_from([255, 257, 4095, 15962, 100_003, 2**20]))
def tables_are_exact_far_out(target, position):
    """e^{ipθ} = (e^{iθ})^p by repeated squaring (Eq. 7.1): an angle in fewer than 53 bits is off by
    as much as p loses."""
    cos, sin = target.rope_tables(np.array([1, position]), 128)
    assert cos.dtype == sin.dtype == np.float64, f"got dtype {cos.dtype}"
    for i in range(64):
        theta = 10000.0 ** (-i / 64)
        z, square, p = 1 + 0j, cmath.exp(1j * theta), position
        while p:
            z, square, p = (z * square if p & 1 else z), square * square, p >> 1
        got = complex(cos[1, i], sin[1, i])
        assert abs(got - z) < 1e-13 + 1e-15 * position, f"pair {i}: got {got}, expected {z}"


@suite.property(TABLES, FORWARD, BACKWARD, seed=seeds, layout=layouts, dtype=dtypes)
def narrow_arrays_are_rounded_once(target, seed, layout, dtype):
    """float16 and bfloat16 in and out, turned in float32, forward and backward."""
    x = normal((2, 5, 8), seed).astype(DTYPES[dtype])
    cos, sin = target.rope_tables(np.arange(5) + 300, 8)
    out, cache = target.rope_forward(x, cos, sin, layout=layout)
    exact, wide = target.rope_forward(x.astype(np.float64), cos, sin, layout=layout)
    assert_rounded_once(out, exact, dtype, what="out")
    dout = cotangent(out, seed).astype(DTYPES[dtype])
    dx = target.rope_backward(dout, cache)
    expected = target.rope_backward(dout.astype(np.float64), wide)
    assert_rounded_once(dx, expected, dtype, what="gradient of x")


@suite.property(TABLES, FORWARD, BACKWARD, seed=seeds, layout=layouts)
def arguments_are_left_alone(target, seed, layout):
    """No array of the caller is modified, one cache serves twice, and what was asked before does
    not change what is answered now."""
    x, positions = normal((2, 3, 6), seed), np.array([4, 0, 9])
    cos, sin = target.rope_tables(positions, 4)
    later, _ = target.rope_tables(positions + 5, 4)
    both, _ = target.rope_tables(np.concatenate([positions, positions + 5]), 4)
    assert np.array_equal(both, np.concatenate([cos, later])), "the tables remember another call"
    before = x.copy(), cos.copy(), sin.copy(), positions.copy()
    out, cache = target.rope_forward(x, cos, sin, layout=layout)
    dout = cotangent(out, seed)
    untouched = dout.copy()
    once, again = (target.rope_backward(dout, cache) for _ in range(2))
    assert np.array_equal(once, again), "the second backward differs from the first"
    assert np.array_equal(dout, untouched), "the cotangent was modified"
    for name, now, then in zip(
        ("x", "cos", "sin", "positions"), (x, cos, sin, positions), before, strict=True
    ):
        assert np.array_equal(now, then), f"{name} was modified"


# ---- longer texts --------------------------------------------------------------------------------


@suite.property(TABLES, "Scaling", factor=factors, base=bases, seed=seeds)
def linear_scaling_divides_the_positions(target, factor, base, seed):
    """θ / s at p is θ at p / s: positions are squeezed into the range it was trained on (Eq.
    7.4)."""
    positions = np.random.default_rng(seed).integers(0, 300, 7)
    got = target.rope_tables(positions, 10, base=base, scaling=target.Scaling("linear", factor))
    squeezed = target.rope_tables(positions / factor, 10, base=base)
    for name, a, b in zip(("cos", "sin"), got, squeezed, strict=True):
        assert_close(a, b, what=name)


@suite.property(TABLES, "Scaling", factor=factors, base=bases, width=st.sampled_from([4, 6, 128]))
def ntk_keeps_the_first_frequency_and_divides_the_last(target, factor, base, width):
    """Eq. 7.5: the first pair as it was, the last slower by s, those between by equal ratios."""
    plain = angles(target, width, base=base)
    got = angles(target, width, base=base, scaling=target.Scaling("ntk", factor))
    count = width // 2
    expected = [plain[i] / factor ** (i / (count - 1)) for i in range(count)]
    assert_close(got, np.array(expected), 1e-12, what="frequencies")
    assert_close(got / plain, np.array(expected) / plain, 1e-9, what="frequencies, scaled / plain")


@suite.property(
    TABLES, "Scaling", factor=factors, original=trained, times=st.sampled_from([0.5, 1, 1.5, 4])
)
def dynamic_ntk_waits_until_the_text_is_longer(target, factor, original, times):
    """Eq. 7.6: up to the length of training nothing changes; at `times` as long, it is NTK with
    s·times - (s - 1), which is `times` for s = 1."""
    length = int(original * times)
    scaling = target.Scaling("dynamic", factor, original=original)
    got = angles(target, 8, scaling=scaling, length=length)
    if length <= original:
        assert np.array_equal(got, angles(target, 8)), "a short text is turned otherwise"
        return
    grown = 1 + factor * (length - original) / original
    expected = angles(target, 8, scaling=target.Scaling("ntk", grown))
    assert_close(got, expected, what="frequencies")


@suite.property(
    TABLES, "Scaling", factor=factors, original=trained, width=st.sampled_from([8, 64, 128])
)
def yarn_keeps_the_fast_pairs_and_slows_the_slow_ones(target, factor, original, width):
    """Eq. 7.7: pairs that turn 32 times and more within the trained length stay as they are, those
    that turn at most once are slower by s, and between them the share changes in equal steps."""
    plain = angles(target, width)
    scaling = target.Scaling("yarn", factor, original=original)
    got = angles(target, width, scaling=scaling)
    turns = original * plain / (2 * math.pi)
    share = np.ones_like(plain) if factor == 1 else (1 - got / plain) / (1 - 1 / factor)
    expected = np.where(turns >= 32, 0.0, np.where(turns <= 1, 1.0, np.nan))
    known = ~np.isnan(expected)
    if factor == 1:
        assert_close(got, plain, what="frequencies with factor 1")
        return
    assert_close(share[known], expected[known], 1e-9, what="share of the slow frequency")
    assert (np.diff(share) >= -1e-9).all(), "a slower pair is slowed down less"
    inside = np.flatnonzero((share > 1e-9) & (share < 1 - 1e-9))
    steps = np.diff(share[inside])
    if steps.size:
        assert_close(steps, np.full_like(steps, steps[0]), 1e-9, what="steps of the ramp")


@suite.property(TABLES, "Scaling")
def yarn_of_a_known_model(target):
    """Eq. 7.7 and 9.8 for 128 channels, s = 16, trained at 4096: pair 20 is the last as it was,
    pair 46 the first at θ / 16; in the middle, at 33, the mean of both; magnitude 1.27726."""
    plain = angles(target, 128)
    got = angles(target, 128, scaling=target.Scaling("yarn", 16.0, original=4096))
    ratio = got / plain
    assert_close(ratio[:21], np.ones(21), what="fast pairs")
    assert_close(ratio[46:], np.full(18, 1 / 16), what="slow pairs")
    assert ratio[21] < 1 - 1e-3, "pair 21 is as it was"
    assert ratio[45] > 1 / 16 + 1e-3, "pair 45 is at the end of the ramp"
    assert_close(ratio[33], np.asarray((1 + 1 / 16) / 2), 1e-9, what="the middle of the ramp")


@suite.property(TABLES, FORWARD, "Scaling", factor=factors, seed=seeds, layout=layouts)
def yarn_multiplies_the_scores(target, factor, seed, layout):
    """Eq. 7.8: cos² + sin² is m² with m = 0.1 ln s + 1, so that every score is m² times what the
    rotation alone gives, or what `attention_factor` says; no other kind stretches."""
    m = 0.1 * math.log(factor) + 1
    x, positions = normal((2, 5, 8), seed), np.arange(5)
    for options, expected in (({}, m), ({"attention_factor": 1.5}, 1.5)):
        scaling = target.Scaling("yarn", factor, original=64, **options)
        cos, sin = target.rope_tables(positions, 8, scaling=scaling)
        assert_close(cos**2 + sin**2, np.full_like(cos, expected**2), what="cos² + sin²")
        out, _ = target.rope_forward(x, cos, sin, layout=layout)
        squares = (out**2).sum(axis=-1)
        assert_close(squares, expected**2 * (x**2).sum(axis=-1), what="score with itself")
    for scaling in (target.Scaling("linear", factor), target.Scaling("ntk", factor)):
        cos, sin = target.rope_tables(positions, 8, scaling=scaling)
        assert_close(cos**2 + sin**2, np.ones_like(cos), what=f"{scaling.kind}: cos² + sin²")


# ---- layouts -------------------------------------------------------------------------------------


@suite.property(
    TABLES, FORWARD, "to_half_layout", seed=seeds,
    heads=st.sampled_from([(2, 1), (4, 2), (1, 1), (3, 3)]),
    widths=st.sampled_from([(4, 4), (8, 4), (7, 6), (2, 2), (10, 10)]),
)  # fmt: skip
def converted_weights_give_the_same_scores(target, seed, heads, widths):
    """Eq. 7.9: with both projections (and biases) converted, rotation by halves gives the scores
    that interleaved rotation gave, for every head, its tail included."""
    width, rotary = widths
    x = normal((5, 3), seed)
    tables = target.rope_tables(np.arange(5) + 1, rotary)
    found = {}
    for layout in ("interleaved", "half"):
        turned = []
        for number, count in enumerate(heads):  # queries, then keys
            weight = normal((3, count * width), seed ^ number)
            bias = normal((count * width,), seed ^ (number + 2))
            if layout == "half":
                weight, bias = (
                    target.to_half_layout(a, count, rotary=rotary) for a in (weight, bias)
                )
            split = np.swapaxes((x @ weight + bias).reshape(5, count, width), 0, 1)
            turned.append(target.rope_forward(split, *tables, layout=layout)[0])
        q, k = turned
        k = np.repeat(k, heads[0] // heads[1], axis=0)
        found[layout] = q @ np.swapaxes(k, -1, -2)
    assert_close(found["half"], found["interleaved"], what="scores")


@suite.property("to_half_layout", "to_interleaved_layout", seed=seeds,
    widths=st.sampled_from([(4, None), (6, None), (8, 6), (7, 4), (5, 0)]))  # fmt: skip
def converting_back_restores_every_weight(target, seed, widths):
    """Eq. 7.9: the two conversions undo each other, bit for bit, in either order; the first head of
    width 8 becomes 0, 2, 4, 6, 1, 3, 5, 7."""
    width, rotary = widths
    weight = normal((5, 3 * width), seed)
    before = weight.copy()
    half = target.to_half_layout(weight, 3, rotary=rotary)
    assert np.array_equal(target.to_interleaved_layout(half, 3, rotary=rotary), weight)
    other = target.to_interleaved_layout(weight, 3, rotary=rotary)
    assert np.array_equal(target.to_half_layout(other, 3, rotary=rotary), weight)
    assert np.array_equal(weight, before), "the weight was modified"
    order = target.to_half_layout(np.arange(16.0), 2)
    assert order[:8].tolist() == [0, 2, 4, 6, 1, 3, 5, 7], f"got {order[:8]}"


@suite.property(TABLES, FORWARD, seed=seeds, layout=layouts, rotated=st.sampled_from([0, 2, 4, 8]))
def proportional_rotation_turns_the_first_pairs_of_the_whole(target, seed, layout, rotated):
    """Eq. 7.1 with `rotated` of 8 channels: the pairs and frequencies of all 8, of which the first
    turn and the rest stand, bit for bit."""
    x, positions = normal((3, 4, 8), seed), np.arange(4) + 1
    cos, sin = target.rope_tables(positions, 8, rotated=rotated)
    out, _ = target.rope_forward(x, cos, sin, layout=layout)
    whole, _ = target.rope_forward(x, *target.rope_tables(positions, 8), layout=layout)
    for i, pair in enumerate(pairs(layout, 8)):
        expected = whole if i < rotated // 2 else x
        for channel in pair:
            assert np.array_equal(out[..., channel], expected[..., channel]), f"channel {channel}"
