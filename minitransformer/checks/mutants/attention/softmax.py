"""Mistakes people make with softmax, each with a name a learner understands."""

import numpy as np

from minitransformer.attention import softmax as right
from minitransformer.attention.softmax import MergeGrads, Partial, SoftmaxState
from minitransformer.checks.properties.attention.softmax import suite


def _normalise(e, axis):
    z = e.sum(axis=axis, keepdims=True)
    return e / np.where(z == 0, 1, z)


def _cached(weights, axis):
    return weights, right.SoftmaxCache(weights, axis)


@suite.mutant(
    "softmax_forward",
    "exp overflows at 710 in float64 and at 12 in float16",
    killed_by="rows_far_apart_do_not_disturb_each_other",
)
def maximum_not_subtracted(scores, *, axis=-1, check_finite=True):
    return _cached(_normalise(np.exp(scores), axis), axis)


@suite.mutant(
    "softmax_forward",
    "one huge row pushes every other row's exponentials to zero",
    killed_by="rows_far_apart_do_not_disturb_each_other",
)
def one_maximum_for_the_whole_array(scores, *, axis=-1, check_finite=True):
    m = scores.real.max(initial=-np.inf)
    return _cached(_normalise(np.exp(scores - (0 if m == -np.inf else m)), axis), axis)


@suite.mutant(
    "softmax_forward",
    "-inf - (-inf) is NaN: a dead row needs a guard",
    killed_by="weights_sum_to_one_or_to_zero",
)
def dead_row_not_guarded(scores, *, axis=-1, check_finite=True):
    e = np.exp(scores - scores.real.max(axis=axis, keepdims=True, initial=-np.inf))
    return _cached(e / e.sum(axis=axis, keepdims=True), axis)


@suite.mutant(
    "softmax_forward", "the argument is read and forgotten", killed_by="the_axis_is_honoured"
)
def axis_ignored(scores, *, axis=-1, check_finite=True):
    return right.softmax_forward(scores, axis=-1, check_finite=check_finite)


@suite.mutant(
    "softmax_forward",
    "an epsilon against division by zero: rows no longer sum to one",
    killed_by="weights_sum_to_one_or_to_zero",
)
def epsilon_in_the_denominator(scores, *, axis=-1, check_finite=True):
    _, e, z = right._exponentials(scores, axis)
    return _cached(e / (z + 1e-6), axis)


@suite.mutant(
    "softmax_forward",
    "base 2 is for kernels that fold log2(e) into the scale",
    killed_by="ratios_are_exponentials_of_differences",
)
def powers_of_two(scores, *, axis=-1, check_finite=True):
    return right.softmax_forward(scores * np.log(2), axis=axis, check_finite=check_finite)


@suite.mutant(
    "softmax_forward",
    "tidy rows, but every weight is a clipped score",
    killed_by="a_common_shift_changes_nothing",
)
def scores_divided_by_their_sum(scores, *, axis=-1, check_finite=True):
    return _cached(
        _normalise(np.maximum(np.where(np.isfinite(scores), scores, 0).real, 0) + 1e-9, axis), axis
    )


@suite.mutant(
    "softmax_forward", "saves an array, corrupts the caller's", killed_by="inputs_are_left_alone"
)
def subtracts_in_place(scores, *, axis=-1, check_finite=True):
    if scores.size:
        m = scores.real.max(axis=axis, keepdims=True)
        scores -= np.where(m == -np.inf, 0, m)
    return right.softmax_forward(scores, axis=axis, check_finite=check_finite)


@suite.mutant(
    "softmax_forward",
    "a sum of many float16 terms loses what each term adds",
    killed_by="dtype_of_scores_is_dtype_of_weights",
)
def narrow_sums(scores, *, axis=-1, check_finite=True):
    if scores.dtype != np.float16:
        return right.softmax_forward(scores, axis=axis, check_finite=check_finite)
    e = np.exp(scores - scores.max(axis=axis, keepdims=True))
    z = np.add.accumulate(e, axis=axis, dtype=np.float16).take([-1], axis=axis)
    return _cached(e / z, axis)


@suite.mutant(
    "softmax_backward",
    "the Jacobian's diagonal alone",
    killed_by="softmax_backward_is_the_derivative",
)
def gradient_without_the_sum(dweights, cache):
    return cache.weights * dweights


@suite.mutant(
    "softmax_backward",
    "y (1 - y) is the sigmoid's derivative",
    killed_by="softmax_backward_is_the_derivative",
)
def gradient_of_a_sigmoid(dweights, cache):
    return dweights * cache.weights * (1 - cache.weights)


@suite.mutant(
    "logsumexp_forward",
    "without the maximum added back it is log Z",
    killed_by=(
        "logsumexp_lies_between_max_and_max_plus_log_n",
        "softmax_is_the_exponential_of_score_minus_lse",
    ),
)
def maximum_not_added_back(scores, *, axis=-1, keepdims=False, check_finite=True):
    lse, cache = right.logsumexp_forward(scores, axis=axis, keepdims=True)
    m = scores.real.max(axis=axis, keepdims=True, initial=-np.inf)
    lse = lse - np.where(m == -np.inf, 0, m)
    return lse if keepdims else lse.squeeze(axis), cache._replace(keepdims=keepdims)


@suite.mutant(
    "logsumexp_backward",
    "sends the cotangent to every score alike",
    killed_by="logsumexp_backward_is_the_derivative",
)
def lse_gradient_spread_evenly(dlse, cache):
    dlse = dlse if cache.keepdims else np.expand_dims(dlse, cache.axis)
    return np.broadcast_to(dlse / cache.weights.shape[cache.axis], cache.weights.shape)


@suite.mutant(
    "log_softmax_forward",
    "log(0) = -inf where softmax underflows",
    killed_by="log_softmax_survives_where_softmax_underflows",
)
def logarithm_of_softmax(scores, *, axis=-1, check_finite=True):
    _, cache = right.log_softmax_forward(scores, axis=axis)
    return np.log(right.softmax_forward(scores, axis=axis)[0]), cache


@suite.mutant(
    "log_softmax_backward",
    "softmax's backward, not log-softmax's",
    killed_by="log_softmax_backward_is_the_derivative",
)
def backward_of_softmax_for_log_softmax(dout, cache):
    y = cache.weights
    return y * (dout - (y * dout).sum(axis=cache.axis, keepdims=True))


@suite.mutant(
    "merge_forward",
    "two means averaged without their weights",
    killed_by="merging_the_parts_gives_the_whole",
)
def parts_averaged_evenly(first, second):
    merged, cache = right.merge_forward(first, second)
    return merged._replace(out=(first.out + second.out) / 2), cache


@suite.mutant(
    "merge_forward",
    "-inf - (-inf) again: two dead parts make NaN",
    killed_by="merging_the_parts_gives_the_whole",
)
def dead_parts_not_guarded(first, second):
    lse = np.logaddexp(first.lse.real, second.lse.real)
    a1, a2 = np.exp(first.lse - lse), np.exp(second.lse - lse)
    out = a1[..., None] * first.out + a2[..., None] * second.out
    return Partial(out, lse), right.MergeCache(first, second, Partial(out, lse), (a1, a2))


@suite.mutant(
    "merge_backward", "the LSE moves the mixture too", killed_by="merge_backward_is_the_derivative"
)
def lse_gradient_forgets_the_output(dmerged, cache):
    return MergeGrads(*(Partial(a[..., None] * dmerged.out, a * dmerged.lse) for a in cache.shares))


@suite.mutant(
    "merge_backward",
    "the cotangent of the LSE enters with a minus",
    killed_by="merge_backward_is_the_derivative",
)
def wrong_sign_of_the_lse_cotangent(dmerged, cache):
    return right.merge_backward(dmerged._replace(lse=-dmerged.lse), cache)


@suite.mutant(
    "merge_states",
    "the old values keep the scale of the old maximum",
    killed_by="states_merge_like_partials",
)
def values_not_rescaled(first, second):
    state = right.merge_states(first, second)
    return state._replace(weighted=first.weighted + second.weighted)


@suite.mutant(
    "merge_states",
    "e^{m - m_i} instead of e^{m_i - m}: grows where it should shrink",
    killed_by="states_merge_like_partials",
)
def rescaled_the_wrong_way(first, second):
    m = np.maximum(first.maximum, second.maximum)
    safe = np.where(m == -np.inf, 0, m)
    c1, c2 = np.exp(safe - first.maximum), np.exp(safe - second.maximum)
    return SoftmaxState(
        m,
        c1 * first.total + c2 * second.total,
        c1[..., None] * first.weighted + c2[..., None] * second.weighted,
    )


@suite.mutant(
    "softcap_forward",
    "x · tanh(x / c) is even, not odd",
    killed_by="softcap_is_bounded_odd_and_flat_at_zero",
)
def score_times_tanh(scores, cap):
    if not cap:
        return right.softcap_forward(scores, cap)
    return scores * np.tanh(scores / cap), right.softcap_forward(scores, cap)[1]


@suite.mutant(
    "softcap_forward",
    "0 means off, and x / 0 means trouble",
    killed_by="softcap_none_or_zero_is_the_identity",
)
def zero_cap_is_a_cap(scores, cap):
    if cap is None:
        return right.softcap_forward(scores, cap)
    c = max(cap, 1e-9)
    return c * np.tanh(scores / c), right.softcap_forward(scores, cap)[1]


@suite.mutant(
    "softcap_backward",
    "forgets that tanh is flat where it saturates",
    killed_by="softcap_backward_is_the_derivative",
)
def straight_through_the_cap(dout, cache):
    return dout
