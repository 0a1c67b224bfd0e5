"""Mistakes people make when retrieved documents are read with a prior."""

import numpy as np

from minitransformer.attention import retrieval as right
from minitransformer.checks.properties.attention.retrieval import suite

TOKEN = "each_token_has_the_prior_of_its_document"
MULTIPLIED = "probabilities_are_multiplied_and_made_to_sum_to_one"
DERIVATIVE = "prior_backward_is_the_derivative"
NOT_THERE = "a_document_without_relevance_might_as_well_not_exist"
ORDER = "the_order_of_documents_does_not_matter"
MASS = "mass_is_what_a_document_gets"
ONCE = "a_document_found_twice_counts_once"
CHUNK = "a_chunk_reads_what_was_found_for_the_one_before"
NARROW = "narrow_numbers_are_summed_wide"
ALONE = "arguments_are_left_alone"

FORWARD, BACKWARD = "retrieval_prior_forward", "retrieval_prior_backward"


@suite.mutant(FORWARD, "r added to a score, where log r is", killed_by=(TOKEN, MULTIPLIED))
def relevance_without_its_logarithm(log_relevance, documents):
    bias, cache = right.retrieval_prior_forward(log_relevance, documents)
    return np.exp(bias), cache


@suite.mutant(
    FORWARD,
    "-1 reads the last document",
    killed_by=(TOKEN, MULTIPLIED, NOT_THERE),
    crashes=True,
)
def padding_wraps_around(log_relevance, documents):
    _, cache = right.retrieval_prior_forward(log_relevance, documents)
    numbers = cache.documents % log_relevance.shape[-1]
    return np.take_along_axis(log_relevance, numbers, axis=-1)[..., None, None, :], cache


@suite.mutant(
    FORWARD, "a finite stand-in: NaN behind it leaks", killed_by=(TOKEN, NOT_THERE), crashes=True
)
def large_number_for_infinity(log_relevance, documents):
    bias, cache = right.retrieval_prior_forward(log_relevance, documents)
    return np.where(bias == -np.inf, -1e9, bias), cache


@suite.mutant(FORWARD, "token j has the prior of document j", killed_by=(TOKEN, MULTIPLIED, ORDER))
def tokens_taken_for_documents(log_relevance, documents):
    _, cache = right.retrieval_prior_forward(log_relevance, documents)
    numbers = np.broadcast_to(
        np.arange(documents.shape[-1]) % log_relevance.shape[-1], cache.documents.shape
    )
    bias = np.take_along_axis(log_relevance, numbers, axis=-1)
    return np.where(cache.documents < 0, -np.inf, bias)[..., None, None, :], cache


@suite.mutant(
    FORWARD, "log r - log of its length: a long document is not two", killed_by=(TOKEN, MULTIPLIED)
)
def divided_by_the_length(log_relevance, documents):
    bias, cache = right.retrieval_prior_forward(log_relevance, documents)
    size = (cache.documents[..., None] == cache.documents[..., None, :]).sum(axis=-1)
    return bias - np.log(np.maximum(size, 1))[..., None, None, :], cache


@suite.mutant(FORWARD, "log r shifted by the caller's array", killed_by=ALONE)
def normalised_in_place(log_relevance, documents):
    out = right.retrieval_prior_forward(log_relevance, documents)
    log_relevance -= 1
    return out


@suite.mutant(BACKWARD, "the mean over the tokens", killed_by=DERIVATIVE)
def gradient_averaged_over_tokens(dbias, cache):
    size = (cache.documents[..., None] == np.arange(cache.found.shape[-1])).sum(axis=-2)
    return right.retrieval_prior_backward(dbias, cache) / np.maximum(size, 1)


@suite.mutant(BACKWARD, "fancy += keeps the last token only", killed_by=DERIVATIVE)
def last_token_wins(dbias, cache):
    dlog = np.zeros((*cache.found.shape[:-1], cache.found.shape[-1] + 1))
    rows = tuple(x[..., None] for x in np.indices(cache.documents.shape[:-1], sparse=True))
    dlog[(*rows, cache.documents)] += dbias[..., 0, 0, :]
    return np.where(cache.found, dlog[..., :-1], 0)


@suite.mutant(BACKWARD, "what was not found learns to be", killed_by=DERIVATIVE)
def no_relevance_learns(dbias, cache):
    return right.retrieval_prior_backward(dbias, cache._replace(found=np.ones_like(cache.found)))


@suite.mutant(BACKWARD, "the retriever is frozen", killed_by=DERIVATIVE)
def relevance_is_a_constant(dbias, cache):
    return 0 * right.retrieval_prior_backward(dbias, cache)


@suite.mutant(BACKWARD, "bfloat16 ones stop at 256", killed_by=NARROW)
def gradient_summed_in_the_storage_type(dbias, cache):
    dlog = np.zeros(cache.found.shape, cache.like.dtype)
    for j in range(cache.documents.shape[-1]):
        for b in np.ndindex(dlog.shape[:-1]):
            d = cache.documents[(*b, j)]
            dlog[(*b, d)] = dlog[(*b, d)] + dbias[(*b, 0, 0, j)].astype(dlog.dtype)
    return dlog


@suite.mutant("document_mass", "the mean weight of its tokens", killed_by=MASS)
def mass_averaged(weights, documents, count):
    size = (documents[..., None] == np.arange(count)).sum(axis=-2)
    found = right.document_mass(weights, documents, count)
    return found / np.maximum(size, 1)[..., None, None, :]


@suite.mutant("document_mass", "padding is of document 0", killed_by=MASS)
def padding_counted(weights, documents, count):
    return right.document_mass(weights, np.maximum(documents, 0), count)


@suite.mutant("share_duplicates", "log r / n, where log r - log n is", killed_by=ONCE)
def logarithm_divided(log_relevance, same):
    times = (same[..., :, None] == same[..., None, :]).sum(axis=-1)
    return log_relevance / times


@suite.mutant("share_duplicates", "one copy is kept, the last", killed_by=ONCE)
def copies_not_noticed(log_relevance, same):
    return log_relevance.copy()


@suite.mutant("share_duplicates", "copies that nobody reads take a share", killed_by=ONCE)
def copies_without_relevance_counted(log_relevance, same):
    times = (same[..., :, None] == same[..., None, :]).sum(axis=-1)
    return log_relevance - np.log(times)


@suite.mutant(
    "neighbours_of_the_chunk_before",
    "of the own chunk: the search has seen its end",
    killed_by=CHUNK,
)
def neighbours_of_the_own_chunk(queries, chunk, found_for):
    return (np.arange(queries) // chunk)[:, None] == found_for


@suite.mutant("neighbours_of_the_chunk_before", "of all chunks before", killed_by=CHUNK)
def neighbours_of_every_chunk_before(queries, chunk, found_for):
    return ((np.arange(queries) // chunk)[:, None] > found_for) & (found_for >= 0)
