"""The figure of linear attention shows what the library computes."""

import io

import numpy as np

from minitransformer.plots.linear import expected_error, kernel_errors, linear_figure, recall_errors


def test_the_kernel_is_as_far_off_as_the_variance_says():
    for features in (8, 32):
        expected = expected_error(16, features, 3)
        got = kernel_errors(16, features, 300, 3, orthogonal=False)
        assert abs(got / expected - 1) < 0.2, f"{got} instead of {expected}"
        assert kernel_errors(16, features, 300, 3, hyperbolic=True) < got


def test_the_figure_shows_error_memory_and_recall():
    features, lengths = (2, 8), (1, 4, 16)
    fig = linear_figure(width=4, features=features, lengths=lengths, redraws=5)
    kernel, memory, recall = fig.axes
    assert list(kernel.lines[0].get_ydata()) == [expected_error(4, m, 0) for m in features]
    for line, kind in zip(
        kernel.lines[1:], ({"orthogonal": False}, {}, {"hyperbolic": True}), strict=True
    ):
        expected = [kernel_errors(4, m, 5, 0, **kind) for m in features]
        assert np.array_equal(line.get_ydata(), expected)
    cache, elu, favor = (line.get_ydata() for line in memory.lines)
    assert list(cache) == [2 * 4 * n for n in lengths]
    assert set(elu) == {4 * 5} and set(favor) == {8 * 4 + 2 * 8}
    shown = np.array([line.get_ydata() for line in recall.lines])
    assert np.array_equal(shown.T, [recall_errors(4, 8, n, 0) for n in lengths])
    assert (shown[:, 0] < 1e-12).all(), "one token is read back exactly"
    for ax in fig.axes:
        assert ax.get_title(loc="left") and ax.get_xlabel() and ax.get_ylabel()
    fig.savefig(io.BytesIO(), format="png")
