"""Watching a run without touching it.

Every step leaves its training loss: another batch and other masks each time. Every `look_every`
steps the model is also shown a *fixed* probe batch with full attention, so the probe's loss moves
only when the weights do. Of both, the fluctuation: how far the last W values lie from the straight
line through them,

    σ = sqrt( (1/W) Σ_t (x_t - (a + b t))² ),   a, b: least squares

compared with a band (`training.band`, in nats). Around a line and not around a mean, because a loss
is supposed to fall. A probe that leaves its band says the weights themselves are thrown about; a
training loss that leaves it while the probe does not says batches and masks differ.

A look draws nothing and changes nothing: training with and without it gives the same bits.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from minitransformer.arrays import Array
from minitransformer.heads.health import (
    attention_entropy_forward,
    head_output_norm,
    live_rows,
    mean_over_rows,
    weight_norm,
)
from minitransformer.nn.losses import cross_entropy_forward
from minitransformer.philox import Draw

# How many values the line goes through: enough to average, few enough to be straight.
LOSS_WINDOW, PROBE_WINDOW = 50, 5


def fluctuation(values: Array) -> float:
    """Root mean square distance of a series from the straight line through it."""
    values = np.asarray(values, dtype=np.float64)
    t = np.arange(len(values)) - (len(values) - 1) / 2
    centred = values - values.mean()
    slope = (t @ centred) / (t @ t or 1.0)  # one value has no slope
    return math.sqrt(np.mean((centred - slope * t) ** 2))


class Monitor:
    """Looks at a model and follows the records of its run. What it knows comes from the records
    alone, so a resumed run rebuilds it from metrics.jsonl."""

    def __init__(self, model: Any, task: Any, band: float):
        self.model, self.band = model, band
        self._probe, self._validation = task.probe(), task.quick_validation()
        self._series: dict[str, deque[float]] = {
            "loss": deque(maxlen=LOSS_WINDOW),
            "probe": deque(maxlen=PROBE_WINDOW),
        }
        self._skipped = 0

    def look(self) -> dict[str, Any]:
        """The loss on the probe and on some validation text, and what each head does on the
        probe."""
        probe, cache = self._loss(self._probe)
        validation, _ = self._loss(self._validation)
        measures = [head_measures(attention) for attention in cache.attentions]
        return {
            "probe": probe,
            "validation": validation,
            "gap": validation - probe,
            # each (layers, heads)
            "heads": {name: [m[name] for m in measures] for name in HEAD_MEASURES},
        }

    def _loss(self, batch: tuple[Array, Array]) -> tuple[float, Any]:
        inputs, targets = batch
        with np.errstate(over="ignore", invalid="ignore"):  # a diverged model has a loss of NaN
            logits, cache = self.model.forward(inputs, draw=Draw(0, training=False))
            loss, _ = cross_entropy_forward(logits, targets)
        return float(loss), cache

    def follow(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Take note of a step's record, fresh or read back, and say what the series so far show:
        the fluctuation of each that is long enough, which are outside the band, and how many
        steps had a gradient that was not finite."""
        self._note("loss", record["loss"])
        if "look" in record:
            self._note("probe", record["look"]["probe"])
        self._skipped += record["skipped"]
        found = {
            name: fluctuation(np.array(series))
            for name, series in self._series.items()
            if len(series) == series.maxlen
        }
        return {
            "fluctuation": found,
            "outside": [name for name, sigma in found.items() if sigma > self.band],
            "skipped_so_far": self._skipped,
        }

    def _note(self, name: str, value: float | None) -> None:
        if value is not None and math.isfinite(value):  # JSON keeps NaN as null
            self._series[name].append(value)


# ---- heads ---------------------------------------------------------------------------------------

HEAD_MEASURES = ("entropy", "weight_norm", "output_norm")


def head_measures(attention: Any) -> dict[str, Array]:
    """What each head of one layer does, averaged over the batch: (H,) each."""
    weights = attention.weights
    rows = live_rows(weights)
    entropy, _ = attention_entropy_forward(weights)
    with np.errstate(over="ignore", invalid="ignore"):  # a diverged model has heads of NaN
        found = (
            mean_over_rows(entropy, rows),
            weight_norm(weights),
            head_output_norm(attention.out, rows=rows),
        )
    return {name: x.mean(axis=0) for name, x in zip(HEAD_MEASURES, found, strict=True)}
