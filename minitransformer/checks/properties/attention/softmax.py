"""What a correct softmax does, and its relatives: log-sum-exp, log-softmax, the online merge, the
soft-cap."""

import numpy as np
from hypothesis import strategies as st

from minitransformer.attention.softmax import Partial
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.strategies import (
    finite_rows,
    held,
    normal,
    reachable,
    rows,
    seeds,
    sizes,
)
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import at_least

suite = Suite("attention.softmax")


# ---- softmax: Eq. 1.1, Eq. 1.2 -------------------------------------------------------------------


@suite.property("softmax_forward", scores=rows())
def weights_sum_to_one_or_to_zero(target, scores):
    """Each row of weights sums to 1, or to exactly 0 if nothing is allowed."""
    weights, _ = target.softmax_forward(scores)
    assert weights.shape == scores.shape
    dead = (scores == -np.inf).all(axis=-1)
    assert (weights[dead] == 0).all(), "a dead row has weights other than 0"
    assert_close(weights.sum(axis=-1), np.where(dead, 0.0, 1.0), what="row sums")
    assert (weights >= 0).all()


@suite.property("softmax_forward", scores=finite_rows(), shift=st.floats(-700, 700))
def a_common_shift_changes_nothing(target, scores, shift):
    """softmax(x + c) = softmax(x)."""
    moved, shift = held(scores + held(shift)), held(shift)  # a narrow sum is rounded already
    expected = target.softmax_forward(moved - shift)[0]
    assert_close(target.softmax_forward(moved)[0], expected, tolerance=1e-11)


@suite.property("softmax_forward", scores=finite_rows())
def ratios_are_exponentials_of_differences(target, scores):
    """y_j / y_k = exp(x_j - x_k): Eq. 1.1, compared against the row's largest entry."""
    weights, _ = target.softmax_forward(scores)
    top = scores.argmax(axis=-1)[..., None]
    largest = np.take_along_axis(weights, top, axis=-1)
    difference = scores - np.take_along_axis(scores, top, axis=-1)
    assert_close(weights, largest * np.exp(difference), what="weights")


@suite.property("softmax_forward", seed=seeds, axis=st.sampled_from([0, 1, 2, -2]))
def the_axis_is_honoured(target, seed, axis):
    """softmax along `axis` is softmax along the last axis of the transposed array."""
    scores = normal((2, 3, 4), seed, 3.0)
    expected = np.moveaxis(target.softmax_forward(np.moveaxis(scores, axis, -1))[0], -1, axis)
    assert_close(target.softmax_forward(scores, axis=axis)[0], expected)


@suite.property("softmax_forward", seed=seeds, far=st.sampled_from([1e3, 1e4, 1e300]))
def rows_far_apart_do_not_disturb_each_other(target, seed, far):
    """A huge row neither overflows nor flushes a small one to zero: the maximum is the row's
    own."""
    scores = normal((3, 4), seed, 3.0)
    alone = target.softmax_forward(scores)[0]
    scores, far = scores.copy(), reachable(far)
    scores[1] += far * np.array([1.0, 0.5, 0.25, 0.0])
    together = target.softmax_forward(scores)[0]
    assert_close(together[[0, 2]], alone[[0, 2]])
    assert_close(together[1], np.array([1.0, 0, 0, 0]))


@suite.property("softmax_forward", "softmax_backward", scores=rows(), seed=seeds)
def softmax_backward_is_the_derivative(target, scores, seed):
    """Eq. 1.2 against the complex step; a masked entry gets exactly 0."""
    weights, cache = target.softmax_forward(scores)
    dweights = cotangent(weights, seed)
    dscores = target.softmax_backward(dweights, cache)
    assert (dscores[scores == -np.inf] == 0).all(), "gradient flows to a masked score"
    assert_gradients(
        lambda scores: target.softmax_forward(scores)[0],
        {"scores": dscores},
        {"scores": scores},
        dweights,
    )


@suite.property("softmax_forward", scores=rows())
def inputs_are_left_alone(target, scores):
    """The caller's array is not modified."""
    before = scores.copy()
    target.softmax_forward(scores)
    assert np.array_equal(before, scores)


@suite.property(
    "softmax_forward", seed=seeds, dtype=st.sampled_from(["float16", "float32", "float64"])
)
def dtype_of_scores_is_dtype_of_weights(target, seed, dtype):
    """float16 in, float16 out, and never less exact than one rounding of the float32 result."""
    scores = normal((4, 50), seed, 8.0).astype(dtype)
    weights, _ = target.softmax_forward(scores)
    assert weights.dtype == scores.dtype
    exact = target.softmax_forward(scores.astype(np.float64))[0]
    unit = np.finfo(dtype).eps / 2
    # absolute floor: the smallest subnormal; relative: one rounding of storage, a few of float32
    limit = float(np.finfo(dtype).smallest_subnormal) + np.abs(exact) * (
        2 * unit + (0 if dtype == "float64" else 3e-6) + 1e-14
    )
    assert (np.abs(weights.astype(np.float64) - exact) <= limit).all()


# ---- log-sum-exp and log-softmax: Eq. 1.3 - 1.5 --------------------------------------------------


@suite.property("logsumexp_forward", scores=rows())
def logsumexp_lies_between_max_and_max_plus_log_n(target, scores):
    """max x <= lse <= max x + log n, and -inf for a dead row."""
    lse, _ = target.logsumexp_forward(scores)
    largest = scores.max(axis=-1, initial=-np.inf)
    assert lse.shape == largest.shape
    assert np.array_equal(lse == -np.inf, largest == -np.inf)
    slack = 1e-12 * np.maximum(1, np.abs(np.where(np.isfinite(largest), largest, 0)))
    assert (lse >= largest - slack).all()
    assert (lse <= largest + np.log(max(scores.shape[-1], 1)) + slack).all()


@suite.property("logsumexp_forward", "softmax_forward", scores=finite_rows())
def softmax_is_the_exponential_of_score_minus_lse(target, scores):
    """y = exp(x - lse)."""
    lse, _ = target.logsumexp_forward(scores, keepdims=True)
    slack = np.exp(at_least(0) * np.abs(lse).max(initial=0)) - 1  # of a narrow lse, made larger
    expected = target.softmax_forward(scores)[0]
    assert_close(np.exp(scores - lse), expected, tolerance=max(1e-11, float(slack)))


@suite.property("logsumexp_forward", "logsumexp_backward", scores=finite_rows(), seed=seeds)
def logsumexp_backward_is_the_derivative(target, scores, seed):
    """Eq. 1.3 against the complex step."""
    lse, cache = target.logsumexp_forward(scores)
    dlse = cotangent(lse, seed)
    dscores = target.logsumexp_backward(dlse, cache)
    assert_gradients(
        lambda scores: target.logsumexp_forward(scores)[0],
        {"scores": dscores},
        {"scores": scores},
        dlse,
    )


@suite.property("log_softmax_forward", scores=rows())
def log_softmax_survives_where_softmax_underflows(target, scores):
    """log y = x - lse stays finite for every allowed entry, however small its weight."""
    spread = scores * 30  # ±900: exp underflows, the logarithm must not
    out, _ = target.log_softmax_forward(spread)
    assert np.array_equal(np.isneginf(out), np.isneginf(spread))
    allowed = np.isfinite(spread)
    largest = np.where(allowed, spread, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
    safe = np.where(largest == -np.inf, 0, largest)
    total = np.exp(spread - safe).sum(axis=-1, keepdims=True)
    expected = spread - safe - np.log(np.where(total == 0, 1, total))
    assert_close(out, expected, what="log-softmax")


@suite.property("log_softmax_forward", "log_softmax_backward", scores=rows(), seed=seeds)
def log_softmax_backward_is_the_derivative(target, scores, seed):
    """Eq. 1.5 against the complex step of the allowed entries, underflowed ones included."""
    spread = scores * 30
    allowed = np.isfinite(spread)
    out, cache = target.log_softmax_forward(spread)
    dout = cotangent(out, seed)
    dscores = target.log_softmax_backward(dout, cache)
    assert (dscores[~allowed] == 0).all(), "gradient flows to a masked score"

    def forward(scores):
        return np.where(allowed, target.log_softmax_forward(scores)[0], 0)

    assert_gradients(forward, {"scores": dscores}, {"scores": spread}, dout)


# ---- the online merge: Eq. 1.6 - 1.8 -------------------------------------------------------------


def attend(scores, values):
    """Attention over one set of keys as a Partial: the definition that the merge is judged
    against."""
    m = scores.max(axis=-1, initial=-np.inf)
    safe = np.where(m == -np.inf, 0, m)
    e = np.exp(scores - safe[..., None])
    z = e.sum(axis=-1)
    alive = z > 0
    z = np.where(alive, z, 1)
    return Partial((e @ values) / z[..., None], np.where(alive, safe + np.log(z), -np.inf))


splits = st.fixed_dictionaries({
    "seed": seeds, "n": sizes, "m": st.integers(0, 9), "cut": st.floats(0, 1), "masked":
    st.sampled_from([0, 0.5, 0.9]),
})  # fmt: skip


def parts(split):
    scores = normal((split["n"], split["m"]), split["seed"], 10.0)
    rng = np.random.default_rng([split["seed"], 2])
    scores = np.where(rng.random(scores.shape) < split["masked"], -np.inf, scores)
    values = normal((split["m"], 3), split["seed"] ^ 1)
    cut = round(split["cut"] * split["m"])
    return scores, values, cut


@suite.property("merge_forward", split=splits)
def merging_the_parts_gives_the_whole(target, split):
    """Attention over a split of the keys, merged, is attention over all of them (Eq. 1.6); dead
    parts are neutral."""
    scores, values, cut = parts(split)
    merged, _ = target.merge_forward(
        attend(scores[:, :cut], values[:cut]), attend(scores[:, cut:], values[cut:])
    )
    whole = attend(scores, values)
    assert_close(merged.out, whole.out, what="out")
    assert_close(merged.lse, whole.lse, what="lse")


@suite.property("merge_forward", "merge_backward", seed=seeds, n=sizes)
def merge_backward_is_the_derivative(target, seed, n):
    """Eq. 1.7 against the complex step, with a cotangent for the output and one for the LSE."""
    a = Partial(normal((n, 3), seed), normal((n,), seed ^ 1, 3.0))
    b = Partial(normal((n, 3), seed ^ 2), normal((n,), seed ^ 3, 3.0))
    merged, cache = target.merge_forward(a, b)
    dmerged = Partial(cotangent(merged.out, seed), cotangent(merged.lse, seed ^ 4))
    grads = target.merge_backward(dmerged, cache)

    def forward(**x):
        merged, _ = target.merge_forward(
            Partial(x["out_a"], x["lse_a"]), Partial(x["out_b"], x["lse_b"])
        )
        return np.concatenate([merged.out.ravel(), merged.lse.ravel()])

    assert_gradients(
        forward,
        {
            "out_a": grads.first.out,
            "lse_a": grads.first.lse,
            "out_b": grads.second.out,
            "lse_b": grads.second.lse,
        },
        {"out_a": a.out, "lse_a": a.lse, "out_b": b.out, "lse_b": b.lse},
        np.concatenate([dmerged.out.ravel(), dmerged.lse.ravel()]),
    )


@suite.property("state_of", "merge_states", "finish_state", split=splits)
def states_merge_like_partials(target, split):
    """The running (m, l, a) of a kernel gives the same result, divided once at the end (Eq.
    1.8)."""
    scores, values, cut = parts(split)
    state = target.merge_states(
        target.state_of(scores[:, :cut], values[:cut]),
        target.state_of(scores[:, cut:], values[cut:]),
    )
    merged, whole = target.finish_state(state), attend(scores, values)
    assert_close(merged.out, whole.out, what="out")
    assert_close(merged.lse, whole.lse, what="lse")


# ---- the soft-cap: Eq. 1.9, Eq. 1.10 -------------------------------------------------------------

caps = st.sampled_from([0.5, 5.0, 50.0])


@suite.property("softcap_forward", scores=finite_rows(), cap=caps)
def softcap_is_bounded_odd_and_flat_at_zero(target, scores, cap):
    """|f| <= c, f(-x) = -f(x), and |f(x) - x| <= |x|³ / 3c²: near zero the cap is the identity."""
    out, _ = target.softcap_forward(scores, cap)
    assert (np.abs(out) <= cap).all()
    assert_close(target.softcap_forward(-scores, cap)[0], -out)
    assert (np.abs(out - scores) <= np.abs(scores) ** 3 / (3 * cap**2) + 1e-12).all()


@suite.property("softcap_forward", scores=finite_rows(), off=st.sampled_from([None, 0, 0.0]))
def softcap_none_or_zero_is_the_identity(target, scores, off):
    """None and 0 turn the cap off."""
    assert np.array_equal(target.softcap_forward(scores, off)[0], scores)


@suite.property("softcap_forward", "softcap_backward", scores=finite_rows(), cap=caps, seed=seeds)
def softcap_backward_is_the_derivative(target, scores, cap, seed):
    """Eq. 1.10 against the complex step."""
    out, cache = target.softcap_forward(scores, cap)
    dout = cotangent(out, seed)
    assert_gradients(
        lambda scores: target.softcap_forward(scores, cap)[0],
        {"scores": target.softcap_backward(dout, cache)},
        {"scores": scores},
        dout,
    )
