"""The look that all figures share."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#1f2933"
MUTED = "#7b8794"
# Two arms of an experiment: told apart by lightness and line style as well as by hue.
DENSE, STOCHASTIC, BASELINE = "#27408b", "#e8871e", "#9aa5b1"
KEPT, DROPPED, FORBIDDEN = "#27408b", "#f4b860", "#eef1f4"


def figure(width: float, height: float) -> Figure:
    """An empty figure of the given size in inches, with an opaque white background."""
    return Figure(figsize=(width, height), facecolor="white", layout="constrained")


def panels(
    fig: Figure, rows: int, columns: int, *, titles: Sequence[str] = (), **options
) -> list[Axes]:
    """A grid of axes, in reading order, each with its small title."""
    axes = [*np.asarray(fig.subplots(rows, columns, squeeze=False, **options)).ravel()]
    for ax, title in zip(axes, titles, strict=False):
        ax.set_title(title, fontsize=9, color=INK)
    return axes


def tidy(ax: Axes, *, xlabel: str = "", ylabel: str = "", title: str = "") -> Axes:
    """Labels on, boxes off."""
    ax.set_xlabel(xlabel, fontsize=9, color=INK)
    ax.set_ylabel(ylabel, fontsize=9, color=INK)
    if title:
        ax.set_title(title, fontsize=11, color=INK, loc="left")
    ax.tick_params(labelsize=8, colors=MUTED)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
    return ax


def image(ax: Axes, picture, *, xlabel: str = "key", ylabel: str = "query", **options):
    """A matrix as a picture: one cell a pixel, no interpolation, the origin at the upper left."""
    shown = ax.imshow(picture, interpolation="nearest", aspect="auto", **options)
    ax.set_xlabel(xlabel, fontsize=8, color=INK)
    for axis in (ax.xaxis, ax.yaxis):  # there is no query 2.5
        axis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    ax.set_ylabel(ylabel, fontsize=8, color=INK)
    ax.tick_params(labelsize=7, colors=MUTED, length=2)
    return shown
