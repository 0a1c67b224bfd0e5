"""What a list of tiles must do: say of every pair what the dense mask says, by rows and by columns
alike."""

import math
from dataclasses import fields

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.checks.gradients import assert_close
from minitransformer.checks.strategies import seeds
from minitransformer.checks.suite import Suite

suite = Suite("sparse.block_mask")

DENSE, RULE, TILES, BACK = "from_dense", "from_rule", "from_tiles", "to_dense"

# leading axes, N, M; tiles of several sizes divide none of them, or all
SHAPES = (
    ((2, 3), 19, 37),
    ((), 16, 16),
    ((3,), 9, 8),
    ((1, 2), 1, 45),
    ((2, 1), 33, 1),
    ((), 0, 5),
    ((2,), 5, 0),
    ((0, 2), 4, 4),
    ((), 1, 1),
)
shapes = st.sampled_from(SHAPES)
sizes = st.sampled_from([8, (8, 16), (16, 8), (4, 5), 1, (3, 33), (40, 7), 128])
wide = st.sampled_from([(3, 33), 128, (16, 64), 8])  # more than one word in a row
kinds = st.sampled_from(["tiles", "random", "causal", "full", "empty"])
mixed = st.sampled_from(["random", "tiles", "causal"])


def of_pair(tile) -> tuple[int, int]:
    return tile if isinstance(tile, tuple) else (tile, tile)


def keep_of(kind: str, shape, tile, seed: int) -> Array:
    """A keep-mask (*L, N, M); "tiles" has full, partial and missing tiles."""
    leading, n, m = shape
    r, c = of_pair(tile)
    rng = np.random.default_rng([seed, 10])
    whole = (*leading, n, m)
    if kind in ("full", "empty"):
        return np.full(whole, kind == "full")
    if kind == "causal":
        return np.ascontiguousarray(np.broadcast_to(np.tri(n, m, m - n, dtype=np.bool_), whole))
    if kind == "random":
        return rng.random(whole) < rng.choice([0.05, 0.5, 0.97])
    share = rng.choice([0.0, 0.3, 1.0], size=(*leading, -(-n // r), -(-m // c)))
    share = np.repeat(np.repeat(share, r, axis=-2), c, axis=-1)[..., :n, :m]
    return rng.random(whole) < share


def grid_of(keep: Array, tile):
    """Each tile as loops: (s, I, J) and what is inside, cut at the ragged ends."""
    r, c = of_pair(tile)
    *leading, n, m = keep.shape
    flat = keep.reshape(math.prod(leading), n, m)
    for s, i, j in np.ndindex(len(flat), -(-n // r), -(-m // c)):
        yield (s, i, j), flat[s, i * r : i * r + r, j * c : j * c + c]


def bit(mask, entry: int, x: int, y: int) -> bool:
    """One pair of one tile, read as a kernel reads it."""
    if mask.pattern[entry] < 0:
        return True
    return bool(mask.bits[mask.pattern[entry], x, y >> 5] >> np.uint32(y & 31) & 1)


# ---- there and back ------------------------------------------------------------------------------


@suite.property(DENSE, BACK, shape=shapes, tile=sizes, kind=kinds, seed=seeds)
def there_and_back_is_the_same_mask(target, shape, tile, kind, seed):
    """Eq. 10.1 and Eq. 10.4: whatever the tile size, ragged or not, shared or by batch and head,
    every pair is what it was.

    https://github.com/pytorch/pytorch/issues/141126
    """
    keep = keep_of(kind, shape, tile, seed)
    got = target.to_dense(target.from_dense(keep, tile=tile))
    assert got.dtype == np.bool_ and got.shape == keep.shape, f"got {got.dtype} {got.shape}"
    assert np.array_equal(got, keep), f"{(got != keep).sum()} of {keep.size} pairs differ"


@suite.property(DENSE, shape=shapes, tile=sizes, kind=kinds, seed=seeds)
def rows_list_the_tiles_that_hold_something(target, shape, tile, kind, seed):
    """Eq. 10.1 and Eq. 10.2: a tile is listed if and only if it allows a pair, ascending in its
    row."""
    keep = keep_of(kind, shape, tile, seed)
    mask = target.from_dense(keep, tile=tile)
    expected = [at for at, inside in grid_of(keep, tile) if inside.any()]
    got = []
    for s, row in np.ndindex(mask.layouts, mask.grid[0]):
        start, end = mask.row_pointers[s, row : row + 2]
        got += [(s, row, int(j)) for j in mask.columns[start:end]]
    assert got == expected, f"rows list {len(got)} tiles, expected {len(expected)}"


@suite.property(DENSE, shape=shapes, tile=sizes, kind=kinds, seed=seeds)
def columns_list_the_same_tiles(target, shape, tile, kind, seed):
    """Eq. 10.3: ascending in its column, and `order` leads to the pattern of each."""
    keep = keep_of(kind, shape, tile, seed)
    mask = target.from_dense(keep, tile=tile)
    by_rows = [at for at, inside in grid_of(keep, tile) if inside.any()]
    expected = sorted(by_rows, key=lambda at: (at[0], at[2], at[1]))
    got = []
    for s, column in np.ndindex(mask.layouts, mask.grid[1]):
        start, end = mask.column_pointers[s, column : column + 2]
        got += [(s, int(i), column) for i in mask.rows[start:end]]
    assert got == expected, "columns list other tiles than rows, or in another order"
    assert [by_rows[entry] for entry in mask.order] == expected, "order leads to other tiles"


@suite.property(DENSE, shape=shapes, tile=sizes, kind=kinds, seed=seeds)
def partial_tiles_alone_have_bits(target, shape, tile, kind, seed):
    """Eq. 10.4 word by word: a tile that allows all it has, cut at the ends, is full; in the others
    every bit is a pair, and beyond the ends every bit is 0."""
    keep = keep_of(kind, shape, tile, seed)
    mask = target.from_dense(keep, tile=tile)
    r, c = of_pair(tile)
    inside = [x for _, x in grid_of(keep, tile) if x.any()]
    assert len(inside) == len(mask.pattern)
    assert mask.bits.dtype == np.uint32 and mask.bits.shape[1:] == (r, -(-c // 32))
    for entry, held in enumerate(inside[:12]):
        assert (mask.pattern[entry] < 0) == held.all(), "full and partial are confused"
        if held.all():
            continue
        n, m = held.shape
        got = [[bit(mask, entry, x, y) for y in range(m)] for x in range(n)]
        assert np.array_equal(got, held), f"the bits of tile {entry} are not its pairs"
        total = np.bitwise_count(mask.bits[mask.pattern[entry]]).sum()
        assert total == held.sum(), "bits beyond the end"


@suite.property(DENSE, "pairs", shape=shapes, tile=wide, kind=mixed, seed=seeds)
def pairs_of_a_tile_are_its_slice(target, shape, tile, kind, seed):
    """Eq. 10.4: what a kernel in NumPy asks of one tile; None where there is nothing to mask."""
    keep = keep_of(kind, shape, tile, seed)
    mask = target.from_dense(keep, tile=tile)
    inside = [x for _, x in grid_of(keep, tile) if x.any()]
    for entry, held in enumerate(inside):
        got = target.pairs(mask, entry, *held.shape)
        assert (got is None) == held.all()
        assert got is None or np.array_equal(got, held), f"tile {entry} is not the slice"


@suite.property(DENSE, "listed", shape=shapes, tile=sizes, kind=kinds, seed=seeds)
def listed_tiles_name_layout_row_and_column(target, shape, tile, kind, seed):
    """(s, I, J) of each entry of Eq. 10.2, in that order."""
    keep = keep_of(kind, shape, tile, seed)
    got = target.listed(target.from_dense(keep, tile=tile))
    expected = [at for at, inside in grid_of(keep, tile) if inside.any()]
    assert got.shape == (len(expected), 3) and [tuple(t) for t in got.tolist()] == expected


@suite.property(DENSE, tile=st.sampled_from([8, 16]), heads=st.sampled_from([1, 3]))
def equal_tiles_share_their_bits(target, tile, heads):
    """A causal mask has one kind of partial tile, however long the text and however many heads."""
    keep = np.tile(np.tri(4 * tile, dtype=np.bool_), (heads, 1, 1))
    mask = target.from_dense(keep, tile=tile)
    assert len(mask.bits) == 1, f"{len(mask.bits)} patterns are stored for one"
    assert (mask.pattern >= 0).sum() == 4 * heads, "the diagonal's tiles are partial"


# ---- from rules, from tiles ----------------------------------------------------------------------


@suite.property(RULE, BACK, shape=shapes, tile=sizes, seed=seeds)
def a_rule_is_asked_about_batch_head_row_and_column(target, shape, tile, seed):
    """Eq. 10.4 of rule(b, h, i, j), with absolute i and j inside the matrix, b and h inside
    `leading`; a rule that looks things up in arrays can rely on it."""
    leading, n, m = shape
    heads = leading[-1] if leading else 1
    batch = math.prod(leading[:-1])
    rng = np.random.default_rng([seed, 11])
    lengths, shares = rng.integers(0, m + 1, batch), rng.integers(1, 4, heads)

    def rule(b, h, i, j):
        for what, x, end in (("b", b, batch), ("h", h, heads), ("i", i, n), ("j", j, m)):
            assert ((x >= 0) & (x < end)).all(), f"asked about {what} outside [0, {end})"
        return (j < lengths[b]) & ((i + 2 * j) % (shares[h] + 1) != 0)

    got = target.to_dense(target.from_rule(rule, queries=n, keys=m, tile=tile, leading=leading))
    i, j = np.arange(n)[:, None], np.arange(m)
    b, h = np.arange(batch)[:, None, None, None], np.arange(heads)[:, None, None]
    expected = np.broadcast_to((j < lengths[b]) & ((i + 2 * j) % (shares[h] + 1) != 0),
        (batch, heads, n, m))  # fmt: skip
    assert np.array_equal(got, expected.reshape(*leading, n, m)), "another mask than the rule's"


def some_tiles(shape, tile, seed: int) -> tuple[Array, Array]:
    """A boolean grid (S, R, C) and its tiles in no order."""
    leading, n, m = shape
    r, c = of_pair(tile)
    rng = np.random.default_rng([seed, 12])
    grid = rng.random((math.prod(leading), -(-n // r), -(-m // c))) < 0.5
    return grid, rng.permutation(np.argwhere(grid))


@suite.property(TILES, BACK, shape=shapes, tile=sizes, seed=seeds)
def given_tiles_are_full(target, shape, tile, seed):
    """Eq. 10.4: the tiles as they are given, in any order, and no others; nothing has bits."""
    leading, n, m = shape
    r, c = of_pair(tile)
    grid, tiles = some_tiles(shape, tile, seed)
    mask = target.from_tiles(tiles, queries=n, keys=m, tile=tile, leading=leading)
    assert len(mask.columns) == len(tiles) and (mask.pattern == -1).all()
    expected = np.repeat(np.repeat(grid, r, axis=1), c, axis=2)[:, :n, :m]
    assert np.array_equal(target.to_dense(mask), expected.reshape(*leading, n, m))


@suite.property(TILES, BACK, shape=shapes, tile=sizes, seed=seeds)
def a_rule_inside_given_tiles_is_both(target, shape, tile, seed):
    """Eq. 10.4 with tiles and a rule: pairs in a given tile that the rule allows. A tile in which
    it allows nothing is not listed, one in which it allows everything is full."""
    leading, n, m = shape
    r, c = of_pair(tile)
    grid, tiles = some_tiles(shape, tile, seed)

    def causal(b, h, i, j):
        return j <= i + m - n

    mask = target.from_tiles(tiles, queries=n, keys=m, tile=tile, leading=leading, rule=causal)
    expected = np.repeat(np.repeat(grid, r, axis=1), c, axis=2)[:, :n, :m] & np.tri(
        n, m, m - n, dtype=np.bool_
    )
    assert np.array_equal(target.to_dense(mask), expected.reshape(*leading, n, m))
    held = [inside for _, inside in grid_of(expected, tile) if inside.any()]
    assert len(mask.columns) == len(held), "a tile that holds nothing is listed"
    assert (mask.pattern < 0).tolist() == [bool(x.all()) for x in held]


# ---- what it is and costs ------------------------------------------------------------------------


@suite.property(DENSE, "tile_density", "pair_density", shape=shapes, tile=sizes, kind=kinds,
    seed=seeds)  # fmt: skip
def densities_are_shares_of_tiles_and_of_pairs(target, shape, tile, kind, seed):
    """Eq. 10.5 counts tiles, which is the work; Eq. 10.6 counts pairs, which is not. Of nothing,
    the share is 0."""
    keep = keep_of(kind, shape, tile, seed)
    mask = target.from_dense(keep, tile=tile)
    tiles = [bool(inside.any()) for _, inside in grid_of(keep, tile)]
    work = np.float64(sum(tiles) / max(len(tiles), 1))
    assert_close(np.float64(target.tile_density(mask)), work, what="tile density")
    kept = np.float64(keep.sum() / max(keep.size, 1))
    assert_close(np.float64(target.pair_density(mask)), kept, what="pair density")


@suite.property(DENSE, "memory", shape=shapes, tile=sizes, kind=kinds, seed=seeds)
def memory_is_that_of_the_lists(target, shape, tile, kind, seed):
    """Eq. 10.7: two lists, one number a tile for the pattern and one for the order, and the
    bits."""
    keep = keep_of(kind, shape, tile, seed)
    mask = target.from_dense(keep, tile=tile)
    (rows, columns), s, t = mask.grid, mask.layouts, len(mask.columns)
    bits = mask.bits.shape[0] * of_pair(tile)[0] * math.ceil(of_pair(tile)[1] / 32)
    expected = 4 * (s * (rows + 1) + s * (columns + 1) + 4 * t + bits)
    assert target.memory(mask) == expected, f"got {target.memory(mask)}, expected {expected}"


@suite.property(DENSE, "layout_of", shape=shapes, extra=st.sampled_from([(), (2,), (3, 1)]))
def every_batch_row_and_head_finds_its_layout(target, shape, extra):
    """Layouts broadcast like any array: axes of 1 are shared."""
    leading = shape[0]
    mask = target.from_dense(np.ones((*leading, 2, 3), np.bool_), tile=8)
    whole = (*extra, *(n if n != 1 else 4 for n in leading))
    got = target.layout_of(mask, whole)
    assert got.shape == whole
    # the layout of an index is the one that NumPy would read there
    numbers = np.arange(math.prod(leading)).reshape(leading)
    for at in np.ndindex(whole):
        own = at[len(extra) :]
        index = tuple(0 if n == 1 else x for x, n in zip(own, leading, strict=True))
        assert got[at] == numbers[index], f"{at} reads layout {got[at]}, not {numbers[index]}"


def _damaged(mask, seed: int) -> dict[str, dict]:
    """A correct mask with one thing wrong, by what is wrong."""
    given = {f.name: getattr(mask, f.name) for f in fields(mask)}

    def changed(name, at, value):
        x = given[name].copy()
        x[at] = value
        return {**given, name: x}

    swapped = given["columns"].copy()
    swapped[1:3] = swapped[2:0:-1]  # the tiles of row 1
    return {
        "a tile twice": changed("columns", 2, given["columns"][1]),
        "tiles out of order": {**given, "columns": swapped},
        "a column outside the grid": changed("columns", 2, mask.grid[1]),
        "a negative column": changed("columns", 0, -1),
        "rows that are not the transpose": changed("rows", 0, given["rows"][0] ^ 1),
        "an order that is not the transpose": changed("order", 0, given["order"][1]),
        "pointers that fall": changed("row_pointers", (0, 1), 1 << 20),
        "pointers that end early": changed("row_pointers", (-1, -1), 1),
        "column pointers of another layout": changed("column_pointers", (0, 1), 0),
        "a pattern that is not stored": changed("pattern", 0, len(mask.bits)),
        "a partial tile with nothing in it": changed("bits", 0, 0),
        "a partial tile with everything in it": changed("bits", 0, 255),
        "bits beyond the tile": changed("bits", (0, 0, 0), 1 << 9),
        "the wrong dtype": {**given, "columns": given["columns"].astype(np.int64)},
        "one pattern too few": {**given, "pattern": given["pattern"][:-1]},
        "more queries than tiles": {**given, "queries": 400},
        "a tile of size 0": {**given, "tile": (0, 8)},
        "a tile too large": {**given, "tile": (8, 256)},
    }


@suite.property(DENSE, "BlockMask", seed=seeds)
def damage_is_refused_on_construction(target, seed):
    """A list that is not what Eq. 10.1 - 10.4 say raises a ValueError when it is made, before any
    kernel follows it out of bounds."""
    keep = np.tile(np.tri(24, dtype=np.bool_), (2, 1, 1))
    mask = target.from_dense(keep, tile=8)
    target.BlockMask(**{f.name: getattr(mask, f.name) for f in fields(mask)})
    for what, given in _damaged(mask, seed).items():
        try:
            target.BlockMask(**given)
        except ValueError:
            continue
        raise AssertionError(f"{what} was accepted")


@suite.property(DENSE, TILES, BACK, shape=shapes, tile=sizes, seed=seeds)
def arguments_are_left_alone(target, shape, tile, seed):
    """No array of the caller is modified, and what is made does not change with them."""
    leading, n, m = shape
    keep = keep_of("tiles", shape, tile, seed)
    _, tiles = some_tiles(shape, tile, seed)
    before = keep.copy(), tiles.copy()
    mask = target.from_dense(keep, tile=tile)
    other = target.from_tiles(tiles, queries=n, keys=m, tile=tile, leading=leading)
    assert np.array_equal(keep, before[0]), "keep was modified"
    assert np.array_equal(tiles, before[1]), "tiles was modified"
    columns = other.columns.copy()
    keep[...], tiles[...] = ~keep, 0
    assert np.array_equal(target.to_dense(mask), before[0]), "the mask follows the caller's array"
    assert np.array_equal(other.columns, columns), "the list follows the caller's array"
