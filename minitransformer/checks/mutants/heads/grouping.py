"""Mistakes people make when they share key/value heads."""

import numpy as np

from minitransformer.checks.properties.heads.grouping import suite
from minitransformer.heads import grouping as right

MEAN = "a_shared_head_is_the_mean_of_its_neighbours"
AGREE = "heads_that_agree_lose_nothing"
NEAREST = "no_shared_head_is_nearer_than_the_mean"
ROTATED = "averaged_keys_may_be_turned"
COPIES = "copies_stand_side_by_side"
MORE = "more_heads_change_no_output"
STEPS = "two_steps_are_one"
POOL_D = "pool_backward_is_the_derivative"
EXPAND_D = "expand_backward_is_the_derivative"
LEARNS = "a_shared_head_learns_from_all_its_queries"
NARROW = "narrow_weights_are_averaged_wide"
ALONE = "arguments_are_left_alone"


def _members(weight, heads, groups):
    """(…, G, H/G, D)"""
    width = weight.shape[-1] // heads
    return weight.reshape(*weight.shape[:-1], groups, heads // groups, width)


def _pooled(compute):
    """A mutant of the mean: `compute(members, size)` gives (…, G, D)."""

    def made(weight, heads, groups):
        out, cache = right.pool_heads_forward(weight, heads, groups)
        if not out.size:
            return out, cache
        mean = compute(_members(weight, heads, groups), heads // groups)
        return mean.reshape(out.shape).astype(out.dtype), cache

    made.__name__ = compute.__name__
    return made


# ---- fewer ---------------------------------------------------------------------------------------


@suite.mutant("pool_heads_forward", "heads h, h + G, h + 2G … share", killed_by=(MEAN, ROTATED))
def strided_groups(weight, heads, groups):
    out, cache = right.pool_heads_forward(weight, heads, groups)
    width = weight.shape[-1] // heads
    split = weight.reshape(*weight.shape[:-1], heads // groups, groups, width)
    return split.mean(axis=-3).reshape(out.shape).astype(out.dtype), cache


@suite.mutant("pool_heads_forward", "the sum", killed_by=(MEAN, NEAREST, ROTATED, COPIES))
@_pooled
def heads_summed(members, size):
    return members.sum(axis=-2)


@suite.mutant(
    "pool_heads_forward", "the first of each group will do", killed_by=(MEAN, NEAREST, ROTATED)
)
@_pooled
def first_head_for_all(members, size):
    return members[..., 0, :]


@suite.mutant(
    "pool_heads_forward",
    "a normalised sum: right for the variance of independent heads",
    killed_by=(MEAN, NEAREST, COPIES),
)
@_pooled
def divided_by_the_root(members, size):
    return members.sum(axis=-2) / np.sqrt(size)


@suite.mutant("pool_heads_forward", "one head for all groups", killed_by=(MEAN, COPIES))
@_pooled
def groups_averaged_too(members, size):
    mean = members.mean(axis=(-3, -2), keepdims=True)[..., 0, :]
    return np.broadcast_to(mean, (*members.shape[:-2], members.shape[-1]))


@suite.mutant(
    "pool_heads_forward", "channels of one head averaged with each other", killed_by=(MEAN, ROTATED)
)
def channels_averaged(weight, heads, groups):
    out, cache = right.pool_heads_forward(weight, heads, groups)
    if not out.size:
        return out, cache
    size = heads // groups
    return weight.reshape(*out.shape, size).mean(axis=-1).astype(out.dtype), cache


@suite.mutant("pool_heads_forward", "added up as it is stored", killed_by=NARROW)
@_pooled
def averaged_in_the_storage_type(members, size):
    total = np.zeros_like(members[..., 0, :])
    for i in range(size):
        total = (total + members[..., i, :]).astype(members.dtype)
    return total / np.asarray(size).astype(members.dtype)


@suite.mutant("pool_heads_backward", "the mean's factor forgotten", killed_by=POOL_D)
def pooled_gradient_undivided(dout, cache):
    return right.pool_heads_backward(dout, cache) * (cache.heads // cache.after)


@suite.mutant("pool_heads_backward", "copies of all heads, in turn", killed_by=POOL_D)
def pooled_gradient_tiled(dout, cache):
    size = cache.heads // cache.after
    return np.tile(dout, size) / size


# ---- more ----------------------------------------------------------------------------------------


def _tiled(weight, groups, heads):
    _, cache = right.expand_heads_forward(weight, groups, heads)
    return np.tile(weight, heads // groups), cache


@suite.mutant(
    "expand_heads_forward",
    "0 1 0 1 for 0 0 1 1: https://github.com/onnx/onnx/pull/7274",
    killed_by=(COPIES, EXPAND_D, LEARNS),
)
def tiled_instead_of_repeated(weight, groups, heads):
    return _tiled(weight, groups, heads)


@suite.mutant("expand_heads_forward", "every channel twice", killed_by=(COPIES, EXPAND_D))
def channels_repeated(weight, groups, heads):
    _, cache = right.expand_heads_forward(weight, groups, heads)
    return np.repeat(weight, heads // groups, axis=-1), cache


@suite.mutant("expand_heads_forward", "shared out among the copies", killed_by=(COPIES, EXPAND_D))
def copies_divided(weight, groups, heads):
    out, cache = right.expand_heads_forward(weight, groups, heads)
    return out / (heads // groups), cache


@suite.mutant(
    "expand_heads_backward",
    "the mean over the copies: https://github.com/marin-community/levanter/pull/449",
    killed_by=(EXPAND_D, LEARNS, NARROW),
)
def shared_gradient_averaged(dout, cache):
    return (right.expand_heads_backward(dout, cache) / (cache.after // cache.heads)).astype(
        cache.dtype
    )


@suite.mutant("expand_heads_backward", "the last copy wins", killed_by=(EXPAND_D, LEARNS))
def gradient_of_the_last_copy(dout, cache):
    members = _members(dout, cache.after, cache.heads)
    return members[..., -1, :].reshape(cache.shape)


@suite.mutant("expand_heads_backward", "bfloat16 ones stop at 256", killed_by=NARROW)
def gradient_summed_in_the_storage_type(dout, cache):
    members = _members(dout, cache.after, cache.heads)
    total = np.zeros_like(members[..., 0, :])
    for i in range(members.shape[-2]):
        total = (total + members[..., i, :]).astype(dout.dtype)
    return total.reshape(cache.shape)


@suite.mutant("expand_heads_backward", "saves an array, spoils the caller's", killed_by=ALONE)
def cotangent_collected_in_place(dout, cache):
    members = dout.reshape(
        *dout.shape[:-1], cache.heads, cache.after // cache.heads, -1 if dout.size else 0
    )
    for i in range(1, members.shape[-2]):
        members[..., 0, :] += members[..., i, :]
    return members[..., 0, :].reshape(cache.shape)


# ---- a whole layer -------------------------------------------------------------------------------


@suite.mutant(
    "regroup",
    "biases are forgotten: the old ones no longer fit, so none",
    killed_by=(AGREE, MORE, STEPS),
    crashes=True,
)
def biases_dropped(projections, heads, after):
    found = right.regroup(projections, heads, after)
    return found._replace(key_bias=None, value_bias=None)


@suite.mutant(
    "regroup",
    "the key's bias is felt by no softmax, and the value's goes with it",
    killed_by=(AGREE, MORE, STEPS),
)
def bias_of_the_values_zeroed(projections, heads, after):
    found = right.regroup(projections, heads, after)
    if found.value_bias is None:
        return found
    return found._replace(value_bias=0 * found.value_bias)


@suite.mutant("regroup", "weights averaged, biases cut off", killed_by=(AGREE, STEPS))
def first_biases_taken(projections, heads, after):
    found = right.regroup(projections, heads, after)
    if found.value_bias is None or after > heads:
        return found
    return found._replace(
        key_bias=projections.key_bias[: found.key_bias.size].copy(),
        value_bias=projections.value_bias[: found.value_bias.size].copy(),
    )


@suite.mutant("regroup", "keys averaged, values of the first heads", killed_by=(AGREE, STEPS))
def first_values_taken(projections, heads, after):
    found = right.regroup(projections, heads, after)
    if after > heads:
        return found
    return found._replace(value=projections.value[..., : found.value.shape[-1]].copy())


@suite.mutant("regroup", "biases add up", killed_by=(AGREE, STEPS))
def biases_summed(projections, heads, after):
    found = right.regroup(projections, heads, after)
    if found.value_bias is None or after >= heads:
        return found
    return found._replace(value_bias=found.value_bias * (heads // after))


@suite.mutant(
    "regroup",
    "0 1 0 1 for 0 0 1 1, in the whole layer: https://github.com/onnx/onnx/pull/7274",
    killed_by=MORE,
)
def layer_tiled(projections, heads, after):
    if after <= heads:
        return right.regroup(projections, heads, after)
    return right.KeyValueProjections(
        *(None if x is None else _tiled(x, heads, after)[0] for x in projections)
    )


@suite.mutant("regroup", "nothing to do, so the same arrays", killed_by=ALONE)
def same_number_is_a_view(projections, heads, after):
    return projections if heads == after else right.regroup(projections, heads, after)


@suite.mutant("grouping_distance", "from the mean of all heads", killed_by=NEAREST)
def distance_from_one_head(weight, heads, groups):
    return right.grouping_distance(weight, heads, 1)


@suite.mutant("grouping_distance", "a mean over the entries", killed_by=NEAREST)
def distance_averaged(weight, heads, groups):
    return right.grouping_distance(weight, heads, groups) / max(weight.size, 1)
