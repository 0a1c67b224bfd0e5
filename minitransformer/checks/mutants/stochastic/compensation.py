"""Mistakes people make when they drop attention at random."""

import numpy as np

from minitransformer.attention.dense import attention_forward
from minitransformer.attention.softmax import softcap_forward
from minitransformer.checks.properties.stochastic.compensation import suite
from minitransformer.stochastic import compensation as right
from minitransformer.stochastic.samplers import RandomMask, is_active, resolve

RENORMALISED = "renormalised_is_softmax_of_what_is_kept"
INVERTED = "inverted_is_full_attention_times_the_multiplier"


def _drawn(q, k, v, random_mask, draw, layer, keep, options):
    """The mask that the mechanism would draw, or None where it draws nothing; proposals made of
    scores are left to the mechanism."""
    drop_rate = options.pop("drop_rate", None)
    if not is_active(random_mask, draw, drop_rate) or random_mask.proposal == "scores":
        return None
    shape = (*q.shape[:-1], k.shape[-2])
    return resolve(random_mask, draw, layer, shape, keep=keep, drop_rate=drop_rate)


def _whole(keep, sampled):
    return np.broadcast_to(True if keep is None else keep, sampled.keep.shape)


@suite.mutant(
    "stochastic_attention_forward",
    "a zeroed logit keeps the weight exp(0): the mask multiplied into the scores",
    killed_by=RENORMALISED,
)
def logits_multiplied_by_the_mask(q, k, v, *, random_mask, draw, layer, keep=None, **options):
    sampled = _drawn(q, k, v, random_mask, draw, layer, keep, options)
    if sampled is None or random_mask.compensation == "inverted":
        return right.stochastic_attention_forward(
            q, k, v, random_mask=random_mask, draw=draw, layer=layer, keep=keep, **options
        )
    # the bias that makes a dropped logit 0: minus the score itself
    scores = _scores(q, k, options)
    bias = np.where(sampled.keep, scores, 0.0)
    options["bias"], options["softcap"] = bias, None
    out, cache = attention_forward(np.zeros_like(q), k, v, keep=keep, **options)
    return out, right.StochasticCache(cache, sampled.keep, None)


def _scores(q, k, options):
    k = np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    scores = softcap_forward(scores, options.get("softcap"))[0]
    return scores + (0 if options.get("bias") is None else options["bias"])


@suite.mutant(
    "stochastic_attention_forward",
    "-1e9 for minus infinity: a row with nothing left becomes the mean of masked values",
    killed_by=RENORMALISED,
)
def minus_a_billion_for_a_dropped_pair(q, k, v, *, random_mask, draw, layer, keep=None, **options):
    sampled = _drawn(q, k, v, random_mask, draw, layer, keep, options)
    if sampled is None or random_mask.compensation == "inverted":
        return right.stochastic_attention_forward(
            q, k, v, random_mask=random_mask, draw=draw, layer=layer, keep=keep, **options
        )
    fill = np.where(sampled.keep, 0.0, -1e9)
    options["bias"] = fill if options.get("bias") is None else options["bias"] + fill
    out, cache = attention_forward(q, k, v, **options)
    return out, right.StochasticCache(cache, sampled.keep, None)


def _multiplied(q, k, v, random_mask, draw, layer, keep, options, multiplier):
    """Full attention times `multiplier(sampled)`, which is None to leave the mechanism as it is."""
    given = dict(options)
    sampled = _drawn(q, k, v, random_mask, draw, layer, keep, given)
    factor = None if sampled is None else multiplier(sampled)
    if factor is None:
        return right.stochastic_attention_forward(
            q, k, v, random_mask=random_mask, draw=draw, layer=layer, keep=keep, **options
        )
    out, cache = attention_forward(q, k, v, keep=keep, multiplier=factor, **given)
    return out, right.StochasticCache(cache, sampled.keep, None)


@suite.mutant(
    "stochastic_attention_forward",
    "dropped after softmax and not made up for: rows sum to less than 1",
    killed_by=(RENORMALISED, "a_shift_of_the_values_shifts_renormalised_rows"),
)
def dropped_and_not_compensated(q, k, v, *, random_mask, draw, layer, keep=None, **options):
    def multiplier(sampled):
        renormalise = random_mask.compensation != "inverted" and random_mask.kind != "head"
        return sampled.keep.astype(float) if renormalise else None

    return _multiplied(q, k, v, random_mask, draw, layer, keep, options, multiplier)


@suite.mutant(
    "stochastic_attention_forward", "1/p for 1/(1 - p): right at p = 0.5 only", killed_by=INVERTED
)
def scaled_by_one_over_the_drop_rate(q, k, v, *, random_mask, draw, layer, keep=None, **options):
    def multiplier(sampled):
        element = random_mask.compensation == "inverted" and random_mask.kind == "element"
        return sampled.keep / max(random_mask.rate, 1e-9) if element else None

    return _multiplied(q, k, v, random_mask, draw, layer, keep, options, multiplier)


@suite.mutant(
    "stochastic_attention_forward",
    "a protected pair is certain: it must not be scaled",
    killed_by=INVERTED,
)
def protected_pairs_scaled(q, k, v, *, random_mask, draw, layer, keep=None, **options):
    def multiplier(sampled):
        element = random_mask.compensation == "inverted" and random_mask.kind == "element"
        return sampled.keep / max(1 - random_mask.rate, 1e-9) if element else None

    return _multiplied(q, k, v, random_mask, draw, layer, keep, options, multiplier)


@suite.mutant(
    "stochastic_attention_forward",
    "inverted with a renormalised denominator: kept weights grow twice",
    killed_by=INVERTED,
)
def renormalised_and_inverted(q, k, v, *, random_mask, draw, layer, keep=None, **options):
    given = dict(options)
    sampled = _drawn(q, k, v, random_mask, draw, layer, keep, given)
    if sampled is None or random_mask.compensation != "inverted":
        return right.stochastic_attention_forward(
            q, k, v, random_mask=random_mask, draw=draw, layer=layer, keep=keep, **options
        )
    out, cache = attention_forward(
        q, k, v, keep=sampled.keep, multiplier=sampled.multiplier, **given
    )
    return out, right.StochasticCache(cache, sampled.keep, None)


@suite.mutant(
    "stochastic_attention_forward",
    "no training flag: the model is random when it answers",
    killed_by="nothing_dropped_is_dense_attention_bitwise",
)
def mask_active_in_evaluation(q, k, v, *, random_mask, draw, **options):
    return right.stochastic_attention_forward(
        q, k, v, random_mask=random_mask, draw=draw._replace(training=True), **options
    )


@suite.mutant(
    "stochastic_attention_forward",
    "the weights pass through a product with 1 / sum: close to dense, not equal",
    killed_by="nothing_dropped_is_dense_attention_bitwise",
)
def renormalised_once_more(q, k, v, **options):
    out, cache = right.stochastic_attention_forward(q, k, v, **options)
    return out * (1 + 2.0**-50), cache


@suite.mutant(
    "stochastic_attention_forward",
    "one mask broadcast over the batch",
    killed_by=(RENORMALISED, INVERTED),
)
def one_mask_for_the_whole_batch(q, k, v, *, random_mask, draw, layer, keep=None, **options):
    given = dict(options)
    sampled = _drawn(q, k, v, random_mask, draw, layer, None, given)
    if sampled is None:
        return right.stochastic_attention_forward(
            q, k, v, random_mask=random_mask, draw=draw, layer=layer, keep=keep, **options
        )
    first = right.Sampled(
        *(x if x is None else np.broadcast_to(x[:1], sampled.keep.shape) for x in sampled)
    )
    return right.compensated_attention_forward(
        q, k, v, sampled=first._replace(keep=first.keep & _whole(keep, first)),
        compensation=random_mask.compensation, keep=keep, **given,
    )  # fmt: skip


@suite.mutant(
    "stochastic_attention_forward",
    "the random mask in place of the structural one: queries see the future",
    killed_by=(RENORMALISED, "what_nobody_may_read_changes_nothing"),
)
def structural_mask_forgotten(q, k, v, *, random_mask, draw, keep=None, **options):
    kept = keep if not is_active(random_mask, draw, options.get("drop_rate")) else None
    return right.stochastic_attention_forward(
        q, k, v, random_mask=random_mask, draw=draw, keep=kept, check_finite=False, **options
    )


@suite.mutant(
    "stochastic_attention_forward", "every layer drops the same pairs", killed_by=RENORMALISED
)
def layer_forgotten(q, k, v, *, layer, **options):
    return right.stochastic_attention_forward(q, k, v, layer=0, **options)


@suite.mutant(
    "stochastic_attention_forward",
    "the result keeps the width it was computed in",
    killed_by="dtype_in_is_dtype_out",
)
def widened_for_ever(q, k, v, **options):
    wide = (x.astype(np.result_type(x, np.float32)) for x in (q, k, v))
    return right.stochastic_attention_forward(*wide, **options)


# ---- data in place of a draw ---------------------------------------------------------------------


@suite.mutant(
    "compensated_attention_forward",
    "renormalised where inverted was asked for: biased towards flat rows",
    killed_by="inverted_is_unbiased_with_the_known_variance",
)
def always_renormalised(q, k, v, *, sampled, compensation, **options):
    return right.compensated_attention_forward(
        q, k, v, sampled=sampled._replace(multiplier=None), compensation="renormalise", **options
    )


@suite.mutant(
    "compensated_attention_forward",
    "the mean is right and the variance too small: every pair shrunk to its expectation",
    killed_by="inverted_is_unbiased_with_the_known_variance",
)
def expectation_in_place_of_the_draw(q, k, v, *, sampled, compensation, **options):
    if compensation != "inverted":
        return right.compensated_attention_forward(
            q, k, v, sampled=sampled, compensation=compensation, **options
        )
    out, cache = attention_forward(q, k, v, **options)
    return out, right.StochasticCache(cache, sampled.keep, None)


@suite.mutant(
    "compensated_attention_forward",
    "a row with nothing left falls back to full attention",
    killed_by="renormalised_uniform_rows_lose_only_the_empty_ones",
)
def empty_rows_attend_to_everything(q, k, v, *, sampled, compensation, keep=None, **options):
    empty = ~sampled.keep.any(axis=-1, keepdims=True)
    return right.compensated_attention_forward(
        q, k, v, sampled=sampled._replace(keep=sampled.keep | (empty & _whole(keep, sampled))),
        compensation=compensation, keep=keep, **options,
    )  # fmt: skip


# ---- backward ------------------------------------------------------------------------------------

DERIVATIVE = "stochastic_attention_backward_is_the_derivative"


@suite.mutant(
    "stochastic_attention_backward",
    "the mask drawn again in the backward pass, and differently",
    killed_by=DERIVATIVE,
)
def mask_drawn_again(dout, cache):
    if cache.keep is None:
        return right.stochastic_attention_backward(dout, cache)
    weights = cache.attention.weights
    shape = weights.shape
    again = resolve(RandomMask("element"), right.Draw(0), 0, shape).keep & (weights > 0)
    redrawn = weights * again
    total = redrawn.sum(axis=-1, keepdims=True)
    redrawn = redrawn / np.where(total == 0, 1, total)
    attention = cache.attention._replace(weights=redrawn)
    return right.stochastic_attention_backward(dout, cache._replace(attention=attention))


def _with_multiplier(dout, cache, change):
    attention = cache.attention
    if attention.multiplier is not None:
        attention = attention._replace(multiplier=change(attention.multiplier))
    return right.stochastic_attention_backward(dout, cache._replace(attention=attention))


@suite.mutant(
    "stochastic_attention_backward",
    "the backward pass forgets that weights were scaled",
    killed_by=DERIVATIVE,
)
def multiplier_forgotten(dout, cache):
    return _with_multiplier(dout, cache, lambda m: (m > 0).astype(m.dtype))


@suite.mutant(
    "stochastic_attention_backward",
    "multiplied by 1 - p where the forward pass divided by it",
    killed_by=DERIVATIVE,
)
def multiplier_upside_down(dout, cache):
    return _with_multiplier(dout, cache, lambda m: np.where(m > 0, 1 / np.where(m > 0, m, 1), 0))


@suite.mutant(
    "stochastic_attention_backward",
    "the denominator held constant by default: dropped logits get a gradient",
    killed_by="dropped_pairs_get_exactly_no_gradient",
)
def gradient_leaks_to_dropped_pairs(dout, cache):
    grads = right.stochastic_attention_backward(dout, cache)
    if cache.keep is None or grads.bias is None:
        return grads
    mean = grads.bias.sum(axis=-1, keepdims=True) - (cache.weights.max(axis=-1, keepdims=True))
    return grads._replace(bias=np.where(cache.keep, grads.bias, mean))


@suite.mutant(
    "stochastic_attention_backward",
    "stop-gradient asked for, the true derivative given",
    killed_by="stop_gradient_is_the_derivative_with_a_constant_denominator",
)
def denominator_differentiated(dout, cache):
    return right.stochastic_attention_backward(dout, cache._replace(full=None))


@suite.mutant(
    "stochastic_attention_backward",
    "the cotangent of an empty row is read",
    killed_by="dropped_pairs_get_exactly_no_gradient",
)
def cotangent_of_an_empty_row_read(dout, cache):
    grads = right.stochastic_attention_backward(dout, cache)
    poison = 0 * dout.sum()
    return grads._replace(v=grads.v + poison)
