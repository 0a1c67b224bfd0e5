"""What linear attention gives for its constant memory: how well random features estimate the
softmax kernel, what is kept of a text, and what can be read back from it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from minitransformer.arrays import Array
from minitransformer.attention.dense import attention_forward
from minitransformer.attention.favor import (
    favor_attention_forward,
    log_features_forward,
    random_projection,
)
from minitransformer.attention.linear import linear_attention_forward
from minitransformer.philox import Draw
from minitransformer.plots.canvas import (
    BASELINE,
    DENSE,
    INK,
    MUTED,
    STOCHASTIC,
    figure,
    panels,
    tidy,
)

# name, options of random_projection, look of the line
PROJECTIONS: tuple[tuple[str, dict[str, bool], dict[str, Any]], ...] = (
    ("independent rows", {"orthogonal": False}, {"color": BASELINE, "linestyle": "--"}),
    ("orthogonal rows", {}, {"color": DENSE, "linestyle": "-"}),
    ("orthogonal, with negatives", {"hyperbolic": True}, {"color": STOCHASTIC, "linestyle": "-."}),
)


def linear_figure(
    *,
    width: int = 16,
    features: Sequence[int] = (2, 4, 8, 16, 32, 64, 128, 256),
    lengths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
    redraws: int = 100,
    seed: int = 0,
    title: str = "A memory of constant size, and what it costs",
) -> Figure:
    """The error of the kernel over the number of features, the numbers kept over the length of the
    text, and the error of a value that is asked for by its own key."""
    fig = figure(12.6, 3.9)
    axes = panels(fig, 1, 3)
    _kernel(axes[0], width, features, redraws, seed)
    _memory(axes[1], width, max(features), lengths)
    _recall(axes[2], width, max(features), lengths, seed)
    fig.suptitle(title, fontsize=11, color=INK)
    return fig


def _pairs(width: int, seed: int) -> tuple[Array, Array]:
    """Queries and keys with s ‖q + k‖² about 1: the variance is its exponential, and where it is
    much larger, few redraws do not even show it."""
    q, k = np.random.default_rng(seed).standard_normal((2, 16, width)) * width**-0.25 / math.sqrt(2)
    return q, k


def kernel_errors(width: int, features: int, redraws: int, seed: int, **kind: bool) -> float:
    """How far φ(q) · φ(k) is from exp(s q · k), root mean square over redraws and pairs, as a share
    of it."""
    q, k = _pairs(width, seed)
    exact = (q * k).sum(axis=-1) / math.sqrt(width)
    squares = np.zeros(len(q))
    for step in range(redraws):
        w = random_projection(Draw(seed, step=step), features, width, every=1, **kind)
        logs = log_features_forward(q, w)[0] + log_features_forward(k, w)[0]
        squares += (np.exp(logs - exact[:, None]).mean(axis=-1) - 1) ** 2
    return float(np.sqrt(squares.mean() / redraws))


def expected_error(width: int, features: int, seed: int) -> float:
    """The same of endlessly many independent redraws: √((e^{s ‖q + k‖²} - 1) / m)."""
    q, k = _pairs(width, seed)
    squares = np.square(q + k).sum(axis=-1) / math.sqrt(width)
    return float(np.sqrt(np.expm1(squares).mean() / features))


def _kernel(ax: Axes, width: int, features: Sequence[int], redraws: int, seed: int) -> None:
    law = [expected_error(width, m, seed) for m in features]
    ax.plot(features, law, ":", color=INK, linewidth=1.0, label="independent, by the formula")
    for name, kind, look in PROJECTIONS:
        errors = [kernel_errors(width, m, redraws, seed, **kind) for m in features]
        ax.plot(features, errors, label=name, linewidth=1.4, **look)
    tidy(
        ax,
        xlabel="features",
        ylabel="error of the kernel, as a share of it",
        title="FAVOR+: more features, less error",
    )
    _doubling(ax, features, both=True)
    ax.legend(fontsize=8, frameon=False)


def _memory(ax: Axes, width: int, features: int, lengths: Sequence[int]) -> None:
    """Counted from the arrays, not from a formula."""
    kept: dict[str, list[int]] = {"keys and values": [], "elu + 1": [], f"FAVOR+, {features}": []}
    w = random_projection(Draw(0), features, width)
    for n in lengths:
        x = np.ones((1, n, width))
        _, linear = linear_attention_forward(x, x, x)
        _, favor = favor_attention_forward(x, x, x, w)
        sizes = (2 * x.size, sum(a.size for a in linear.state), sum(a.size for a in favor.state))
        for name, size in zip(kept, sizes, strict=True):
            kept[name].append(size)
    _lines(ax, lengths, kept)
    tidy(
        ax,
        xlabel="tokens read so far",
        ylabel="numbers kept, for one head",
        title="The state does not grow",
    )
    _doubling(ax, lengths, both=True)


def recall_errors(width: int, features: int, tokens: int, seed: int) -> Array:
    """The error of each value asked for by its own key, as a share of the values' norm: softmax,
    elu + 1 and FAVOR+. Keys are of length 2 √width; so sure is a sharp head."""
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, 1, tokens, width))
    k *= 2 * math.sqrt(width) / np.linalg.norm(k, axis=-1, keepdims=True)
    w = random_projection(Draw(seed), features, width)
    outs = (
        attention_forward(k, k, v)[0],
        linear_attention_forward(k, k, v)[0],
        favor_attention_forward(k, k, v, w)[0],
    )
    return np.array([np.linalg.norm(out - v) / np.linalg.norm(v) for out in outs])


def _recall(ax: Axes, width: int, features: int, lengths: Sequence[int], seed: int) -> None:
    errors = np.array([recall_errors(width, features, n, seed) for n in lengths]).T
    names = ("softmax", "elu + 1", f"FAVOR+, {features}")
    _lines(ax, lengths, dict(zip(names, errors, strict=True)))
    tidy(
        ax,
        xlabel="tokens read so far",
        ylabel="error of a value asked for by its key",
        title="What is asked for drowns in the rest",
    )
    _doubling(ax, lengths, both=False)


def _doubling(ax: Axes, x: Sequence[int], *, both: bool) -> None:
    """Logarithmic axes with plain numbers at every second place."""
    ax.set_xscale("log", base=2)
    ax.set_xticks([*x][::2], labels=[f"{n:,}" for n in [*x][::2]])
    if both:
        ax.set_yscale("log")
        for which in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            which(FuncFormatter(lambda y, _: f"{y:,g}"))
        ax.tick_params(axis="y", which="minor", labelsize=7, colors=MUTED)
        ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))


def _lines(ax: Axes, x: Sequence[int], lines: dict) -> None:
    looks = ((INK, "-"), (STOCHASTIC, "-."), (DENSE, "--"))
    for (name, y), (colour, style) in zip(lines.items(), looks, strict=True):
        ax.plot(x, y, style, color=colour, linewidth=1.4, label=name)
    ax.legend(fontsize=8, frameon=False)
