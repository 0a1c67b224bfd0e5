"""Key/value caches: what decoding has computed once it does not compute again.

    K ← [K; k],   V ← [V; v],   p ← [p; p_new]   append-only  (Eq. 8.1)
    keep_ij = 0 <= p_j <= p_i,   p_j the position of the key, wherever it is stored  (Eq. 8.2)
    p_new = 1 + the largest position so far, not the number of slots  (Eq. 8.3)
    window W: slot p mod W, and keep_ij only where p_i - p_j < W  (Eq. 8.4)

A prompt, then chunks, then single tokens give what one pass over the whole text gives. A chunk
reads what was held *and* itself before a ring overwrites anything: its first queries still need the
oldest keys. Whoever is overwritten is W older than the newcomer, out of every later window.

Caches are values: `extend` returns a new one and leaves the old one, so that beams may fork. A
key is turned (RoPE) before it is cached; ALiBi takes the positions that `Read` carries. Random
masks are off in decoding. There is no gradient here: training sees the whole text at once.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Inexact, Integer

from minitransformer.arrays import (
    Array,
    require_array,
    require_bool,
    require_broadcastable,
    require_integers,
    require_whole,
)
from minitransformer.attention.dense import attention_forward


class KVCache(NamedTuple):
    k: Inexact[Array, "*B G S D"]
    v: Inexact[Array, "*B G S E"]
    positions: Integer[Array, "*B S"]  # of the token in each slot; -1: nobody may read it
    window: int | None


class MemoryCache(NamedTuple):
    k: Inexact[Array, "*B G M D"]
    v: Inexact[Array, "*B G M E"]
    keep: Bool[Array, "*B M"]


class Read(NamedTuple):
    """What attention needs: `attention_forward(q, k, v, keep=keep)`, with a bias from `positions`
    if there is one. -1 in `positions` is an empty slot or padding, and `keep` hides it."""

    k: Inexact[Array, "*B G M D"]
    v: Inexact[Array, "*B G M E"]
    positions: Integer[Array, "*B M"]
    keep: Bool[Array, "*B 1 N M"]


AnyCache = TypeVar("AnyCache", KVCache, MemoryCache)


# ---- self-attention ------------------------------------------------------------------------------


def empty_cache(
    leading: tuple[int, ...],
    groups: int,
    width: int,
    value_width: int | None = None,
    *,
    window: int | None = None,
    dtype: np.typing.DTypeLike = np.float64,
) -> KVCache:
    """A cache that holds nothing. With a window it has that many slots, for good  (Eq. 8.4);
    without, it grows with the text  (Eq. 8.1).

    Raises
    ------
    TypeError, ValueError
        If a size is no whole number or too small.
    """
    value_width = width if value_width is None else value_width
    require_whole(1, groups=groups)
    require_whole(0, width=width, value_width=value_width)
    for size in leading:
        require_whole(0, leading=size)
    if window is not None:
        require_whole(1, window=window)
    slots = window or 0
    k = np.zeros((*leading, groups, slots, width), dtype)
    v = np.zeros((*leading, groups, slots, value_width), dtype)
    require_array("dtype", k)
    return KVCache(k, v, np.full((*leading, slots), -1), window)


def next_positions(cache: KVCache, tokens: int) -> Integer[Array, "*B N"]:
    """Where the next `tokens` tokens of each row stand  (Eq. 8.3)

    Ask before turning the new queries and keys. A ring has forgotten most tokens, and padding has
    no position: neither the number of slots nor the length of the longest row will do.
    """
    require_whole(0, tokens=tokens)
    last = cache.positions.max(axis=-1, initial=-1)
    return last[..., None] + 1 + np.arange(tokens)


def padded_positions(real: Bool[Array, "*B N"]) -> Integer[Array, "*B N"]:
    """p_i = (number of real tokens up to i) - 1 where i is real, -1 where it is padding  (Eq. 8.5)

    Rows of unlike length, padded on either side, count from 0 at their own first token.
    """
    require_bool("real", real)
    return np.where(real, np.cumsum(real, axis=-1) - 1, -1)


def extend(
    cache: KVCache,
    k: Inexact[Array, "*B G N D"],
    v: Inexact[Array, "*B G N E"],
    *,
    positions: Integer[Array, "*#B N"] | None = None,
) -> tuple[Read, KVCache]:
    """What N new tokens read, and the cache after them  (Eq. 8.1, Eq. 8.2, Eq. 8.4)

    `positions` defaults to `next_positions`; -1 marks padding, which reads nothing and which nobody
    reads. New keys are rounded to the dtype of the cache before anybody reads them: a key is the
    same number now and later.

    Raises
    ------
    TypeError, ValueError
        If k and v do not fit the cache, or the positions do not go on upwards from those it holds.
    """
    _require_fit(cache, k, v)
    k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
    p = _positions(cache, k.shape[-2], positions)
    # pass 1: read what was held and what came
    held = np.concatenate([cache.positions, p], axis=-1)
    all_k = np.concatenate([cache.k, k], axis=-2)
    all_v = np.concatenate([cache.v, v], axis=-2)
    read = Read(all_k, all_v, held, _visible(p, held, cache.window)[..., None, :, :])
    # pass 2: keep it all, or the newest W
    if cache.window is None:
        return read, KVCache(all_k, all_v, held, None)
    source = _sources(p, cache.window)
    rows = source[..., None, :, None]
    return read, KVCache(
        np.take_along_axis(all_k, rows, axis=-2),
        np.take_along_axis(all_v, rows, axis=-2),
        np.take_along_axis(held, source, axis=-1),
        cache.window,
    )


def decode_step(
    q: Inexact[Array, "*B H N D"],
    k: Inexact[Array, "*B G N D"],
    v: Inexact[Array, "*B G N E"],
    cache: KVCache,
    *,
    positions: Integer[Array, "*#B N"] | None = None,
    scale: float | None = None,
    check_finite: bool = True,
) -> tuple[Inexact[Array, "*B H N E"], KVCache]:
    """What N new tokens attend to, and the cache after them: `extend`, then attention over what it
    says may be read  (Eq. 8.1, Eq. 8.2, Eq. 8.4)

    Raises
    ------
    TypeError, ValueError
        As `extend` and `attention_forward` do.
    """
    read, after = extend(cache, k, v, positions=positions)
    out, _ = attention_forward(
        q, read.k, read.v, keep=read.keep, scale=scale, check_finite=check_finite
    )
    return out, after


def reorder(cache: AnyCache, rows: Integer[Array, "beams"]) -> AnyCache:
    """Row b goes on from what row rows[b] was: K'_b = K_{rows[b]}, V and positions likewise
    (Eq. 8.6)

    Beam search: a beam may be continued twice, or not at all; [0, 0, 0] makes one prompt three
    beams. The rows are those of the first leading axis.

    Raises
    ------
    TypeError, ValueError
        If `rows` are no integers (N,) in [0, B), or the cache has no leading axis.
    """
    require_integers("rows", rows)
    if cache.k.ndim < 4:
        raise ValueError(f"cache has no batch axis to reorder: its keys are {cache.k.shape}")
    if rows.ndim != 1 or (rows.size and not 0 <= rows.min() <= rows.max() < len(cache.k)):
        raise ValueError(
            f"rows must have shape (beams,) and lie in [0, {len(cache.k)}), got {rows.tolist()}"
        )
    arrays = {name: x[rows] for name, x in cache._asdict().items() if isinstance(x, np.ndarray)}
    return cache._replace(**arrays)


def bytes_per_token(
    layers: int,
    groups: int,
    width: int,
    value_width: int | None = None,
    *,
    dtype: np.typing.DTypeLike = np.float32,
) -> int:
    """layers · G · (D + E) · bytes of a number: what each token of each row costs  (Eq. 8.8)

    Query heads do not appear: that is why grouped queries exist.
    """
    value_width = width if value_width is None else value_width
    require_whole(1, layers=layers, groups=groups)
    require_whole(0, width=width, value_width=value_width)
    return int(layers * groups * (width + value_width) * np.dtype(dtype).itemsize)


# ---- cross-attention -----------------------------------------------------------------------------


def memory_cache(
    memory: Inexact[Array, "*B M W"],
    project: Callable[[Array], tuple[Array, Array]],
    *,
    keep: Bool[Array, "*B M"] | None = None,
) -> MemoryCache:
    """K, V = project(memory), once, for every token that will be decoded  (Eq. 8.7)

    `project` returns k (*B, G, M, D) and v (*B, G, M, E). `keep` is False at the memory's padding.

    Raises
    ------
    TypeError, ValueError
        If an argument is no array of the right kind, or the shapes disagree.
    """
    require_array("memory", memory, min_ndim=2)
    *leading, rows, _ = memory.shape
    if keep is None:
        keep = np.ones((*leading, rows), bool)
    require_bool("keep", keep)
    require_broadcastable("keep", keep.shape, (*leading, rows))
    k, v = project(memory)
    for name, x in (("k", k), ("v", v)):
        require_array(name, x, min_ndim=3)
        if (*x.shape[:-3], x.shape[-2]) != (*leading, rows):
            raise ValueError(
                f"project gave {name} of shape {x.shape} for a memory of {memory.shape}: expected "
                f"({', '.join(map(str, [*leading, 'groups', rows, 'width']))})"
            )
    return MemoryCache(k, v, np.array(np.broadcast_to(keep, (*leading, rows))))


def read_memory(cache: MemoryCache, queries: int) -> Read:
    """What `queries` tokens read of the memory: all that is no padding, however far the text has
    come  (Eq. 8.7). Neither a causal mask nor the decoder's window has a meaning here.
    """
    require_whole(0, queries=queries)
    *leading, keys = cache.keep.shape
    keep = np.broadcast_to(cache.keep[..., None, None, :], (*leading, 1, queries, keys))
    positions = np.where(cache.keep, np.arange(keys), -1)
    return Read(cache.k, cache.v, positions, np.array(keep))


# ---- inside --------------------------------------------------------------------------------------


def _visible(queries: Array, keys: Array, window: int | None) -> Array:
    """Eq. 8.2 and Eq. 8.4, (*B, N, M)"""
    distance = queries[..., :, None] - keys[..., None, :]
    visible = (keys[..., None, :] >= 0) & (distance >= 0)
    return visible if window is None else visible & (distance < window)


def _sources(p: Array, window: int) -> Array:
    """For each of the W slots, which of the W + N tokens of a read it holds afterwards, (*B, W):
    its own, unless a new one among the last W positions comes to it."""
    *leading, new = p.shape
    last = p.max(axis=-1, initial=-1, keepdims=True)
    stays = (p >= 0) & (p > last - window)
    slot = np.where(stays, p % window, window)  # the slot behind the last is thrown away
    source = np.broadcast_to(np.arange(window + 1), (*leading, window + 1)).copy()
    columns = np.broadcast_to(window + np.arange(new), p.shape)
    np.put_along_axis(source, slot, columns, axis=-1)
    return source[..., :window]


def _positions(cache: KVCache, tokens: int, positions: Array | None) -> Array:
    """The positions of the new tokens, (*B, N), if they go on upwards."""
    if positions is None:
        return next_positions(cache, tokens)
    require_integers("positions", positions)
    shape = (*cache.positions.shape[:-1], tokens)
    require_broadcastable("positions", positions.shape, shape)
    p = np.broadcast_to(positions.astype(np.int64), shape)
    last = cache.positions.max(axis=-1, initial=-1, keepdims=True)
    before = np.maximum.accumulate(np.concatenate([last, p], axis=-1), axis=-1)[..., :-1]
    if (p < -1).any() or ((p >= 0) & (p <= before)).any():
        raise ValueError(
            "positions must rise within each row, from what the cache holds on (-1: padding), got "
            f"{positions.tolist()}"
        )
    return p


def _require_fit(cache: KVCache, k: Array, v: Array) -> None:
    for name, x, held in (("k", k, cache.k), ("v", v, cache.v)):
        require_array(name, x, min_ndim=3)
        if (*x.shape[:-2], x.shape[-1]) != (*held.shape[:-2], held.shape[-1]):
            raise ValueError(
                f"{name} has shape {x.shape}, the cache holds {held.shape}: all but the number of "
                "tokens must agree"
            )
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"v has {v.shape[-2]} tokens, k has {k.shape[-2]}: the two must agree")
