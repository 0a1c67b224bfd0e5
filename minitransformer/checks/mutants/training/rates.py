"""Mistakes people make in a learning rate."""

import math

from minitransformer.checks.properties.training.rates import suite
from minitransformer.training import rates as right

WAVE, TURN = "the_fall_is_half_a_wave", "the_rate_turns_once_and_never_jumps"
RAMP, FLOOR = (
    "the_warmup_rises_in_equal_steps_to_the_peak",
    "after_the_last_step_the_rate_stays_at_the_floor",
)


def _fall(step, peak, steps, warmup, low, wave):
    """Eq. 16.24 with another fall."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= steps or steps == warmup:
        return low
    return low + (peak - low) * wave((step - warmup) / (steps - warmup))


# ---- cosine --------------------------------------------------------------------------------------


@suite.mutant(
    "cosine_rate",
    "t / T_w: the first update moves nothing, and the peak comes one late",
    killed_by=RAMP,
)
def warmup_from_nothing(step, *, peak, steps, warmup=0, final_fraction=0.0):
    if step < warmup:
        return peak * step / warmup
    return right.cosine_rate(
        step, peak=peak, steps=steps, warmup=warmup, final_fraction=final_fraction
    )


@suite.mutant(
    "cosine_rate",
    "no warm-up: full steps while AdamW's moments know next to nothing",
    killed_by=RAMP,
)
def warmup_forgotten(step, *, peak, steps, warmup=0, final_fraction=0.0):
    return right.cosine_rate(step, peak=peak, steps=steps, final_fraction=final_fraction)


@suite.mutant(
    "cosine_rate",
    "1 + cos goes from 2 to 0: without the half the peak is doubled",
    killed_by=(WAVE, TURN),
)
def cosine_without_the_half(step, *, peak, steps, warmup=0, final_fraction=0.0):
    return _fall(step, peak, steps, warmup, peak * final_fraction,
                 lambda share: 1 + math.cos(math.pi * share))  # fmt: skip


@suite.mutant(
    "cosine_rate",
    "the wave runs from step 0: it is under way when the warm-up ends, and the rate jumps",
    killed_by=(WAVE, TURN),
)
def fall_counted_from_the_start(step, *, peak, steps, warmup=0, final_fraction=0.0):
    if step < warmup:
        return peak * (step + 1) / warmup
    return right.cosine_rate(step, peak=peak, steps=steps, final_fraction=final_fraction)


@suite.mutant(
    "cosine_rate",
    "a straight line has the same ends and the same middle",
    killed_by=WAVE,
)
def straight_fall(step, *, peak, steps, warmup=0, final_fraction=0.0):
    return _fall(step, peak, steps, warmup, peak * final_fraction, lambda share: 1 - share)


@suite.mutant(
    "cosine_rate",
    "a quarter of a wave falls steepest at the end: the floor is reached, not approached",
    killed_by=WAVE,
)
def quarter_of_a_wave(step, *, peak, steps, warmup=0, final_fraction=0.0):
    return _fall(step, peak, steps, warmup, peak * final_fraction,
                 lambda share: math.cos(math.pi / 2 * share))  # fmt: skip


@suite.mutant(
    "cosine_rate",
    "not held after the end: the cosine comes up again",
    killed_by=(FLOOR, TURN),
)
def rises_again_after_the_end(step, *, peak, steps, warmup=0, final_fraction=0.0):
    if step < warmup or steps == warmup:
        return right.cosine_rate(
            step, peak=peak, steps=steps, warmup=warmup, final_fraction=final_fraction
        )
    share = (step - warmup) / (steps - warmup)
    low = peak * final_fraction
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * share))


@suite.mutant(
    "cosine_rate",
    "the fraction taken for a rate: with a small peak the rate rises at the end",
    killed_by=(FLOOR, WAVE),
)
def floor_not_a_share_of_the_peak(step, *, peak, steps, warmup=0, final_fraction=0.0):
    return _fall(step, peak, steps, warmup, final_fraction,
                 lambda share: 0.5 * (1 + math.cos(math.pi * share)))  # fmt: skip


@suite.mutant(
    "cosine_rate",
    "the floor under a whole wave: half way it is too high, and the peak is above the peak",
    killed_by=(WAVE, TURN),
)
def floor_added_to_the_whole_peak(step, *, peak, steps, warmup=0, final_fraction=0.0):
    return _fall(step, peak, steps, warmup, peak * final_fraction,
                 lambda share: 0.5 * (1 + math.cos(math.pi * share))
                 / max(1 - final_fraction, 1e-9))  # fmt: skip


# ---- inverse square root -------------------------------------------------------------------------


@suite.mutant(
    "inverse_root_rate",
    "the larger of the two: it falls first and rises for ever",
    killed_by=(
        "inverse_root_peaks_at_the_end_of_the_warmup",
        "four_times_the_updates_have_half_the_rate",
    ),
)
def maximum_of_the_two(step, *, width, warmup):
    t = step + 1
    return width**-0.5 * max(t**-0.5, t * warmup**-1.5)


@suite.mutant(
    "inverse_root_rate",
    "steps counted from 0 where the formula counts from 1: the first update moves nothing",
    killed_by="inverse_root_peaks_at_the_end_of_the_warmup",
)
def updates_counted_from_zero(step, *, width, warmup):
    return right.inverse_root_rate(step - 1, width=width, warmup=warmup) if step else 0.0


@suite.mutant(
    "inverse_root_rate",
    "√W for 1 / √W: a wider model learns faster, until it diverges",
    killed_by=(
        "inverse_root_peaks_at_the_end_of_the_warmup",
        "four_times_the_updates_have_half_the_rate",
    ),
)
def width_upside_down(step, *, width, warmup):
    return right.inverse_root_rate(step, width=width, warmup=warmup) * width


@suite.mutant(
    "inverse_root_rate",
    "1 / t after the warm-up falls so fast that a long run stands still",
    killed_by="four_times_the_updates_have_half_the_rate",
)
def inverse_instead_of_its_root(step, *, width, warmup):
    rate = right.inverse_root_rate(step, width=width, warmup=warmup)
    return rate * min(1.0, math.sqrt(warmup / (step + 1)))
