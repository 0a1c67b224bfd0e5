"""Mistakes people make with a table of rows."""

import math

import numpy as np

from minitransformer.checks.properties.nn.embedding import suite
from minitransformer.nn import embedding as right

READS = "each_token_reads_its_row"
COPY = "what_is_read_is_a_copy_in_the_same_dtype"
DERIVATIVE = "embedding_backward_is_the_derivative"
PADDING = "the_padding_row_is_read_and_never_learns"
WIDE = "narrow_gradients_are_summed_wide"
ALONE = "arguments_are_left_alone"


@suite.mutant("embedding_forward", "tokens count from 0", killed_by=READS)
def rows_count_from_one(tokens, table, *, padding_index=None):
    _, cache = right.embedding_forward(tokens, table, padding_index=padding_index)
    return table[tokens.astype(np.int64) - 1], cache


@suite.mutant(
    "embedding_forward",
    "√W scales embeddings in the first Transformer; it is no part of the table",
    killed_by=READS,
)
def scaled_by_the_root_of_the_width(tokens, table, *, padding_index=None):
    out, cache = right.embedding_forward(tokens, table, padding_index=padding_index)
    return out * math.sqrt(table.shape[1]), cache


@suite.mutant(
    "embedding_forward", "tokens that count up are a slice, and a slice is a view", killed_by=COPY
)
def slice_for_a_range(tokens, table, *, padding_index=None):
    out, cache = right.embedding_forward(tokens, table, padding_index=padding_index)
    if tokens.ndim == 1 and np.array_equal(tokens, np.arange(len(tokens))):
        return table[: len(tokens)], cache
    return out, cache


@suite.mutant("embedding_forward", "one-hot is made in float64, and widens", killed_by=COPY)
def one_hot_times_the_table(tokens, table, *, padding_index=None):
    _, cache = right.embedding_forward(tokens, table, padding_index=padding_index)
    return np.eye(len(table))[tokens] @ table.astype(np.result_type(table, 1.0)), cache


@suite.mutant(
    "embedding_forward", "padding is read like any row; only its gradient is 0", killed_by=PADDING
)
def padding_read_as_zero(tokens, table, *, padding_index=None):
    out, cache = right.embedding_forward(tokens, table, padding_index=padding_index)
    if padding_index is not None:
        out[tokens == padding_index] = 0
    return out, cache


@suite.mutant("embedding_forward", "sets the caller's row to zero for good", killed_by=ALONE)
def padding_row_cleared_in_the_table(tokens, table, *, padding_index=None):
    result = right.embedding_forward(tokens, table, padding_index=padding_index)
    if padding_index is not None:
        table[padding_index] = 0
    return result


@suite.mutant(
    "embedding_backward",
    "dE[t] += dy writes each row once: the last one wins",
    killed_by=DERIVATIVE,
)
def last_gradient_wins(dout, cache):
    dtable = np.zeros(cache.shape)
    dtable[cache.tokens.ravel()] += dout.reshape(cache.tokens.size, cache.shape[1])
    return dtable


@suite.mutant(
    "embedding_backward", "a frequent token learns as little as a rare one", killed_by=DERIVATIVE
)
def gradients_of_a_token_averaged(dout, cache):
    counts = np.bincount(cache.tokens.ravel(), minlength=cache.shape[0])
    return right.embedding_backward(dout, cache) / np.maximum(counts, 1)[:, None]


@suite.mutant("embedding_backward", "the batch is a sum, not a mean", killed_by=DERIVATIVE)
def gradient_divided_by_the_tokens(dout, cache):
    return right.embedding_backward(dout, cache) / max(cache.tokens.size, 1)


@suite.mutant("embedding_backward", "the index was read and forgotten", killed_by=PADDING)
def padding_row_learns(dout, cache):
    return right.embedding_backward(dout, cache._replace(padding_index=None))


@suite.mutant("embedding_backward", "token 0 is padding only for who says so", killed_by=DERIVATIVE)
def row_zero_is_always_padding(dout, cache):
    return right.embedding_backward(dout, cache._replace(padding_index=0))


@suite.mutant("embedding_backward", "a long sum of narrow numbers stops growing", killed_by=WIDE)
def narrow_sum_over_the_tokens(dout, cache):
    dtable = np.zeros(cache.shape, dout.dtype)
    for t, row in zip(
        cache.tokens.ravel(), dout.reshape(cache.tokens.size, cache.shape[1]), strict=True
    ):
        if t != cache.padding_index:
            dtable[t] = dtable[t] + row
    return dtable
