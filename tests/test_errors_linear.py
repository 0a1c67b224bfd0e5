"""What linear attention says to bad input: the argument, what was expected, what came."""

import re

import numpy as np
import pytest

from minitransformer.attention.linear import (
    LinearState,
    elu_plus_one_backward,
    elu_plus_one_forward,
    linear_attention_backward,
    linear_attention_forward,
)

pytestmark = pytest.mark.usefixtures("own_errors")


def arrays(**changed):
    q, k, v = np.ones((2, 4, 3, 5)), np.ones((2, 2, 6, 5)), np.ones((2, 2, 6, 7))
    return {"q": q, "k": k, "v": v, **changed}


NAN = np.where(np.arange(6) == 4, np.nan, 1)[:, None]


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"q": [[1.0]]}, TypeError, "q must be a NumPy array, got list"),
        ({"k": np.ones((2, 2, 6, 4))}, ValueError, "k has head width 4, q has 5"),
        ({"v": np.ones((2, 2, 5, 7))}, ValueError, "v has 5 keys, k has 6"),
        ({"q": np.ones((2, 3, 3, 5))}, ValueError, "q has 3 heads, k has 2"),
        (
            {"q": np.ones((4, 3, 0)), "k": np.ones((2, 6, 0))},
            ValueError,
            "q has head width 0: there are no features",
        ),
        ({"form": "scan"}, ValueError, "form must be one of parallel, .* got 'scan'"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"chunk": 2.0}, TypeError, "chunk must be a whole number, got 2.0"),
        (
            {"causal": True},
            ValueError,
            "align must be one of .* got None: 3 queries and 6 keys have two alignments",
        ),
        ({"align": "left"}, ValueError, "align must be one of lower_right, .* got 'left'"),
        ({"keep": np.ones(6)}, TypeError, "keep must be a boolean array .* got dtype float64"),
        (
            {"keep": np.ones((3, 6), bool)},
            ValueError,
            r"keep has shape \(3, 6\): only whole keys can be left out here, not pairs",
        ),
        (
            {"keep": np.ones((4, 1, 6), bool)},
            ValueError,
            r"keep has shape \(4, 1, 6\), which does not broadcast to \(2, 2, 1, 6\)",
        ),
        ({"keep": np.ones(5, bool)}, ValueError, r"keep has shape \(5,\), which does not"),
        ({"state": (1, 2)}, TypeError, "state must be a LinearState, got tuple"),
        (
            {"state": LinearState(np.ones((2, 5, 6)), np.ones((2, 5)))},
            ValueError,
            r"state.s has shape \(2, 5, 6\), these heads need \(2, 2, 5, 7\)",
        ),
        (
            {"state": LinearState(np.ones((3, 2, 5, 7)), np.ones((2, 5)))},
            ValueError,
            r"state.s has shape \(3, 2, 5, 7\), which does not broadcast to",
        ),
        (
            {"state": LinearState(np.ones((2, 5, 7)), np.ones((2, 4)))},
            ValueError,
            r"state.z has shape \(2, 4\), these heads need \(2, 2, 5\)",
        ),
        ({"k": np.ones((2, 2, 6, 5)) * NAN}, ValueError, "k holds NaN or infinity at index"),
        (
            {"q": np.full((2, 4, 3, 5), -1000.0)},
            ValueError,
            "the features of q and k underflow",
        ),
    ],
)
def test_linear_attention_names_the_argument(given, error, message):
    with pytest.raises(error, match=message):
        linear_attention_forward(**arrays(**given))


def test_without_the_check_nan_spreads_and_underflow_is_zero():
    spread, _ = linear_attention_forward(
        **arrays(k=np.ones((2, 2, 6, 5)) * NAN), check_finite=False
    )
    assert np.isnan(spread).all()
    nothing, _ = linear_attention_forward(
        **arrays(q=np.full((2, 4, 3, 5), -1000.0)), check_finite=False
    )
    assert (nothing == 0).all()


def test_backward_names_the_cotangent():
    out, cache = linear_attention_forward(**arrays())
    with pytest.raises(ValueError, match=re.escape("dout has shape (2, 4, 3, 1), the forward")):
        linear_attention_backward(out[..., :1], cache)
    s, z = cache.state
    with pytest.raises(ValueError, match=r"dstate.z has shape \(2, 2\), the forward"):
        linear_attention_backward(out, cache, dstate=LinearState(s, z[..., 0]))


def test_feature_map_names_the_argument():
    with pytest.raises(TypeError, match="x must hold floating-point numbers, got dtype int64"):
        elu_plus_one_forward(np.arange(3))
    _, cache = elu_plus_one_forward(np.ones(3))
    with pytest.raises(ValueError, match=r"dout has shape \(1,\), the forward pass gave \(3,\)"):
        elu_plus_one_backward(np.ones(1), cache)
