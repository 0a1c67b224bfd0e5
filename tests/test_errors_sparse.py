"""What the sparse floor says to bad input: the argument, what was expected, what came."""

from dataclasses import replace

import numpy as np
import pytest

from minitransformer.philox import Draw
from minitransformer.sparse import patterns
from minitransformer.sparse.block_mask import from_dense, from_rule, from_tiles, layout_of
from minitransformer.sparse.tiled import tiled_attention_backward, tiled_attention_forward

pytestmark = pytest.mark.usefixtures("own_errors")

KEEP = np.tile(np.tri(24, dtype=np.bool_), (2, 1, 1))
MASK = from_dense(KEEP, tile=8)
SIZES = {"queries": 24, "keys": 16, "tile": 8}


def changed(name, at, value):
    x = getattr(MASK, name).copy()
    x[at] = value
    return replace(MASK, **{name: x})


# ---- block masks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: from_dense(KEEP.astype(float), tile=8),
            TypeError,
            "keep must be a boolean array .* got dtype float64",
        ),
        (lambda: from_dense(KEEP[0, 0], tile=8), ValueError, r"keep must have shape \(\*L, N, M\)"),
        (lambda: from_dense(KEEP, tile=0), ValueError, "tile rows must be at least 1, got 0"),
        (
            lambda: from_dense(KEEP, tile=(8, 2.5)),
            TypeError,
            "tile columns must be a whole number, got 2.5",
        ),
        (lambda: from_dense(KEEP, tile=(8, 8, 8)), ValueError, "tile must be one or two whole"),
        (lambda: from_dense(KEEP, tile=256), ValueError, "tile must be at most 128 on a side"),
        (
            lambda: from_rule(lambda b, h, i, j: j <= i, queries=-1, keys=3, tile=8),
            ValueError,
            "queries must be at least 0, got -1",
        ),
        (
            lambda: from_rule(lambda b, h, i, j: j <= i, **SIZES, leading=(2, -1)),
            ValueError,
            r"leading\[1\] must be at least 0, got -1",
        ),
        (
            lambda: from_rule(lambda b, h, i, j: 1.0 * (j <= i), **SIZES),
            TypeError,
            "what rule returns must be a boolean array .* got dtype float64",
        ),
        (
            lambda: from_tiles(np.zeros((1, 3)), **SIZES),
            TypeError,
            "tiles must be an array of integers, got dtype float64",
        ),
        (
            lambda: from_tiles(np.zeros((3, 2), dtype=int), **SIZES),
            ValueError,
            r"tiles must have shape \(T, 3\): layout, row, column; got \(3, 2\)",
        ),
        (
            lambda: from_tiles(np.array([[0, 0, 2]]), **SIZES),
            ValueError,
            r"tiles holds \(layout 0, row 0, column 2\), outside the grid \(1, 3, 2\)",
        ),
        (
            lambda: from_tiles(np.array([[0, 1, 1], [0, 0, 0], [0, 1, 1]]), **SIZES),
            ValueError,
            r"tiles holds \(layout 0, row 1, column 1\) more than once",
        ),
        (
            lambda: layout_of(MASK, (4, 3)),
            ValueError,
            r"the leading axes of mask has shape \(2,\), which does not broadcast to \(4, 3\)",
        ),
        (
            lambda: changed("columns", 2, 0),
            ValueError,
            r"columns lists \(layout 0, row 1, column 0\) twice",
        ),
        (
            lambda: replace(MASK, columns=MASK.columns[[0, 2, 1, *range(3, 12)]]),
            ValueError,
            r"columns lists \(layout 0, row 1, column 0\) out of order",
        ),
        (lambda: changed("columns", 5, 3), ValueError, r"columns must lie in \[0, 3\), got 3"),
        (
            lambda: changed("row_pointers", (0, 3), 5),
            ValueError,
            r"row_pointers must rise from 0 to 12 \(tiles listed\), without a gap",
        ),
        (
            lambda: replace(MASK, rows=MASK.columns),
            ValueError,
            "rows does not list by columns the tiles that columns lists by rows",
        ),
        (
            lambda: replace(MASK, queries=25),
            ValueError,
            r"row_pointers must be int32 of shape \(2, 5\), got int32 \(2, 4\)",
        ),
        (
            lambda: changed("bits", 0, 0),
            ValueError,
            r"the partial tile \(layout 0, row 0, column 0\) allows nothing: leave it out",
        ),
        (
            lambda: changed("bits", 0, 255),
            ValueError,
            "allows everything: its pattern must be -1",
        ),
        (lambda: changed("bits", 0, 1 << 8), ValueError, "has bits beyond the end"),
        (
            lambda: replace(MASK, columns=MASK.columns.tolist()),
            TypeError,
            "columns must be a NumPy array, got list",
        ),
    ],
)
def test_block_masks_name_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- attention in tiles --------------------------------------------------------------------------

X = np.ones((2, 24, 4))


def attend(q=X, k=X, v=X, mask=MASK, **options):
    return tiled_attention_forward(q, k, v, mask, **options)


def holding(value):
    """X with one entry at the last key, which every layout's last query reads."""
    x = X.copy()
    x[1, 23, 2] = value
    return x


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: attend(mask=KEEP), TypeError, "mask must be a BlockMask, got ndarray"),
        (
            lambda: attend(q=X[:, :20]),
            ValueError,
            "mask is of 24 queries and 24 keys, q and k have 20 and 24",
        ),
        (
            lambda: attend(q=np.ones((3, 24, 4)), k=X[:1], v=X[:1]),
            ValueError,
            r"the leading axes of mask has shape \(2,\), which does not broadcast to \(3,\)",
        ),
        (lambda: attend(v=X[:, :20]), ValueError, "v has 20 keys, k has 24: the two must agree"),
        (lambda: attend(k=X[..., :3]), ValueError, "k has head width 3, q has 4"),
        (lambda: attend(scale=np.nan), ValueError, "scale must be finite, got nan"),
        (lambda: attend(softcap=-1.0), ValueError, "softcap must be a positive number"),
        (lambda: attend(k=holding(np.nan)), ValueError, r"k holds NaN .* \(1, 23, 2\)"),
        (lambda: attend(v=holding(np.inf)), ValueError, r"v holds NaN .* \(1, 23, 2\)"),
        (lambda: attend(q=holding(np.nan)), ValueError, r"q holds NaN .* \(1, 23, 2\)"),
        (
            lambda: attend(q=1e200 * X, k=1e200 * X),
            ValueError,
            "q kᵀ holds NaN or .inf",
        ),
        (
            lambda: tiled_attention_backward(X[:1], attend()[1]),
            ValueError,
            r"dout has shape \(1, 24, 4\), the forward pass gave \(2, 24, 4\)",
        ),
        (
            lambda: tiled_attention_backward(X, attend()[1], dlse=X),
            ValueError,
            r"dlse has shape \(2, 24, 4\), the forward pass gave \(2, 24\)",
        ),
    ],
)
def test_tiled_attention_names_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- patterns ------------------------------------------------------------------------------------

HERE = {"tile": 8, "align": "lower_right"}
DRAWN = {**HERE, "draw": Draw(0)}


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: patterns.log_sparse(24, 24, tile=8, align="left"),
            ValueError,
            "align must be one of lower_right, upper_left, got 'left'",
        ),
        (
            lambda: patterns.log_sparse(24, -1, **HERE),
            ValueError,
            "keys must be at least 0, got -1",
        ),
        (
            lambda: patterns.log_sparse(24, 24, tile=0, align="lower_right"),
            ValueError,
            "tile rows must be at least 1, got 0",
        ),
        (
            lambda: patterns.log_sparse(24, 24, tile=(8, 8, 8), align="lower_right"),
            ValueError,
            "tile must be one or two whole numbers",
        ),
        (
            lambda: patterns.log_sparse(24, 24, tile=256, align="lower_right"),
            ValueError,
            "tile must be at most 128 on a side",
        ),
        (
            lambda: patterns.longformer(24, 24, window=-1, **HERE),
            ValueError,
            "window must be at least 0, got -1",
        ),
        (
            lambda: patterns.longformer(24, 24, window=2, dilation=(1, 0), **HERE),
            ValueError,
            "dilation must be at least 1, got 0",
        ),
        (
            lambda: patterns.longformer(24, 24, window=2, dilation=1.5, **HERE),
            TypeError,
            "dilation must be a whole number, got 1.5",
        ),
        (
            lambda: patterns.longformer(24, 24, window=2, dilation=((1, 2), (1, 2)), **HERE),
            ValueError,
            r"dilation must be one number or one for each head, got shape \(2, 2\)",
        ),
        (
            lambda: patterns.longformer(24, 24, window=2, tokens=(24,), **HERE),
            ValueError,
            r"tokens must be positions in \[0, 24\), got \[24\]",
        ),
        (
            lambda: patterns.bigbird(24, 24, random=-1, **DRAWN),
            ValueError,
            "random must be at least 0, got -1",
        ),
        (
            lambda: patterns.bigbird(24, 24, ends=1.5, **DRAWN),
            TypeError,
            "ends must be a whole number, got 1.5",
        ),
        (
            lambda: patterns.bigbird(24, 24, leading=(2, -1), **DRAWN),
            ValueError,
            r"leading\[1\] must be at least 0, got -1",
        ),
        (
            lambda: patterns.bigbird(24, 24, draw=Draw(2**32), **HERE),
            ValueError,
            "draw.seed must lie in",
        ),
        (
            lambda: patterns.random_log(24, 24, layer=-1, **DRAWN),
            ValueError,
            r"layer must lie in \[0, 65535\], got -1",
        ),
        (
            lambda: patterns.strided(24, 24, stride=0, **HERE),
            ValueError,
            "stride must be at least 1, got 0",
        ),
        (
            lambda: patterns.strided(24, 24, stride=2, part="far", **HERE),
            ValueError,
            "part must be one of local, stride, both, got 'far'",
        ),
        (
            lambda: patterns.fixed(24, 24, block=2, summary=3, **HERE),
            ValueError,
            "summary is 3, more than block = 2",
        ),
    ],
)
def test_patterns_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
