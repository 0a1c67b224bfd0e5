"""Mistakes people make with a schedule."""

import math

import numpy as np

from minitransformer.checks.properties.stochastic.schedules import suite
from minitransformer.stochastic.schedules import Schedule as Right


@suite.mutant(
    "Schedule",
    "layers counted from 1: the first layer already drops less",
    killed_by=(
        "linear_falls_by_the_decrement_and_stops_at_zero",
        "geometric_falls_by_the_same_factor",
    ),
)
class layers_counted_from_one(Right):
    def _over_layers(self, layer, layers):
        shifted = layer if self.schedule in ("cosine", "increasing") else layer + 1
        return super()._over_layers(shifted, layers)


@suite.mutant(
    "Schedule",
    "p - δ l is negative from layer 6 on",
    killed_by=(
        "rates_are_probabilities",
        "linear_falls_by_the_decrement_and_stops_at_zero",
    ),
)
class not_stopped_at_zero(Right):
    def _over_layers(self, layer, layers):
        if self.schedule == "linear":
            return self.rate - self.decrement * layer
        return super()._over_layers(layer, layers)


@suite.mutant(
    "Schedule",
    "'decay 0.9' and 'minus 0.1' are two schedules, equal only at the first layer",
    killed_by="geometric_falls_by_the_same_factor",
)
class decay_subtracted(Right):
    def _over_layers(self, layer, layers):
        if self.schedule == "geometric":
            return max(0.0, self.rate - (1 - self.decay) * layer)
        return super()._over_layers(layer, layers)


@suite.mutant(
    "Schedule",
    "π l / L stops short of the last layer, which still drops",
    killed_by="cosine_is_a_half_wave",
)
class cosine_over_the_number_of_layers(Right):
    def _over_layers(self, layer, layers):
        if self.schedule == "cosine":
            return self.rate * 0.5 * (1 + math.cos(math.pi * layer / layers))
        return super()._over_layers(layer, layers)


@suite.mutant(
    "Schedule",
    "l / L: the first layer never drops, the last not fully",
    killed_by="increasing_ends_with_the_whole_rate",
)
class increasing_from_zero(Right):
    def _over_layers(self, layer, layers):
        if self.schedule == "increasing":
            return self.rate * layer / layers
        return super()._over_layers(layer, layers)


@suite.mutant(
    "Schedule",
    "the ramp never stops rising",
    killed_by=("rates_are_probabilities", "warmup_ends_when_it_says"),
)
class ramp_without_an_end(Right):
    def _over_training(self, step, steps):
        until = math.ceil(self.warmup_fraction * steps)
        return step / until if self.warmup == "ramp" and until else 1.0


@suite.mutant(
    "Schedule",
    "the whole training is the warm-up: the full rate is there at the last step",
    killed_by="warmup_ends_when_it_says",
)
class warmup_as_long_as_training(Right):
    def _over_training(self, step, steps):
        return step / steps if self.warmup == "ramp" else super()._over_training(step, steps)


@suite.mutant(
    "Schedule",
    "high first and low after: early dropout, the opposite regime",
    killed_by="warmup_ends_when_it_says",
)
class warmup_upside_down(Right):
    def _over_training(self, step, steps):
        until = self.warmup_fraction * steps
        return self.low if self.warmup == "hold" and step >= until else 1.0


@suite.mutant(
    "Schedule",
    "micro-batches counted as steps: the warm-up is over too soon",
    killed_by=("warmup_ends_when_it_says", "a_local_start_widens_to_everything"),
)
class micro_batches_counted(Right):
    def drop_rate(self, layer, layers, step, steps, heads=None):
        return super().drop_rate(layer, layers, 4 * step, steps, heads)


@suite.mutant(
    "Schedule",
    "widening starts from nothing: at first no layer drops at all",
    killed_by="a_local_start_widens_to_everything",
)
class nothing_reached_at_first(Right):
    def _reached(self, first, of, step, steps):
        return super()._reached(0, of, step, steps)


@suite.mutant(
    "Schedule",
    "the last heads first: reached and not reached change places",
    killed_by="a_local_start_widens_to_everything",
)
class last_heads_first(Right):
    def drop_rate(self, layer, layers, step, steps, heads=None):
        rate = super().drop_rate(layer, layers, step, steps, heads)
        return rate[::-1] if isinstance(rate, np.ndarray) else rate


@suite.mutant(
    "Schedule",
    "one head for ever: the local start is never widened",
    killed_by=(
        "a_local_start_widens_to_everything",
        "without_a_local_start_all_heads_share_one_rate",
    ),
)
class never_widened(Right):
    def drop_rate(self, layer, layers, step, steps, heads=None):
        rate = super().drop_rate(layer, layers, step, steps)
        return rate if heads is None else np.where(np.arange(heads) < self.first_heads, rate, 0.0)
