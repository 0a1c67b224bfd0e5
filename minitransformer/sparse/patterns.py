"""Sparse patterns: fixed rules, and random tiles from the mask law, as lists of tiles.

All but Longformer's window are patterns of tiles: with tiles of 1 x 1 they are the published ones,
pair by pair. Where the diagonal i + o = j crosses row I of the tiles, and how far tile J is before
it (o is the offset of `attention.masks`):

    lo_I = ⌊(Ir + o) / c⌋,   hi_I = ⌊(min(Ir + r, N) - 1 + o) / c⌋  (Eq. 10.8)
    d(I, J) = lo_I - J where J < lo_I,   0 where lo_I <= J <= hi_I,   hi_I - J beyond  (Eq. 10.9)

A causal pattern lists no tile with d < 0, and in the tiles of the diagonal its bits are causal.
Random tiles are drawn without replacement among those that the rest of the pattern leaves: a tile
that is global cannot be drawn, and none can be counted twice. All of it costs as much as there are
tiles listed; nothing of R x C is made.

arXiv:2004.05150, arXiv:2007.14062, arXiv:1904.10509, arXiv:1907.00235.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from minitransformer.arrays import Array, require_whole
from minitransformer.attention.masks import global_tokens, offset
from minitransformer.philox import Draw, Stream, key_of, random_bits
from minitransformer.sparse.block_mask import BlockMask, Rule, from_tiles

Lines = tuple[Array, Array]  # rows and columns of tiles, which broadcast together


def longformer(
    queries: int,
    keys: int,
    *,
    window: int,
    dilation: int | Sequence[int] = 1,
    tokens: Sequence[int] = (),
    causal: bool = False,
    tile: int | tuple[int, int],
    align: str,
) -> BlockMask:
    """Near keys, with gaps, and tokens that see and are seen by all, x = i + o - j:

        keep = |x| <= window · δ_h and x mod δ_h = 0,   or i + o ∈ tokens,   or j ∈ tokens;
               and x >= 0 if causal  (Eq. 10.10)

    `window` counts keys on either side, `tokens` are key positions; both to the pair. A list of
    dilations is one for each head. The authors read global rows through projections of their own;
    that is a matter of the layer, not of the mask.

    Raises
    ------
    TypeError, ValueError
        Here and below: if a size is no whole number or out of range, or `align` is neither of the
        two.
    """
    o, (r, c) = offset(queries, keys, align), _tile(tile)
    require_whole(0, window=window)
    gaps = np.asarray(dilation)
    if gaps.ndim > 1:
        raise ValueError(
            f"dilation must be one number or one for each head, got shape {gaps.shape}"
        )
    for gap in gaps.ravel().tolist():
        require_whole(1, dilation=gap)
    chosen = global_tokens(queries, keys, tokens=tokens, align=align)

    def rule(b: Array, h: Array, i: Array, j: Array) -> Array:
        x = np.abs(i + o - j)
        near = (x <= window * gaps.ravel()[h]) & (x % gaps.ravel()[h] == 0)
        kept = near | chosen(i, j)
        return kept & (j <= i + o) if causal else kept

    rows = np.arange(-(-queries // r))[:, None]
    first, last = rows * r + o, np.minimum(rows * r + r, queries) - 1 + o
    reach = window * int(gaps.max(initial=1))
    width = -(-(r + 2 * reach) // c) + 1
    near = (first - reach) // c + np.arange(width)
    seen = np.unique(np.asarray(tokens, dtype=np.int64) // c)
    seeing = rows[np.isin(rows, (np.asarray(tokens, dtype=np.int64) - o) // r).ravel()]
    near = np.where(near <= (last + reach) // c, near, -1)
    parts = [(rows, near), (rows, seen), (seeing, np.arange(-(-keys // c)))]
    return _made(parts, queries, keys, (r, c), gaps.shape, rule)


def bigbird(
    queries: int,
    keys: int,
    *,
    draw: Draw,
    layer: int = 0,
    window: int = 1,
    ends: int = 1,
    random: int = 3,
    causal: bool = False,
    leading: tuple[int, ...] = (),
    tile: int | tuple[int, int],
    align: str,
) -> BlockMask:
    """Window, global and random tiles:

        listed(I, J) = |d| <= window,   or J ∈ G,   or lo_I … hi_I meets G,   or J ∈ F_I;
                       and d >= 0 if causal;   G = the first and the last `ends` tiles  (Eq. 10.11)

    F_I are `random` tiles of every row that is not global, or all that are left. With u_t the word
    at (s, I, t) of the stream PATTERN and n candidates in ascending order, k = min(random, n) of
    them are chosen in turn (Floyd, CACM 30 (1987)):

        x_t = ⌊u_t (n - k + t + 1) / 2³²⌋,   or n - k + t if x_t is chosen already  (Eq. 10.12)

    The authors draw from the first tiles alone, may draw a global one and then count it twice, and
    draw once for a model: a draw with the same seed and step gives that. `leading` (*B, H) gives
    each batch row and head its own.
    """
    o, (r, c) = offset(queries, keys, align), _tile(tile)
    require_whole(0, window=window, ends=ends, random=random)
    rows, columns = np.arange(-(-queries // r))[:, None], -(-keys // c)
    low, high = diagonal_tiles(queries, keys, tile=(r, c), align=align)
    low, high = low[:, None], high[:, None]
    at_ends = np.unique(np.concatenate([np.arange(ends), columns - 1 - np.arange(ends)]))
    at_ends = at_ends[(at_ends >= 0) & (at_ends < columns)]
    is_global = ((at_ends >= low) & (at_ends <= high)).any(axis=1)
    kept = np.concatenate(
        [
            _between(low - window, high + window),
            np.broadcast_to(at_ends, (len(rows), len(at_ends))),
        ],
        axis=1,
    )
    end = _end(high, columns, causal)
    wanted = np.where(is_global, 0, random)
    drawn = _random_tiles(kept, end, wanted, draw, layer, leading)
    every = np.arange(columns)
    parts = [
        (rows, np.where(kept < end, kept, -1)),
        (rows[is_global], np.where(every < end[is_global], every, -1)),
    ]
    return _made(parts, queries, keys, (r, c), leading, _past(o) if causal else None, drawn)


def random_log(
    queries: int,
    keys: int,
    *,
    draw: Draw,
    layer: int = 0,
    random: int | None = None,
    causal: bool = False,
    leading: tuple[int, ...] = (),
    tile: int | tuple[int, int],
    align: str,
) -> BlockMask:
    """The diagonal's tiles, and `random` others drawn as in Eq. 10.12; ⌈log₂ M⌉ by default:

        listed(I, J) = d = 0,   or J ∈ F_I,   |F_I| = min(⌈log₂ M⌉, all that are left)  (Eq. 10.13)

    O(M log M) pairs for a tile of any fixed size: what "random attention in n log n" can mean.
    """
    o, (r, c) = offset(queries, keys, align), _tile(tile)
    count = max(keys - 1, 0).bit_length() if random is None else random
    require_whole(0, random=count)
    rows, columns = np.arange(-(-queries // r))[:, None], -(-keys // c)
    low, high = (x[:, None] for x in diagonal_tiles(queries, keys, tile=(r, c), align=align))
    kept, end = _between(low, high), _end(high, columns, causal)
    wanted = np.full(len(rows), count)
    drawn = _random_tiles(kept, end, wanted, draw, layer, leading)
    rule = _past(o) if causal else None
    return _made([(rows, kept)], queries, keys, (r, c), leading, rule, drawn)


# ---- without chance, causal ----------------------------------------------------------------------


def strided(
    queries: int,
    keys: int,
    *,
    stride: int,
    part: str = "both",
    tile: int | tuple[int, int],
    align: str,
) -> BlockMask:
    """0 <= d < stride for "local", d >= 0 and d mod stride = 0 for "stride", "both": either  (Eq.
    10.14)

    The Sparse Transformer's, O(n √n) for a stride of about √R; causal.
    """
    require_whole(1, stride=stride)
    _require_part(part, ("local", "stride", "both"))
    rows, low, high, columns = _lines(queries, keys, tile, align)
    local = _between(low - (stride - 1), high)
    steps = np.arange(max(columns, int(low.max(initial=0))) // stride + 1)
    far = np.concatenate([_between(low, high), low - stride * steps], axis=1)
    parts = {"local": [(rows, local)], "stride": [(rows, far)]}
    parts["both"] = parts["local"] + parts["stride"]
    o = offset(queries, keys, align)
    return _made(parts[part], queries, keys, _tile(tile), (), _past(o))


def fixed(
    queries: int,
    keys: int,
    *,
    block: int,
    summary: int,
    part: str = "both",
    tile: int | tuple[int, int],
    align: str,
) -> BlockMask:
    """d >= 0 and ⌊J / block⌋ >= ⌊lo_I / block⌋ for "block", d >= 0 and J mod block >= block -
    summary for "summary", "both": either  (Eq. 10.15)

    The last `summary` tiles of each block of tiles speak for it to all later ones; causal.
    """
    require_whole(1, block=block, summary=summary)
    _require_part(part, ("block", "summary", "both"))
    if summary > block:
        raise ValueError(f"summary is {summary}, more than block = {block}")
    rows, low, high, columns = _lines(queries, keys, tile, align)
    every = np.arange(columns)
    spokesmen = every[every % block >= block - summary]
    parts = {
        "block": [(rows, _between(low // block * block, high))],
        "summary": [(rows, np.where(spokesmen <= high, spokesmen, -1))],
    }
    parts["both"] = parts["block"] + parts["summary"]
    o = offset(queries, keys, align)
    return _made(parts[part], queries, keys, _tile(tile), (), _past(o))


def log_sparse(queries: int, keys: int, *, tile: int | tuple[int, int], align: str) -> BlockMask:
    """d = 0, or d = 2^k for k = 0, 1, 2 …  (Eq. 10.16)

    ⌊log₂ I⌋ + 2 tiles in row I > 0; the largest number of ones in a binary numeral below R is how
    many layers it takes to reach everything before. Causal.
    """
    rows, low, high, columns = _lines(queries, keys, tile, align)
    powers = 2 ** np.arange(max(columns, int(low.max(initial=0))).bit_length())
    parts = [(rows, _between(low, high)), (rows, low - powers)]
    return _made(parts, queries, keys, _tile(tile), (), _past(offset(queries, keys, align)))


# ---- where the diagonal is -----------------------------------------------------------------------


def diagonal_tiles(
    queries: int, keys: int, *, tile: int | tuple[int, int], align: str
) -> tuple[Integer[Array, "R"], Integer[Array, "R"]]:
    """lo_I and hi_I of each row of tiles  (Eq. 10.8)

    They may lie outside the grid: with more queries than keys, the first rows stand before it.
    """
    o, (r, c) = offset(queries, keys, align), _tile(tile)
    first = np.arange(-(-queries // r)) * r
    return (first + o) // c, (np.minimum(first + r, queries) - 1 + o) // c


def _lines(queries: int, keys: int, tile: int | tuple[int, int], align: str):
    """The rows of tiles, their lo and hi, each (R, 1), and the number of columns."""
    low, high = diagonal_tiles(queries, keys, tile=tile, align=align)
    columns = -(-keys // _tile(tile)[1])
    return np.arange(len(low))[:, None], low[:, None], high[:, None], columns


def _between(first: Array, last: Array) -> Array:
    """first … last of each row, (R, K); -1, which is no tile, where a row has fewer."""
    each = first + np.arange(int((last - first).max(initial=-1)) + 1)
    return np.where(each <= last, each, -1)


def _end(high: Array, columns: int, causal: bool) -> Array:
    """One past the last column that a row may list, (R, 1)."""
    return np.clip(high + 1, 0, columns) if causal else np.full_like(high, columns)


# ---- chance --------------------------------------------------------------------------------------


def _random_tiles(
    kept: Array, end: Array, wanted: Array, draw: Draw, layer: int, leading: tuple[int, ...]
) -> Array:
    """The tiles (s, I, J) that are drawn, T in all  (Eq. 10.12)

    `kept` (R, K) are the columns that a row has without them, in any order and more than once or
    outside 0 … `end` (R, 1) if need be.
    """
    key_of(draw, Stream.PATTERN, layer)  # refuses a bad draw, whether or not there is a tile
    # pass 1: what is kept, once, ascending; what is not in 0 … end comes last
    nowhere = np.int64(np.iinfo(np.int32).max)
    kept = np.sort(np.where((kept >= 0) & (kept < end), kept, nowhere), axis=1)
    kept[:, 1:][kept[:, 1:] == kept[:, :-1]] = nowhere
    kept.sort(axis=1)
    candidates = end[:, 0] - (kept < nowhere).sum(axis=1)
    k = np.minimum(wanted, candidates)
    # pass 2: k of the candidates, by their number
    layouts = _count(leading)
    s, row = np.arange(layouts)[:, None, None], np.arange(len(kept))[:, None]
    most = int(k.max(initial=0))
    bits = random_bits(draw, Stream.PATTERN, layer, s, row, np.arange(most)).astype(np.uint64)
    chosen = np.full((layouts, len(kept), most), -1)
    for t in range(most):
        last = np.maximum(candidates - k + t, 0)
        x = ((bits[..., t] * (last + 1).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
        again = (chosen[..., :t] == x[..., None]).any(axis=-1)
        chosen[..., t] = np.where(t < k, np.where(again, last, x), -1)
    # pass 3: from numbers to columns: step over what is kept
    valid = chosen >= 0
    for column in kept.T:
        chosen += chosen >= column[:, None]
    s, row = (np.broadcast_to(x, chosen.shape) for x in (s, row))
    return np.stack([s[valid], row[valid], chosen[valid]], axis=-1)


# ---- from lines of tiles to a mask ---------------------------------------------------------------


def _past(o: int) -> Rule:
    return lambda b, h, i, j: j <= i + o


def _made(
    parts: Sequence[Lines],
    queries: int,
    keys: int,
    tile: tuple[int, int],
    leading: tuple[int, ...],
    rule: Rule | None,
    drawn: Array | None = None,
) -> BlockMask:
    """The union of `parts`, in every layout, and of what each has `drawn` for itself."""
    rows, columns = -(-queries // tile[0]), -(-keys // tile[1])
    layouts = _count(leading)
    numbers = [np.zeros(0, dtype=np.int64)]
    for part in parts:
        i, j = np.broadcast_arrays(*part)
        inside = (j >= 0) & (j < columns)
        numbers.append(i[inside] * columns + j[inside])
    shared = np.unique(np.concatenate(numbers))
    whole = (np.arange(layouts)[:, None] * rows * columns + shared).ravel()
    tiles = np.stack(np.unravel_index(whole, (layouts, rows, columns)), axis=-1)
    if drawn is not None:
        tiles = np.concatenate([tiles, drawn])
    return from_tiles(tiles, queries=queries, keys=keys, tile=tile, leading=leading, rule=rule)


def _count(leading: tuple[int, ...]) -> int:
    """How many layouts `leading` asks for."""
    require_whole(0, **{f"leading[{axis}]": n for axis, n in enumerate(leading)})
    return math.prod(leading)


def _tile(tile: int | tuple[int, int]) -> tuple[int, int]:
    both = tuple(tile) if isinstance(tile, tuple | list) else (tile, tile)
    if len(both) != 2:
        raise ValueError(f"tile must be one or two whole numbers, got {tile}")
    require_whole(1, **{"tile rows": both[0], "tile columns": both[1]})
    return both


def _require_part(part: str, choices: Sequence[str]) -> None:
    if part not in choices:
        raise ValueError(f"part must be one of {', '.join(choices)}, got {part!r}")
