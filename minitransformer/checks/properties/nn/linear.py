"""What an affine map of rows must do."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes, entries
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype

suite = Suite("nn.linear")

# leading axes, width in, width out: square ones hide a transposition from the shapes alone
shapes = st.sampled_from(
    [
        ((2, 3), 4, 4),
        ((3,), 5, 2),
        ((7,), 3, 3),
        ((), 2, 2),
        ((2, 1, 3), 2, 7),
        ((1,), 5, 5),
        ((2,), 1, 1),
        ((0,), 3, 2),
        ((2, 3), 0, 5),
        ((5,), 3, 0),
    ]
)
biases = st.booleans()


def inputs(shape, seed, with_bias):
    """x, W and b, as arguments; W is a view, as a tied one is."""
    leading, fan_in, fan_out = shape
    given = {"x": entries((*leading, fan_in), seed), "weight": entries((fan_in, fan_out), seed ^ 1)}
    return given | ({"bias": normal((fan_out,), seed ^ 2)} if with_bias else {})


def by_loops(x, weight, bias=None):
    out = np.empty((*x.shape[:-1], weight.shape[1]))
    for *index, o in np.ndindex(out.shape):
        terms = [float(a) * float(w) for a, w in zip(x[tuple(index)], weight[:, o], strict=True)]
        out[*index, o] = math.fsum(terms) + (0.0 if bias is None else float(bias[o]))
    return out


@suite.property("linear_forward", shape=shapes, seed=seeds, with_bias=biases)
def every_output_is_a_sum_of_products(target, shape, seed, with_bias):
    """Eq. 16.1 by loops and exact sums, over any leading axes, a width of 0 included."""
    given = inputs(shape, seed, with_bias)
    out, _ = target.linear_forward(**given)
    assert_close(out, by_loops(**given), what="x W + b")


@suite.property("linear_forward", shape=shapes, seed=seeds, with_bias=biases)
def the_map_is_affine(target, shape, seed, with_bias):
    """f(3 x - 2 x') = 3 f(x) - 2 f(x'), since 3 - 2 = 1; and f(0) is the bias."""
    given = inputs(shape, seed, with_bias)
    other = given | {"x": entries(given["x"].shape, seed ^ 3)}
    between = given | {"x": 3 * given["x"] - 2 * other["x"]}
    f, g, h = (target.linear_forward(**a)[0] for a in (given, other, between))
    assert_close(h, 3 * f - 2 * g, what="f(3 x - 2 x')")
    origin, _ = target.linear_forward(**given | {"x": np.zeros_like(given["x"])})
    assert_close(origin, np.broadcast_to(given.get("bias", 0.0), origin.shape), what="f(0)")


@suite.property("linear_forward", "linear_backward", shape=shapes, seed=seeds, with_bias=biases)
def linear_backward_is_the_derivative(target, shape, seed, with_bias):
    """Eq. 16.2 against the complex step, for x, W and b; no bias, no gradient of it."""
    given = inputs(shape, seed, with_bias)
    out, cache = target.linear_forward(**given)
    dout = cotangent(out, seed)
    grads = target.linear_backward(dout, cache)
    assert with_bias or grads.bias is None, "a gradient for a bias that is not there"
    assert_gradients(
        lambda **given: target.linear_forward(**given)[0],
        {name: getattr(grads, name) for name in given},
        given,
        dout,
    )


@suite.property("linear_forward", "linear_backward", seed=seeds, dtype=dtypes)
def narrow_numbers_are_summed_wide(target, seed, dtype):
    """The dtype of x comes out, forward and backward, rounded once; the gradients of 3000 rows are
    those of wide numbers: a bfloat16 sum of ones ends at 256."""
    x = (1 + entries((3000, 7), seed, 0.1)).astype(DTYPES[dtype])
    weight, bias = (normal(s, seed ^ 1).astype(DTYPES[dtype]) for s in ((7, 3), (3,)))
    dout = (1 + entries((3000, 3), seed ^ 2, 0.1)).astype(DTYPES[dtype])
    x_, weight_, bias_, dout_ = (a.astype(np.float64) for a in (x, weight, bias, dout))
    out, cache = target.linear_forward(x, weight, bias)
    assert_rounded_once(out[:5], by_loops(x_[:5], weight_, bias_), dtype, "x W + b")
    grads = target.linear_backward(dout, cache)
    assert_rounded_once(grads.x[:5], by_loops(dout_[:5], weight_.T), dtype, "gradient of x")
    tolerance = of_dtype("float64" if dtype == "float64" else "float32")
    assert_close(grads.weight, by_loops(x_.T, dout_), tolerance, what="gradient of W")
    assert_close(grads.bias, by_loops(np.ones((1, 3000)), dout_)[0], tolerance, "gradient of b")


@suite.property("linear_forward", "linear_backward", shape=shapes, seed=seeds, with_bias=biases)
def arguments_are_left_alone(target, shape, seed, with_bias):
    """No array of the caller is modified, and one cache serves twice."""
    given = inputs(shape, seed, with_bias)
    before = {name: a.copy() for name, a in given.items()}
    out, cache = target.linear_forward(**given)
    dout = cotangent(out, seed)
    untouched = dout.copy()
    first, second = (target.linear_backward(dout, cache) for _ in range(2))
    assert all(np.array_equal(given[name], a) for name, a in before.items()), "modified"
    assert np.array_equal(dout, untouched), "the cotangent was modified"
    for a, b in zip(first[: len(given)], second[: len(given)], strict=True):
        assert np.array_equal(a, b), "the second backward differs from the first"
