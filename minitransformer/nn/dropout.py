"""Inverted dropout of single entries, by the mask law.

    y = x ⊙ Z / π,   Z = 1 with probability π  (Eq. 16.13)

E[y] = x. In evaluation y = x. The mask is a function of (seed, step, layer) and of where an entry
stands, so it can be drawn again anywhere. arXiv:1207.0580.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Inexact

from minitransformer.arrays import Array, require_array, require_cotangent, require_in_range
from minitransformer.philox import Draw, Stream, inclusion_probability, random_bits, threshold


class DropoutCache(NamedTuple):
    factor: Array | None  # Z / π; None: nothing was dropped


def dropout_forward(
    x: Inexact[Array, "*B W"], *, drop_rate: float, draw: Draw, layer: int
) -> tuple[Inexact[Array, "*B W"], DropoutCache]:
    """Drop each entry with probability `drop_rate` and scale up the others  (Eq. 16.13). The same
    `layer` twice in one step means the same mask twice: give every dropout of a model its own.

    Raises
    ------
    TypeError, ValueError
        If x is no floating array or the rate is outside [0, 1].
    """
    require_array("x", x, min_ndim=1)
    require_in_range("drop_rate", drop_rate, 0.0, 1.0)
    if drop_rate == 0 or (not draw.training and draw.sample == 0):
        return x, DropoutCache(None)
    rows = x.reshape(int(np.prod(x.shape[:-1])), x.shape[-1])
    i, j = np.arange(rows.shape[0])[:, None], np.arange(rows.shape[1])
    bits = random_bits(draw, Stream.DROPOUT, layer, np.zeros((1, 1), np.int64), i, j)
    kept = (bits.astype(np.uint64) >= threshold(drop_rate)).reshape(x.shape)
    probability = float(inclusion_probability(drop_rate))
    factor = kept * (1 / probability if probability else 0.0)
    factor = factor.astype(np.float32 if x.dtype.itemsize <= 4 else np.float64)
    return (x * factor).astype(x.dtype, copy=False), DropoutCache(factor)


def dropout_backward(dout: Inexact[Array, "*B W"], cache: DropoutCache) -> Inexact[Array, "*B W"]:
    """dx = dy ⊙ Z / π  (Eq. 16.14)"""
    if cache.factor is None:
        return dout
    require_cotangent("dout", dout, cache.factor.shape)
    return (dout * cache.factor).astype(dout.dtype, copy=False)
