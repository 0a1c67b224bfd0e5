"""What learned positions must do: add the row of each position, refuse one that has no row, and
bring home what all rows of the batch have to say."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype

suite = Suite("positions.learned")

FORWARD, BACKWARD = "learned_forward", "learned_backward"

# leading axes of x and of the positions, N, W, rows of the table
SHAPES = (
    ((2,), (), 5, 4, 7),
    ((2,), (2,), 3, 7, 5),
    ((2, 3), (3,), 4, 1, 4),
    ((2, 3), (2, 1), 2, 3, 3),
    ((), (), 1, 1, 1),
    ((3,), (1,), 4, 2, 2),
    ((0,), (), 3, 4, 5),
    ((2,), (2,), 0, 5, 3),
    ((2,), (), 3, 0, 4),
    ((1,), (), 0, 2, 0),
)
shapes = st.sampled_from(SHAPES)
integers = st.sampled_from(["int64", "int32", "uint8", "uint32"])


def case(shape, seed: int, integer: str = "int64") -> tuple[Array, Array, Array]:
    """x, a table, and positions in no order, many of them twice."""
    leading, of_positions, n, width, rows = shape
    rng = np.random.default_rng([seed, 13])
    positions = rng.integers(0, max(rows, 1), (*of_positions, n)).astype(integer)
    return normal((*leading, n, width), seed), normal((rows, width), seed ^ 1), positions


# ---- forward -------------------------------------------------------------------------------------


@suite.property(FORWARD, shape=shapes, seed=seeds, integer=integers)
def each_row_gets_the_row_of_its_position(target, shape, seed, integer):
    """Eq. 7.21 row by row, for positions that all rows of the batch share and for those of each, in
    any order and any integer type."""
    x, table, positions = case(shape, seed, integer)
    out, _ = target.learned_forward(x, table, positions)
    of_row = np.broadcast_to(positions, x.shape[:-1])
    expected = x.copy()
    for at in np.ndindex(x.shape[:-1]):
        expected[at] += table[int(of_row[at])]
    assert_close(out, expected)


@suite.property(FORWARD, seed=seeds, past=st.sampled_from([1, 4, 9]))
def decoding_goes_on_where_the_text_ends(target, seed, past):
    """Eq. 7.21 token by token, at past, past + 1, …, is what the whole text gets at once."""
    x, table = normal((2, past + 2, 6), seed), normal((past + 2, 6), seed ^ 1)
    whole, _ = target.learned_forward(x, table, np.arange(past + 2))
    for p in range(past, past + 2):
        step, _ = target.learned_forward(x[:, p : p + 1], table, np.array([p]))
        assert_close(step, whole[:, p : p + 1], what=f"token {p}")


@suite.property(FORWARD, seed=seeds)
def padding_on_the_left_moves_nothing(target, seed):
    """Two rows, one padded by two tokens on its left: with its own positions that row's tokens get
    what they would get alone.

    https://github.com/unslothai/unsloth/issues/3699
    """
    x, table = normal((2, 4, 5), seed), normal((4, 5), seed ^ 1)
    out, _ = target.learned_forward(x, table, np.array([[0, 1, 2, 3], [0, 0, 0, 1]]))
    alone, _ = target.learned_forward(x[1:, 2:], table, np.arange(2))
    assert_close(out[1:, 2:], alone, what="the padded row")


@suite.property(
    FORWARD, rows=st.integers(0, 5), beyond=st.sampled_from([0, 1, 100]), seed=seeds,
    below=st.booleans(),
)  # fmt: skip
def a_position_without_a_row_is_refused(target, rows, beyond, seed, below):
    """Eq. 7.21 has no row at -1 and none behind the last: an error, never a row of the other end.
    A text longer than the table is the usual way there."""
    x, table = normal((1, 2, 3), seed), normal((rows, 3), seed ^ 1)
    wrong = -1 - beyond if below else rows + beyond
    positions = np.array([min(1, max(rows - 1, 0)), wrong])
    try:
        target.learned_forward(x, table, positions)
    except (ValueError, IndexError):
        return
    raise AssertionError(f"position {wrong} was read from a table of {rows} rows")


# ---- the gradient --------------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, shape=shapes, seed=seeds)
def learned_backward_is_the_derivative(target, shape, seed):
    """Eq. 7.22 against the complex step: x's goes on as it came, a row of the table collects from
    every token that read it, in every row of the batch."""
    x, table, positions = case(shape, seed)
    out, cache = target.learned_forward(x, table, positions)
    dout = cotangent(out, seed)
    grads = target.learned_backward(dout, cache)
    assert_gradients(
        lambda x, table: target.learned_forward(x, table, positions)[0],
        {"x": grads.x, "table": grads.table},
        {"x": x, "table": table},
        dout,
    )


@suite.property(FORWARD, BACKWARD, seed=seeds, n=st.sampled_from([1, 3, 6]))
def rows_that_no_text_reached_do_not_learn(target, seed, n):
    """Eq. 7.22 for a text shorter than the table: the gradient has the table's shape, is the sum
    over the batch for the first n rows and exactly 0 behind them."""
    x, table = normal((2, 3, n, 4), seed), normal((7, 4), seed ^ 1)
    out, cache = target.learned_forward(x, table, np.arange(n))
    dout = cotangent(out, seed)
    got = target.learned_backward(dout, cache).table
    expected = np.zeros((7, 4))
    expected[:n] = dout.sum(axis=(0, 1))
    assert_close(got, expected, what="gradient of the table")
    assert (got[n:] == 0).all(), "a row that nobody read has a gradient"


# ---- numbers -------------------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, seed=seeds, dtype=dtypes, wide_table=st.booleans())
def narrow_arrays_are_rounded_once(target, seed, dtype, wide_table):
    """Narrow x stays narrow, whatever the table is stored in, and a wider table is not rounded
    before it is added; where the sum is small that would be most of it."""
    table = normal((5, 8), seed, 3.0)
    if wide_table:
        table = table + normal((5, 8), seed ^ 2, 1.0) / 1024
    # x near -E: what is left of the two shows how each was rounded
    x = (normal((5, 8), seed ^ 1, 0.01) - table).astype(DTYPES[dtype])
    if not wide_table or dtype == "float32":
        table = table.astype(DTYPES[dtype])
    out, cache = target.learned_forward(x, table, np.arange(5))
    assert_rounded_once(out, x.astype(np.float64) + table.astype(np.float64), dtype, what="out")
    assert target.learned_backward(out, cache).x.dtype == x.dtype, "dx has another dtype"


@suite.property(FORWARD, BACKWARD, seed=seeds, dtype=dtypes, each_its_own=st.booleans())
def narrow_gradients_are_summed_wide(target, seed, dtype, each_its_own):
    """Three thousand narrow gradients of one row add up, from a batch that shares its positions and
    from one that does not: a bfloat16 sum of ones ends at 256."""
    x, table = np.ones((3000, 1, 2), DTYPES[dtype]), np.ones((3, 2), DTYPES[dtype])
    positions = np.full((3000, 1) if each_its_own else (1,), 1)
    _, cache = target.learned_forward(x, table, positions)
    dout = (1 + normal(x.shape, seed, 0.1)).astype(DTYPES[dtype])
    dtable = target.learned_backward(dout, cache).table
    total = [math.fsum(float(a) for a in column) for column in dout[:, 0].T]
    tolerance = of_dtype("float64" if dtype == "float64" else "float32")
    assert_close(dtable[1].astype(np.float64), np.array(total), tolerance, what="gradient")


@suite.property(FORWARD, BACKWARD, shape=shapes, seed=seeds)
def arguments_are_left_alone(target, shape, seed):
    """No array of the caller is modified, no result is a view of one, and one cache serves
    twice."""
    x, table, positions = case(shape, seed)
    given = {"x": x, "table": table, "positions": positions}
    before = {name: a.copy() for name, a in given.items()}
    out, cache = target.learned_forward(x, table, positions)
    dout = cotangent(out, seed)
    untouched = dout.copy()
    once, again = (target.learned_backward(dout, cache) for _ in range(2))
    for name in ("x", "table"):
        first, second = getattr(once, name), getattr(again, name)
        assert np.array_equal(first, second), f"the second backward differs in {name}"
    once.x[...] += 1
    assert np.array_equal(dout, untouched), "the cotangent was modified, or dx is a view of it"
    assert not np.shares_memory(out, x), "the output is a view of x"
    for name, a in given.items():
        assert np.array_equal(a, before[name]), f"{name} was modified"


@suite.property(FORWARD, BACKWARD, seed=seeds)
def a_cache_remembers_what_was_read(target, seed):
    """Whoever counts his positions up in place for the next token does not move the gradient of the
    last one to another row (Eq. 7.22)."""
    x, table, positions = normal((2, 1, 3), seed), normal((4, 3), seed ^ 1), np.array([1])
    out, cache = target.learned_forward(x, table, positions)
    positions += 1
    dtable = target.learned_backward(1 + cotangent(out, seed) ** 2, cache).table
    assert np.flatnonzero(dtable.any(axis=1)).tolist() == [1], "the gradient went to another row"
