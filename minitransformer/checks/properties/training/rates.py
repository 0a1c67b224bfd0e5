"""What a learning rate does over a run: it rises in equal steps, turns without a jump, falls."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close
from minitransformer.checks.suite import Suite

suite = Suite("training.rates")

peaks = st.sampled_from([3e-3, 1.0, 0.0])
fractions = st.sampled_from([0.1, 0.0, 0.5, 1.0])
# steps, warm-up: none, a usual one, all of it, all but one
lengths = st.sampled_from([(100, 10), (60, 0), (7, 7), (8, 7), (1, 0), (1, 1), (30, 1)])


def cosine(target, length, peak=1.0, fraction=0.0, beyond=5):
    """The rates of a whole run and of a few steps after it."""
    steps, warmup = length
    return np.array(
        [
            target.cosine_rate(t, peak=peak, steps=steps, warmup=warmup, final_fraction=fraction)
            for t in range(steps + beyond)
        ]
    )


# ---- cosine: Eq. 16.24 ---------------------------------------------------------------------------


@suite.property("cosine_rate", length=lengths, peak=peaks, fraction=fractions)
def the_warmup_rises_in_equal_steps_to_the_peak(target, length, peak, fraction):
    """Eq. 16.24, first half: the first update has one share of T_w already, the last all of it."""
    _, warmup = length
    rates = cosine(target, length, peak, fraction)[:warmup]
    assert_close(rates, peak * np.linspace(0, 1, warmup + 1)[1:])


@suite.property("cosine_rate", length=lengths, peak=peaks, fraction=fractions)
def the_fall_is_half_a_wave(target, length, peak, fraction):
    """Eq. 16.24, second half: from the peak at T_w to the floor at T, as much above the middle
    before half time as below it after."""
    steps, warmup = length
    low, span = peak * fraction, steps - warmup
    rates = cosine(target, length, peak, fraction)[warmup : steps + 1]
    if span:
        assert_close(rates[0], peak)
        assert_close(rates + rates[::-1], np.full(span + 1, peak + low))
        wave = np.cos(np.pi / 2 * np.arange(span + 1) / span) ** 2
        assert_close(rates, low + (peak - low) * wave)
    assert_close(rates[-1], low)


@suite.property("cosine_rate", length=lengths, peak=peaks, fraction=fractions)
def after_the_last_step_the_rate_stays_at_the_floor(target, length, peak, fraction):
    """A run that is made longer does not rise again: from T on it is η_min, a share of the peak."""
    steps, _ = length
    assert_close(cosine(target, length, peak, fraction)[steps:], np.full(5, peak * fraction))


@suite.property("cosine_rate", length=lengths, peak=peaks, fraction=fractions)
def the_rate_turns_once_and_never_jumps(target, length, peak, fraction):
    """Up until the peak, then down, and from the peak on no faster than a cosine where it is
    steepest: π/2 of its mean slope."""
    steps, warmup = length
    rates = cosine(target, length, peak, fraction)
    slack = 1e-12 * peak  # a few roundings
    assert (rates >= 0).all() and (rates <= peak + slack).all()
    top = max(warmup - 1, 0)
    up, down = np.diff(rates[: top + 1]), np.diff(rates[top:])
    assert (up >= -slack).all(), "the warm-up falls"
    assert (down <= slack).all(), "the rate rises after the warm-up"
    if steps > warmup:
        steepest = math.pi / 2 * peak * (1 - fraction) / (steps - warmup)
        assert (down >= -steepest - slack).all(), "a jump"


# ---- inverse square root: Eq. 16.25 --------------------------------------------------------------

widths = st.sampled_from([512, 64, 1, 7])
warmups = st.sampled_from([10, 1, 4, 25])


def inverse_root(target, width, warmup, steps):
    return np.array([target.inverse_root_rate(t, width=width, warmup=warmup) for t in range(steps)])


@suite.property("inverse_root_rate", width=widths, warmup=warmups)
def inverse_root_peaks_at_the_end_of_the_warmup(target, width, warmup):
    """Eq. 16.25: update T_w has the largest rate, 1 / √(W T_w); equal steps lead up to it."""
    rates = inverse_root(target, width, warmup, 4 * warmup)
    assert int(rates.argmax()) == warmup - 1
    peak = 1 / math.sqrt(width * warmup)
    assert_close(rates[:warmup] / peak, np.arange(1, warmup + 1) / warmup)


@suite.property("inverse_root_rate", width=widths, warmup=warmups)
def four_times_the_updates_have_half_the_rate(target, width, warmup):
    """Eq. 16.25 after the warm-up, and over the width as well."""
    rates = inverse_root(target, width, warmup, 8 * warmup)
    wide = inverse_root(target, 4 * width, warmup, 8 * warmup)
    peak = rates.max()
    for count in range(warmup, 2 * warmup + 1):
        assert_close(rates[4 * count - 1] / peak, rates[count - 1] / peak / 2)
    assert_close(wide / peak, rates / peak / 2)
