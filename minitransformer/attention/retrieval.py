"""Documents as a memory: how relevant each is takes part in attention, and learns from it.

    S_ij + log r_{d(j)}   d(j) the document of token j  (Eq. 9.1)
    P_ij = r_{d(j)} P'_ij / Σ_l r_{d(l)} P'_il   P' attention's weights without the prior  (Eq. 9.2)
    d log r_d = Σ_{j in d} Σ_hi dS_hij  (Eq. 9.3)
    mass_d = Σ_{j in d} P_ij: what the query takes from the document  (Eq. 9.4)
    log r_d - log n_d   n_d how often the document is among those found  (Eq. 9.5)
    keep(i, j) = [c(j) = ⌊i/C⌋ - 1]   c(j) the chunk that j's document was found for  (Eq. 9.6)

The prior is added to scores, before softmax: probabilities multiplied afterwards no longer sum to
1. A common factor of all r cancels. r = 0 takes a document out. It is learned through log r, which
softmax has a finite gradient for: a retriever's scores are such logarithms. A document found twice
has twice the weight, as if r were doubled, unless Eq. 9.5 shares it out. With Eq. 9.6 what was
found for a chunk of text is read by the next one only, because the search has seen the whole chunk.

The memory is the documents' tokens one after the other, each encoded for itself, arXiv:2007.01282;
chunks, arXiv:2112.04426.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Inexact, Integer

from minitransformer.arrays import (
    Array,
    compute_dtype,
    require_array,
    require_broadcastable,
    require_cotangent,
    require_integers,
    require_whole,
)


class PriorCache(NamedTuple):
    documents: Integer[Array, "*B M"]
    found: Bool[Array, "*B R"]  # r > 0
    like: Array  # an empty array of the dtype that came in


def retrieval_prior_forward(
    log_relevance: Inexact[Array, "*B R"], documents: Integer[Array, "*#B M"]
) -> tuple[Inexact[Array, "*B 1 1 M"], PriorCache]:
    """log r of each token's document, to be the bias of attention  (Eq. 9.1)

    `documents` numbers the document of each token, from 0 to R - 1; -1 is padding, which gets -inf
    like a document with r = 0.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape, a number is no document, or a logarithm is NaN
        or +inf.
    """
    require_array("log_relevance", log_relevance, min_ndim=1)
    *leading, count = log_relevance.shape
    _require_documents(documents, leading, count)
    if np.isnan(log_relevance).any() or np.isposinf(log_relevance.real).any():
        raise ValueError("log_relevance holds NaN or +inf: -inf is a document without relevance")
    documents = np.broadcast_to(documents, (*leading, documents.shape[-1]))
    # one more column, for padding: -1 reads the last
    nothing = np.full((*leading, 1), -np.inf, log_relevance.dtype)
    bias = np.take_along_axis(np.append(log_relevance, nothing, axis=-1), documents, axis=-1)
    found = log_relevance.real != -np.inf
    cache = PriorCache(documents, found, np.empty(0, log_relevance.dtype))
    return bias[..., None, None, :], cache


def retrieval_prior_backward(
    dbias: Inexact[Array, "*B 1 1 M"], cache: PriorCache
) -> Inexact[Array, "*B R"]:
    """The sum over each document's tokens  (Eq. 9.3); exactly 0 for a document with r = 0.

    `dbias` is what attention's backward gives for its bias: summed over heads and queries.

    Raises
    ------
    ValueError
        If `dbias` does not have the shape of what the forward pass returned.
    """
    documents, found, like = cache
    require_cotangent("dbias", dbias, (*documents.shape[:-1], 1, 1, documents.shape[-1]))
    wide = dbias[..., 0, 0, :].astype(compute_dtype(dbias, like), copy=False)
    dlog = np.zeros((*found.shape[:-1], found.shape[-1] + 1), wide.dtype)
    rows: Any = np.indices(documents.shape[:-1], sparse=True)
    np.add.at(dlog, (*(x[..., None] for x in rows), documents), wide)
    return np.where(found, dlog[..., :-1], 0).astype(like.dtype, copy=False)


def document_mass(
    weights: Float[Array, "*B H N M"], documents: Integer[Array, "*#B M"], count: int
) -> Float[Array, "*B H N R"]:
    """How much of its attention each query gives to each of `count` documents  (Eq. 9.4). Never
    narrower than float32.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape, or a number is no document.
    """
    require_array("weights", weights, min_ndim=3)
    require_whole(0, count=count)
    _require_documents(documents, weights.shape[:-3], count)
    if documents.shape[-1] != weights.shape[-1]:
        raise ValueError(
            f"documents numbers {documents.shape[-1]} tokens, weights has {weights.shape[-1]}"
        )
    wide = weights.astype(compute_dtype(weights), copy=False)
    member = documents[..., None] == np.arange(count)  # (*#B, M, R)
    return wide @ member[..., None, :, :].astype(wide.dtype)


def share_duplicates(
    log_relevance: Inexact[Array, "*B R"], same: Integer[Array, "*#B R"]
) -> Inexact[Array, "*B R"]:
    """log r less the logarithm of how many documents are the same one  (Eq. 9.5)

    `same` gives equal documents equal numbers. One without relevance is not counted. What is taken
    off is a constant: the gradient passes through.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape.
    """
    require_array("log_relevance", log_relevance, min_ndim=1)
    require_integers("same", same)
    require_broadcastable("same", same.shape, log_relevance.shape)
    same = np.broadcast_to(same, log_relevance.shape)
    found = log_relevance.real != -np.inf
    alike = (same[..., :, None] == same[..., None, :]) & found[..., None, :]
    times = np.log(np.maximum(alike.sum(axis=-1), 1))
    wide = log_relevance.astype(compute_dtype(log_relevance), copy=False)
    return (wide - times.astype(wide.real.dtype)).astype(log_relevance.dtype, copy=False)


def neighbours_of_the_chunk_before(
    queries: int, chunk: int, found_for: Integer[Array, "M"]
) -> Bool[Array, "N M"]:
    """Who may read what was found: chunk c reads the neighbours of chunk c - 1  (Eq. 9.6). The
    first chunk reads nothing.

    Raises
    ------
    TypeError, ValueError
        If a number is not whole or too small, or `found_for` is no row of integers.
    """
    require_whole(0, queries=queries)
    require_whole(1, chunk=chunk)
    require_integers("found_for", found_for)
    if found_for.ndim != 1:
        raise ValueError(f"found_for has shape {found_for.shape}, expected a chunk for each key")
    before = np.arange(queries) // chunk - 1
    return (before[:, None] == found_for) & (before >= 0)[:, None]


def _require_documents(documents: Array, leading: tuple[int, ...] | list[int], count: int) -> None:
    require_integers("documents", documents)
    if documents.ndim < 1:
        raise ValueError("documents needs a number for each token, got a single one")
    require_broadcastable("documents", documents.shape, (*leading, documents.shape[-1]))
    if documents.size and not (documents.min() >= -1 and documents.max() < count):
        raise ValueError(
            f"documents must lie in [-1, {count}), got values from {documents.min()} to "
            f"{documents.max()}"
        )
