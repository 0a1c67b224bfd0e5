"""Fine attention inside a block, coarse attention to the other blocks: each of those is one key and
one value, the means of what it holds.

    k̄_c = (1/n_c) Σ_{j in c} k_j,   v̄_c likewise,
    over the n_c keys of block c that exist  (Eq. 13.21)
    fine   F_i = {j : ⌊j/b⌋ = ⌊p_i/b⌋},   causal: and j <= p_i,   p_i = i + o
    coarse C_i = {c : c != ⌊p_i/b⌋},   causal: c < ⌊p_i/b⌋  (Eq. 13.22)
    S_ij = s q_i · k_j,   S_ic = s q_i · k̄_c + log n_c  (Eq. 13.23)
    o_i = Σ_{j in F_i} P_ij v_j + Σ_{c in C_i} P_ic v̄_c,
    P = softmax of both together,   L_i their log-sum-exp  (Eq. 13.24)

b is the length of a block and o the offset of the queries. A row has b + M/b scores and not M. A
summary has the weight of the n_c keys that it stands for, so the result is dense attention's where
the keys of each block agree, whatever the values; with blocks of one; and with a single block.
Elsewhere L is below dense attention's, by Jensen's inequality: far keys that differ weigh less
than they should. A causal row reads no summary of its own block, in which the future has a share.

Keys are left out whole, by `keep`: a summary is shared by all queries, so a mask of pairs has no
meaning here. Positions that are rotated into the keys (RoPE) are averaged along with them. After
the idea of arXiv:2107.05768.
"""

from collections.abc import Iterator
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
from minitransformer.attention.dense import (
    AttentionCache,
    attention_backward,
    attention_forward,
    score_shape,
)
from minitransformer.attention.linear import require_alignment, require_key_mask, rows_alive


class PoolCache(NamedTuple):
    """`counts` is public: how many rows of each block exist, (*#B, C)."""

    counts: Array
    exists: Bool[Array, "..."] | None
    block: int
    rows: int
    like: Array  # an empty array of the shape and dtype that came in, but for the rows


class LocalGlobalCache(NamedTuple):
    lse: Inexact[Array, "*B H N"]
    blocks: list[tuple[slice, slice, AttentionCache]]  # rows of queries, of keys, dense attention
    pools: tuple[PoolCache, PoolCache]
    shape: tuple[int, ...]  # of the output
    inputs: tuple[tuple[tuple[int, ...], np.dtype], ...]  # shape and dtype of q, k, v


class LocalGlobalGrads(NamedTuple):
    q: Inexact[Array, "*Q H N D"]
    k: Inexact[Array, "*K G M D"]
    v: Inexact[Array, "*V G M E"]


# ---- summaries -----------------------------------------------------------------------------------


def pool_blocks_forward(
    x: Inexact[Array, "*B M D"], block: int, *, exists: Bool[Array, "..."] | None = None
) -> tuple[Inexact[Array, "*B C D"], PoolCache]:
    """The mean of each `block` rows that exist, the last block as long as it is  (Eq. 13.21)

    `exists` is boolean and broadcasts to (*B, M). A block without a row has the summary 0.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape.
    """
    require_array("x", x, min_ndim=2)
    require_whole(1, block=block)
    if exists is not None:
        require_bool("exists", exists)
        require_broadcastable("exists", exists.shape, x.shape[:-1])
    wide = x.astype(compute_dtype(x), copy=False)
    there = np.ones(x.shape[-2], np.int64)
    if exists is not None:
        there = np.broadcast_to(exists, (*exists.shape[:-1], x.shape[-2])).astype(np.int64)
        wide = np.where(exists[..., None], wide, 0)
    count = _sums(there[..., None], block)[..., 0]
    mean = _sums(wide, block) / np.maximum(count, 1)[..., None].astype(wide.real.dtype)
    like = np.empty((*x.shape[:-2], 0, x.shape[-1]), x.dtype)
    return narrowed(mean, x), PoolCache(count, exists, block, x.shape[-2], like)


def pool_blocks_backward(
    dout: Inexact[Array, "*B C D"], cache: PoolCache
) -> Inexact[Array, "*B M D"]:
    """dx_j = dx̄_c / n_c, c the block of j; 0 where j does not exist  (Eq. 13.25)

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    *leading, _, width = cache.like.shape
    require_cotangent("dout", dout, (*leading, cache.counts.shape[-1], width))
    wide = dout.astype(compute_dtype(dout, cache.like), copy=False)
    share = wide / np.maximum(cache.counts, 1)[..., None].astype(wide.real.dtype)
    dx = np.repeat(share, cache.block, axis=-2)[..., : cache.rows, :]
    if cache.exists is not None:
        dx = np.where(cache.exists[..., None], dx, 0)
    return narrowed(dx, cache.like)


def _sums(x: Array, block: int) -> Array:
    """The sum of each `block` rows, (*B, C, D)."""
    *leading, rows, width = x.shape
    blocks = -(-rows // block)
    whole = np.zeros((*leading, blocks * block, width), x.dtype)
    whole[..., :rows, :] = x
    return whole.reshape(*leading, blocks, block, width).sum(axis=-2)


# ---- attention -----------------------------------------------------------------------------------


def local_global_attention_forward(
    q: Inexact[Array, "*#B H N D"],
    k: Inexact[Array, "*#B G M D"],
    v: Inexact[Array, "*#B G M E"],
    *,
    block: int,
    causal: bool = False,
    align: str | None = None,
    keep: Bool[Array, "..."] | None = None,
    scale: float | None = None,
    check_finite: bool = True,
) -> tuple[Inexact[Array, "*B H N E"], LocalGlobalCache]:
    """Each query's weighted mean of the values near it and of the summaries far off  (Eq. 13.21 -
    13.24)

    `keep` says which keys exist and broadcasts to (*B, G, 1, M). `align` is asked for where N != M,
    causal or not: it says in which block a query stands.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape; with `check_finite`, if a NaN or infinity stands
        where some query may read it.
    """
    shape, groups = score_shape(q, k, v), k.shape[-3]
    queries, keys = shape[-2:]
    align = require_alignment(queries != keys, align, shape)
    require_whole(1, block=block)
    require_key_mask(keep, shape, groups)
    offset = keys - queries if align == "lower_right" else 0
    dtype = compute_dtype(q, k, v)

    # pass 1: what nobody may read is 0, whatever stands there
    kept = np.ones((1, 1, keys), np.bool_) if keep is None else keep
    kept = np.broadcast_to(kept, (*np.broadcast_shapes(kept.shape, (1, 1, 1))[:-1], keys))
    alive = _of_heads(rows_alive(kept, None, shape, causal, align)[..., 0, :], shape[-3])
    kept = kept[..., 0, :]
    # a summary is read from behind its block: by nobody who may not read all of it
    read = kept & (np.arange(keys) < queries + offset) if causal else kept
    q_, k_, v_ = (x.astype(dtype, copy=False) for x in (q, k, v))
    q_ = q_ if alive.all() else np.where(alive[..., None], q_, 0)
    k_, v_ = (np.where(read[..., None], x, 0) for x in (k_, v_))
    if check_finite:
        for name, x in (("q", q_), ("k", k_), ("v", v_)):
            require_finite(name, x)

    # pass 2: summaries
    k_bar, k_pool = pool_blocks_forward(k_, block, exists=kept)
    v_bar, v_pool = pool_blocks_forward(v_, block, exists=kept)
    count = _of_heads(k_pool.counts, shape[-3])[..., None, :]  # (*#B, H or 1, 1, C)
    weight = np.log(np.maximum(count, 1)).astype(k_.real.dtype)
    exists = _of_heads(kept, shape[-3])[..., None, :]

    # pass 3: the queries of one block after the other, against its keys and all summaries
    caches, outs = [], []
    for own, here, near in _blocks(queries, keys, block, offset):
        fine, blocks = exists[..., near], np.arange(k_bar.shape[-2])
        if causal:
            fine = fine & (np.arange(keys)[near] <= np.arange(queries)[here, None] + offset)
        coarse = (count > 0) & (blocks < own if causal else blocks != own)
        out, cache = attention_forward(
            q_[..., here, :],
            np.concatenate([k_[..., near, :], k_bar], axis=-2),
            np.concatenate([v_[..., near, :], v_bar], axis=-2),
            keep=_beside(fine, coarse),
            bias=_beside(np.zeros((1, near.stop - near.start), weight.dtype), weight),
            scale=scale,
            check_finite=False,
        )
        caches.append((here, near, cache))
        outs.append(out)

    lse = np.concatenate([cache.lse for _, _, cache in caches], axis=-1)
    inputs = tuple((x.shape, x.dtype) for x in (q, k, v))
    out, stored = np.concatenate(outs, axis=-2), common_dtype(q, k, v)
    out = out.astype(stored) if stored.itemsize == 2 else out
    return out, LocalGlobalCache(lse, caches, (k_pool, v_pool), out.shape, inputs)


def local_global_attention_backward(
    dout: Inexact[Array, "*B H N E"],
    cache: LocalGlobalCache,
    *,
    dlse: Inexact[Array, "*B H N"] | None = None,
) -> LocalGlobalGrads:
    """Undo the passes in reverse. A key is read twice, as itself and in its block's mean:

        dk_j = Σ_{i : j in F_i} s dS_ij q_i + dk̄_{c(j)} / n_c,
        dk̄_c = Σ_{i : c in C_i} s dS_ic q_i,   dv_j likewise with P and do  (Eq. 13.26)

    Raises
    ------
    ValueError
        If `dout` or `dlse` does not have the shape of what the forward pass returned.
    """
    require_cotangent("dout", dout, cache.shape)
    if dlse is not None:
        require_cotangent("dlse", dlse, cache.lse.shape)
    # undo pass 3
    dtype, dqs = cache.lse.dtype, []
    shapes = [(*p.like.shape[:-2], p.rows, p.like.shape[-1]) for p in cache.pools]
    dk, dv = (np.zeros(shape, dtype) for shape in shapes)
    dk_bar, dv_bar = (
        np.zeros((*shape[:-2], p.counts.shape[-1], shape[-1]), dtype)
        for shape, p in zip(shapes, cache.pools, strict=True)
    )
    for here, near, dense in cache.blocks:
        part = None if dlse is None else dlse[..., here]
        grads = attention_backward(dout[..., here, :], dense, dlse=part)
        own = near.stop - near.start
        dqs.append(grads.q)
        for x, x_bar, g in ((dk, dk_bar, grads.k), (dv, dv_bar, grads.v)):
            x[..., near, :] += g[..., :own, :]
            x_bar += g[..., own:, :]
    # undo pass 2
    dk += pool_blocks_backward(dk_bar, cache.pools[0])
    dv += pool_blocks_backward(dv_bar, cache.pools[1])
    # undo pass 1: what was broadcast summed, rounded once to what came in
    wide = (np.concatenate(dqs, axis=-2), dk, dv)
    return LocalGlobalGrads(
        *(
            unbroadcast(x, like).astype(dtype, copy=False)
            for x, (like, dtype) in zip(wide, cache.inputs, strict=True)
        )
    )


# ---- inside --------------------------------------------------------------------------------------


def _blocks(queries: int, keys: int, block: int, offset: int) -> Iterator[tuple[int, slice, slice]]:
    """Each block in which a query stands, the rows of those, and its keys: none before the first
    key or after the last."""
    last = max(queries - 1, 0)
    for own in range(offset // block, (offset + last) // block + 1):
        start, stop = own * block, (own + 1) * block
        here = slice(max(start - offset, 0), min(stop - offset, queries))
        yield own, here, slice(min(max(start, 0), keys), min(max(stop, 0), keys))


def _of_heads(x: Array, heads: int) -> Array:
    """(*B, G or 1, X) -> (*B, H or 1, X)"""
    return x if x.shape[-2] == 1 else np.repeat(x, heads // x.shape[-2], axis=-2)


def _beside(left: Array, right: Array) -> Array:
    """Joined along the last axis, stretched along the others."""
    to = np.broadcast_shapes(left.shape[:-1], right.shape[:-1])
    parts = [np.broadcast_to(x, (*to, x.shape[-1])) for x in (left, right)]
    return np.concatenate(parts, axis=-1)
