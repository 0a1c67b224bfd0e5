"""Mistakes people make with sinusoidal positions."""

import functools
import math

import numpy as np

from minitransformer.arrays import compute_dtype
from minitransformer.checks.properties.positions.sinusoidal import suite
from minitransformer.positions import sinusoidal as right

WAVE = "each_channel_is_its_wave"
KNOWN = "the_first_rows_are_known"
DISTANCE = "similarity_depends_on_the_distance_alone"
TURN = "a_step_turns_each_pair"
EXACT = "tables_are_exact_far_out"
ADDED = "each_row_gets_the_waves_of_its_position"
DECODING = "decoding_goes_on_where_the_text_ends"
PADDING = "padding_on_the_left_moves_nothing"
DERIVATIVE = "sinusoidal_backward_is_the_derivative"
NARROW = "narrow_arrays_are_rounded_once"
ALONE = "arguments_are_left_alone"


# ---- the table -----------------------------------------------------------------------------------


def _frequencies(compute):
    """A mutant of the table: `compute(i, W, base)` gives the frequencies of the pairs."""

    @functools.wraps(compute)
    def made(positions, width, *, base=10000.0):
        angle = positions.astype(np.float64)[..., None] * compute(
            np.arange((width + 1) // 2), width, base
        )
        return _interleaved(np.sin(angle), np.cos(angle), width)

    return made


def _interleaved(sine, cosine, width):
    table = np.empty((*sine.shape[:-1], width), sine.dtype)
    table[..., 0::2], table[..., 1::2] = sine, cosine[..., : width // 2]
    return table


def _halves(positions, width, base):
    table = right.sinusoidal_table(positions, width, base=base)
    return table[..., 0::2], table[..., 1::2]


@suite.mutant(
    "sinusoidal_table", "all sines, then all cosines: another convention",
    killed_by=(WAVE, KNOWN, TURN),
)  # fmt: skip
def halves_for_pairs(positions, width, *, base=10000.0):
    return np.concatenate(_halves(positions, width, base), axis=-1)


@suite.mutant("sinusoidal_table", "cosine first", killed_by=(WAVE, KNOWN, TURN))
def cosine_and_sine_swapped(positions, width, *, base=10000.0):
    table = right.sinusoidal_table(positions, width, base=base)
    even = width - width % 2
    pairs = table[..., :even].reshape(*table.shape[:-1], even // 2, 2)[..., ::-1]
    table[..., :even] = pairs.reshape(*table.shape[:-1], even)
    return table


@suite.mutant("sinusoidal_table", "base^{-i/W}: 2i was meant", killed_by=(WAVE, KNOWN, DISTANCE))
@_frequencies
def exponent_without_the_two(i, width, base):
    return base ** -(i / width)


@suite.mutant(
    "sinusoidal_table", "-c/W for channel c: the two of a pair have two frequencies",
    killed_by=(WAVE, KNOWN, DISTANCE, TURN),
)  # fmt: skip
def frequency_by_channel(positions, width, *, base=10000.0):
    omega = base ** -(np.arange(width) / width)
    angle = positions.astype(np.float64)[..., None] * omega
    return _interleaved(np.sin(angle[..., 0::2]), np.cos(angle[..., 1::2]), width)


@suite.mutant(
    "sinusoidal_table", "i/(W/2 - 1), as tensor2tensor has it, and 0/0 for two channels",
    killed_by=(WAVE, KNOWN, DISTANCE),
)  # fmt: skip
@_frequencies
def last_frequency_is_one_over_the_base(i, width, base):
    return base ** -(i / (width // 2 - 1 if width >= 4 else 1))


@suite.mutant("sinusoidal_table", "faster and faster", killed_by=(WAVE, KNOWN, DISTANCE))
@_frequencies
def frequencies_rise(i, width, base):
    return base ** (2 * i / width)


@suite.mutant("sinusoidal_table", "the width is rounded down for odd ones", killed_by=(WAVE, KNOWN))
@_frequencies
def odd_width_taken_for_the_even_below(i, width, base):
    return base ** (-2 * i / max(width - width % 2, 1))


@suite.mutant("sinusoidal_table", "padded by zeros, where a sine fits", killed_by=(WAVE, KNOWN))
def odd_width_ends_in_zero(positions, width, *, base=10000.0):
    table = right.sinusoidal_table(positions, width, base=base)
    if width % 2:
        table[..., -1] = 0
    return table


@suite.mutant("sinusoidal_table", "the option was read and forgotten", killed_by=(WAVE, DISTANCE))
def base_always_ten_thousand(positions, width, *, base=10000.0):
    return right.sinusoidal_table(positions, width)


@suite.mutant("sinusoidal_table", "turns, not radians", killed_by=(WAVE, KNOWN, DISTANCE))
@_frequencies
def waves_of_a_whole_turn(i, width, base):
    return 2 * math.pi * base ** (-2 * i / width)


@suite.mutant("sinusoidal_table", "tokens count from 0", killed_by=(WAVE, KNOWN))
def positions_count_from_one(positions, width, *, base=10000.0):
    return right.sinusoidal_table(positions.astype(np.int64) + 1, width, base=base)


@suite.mutant("sinusoidal_table", "rows counted from 0 again", killed_by=(WAVE, KNOWN, TURN, EXACT))
def positions_by_their_place(positions, width, *, base=10000.0):
    rows = np.arange(positions.shape[-1]) if positions.ndim else np.zeros((), int)
    return right.sinusoidal_table(np.broadcast_to(rows, positions.shape), width, base=base)


@suite.mutant("sinusoidal_table", "a row looked up from the end", killed_by=(WAVE, EXACT))
def table_of_64_positions_repeats(positions, width, *, base=10000.0):
    return right.sinusoidal_table(positions % 64, width, base=base)


@suite.mutant("sinusoidal_table", "24 bits of an angle, less those of p", killed_by=EXACT)
def angles_in_float32(positions, width, *, base=10000.0):
    omega = (base ** -(np.arange(0, width, 2) / width)).astype(np.float32)
    angle = (positions[..., None].astype(np.float32) * omega).astype(np.float64)
    return _interleaved(np.sin(angle), np.cos(angle), width)


@suite.mutant(
    "sinusoidal_table", "kept from the last call, whose positions were others", killed_by=ALONE
)
def tables_cached_by_length_alone(positions, width, *, base=10000.0):
    key = (positions.shape, width, base)
    if _seen.get("key") != key:
        _seen.update(key=key, table=right.sinusoidal_table(positions, width, base=base))
    return _seen["table"]


_seen: dict = {}


# ---- added to a text -----------------------------------------------------------------------------


@suite.mutant(
    "sinusoidal_forward", "√W belongs to the embedding, and to x", killed_by=(ADDED, DERIVATIVE)
)
def x_scaled_by_the_root_of_the_width(x, positions, *, base=10000.0):
    root = math.sqrt(x.shape[-1])
    out, cache = right.sinusoidal_forward(x, positions, base=base)
    return (out + (root - 1) * x).astype(out.dtype), cache


@suite.mutant("sinusoidal_forward", "the batch axis for the text's", killed_by=(ADDED, PADDING))
def positions_along_the_wrong_axis(x, positions, *, base=10000.0):
    _, cache = right.sinusoidal_forward(x, positions, base=base)
    rows = np.arange(x.shape[0]).reshape(-1, *[1] * (x.ndim - 2))
    rows = np.broadcast_to(rows, x.shape[:-1])
    return right.sinusoidal_forward(x, rows, base=base)[0], cache


@suite.mutant(
    "sinusoidal_forward", "each step of decoding is the first token", killed_by=(ADDED, DECODING)
)
def positions_restart_at_zero(x, positions, *, base=10000.0):
    return right.sinusoidal_forward(x, np.arange(x.shape[-2]), base=base)


@suite.mutant(
    "sinusoidal_forward",
    "one row's positions for all: https://github.com/unslothai/unsloth/issues/3699",
    killed_by=(ADDED, PADDING),
)
def positions_of_the_first_row(x, positions, *, base=10000.0):
    if positions.ndim > 1:
        positions = np.broadcast_to(positions[:1], positions.shape)
    return right.sinusoidal_forward(x, positions, base=base)


@suite.mutant("sinusoidal_forward", "a table of float64 widens the model", killed_by=NARROW)
def output_widened_by_the_table(x, positions, *, base=10000.0):
    _, cache = right.sinusoidal_forward(x, positions, base=base)
    wide = x.astype(np.result_type(compute_dtype(x), np.float64))
    return wide + right.sinusoidal_table(positions, x.shape[-1], base=base), cache


@suite.mutant("sinusoidal_forward", "waves rounded, then the sum", killed_by=NARROW)
def waves_in_the_storage_type(x, positions, *, base=10000.0):
    _, cache = right.sinusoidal_forward(x, positions, base=base)
    return x + right.sinusoidal_table(positions, x.shape[-1], base=base).astype(x.dtype), cache


@suite.mutant("sinusoidal_forward", "+= on the caller's array", killed_by=ALONE)
def added_in_place(x, positions, *, base=10000.0):
    out, cache = right.sinusoidal_forward(x, positions, base=base)
    x[...] = out
    return x, cache


@suite.mutant(
    "sinusoidal_backward", "waves have no gradient, so neither has x", killed_by=DERIVATIVE
)
def gradient_stopped(dout, cache):
    return np.zeros(cache.shape, cache.dtype)


@suite.mutant("sinusoidal_backward", "the forward once more", killed_by=DERIVATIVE)
def gradient_gets_the_waves(dout, cache):
    rows = np.arange(cache.shape[-2])
    return right.sinusoidal_forward(dout, rows)[0]


@suite.mutant("sinusoidal_backward", "dx is dy, the array itself", killed_by=ALONE)
def gradient_is_the_cotangent_itself(dout, cache):
    return dout
