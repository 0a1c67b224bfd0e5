"""Linear attention: a kernel φ(q) · φ(k) in the place of exp(q · k), so that keys can be summed
before anybody asks.

    φ(x) = x + 1 where x > 0, exp(x) elsewhere  (Eq. 13.1)
    o_i = Σ_j w_ij v_j / Σ_j w_ij,   w_ij = φ(q_i) · φ(k_j)  (Eq. 13.2)
    S_t = S_{t-1} + φ(k_t) v_tᵀ,   z_t = z_{t-1} + φ(k_t),
    o_t = S_tᵀ φ(q_t) / (φ(q_t) · z_t)  (Eq. 13.3)
    O' = tril(Φ_q Φ_kᵀ) V' + Φ_q S',   S' ← S' + Φ_kᵀ V',   chunk after chunk  (Eq. 13.4)

Three forms of one function: parallel (Eq. 13.2, N · M weights), recurrent (Eq. 13.3, a state of
D · (E + 1) numbers) and chunked (Eq. 13.4, between them). In Eq. 13.4 and in the code a column of
ones stands beside V and z beside S, so the last column of O' is the denominator. Without `causal`
every query reads the last state.

A key is taken out by φ(k) = 0, not by k = 0: φ(0) = 1. Only whole keys can be: a mask of pairs (i,
j), random or not, has no linear form. There is no ε: features are positive, so a denominator is 0
only where nothing is read, and there the output is 0. There is no scale either: it would not cancel
inside φ. Query head h reads key/value head h // (H // G). arXiv:2006.16236.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Inexact

from minitransformer.arrays import (
    Array,
    common_dtype,
    compute_dtype,
    narrowed,
    require_array,
    require_bool,
    require_broadcastable,
    require_cotangent,
    require_finite,
    require_whole,
    unbroadcast,
)
from minitransformer.attention.dense import score_shape
from minitransformer.attention.masks import ALIGNMENTS

FORMS = ("parallel", "recurrent", "chunked")
Scan = tuple[Array, Array]
Gradients = tuple[Array, Array, Array, Array]


class FeatureCache(NamedTuple):
    slope: Inexact[Array, "*S"]
    like: Array  # an empty array of the dtype that came in


class LinearState(NamedTuple):
    """All that is left of the keys and values read so far. The states of two texts add up."""

    s: Inexact[Array, "*B G D E"]
    z: Inexact[Array, "*B G D"]


class LinearCache(NamedTuple):
    """`state` is public: what the next call goes on from."""

    state: LinearState
    features: tuple[Array, Array]  # of q (*Q, G, H//G, N, D) and k (*K, G, 1, M, D)
    maps: tuple[FeatureCache, FeatureCache]
    values: Array  # with the column of ones (*V, G, 1, M, E + 1)
    start: Array  # the state before, z beside S (*B, G, 1, D, E + 1)
    out: Array  # (*B, G, H//G, N, E)
    total: Array  # the denominators, 1 where nothing is read
    alive: Bool[Array, "..."]  # the rows that read something
    keep: Bool[Array, "..."] | None
    shape: tuple[int, ...]
    inputs: tuple[tuple[tuple[int, ...], np.dtype], ...]  # shape and dtype of q, k, v, s and z
    options: tuple[bool, str, str, int]  # causal, align, form, chunk


class LinearGrads(NamedTuple):
    q: Inexact[Array, "*Q H N D"]
    k: Inexact[Array, "*K G M D"]
    v: Inexact[Array, "*V G M E"]
    state: LinearState | None


def elu_plus_one_forward(x: Inexact[Array, "*S"]) -> tuple[Inexact[Array, "*S"], FeatureCache]:
    """φ(x), positive everywhere  (Eq. 13.1)

    Raises
    ------
    TypeError
        If `x` is not an array of floating-point numbers.
    """
    require_array("x", x)
    wide = x.astype(compute_dtype(x), copy=False)
    positive = wide.real > 0
    # where x is positive, nobody asks for exp(x)
    power = np.asarray(np.exp(np.where(positive, 0, wide)))
    out = np.where(positive, wide + 1, power)
    return narrowed(out, x), FeatureCache(power, np.empty(0, x.dtype))


def elu_plus_one_backward(dout: Inexact[Array, "*S"], cache: FeatureCache) -> Inexact[Array, "*S"]:
    """dx = dφ ⊙ φ'(x),   φ' = 1 where x > 0, exp(x) elsewhere  (Eq. 13.9)

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    require_cotangent("dout", dout, cache.slope.shape)
    return narrowed(np.asarray(dout * cache.slope), cache.like)


def linear_attention_forward(
    q: Inexact[Array, "*#B H N D"],
    k: Inexact[Array, "*#B G M D"],
    v: Inexact[Array, "*#B G M E"],
    *,
    causal: bool = False,
    align: str | None = None,
    keep: Bool[Array, "..."] | None = None,
    state: LinearState | None = None,
    form: str = "chunked",
    chunk: int = 64,
    check_finite: bool = True,
) -> tuple[Inexact[Array, "*B H N E"], LinearCache]:
    """Each query's weighted mean of the values  (Eq. 13.2 - 13.4)

    `keep` says which keys exist and broadcasts to (*B, G, 1, M). `causal` asks for `align` where
    N != M. `state` is the `cache.state` of the text before, which every query reads.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape; with `check_finite`, if a NaN or infinity stands
        where some query may read it, or if all features of a query that has keys are 0.
    """
    shape = score_shape(q, k, v)
    align = require_alignment(causal, align, shape)
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    require_whole(1, chunk=chunk)
    require_key_mask(keep, shape, k.shape[-3])
    if q.shape[-1] == 0:
        raise ValueError("q has head width 0: there are no features to weigh keys by")
    _require_state(state, q, shape, v)
    given = [q, k, v, *(state or ())]
    dtype = compute_dtype(*given)

    # pass 1: what nobody may read is 0, whatever stands there
    past = None if state is None else (state.z != 0).any(axis=-1)
    alive = rows_alive(keep, past, shape, causal, align)
    q_, k_, v_ = (x.astype(dtype, copy=False) for x in (q, k, v))
    q_, k_, v_ = grouped(q_, k.shape[-3]), k_[..., None, :, :], v_[..., None, :, :]
    if not alive.all():
        q_ = np.where(alive[..., None], q_, 0)
    if keep is not None:
        k_, v_ = (np.where(keep[..., None], x, 0) for x in (k_, v_))
    if check_finite:
        for name, x in (("q", q_), ("k", k_), ("v", v_)):
            require_finite(name, x)

    # pass 2: features; a key that is out has none
    fq, map_q = elu_plus_one_forward(q_)
    fk, map_k = elu_plus_one_forward(k_)
    if keep is not None:
        fk = np.where(keep[..., None], fk, 0)
    values = np.concatenate([v_, np.ones_like(v_[..., :1])], axis=-1)
    start = np.zeros((q.shape[-1], values.shape[-1]), dtype)
    if state is not None:
        start = np.concatenate([state.s, state.z[..., None]], axis=-1, dtype=dtype)
        start = start[..., None, :, :]

    # pass 3: numerator and denominator, in one of three forms
    options = (causal, align, form, chunk)
    both, end = _forward(fq, fk, values, start, options)
    total = both[..., -1]
    if check_finite and ((total == 0) & alive).any():
        raise ValueError(
            "the features of q and k underflow: a query that has keys gives all of them weight 0"
        )
    # pass 4: the mean
    total = np.where(total == 0, 1, total)
    out = both[..., :-1] / total[..., None]

    after = LinearState(end[..., 0, :, :-1], end[..., 0, :, -1])
    inputs = tuple((x.shape, x.dtype) for x in given)
    cache = LinearCache(
        after, (fq, fk), (map_q, map_k), values, start, out, total, alive, keep, shape, inputs,
        options,
    )  # fmt: skip
    out = out.reshape(*shape[:-1], v.shape[-1])
    stored = common_dtype(q, k, v)
    return out.astype(stored) if stored.itemsize == 2 else out, cache


def linear_attention_backward(
    dout: Inexact[Array, "*B H N E"], cache: LinearCache, *, dstate: LinearState | None = None
) -> LinearGrads:
    """Undo the passes in reverse, for a cotangent of the output and, if wanted, of the state after.

        g_t = do_t / den_t,   h_t = -(do_t · o_t) / den_t  (Eq. 13.5)
        dφ(q_t) = S_t g_t + h_t z_t  (Eq. 13.6)
        U_t = Σ_{s >= t} φ(q_s) g_sᵀ,   u_t = Σ_{s >= t} h_s φ(q_s),
        dφ(k_t) = U_t v_t + u_t,   dv_t = U_tᵀ φ(k_t)  (Eq. 13.7)
        dΦ_q = B Φ_k + G' S'ᵀ,   dΦ_k = Bᵀ Φ_q + V' U'ᵀ,   dV' = Aᵀ G' + Φ_k U',
        A = tril(Φ_q Φ_kᵀ),   B = tril(G' V'ᵀ),   G' = (G, h)  (Eq. 13.8)

    S and z are summed again from the start: subtracting a key from the last state would leave its
    rounding behind. U_1 and u_1 are the gradients of the state before.

    Raises
    ------
    TypeError, ValueError
        If `dout` or `dstate` does not have the shape of what the forward pass returned.
    """
    shape, (fq, fk) = cache.shape, cache.features
    require_cotangent("dout", dout, (*shape[:-1], cache.out.shape[-1]))
    dout = grouped(dout.astype(cache.out.dtype, copy=False), fk.shape[-4])
    if not cache.alive.all():
        dout = np.where(cache.alive[..., None], dout, 0)
    end = np.zeros_like(cache.start)
    if dstate is not None:
        for name, x, like in zip(("dstate.s", "dstate.z"), dstate, cache.state, strict=True):
            require_cotangent(name, x, like.shape)
        end = np.concatenate([dstate.s, dstate.z[..., None]], axis=-1)[..., None, :, :]

    # undo pass 4: out = numerator / denominator, the latter in the last column
    g = dout / cache.total[..., None]
    g = np.concatenate([g, -(g * cache.out).sum(axis=-1, keepdims=True)], axis=-1)
    # undo pass 3
    dfq, dfk, dvalues, dstart = _backward(g, fq, fk, cache.values, cache.start, end, cache.options)
    # undo pass 2
    if cache.keep is not None:
        dfk = np.where(cache.keep[..., None], dfk, 0)
        dvalues = np.where(cache.keep[..., None], dvalues, 0)
    dq = dfq * cache.maps[0].slope
    dk = dfk * cache.maps[1].slope

    # undo pass 1: heads together again, what was broadcast summed, rounded once to what came in
    dq = dq.reshape(*dq.shape[:-4], dq.shape[-4] * dq.shape[-3], *dq.shape[-2:])
    folded = [dq, dk[..., 0, :, :], dvalues[..., 0, :, :-1]]
    folded += [dstart[..., 0, :, :-1], dstart[..., 0, :, -1]][: len(cache.inputs) - 3]
    grads = [
        unbroadcast(x, like).astype(dtype, copy=False)
        for x, (like, dtype) in zip(folded, cache.inputs, strict=True)
    ]
    dq, dk, dv, *before = grads
    return LinearGrads(dq, dk, dv, LinearState(*before) if before else None)


def merged(first: LinearState, second: LinearState) -> LinearState:
    """The state of both texts: sums do not care who came first  (Eq. 13.3)"""
    return LinearState(first.s + second.s, first.z + second.z)


# ---- the three forms -----------------------------------------------------------------------------
# Each gives numerator and denominator of every query, and the state after all keys; its adjoint
# takes cotangents g of those rows and u of that state, and gives those of the features of q and k,
# of the values and of the state before. Under a causal mask there are as many queries as keys.


def _forward(fq: Array, fk: Array, v: Array, s: Array, options: tuple) -> Scan:
    causal, align, form, chunk = options
    if not causal:
        return _parallel(fq, fk, v, s, False) if form == "parallel" else _summed(fq, fk, v, s)
    rows, length = fq.shape[-2], max(fq.shape[-2], fk.shape[-2])
    fq, fk, v = (lengthened(x, length, align) for x in (fq, fk, v))
    if form == "parallel":
        out, s = _parallel(fq, fk, v, s, True)
    elif form == "recurrent":
        out, s = _recurrent(fq, fk, v, s)
    else:
        out, s = _chunked(fq, fk, v, s, chunk)
    return shortened(out, rows, align), s


def _backward(
    g: Array, fq: Array, fk: Array, v: Array, s: Array, u: Array, options: tuple
) -> Gradients:
    causal, align, form, chunk = options
    if not causal:
        undo = _summed_backward if form != "parallel" else _parallel_backward
        return undo(g, fq, fk, v, s, u, False)
    queries, keys, length = fq.shape[-2], fk.shape[-2], max(fq.shape[-2], fk.shape[-2])
    g, fq, fk, v = (lengthened(x, length, align) for x in (g, fq, fk, v))
    if form == "parallel":
        dfq, dfk, dv, u = _parallel_backward(g, fq, fk, v, s, u, True)
    elif form == "recurrent":
        dfq, dfk, dv, u = _recurrent_backward(g, fq, fk, v, s, u)
    else:
        dfq, dfk, dv, u = _chunked_backward(g, fq, fk, v, s, u, chunk)
    dfk, dv = (shortened(x, keys, align) for x in (dfk, dv))
    return shortened(dfq, queries, align), dfk, dv, u


def _parallel(fq: Array, fk: Array, v: Array, s: Array, causal: bool) -> Scan:
    """Eq. 13.2: all the weights at once."""
    a = fq @ fk.mT
    a = np.tril(a) if causal else a
    return a @ v + fq @ s, s + fk.mT @ v


def _parallel_backward(
    g: Array, fq: Array, fk: Array, v: Array, s: Array, u: Array, causal: bool
) -> Gradients:
    a, b = fq @ fk.mT, g @ v.mT
    if causal:
        a, b = np.tril(a), np.tril(b)
    dfq, dfk = b @ fk + g @ s.mT, over_heads(b.mT @ fq) + v @ u.mT
    return dfq, dfk, over_heads(a.mT @ g) + fk @ u, u + over_heads(fq.mT @ g)


def _summed(fq: Array, fk: Array, v: Array, s: Array) -> Scan:
    """Without a mask nothing needs scanning: every query reads the last state."""
    s = s + fk.mT @ v
    return fq @ s, s


def _summed_backward(
    g: Array, fq: Array, fk: Array, v: Array, s: Array, u: Array, causal: bool
) -> Gradients:
    u = u + over_heads(fq.mT @ g)
    return g @ (s + fk.mT @ v).mT, v @ u.mT, fk @ u, u


def _recurrent(fq: Array, fk: Array, v: Array, s: Array) -> Scan:
    """Eq. 13.3: one token after the other."""
    rows = []
    for t in _steps(fq.shape[-2], 1):
        s = s + fk[t].mT @ v[t]
        rows.append(fq[t] @ s)
    return _joined(rows), s


def _recurrent_backward(g: Array, fq: Array, fk: Array, v: Array, s: Array, u: Array) -> Gradients:
    steps, dfq, dfk, dv = _steps(fq.shape[-2], 1), [], [], []
    for t in steps:  # Eq. 13.6: the states again, first to last
        s = s + fk[t].mT @ v[t]
        dfq.append(g[t] @ s.mT)
    for t in reversed(steps):  # Eq. 13.7: who reads key t stands at t or after it
        u = u + over_heads(fq[t].mT @ g[t])
        dfk.append(v[t] @ u.mT)
        dv.append(fk[t] @ u)
    return _joined(dfq), _joined(dfk[::-1]), _joined(dv[::-1]), u


def _chunked(fq: Array, fk: Array, v: Array, s: Array, chunk: int) -> Scan:
    """Eq. 13.4: parallel inside a chunk, the state between chunks."""
    rows = []
    for c in _steps(fq.shape[-2], chunk):
        rows.append(np.tril(fq[c] @ fk[c].mT) @ v[c] + fq[c] @ s)
        s = s + fk[c].mT @ v[c]
    return _joined(rows), s


def _chunked_backward(
    g: Array, fq: Array, fk: Array, v: Array, s: Array, u: Array, chunk: int
) -> Gradients:
    steps, dfq, dfk, dv = _steps(fq.shape[-2], chunk), [], [], []
    for c in steps:
        dfq.append(np.tril(g[c] @ v[c].mT) @ fk[c] + g[c] @ s.mT)
        s = s + fk[c].mT @ v[c]
    for c in reversed(steps):
        a, b = np.tril(fq[c] @ fk[c].mT), np.tril(g[c] @ v[c].mT)
        dfk.append(over_heads(b.mT @ fq[c]) + v[c] @ u.mT)
        dv.append(over_heads(a.mT @ g[c]) + fk[c] @ u)
        u = u + over_heads(fq[c].mT @ g[c])
    return _joined(dfq), _joined(dfk[::-1]), _joined(dv[::-1]), u


def _steps(length: int, chunk: int) -> list[tuple]:
    """Slices of the rows; an empty one if there are none, so that shapes come out right."""
    return [np.s_[..., i : i + chunk, :] for i in range(0, max(length, 1), chunk)]


def _joined(rows: list[Array]) -> Array:
    return np.concatenate(rows, axis=-2)


# ---- rows and heads (FAVOR+ uses them too) -------------------------------------------------------


def grouped(x: Array, groups: int) -> Array:
    """(*Q, H, N, X) -> (*Q, G, H//G, N, X): the query heads of a key/value head on an axis of their
    own, along which keys broadcast."""
    *leading, heads, rows, width = x.shape
    return x.reshape(*leading, groups, heads // groups, rows, width)


def over_heads(x: Array) -> Array:
    """The gradient of what the query heads of a group share: summed over them."""
    return x.sum(axis=-3, keepdims=True)


def lengthened(x: Array, length: int, align: str, fill: float = 0.0) -> Array:
    """`x` with rows of `fill`, in front where the last rows are aligned, else behind. A key without
    features is no key, and a query more changes nobody."""
    missing = (*x.shape[:-2], length - x.shape[-2], x.shape[-1])
    rows = np.full(missing, fill, x.dtype)
    return np.concatenate([rows, x] if align == "lower_right" else [x, rows], axis=-2)


def shortened(x: Array, rows: int, align: str) -> Array:
    """The inverse of `lengthened`."""
    return x[..., x.shape[-2] - rows :, :] if align == "lower_right" else x[..., :rows, :]


def rows_alive(
    keep: Array | None, past: Array | None, shape: tuple[int, ...], causal: bool, align: str
) -> Array:
    """Which queries read something: a key, or the `past` (*B, G). Broadcasts to
    (*B, G, H//G, N)."""
    queries, keys = shape[-2:]
    kept = np.ones((1, keys), np.bool_) if keep is None else keep
    kept = np.broadcast_to(kept, (*kept.shape[:-1], keys))[..., None]
    if causal:
        kept = lengthened(kept, max(queries, keys), align)
        alive = shortened(np.logical_or.accumulate(kept, axis=-2), queries, align)[..., 0]
    else:
        alive = np.broadcast_to(kept.any(axis=-2), (*kept.shape[:-2], queries))
    return alive if past is None else alive | past[..., None, None]


# ---- what is asked of arguments ------------------------------------------------------------------


def require_alignment(causal: bool, align: str | None, shape: tuple[int, ...]) -> str:
    """The alignment, which must be given where it matters."""
    queries, keys = shape[-2:]
    if align is None and (not causal or queries == keys):
        return ALIGNMENTS[0]
    if align not in ALIGNMENTS:
        hint = "" if align else f": {queries} queries and {keys} keys have two alignments"
        raise ValueError(f"align must be one of {', '.join(ALIGNMENTS)}, got {align!r}{hint}")
    return align


def require_key_mask(keep: Array | None, shape: tuple[int, ...], groups: int) -> None:
    """Raise an error unless `keep` is boolean and speaks of keys only."""
    if keep is None:
        return
    require_bool("keep", keep)
    to = (*shape[:-3], groups, 1, shape[-1])
    if keep.ndim == 0 or (keep.ndim > 1 and keep.shape[-2] != 1):
        raise ValueError(
            f"keep has shape {keep.shape}: only whole keys can be left out here, not pairs of "
            f"query and key; it must broadcast to (*B, G, 1, M) = {to}"
        )
    require_broadcastable("keep", keep.shape, to)


def _require_state(state: LinearState | None, q: Array, shape: tuple[int, ...], v: Array) -> None:
    """Raise an error unless the state is one of these heads and widths."""
    if state is None:
        return
    if not isinstance(state, LinearState):
        raise TypeError(f"state must be a LinearState, got {type(state).__name__}")
    to = (*shape[:-3], v.shape[-3], q.shape[-1], v.shape[-1])
    for name, x, wanted in (("state.s", state.s, to), ("state.z", state.z, to[:-1])):
        require_array(name, x, min_ndim=len(wanted) - len(shape) + 3)
        if x.shape[-len(wanted[len(shape) - 3 :]) :] != wanted[len(shape) - 3 :]:
            raise ValueError(f"{name} has shape {x.shape}, these heads need {wanted}")
        require_broadcastable(name, x.shape, wanted)
