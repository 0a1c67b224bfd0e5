"""Learned positions: a table with a row for each position, added to what stands there.

    y_bn = x_bn + E[p_bn]  (Eq. 7.21)
    dx = dy,   dE[t] = Σ_{b,n: p_bn = t} dy_bn  (Eq. 7.22)

The table ends where the longest text of training ended: there is no row behind it, and a position
below 0 or beyond the end is an error, never one from the other end. Rows that no text reached have
gradient 0. arXiv:1705.03122, and arXiv:1706.03762, which found it as good as sines.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Inexact, Integer

from minitransformer.arrays import (
    Array,
    compute_dtype,
    narrowed,
    require_array,
    require_broadcastable,
    require_cotangent,
    require_integers,
    unbroadcast,
)


class LearnedCache(NamedTuple):
    positions: Integer[Array, "..."]
    shape: tuple[int, ...]
    table_shape: tuple[int, int]
    dtype: np.dtype


class LearnedGrads(NamedTuple):
    x: Inexact[Array, "*B N W"]
    table: Inexact[Array, "P W"]


def learned_forward(
    x: Inexact[Array, "*B N W"], table: Inexact[Array, "P W"], positions: Integer[Array, "..."]
) -> tuple[Inexact[Array, "*B N W"], LearnedCache]:
    """Add to each row of x the row of its position, rounded once to the dtype of x  (Eq. 7.21)

    Positions are (N,) for all rows of the batch, or (*B, N) for each its own, as where rows are
    padded on the left. With a cache they go on where it ends.

    Raises
    ------
    TypeError, ValueError
        If x is no floating (*B, N, W), the table no floating (positions, W), or positions are no
        integers in [0, P), one for each row of x.
    """
    require_array("x", x, min_ndim=2)
    require_array("table", table)
    if table.ndim != 2 or table.shape[1] != x.shape[-1]:
        raise ValueError(
            f"table must have shape (positions, {x.shape[-1]}), the width of x, got {table.shape}"
        )
    require_integers("positions", positions)
    if positions.shape[-1:] != x.shape[-2:-1]:
        raise ValueError(f"positions has shape {positions.shape}, x {x.shape}: one for each row")
    require_broadcastable("positions", positions.shape, x.shape[:-1])
    if positions.size and not (0 <= positions.min() and positions.max() < len(table)):
        raise ValueError(
            f"positions must lie in [0, {len(table)}), the rows of the table, got values from "
            f"{positions.min()} to {positions.max()}"
        )
    wide = compute_dtype(x, table)
    out = x.astype(wide, copy=False) + table[positions].astype(wide, copy=False)
    cache = LearnedCache(positions.copy(), x.shape, table.shape, x.dtype)
    return narrowed(out, x), cache


def learned_backward(dout: Inexact[Array, "*B N W"], cache: LearnedCache) -> LearnedGrads:
    """Pass dy on to x, and add it up in the rows that were read, over the batch first where all
    share their positions  (Eq. 7.22)

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    require_cotangent("dout", dout, cache.shape)
    width = cache.shape[-1]
    rows = unbroadcast(dout.astype(compute_dtype(dout)), (*cache.positions.shape, width))
    dtable = np.zeros(cache.table_shape, rows.dtype)
    # `dtable[positions] += rows` would keep one of the rows that meet
    np.add.at(dtable, cache.positions.ravel(), rows.reshape(cache.positions.size, width))
    return LearnedGrads(dout.astype(cache.dtype), dtable)
