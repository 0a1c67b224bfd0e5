"""The figure of positions shows what the library computes."""

import io

import numpy as np

from minitransformer.checks.gradients import assert_close
from minitransformer.plots.positions import positions_figure
from minitransformer.positions.alibi import alibi_slopes
from minitransformer.positions.sinusoidal import sinusoidal_table
from minitransformer.positions.t5_bias import t5_buckets


def test_the_figure_of_positions_shows_four_schemes():
    fig = positions_figure(reach=40, width=8, heads=3)
    waves, rope, alibi, t5 = fig.axes[:4]
    apart = np.arange(-40, 41)
    assert_close(waves.images[0].get_array(), sinusoidal_table(np.arange(40), 8))
    for line, base in zip(rope.lines, (1e4, 5e5), strict=True):
        theta = base ** -(np.arange(4) / 4)
        assert_close(line.get_ydata(), np.cos(apart[:, None] * theta).mean(axis=1), what="RoPE")
    assert len(alibi.lines) == 3
    for line, slope in zip(alibi.lines, alibi_slopes(3), strict=True):
        assert_close(line.get_ydata(), -slope * abs(apart), what="ALiBi")
    places = t5_buckets(apart, bidirectional=True) % 16
    assert_close(t5.lines[0].get_ydata(), -1.0 * places, what="T5")
    for ax in (waves, rope, alibi, t5):
        assert ax.get_title(loc="left") and ax.get_xlabel() and ax.get_ylabel()
    fig.savefig(io.BytesIO(), format="png")


def test_the_figure_of_positions_shows_a_table_that_was_learned():
    table = np.random.default_rng(0).standard_normal((8, 2))
    t5 = positions_figure(reach=30, width=8, table=table).axes[3]
    buckets = t5_buckets(np.arange(-30, 31), 8, bidirectional=True)
    for line, numbers in zip(t5.lines, table.T, strict=True):
        assert_close(line.get_ydata(), numbers[buckets], what=line.get_label())
