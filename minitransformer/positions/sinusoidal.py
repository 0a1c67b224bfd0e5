"""Sinusoidal positions: a fixed row of waves for each position, added to what stands there.

    ω_i = base^{-2i/W},   i < ⌈W/2⌉  (Eq. 7.18)
    P[p, 2i] = sin(p ω_i),   P[p, 2i + 1] = cos(p ω_i)  (Eq. 7.19)
    y_n = x_n + P[p_n],   dx_n = dy_n  (Eq. 7.20)

P_{p+k} is P_p with each pair turned by k ω_i, and P_p · P_q depends on p - q alone. An odd width
ends in a sine without its cosine. Nothing is learned and no length is fixed. arXiv:1706.03762,
which multiplies embeddings by √W before it adds; that is no part of this. tensor2tensor and fairseq
put all sines before all cosines and divide the exponent by W/2 - 1 instead of W/2.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Inexact, Integer

from minitransformer.arrays import (
    Array,
    compute_dtype,
    narrowed,
    require_array,
    require_broadcastable,
    require_cotangent,
    require_integers,
    require_whole,
)


class SinusoidalCache(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype


def sinusoidal_table(
    positions: Integer[Array, "*P"], width: int, *, base: float = 10000.0
) -> Float[Array, "*P W"]:
    """The row of each position, in float64: an angle of thousands in float32 is wrong in the fourth
    digit, in bfloat16 it is noise  (Eq. 7.18, Eq. 7.19)

    Raises
    ------
    TypeError, ValueError
        If positions are no integers, the width is below 1, or the base no number above 1.
    """
    require_integers("positions", positions)
    require_whole(1, width=width)
    if not 1 < base < math.inf:
        raise ValueError(f"base must be a number above 1, got {base}")
    omega = base ** -(np.arange(0, width, 2) / width)
    angle = positions.astype(np.float64)[..., None] * omega
    table = np.empty((*positions.shape, width))
    table[..., 0::2] = np.sin(angle)
    table[..., 1::2] = np.cos(angle[..., : width // 2])
    return table


def sinusoidal_forward(
    x: Inexact[Array, "*B N W"], positions: Integer[Array, "..."], *, base: float = 10000.0
) -> tuple[Inexact[Array, "*B N W"], SinusoidalCache]:
    """Add to each row of x the waves of its position, rounded once to the dtype of x  (Eq. 7.20)

    Positions are (N,) for all rows of the batch, or (*B, N) for each its own, as where rows are
    padded on the left. With a cache they go on where it ends.

    Raises
    ------
    TypeError, ValueError
        If x is no floating (*B, N, W), or positions are no integers, one for each row of x.
    """
    require_array("x", x, min_ndim=2)
    require_integers("positions", positions)
    if positions.shape[-1:] != x.shape[-2:-1]:
        raise ValueError(f"positions has shape {positions.shape}, x {x.shape}: one for each row")
    require_broadcastable("positions", positions.shape, x.shape[:-1])
    wide = compute_dtype(x)
    waves = sinusoidal_table(positions, x.shape[-1], base=base).astype(wide)
    return narrowed(x.astype(wide, copy=False) + waves, x), SinusoidalCache(x.shape, x.dtype)


def sinusoidal_backward(
    dout: Inexact[Array, "*B N W"], cache: SinusoidalCache
) -> Inexact[Array, "*B N W"]:
    """dx = dy: what is added does not depend on x  (Eq. 7.20)

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    require_cotangent("dout", dout, cache.shape)
    return dout.astype(cache.dtype)
