"""Losses over training, and how much they fluctuate.

The records are those of a run's metrics.jsonl, so a figure can be drawn of a run that is still
going on.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from minitransformer.plots.canvas import BASELINE, DENSE, INK, MUTED, STOCHASTIC, figure, tidy

Records = Sequence[Mapping[str, Any]]
_COLOURS = (STOCHASTIC, DENSE)


def _series(records: Records, *path: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have the value at this path."""
    steps, values = [], []
    for record in records:
        value: Any = record
        for name in path:
            value = value.get(name) if value is not None else None
        if value is not None:
            steps.append(record["step"])
            values.append(value)
    return np.array(steps), np.array(values, dtype=float)


def _to_bits(nats: Any) -> Any:
    return nats / math.log(2)


def _to_nats(bits: Any) -> Any:
    return bits * math.log(2)


def loss_figure(
    runs: Mapping[str, Records],
    *,
    baselines: Mapping[str, float] | None = None,
    band: float = 0.05,
    title: str = "What the model has learned, step by step",
) -> Figure:
    """For each run (two at most): the training loss, the probe's loss in its band, and the loss on
    validation text; baselines (nats) as lines."""
    fig = figure(7.2, 4.2)
    ax = fig.subplots()
    seen = []
    for (name, records), colour in zip(runs.items(), _COLOURS, strict=False):
        steps, losses = _series(records, "loss")
        ax.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.7)
        looked, probe = _series(records, "look", "probe")
        checked, validation = _series(records, "look", "validation")
        label = f"{name}, " if len(runs) > 1 else ""
        ax.fill_between(looked, probe - band, probe + band, color=colour, alpha=0.25, linewidth=0)
        ax.plot(looked, probe, color=colour, linewidth=1.6, label=f"{label}probe (±{band:g} nats)")
        ax.plot(checked, validation, "--", color=colour, linewidth=1.4, label=f"{label}validation")
        seen += [*probe, *validation]
    for name, value in (baselines or {}).items():
        ax.axhline(value, color=BASELINE, linewidth=1, linestyle=":")
        ax.annotate(
            name,
            (0, value),
            xycoords=("axes fraction", "data"),
            xytext=(2, 2),
            textcoords="offset points",
            fontsize=7,
            color=MUTED,
        )
        seen.append(value)
    finite = [x for x in seen if math.isfinite(x)]
    if finite:  # the first steps of the thin line may leave the picture at the top
        ax.set_ylim(min(finite) - 0.15, max(finite) + 0.15)
    tidy(ax, xlabel="training step", ylabel="loss (nats per character)", title=title)
    bits = ax.secondary_yaxis("right", functions=(_to_bits, _to_nats))
    bits.set_ylabel("bits per character", fontsize=9, color=INK)
    bits.tick_params(labelsize=8, colors=MUTED)
    ax.plot([], [], color=MUTED, alpha=0.5, linewidth=0.7, label="training loss of each step")
    ax.legend(fontsize=8, frameon=False, loc="upper right")
    return fig


def fluctuation_figure(
    runs: Mapping[str, Records],
    *,
    band: float = 0.05,
    title: str = "How much the loss fluctuates, against its band",
) -> Figure:
    """Rolling fluctuation of the training and the probe loss of each run (two at most)."""
    fig = figure(7.2, 3.0)
    ax = fig.subplots()
    ax.axhspan(0, band, color=BASELINE, alpha=0.25, linewidth=0, label=f"band (±{band:g} nats)")
    for (name, records), colour in zip(runs.items(), _COLOURS, strict=False):
        label = f"{name}, " if len(runs) > 1 else ""
        ax.plot(
            *_series(records, "fluctuation", "loss"),
            color=colour,
            linewidth=1.0,
            label=f"{label}training loss (other batches, other masks)",
        )
        ax.plot(
            *_series(records, "fluctuation", "probe"),
            "--",
            color=colour,
            linewidth=1.4,
            label=f"{label}probe (same batch, full attention)",
        )
    ax.set_ylim(0, 1.4 * ax.get_ylim()[1])  # room for the legend
    tidy(ax, xlabel="training step", ylabel="fluctuation (nats)", title=title)
    ax.legend(fontsize=8, frameon=False, loc="upper right")
    return fig
