"""What a prior over documents must do: weigh each document's tokens as if its relevance multiplied
their probabilities, and learn from what they were worth."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.attention.dense import attention_backward, attention_forward
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, dtypes
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import FLOAT32
from minitransformer.checks.tolerances import FLOAT32 as SUMMED

suite = Suite("attention.retrieval")

FORWARD, BACKWARD = "retrieval_prior_forward", "retrieval_prior_backward"
MASS, SHARE, CHUNKS = "document_mass", "share_duplicates", "neighbours_of_the_chunk_before"

# leading axes of the relevance and of the documents, documents, tokens
SHAPES = (((2,), (2,), 3, 7), ((), (), 1, 1), ((2,), (), 4, 5), ((2, 3), (1, 3), 2, 6),
          ((2,), (2,), 3, 0), ((0,), (0,), 2, 3), ((2,), (2,), 1, 4))  # fmt: skip
shapes = st.sampled_from(SHAPES)


def drawn(shape, seed: int, *, none: float = 0.3, padded: float = 0.2) -> tuple[Array, Array]:
    """log r, some of it -inf but not all, and the document of each token, some of them padding."""
    leading, of_documents, count, tokens = shape
    rng = np.random.default_rng([seed, 9])
    log_r = normal((*leading, count), seed, 2.0)
    log_r = np.where((rng.random(log_r.shape) < none) & (np.arange(count) > 0), -np.inf, log_r)
    documents = rng.integers(0, count, (*of_documents, tokens))
    gone = (rng.random(documents.shape) < padded) & (np.arange(tokens) > 0)
    return log_r, np.where(gone, -1, documents)


def memory(shape, seed: int) -> tuple[Array, Array, Array]:
    """q (*B, 2, 3, 4), k and v (*B, 1, M, 4)"""
    leading, _, _, tokens = shape
    return (
        normal((*leading, 2, 3, 4), seed ^ 1),
        normal((*leading, 1, tokens, 4), seed ^ 2),
        normal((*leading, 1, tokens, 4), seed ^ 3),
    )


# ---- the prior -----------------------------------------------------------------------------------


@suite.property(FORWARD, shape=shapes, seed=seeds)
def each_token_has_the_prior_of_its_document(target, shape, seed):
    """Eq. 9.1 token by token; padding has -inf."""
    log_r, documents = drawn(shape, seed)
    got, _ = target.retrieval_prior_forward(log_r, documents)
    leading, _, _, tokens = shape
    expected = np.full((*leading, 1, 1, tokens), -np.inf)
    numbers = np.broadcast_to(documents, (*leading, tokens))
    for *b, j in np.ndindex(*leading, tokens):
        number = numbers[(*b, j)]
        if number >= 0:
            expected[(*b, 0, 0, j)] = log_r[(*b, number)]
    assert got.shape == expected.shape, f"got shape {got.shape}"
    assert np.array_equal(got, expected)


@suite.property(FORWARD, shape=shapes, seed=seeds, factor=st.sampled_from([1.0, 1e-200, 1e200]))
def probabilities_are_multiplied_and_made_to_sum_to_one(target, shape, seed, factor):
    """Eq. 9.2: attention with the bias has the weights of attention without, times r, divided by
    their sum; a common factor of all r is not felt, however large."""
    log_r, documents = drawn(shape, seed)
    q, k, v = memory(shape, seed)
    bias, _ = target.retrieval_prior_forward(log_r + math.log(factor), documents)
    got, cache = attention_forward(q, k, v, bias=bias)
    _, plain = attention_forward(q, k, v)
    leading, _, count, tokens = shape
    r = np.append(np.exp(log_r), np.zeros((*leading, 1)), axis=-1)
    each = np.take_along_axis(r, np.broadcast_to(documents, (*leading, tokens)) % (count + 1), -1)
    expected = plain.weights * each[..., None, None, :]
    total = expected.sum(axis=-1, keepdims=True)
    expected = expected / np.where(total == 0, 1, total)
    assert_close(cache.weights, expected, what="weights")
    assert_close(got, expected @ v, what="out")


@suite.property(FORWARD, BACKWARD, shape=shapes, seed=seeds)
def prior_backward_is_the_derivative(target, shape, seed):
    """Eq. 9.3 against the complex step, alone and through attention; what has no relevance or no
    token gets exactly 0."""
    log_r, documents = drawn(shape, seed)
    q, k, v = memory(shape, seed)
    found = log_r != -np.inf
    numbers = np.broadcast_to(documents, (*log_r.shape[:-1], documents.shape[-1]))

    def given(x):
        return np.where(found, x, -np.inf)

    bias, cache = target.retrieval_prior_forward(log_r, documents)
    dbias = cotangent(bias, seed)
    dlog = target.retrieval_prior_backward(dbias, cache)
    finite = np.where(found, log_r, 0)

    def alone(x):
        bias, _ = target.retrieval_prior_forward(given(x), documents)
        return np.where(np.isfinite(bias), bias, 0)

    assert_gradients(alone, {"x": dlog}, {"x": finite}, dbias)
    out, kept = attention_forward(q, k, v, bias=bias)
    dout = cotangent(out, seed)
    dlog = target.retrieval_prior_backward(attention_backward(dout, kept).bias, cache)

    def through(x):
        bias, _ = target.retrieval_prior_forward(given(x), documents)
        return attention_forward(q, k, v, bias=bias)[0]

    assert_gradients(through, {"x": dlog}, {"x": finite}, dout)
    assert (dlog[~found] == 0).all(), "a document without relevance learns"
    has_token = (numbers[..., None] == np.arange(log_r.shape[-1])).any(axis=-2)
    assert (dlog[~has_token] == 0).all(), "a document without a token learns"
    assert_close(dlog.sum(axis=-1), np.zeros(dlog.shape[:-1]), what="sum over the documents")


@suite.property(FORWARD, BACKWARD, shape=shapes, seed=seeds)
def a_document_without_relevance_might_as_well_not_exist(target, shape, seed):
    """NaN in its tokens, or in padding, reaches no output and no gradient."""
    log_r, documents = drawn(shape, seed, none=0.6)
    q, k, v = memory(shape, seed)
    bias, cache = target.retrieval_prior_forward(log_r, documents)
    numbers = np.broadcast_to(documents, (*log_r.shape[:-1], documents.shape[-1]))
    relevant = np.take_along_axis(log_r, np.maximum(numbers, 0), axis=-1) != -np.inf
    gone = ~(relevant & (numbers >= 0))[..., None, :, None]
    clean, _ = attention_forward(q, np.where(gone, 0, k), np.where(gone, 0, v), bias=bias)
    k, v = np.where(gone, np.nan, k), np.where(gone, np.nan, v)
    out, kept = attention_forward(q, k, v, bias=bias)
    assert np.array_equal(out, clean), "it is read"
    dlog = target.retrieval_prior_backward(
        attention_backward(cotangent(out, seed), kept).bias, cache
    )
    assert np.isfinite(dlog).all(), "it spoils the gradient"


@suite.property(FORWARD, seed=seeds, count=st.sampled_from([3, 2, 4]))
def the_order_of_documents_does_not_matter(target, seed, count):
    """Documents put in another order, tokens and relevance along with them (Eq. 9.1): the same
    answer."""
    shape = ((2,), (), count, 3 * count)
    log_r, _ = drawn(shape, seed)
    q, k, v = memory(shape, seed)
    order = np.random.default_rng(seed).permutation(count)
    documents = np.repeat(np.arange(count), 3)
    tokens = np.concatenate([np.flatnonzero(documents == d) for d in order])
    here, _ = target.retrieval_prior_forward(log_r, documents)
    there, _ = target.retrieval_prior_forward(log_r[..., order], documents)
    first, _ = attention_forward(q, k, v, bias=here)
    second, _ = attention_forward(q, k[..., tokens, :], v[..., tokens, :], bias=there)
    assert_close(second, first)


# ---- who was read, twins, chunks -----------------------------------------------------------------


@suite.property(MASS, shape=shapes, seed=seeds)
def mass_is_what_a_document_gets(target, shape, seed):
    """Eq. 9.4 query by query: with nothing padded a query's masses sum to 1."""
    leading, _, count, tokens = shape
    _, documents = drawn(shape, seed)
    q, k, v = memory(shape, seed)
    _, cache = attention_forward(q, k, v)
    got = target.document_mass(cache.weights, documents, count)
    numbers = np.broadcast_to(documents, (*leading, tokens))
    expected = np.zeros((*leading, 2, 3, count))
    for *b, h, i in np.ndindex(*leading, 2, 3):
        for j in range(tokens):
            if numbers[(*b, j)] >= 0:
                expected[(*b, h, i, numbers[(*b, j)])] += cache.weights[(*b, h, i, j)]
    assert_close(got, expected)
    if tokens:
        whole = target.document_mass(cache.weights, np.maximum(documents, 0), count)
        assert_close(whole.sum(axis=-1), np.ones(whole.shape[:-1]), what="sum over documents")


@suite.property(FORWARD, SHARE, seed=seeds, times=st.sampled_from([2, 1, 3]))
def a_document_found_twice_counts_once(target, seed, times):
    """With Eq. 9.5 copies of a document are the document; without, they are it with `times` its
    relevance (Eq. 9.1). Other documents, and copies without relevance, change nothing."""
    shape = ((2,), (), 3, 9)
    log_r, _ = drawn(shape, seed, none=0.0)
    q, k, v = memory(shape, seed)
    documents = np.repeat(np.arange(3), 3)
    once, _ = attention_forward(q, k, v, bias=target.retrieval_prior_forward(log_r, documents)[0])
    copies = [1] * (times - 1)
    many = np.append(log_r, log_r[:, copies], axis=-1)
    numbers = np.concatenate([documents, np.repeat(np.arange(3, 2 + times), 3)])
    again = [np.concatenate([x, *[x[..., 3:6, :]] * (times - 1)], axis=-2) for x in (k, v)]
    same = np.array([5, 7, 9] + [7] * (times - 1))
    shared = target.share_duplicates(many, same)
    got, _ = attention_forward(q, *again, bias=target.retrieval_prior_forward(shared, numbers)[0])
    assert_close(got, once, what="shared out")
    got, _ = attention_forward(q, *again, bias=target.retrieval_prior_forward(many, numbers)[0])
    louder = log_r + np.array([0, math.log(times), 0])
    expected, _ = attention_forward(
        q, k, v, bias=target.retrieval_prior_forward(louder, documents)[0]
    )
    assert_close(got, expected, what="not shared out")
    gone = np.append(log_r, np.full((2, times), -np.inf), axis=-1)
    shared = target.share_duplicates(gone, np.array([5, 7, 9] + [7] * times))
    assert np.array_equal(shared[:, :3], log_r), "a copy without relevance is counted"


@suite.property(
    CHUNKS,
    queries=st.sampled_from([7, 0, 1, 4]),
    chunk=st.sampled_from([2, 1, 3, 100]),
    seed=seeds,
)
def a_chunk_reads_what_was_found_for_the_one_before(target, queries, chunk, seed):
    """Eq. 9.6 pair by pair: what is read was searched for with tokens before the query only."""
    found_for = np.random.default_rng(seed).integers(-1, 4, 5)
    got = target.neighbours_of_the_chunk_before(queries, chunk, found_for)
    assert got.shape == (queries, 5) and got.dtype == np.bool_
    for i, j in np.ndindex(queries, 5):
        wanted = found_for[j] >= 0 and found_for[j] == i // chunk - 1
        assert got[i, j] == wanted, f"query {i}, found for chunk {found_for[j]} of {chunk} tokens"
        if got[i, j]:
            assert (found_for[j] + 1) * chunk <= i, "the search has seen the query or its future"


# ---- numbers -------------------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, MASS, SHARE, seed=seeds, dtype=dtypes)
def narrow_numbers_are_summed_wide(target, seed, dtype):
    """The prior has the bits of log r; gradients and masses of a thousand tokens are summed wide: a
    bfloat16 sum of ones ends at 256."""
    log_r = normal((2, 2), seed).astype(DTYPES[dtype])
    documents = np.arange(1000) % 2
    bias, cache = target.retrieval_prior_forward(log_r, documents)
    assert bias.dtype == DTYPES[dtype] and np.array_equal(bias[:, 0, 0, :2], log_r)
    dbias = (1 + normal((2, 1, 1, 1000), seed, 0.1)).astype(DTYPES[dtype])
    got = target.retrieval_prior_backward(dbias, cache)
    assert got.dtype == DTYPES[dtype], f"gradient in {got.dtype}"
    wide = dbias[:, 0, 0].astype(np.float64)
    exact = np.stack([wide[:, 0::2].sum(axis=-1), wide[:, 1::2].sum(axis=-1)], axis=-1)
    expected = exact.astype(DTYPES[dtype]).astype(np.float64)
    assert_close(got.astype(np.float64), expected, SUMMED, what="gradient")
    weights = np.full((1, 1, 1000), 1e-3).astype(DTYPES[dtype])
    mass = target.document_mass(weights, documents, 2)
    assert mass.dtype.itemsize >= 4, f"mass in {mass.dtype}"
    exact = np.full((1, 1, 2), 500 * float(weights[0, 0, 0]))
    assert_close(mass.astype(np.float64), exact, FLOAT32, what="mass")
    assert target.share_duplicates(log_r, np.array([1, 1])).dtype == DTYPES[dtype]


@suite.property(FORWARD, BACKWARD, MASS, SHARE, shape=shapes, seed=seeds)
def arguments_are_left_alone(target, shape, seed):
    """No array of the caller is modified, and one cache serves twice."""
    log_r, documents = drawn(shape, seed)
    weights = np.full((*shape[0], 2, 3, shape[3]), 0.25)
    same = np.zeros(shape[2], int)
    bias, cache = target.retrieval_prior_forward(log_r, documents)
    dbias = cotangent(bias, seed)
    given = (log_r, documents, weights, same, dbias)
    before = [x.copy() for x in given]
    bias, cache = target.retrieval_prior_forward(log_r, documents)
    bias[...] = 7
    once, again = (target.retrieval_prior_backward(dbias, cache) for _ in range(2))
    target.document_mass(weights, documents, shape[2])
    shared = target.share_duplicates(log_r, same)
    shared[...] = 7
    assert all(map(np.array_equal, given, before)), "an argument was modified"
    assert np.array_equal(once, again), "the second backward differs from the first"
