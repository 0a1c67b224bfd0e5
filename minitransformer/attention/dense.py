"""Scaled dot-product attention, dense: THE definition that every faster form is held against.

    R = s · Q Kᵀ,   S = cap(R) + bias where keep, else -inf,   P = softmax(S)  (Eq. 2.1)
    W = P ⊙ multiplier,   O = W V,   L = log Σ_j exp(S_j)  (Eq. 2.2)

s = 1/√D by default. The order is normative: scale, soft-cap, bias, keep, softmax, multiplier. Query
head h reads key/value head h // (H // G): H = G is multi-head, G = 1 multi-query, between them
grouped-query attention. arXiv:1706.03762, arXiv:1911.02150, arXiv:2305.13245.

A masked pair has no influence. Arithmetic alone does not give that: 0 · NaN is NaN, in the product
with V and again in dK. So a key that no query may attend to, a query with no key, and the cotangent
of a row with no key are set to 0 before anything is multiplied. A row with no key has weights 0,
output 0, L = -inf and gradient 0.
"""

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
)


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
    shape = score_shape(q, k, v)
    allowed = _allowed(keep, bias, shape)
    scale = score_scale(scale, q.shape[-1])
    dtype = compute_dtype(*(x for x in (q, k, v, bias) if x is not None))

    # pass 0: what nobody may read is 0, whatever stands there
    q_, k_, v_ = (x.astype(dtype, copy=False) for x in (q, k, v))
    finite = all(np.isfinite(x).all() for x in (q_, k_, v_))
    if not finite and (allowed is not None or 0 in shape):
        asked = np.broadcast_to(True if allowed is None else allowed, shape)
        read = np.any(_stack(asked, k.shape[-3]), axis=-2)  # (*B, G, M): by some query
        k_, v_ = _silence(k_, read), _silence(v_, read)
        q_ = _silence(q_, np.any(asked, axis=-1))
    if check_finite and not finite:
        for name, x in (("q", q_), ("k", k_), ("v", v_)):
            require_finite(name, x)

    # pass 1: products; the queries of a group are more rows against the same keys
    groups = k.shape[-3]
    with np.errstate(over="ignore", invalid="ignore"):  # a masked pair may overflow
        product = _stack(q_, groups) @ np.swapaxes(k_, -1, -2)
    scores = _unstack(product, shape)  # (*B, H, N, M)
    softcap_cache = SoftcapCache(None)
    plain = bias is None and not softcap and not check_finite
    fast = fast and plain and scores.dtype in (np.float32, np.float64)
    if fast:
        from minitransformer import fast as twins

        weights, lse = twins.masked_softmax(scores, scale, allowed)
    else:
        # pass 2: scale, soft-cap, bias, keep
        scores = scores * scale
        if softcap and allowed is not None:
            scores = np.where(allowed, scores, 0)  # its slope is used at every pair
        scores, softcap_cache = softcap_forward(scores, softcap)
        if bias is not None:
            scores = scores + bias.astype(dtype, copy=False)
        if allowed is not None:
            scores = np.where(allowed, scores, -np.inf)
        # pass 3: softmax
        lse, exponentials = logsumexp_forward(scores, check_finite=check_finite)
        weights = exponentials.weights
    # pass 4: the multiplier, and the mean of the values
    if multiplier is not None:
        multiplier = _multiplier(multiplier, allowed, shape, dtype, check_finite)
    applied = weights if multiplier is None else weights * multiplier
    out = _unstack(_stack(applied, groups) @ v_, (*shape[:-1], v.shape[-1]))

    given = [x for x in (q, k, v, bias) if x is not None]
    inputs = tuple((x.shape, x.dtype) for x in given)
    cache = AttentionCache(
        weights, lse, q_, k_, v_, out, multiplier, scale, softcap_cache, inputs, fast
    )
    return out.astype(common_dtype(q, k, v, bias), copy=False), cache


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
    for name, x, like in (("dout", dout, cache.out), ("dlse", dlse, cache.lse)):
        if x is not None and x.shape != like.shape:
            raise ValueError(f"{name} has shape {x.shape}, the forward pass gave {like.shape}")
    weights, groups, shape = cache.weights, cache.k.shape[-3], cache.weights.shape
    alive = cache.lse != -np.inf
    dout = dout.astype(weights.dtype, copy=False)
    if not np.isfinite(dout).all():  # only a NaN or infinity could be felt in a dead row
        dout = _silence(dout, alive)
    dout_rows = _stack(dout, groups)

    # undo pass 4: out = (weights * multiplier) @ v
    applied = weights if cache.multiplier is None else weights * cache.multiplier
    dv = np.swapaxes(_stack(applied, groups), -1, -2) @ dout_rows
    dweights = _unstack(dout_rows @ np.swapaxes(cache.v, -1, -2), shape)
    if cache.multiplier is not None:
        dweights = dweights * cache.multiplier
    if cache.fast and dlse is None:
        from minitransformer import fast as twins

        dscores = twins.softmax_backward(dweights, weights, cache.scale)
        dproduct = _stack(dscores, groups)
    else:
        # undo pass 3: softmax; the LSE's own gradient is the weights
        dscores = softmax_backward(dweights, SoftmaxCache(weights, -1))
        if dlse is not None:
            dscores = dscores + weights * np.where(alive, dlse, 0)[..., None]
        # undo pass 2: the bias was added, so dscores is its gradient too; then soft-cap
        dproduct = _stack(softcap_backward(dscores, cache.softcap) * cache.scale, groups)
    # undo pass 1: product = q @ kᵀ, a group's rows summed
    dq = _unstack(dproduct @ cache.k, (*shape[:-1], cache.q.shape[-1]))
    dk = np.swapaxes(dproduct, -1, -2) @ _stack(cache.q, groups)

    # sum what was broadcast, round once to what came in
    grads = [
        unbroadcast(g, like).astype(dtype, copy=False)
        for g, (like, dtype) in zip((dq, dk, dv, dscores), cache.inputs, strict=False)
    ]
    return AttentionGrads(*grads, *([None] if len(grads) == 3 else []))


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
