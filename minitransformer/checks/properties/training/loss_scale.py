"""What loss scaling must do: give the gradient that there is, keep what float16 would lose, and
find its scale by itself."""

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.properties.nn import DTYPES, dtypes
from minitransformer.checks.strategies import seeds
from minitransformer.checks.suite import Suite

suite = Suite("training.loss_scale")

UNSCALED, NEXT, STATE = "unscaled", "next_scale", "LossScale"
scales = st.sampled_from([2.0**16, 1.0, 2.0, 2.0**24])


@suite.property(UNSCALED, seed=seeds, scale=scales, dtype=dtypes)
def a_scale_moves_no_digit(target, seed, scale, dtype):
    """Eq. 15.6: what was scaled in float32 or float64 comes back bit for bit, what is stored narrow
    comes back wide; zeros, infinities and NaN stay what they are."""
    rng = np.random.default_rng(seed)
    grad = np.ldexp(rng.standard_normal(50), rng.integers(-40, 20, 50))
    wide = grad.astype(np.float64 if dtype == "float64" else np.float32)
    got = target.unscaled(wide * wide.dtype.type(scale), scale)
    assert got.dtype == wide.dtype and np.array_equal(got, wide), "a digit moved"
    small = rng.integers(-100, 100, 50) * 2.0**-6
    stored = (small * (scale if dtype != "float16" else min(scale, 2.0**9))).astype(DTYPES[dtype])
    got = target.unscaled(stored, scale)
    assert got.dtype.itemsize >= 4, f"a gradient in {got.dtype}"
    assert np.array_equal(got.astype(np.float64), stored.astype(np.float64) / scale)
    edges = np.array([0.0, np.inf, -np.inf, np.nan], np.float32)
    assert np.array_equal(target.unscaled(edges, scale), edges, equal_nan=True)


@suite.property(UNSCALED, seed=seeds)
def what_float16_loses_is_kept(target, seed):
    """Gradients of 2^-30 are 0 in float16 and reach the weights with a scale of 2^16 (Eq. 15.6),
    with the relative error of the format."""
    grad = 2.0**-30 * (1 + np.random.default_rng(seed).random(20))
    assert not grad.astype(np.float16).any()
    got = target.unscaled((grad * 2.0**16).astype(np.float16), 2.0**16)
    assert (np.abs(got - grad) <= 2.0**-10 * grad).all(), "small gradients are lost"


@suite.property(
    NEXT,
    STATE,
    steps=st.lists(st.sampled_from([True, True, True, False]), min_size=30, max_size=80),
    patience=st.sampled_from([3, 1, 5]),
    start=st.sampled_from([2.0**3, 1.0, 2.0**6]),
)
def the_scale_follows_the_steps(target, steps, patience, start):
    """Eq. 15.7 - 15.8, step by step: halved by a step that is not finite and never below 1;
    doubled after `patience` finite ones in a row since its last change, never above the largest;
    a power of two all along."""
    state, scale, good = target.LossScale(start, 0), start, 0
    for finite in steps:
        before = state
        state = target.next_scale(state, finite, patience=patience, largest=2.0**6)
        assert before == (scale, good), "the state before was changed"
        if not finite:
            scale, good = max(scale / 2, 1.0), 0
        else:
            good += 1
            if good == patience:
                scale, good = min(2 * scale, 2.0**6), 0
        assert tuple(state) == (scale, good), f"{tuple(state)} instead of {(scale, good)}"


@suite.property(NEXT, STATE, limit=st.sampled_from([9, 1, 15]))
def it_finds_what_overflows(target, limit):
    """Where everything beyond 2^limit overflows, the scale ends within a factor of two of it,
    from above and from below (Eq. 15.7 - 15.8), and few steps are lost."""
    for start in (2.0**16, 1.0):
        state, lost = target.LossScale(start, 0), 0
        for step in range(400):
            finite = state.scale <= 2.0**limit
            lost += not finite and step >= 200
            state = target.next_scale(state, finite, patience=20)
        assert 2.0 ** (limit - 1) <= state.scale <= 2.0 ** (limit + 1), f"a scale of {state.scale}"
        assert lost <= 200 / 20, f"{lost} of 200 steps are lost"


@suite.property(UNSCALED, NEXT, STATE, seed=seeds)
def arguments_are_left_alone(target, seed):
    """The gradient that is given, and the state, stay what they are."""
    grad = np.random.default_rng(seed).standard_normal(5).astype(np.float32)
    before, state = grad.copy(), target.LossScale(4.0, 1)
    got = target.unscaled(grad, 4.0)
    got[...] = 7
    one = target.unscaled(grad, 1.0)
    one[...] = 7
    target.next_scale(state, False)
    assert np.array_equal(grad, before), "the gradient was modified"
    assert tuple(state) == (4.0, 1), "the state was modified"
