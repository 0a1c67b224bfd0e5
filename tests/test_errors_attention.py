"""What exact attention says to bad input: the argument, what was expected, what came."""

import numpy as np
import pytest

from minitransformer.attention import masks, softmax
from minitransformer.attention.dense import attention_backward, attention_forward

pytestmark = pytest.mark.usefixtures("own_errors")

LOWER = {"align": "lower_right"}


# ---- softmax -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: softmax.softmax_forward([1.0]),
            TypeError,
            "scores must be a NumPy array, got list",
        ),
        (
            lambda: softmax.softmax_forward(np.arange(3)),
            TypeError,
            "scores must hold floating.*int64",
        ),
        (
            lambda: softmax.softmax_forward(np.array([1.0, np.nan])),
            ValueError,
            r"scores holds NaN .* \(1,\)",
        ),
        (lambda: softmax.softmax_forward(np.array([np.inf, 0])), ValueError, "NaN or .inf"),
        (lambda: softmax.softmax_forward(np.ones((2, 3)), axis=2), ValueError, "axis .*2"),
        (lambda: softmax.softcap_forward(np.ones(2), -1.0), ValueError, "cap .* got -1.0"),
        (lambda: softmax.softcap_forward(np.ones(2), np.inf), ValueError, "cap .* got inf"),
    ],
)
def test_softmax_names_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: masks.causal(3, 3, align="right"),
            ValueError,
            "align must be one of lower_right, upper_left, got 'right'",
        ),
        (lambda: masks.causal(-1, 3, **LOWER), ValueError, "queries must be at least 0, got -1"),
        (lambda: masks.causal(3, 2.0, **LOWER), TypeError, "keys must be a whole number, got 2.0"),
        (
            lambda: masks.causal(True, 2, **LOWER),
            TypeError,
            "queries must be a whole number, got True",
        ),
        (
            lambda: masks.window(3, 3, left=-2, right=0, **LOWER),
            ValueError,
            r"left must be at least -1 \(-1: no limit\), got -2",
        ),
        (
            lambda: masks.window(3, 3, left=0, right=-3, **LOWER),
            ValueError,
            "right must be at least -1",
        ),
        (
            lambda: masks.dilated(3, 3, width=1, dilation=0, **LOWER),
            ValueError,
            "dilation must be at least 1, got 0",
        ),
        (
            lambda: masks.dilated(3, 3, width=-1, dilation=1, **LOWER),
            ValueError,
            "width must be at least 0",
        ),
        (lambda: masks.strided(3, 3, stride=0, **LOWER), ValueError, "stride must be at least 1"),
        (
            lambda: masks.strided(3, 3, stride=2, part="near", **LOWER),
            ValueError,
            "part must be one of local, stride, both, got 'near'",
        ),
        (
            lambda: masks.fixed(3, 3, block=2, summary=3, **LOWER),
            ValueError,
            "summary is 3, more than block = 2",
        ),
        (
            lambda: masks.global_tokens(3, 3, tokens=[3], **LOWER),
            ValueError,
            r"tokens must be positions in \[0, 3\), got \[3\]",
        ),
        (
            lambda: masks.global_tokens(3, 3, tokens=[-1], **LOWER),
            ValueError,
            "tokens must be positions",
        ),
        (
            lambda: masks.global_tokens(3, 3, tokens=[0.5], **LOWER),
            TypeError,
            "tokens must be a list of key positions",
        ),
        (
            lambda: masks.padding([2], queries=2, keys=3),
            TypeError,
            r"lengths must be an array of integers, got \[2\]",
        ),
        (
            lambda: masks.padding(np.array([4]), queries=2, keys=3),
            ValueError,
            r"lengths must lie in \[0, 3\], got \[4\]",
        ),
        (
            lambda: masks.packed(np.ones((2, 3)), np.ones((2, 3), int)),
            TypeError,
            "query_segments must be an array of integers",
        ),
        (
            lambda: masks.packed(np.ones((2, 3), int), np.ones((3, 3), int)),
            ValueError,
            "differ in their leading axes",
        ),
        (
            lambda: masks.packed(np.array(1), np.ones(3, int)),
            ValueError,
            r"query_segments must have shape \(\*B, length\), got \(\)",
        ),
        (
            lambda: masks.causal(3, 3, **LOWER) & masks.causal(3, 4, **LOWER),
            ValueError,
            "3 x 3 and 3 x 4 pairs",
        ),
        (lambda: masks.causal(3, 3, **LOWER) | np.ones((3, 3)), TypeError, "unsupported operand"),
    ],
)
def test_masks_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- attention -----------------------------------------------------------------------------------


def arrays(**shapes):
    """q (4, 3, 2), k (2, 5, 2), v (2, 5, 3), or other shapes."""
    given = {"q": (4, 3, 2), "k": (2, 5, 2), "v": (2, 5, 3), **shapes}
    return {name: np.ones(shape) for name, shape in given.items()}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"q": np.ones((3, 2))}, "q needs at least 3 axes"),
        ({"k": np.ones((2, 5, 4))}, "k has head width 4, q has 2: the two must agree"),
        ({"v": np.ones((2, 4, 3))}, "v has 4 keys, k has 5: the two must agree"),
        ({"v": np.ones((1, 5, 3))}, "v has 1 heads, k has 2: the two must agree"),
        ({"q": np.ones((3, 3, 2))}, "q has 3 heads, k has 2: the key/value heads must divide"),
        ({"k": np.ones((0, 5, 2)), "v": np.ones((0, 5, 3))}, "q has 4 heads, k has 0"),
        (
            {"q": np.ones((2, 4, 3, 2)), "k": np.ones((3, 2, 5, 2))},
            "leading axes of q .* do not broadcast",
        ),
        (
            {"keep": np.ones((3, 4), bool)},
            r"keep has shape \(3, 4\), which does not broadcast to \(4, 3, 5\)",
        ),
        ({"keep": np.ones((2, 4, 3, 5), bool)}, "keep has shape"),
        ({"bias": np.ones((5, 3))}, "bias has shape"),
        ({"multiplier": np.ones((2, 1, 1))}, "multiplier has shape"),
        ({"scale": float("nan")}, "scale must be finite, got nan"),
        ({"softcap": -2.0}, "cap .* got -2.0"),
        (
            {"q": np.full((4, 3, 2), np.nan)},
            r"q holds NaN or infinity at index \(0, 0, 0\).*mask it, or pass check_finite=False",
        ),
        ({"v": np.full((2, 5, 3), np.inf)}, "v holds NaN or infinity"),
        ({"bias": np.full((3, 5), np.nan)}, "NaN"),
        ({"multiplier": np.full((3, 5), np.nan)}, "multiplier holds NaN"),
        ({"q": np.ones((4, 3, 0)), "k": np.ones((2, 5, 0))}, "q has head width 0.* give scale"),
    ],
)
def test_attention_names_the_argument(changed, message):
    with pytest.raises(ValueError, match=message):
        attention_forward(**{**arrays(), **changed})


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"q": [[[1.0]]]}, "q must be a NumPy array, got list"),
        ({"k": np.ones((2, 5, 2), int)}, "k must hold floating-point numbers, got dtype int64"),
        (
            {"keep": np.ones((3, 5))},
            r"keep must be a boolean array \(True = may attend\), got dtype float64",
        ),
        ({"keep": [[True]]}, "keep must be a boolean array .* got list"),
        ({"bias": np.ones((3, 5), bool)}, "bias must hold floating-point numbers"),
        ({"multiplier": 2.0}, "multiplier must be a NumPy array, got float"),
    ],
)
def test_attention_names_the_type(changed, message):
    with pytest.raises(TypeError, match=message):
        attention_forward(**{**arrays(), **changed})


def test_attention_backward_wants_the_shapes_of_the_forward():
    out, cache = attention_forward(**arrays())
    with pytest.raises(
        ValueError, match=r"dout has shape \(4, 3\), the forward pass gave \(4, 3, 3\)"
    ):
        attention_backward(out[..., 0], cache)
    with pytest.raises(ValueError, match=r"dlse has shape \(3,\), the forward pass gave \(4, 3\)"):
        attention_backward(out, cache, dlse=np.ones(3))


def test_what_is_not_finite_spreads_if_one_asks_for_it():
    given = arrays()
    given["v"][0, 1] = np.nan
    out, _ = attention_forward(**given, check_finite=False)
    assert np.isnan(out[:2]).all()
    assert np.isfinite(out[2:]).all()
