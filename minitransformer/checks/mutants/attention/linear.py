"""Mistakes people make with linear attention; the causal ones and those of padding were shipped."""

import numpy as np

from minitransformer.arrays import unbroadcast
from minitransformer.attention import linear as right
from minitransformer.checks.properties.attention.linear import suite

FEATURES = "features_are_elu_plus_one"
SLOPE = "feature_backward_is_the_derivative"
ROUNDED = "narrow_features_are_rounded_once"
DEFINITION = "the_output_is_the_definition"
AGREE = "the_three_forms_agree"
GROUPS = "query_head_h_reads_key_head_h_over_the_group_size"
HULL = "the_output_lies_among_the_values"
SUM = "the_state_is_the_sum_over_keys"
PARTS = "a_text_read_in_parts_is_the_text"
ADD = "states_of_two_texts_add_up"
FUTURE = "nothing_comes_from_the_future"
LEFT_OUT = "a_key_left_out_might_as_well_not_exist"
DEAD = "a_row_with_no_key_is_zero"
DERIVATIVE = "linear_attention_backward_is_the_derivative"
THROUGH = "gradients_pass_through_the_state"
NARROW = "narrow_numbers_are_rounded_once"
ALONE = "arguments_are_left_alone"


# ---- features ------------------------------------------------------------------------------------


@suite.mutant("elu_plus_one_forward", "the one is forgotten: weights below 0", killed_by=FEATURES)
def elu_without_one(x):
    out, cache = right.elu_plus_one_forward(x)
    return out - 1, cache


@suite.mutant("elu_plus_one_forward", "positive is enough; 0 is not", killed_by=(FEATURES, ROUNDED))
def relu_for_elu_plus_one(x):
    return np.maximum(x.real, 0).astype(x.dtype), right.elu_plus_one_forward(x)[1]


@suite.mutant(
    "elu_plus_one_forward",
    "exp(x) of every x, also where x + 1 is taken",
    killed_by=FEATURES,
    crashes=True,
)
def exponential_of_large_numbers(x):
    np.exp(x)
    return right.elu_plus_one_forward(x)


@suite.mutant("elu_plus_one_forward", "float32 comes out of float16", killed_by=ROUNDED)
def features_left_wide(x):
    return right.elu_plus_one_forward(x.astype(np.result_type(x.dtype.type(0), np.float32)))


@suite.mutant("elu_plus_one_backward", "φ' = φ, the exponential's habit", killed_by=SLOPE)
def slope_is_the_feature(dout, cache):
    return right.elu_plus_one_backward(dout * (cache.slope + 1), cache)


@suite.mutant("elu_plus_one_backward", "the slope of relu", killed_by=(SLOPE, ROUNDED))
def no_slope_below_zero(dout, cache):
    return right.elu_plus_one_backward(dout * (cache.slope == 1), cache)


@suite.mutant("elu_plus_one_backward", "elu'(0) taken for 0", killed_by=SLOPE)
def no_slope_at_zero(dout, cache):
    return right.elu_plus_one_backward(dout * (np.abs(cache.slope - 1) > 1e-8), cache)


# ---- the forward ---------------------------------------------------------------------------------


def _seen(mask, n, m, options):
    """Which pairs the causal `mask` (np.tri, if it is right) lets through."""
    offset = m - n if options.get("align") == "lower_right" else 0
    if not options.get("causal"):
        return np.ones((n, m), np.bool_)
    return (mask or np.tri)(n, m, offset).astype(np.bool_)


def _naive(q, k, v, *, mask=None, total=None, weights=None, **options):
    """The parallel form in plain lines, some of which a mutant may replace: the causal `mask`, the
    `weights`, and their `total`."""
    right_out, cache = right.linear_attention_forward(q, k, v, **options)
    (fq, fk), before = cache.features, cache.features[0] @ cache.start
    seen = _seen(mask, q.shape[-2], k.shape[-2], options)
    w = fq @ fk.mT
    w = np.where(seen, w, 0) if weights is None else weights(w, seen)
    above = w @ cache.values[..., :-1] + before[..., :-1]
    below = (total or _total)(w, fq, fk) + before[..., -1:]
    out = above / np.where(below == 0, 1, below)
    out = np.broadcast_to(out, cache.out.shape)
    return out.reshape(right_out.shape).astype(right_out.dtype), cache._replace(out=out)


def _triu(n, m, offset):
    return np.tri(m, n, -offset).T


def _strict(n, m, offset):
    return np.tri(n, m, offset - 1)


def _total(w, fq, fk):
    return w.sum(axis=-1, keepdims=True)


@suite.mutant("linear_attention_forward", "triu for tril", killed_by=(DEFINITION, FUTURE, PARTS))
def reads_the_future(q, k, v, **options):
    return _naive(q, k, v, mask=_triu, **options)


@suite.mutant(
    "linear_attention_forward",
    "the state is read, then updated: no token sees itself",
    killed_by=(DEFINITION, AGREE),
)
def state_read_before_the_update(q, k, v, **options):
    if options.get("form") != "recurrent":
        return right.linear_attention_forward(q, k, v, **options)
    return _naive(q, k, v, mask=_strict, **options)


@suite.mutant(
    "linear_attention_forward",
    "prefix sums above, the whole sum below the line",
    killed_by=(DEFINITION, FUTURE, HULL),
)
def normaliser_without_prefix_sums(q, k, v, **options):
    def total(w, fq, fk):
        return (fq @ fk.mT).sum(axis=-1, keepdims=True)

    return _naive(q, k, v, total=total, **options)


@suite.mutant(
    "linear_attention_forward", "Σ w v is no mean", killed_by=(DEFINITION, HULL, GROUPS, NARROW)
)
def never_divided(q, k, v, **options):
    return _naive(q, k, v, total=lambda w, fq, fk: np.ones_like(w[..., :1]), **options)


@suite.mutant(
    "linear_attention_forward",
    "an ε for safety: every output a little short, and shorter where features are small",
    killed_by=(DEFINITION, HULL),
)
def epsilon_in_the_denominator(q, k, v, **options):
    return _naive(q, k, v, total=lambda w, fq, fk: _total(w, fq, fk) + 1e-6, **options)


@suite.mutant(
    "linear_attention_forward", "softmax(q · k) after all", killed_by=(DEFINITION, NARROW)
)
def exponential_kernel(q, k, v, **options):
    return _naive(q, k, v, weights=lambda w, seen: np.where(seen, np.expm1(w / 9), 0), **options)


@suite.mutant("linear_attention_forward", "0/0 where nothing is read", killed_by=(DEFINITION, DEAD))
def dead_rows_divided_by_zero(q, k, v, **options):
    out, cache = right.linear_attention_forward(q, k, v, **options)
    dead = np.broadcast_to(~cache.alive[..., None], cache.out.shape).reshape(out.shape)
    return np.where(dead, np.nan, out), cache


@suite.mutant(
    "linear_attention_forward",
    "φ(0) = 1: a key of zeros is a key",
    killed_by=(DEFINITION, SUM, LEFT_OUT),
)
def padding_zeroes_the_key(q, k, v, *, keep=None, **options):
    if keep is not None:
        k, v = (np.where(keep[..., 0, :, None], x, 0) for x in (k, v))
    return right.linear_attention_forward(q, k, v, **options)


@suite.mutant(
    "linear_attention_forward",
    "https://github.com/fla-org/flash-linear-attention/issues/1263",
    killed_by=(DEFINITION, SUM, LEFT_OUT),
)
def padding_zeroes_the_value(q, k, v, *, keep=None, **options):
    k = np.where(np.isfinite(k), k, 0)
    if keep is not None:
        v = np.where(keep[..., 0, :, None], v, 0)
    return right.linear_attention_forward(q, k, v, **options)


@suite.mutant(
    "linear_attention_forward",
    "1/√D as in softmax, but inside φ it does not cancel",
    killed_by=(DEFINITION, NARROW),
)
def queries_scaled(q, k, v, **options):
    scaled = (q / np.sqrt(q.shape[-1])).astype(q.dtype)
    return right.linear_attention_forward(scaled, k, v, **options)


@suite.mutant("linear_attention_forward", "head h reads h % G", killed_by=(DEFINITION, GROUPS))
def key_heads_tiled_instead_of_repeated(q, k, v, **options):
    _, cache = right.linear_attention_forward(q, k, v, **options)
    heads, groups = q.shape[-3], k.shape[-3]
    order = np.arange(heads).reshape(-1, groups).T.ravel()  # the heads that read group 0, 1, …
    tiled, _ = right.linear_attention_forward(q[..., order, :, :], k, v, **options)
    return tiled[..., np.argsort(order), :, :], cache


@suite.mutant(
    "linear_attention_forward",
    "every query at its own index, whatever was there before",
    killed_by=DEFINITION,
)
def alignment_ignored(q, k, v, **options):
    return right.linear_attention_forward(q, k, v, **{**options, "align": "upper_left"})


@suite.mutant(
    "linear_attention_forward", "every call the first", killed_by=(DEFINITION, SUM, PARTS, ADD)
)
def state_ignored(q, k, v, *, state=None, **options):
    return right.linear_attention_forward(q, k, v, **options)


@suite.mutant(
    "linear_attention_forward",
    "S is carried over, z starts again",
    killed_by=(DEFINITION, SUM, PARTS, ADD),
)
def normaliser_not_carried_over(q, k, v, *, state=None, **options):
    if state is not None:
        state = state._replace(z=0 * state.z)
    options["check_finite"] = False
    return right.linear_attention_forward(q, k, v, state=state, **options)


@suite.mutant(
    "linear_attention_forward",
    "the last, incomplete chunk is not in the state",
    killed_by=(AGREE, SUM, PARTS),
)
def last_chunk_dropped_from_the_state(q, k, v, **options):
    out, cache = right.linear_attention_forward(q, k, v, **options)
    m, chunk = k.shape[-2], options.get("chunk", 64)
    if options.get("form") != "chunked" or not options.get("causal") or chunk > 2:
        return out, cache
    whole = m // chunk * chunk
    options = {**options, "align": "lower_right", "keep": None}
    return out, cache._replace(
        state=right.linear_attention_forward(q, k[..., :whole, :], v[..., :whole, :], **options)[
            1
        ].state
    )


@suite.mutant(
    "linear_attention_forward",
    "only what the last query may read: the keys behind it never reach the next call",
    killed_by=(SUM, ADD),
)
def state_of_the_last_query(q, k, v, **options):
    out, cache = right.linear_attention_forward(q, k, v, **options)
    n = q.shape[-2]
    if options.get("causal") and options.get("align") != "upper_left":
        return out, cache
    keep = options.get("keep")
    options = {**options, "keep": None if keep is None else keep[..., :n]}
    short = right.linear_attention_forward(q, k[..., :n, :], v[..., :n, :], **options)[1]
    return out, cache._replace(state=short.state)


@suite.mutant("linear_attention_forward", "the state in float16 too", killed_by=NARROW)
def state_in_the_storage_dtype(q, k, v, **options):
    out, cache = right.linear_attention_forward(q, k, v, **options)
    if q.dtype.itemsize == 2:
        cache = cache._replace(state=right.LinearState(*(x.astype(q.dtype) for x in cache.state)))
    return out, cache


@suite.mutant("linear_attention_forward", "S += φ(k) vᵀ into the caller's S", killed_by=ALONE)
def state_updated_in_place(q, k, v, *, state=None, **options):
    out, cache = right.linear_attention_forward(q, k, v, state=state, **options)
    if state is not None and state.s.shape == cache.state.s.shape:
        state.s[...] = cache.state.s.real
    return out, cache


@suite.mutant("merged", "the mean of two states", killed_by=ADD)
def second_state_alone(first, second):
    return second


@suite.mutant("merged", "S adds up, z is kept", killed_by=ADD)
def normaliser_not_merged(first, second):
    return second._replace(s=first.s + second.s)


# ---- the backward --------------------------------------------------------------------------------


def _backward(dout, cache, *, dstate=None, a_mask=None, b_mask=None, dk_mask=None):
    """The parallel backward, in which a mutant may take other masks for A = tril(Φ_q Φ_kᵀ) and for
    B = tril(G' V'ᵀ), in dΦ_q or in dΦ_k."""
    grads = right.linear_attention_backward(dout, cache, dstate=dstate)
    (fq, fk), v = cache.features, cache.values
    causal, align, *_ = cache.options
    options = {"causal": causal, "align": align}
    a_mask, b_mask, dk_mask = (
        _seen(mask, *cache.shape[-2:], options) for mask in (a_mask, b_mask, dk_mask)
    )
    g = np.where(cache.alive[..., None], right.grouped(dout, fk.shape[-4]), 0)
    g = g / cache.total[..., None]
    g = np.concatenate([g, -(g * cache.out).sum(axis=-1, keepdims=True)], axis=-1)
    u = np.zeros_like(cache.start)
    if dstate is not None:
        u = np.concatenate([dstate.s, dstate.z[..., None]], axis=-1)[..., None, :, :]
    a, b = fq @ fk.mT, g @ v.mT
    dfq = (b_mask * b) @ fk + g @ cache.start.mT
    dfk = right.over_heads((dk_mask * b).mT @ fq) + v @ u.mT
    dv = right.over_heads((a_mask * a).mT @ g) + fk @ u
    if cache.keep is not None:
        dfk, dv = (np.where(cache.keep[..., None], x, 0) for x in (dfk, dv))
    dq = dfq * cache.maps[0].slope
    dq = dq.reshape(*cache.shape[:-1], dq.shape[-1])
    dk, dv = (dfk * cache.maps[1].slope)[..., 0, :, :], dv[..., 0, :, :-1]
    dq, dk, dv = (
        unbroadcast(x, like).astype(dtype)
        for x, (like, dtype) in zip((dq, dk, dv), cache.inputs, strict=False)
    )
    return right.LinearGrads(dq, dk, dv, grads.state)


@suite.mutant(
    "linear_attention_backward",
    "the denominator taken for a constant",
    killed_by=DERIVATIVE,
)
def normaliser_has_no_gradient(dout, cache, *, dstate=None):
    return right.linear_attention_backward(dout, cache._replace(out=0 * cache.out), dstate=dstate)


@suite.mutant("linear_attention_backward", "h = +(do · o) / den", killed_by=DERIVATIVE)
def normaliser_gradient_with_the_wrong_sign(dout, cache, *, dstate=None):
    return right.linear_attention_backward(dout, cache._replace(out=-cache.out), dstate=dstate)


@suite.mutant(
    "linear_attention_backward",
    "the reverse scan started at the first query: keys learn from who cannot read them",
    killed_by=(DERIVATIVE, THROUGH),
)
def reverse_scan_from_the_wrong_end(dout, cache, *, dstate=None):
    return _backward(dout, cache, dstate=dstate, dk_mask=_triu, a_mask=_triu)


@suite.mutant(
    "linear_attention_backward",
    "U is read before the query at t is added",
    killed_by=DERIVATIVE,
)
def reverse_state_read_before_the_update(dout, cache, *, dstate=None):
    return _backward(dout, cache, dstate=dstate, dk_mask=_strict, a_mask=_strict)


@suite.mutant(
    "linear_attention_backward",
    "one sum for all queries, as without a mask",
    killed_by=(DERIVATIVE, FUTURE, THROUGH),
)
def queries_learn_from_the_last_state(dout, cache, *, dstate=None):
    return _backward(dout, cache, dstate=dstate, b_mask=lambda n, m, o: np.ones((n, m)))


@suite.mutant(
    "linear_attention_backward",
    "earlier states by subtraction from the last: it saves memory and keeps the rounding",
    killed_by=FUTURE,
)
def states_subtracted_back(dout, cache, *, dstate=None):
    grads = right.linear_attention_backward(dout, cache, dstate=dstate)
    (fq, fk), v = cache.features, cache.values
    if not cache.options[0] or fq.shape[-2] != fk.shape[-2] or not v.size:
        return grads
    g = right.grouped(np.where(np.isfinite(dout), dout, 0), fk.shape[-4]) / cache.total[..., None]
    g = np.concatenate([g, -(g * cache.out).sum(axis=-1, keepdims=True)], axis=-1)
    s, rows = cache.start + fk.mT @ v, []
    for t in reversed(range(fk.shape[-2])):
        rows.append(g[..., t : t + 1, :] @ s.mT)
        s = s - fk[..., t : t + 1, :].mT @ v[..., t : t + 1, :]
    dq = np.concatenate(rows[::-1], axis=-2) * cache.maps[0].slope
    dq = dq.reshape(*cache.shape[:-1], dq.shape[-1])
    shape, dtype = cache.inputs[0]
    return grads._replace(q=unbroadcast(dq, shape).astype(dtype))


@suite.mutant("linear_attention_backward", "dφ(k) handed out as dk", killed_by=DERIVATIVE)
def slope_of_the_key_features_forgotten(dout, cache, *, dstate=None):
    q, k = cache.maps
    straight = k._replace(slope=np.ones_like(k.slope))
    return right.linear_attention_backward(dout, cache._replace(maps=(q, straight)), dstate=dstate)


@suite.mutant("linear_attention_backward", "the slope at the key for both", killed_by=DERIVATIVE)
def slope_of_the_query_features_forgotten(dout, cache, *, dstate=None):
    q, k = cache.maps
    straight = q._replace(slope=np.ones_like(q.slope))
    return right.linear_attention_backward(dout, cache._replace(maps=(straight, k)), dstate=dstate)


@suite.mutant(
    "linear_attention_backward",
    "the query heads of a group averaged, not summed",
    killed_by=DERIVATIVE,
)
def group_gradients_averaged(dout, cache, *, dstate=None):
    grads = right.linear_attention_backward(dout, cache, dstate=dstate)
    repeat = cache.features[0].shape[-3]
    return grads._replace(v=grads.v / repeat, k=grads.k / repeat)


@suite.mutant(
    "linear_attention_backward",
    "the next part's gradient stops at the cut",
    killed_by=(DERIVATIVE, THROUGH),
)
def cotangent_of_the_state_ignored(dout, cache, *, dstate=None):
    return right.linear_attention_backward(dout, cache)


@suite.mutant("linear_attention_backward", "S has one, z has none", killed_by=(DERIVATIVE, THROUGH))
def gradient_of_the_normaliser_state_forgotten(dout, cache, *, dstate=None):
    grads = right.linear_attention_backward(dout, cache, dstate=dstate)
    if grads.state is None:
        return grads
    return grads._replace(state=grads.state._replace(z=0 * grads.state.z))


@suite.mutant(
    "linear_attention_backward",
    "φ(k) was zeroed; its gradient goes on to the key",
    killed_by=(DERIVATIVE, LEFT_OUT),
)
def left_out_keys_learn(dout, cache, *, dstate=None):
    return right.linear_attention_backward(dout, cache._replace(keep=None), dstate=dstate)


@suite.mutant("linear_attention_backward", "0 · NaN into every key", killed_by=DEAD)
def cotangent_of_a_dead_row_let_in(dout, cache, *, dstate=None):
    grads = right.linear_attention_backward(dout, cache, dstate=dstate)
    return grads._replace(v=grads.v + 0 * dout.sum())


@suite.mutant("linear_attention_backward", "dO /= den, in place", killed_by=ALONE)
def cotangent_divided_in_place(dout, cache, *, dstate=None):
    grads = right.linear_attention_backward(dout, cache, dstate=dstate)
    dout /= cache.total.reshape(dout.shape[:-1])[..., None]
    return grads
