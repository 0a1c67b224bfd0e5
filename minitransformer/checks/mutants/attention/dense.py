"""Mistakes people make with attention. Most were shipped by somebody; the forward ones are written
as one wrong line in a naive forward."""

import itertools
import math

import numpy as np

from minitransformer.attention import dense as right
from minitransformer.attention.softmax import softcap_forward, softmax_forward
from minitransformer.checks.properties.attention.dense import suite

DEFINITION = "the_output_is_the_definition"
CACHED = "weights_and_lse_are_those_of_the_definition"
DERIVATIVE = "attention_backward_is_the_derivative"
LSE_DERIVATIVE = "the_lse_has_a_derivative_too"
UNREAD = "what_nobody_may_read_changes_nothing"
DEAD = "a_row_with_no_key_is_zero"
LEAK = "nothing_comes_out_of_a_dead_row"


def _returned(out, weights, lse, q, k, v, options):
    """A wrong result with the right one's cache around it."""
    shape = right.score_shape(q, k, v)
    _, cache = right.attention_forward(q, k, v, **options)
    weights = np.broadcast_to(weights, shape)
    return out, cache._replace(out=out, weights=weights, lse=lse)


def _repeated(x, heads):
    return np.repeat(x, heads // x.shape[-3], axis=-3)


def _naive(q, k, v, *, scores=None, weights=None, heads=_repeated, **options):
    """Attention in five plain lines, two of which a mutant may replace: how `scores` come from the
    products, and `weights` from the scores."""
    k_, v_ = heads(k, q.shape[-3]), heads(v, q.shape[-3])
    scale = options.get("scale") or 1 / math.sqrt(q.shape[-1])
    product = q @ np.swapaxes(k_, -1, -2)
    s = (scores or _scores)(product, scale, options)
    p = (weights or _weights)(s, options)
    lse = np.log(np.exp(s).sum(axis=-1))
    applied = p if options.get("multiplier") is None else p * options["multiplier"]
    return _returned(applied @ v_, p, lse, q, k, v, options)


def _bias(options):
    return 0 if options.get("bias") is None else options["bias"]


def _masked(s, options):
    return s if options.get("keep") is None else np.where(options["keep"], s, -np.inf)


def _scores(product, scale, options):
    s = softcap_forward(product * scale, options.get("softcap"))[0] + _bias(options)
    return _masked(s, options)


def _weights(s, options):
    return softmax_forward(s, check_finite=False)[0]


# ---- masks ---------------------------------------------------------------------------------------


@suite.mutant(
    "attention_forward",
    "a zeroed logit keeps the weight exp(0): the mask multiplied into the scores",
    killed_by=(DEFINITION, "a_masked_pair_has_no_influence"),
)
def logits_multiplied_by_the_mask(q, k, v, **options):
    def scores(product, scale, options):
        s = softcap_forward(product * scale, options.get("softcap"))[0] + _bias(options)
        return s if options.get("keep") is None else s * options["keep"]

    return _naive(q, k, v, scores=scores, **options)


@suite.mutant(
    "attention_forward",
    "-1e9 for minus infinity: a row with no key becomes the mean of what it may not read",
    killed_by=(DEAD, "narrow_numbers_are_rounded_once"),
)
def minus_a_billion_for_minus_infinity(q, k, v, **options):
    def scores(product, scale, options):
        s = softcap_forward(product * scale, options.get("softcap"))[0] + _bias(options)
        if options.get("keep") is not None:  # in float16 the fill *is* -inf
            s = s + np.where(options["keep"], 0.0, -1e9).astype(s.dtype)
        return s

    def weights(s, options):  # why guard a row that is never all -inf?
        e = np.exp(s - s.max(axis=-1, keepdims=True, initial=-np.inf))
        return e / e.sum(axis=-1, keepdims=True)

    return _naive(q, k, v, scores=scores, weights=weights, **options)


@suite.mutant(
    "attention_forward",
    "masked weights set to 0 after softmax: rows no longer sum to 1",
    killed_by=(DEFINITION, "adding_a_constant_to_the_values_adds_it_to_the_output"),
)
def mask_applied_after_softmax(q, k, v, *, keep=None, **options):
    multiplier = options.pop("multiplier", None)
    if keep is not None:
        multiplier = keep * (1.0 if multiplier is None else multiplier)
    return right.attention_forward(q, k, v, multiplier=multiplier, **options)


@suite.mutant("attention_forward", "True read as `ignore`", killed_by=DEFINITION)
def mask_polarity_reversed(q, k, v, *, keep=None, **options):
    return right.attention_forward(q, k, v, keep=None if keep is None else ~keep, **options)


@suite.mutant(
    "attention_forward",
    "0 · NaN is NaN: a weight of zero does not silence what it multiplies",
    killed_by=(UNREAD, LEAK),
)
def zero_weight_taken_for_silence(q, k, v, **options):
    cache = right.attention_forward(q, k, v, **options)[1]
    weights = cache.weights
    v_ = np.broadcast_to(_repeated(v, q.shape[-3]), (*weights.shape[:-2], *v.shape[-2:]))
    applied = weights if options.get("multiplier") is None else weights * options["multiplier"]
    # a mean that multiplies everything, the NaN of a dead query among it
    return applied @ v_ + 0 * q.sum(axis=-1, keepdims=True), cache


@suite.mutant(
    "attention_forward",
    "a dead row shares its weight among all keys",
    killed_by=(DEAD, DEFINITION),
)
def dead_row_attends_to_everything(q, k, v, *, keep=None, **options):
    if keep is not None:
        keep = np.broadcast_to(keep, right.score_shape(q, k, v))
        keep = keep | ~keep.any(axis=-1, keepdims=True)
    return right.attention_forward(q, k, v, keep=keep, check_finite=False, **options)


# ---- scale, soft-cap, bias -----------------------------------------------------------------------


@suite.mutant("attention_forward", "1/√E, the width of the values", killed_by=DEFINITION)
def scale_from_the_value_width(q, k, v, *, scale=None, **options):
    scale = 1 / math.sqrt(v.shape[-1]) if scale is None else scale
    return right.attention_forward(q, k, v, scale=scale, **options)


@suite.mutant("attention_forward", "on q, and on the product again", killed_by=DEFINITION)
def scale_applied_twice(q, k, v, *, scale=None, **options):
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return right.attention_forward(q, k, v, scale=scale * scale, **options)


@suite.mutant(
    "attention_forward", "a `scale` from the caller is read and forgotten", killed_by=DEFINITION
)
def scale_argument_ignored(q, k, v, *, scale=None, **options):
    return right.attention_forward(q, k, v, **options)


@suite.mutant(
    "attention_forward",
    "c · tanh(-inf) = -c: the soft-cap after the mask unmasks it",
    killed_by=(DEFINITION, "a_masked_pair_has_no_influence"),
)
def softcap_after_the_mask(q, k, v, **options):
    def scores(product, scale, options):
        s = _masked(product * scale + _bias(options), options)
        return softcap_forward(s, options.get("softcap"))[0]

    return _naive(q, k, v, scores=scores, **options)


@suite.mutant(
    "attention_forward",
    "the bias is capped too, and with it the -inf that masks",
    killed_by=(DEFINITION, "minus_infinity_in_the_bias_masks"),
)
def softcap_after_the_bias(q, k, v, **options):
    def scores(product, scale, options):
        s = product * scale + np.maximum(_bias(options), -1e300)
        return _masked(softcap_forward(s, options.get("softcap"))[0], options)

    return _naive(q, k, v, scores=scores, **options)


@suite.mutant("attention_forward", "(Q Kᵀ + bias) / √D", killed_by=DEFINITION)
def bias_scaled_with_the_product(q, k, v, *, bias=None, scale=None, **options):
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    bias = None if bias is None else bias * factor
    return right.attention_forward(q, k, v, bias=bias, scale=scale, **options)


@suite.mutant(
    "attention_forward",
    "exp(s) / Σ exp(s) as the book prints it",
    killed_by="huge_scores_pick_the_largest",
)
def maximum_not_subtracted(q, k, v, **options):
    def weights(s, options):
        e = np.exp(s)
        z = e.sum(axis=-1, keepdims=True)
        return e / np.where(z == 0, 1, z)

    return _naive(q, k, v, weights=weights, **options)


@suite.mutant(
    "attention_forward",
    "dropped weights taken out of the denominator: another mechanism",
    killed_by=DEFINITION,
)
def multiplier_inside_the_denominator(q, k, v, *, multiplier=None, **options):
    out, cache = right.attention_forward(q, k, v, multiplier=multiplier, **options)
    if multiplier is None:
        return out, cache
    mass = (cache.weights * multiplier).sum(axis=-1, keepdims=True)
    return out / np.where(mass == 0, 1, mass), cache


@suite.mutant("attention_forward", "log2 for log", killed_by=CACHED)
def lse_in_base_two(q, k, v, **options):
    out, cache = right.attention_forward(q, k, v, **options)
    return out, cache._replace(lse=cache.lse / math.log(2))


# ---- heads and keys ------------------------------------------------------------------------------


@suite.mutant(
    "attention_forward",
    "head h reads h % G: key/value heads tiled instead of repeated",
    killed_by=(DEFINITION, "query_head_h_reads_key_head_h_over_the_group_size"),
)
def key_heads_tiled_instead_of_repeated(q, k, v, **options):
    def tiled(x):
        return np.concatenate([x] * (q.shape[-3] // x.shape[-3]), axis=-3)

    return right.attention_forward(q, tiled(k), tiled(v), **options)


@suite.mutant(
    "attention_forward",
    "the first key is an attention sink that nobody asked for",
    killed_by="the_order_of_keys_does_not_matter",
)
def first_key_favoured(q, k, v, *, bias=None, **options):
    shape = right.score_shape(q, k, v)
    favour = np.zeros(shape[-1:], q.dtype)
    favour[:1] = 1
    bias = favour if bias is None else bias + favour
    return right.attention_forward(q, k, v, bias=bias, **options)


@suite.mutant(
    "attention_forward",
    "a log-sum-exp of float16 in float16",
    killed_by="the_lse_of_narrow_numbers_is_wide",
)
def lse_in_the_storage_dtype(q, k, v, **options):
    if q.dtype.itemsize > 2:
        return right.attention_forward(q, k, v, **options)
    out, cache = right.attention_forward(q, k, v, **options)
    return out, cache._replace(lse=cache.lse.astype(q.dtype))


@suite.mutant(
    "attention_forward",
    "the mask is written into the caller's bias",
    killed_by="arguments_are_left_alone",
)
def mask_written_into_the_bias(q, k, v, *, keep=None, bias=None, **options):
    if keep is not None and bias is not None and bias.shape == right.score_shape(q, k, v):
        bias[~np.broadcast_to(keep, bias.shape)] = -np.inf
    return right.attention_forward(q, k, v, keep=keep, bias=bias, **options)


_launches = itertools.count()


@suite.mutant(
    "attention_forward",
    "atomic additions: right to rounding, another rounding every time",
    killed_by="the_same_call_gives_the_same_bits",
)
def sums_in_an_order_that_changes(q, k, v, **options):
    out, cache = right.attention_forward(q, k, v, **options)
    return out * (1 + 1e-14 * (next(_launches) % 7)), cache


@suite.mutant(
    "attention_forward",
    "large enough for float16, not for a bias or a row with nothing else",
    killed_by=(DEFINITION, DEAD),
)
def minus_ten_thousand_for_minus_infinity(q, k, v, **options):
    def scores(product, scale, options):
        s = _scores(product, scale, {**options, "keep": None})
        return s if options.get("keep") is None else np.where(options["keep"], s, -1e4)

    return _naive(q, k, v, scores=scores, **options)


@suite.mutant(
    "attention_forward",
    "a mask of 0 and 1, added: e⁻¹ of a forbidden key is left",
    killed_by=(DEFINITION, "a_masked_pair_has_no_influence", DEAD),
)
def mask_added_as_one(q, k, v, **options):
    def scores(product, scale, options):
        s = _scores(product, scale, {**options, "keep": None})
        return s if options.get("keep") is None else s - np.where(options["keep"], 0.0, 1.0)

    return _naive(q, k, v, scores=scores, **options)


@suite.mutant("attention_forward", "the sum runs along the other axis", killed_by=DEFINITION)
def softmax_over_queries(q, k, v, **options):
    def weights(s, options):
        return softmax_forward(s, axis=-2, check_finite=False)[0]

    return _naive(q, k, v, weights=weights, **options)


@suite.mutant("attention_forward", "ε against a division by zero", killed_by=DEFINITION)
def epsilon_in_the_sum(q, k, v, **options):
    def weights(s, options):
        top = s.max(axis=-1, keepdims=True, initial=-np.inf)
        e = np.exp(s - np.where(np.isneginf(top), 0, top))
        return e / (e.sum(axis=-1, keepdims=True) + 1e-6)

    return _naive(q, k, v, weights=weights, **options)


@suite.mutant("attention_forward", "0/0 where nothing may be read", killed_by=(DEFINITION, DEAD))
def dead_row_not_guarded(q, k, v, **options):
    out, cache = right.attention_forward(q, k, v, **options)
    return np.where(np.isneginf(cache.lse)[..., None], np.nan, out), cache


@suite.mutant("attention_forward", "every query head reads the first", killed_by=DEFINITION)
def first_group_for_all(q, k, v, **options):
    k, v = (np.broadcast_to(x[..., :1, :, :], x.shape) for x in (k, v))
    return right.attention_forward(q, k, v, **options)


@suite.mutant("attention_forward", "(B, N, H, E) read as (B, H, N, E)", killed_by=DEFINITION)
def heads_merged_without_a_transpose(q, k, v, **options):
    out, cache = right.attention_forward(q, k, v, **options)
    return np.swapaxes(out, -2, -3).reshape(out.shape), cache


# ---- another question answered -------------------------------------------------------------------


def _asking(change):
    """A mutant that answers rightly, but of options that `change` made."""

    def answer(q, k, v, **options):
        return right.attention_forward(q, k, v, **{**options, **change(q, k, v, options)})

    answer.__name__ = change.__name__
    return answer


def _asking_of_mask(change):
    """The same, where only a mask changes: `change` gets all of it."""

    def changed(q, k, v, options):
        if options.get("keep") is None:
            return {}
        return {"keep": change(np.broadcast_to(options["keep"], right.score_shape(q, k, v)))}

    changed.__name__ = change.__name__
    return _asking(changed)


@suite.mutant("attention_forward", "1/√D is the caller's business", killed_by=DEFINITION)
@_asking
def scale_missing(q, k, v, options):
    return {} if options.get("scale") is not None else {"scale": 1.0}


@suite.mutant("attention_forward", "a kernel without it takes the option", killed_by=DEFINITION)
@_asking
def softcap_ignored(q, k, v, options):
    return {"softcap": None}


@suite.mutant("attention_forward", "a kernel without it takes the option", killed_by=DEFINITION)
@_asking
def bias_ignored(q, k, v, options):
    return {"bias": None}


@suite.mutant("attention_forward", "a penalty is taken off, a bias is added", killed_by=DEFINITION)
@_asking
def bias_subtracted(q, k, v, options):
    return {} if options.get("bias") is None else {"bias": -options["bias"]}


@suite.mutant("attention_forward", "no dropout where dropout was asked for", killed_by=DEFINITION)
@_asking
def multiplier_ignored(q, k, v, options):
    return {"multiplier": None}


@suite.mutant(
    "attention_forward",
    "a kernel without masks takes the option",
    killed_by=(DEFINITION, "a_masked_pair_has_no_influence", DEAD),
)
@_asking
def mask_ignored(q, k, v, options):
    return {"keep": None}


@suite.mutant(
    "attention_forward",
    "a stride of 0 along the batch",
    killed_by=(DEFINITION, "a_masked_pair_has_no_influence"),
)
@_asking_of_mask
def mask_of_the_first_batch_row(keep):
    return (
        np.broadcast_to(keep.reshape(-1, *keep.shape[-3:])[:1], keep.shape) if keep.size else keep
    )


@suite.mutant(
    "attention_forward",
    "a stride of 0 along the heads",
    killed_by=(DEFINITION, "a_masked_pair_has_no_influence"),
)
@_asking_of_mask
def mask_of_the_first_head(keep):
    return np.broadcast_to(keep[..., :1, :, :], keep.shape)


@suite.mutant(
    "attention_forward",
    "the mask counts from one, the keys from zero",
    killed_by=(DEFINITION, "a_masked_pair_has_no_influence"),
)
@_asking_of_mask
def mask_one_key_late(keep):
    return np.roll(keep, 1, axis=-1)


@suite.mutant("attention_forward", "j < M - 1: the ragged end is lost", killed_by=DEFINITION)
@_asking
def last_key_dropped(q, k, v, options):
    m = k.shape[-2]
    keep = np.broadcast_to(True if options.get("keep") is None else options["keep"],
        right.score_shape(q, k, v))  # fmt: skip
    return {"keep": keep & (np.arange(m) < max(m - 1, 1))}


# ---- backward ------------------------------------------------------------------------------------


@suite.mutant("attention_backward", "dK = dRᵀ Q without its s", killed_by=DERIVATIVE)
def scale_forgotten_in_the_gradient_of_the_keys(dout, cache, *, dlse=None):
    grads = right.attention_backward(dout, cache, dlse=dlse)
    return grads._replace(k=grads.k / cache.scale)


@suite.mutant(
    "attention_backward",
    "the query heads of a group averaged, not summed",
    killed_by=(DERIVATIVE, "gradients_agree_with_the_reference"),
)
def group_gradients_averaged(dout, cache, *, dlse=None):
    grads = right.attention_backward(dout, cache, dlse=dlse)
    repeat = cache.weights.shape[-3] // cache.k.shape[-3]
    return grads._replace(k=grads.k / repeat, v=grads.v / repeat)


@suite.mutant(
    "attention_backward",
    "dS = P ⊙ dP: the row that softmax subtracts is missing",
    killed_by=(DERIVATIVE, "a_common_shift_of_the_keys_has_no_gradient"),
)
def softmax_derivative_without_its_mean(dout, cache, *, dlse=None):
    alive = cache.lse != -np.inf
    mean = np.where(alive, (dout * cache.out).sum(axis=-1), 0)
    return right.attention_backward(dout, cache, dlse=mean if dlse is None else dlse + mean)


@suite.mutant(
    "attention_backward",
    "the dropped weights of the forward pass are back in the backward",
    killed_by=DERIVATIVE,
)
def multiplier_forgotten(dout, cache, *, dlse=None):
    return right.attention_backward(dout, cache._replace(multiplier=None), dlse=dlse)


@suite.mutant("attention_backward", "π where 1/π belongs", killed_by=DERIVATIVE)
def multiplier_inverted(dout, cache, *, dlse=None):
    if cache.multiplier is not None:
        z = cache.multiplier
        cache = cache._replace(multiplier=np.where(z == 0, 0, 1 / np.where(z == 0, 1, z)))
    return right.attention_backward(dout, cache, dlse=dlse)


@suite.mutant("attention_backward", "the LSE is an output too", killed_by=LSE_DERIVATIVE)
def lse_cotangent_ignored(dout, cache, *, dlse=None):
    return right.attention_backward(dout, cache)


@suite.mutant("attention_backward", "D - dL, not dL - D", killed_by=LSE_DERIVATIVE)
def lse_cotangent_with_the_wrong_sign(dout, cache, *, dlse=None):
    return right.attention_backward(dout, cache, dlse=None if dlse is None else -dlse)


@suite.mutant("attention_backward", "straight through the tanh", killed_by=DERIVATIVE)
def softcap_slope_forgotten(dout, cache, *, dlse=None):
    return right.attention_backward(dout, cache._replace(softcap=right.SoftcapCache(None)),
        dlse=dlse)  # fmt: skip


@suite.mutant(
    "attention_backward",
    "a bias shared by rows collects the gradient of one",
    killed_by="a_shared_bias_collects_from_all_it_was_added_to",
)
def gradient_of_a_broadcast_bias_not_summed(dout, cache, *, dlse=None):
    grads = right.attention_backward(dout, cache, dlse=dlse)
    if grads.bias is None or not grads.bias.size:
        return grads
    shape = cache.weights.shape
    stretched = math.prod(shape) // grads.bias.size
    return grads._replace(bias=grads.bias / max(stretched, 1))


@suite.mutant(
    "attention_backward",
    "a NaN cotangent of a dead row, times 0, into dV",
    killed_by=LEAK,
)
def cotangent_of_a_dead_row_let_in(dout, cache, *, dlse=None):
    grads = right.attention_backward(dout, cache, dlse=dlse)
    leak = 0 * dout.sum()
    return grads._replace(v=grads.v + leak)


@suite.mutant("attention_backward", "detached by a copy", killed_by=DERIVATIVE)
def keys_without_a_gradient(dout, cache, *, dlse=None):
    grads = right.attention_backward(dout, cache, dlse=dlse)
    return grads._replace(k=np.zeros_like(grads.k))


@suite.mutant("attention_backward", "detached by a copy", killed_by=DERIVATIVE)
def values_without_a_gradient(dout, cache, *, dlse=None):
    grads = right.attention_backward(dout, cache, dlse=dlse)
    return grads._replace(v=np.zeros_like(grads.v))


@suite.mutant("attention_backward", "a bias that was meant to learn", killed_by=DERIVATIVE)
def bias_without_a_gradient(dout, cache, *, dlse=None):
    grads = right.attention_backward(dout, cache, dlse=dlse)
    return grads if grads.bias is None else grads._replace(bias=np.zeros_like(grads.bias))
