"""What stands between two linear maps must do: GELU in both forms, and the gate of SwiGLU."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes, entries
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import NotApplicable, Suite
from minitransformer.checks.tolerances import at_least

suite = Suite("nn.activations")

forms = st.sampled_from(["tanh", "erf"])
shapes = st.sampled_from([(7,), (2, 3), (1, 1), (3, 1, 5), (0,), (2, 0, 3)])
# ±1e4 is far beyond 710, where an exponential overflows
magnitudes = st.sampled_from([1.0, 0.1, 30.0, 1e4])


def logistic(u):
    """1 / (1 + e^-u), entry by entry, by whichever exponential cannot overflow."""
    return np.reshape(
        [1 / (1 + math.exp(-v)) if v > 0 else math.exp(v) / (1 + math.exp(v)) for v in u.ravel()],
        u.shape,
    )


def gelu(x, form):
    """x Φ(x) by the complementary error function, or x times a logistic function: ½(1 + tanh u) =
    1 / (1 + e^-2u)."""
    if form == "erf":
        return x * np.reshape([math.erfc(-v / math.sqrt(2)) / 2 for v in x.ravel()], x.shape)
    return x * logistic(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


# ---- GELU: Eq. 16.8, Eq. 16.9, Eq. 16.11 ---------------------------------------------------------


@suite.property("gelu_forward", shape=shapes, seed=seeds, scale=magnitudes)
def exact_gelu_is_x_times_the_normal_distribution_function(target, shape, seed, scale):
    """Eq. 16.8, against the complementary error function."""
    x = entries(shape, seed, scale)
    out, _ = target.gelu_forward(x, form="erf")
    assert_close(out, gelu(x, "erf"), what="GELU by erf")


@suite.property("gelu_forward", shape=shapes, seed=seeds, scale=magnitudes)
def gelu_by_tanh_is_x_times_a_logistic_function(target, shape, seed, scale):
    """Eq. 16.9, without a tanh; and it is the form of who does not ask for one."""
    x = entries(shape, seed, scale)
    out, _ = target.gelu_forward(x, form="tanh")
    assert_close(out, gelu(x, "tanh"), what="GELU by tanh")
    assert np.array_equal(target.gelu_forward(x)[0], out), "tanh is not the default"


@suite.property("gelu_forward", shape=shapes, seed=seeds, scale=magnitudes, form=forms)
def the_two_sides_of_gelu_differ_by_x(target, shape, seed, scale, form):
    """gelu(x) - gelu(-x) = x, because Φ(x) + Φ(-x) = 1; and gelu(0) = 0."""
    x = entries(shape, seed, scale)
    right, left = (target.gelu_forward(side, form=form)[0] for side in (x, -x))
    assert_close(right - left, x, what="gelu(x) - gelu(-x)")
    assert target.gelu_forward(np.zeros(1), form=form)[0] == 0


@suite.property("gelu_forward", start=st.floats(0, 0.01))
def the_two_forms_of_gelu_are_near_and_not_the_same(target, start):
    """Eq. 16.8 and Eq. 16.9 differ by more than 4e-4 somewhere and by 5e-4 nowhere."""
    if at_least(0) > 1e-4:
        raise NotApplicable("the two forms differ by less than this dtype can tell")
    x = np.arange(-900, 900) / 100 + start
    exact, approximate = (target.gelu_forward(x, form=form)[0] for form in ("erf", "tanh"))
    gap = np.abs(exact - approximate).max()
    assert 4e-4 < gap < 5e-4 + at_least(0), f"the two forms differ by up to {gap:.1e}"


@suite.property(
    "gelu_forward", "gelu_backward", shape=shapes, seed=seeds, scale=magnitudes, form=forms
)
def gelu_backward_is_the_derivative(target, shape, seed, scale, form):
    """Eq. 16.11 against the complex step; for the real error function, against differences."""
    x = entries(shape, seed, scale)
    out, cache = target.gelu_forward(x, form=form)
    dout = cotangent(out, seed)
    assert_gradients(
        lambda x: target.gelu_forward(x, form=form)[0],
        {"x": target.gelu_backward(dout, cache)},
        {"x": x},
        dout,
    )


# ---- SwiGLU: Eq. 16.10, Eq. 16.12 ----------------------------------------------------------------


@suite.property("swiglu_forward", shape=shapes, seed=seeds, scale=magnitudes)
def swiglu_is_up_times_gate_times_its_logistic(target, shape, seed, scale):
    """Eq. 16.10: finite for any gate, where e^-a has long overflown."""
    gate, up = entries(shape, seed, scale), entries(shape, seed ^ 1)
    out, _ = target.swiglu_forward(gate, up)
    assert_close(out, up * gate * logistic(gate), what="SwiGLU")


@suite.property("swiglu_forward", shape=shapes, seed=seeds, scale=magnitudes)
def swiglu_is_linear_in_up_and_its_two_sides_differ_by_the_gate(target, shape, seed, scale):
    """swiglu(a, s·b) = s·swiglu(a, b), and silu(a) - silu(-a) = a."""
    gate, up = entries(shape, seed, scale), entries(shape, seed ^ 1)
    out, _ = target.swiglu_forward(gate, up)
    assert_close(target.swiglu_forward(gate, -3 * up)[0], -3 * out, what="swiglu(a, -3 b)")
    left, _ = target.swiglu_forward(-gate, up)
    assert_close(out - left, gate * up, what="swiglu(a, b) - swiglu(-a, b)")


@suite.property("swiglu_forward", "swiglu_backward", shape=shapes, seed=seeds, scale=magnitudes)
def swiglu_backward_is_the_derivative(target, shape, seed, scale):
    """Eq. 16.12 against the complex step, for the gate and for what it lets through."""
    gate, up = entries(shape, seed, scale), entries(shape, seed ^ 1)
    out, cache = target.swiglu_forward(gate, up)
    dout = cotangent(out, seed)
    grads = target.swiglu_backward(dout, cache)
    assert_gradients(
        lambda gate, up: target.swiglu_forward(gate, up)[0],
        {"gate": grads.gate, "up": grads.up},
        {"gate": gate, "up": up},
        dout,
    )


# ---- numbers and memory --------------------------------------------------------------------------


@suite.property("gelu_forward", "swiglu_forward", seed=seeds, dtype=dtypes, form=forms)
def narrow_numbers_are_rounded_once(target, seed, dtype, form):
    """The dtype of x comes out, computed wide and stored narrow once."""
    x, up = (normal((4, 25), seed ^ n, 2.0).astype(DTYPES[dtype]) for n in range(2))
    x_, up_ = x.astype(np.float64), up.astype(np.float64)
    for name, out, expected in (
        ("GELU", target.gelu_forward(x, form=form)[0], gelu(x_, form)),
        ("SwiGLU", target.swiglu_forward(x, up)[0], up_ * x_ * logistic(x_)),
    ):
        assert_rounded_once(out, expected, dtype, name)


@suite.property(
    "gelu_forward", "gelu_backward", "swiglu_forward", "swiglu_backward",
    shape=shapes, seed=seeds, form=forms,
)  # fmt: skip
def arguments_are_left_alone(target, shape, seed, form):
    """No array of the caller is modified, and one cache serves twice."""
    x, up, dout = (entries(shape, seed ^ n) for n in range(3))
    before = [a.copy() for a in (x, up, dout)]
    _, one = target.gelu_forward(x, form=form)
    _, other = target.swiglu_forward(x, up)
    first, second = (
        [target.gelu_backward(dout, one), *target.swiglu_backward(dout, other)] for _ in range(2)
    )
    for a, b in zip((x, up, dout), before, strict=True):
        assert np.array_equal(a, b), "an argument was modified"
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a, b), "the second backward differs from the first"
