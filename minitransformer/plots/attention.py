"""Attention weights as heat maps, through training."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from minitransformer.arrays import Array
from minitransformer.plots.canvas import INK, figure, image, panels


def attention_strip(
    snapshots: Mapping[str, Array], *, title: str = "One head learns where to look"
) -> Figure:
    """Weights (N, M) of one head at several steps, side by side on one colour scale."""
    fig = figure(2.0 * len(snapshots) + 0.6, 2.7)
    axes = panels(fig, 1, len(snapshots), titles=list(snapshots))
    shown = None
    for ax, weights in zip(axes, snapshots.values(), strict=True):
        # the square root makes small weights visible; the scale says so
        shown = image(ax, np.sqrt(weights), cmap="magma", vmin=0, vmax=1)
        ax.set_aspect("equal")
    if shown is not None:
        bar = fig.colorbar(shown, ax=axes, shrink=0.8)
        ticks = [0, 0.01, 0.1, 0.3, 1]
        bar.set_ticks([t**0.5 for t in ticks], labels=[str(t) for t in ticks])
        bar.ax.tick_params(labelsize=7)
        bar.set_label("weight", fontsize=8)
    fig.suptitle(title, fontsize=11, color=INK)
    return fig


def head_measure_figure(
    values: Array, *, measure: str, title: str = "What the heads do, by depth"
) -> Figure:
    """One number for each head: (layers, H) as a heat map with the numbers written in."""
    values = np.asarray(values)
    layers, heads = values.shape
    fig = figure(0.8 * heads + 2.0, 0.5 * layers + 1.3)
    ax = fig.subplots()
    shown = image(ax, values, xlabel="head", ylabel="layer", cmap="viridis")
    middle = (values.min() + values.max()) / 2
    for layer in range(layers):
        for head in range(heads):
            colour = "white" if values[layer, head] < middle else "black"
            ax.text(
                head,
                layer,
                f"{values[layer, head]:.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color=colour,
            )
    ax.set_xticks(range(heads))
    ax.set_yticks(range(layers))
    fig.colorbar(shown, ax=ax, label=measure)
    fig.suptitle(title, fontsize=11, color=INK)
    return fig
