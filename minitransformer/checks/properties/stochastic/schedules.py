"""What a schedule of drop rates must do, over layers, steps and heads."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close
from minitransformer.checks.suite import Suite

suite = Suite("stochastic.schedules")

kinds = ("constant", "linear", "geometric", "cosine", "increasing")
warmups = ("none", "hold", "ramp")
rates = st.sampled_from([0.5, 0.3, 1.0, 0.0, 0.6])
layer_counts = st.sampled_from([6, 1, 2, 3, 12])
step_counts = st.sampled_from([30, 100, 1, 7, 1200])
fractions = st.sampled_from([0.1, 0.25, 1.0, 0.0])


def over_layers(target, layers, **given):
    """The full rates, without a warm-up."""
    schedule = target.Schedule(warmup="none", **given)
    return np.array([schedule.drop_rate(layer, layers, 0, 10) for layer in range(layers)])


def over_steps(target, steps, layers=3, layer=1, **given):
    schedule = target.Schedule(**given)
    return np.array([schedule.drop_rate(layer, layers, t, steps) for t in range(steps + 1)])


@suite.property("Schedule", rate=rates, layers=layer_counts, steps=step_counts, fraction=fractions)
def rates_are_probabilities(target, rate, layers, steps, fraction):
    """0 <= p_l(t) <= rate for every layer, step and kind, also far below the last layer."""
    for kind in kinds:
        for warmup in warmups:
            schedule = target.Schedule(
                rate, kind, decrement=0.2, warmup=warmup, warmup_fraction=fraction
            )
            for layer in range(layers):
                for step in (0, 1, steps // 2, steps):
                    assert 0 <= schedule.drop_rate(layer, layers, step, steps) <= rate, kind


@suite.property("Schedule", rate=rates, layers=layer_counts, decrement=st.sampled_from([0.1, 0.2]))
def linear_falls_by_the_decrement_and_stops_at_zero(target, rate, layers, decrement):
    """Eq. 6.1, from the first layer, which has the whole rate."""
    got = over_layers(target, layers, rate=rate, schedule="linear", decrement=decrement)
    assert_close(got, np.maximum(rate - decrement * np.arange(layers), 0))


@suite.property("Schedule", rate=rates, layers=layer_counts, decay=st.sampled_from([0.9, 0.8, 0.0]))
def geometric_falls_by_the_same_factor(target, rate, layers, decay):
    """Eq. 6.2, from the first layer; a constant schedule is the factor 1."""
    got = over_layers(target, layers, rate=rate, schedule="geometric", decay=decay)
    assert_close(got, [rate * math.prod([decay] * layer) for layer in range(layers)])
    flat = over_layers(target, layers, rate=rate, schedule="constant", decay=decay)
    assert_close(flat, np.full(layers, rate))


@suite.property("Schedule", rate=rates, layers=layer_counts)
def cosine_is_a_half_wave(target, rate, layers):
    """Eq. 6.3: the whole rate first, 0 last, symmetric about the middle; alone, a layer has all."""
    got = over_layers(target, layers, rate=rate, schedule="cosine")
    assert_close(got[0], rate)
    if layers > 1:
        assert_close(got + got[::-1], np.full(layers, rate))
        assert_close(got, rate * np.cos(np.pi / 2 * np.arange(layers) / (layers - 1)) ** 2)


@suite.property("Schedule", rate=rates, layers=layer_counts)
def increasing_ends_with_the_whole_rate(target, rate, layers):
    """Eq. 6.4: equal steps from rate / L up to the rate."""
    got = over_layers(target, layers, rate=rate, schedule="increasing")
    assert_close(got, np.linspace(0, rate, layers + 1)[1:])


@suite.property("Schedule", steps=step_counts, fraction=fractions, kind=st.sampled_from(kinds))
def warmup_ends_when_it_says(target, steps, fraction, kind):
    """Eq. 6.5: from T_w = ⌈f T⌉ on the full rate; before it, the ramp t / T_w or the low share. 0
    means no warm-up at all."""
    full = over_layers(target, 3, schedule=kind)[1]
    until = math.ceil(round(fraction * steps, 6))
    t = np.arange(steps + 1)
    given = {"schedule": kind, "warmup_fraction": fraction, "low": 0.25}
    ramp = over_steps(target, steps, warmup="ramp", **given)
    hold = over_steps(target, steps, warmup="hold", **given)
    none = over_steps(target, steps, warmup="none", **given)
    assert_close(ramp, full * np.minimum(1, t / until if until else 1.0 + t), what="ramp")
    assert_close(hold, np.where(t < until, 0.25 * full, full), what="hold")
    assert_close(none, np.full(steps + 1, full), what="none")


@suite.property(
    "Schedule",
    layers=layer_counts,
    heads=st.sampled_from([4, 1, 3]),
    fraction=st.sampled_from([0.5, 0.2, 1.0]),
)
def a_local_start_widens_to_everything(target, layers, heads, fraction):
    """Eq. 6.6: one layer and one head at first, then more, none ever leaving, and all of them from
    T_s = ⌈f_s T⌉ on."""
    steps = 60
    schedule = target.Schedule(
        0.5, "constant", warmup="none", widen_fraction=fraction, first_layers=1, first_heads=1
    )
    reached = np.array(
        [
            [schedule.drop_rate(layer, layers, t, steps, heads) for layer in range(layers)]
            for t in range(steps + 1)
        ]
    )
    assert reached.shape == (steps + 1, layers, heads)
    assert np.isin(reached, [0, 0.5]).all()
    t, until = np.arange(steps + 1), math.ceil(round(fraction * steps, 6))
    share = np.minimum(t / until, 1)
    for count, of in (((reached > 0).any(axis=2).sum(axis=1), layers),
                      ((reached > 0).any(axis=1).sum(axis=1), heads)):  # fmt: skip
        assert np.array_equal(count, np.floor(1 + (of - 1) * share + 1e-9))
    # the lowest layers, and in each the first heads
    assert (np.diff((reached > 0).any(axis=2).astype(int), axis=1) <= 0).all()
    assert (np.diff(reached[:, 0], axis=1) <= 0).all()


@suite.property("Schedule", layers=layer_counts, heads=st.sampled_from([4, 1, 3]))
def without_a_local_start_all_heads_share_one_rate(target, layers, heads):
    """By default every layer and head takes part from the first step, and the rate is a number."""
    schedule = target.Schedule(0.4, "constant", warmup="none")
    for layer in range(layers):
        rate = schedule.drop_rate(layer, layers, 0, 10, heads)
        assert isinstance(rate, float) and rate == 0.4
