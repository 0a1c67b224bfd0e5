"""Mistakes people make between two linear maps."""

import math

import numpy as np

from minitransformer.checks.properties.nn.activations import suite
from minitransformer.nn import activations as right
from minitransformer.nn.activations import ActivationCache, SwigluGrads

TANH = "gelu_by_tanh_is_x_times_a_logistic_function"
EXACT = "exact_gelu_is_x_times_the_normal_distribution_function"
SIDES = "the_two_sides_of_gelu_differ_by_x"
FORMS = "the_two_forms_of_gelu_are_near_and_not_the_same"
GELU_DERIVATIVE = "gelu_backward_is_the_derivative"
SWIGLU = "swiglu_is_up_times_gate_times_its_logistic"
SWIGLU_SIDES = "swiglu_is_linear_in_up_and_its_two_sides_differ_by_the_gate"
SWIGLU_DERIVATIVE = "swiglu_backward_is_the_derivative"


def _sigmoid(a):
    return 0.5 * (1 + np.tanh(0.5 * a))


def _tanh_form(x, root, cube):
    """Eq. 16.9 with constants of one's own, and the slope that belongs to it."""
    t = np.tanh(root * x * (1 + cube * x * x))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * cube * x * x)
    return 0.5 * x * (1 + t), ActivationCache(slope)


# ---- GELU ----------------------------------------------------------------------------------------


@suite.mutant("gelu_forward", "0.044715 x³ was dropped: 3e-2 off near 2", killed_by=(TANH, FORMS))
def cube_forgotten(x, *, form="tanh"):
    if form == "erf":
        return right.gelu_forward(x, form=form)
    return _tanh_form(x, right.ROOT, 0.0)


@suite.mutant("gelu_forward", "√(2π) belongs to the density, √(2/π) here", killed_by=(TANH, FORMS))
def wrong_root(x, *, form="tanh"):
    if form == "erf":
        return right.gelu_forward(x, form=form)
    return _tanh_form(x, 1 / math.sqrt(2 * math.pi), right.CUBE)


@suite.mutant("gelu_forward", "the option is read and forgotten", killed_by=(EXACT, FORMS))
def form_ignored(x, *, form="tanh"):
    return right.gelu_forward(x)


@suite.mutant("gelu_forward", "a model trained with one form runs with the other", killed_by=TANH)
def the_default_is_the_other_form(x, *, form="erf"):
    return right.gelu_forward(x, form=form)


@suite.mutant(
    "gelu_forward", "Φ(x) is ½ (1 + erf(x/√2)): the root was forgotten", killed_by=(EXACT, FORMS)
)
def error_function_of_x(x, *, form="tanh"):
    out, cache = right.gelu_forward(x, form=form)
    return (x * 0.5 * (1 + right._erf(x)), cache) if form == "erf" else (out, cache)


@suite.mutant(
    "gelu_forward",
    "x σ(1.702 x) is the third, quick form: off by 2e-2",
    killed_by=(TANH, EXACT, FORMS),
)
def quick_gelu(x, *, form="tanh"):
    return x * _sigmoid(1.702 * x), right.gelu_forward(x, form=form)[1]


@suite.mutant("gelu_forward", "x σ(x) is SiLU", killed_by=(TANH, EXACT))
def silu_for_gelu(x, *, form="tanh"):
    return x * _sigmoid(x), right.gelu_forward(x, form=form)[1]


@suite.mutant("gelu_forward", "the 1 fell out: ½ x tanh is even", killed_by=(SIDES, TANH))
def tanh_without_its_one(x, *, form="tanh"):
    out, cache = right.gelu_forward(x, form=form)
    return out - 0.5 * x, cache


@suite.mutant(
    "gelu_forward",
    "t = (e^2u - 1)/(e^2u + 1) is infinity over infinity from x = 21 on",
    killed_by=(SIDES, TANH),
)
def tanh_by_exponentials(x, *, form="tanh"):
    out, cache = right.gelu_forward(x, form=form)
    if form == "erf":
        return out, cache
    e = np.exp(2 * right.ROOT * (x + right.CUBE * x**3))
    return 0.5 * x * (1 + (e - 1) / (e + 1)), cache


@suite.mutant(
    "gelu_forward",
    "a NumPy constant is a float64, and widens float32 without a word",
    killed_by="narrow_numbers_are_rounded_once",
)
def constant_of_numpy(x, *, form="tanh"):
    out, cache = right.gelu_forward(x, form=form)
    return out * np.float64(1), cache


@suite.mutant(
    "gelu_forward",
    "saves an array, corrupts the caller's",
    killed_by="arguments_are_left_alone",
)
def halves_in_place(x, *, form="tanh"):
    result = right.gelu_forward(x, form=form)
    x *= 0.5
    return result


@suite.mutant(
    "gelu_backward",
    "a slope is no probability: GELU's reaches 1.13, and is negative on the left",
    killed_by=GELU_DERIVATIVE,
)
def slope_kept_between_zero_and_one(dout, cache):
    return dout * np.clip(cache.slope, 0, 1)


@suite.mutant("gelu_backward", "forgets that GELU bends", killed_by=GELU_DERIVATIVE)
def straight_through_gelu(dout, cache):
    return dout


@suite.mutant("gelu_backward", "the gradient of ReLU", killed_by=GELU_DERIVATIVE)
def gradient_of_relu(dout, cache):
    return dout * (cache.slope > 0.5)


# ---- SwiGLU --------------------------------------------------------------------------------------


@suite.mutant("swiglu_forward", "σ(a) ⊙ b is the older GLU", killed_by=(SWIGLU, SWIGLU_SIDES))
def gate_without_its_own_factor(gate, up):
    return _sigmoid(gate) * up, right.swiglu_forward(gate, up)[1]


@suite.mutant(
    "swiglu_forward", "silu acts on the gate, not on the other", killed_by=(SWIGLU, SWIGLU_SIDES)
)
def gate_and_up_exchanged(gate, up):
    return right.swiglu_forward(up, gate)


@suite.mutant("swiglu_forward", "gelu(a) ⊙ b is GEGLU", killed_by=SWIGLU)
def gelu_in_the_gate(gate, up):
    return right.gelu_forward(gate)[0] * up, right.swiglu_forward(gate, up)[1]


@suite.mutant(
    "swiglu_forward",
    "e^a / (1 + e^a) is infinity over infinity from 710 on",
    killed_by=(SWIGLU, SWIGLU_SIDES),
)
def logistic_that_overflows(gate, up):
    e = np.exp(gate)
    return gate * (e / (1 + e)) * up, right.swiglu_forward(gate, up)[1]


@suite.mutant(
    "swiglu_forward",
    "a product of three float16 numbers, rounded after each",
    killed_by="narrow_numbers_are_rounded_once",
)
def narrow_products(gate, up):
    out, cache = right.swiglu_forward(gate, up)
    if gate.dtype.itemsize != 2:
        return out, cache
    one = gate.dtype.type(1)
    return gate / (one + np.exp(-gate)) * up * one, cache


@suite.mutant(
    "swiglu_forward",
    "multiplies into the caller's array",
    killed_by="arguments_are_left_alone",
)
def gates_in_place(gate, up):
    result = right.swiglu_forward(gate, up)
    up *= _sigmoid(gate)
    return result


@suite.mutant("swiglu_backward", "silu' = σ only where σ is flat", killed_by=SWIGLU_DERIVATIVE)
def slope_of_the_logistic_forgotten(dout, cache):
    a, b, sigmoid = cache
    return SwigluGrads(dout * b * sigmoid, dout * a * sigmoid)


@suite.mutant("swiglu_backward", "σ (1 - σ) differentiates σ, not a σ", killed_by=SWIGLU_DERIVATIVE)
def derivative_of_the_logistic_alone(dout, cache):
    a, b, sigmoid = cache
    return SwigluGrads(dout * b * sigmoid * (1 - sigmoid), dout * a * sigmoid)


@suite.mutant(
    "swiglu_backward", "up is multiplied by silu(a), not by σ(a)", killed_by=SWIGLU_DERIVATIVE
)
def gradient_of_up_without_the_gate(dout, cache):
    right_one = right.swiglu_backward(dout, cache)
    return right_one._replace(up=dout * cache.sigmoid)
