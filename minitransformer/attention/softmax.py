"""Stable softmax and its relatives: log-sum-exp, log-softmax, the online merge, the soft-cap.

    m = max_j x_j,   Z = Σ_j exp(x_j - m),   y_j = exp(x_j - m) / Z,   lse = m + log Z  (Eq. 1.1)

Subtracting the maximum changes nothing but the range: exp never overflows, and Z >= 1. A score of
-inf means "masked". A row with nothing but -inf (or no entry at all) has weights 0 and lse = -inf,
never NaN. The online merge makes softmax a sum over parts (arXiv:1805.02867, arXiv:2112.05682).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Inexact

from minitransformer.arrays import Array, compute_dtype, require_array, require_logits


class SoftmaxCache(NamedTuple):
    weights: Inexact[Array, "..."]
    axis: int


class LogSoftmaxCache(NamedTuple):
    weights: Inexact[Array, "..."]
    masked: Bool[Array, "..."]
    axis: int


class LogSumExpCache(NamedTuple):
    weights: Inexact[Array, "..."]
    axis: int
    keepdims: bool


def _prepare(scores: Array, axis: int, check_finite: bool) -> Array:
    require_array("scores", scores, min_ndim=1)
    if not -scores.ndim <= axis < scores.ndim:
        raise ValueError(f"axis is {axis}, but scores has {scores.ndim} axes")
    if check_finite:
        require_logits("scores", scores)
    return scores.astype(compute_dtype(scores), copy=False)


def _exponentials(x: Array, axis: int) -> tuple[Array, Array, Array]:
    """Row maximum (0 for a dead row), exp(x - m), and their sum Z: the first two thirds of Eq.
    1.1."""
    m = x.real.max(axis=axis, keepdims=True, initial=-np.inf)
    m = np.where(
        m == -np.inf, 0, m
    )  # a dead row: exp(-inf - 0) = 0, where exp(-inf - -inf) would be NaN
    e = np.exp(x - m)
    return m, e, e.sum(axis=axis, keepdims=True)


def softmax_forward(
    scores: Inexact[Array, "..."], *, axis: int = -1, check_finite: bool = True
) -> tuple[Inexact[Array, "..."], SoftmaxCache]:
    """Normalised exponentials along `axis` (Eq. 1.1).

    Raises
    ------
    TypeError, ValueError
        If `scores` is no floating array, `axis` is not one of its axes, or an entry is NaN or +inf.
    """
    x = _prepare(scores, axis, check_finite)
    # pass 1 and 2: subtract the maximum, exponentiate
    _, e, z = _exponentials(x, axis)
    # pass 3: divide; a dead row has Z = 0 and stays 0
    weights = e / np.where(z == 0, 1, z)
    return weights.astype(scores.dtype, copy=False), SoftmaxCache(weights, axis)


def softmax_backward(dweights: Inexact[Array, "..."], cache: SoftmaxCache) -> Inexact[Array, "..."]:
    """dx = y ⊙ (dy - Σ_j y_j dy_j)  (Eq. 1.2)"""
    y = cache.weights
    return y * (dweights - (y * dweights).sum(axis=cache.axis, keepdims=True))


def logsumexp_forward(
    scores: Inexact[Array, "..."],
    *,
    axis: int = -1,
    keepdims: bool = False,
    check_finite: bool = True,
) -> tuple[Inexact[Array, "..."], LogSumExpCache]:
    """lse = m + log Σ_j exp(x_j - m): the log of softmax's denominator (Eq. 1.1); -inf for a dead
    row.

    The result is never narrower than float32.
    """
    x = _prepare(scores, axis, check_finite)
    m, e, z = _exponentials(x, axis)
    alive = z != 0
    lse = np.where(alive, m + np.log(np.where(alive, z, 1)), -np.inf)
    cache = LogSumExpCache(e / np.where(alive, z, 1), axis, keepdims)
    return lse if keepdims else lse.squeeze(axis), cache


def logsumexp_backward(dlse: Inexact[Array, "..."], cache: LogSumExpCache) -> Inexact[Array, "..."]:
    """dx = y · dlse: the gradient of log-sum-exp is softmax  (Eq. 1.3)"""
    dlse = dlse if cache.keepdims else np.expand_dims(dlse, cache.axis)
    return cache.weights * dlse


def log_softmax_forward(
    scores: Inexact[Array, "..."], *, axis: int = -1, check_finite: bool = True
) -> tuple[Inexact[Array, "..."], LogSoftmaxCache]:
    """log y = x - lse  (Eq. 1.4)

    Not log(softmax(x)): that underflows to -inf where softmax underflows to 0. A masked entry, and
    every entry of a dead row, is -inf.
    """
    x = _prepare(scores, axis, check_finite)
    m, e, z = _exponentials(x, axis)
    safe = np.where(z == 0, 1, z)
    out = (x - m) - np.log(safe)
    return out.astype(scores.dtype, copy=False), LogSoftmaxCache(e / safe, x == -np.inf, axis)


def log_softmax_backward(
    dout: Inexact[Array, "..."], cache: LogSoftmaxCache
) -> Inexact[Array, "..."]:
    """dx = dy - y · Σ_j dy_j over the entries that are not masked  (Eq. 1.5)"""
    dout = np.where(cache.masked, 0, dout)  # an entry at -inf is constant: no gradient reaches it
    return dout - cache.weights * dout.sum(axis=cache.axis, keepdims=True)


# ---- the online merge: softmax of a whole from softmaxes of its parts ----------------------------


class Partial(NamedTuple):
    """Attention over some of the keys: a weighted mean of values and the log of its denominator.
    (0, -inf) is neutral."""

    out: Inexact[Array, "*B N E"]
    lse: Inexact[Array, "*B N"]


class MergeCache(NamedTuple):
    first: Partial
    second: Partial
    merged: Partial
    shares: tuple[Array, Array]


class MergeGrads(NamedTuple):
    first: Partial
    second: Partial


def merge_forward(first: Partial, second: Partial) -> tuple[Partial, MergeCache]:
    """Join attention over two disjoint sets of keys into attention over their union.

        L = log(e^{L1} + e^{L2}),   a_i = e^{L_i - L},   O = a_1 O_1 + a_2 O_2  (Eq. 1.6)

    Associative and commutative, with Partial(0, -inf) as identity: any split of the keys gives the
    same result.

    Raises
    ------
    ValueError
        If the two partials do not have the same shapes, or a lse is not its output's shape less the
        last axis.
    """
    for name, part in (("first", first), ("second", second)):
        require_array(f"{name}.out", part.out, min_ndim=1)
        require_array(f"{name}.lse", part.lse)
        if part.lse.shape != part.out.shape[:-1]:
            raise ValueError(
                f"{name}.lse has shape {part.lse.shape}, its out {part.out.shape}: expected"
                f" {part.out.shape[:-1]}"
            )
    if first.out.shape != second.out.shape:
        raise ValueError(
            f"first.out has shape {first.out.shape}, second.out {second.out.shape}: "
            "the two must agree"
        )

    # pass 1: the common scale, 0 where both parts are dead
    m = np.maximum(first.lse.real, second.lse.real)
    m = np.where(m == -np.inf, 0, m)
    e1, e2 = np.exp(first.lse - m), np.exp(second.lse - m)
    z = e1 + e2
    alive = z != 0
    # pass 2: each part's share of the denominator
    safe = np.where(alive, z, 1)
    a1, a2 = e1 / safe, e2 / safe
    # pass 3: mix
    merged = Partial(
        a1[..., None] * first.out + a2[..., None] * second.out,
        np.where(alive, m + np.log(safe), -np.inf),
    )
    return merged, MergeCache(first, second, merged, (a1, a2))


def merge_backward(dmerged: Partial, cache: MergeCache) -> MergeGrads:
    """dO_i = a_i dO,   dL_i = a_i (dL + Σ_e dO (O_i - O))  (Eq. 1.7)"""
    grads = []
    for part, share in zip((cache.first, cache.second), cache.shares, strict=True):
        moved = (dmerged.out * (part.out - cache.merged.out)).sum(axis=-1)
        grads.append(Partial(share[..., None] * dmerged.out, share * (dmerged.lse + moved)))
    return MergeGrads(*grads)


class SoftmaxState(NamedTuple):
    """Softmax-weighted values before the division, as a kernel carries them from tile to tile (Eq.
    1.8)."""

    maximum: Inexact[Array, "*B N"]
    total: Inexact[Array, "*B N"]
    weighted: Inexact[Array, "*B N E"]


def state_of(scores: Inexact[Array, "*B N M"], values: Inexact[Array, "*B M E"]) -> SoftmaxState:
    """The state of one tile: (m, l, a) = (max_j s_j, Σ_j e^{s_j - m}, Σ_j e^{s_j - m} v_j)."""
    m = scores.max(axis=-1, initial=-np.inf)
    e = np.exp(scores - np.where(m == -np.inf, 0, m)[..., None])
    return SoftmaxState(m, e.sum(axis=-1), e @ values)


def merge_states(first: SoftmaxState, second: SoftmaxState) -> SoftmaxState:
    """m = max(m1, m2),   l = c1 l1 + c2 l2,   a = c1 a1 + c2 a2,   c_i = e^{m_i - m}  (Eq. 1.8)"""
    m = np.maximum(first.maximum, second.maximum)
    safe = np.where(m == -np.inf, 0, m)
    c1, c2 = np.exp(first.maximum - safe), np.exp(second.maximum - safe)
    return SoftmaxState(
        m,
        c1 * first.total + c2 * second.total,
        c1[..., None] * first.weighted + c2[..., None] * second.weighted,
    )


def finish_state(state: SoftmaxState) -> Partial:
    """Divide once, at the end: O = a / l, L = m + log l; a dead row gives (0, -inf)."""
    alive = state.total != 0
    safe = np.where(alive, state.total, 1)
    return Partial(
        state.weighted / safe[..., None], np.where(alive, state.maximum + np.log(safe), -np.inf)
    )


# ---- the soft-cap --------------------------------------------------------------------------------


class SoftcapCache(NamedTuple):
    slope: Inexact[Array, "..."] | None  # None: the cap is off


def softcap_forward(
    scores: Inexact[Array, "..."], cap: float | None
) -> tuple[Inexact[Array, "..."], SoftcapCache]:
    """f(x) = c · tanh(x / c): scores bounded by ±c, unchanged near 0; None or 0 turns it off  (Eq.
    1.9)

    It comes before bias and mask: tanh(-inf) = -1 would give a masked key the logit -c. Used by
    Gemma 2, arXiv:2408.00118.
    """
    require_array("scores", scores)
    if cap is None or cap == 0:
        return scores, SoftcapCache(None)
    if not (np.isfinite(cap) and cap > 0):
        raise ValueError(f"softcap must be a positive number, or None to turn it off, got {cap}")
    t = np.tanh(scores / cap)
    return cap * t, SoftcapCache(1 - t * t)


def softcap_backward(dout: Inexact[Array, "..."], cache: SoftcapCache) -> Inexact[Array, "..."]:
    """dx = dy · (1 - tanh²(x / c))  (Eq. 1.10)"""
    return dout if cache.slope is None else dout * cache.slope
