"""Line by line means: these lines, in this order, and for each of their values its own gradient.

The lines of a pass stand here as a table. A value is nudged, the lines after it are computed again,
and what the result does is its gradient: no other knowledge of the mechanism enters.
"""

import numpy as np
from hypothesis import strategies as st

from minitransformer.attention.softmax import SoftmaxCache, softmax_backward
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.strategies import finite_rows, normal, seeds, sizes
from minitransformer.checks.suite import Suite

suite = Suite("steps")


def total(x):
    return x.sum(axis=-1, keepdims=True)


def largest(x):
    return np.take_along_axis(x, x.real.argmax(axis=-1)[..., None], axis=-1)


def row_softmax(scores):
    """By the definition; a row with nothing allowed has weights 0."""
    top = scores.real.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(scores - np.where(top == -np.inf, 0, top))
    return e / np.where(total(e) == 0, 1, total(e))


def one_over(c):
    return np.where(c == 0, 0, 1 / np.where(c == 0, 1, c))


SOFTMAX = {  # Eq. 1.11
    "maximum": lambda v: largest(v["scores"]),
    "shifted": lambda v: v["scores"] - v["maximum"],
    "exponentials": lambda v: np.exp(v["shifted"]),
    "total": lambda v: total(v["exponentials"]),
    "inverse": lambda v: 1 / v["total"],
    "weights": lambda v: v["exponentials"] * v["inverse"],
}
ATTENTION = {  # Eq. 2.7
    "products": lambda v: v["q"] @ np.swapaxes(v["k"], -1, -2),
    "scores": lambda v: np.where(v["keep"], v["scale"] * v["products"], -np.inf),
    "weights": lambda v: row_softmax(v["scores"]),
    "out": lambda v: v["weights"] @ v["v"],
}
RENORMALISE = {  # Eq. 4.14
    "kept": lambda v: v["weights"] * v["keep"],
    "total": lambda v: total(v["kept"]),
    "inverse": lambda v: one_over(v["total"]),
    "renormalised": lambda v: v["kept"] * v["inverse"],
}
CROSS_ENTROPY = {  # Eq. 16.17
    "maximum": lambda v: largest(v["logits"]),
    "shifted": lambda v: v["logits"] - v["maximum"],
    "exponentials": lambda v: np.exp(v["shifted"]),
    "total": lambda v: total(v["exponentials"]),
    "log_total": lambda v: np.log(v["total"]),
    "log_probabilities": lambda v: v["shifted"] - v["log_total"],
    "picked": lambda v: v["log_probabilities"][np.arange(len(v["targets"])), v["targets"]],
    "loss": lambda v: -v["picked"].mean(),
}


def follow(lines, values, moved=None, by=None):
    """All values; if one of them is `moved`, the lines after it are computed again and no other."""
    values = {**values} if moved is None else {**values, moved: by}
    after = moved not in lines
    for name, line in lines.items():
        if after:
            values[name] = line(values)
        after = after or name == moved
    return values


def assert_lines(steps, lines, given):
    expected = follow(lines, given)
    for name in steps._fields:
        assert_close(getattr(steps, name), expected[name], what=name)


def assert_every_gradient(gradients, lines, given, dout):
    """Each field of `gradients` against what nudging that value does to the last one."""
    values, last = follow(lines, given), list(lines)[-1]
    for name in gradients._fields[::-1]:  # last line first: the first wrong one is the one to mend

        def forward(name=name, **x):
            return follow(lines, values, name, x[name])[last]

        allowed = np.isfinite(values[name])
        x = {name: np.asarray(values[name])}
        gradient = {name: np.where(allowed, getattr(gradients, name), 0)}
        assert_gradients(forward, gradient, x, dout)


# ---- softmax: Eq. 1.11 ---------------------------------------------------------------------------


@suite.property("softmax_steps_forward", scores=finite_rows())
def softmax_is_these_seven_values(target, scores):
    """Eq. 1.11, value by value."""
    assert_lines(target.softmax_steps_forward(scores), SOFTMAX, {"scores": scores})


@suite.property("softmax_steps_forward", "softmax_steps_backward", scores=finite_rows(), seed=seeds)
def every_line_of_softmax_has_its_derivative(target, scores, seed):
    """The gradient of each value of Eq. 1.11: scores, maximum, shifted, exponentials, total,
    inverse, weights."""
    steps = target.softmax_steps_forward(scores)
    dweights = cotangent(steps.weights, seed)
    gradients = target.softmax_steps_backward(dweights, steps)
    assert_every_gradient(gradients, SOFTMAX, {"scores": scores}, dweights)


@suite.property("softmax_steps_forward", "softmax_steps_backward", scores=finite_rows(), seed=seeds)
def the_maximum_has_no_gradient_and_the_lines_fuse(target, scores, seed):
    """Shifting a row changes nothing, so dm = 0; the gradient of the scores is softmax's own."""
    steps = target.softmax_steps_forward(scores)
    dweights = cotangent(steps.weights, seed)
    gradients = target.softmax_steps_backward(dweights, steps)
    assert_close(gradients.maximum, np.zeros_like(steps.maximum), what="gradient of the maximum")
    fused = softmax_backward(dweights, SoftmaxCache(steps.weights, -1))
    assert_close(gradients.scores, fused, what="gradient of the scores")


# ---- attention: Eq. 2.7 --------------------------------------------------------------------------

attentions = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([(), (2,), (0,)]),
        "n": sizes,
        "m": sizes,
        "d": st.sampled_from([1, 3, 2]),
        "e": st.sampled_from([2, 1, 3]),
        "scale": st.sampled_from([0.7, 1.0, -0.3]),
        "masked": st.sampled_from([0.0, 0.4, 0.9]),
        "seed": seeds,
    }
)


def attention_case(case):
    batch, n, m, d, e, seed = (case[name] for name in ("batch", "n", "m", "d", "e", "seed"))
    keep = np.random.default_rng([seed, 4]).random((n, m)) >= case["masked"]
    return {
        "q": normal((*batch, n, d), seed),
        "k": normal((*batch, m, d), seed ^ 1),
        "v": normal((*batch, m, e), seed ^ 2),
        "scale": case["scale"],
        "keep": keep,
    }


@suite.property("attention_steps_forward", case=attentions)
def attention_is_these_seven_values(target, case):
    """Eq. 2.7, value by value; a query with nothing to read has weights 0."""
    given = attention_case(case)
    assert_lines(target.attention_steps_forward(**given), ATTENTION, given)


@suite.property("attention_steps_forward", "attention_steps_backward", case=attentions)
def every_line_of_attention_has_its_derivative(target, case):
    """The gradient of each value of Eq. 2.7: q, k, v, products, scores, weights, out."""
    given = attention_case(case)
    steps = target.attention_steps_forward(**given)
    dout = cotangent(steps.out, case["seed"])
    options = {"scale": given["scale"], "keep": given["keep"]}
    gradients = target.attention_steps_backward(dout, steps, **options)
    assert_every_gradient(gradients, ATTENTION, given, dout)


# ---- renormalised weights: Eq. 4.14 --------------------------------------------------------------


def dropped(scores, seed, share):
    return np.random.default_rng([seed, 3]).random(scores.shape) >= share


shares = st.sampled_from([0.4, 0.0, 0.9])


@suite.property("renormalise_steps_forward", scores=finite_rows(), seed=seeds, share=shares)
def renormalising_is_these_five_values(target, scores, seed, share):
    """Eq. 4.14, value by value; a row with nothing left stays 0."""
    given = {"weights": row_softmax(scores), "keep": dropped(scores, seed, share)}
    assert_lines(target.renormalise_steps_forward(**given), RENORMALISE, given)


@suite.property(
    "renormalise_steps_forward",
    "renormalise_steps_backward",
    scores=finite_rows(magnitude=st.sampled_from([0.5, 2.0])),
    seed=seeds,
    share=shares,
)
def every_line_of_renormalising_has_its_derivative(target, scores, seed, share):
    """The gradient of each value of Eq. 4.14: weights, kept, total, inverse, renormalised."""
    given = {"weights": row_softmax(scores), "keep": dropped(scores, seed, share)}
    steps = target.renormalise_steps_forward(**given)
    dout = cotangent(steps.renormalised, seed)
    gradients = target.renormalise_steps_backward(dout, steps, given["keep"])
    assert_every_gradient(gradients, RENORMALISE, given, dout)


@suite.property(
    "renormalise_steps_forward",
    "renormalise_steps_backward",
    scores=finite_rows(magnitude=st.sampled_from([0.5, 2.0])),
    seed=seeds,
    share=shares,
)
def renormalising_then_softmax_is_a_masked_softmax(target, scores, seed, share):
    """Gone back through both, a dropped score gets 0 and the others what softmax gives for the
    renormalised weights: the denominator has fused away."""
    weights, keep = row_softmax(scores), dropped(scores, seed, share)
    steps = target.renormalise_steps_forward(weights, keep)
    dout = cotangent(weights, seed)
    dweights = target.renormalise_steps_backward(dout, steps, keep).weights
    dscores = softmax_backward(dweights, SoftmaxCache(weights, -1))
    w = steps.renormalised
    assert_close(dscores, w * (dout - total(w * dout)), what="gradient of the scores")


# ---- cross-entropy: Eq. 16.17 --------------------------------------------------------------------

tables = st.fixed_dictionaries(
    {"rows": sizes, "classes": sizes, "seed": seeds, "scale": st.sampled_from([0.5, 3.0, 30.0])}
)


def table(case):
    shape = (case["rows"], case["classes"])
    logits = normal(shape, case["seed"], case["scale"])
    targets = np.random.default_rng([case["seed"], 5]).integers(0, shape[1], shape[0])
    return {"logits": logits, "targets": targets}


@suite.property("cross_entropy_steps_forward", case=tables)
def cross_entropy_is_these_nine_values(target, case):
    """Eq. 16.17, value by value."""
    assert_lines(target.cross_entropy_steps_forward(**table(case)), CROSS_ENTROPY, table(case))


@suite.property("cross_entropy_steps_forward", "cross_entropy_steps_backward", case=tables)
def every_line_of_cross_entropy_has_its_derivative(target, case):
    """The gradient of each value of Eq. 16.17, from the loss back to the logits, for a cotangent
    that is not 1."""
    given = table(case)
    steps = target.cross_entropy_steps_forward(**given)
    dloss = cotangent(steps.loss, case["seed"])
    gradients = target.cross_entropy_steps_backward(dloss, steps, given["targets"])
    assert_every_gradient(gradients, CROSS_ENTROPY, given, dloss)


@suite.property("cross_entropy_steps_forward", "cross_entropy_steps_backward", case=tables)
def cross_entropy_fuses_to_softmax_minus_one_hot(target, case):
    """Gone back through nine lines, what is left is (P - onehot) · dL / R, and dm = 0."""
    given = table(case)
    steps = target.cross_entropy_steps_forward(**given)
    gradients = target.cross_entropy_steps_backward(1.7, steps, given["targets"])
    one_hot = np.eye(case["classes"])[given["targets"]]
    expected = 1.7 * (row_softmax(given["logits"]) - one_hot) / case["rows"]
    assert_close(gradients.logits, expected, what="gradient of the logits")
    assert_close(gradients.maximum, np.zeros((case["rows"], 1)), what="gradient of the maximum")
