"""Mistakes people make with buckets of distances."""

import functools
import math

import numpy as np

from minitransformer.arrays import compute_dtype
from minitransformer.checks.properties.positions.t5_bias import suite
from minitransformer.positions import t5_bias as right

BUCKET = "each_distance_has_its_bucket"
KNOWN = "buckets_of_t5"
WIDEN = "buckets_widen_with_the_distance"
READS = "each_pair_reads_its_bucket"
SHIFT = "a_common_shift_changes_nothing"
DECODING = "decoding_reads_the_rows_of_the_whole"
UNSCALED = "attention_sees_the_bias_beside_unscaled_scores"
DERIVATIVE = "t5_bias_backward_is_the_derivative"
LEARN = "the_table_learns_through_attention"
UNREAD = "a_bucket_that_nobody_reads_does_not_learn"
NARROW = "narrow_tables_are_read_bit_for_bit"
WIDE = "narrow_gradients_are_summed_wide"
ALONE = "arguments_are_left_alone"


# ---- the buckets ---------------------------------------------------------------------------------


def _far(distance, side, exact, furthest, *, whole=np.floor):
    """Buckets of one side, with the rounding as an option."""
    ratio = np.log(np.maximum(distance, exact) / exact) / math.log(furthest / exact)
    far = exact + whole(ratio * (side - exact)).astype(np.int64)
    return np.where(distance < exact, distance, np.minimum(far, side - 1))


def _one_side(compute):
    """A mutant of the buckets: `compute(distance, side, exact, F)` gives those of one side."""

    @functools.wraps(compute)
    def made(relative, buckets=32, *, bidirectional, max_distance=128):
        side = buckets // 2 if bidirectional else buckets
        r = relative.astype(np.int64)
        distance = np.abs(r) if bidirectional else np.maximum(-r, 0)
        bucket = compute(distance, side, side // 2, max_distance)
        return bucket + side * (r > 0) if bidirectional else bucket

    return made


@suite.mutant("t5_buckets", "a border belongs to the farther bucket", killed_by=(BUCKET, KNOWN))
@_one_side
def logarithm_rounded_to_the_nearest(distance, side, exact, furthest):
    return _far(distance, side, exact, furthest, whole=np.round)


@suite.mutant("t5_buckets", "each shared bucket one too far", killed_by=(BUCKET, KNOWN))
@_one_side
def logarithm_rounded_up(distance, side, exact, furthest):
    return _far(distance, side, exact, furthest, whole=np.ceil)


@suite.mutant(
    "t5_buckets", "log(n/e) / log F: the last is never reached", killed_by=(BUCKET, KNOWN)
)
@_one_side
def growth_not_from_the_exact_ones(distance, side, exact, furthest):
    ratio = np.log(np.maximum(distance, exact) / exact) / math.log(furthest)
    far = exact + np.floor(ratio * (side - exact)).astype(np.int64)
    return np.where(distance < exact, distance, np.minimum(far, side - 1))


@suite.mutant("t5_buckets", "as wide as each other: no logarithm", killed_by=(BUCKET, KNOWN, WIDEN))
@_one_side
def shared_buckets_of_equal_width(distance, side, exact, furthest):
    far = exact + (distance - exact) * (side - exact) // (furthest - exact)
    return np.where(distance < exact, distance, np.minimum(far, side - 1))


@suite.mutant("t5_buckets", "beyond the last, from the start again", killed_by=(BUCKET, KNOWN))
@_one_side
def far_keys_wrap_around(distance, side, exact, furthest):
    ratio = np.log(np.maximum(distance, exact) / exact) / math.log(furthest / exact)
    far = exact + np.floor(ratio * (side - exact)).astype(np.int64)
    return np.where(distance < exact, distance, far) % side


@suite.mutant(
    "t5_buckets", "every distance is exact, until they run out", killed_by=(BUCKET, KNOWN)
)
@_one_side
def distance_cut_off_at_the_last_bucket(distance, side, exact, furthest):
    return np.minimum(distance, side - 1)


@suite.mutant("t5_buckets", "half of a side's buckets, not of all", killed_by=(BUCKET, KNOWN))
def exact_ones_are_half_of_all(relative, buckets=32, *, bidirectional, max_distance=128):
    if not bidirectional:
        return right.t5_buckets(relative, buckets, bidirectional=False, max_distance=max_distance)
    side, r = buckets // 2, relative.astype(np.int64)
    return np.minimum(np.abs(r), side - 1) + side * (r > 0)


@suite.mutant("t5_buckets", "query minus key: past is future", killed_by=(BUCKET, KNOWN, WIDEN))
def sign_of_the_distance_swapped(relative, buckets=32, *, bidirectional, max_distance=128):
    return right.t5_buckets(
        -relative.astype(np.int64), buckets, bidirectional=bidirectional, max_distance=max_distance
    )


@suite.mutant("t5_buckets", "n <= 0 where n < 0 is meant", killed_by=(BUCKET, KNOWN, WIDEN))
def token_itself_counts_as_future(relative, buckets=32, *, bidirectional, max_distance=128):
    got = right.t5_buckets(
        relative, buckets, bidirectional=bidirectional, max_distance=max_distance
    )
    return got + (relative == 0) * (buckets // 2) if bidirectional else got


@suite.mutant("t5_buckets", "|n| where max(n, 0) is meant", killed_by=(BUCKET, KNOWN))
def future_of_a_decoder_like_its_past(relative, buckets=32, *, bidirectional, max_distance=128):
    past = relative if bidirectional else -np.abs(relative.astype(np.int64))
    return right.t5_buckets(past, buckets, bidirectional=bidirectional, max_distance=max_distance)


@suite.mutant("t5_buckets", "the decoder shares the encoder's buckets", killed_by=(BUCKET, KNOWN))
def always_bidirectional(relative, buckets=32, *, bidirectional, max_distance=128):
    return right.t5_buckets(
        relative, buckets, bidirectional=buckets >= 4, max_distance=max_distance
    )


@suite.mutant("t5_buckets", "the option was read and forgotten", killed_by=BUCKET)
def largest_distance_always_128(relative, buckets=32, *, bidirectional, max_distance=128):
    return right.t5_buckets(relative, buckets, bidirectional=bidirectional)


@suite.mutant(
    "t5_buckets",
    "(r - e) / log(F/e) computed first: 64 falls one bucket short",
    killed_by=(BUCKET, KNOWN),
)
@_one_side
def growth_rounded_before_the_logarithm(distance, side, exact, furthest):
    growth = (side - exact) / math.log(furthest / exact)
    far = exact + np.floor(np.log(np.maximum(distance, exact) / exact) * growth).astype(np.int64)
    return np.where(distance < exact, distance, np.minimum(far, side - 1))


# ---- the bias ------------------------------------------------------------------------------------


@suite.mutant(
    "t5_bias_forward", "query minus key: every pair read as its mirror", killed_by=(READS, UNSCALED)
)
def rows_and_columns_mirrored(table, query_positions, key_positions, **options):
    i, j = (-p.astype(np.int64) for p in (query_positions, key_positions))
    return right.t5_bias_forward(table, i, j, **options)


@suite.mutant(
    "t5_bias_forward", "the encoder's buckets in a decoder", killed_by=(READS, UNSCALED, UNREAD)
)
def decoder_with_the_encoders_buckets(table, query_positions, key_positions, **options):
    if len(table) % 2 == 0 and len(table) >= 4:
        options["bidirectional"] = not options["bidirectional"]
    return right.t5_bias_forward(table, query_positions, key_positions, **options)


@suite.mutant(
    "t5_bias_forward",
    "queries counted from 0 again: https://github.com/NVIDIA/TensorRT-LLM/issues/1343",
    killed_by=(READS, DECODING, UNSCALED),
)
def queries_restart_at_zero(table, query_positions, key_positions, **options):
    rows = np.broadcast_to(np.arange(query_positions.shape[-1]), query_positions.shape)
    return right.t5_bias_forward(table, rows, key_positions, **options)


@suite.mutant(
    "t5_bias_forward", "slots of a ring buffer are not positions", killed_by=(READS, DECODING)
)
def keys_counted_by_their_slot(table, query_positions, key_positions, **options):
    slots = np.broadcast_to(np.arange(key_positions.shape[-1]), key_positions.shape)
    return right.t5_bias_forward(table, query_positions, slots, **options)


@suite.mutant(
    "t5_bias_forward", "where the key stands, not how far away", killed_by=(READS, SHIFT, UNSCALED)
)
def keys_alone(table, query_positions, key_positions, **options):
    return right.t5_bias_forward(table, key_positions, 0 * query_positions, **options)


@suite.mutant(
    "t5_bias_forward", "added before the scores are scaled by 1/√D", killed_by=(READS, UNSCALED)
)
def scaled_with_the_scores(table, query_positions, key_positions, **options):
    out, cache = right.t5_bias_forward(table, query_positions, key_positions, **options)
    return (out / 2).astype(out.dtype), cache


@suite.mutant(
    "t5_bias_forward", "heads in reverse", killed_by=(READS, UNSCALED, DERIVATIVE, NARROW)
)
def heads_in_reverse(table, query_positions, key_positions, **options):
    return right.t5_bias_forward(table[:, ::-1], query_positions, key_positions, **options)


@suite.mutant("t5_bias_forward", "every batch row at the positions of the first", killed_by=READS)
def positions_of_the_first_row(table, query_positions, key_positions, **options):
    def first(p):
        return np.broadcast_to(p[:1], p.shape) if p.ndim > 1 else p

    return right.t5_bias_forward(table, first(query_positions), first(key_positions), **options)


@suite.mutant("t5_bias_forward", "heads last, as the table has them", killed_by=READS)
def heads_on_the_last_axis(table, query_positions, key_positions, **options):
    out, cache = right.t5_bias_forward(table, query_positions, key_positions, **options)
    return np.moveaxis(out, -3, -1), cache


@suite.mutant("t5_bias_forward", "5 - 7 is 254 in uint8, and no error", killed_by=READS)
def unsigned_positions_subtracted(table, query_positions, key_positions, **options):
    r = key_positions[..., None, :] - query_positions[..., None]
    bucket = right.t5_buckets(r, len(table), **options)
    cache = right.T5BiasCache(bucket, table.shape)
    return np.moveaxis(table[bucket], -1, -3), cache


@suite.mutant("t5_bias_forward", "2051 is no float16, 257 no bfloat16", killed_by=NARROW)
def distance_in_the_dtype_of_the_table(table, query_positions, key_positions, **options):
    dtype = np.float64 if np.iscomplexobj(table) else table.dtype
    with np.errstate(over="ignore"):
        i, j = (p.astype(dtype).astype(np.float64) for p in (query_positions, key_positions))
    i, j = (np.nan_to_num(p).astype(np.int64) for p in (i, j))
    return right.t5_bias_forward(table, i, j, **options)


@suite.mutant("t5_bias_forward", "float64 from here on", killed_by=NARROW)
def bias_always_widened(table, query_positions, key_positions, **options):
    wide = table.astype(np.result_type(compute_dtype(table), np.float64))
    return right.t5_bias_forward(wide, query_positions, key_positions, **options)


@suite.mutant("t5_bias_forward", "bucket 0 is no padding row", killed_by=(READS, UNSCALED))
def first_bucket_reads_as_zero(table, query_positions, key_positions, **options):
    table = table.copy()
    table[:1] = 0
    return right.t5_bias_forward(table, query_positions, key_positions, **options)


# ---- the gradient --------------------------------------------------------------------------------


@suite.mutant(
    "t5_bias_backward", "dE[b] += dbias writes each row once: the last pair wins",
    killed_by=(DERIVATIVE, LEARN, WIDE),
)  # fmt: skip
def last_pair_wins(dout, cache):
    dtable = np.zeros(cache.shape, compute_dtype(dout))
    dtable[cache.bucket] += np.moveaxis(dout, -3, -1).astype(dtable.dtype)
    return dtable


@suite.mutant(
    "t5_bias_backward", "a bucket's mean, not its sum", killed_by=(DERIVATIVE, LEARN, WIDE)
)
def gradient_averaged_over_the_bucket(dout, cache):
    pairs = np.bincount(cache.bucket.ravel(), minlength=cache.shape[0])
    return right.t5_bias_backward(dout, cache) / np.maximum(pairs, 1)[:, None]


@suite.mutant("t5_bias_backward", "the mean over the batch", killed_by=DERIVATIVE)
def gradient_averaged_over_the_batch(dout, cache):
    *leading, _, _ = cache.bucket.shape
    return right.t5_bias_backward(dout, cache) / max(math.prod(leading), 1)


@suite.mutant("t5_bias_backward", "heads summed with the pairs", killed_by=(DERIVATIVE, LEARN))
def one_gradient_for_all_heads(dout, cache):
    dtable = right.t5_bias_backward(dout, cache)
    return np.broadcast_to(dtable.sum(axis=1, keepdims=True), dtable.shape).copy()


@suite.mutant("t5_bias_backward", "the far ones learn alike", killed_by=(DERIVATIVE, LEARN, UNREAD))
def gradient_spread_over_the_table(dout, cache):
    dtable = right.t5_bias_backward(dout, cache)
    return np.broadcast_to(dtable.mean(axis=0, keepdims=True), dtable.shape).copy()


@suite.mutant(
    "t5_bias_backward", "bincount without minlength: a short text gives a short table",
    killed_by=(DERIVATIVE, LEARN, UNREAD),
)  # fmt: skip
def table_as_long_as_the_text(dout, cache):
    return right.t5_bias_backward(dout, cache)[: cache.bucket.max(initial=0) + 1]


@suite.mutant("t5_bias_backward", "keys at rows, queries at columns", killed_by=(DERIVATIVE, LEARN))
def pairs_transposed(dout, cache):
    shape = cache.bucket.shape
    turned = np.swapaxes(cache.bucket, -1, -2).reshape(shape)
    return right.t5_bias_backward(dout, cache._replace(bucket=turned))


@suite.mutant("t5_bias_backward", "a bfloat16 sum stands still after 256 ones", killed_by=WIDE)
def gradient_summed_in_the_storage_type(dout, cache):
    dtable = np.zeros(cache.shape, dout.dtype)
    pairs = np.moveaxis(dout, -3, -1).reshape(-1, cache.shape[1])
    for b, row in zip(cache.bucket.ravel(), pairs, strict=True):
        dtable[b] = (dtable[b] + row).astype(dout.dtype)
    return dtable


@suite.mutant("t5_bias_backward", "heads are scaled in the caller's array", killed_by=ALONE)
def cotangent_multiplied_in_place(dout, cache):
    dout *= 2
    return right.t5_bias_backward(dout, cache) / 2
