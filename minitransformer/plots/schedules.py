"""Drop rates over layers and training steps."""

import numpy as np
from matplotlib.figure import Figure

from minitransformer.arrays import Array
from minitransformer.plots.canvas import figure, image, tidy


def schedule_figure(
    rates: Array, *, title: str = "How much each layer drops, step by step"
) -> Figure:
    """A heat map of drop rates of shape (layers, steps)."""
    rates = np.asarray(rates)
    layers = rates.shape[0]
    fig = figure(6.4, 0.45 * layers + 1.3)
    ax = fig.subplots()
    shown = image(
        ax,
        rates,
        xlabel="training step",
        ylabel="layer",
        cmap="viridis",
        vmin=0,
        vmax=max(0.05, rates.max(initial=0)),
    )
    ax.set_yticks(range(layers))
    tidy(ax, xlabel="training step", ylabel="layer", title=title)
    fig.colorbar(shown, ax=ax, label="drop rate")
    return fig
