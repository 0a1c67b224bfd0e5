"""What local-global attention says to bad input: the argument, what was expected, what came."""

import re

import numpy as np
import pytest

from minitransformer.attention.local_global import (
    local_global_attention_backward,
    local_global_attention_forward,
    pool_blocks_backward,
    pool_blocks_forward,
)

pytestmark = pytest.mark.usefixtures("own_errors")

ROWS = np.ones((2, 6, 5))


@pytest.mark.parametrize(
    "x, block, exists, error, message",
    [
        ([[1.0]], 2, None, TypeError, "x must be a NumPy array, got list"),
        (ROWS[0, 0], 2, None, ValueError, r"x needs at least 2 axes, got shape \(5,\)"),
        (ROWS, 0, None, ValueError, "block must be at least 1, got 0"),
        (ROWS, 2.0, None, TypeError, "block must be a whole number, got 2.0"),
        (ROWS, 2, np.ones(6), TypeError, "exists must be a boolean array"),
        (ROWS, 2, np.ones(5, bool), ValueError, r"exists has shape \(5,\), .* to \(2, 6\)"),
    ],
)
def test_a_summary_names_the_argument(x, block, exists, error, message):
    with pytest.raises(error, match=message):
        pool_blocks_forward(x, block, exists=exists)


def arrays(**changed):
    q, k, v = np.ones((2, 4, 3, 5)), np.ones((2, 2, 6, 5)), np.ones((2, 2, 6, 7))
    return {"q": q, "k": k, "v": v, "block": 2, "align": "lower_right", **changed}


NAN = np.where(np.arange(6) == 4, np.nan, 1)[:, None]


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"q": [[1.0]]}, TypeError, "q must be a NumPy array, got list"),
        ({"k": np.ones((2, 2, 6, 4))}, ValueError, "k has head width 4, q has 5"),
        ({"v": np.ones((2, 2, 5, 7))}, ValueError, "v has 5 keys, k has 6"),
        ({"q": np.ones((2, 3, 3, 5))}, ValueError, "q has 3 heads, k has 2"),
        ({"block": 0}, ValueError, "block must be at least 1, got 0"),
        ({"block": True}, TypeError, "block must be a whole number, got True"),
        ({"align": "left"}, ValueError, "align must be one of lower_right, .* got 'left'"),
        ({"align": None}, ValueError, "align must be one of .* 3 queries and 6 keys"),
        ({"keep": np.ones(6)}, TypeError, "keep must be a boolean array .* got dtype float64"),
        (
            {"keep": np.ones((3, 6), bool)},
            ValueError,
            r"keep has shape \(3, 6\): only whole keys can be left out here, not pairs",
        ),
        ({"keep": np.ones(5, bool)}, ValueError, r"keep has shape \(5,\), which does not"),
        ({"scale": np.nan}, ValueError, "scale must be finite, got nan"),
        ({"k": np.ones((2, 2, 6, 5)) * NAN}, ValueError, "k holds NaN or infinity at index"),
    ],
)
def test_local_global_attention_names_the_argument(given, error, message):
    with pytest.raises(error, match=message):
        local_global_attention_forward(**arrays(**given))


def test_where_a_query_stands_is_asked_for_without_a_causal_mask_too():
    with pytest.raises(ValueError, match="3 queries and 6 keys have two alignments"):
        local_global_attention_forward(**arrays(align=None, causal=False))


def test_the_cotangents_have_the_shapes_of_the_results():
    out, cache = local_global_attention_forward(**arrays())
    with pytest.raises(ValueError, match=re.escape("dout has shape (2, 4, 3, 1), the forward")):
        local_global_attention_backward(out[..., :1], cache)
    with pytest.raises(ValueError, match=r"dlse has shape \(2, 4, 1\), the forward .* \(2, 4, 3\)"):
        local_global_attention_backward(out, cache, dlse=cache.lse[..., :1])
    _, cache = pool_blocks_forward(ROWS, 4)
    with pytest.raises(ValueError, match=r"dout has shape \(2, 6, 5\), the forward .* \(2, 2, 5\)"):
        pool_blocks_backward(ROWS, cache)
