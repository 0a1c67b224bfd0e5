"""What the heads of a model do, by depth."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minitransformer.arrays import Array
from minitransformer.plots.canvas import DENSE, INK, STOCHASTIC, figure, image, panels, tidy


def heads_figure(
    measures: Mapping[str, Array],
    likeness: Mapping[str, Sequence[float | None]],
    *,
    named: Mapping[tuple[int, int], str] | None = None,
    title: str = "What the heads do, by depth",
) -> Figure:
    """Each measure (layers, H) as a map with its numbers, and by layer how alike the heads are.

    `named` puts a word under the number of a head (layer, head), in the first map.
    """
    first = np.asarray(next(iter(measures.values())))
    layers, heads = first.shape
    columns = (len(measures) + 2) // 2  # two rows, the curves last
    fig = figure(columns * max(0.55 * heads + 1.2, 3.2), 2 * max(0.5 * layers + 1.2, 2.6))
    axes = panels(fig, 2, columns)
    for place, (name, values) in enumerate(measures.items()):
        _map(axes[place], name, np.asarray(values), named or {} if place == 0 else {})
    _depth(axes[len(measures)], likeness, layers)
    for ax in axes[len(measures) + 1 :]:
        ax.remove()
    fig.suptitle(title, fontsize=11, color=INK)
    return fig


def _map(ax: Axes, name: str, values: Array, named: Mapping[tuple[int, int], str]) -> None:
    layers, heads = values.shape
    shown = image(ax, values, xlabel="head", ylabel="layer", cmap="viridis")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (layer, head), value in np.ndenumerate(values):
        word = named.get((layer, head), "")
        ax.text(
            head,
            layer,
            f"{value:.2g}\n{word}" if word else f"{value:.2g}",
            ha="center",
            va="center",
            fontsize=7,
            color="white" if value < middle else "black",
        )
    ax.set_xticks(range(heads))
    ax.set_yticks(range(layers))
    ax.set_title(name, fontsize=9, color=INK)
    ax.figure.colorbar(shown, ax=ax).ax.tick_params(labelsize=7)


def _depth(ax: Axes, likeness: Mapping[str, Sequence[float | None]], layers: int) -> None:
    looks = ((DENSE, "o-"), (STOCHASTIC, "s--"))
    for (name, values), (colour, style) in zip(likeness.items(), looks, strict=False):
        known = [np.nan if v is None else v for v in values]
        ax.plot(range(layers), known, style, color=colour, linewidth=1.4, markersize=4, label=name)
    tidy(ax, xlabel="layer", ylabel="1: all alike")
    ax.set_title("two heads of a layer", fontsize=9, color=INK)
    ax.set_xticks(range(layers))
    ax.set_ylim(0, 1.05)
    ax.legend(fontsize=7, frameon=False)
