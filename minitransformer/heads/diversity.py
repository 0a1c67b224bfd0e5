"""Do the heads of a layer do different things? Three penalties that say how alike they are.

    C_i = (1/H²) Σ_ab cos(y_ai, y_bi) = ‖(1/H) Σ_a ŷ_ai‖²,   ŷ = y / ‖y‖   outputs  (Eq. 14.13)
    R_i = (1/H²) Σ_ab ⟨P_ai, P_bi⟩ = ‖(1/H) Σ_a P_ai‖²   the keys they read  (Eq. 14.14)
    F = ‖A Aᵀ - I‖²   rows of A not orthonormal  (Eq. 14.15)

Each is added to the loss with a positive factor: less of it is more diverse. (The paper maximises
-C and -R, the disagreements of outputs and of positions, and takes C of the values for that of
subspaces.) Sums run over all pairs of heads, a = b included, as there. In C a head's own term is a
constant 1/H², so C is at least 1/H for heads that are at right angles and 0 only for heads that
cancel; in R it is ‖P_ai‖²/H², which also pushes each single head to spread.

F is asked of two things: of the maps of one row, A = (H, M), which also makes each head sharp
(1703.03130), and of a weight, A = Wᵀ, whose columns then keep apart. arXiv:1810.10183,
arXiv:1703.03130.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Inexact

from minitransformer.arrays import (
    Array,
    compute_dtype,
    require_array,
    require_cotangent,
)


class SimilarityCache(NamedTuple):
    unit: Inexact[Array, "*B H N E"]  # ŷ; 0 for a head that gives 0
    total: Inexact[Array, "*B 1 N E"]  # Σ_a ŷ_a
    scale: Inexact[Array, "*B H N 1"]  # the largest entry of each y, or 1
    norm: Inexact[Array, "*B H N 1"]  # of y / scale, or 1
    dtype: np.dtype


class OverlapCache(NamedTuple):
    total: Inexact[Array, "*B 1 N M"]
    shape: tuple[int, ...]
    dtype: np.dtype


class OrthogonalityCache(NamedTuple):
    a: Inexact[Array, "*B R C"]
    excess: Inexact[Array, "*B R R"]  # A Aᵀ - I
    dtype: np.dtype


# ---- outputs -------------------------------------------------------------------------------------


def output_similarity_forward(
    out: Inexact[Array, "*B H N E"],
) -> tuple[Inexact[Array, "*B N"], SimilarityCache]:
    """The mean cosine of two heads' outputs, at every row  (Eq. 14.13); from 0 to 1.

    A head that gives 0, in a row with nothing to read, is like nobody, itself included. Never
    narrower than float32, here and below.

    Raises
    ------
    TypeError, ValueError
        If `out` is no floating array with a head axis of at least one head.
    """
    _require_heads("out", out)
    y = out.astype(compute_dtype(out), copy=False)
    # pass 1: directions; scaled first, for the squares of tiny numbers vanish
    scale = np.abs(y.real).max(axis=-1, keepdims=True, initial=0)
    alive = scale > 0
    scale = np.where(alive, scale, 1)
    scaled = np.where(alive, y / scale, 0)
    norm = np.where(alive, np.sqrt((scaled * scaled).sum(axis=-1, keepdims=True)), 1)
    unit = scaled / norm
    # pass 2: the square of their mean is the mean over all pairs
    total = unit.sum(axis=-3, keepdims=True)
    similarity = (total * total).sum(axis=-1)[..., 0, :] / out.shape[-3] ** 2
    return similarity, SimilarityCache(unit, total, scale, norm, out.dtype)


def output_similarity_backward(
    dout: Inexact[Array, "*B N"], cache: SimilarityCache
) -> Inexact[Array, "*B H N E"]:
    """g = (2/H²) dC Σ_b ŷ_b,   dy_a = (g - ŷ_a (g · ŷ_a)) / ‖y_a‖  (Eq. 14.16); 0 for a head that
    gives 0.

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    *leading, heads, rows, _ = cache.unit.shape
    require_cotangent("dout", dout, (*leading, rows))
    # undo pass 2
    g = 2 / heads**2 * cache.total * dout[..., None, :, None]
    # undo pass 1: along the direction itself nothing changes
    along = (g * cache.unit).sum(axis=-1, keepdims=True)
    alive = cache.unit.any(axis=-1, keepdims=True)
    dy = np.where(alive, g - cache.unit * along, 0) / cache.norm / cache.scale
    return dy.astype(cache.dtype, copy=False)


# ---- maps ----------------------------------------------------------------------------------------


def map_overlap_forward(
    weights: Inexact[Array, "*B H N M"],
) -> tuple[Inexact[Array, "*B N"], OverlapCache]:
    """How much of the same keys the heads read, at every row  (Eq. 14.14); from 0 to 1 for
    attention weights, 0 where nothing is read.

    Raises
    ------
    TypeError, ValueError
        If `weights` is no floating array with a head axis of at least one head.
    """
    _require_heads("weights", weights)
    p = weights.astype(compute_dtype(weights), copy=False)
    total = p.sum(axis=-3, keepdims=True)
    overlap = (total * total).sum(axis=-1)[..., 0, :] / weights.shape[-3] ** 2
    return overlap, OverlapCache(total, weights.shape, weights.dtype)


def map_overlap_backward(
    dout: Inexact[Array, "*B N"], cache: OverlapCache
) -> Inexact[Array, "*B H N M"]:
    """dP_a = (2/H²) dR Σ_b P_b, the same for every head  (Eq. 14.17)

    Of the weights: softmax comes next, and takes a masked key's share away.

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    *leading, heads, rows, _ = cache.shape
    require_cotangent("dout", dout, (*leading, rows))
    dp = 2 / heads**2 * cache.total * dout[..., None, :, None]
    return np.array(np.broadcast_to(dp, cache.shape)).astype(cache.dtype, copy=False)


# ---- orthogonality -------------------------------------------------------------------------------


def orthogonality_forward(
    a: Inexact[Array, "*B R C"],
) -> tuple[Inexact[Array, "*B"], OrthogonalityCache]:
    """‖A Aᵀ - I‖², 0 if and only if the rows of A are orthonormal  (Eq. 14.15)

    More rows than columns cannot be: R - C is the least. For the heads of each row of attention
    give `np.swapaxes(weights, -3, -2)`, (*B, N, H, M); for the columns of a weight, its transpose.

    Raises
    ------
    TypeError, ValueError
        If `a` is no floating array with two axes.
    """
    require_array("a", a, min_ndim=2)
    wide = a.astype(compute_dtype(a), copy=False)
    excess = wide @ np.swapaxes(wide, -1, -2) - np.eye(a.shape[-2], dtype=wide.real.dtype)
    penalty = (excess * excess).sum(axis=(-2, -1))
    return np.asarray(penalty), OrthogonalityCache(wide, excess, a.dtype)


def orthogonality_backward(
    dout: Inexact[Array, "*B"], cache: OrthogonalityCache
) -> Inexact[Array, "*B R C"]:
    """dA = 4 dF (A Aᵀ - I) A  (Eq. 14.18)

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    require_cotangent("dout", dout, cache.a.shape[:-2])
    da = 4 * np.asarray(dout)[..., None, None] * (cache.excess @ cache.a)
    return da.astype(cache.dtype, copy=False)


def _require_heads(name: str, x: Array) -> None:
    require_array(name, x, min_ndim=3)
    if not x.shape[-3]:
        raise ValueError(f"{name} has no heads: its shape is {x.shape}")
