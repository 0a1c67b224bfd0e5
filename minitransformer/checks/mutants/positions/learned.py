"""Mistakes people make with a table of positions."""

import math

import numpy as np

from minitransformer.arrays import compute_dtype
from minitransformer.checks.properties.positions.learned import suite
from minitransformer.positions import learned as right

ROW = "each_row_gets_the_row_of_its_position"
DECODING = "decoding_goes_on_where_the_text_ends"
PADDING = "padding_on_the_left_moves_nothing"
REFUSED = "a_position_without_a_row_is_refused"
DERIVATIVE = "learned_backward_is_the_derivative"
UNREAD = "rows_that_no_text_reached_do_not_learn"
NARROW = "narrow_arrays_are_rounded_once"
WIDE = "narrow_gradients_are_summed_wide"
ALONE = "arguments_are_left_alone"
REMEMBERS = "a_cache_remembers_what_was_read"


# ---- forward -------------------------------------------------------------------------------------


@suite.mutant("learned_forward", "row -1 is the last: no error, another row", killed_by=REFUSED)
def negative_positions_wrap_around(x, table, positions):
    p = positions.astype(np.int64)
    return right.learned_forward(
        x, table, np.where((p < 0) & (p >= -len(table)), p % len(table), p)
    )


@suite.mutant("learned_forward", "the last row for all that is behind it", killed_by=REFUSED)
def positions_clipped_to_the_table(x, table, positions):
    return right.learned_forward(x, table, np.clip(positions.astype(np.int64), 0, len(table) - 1))


@suite.mutant("learned_forward", "p mod P: a long text starts again", killed_by=REFUSED)
def long_texts_start_again(x, table, positions):
    return right.learned_forward(x, table, positions.astype(np.int64) % max(len(table), 1))


@suite.mutant(
    "learned_forward", "some families keep two rows in front for padding; this table has none",
    killed_by=(ROW, DERIVATIVE),
)  # fmt: skip
def rows_offset_by_two(x, table, positions):
    return right.learned_forward(x, np.roll(table, -2, axis=0), positions)


@suite.mutant(
    "learned_forward", "counted from 0 again: each step of decoding is the first token",
    killed_by=(ROW, DECODING),
)  # fmt: skip
def positions_restart_at_zero(x, table, positions):
    rows = np.arange(x.shape[-2]) % max(len(table), 1)
    return right.learned_forward(x, table, np.broadcast_to(rows, positions.shape))


@suite.mutant(
    "learned_forward",
    "one row's positions for all: https://github.com/unslothai/unsloth/issues/3699",
    killed_by=(ROW, PADDING),
)
def positions_of_the_first_row(x, table, positions):
    if positions.ndim > 1:
        positions = np.broadcast_to(positions[:1], positions.shape)
    return right.learned_forward(x, table, positions)


@suite.mutant("learned_forward", "the batch axis for the text's", killed_by=(ROW, PADDING))
def positions_along_the_batch(x, table, positions):
    _, cache = right.learned_forward(x, table, positions)
    rows = np.arange(math.prod(x.shape[:-2])).reshape(*x.shape[:-2], 1) % max(len(table), 1)
    rows = np.broadcast_to(rows, x.shape[:-1])
    return right.learned_forward(x, table, rows)[0], cache


@suite.mutant("learned_forward", "the row instead of the sum", killed_by=(ROW, DERIVATIVE, NARROW))
def token_forgotten(x, table, positions):
    out, cache = right.learned_forward(0 * x, table, positions)
    return out, cache


@suite.mutant("learned_forward", "√W belongs to the embedding", killed_by=(ROW, DERIVATIVE))
def x_scaled_by_the_root_of_the_width(x, table, positions):
    out, cache = right.learned_forward(x, table, positions)
    return (out + (math.sqrt(x.shape[-1]) - 1) * x).astype(out.dtype), cache


@suite.mutant("learned_forward", "as wide as the wider of the two", killed_by=NARROW)
def output_as_wide_as_the_table(x, table, positions):
    _, cache = right.learned_forward(x, table, positions)
    wide = np.result_type(compute_dtype(x, table), np.float64)
    return x.astype(wide) + table[positions].astype(wide), cache


@suite.mutant("learned_forward", "rows rounded, then the sum", killed_by=NARROW)
def rows_in_the_storage_type_of_x(x, table, positions):
    narrow = x.dtype.itemsize == 2
    return right.learned_forward(x, table.astype(x.dtype) if narrow else table, positions)


@suite.mutant("learned_forward", "+= on the caller's array", killed_by=ALONE)
def added_in_place(x, table, positions):
    out, cache = right.learned_forward(x, table, positions)
    x[...] = out
    return x, cache


@suite.mutant("learned_forward", "the cache holds the caller's array", killed_by=REMEMBERS)
def positions_not_copied(x, table, positions):
    out, cache = right.learned_forward(x, table, positions)
    return out, cache._replace(positions=positions)


# ---- the gradient --------------------------------------------------------------------------------


@suite.mutant(
    "learned_backward", "dE[p] += dy writes each row once: the last one wins",
    killed_by=(DERIVATIVE, WIDE),
)  # fmt: skip
def last_gradient_wins(dout, cache):
    grads = right.learned_backward(dout, cache)
    shared = dout.astype(compute_dtype(dout))
    extra = tuple(range(dout.ndim - 1 - cache.positions.ndim))
    shared = shared.sum(axis=extra)
    rows = np.broadcast_to(cache.positions, shared.shape[:-1])
    dtable = np.zeros_like(grads.table)
    dtable[rows] = shared
    return grads._replace(table=dtable)


@suite.mutant("learned_backward", "the mean over the batch", killed_by=(DERIVATIVE, UNREAD, WIDE))
def gradient_averaged_over_the_batch(dout, cache):
    grads = right.learned_backward(dout, cache)
    return grads._replace(table=grads.table / max(math.prod(cache.shape[:-2]), 1))


@suite.mutant("learned_backward", "a row's mean, not its sum", killed_by=(DERIVATIVE, WIDE, UNREAD))
def gradient_averaged_over_the_tokens_of_a_row(dout, cache):
    grads = right.learned_backward(dout, cache)
    rows = np.broadcast_to(cache.positions, cache.shape[:-1]).ravel()
    counts = np.bincount(rows, minlength=cache.table_shape[0])
    return grads._replace(table=grads.table / np.maximum(counts, 1)[:, None])


@suite.mutant(
    "learned_backward", "one text for the whole batch", killed_by=(DERIVATIVE, UNREAD, WIDE)
)
def gradient_of_the_first_row_of_the_batch(dout, cache):
    grads = right.learned_backward(dout, cache)
    masked = dout.copy()
    if masked.ndim > 2:
        masked[1:] = 0
    return grads._replace(table=right.learned_backward(masked, cache).table)


@suite.mutant(
    "learned_backward", "as long as the text, not the table", killed_by=(DERIVATIVE, UNREAD)
)
def gradient_as_long_as_the_text(dout, cache):
    grads = right.learned_backward(dout, cache)
    return grads._replace(table=grads.table[: cache.shape[-2]])


@suite.mutant("learned_backward", "row 0 is no padding", killed_by=(DERIVATIVE, UNREAD))
def first_row_never_learns(dout, cache):
    grads = right.learned_backward(dout, cache)
    grads.table[:1] = 0
    return grads


@suite.mutant("learned_backward", "every row learns alike", killed_by=(DERIVATIVE, UNREAD))
def gradient_spread_over_the_table(dout, cache):
    grads = right.learned_backward(dout, cache)
    total = grads.table.sum(axis=0) / max(len(grads.table), 1)
    return grads._replace(table=np.broadcast_to(total, grads.table.shape).copy())


@suite.mutant("learned_backward", "all of it to the table", killed_by=DERIVATIVE)
def gradient_of_x_stopped(dout, cache):
    grads = right.learned_backward(dout, cache)
    return grads._replace(x=np.zeros_like(grads.x))


@suite.mutant("learned_backward", "a bfloat16 sum stands still after 256 ones", killed_by=WIDE)
def gradient_summed_in_the_storage_type(dout, cache):
    grads = right.learned_backward(dout, cache)
    dtable = np.zeros(cache.table_shape, dout.dtype)
    rows = np.broadcast_to(cache.positions, cache.shape[:-1]).ravel()
    for p, row in zip(rows, dout.reshape(len(rows), cache.shape[-1]), strict=True):
        dtable[p] = dtable[p] + row
    return grads._replace(table=dtable)


@suite.mutant("learned_backward", "dx is dy, the array itself", killed_by=ALONE)
def gradient_is_the_cotangent_itself(dout, cache):
    return right.learned_backward(dout, cache)._replace(x=dout)
