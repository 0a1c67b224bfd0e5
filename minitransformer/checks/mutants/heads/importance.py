"""Mistakes people make when they say what a head is worth."""

import numpy as np

from minitransformer.arrays import unbroadcast
from minitransformer.checks.properties.heads.importance import suite
from minitransformer.heads import importance as right

SCALES = "a_gate_scales_its_head"
DERIVATIVE = "gate_backward_is_the_derivative"
STANDS = "the_absolute_value_stands_where_it_is_said"
LAYER = "importance_is_felt_through_a_layer"
CANCEL = "a_larger_unit_can_only_cancel"
BATCHES = "batches_of_any_size_average_to_the_whole"
NOBODY = "a_head_that_nobody_listens_to_is_worth_nothing"
LENGTH = "a_layer_has_length_one"
KNOWS = "what_the_gradient_guesses_ablation_knows"
ORDER = "heads_in_another_order_keep_their_worth"
WIDE = "narrow_products_are_summed_wide"
ALONE = "arguments_are_left_alone"


# ---- gates ---------------------------------------------------------------------------------------


@suite.mutant(
    "gate_heads_forward", "the last axis is the width, not the heads", killed_by=(SCALES, LAYER),
    crashes=True,
)  # fmt: skip
def channels_gated(out, gates):
    gated, cache = right.gate_heads_forward(out, gates)
    heads, width = out.shape[-3], out.shape[-1]
    if gates.ndim != 1 or len(gates) != heads:
        return gated, cache
    return out * np.resize(gates, width), cache


@suite.mutant("gate_heads_forward", "a gate is open or shut", killed_by=(SCALES, LAYER, DERIVATIVE))
def gate_rounded_to_a_bit(out, gates):
    return right.gate_heads_forward(out, (gates.real > 0.5).astype(gates.dtype))


@suite.mutant("gate_heads_forward", "those that stay speak louder", killed_by=(SCALES, DERIVATIVE))
def rescaled_like_drophead(out, gates):
    gated, cache = right.gate_heads_forward(out, gates)
    total = gates.sum()
    return gated * (gates.size / total if total != 0 else 1), cache


@suite.mutant(
    "gate_heads_forward", "saves an array, spoils the caller's", killed_by=(ALONE, SCALES)
)
def output_gated_in_place(out, gates):
    cache = right.GateCache(out.copy(), gates)
    out *= gates[..., None, None]
    return out, cache


@suite.mutant("gate_heads_backward", "as if the gate were always 1", killed_by=DERIVATIVE)
def gate_missing_in_the_gradient(dout, cache):
    return right.gate_heads_backward(dout, cache)._replace(out=dout.copy())


@suite.mutant("gate_heads_backward", "the mean over what shares the gate", killed_by=DERIVATIVE)
def gate_gradient_averaged(dout, cache):
    grads = right.gate_heads_backward(dout, cache)
    heads = max(int(np.prod(cache.out.shape[:-2])), 1)
    return grads._replace(gates=grads.gates * (cache.gates.size / heads))


@suite.mutant("gate_heads_backward", "the gated output for the output", killed_by=DERIVATIVE)
def gated_output_in_the_gradient(dout, cache):
    grads = right.gate_heads_backward(dout, cache)
    return grads._replace(gates=grads.gates * cache.gates)


@suite.mutant("gate_heads_backward", "bfloat16 ones stop at 256", killed_by=WIDE)
def gate_gradient_summed_in_the_storage_type(dout, cache):
    grads = right.gate_heads_backward(dout, cache)
    products = (cache.out * dout).reshape(*cache.out.shape[:-2], -1 if dout.size else 0)
    total = np.zeros(products.shape[:-1], dout.dtype)
    for i in range(products.shape[-1]):
        total = (total + products[..., i]).astype(dout.dtype)
    return grads._replace(gates=unbroadcast(total, cache.gates.shape))


@suite.mutant("gate_heads_backward", "saves an array, spoils the caller's", killed_by=ALONE)
def cotangent_gated_in_place(dout, cache):
    grads = right.gate_heads_backward(dout, cache)
    dout *= cache.gates[..., None, None]
    return grads


# ---- importance ----------------------------------------------------------------------------------


def _felt(out, dout):
    return (out * dout).sum(axis=(-2, -1))


def _examples(out):
    return tuple(range(out.ndim - 3)), max(int(np.prod(out.shape[:-3])), 1)


@suite.mutant(
    "head_importance",
    "|·| after the data set was averaged: what some need and others suffer from cancels",
    killed_by=(STANDS, LAYER, BATCHES),
)
def absolute_value_last(out, dout, *, granularity):
    return right.head_importance(out, dout, granularity="batch")


@suite.mutant("head_importance", "|·| of every token, always", killed_by=(STANDS, LAYER, BATCHES))
def absolute_value_per_token(out, dout, *, granularity):
    return right.head_importance(out, dout, granularity="token")


@suite.mutant("head_importance", "|·| of every channel: no unit at all", killed_by=(STANDS, CANCEL))
def absolute_value_per_channel(out, dout, *, granularity):
    if granularity == "batch":
        return right.head_importance(out, dout, granularity=granularity)
    axes, count = _examples(out)
    return np.abs(out * dout).sum(axis=(*axes, -2, -1)) / count


@suite.mutant("head_importance", "no |·|: harm is less than nothing", killed_by=(STANDS, CANCEL))
def absolute_value_forgotten(out, dout, *, granularity):
    axes, count = _examples(out)
    return _felt(out, dout).sum(axis=axes) / count


@suite.mutant(
    "head_importance", "the sum: more data, more worth", killed_by=(STANDS, LAYER, BATCHES)
)
def not_divided_by_the_examples(out, dout, *, granularity):
    return right.head_importance(out, dout, granularity=granularity) * _examples(out)[1]


@suite.mutant(
    "head_importance", "by tokens here, by examples there: the units compare no more",
    killed_by=(STANDS, CANCEL),
)  # fmt: skip
def tokens_averaged(out, dout, *, granularity):
    found = right.head_importance(out, dout, granularity=granularity)
    return found / max(out.shape[-2], 1) if granularity == "token" else found


@suite.mutant("head_importance", "|o| · |do|: no angle", killed_by=(STANDS, LAYER))
def product_of_the_norms(out, dout, *, granularity):
    axes, count = _examples(out)
    norms = np.sqrt((out**2).sum(axis=(-2, -1)) * (dout**2).sum(axis=(-2, -1)))
    return norms.sum(axis=axes) / count


@suite.mutant("head_importance", "loud is not important", killed_by=(STANDS, LAYER, NOBODY, KNOWS))
def norm_of_the_output(out, dout, *, granularity):
    axes, count = _examples(out)
    return np.sqrt((out**2).sum(axis=(-2, -1))).sum(axis=axes) / count


@suite.mutant(
    "head_importance", "the gradient, without what it multiplies", killed_by=(STANDS, KNOWS)
)
def norm_of_the_gradient(out, dout, *, granularity):
    axes, count = _examples(out)
    return np.sqrt((dout**2).sum(axis=(-2, -1))).sum(axis=axes) / count


@suite.mutant("head_importance", "shares of a whole", killed_by=(STANDS, LAYER, BATCHES))
def divided_by_the_layers_sum(out, dout, *, granularity):
    found = right.head_importance(out, dout, granularity=granularity)
    total = found.sum()
    return found / total if total else found


@suite.mutant("head_importance", "in units of the first head", killed_by=(STANDS, ORDER))
def measured_against_the_first_head(out, dout, *, granularity):
    found = right.head_importance(out, dout, granularity=granularity)
    return found / max(found[0], 1e-9)


@suite.mutant("head_importance", "bfloat16 ones stop at 256", killed_by=WIDE)
def products_summed_in_the_storage_type(out, dout, *, granularity):
    found = right.head_importance(out, dout, granularity=granularity)
    products = np.moveaxis(out * dout, -3, 0).reshape(len(found), -1)
    total = np.zeros(len(found), out.dtype)
    for column in products.T:
        total = (total + column).astype(out.dtype)
    return np.abs(total).astype(found.dtype)


# ---- beside other layers -------------------------------------------------------------------------


@suite.mutant("normalised_importance", "one norm for all layers", killed_by=LENGTH)
def layers_share_a_norm(importance):
    norm = np.sqrt((importance**2).sum())
    return importance / (norm if norm else 1)


@suite.mutant("normalised_importance", "shares, whose sum is 1", killed_by=LENGTH)
def importances_as_shares(importance):
    total = importance.sum(axis=-1, keepdims=True)
    return importance / np.where(total > 0, total, 1)


@suite.mutant("normalised_importance", "0/0 where nothing is felt", killed_by=LENGTH)
def idle_layer_divided_by_zero(importance):
    return importance / np.sqrt((importance**2).sum(axis=-1, keepdims=True))


@suite.mutant("normalised_importance", "an epsilon as large as a late gradient", killed_by=LENGTH)
def epsilon_in_the_norm(importance):
    return importance / (np.sqrt((importance**2).sum(axis=-1, keepdims=True)) + 1e-8)


@suite.mutant("normalised_importance", "the largest is 1", killed_by=LENGTH)
def divided_by_the_largest(importance):
    largest = importance.max(axis=-1, keepdims=True, initial=0)
    return importance / np.where(largest > 0, largest, 1)


@suite.mutant("head_ablation", "with less without", killed_by=KNOWS)
def ablation_with_the_other_sign(loss, heads):
    return -right.head_ablation(loss, heads)


@suite.mutant("head_ablation", "all but the head are silenced", killed_by=KNOWS)
def only_the_head_is_left(loss, heads):
    whole = loss(np.ones(heads))
    return np.array([loss(np.eye(heads)[h]) - whole for h in range(heads)])


@suite.mutant("head_ablation", "the one before is still silent", killed_by=KNOWS)
def heads_stay_removed(loss, heads):
    gates, whole, found = np.ones(heads), loss(np.ones(heads)), []
    for h in range(heads):
        gates[h] = 0
        found.append(loss(gates) - whole)
    return np.array(found)


@suite.mutant("head_ablation", "the worth of a head is never negative", killed_by=KNOWS)
def harm_counted_as_worth(loss, heads):
    return np.abs(right.head_ablation(loss, heads))
