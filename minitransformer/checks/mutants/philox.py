"""Mistakes people make with counter-based random bits."""

import numpy as np

from minitransformer import philox as right
from minitransformer.checks.properties.philox import suite

WORDS = ("known_answers_of_the_authors", "ten_rounds_is_the_default")


def _rounds(counter, key, rounds, *, bumped_first=False, widened=True, swapped=False):
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) for c in counter))
    k0, k1 = key
    for _ in range(rounds):
        if bumped_first:
            k0, k1 = (k0 + right.WEYL[0]) % 2**32, (k1 + right.WEYL[1]) % 2**32
        a, b = np.uint64(right.MULTIPLIERS[0]) * c0, np.uint64(right.MULTIPLIERS[1]) * c2
        if not widened:
            a, b = a & right.LOW, b & right.LOW
        high_a, low_a, high_b, low_b = a >> 32, a & right.LOW, b >> 32, b & right.LOW
        if swapped:
            high_a, low_a, high_b, low_b = low_a, high_a, low_b, high_b
        c0, c1, c2, c3 = high_b ^ c1 ^ np.uint64(k0), low_b, high_a ^ c3 ^ np.uint64(k1), low_a
        if not bumped_first:
            k0, k1 = (k0 + right.WEYL[0]) % 2**32, (k1 + right.WEYL[1]) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


@suite.mutant(
    "philox", "uint32 × uint32 keeps the low half; the high half is gone", killed_by=WORDS
)
def product_not_widened(counter, key, *, rounds=10):
    return _rounds(counter, key, rounds, widened=False)


@suite.mutant("philox", "the key is bumped between rounds, not before the first", killed_by=WORDS)
def key_bumped_before_the_first_round(counter, key, *, rounds=10):
    return _rounds(counter, key, rounds, bumped_first=True)


@suite.mutant("philox", "high and low halves change places", killed_by=WORDS)
def halves_swapped(counter, key, *, rounds=10):
    return _rounds(counter, key, rounds, swapped=True)


@suite.mutant("philox", "range(1, 10) is nine rounds", killed_by=WORDS)
def nine_rounds(counter, key, *, rounds=10):
    return _rounds(counter, key, rounds - 1)


@suite.mutant("philox", "one round too many", killed_by=WORDS)
def eleven_rounds(counter, key, *, rounds=10):
    return _rounds(counter, key, rounds + 1)


@suite.mutant(
    "philox",
    "FlashAttention's fast variant: another generator, other masks",
    killed_by="ten_rounds_is_the_default",
)
def seven_rounds_by_default(counter, key, *, rounds=7):
    return _rounds(counter, key, rounds)


LAW = ("bits_follow_the_mask_law", "every_coordinate_changes_the_bits")


@suite.mutant("random_bits", "the same mask at every step of training", killed_by=LAW)
def step_forgotten(draw, stream, layer, heads, rows, columns):
    return right.random_bits(draw._replace(step=0), stream, layer, heads, rows, columns)


@suite.mutant("random_bits", "every layer drops the same pairs", killed_by=LAW)
def layer_forgotten(draw, stream, layer, heads, rows, columns):
    return right.random_bits(draw, stream, 0, heads, rows, columns)


@suite.mutant("random_bits", "one mask broadcast over heads and batch", killed_by=LAW)
def head_forgotten(draw, stream, layer, heads, rows, columns):
    return right.random_bits(draw, stream, layer, np.zeros_like(heads), rows, columns)


@suite.mutant("random_bits", "dropout and attention draw the same bits", killed_by=LAW)
def stream_forgotten(draw, stream, layer, heads, rows, columns):
    return right.random_bits(draw, right.Stream.ELEMENT, layer, heads, rows, columns)


@suite.mutant("random_bits", "every Monte-Carlo sample is the same one", killed_by=LAW)
def sample_forgotten(draw, stream, layer, heads, rows, columns):
    return right.random_bits(draw._replace(sample=0), stream, layer, heads, rows, columns)


@suite.mutant("random_bits", "four neighbours share the first of their four words", killed_by=LAW)
def first_word_for_all_four(draw, stream, layer, heads, rows, columns):
    return right.random_bits(draw, stream, layer, heads, rows, columns & ~3)


@suite.mutant(
    "random_bits",
    "positions counted from the tile's corner: every tile repeats the first",
    killed_by=("a_tile_is_the_slice_of_the_whole", "bits_follow_the_mask_law"),
)
def positions_local_to_the_tile(draw, stream, layer, heads, rows, columns):
    return right.random_bits(
        draw, stream, layer, heads, rows - np.min(rows, initial=2**31), columns
    )


@suite.mutant(
    "random_bits",
    "a sequence of numbers, not a function of where you stand",
    killed_by=("a_tile_is_the_slice_of_the_whole", "bits_follow_the_mask_law"),
)
def one_generator_read_in_order(draw, stream, layer, heads, rows, columns):
    shape = np.broadcast_shapes(np.shape(heads), np.shape(rows), np.shape(columns))
    generator = np.random.default_rng([draw.seed, draw.step, int(stream), layer])
    return generator.integers(0, 2**32, shape, dtype=np.uint32)


@suite.mutant(
    "random_bits",
    "a signed shift fills the upper half with the sign bit",
    killed_by=("bytes_are_uniform", "bits_follow_the_mask_law"),
)
def signed_shift(draw, stream, layer, heads, rows, columns):
    bits = right.random_bits(draw, stream, layer, heads, rows, columns)
    return (bits.view(np.int32) >> 8).view(np.uint32)


BOTH = ("threshold_is_the_rounded_rate", "every_head_has_its_own_threshold")


@suite.mutant(
    "threshold",
    "2³² does not fit: at p = 1 the threshold wraps to 0 and everything is kept",
    killed_by="threshold_is_the_rounded_rate",
)
def threshold_of_32_bits(drop_rate):
    return (right.threshold(drop_rate) & right.LOW).astype(np.uint32)


@suite.mutant("threshold", "p · (2³² - 1), as if 2³² - 1 were the number of words", killed_by=BOTH)
def threshold_scaled_by_the_largest_word(drop_rate):
    return np.rint(np.asarray(drop_rate) * (2.0**32 - 1)).astype(np.uint64)


@suite.mutant("threshold", "eight bits of threshold: a rate on a grid of 1/256", killed_by=BOTH)
def threshold_of_8_bits(drop_rate):
    return np.floor(np.asarray(drop_rate) * 255).astype(np.uint64) << np.uint64(24)


@suite.mutant("inclusion_probability", "the probability of being dropped", killed_by=BOTH)
def kept_and_dropped_confused(drop_rate):
    return np.asarray(drop_rate, dtype=np.float64)


@suite.mutant(
    "threshold",
    "the first head's rate for all heads",
    killed_by="every_head_has_its_own_threshold",
)
def one_threshold_for_all_heads(drop_rate):
    first = np.asarray(drop_rate).ravel()[:1]
    return np.broadcast_to(right.threshold(first), np.shape(drop_rate)).reshape(np.shape(drop_rate))


@suite.mutant(
    "uniform",
    "divided by the largest word: 1 is possible, and log(1 - u) is -inf",
    killed_by="uniform_numbers_lie_in_the_half_open_interval",
)
def interval_closed_at_one(bits):
    return bits / (2.0**32 - 1)


@suite.mutant(
    "uniform",
    "32 bits do not fit into float32: the largest words round to 1",
    killed_by="uniform_numbers_lie_in_the_half_open_interval",
)
def rounded_to_float32(bits):
    return (bits * 2.0**-32).astype(np.float32)
