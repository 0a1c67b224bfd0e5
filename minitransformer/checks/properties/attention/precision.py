"""What narrow formats must do: hold the nearest number, ties to even, and cost attention no more
than their digits say; a mask hides in every one of them."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.attention.dense import attention_forward
from minitransformer.checks.gradients import assert_close
from minitransformer.checks.properties.attention.dense import cases
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite

suite = Suite("attention.precision")

ROUND, BITS, ATTEND, ERRORS = (
    "round_to", "bfloat16_by_bits", "emulated_attention", "step_errors",
)  # fmt: skip
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
names = st.sampled_from(list(DTYPES))
STEPS = ("inputs", "scores", "weights", "sums", "out")
# digits, lowest exponent of a normal number, the largest number
LAYOUT = {"float16": (11, -14, 65504.0), "bfloat16": (8, -126, 255 * 2.0**120)}


EDGES = (
    *(0.0, np.inf, np.nan, 65504.0, 65519.996, 65520.0, 2.0**-24, 2.0**-25, 2.0**-133, 2.0**-134),
    *(3.389e38, 3.396e38, 3.4e38, 1.00390625, 1.01171875),
)


def any_float32(seed: int, count: int = 400) -> Array:
    """Every kind of number: bits at random, zeros, infinities, NaN, the edges of the formats."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)
    edges = np.array(EDGES, np.float32)
    usual = np.ldexp(rng.standard_normal(count), rng.integers(-30, 20, count)).astype(np.float32)
    return np.concatenate([bits.view(np.float32), edges, -edges, usual])


def nearest(x: float, name: str) -> float:
    """Eq. 15.1 in whole numbers and fractions."""
    digits, lowest, largest = LAYOUT[name]
    if x == 0 or not math.isfinite(x):
        return x
    exact, exponent = abs(Fraction(x)), lowest
    while exact >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - digits + 1)
    whole, rest = divmod(exact, unit)
    up = rest * 2 > unit or (rest * 2 == unit and whole % 2)
    value = (whole + bool(up)) * unit
    return math.copysign(float(value) if value <= largest else math.inf, x)


# ---- rounding ------------------------------------------------------------------------------------


@suite.property(ROUND, seed=seeds, name=names)
def the_nearest_number_ties_to_even(target, seed, name):
    """Eq. 15.1 by fractions: of float64 at once, halfway cases and those a hair beside them among
    the numbers; zeros and infinities keep their sign, NaN stays."""
    digits, lowest, largest = LAYOUT[name]
    rng = np.random.default_rng(seed)
    whole = rng.integers(2 ** (digits - 1), 2**digits, 40)
    half = (whole + 0.5) * 2.0 ** rng.integers(-5, 6, 40)
    beside = half * (1 + rng.choice([-1, 1], 40) * 2.0**-40)  # float32 would make them a tie
    small = rng.standard_normal(20) * 2.0 ** (lowest - rng.integers(0, digits + 2, 20))
    edges = np.array([largest, largest * (1 + 2.0**-digits), -largest * 1.01, 0.0, -0.0, np.inf])
    x = np.concatenate([half, beside, small, edges, -half])
    got = target.round_to(x, name)
    expected = np.array([nearest(value, name) for value in x.tolist()])
    assert got.dtype == np.float64 and np.array_equal(got, expected), "not the nearest"
    assert np.array_equal(np.signbit(got), np.signbit(x)), "a sign was lost"
    assert np.isnan(target.round_to(np.array([np.nan]), name)).all()


@suite.property(ROUND, seed=seeds, name=names)
def formats_are_those_of_the_hardware(target, seed, name):
    """From float32 every bit is what NumPy's float16 and ml_dtypes' bfloat16 make of it."""
    x = any_float32(seed)
    with np.errstate(all="ignore"):
        expected = x.astype(DTYPES[name]).astype(np.float32)
    got = target.round_to(x, name)
    assert got.dtype == np.float32 and np.array_equal(got, expected, equal_nan=True)


@suite.property(ROUND, seed=seeds, name=names)
def an_error_is_at_most_half_a_unit(target, seed, name):
    """Eq. 15.2, and the bound is reached; rounding what was rounded changes nothing, and keeps the
    order."""
    digits, lowest, _ = LAYOUT[name]
    rng = np.random.default_rng(seed)
    x = np.sort(np.ldexp(1 + rng.random(200), rng.integers(lowest, 15, 200)))
    got = target.round_to(x, name)
    error = np.abs(got - x) / x
    assert (error <= 2.0**-digits).all(), f"an error of {error.max():.1e}"
    assert (np.diff(got) >= 0).all(), "the order changed"
    assert np.array_equal(target.round_to(got, name), got), "the second time is another number"
    halfway = np.array([1 + 2.0**-digits])
    assert abs(target.round_to(halfway, name)[0] - halfway[0]) == 2.0**-digits


@suite.property(BITS, ROUND, seed=seeds)
def the_carry_rounds(target, seed):
    """Eq. 15.3 is Eq. 15.1 bit for bit, whatever the float32: into the next power of two, into
    infinity; NaN stays NaN, with nothing in its lower half."""
    x = np.append(any_float32(seed), np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32))
    got = target.bfloat16_by_bits(x)
    assert got.dtype == np.float32 and not (got.view(np.uint32) & np.uint32(0xFFFF)).any()
    assert np.array_equal(got, target.round_to(x, "bfloat16"), equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(x))


# ---- attention -----------------------------------------------------------------------------------


def plain_cases(**options):
    """Cases of dense attention with a mask and a scale alone."""
    return cases(softcaps=(None,), multiplied=(False,), **options).map(_stripped)


def _stripped(case):
    for name in ("bias", "softcap", "multiplier"):
        case.options.pop(name, None)
    return case


@suite.property(ATTEND, case=plain_cases())
def without_a_format_it_is_attention(target, case):
    """Nothing is rounded unless asked for: dense attention, dead rows included."""
    got = target.emulated_attention(case.q, case.k, case.v, formats={}, **case.options)
    expected, _ = attention_forward(case.q, case.k, case.v, **case.options)
    assert_close(got, expected)


@suite.property(ATTEND, seed=seeds, name=names, step=st.sampled_from(STEPS), causal=st.booleans())
def a_step_rounds_where_it_is_said_to(target, seed, name, step, causal):
    """Eq. 15.4 with one step narrow, by another rounding: ml_dtypes' and NumPy's; sums product by
    product in the order of the terms (Eq. 15.5)."""
    q, k, v = (normal((2, h, 5, 3), seed ^ n, 2.0) for n, h in enumerate((4, 2, 2)))
    keep = np.tri(5, dtype=np.bool_) if causal else None
    got = target.emulated_attention(q, k, v, formats={step: name}, keep=keep)

    def narrow(x):
        return np.asarray(x).astype(DTYPES[name]).astype(np.float64)

    def product(a, b):
        if step != "sums":
            return a @ b
        total = np.zeros((*a.shape[:-1], b.shape[-1]))
        for n in range(a.shape[-1]):
            total = narrow(total + narrow(a[..., n, None] * b[..., n, None, :]))
        return total

    if step == "inputs":
        q, k, v = narrow(q), narrow(k), narrow(v)
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    scores = product(q, np.swapaxes(k, -1, -2)) / math.sqrt(3)
    scores = narrow(scores) if step == "scores" else scores
    scores = scores if keep is None else np.where(keep, scores, -np.inf)
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = e / e.sum(axis=-1, keepdims=True)
    out = product(narrow(weights) if step == "weights" else weights, v)
    # a rounding of 1e-16 may decide a tie: one unit of the format where it does
    assert_close(got, narrow(out) if step == "out" else out, 2.0 ** -LAYOUT[name][0] / 4)


@suite.property(ATTEND, case=plain_cases(), name=names, step=st.sampled_from([*STEPS, "all"]))
def a_mask_hides_in_every_format(target, case, name, step):
    """Another key and value where nobody may look change no bit, however large; a row with no key
    gives exactly 0. A finite number added to scores hides nothing in float16."""
    if "keep" not in case.options:
        return
    formats = dict.fromkeys(STEPS if step == "all" else (step,), name)
    shape = (*np.broadcast_shapes(case.q.shape[:-3], case.k.shape[:-3], case.v.shape[:-3]),
             *case.q.shape[-3:-1], case.k.shape[-2])  # fmt: skip
    keep = np.broadcast_to(case.options["keep"], shape)
    hidden = ~keep.any(axis=tuple(range(keep.ndim - 1)))
    out = target.emulated_attention(case.q, case.k, case.v, formats=formats, **case.options)
    assert (out[~keep.any(axis=-1)] == 0).all(), "a row with no key is not 0"
    k, v = (np.where(hidden[:, None], 3e4, x) for x in (case.k, case.v))
    again = target.emulated_attention(case.q, k, v, formats=formats, **case.options)
    assert np.array_equal(again, out, equal_nan=True), "a masked key is felt"


@suite.property(ERRORS, ATTEND, seed=seeds, name=names)
def what_a_step_costs_is_measured(target, seed, name):
    """Each step's error is that of the output against no rounding at all, relative to its norm;
    each is within what Eq. 15.2 allows, and scores of float16 may overflow where those of bfloat16
    do not."""
    q, k, v = (normal((1, 2, 6, 4), seed ^ n) for n in range(3))
    found = target.step_errors(q, k, v, name=name)
    assert set(found) == {*STEPS, "all"}
    exact, _ = attention_forward(q, k, v)
    for step, error in found.items():
        formats = dict.fromkeys(STEPS if step == "all" else (step,), name)
        out = target.emulated_attention(q, k, v, formats=formats)
        expected = float(np.linalg.norm(out - exact) / np.linalg.norm(exact))
        assert abs(error - expected) < 1e-12, f"{step}: {error}, not {expected}"
        assert 0 < error < 200 * 2.0 ** -LAYOUT[name][0], f"{step}: an error of {error:.1e}"
    large = target.step_errors(400 * q + 1e3, 400 * k + 1e3, v, name=name)
    assert (large["scores"] == np.inf) == (name == "float16"), f"scores of a million: {large}"


@suite.property(ROUND, BITS, ATTEND, seed=seeds, name=names)
def arguments_are_left_alone(target, seed, name):
    """No array of the caller is modified."""
    q, k, v = (normal((2, 3, 4), seed ^ n) for n in range(3))
    narrow, keep = any_float32(seed), np.tri(3, dtype=np.bool_)
    given = (q, k, v, narrow, keep)
    before = [x.copy() for x in given]
    target.round_to(q, name)
    target.round_to(narrow, name)
    target.bfloat16_by_bits(narrow)
    target.emulated_attention(q, k, v, formats=dict.fromkeys(STEPS, name), keep=keep)
    for now, then in zip(given, before, strict=True):
        assert np.array_equal(now, then, equal_nan=now.dtype != np.bool_), (
            "an argument was modified"
        )
