"""ALiBi: every head subtracts its slope times the distance from the scores.

    m_k = 2^{-8k/n}, k = 1 … n, for a power of two n of heads  (Eq. 7.10)
    m = (m of p heads, then the 1st, 3rd, 5th … of 2p),   p = 2^⌊log₂ n⌋, otherwise  (Eq. 7.11)
    bias_hij = -m_h |p_i - p_j|  (Eq. 7.12)

The bias is added after scale and soft-cap, and is not scaled itself. Under a causal mask, which it
does not replace, it is the paper's -m_h (i - j); without one it is symmetric. Slopes are fixed
numbers unless somebody lets them learn. arXiv:2108.12409; Eq. 7.11 is the authors' code, and leaves
the slopes in no order of size.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Inexact, Integer

from minitransformer.arrays import (
    Array,
    compute_dtype,
    narrowed,
    require_array,
    require_cotangent,
    require_whole,
)
from minitransformer.positions.relative import relative_positions


class AlibiCache(NamedTuple):
    distance: Integer[Array, "*B N M"]
    heads: int


def alibi_slopes(heads: int) -> Float[Array, "H"]:
    """The slopes of any number of heads, in float64  (Eq. 7.10, Eq. 7.11)

    Raises
    ------
    TypeError, ValueError
        If `heads` is no whole number or below 1.
    """
    require_whole(1, heads=heads)
    power = 1 << (int(heads).bit_length() - 1)
    first = np.arange(1, power + 1) / power
    between = np.arange(1, 2 * (heads - power), 2) / (2 * power)
    return 2.0 ** (-8 * np.concatenate([first, between]))


def alibi_forward(
    slopes: Inexact[Array, "H"],
    query_positions: Integer[Array, "*#B N"],
    key_positions: Integer[Array, "*#B M"],
) -> tuple[Inexact[Array, "*B H N M"], AlibiCache]:
    """The bias to add to the scores  (Eq. 7.12)

    Positions are those in the text: with a cache of M - N tokens, M - N … M - 1 for the queries and
    0 … M - 1 for the keys, in whatever order the cache holds them.

    Raises
    ------
    TypeError, ValueError
        If slopes are no floating (H,), or positions no integers whose leading axes broadcast.
    """
    require_array("slopes", slopes)
    if slopes.ndim != 1:
        raise ValueError(f"slopes must have shape (heads,), got {slopes.shape}")
    distance = np.abs(relative_positions(query_positions, key_positions))
    wide = compute_dtype(slopes)
    bias = slopes.astype(wide, copy=False)[:, None, None] * -distance[..., None, :, :].astype(wide)
    return narrowed(bias, slopes), AlibiCache(distance, len(slopes))


def alibi_backward(dout: Inexact[Array, "*B H N M"], cache: AlibiCache) -> Inexact[Array, "H"]:
    """dm_h = -Σ_{bij} dbias_bhij |p_i - p_j|, for slopes that learn  (Eq. 7.13)

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    *leading, queries, keys = cache.distance.shape
    require_cotangent("dout", dout, (*leading, cache.heads, queries, keys))
    wide = compute_dtype(dout)
    paid = dout.astype(wide, copy=False) * cache.distance[..., None, :, :].astype(wide)
    return -np.moveaxis(paid, -3, 0).sum(axis=tuple(range(1, paid.ndim)))
