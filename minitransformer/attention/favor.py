"""FAVOR+: softmax attention estimated by positive random features, in time linear in the text.

    g_ij = √(-2 ln u) cos(2π u'),   u, u' from the words 2j, 2j + 1 of feature i  (Eq. 13.10)
    W: each D rows of g made orthogonal, each as long as another row of D normals  (Eq. 13.11)
    x̂ = √s x,   l(x) = W x̂ - ‖x̂‖²/2,   φ(x) = exp(l(x)) / √m  (Eq. 13.12)
    E[φ(q) · φ(k)] = exp(s q · k)  (Eq. 13.13)
    o_i = Σ_j w_ij v_j / Σ_j w_ij,   w_ij = Σ_f exp(l_f(q_i) + l_f(k_j))  (Eq. 13.14)

s = 1/√D by default. The words are those of the mask law, so a projection is a function of
seed, layer and redraw. The kernel is unbiased; the ratio o, of two estimates, is only consistent.

The exponentials need a shift. The authors' code subtracts the largest l of *all* keys and adds an
ε: then the shift does not cancel, and a later key changes the rows before it. Here every feature
has its own running maximum, the state is scaled along, and there is no ε:

    c_t = max(c_{t-1}, l(k_t)),
    S_t = e^{c_{t-1} - c_t} ⊙ S_{t-1} + e^{l(k_t) - c_t} v_tᵀ,   z_t likewise  (Eq. 13.15)
    o_t = S_tᵀ f / (z_t · f),   f = exp(l(q_t) + c_t - max_f(l(q_t) + c_t))  (Eq. 13.16)

The row's largest term is 1, so the denominator is at least 1 wherever something is read, whatever
the size of the keys. Between chunks Eq. 13.15 and 13.16 carry the state; inside a chunk the weights
of Eq. 13.14 are formed feature by feature: chunk=1 is the recurrent form, chunk >= N the parallel
one. Trigonometric features, unbiased as well, are left out: where the kernel is small they may be
negative. arXiv:2009.14794.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Inexact

from minitransformer.arrays import (
    Array,
    common_dtype,
    compute_dtype,
    narrowed,
    require_array,
    require_broadcastable,
    require_cotangent,
    require_finite,
    require_whole,
    unbroadcast,
)
from minitransformer.attention.dense import score_scale, score_shape
from minitransformer.attention.linear import (
    grouped,
    lengthened,
    over_heads,
    require_alignment,
    require_key_mask,
    rows_alive,
    shortened,
)
from minitransformer.philox import Draw, Stream, random_bits, uniform


class LogFeatureCache(NamedTuple):
    scaled: Inexact[Array, "*B N D"]
    projection: Inexact[Array, "F D"]
    root: float
    like: Array  # an empty array of the dtype that came in


class FavorState(NamedTuple):
    """What is left of the text so far: each feature's largest l(k), and sums that are scaled by
    it."""

    peak: Inexact[Array, "*B G F"]
    s: Inexact[Array, "*B G F E"]
    z: Inexact[Array, "*B G F"]


class FavorCache(NamedTuple):
    """`state` is public: what the next call goes on from."""

    state: FavorState
    logs: tuple[Array, Array]  # l of q (*Q, G, H//G, N, F) and of k (*K, G, 1, M, F)
    maps: tuple[LogFeatureCache, LogFeatureCache]
    values: Array  # with a column of ones (*V, G, 1, M, E + 1)
    start: tuple[Array, Array]  # peak (*B, G, 1, F), and z beside S (*B, G, 1, F, E + 1)
    out: Array  # (*B, G, H//G, N, E)
    total: Array  # the denominators, 1 where nothing is read
    alive: Bool[Array, "..."]
    shape: tuple[int, ...]
    inputs: tuple[tuple[tuple[int, ...], np.dtype], ...]  # shape and dtype of q, k, v
    options: tuple[bool, str, int]  # causal, align, chunk


class FavorGrads(NamedTuple):
    q: Inexact[Array, "*Q H N D"]
    k: Inexact[Array, "*K G M D"]
    v: Inexact[Array, "*V G M E"]


# ---- features ------------------------------------------------------------------------------------


def random_projection(
    draw: Draw,
    features: int,
    width: int,
    *,
    layer: int = 0,
    every: int | None = None,
    orthogonal: bool = True,
    hyperbolic: bool = False,
) -> Float[Array, "F D"]:
    """W, in float64: normal rows, orthogonal inside each block of D  (Eq. 13.10, Eq. 13.11)

    Drawn anew every `every` steps of `draw`, never if that is None; training or not makes no
    difference. `hyperbolic` takes half the rows and then their negatives, which lowers the variance
    of Eq. 13.13. More features keep the rows of fewer, to rounding, unless hyperbolic.

    Raises
    ------
    TypeError, ValueError
        If a number is not whole or too small, if `features` is odd and hyperbolic, or if `draw` is
        outside the range of the law.
    """
    require_whole(1, features=features, width=width)
    if every is not None:
        require_whole(1, every=every)
    if hyperbolic and features % 2:
        raise ValueError(f"features must be even for hyperbolic ones, got {features}")
    rows = features // 2 if hyperbolic else features
    draw = draw._replace(step=draw.step // every if every else 0)
    w = _normals(draw, layer, 0, rows, width)
    if orthogonal:
        blocks = [w[i : i + width] for i in range(0, rows, width)]
        lengths = np.linalg.norm(_normals(draw, layer, 1, rows, width), axis=1, keepdims=True)
        w = lengths * np.concatenate([_orthonormal(block) for block in blocks])
    return np.concatenate([w, -w]) if hyperbolic else w


def _normals(draw: Draw, layer: int, head: int, rows: int, width: int) -> Array:
    """Box-Muller over the words of the law; u is moved half a step of its grid away from 0."""
    columns = np.arange(2 * width)
    bits = random_bits(
        draw, Stream.FEATURES, layer, np.array(head), np.arange(rows)[:, None], columns
    )
    u = uniform(bits) + 2.0**-25
    return np.sqrt(-2 * np.log(u[:, 0::2])) * np.cos(2 * math.pi * u[:, 1::2])


def _orthonormal(block: Array) -> Array:
    """Gram-Schmidt of the rows. QR leaves the signs to LAPACK; with those of R's diagonal undone
    every rotation is equally likely."""
    q, r = np.linalg.qr(block.T)
    return (q * np.sign(np.diagonal(r))).T


def log_features_forward(
    x: Inexact[Array, "*B N D"], projection: Inexact[Array, "F D"], *, scale: float | None = None
) -> tuple[Inexact[Array, "*B N F"], LogFeatureCache]:
    """l(x), the logarithm of each feature times √m  (Eq. 13.12)

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape, or `scale` is negative.
    """
    require_array("x", x, min_ndim=2)
    _require_projection(projection, x.shape[-1])
    scale = score_scale(scale, x.shape[-1])
    if scale < 0:
        raise ValueError(f"scale must not be negative, got {scale}: features take its root")
    wide, root = compute_dtype(x), math.sqrt(scale)
    scaled = root * x.astype(wide, copy=False)
    w = projection.astype(np.result_type(wide.type(0).real), copy=False)
    out = scaled @ w.T - (scaled * scaled).sum(axis=-1, keepdims=True) / 2
    return narrowed(out, x), LogFeatureCache(scaled, w, root, np.empty(0, x.dtype))


def log_features_backward(
    dout: Inexact[Array, "*B N F"], cache: LogFeatureCache
) -> Inexact[Array, "*B N D"]:
    """dx = √s (dl W - x̂ Σ_f dl_f)  (Eq. 13.20)

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    require_cotangent("dout", dout, (*cache.scaled.shape[:-1], len(cache.projection)))
    dout = dout.astype(cache.scaled.dtype, copy=False)
    dx = dout @ cache.projection - cache.scaled * dout.sum(axis=-1, keepdims=True)
    return narrowed(cache.root * dx, cache.like)


# ---- attention -----------------------------------------------------------------------------------


def favor_attention_forward(
    q: Inexact[Array, "*#B H N D"],
    k: Inexact[Array, "*#B G M D"],
    v: Inexact[Array, "*#B G M E"],
    projection: Inexact[Array, "F D"],
    *,
    causal: bool = False,
    align: str | None = None,
    keep: Bool[Array, "..."] | None = None,
    scale: float | None = None,
    state: FavorState | None = None,
    chunk: int = 16,
    check_finite: bool = True,
) -> tuple[Inexact[Array, "*B H N E"], FavorCache]:
    """Each query's weighted mean of the values  (Eq. 13.14 - 13.16)

    `keep` says which keys exist and broadcasts to (*B, G, 1, M). `causal` asks for `align` where
    N != M; it forms chunk² · F numbers at a time. `state` is the `cache.state` of the text before,
    under the same projection and scale.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape; with `check_finite`, if a NaN or infinity stands
        where some query may read it.
    """
    shape, groups = score_shape(q, k, v), k.shape[-3]
    align = require_alignment(causal, align, shape)
    require_whole(1, chunk=chunk)
    require_key_mask(keep, shape, groups)
    _require_projection(projection, q.shape[-1])
    _require_state(state, (*shape[:-3], groups, len(projection), v.shape[-1]))
    dtype = compute_dtype(q, k, v, *(state or ()))

    # pass 1: what nobody may read is 0, whatever stands there
    past = None if state is None else np.any(state.peak.real > -np.inf, axis=-1)
    alive = rows_alive(keep, past, shape, causal, align)
    q_, k_, v_ = (x.astype(dtype, copy=False) for x in (q, k, v))
    q_, k_, v_ = grouped(q_, groups), k_[..., None, :, :], v_[..., None, :, :]
    if not alive.all():
        q_ = np.where(alive[..., None], q_, 0)
    if keep is not None:
        k_, v_ = (np.where(keep[..., None], x, 0) for x in (k_, v_))
    if check_finite:
        for name, x in (("q", q_), ("k", k_), ("v", v_), ("projection", projection)):
            require_finite(name, x)

    # pass 2: logarithms of features; that of a key that is out is -inf
    lq, map_q = log_features_forward(q_, projection, scale=scale)
    lk, map_k = log_features_forward(k_, projection, scale=scale)
    if keep is not None:
        lk = np.where(keep[..., None], lk, -np.inf)
    values = np.concatenate([v_, np.ones_like(v_[..., :1])], axis=-1)
    peak = np.full(len(projection), -np.inf, lk.real.dtype)
    s = np.zeros((len(projection), values.shape[-1]), dtype)
    if state is not None:
        peak = state.peak.real[..., None, :]
        s = np.concatenate([state.s, state.z[..., None]], axis=-1, dtype=dtype)[..., None, :, :]

    # pass 3: numerator and denominator
    start, options = (peak, s), (causal, align, chunk)
    both, (peak, s) = (_causal if causal else _summed)(lq, lk, values, *start, options)
    # pass 4: the mean
    total = np.where(both[..., -1] == 0, 1, both[..., -1])
    out = both[..., :-1] / total[..., None]

    after = FavorState(peak[..., 0, :], s[..., 0, :, :-1], s[..., 0, :, -1])
    inputs = tuple((x.shape, x.dtype) for x in (q, k, v))
    cache = FavorCache(
        after, (lq, lk), (map_q, map_k), values, start, out, total, alive, shape, inputs, options
    )
    out, stored = out.reshape(*shape[:-1], v.shape[-1]), common_dtype(q, k, v)
    return out.astype(stored) if stored.itemsize == 2 else out, cache


def favor_attention_backward(dout: Inexact[Array, "*B H N E"], cache: FavorCache) -> FavorGrads:
    """Undo the passes in reverse. Shifts cancel, so they count as constants; the projection is not
    trained, and the state before is taken as given.

        g_i = do_i / den_i,   h_i = -(do_i · o_i) / den_i,   b_ij = g_i · v_j + h_i  (Eq. 13.17)
        e_ijf = exp(l_f(q_i) + l_f(k_j) - a_i),   a_i the shift of row i,
        dl_f(q_i) = Σ_j b_ij e_ijf,   dl_f(k_j) = Σ_i b_ij e_ijf,
        dv_j = Σ_if e_ijf g_i  (Eq. 13.18)
        U_t = e^{c_t - c_{t+1}} ⊙ U_{t+1} + exp(l(q_t) + c_t - a_t) g_tᵀ  (Eq. 13.19)

    Inside a chunk it is Eq. 13.18; the chunks before reach it through S, those after through U,
    which is scaled the other way.

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    require_cotangent("dout", dout, (*cache.shape[:-1], cache.out.shape[-1]))
    (lq, lk), causal = cache.logs, cache.options[0]
    dout = grouped(dout.astype(cache.out.dtype, copy=False), lk.shape[-4])
    if not cache.alive.all():
        dout = np.where(cache.alive[..., None], dout, 0)

    # undo pass 4: out = numerator / denominator, the latter in the last column
    g = dout / cache.total[..., None]
    g = np.concatenate([g, -(g * cache.out).sum(axis=-1, keepdims=True)], axis=-1)
    # undo pass 3: a key that is out has features 0, so its gradients are 0
    undo = _causal_backward if causal else _summed_backward
    dlq, dlk, dvalues = undo(g, lq, lk, cache.values, *cache.start, cache.options)
    # undo pass 2; the axes along which the mask or others stretched the keys are summed at the end
    map_q, map_k = cache.maps
    dq = _features_back(dlq, map_q)
    dk = _features_back(dlk, map_k)

    # undo pass 1: heads together again, what was broadcast summed, rounded once to what came in
    dq = dq.reshape(*dq.shape[:-4], dq.shape[-4] * dq.shape[-3], *dq.shape[-2:])
    dq, dk, dv = (
        unbroadcast(x, like).astype(dtype, copy=False)
        for x, (like, dtype) in zip(
            (dq, dk[..., 0, :, :], dvalues[..., 0, :, :-1]), cache.inputs, strict=True
        )
    )
    return FavorGrads(dq, dk, dv)


def merged(first: FavorState, second: FavorState) -> FavorState:
    """The state of both texts, scaled to the larger peaks  (Eq. 13.15)"""
    peak = np.maximum(first.peak, second.peak)
    parts = [(_decay(x.peak, peak), x) for x in (first, second)]
    s = sum(decay[..., None] * x.s for decay, x in parts)
    return FavorState(peak, s, sum(decay * x.z for decay, x in parts))


# ---- without a mask: all keys, then all queries --------------------------------------------------


def _summed(
    lq: Array, lk: Array, v: Array, peak: Array, s: Array, options: tuple
) -> tuple[Array, tuple[Array, Array]]:
    highest = _raised(peak, lk)
    s = _decay(peak, highest)[..., None] * s + _under(lk, highest).mT @ v
    return _over(lq, highest) @ s, (highest, s)


def _summed_backward(
    g: Array, lq: Array, lk: Array, v: Array, peak: Array, s: Array, options: tuple
) -> tuple[Array, Array, Array]:
    highest = _raised(peak, lk)
    fk = _under(lk, highest)
    s = _decay(peak, highest)[..., None] * s + fk.mT @ v
    fq = _over(lq, highest)
    u = over_heads(fq.mT @ g)
    return fq * (g @ s.mT), fk * (v @ u.mT), fk @ u


# ---- causal: chunk after chunk -------------------------------------------------------------------


def _causal(
    lq: Array, lk: Array, v: Array, peak: Array, s: Array, options: tuple
) -> tuple[Array, tuple[Array, Array]]:
    _, align, chunk = options
    queries, (lq, lk, v) = lq.shape[-2], _rows_aligned(lq, lk, v, align)
    rows = []
    for c in _steps(lq.shape[-2], chunk):
        e, fq, fk, decay, highest = _chunk(lq[c], lk[c], peak)
        rows.append(e.sum(axis=-1) @ v[c] + fq @ s)
        peak, s = highest, decay[..., None] * s + fk.mT @ v[c]
    return shortened(np.concatenate(rows, axis=-2), queries, align), (peak, s)


def _causal_backward(
    g: Array, lq: Array, lk: Array, v: Array, peak: Array, s: Array, options: tuple
) -> tuple[Array, Array, Array]:
    _, align, chunk = options
    queries, keys = lq.shape[-2], lk.shape[-2]
    g = lengthened(g, max(queries, keys), align)
    lq, lk, v = _rows_aligned(lq, lk, v, align)
    steps, before, dlq, dlk, dv = _steps(lq.shape[-2], chunk), [], [], [], []
    for c in steps:  # the states again, first to last
        before.append((peak, s))
        _, _, fk, decay, highest = _chunk(lq[c], lk[c], peak)
        peak, s = highest, decay[..., None] * s + fk.mT @ v[c]
    u = np.zeros_like(s)
    for c, (peak, s) in zip(reversed(steps), reversed(before), strict=True):
        e, fq, fk, decay, _ = _chunk(lq[c], lk[c], peak)
        de = (g[c] @ v[c].mT)[..., None] * e
        dlq.append(de.sum(axis=-2) + fq * (g[c] @ s.mT))
        dlk.append(over_heads(de.sum(axis=-3)) + fk * (v[c] @ u.mT))
        dv.append(over_heads(e.sum(axis=-1).mT @ g[c]) + fk @ u)
        u = decay[..., None] * u + over_heads(fq.mT @ g[c])
    dlq_, dlk_, dv_ = (np.concatenate(x[::-1], axis=-2) for x in (dlq, dlk, dv))
    dlk_, dv_ = (shortened(x, keys, align) for x in (dlk_, dv_))
    return shortened(dlq_, queries, align), dlk_, dv_


def _chunk(lq: Array, lk: Array, peak: Array) -> tuple[Array, Array, Array, Array, Array]:
    """What one chunk needs: e (…, C, C, F) among its own rows, features of its queries for the
    state before and of its keys for the state after, the factor between the two states, and the
    peaks after."""
    running = np.maximum(np.maximum.accumulate(lk.real, axis=-2), peak[..., None, :])
    shift = _row_shift(lq, running)
    causal = np.tri(lq.shape[-2], lk.shape[-2], dtype=np.bool_)[..., None]
    exponent = lq[..., :, None, :] + lk[..., None, :, :] - shift[..., None]
    e = np.exp(np.where(causal, exponent, -np.inf))
    highest = _raised(peak, lk)
    fq = np.exp(lq + peak[..., None, :] - shift)
    return e, fq, _under(lk, highest), _decay(peak, highest), highest


def _rows_aligned(lq: Array, lk: Array, v: Array, align: str) -> tuple[Array, Array, Array]:
    length = max(lq.shape[-2], lk.shape[-2])
    lk = lengthened(lk, length, align, fill=-np.inf)
    return lengthened(lq, length, align), lk, lengthened(v, length, align)


def _steps(length: int, chunk: int) -> list[tuple]:
    return [np.s_[..., i : i + chunk, :] for i in range(0, max(length, 1), chunk)]


# ---- shifts: real, and never -inf minus -inf -----------------------------------------------------


def _raised(peak: Array, lk: Array) -> Array:
    """Each feature's largest l(k) so far, (…, F)."""
    return np.maximum(peak, lk.real.max(axis=-2, initial=-np.inf))


def _row_shift(lq: Array, peaks: Array) -> Array:
    """The largest l(q) + c of each row, (…, N, 1); 0 where nothing is read."""
    largest = (lq.real + peaks).max(axis=-1, keepdims=True)
    return np.where(largest == -np.inf, 0, largest)


def _under(lk: Array, peak: Array) -> Array:
    """exp(l(k) - c), 0 for a key that is out."""
    return np.exp(lk - np.where(peak == -np.inf, 0, peak)[..., None, :])


def _over(lq: Array, peak: Array) -> Array:
    """exp(l(q) + c), the largest feature of each row scaled to 1."""
    return np.exp(lq + peak[..., None, :] - _row_shift(lq, peak[..., None, :]))


def _decay(peak: Array, raised: Array) -> Array:
    """exp(c - c'), 0 where nothing was read before."""
    return np.exp(peak - np.where(raised == -np.inf, 0, raised))


def _features_back(dl: Array, cache: LogFeatureCache) -> Array:
    to = (*cache.scaled.shape[:-1], len(cache.projection))
    return log_features_backward(unbroadcast(dl, to), cache)


# ---- what is asked of arguments ------------------------------------------------------------------


def _require_projection(projection: Array, width: int) -> None:
    require_array("projection", projection)
    if projection.ndim != 2 or projection.shape[1] != width or len(projection) == 0:
        raise ValueError(
            f"projection has shape {projection.shape}, expected (features, {width}) with at least "
            "one feature"
        )


def _require_state(state: FavorState | None, to: tuple[int, ...]) -> None:
    """Raise an error unless the state broadcasts to (*B, G, F, E)."""
    if state is None:
        return
    if not isinstance(state, FavorState):
        raise TypeError(f"state must be a FavorState, got {type(state).__name__}")
    for name, x, wanted in zip(FavorState._fields, state, (to[:-1], to, to[:-1]), strict=True):
        own = 3 if name == "s" else 2  # heads, features and widths do not broadcast
        require_array(f"state.{name}", x, min_ndim=own)
        if x.shape[-own:] != wanted[-own:]:
            raise ValueError(f"state.{name} has shape {x.shape}, these heads need {wanted}")
        require_broadcastable(f"state.{name}", x.shape, wanted)
