"""What pruning says to bad input: the argument, what was expected, what came."""

import numpy as np
import pytest

from minitransformer.heads.pruning import (
    HeadProjections,
    all_heads,
    choose_heads,
    gate_output_backward,
    gate_output_forward,
    prune_heads,
    prune_iteratively,
    random_scores,
    removed_by,
)
from minitransformer.philox import Draw

pytestmark = pytest.mark.usefixtures("own_errors")

OUTPUT = np.ones((8, 5))  # 4 heads of width 2
LAYER = HeadProjections(np.ones((5, 12)), np.ones((5, 6)), np.ones((5, 4)), OUTPUT)


@pytest.mark.parametrize(
    "output, gates, error, message",
    [
        ([[1.0]], np.ones(4), TypeError, "output must be a NumPy array, got list"),
        (OUTPUT[0], np.ones(4), ValueError, "output needs at least 2 axes"),
        (OUTPUT, np.ones(4, bool), TypeError, "gates must hold floating-point numbers"),
        (OUTPUT, np.ones(3), ValueError, "output has 8 rows, not a multiple of 3 gates"),
        (OUTPUT, np.ones(0), ValueError, "output has 8 rows, not a multiple of 0 gates"),
    ],
)
def test_a_gate_for_the_rows_of_each_head(output, gates, error, message):
    with pytest.raises(error, match=message):
        gate_output_forward(output, gates)


def test_the_cotangent_has_the_shape_of_the_weights():
    _, cache = gate_output_forward(OUTPUT, np.ones(4))
    with pytest.raises(ValueError, match=r"dout has shape \(5,\), the forward pass gave \(8, 5\)"):
        gate_output_backward(OUTPUT[0], cache)


@pytest.mark.parametrize(
    "changed, sizes, error, message",
    [
        ({}, (4, 3), ValueError, "groups is 3, which does not divide heads = 4"),
        ({}, (4.0, 2), TypeError, "heads must be a whole number, got 4.0"),
        ({"query": [1.0]}, (4, 2), TypeError, "query must be a NumPy array, got list"),
        ({"key": np.ones(6)}, (4, 2), ValueError, "key needs at least 2 axes"),
        ({}, (5, 1), ValueError, "query has 12 columns, not a multiple of 5 heads"),
        ({"value": np.ones((5, 3))}, (4, 2), ValueError, "value has 3 columns, .* of 2 groups"),
        ({"output": np.ones((6, 5))}, (4, 2), ValueError, "output has 6 rows, .* of 4 heads"),
        ({"key_bias": np.ones(5)}, (4, 2), ValueError, "key_bias has 5 columns, .* 2 groups"),
    ],
)
def test_projections_hold_as_many_heads_as_they_are_said_to(changed, sizes, error, message):
    with pytest.raises(error, match=message):
        all_heads(LAYER._replace(**changed), *sizes)


@pytest.mark.parametrize(
    "keep, error, message",
    [
        (np.ones(4), TypeError, "keep must be a boolean array"),
        (
            np.ones(3, bool),
            ValueError,
            r"keep has shape \(3,\), expected \(4,\): one flag for each",
        ),
        (np.zeros(4, bool), ValueError, "keep leaves no head: a layer needs one"),
    ],
)
def test_flags_are_for_the_heads_that_the_layer_once_had(keep, error, message):
    with pytest.raises(error, match=message):
        prune_heads(all_heads(LAYER, 4, 2), keep)
    if keep.shape == (3,):
        fewer = prune_heads(all_heads(LAYER, 4, 2), np.arange(4) > 0)
        with pytest.raises(error, match=message):
            prune_heads(fewer, keep)


SCORES, KEEP = np.ones((2, 3)), np.ones((2, 3), bool)


@pytest.mark.parametrize(
    "scores, keep, remove, options, error, message",
    [
        ([[1.0]], KEEP, 1, {}, TypeError, "scores must be a NumPy array, got list"),
        (SCORES, KEEP.astype(float), 1, {}, TypeError, "keep must be a boolean array"),
        (SCORES, KEEP[:, :2], 1, {}, ValueError, r"keep has shape \(2, 2\), scores \(2, 3\)"),
        (SCORES, KEEP, -1, {}, ValueError, "remove must be at least 0, got -1"),
        (SCORES, KEEP, 1, {"minimum": 1.5}, TypeError, "minimum must be a whole number"),
        (SCORES * np.nan, KEEP, 1, {}, ValueError, "scores holds NaN"),
        (SCORES, KEEP, 5, {}, ValueError, "remove is 5, but only 4 heads can go if each layer k"),
        (SCORES, KEEP, 3, {"minimum": 2}, ValueError, "remove is 3, but only 2 heads can go"),
    ],
)
def test_who_goes_is_decided_by_scores(scores, keep, remove, options, error, message):
    with pytest.raises(error, match=message):
        choose_heads(scores, keep, remove, **options)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: random_scores(Draw(0), 0, 2), ValueError, "layers must be at least 1, got 0"),
        (lambda: random_scores(Draw(-1), 1, 2), ValueError, "draw.seed"),
        (
            lambda: list(prune_iteratively(lambda _: SCORES, KEEP, 0)),
            ValueError,
            "remove is 1, but only 0 heads can go",
        ),
        (
            lambda: list(prune_iteratively(lambda _: SCORES, KEEP, 3, each=0)),
            ValueError,
            "each must be at least 1, got 0",
        ),
        (
            lambda: removed_by(1, total=2, start=3, end=3),
            ValueError,
            "end is 3, which is not after start = 3",
        ),
        (
            lambda: removed_by(1.0, total=2, start=3, end=4),
            TypeError,
            "step must be a whole number, got 1.0",
        ),
    ],
)
def test_chance_rounds_and_rhythm_say_what_they_need(call, error, message):
    with pytest.raises(error, match=message):
        call()
