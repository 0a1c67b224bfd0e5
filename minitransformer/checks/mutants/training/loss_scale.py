"""Mistakes people make when they scale a loss."""

import numpy as np

from minitransformer.checks.properties.training.loss_scale import suite
from minitransformer.training import loss_scale as right

DIGIT = "a_scale_moves_no_digit"
KEPT = "what_float16_loses_is_kept"
FOLLOWS = "the_scale_follows_the_steps"
FINDS = "it_finds_what_overflows"
ALONE = "arguments_are_left_alone"


@suite.mutant("unscaled", "S times too large", killed_by=(DIGIT, KEPT))
def not_divided(grad, scale):
    return right.unscaled(grad, 1.0) * 1


@suite.mutant("unscaled", "S² in the place of S", killed_by=(DIGIT, KEPT))
def divided_twice(grad, scale):
    return right.unscaled(right.unscaled(grad, scale), scale)


@suite.mutant("unscaled", "back to 0 in the storage type", killed_by=(DIGIT, KEPT))
def divided_in_float16(grad, scale):
    narrow = grad.astype(np.float16) / np.float16(min(scale, 60000))
    return narrow.astype(np.float32)


@suite.mutant("unscaled", "NaN is made 0, so that no step is lost", killed_by=DIGIT)
def overflow_hidden(grad, scale):
    return np.nan_to_num(right.unscaled(grad, scale))


@suite.mutant("unscaled", "the caller's array divided", killed_by=ALONE)
def divided_in_place(grad, scale):
    out = right.unscaled(grad, scale)
    if grad.dtype == out.dtype:
        grad[...] = out
    return out


@suite.mutant("next_scale", "it only shrinks", killed_by=(FOLLOWS, FINDS))
def never_grows(state, finite, *, patience=200, largest=right.LARGEST):
    found = right.next_scale(state, finite, patience=patience, largest=largest)
    return found if found.scale <= state.scale else right.LossScale(state.scale, 0)


@suite.mutant("next_scale", "it stays where it overflows", killed_by=(FOLLOWS, FINDS))
def never_shrinks(state, finite, *, patience=200, largest=right.LARGEST):
    return right.next_scale(state, True, patience=patience, largest=largest)


@suite.mutant("next_scale", "finite steps are counted on over an overflow", killed_by=FOLLOWS)
def count_not_started_again(state, finite, *, patience=200, largest=right.LARGEST):
    found = right.next_scale(state, finite, patience=patience, largest=largest)
    return found if finite else found._replace(good=min(state.good, patience - 1))


@suite.mutant("next_scale", "doubled at every finite step", killed_by=(FOLLOWS, FINDS))
def no_patience(state, finite, *, patience=200, largest=right.LARGEST):
    return right.next_scale(state, finite, patience=1, largest=largest)


@suite.mutant("next_scale", "a scale below 1", killed_by=FOLLOWS)
def no_least_scale(state, finite, *, patience=200, largest=right.LARGEST):
    if not finite:
        return right.LossScale(state.scale / 2, 0)
    return right.next_scale(
        state._replace(scale=max(state.scale, 1.0)), True, patience=patience, largest=largest
    )


@suite.mutant("next_scale", "no largest scale", killed_by=FOLLOWS)
def no_largest_scale(state, finite, *, patience=200, largest=right.LARGEST):
    return right.next_scale(state, finite, patience=patience, largest=2.0**60)


@suite.mutant("next_scale", "halved when finite, doubled when not", killed_by=(FOLLOWS, FINDS))
def the_other_way_round(state, finite, *, patience=200, largest=right.LARGEST):
    if finite:
        return right.LossScale(max(state.scale / 2, 1.0), 0)
    return right.LossScale(min(state.scale * 2, largest), 0)
