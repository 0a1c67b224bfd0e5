"""What each position scheme tells attention, side by side."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minitransformer.arrays import Array
from minitransformer.plots.canvas import DENSE, INK, STOCHASTIC, figure, image, panels, tidy
from minitransformer.positions.alibi import alibi_forward, alibi_slopes
from minitransformer.positions.rope import rope_forward, rope_tables
from minitransformer.positions.sinusoidal import sinusoidal_table
from minitransformer.positions.t5_bias import t5_bias_forward

_LINES = ("-", "--", "-.", ":")
_DISTANCE = "key's position minus query's, in tokens"


def positions_figure(
    *,
    reach: int = 160,
    width: int = 64,
    heads: int = 4,
    table: Array | None = None,
    title: str = "Four ways to say where a token stands",
) -> Figure:
    """The sinusoidal table of `reach` positions, and over distances up to `reach` on either side
    RoPE's dot product, ALiBi's bias and T5's.

    RoPE turns a query and a key that are the same unit vector, equal in every channel. T5 learns
    its `table` (buckets, heads); if none is given, each row of 32 is minus its bucket's place on
    its side, which shows where the buckets end. A learned table of positions has no shape of its
    own before training.
    """
    fig = figure(9.4, 6.2)
    axes = panels(fig, 2, 2)
    _sinusoidal(axes[0], sinusoidal_table(np.arange(reach), width))
    apart = np.arange(-reach, reach + 1)
    _rope(axes[1], apart, width)
    _alibi(axes[2], apart, heads)
    given = table is not None
    _t5(axes[3], apart, table if table is not None else -(np.arange(32.0) % 16)[:, None], given)
    fig.suptitle(title, fontsize=11, color=INK)
    return fig


def _sinusoidal(ax: Axes, waves: Array) -> None:
    shown = image(ax, waves, cmap="viridis", vmin=-1, vmax=1)
    tidy(
        ax,
        xlabel="channel",
        ylabel="position, in tokens",
        title="sinusoidal: what is added to the token",
    )
    bar = ax.figure.colorbar(shown, ax=ax)
    bar.set_label("added", fontsize=8)
    bar.ax.tick_params(labelsize=7)


def _rope(ax: Axes, apart: Array, width: int) -> None:
    vector = np.full((len(apart), width), width**-0.5)
    bases = (10_000.0, 500_000.0)
    for base, colour, line in zip(bases, (DENSE, STOCHASTIC), _LINES, strict=False):
        keys, _ = rope_forward(vector, *rope_tables(apart, width, base=base), layout="half")
        ax.plot(apart, keys @ vector[0], line, color=colour, linewidth=1.4, label=f"base {base:,g}")
    tidy(
        ax,
        xlabel=_DISTANCE,
        ylabel="query · key, of unit length",
        title="RoPE: what turning leaves of a match",
    )
    ax.legend(fontsize=8, frameon=False)


def _alibi(ax: Axes, apart: Array, heads: int) -> None:
    slopes = alibi_slopes(heads)
    bias, _ = alibi_forward(slopes, np.array([0]), apart)
    _biases(ax, apart, bias, [f"slope {slope:.3g}" for slope in slopes])
    tidy(
        ax,
        xlabel=_DISTANCE,
        ylabel="added to the score",
        title="ALiBi: a line for each head",
    )


def _t5(ax: Axes, apart: Array, table: Array, given: bool) -> None:
    bias, _ = t5_bias_forward(table, np.array([0]), apart, bidirectional=True)
    labels = [f"head {h}" for h in range(len(bias))] if given else []
    _biases(ax, apart, bias, labels, drawstyle="steps-mid")
    what = "a number for each bucket" if given else "buckets (here minus their place)"
    tidy(ax, xlabel=_DISTANCE, ylabel="added to the score", title=f"T5: {what}")


def _biases(ax: Axes, apart: Array, bias: Array, labels: list[str], **options) -> None:
    """One line a head, told apart by line style and by lightness."""
    for h, head in enumerate(bias[:, 0]):
        share = h / max(len(bias) - 1, 1)
        ax.plot(
            apart,
            head,
            _LINES[h % len(_LINES)],
            color=DENSE,
            alpha=1 - 0.5 * share,
            linewidth=1.4,
            label=labels[h] if labels else None,
            **options,
        )
    if labels:
        ax.legend(fontsize=8, frameon=False)
