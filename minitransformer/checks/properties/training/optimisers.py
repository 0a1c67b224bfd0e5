"""What AdamW does to every number it updates, and what clipping may do to a gradient."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close
from minitransformer.checks.properties.nn import DTYPES
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.nn.module import Parameter

suite = Suite("training.optimisers")

shapes = st.sampled_from([(3,), (2, 5), (), (1,), (0, 3), (2, 1, 3)])
updates = st.sampled_from([3, 1, 7])
options = st.fixed_dictionaries({
    "rate": st.sampled_from([1e-2, 1.0, 3e-4, 0.0]),
    "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.9, 0.5), (0.0, 0.99), (0.9, 0.0)]),
    "weight_decay": st.sampled_from([0.1, 0.0, 2.0]),
    "eps": st.sampled_from([1e-8, 1e-2]),
})  # fmt: skip


def gradients(shape, seed, steps, scale=1.0):
    """A gradient for each step, of unlike sizes: an entry's moments forget and remember."""
    rng = np.random.default_rng([seed, 9])
    sizes = 10.0 ** rng.integers(-3, 3, (steps, *shape))
    return normal((steps, *shape), seed) * sizes * scale


def run(target, value, grads, **given):
    """Update by one gradient after another, and give what each update gave."""
    mean, square = np.zeros_like(value), np.zeros_like(value)
    trace = []
    for step, grad in enumerate(grads, start=1):
        new = target.adamw_update(value, np.asarray(grad), mean, square, step=step, **given)
        value, mean, square = new.value, new.mean, new.square
        trace.append(new)
    return trace


# ---- one array: Eq. 16.20, Eq. 16.21 -------------------------------------------------------------


@suite.property("adamw_update", shape=shapes, seed=seeds, steps=updates, given=options)
def updates_are_those_of_a_loop_over_numbers(target, shape, seed, steps, given):
    """Eq. 16.20 and Eq. 16.21, stated for one number at a time and one step after the other."""
    value, grads = normal(shape, seed ^ 1), gradients(shape, seed, steps)
    trace = run(target, value, grads, **given)
    rate, decay, eps = given["rate"], given["weight_decay"], given["eps"]
    beta1, beta2 = given["betas"]
    for at in np.ndindex(shape):
        theta, m, s = float(value[at]), 0.0, 0.0
        for t, new in enumerate(trace, start=1):
            g = float(grads[t - 1][at])
            m = beta1 * m + (1 - beta1) * g
            s = beta2 * s + (1 - beta2) * g**2
            m_hat, s_hat = m / (1 - beta1**t), s / (1 - beta2**t)
            theta = theta - rate * decay * theta
            theta = theta - rate * m_hat / (math.sqrt(s_hat) + eps)
            assert_close(new.mean[at], m, what=f"mean after {t}")
            assert_close(new.square[at], s, what=f"square after {t}")
            assert_close(new.value[at], theta, what=f"value after {t}")
    for new in trace:
        assert new.value.shape == new.mean.shape == new.square.shape == shape


@suite.property("adamw_update", shape=shapes, seed=seeds, given=options)
def the_first_update_moves_every_number_by_the_rate(target, shape, seed, given):
    """Unbiased, the first moments are g and g²: the step is the rate times g / (|g| + ε), its
    sign where |g| is well above ε, whatever the betas."""
    value, grad = normal(shape, seed ^ 1), gradients(shape, seed, 1)[0]
    new = run(target, value, [grad], **{**given, "weight_decay": 0.0})[0]
    expected = given["rate"] * grad / (np.abs(grad) + given["eps"])
    assert_close(value - new.value, expected)


@suite.property("adamw_update", shape=shapes, seed=seeds, steps=updates, given=options)
def a_gradient_that_stays_gives_steps_that_stay(target, shape, seed, steps, given):
    """m̂ = g and ŝ = g² at every step, so every step is the first: what the bias correction is
    for."""
    value, grad = normal(shape, seed ^ 1), gradients(shape, seed, 1)[0]
    trace = run(target, value, [grad] * steps, **{**given, "weight_decay": 0.0})
    step = given["rate"] * grad / (np.abs(grad) + given["eps"])
    for t, new in enumerate(trace, start=1):
        assert_close(new.value, value - t * step, tolerance=1e-11)


@suite.property(
    "adamw_update",
    shape=shapes,
    seed=seeds,
    steps=updates,
    given=options,
    factor=st.sampled_from([1e-6, 1e3, 7.0]),
)
def the_size_of_the_loss_does_not_matter(target, shape, seed, steps, given, factor):
    """With ε = 0, gradients a thousand times larger give the same updates, decay included."""
    given = {**given, "eps": 0.0}
    value, grads = normal(shape, seed ^ 1), gradients(shape, seed, steps)
    grads = np.where(grads == 0, 1.0, grads)  # 0 / 0
    moved = run(target, value, grads * factor, **given)[-1]
    assert_close(moved.value, run(target, value, grads, **given)[-1].value, tolerance=1e-10)


@suite.property("adamw_update", shape=shapes, seed=seeds, steps=updates, given=options)
def decay_acts_on_the_weight_and_not_through_the_gradient(target, shape, seed, steps, given):
    """Decay takes the same share of the weight whatever the gradient, and the moments never hear of
    it; without a gradient the weight shrinks by 1 - ηλ a step."""
    value, grads = normal(shape, seed ^ 1), gradients(shape, seed, steps)
    with_decay = run(target, value, grads, **given)
    without = run(target, value, grads, **{**given, "weight_decay": 0.0})
    for a, b in zip(with_decay, without, strict=True):
        assert_close(a.mean, b.mean, what="mean")
        assert_close(a.square, b.square, what="square")
    share = given["rate"] * given["weight_decay"]
    assert_close(without[0].value - with_decay[0].value, share * value, what="what decay took")
    silent = run(target, value, grads * 0, **given)
    assert_close(silent[-1].value, value * (1 - share) ** steps, what="without a gradient")


@suite.property("adamw_update", shape=shapes, seed=seeds, given=options)
def an_update_changes_nothing_in_place(target, shape, seed, given):
    """Value, gradient and moments are left as they were, and no result shares their memory."""
    before = [normal(shape, seed ^ k) for k in range(4)]
    before[3] = np.asarray(before[3] ** 2)
    used = [x.copy() for x in before]
    new = target.adamw_update(*used, step=3, **given)
    for x, y in zip(used, before, strict=True):
        assert np.array_equal(x, y), "an argument was changed"
        assert not any(np.shares_memory(x, z) for z in new)


@suite.property("adamw_update", seed=seeds, given=options)
def narrow_weights_have_narrow_moments(target, seed, given):
    """float32 in, float32 out: a checkpoint has the size of three models, not of five."""
    value, grads = normal((2, 5), seed ^ 1), gradients((2, 5), seed, 3)
    wide = run(target, value, grads, **given)[-1]
    narrow = run(target, value.astype(np.float32), grads.astype(np.float32), **given)[-1]
    for x, y in zip(narrow, wide, strict=True):
        assert x.dtype == np.float32
        assert_close(x.astype(np.float64), y, tolerance=1e-5)


# ---- a model -------------------------------------------------------------------------------------

MODEL = {
    "matrix": ((2, 3), True),
    "bias": ((3,), False),
    "scale": ((), False),
    "none": ((0,), True),
}


def model_of(seed, scale=1.0, dtype=np.float64):
    """Parameters of several shapes, those with two axes to decay, with a gradient each."""
    found = {}
    for k, (name, (shape, decay)) in enumerate(MODEL.items()):
        found[name] = Parameter(normal(shape, seed ^ k, scale).astype(dtype), decay=decay)
        found[name].grad[...] = normal(shape, seed ^ (k + 16), scale)
    return found


def renew(parameters, seed):
    for k, p in enumerate(parameters.values()):
        p.grad[...] = normal(p.grad.shape, seed ^ (k + 32))


def bits(parameters):
    return {name: p.value.tobytes() for name, p in parameters.items()}


@suite.property("AdamW", "adamw_update", seed=seeds, steps=updates, given=options)
def every_parameter_is_updated_with_the_same_count(target, seed, steps, given):
    """The optimiser's step is `adamw_update` of each parameter, with one t for all, in the array
    that the model holds; decay only for those that ask for it."""
    given = dict(given)
    rate, decay = given.pop("rate"), given.pop("weight_decay")
    parameters = model_of(seed)
    held = {name: p.value for name, p in parameters.items()}
    expected = {name: (p.value, np.zeros(p.value.shape), np.zeros(p.value.shape))
                for name, p in parameters.items()}  # fmt: skip
    optimiser = target.AdamW(parameters, weight_decay=decay, **given)
    for t in range(1, steps + 1):
        renew(parameters, seed ^ (t << 8))
        for name, p in parameters.items():
            value, mean, square = expected[name]
            expected[name] = target.adamw_update(
                value.copy(),
                p.grad,
                mean,
                square,
                step=t,
                rate=rate,
                weight_decay=decay if p.decay else 0.0,
                **given,
            )
        optimiser.step(rate)
    for name, p in parameters.items():
        assert p.value is held[name], f"{name} is another array: who shares it does not learn"
        assert_close(p.value, expected[name][0], what=name)


@suite.property("AdamW", seed=seeds, before=st.sampled_from([2, 0, 5]), after=updates)
def an_optimiser_read_back_goes_on_as_if_never_stopped(target, seed, before, after):
    """From the weights and `state()` alone, the next updates are the same bits; the state is a
    value, which neither goes on with the optimiser nor with who reads it."""

    def advance(parameters, optimiser, first, count):
        for t in range(first, first + count):
            renew(parameters, seed ^ (t << 8))
            optimiser.step(0.01)

    whole = model_of(seed)
    optimiser = target.AdamW(whole, weight_decay=0.1)
    advance(whole, optimiser, 0, before)
    state = optimiser.state()
    kept = {name: np.array(x) for name, x in state.items()}
    parts = model_of(seed)
    for name, p in parts.items():
        p.value[...] = whole[name].value
    advance(whole, optimiser, before, after)

    other = target.AdamW(parts, weight_decay=0.1)
    other.load_state(state)
    advance(parts, other, before, after)
    assert bits(parts) == bits(whole)
    # back to an earlier state: one that was given away in between stays what it is
    given = other.state()
    later = {name: np.array(x) for name, x in given.items()}
    other.load_state(kept)
    for x, copy in ((state, kept), (given, later)):
        assert all(np.array_equal(x[name], copy[name]) for name in copy), "the state has moved on"


@suite.property("AdamW", seed=seeds, dtype=st.sampled_from(["bfloat16", "float16"]))
def small_updates_of_narrow_weights_add_up(target, seed, dtype):
    """A weight stored narrow is the rounded weight of a run in float32: a hundred updates by less
    than half a unit of it are not lost. Moments are those of float32; a run read back ends with
    the same bits."""
    narrow, wide = (model_of(seed, dtype=t) for t in (DTYPES[dtype], np.float32))
    for name, p in wide.items():
        p.value[...] = narrow[name].value
    runs = [(x, target.AdamW(x, weight_decay=0.1)) for x in (narrow, wide)]

    def advance(parameters, optimiser, first, count):
        for t in range(first, first + count):
            renew(parameters, seed ^ (t // 50 << 8))
            optimiser.step(1e-4)

    for parameters, optimiser in runs:
        advance(parameters, optimiser, 0, 100)
    for name, p in narrow.items():
        assert p.value.dtype == DTYPES[dtype], f"{name} in {p.value.dtype}"
        assert p.grad.dtype == np.float32, f"gradient of {name} in {p.grad.dtype}"
        expected = wide[name].value.astype(DTYPES[dtype]).astype(np.float64)
        assert np.array_equal(p.value.astype(np.float64), expected), f"{name}: updates are lost"
    (_, optimiser), (_, right) = runs
    for name in MODEL:
        for got, expected in ((optimiser.mean, right.mean), (optimiser.square, right.square)):
            assert got[name].dtype == np.float32 and np.array_equal(got[name], expected[name])
    other = model_of(seed, dtype=DTYPES[dtype])
    again = target.AdamW(other, weight_decay=0.1)
    again.load_state({name: np.array(x) for name, x in optimiser.state().items()})
    advance(other, again, 100, 60)
    advance(narrow, optimiser, 100, 60)
    assert bits(other) == bits(narrow), "read back it goes on another way"


# ---- clipping: Eq. 16.22 -------------------------------------------------------------------------

limits = st.sampled_from([1.0, 0.1, 5.0])
scales = st.sampled_from([1.0, 1e-2, 1e4])


def norm_of(parameters):
    entries = [x for p in parameters.values() for x in p.grad.ravel().tolist()]
    return math.sqrt(math.fsum(x * x for x in entries))


@suite.property("gradient_norm", seed=seeds, scale=scales, dtype=st.sampled_from(["f8", "f4"]))
def the_norm_is_over_all_arrays_together(target, seed, scale, dtype):
    """The root of the sum of every entry's square, in float64 whatever the gradients are."""
    parameters = model_of(seed, scale, dtype)
    expected = norm_of(parameters)
    assert abs(target.gradient_norm(parameters) - expected) <= 1e-13 * expected
    assert target.gradient_norm({}) == 0
    parameters["matrix"].grad[...] *= 1e30 / scale  # its square is no float32
    expected = norm_of(parameters)
    assert abs(target.gradient_norm(parameters) - expected) <= 1e-13 * expected


@suite.property("clip", seed=seeds, scale=scales, limit=limits)
def all_gradients_shrink_by_the_one_factor(target, seed, scale, limit):
    """Eq. 16.22, with the norm before it returned: one factor, so the direction stays."""
    parameters = model_of(seed, scale)
    before, norm = {name: p.grad.copy() for name, p in parameters.items()}, norm_of(parameters)
    returned = target.clip(parameters, limit)
    assert abs(returned - norm) <= 1e-12 * norm, "not the norm before clipping"
    factor = min(1.0, limit / (norm + 1e-6))
    for name, p in parameters.items():
        assert_close(p.grad, before[name] * factor, what=name)


@suite.property("clip", seed=seeds, scale=scales, limit=limits)
def clipping_never_lengthens_and_twice_is_once(target, seed, scale, limit):
    """The norm after is at most the limit, and at most the norm before; a second time changes
    nothing to speak of."""
    parameters = model_of(seed, scale)
    before = norm_of(parameters)
    target.clip(parameters, limit)
    after = norm_of(parameters)
    assert after <= min(limit, before) * (1 + 1e-12)
    target.clip(parameters, limit)
    assert abs(norm_of(parameters) - after) <= 1e-5 * after


@suite.property("clip", seed=seeds, scale=scales)
def a_gradient_within_the_limit_keeps_its_bits(target, seed, scale):
    """At most `limit` long, or no limit at all (0): nothing is touched, and the norm is still
    said."""
    parameters = model_of(seed, scale)
    before, norm = {name: p.grad.copy() for name, p in parameters.items()}, norm_of(parameters)
    for limit in (norm * 1.5, 0.0):
        assert abs(target.clip(parameters, limit) - norm) <= 1e-12 * norm
        for name, p in parameters.items():
            assert np.array_equal(p.grad, before[name])


@suite.property("clip", seed=seeds, bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def a_norm_that_is_not_finite_is_reported_and_nothing_is_touched(target, seed, bad):
    """The caller skips the step by what is returned; one bad entry does not spread to the rest."""
    parameters = model_of(seed)
    parameters["bias"].grad[1] = bad
    before = {name: p.grad.copy() for name, p in parameters.items()}
    assert not math.isfinite(target.clip(parameters, 1.0))
    for name, p in parameters.items():
        assert np.array_equal(p.grad, before[name], equal_nan=True)
