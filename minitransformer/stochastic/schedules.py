"""How much to drop: the rate as a function of layer, head and training step.

Over the layers l = 0 .. L - 1, from the rate p of the first:

    constant     p_l = p
    linear       p_l = max(0, p - δ l)  (Eq. 6.1)
    geometric    p_l = p γ^l  (Eq. 6.2)
    cosine       p_l = p · ½ (1 + cos(π l / (L - 1)))  (Eq. 6.3)
    increasing   p_l = p (l + 1) / L, the other direction  (Eq. 6.4)

Over the steps t = 0 .. T - 1 the rate is r(t) p_l, with T_w = ⌈f T⌉ and r = 1 from T_w on:

    ramp         r = t / T_w          hold   r = low          none   r = 1  (Eq. 6.5)

Starting local, the random mask reaches a0 layers (the lowest) and in each a0' heads (the first),
and widens until T_s = ⌈f_s T⌉:

    a(t) = a0 + ⌊(A - a0) · min(1, t / T_s)⌋  (Eq. 6.6)

A rate that decreases with depth: arXiv:2208.02646. One that increases with it: stochastic depth,
arXiv:1603.09382. Little randomness at first is late dropout, which helps where a model overfits and
hurts where it underfits: arXiv:2303.01500. t counts updates of the weights, not micro-batches.
"""

import math
from dataclasses import dataclass

import numpy as np

from minitransformer.arrays import Array, require_in_range

OVER_LAYERS = ("constant", "linear", "geometric", "cosine", "increasing")
OVER_TRAINING = ("none", "hold", "ramp")


@dataclass(frozen=True)
class Schedule:
    """Drop rates of a whole run, in one value."""

    rate: float = 0.5  # of the first layer (of the last, if increasing)
    schedule: str = "geometric"  # over the layers
    decay: float = 0.9  # γ
    decrement: float = 0.1  # δ
    warmup: str = "ramp"  # over training
    warmup_fraction: float = 0.1  # f
    low: float = 0.1  # the share of the full rate that `hold` starts with
    first_layers: int = 1
    first_heads: int = 1
    widen_fraction: float = 0.0  # f_s; 0: every layer and head from the first step

    def __post_init__(self) -> None:
        for name in ("rate", "decay", "decrement", "warmup_fraction", "low", "widen_fraction"):
            require_in_range(name, getattr(self, name), 0.0, 1.0)
        for name, valid in (("schedule", OVER_LAYERS), ("warmup", OVER_TRAINING)):
            if getattr(self, name) not in valid:
                raise ValueError(
                    f"{name} must be one of {', '.join(valid)}, got {getattr(self, name)!r}"
                )
        for name in ("first_layers", "first_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def drop_rate(
        self, layer: int, layers: int, step: int, steps: int, heads: int | None = None
    ) -> float | Array:
        """The rate of one layer at one step; for each head, (H,), if heads join one by one.

        Raises
        ------
        ValueError
            If there is no such layer, or a count is not positive.
        """
        if not 0 <= layer < layers:
            raise ValueError(
                f"layer must lie in [0, {layers - 1}], got {layer}: layers count from 0"
            )
        if step < 0 or steps < 1:
            raise ValueError(f"step must be >= 0 and steps >= 1, got {step} and {steps}")
        rate = self._over_training(step, steps) * self._over_layers(layer, layers)
        if layer >= self._reached(self.first_layers, layers, step, steps):
            rate = 0.0
        if heads is None or self.widen_fraction == 0:
            return rate
        reached = self._reached(self.first_heads, heads, step, steps)
        return np.where(np.arange(heads) < reached, rate, 0.0)

    def _over_layers(self, layer: int, layers: int) -> float:
        """The rate of layer l when nothing holds it back  (Eq. 6.1 - 6.4)"""
        if self.schedule == "linear":
            return max(0.0, self.rate - self.decrement * layer)
        if self.schedule == "geometric":
            return self.rate * self.decay**layer
        if self.schedule == "cosine":
            return self.rate * 0.5 * (1 + math.cos(math.pi * layer / max(layers - 1, 1)))
        if self.schedule == "increasing":
            return self.rate * (layer + 1) / layers
        return self.rate

    def _over_training(self, step: int, steps: int) -> float:
        """The share r(t) of that rate at one step  (Eq. 6.5)"""
        until = _steps(self.warmup_fraction, steps)
        if self.warmup == "none" or step >= until:
            return 1.0
        return self.low if self.warmup == "hold" else step / until

    def _reached(self, first: int, of: int, step: int, steps: int) -> int:
        """How many layers (or heads) the random mask has reached  (Eq. 6.6)"""
        until = _steps(self.widen_fraction, steps)
        if step >= until:
            return of
        return min(first + max(of - first, 0) * step // until, of)


def _steps(fraction: float, steps: int) -> int:
    """⌈f T⌉, and 3 for 0.1 · 30, not 4: the product of floats may lie a hair above."""
    return math.ceil(round(fraction * steps, 9))
