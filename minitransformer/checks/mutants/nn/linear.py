"""Mistakes people make with an affine map."""

import numpy as np

from minitransformer.checks.properties.nn.linear import suite
from minitransformer.nn import linear as right

SUM = "every_output_is_a_sum_of_products"
AFFINE = "the_map_is_affine"
DERIVATIVE = "linear_backward_is_the_derivative"
WIDE = "narrow_numbers_are_summed_wide"
ALONE = "arguments_are_left_alone"


def _is_square(weight):
    return weight.shape[0] == weight.shape[1]


@suite.mutant("linear_forward", "PyTorch's weight is (out, in), ours (in, out)", killed_by=SUM)
def weight_transposed(x, weight, bias=None):
    return right.linear_forward(x, weight.T if _is_square(weight) else weight, bias)


@suite.mutant("linear_forward", "y = x W goes through zero", killed_by=(SUM, AFFINE))
def bias_forgotten(x, weight, bias=None):
    out, cache = right.linear_forward(x, weight)
    return out, cache._replace(has_bias=bias is not None)


@suite.mutant("linear_forward", "(x + b) W: the shift came first", killed_by=(SUM, AFFINE))
def bias_before_the_weight(x, weight, bias=None):
    if bias is None or not _is_square(weight):
        return right.linear_forward(x, weight, bias)
    out, cache = right.linear_forward(x + bias, weight)
    return out, cache._replace(x=x, has_bias=True)


@suite.mutant(
    "linear_forward", "an activation that belongs to the next line", killed_by=(SUM, AFFINE)
)
def clipped_at_zero(x, weight, bias=None):
    out, cache = right.linear_forward(x, weight, bias)
    return np.where(out.real > 0, out, 0), cache


@suite.mutant("linear_forward", "adds the terms in float16, and rounds after each", killed_by=WIDE)
def narrow_products(x, weight, bias=None):
    out, cache = right.linear_forward(x, weight, bias)
    if x.dtype.itemsize != 2 or bias is None:
        return out, cache
    total = np.broadcast_to(bias, out.shape)
    for a, w in zip(np.moveaxis(x, -1, 0), weight, strict=True):
        total = total + a[..., None] * w
    return total, cache


@suite.mutant("linear_forward", "zeroes what the caller still needs", killed_by=ALONE)
def input_consumed(x, weight, bias=None):
    out, cache = right.linear_forward(x, weight, bias)
    cache = cache._replace(x=x.copy())
    x[...] = 0
    return out, cache


@suite.mutant(
    "linear_backward", "dy W for dy Wᵀ: only a square weight lets it pass", killed_by=DERIVATIVE
)
def dx_through_the_untransposed_weight(dout, cache):
    grads = right.linear_backward(dout, cache)
    return grads._replace(x=dout @ cache.weight) if _is_square(cache.weight) else grads


@suite.mutant(
    "linear_backward", "dyᵀ x is the gradient of a weight (out, in)", killed_by=DERIVATIVE
)
def dw_transposed(dout, cache):
    grads = right.linear_backward(dout, cache)
    return grads._replace(weight=grads.weight.T) if _is_square(cache.weight) else grads


@suite.mutant(
    "linear_backward",
    "the loss has divided by the batch already: rows are summed",
    killed_by=DERIVATIVE,
)
def gradients_averaged_over_rows(dout, cache):
    grads = right.linear_backward(dout, cache)
    rows = max(dout.size // max(dout.shape[-1], 1), 1)
    bias = None if grads.bias is None else grads.bias / rows
    return grads._replace(weight=grads.weight / rows, bias=bias)


@suite.mutant(
    "linear_backward",
    "with two leading axes, the last entry of the first alone",
    killed_by=DERIVATIVE,
)
def one_sequence_of_the_batch(dout, cache):
    grads = right.linear_backward(dout, cache)
    if dout.ndim < 3 or not dout.size:
        return grads
    last = right.linear_backward(dout[-1], cache._replace(x=cache.x[-1]))
    return grads._replace(weight=last.weight)


@suite.mutant("linear_backward", "a gradient where there is no parameter", killed_by=DERIVATIVE)
def gradient_of_an_absent_bias(dout, cache):
    return right.linear_backward(dout, cache._replace(has_bias=True))


@suite.mutant("linear_backward", "x is narrow, its gradient is not", killed_by=WIDE)
def gradient_of_x_left_wide(dout, cache):
    wide = np.result_type(cache.x.dtype.type(0), np.float32)
    return right.linear_backward(dout, cache._replace(x=cache.x.astype(wide)))


@suite.mutant("linear_backward", "a long sum of narrow numbers stops growing", killed_by=WIDE)
def narrow_sum_over_the_rows(dout, cache):
    grads = right.linear_backward(dout, cache)
    if dout.ndim != 2 or grads.bias is None:
        return grads
    total = np.zeros(dout.shape[-1], dout.dtype)
    for row in dout:
        total = total + row
    return grads._replace(bias=total)
