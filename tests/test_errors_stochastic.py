"""What the stochastic floor says to bad input: the argument, what was expected, what came."""

import re

import numpy as np
import pytest

from minitransformer.philox import Draw
from minitransformer.stochastic.samplers import RandomMask, inclusion_probabilities, resolve
from minitransformer.stochastic.schedules import Schedule

pytestmark = pytest.mark.usefixtures("own_errors")


# ---- RandomMask ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, message",
    [
        ({"kind": "elements"}, "kind must be one of element, column, .* got 'elements'"),
        ({"rate": 1.5}, r"rate must lie in \[0.0, 1.0\], got 1.5"),
        ({"rate": float("nan")}, "rate must lie in .* got nan"),
        ({"tile": 0}, "tile must be one or two whole numbers >= 1, got 0"),
        ({"tile": (8, 8, 8)}, r"tile must be one or two whole numbers >= 1, got \(8, 8, 8\)"),
        ({"tile": 2.5}, "tile must be .* got 2.5"),
        ({"tile": "16"}, "tile must be .* got 16"),
        ({"k": 3}, "k is for fixed_k, multinomial, gumbel, not for kind='element': use rate"),
        ({"kind": "fixed_k", "k": 0}, "k must be a whole number >= 1, got 0"),
        ({"kind": "fixed_k", "k": True}, "k must be a whole number >= 1, got True"),
        ({"proposal": "distance"}, "proposal='distance' is for multinomial and gumbel"),
        (
            {"kind": "gumbel", "proposal": "score"},
            "proposal must be one of uniform, .* got 'score'",
        ),
        ({"protect_columns": (-1,)}, r"protect_columns must be key positions >= 0, got \(-1,\)"),
        ({"min_keep": 2}, "min_keep must be one of 0, 1, got 2"),
        ({"kind": "column", "min_keep": 1}, "min_keep=1 .* is for kind='element', not 'column'"),
        ({"compensation": "invert"}, "compensation must be one of renormalise, .* got 'invert'"),
        (
            {"kind": "gumbel", "compensation": "inverted"},
            "kind='gumbel' has no closed-form inclusion probability.* use compensation=",
        ),
    ],
)
def test_random_mask_names_the_setting(given, message):
    with pytest.raises(ValueError, match=message):
        RandomMask(**{"kind": "element", **given})


# ---- resolve -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"shape": (3,)}, ValueError, r"shape must be \(\*B, H, N, M\), got \(3,\)"),
        ({"keep": np.ones((4, 4))}, TypeError, "keep must be a boolean array .* got dtype float64"),
        (
            {"keep": np.ones((3, 4), dtype=bool)},
            ValueError,
            r"keep has shape \(3, 4\), which does not broadcast to \(2, 2, 4, 4\)",
        ),
        (
            {"drop_rate": np.array([0.1, 0.2, 0.3])},
            ValueError,
            r"drop_rate must be a number or have shape \(2,\), got shape \(3,\)",
        ),
        ({"drop_rate": -0.1}, ValueError, r"drop_rate must lie in \[0.0, 1.0\], got -0.1"),
        ({"drop_rate": np.array([0.5, np.nan])}, ValueError, "drop_rate must lie in"),
        ({"row_start": 4}, ValueError, "a tile does not know the size of the whole: give offset"),
        (
            {"kind": "fixed_k", "column_start": 4, "offset": 0},
            ValueError,
            "kind='fixed_k' looks at whole rows: column_start must be 0",
        ),
        ({"kind": "gumbel", "proposal": "scores"}, ValueError, "proposal='scores' needs scores"),
        (
            {"kind": "gumbel", "proposal": "scores", "scores": np.zeros((2, 5))},
            ValueError,
            r"scores has shape \(2, 5\), which does not broadcast",
        ),
        (
            {"kind": "gumbel", "proposal": "scores", "scores": [0.0]},
            TypeError,
            "scores must be a NumPy array, got list",
        ),
        ({"draw": Draw(2**32)}, ValueError, r"draw\.seed must lie in \[0, 4294967295\]"),
        ({"draw": Draw(0, -1)}, ValueError, r"draw\.step must lie in"),
        (
            {"draw": Draw(0, 0, False, 16)},
            ValueError,
            r"draw\.sample must lie in \[0, 15\], got 16",
        ),
        ({"layer": 2**16}, ValueError, r"layer must lie in \[0, 65535\], got 65536"),
    ],
)
def test_resolve_names_the_argument(given, error, message):
    given = dict(given)
    mask = RandomMask(given.pop("kind", "element"), proposal=given.pop("proposal", "uniform"))
    draw, layer = given.pop("draw", Draw(0)), given.pop("layer", 0)
    with pytest.raises(error, match=message):
        resolve(mask, draw, layer, given.pop("shape", (2, 2, 4, 4)), **given)


def test_gumbel_has_no_inclusion_probabilities():
    with pytest.raises(ValueError, match="kind='gumbel' has no closed-form inclusion probability"):
        inclusion_probabilities(RandomMask("gumbel"), (3, 3))


# ---- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, message",
    [
        ({"rate": 1.2}, r"rate must lie in \[0.0, 1.0\], got 1.2"),
        ({"decay": -0.1}, "decay must lie in"),
        ({"decrement": 2.0}, "decrement must lie in"),
        ({"warmup_fraction": 1.1}, "warmup_fraction must lie in"),
        ({"low": -1.0}, "low must lie in"),
        ({"widen_fraction": float("nan")}, "widen_fraction must lie in"),
        ({"schedule": "exponential"}, "schedule must be one of constant, .* got 'exponential'"),
        ({"warmup": "linear"}, "warmup must be one of none, hold, ramp, got 'linear'"),
        ({"first_layers": 0}, "first_layers must be at least 1, got 0"),
        ({"first_heads": -1}, "first_heads must be at least 1, got -1"),
    ],
)
def test_schedule_names_the_setting(given, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**given)


@pytest.mark.parametrize(
    "layer, layers, step, steps, message",
    [
        (4, 4, 0, 10, "layer must lie in [0, 3], got 4: layers count from 0"),
        (-1, 4, 0, 10, "layer must lie in [0, 3], got -1"),
        (0, 4, -1, 10, "step must be >= 0 and steps >= 1, got -1 and 10"),
        (0, 4, 0, 0, "step must be >= 0 and steps >= 1, got 0 and 0"),
    ],
)
def test_drop_rate_names_the_place(layer, layers, step, steps, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Schedule().drop_rate(layer, layers, step, steps)
