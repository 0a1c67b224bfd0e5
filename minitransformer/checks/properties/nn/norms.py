"""What normalising each row must do: LayerNorm and RMSNorm."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes, entries
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype, working_dtype

suite = Suite("nn.norms")

shapes = st.sampled_from([(3, 5), (7,), (2, 3, 2), (4, 1), (1, 1, 3), (0, 3), (2, 0, 5)])
scales = st.sampled_from([1.0, 3.0, 0.01])  # at 0.01 the variance is small beside ε
epsilons = st.sampled_from([None, 0.1, 1e-3])  # None: the default, 1e-5 and 1e-6
# of the derivatives: a norm bends on the scale √ε, and a target that takes no complex numbers is
# asked for differences that must not step over the bend
smooth = st.sampled_from([0.1, 0.5])
offsets = st.sampled_from([0.0, 1.0])


def inputs(shape, seed, scale=1.0):
    """x, γ and β."""
    width = shape[-1:]
    return entries(shape, seed, scale), normal(width, seed ^ 1), normal(width, seed ^ 2)


def eighths(shape, seed):
    """Multiples of 1/8: a shift by a whole number is exact, and so is their sum."""
    return np.round(8 * entries(shape, seed)) / 8


def given(eps):
    return {} if eps is None else {"eps": eps}


def by_rows(x, gain, beta, eps, *, centred):
    """Row by row with exact sums: subtract the mean (of a LayerNorm), divide by the root of the
    mean square plus ε."""
    out = np.empty(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        row = [float(a) for a in x[index]]
        mean = math.fsum(row) / len(row) if centred else 0.0
        square = math.fsum((a - mean) ** 2 for a in row) / len(row)
        out[index] = [(a - mean) / math.sqrt(square + eps) for a in row]
    return out * gain + beta


# ---- LayerNorm: Eq. 16.4, Eq. 16.5 ---------------------------------------------------------------


@suite.property("layer_norm_forward", shape=shapes, seed=seeds, scale=scales, eps=epsilons)
def layer_norm_is_its_definition_row_by_row(target, shape, seed, scale, eps):
    """Eq. 16.4 by loops and exact sums; ε is 1e-5 for who gives none."""
    x, gamma, beta = inputs(shape, seed, scale)
    out, _ = target.layer_norm_forward(x, gamma, beta, **given(eps))
    expected = by_rows(x, gamma, beta, 1e-5 if eps is None else eps, centred=True)
    assert_close(out, expected, what="LayerNorm")


@suite.property("layer_norm_forward", shape=shapes, seed=seeds, scale=scales, eps=epsilons)
def layer_norm_rows_have_mean_zero_and_variance_one(target, shape, seed, scale, eps):
    """With γ = 1 and β = 0 a row of variance v gets mean 0 and variance v / (v + ε): almost 1."""
    x = entries(shape, seed, scale)
    one, zero = np.ones(shape[-1:]), np.zeros(shape[-1:])
    out, _ = target.layer_norm_forward(x, one, zero, **given(eps))
    assert_close(out.mean(axis=-1), np.zeros(shape[:-1]), what="mean of a row")
    v, e = x.var(axis=-1), 1e-5 if eps is None else eps
    assert_close(out.var(axis=-1), v / (v + e), what="variance of a row")


@suite.property(
    "layer_norm_forward", shape=shapes, seed=seeds, eps=st.sampled_from([1e-5, 0.1]),
    scale=st.sampled_from([1.0, 8.0, -2.0, 0.5]), shift=st.sampled_from([3, 0, -(2**20)]),
)  # fmt: skip
def layer_norm_forgets_shift_and_scale(target, shape, seed, eps, scale, shift):
    """LN(s x + c) with ε s² is ±LN(x) with ε, however far away c is."""
    x, one, zero = eighths(shape, seed), np.ones(shape[-1:]), np.zeros(shape[-1:])
    wide = working_dtype() == "float64"
    if not wide:  # as far as narrow numbers tell eighths apart
        shift = max(shift, -64 if working_dtype() == "float32" else -3)
    out, _ = target.layer_norm_forward(x, one, zero, eps=eps)
    moved, _ = target.layer_norm_forward(scale * x + shift, one, zero, eps=eps * scale**2)
    # the mean of large numbers is rounded in units of their size; a row spreads by 1/46 at least
    tolerance = 1e-12 + 120 * abs(shift) * 2.0 ** (-52 if wide else -23)
    assert_close(moved, math.copysign(1, scale) * out, tolerance, what="LN(s x + c)")


@suite.property(
    "layer_norm_forward",
    "rms_norm_forward",
    shape=shapes,
    seed=seeds,
    eps=st.sampled_from([0, 0.1]),
)
def constant_rows_become_beta_and_zero_rows_zero(target, shape, seed, eps):
    """Nothing divided by nothing is nothing, with ε = 0 as well; a width of 1 gives β always."""
    _, gamma, beta = inputs(shape, seed)
    x = np.broadcast_to(eighths((*shape[:-1], 1), seed), shape)
    out, _ = target.layer_norm_forward(x, gamma, beta, eps=eps)
    assert_close(out, np.broadcast_to(beta, shape), what="LayerNorm of constant rows")
    out, _ = target.rms_norm_forward(np.zeros(shape), gamma, eps=eps)
    assert_close(out, np.zeros(shape), what="RMSNorm of zeros")


@suite.property(
    "layer_norm_forward", "layer_norm_backward", shape=shapes, seed=seeds, eps=smooth,
    scale=st.sampled_from([1.0, 0.1, 30.0]),
)  # fmt: skip
def layer_norm_backward_is_the_derivative(target, shape, seed, eps, scale):
    """Eq. 16.5 against the complex step, for x, γ and β."""
    x, gamma, beta = inputs(shape, seed, scale)
    out, cache = target.layer_norm_forward(x, gamma, beta, eps=eps)
    dout = cotangent(out, seed)
    grads = target.layer_norm_backward(dout, cache)
    assert_gradients(
        lambda x, gamma, beta: target.layer_norm_forward(x, gamma, beta, eps=eps)[0],
        {"x": grads.x, "gamma": grads.gamma, "beta": grads.beta},
        {"x": x, "gamma": gamma, "beta": beta},
        dout,
    )


# ---- RMSNorm: Eq. 16.6, Eq. 16.7 -----------------------------------------------------------------


@suite.property(
    "rms_norm_forward", shape=shapes, seed=seeds, scale=scales, eps=epsilons, offset=offsets
)
def rms_norm_is_its_definition_row_by_row(target, shape, seed, scale, eps, offset):
    """Eq. 16.6 by loops and exact sums; ε is 1e-6 and the offset 0 for who gives none."""
    x, gamma, _ = inputs(shape, seed, scale)
    options = given(eps) | ({"offset": offset} if offset else {})
    out, _ = target.rms_norm_forward(x, gamma, **options)
    expected = by_rows(x, gamma + offset, 0.0, 1e-6 if eps is None else eps, centred=False)
    assert_close(out, expected, what="RMSNorm")


@suite.property(
    "rms_norm_forward", shape=shapes, seed=seeds, eps=st.sampled_from([1e-6, 0.1]),
    scale=st.sampled_from([1.0, 8.0, -2.0, 0.5]),
)  # fmt: skip
def rms_norm_forgets_scale_but_not_shift(target, shape, seed, eps, scale):
    """A row of mean square q gets q / (q + ε), its mean left where it is; RMS(s x) with ε s² is
    ±RMS(x) with ε."""
    x, one = 2 + entries(shape, seed), np.ones(shape[-1:])
    out, _ = target.rms_norm_forward(x, one, eps=eps)
    q = (x * x).mean(axis=-1)
    assert_close((out * out).mean(axis=-1), q / (q + eps), what="mean square of a row")
    assert_close(out.mean(axis=-1), x.mean(axis=-1) / np.sqrt(q + eps), what="mean of a row")
    scaled, _ = target.rms_norm_forward(scale * x, one, eps=eps * scale**2)
    assert_close(scaled, math.copysign(1, scale) * out, what="RMS(s x)")


@suite.property(
    "rms_norm_forward", "rms_norm_backward", shape=shapes, seed=seeds, eps=smooth, offset=offsets,
    scale=st.sampled_from([1.0, 0.1, 30.0]),
)  # fmt: skip
def rms_norm_backward_is_the_derivative(target, shape, seed, eps, offset, scale):
    """Eq. 16.7 against the complex step, for x and γ, with an offset and without."""
    x, gamma, _ = inputs(shape, seed, scale)
    out, cache = target.rms_norm_forward(x, gamma, eps=eps, offset=offset)
    dout = cotangent(out, seed)
    grads = target.rms_norm_backward(dout, cache)
    assert_gradients(
        lambda x, gamma: target.rms_norm_forward(x, gamma, eps=eps, offset=offset)[0],
        {"x": grads.x, "gamma": grads.gamma},
        {"x": x, "gamma": gamma},
        dout,
    )


# ---- numbers and memory --------------------------------------------------------------------------


@suite.property(
    "layer_norm_forward", "rms_norm_forward", seed=seeds, dtype=dtypes,
    scale=st.sampled_from([1.0, 400.0]),
)  # fmt: skip
def narrow_numbers_are_rounded_once(target, seed, dtype, scale):
    """The dtype of x comes out, computed wide and stored narrow once: a square of 400 is no float16
    number."""
    x, gamma, beta = (a.astype(DTYPES[dtype]) for a in inputs((4, 25), seed, scale))
    x_, gamma_, beta_ = (a.astype(np.float64) for a in (x, gamma, beta))
    out, _ = target.layer_norm_forward(x, gamma, beta)
    assert_rounded_once(out, by_rows(x_, gamma_, beta_, 1e-5, centred=True), dtype, "LayerNorm")
    out, _ = target.rms_norm_forward(x, gamma)
    assert_rounded_once(out, by_rows(x_, gamma_, 0.0, 1e-6, centred=False), dtype, "RMSNorm")


@suite.property(
    "layer_norm_forward", "layer_norm_backward", "rms_norm_forward", "rms_norm_backward",
    seed=seeds, dtype=dtypes,
)  # fmt: skip
def gradients_of_parameters_are_summed_wide(target, seed, dtype):
    """Over 3000 rows dγ and dβ of narrow numbers are those of wide ones: a bfloat16 sum of ones
    ends at 256."""
    x, gamma, beta = (a.astype(DTYPES[dtype]) for a in inputs((3000, 3), seed))
    dout = (1 + entries((3000, 3), seed ^ 3, 0.1)).astype(DTYPES[dtype])
    for name, backward, parameters in (
        ("layer_norm", target.layer_norm_backward, (gamma, beta)),
        ("rms_norm", target.rms_norm_backward, (gamma,)),
    ):
        forward = getattr(target, f"{name}_forward")
        narrow = backward(dout, forward(x, *parameters)[1])[1:]
        x_, *wider = (a.astype(np.float64) for a in (x, *parameters))
        wide = backward(dout.astype(np.float64), forward(x_, *wider)[1])[1:]
        tolerance = of_dtype("float64" if dtype == "float64" else "float32")
        for got, expected, parameter in zip(narrow, wide, ("γ", "β"), strict=False):
            assert_close(got, expected, tolerance, what=f"{name}: gradient of {parameter}")


@suite.property(
    "layer_norm_forward", "layer_norm_backward", "rms_norm_forward", "rms_norm_backward",
    shape=shapes, seed=seeds,
)  # fmt: skip
def arguments_are_left_alone(target, shape, seed):
    """No array of the caller is modified, and one cache serves twice."""
    arrays = (*inputs(shape, seed), entries(shape, seed ^ 3))
    before = [a.copy() for a in arrays]
    x, gamma, beta, dout = arrays
    _, layer = target.layer_norm_forward(x, gamma, beta)
    _, rms = target.rms_norm_forward(x, gamma, offset=1.0)
    first, second = (
        [*target.layer_norm_backward(dout, layer), *target.rms_norm_backward(dout, rms)]
        for _ in range(2)
    )
    for a, b in zip(arrays, before, strict=True):
        assert np.array_equal(a, b), "an argument was modified"
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a, b), "the second backward differs from the first"
