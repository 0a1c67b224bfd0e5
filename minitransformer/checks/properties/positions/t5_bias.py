"""What T5's bias must do: put each distance in its bucket, read the table there, and bring every
pair's gradient back to it."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.attention.dense import attention_backward, attention_forward
from minitransformer.attention.masks import causal
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, dtypes
from minitransformer.checks.properties.positions import SHAPES, integers
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype

suite = Suite("positions.t5_bias")

BUCKETS, FORWARD, BACKWARD = "t5_buckets", "t5_bias_forward", "t5_bias_backward"

shapes = st.sampled_from((*SHAPES, ((), (), 0, 2, 3)))
sides = st.booleans()
# R and F; among them odd numbers of buckets a side, and as few as there can be
SETTINGS = ((32, 128), (8, 20), (16, 64), (64, 256), (12, 50), (6, 11), (4, 3))
settings = st.sampled_from(SETTINGS)


def exact_bucket(relative: int, buckets: int, furthest: int, bidirectional: bool) -> int:
    """The bucket in whole numbers: no logarithm, so nothing to round."""
    if bidirectional:
        buckets //= 2
        start, distance = (buckets if relative > 0 else 0), abs(relative)
    else:
        start, distance = 0, max(-relative, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    rest = buckets - exact
    passed = [distance**rest * exact**k >= furthest**k * exact**rest for k in range(1, rest)]
    return start + exact + sum(passed)


def case(shape, seed: int, integer: str = "int64", buckets: int = 8) -> tuple[Array, Array, Array]:
    """A table, and positions of queries and keys in no order."""
    leading_q, leading_k, heads, n, m = shape
    rng = np.random.default_rng([seed, 5])
    queries = rng.integers(0, 60, (*leading_q, n)).astype(integer)
    keys = rng.integers(0, 60, (*leading_k, m)).astype(integer)
    return normal((buckets, heads), seed), queries, keys


# ---- the buckets ---------------------------------------------------------------------------------


@suite.property(BUCKETS, setting=settings, bidirectional=sides)
def each_distance_has_its_bucket(target, setting, bidirectional):
    """Eq. 7.14 and Eq. 7.15 in whole numbers, where (n/e)^{r-e} is held against (F/e)^k."""
    buckets, furthest = setting
    relative = np.arange(-2 * furthest, 2 * furthest + 1)
    got = target.t5_buckets(relative, buckets, bidirectional=bidirectional, max_distance=furthest)
    expected = [exact_bucket(int(r), buckets, furthest, bidirectional) for r in relative]
    assert_close(got, np.array(expected), what="bucket")


@suite.property(BUCKETS)
def buckets_of_t5(target):
    """Eq. 7.14 and Eq. 7.15 with T5's 32 buckets and 128, which are the defaults: 1 before is 1,
    1 after 17, 8 after 24, and 64 the first of its bucket though the logarithm is rounded; a
    decoder has 0 … 15 for itself, 16 for 16 to 18 before, 31 for 128.

    https://github.com/NVIDIA/TensorRT-LLM/issues/1343
    """
    near = {0: 0, -1: 1, 1: 17, -7: 7, 8: 24, -8: 8, -12: 9}
    encoder = near | {63: 29, 64: 30, 127: 31, -128: 15, 5000: 31, -5000: 15}
    decoder = {-n: n for n in range(17)} | {-18: 16, -19: 17, -128: 31, -9999: 31, 1: 0, 40: 0}
    for bidirectional, known in ((True, encoder), (False, decoder)):
        got = target.t5_buckets(np.array([*known]), bidirectional=bidirectional)
        what = "bucket, bidirectional" if bidirectional else "bucket, causal"
        assert_close(got, np.array([*known.values()]), what=what)


@suite.property(BUCKETS, bidirectional=sides)
def buckets_widen_with_the_distance(target, bidirectional):
    """Further away is never a lower bucket, none is skipped, the exact ones hold one distance, the
    widest four times as many as the first that is shared; of T5's 32 only number 16 is never used,
    and only bidirectional."""
    before = target.t5_buckets(-np.arange(128 * 4), bidirectional=bidirectional)
    steps = np.diff(before)
    assert ((steps == 0) | (steps == 1)).all(), "a bucket is skipped, or comes again"
    widths, exact = np.bincount(before), 8 if bidirectional else 16
    assert (widths[:exact] == 1).all(), "a near key shares its bucket"
    assert widths[-2] >= 4 * widths[exact] > 4, "far buckets are not wider than near ones"
    everywhere = target.t5_buckets(np.arange(-300, 301), bidirectional=bidirectional)
    unused = set(range(32)) - set(everywhere.tolist())
    assert unused == ({16} if bidirectional else set()), f"buckets {unused} are not used"


# ---- the bias ------------------------------------------------------------------------------------


@suite.property(FORWARD, shape=shapes, seed=seeds, integer=integers, bidirectional=sides)
def each_pair_reads_its_bucket(target, shape, seed, integer, bidirectional):
    """Eq. 7.16 pair by pair, bit for bit, for positions in any order and any integer type."""
    table, queries, keys = case(shape, seed, integer)
    bias, _ = target.t5_bias_forward(
        table, queries, keys, bidirectional=bidirectional, max_distance=20
    )
    leading = np.broadcast_shapes(queries.shape[:-1], keys.shape[:-1])
    n, m = queries.shape[-1], keys.shape[-1]
    assert bias.shape == (*leading, table.shape[1], n, m), f"got shape {bias.shape}"
    rows = np.broadcast_to(queries, (*leading, n)), np.broadcast_to(keys, (*leading, m))
    expected = np.zeros(bias.shape)
    for *b, h, i, j in np.ndindex(bias.shape):
        relative = int(rows[1][(*b, j)]) - int(rows[0][(*b, i)])
        expected[(*b, h, i, j)] = table[exact_bucket(relative, 8, 20, bidirectional), h]
    assert_close(bias, expected, what="bias")


@suite.property(FORWARD, seed=seeds, bidirectional=sides, shift=st.sampled_from([1, 7, 2**40]))
def a_common_shift_changes_nothing(target, seed, bidirectional, shift):
    """Only the distance counts, and the side: rows padded on the left get the bias of the same
    tokens at 0; another distance gets another."""
    table, queries, keys = case(((2,), (2,), 3, 4, 5), seed, buckets=32)
    here, _ = target.t5_bias_forward(table, queries, keys, bidirectional=bidirectional)
    there, _ = target.t5_bias_forward(
        table, queries + shift, keys + shift, bidirectional=bidirectional
    )
    assert np.array_equal(here, there), "a common shift was felt"
    apart, _ = target.t5_bias_forward(table, queries + 200, keys, bidirectional=bidirectional)
    assert not np.array_equal(here, apart), "the distance does not matter"


@suite.property(FORWARD, seed=seeds, past=st.sampled_from([1, 4, 20]), new=st.sampled_from([1, 3]))
def decoding_reads_the_rows_of_the_whole(target, seed, past, new):
    """With a cache the queries stand at past, past + 1, …: their rows are the last of the whole
    bias. A ring buffer holds the keys in another order: their columns, in that order.

    https://github.com/NVIDIA/TensorRT-LLM/issues/1343
    """
    table, positions = normal((32, 3), seed), np.arange(past + new)
    whole, _ = target.t5_bias_forward(table, positions, positions, bidirectional=False)
    step, _ = target.t5_bias_forward(table, positions[past:], positions, bidirectional=False)
    assert np.array_equal(step, whole[:, past:]), "not the last rows of the whole"
    slots = np.roll(positions, 2)
    ring, _ = target.t5_bias_forward(table, positions[past:], slots, bidirectional=False)
    assert np.array_equal(ring, whole[:, past:, slots]), "not the columns of the slots"


@suite.property(FORWARD, seed=seeds, sizes=st.sampled_from([(5, 5), (2, 6), (1, 4)]))
def attention_sees_the_bias_beside_unscaled_scores(target, seed, sizes):
    """The weights of a T5 decoder are softmax(q · k + E[b]), with no 1/√D on either."""
    n, m = sizes
    q, k, table = normal((3, n, 4), seed), normal((3, m, 4), seed ^ 1), normal((8, 3), seed ^ 2)
    bias, _ = target.t5_bias_forward(
        table, np.arange(m - n, m), np.arange(m), bidirectional=False, max_distance=20
    )
    keep = causal(n, m, align="lower_right").dense()
    got = attention_forward(q, k, k, bias=bias, keep=keep, scale=1.0)[1].weights
    expected = np.zeros_like(got)
    for h, i in np.ndindex(3, n):
        p = i + m - n
        logits = [
            q[h, i] @ k[h, j] + table[exact_bucket(j - p, 8, 20, False), h] for j in range(p + 1)
        ]
        powers = np.exp(np.array(logits) - max(logits))
        expected[h, i, : p + 1] = powers / powers.sum()
    assert_close(got, expected, what="weights")


# ---- the gradient --------------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, shape=shapes, seed=seeds, bidirectional=sides)
def t5_bias_backward_is_the_derivative(target, shape, seed, bidirectional):
    """Eq. 7.17 against the complex step: each bucket collects the pairs of all batch rows."""
    table, queries, keys = case(shape, seed)
    options = {"bidirectional": bidirectional, "max_distance": 20}
    bias, cache = target.t5_bias_forward(table, queries, keys, **options)
    dout = cotangent(bias, seed)
    assert_gradients(
        lambda table: target.t5_bias_forward(table, queries, keys, **options)[0],
        {"table": target.t5_bias_backward(dout, cache)},
        {"table": table},
        dout,
    )


@suite.property(FORWARD, BACKWARD, seed=seeds, masked=st.booleans())
def the_table_learns_through_attention(target, seed, masked):
    """Eq. 7.17 behind attention's own backward: the gradient of its bias, summed over the batch for
    positions that all rows share, goes on to the table; masked pairs add nothing."""
    q, k, v = (normal((2, 3, 4, 5), seed ^ i, 0.5) for i in range(3))
    table, positions = normal((8, 3), seed), np.arange(4)
    keep = causal(4, 4, align="lower_right").dense() if masked else None

    def attend(table):
        bias, cache = target.t5_bias_forward(table, positions, positions, bidirectional=not masked)
        return *attention_forward(q, k, v, bias=bias, keep=keep, scale=1.0), cache

    out, attention, cache = attend(table)
    dout = cotangent(out, seed)
    dbias = attention_backward(dout, attention).bias
    assert_gradients(
        lambda table: attend(table)[0],
        {"table": target.t5_bias_backward(dbias, cache)},
        {"table": table},
        dout,
    )


@suite.property(FORWARD, BACKWARD, seed=seeds, bidirectional=sides)
def a_bucket_that_nobody_reads_does_not_learn(target, seed, bidirectional):
    """Eq. 7.17 is exactly 0 for a bucket without a pair: far ones in a short text, the future's of
    a decoder's, and always number R/2 of a bidirectional table."""
    table, positions = normal((32, 2), seed), np.arange(5)
    bias, cache = target.t5_bias_forward(table, positions, positions, bidirectional=bidirectional)
    dtable = target.t5_bias_backward(1 + cotangent(bias, seed) ** 2, cache)
    read = [0, 1, 2, 3, 4, *([17, 18, 19, 20] if bidirectional else [])]
    assert dtable.shape == (32, 2), f"got shape {dtable.shape}"
    learns = np.flatnonzero((dtable != 0).any(axis=1)).tolist()
    assert learns == read, f"buckets {learns} learn, {read} are read"


# ---- numbers -------------------------------------------------------------------------------------


@suite.property(FORWARD, seed=seeds, dtype=dtypes, start=st.sampled_from([0, 2048, 30_000]))
def narrow_tables_are_read_bit_for_bit(target, seed, dtype, start):
    """The bias has the dtype of the table and its very numbers: buckets are whole numbers, whatever
    the table is stored in, and however far out the text is."""
    table = normal((32, 3), seed).astype(DTYPES[dtype])
    queries, keys = np.array([start, start + 3]), np.arange(0, start + 400, 7)
    bias, _ = target.t5_bias_forward(table, queries, keys, bidirectional=True)
    assert bias.dtype == table.dtype, f"got dtype {bias.dtype}"
    wide, _ = target.t5_bias_forward(table.astype(float), queries, keys, bidirectional=True)
    assert np.array_equal(bias.astype(float), wide), "another dtype reads other buckets"
    for i, j in ((0, 0), (1, len(keys) - 1), (0, start // 7), (1, start // 7 + 20)):
        row = exact_bucket(int(keys[j] - queries[i]), 32, 128, True)
        assert np.array_equal(bias[:, i, j], table[row]), f"pair {i}, {j} reads another bucket"


@suite.property(FORWARD, BACKWARD, seed=seeds, dtype=dtypes)
def narrow_gradients_are_summed_wide(target, seed, dtype):
    """Three thousand narrow cotangents add up: a bfloat16 sum of ones ends at 256."""
    table = np.ones((4, 2), DTYPES[dtype])
    bias, cache = target.t5_bias_forward(
        table, np.array([1]), np.full(3000, 0), bidirectional=False, max_distance=9
    )
    dout = (1 + normal(bias.shape, seed, 0.1)).astype(DTYPES[dtype])
    total = [math.fsum(float(x) for x in head[0]) for head in dout]
    tolerance = of_dtype("float64" if dtype == "float64" else "float32")
    dtable = target.t5_bias_backward(dout, cache)
    assert_close(dtable[1].astype(np.float64), np.array(total), tolerance, what="gradient")


@suite.property(FORWARD, BACKWARD, shape=shapes, seed=seeds)
def arguments_are_left_alone(target, shape, seed):
    """No array of the caller is modified, the bias is no view of the table, and one cache serves
    twice."""
    table, queries, keys = case(shape, seed)
    given = {"table": table, "query_positions": queries, "key_positions": keys}
    before = {name: x.copy() for name, x in given.items()}
    bias, cache = target.t5_bias_forward(table, queries, keys, bidirectional=True)
    dout = cotangent(bias, seed)
    untouched = dout.copy()
    once, again = (target.t5_bias_backward(dout, cache) for _ in range(2))
    assert np.array_equal(once, again), "the second backward differs from the first"
    assert np.array_equal(dout, untouched), "the cotangent was modified"
    assert not np.shares_memory(bias, table), "the bias is a view of the table"
    for name, x in given.items():
        assert np.array_equal(x, before[name]), f"{name} was modified"
