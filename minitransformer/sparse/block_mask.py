"""Which tiles of the score matrix exist: what is not listed is neither read nor computed.

The N x M pairs are cut into tiles of r x c, ragged at the ends:

    R = ⌈N / r⌉,   C = ⌈M / c⌉,   tile (I, J) = rows Ir … min(N, Ir + r) - 1,
                                  columns Jc … min(M, Jc + c) - 1  (Eq. 10.1)

Kernels walk along rows forward and for dQ, along columns for dK and dV, so the tiles of layout s
are listed twice, ascending:

    row I:     columns[row_pointers[s, I] : row_pointers[s, I + 1]]  (Eq. 10.2)
    column J:  rows[column_pointers[s, J] : column_pointers[s, J + 1]]  (Eq. 10.3)

Entry u of the second list is entry order[u] of the first. A full tile has pattern -1; a partial one
says pair by pair who may attend, in words of 32 bits, and equal tiles share a pattern:

    keep(i, j) = 1 iff tile (I, J) = (⌊i/r⌋, ⌊j/c⌋) is listed as entry t and pattern[t] = -1 or
                 bits[pattern[t], i mod r, x >> 5] >> (x & 31) & 1,   x = j mod c  (Eq. 10.4)

One layout serves every batch row and head, or there is one for each: `leading` broadcasts to
(*B, H). Compressed rows as in the kernels of arXiv:2205.14135 (block-sparse).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Integer, UInt32

from minitransformer.arrays import (
    Array,
    require_bool,
    require_broadcastable,
    require_integers,
    require_whole,
)

LARGEST_TILE = 128
ARRAYS = ("row_pointers", "columns", "column_pointers", "rows", "order", "pattern", "bits")
AT_ONCE = 1 << 22  # pairs that a rule is asked about in one call

Rule = Callable[[Array, Array, Array, Array], Array]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The tiles of S = Π leading layouts, T in all. Made by `from_dense`, `from_rule` or
    `from_tiles`; checked however it is made."""

    queries: int
    keys: int
    tile: tuple[int, int]
    leading: tuple[int, ...]
    row_pointers: Array  # int32 (S, R + 1)
    columns: Array  # int32 (T,)
    column_pointers: Array  # int32 (S, C + 1)
    rows: Array  # int32 (T,)
    order: Array  # int32 (T,)
    pattern: Array  # int32 (T,)
    bits: Array  # uint32 (P, r, ⌈c / 32⌉)

    @property
    def grid(self) -> tuple[int, int]:
        """(R, C)  (Eq. 10.1)"""
        return -(-self.queries // self.tile[0]), -(-self.keys // self.tile[1])

    @property
    def layouts(self) -> int:
        """S"""
        return math.prod(self.leading)

    def __post_init__(self) -> None:
        _require_sizes(self.queries, self.keys, self.tile, self.leading)
        for name in ARRAYS:
            x = getattr(self, name)
            if not isinstance(x, np.ndarray):
                raise TypeError(f"{name} must be a NumPy array, got {type(x).__name__}")
        (rows, columns), s, t = self.grid, self.layouts, len(self.columns)
        shapes = {
            "row_pointers": (s, rows + 1),
            "columns": (t,),
            "column_pointers": (s, columns + 1),
            "rows": (t,),
            "order": (t,),
            "pattern": (t,),
            "bits": (len(self.bits), self.tile[0], -(-self.tile[1] // 32)),
        }
        for name, shape in shapes.items():
            x, dtype = getattr(self, name), np.uint32 if name == "bits" else np.int32
            if x.dtype != dtype or x.shape != shape:
                raise ValueError(
                    f"{name} must be {np.dtype(dtype)} of shape {shape}, got {x.dtype} {x.shape}"
                )
        _require_pointers("row_pointers", self.row_pointers, t)
        _require_indices("columns", self.columns, 0, columns)
        _require_indices("pattern", self.pattern, -1, len(self.bits))
        tiles = listed(self)
        _require_ascending(tiles)
        _require_transposed(self, tiles)
        _require_canonical(self, tiles)


# ---- made from ----------------------------------------------------------------------------------


def from_dense(keep: Bool[Array, "*L N M"], *, tile: int | tuple[int, int]) -> BlockMask:
    """The tiles in which `keep` allows anything; its leading axes become those of the layouts.

    Raises
    ------
    TypeError, ValueError
        Here and below: if an argument has the wrong type, shape or range.
    """
    require_bool("keep", keep)
    if keep.ndim < 2:
        raise ValueError(f"keep must have shape (*L, N, M), got {keep.shape}")
    *leading, queries, keys = keep.shape
    flat = keep.reshape(math.prod(leading[:-1]), *(leading[-1:] or (1,)), queries, keys)
    return from_rule(
        lambda b, h, i, j: flat[b, h, i, j],
        queries=queries,
        keys=keys,
        tile=tile,
        leading=tuple(leading),
    )


def from_rule(
    rule: Rule,
    *,
    queries: int,
    keys: int,
    tile: int | tuple[int, int],
    leading: tuple[int, ...] = (),
) -> BlockMask:
    """The tiles in which `rule(b, h, i, j)` allows anything, asked about every pair once.

    The four are arrays of integers that broadcast together; b counts the batch rows of `leading`, h
    is its last axis. A shared layout (`leading` empty, or 1 on an axis) is asked with b = h = 0.
    `lambda b, h, i, j: mask(i, j)` asks a mask of `attention.masks`; `j < lengths[b]` is padding.
    """
    r, c = _pair(tile)
    _require_sizes(queries, keys, (r, c), leading)
    grid = (math.prod(leading), -(-queries // r), -(-keys // c))
    tiles = np.stack(np.unravel_index(np.arange(math.prod(grid)), grid), axis=-1)
    return from_tiles(tiles, queries=queries, keys=keys, tile=tile, leading=leading, rule=rule)


def from_tiles(
    tiles: Integer[Array, "T 3"],
    *,
    queries: int,
    keys: int,
    tile: int | tuple[int, int],
    leading: tuple[int, ...] = (),
    rule: Rule | None = None,
) -> BlockMask:
    """The tiles (s, I, J) as they are given, in any order, each once.

    They are full, or hold what `rule` allows in them; it is asked about these alone, and a tile in
    which it allows nothing is not listed. `np.argwhere` of a boolean (S, R, C) gives such tiles.
    """
    size = _pair(tile)
    _require_sizes(queries, keys, size, leading)
    require_integers("tiles", tiles)
    if tiles.ndim != 2 or tiles.shape[1] != 3:
        raise ValueError(f"tiles must have shape (T, 3): layout, row, column; got {tiles.shape}")
    grid = (math.prod(leading), -(-queries // size[0]), -(-keys // size[1]))
    outside = ((tiles < 0) | (tiles >= grid)).any(axis=1)
    if outside.any():
        raise ValueError(f"tiles holds {_text(tiles[outside][0])}, outside the grid {grid}")
    tiles = tiles[np.lexsort(tiles.T[::-1])].astype(np.int64)
    again = (tiles[1:] == tiles[:-1]).all(axis=1)
    if again.any():
        raise ValueError(f"tiles holds {_text(tiles[1:][again][0])} more than once")

    # pass 1: what each tile holds
    width = -(-size[1] // 32)
    partial, words = np.zeros(len(tiles), dtype=np.bool_), np.zeros((0, size[0], width), np.uint32)
    if rule is not None:
        held, partial, words = _asked(tiles, rule, queries, keys, size, leading)
        tiles, partial = tiles[held], partial[held]
    # pass 2: equal patterns are stored once
    lines = words.reshape(len(words), size[0] * width)
    bits, which = np.unique(lines, axis=0, return_inverse=True)
    pattern = np.full(len(tiles), -1)
    pattern[partial] = which.ravel()
    # pass 3: the same tiles by rows and by columns
    s, i, j = tiles.T
    order = np.lexsort((i, j, s))
    row_pointers, column_pointers = _pointers(s, i, *grid[:2]), _pointers(s, j, grid[0], grid[2])
    return BlockMask(
        queries=int(queries),
        keys=int(keys),
        tile=size,
        leading=tuple(leading),
        row_pointers=row_pointers.astype(np.int32),
        columns=j.astype(np.int32),
        column_pointers=column_pointers.astype(np.int32),
        rows=i[order].astype(np.int32),
        order=order.astype(np.int32),
        pattern=pattern.astype(np.int32),
        bits=bits.reshape(len(bits), size[0], width),
    )


def _asked(
    tiles: Array, rule: Rule, queries: int, keys: int, tile: tuple[int, int], leading: tuple
) -> tuple[Array, Array, Array]:
    """Of each tile, whether `rule` allows anything in it, and whether not everything; of the latter
    the bits."""
    heads, (r, c) = leading[-1] if leading else 1, tile
    held, partial, words = [], [], [np.zeros((0, r, -(-c // 32)), np.uint32)]
    for start in range(0, len(tiles), max(1, AT_ONCE // (r * c))):
        layout, row, column = tiles[start : start + max(1, AT_ONCE // (r * c))].T[:, :, None, None]
        i, j = row * r + np.arange(r)[:, None], column * c + np.arange(c)
        inside = (i < queries) & (j < keys)
        asked = (layout // heads, layout % heads, np.minimum(i, queries - 1))
        kept = np.broadcast_to(rule(*asked, np.minimum(j, keys - 1)), inside.shape)
        require_bool("what rule returns", np.asarray(kept))
        kept = kept & inside
        some = kept.any(axis=(1, 2))
        part = some & (kept != inside).any(axis=(1, 2))
        held.append(some)
        partial.append(part)
        words.append(_packed(kept[part]))
    nothing = np.zeros(0, np.bool_)
    return np.concatenate([nothing, *held]), np.concatenate([nothing, *partial]), np.vstack(words)


def _pointers(layout: Array, line: Array, layouts: int, lines: int) -> Array:
    """Where each line of each layout starts in the list, (S, lines + 1)."""
    counts = np.bincount(layout * lines + line, minlength=layouts * lines)
    ends = np.cumsum(counts).reshape(layouts, lines)
    starts = np.concatenate([[0], ends[:-1, -1]])[:layouts] if lines else np.zeros(layouts)
    return np.concatenate([starts[:, None], ends], axis=1)


# ---- made into ----------------------------------------------------------------------------------


def listed(mask: BlockMask) -> Integer[Array, "T 3"]:
    """The tiles (s, I, J) in the order of the rows  (Eq. 10.2)"""
    counts = np.diff(mask.row_pointers, axis=1).ravel()
    line = np.repeat(np.arange(counts.size), counts)
    rows = max(mask.grid[0], 1)
    return np.stack([line // rows, line % rows, mask.columns.astype(np.int64)], axis=-1)


def pairs(mask: BlockMask, entry: int, rows: int, columns: int) -> Bool[Array, "n m"] | None:
    """Who may attend to whom in the first `rows` x `columns` of tile `entry`, in the order of the
    rows; None for a full tile  (Eq. 10.4)"""
    pattern = int(mask.pattern[entry])
    return None if pattern < 0 else _unpacked(mask.bits[pattern], mask.tile[1])[:rows, :columns]


def to_dense(mask: BlockMask) -> Bool[Array, "*L N M"]:
    """The keep-mask that a dense product would need  (Eq. 10.4)"""
    (r, c), (rows, columns) = mask.tile, mask.grid
    s, i, j = listed(mask).T
    held = np.ones((len(s), r, c), dtype=np.bool_)
    partial = mask.pattern >= 0
    held[partial] = _unpacked(mask.bits, c)[mask.pattern[partial]]
    keep = np.zeros((mask.layouts, rows, r, columns, c), dtype=np.bool_)
    keep[s, i, :, j, :] = held
    keep = keep.reshape(mask.layouts, rows * r, columns * c)[:, : mask.queries, : mask.keys]
    return keep.reshape(*mask.leading, mask.queries, mask.keys)


def layout_of(mask: BlockMask, leading: tuple[int, ...]) -> Integer[Array, "..."]:
    """The layout s that each batch row and head of (*B, H) reads.

    Raises
    ------
    ValueError
        If the layouts do not broadcast to that.
    """
    require_broadcastable("the leading axes of mask", mask.leading, leading)
    return np.broadcast_to(np.arange(mask.layouts).reshape(mask.leading), leading)


# ---- how much -----------------------------------------------------------------------------------


def tile_density(mask: BlockMask) -> float:
    """T / (S R C): the share of the work that is done  (Eq. 10.5)"""
    return len(mask.columns) / max(mask.layouts * math.prod(mask.grid), 1)


def pair_density(mask: BlockMask) -> float:
    """Σ keep / (S N M), never more than the tiles' share weighted by their sizes  (Eq. 10.6)"""
    _, i, j = listed(mask).T
    sizes = np.stack(_cropped(mask, i, j), axis=-1).prod(axis=-1)
    inside = np.bitwise_count(mask.bits).sum(axis=(1, 2), dtype=np.int64)
    partial = mask.pattern >= 0
    kept = sizes[~partial].sum() + inside[mask.pattern[partial]].sum()
    return float(kept) / max(mask.layouts * mask.queries * mask.keys, 1)


def memory(mask: BlockMask) -> int:
    """Bytes: 4 (S (R + 1) + S (C + 1) + 4 T + P r ⌈c/32⌉), against S N M of a dense mask  (Eq.
    10.7)"""
    return sum(getattr(mask, name).nbytes for name in ARRAYS)


# ---- bits ---------------------------------------------------------------------------------------


def _packed(kept: Bool[Array, "T r c"]) -> UInt32[Array, "T r words"]:
    """Bit x & 31 of word x >> 5 is column x."""
    count, r, c = kept.shape
    room = np.zeros((count, r, -(-c // 32) * 32), dtype=np.bool_)
    room[..., :c] = kept
    return np.packbits(room, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def _unpacked(bits: UInt32[Array, "*P r words"], columns: int) -> Bool[Array, "*P r c"]:
    """The first `columns` columns again."""
    as_bytes = np.ascontiguousarray(bits).astype("<u4").view(np.uint8)
    return np.unpackbits(as_bytes, axis=-1, bitorder="little", count=columns).astype(np.bool_)


def _cropped(mask: BlockMask, i: Array, j: Array) -> tuple[Array, Array]:
    """Rows and columns of tiles (I, J), fewer at the ragged ends  (Eq. 10.1)"""
    (r, c) = mask.tile
    return np.minimum(r, mask.queries - i * r), np.minimum(c, mask.keys - j * c)


# ---- what may be wrong --------------------------------------------------------------------------


def _pair(tile: int | tuple[int, int]) -> tuple[int, int]:
    both = tuple(tile) if isinstance(tile, tuple | list) else (tile, tile)
    if len(both) != 2:
        raise ValueError(f"tile must be one or two whole numbers, got {tile}")
    return both


def _require_sizes(queries: int, keys: int, tile: tuple[int, int], leading: tuple) -> None:
    axes = {f"leading[{axis}]": n for axis, n in enumerate(leading)}
    require_whole(0, queries=queries, keys=keys, **axes)
    require_whole(1, **{"tile rows": tile[0], "tile columns": tile[1]})
    if max(tile) > LARGEST_TILE:
        raise ValueError(f"tile must be at most {LARGEST_TILE} on a side, got {tile}")


def _text(tile: Array) -> str:
    return "(layout {}, row {}, column {})".format(*tile.tolist())


def _require_pointers(name: str, pointers: Array, entries: int) -> None:
    """Each line ends where the next one starts, over all layouts."""
    flat = pointers.ravel()
    joined = len(pointers) < 2 or np.array_equal(pointers[1:, 0], pointers[:-1, -1])
    whole = flat.size == 0 or (flat[0] == 0 and flat[-1] == entries)
    if not (joined and whole and (np.diff(flat) >= 0).all() and (flat.size or not entries)):
        raise ValueError(f"{name} must rise from 0 to {entries} (tiles listed), without a gap")


def _require_indices(name: str, x: Array, low: int, end: int) -> None:
    bad = (x < low) | (x >= end)
    if bad.any():
        raise ValueError(f"{name} must lie in [{low}, {end}), got {x[bad][0]}")


def _require_ascending(tiles: Array) -> None:
    s, i, j = tiles.T
    same_line = (s[1:] == s[:-1]) & (i[1:] == i[:-1])
    for what, bad in (("twice", j[1:] == j[:-1]), ("out of order", j[1:] < j[:-1])):
        if (same_line & bad).any():
            raise ValueError(f"columns lists {_text(tiles[1:][same_line & bad][0])} {what}")


def _require_transposed(mask: BlockMask, tiles: Array) -> None:
    s, i, j = tiles.T
    order = np.lexsort((i, j, s))
    pointers = _pointers(s, j, mask.layouts, mask.grid[1])
    for name, expected in (("column_pointers", pointers), ("rows", i[order]), ("order", order)):
        if not np.array_equal(getattr(mask, name), expected):
            raise ValueError(
                f"{name} does not list by columns the tiles that columns lists by rows"
            )


def _require_canonical(mask: BlockMask, tiles: Array) -> None:
    """A partial tile holds something, not everything, and nothing beyond the ragged ends."""
    partial = mask.pattern >= 0
    if not partial.any():
        return
    _, i, j = tiles[partial].T
    rows, columns = _cropped(mask, i, j)
    which, kept = mask.pattern[partial], _unpacked(mask.bits, mask.bits.shape[2] * 32)
    lowest = (kept.any(axis=2) * np.arange(1, kept.shape[1] + 1)).max(axis=1)
    rightmost = (kept.any(axis=1) * np.arange(1, kept.shape[2] + 1)).max(axis=1)
    count = kept.sum(axis=(1, 2))
    for what, bad in (
        ("allows nothing: leave it out", count[which] == 0),
        ("has bits beyond the end", (lowest[which] > rows) | (rightmost[which] > columns)),
        ("allows everything: its pattern must be -1", count[which] == rows * columns),
    ):
        if bad.any():
            raise ValueError(f"bits: the partial tile {_text(tiles[partial][bad][0])} {what}")
