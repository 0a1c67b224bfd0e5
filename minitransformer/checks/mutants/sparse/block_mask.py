"""Mistakes people make with lists of tiles."""

from dataclasses import fields, replace

import numpy as np

from minitransformer.checks.properties.sparse.block_mask import of_pair, suite
from minitransformer.sparse import block_mask as right

BACK = "there_and_back_is_the_same_mask"
ROWS = "rows_list_the_tiles_that_hold_something"
COLUMNS = "columns_list_the_same_tiles"
BITS = "partial_tiles_alone_have_bits"
SLICE = "pairs_of_a_tile_are_its_slice"
LISTED = "listed_tiles_name_layout_row_and_column"
SHARE = "equal_tiles_share_their_bits"
ASKED = "a_rule_is_asked_about_batch_head_row_and_column"
GIVEN = "given_tiles_are_full"
BOTH = "a_rule_inside_given_tiles_is_both"
DENSITIES = "densities_are_shares_of_tiles_and_of_pairs"
MEMORY = "memory_is_that_of_the_lists"
LAYOUT = "every_batch_row_and_head_finds_its_layout"
DAMAGE = "damage_is_refused_on_construction"
ALONE = "arguments_are_left_alone"


class Unchecked(right.BlockMask):
    """Whatever it is given."""

    def __post_init__(self):
        pass


def _unchecked(mask, **changed):
    given = {f.name: getattr(mask, f.name) for f in fields(mask)}
    return Unchecked(**{**given, **changed})


# ---- from a dense mask ---------------------------------------------------------------------------


@suite.mutant("from_dense", "N // r tiles: the ragged end is lost", killed_by=(BACK, ROWS))
def ragged_end_left_out(keep, *, tile):
    r, c = of_pair(tile)
    n, m = keep.shape[-2:]
    keep = keep.copy()
    keep[..., n // r * r :, :] = False
    keep[..., m // c * c :] = False
    return right.from_dense(keep, tile=tile)


@suite.mutant(
    "from_dense", "a tile counts if all of its pairs do", killed_by=(BACK, ROWS, DENSITIES)
)
def partial_tiles_left_out(keep, *, tile):
    mask = right.from_dense(keep, tile=tile)
    tiles = right.listed(mask)[mask.pattern < 0]
    n, m = keep.shape[-2:]
    return right.from_tiles(tiles, queries=n, keys=m, tile=tile, leading=keep.shape[:-2])


@suite.mutant(
    "from_dense",
    "a tile that holds something holds everything:"
    " https://github.com/pytorch/pytorch/issues/141126",
    killed_by=(BACK, BITS, SLICE),
)
def partial_tiles_made_full(keep, *, tile):
    mask = right.from_dense(keep, tile=tile)
    n, m = keep.shape[-2:]
    return right.from_tiles(
        right.listed(mask), queries=n, keys=m, tile=tile, leading=keep.shape[:-2]
    )


@suite.mutant("from_dense", "row 0 of the tile is its column 0", killed_by=(BACK, BITS, SLICE))
def bits_transposed(keep, *, tile):
    mask = right.from_dense(keep, tile=tile)
    r, c = mask.tile
    if r != c:
        return mask
    whole = right._unpacked(mask.bits, c).swapaxes(1, 2)
    return _unchecked(mask, bits=right._packed(whole))


@suite.mutant("from_dense", "np.packbits writes the first bit highest", killed_by=(BACK, BITS))
def bits_from_the_other_end(keep, *, tile):
    mask = right.from_dense(keep, tile=tile)
    as_bytes = mask.bits.astype("<u4").view(np.uint8)
    turned = np.packbits(np.unpackbits(as_bytes, axis=-1, bitorder="little"), axis=-1)
    return _unchecked(mask, bits=turned.view("<u4").astype(np.uint32))


@suite.mutant("from_dense", "padding to whole tiles may be attended to", killed_by=BITS)
def padded_with_true(keep, *, tile):
    mask = right.from_dense(keep, tile=tile)
    bits = [np.zeros((0, *mask.bits.shape[1:]), np.uint32)]
    pattern = mask.pattern.copy()
    for entry, (_, i, j) in enumerate(right.listed(mask)):
        if mask.pattern[entry] >= 0:
            rows, columns = right._cropped(mask, i, j)
            kept = right._unpacked(mask.bits[mask.pattern[entry]], mask.tile[1])
            kept[rows:], kept[:, columns:] = True, True
            pattern[entry] = len(bits) - 1
            bits.append(right._packed(kept[None]))
    return _unchecked(mask, bits=np.concatenate(bits), pattern=pattern)


@suite.mutant("from_dense", "every tile listed, the empty ones as well", killed_by=(ROWS, COLUMNS))
def empty_tiles_listed(keep, *, tile):
    mask = right.from_dense(keep, tile=tile)
    r, c = mask.tile
    whole = (mask.layouts, *mask.grid)
    tiles = np.stack(np.unravel_index(np.arange(int(np.prod(whole))), whole), axis=-1)
    n, m = keep.shape[-2:]
    full = right.from_tiles(tiles, queries=n, keys=m, tile=tile, leading=keep.shape[:-2])
    room = np.zeros((mask.layouts, mask.grid[0] * r, mask.grid[1] * c), np.bool_)
    room[:, :n, :m] = keep.reshape(mask.layouts, n, m)
    cut = room.reshape(mask.layouts, mask.grid[0], r, mask.grid[1], c).swapaxes(2, 3)
    return _unchecked(
        full,
        bits=right._packed(cut.reshape(len(tiles), r, c)),
        pattern=np.arange(len(tiles), dtype=np.int32),
    )


@suite.mutant("from_dense", "head 0's layout for all", killed_by=(BACK, ROWS))
def first_layout_for_all(keep, *, tile):
    flat = keep.reshape(int(np.prod(keep.shape[:-2])), *keep.shape[-2:])
    same = np.broadcast_to(flat[:1], flat.shape).reshape(keep.shape)
    return right.from_dense(np.ascontiguousarray(same), tile=tile)


@suite.mutant("from_dense", "the patterns of rows for the list of columns", killed_by=COLUMNS)
def order_left_as_it_is(keep, *, tile):
    mask = right.from_dense(keep, tile=tile)
    return _unchecked(mask, order=np.arange(len(mask.order), dtype=np.int32))


@suite.mutant("from_dense", "a stable sort by column alone mixes layouts", killed_by=COLUMNS)
def columns_sorted_over_all_layouts(keep, *, tile):
    mask = right.from_dense(keep, tile=tile)
    _, i, j = right.listed(mask).T
    order = np.argsort(j, kind="stable").astype(np.int32)
    return _unchecked(mask, order=order, rows=i[order].astype(np.int32))


@suite.mutant("from_dense", "each partial tile stores its own", killed_by=SHARE)
def bits_stored_for_every_tile(keep, *, tile):
    mask = right.from_dense(keep, tile=tile)
    partial = mask.pattern >= 0
    pattern = np.where(partial, np.cumsum(partial) - 1, -1).astype(np.int32)
    return _unchecked(mask, bits=mask.bits[mask.pattern[partial]], pattern=pattern)


@suite.mutant("from_dense", "a scratch buffer that is the caller's", killed_by=ALONE)
def clears_what_it_has_read(keep, *, tile):
    mask = right.from_dense(keep, tile=tile)
    keep[...] = False
    return mask


# ---- from a rule, from tiles ---------------------------------------------------------------------


@suite.mutant("from_rule", "i and j inside the tile, not inside the matrix", killed_by=ASKED)
def rule_asked_about_the_place_in_the_tile(rule, *, queries, keys, tile, leading=()):
    r, c = of_pair(tile)
    return right.from_rule(
        lambda b, h, i, j: rule(b, h, i % r, j % c),
        queries=queries,
        keys=keys,
        tile=tile,
        leading=leading,
    )


@suite.mutant("from_rule", "one head asked for all", killed_by=ASKED)
def rule_asked_about_head_zero(rule, **given):
    return right.from_rule(lambda b, h, i, j: rule(b, 0 * h, i, j), **given)


@suite.mutant("from_rule", "one batch row asked for all", killed_by=ASKED)
def rule_asked_about_the_first_row_of_the_batch(rule, **given):
    return right.from_rule(lambda b, h, i, j: rule(0 * b, h, i, j), **given)


@suite.mutant("from_rule", "b and h are one number", killed_by=ASKED, crashes=True)
def rule_asked_about_layouts(rule, *, leading=(), **given):
    heads = leading[-1] if leading else 1
    return right.from_rule(
        lambda b, h, i, j: rule(b * heads + h, h, i, j), leading=leading, **given
    )


@suite.mutant("from_rule", "row 40 of a tile that ends at 37", killed_by=ASKED, crashes=True)
def rule_asked_beyond_the_end(rule, *, queries, keys, tile, leading=()):
    r, c = of_pair(tile)
    n, m = -(-queries // r) * r, -(-keys // c) * c
    keep = right.to_dense(right.from_rule(rule, queries=n, keys=m, tile=tile, leading=leading))
    return right.from_dense(keep[..., :queries, :keys], tile=tile)


@suite.mutant("from_tiles", "rows and columns exchanged", killed_by=(GIVEN, BOTH), crashes=True)
def row_and_column_exchanged(tiles, **given):
    return right.from_tiles(tiles[:, [0, 2, 1]], **given)


@suite.mutant("from_tiles", "in the order they came", killed_by=GIVEN)
def tiles_left_unsorted(tiles, **given):
    mask = right.from_tiles(tiles, **given)
    if given.get("rule") is not None or not len(tiles):
        return mask
    return _unchecked(mask, columns=tiles[:, 2].astype(np.int32))


@suite.mutant("from_tiles", "the tiles are the mask", killed_by=BOTH)
def rule_forgotten(tiles, *, rule=None, **given):
    return right.from_tiles(tiles, **given)


@suite.mutant("from_tiles", "the rule is the mask", killed_by=BOTH)
def tiles_forgotten(tiles, *, rule=None, **given):
    return right.from_tiles(tiles, **given) if rule is None else right.from_rule(rule, **given)


@suite.mutant("from_tiles", "views what it should copy", killed_by=ALONE)
def list_is_the_callers_array(tiles, **given):
    mask = right.from_tiles(tiles, **given)
    return _unchecked(mask, columns=tiles[:, 2]) if len(tiles) else mask


# ---- into a dense mask, and single tiles ---------------------------------------------------------


@suite.mutant("to_dense", "bits ignored", killed_by=(BACK, BOTH))
def every_listed_tile_is_full(mask):
    return right.to_dense(_unchecked(mask, pattern=np.full_like(mask.pattern, -1)))


@suite.mutant("to_dense", "row lists of layout 0 for all", killed_by=BACK)
def layouts_all_the_first(mask):
    keep = right.to_dense(mask)
    flat = keep.reshape(mask.layouts, *keep.shape[-2:])
    return np.broadcast_to(flat[:1], flat.shape).reshape(keep.shape)


@suite.mutant("pairs", "-1 reads the last pattern", killed_by=SLICE)
def full_tiles_read_the_last_pattern(mask, entry, rows, columns):
    if not len(mask.bits):
        return right.pairs(mask, entry, rows, columns)
    kept = right._unpacked(mask.bits[mask.pattern[entry]], mask.tile[1])[:rows, :columns]
    return None if kept.all() else kept


@suite.mutant("pairs", "only the first word of a row", killed_by=SLICE)
def columns_beyond_32_repeat(mask, entry, rows, columns):
    kept = right.pairs(mask, entry, rows, columns)
    return None if kept is None else kept[:, np.arange(columns) & 31]


@suite.mutant("listed", "columns before rows", killed_by=LISTED)
def listed_in_the_order_of_columns(mask):
    return right.listed(mask)[mask.order]


# ---- what it is and costs ------------------------------------------------------------------------


@suite.mutant("tile_density", "1 - element density is not what is saved", killed_by=DENSITIES)
def pairs_counted_as_work(mask):
    return right.pair_density(mask)


@suite.mutant("pair_density", "every tile r · c, ragged or not", killed_by=DENSITIES)
def tiles_at_the_end_counted_whole(mask):
    partial = mask.pattern >= 0
    inside = np.bitwise_count(mask.bits).sum(axis=(1, 2), dtype=np.int64)
    kept = (~partial).sum() * mask.tile[0] * mask.tile[1] + inside[mask.pattern[partial]].sum()
    return float(kept) / max(mask.layouts * mask.queries * mask.keys, 1)


@suite.mutant("pair_density", "shared patterns counted once", killed_by=DENSITIES)
def patterns_counted_once(mask):
    partial = mask.pattern >= 0
    every = replace(mask)
    full = right.pair_density(every)
    inside = np.bitwise_count(mask.bits).sum(axis=(1, 2), dtype=np.int64)
    surplus = inside[mask.pattern[partial]].sum() - inside.sum()
    return full - float(surplus) / max(mask.layouts * mask.queries * mask.keys, 1)


@suite.mutant("memory", "a byte a pair, as if dense", killed_by=MEMORY)
def memory_of_the_dense_mask(mask):
    return mask.layouts * mask.queries * mask.keys


@suite.mutant("memory", "the list of columns forgotten", killed_by=MEMORY)
def memory_of_the_rows_alone(mask):
    return mask.row_pointers.nbytes + mask.columns.nbytes + mask.pattern.nbytes + mask.bits.nbytes


@suite.mutant("layout_of", "b · H + h, though one layout serves all heads", killed_by=LAYOUT)
def layouts_counted_by_place(mask, leading):
    return np.arange(int(np.prod(leading))).reshape(leading)


@suite.mutant("BlockMask", "the arrays are trusted", killed_by=DAMAGE)
class NothingChecked(Unchecked):
    pass


@suite.mutant(
    "BlockMask", "duplicates do not matter to a mask, and count twice in a sum", killed_by=DAMAGE
)
class DuplicatesAccepted(right.BlockMask):
    def __post_init__(self):
        try:
            super().__post_init__()
        except ValueError as error:
            if "twice" not in str(error):
                raise


@suite.mutant("BlockMask", "only the rows are looked at", killed_by=DAMAGE)
class ColumnsTrusted(right.BlockMask):
    def __post_init__(self):
        try:
            super().__post_init__()
        except ValueError as error:
            if "list by columns" not in str(error):
                raise


@suite.mutant("BlockMask", "a pattern may say anything", killed_by=DAMAGE)
class BitsTrusted(right.BlockMask):
    def __post_init__(self):
        try:
            super().__post_init__()
        except ValueError as error:
            if not str(error).startswith("bits:"):
                raise
