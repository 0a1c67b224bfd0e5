"""Mistakes people make when they normalise."""

import numpy as np

from minitransformer.checks.properties.nn.norms import suite
from minitransformer.nn import norms as right
from minitransformer.nn.norms import NormCache

LAYER = "layer_norm_is_its_definition_row_by_row"
MOMENTS = "layer_norm_rows_have_mean_zero_and_variance_one"
FORGETS = "layer_norm_forgets_shift_and_scale"
CONSTANT = "constant_rows_become_beta_and_zero_rows_zero"
LAYER_DERIVATIVE = "layer_norm_backward_is_the_derivative"
RMS = "rms_norm_is_its_definition_row_by_row"
RMS_FORGETS = "rms_norm_forgets_scale_but_not_shift"
RMS_DERIVATIVE = "rms_norm_backward_is_the_derivative"
NARROW = "narrow_numbers_are_rounded_once"
ALONE = "arguments_are_left_alone"


def _with(centred, inverse, gamma, beta=0.0):
    """The end of either norm, once the row is centred and 1/√ is known."""
    normalised = centred * inverse
    return normalised * gamma + beta, NormCache(normalised, inverse, gamma)


def _centred(x):
    return x - x.mean(axis=-1, keepdims=True)


def _mean_square(x):
    return (x * x).mean(axis=-1, keepdims=True)


# ---- LayerNorm -----------------------------------------------------------------------------------


@suite.mutant(
    "layer_norm_forward", "1 / (√v + ε): ε stands under the root", killed_by=(LAYER, MOMENTS)
)
def epsilon_outside_the_root(x, gamma, beta, *, eps=1e-5):
    centred = _centred(x)
    return _with(centred, 1 / (np.sqrt(_mean_square(centred)) + eps), gamma, beta)


@suite.mutant(
    "layer_norm_forward",
    "ddof=1 estimates a population; a row is all there is",
    killed_by=(LAYER, MOMENTS),
)
def unbiased_variance(x, gamma, beta, *, eps=1e-5):
    centred, width = _centred(x), x.shape[-1]
    square = _mean_square(centred) * (width / max(width - 1, 1))
    return _with(centred, right._inverse_root(square, eps), gamma, beta)


@suite.mutant(
    "layer_norm_forward",
    "mean x² - (mean x)²: far from zero nothing of it is left",
    killed_by=FORGETS,
)
def variance_as_a_difference_of_squares(x, gamma, beta, *, eps=1e-5):
    square = _mean_square(x) - x.mean(axis=-1, keepdims=True) ** 2
    square = np.where(square.real > 0, square, 0)
    return _with(_centred(x), right._inverse_root(square, eps), gamma, beta)


@suite.mutant(
    "layer_norm_forward", "that is RMSNorm", killed_by=(LAYER, MOMENTS, FORGETS, CONSTANT)
)
def mean_not_subtracted(x, gamma, beta, *, eps=1e-5):
    return _with(x, right._inverse_root(_mean_square(x), eps), gamma, beta)


@suite.mutant(
    "layer_norm_forward",
    "statistics of a feature over the rows: that is BatchNorm",
    killed_by=(LAYER, MOMENTS),
)
def normalised_over_the_batch(x, gamma, beta, *, eps=1e-5):
    if x.ndim == 1 or not x.size:
        return right.layer_norm_forward(x, gamma, beta, eps=eps)
    centred = x - x.mean(axis=0)
    inverse = 1 / np.sqrt((centred * centred).mean(axis=0, keepdims=True) + eps)
    return _with(centred, inverse, gamma, beta)


@suite.mutant(
    "layer_norm_forward",
    "γ (x̂ + β): the shift comes last",
    killed_by=(LAYER, CONSTANT),
)
def shift_before_gain(x, gamma, beta, *, eps=1e-5):
    return right.layer_norm_forward(x, gamma, gamma * beta, eps=eps)


@suite.mutant(
    "layer_norm_forward",
    "the argument is read and forgotten",
    killed_by=(LAYER, MOMENTS, FORGETS),
)
def epsilon_ignored(x, gamma, beta, *, eps=1e-5):
    return right.layer_norm_forward(x, gamma, beta)


@suite.mutant(
    "layer_norm_forward",
    "1e-6 and 1e-12 are other models' defaults",
    killed_by=LAYER,
)
def another_default(x, gamma, beta, *, eps=1e-12):
    return right.layer_norm_forward(x, gamma, beta, eps=eps)


@suite.mutant("layer_norm_forward", "0/0 where ε = 0 and a row is constant", killed_by=CONSTANT)
def constant_row_not_guarded(x, gamma, beta, *, eps=1e-5):
    centred = _centred(x)
    return _with(centred, 1 / np.sqrt(_mean_square(centred) + eps), gamma, beta)


@suite.mutant("layer_norm_forward", "squares of float16 numbers overflow at 256", killed_by=NARROW)
def narrow_squares(x, gamma, beta, *, eps=1e-5):
    if x.dtype.itemsize != 2:
        return right.layer_norm_forward(x, gamma, beta, eps=eps)
    centred = x - x.mean(axis=-1, keepdims=True)
    square = (centred * centred).mean(axis=-1, keepdims=True)
    return _with(centred, (1 / np.sqrt(square + x.dtype.type(eps))), gamma, beta)


@suite.mutant("layer_norm_forward", "saves an array, corrupts the caller's", killed_by=ALONE)
def centred_in_place(x, gamma, beta, *, eps=1e-5):
    result = right.layer_norm_forward(x, gamma, beta, eps=eps)
    if x.flags.writeable:
        x -= x.mean(axis=-1, keepdims=True)
    return result


@suite.mutant(
    "layer_norm_backward",
    "the mean moves with x as well: dx must sum to zero",
    killed_by=LAYER_DERIVATIVE,
)
def gradient_of_the_mean_forgotten(dout, cache):
    grads = right.rms_norm_backward(dout, cache)
    return right.layer_norm_backward(dout, cache)._replace(x=grads.x)


@suite.mutant(
    "layer_norm_backward",
    "1/√ was taken for a constant: dx must be orthogonal to x̂",
    killed_by=LAYER_DERIVATIVE,
)
def gradient_of_the_variance_forgotten(dout, cache):
    g = dout * cache.gain
    dx = cache.inverse * (g - g.mean(axis=-1, keepdims=True))
    return right.layer_norm_backward(dout, cache)._replace(x=dx)


@suite.mutant("layer_norm_backward", "dy for g = dy ⊙ γ", killed_by=LAYER_DERIVATIVE)
def gain_forgotten_in_dx(dout, cache):
    plain = cache._replace(gain=np.ones_like(cache.gain))
    return right.layer_norm_backward(dout, cache)._replace(
        x=right.layer_norm_backward(dout, plain).x
    )


@suite.mutant("layer_norm_backward", "Σ dy belongs to β", killed_by=LAYER_DERIVATIVE)
def gain_gradient_without_x_hat(dout, cache):
    grads = right.layer_norm_backward(dout, cache)
    return grads._replace(gamma=grads.beta)


@suite.mutant("layer_norm_backward", "β is added after γ", killed_by=LAYER_DERIVATIVE)
def shift_gradient_times_the_gain(dout, cache):
    grads = right.layer_norm_backward(dout, cache)
    return grads._replace(beta=grads.beta * cache.gain)


@suite.mutant(
    "layer_norm_backward",
    "γ serves every row: the rows' gradients are summed, not averaged",
    killed_by=LAYER_DERIVATIVE,
)
def parameter_gradients_averaged(dout, cache):
    grads = right.layer_norm_backward(dout, cache)
    rows = max(dout.size // dout.shape[-1], 1)
    return grads._replace(gamma=grads.gamma / rows, beta=grads.beta / rows)


@suite.mutant(
    "layer_norm_backward",
    "a long sum of narrow numbers stops growing",
    killed_by="gradients_of_parameters_are_summed_wide",
)
def narrow_sum_over_the_rows(dout, cache):
    total = np.zeros(dout.shape[-1:], dout.dtype)
    for row in dout.reshape(-1, dout.shape[-1]):
        total = total + row
    return right.layer_norm_backward(dout, cache)._replace(beta=total)


# ---- RMSNorm -------------------------------------------------------------------------------------


@suite.mutant("rms_norm_forward", "that is LayerNorm", killed_by=(RMS, RMS_FORGETS))
def mean_subtracted(x, gamma, *, eps=1e-6, offset=0.0):
    return right.rms_norm_forward(_centred(x), gamma, eps=eps, offset=offset)


@suite.mutant("rms_norm_forward", "divides by the length of the row", killed_by=(RMS, RMS_FORGETS))
def sum_of_squares_for_their_mean(x, gamma, *, eps=1e-6, offset=0.0):
    square = (x * x).sum(axis=-1, keepdims=True)
    return _with(x, right._inverse_root(square, eps), gamma + offset)


@suite.mutant(
    "rms_norm_forward", "1 / (√q + ε): ε stands under the root", killed_by=(RMS, RMS_FORGETS)
)
def epsilon_outside_the_root_of_rms(x, gamma, *, eps=1e-6, offset=0.0):
    return _with(x, 1 / (np.sqrt(_mean_square(x)) + eps), gamma + offset)


@suite.mutant("rms_norm_forward", "Gemma's γ starts from 0: its gain is 1 + γ", killed_by=RMS)
def offset_ignored(x, gamma, *, eps=1e-6, offset=0.0):
    return right.rms_norm_forward(x, gamma, eps=eps)


@suite.mutant("rms_norm_forward", "γ x̂ + 1: the offset belongs to the gain", killed_by=RMS)
def offset_added_to_the_result(x, gamma, *, eps=1e-6, offset=0.0):
    out, cache = right.rms_norm_forward(x, gamma, eps=eps)
    return out + offset, cache


@suite.mutant("rms_norm_forward", "0/0 where ε = 0 and a row is zero", killed_by=CONSTANT)
def zero_row_not_guarded(x, gamma, *, eps=1e-6, offset=0.0):
    return _with(x, 1 / np.sqrt(_mean_square(x) + eps), gamma + offset)


@suite.mutant(
    "rms_norm_forward", "x̂ rounded to float16 before γ, and again after", killed_by=NARROW
)
def rounded_before_the_gain(x, gamma, *, eps=1e-6, offset=0.0):
    out, cache = right.rms_norm_forward(x, gamma, eps=eps, offset=offset)
    if x.dtype.itemsize != 2:
        return out, cache
    return cache.normalised.astype(x.dtype) * cache.gain, cache


@suite.mutant(
    "rms_norm_backward", "RMSNorm subtracts no mean: its gradient neither", killed_by=RMS_DERIVATIVE
)
def backward_of_layer_norm(dout, cache):
    x = right.layer_norm_backward(dout, cache).x
    return right.rms_norm_backward(dout, cache)._replace(x=x)


@suite.mutant("rms_norm_backward", "the root was taken for a constant", killed_by=RMS_DERIVATIVE)
def gradient_of_the_root_forgotten(dout, cache):
    x = cache.inverse * dout * cache.gain
    return right.rms_norm_backward(dout, cache)._replace(x=x)


@suite.mutant("rms_norm_backward", "x̂ for x: 1/√ was left out", killed_by=RMS_DERIVATIVE)
def inverse_root_forgotten(dout, cache):
    grads = right.rms_norm_backward(dout, cache)
    return grads._replace(x=grads.x / np.where(cache.inverse == 0, 1, cache.inverse))


@suite.mutant("rms_norm_backward", "dγ = Σ dy x̂, without a γ", killed_by=RMS_DERIVATIVE)
def gain_gradient_times_the_gain(dout, cache):
    grads = right.rms_norm_backward(dout, cache)
    return grads._replace(gamma=grads.gamma * cache.gain)


@suite.mutant("rms_norm_backward", "overwrites the cotangent of its caller", killed_by=ALONE)
def gain_multiplied_in_place(dout, cache):
    grads = right.rms_norm_backward(dout, cache)
    dout *= cache.gain
    return grads
