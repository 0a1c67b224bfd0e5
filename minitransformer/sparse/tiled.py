"""Block-sparse attention in plain NumPy, tile by tile: the page to read before the kernels.

Only listed tiles are computed, and no array of N x M exists. A row of tiles carries the state
(m, l, a) of the online softmax (Eq. 1.8) from tile to tile; P̃ are weights before the division:

    S = cap(s · Q_I K_Jᵀ) where kept, else -inf,   m' = max(m, max_j S)  (Eq. 11.1)
    P̃ = e^{S - m'},   l ← e^{m - m'} l + Σ_j P̃,   a ← e^{m - m'} a + P̃ V_J  (Eq. 11.2)
    O_I = a / l,   L_I = m + log l   after the last tile of the row  (Eq. 11.3)

Backward, the weights come back from the scores and L; nothing but L was kept. dQ goes along rows of
tiles, dK and dV along columns, so that each sum has one owner and a fixed order: no atomics.
arXiv:2205.14135, arXiv:2307.08691; here a pair is computed twice backward, once for each direction.

It equals `attention.dense` under the expanded mask. There is no bias and no multiplier: tiles that
are not listed could not hold what an inverted mask leaves in the denominator.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Inexact

from minitransformer.arrays import (
    Array,
    common_dtype,
    compute_dtype,
    require_cotangent,
    require_finite,
    require_logits,
    unbroadcast,
)
from minitransformer.attention.dense import AttentionGrads, score_scale, score_shape
from minitransformer.attention.softmax import SoftcapCache, softcap_backward, softcap_forward
from minitransformer.sparse.block_mask import BlockMask, layout_of, listed, pairs


class TiledCache(NamedTuple):
    """`lse` is public. Beyond the inputs and the output, it is all that is kept: O(N)."""

    lse: Inexact[Array, "*B H N"]
    q: Inexact[Array, "*B H N D"]
    k: Inexact[Array, "*B G M D"]
    v: Inexact[Array, "*B G M E"]
    out: Inexact[Array, "*B H N E"]
    mask: BlockMask
    scale: float
    softcap: float | None
    inputs: tuple[tuple[tuple[int, ...], np.dtype], ...]  # shape and dtype of q, k, v


def tiled_attention_forward(
    q: Inexact[Array, "*#B H N D"],
    k: Inexact[Array, "*#B G M D"],
    v: Inexact[Array, "*#B G M E"],
    mask: BlockMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    check_finite: bool = True,
) -> tuple[Inexact[Array, "*B H N E"], TiledCache]:
    """Each query's weighted mean of the values in its listed tiles  (Eq. 11.1 - 11.3)

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape, or `mask` is of other sizes; with
        `check_finite`, if a NaN or infinity stands where some query may read it.
    """
    shape = score_shape(q, k, v)
    *leading, heads, queries, _ = shape
    layout, scale = _layouts(mask, shape), score_scale(scale, q.shape[-1])
    dtype, groups = compute_dtype(q, k, v), k.shape[-3]
    q_, k_, v_ = (
        np.broadcast_to(x.astype(dtype, copy=False), (*leading, *x.shape[-3:])) for x in (q, k, v)
    )
    if check_finite:
        _require_finite_where_read(mask, layout, {"q": q_, "k": k_, "v": v_})

    out = np.zeros((*shape[:-1], v.shape[-1]), dtype)
    lse = np.full(shape[:-1], -np.inf, dtype)
    cache = TiledCache(
        lse, q_, k_, v_, out, mask, scale, softcap, tuple((x.shape, x.dtype) for x in (q, k, v))
    )
    softcap_forward(out[:0], softcap)  # refuses a bad one, whether or not there is a tile
    for at in np.ndindex(*leading, heads):
        group = (*at[:-1], at[-1] * groups // heads)
        for i in range(mask.grid[0]):
            rows = _slice(i, mask.tile[0], queries)
            # pass 1: the state of a row that has read nothing
            m = np.full(rows.stop - rows.start, -np.inf, dtype)
            total, weighted = np.zeros_like(m), np.zeros((len(m), v.shape[-1]), dtype)
            for entry, columns in _row(mask, int(layout[at]), i):
                # pass 2: the scores of one tile
                scores, keep, _ = _scores(cache, at, group, rows, columns, entry)
                if check_finite:
                    require_logits("q kᵀ", scores)
                # pass 3: its weights, and what was carried, on the common scale m'
                top = np.maximum(m.real, scores.real.max(axis=1))
                safe = np.where(top == -np.inf, 0, top)  # nothing read yet: exp(-inf), not NaN
                shrink, p = np.exp(m - safe), np.exp(scores - safe[:, None])
                total = shrink * total + p.sum(axis=1)
                weighted = shrink[:, None] * weighted + _product(p, v_[group][columns], keep)
                m = top.astype(dtype)
            # pass 4: divide once; a row that read nothing keeps its 0 and -inf
            alive = total != 0
            divisor = np.where(alive, total, 1)
            out[at][rows] = weighted / divisor[:, None]
            lse[at][rows] = np.where(alive, m + np.log(divisor), -np.inf)
    return out.astype(common_dtype(q, k, v), copy=False), cache


def tiled_attention_backward(
    dout: Inexact[Array, "*B H N E"],
    cache: TiledCache,
    *,
    dlse: Inexact[Array, "*B H N"] | None = None,
) -> AttentionGrads:
    """Row by row for the queries, then column by column for keys and values.

        D = rowsum(dO ⊙ O)  (Eq. 11.4)
        P = e^{S - L},   dS = P ⊙ (dO_I V_Jᵀ - D + dL) ⊙ cap'  (Eq. 11.5)
        dQ_I = s · Σ_J dS K_J   over the tiles of row I  (Eq. 11.6)
        dV_J = Σ_h Σ_I Pᵀ dO_I,   dK_J = s · Σ_h Σ_I dSᵀ Q_I   over the tiles of column J, for every
                                  query head h of the group  (Eq. 11.7)

    Raises
    ------
    ValueError
        If `dout` or `dlse` does not have the shape of what the forward pass returned.
    """
    require_cotangent("dout", dout, cache.out.shape)
    mask, dtype = cache.mask, cache.out.dtype
    *leading, heads, queries, _ = cache.out.shape
    groups, keys = cache.k.shape[-3:-1]
    layout = layout_of(mask, (*leading, heads))
    dout = dout.astype(dtype, copy=False)
    with np.errstate(invalid="ignore"):  # a dead row's cotangent may be anything
        delta = (dout * cache.out).sum(axis=-1)
    if dlse is not None:
        require_cotangent("dlse", dlse, cache.lse.shape)
        delta = delta - dlse
    dq, dk, dv = (np.zeros(x.shape, dtype) for x in (cache.q, cache.k, cache.v))

    for at in np.ndindex(*leading, heads):
        group, s = (*at[:-1], at[-1] * groups // heads), int(layout[at])
        # pass 1: along rows, each owns its dQ
        for i in range(mask.grid[0]):
            rows = _slice(i, mask.tile[0], queries)
            for entry, columns in _row(mask, s, i):
                _, dscores, keep = _gradients(cache, dout, delta, at, group, rows, columns, entry)
                dq[at][rows] += cache.scale * _product(dscores, cache.k[group][columns], keep)
        # pass 2: along columns, each owns its dK and dV, and the heads of a group come in turn
        for j in range(mask.grid[1]):
            columns = _slice(j, mask.tile[1], keys)
            for entry, rows in _column(mask, s, j):
                p, dscores, keep = _gradients(cache, dout, delta, at, group, rows, columns, entry)
                kept = None if keep is None else keep.T
                dv[group][columns] += _product(p.T, dout[at][rows], kept)
                dk[group][columns] += cache.scale * _product(dscores.T, cache.q[at][rows], kept)

    # sum what was broadcast, round once to what came in
    grads = [
        unbroadcast(g, like).astype(given, copy=False)
        for g, (like, given) in zip((dq, dk, dv), cache.inputs, strict=True)
    ]
    return AttentionGrads(grads[0], grads[1], grads[2], None)


# ---- one tile ------------------------------------------------------------------------------------


def _scores(
    cache: TiledCache, at: tuple, group: tuple, rows: slice, columns: slice, entry: int
) -> tuple[Array, Array | None, SoftcapCache]:
    """S of one tile, who may attend in it (None: all), and the slope of the cap  (Eq. 11.1)"""
    keep = pairs(cache.mask, entry, rows.stop - rows.start, columns.stop - columns.start)
    with np.errstate(over="ignore", invalid="ignore"):  # a masked pair may overflow
        product = cache.scale * (cache.q[at][rows] @ cache.k[group][columns].T)
    if keep is not None and cache.softcap:
        product = np.where(keep, product, 0)
    scores, slope = softcap_forward(product, cache.softcap)
    return scores if keep is None else np.where(keep, scores, -np.inf), keep, slope


def _gradients(
    cache: TiledCache,
    dout: Array,
    delta: Array,
    at: tuple,
    group: tuple,
    rows: slice,
    columns: slice,
    entry: int,
) -> tuple[Array, Array, Array | None]:
    """P and dS of one tile from L, and who may attend in it  (Eq. 11.5)"""
    scores, keep, slope = _scores(cache, at, group, rows, columns, entry)
    lse = cache.lse[at][rows, None]
    p = np.exp(scores - np.where(lse == -np.inf, np.inf, lse))  # a dead row: e^{-inf} = 0
    with np.errstate(over="ignore", invalid="ignore"):
        dp = dout[at][rows] @ cache.v[group][columns].T
        dscores = softcap_backward(p * (dp - delta[at][rows, None]), slope)
    return p, dscores if keep is None else np.where(keep, dscores, 0), keep


def _product(weights: Array, x: Array, keep: Bool[Array, "n m"] | None) -> Array:
    """weights @ x in which a pair that is not kept has no influence, where 0 · NaN would have."""
    if keep is not None and not np.isfinite(x).all():
        x = np.where(np.any(keep, axis=0)[:, None], x, 0)  # what nobody reads
        if not np.isfinite(x).all():
            with np.errstate(invalid="ignore"):
                return np.where(keep[..., None], weights[..., None] * x, 0).sum(axis=1)
    return weights @ x


# ---- which tiles ---------------------------------------------------------------------------------


def _slice(line: int, size: int, end: int) -> slice:
    """Rows or columns of tile `line`, cut at the ragged end."""
    return slice(line * size, min(line * size + size, end))


def _row(mask: BlockMask, layout: int, i: int):
    """The tiles of row I: entry, and its columns  (Eq. 10.2)"""
    for entry in range(*mask.row_pointers[layout, i : i + 2].tolist()):
        yield entry, _slice(int(mask.columns[entry]), mask.tile[1], mask.keys)


def _column(mask: BlockMask, layout: int, j: int):
    """The tiles of column J: entry in the order of the rows, and its rows  (Eq. 10.3)"""
    for place in range(*mask.column_pointers[layout, j : j + 2].tolist()):
        yield int(mask.order[place]), _slice(int(mask.rows[place]), mask.tile[0], mask.queries)


def _layouts(mask: BlockMask, shape: tuple[int, ...]) -> Array:
    """The layout of each batch row and head, if the mask is of these sizes."""
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a BlockMask, got {type(mask).__name__}")
    if (mask.queries, mask.keys) != shape[-2:]:
        raise ValueError(
            f"mask is of {mask.queries} queries and {mask.keys} keys, q and k have {shape[-2]} and "
            f"{shape[-1]}"
        )
    return layout_of(mask, shape[:-2])


def _require_finite_where_read(mask: BlockMask, layout: Array, given: dict[str, Array]) -> None:
    """Raise a ValueError for a NaN or infinity in a query with a key, or in a key that some query
    reads."""
    if all(np.isfinite(x).all() for x in given.values()):
        return
    reads = np.zeros((mask.layouts, mask.queries), np.bool_)
    read = np.zeros((mask.layouts, mask.keys), np.bool_)
    for entry, (s, i, j) in enumerate(listed(mask).tolist()):
        rows, columns = _slice(i, mask.tile[0], mask.queries), _slice(j, mask.tile[1], mask.keys)
        keep = pairs(mask, entry, rows.stop - rows.start, columns.stop - columns.start)
        reads[s, rows] |= True if keep is None else keep.any(axis=1)
        read[s, columns] |= True if keep is None else keep.any(axis=0)
    groups = given["k"].shape[-3]
    each = (*layout.shape[:-1], groups, layout.shape[-1] // groups, mask.keys)
    by_group = read[layout].reshape(each).any(axis=-2)
    for name, x in given.items():
        used = reads[layout] if name == "q" else by_group
        require_finite(name, np.where(used[..., None], x, 0))
