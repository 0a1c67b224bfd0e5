"""What a table of rows must do when it is read and when it learns."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, dtypes, entries
from minitransformer.checks.strategies import seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype

suite = Suite("nn.embedding")

# few rows and many tokens: nearly all of them repeat
tables = st.sampled_from([(5, 3), (2, 7), (1, 1), (7, 1), (3, 0)])
shapes = st.sampled_from([(2, 7), (11,), (1,), (2, 3, 5), (0,), (3, 0)])
integers = st.sampled_from(["int64", "int32", "uint8"])


def inputs(shape, table, seed, integer="int64"):
    """Tokens and the table that they are looked up in."""
    tokens = np.random.default_rng(seed).integers(0, table[0], shape).astype(integer)
    return tokens, entries(table, seed ^ 1)


@suite.property("embedding_forward", shape=shapes, table=tables, seed=seeds, integer=integers)
def each_token_reads_its_row(target, shape, table, seed, integer):
    """Eq. 16.3, bit for bit: row t of the table, which is the one-hot row of t times the table."""
    tokens, table = inputs(shape, table, seed, integer)
    out, _ = target.embedding_forward(tokens, table)
    assert out.shape == (*shape, table.shape[1])
    for index in np.ndindex(shape):
        assert np.array_equal(out[index], table[int(tokens[index])]), f"at {index}"
    one_hot = (tokens[..., None] == np.arange(len(table))).astype(np.float64)
    assert_close(out, one_hot @ table, what="one-hot times the table")


@suite.property("embedding_forward", table=tables, seed=seeds, dtype=dtypes)
def what_is_read_is_a_copy_in_the_same_dtype(target, table, seed, dtype):
    """Nobody who adds to the output changes the table, not even where tokens count from 0 up."""
    table = entries(table, seed).astype(DTYPES[dtype])
    before = table.copy()
    out, _ = target.embedding_forward(np.arange(len(table)), table)
    assert out.dtype == table.dtype, f"got dtype {out.dtype}"
    out += np.ones_like(out)
    assert np.array_equal(table, before), "the output is a view of the table"


@suite.property("embedding_forward", "embedding_backward", shape=shapes, table=tables, seed=seeds)
def embedding_backward_is_the_derivative(target, shape, table, seed):
    """Eq. 16.3 against the complex step: a token that occurs twice brings home both gradients."""
    tokens, table = inputs(shape, table, seed)
    out, cache = target.embedding_forward(tokens, table)
    dout = cotangent(out, seed)
    assert_gradients(
        lambda table: target.embedding_forward(tokens, table)[0],
        {"table": target.embedding_backward(dout, cache)},
        {"table": table},
        dout,
    )


@suite.property("embedding_forward", "embedding_backward", shape=shapes, table=tables, seed=seeds)
def the_padding_row_is_read_and_never_learns(target, shape, table, seed):
    """With a padding index the output is the same, and of the gradient only that row is 0."""
    tokens, table = inputs(shape, table, seed)
    padding = seed % len(table)
    plain, cache = target.embedding_forward(tokens, table)
    out, other = target.embedding_forward(tokens, table, padding_index=padding)
    assert np.array_equal(out, plain), "the padding row is not read"
    dout = cotangent(out, seed)
    expected = target.embedding_backward(dout, cache).copy()
    expected[padding] = 0
    assert_close(target.embedding_backward(dout, other), expected, what="gradient of the table")


@suite.property("embedding_forward", "embedding_backward", seed=seeds, dtype=dtypes)
def narrow_gradients_are_summed_wide(target, seed, dtype):
    """Three thousand narrow gradients of one token add up: a bfloat16 sum of ones ends at 256."""
    dout = (1 + entries((3000, 2), seed, 0.1)).astype(DTYPES[dtype])
    _, cache = target.embedding_forward(np.full(3000, 1), np.ones((3, 2), DTYPES[dtype]))
    dtable = target.embedding_backward(dout, cache)
    total = [math.fsum(float(a) for a in column) for column in dout.T]
    tolerance = of_dtype("float64" if dtype == "float64" else "float32")
    assert_close(dtable[1], np.array(total), tolerance, what="gradient of the row")
    assert (dtable[[0, 2]] == 0).all(), "a row that nobody read has a gradient"


@suite.property("embedding_forward", "embedding_backward", shape=shapes, table=tables, seed=seeds)
def arguments_are_left_alone(target, shape, table, seed):
    """No array of the caller is modified, and one cache serves twice."""
    tokens, table = inputs(shape, table, seed)
    before = tokens.copy(), table.copy()
    out, cache = target.embedding_forward(tokens, table, padding_index=0)
    dout = cotangent(out, seed)
    untouched = dout.copy()
    first, second = (target.embedding_backward(dout, cache) for _ in range(2))
    assert np.array_equal(tokens, before[0]), "tokens were modified"
    assert np.array_equal(table, before[1]), "the table was modified"
    assert np.array_equal(dout, untouched), "the cotangent was modified"
    assert np.array_equal(first, second), "the second backward differs from the first"
