"""Mistakes people make with linear biases."""

import numpy as np

from minitransformer.arrays import narrowed
from minitransformer.checks.properties.positions.alibi import suite
from minitransformer.positions import alibi as right
from minitransformer.positions.relative import relative_positions

AUTHORS = "slopes_are_those_of_the_authors"
KNOWN = "slopes_of_known_models"
KEEP = "more_heads_keep_the_slopes_of_fewer"
PAYS = "each_pair_pays_for_its_distance"
NEAR = "near_keys_are_preferred_on_either_side"
SHIFT = "a_common_shift_changes_nothing"
DECODING = "decoding_reads_the_rows_of_the_whole"
PAPER = "causal_attention_sees_the_papers_bias"
DERIVATIVE = "alibi_backward_is_the_derivative"
LEARN = "slopes_learn_through_attention"
NARROW = "narrow_biases_are_rounded_once"
WIDE = "narrow_gradients_are_summed_wide"
ALONE = "arguments_are_left_alone"


def _power(heads):
    return 1 << (heads.bit_length() - 1)


# ---- the slopes ----------------------------------------------------------------------------------


@suite.mutant(
    "alibi_slopes",
    "2^{-8k/n} for any n: https://github.com/ml-explore/mlx/pull/3071",
    killed_by=(AUTHORS, KNOWN, KEEP),
)
def geometric_for_any_number_of_heads(heads):
    return 2.0 ** (-8 * np.arange(1, heads + 1) / heads)


@suite.mutant(
    "alibi_slopes",
    "the order looks like a mistake; trained weights have it:"
    " https://github.com/NVIDIA/TensorRT-LLM/pull/1611",
    killed_by=(AUTHORS, KNOWN, KEEP),
)
def slopes_in_order_of_size(heads):
    return np.sort(right.alibi_slopes(heads))[::-1]


@suite.mutant("alibi_slopes", "heads count from 1: the first is 2^{-8/n}", killed_by=AUTHORS)
def first_slope_is_one(heads):
    power = _power(heads)
    return right.alibi_slopes(heads) * 2.0 ** (8 / power)


@suite.mutant("alibi_slopes", "the flattest is 2⁻⁸ however many heads", killed_by=(AUTHORS, KNOWN))
def each_slope_half_of_the_last(heads):
    return 2.0 ** -np.arange(1.0, heads + 1)


@suite.mutant(
    "alibi_slopes", "the even ones of 2p heads are those of p again", killed_by=(AUTHORS, KEEP)
)
def gaps_filled_with_what_is_there(heads):
    power = _power(heads)
    double = right.alibi_slopes(2 * power)
    return np.concatenate([double[1::2], double[1::2][: heads - power]])


@suite.mutant(
    "alibi_slopes", "every other one is meant, not the first", killed_by=(AUTHORS, KNOWN, KEEP)
)
def gaps_filled_without_a_step(heads):
    power = _power(heads)
    double = right.alibi_slopes(2 * power)
    return np.concatenate([double[1::2], double[: heads - power]])


@suite.mutant("alibi_slopes", "the next power of two, cut off", killed_by=(AUTHORS, KNOWN, KEEP))
def slopes_of_more_heads_cut_off(heads):
    power = _power(heads)
    return right.alibi_slopes(power if power == heads else 2 * power)[:heads]


@suite.mutant(
    "alibi_slopes", "the gaps of the flat heads instead", killed_by=(AUTHORS, KNOWN, KEEP)
)
def gaps_filled_from_the_end(heads):
    power = _power(heads)
    double = right.alibi_slopes(2 * power)
    return np.concatenate([double[1::2], double[0::2][::-1][: heads - power]])


@suite.mutant("alibi_slopes", "made in the dtype of some model", killed_by=AUTHORS)
def slopes_in_float32(heads):
    return right.alibi_slopes(heads).astype(np.float32)


# ---- the bias ------------------------------------------------------------------------------------


def _bias(compute):
    """A mutant of the bias: `compute(r)` gives what each unit of slope adds, r = key - query."""

    def made(slopes, query_positions, key_positions):
        out, cache = right.alibi_forward(slopes, query_positions, key_positions)
        r = relative_positions(query_positions, key_positions)[..., None, :, :]
        return (slopes[:, None, None] * compute(r)).astype(out.dtype), cache

    made.__name__ = compute.__name__
    return made


@suite.mutant("alibi_forward", "far keys are rewarded", killed_by=(PAYS, NEAR, PAPER))
@_bias
def bias_with_the_other_sign(r):
    return np.abs(r)


@suite.mutant("alibi_forward", "without a mask the future is rewarded", killed_by=(PAYS, NEAR))
@_bias
def signed_distance(r):
    return r


@suite.mutant("alibi_forward", "the causal form where nothing is masked", killed_by=(PAYS, NEAR))
@_bias
def future_is_free(r):
    return np.minimum(r, 0)


@suite.mutant("alibi_forward", "the paper's line became a parabola", killed_by=(PAYS, PAPER))
@_bias
def squared_distance(r):
    return -(r**2)


@suite.mutant("alibi_forward", "the token itself is at distance 0", killed_by=(PAYS, NEAR, NARROW))
@_bias
def distances_count_from_one(r):
    return -np.abs(r) - 1


@suite.mutant(
    "alibi_forward",
    "added before the scores are scaled: 1/√D of the bias is left",
    killed_by=(PAYS, PAPER),
)
@_bias
def scaled_with_the_scores(r):
    return -np.abs(r) / 2


@suite.mutant(
    "alibi_forward", "m · j is enough under a causal mask, and only there",
    killed_by=(PAYS, NEAR, SHIFT),
)  # fmt: skip
def keys_alone(slopes, query_positions, key_positions):
    return right.alibi_forward(slopes, 0 * query_positions, key_positions)


@suite.mutant(
    "alibi_forward",
    "queries counted from 0 again: every step of decoding is the first",
    killed_by=(PAYS, DECODING, PAPER),
)
def queries_restart_at_zero(slopes, query_positions, key_positions):
    rows = np.broadcast_to(np.arange(query_positions.shape[-1]), query_positions.shape)
    return right.alibi_forward(slopes, rows, key_positions)


@suite.mutant(
    "alibi_forward", "slots of a ring buffer are not positions", killed_by=(PAYS, DECODING)
)
def keys_counted_by_their_slot(slopes, query_positions, key_positions):
    slots = np.broadcast_to(np.arange(key_positions.shape[-1]), key_positions.shape)
    return right.alibi_forward(slopes, query_positions, slots)


@suite.mutant("alibi_forward", "keys at rows, queries at columns", killed_by=PAYS, crashes=True)
def queries_and_keys_exchanged(slopes, query_positions, key_positions):
    out, cache = right.alibi_forward(slopes, query_positions, key_positions)
    return right.alibi_forward(slopes, key_positions, query_positions)[0].reshape(out.shape), cache


@suite.mutant("alibi_forward", "the steepest slope to the last head", killed_by=(PAYS, PAPER))
def heads_in_reverse(slopes, query_positions, key_positions):
    return right.alibi_forward(slopes[::-1], query_positions, key_positions)


@suite.mutant("alibi_forward", "every batch row at the positions of the first", killed_by=PAYS)
def positions_of_the_first_row(slopes, query_positions, key_positions):
    def first(p):
        return np.broadcast_to(p[:1], p.shape) if p.ndim > 1 else p

    return right.alibi_forward(slopes, first(query_positions), first(key_positions))


@suite.mutant("alibi_forward", "5 - 7 is 254 in uint8, and no error", killed_by=PAYS)
def unsigned_positions_subtracted(slopes, query_positions, key_positions):
    out, cache = right.alibi_forward(slopes, query_positions, key_positions)
    r = np.abs(key_positions[..., None, :] - query_positions[..., None])
    return (-slopes[:, None, None] * r[..., None, :, :]).astype(out.dtype), cache


@suite.mutant("alibi_forward", "slopes are float64, so the scores become it", killed_by=NARROW)
def bias_always_in_float64(slopes, query_positions, key_positions):
    return right.alibi_forward(slopes.astype(np.float64), query_positions, key_positions)


@suite.mutant("alibi_forward", "two large numbers, rounded, then subtracted", killed_by=NARROW)
def difference_of_rounded_products(slopes, query_positions, key_positions):
    out, cache = right.alibi_forward(slopes, query_positions, key_positions)
    wide = slopes if slopes.dtype.itemsize > 2 else slopes.astype(np.float32)
    i, j = (
        narrowed(wide[:, None] * p[..., None, :], slopes).astype(np.float64)
        for p in (query_positions, key_positions)
    )
    sign = np.sign(slopes.astype(np.float64))[:, None, None]
    return (-sign * np.abs(i[..., None] - j[..., None, :])).astype(out.dtype), cache


# ---- the gradient --------------------------------------------------------------------------------


@suite.mutant("alibi_backward", "the bias is minus the slope", killed_by=(DERIVATIVE, LEARN, WIDE))
def gradient_with_the_other_sign(dout, cache):
    return -right.alibi_backward(dout, cache)


@suite.mutant("alibi_backward", "the mean over pairs", killed_by=(DERIVATIVE, LEARN, WIDE))
def gradient_averaged_over_pairs(dout, cache):
    return right.alibi_backward(dout, cache) / max(cache.distance.size, 1)


@suite.mutant("alibi_backward", "the mean over the batch", killed_by=DERIVATIVE)
def gradient_averaged_over_the_batch(dout, cache):
    *leading, _, _ = cache.distance.shape
    return right.alibi_backward(dout, cache) / max(int(np.prod(leading)), 1)


@suite.mutant("alibi_backward", "the distance is the gradient", killed_by=(DERIVATIVE, LEARN))
def gradient_without_the_distance(dout, cache):
    return right.alibi_backward(dout, cache._replace(distance=np.sign(cache.distance)))


@suite.mutant("alibi_backward", "heads summed with the pairs", killed_by=(DERIVATIVE, LEARN))
def one_gradient_for_all_heads(dout, cache):
    dslopes = right.alibi_backward(dout, cache)
    return np.full_like(dslopes, dslopes.sum())


@suite.mutant("alibi_backward", "a bfloat16 sum stands still after 256 ones", killed_by=WIDE)
def gradient_summed_in_the_storage_type(dout, cache):
    paid = -dout * cache.distance[..., None, :, :].astype(dout.dtype)
    rows = np.moveaxis(paid, -3, 0).reshape(cache.heads, -1)
    total = np.zeros(cache.heads, dout.dtype)
    for column in rows.T:
        total = (total + column).astype(dout.dtype)
    return total


@suite.mutant("alibi_backward", "saves an array, spoils the caller's", killed_by=ALONE)
def cotangent_multiplied_in_place(dout, cache):
    dout *= cache.distance[..., None, :, :].astype(dout.dtype)
    return -np.moveaxis(dout, -3, 0).sum(axis=tuple(range(1, dout.ndim)))
