"""Chapter 05: Block-wise randomness. See README.md beside this file."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Integer, UInt32

from minitransformer.arrays import (
    Array,
    require_bool,
    require_broadcastable,
    require_in_range,
    require_integers,
    require_whole,
)
from minitransformer.philox import Draw, Stream, random_bits, uniform

# ==== stochastic.samplers =========================================================================


KINDS = ("element", "column", "fixed_k", "multinomial", "gumbel", "block", "head")


COUNTED = ("fixed_k", "multinomial", "gumbel")  # these draw a number k of keys for each query


PROPOSALS = ("uniform", "distance", "scores")


COMPENSATIONS = ("renormalise", "inverted", "stop_gradient")


def _is_count(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


@dataclass(frozen=True)
class RandomMask:
    """What to drop, in one value.

    `rate` is the probability of dropping. The kinds that draw a number of keys take `k`, or else
    k = max(1, round((1 - rate) · n)). Protection is of places: the diagonal (query i and key i + o
    are the same token) and whole columns (absolute key positions). For blocks, every tile that
    holds a protected pair is kept; a dropped head is silent altogether, and nothing protects it.
    """

    kind: str
    rate: float = 0.5
    tile: int | tuple[int, int] = 16
    k: int | None = None
    proposal: str = "uniform"
    protect_diagonal: bool = True
    protect_columns: tuple[int, ...] = ()
    min_keep: int = 0
    compensation: str = "renormalise"

    def __post_init__(self) -> None:
        for name, valid in (
            ("kind", KINDS),
            ("proposal", PROPOSALS),
            ("compensation", COMPENSATIONS),
            ("min_keep", (0, 1)),
        ):
            if getattr(self, name) not in valid:
                listed = ", ".join(map(str, valid))
                raise ValueError(f"{name} must be one of {listed}, got {getattr(self, name)!r}")
        require_in_range("rate", self.rate, 0.0, 1.0)
        if len(self.tiles) != 2 or not all(_is_count(n) and n >= 1 for n in self.tiles):
            raise ValueError(f"tile must be one or two whole numbers >= 1, got {self.tile}")
        if self.k is not None and self.kind not in COUNTED:
            raise ValueError(f"k is for {', '.join(COUNTED)}, not for kind={self.kind!r}: use rate")
        if self.k is not None and not (_is_count(self.k) and self.k >= 1):
            raise ValueError(f"k must be a whole number >= 1, got {self.k}")
        if self.proposal != "uniform" and self.kind not in ("multinomial", "gumbel"):
            raise ValueError(
                f"proposal={self.proposal!r} is for multinomial and gumbel, not {self.kind!r}"
            )
        if not all(_is_count(j) and j >= 0 for j in self.protect_columns):
            raise ValueError(
                f"protect_columns must be key positions >= 0, got {self.protect_columns}"
            )
        if self.min_keep and self.kind != "element":
            raise ValueError(
                f"min_keep=1 draws rows again and is for kind='element', not {self.kind!r}: "
                "protect the diagonal instead"
            )
        if self.kind == "gumbel" and self.compensation == "inverted":
            raise ValueError(
                "kind='gumbel' has no closed-form inclusion probability, so it cannot be "
                "inverted: use compensation='renormalise', or kind='multinomial'"
            )

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.tile if isinstance(self.tile, tuple) else (self.tile, self.tile)


class _Site(NamedTuple):
    """Where a mask is drawn, with all leading axes but the heads in one: (B, H, N, M)."""

    mask: RandomMask
    allowed: Bool[Array, "B H N M"]
    protected: Bool[Array, "..."]
    candidates: Bool[Array, "B H N M"]
    thresholds: Array  # T of each head, (H, 1, 1)
    heads: Int[Array, "B H"]
    rows: Int[Array, "N"]
    columns: Int[Array, "M"]
    distance: Int[Array, "N M"]  # i + o - j
    scores: Array | None

    @property
    def dropped(self) -> Array:
        """p as the threshold rounds it, (H, 1, 1)."""
        return self.thresholds / 2.0**32

    @property
    def n(self) -> Array:
        """Candidates of each row, (B, H, N, 1)."""
        return self.candidates.sum(axis=-1, keepdims=True)

    @property
    def k(self) -> Array:
        """Keys to draw for each row, (B, H, N, 1): none where there is nothing to draw from."""
        wanted = self.mask.k or np.maximum(1, np.rint((1 - self.dropped) * self.n))
        return np.where(self.n == 0, 0, wanted).astype(np.int64)


class _Source(NamedTuple):
    """Where the bits come from."""

    draw: Draw
    layer: int
    fast: bool

    def bits(self, stream: int, heads: Array, rows: Array, columns: Array) -> UInt32[Array, "..."]:
        """Words on the grid (B, H, rows, columns) of three index arrays."""
        if self.fast:
            from minitransformer import fast

            grid = fast.philox_bits(self.draw, stream, self.layer, heads.ravel(), rows, columns)
            return grid.reshape(*heads.shape, rows.size, columns.size)
        return random_bits(
            self.draw, stream, self.layer, heads[..., None, None], rows[:, None], columns
        )


def _block(site: _Site, source: _Source) -> Array:
    """One word for each tile, cropped where the mask ends  (Eq. 5.1)"""
    # 05.1: your lines


# ==== sparse.block_mask ===========================================================================


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
    # 05.3: your lines


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
    # 05.3: your lines


def _pointers(layout: Array, line: Array, layouts: int, lines: int) -> Array:
    """Where each line of each layout starts in the list, (S, lines + 1)."""
    # 05.4: your lines


# ---- made into ----------------------------------------------------------------------------------


def listed(mask: BlockMask) -> Integer[Array, "T 3"]:
    """The tiles (s, I, J) in the order of the rows  (Eq. 10.2)"""
    # 05.4: your lines


def pairs(mask: BlockMask, entry: int, rows: int, columns: int) -> Bool[Array, "n m"] | None:
    """Who may attend to whom in the first `rows` x `columns` of tile `entry`, in the order of the
    rows; None for a full tile  (Eq. 10.4)"""
    # 05.5: your lines


def to_dense(mask: BlockMask) -> Bool[Array, "*L N M"]:
    """The keep-mask that a dense product would need  (Eq. 10.4)"""
    # 05.5: your lines


def layout_of(mask: BlockMask, leading: tuple[int, ...]) -> Integer[Array, "..."]:
    """The layout s that each batch row and head of (*B, H) reads.

    Raises
    ------
    ValueError
        If the layouts do not broadcast to that.
    """
    # 05.5: your lines


# ---- how much -----------------------------------------------------------------------------------


def tile_density(mask: BlockMask) -> float:
    """T / (S R C): the share of the work that is done  (Eq. 10.5)"""
    # 05.6: your lines


def pair_density(mask: BlockMask) -> float:
    """Σ keep / (S N M), never more than the tiles' share weighted by their sizes  (Eq. 10.6)"""
    # 05.6: your lines


def memory(mask: BlockMask) -> int:
    """Bytes: 4 (S (R + 1) + S (C + 1) + 4 T + P r ⌈c/32⌉), against S N M of a dense mask  (Eq.
    10.7)"""
    # 05.6: your lines


# ---- bits ---------------------------------------------------------------------------------------


def _packed(kept: Bool[Array, "T r c"]) -> UInt32[Array, "T r words"]:
    """Bit x & 31 of word x >> 5 is column x."""
    # 05.2: your lines


def _unpacked(bits: UInt32[Array, "*P r words"], columns: int) -> Bool[Array, "*P r c"]:
    """The first `columns` columns again."""
    # 05.2: your lines


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
