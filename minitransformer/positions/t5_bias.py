"""T5's bias: every head learns one number for each bucket of distances.

    n = |j - i|, past and future in R/2 buckets each, bidirectional,
    n = max(i - j, 0), all R for the past, causal  (Eq. 7.14)
    b = n for n < e,   b = min(e + ⌊(r - e) log(n/e) / log(F/e)⌋, r - 1) from there on,
    r buckets a side, e = ⌊r/2⌋, F = max_distance;   the future's are b + R/2  (Eq. 7.15)
    bias_hij = E[b(j - i), h]  (Eq. 7.16)

Near keys have a bucket each, far ones share wider and wider buckets, all beyond F the last. T5 has
32 and 128; its scores are q · k without 1/√D (its first weights make up for that), so attention
wants scale=1; all layers share one table; cross-attention has none. Bidirectional, bucket R/2 is a
future key at distance 0: nobody reads it. Encoder and decoder differ in silence, so `bidirectional`
has no default. arXiv:1910.10683; Eq. 7.15 is the authors' code.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Inexact, Integer

from minitransformer.arrays import (
    Array,
    compute_dtype,
    require_array,
    require_cotangent,
    require_integers,
    require_whole,
)
from minitransformer.positions.relative import relative_positions


class T5BiasCache(NamedTuple):
    bucket: Integer[Array, "*B N M"]
    shape: tuple[int, int]  # of the table


def t5_buckets(
    relative: Integer[Array, "*P"],
    buckets: int = 32,
    *,
    bidirectional: bool,
    max_distance: int = 128,
) -> Integer[Array, "*P"]:
    """The bucket of each relative position, key minus query  (Eq. 7.14, Eq. 7.15)

    The logarithm is taken in float64. Where a border is a whole number its rounding decides; with
    32 buckets and 128 the authors' float32 gives the same.

    Raises
    ------
    TypeError, ValueError
        If a side has fewer than 2 buckets, the two sides cannot be equal, or `max_distance` is not
        beyond the distances that have a bucket each.
    """
    require_integers("relative", relative)
    require_whole(4 if bidirectional else 2, buckets=buckets)
    if bidirectional and buckets % 2:
        raise ValueError(f"buckets must be even when bidirectional: past and future, got {buckets}")
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2
    require_whole(exact + 1, max_distance=max_distance)

    r = relative.astype(np.int64)
    distance = np.abs(r) if bidirectional else np.maximum(-r, 0)
    # in the authors' order: (r - e) / log(F/e) first would put 64 one bucket too near
    share = np.log(np.maximum(distance, exact) / exact) / math.log(max_distance / exact)
    far = exact + np.floor(share * (side - exact)).astype(np.int64)
    bucket = np.where(distance < exact, distance, np.minimum(far, side - 1))
    return bucket + side * (r > 0) if bidirectional else bucket


def t5_bias_forward(
    table: Inexact[Array, "R H"],
    query_positions: Integer[Array, "*#B N"],
    key_positions: Integer[Array, "*#B M"],
    *,
    bidirectional: bool,
    max_distance: int = 128,
) -> tuple[Inexact[Array, "*B H N M"], T5BiasCache]:
    """The bias to add to the scores, in the dtype of the table  (Eq. 7.16)

    Positions are those in the text, as for ALiBi: with a cache the queries go on where it ends.

    Raises
    ------
    TypeError, ValueError
        If the table is no floating (buckets, heads), positions are no integers whose leading axes
        broadcast, or an option does not fit (see `t5_buckets`).
    """
    require_array("table", table)
    if table.ndim != 2:
        raise ValueError(f"table must have shape (buckets, heads), got {table.shape}")
    bucket = t5_buckets(
        relative_positions(query_positions, key_positions),
        len(table),
        bidirectional=bidirectional,
        max_distance=max_distance,
    )
    return np.moveaxis(table[bucket], -1, -3), T5BiasCache(bucket, table.shape)


def t5_bias_backward(dout: Inexact[Array, "*B H N M"], cache: T5BiasCache) -> Inexact[Array, "R H"]:
    """dE[b, h] = Σ dbias_hij over all pairs of the batch whose bucket is b  (Eq. 7.17)

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    *leading, queries, keys = cache.bucket.shape
    buckets, heads = cache.shape
    require_cotangent("dout", dout, (*leading, heads, queries, keys))
    wide = compute_dtype(dout)
    bucket = cache.bucket.ravel()
    dtable = np.zeros(cache.shape, wide)
    for h in range(heads):
        pairs = dout[..., h, :, :].astype(wide).ravel()
        dtable[:, h] = np.bincount(bucket, weights=pairs, minlength=buckets)
    return dtable
