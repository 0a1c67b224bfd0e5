"""Chapter 02: Attention. See README.md beside this file."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Inexact

from minitransformer.arrays import (
    Array,
    common_dtype,
    compute_dtype,
    require_array,
    require_bool,
    require_broadcastable,
    require_finite,
    unbroadcast,
)
from minitransformer.attention.softmax import (
    SoftcapCache,
    SoftmaxCache,
    logsumexp_forward,
    softcap_backward,
    softcap_forward,
    softmax_backward,
    softmax_forward,
)

# ==== steps =======================================================================================


# ---- attention -----------------------------------------------------------------------------------


class AttentionSteps(NamedTuple):
    """The values of Eq. 2.7, or their gradients."""

    q: Inexact[Array, "*B N D"]
    k: Inexact[Array, "*B M D"]
    v: Inexact[Array, "*B M E"]
    products: Inexact[Array, "*B N M"]
    scores: Inexact[Array, "*B N M"]
    weights: Inexact[Array, "*B N M"]
    out: Inexact[Array, "*B N E"]


def attention_steps_forward(
    q: Inexact[Array, "*B N D"],
    k: Inexact[Array, "*B M D"],
    v: Inexact[Array, "*B M E"],
    *,
    scale: float,
    keep: Bool[Array, "N M"],
) -> AttentionSteps:
    """Attention without heads or options, line by line  (Eq. 2.7)"""
    # 02.1: your lines


def attention_steps_backward(
    dout: Inexact[Array, "*B N E"],
    steps: AttentionSteps,
    *,
    scale: float,
    keep: Bool[Array, "N M"],
) -> AttentionSteps:
    """The gradient of every value of Eq. 2.7, last line first.

    A product C = A B sends dC Bᵀ to A and Aᵀ dC to B: the shapes leave no other choice. A score
    that was masked is a constant.
    """
    # 02.2: your lines


# ==== attention.dense =============================================================================


class AttentionCache(NamedTuple):
    """`weights` (P, before any multiplier) and `lse` are public; the rest is for the backward."""

    weights: Inexact[Array, "*B H N M"]
    lse: Inexact[Array, "*B H N"]
    q: Inexact[Array, "*Q H N D"]
    k: Inexact[Array, "*K G M D"]
    v: Inexact[Array, "*V G M E"]
    out: Inexact[Array, "*B H N E"]
    multiplier: Inexact[Array, "..."] | None
    scale: float
    softcap: SoftcapCache
    inputs: tuple[tuple[tuple[int, ...], np.dtype], ...]  # shape and dtype of q, k, v (and bias)
    fast: bool  # the twin was taken: no bias, no soft-cap


class AttentionGrads(NamedTuple):
    q: Inexact[Array, "*Q H N D"]
    k: Inexact[Array, "*K G M D"]
    v: Inexact[Array, "*V G M E"]
    bias: Inexact[Array, "..."] | None


def attention_forward(
    q: Inexact[Array, "*#B H N D"],
    k: Inexact[Array, "*#B G M D"],
    v: Inexact[Array, "*#B G M E"],
    *,
    keep: Bool[Array, "..."] | None = None,
    bias: Inexact[Array, "..."] | None = None,
    multiplier: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    check_finite: bool = True,
    fast: bool = False,
) -> tuple[Inexact[Array, "*B H N E"], AttentionCache]:
    """Each query's weighted mean of the values  (Eq. 2.1, Eq. 2.2)

    `keep` is boolean, True = may attend. `bias` is added to the scores; -inf in it masks.
    `multiplier` scales the weights after softmax: an inverted-dropout mask, as data. Each
    broadcasts to (*B, H, N, M). `fast` takes the Numba twin of passes 2 and 3 where it exists:
    real arrays, no bias, no soft-cap, nothing to check.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape; with `check_finite`, if a NaN or infinity stands
        where some query may read it.
    """
    # 02.3: your lines


def attention_backward(
    dout: Inexact[Array, "*B H N E"],
    cache: AttentionCache,
    *,
    dlse: Inexact[Array, "*B H N"] | None = None,
) -> AttentionGrads:
    """Undo the passes in reverse, for a cotangent of the output and, if wanted, of the LSE.

        dV = Σ_group Wᵀ dO,   dP = (dO Vᵀ) ⊙ multiplier  (Eq. 2.3)
        dS = P ⊙ (dP - D + dL),   D = rowsum(dO ⊙ O) = rowsum(dP ⊙ P)  (Eq. 2.4)
        dbias = dS summed over broadcast axes,   dR = dS ⊙ cap'(R)  (Eq. 2.5)
        dQ = s · dR K,   dK = s · Σ_group dRᵀ Q  (Eq. 2.6)

    Raises
    ------
    ValueError
        If `dout` or `dlse` does not have the shape of what the forward pass returned.
    """
    # 02.4: your lines


# ---- shapes --------------------------------------------------------------------------------------


def score_shape(q: Array, k: Array, v: Array) -> tuple[int, ...]:
    """The shape (*B, H, N, M) of the scores; every disagreement is an error that names both
    sides."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_array(name, x, min_ndim=3)
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head width {k.shape[-1]}, q has {q.shape[-1]}: the two must agree")
    for axis, what in ((-3, "heads"), (-2, "keys")):
        if v.shape[axis] != k.shape[axis]:
            raise ValueError(
                f"v has {v.shape[axis]} {what}, k has {k.shape[axis]}: the two must agree"
            )
    heads, groups = q.shape[-3], k.shape[-3]
    if groups == 0 or heads % groups:
        raise ValueError(
            f"q has {heads} heads, k has {groups}: the key/value heads must divide the query heads"
        )
    try:
        leading = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ValueError(
            f"the leading axes of q {q.shape[:-3]}, k {k.shape[:-3]} and v {v.shape[:-3]} do not "
            "broadcast together"
        ) from None
    return (*leading, heads, q.shape[-2], k.shape[-2])


def _stack(x: Array, groups: int) -> Array:
    """(*B, H, N, X) -> (*B, G, H//G · N, X): the heads of a group, one below the other."""
    *leading, heads, rows, width = x.shape
    return x.reshape(*leading, groups, heads // groups * rows, width)


def _unstack(x: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_stack`, to (*B, H, N, X) with the H and N of `shape`."""
    return x.reshape(*x.shape[:-3], *shape[-3:-1], x.shape[-1])


# ---- what may be read ----------------------------------------------------------------------------


def _allowed(keep: Array | None, bias: Array | None, shape: tuple[int, ...]) -> Array | None:
    """Who may attend to whom, (*B, H, N, M), from `keep` and from the -inf in `bias`; None if
    everybody may attend to everything."""
    allowed = None
    if keep is not None:
        require_bool("keep", keep)
        require_broadcastable("keep", keep.shape, shape)
        allowed = keep
    if bias is not None:
        require_array("bias", bias)
        require_broadcastable("bias", bias.shape, shape)
        masked = bias.real == -np.inf
        if masked.any():
            allowed = ~masked if allowed is None else allowed & ~masked
    return None if allowed is None else np.broadcast_to(allowed, shape)


def _silence(x: Array, read: Array) -> Array:
    """`x` (*X, R, C) with 0 in the rows that are not `read` (*B, R)."""
    return np.where(read[..., None], x, 0)


# ---- options -------------------------------------------------------------------------------------


def score_scale(scale: float | None, width: int) -> float:
    """The given scale, or 1/√D."""
    if scale is None:
        if width == 0:
            raise ValueError("q has head width 0, for which 1/√D has no value: give scale")
        return 1 / math.sqrt(width)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def _multiplier(
    multiplier: Array,
    allowed: Array | None,
    shape: tuple[int, ...],
    dtype: np.dtype,
    check_finite: bool,
) -> Array:
    """The multiplier in the dtype of the computation, 0 where nobody may attend."""
    if not isinstance(multiplier, np.ndarray):
        raise TypeError(f"multiplier must be a NumPy array, got {type(multiplier).__name__}")
    require_broadcastable("multiplier", multiplier.shape, shape)
    multiplier = multiplier.astype(dtype, copy=False)
    if allowed is not None:
        multiplier = np.where(allowed, multiplier, 0)
    if check_finite:
        require_finite("multiplier", multiplier)
    return multiplier
