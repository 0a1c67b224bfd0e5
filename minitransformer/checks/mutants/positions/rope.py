"""Mistakes people make with rotary positions."""

import dataclasses
import functools

import numpy as np
from ml_dtypes import bfloat16

from minitransformer.checks.properties.positions.rope import suite
from minitransformer.positions import rope as right
from minitransformer.positions.rope import RopeTables, Scaling

PAIRS = "each_pair_turns_by_its_angle"
DISTANCE = "scores_depend_on_the_distance_alone"
COMPOSE = "rotations_keep_lengths_and_compose"
TAIL = "channels_behind_the_rotary_width_do_not_move"
ROWS = "positions_may_differ_by_batch_row"
DERIVATIVE = "rope_backward_is_the_derivative"
STRETCH = "the_derivative_keeps_a_magnitude"
EXACT = "tables_are_exact_far_out"
NARROW = "narrow_arrays_are_rounded_once"
ALONE = "arguments_are_left_alone"
LINEAR = "linear_scaling_divides_the_positions"
NTK = "ntk_keeps_the_first_frequency_and_divides_the_last"
DYNAMIC = "dynamic_ntk_waits_until_the_text_is_longer"
YARN = "yarn_keeps_the_fast_pairs_and_slows_the_slow_ones"
KNOWN = "yarn_of_a_known_model"
SCORES = "yarn_multiplies_the_scores"
SAME = "converted_weights_give_the_same_scores"
BACK = "converting_back_restores_every_weight"
PROPORTIONAL = "proportional_rotation_turns_the_first_pairs_of_the_whole"


def _cached(x, cos, sin, layout):
    return right.rope_forward(x, cos, sin, layout=layout)[1]


# ---- the rotation --------------------------------------------------------------------------------


@suite.mutant("rope_forward", "the other direction: R_{-p}", killed_by=(PAIRS, DERIVATIVE))
def turned_backwards(x, cos, sin, *, layout):
    return right.rope_forward(x, cos, -sin, layout=layout)[0], _cached(x, cos, sin, layout)


@suite.mutant(
    "rope_forward", "the minus belongs to the first of a pair", killed_by=(PAIRS, DISTANCE)
)
def same_sign_on_both(x, cos, sin, *, layout):
    out, cache = right.rope_forward(x, cos, sin, layout=layout)
    mirrored, _ = right.rope_forward(x, cos, -sin, layout=layout)
    half = cos.shape[-1]
    first = slice(0, 2 * half, 2) if layout == "interleaved" else slice(half)
    out[..., first] = mirrored[..., first]
    return out, cache


@suite.mutant("rope_forward", "position 0 turns by a quarter", killed_by=(PAIRS, COMPOSE))
def cosine_and_sine_swapped(x, cos, sin, *, layout):
    return right.rope_forward(x, sin, cos, layout=layout)


@suite.mutant(
    "rope_forward", "weights made for one layout, rotation in the other: silent nonsense",
    killed_by=(PAIRS, SAME),
)  # fmt: skip
def layouts_confused(x, cos, sin, *, layout):
    other = "half" if layout == "interleaved" else "interleaved"
    return right.rope_forward(x, cos, sin, layout=other)


@suite.mutant(
    "rope_forward", "halves of the head, where halves of the rotary width are meant",
    killed_by=(PAIRS, TAIL),
)  # fmt: skip
def halves_of_the_whole_head(x, cos, sin, *, layout):
    out, cache = right.rope_forward(x, cos, sin, layout=layout)
    half, width = cos.shape[-1], x.shape[-1]
    if layout == "half":
        out = x.copy()
        a, b = x[..., :half], x[..., width // 2 : width // 2 + half]
        out[..., :half] = (a * cos - b * sin).astype(x.dtype)
        out[..., width // 2 : width // 2 + half] = (a * sin + b * cos).astype(x.dtype)
    return out, cache


@suite.mutant("rope_forward", "what does not turn is cut off as zero", killed_by=TAIL)
def tail_set_to_zero(x, cos, sin, *, layout):
    out, cache = right.rope_forward(x, cos, sin, layout=layout)
    out[..., 2 * cos.shape[-1] :] = 0
    return out, cache


@suite.mutant("rope_forward", "saves an array, turns the caller's", killed_by=ALONE)
def turned_in_place(x, cos, sin, *, layout):
    out, cache = right.rope_forward(x, cos, sin, layout=layout)
    x[...] = out
    return x, cache


@suite.mutant(
    "rope_forward", "every batch row turned by the positions of the first", killed_by=ROWS
)
def positions_of_the_first_row(x, cos, sin, *, layout):
    if cos.ndim > 2 and len(cos):
        cos, sin = (np.broadcast_to(table[:1], table.shape) for table in (cos, sin))
    return right.rope_forward(x, cos, sin, layout=layout)


@suite.mutant("rope_forward", "products rounded before they are added", killed_by=NARROW)
def turned_in_the_storage_type(x, cos, sin, *, layout):
    _, cache = right.rope_forward(x, cos, sin, layout=layout)
    c, s = (cos, sin) if np.iscomplexobj(x) else (cos.astype(x.dtype), sin.astype(x.dtype))
    half = c.shape[-1]
    first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    if layout == "half":
        first, second = slice(half), slice(half, 2 * half)
    out, a, b = x.copy(), x[..., first], x[..., second]
    out[..., first], out[..., second] = a * c - b * s, a * s + b * c
    return out, cache


@suite.mutant("rope_backward", "a gradient is turned back, not on", killed_by=DERIVATIVE)
def gradient_turned_forward(dout, cache):
    return right.rope_backward(dout, cache._replace(sin=-cache.sin))


@suite.mutant("rope_backward", "rotation keeps lengths, so it was left out", killed_by=DERIVATIVE)
def gradient_not_turned(dout, cache):
    return dout.astype(cache.dtype)


@suite.mutant("rope_backward", "the inverse, where the transpose is meant", killed_by=STRETCH)
def gradient_divided_by_the_magnitude(dout, cache):
    square = cache.cos**2 + cache.sin**2
    return right.rope_backward(dout, cache._replace(cos=cache.cos / square, sin=cache.sin / square))


# ---- the tables ----------------------------------------------------------------------------------


def _angles(positions, width, base, scaling, length, rotated):
    theta = right.rope_frequencies(width, base=base, scaling=scaling, length=length)
    theta[width if rotated is None else rotated // 2 :] = 0
    return positions, theta, 1.0 if scaling is None else scaling.magnitude


def _tables(compute):
    """A mutant of the tables: `compute(positions, theta)` gives the angles."""

    @functools.wraps(compute)
    def made(positions, width, *, base=10000.0, scaling=None, length=None, rotated=None):
        p, theta, m = _angles(positions, width, base, scaling, length, rotated)
        angle = compute(p, theta)
        return RopeTables(m * np.cos(angle), m * np.sin(angle))

    return made


@suite.mutant("rope_tables", "24 bits of an angle, less those of the position", killed_by=EXACT)
@_tables
def angles_in_float32(p, theta):
    return (p[..., None].astype(np.float32) * theta.astype(np.float32)).astype(np.float64)


@suite.mutant(
    "rope_tables", "a frequency rounded to 8 bits, times a position of thousands", killed_by=EXACT
)
@_tables
def frequencies_in_bfloat16(p, theta):
    return p[..., None] * theta.astype(bfloat16).astype(np.float64)


@suite.mutant("rope_tables", "257 is no bfloat16", killed_by=EXACT)
@_tables
def positions_in_bfloat16(p, theta):
    return p.astype(np.float32).astype(bfloat16).astype(np.float64)[..., None] * theta


@suite.mutant(
    "rope_tables", "rows counted from 0 again: every step of decoding is the first token",
    killed_by=(PAIRS, DISTANCE, COMPOSE),
)  # fmt: skip
@_tables
def positions_restart_at_zero(p, theta):
    rows = np.arange(p.shape[-1]) if p.ndim else np.zeros(())
    return np.broadcast_to(rows, p.shape)[..., None] * theta


@suite.mutant("rope_tables", "tokens count from 0: the first does not turn", killed_by=PAIRS)
@_tables
def positions_count_from_one(p, theta):
    return (p[..., None] + 1) * theta


@suite.mutant("rope_tables", "θ_i = base^{-i/r}: 2i was meant", killed_by=PAIRS)
def exponent_without_the_two(positions, width, *, base=10000.0, **options):
    return right.rope_tables(positions, width, base=base**0.5, **options)


@suite.mutant(
    "rope_tables", "kept from the last call, whose positions and base were others", killed_by=ALONE
)
def tables_cached_by_length_alone(positions, width, **options):
    key = (positions.shape, width)
    if _tables_seen.get("key") != key:
        _tables_seen.update(key=key, tables=right.rope_tables(positions, width, **options))
    return _tables_seen["tables"]


_tables_seen: dict = {}


@suite.mutant(
    "rope_tables",
    "contiguous and proportional partial rotation share a name",
    killed_by=PROPORTIONAL,
)
def rotated_taken_for_the_width(positions, width, *, rotated=None, **options):
    if rotated is None or rotated == width:
        return right.rope_tables(positions, width, **options)
    if rotated == 0:
        return right.rope_tables(positions, width, rotated=0, **options)
    return right.rope_tables(positions, rotated, **options)


@suite.mutant("rope_tables", "the frequencies are in steps of 2/D, not 2/r", killed_by=PROPORTIONAL)
def frequencies_of_the_rotated_alone(positions, width, *, rotated=None, **options):
    cos, sin = (t.copy() for t in right.rope_tables(positions, width, rotated=rotated, **options))
    if rotated:
        alone = right.rope_tables(positions, rotated, **options)
        cos[..., : rotated // 2], sin[..., : rotated // 2] = alone
    return RopeTables(cos, sin)


# ---- longer texts --------------------------------------------------------------------------------


def _scaled(kind):
    """A mutant of the tables for one kind of scaling."""

    def decorate(compute):
        @functools.wraps(compute)
        def made(positions, width, *, base=10000.0, scaling=None, length=None, rotated=None):
            if scaling is not None and scaling.kind == kind:
                return compute(positions, width, base, scaling, length)
            return right.rope_tables(
                positions, width, base=base, scaling=scaling, length=length, rotated=rotated
            )

        return made

    return decorate


@suite.mutant("rope_tables", "the text is squeezed, not stretched", killed_by=LINEAR)
@_scaled("linear")
def positions_multiplied(positions, width, base, scaling, length):
    return right.rope_tables(positions * scaling.factor, width, base=base)


@suite.mutant("rope_tables", "tokens 2m and 2m + 1 become one", killed_by=LINEAR)
@_scaled("linear")
def divided_positions_are_whole(positions, width, base, scaling, length):
    return right.rope_tables(np.floor(positions / scaling.factor), width, base=base)


@suite.mutant("rope_tables", "base · s: the last frequency is not divided by s", killed_by=NTK)
@_scaled("ntk")
def base_times_the_factor(positions, width, base, scaling, length):
    return right.rope_tables(positions, width, base=base * scaling.factor)


@suite.mutant("rope_tables", "linear under another name", killed_by=NTK)
@_scaled("ntk")
def every_frequency_divided(positions, width, base, scaling, length):
    return right.rope_tables(positions, width, base=base, scaling=Scaling("linear", scaling.factor))


@suite.mutant("rope_tables", "short texts are stretched as well", killed_by=DYNAMIC)
@_scaled("dynamic")
def dynamic_from_the_first_token(positions, width, base, scaling, length):
    return right.rope_tables(positions, width, base=base, scaling=Scaling("ntk", scaling.factor))


@suite.mutant("rope_tables", "s L/L0 without - (s - 1): a jump at L0", killed_by=DYNAMIC)
@_scaled("dynamic")
def dynamic_that_jumps(positions, width, base, scaling, length):
    grown = max(scaling.factor * length / scaling.original, 1.0)
    kind = Scaling("ntk", grown if length > scaling.original else 1.0)
    return right.rope_tables(positions, width, base=base, scaling=kind)


@suite.mutant("rope_tables", "slow pairs kept, fast ones divided", killed_by=(YARN, KNOWN))
@_scaled("yarn")
def ramp_the_other_way(positions, width, base, scaling, length):
    theta = right.rope_frequencies(width, base=base)
    got = right.rope_frequencies(width, base=base, scaling=scaling)
    angle = positions[..., None] * (theta + theta / scaling.factor - got)
    return RopeTables(scaling.magnitude * np.cos(angle), scaling.magnitude * np.sin(angle))


@suite.mutant("rope_tables", "turns counted in radians: 2π is missing", killed_by=(YARN, KNOWN))
@_scaled("yarn")
def turns_without_two_pi(positions, width, base, scaling, length):
    longer = dataclasses.replace(scaling, original=round(scaling.original * 2 * np.pi))
    return right.rope_tables(positions, width, base=base, scaling=longer)


@suite.mutant("rope_tables", "a step, where the paper has a ramp", killed_by=KNOWN)
@_scaled("yarn")
def step_for_a_ramp(positions, width, base, scaling, length):
    theta = right.rope_frequencies(width, base=base)
    got = right.rope_frequencies(width, base=base, scaling=scaling)
    middle = (1 + 1 / scaling.factor) / 2
    angle = positions[..., None] * np.where(got / theta > middle, theta, theta / scaling.factor)
    return RopeTables(scaling.magnitude * np.cos(angle), scaling.magnitude * np.sin(angle))


@suite.mutant("rope_tables", "the magnitude belongs to both tables", killed_by=SCORES)
@_scaled("yarn")
def cosine_alone_is_stretched(positions, width, base, scaling, length):
    cos, sin = right.rope_tables(positions, width, base=base, scaling=scaling)
    return RopeTables(cos, sin / scaling.magnitude)


@suite.mutant("rope_tables", "m on the scores is √m on each table: here it is m²", killed_by=SCORES)
@_scaled("yarn")
def root_of_the_magnitude(positions, width, base, scaling, length):
    root = scaling.magnitude**0.5
    return RopeTables(
        *(t / root for t in right.rope_tables(positions, width, base=base, scaling=scaling))
    )


@suite.mutant("rope_tables", "a given magnitude is read and forgotten", killed_by=SCORES)
@_scaled("yarn")
def attention_factor_ignored(positions, width, base, scaling, length):
    own = dataclasses.replace(scaling, attention_factor=None)
    return right.rope_tables(positions, width, base=base, scaling=own)


# ---- layouts -------------------------------------------------------------------------------------


@suite.mutant("to_half_layout", "the inverse permutation", killed_by=(SAME, BACK))
def permuted_the_wrong_way(weight, heads, *, rotary=None):
    return right.to_interleaved_layout(weight, heads, rotary=rotary)


@suite.mutant("to_half_layout", "channels mixed across heads", killed_by=(SAME, BACK))
def all_heads_permuted_as_one(weight, heads, *, rotary=None):
    width = weight.shape[-1] // heads
    if rotary not in (None, width):
        return right.to_half_layout(weight, heads, rotary=rotary)
    return np.concatenate([weight[..., 0::2], weight[..., 1::2]], axis=-1)


@suite.mutant("to_half_layout", "channels that do not turn have no pair", killed_by=(SAME, BACK))
def tail_permuted_too(weight, heads, *, rotary=None):
    width = weight.shape[-1] // heads
    return right.to_half_layout(weight, heads, rotary=width - width % 2)


@suite.mutant("to_interleaved_layout", "the same permutation again", killed_by=BACK)
def permuted_twice_the_same_way(weight, heads, *, rotary=None):
    return right.to_half_layout(weight, heads, rotary=rotary)
