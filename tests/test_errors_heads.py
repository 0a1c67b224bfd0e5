"""What the mechanisms of heads say to bad input: the argument, what was expected, what came."""

import numpy as np
import pytest

from minitransformer.heads.diversity import (
    map_overlap_backward,
    map_overlap_forward,
    orthogonality_backward,
    orthogonality_forward,
    output_similarity_backward,
    output_similarity_forward,
)
from minitransformer.heads.grouping import (
    KeyValueProjections,
    expand_heads_backward,
    expand_heads_forward,
    grouping_distance,
    pool_heads_backward,
    pool_heads_forward,
    regroup,
)
from minitransformer.heads.health import (
    attention_entropy_backward,
    attention_entropy_forward,
    effective_support,
    head_output_norm,
    live_rows,
    mean_distance,
    mean_over_rows,
    output_cka,
    pairwise_overlap,
    relative_entropy,
    weight_norm,
)
from minitransformer.heads.importance import (
    gate_heads_backward,
    gate_heads_forward,
    head_ablation,
    head_importance,
    normalised_importance,
)

pytestmark = pytest.mark.usefixtures("own_errors")

FLAT = np.full((2, 3, 4), 0.25)
MEASURES = {
    "entropy": attention_entropy_forward,
    "support": effective_support,
    "relative": relative_entropy,
    "norm": weight_norm,
    "distance": lambda weights: mean_distance(weights, offset=0),
    "live": live_rows,
    "overlap": pairwise_overlap,
}


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
@pytest.mark.parametrize(
    "weights, error, message",
    [
        ([[[1.0]]], TypeError, "weights must be a NumPy array, got list"),
        (FLAT > 0, TypeError, "weights must hold floating-point numbers, got dtype bool"),
        (FLAT[0], ValueError, r"weights needs at least 3 axes, got shape \(3, 4\)"),
        (FLAT * 2, ValueError, "weights must be attention weights.* take them before any mult"),
        (FLAT - 0.25 * np.eye(4)[0] * 2, ValueError, "weights must be attention weights"),
    ],
    ids=["list", "bool", "no heads", "multiplied", "negative"],
)
def test_a_map_that_is_none_is_refused(measure, weights, error, message):
    with pytest.raises(error, match=message):
        measure(weights)


def test_a_diverged_model_is_measured_not_refused():
    """The monitor looks at it and writes null."""
    assert np.isnan(attention_entropy_forward(FLAT * np.nan)[0]).all()


@pytest.mark.parametrize("offset", [0.5, None, True, np.zeros(3)])
def test_an_offset_is_a_whole_number(offset):
    with pytest.raises(TypeError, match="offset must be a whole number of positions, got"):
        mean_distance(FLAT, offset=offset)


def test_the_cotangent_has_the_shape_of_the_entropy():
    _, cache = attention_entropy_forward(FLAT)
    message = r"dentropy has shape \(2, 3, 4\), the forward pass gave \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        attention_entropy_backward(FLAT, cache)


@pytest.mark.parametrize(
    "keep, error, message",
    [
        (np.ones((3, 4)), TypeError, "keep must be a boolean array"),
        (np.ones((3, 5), bool), ValueError, r"keep has shape \(3, 5\), which does not broadcast"),
        (np.tri(3, 4, 1, dtype=bool), ValueError, "keep forbids a pair that has weight"),
    ],
)
def test_the_mask_is_that_of_the_map(keep, error, message):
    with pytest.raises(error, match=message):
        relative_entropy(FLAT, keep)


@pytest.mark.parametrize(
    "measure, rows, error, message",
    [
        ([[1.0]], None, TypeError, "measure must be a NumPy array, got list"),
        (FLAT[0, 0], None, ValueError, "measure needs at least 2 axes"),
        (FLAT[0], np.ones(4), TypeError, "rows must be a boolean array"),
        (FLAT[0], np.ones(3, bool), ValueError, r"rows has shape \(3,\), which does not broadcast"),
    ],
)
def test_rows_that_count_are_flags(measure, rows, error, message):
    with pytest.raises(error, match=message):
        mean_over_rows(measure, rows)


@pytest.mark.parametrize(
    "out, projection, error, message",
    [
        (FLAT > 0, None, TypeError, "out must hold floating-point numbers, got dtype bool"),
        (FLAT[0], None, ValueError, "out needs at least 3 axes"),
        (FLAT, np.ones((8, 5), int), TypeError, "projection must hold floating-point numbers"),
        (FLAT, np.ones((5, 8)), ValueError, r"projection has shape \(5, 8\), expected 8 rows: 2 "),
        (FLAT, np.ones(8), ValueError, r"projection has shape \(8,\), expected 8 rows"),
    ],
)
def test_a_projection_has_rows_for_every_head(out, projection, error, message):
    with pytest.raises(error, match=message):
        head_output_norm(out, projection=projection)


def test_two_heads_are_compared_over_the_same_rows():
    with pytest.raises(TypeError, match="rows must be a boolean array"):
        pairwise_overlap(FLAT, np.ones(3))
    with pytest.raises(ValueError, match=r"rows has shape \(2, 3\), .* broadcast to \(3,\)"):
        pairwise_overlap(FLAT, np.ones((2, 3), bool))
    with pytest.raises(TypeError, match="out must be a NumPy array, got list"):
        output_cka([[[1.0]]])
    with pytest.raises(ValueError, match="out needs at least 3 axes"):
        output_cka(FLAT[0])


# ---- fewer and more key/value heads --------------------------------------------------------------

WEIGHT = np.ones((3, 12))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: pool_heads_forward([1.0], 1, 1), TypeError, "weight must be a NumPy array, got l"),
        (lambda: pool_heads_forward(WEIGHT > 0, 4, 2), TypeError, "weight must hold floating-po"),
        (lambda: pool_heads_forward(np.array(1.0), 1, 1), ValueError, "weight needs at least 1 ax"),
        (lambda: pool_heads_forward(WEIGHT, 4, 3), ValueError, "groups is 3, .* divide heads = 4"),
        (lambda: pool_heads_forward(WEIGHT, 2, 4), ValueError, "groups is 4, .* divide heads = 2"),
        (lambda: pool_heads_forward(WEIGHT, 4, 0), ValueError, "groups must be at least 1, got 0"),
        (lambda: pool_heads_forward(WEIGHT, 5, 1), ValueError, "weight has 12 channels, not .* 5"),
        (lambda: expand_heads_forward(WEIGHT, 3, 4), ValueError, "groups is 3, .* heads = 4"),
        (lambda: expand_heads_forward(WEIGHT, 5, 10), ValueError, "weight has 12 channels, not"),
        (lambda: grouping_distance(WEIGHT, 4, 1.0), TypeError, "groups must be a whole number"),
    ],
)
def test_numbers_of_heads_divide(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "heads, after, message",
    [
        (6, 4, "after is 4, heads 6: one of the two must divide the other"),
        (5, 1, "key has 12 channels, not a multiple of 5 heads"),
        (6, 0, "after must be at least 1, got 0"),
    ],
)
def test_a_layer_is_regrouped_as_a_whole(heads, after, message):
    with pytest.raises(ValueError, match=message):
        regroup(KeyValueProjections(WEIGHT, WEIGHT), heads, after)


def test_the_part_that_does_not_fit_is_named():
    given = KeyValueProjections(WEIGHT, WEIGHT, WEIGHT[0], WEIGHT[0, :5])
    with pytest.raises(ValueError, match="value_bias has 5 channels, not a multiple of 4 heads"):
        regroup(given, 4, 2)
    with pytest.raises(TypeError, match="key must be a NumPy array, got list"):
        regroup(given._replace(key=[1.0]), 4, 2)


def test_the_cotangent_has_the_shape_of_the_weight():
    for forward, backward, heads, after, width in (
        (pool_heads_forward, pool_heads_backward, 4, 2, 6),
        (expand_heads_forward, expand_heads_backward, 2, 4, 24),
    ):
        _, cache = forward(WEIGHT, heads, after)
        message = rf"dout has shape \(3, 1\), the forward pass gave \(3, {width}\)"
        with pytest.raises(ValueError, match=message):
            backward(WEIGHT[:, :1], cache)


# ---- gates and importance ------------------------------------------------------------------------

OUT = np.ones((2, 3, 4, 5))


@pytest.mark.parametrize(
    "out, gates, error, message",
    [
        ([1.0], np.ones(3), TypeError, "out must be a NumPy array, got list"),
        (OUT[0, 0], np.ones(3), ValueError, "out needs at least 3 axes"),
        (OUT, np.ones(3, bool), TypeError, "gates must hold floating-point numbers, got .* bool"),
        (OUT, np.ones(4), ValueError, r"gates has shape \(4,\), .* broadcast to \(2, 3\)"),
        (OUT, np.ones((1, 2, 3)), ValueError, "gates has shape"),
        (OUT, np.array(1.0), ValueError, "gates needs at least 1 axes"),
    ],
)
def test_a_gate_for_every_head(out, gates, error, message):
    with pytest.raises(error, match=message):
        gate_heads_forward(out, gates)


def test_the_cotangent_has_the_shape_of_the_heads_output():
    _, cache = gate_heads_forward(OUT, np.ones(3))
    message = r"dout has shape \(3, 4, 5\), the forward pass gave \(2, 3, 4, 5\)"
    with pytest.raises(ValueError, match=message):
        gate_heads_backward(OUT[0], cache)
    with pytest.raises(ValueError, match=message):
        head_importance(OUT, OUT[0], granularity="example")


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: head_importance(OUT, OUT, granularity="head"),
            ValueError,
            "granularity must be one of token, example, batch, got 'head'",
        ),
        (
            lambda: head_importance(OUT > 0, OUT, granularity="token"),
            TypeError,
            "out must hold floating-point numbers",
        ),
        (
            lambda: head_importance(OUT, OUT.tolist(), granularity="token"),
            TypeError,
            "dout must be a NumPy array, got list",
        ),
        (
            lambda: normalised_importance(-OUT[0, 0]),
            ValueError,
            "importance must not be negative",
        ),
        (lambda: normalised_importance([1.0]), TypeError, "importance must be a NumPy array"),
        (lambda: head_ablation(sum, 0), ValueError, "heads must be at least 1, got 0"),
    ],
)
def test_importance_says_what_it_needs(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- diversity -----------------------------------------------------------------------------------

LIKENESS = {
    "out": (output_similarity_forward, output_similarity_backward),
    "weights": (map_overlap_forward, map_overlap_backward),
    "a": (orthogonality_forward, orthogonality_backward),
}


@pytest.mark.parametrize("name", LIKENESS)
def test_what_is_compared_is_an_array(name):
    forward, backward = LIKENESS[name]
    with pytest.raises(TypeError, match=f"{name} must be a NumPy array, got list"):
        forward([[1.0]])
    with pytest.raises(TypeError, match=f"{name} must hold floating-point numbers"):
        forward(OUT > 0)
    with pytest.raises(ValueError, match=f"{name} needs at least {2 if name == 'a' else 3} axes"):
        forward(OUT[0, 0, 0])
    found, cache = forward(OUT)
    message = rf"dout has shape \(1, 2, .*, the forward pass gave \({found.shape[0]}, "
    with pytest.raises(ValueError, match=message):
        backward(found[None], cache)


@pytest.mark.parametrize("name", ["out", "weights"])
def test_there_is_a_head_to_compare(name):
    with pytest.raises(ValueError, match=rf"{name} has no heads: its shape is \(2, 0, 4, 5\)"):
        LIKENESS[name][0](OUT[:, :0])
