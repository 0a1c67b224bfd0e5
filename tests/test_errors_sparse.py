"""What the sparse floor says to bad input: the argument, what was expected, what came."""

from dataclasses import replace

import numpy as np
import pytest

from minitransformer.sparse.block_mask import from_dense, from_rule, from_tiles, layout_of

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
