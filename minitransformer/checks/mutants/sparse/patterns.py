"""Mistakes people make with sparse patterns."""

from unittest.mock import patch

import numpy as np

from minitransformer.checks.mutants.sparse.block_mask import _unchecked
from minitransformer.checks.properties.sparse.patterns import suite
from minitransformer.philox import Stream
from minitransformer.sparse import patterns as right
from minitransformer.sparse.block_mask import from_dense, from_tiles, listed, to_dense

DIAGONAL = "the_diagonal_is_where_each_query_finds_itself"
LONGFORMER = "longformer_is_window_and_tokens"
DILATION = "each_head_has_its_own_dilation"
STRIDED = "strided_lists_near_tiles_and_every_stride"
FIXED = "fixed_lists_blocks_and_their_summaries"
LOG = "log_sparse_lists_powers_of_two"
REACH = "log_sparse_reaches_everything_in_log_layers"
BIGBIRD = "bigbird_is_window_ends_and_exactly_so_many_random"
RANDOM = "random_log_is_the_diagonal_and_the_logarithm"
GROWS = "random_log_grows_like_n_log_n"
LIKELY = "every_tile_is_as_likely"
PLACES = "every_place_draws_its_own"
DENSE = "attention_over_a_pattern_is_dense_under_its_mask"
ITSELF = "every_token_reads_itself"

_RIGHT_BETWEEN, _RIGHT_RANDOM, _BITS = right._between, right._random_tiles, right.random_bits


def _without(mask, dropped):
    """A mask less the tiles (s, I, J) for which `dropped` says so; its bits go with them."""
    tiles = listed(mask)
    stays = ~dropped(*tiles.T)
    given = {"queries": mask.queries, "keys": mask.keys, "tile": mask.tile, "leading": mask.leading}
    left = from_tiles(tiles[stays], **given)
    return _unchecked(left, pattern=mask.pattern[stays], bits=mask.bits)


def _all_bits(mask):
    """Every listed tile as if it were full."""
    return _unchecked(mask, pattern=np.full_like(mask.pattern, -1))


# ---- the diagonal --------------------------------------------------------------------------------


@suite.mutant("diagonal_tiles", "queries counted from 0, with a cache too", killed_by=DIAGONAL)
def offset_forgotten(queries, keys, *, tile, align):
    return right.diagonal_tiles(queries, keys, tile=tile, align="upper_left")


@suite.mutant("diagonal_tiles", "the last row of tiles taken for a whole one", killed_by=DIAGONAL)
def ragged_end_taken_for_whole(queries, keys, *, tile, align):
    o, (r, c) = right.offset(queries, keys, align), right._tile(tile)
    first = np.arange(-(-queries // r)) * r
    return (first + o) // c, (first + r - 1 + o) // c


@suite.mutant("diagonal_tiles", "tiles are square", killed_by=DIAGONAL)
def one_tile_a_row(queries, keys, *, tile, align):
    low, _ = right.diagonal_tiles(queries, keys, tile=tile, align=align)
    return low, low


@suite.mutant("diagonal_tiles", "-1 // 4 is 0 in C", killed_by=DIAGONAL)
def truncated_towards_zero(queries, keys, *, tile, align):
    o, (r, c) = right.offset(queries, keys, align), right._tile(tile)
    first = np.arange(-(-queries // r)) * r
    last = np.minimum(first + r, queries) - 1
    return np.trunc((first + o) / c).astype(int), np.trunc((last + o) / c).astype(int)


# ---- Longformer ----------------------------------------------------------------------------------


@suite.mutant(
    "longformer",
    "`window` in all, half on either side: HF's own meaning",
    killed_by=(LONGFORMER, DILATION),
)
def window_halved(queries, keys, *, window, dilation=1, **given):
    same = right.longformer(queries, keys, window=window // 2, dilation=dilation, **given)
    if not isinstance(dilation, int):
        return right.longformer(queries, keys, window=window // 2, dilation=dilation[0], **given)
    return same


@suite.mutant(
    "longformer",
    "one key more: https://github.com/huggingface/transformers/issues/39408",
    killed_by=LONGFORMER,
)
def window_one_wider(queries, keys, *, window, **given):
    return right.longformer(queries, keys, window=window + 1, **given)


@suite.mutant("longformer", "a window of width · dilation without gaps", killed_by=LONGFORMER)
def gaps_filled(queries, keys, *, window, dilation=1, **given):
    if not isinstance(dilation, int):
        return right.longformer(queries, keys, window=window, dilation=dilation, **given)
    return right.longformer(queries, keys, window=window * dilation, **given)


@suite.mutant("longformer", "head 0's dilation for all", killed_by=DILATION)
def first_dilation_for_all(queries, keys, *, dilation=1, **given):
    if not isinstance(dilation, int):
        dilation = (dilation[0],) * len(dilation)
    return right.longformer(queries, keys, dilation=dilation, **given)


@suite.mutant(
    "longformer", "tokens are keys for all, but queries like others", killed_by=LONGFORMER
)
def tokens_do_not_see(queries, keys, *, tokens=(), causal=False, align, **given):
    mask = right.longformer(queries, keys, tokens=tokens, causal=causal, align=align, **given)
    alone = right.longformer(queries, keys, causal=causal, align=align, **given)
    o = right.offset(queries, keys, align)
    keep, near = to_dense(mask), to_dense(alone)
    for t in tokens:
        if 0 <= t - o < queries:
            columns = [j for j in range(keys) if j not in tokens]
            keep[..., t - o, columns] = near[..., t - o, columns]
    return from_dense(keep, tile=mask.tile)


@suite.mutant("longformer", "global tokens see the future too", killed_by=LONGFORMER)
def tokens_look_ahead(queries, keys, *, tokens=(), causal=False, align, **given):
    mask = right.longformer(queries, keys, tokens=tokens, causal=causal, align=align, **given)
    keep, o = to_dense(mask), right.offset(queries, keys, align)
    for t in tokens:
        if 0 <= t - o < queries:
            keep[..., t - o, :] = True
    return from_dense(keep, tile=mask.tile)


# ---- strided, fixed, log-sparse ------------------------------------------------------------------


@suite.mutant("strided", "the stride itself is near", killed_by=STRIDED)
def local_part_one_tile_longer(queries, keys, *, stride, part="both", **given):
    if part == "stride":
        return right.strided(queries, keys, stride=stride, part=part, **given)
    with patch.object(right, "_between", lambda a, b: _RIGHT_BETWEEN(a - 1, b)):
        return right.strided(queries, keys, stride=stride, part=part, **given)


@suite.mutant("strided", "columns of the grid, not distances", killed_by=STRIDED)
def stride_counted_from_the_start(queries, keys, *, stride, part="both", tile, align):
    if part == "local":
        return right.strided(queries, keys, stride=stride, part=part, tile=tile, align=align)
    return right.fixed(queries, keys, block=stride, summary=1, part="summary", tile=tile,
        align=align)  # fmt: skip


@suite.mutant("strided", "whole tiles, the future in them as well", killed_by=STRIDED)
def diagonal_tiles_left_whole(queries, keys, **given):
    return _all_bits(right.strided(queries, keys, **given))


@suite.mutant("strided", "range(1, …): the step 0 forgotten", killed_by=(STRIDED, ITSELF))
def own_tile_left_out(queries, keys, *, tile, align, **given):
    mask = right.strided(queries, keys, tile=tile, align=align, **given)
    low, high = right.diagonal_tiles(queries, keys, tile=tile, align=align)
    return _without(mask, lambda s, i, j: (j >= low[i]) & (j <= high[i]))


@suite.mutant("fixed", "the first positions of a block speak for it", killed_by=FIXED)
def summary_at_the_start(queries, keys, *, block, summary, part="both", tile, align):
    given = {"block": block, "summary": summary, "tile": tile, "align": align}
    if part == "block":
        return right.fixed(queries, keys, part=part, **given)
    _, high = right.diagonal_tiles(queries, keys, tile=tile, align=align)
    columns = np.arange(-(-keys // right._tile(tile)[1]))
    first = columns[columns % block < summary]
    parts = [(np.arange(len(high))[:, None], np.where(first <= high[:, None], first, -1))]
    if part == "both":
        inside = listed(right.fixed(queries, keys, part="block", **given))
        parts.append((inside[:, 1], inside[:, 2]))
    rule = right._past(right.offset(queries, keys, align))
    return right._made(parts, queries, keys, right._tile(tile), (), rule)


@suite.mutant("fixed", "the last one only", killed_by=FIXED)
def one_summary_a_block(queries, keys, *, summary, **given):
    return right.fixed(queries, keys, summary=1, **given)


@suite.mutant("fixed", "blocks of tiles seen as blocks of the past", killed_by=FIXED)
def block_ends_before_oneself(queries, keys, *, tile, align, **given):
    mask = right.fixed(queries, keys, tile=tile, align=align, **given)
    _, high = right.diagonal_tiles(queries, keys, tile=tile, align=align)
    return _without(mask, lambda s, i, j: j == high[i])


def _log_mutant(steps):
    def made(queries, keys, *, tile, align):
        rows, low, high, columns = right._lines(queries, keys, tile, align)
        parts = [(rows, low - steps(columns)), (rows, _RIGHT_BETWEEN(low, high))]
        past = right._past(right.offset(queries, keys, align))
        return right._made(parts, queries, keys, right._tile(tile), (), past)

    made.__name__ = steps.__name__
    return made


@suite.mutant("log_sparse", "range(int(log₂ n)): the farthest is missing", killed_by=(LOG, REACH))
@_log_mutant
def farthest_power_left_out(columns):
    return 2 ** np.arange(max((columns - 1).bit_length() - 1, 0))


@suite.mutant("log_sparse", "2^k - 1: the last tile, not the one before it", killed_by=LOG)
@_log_mutant
def powers_less_one(columns):
    return 2 ** np.arange(columns.bit_length() + 1) - 1


@suite.mutant("log_sparse", "k, not 2^k", killed_by=(LOG, REACH))
@_log_mutant
def a_window_of_log_n(columns):
    return np.arange(1, columns.bit_length() + 1)


@suite.mutant("log_sparse", "x[-1] is the last element: NumPy wraps", killed_by=(LOG, REACH),
    crashes=True)  # fmt: skip
def negative_columns_wrap_around(queries, keys, *, tile, align):
    rows, low, high, columns = right._lines(queries, keys, tile, align)
    far = (low - 2 ** np.arange(columns.bit_length())) % max(columns, 1)
    parts = [(rows, _RIGHT_BETWEEN(low, high)), (rows, far)]
    return right._made(parts, queries, keys, right._tile(tile), (), None)


@suite.mutant("log_sparse", "strictly earlier", killed_by=(LOG, REACH, ITSELF))
def oneself_left_out(queries, keys, *, tile, align):
    mask = right.log_sparse(queries, keys, tile=tile, align=align)
    low, high = right.diagonal_tiles(queries, keys, tile=tile, align=align)
    return _without(mask, lambda s, i, j: (j >= low[i]) & (j <= high[i]))


# ---- random tiles --------------------------------------------------------------------------------


def _random(name, why, killed_by):
    """Register a mutant of pattern `name` that draws its random tiles otherwise."""

    def register(tiles):
        def pattern(*sizes, **given):
            with patch.object(right, "_random_tiles", tiles):
                return getattr(right, name)(*sizes, **given)

        pattern.__name__ = tiles.__name__
        return suite.mutant(name, why, killed_by=killed_by)(pattern)

    return register


def _unique(tiles):
    return np.unique(tiles, axis=0)


@_random("bigbird", "drawn among all tiles, and one that is there already is lost", BIGBIRD)
def random_tiles_may_be_kept_already(kept, end, wanted, *where):
    drawn = _RIGHT_RANDOM(np.full((len(kept), 1), -1), end, wanted, *where)
    return drawn[~(kept[drawn[:, 1]] == drawn[:, 2:]).any(axis=1)]


@_random("bigbird", "the future is drawn from as well", BIGBIRD)
def random_tiles_in_the_future(kept, end, wanted, *where):
    if (end == end.max(initial=0)).all():
        return _RIGHT_RANDOM(kept, end, wanted, *where)
    drawn = _RIGHT_RANDOM(kept, np.full_like(end, end.max()), wanted, *where)
    return drawn


@_random(
    "bigbird",
    "the authors' sampler ends at position 1024:"
    " https://github.com/google-research/bigbird/issues/18",
    (BIGBIRD, LIKELY),
)
def drawn_from_the_first_tiles_alone(kept, end, wanted, *where):
    return _RIGHT_RANDOM(kept, np.minimum(end, np.maximum(end * 2 // 3, 1)), wanted, *where)


@_random("random_log", "np.random.randint(0, n - 1)", (RANDOM, LIKELY))
def last_tile_is_never_drawn(kept, end, wanted, *where):
    return _RIGHT_RANDOM(np.concatenate([kept, end - 1], axis=1), end, wanted, *where)


@_random("random_log", "one draw for all heads", (RANDOM, PLACES))
def heads_share_their_random_tiles(kept, end, wanted, draw, layer, leading):
    first = _RIGHT_RANDOM(kept, end, wanted, draw, layer, ())
    layouts = int(np.prod(leading, dtype=int))
    return np.concatenate([first[:0], *(first + np.array([s, 0, 0]) for s in range(layouts))])


@_random("bigbird", "every layer draws as layer 0", (BIGBIRD, PLACES))
def layers_share_their_random_tiles(kept, end, wanted, draw, layer, leading):
    return _RIGHT_RANDOM(kept, end, wanted, draw, 0, leading)


@_random(
    "bigbird",
    "evaluation draws for itself: https://github.com/huggingface/transformers/issues/23055",
    PLACES,
)
def drawn_again_in_evaluation(kept, end, wanted, draw, layer, leading):
    if not draw.training:
        draw = draw._replace(step=draw.step ^ 1)
    return _RIGHT_RANDOM(kept, end, wanted, draw, layer, leading)


@_random("bigbird", "drawn once for good, though every step asks", (BIGBIRD, PLACES))
def step_ignored(kept, end, wanted, draw, layer, leading):
    return _RIGHT_RANDOM(kept, end, wanted, draw._replace(step=0), layer, leading)


@_random("random_log", "with replacement: some rows get fewer", (RANDOM, GROWS))
def drawn_with_replacement(kept, end, wanted, draw, layer, leading):
    drawn = [
        _RIGHT_RANDOM(kept, end, np.minimum(wanted, 1), draw._replace(step=(draw.step + t) % 2**32),
            layer, leading)
        for t in range(int(wanted.max(initial=0)))
    ]  # fmt: skip
    return _unique(np.concatenate([np.zeros((0, 3), int), *drawn]))


@_random("random_log", "one word for all draws of a row", (RANDOM, LIKELY))
def one_word_for_every_draw(*given):
    def bits(draw, stream, layer, s, row, t):
        return _BITS(draw, stream, layer, s, row, 0 * t)

    with patch.object(right, "random_bits", bits):
        return _RIGHT_RANDOM(*given)


@_random("bigbird", "the words that the block sampler drops tiles by", BIGBIRD)
def stream_shared_with_the_sampler(*given):
    def bits(draw, stream, *place):
        return _BITS(draw, Stream.BLOCK, *place)

    with patch.object(right, "random_bits", bits):
        return _RIGHT_RANDOM(*given)


@suite.mutant(
    "bigbird",
    "a random tile that is global is counted twice:"
    " https://github.com/google-research/bigbird/issues/35",
    killed_by=DENSE,
)
def a_tile_listed_twice(queries, keys, **given):
    mask = right.bigbird(queries, keys, **given)
    s, i, j = listed(mask)[:1].T
    if not len(s):
        return mask
    pointers, columns = mask.row_pointers.copy(), mask.column_pointers.copy()
    pointers.ravel()[int(s[0]) * pointers.shape[1] + int(i[0]) + 1 :] += 1
    columns.ravel()[int(s[0]) * columns.shape[1] + int(j[0]) + 1 :] += 1
    at = int(mask.column_pointers[s[0], j[0]])
    return _unchecked(
        mask,
        row_pointers=pointers,
        column_pointers=columns,
        columns=np.insert(mask.columns, 0, mask.columns[0]),
        pattern=np.insert(mask.pattern, 0, mask.pattern[0]),
        rows=np.insert(mask.rows, at, i[0].astype(np.int32)),
        order=np.insert(mask.order + 1, at, 0).astype(np.int32),
    )


@suite.mutant("bigbird", "the first tile is global, the last is not", killed_by=BIGBIRD)
def last_tile_is_not_global(queries, keys, *, ends=1, tile, align, **given):
    whole = {"tile": tile, "align": align, **given}
    mask = right.bigbird(queries, keys, ends=ends, **whole)
    columns = mask.grid[1]
    _, high = right.diagonal_tiles(queries, keys, tile=tile, align=align)
    return _without(mask, lambda s, i, j: (j == columns - 1) & (high[i] < columns - 2))


@suite.mutant("bigbird", "global tiles are seen, but do not see", killed_by=BIGBIRD)
def global_rows_read_like_others(queries, keys, *, tile, align, window=1, **given):
    mask = right.bigbird(queries, keys, tile=tile, align=align, window=window, **given)
    low, high = right.diagonal_tiles(queries, keys, tile=tile, align=align)
    ends = given.get("ends", 1)
    columns = mask.grid[1]

    def dropped(s, i, j):
        far = (j < low[i] - window) | (j > high[i] + window)
        return far & (j >= ends) & (j < columns - ends) & (low[i] < ends)

    return _without(mask, dropped)


@suite.mutant("bigbird", "whole tiles, the future in them as well", killed_by=BIGBIRD)
def causal_by_tiles_alone(queries, keys, **given):
    return _all_bits(right.bigbird(queries, keys, **given))


@suite.mutant("bigbird", "three in all, one on either side: `window` as the whole",
    killed_by=BIGBIRD)  # fmt: skip
def window_counted_in_all(queries, keys, *, window=1, **given):
    return right.bigbird(queries, keys, window=(window - 1) // 2 if window else 0, **given)


@suite.mutant("random_log", "int(log2(n)): rounded down", killed_by=(RANDOM, GROWS))
def logarithm_rounded_down(queries, keys, *, random=None, **given):
    random = max(keys, 1).bit_length() - 1 if random is None else random
    return right.random_log(queries, keys, random=random, **given)


@suite.mutant("random_log", "log is the natural one", killed_by=(RANDOM, GROWS))
def natural_logarithm(queries, keys, *, random=None, **given):
    random = int(np.ceil(np.log(max(keys, 1)))) if random is None else random
    return right.random_log(queries, keys, random=random, **given)


@suite.mutant("random_log", "k keys and no more, oneself if drawn", killed_by=(RANDOM, ITSELF))
def own_tile_left_to_chance(queries, keys, *, tile, align, **given):
    mask = right.random_log(queries, keys, tile=tile, align=align, **given)
    low, high = right.diagonal_tiles(queries, keys, tile=tile, align=align)
    return _without(mask, lambda s, i, j: (j >= low[i]) & (j <= high[i]))
