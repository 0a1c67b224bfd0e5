"""Mistakes people make with narrow numbers."""

import ml_dtypes
import numpy as np

from minitransformer.attention import precision as right
from minitransformer.checks.properties.attention.precision import suite

NEAREST = "the_nearest_number_ties_to_even"
HARDWARE = "formats_are_those_of_the_hardware"
HALF = "an_error_is_at_most_half_a_unit"
CARRY = "the_carry_rounds"
PLAIN = "without_a_format_it_is_attention"
WHERE = "a_step_rounds_where_it_is_said_to"
HIDES = "a_mask_hides_in_every_format"
COSTS = "what_a_step_costs_is_measured"
ALONE = "arguments_are_left_alone"

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


# ---- rounding ------------------------------------------------------------------------------------


@suite.mutant("round_to", "digits cut off", killed_by=(NEAREST, HARDWARE, HALF))
def truncated(x, name):
    near = right.round_to(x, name)
    digits, lowest, _ = right.FORMATS[name]
    with np.errstate(all="ignore"):
        unit = np.ldexp(1.0, np.maximum(np.frexp(near)[1] - 1, lowest) - digits + 1)
        beyond = np.isfinite(near) & (np.abs(near) > np.abs(x))
        return np.where(beyond, near - np.copysign(unit, near), near).astype(x.dtype)


@suite.mutant("round_to", "halves away from zero", killed_by=(NEAREST, HARDWARE))
def ties_away_from_zero(x, name):
    digits, lowest, _ = right.FORMATS[name]
    with np.errstate(all="ignore"):
        place = np.maximum(np.frexp(x)[1] - 1, lowest) - digits + 1
        parts = np.ldexp(x.astype(np.float64), -place)
        away = np.ldexp(np.copysign(np.floor(np.abs(parts) + 0.5), parts), place)
        return np.where(np.isfinite(x), right.round_to(away, name), x).astype(x.dtype)


@suite.mutant("round_to", "float64 through float32: two roundings", killed_by=NEAREST)
def rounded_twice(x, name):
    with np.errstate(all="ignore"):
        return right.round_to(x.astype(np.float32), name).astype(x.dtype)


@suite.mutant("round_to", "bfloat16 through float16", killed_by=(NEAREST, HARDWARE, HALF))
def one_format_through_the_other(x, name):
    return right.round_to(right.round_to(x, "float16"), name)


@suite.mutant("round_to", "too large is the largest", killed_by=(NEAREST, HARDWARE))
def saturated(x, name):
    largest = right.FORMATS[name].largest
    got = right.round_to(x, name)
    return np.where(np.isinf(got) & np.isfinite(x), np.copysign(largest, x), got).astype(x.dtype)


@suite.mutant("round_to", "small numbers are 0", killed_by=(NEAREST, HARDWARE))
def subnormals_flushed(x, name):
    got = right.round_to(x, name)
    return np.where(np.abs(got) < 2.0 ** right.FORMATS[name].lowest, 0 * got, got).astype(x.dtype)


@suite.mutant("round_to", "rounded where it stands", killed_by=ALONE)
def rounded_in_place(x, name):
    x[...] = right.round_to(x, name)
    return x


@suite.mutant("bfloat16_by_bits", "the lower half cut off", killed_by=CARRY)
def lower_half_cut_off(x):
    bits = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32(np.nan), bits.view(np.float32))


@suite.mutant("bfloat16_by_bits", "+ 0x8000: ties go up", killed_by=CARRY)
def half_always_added(x):
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))


@suite.mutant("bfloat16_by_bits", "the carry makes a NaN zero", killed_by=CARRY)
def nan_rounded_like_a_number(x):
    bits = np.ascontiguousarray(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)


# ---- attention -----------------------------------------------------------------------------------


def _lowest(name):
    return -right.FORMATS[name].largest


@suite.mutant(
    "emulated_attention",
    "-1e9 added to hide a key: https://github.com/huggingface/transformers/issues/17306",
    killed_by=(PLAIN, HIDES),
)
def mask_added_as_a_number(q, k, v, *, formats, keep=None, scale=None):
    if keep is None:
        return right.emulated_attention(q, k, v, formats=formats, scale=scale)
    scale = right.score_scale(scale, q.shape[-1])
    repeat = q.shape[-3] // k.shape[-3]
    k, v = (np.repeat(x, repeat, axis=-3) for x in (k, v))

    def at(step, x):
        return right.round_to(x, formats[step]) if step in formats else x

    scores = at("scores", q @ k.mT * scale)
    scores = at("scores", scores + np.where(keep, 0, -1e4))
    weights, _ = right.softmax_forward(scores, check_finite=False)
    return at("out", at("weights", weights) @ v)


@suite.mutant("emulated_attention", "inputs are rounded whatever is asked", killed_by=PLAIN)
def always_narrow(q, k, v, *, formats, **options):
    return right.emulated_attention(q, k, v, formats={"inputs": "bfloat16", **formats}, **options)


@suite.mutant("emulated_attention", "P is rounded after the values", killed_by=WHERE)
def weights_left_wide(q, k, v, *, formats, **options):
    formats = {step: name for step, name in formats.items() if step != "weights"}
    return right.emulated_attention(q, k, v, formats=formats, **options)


@suite.mutant("emulated_attention", "products are exact, sums too", killed_by=WHERE)
def sums_left_wide(q, k, v, *, formats, **options):
    formats = {step: name for step, name in formats.items() if step != "sums"}
    return right.emulated_attention(q, k, v, formats=formats, **options)


@suite.mutant("emulated_attention", "one format serves for the other", killed_by=WHERE)
def always_bfloat16(q, k, v, *, formats, **options):
    return right.emulated_attention(q, k, v, formats=dict.fromkeys(formats, "bfloat16"), **options)


@suite.mutant("emulated_attention", "a row with no key is the mean of the values", killed_by=HIDES)
def dead_rows_read_everything(q, k, v, *, formats, keep=None, scale=None):
    if keep is not None:
        keep = keep | ~np.any(keep, axis=-1, keepdims=True)
    return right.emulated_attention(q, k, v, formats=formats, keep=keep, scale=scale)


@suite.mutant("step_errors", "what two formats differ by", killed_by=COSTS)
def measured_against_another_format(q, k, v, *, name, **options):
    other = {"float16": "bfloat16", "bfloat16": "float16"}[name]
    return right.step_errors(q, k, v, name=other, **options)


@suite.mutant("step_errors", "overflow counts for nothing", killed_by=COSTS)
def overflow_not_noticed(q, k, v, *, name, **options):
    found = right.step_errors(q, k, v, name=name, **options)
    return {step: error if np.isfinite(error) else 0.0 for step, error in found.items()}
