"""What the importance of a head must be: the derivative of the loss by its gate, with |·| where it
is said to stand."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.checks.gradients import (
    assert_close,
    assert_gradients,
    complex_step,
    cotangent,
)
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes, entries
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype

suite = Suite("heads.importance")

GATE, GATED = "gate_heads_forward", "gate_heads_backward"
IMPORTANCE, NORMALISED, ABLATION = "head_importance", "normalised_importance", "head_ablation"

# shape of the heads' output, shape of the gates
SHAPES = (
    ((2, 3, 5, 4), (3,)),
    ((2, 3, 5, 4), (2, 3)),
    ((2, 1, 2, 3), (2, 1)),
    ((3, 2, 1), (3,)),
    ((2, 3, 2, 1, 2), (3, 2)),
    ((2, 3, 2, 1, 2), (2, 1, 2)),
    ((2, 3, 2, 2), (1,)),
    ((0, 2, 3, 2), (2,)),
    ((2, 2, 0, 3), (2,)),
    ((1, 1, 1, 1), (1,)),
)
shapes = st.sampled_from(SHAPES)
outputs = st.sampled_from([shape for shape, gates in SHAPES if len(gates) == 1])
units = st.sampled_from(["token", "example", "batch"])


def by_loops(out: Array, dout: Array, unit: str) -> Array:
    """Eq. 14.10, product by product."""
    *leading, heads, rows, _ = out.shape
    examples = list(np.ndindex(*leading))
    found = np.zeros(heads)
    for h in range(heads):
        felt = [
            [math.fsum((out[(*b, h, i)] * dout[(*b, h, i)]).tolist()) for i in range(rows)]
            for b in examples
        ]
        if unit == "token":
            total = math.fsum(abs(x) for example in felt for x in example)
        elif unit == "example":
            total = math.fsum(abs(math.fsum(example)) for example in felt)
        else:
            total = abs(math.fsum(x for example in felt for x in example))
        found[h] = total / max(len(examples), 1)
    return found


def joined(out: Array) -> Array:
    """(B, H, N, E) as (B, N, H·E)"""
    b, heads, rows, width = out.shape
    return np.swapaxes(out, 1, 2).reshape(b, rows, heads * width)


# ---- gates ---------------------------------------------------------------------------------------


@suite.property(GATE, shape=shapes, seed=seeds)
def a_gate_scales_its_head(target, shape, seed):
    """Eq. 14.8 head by head; a gate of 1 leaves every bit, one of 0 leaves nothing."""
    out, gates = entries(shape[0], seed), normal(shape[1], seed ^ 1)
    got, _ = target.gate_heads_forward(out, gates)
    each = np.broadcast_to(gates, shape[0][:-2])
    expected = np.zeros(shape[0])
    for head in np.ndindex(each.shape):
        expected[head] = out[head] * each[head]
    assert_close(got, expected)
    assert np.array_equal(target.gate_heads_forward(out, np.ones(shape[1]))[0], out)
    assert (target.gate_heads_forward(out, np.zeros(shape[1]))[0] == 0).all()


@suite.property(GATE, GATED, shape=shapes, seed=seeds)
def gate_backward_is_the_derivative(target, shape, seed):
    """Eq. 14.9 against the complex step, for gates of the layer and gates of each example."""
    out, gates = normal(shape[0], seed), normal(shape[1], seed ^ 1)
    gated, cache = target.gate_heads_forward(out, gates)
    dout = cotangent(gated, seed)
    grads = target.gate_heads_backward(dout, cache)
    assert_gradients(
        lambda out, gates: target.gate_heads_forward(out, gates)[0],
        {"out": grads.out, "gates": grads.gates},
        {"out": out, "gates": gates},
        dout,
    )


# ---- importance ----------------------------------------------------------------------------------


@suite.property(IMPORTANCE, shape=outputs, seed=seeds, unit=units)
def the_absolute_value_stands_where_it_is_said(target, shape, seed, unit):
    """Eq. 14.10 product by product, for each unit, divided by the number of examples."""
    out, dout = entries(shape, seed), normal(shape, seed ^ 1)
    got = target.head_importance(out, dout, granularity=unit)
    assert_close(got, by_loops(out, dout, unit))


@suite.property(IMPORTANCE, GATE, seed=seeds)
def importance_is_felt_through_a_layer(target, seed):
    """Eq. 14.10 of one example is |dL/dξ|: a gate turned (Eq. 14.8) in front of an output
    projection and a loss that is not linear, by the complex step; the mean over the examples."""
    out, w = normal((3, 2, 4, 3), seed), normal((6, 5), seed ^ 1)
    weights = normal((3, 4, 5), seed ^ 2)  # of the loss
    expected = np.zeros((3, 2))
    for b in range(3):

        def loss(gates, b=b):
            gated, _ = target.gate_heads_forward(out[b : b + 1], gates)
            return (weights[b] * np.tanh(joined(gated)[0] @ w)).sum()

        expected[b] = complex_step(loss, np.ones(2))
    y = np.tanh(joined(out) @ w)
    dctx = (weights * (1 - y * y)) @ w.T
    dout = np.swapaxes(dctx.reshape(3, 4, 2, 3), 1, 2)
    got = target.head_importance(out, dout, granularity="example")
    assert_close(got, np.abs(expected).mean(axis=0), 1e-10)
    got = target.head_importance(out, dout, granularity="batch")
    assert_close(got, np.abs(expected.mean(axis=0)), 1e-10)


@suite.property(IMPORTANCE, shape=outputs, seed=seeds)
def a_larger_unit_can_only_cancel(target, shape, seed):
    """Eq. 14.10: 0 <= batch <= example <= token, by the triangle's inequality; a unit of one is
    the same
    as its parts."""
    out, dout = normal(shape, seed), normal(shape, seed ^ 1)

    def measured(out, dout):
        return [
            target.head_importance(out, dout, granularity=unit)
            for unit in ("batch", "example", "token")
        ]

    batch, example, token = measured(out, dout)
    assert (batch >= 0).all(), "worth less than nothing"
    assert (batch <= example + 1e-12).all() and (example <= token + 1e-12).all()
    _, single, each = measured(out[..., :1, :], dout[..., :1, :])
    assert_close(single, each, what="examples of one token")
    if len(shape) == 4:
        whole, single, _ = measured(out[:1], dout[:1])
        assert_close(whole, single, what="a batch of one example")


@suite.property(IMPORTANCE, seed=seeds, cut=st.sampled_from([1, 2, 3, 5]))
def batches_of_any_size_average_to_the_whole(target, seed, cut):
    """For examples and tokens it does not matter how the data was cut: the mean of the parts,
    weighted by their examples, is the whole. A unit of the batch depends on it."""
    out, dout = normal((6, 3, 4, 2), seed), normal((6, 3, 4, 2), seed ^ 1)
    parts = [slice(0, cut), slice(cut, 6)]
    for unit in ("example", "token"):
        whole = target.head_importance(out, dout, granularity=unit)
        found = [target.head_importance(out[p], dout[p], granularity=unit) for p in parts]
        weighted = (cut * found[0] + (6 - cut) * found[1]) / 6
        assert_close(weighted, whole, what=unit)
    opposite = np.concatenate([out, out]), np.concatenate([dout, -dout])
    assert_close(target.head_importance(*opposite, granularity="batch"), np.zeros(3))
    alone = target.head_importance(out, dout, granularity="example")
    assert_close(target.head_importance(*opposite, granularity="example"), alone)


@suite.property(IMPORTANCE, seed=seeds, loud=st.sampled_from([1.0, 1e3]))
def a_head_that_nobody_listens_to_is_worth_nothing(target, seed, loud):
    """However loud it is: with W_O zero in its rows the gradient is 0, and so is the importance of
    Eq. 14.10."""
    out, w = normal((2, 3, 4, 2), seed), normal((6, 5), seed ^ 1)
    out[:, 1] *= loud
    w[2:4] = 0
    dy = cotangent(np.zeros((2, 4, 5)), seed)
    dout = np.swapaxes((dy @ w.T).reshape(2, 4, 3, 2), 1, 2)
    for unit in ("token", "example", "batch"):
        got = target.head_importance(out, dout, granularity=unit)
        assert got[1] == 0, f"worth {got[1]} by {unit}"
        assert got[0] > 0 and got[2] > 0


@suite.property(NORMALISED, seed=seeds, scale=st.sampled_from([1.0, 1e-200, 1e150]))
def a_layer_has_length_one(target, seed, scale):
    """Eq. 14.11: the squares of a layer's heads add up to 1, their order and ratios stay, and the
    size of the loss is no matter. A layer in which nothing is felt stays 0."""
    importance = np.abs(normal((3, 2, 4), seed)) + 0.1
    importance[1, 0] = 0
    got = target.normalised_importance(importance * scale)
    norm = np.array([[math.hypot(*layer) for layer in row] for row in importance.tolist()])
    expected = importance / np.where(norm > 0, norm, 1)[..., None]
    assert_close(got, expected)
    assert target.normalised_importance(importance[..., :0]).shape == (3, 2, 0)


@suite.property(ABLATION, IMPORTANCE, GATE, seed=seeds, curved=st.booleans())
def what_the_gradient_guesses_ablation_knows(target, seed, curved):
    """Eq. 14.12: the loss without the head less the loss with it; |Δ| is the importance of one
    example (Eq. 14.10) where the loss is linear in the gates, and only there."""
    out, dout = normal((1, 3, 4, 2), seed), normal((1, 3, 4, 2), seed ^ 1)
    asked = []

    def loss(gates):
        asked.append(gates.copy())
        gated, _ = target.gate_heads_forward(out, gates)
        linear = float((dout * gated).sum())
        return linear + (float((gated**2).sum()) if curved else 0.0)

    got = target.head_ablation(loss, 3)
    without = [
        -float((dout[:, h] * out[:, h]).sum()) - (float((out[:, h] ** 2).sum()) if curved else 0)
        for h in range(3)
    ]
    assert_close(got, np.array(without), what="loss without the head less the loss")
    slope = dout + (2 * out if curved else 0)
    guess = target.head_importance(out, slope, granularity="example")
    if curved:
        assert np.abs(guess - np.abs(got)).max() > 1e-6
    else:
        assert_close(guess, np.abs(got), what="importance")


@suite.property(IMPORTANCE, NORMALISED, shape=outputs, seed=seeds, unit=units)
def heads_in_another_order_keep_their_worth(target, shape, seed, unit):
    """No head's importance (Eq. 14.10, Eq. 14.11) depends on where it stands."""
    out, dout = normal(shape, seed), normal(shape, seed ^ 1)
    order = np.random.default_rng(seed).permutation(shape[-3])
    here = target.head_importance(out, dout, granularity=unit)
    moved = out[..., order, :, :], dout[..., order, :, :]
    there = target.head_importance(*moved, granularity=unit)
    assert_close(there, here[order])
    there = target.normalised_importance(there)
    assert_close(there, target.normalised_importance(here)[order])


# ---- numbers -------------------------------------------------------------------------------------


@suite.property(IMPORTANCE, GATE, GATED, seed=seeds, dtype=dtypes)
def narrow_products_are_summed_wide(target, seed, dtype):
    """Three thousand narrow products add up: a bfloat16 sum of ones ends at 256."""
    narrow = DTYPES[dtype]
    out = (1 + normal((1, 2, 1000, 3), seed, 0.1)).astype(narrow)
    dout = (1 + normal(out.shape, seed ^ 1, 0.1)).astype(narrow)
    products = out.astype(np.float64) * dout.astype(np.float64)
    exact = products.sum(axis=(0, 2, 3))
    tolerance = of_dtype("float64" if dtype == "float64" else "float32")
    for unit in ("token", "example", "batch"):
        got = target.head_importance(out, dout, granularity=unit)
        assert got.dtype.itemsize >= 4, f"importance in {got.dtype}"
        assert_close(got.astype(np.float64), exact, tolerance, what=unit)
    gates = (1 + normal((2,), seed ^ 2, 0.1)).astype(narrow)
    gated, cache = target.gate_heads_forward(out, gates)
    expected = out.astype(np.float64) * gates.astype(np.float64)[:, None, None]
    assert_rounded_once(gated, expected, dtype, what="gated")
    grads = target.gate_heads_backward(dout, cache)
    assert_rounded_once(grads.gates, exact, dtype, what="gradient of the gates")


@suite.property(GATE, GATED, IMPORTANCE, NORMALISED, shape=shapes, seed=seeds)
def arguments_are_left_alone(target, shape, seed):
    """No array of the caller is modified, and one cache serves twice."""
    out, gates = normal(shape[0], seed), normal(shape[1], seed ^ 1)
    dout = cotangent(out, seed)
    importance = np.abs(normal((2, 3), seed))
    given = (out, gates, dout, importance)
    before = [x.copy() for x in given]
    _, cache = target.gate_heads_forward(out, gates)
    once, again = (target.gate_heads_backward(dout, cache) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        assert np.array_equal(a, b), "the second backward differs from the first"
    target.head_importance(out, dout, granularity="token")
    target.normalised_importance(importance)
    names = ("out", "gates", "dout", "importance")
    for name, now, then in zip(names, given, before, strict=True):
        assert np.array_equal(now, then), f"{name} was modified"
