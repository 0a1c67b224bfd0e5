"""Masks as pictures: who may attend to whom, and what chance has removed."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minitransformer.arrays import Array
from minitransformer.plots.canvas import DROPPED, FORBIDDEN, INK, KEPT, figure, image, panels

_COLOURS = ListedColormap([FORBIDDEN, DROPPED, KEPT])


def mask_figure(masks: Mapping[str, Array], *, title: str = "Who may attend to whom") -> Figure:
    """Keep-masks of shape (N, M) side by side, each under its name."""
    fig = figure(max(2.1 * len(masks), 3.2), 2.7)
    axes = panels(fig, 1, len(masks), titles=list(masks))
    for ax, keep in zip(axes, masks.values(), strict=True):
        image(ax, np.where(keep, 2, 0), cmap=_COLOURS, vmin=0, vmax=2)
        ax.set_aspect("equal")
    fig.suptitle(title, fontsize=11, color=INK)
    return fig


def random_mask_figure(
    rows: Mapping[str, Sequence[Array]],
    structural: Array,
    titles: Sequence[str],
    *,
    title: str = "What chance leaves of each layer's attention",
) -> Figure:
    """One row of pictures for each kind of mask, one column for each layer.

    `rows` maps a name ("element", "block") to the keep-masks (N, M) of its layers; `structural` is
    what was allowed.
    """
    columns = len(titles)
    fig = figure(2.0 * columns + 0.6, 2.1 * len(rows) + 0.8)
    axes = panels(fig, len(rows), columns, titles=list(titles))
    for r, (name, masks) in enumerate(rows.items()):
        for c, keep in enumerate(masks):
            ax = axes[r * columns + c]
            picture = np.where(keep, 2, np.where(structural, 1, 0))
            image(ax, picture, cmap=_COLOURS, vmin=0, vmax=2)
            ax.set_aspect("equal")
            if c == 0:
                ax.set_ylabel(f"{name}\nquery", fontsize=8, color=INK)
            if r < len(rows) - 1:
                ax.set_xlabel("")
    fig.legend(
        handles=[
            Patch(color=KEPT, label="kept"),
            Patch(color=DROPPED, label="dropped by chance"),
            Patch(facecolor=FORBIDDEN, edgecolor="#cbd2d9", label="never allowed"),
        ],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    fig.suptitle(title, fontsize=11, color=INK)
    return fig
