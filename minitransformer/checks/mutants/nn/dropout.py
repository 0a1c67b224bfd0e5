"""Mistakes people make with dropout."""

import numpy as np

from minitransformer.checks.properties.nn.dropout import suite
from minitransformer.nn import dropout as right
from minitransformer.nn.dropout import DropoutCache
from minitransformer.philox import Draw

LAW = "an_entry_is_dropped_or_scaled_up_by_the_mask_law"
IDENTITY = "nothing_dropped_is_the_identity_bitwise"
ZERO = "everything_dropped_is_zero"
MEAN = "the_mean_is_left_where_it_was"
SLICE = "a_slice_drops_what_the_whole_drops"
ANEW = "seed_step_and_layer_each_draw_anew"
DERIVATIVE = "dropout_backward_is_the_derivative"
NARROW = "narrow_numbers_are_rounded_once"
ALONE = "arguments_are_left_alone"


def _is_off(drop_rate, draw):
    return drop_rate == 0 or (not draw.training and draw.sample == 0)


def _times(x, factor):
    return (x * factor).astype(x.dtype), DropoutCache(factor)


@suite.mutant(
    "dropout_forward", "1/p for 1/(1 - p): right at one half alone", killed_by=(LAW, MEAN)
)
def scaled_by_the_drop_rate(x, *, drop_rate, draw, layer):
    out, cache = right.dropout_forward(x, drop_rate=drop_rate, draw=draw, layer=layer)
    if cache.factor is None:
        return out, cache
    return _times(x, (cache.factor != 0) / drop_rate)


@suite.mutant(
    "dropout_forward",
    "the first dropout scaled in evaluation: inverted dropout scales here",
    killed_by=(LAW, MEAN),
)
def not_scaled_up(x, *, drop_rate, draw, layer):
    out, cache = right.dropout_forward(x, drop_rate=drop_rate, draw=draw, layer=layer)
    return (out, cache) if cache.factor is None else _times(x, 1.0 * (cache.factor != 0))


@suite.mutant("dropout_forward", "keeps what it should drop", killed_by=(LAW, MEAN))
def kept_with_the_drop_rate(x, *, drop_rate, draw, layer):
    if _is_off(drop_rate, draw):
        return right.dropout_forward(x, drop_rate=drop_rate, draw=draw, layer=layer)
    return right.dropout_forward(x, drop_rate=1 - drop_rate, draw=draw, layer=layer)


@suite.mutant("dropout_forward", "`training` was never read", killed_by=IDENTITY)
def drops_in_evaluation(x, *, drop_rate, draw, layer):
    return right.dropout_forward(
        x, drop_rate=drop_rate, draw=draw._replace(training=True), layer=layer
    )


@suite.mutant(
    "dropout_forward", "scales in evaluation what training has scaled already", killed_by=IDENTITY
)
def scaled_in_evaluation(x, *, drop_rate, draw, layer):
    out, cache = right.dropout_forward(x, drop_rate=drop_rate, draw=draw, layer=layer)
    if cache.factor is None and not draw.training:
        return _times(x, np.full(x.shape, 1 - drop_rate))
    return out, cache


@suite.mutant(
    "dropout_forward",
    "a Monte-Carlo sample is evaluation, but one that drops",
    killed_by=(LAW, ANEW),
)
def samples_drop_nothing(x, *, drop_rate, draw, layer):
    if not draw.training:
        return x, DropoutCache(None)
    return right.dropout_forward(x, drop_rate=drop_rate, draw=draw, layer=layer)


@suite.mutant("dropout_forward", "0 · 1/0 is NaN where everything is dropped", killed_by=ZERO)
def division_by_zero_not_guarded(x, *, drop_rate, draw, layer):
    out, cache = right.dropout_forward(x, drop_rate=drop_rate, draw=draw, layer=layer)
    if cache.factor is None or drop_rate < 1:
        return out, cache
    return _times(x, cache.factor * (1 / np.float64(1 - drop_rate)))


@suite.mutant(
    "dropout_forward",
    "whole rows share one fate: that is another regulariser",
    killed_by=LAW,
)
def rows_dropped_whole(x, *, drop_rate, draw, layer):
    if _is_off(drop_rate, draw):
        return x, DropoutCache(None)
    _, cache = right.dropout_forward(x[..., :1], drop_rate=drop_rate, draw=draw, layer=layer)
    return _times(x, np.broadcast_to(cache.factor, x.shape) if x.size else np.ones(x.shape))


@suite.mutant(
    "dropout_forward",
    "a sequence of numbers, not a function of the place: a wider array shifts every row",
    killed_by=(LAW, SLICE),
)
def drawn_in_sequence(x, *, drop_rate, draw, layer):
    if _is_off(drop_rate, draw):
        return x, DropoutCache(None)
    rng = np.random.default_rng([*draw._replace(training=0), layer])
    kept = rng.random(x.shape) >= drop_rate
    return _times(x, kept / (1 - drop_rate) if drop_rate < 1 else 0.0 * kept)


@suite.mutant(
    "dropout_forward", "small entries first is pruning, not chance", killed_by=(LAW, SLICE)
)
def smallest_entries_dropped(x, *, drop_rate, draw, layer):
    if _is_off(drop_rate, draw):
        return x, DropoutCache(None)
    kept = np.abs(x) >= (np.quantile(np.abs(x), drop_rate) if x.size else 0)
    return _times(x, kept / (1 - drop_rate) if drop_rate < 1 else 0.0 * kept)


@suite.mutant("dropout_forward", "one mask for the whole training", killed_by=(LAW, ANEW))
def the_same_mask_at_every_step(x, *, drop_rate, draw, layer):
    return right.dropout_forward(x, drop_rate=drop_rate, draw=draw._replace(step=0), layer=layer)


@suite.mutant("dropout_forward", "one mask for every layer", killed_by=(LAW, ANEW))
def the_same_mask_in_every_layer(x, *, drop_rate, draw, layer):
    return right.dropout_forward(x, drop_rate=drop_rate, draw=draw, layer=0)


@suite.mutant("dropout_forward", "a float64 factor widens float32", killed_by=NARROW)
def factor_widens(x, *, drop_rate, draw, layer):
    out, cache = right.dropout_forward(x, drop_rate=drop_rate, draw=draw, layer=layer)
    return (out, cache) if cache.factor is None else (x * cache.factor.astype(float), cache)


@suite.mutant("dropout_forward", "saves an array, corrupts the caller's", killed_by=ALONE)
def dropped_in_place(x, *, drop_rate, draw, layer):
    out, cache = right.dropout_forward(x, drop_rate=drop_rate, draw=draw, layer=layer)
    x[...] = out
    return x, cache


@suite.mutant(
    "dropout_backward", "what was dropped learns all the same", killed_by=(DERIVATIVE, ZERO)
)
def straight_through_the_mask(dout, cache):
    return dout


@suite.mutant("dropout_backward", "the mask without its 1/π", killed_by=(DERIVATIVE, NARROW))
def scale_forgotten_in_the_backward(dout, cache):
    return dout if cache.factor is None else dout * (cache.factor != 0).astype(dout.dtype)


@suite.mutant(
    "dropout_backward",
    "a fresh mask: the gradient of another function",
    killed_by=(DERIVATIVE, NARROW),
)
def mask_redrawn_in_the_backward(dout, cache):
    if cache.factor is None or not cache.factor.any():
        return right.dropout_backward(dout, cache)
    rate = 1 - 1 / cache.factor.max()
    return right.dropout_forward(dout, drop_rate=rate, draw=Draw(0, 1), layer=0)[0]


@suite.mutant("dropout_backward", "overwrites the cotangent of its caller", killed_by=ALONE)
def cotangent_dropped_in_place(dout, cache):
    dx = right.dropout_backward(dout, cache)
    dout[...] = dx
    return dx
