"""What a prior over documents says to bad input: the argument, what was expected, what came."""

import numpy as np
import pytest

from minitransformer.attention.retrieval import (
    document_mass,
    neighbours_of_the_chunk_before,
    retrieval_prior_backward,
    retrieval_prior_forward,
    share_duplicates,
)

pytestmark = pytest.mark.usefixtures("own_errors")

LOG, DOCUMENTS = np.zeros((2, 3)), np.array([0, 1, 1, 2, -1])


@pytest.mark.parametrize(
    "log_relevance, documents, error, message",
    [
        ([0.0], DOCUMENTS, TypeError, "log_relevance must be a NumPy array, got list"),
        (np.zeros(3, int), DOCUMENTS, TypeError, "log_relevance must hold floating-point numbers"),
        (np.array(0.0), DOCUMENTS, ValueError, "log_relevance needs at least 1 axes"),
        (LOG * np.nan, DOCUMENTS, ValueError, "log_relevance holds NaN or .inf: -inf is a doc"),
        (LOG + np.inf, DOCUMENTS, ValueError, "log_relevance holds NaN or .inf"),
        (LOG, DOCUMENTS * 1.0, TypeError, "documents must be an array of integers, got .*float64"),
        (LOG, np.array(1), ValueError, "documents needs a number for each token"),
        (LOG, DOCUMENTS + 1, ValueError, r"documents must lie in \[-1, 3\), got .* 0 to 3"),
        (LOG, DOCUMENTS - 1, ValueError, r"documents must lie in \[-1, 3\), got .* -2 to 1"),
        (
            LOG,
            np.zeros((3, 5), int),
            ValueError,
            r"documents has shape \(3, 5\), which does not broadcast to \(2, 5\)",
        ),
    ],
)
def test_a_prior_names_the_argument(log_relevance, documents, error, message):
    with pytest.raises(error, match=message):
        retrieval_prior_forward(log_relevance, documents)


def test_the_cotangent_has_the_shape_of_the_bias():
    bias, cache = retrieval_prior_forward(LOG, DOCUMENTS)
    with pytest.raises(ValueError, match=r"dbias has shape \(2, 5\), the .* gave \(2, 1, 1, 5\)"):
        retrieval_prior_backward(bias[:, 0, 0], cache)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: document_mass([1.0], DOCUMENTS, 3), TypeError, "weights must be a NumPy array"),
        (
            lambda: document_mass(np.ones((1, 2, 4)), DOCUMENTS, 3),
            ValueError,
            "documents numbers 5 tokens, weights has 4",
        ),
        (
            lambda: document_mass(np.ones((1, 2, 5)), DOCUMENTS, 2),
            ValueError,
            r"documents must lie in \[-1, 2\)",
        ),
        (
            lambda: share_duplicates(LOG, np.array([0, 1])),
            ValueError,
            r"same has shape \(2,\), which does not broadcast to \(2, 3\)",
        ),
        (lambda: share_duplicates(LOG, LOG), TypeError, "same must be an array of integers"),
        (
            lambda: neighbours_of_the_chunk_before(4, 0, DOCUMENTS),
            ValueError,
            "chunk must be at least 1, got 0",
        ),
        (
            lambda: neighbours_of_the_chunk_before(4, 2, DOCUMENTS[None]),
            ValueError,
            r"found_for has shape \(1, 5\), expected a chunk for each key",
        ),
    ],
)
def test_masses_twins_and_chunks_say_what_they_need(call, error, message):
    with pytest.raises(error, match=message):
        call()
