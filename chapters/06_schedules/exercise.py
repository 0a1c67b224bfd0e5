"""Chapter 06: Schedules and warm-up. See README.md beside this file."""

import math
from dataclasses import dataclass

import numpy as np

from minitransformer.arrays import Array, require_in_range

# ==== stochastic.schedules ========================================================================


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
        # 06.3: your lines

    def _over_layers(self, layer: int, layers: int) -> float:
        """The rate of layer l when nothing holds it back  (Eq. 6.1 - 6.4)"""
        # 06.1: your lines

    def _over_training(self, step: int, steps: int) -> float:
        """The share r(t) of that rate at one step  (Eq. 6.5)"""
        # 06.2: your lines

    def _reached(self, first: int, of: int, step: int, steps: int) -> int:
        """How many layers (or heads) the random mask has reached  (Eq. 6.6)"""
        # 06.3: your lines


def _steps(fraction: float, steps: int) -> int:
    """⌈f T⌉, and 3 for 0.1 · 30, not 4: the product of floats may lie a hair above."""
    return math.ceil(round(fraction * steps, 9))


# ==== training.rates ==============================================================================


def cosine_rate(
    step: int, *, peak: float, steps: int, warmup: int = 0, final_fraction: float = 0.0
) -> float:
    """Rise over `warmup` steps to `peak`, then fall along a cosine to `peak · final_fraction`,
    where it stays after `steps`  (Eq. 16.24)

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    # 06.4: your lines


def inverse_root_rate(step: int, *, width: int, warmup: int) -> float:
    """The rate of the first Transformer  (Eq. 16.25)

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    # 06.4: your lines
