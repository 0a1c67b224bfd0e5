"""What ALiBi must do: give any number of heads its slope, and make each pair pay for its
distance."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.attention.dense import attention_backward, attention_forward
from minitransformer.attention.masks import causal
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes
from minitransformer.checks.properties.positions import SHAPES, integers
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype

suite = Suite("positions.alibi")

SLOPES, FORWARD, BACKWARD = "alibi_slopes", "alibi_forward", "alibi_backward"

shapes = st.sampled_from(SHAPES)


def case(shape, seed: int, integer: str = "int64") -> tuple[Array, Array, Array]:
    """Slopes of either sign, and positions of queries and keys in no order."""
    leading_q, leading_k, heads, n, m = shape
    rng = np.random.default_rng([seed, 9])
    queries = rng.integers(0, 60, (*leading_q, n)).astype(integer)
    keys = rng.integers(0, 60, (*leading_k, m)).astype(integer)
    return normal((heads,), seed), queries, keys


def authors_slopes(n: int) -> list[float]:
    """The recursion that the paper's authors published."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return authors_slopes(closest) + authors_slopes(2 * closest)[0::2][: n - closest]


# ---- the slopes ----------------------------------------------------------------------------------


@suite.property(SLOPES, heads=st.integers(1, 70))
def slopes_are_those_of_the_authors(target, heads):
    """Eq. 7.10 and Eq. 7.11 as the authors' recursion, for any number of heads."""
    got = target.alibi_slopes(heads)
    assert got.shape == (heads,) and got.dtype == np.float64, f"got {got.dtype} {got.shape}"
    expected = np.array(authors_slopes(heads))
    assert_close(got / expected, np.ones(heads), what="slopes / the authors'")


@suite.property(SLOPES)
def slopes_of_known_models(target):
    """Eq. 7.10 and Eq. 7.11 in powers of two: 8 heads from -1 to -8; 12 heads go on with -1/2,
    -3/2, -5/2, -7/2, in that order; one head has 2⁻⁸.

    https://github.com/ml-explore/mlx/pull/3071, https://github.com/NVIDIA/TensorRT-LLM/pull/1611
    """
    eight = [-1, -2, -3, -4, -5, -6, -7, -8]
    known = {1: [-8], 2: [-4, -8], 3: [-4, -8, -2], 8: eight, 12: [*eight, -0.5, -1.5, -2.5, -3.5]}
    for heads, exponents in known.items():
        got = np.log2(target.alibi_slopes(heads))
        assert_close(got, np.array(exponents, float), what=f"log₂ of the slopes of {heads} heads")


@suite.property(SLOPES, heads=st.integers(1, 40))
def more_heads_keep_the_slopes_of_fewer(target, heads):
    """Between p and 2p heads the first p are those of p; all differ, and all are among those of
    2p: the gaps are filled, steepest first (Eq. 7.11)."""
    power = 2 ** (len(bin(heads)) - 3)
    got = target.alibi_slopes(heads)
    assert np.array_equal(got[:power], target.alibi_slopes(power)), "the first slopes changed"
    assert len(set(got.tolist())) == heads, "two heads share a slope"
    double = target.alibi_slopes(2 * power)
    assert np.isclose(got[:, None], double, rtol=1e-12, atol=0).any(axis=1).all()
    assert (np.diff(got[power:]) < 0).all(), "the gaps are not filled steepest first"


# ---- the bias ------------------------------------------------------------------------------------


@suite.property(FORWARD, shape=shapes, seed=seeds, integer=integers)
def each_pair_pays_for_its_distance(target, shape, seed, integer):
    """Eq. 7.12 pair by pair, for positions in any order and any integer type: a key before the
    query must not wrap around to 2⁶⁴ - 1."""
    slopes, queries, keys = case(shape, seed, integer)
    bias, _ = target.alibi_forward(slopes, queries, keys)
    leading = np.broadcast_shapes(queries.shape[:-1], keys.shape[:-1])
    n, m = queries.shape[-1], keys.shape[-1]
    assert bias.shape == (*leading, len(slopes), n, m)
    rows = np.broadcast_to(queries, (*leading, n)), np.broadcast_to(keys, (*leading, m))
    expected = np.zeros(bias.shape)
    for *b, h, i, j in np.ndindex(bias.shape):
        distance = abs(int(rows[0][(*b, i)]) - int(rows[1][(*b, j)]))
        expected[(*b, h, i, j)] = -slopes[h] * distance
    assert_close(bias, expected)


@suite.property(SLOPES, FORWARD, heads=st.integers(1, 9), n=st.sampled_from([1, 2, 7]))
def near_keys_are_preferred_on_either_side(target, heads, n):
    """With the slopes of Eq. 7.10 and Eq. 7.11 the token itself pays nothing, one further away
    always pays more, and one as far after as before pays the same."""
    positions = np.arange(n) + 3
    bias, _ = target.alibi_forward(target.alibi_slopes(heads), positions, positions)
    assert np.array_equal(bias, np.swapaxes(bias, -1, -2)), "before and after differ"
    assert (np.diagonal(bias, axis1=-2, axis2=-1) == 0).all(), "the token itself pays"
    assert (np.diff(bias[:, 0], axis=-1) < 0).all(), "further away is not dearer"


@suite.property(FORWARD, seed=seeds, shift=st.sampled_from([1, 7, 1000]))
def a_common_shift_changes_nothing(target, seed, shift):
    """Only distances count: rows padded on the left, or a text that starts at 1000, get the bias of
    the same tokens at 0; another distance gets another."""
    slopes, queries, keys = case(((2,), (2,), 3, 4, 5), seed)
    here, _ = target.alibi_forward(slopes, queries, keys)
    there, _ = target.alibi_forward(slopes, queries + shift, keys + shift)
    assert np.array_equal(here, there), "a common shift was felt"
    apart, _ = target.alibi_forward(slopes, queries + 100, keys)
    assert not np.array_equal(here, apart), "the distance does not matter"


@suite.property(SLOPES, FORWARD, past=st.sampled_from([1, 4, 9]), new=st.sampled_from([1, 3]))
def decoding_reads_the_rows_of_the_whole(target, past, new):
    """With a cache the queries stand at past, past + 1, …: their rows are the last of the whole
    bias. A ring buffer holds the keys in another order: their columns, in that order.

    https://github.com/skyzh/tiny-llm/pull/46
    """
    slopes, positions = target.alibi_slopes(3), np.arange(past + new)
    whole, _ = target.alibi_forward(slopes, positions, positions)
    step, _ = target.alibi_forward(slopes, positions[past:], positions)
    assert np.array_equal(step, whole[:, past:]), "not the last rows of the whole"
    slots = np.roll(positions, 2)
    ring, _ = target.alibi_forward(slopes, positions[past:], slots)
    assert np.array_equal(ring, whole[:, past:, slots]), "not the columns of the slots"


@suite.property(SLOPES, FORWARD, seed=seeds, sizes=st.sampled_from([(5, 5), (2, 6), (1, 4)]))
def causal_attention_sees_the_papers_bias(target, seed, sizes):
    """Under a causal mask the weights are softmax(q · k / √D + m (j - i)), added after scaling; the
    cheaper m · j, equal up to a constant for each row, gives the same, but only there."""
    n, m = sizes
    q, k = normal((3, n, 4), seed), normal((3, m, 4), seed ^ 1)
    slopes = target.alibi_slopes(3)
    bias, _ = target.alibi_forward(slopes, np.arange(m - n, m), np.arange(m))
    keep = causal(n, m, align="lower_right").dense()

    def weights(bias, keep):
        return attention_forward(q, k, k, bias=bias, keep=keep)[1].weights

    got = weights(bias, keep)
    expected = np.zeros_like(got)
    for h, i in np.ndindex(3, n):
        p = i + m - n
        logits = [q[h, i] @ k[h, j] / 2 + slopes[h] * (j - p) for j in range(p + 1)]
        powers = np.exp(np.array(logits))
        expected[h, i, : p + 1] = powers / powers.sum()
    assert_close(got, expected, what="weights")
    cheaper = slopes[:, None, None] * np.arange(m)
    assert_close(got, weights(cheaper, keep), what="weights with m · j")
    if n > 1:
        without = np.abs(weights(bias, None) - weights(cheaper, None)).max()
        assert without > 1e-6, "without a mask, m · j is as good"


# ---- the gradient --------------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, shape=shapes, seed=seeds)
def alibi_backward_is_the_derivative(target, shape, seed):
    """Eq. 7.13 against the complex step: one number for each head, summed over all that it paid."""
    slopes, queries, keys = case(shape, seed)
    bias, cache = target.alibi_forward(slopes, queries, keys)
    dout = cotangent(bias, seed)
    assert_gradients(
        lambda slopes: target.alibi_forward(slopes, queries, keys)[0],
        {"slopes": target.alibi_backward(dout, cache)},
        {"slopes": slopes},
        dout,
    )


@suite.property(FORWARD, BACKWARD, seed=seeds, masked=st.booleans())
def slopes_learn_through_attention(target, seed, masked):
    """Eq. 7.13 behind attention's own backward: the gradient of its bias, summed over the batch for
    positions that all rows share, goes on to the slopes; masked pairs add nothing."""
    q, k, v = (normal((2, 3, 4, 5), seed ^ i) for i in range(3))
    slopes, positions = 0.3 + np.abs(normal((3,), seed)), np.arange(4)
    keep = causal(4, 4, align="lower_right").dense() if masked else None

    def attend(slopes):
        bias, cache = target.alibi_forward(slopes, positions, positions)
        return *attention_forward(q, k, v, bias=bias, keep=keep), cache

    out, attention, cache = attend(slopes)
    dout = cotangent(out, seed)
    dbias = attention_backward(dout, attention).bias
    assert_gradients(
        lambda slopes: attend(slopes)[0],
        {"slopes": target.alibi_backward(dbias, cache)},
        {"slopes": slopes},
        dout,
    )


# ---- numbers -------------------------------------------------------------------------------------


@suite.property(FORWARD, seed=seeds, dtype=dtypes, start=st.sampled_from([0, 2048, 30_000]))
def narrow_biases_are_rounded_once(target, seed, dtype, start):
    """The bias has the dtype of the slopes, and far out in the text it is as exact as at its start:
    m · j for large j, or m · i - m · j, would have lost the difference between near keys.

    https://github.com/vllm-project/vllm/pull/945
    """
    slopes, positions = normal((3,), seed).astype(DTYPES[dtype]), np.arange(7) + start
    bias, _ = target.alibi_forward(slopes, positions, positions)
    exact, _ = target.alibi_forward(slopes.astype(np.float64), positions, positions)
    distance = np.abs(np.arange(7)[:, None] - np.arange(7))
    expected = -slopes.astype(np.float64)[:, None, None] * distance
    assert_close(exact, expected, what="bias in float64")
    assert_rounded_once(bias, expected, dtype, what="bias")


@suite.property(FORWARD, BACKWARD, seed=seeds, dtype=dtypes)
def narrow_gradients_are_summed_wide(target, seed, dtype):
    """Three thousand narrow cotangents add up: a bfloat16 sum of ones ends at 256."""
    slopes = np.ones(2, DTYPES[dtype])
    bias, cache = target.alibi_forward(slopes, np.array([1]), np.tile([0, 2, 1], 1000))
    dout = (1 + normal(bias.shape, seed, 0.1)).astype(DTYPES[dtype])
    total = [-math.fsum(float(x) for x in head[0, np.arange(3000) % 3 < 2]) for head in dout]
    tolerance = of_dtype("float64" if dtype == "float64" else "float32")
    dslopes = target.alibi_backward(dout, cache)
    assert_close(dslopes.astype(np.float64), np.array(total), tolerance, what="gradient")


@suite.property(FORWARD, BACKWARD, shape=shapes, seed=seeds)
def arguments_are_left_alone(target, shape, seed):
    """No array of the caller is modified, and one cache serves twice."""
    slopes, queries, keys = case(shape, seed)
    before = slopes.copy(), queries.copy(), keys.copy()
    bias, cache = target.alibi_forward(slopes, queries, keys)
    dout = cotangent(bias, seed)
    untouched = dout.copy()
    once, again = (target.alibi_backward(dout, cache) for _ in range(2))
    assert np.array_equal(once, again), "the second backward differs from the first"
    assert np.array_equal(dout, untouched), "the cotangent was modified"
    for name, now, then in zip(
        ("slopes", "query_positions", "key_positions"), (slopes, queries, keys), before, strict=True
    ):
        assert np.array_equal(now, then), f"{name} was modified"
