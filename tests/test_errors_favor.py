"""What FAVOR+ says to bad input: the argument, what was expected, what came."""

import re

import numpy as np
import pytest

from minitransformer.attention.favor import (
    FavorState,
    favor_attention_backward,
    favor_attention_forward,
    log_features_backward,
    log_features_forward,
    random_projection,
)
from minitransformer.philox import Draw

pytestmark = pytest.mark.usefixtures("own_errors")


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"features": 0}, ValueError, "features must be at least 1, got 0"),
        ({"features": 2.0}, TypeError, "features must be a whole number, got 2.0"),
        ({"width": 0}, ValueError, "width must be at least 1, got 0"),
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        (
            {"features": 5, "hyperbolic": True},
            ValueError,
            "features must be even for hyperbolic ones, got 5",
        ),
        ({"draw": Draw(2**32)}, ValueError, "seed"),
        ({"layer": -1}, ValueError, "layer"),
    ],
)
def test_a_projection_names_the_argument(given, error, message):
    with pytest.raises(error, match=message):
        random_projection(**{"draw": Draw(0), "features": 4, "width": 3, **given})


def arrays(**changed):
    q, k, v = np.ones((2, 4, 3, 5)), np.ones((2, 2, 6, 5)), np.ones((2, 2, 6, 7))
    return {"q": q, "k": k, "v": v, "projection": np.ones((8, 5)), **changed}


NAN = np.where(np.arange(6) == 4, np.nan, 1)[:, None]


def state(**changed):
    peak, s, z = np.ones((2, 8)), np.ones((2, 8, 7)), np.ones((2, 8))
    return {"state": FavorState(**{"peak": peak, "s": s, "z": z, **changed})}


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"q": [[1.0]]}, TypeError, "q must be a NumPy array, got list"),
        ({"k": np.ones((2, 2, 6, 4))}, ValueError, "k has head width 4, q has 5"),
        ({"v": np.ones((2, 2, 5, 7))}, ValueError, "v has 5 keys, k has 6"),
        ({"q": np.ones((2, 3, 3, 5))}, ValueError, "q has 3 heads, k has 2"),
        ({"projection": [[1.0] * 5]}, TypeError, "projection must be a NumPy array, got list"),
        (
            {"projection": np.ones((8, 4))},
            ValueError,
            r"projection has shape \(8, 4\), expected \(features, 5\) with at least one feature",
        ),
        ({"projection": np.ones((0, 5))}, ValueError, r"projection has shape \(0, 5\)"),
        ({"scale": -1.0}, ValueError, "scale must not be negative, got -1.0"),
        ({"scale": np.inf}, ValueError, "scale must be finite, got inf"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        (
            {"causal": True},
            ValueError,
            "align must be one of .* got None: 3 queries and 6 keys have two alignments",
        ),
        ({"keep": np.ones(6)}, TypeError, "keep must be a boolean array .* got dtype float64"),
        (
            {"keep": np.ones((3, 6), bool)},
            ValueError,
            r"keep has shape \(3, 6\): only whole keys can be left out here, not pairs",
        ),
        ({"state": (1, 2, 3)}, TypeError, "state must be a FavorState, got tuple"),
        (
            state(peak=np.ones((2, 7))),
            ValueError,
            r"state.peak has shape \(2, 7\), these heads need \(2, 2, 8\)",
        ),
        (
            state(s=np.ones((2, 8, 6))),
            ValueError,
            r"state.s has shape \(2, 8, 6\), these heads need \(2, 2, 8, 7\)",
        ),
        (
            state(z=np.ones((3, 2, 8))),
            ValueError,
            r"state.z has shape \(3, 2, 8\), which does not broadcast to \(2, 2, 8\)",
        ),
        ({"k": np.ones((2, 2, 6, 5)) * NAN}, ValueError, "k holds NaN or infinity at index"),
        (
            {"projection": np.full((8, 5), np.inf)},
            ValueError,
            "projection holds NaN or infinity at index",
        ),
    ],
)
def test_favor_attention_names_the_argument(given, error, message):
    with pytest.raises(error, match=message):
        favor_attention_forward(**arrays(**given))


def test_without_the_check_nan_spreads():
    spread, _ = favor_attention_forward(**arrays(k=np.ones((2, 2, 6, 5)) * NAN), check_finite=False)
    assert np.isnan(spread).all()


def test_the_cotangent_has_the_shape_of_the_output():
    out, cache = favor_attention_forward(**arrays())
    with pytest.raises(ValueError, match=re.escape("dout has shape (2, 4, 3, 1), the forward")):
        favor_attention_backward(out[..., :1], cache)
    _, cache = log_features_forward(np.ones((3, 5)), np.ones((8, 5)))
    with pytest.raises(ValueError, match=r"dout has shape \(3, 5\), the forward .* \(3, 8\)"):
        log_features_backward(np.ones((3, 5)), cache)


def test_features_name_the_argument():
    with pytest.raises(TypeError, match="x must hold floating-point numbers, got dtype int64"):
        log_features_forward(np.ones((3, 5), int), np.ones((8, 5)))
    with pytest.raises(ValueError, match=r"x needs at least 2 axes, got shape \(5,\)"):
        log_features_forward(np.ones(5), np.ones((8, 5)))
