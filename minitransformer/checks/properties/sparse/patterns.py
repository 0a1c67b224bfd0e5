"""What a pattern must do: list the tiles of its rule and no others, draw by the mask law, and never
look ahead."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.attention import dense
from minitransformer.checks.gradients import assert_close, cotangent
from minitransformer.checks.properties.sparse.block_mask import of_pair
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import BACKWARD as GRADIENT
from minitransformer.philox import Draw, Stream, random_bits
from minitransformer.sparse.block_mask import to_dense
from minitransformer.sparse.tiled import tiled_attention_backward, tiled_attention_forward

suite = Suite("sparse.patterns")

DIAGONAL = "diagonal_tiles"
LONGFORMER, BIGBIRD, RANDOM = "longformer", "bigbird", "random_log"
STRIDED, FIXED, LOG = "strided", "fixed", "log_sparse"

# N, M, tile: square or not, ragged, smaller than a tile, empty
SIZES = (
    (40, 40, 4),
    (37, 37, 5),
    (16, 48, (4, 8)),
    (45, 27, (8, 3)),
    (23, 23, 1),
    (24, 30, (3, 2)),
    (3, 3, 8),
    (0, 8, 4),
    (8, 0, 4),
)
sizes = st.sampled_from(SIZES)
alignments = st.sampled_from(["lower_right", "upper_left"])
draws = st.builds(Draw, seeds, seeds, st.just(True), st.just(0))


def offset_of(n: int, m: int, align: str) -> int:
    return m - n if align == "lower_right" else 0


def diagonal(n: int, m: int, tile, align: str) -> list[tuple[int, int]]:
    """lo and hi of each row of tiles, one query at a time."""
    r, c = of_pair(tile)
    found = []
    for first in range(0, n, r):
        columns = [(i + offset_of(n, m, align)) // c for i in range(first, min(first + r, n))]
        found.append((min(columns), max(columns)))
    return found


def distance(low: int, high: int, j: int) -> int:
    return low - j if j < low else min(high - j, 0)


def tiles_of(mask) -> list[list[set[int]]]:
    """The columns of each row of tiles of each layout."""
    rows = range(mask.grid[0])
    return [
        [set(mask.columns[slice(*mask.row_pointers[s, i : i + 2])].tolist()) for i in rows]
        for s in range(mask.layouts)
    ]


def assert_lists(mask, size, align: str, rule) -> None:
    """Row I lists exactly the J with `rule(low, high, J, d)`."""
    n, m, tile = size
    (row_tiles,) = tiles_of(mask)
    columns = -(-m // of_pair(tile)[1])
    for i, (low, high) in enumerate(diagonal(n, m, tile, align)):
        expected = {j for j in range(columns) if rule(low, high, j, distance(low, high, j))}
        assert row_tiles[i] == expected, f"row {i} lists {row_tiles[i]}, expected {expected}"


def assert_no_future(mask, n: int, m: int, align: str) -> None:
    """All of the past in the tiles that are listed, and nothing else."""
    keep = to_dense(mask)
    past = np.tri(n, m, offset_of(n, m, align), dtype=np.bool_)
    assert not (keep & ~past).any(), "a query attends to a later key"
    r, c = of_pair(mask.tile)
    whole = np.zeros(keep.shape, np.bool_).reshape(mask.layouts, n, m)
    for s, rows in enumerate(tiles_of(mask)):
        for i, listed in enumerate(rows):
            for j in listed:
                whole[s, i * r : i * r + r, j * c : j * c + c] = True
    assert np.array_equal(keep, (whole & past).reshape(keep.shape)), "a listed pair is missing"


# ---- the diagonal --------------------------------------------------------------------------------


@suite.property(DIAGONAL, size=sizes, align=alignments)
def the_diagonal_is_where_each_query_finds_itself(target, size, align):
    """Eq. 10.8, query by query: for tiles that are not square, ragged, or not a multiple of the
    offset; rows that stand before every key have negative tiles."""
    n, m, tile = size
    low, high = target.diagonal_tiles(n, m, tile=tile, align=align)
    got = list(zip(low.tolist(), high.tolist(), strict=True))
    assert got == diagonal(n, m, tile, align), "the diagonal is elsewhere"


# ---- without chance ------------------------------------------------------------------------------


@suite.property(LONGFORMER, size=sizes, align=alignments, causal=st.booleans(),
    window=st.sampled_from([3, 1, 0, 9]), dilation=st.sampled_from([1, 2, 3]),
    tokens=st.sampled_from([(0,), (), (0, 7, 22)]))  # fmt: skip
def longformer_is_window_and_tokens(target, size, align, causal, window, dilation, tokens):
    """Eq. 10.10 pair by pair, and no tile is listed but for these pairs. `window` is on either
    side, both ends included; a token sees all and is seen by all.

    https://github.com/huggingface/transformers/issues/39408
    """
    n, m, tile = size
    tokens = tuple(t for t in tokens if t < m)
    mask = target.longformer(n, m, window=window, dilation=dilation, tokens=tokens, causal=causal,
        tile=tile, align=align)  # fmt: skip
    expected = np.zeros((n, m), np.bool_)
    for i, j in np.ndindex(n, m):
        p = i + offset_of(n, m, align)
        near = abs(p - j) in [gap * dilation for gap in range(window + 1)]
        expected[i, j] = (near or p in tokens or j in tokens) and (j <= p or not causal)
    assert np.array_equal(to_dense(mask), expected), "another mask than window and tokens"


@suite.property(LONGFORMER, size=sizes, align=alignments)
def each_head_has_its_own_dilation(target, size, align):
    """δ_h of Eq. 10.10: of a list of dilations each head has its own, and so a layout."""
    n, m, tile = size
    given = {"window": 2, "tile": tile, "align": align}
    mask = target.longformer(n, m, dilation=(1, 4, 2), **given)
    assert mask.leading == (3,), f"layouts for {mask.leading}, expected one for each of 3 heads"
    for h, gap in enumerate((1, 4, 2)):
        alone = to_dense(target.longformer(n, m, dilation=gap, **given))
        assert np.array_equal(to_dense(mask)[h], alone), f"head {h} has another dilation"


@suite.property(STRIDED, size=sizes, align=alignments, stride=st.sampled_from([3, 1, 2, 40]))
def strided_lists_near_tiles_and_every_stride(target, size, align, stride):
    """Eq. 10.14 tile by tile, with d of Eq. 10.9; pairs in the future are not kept."""
    n, m, tile = size
    rules = {
        "local": lambda low, high, j, d: 0 <= d < stride,
        "stride": lambda low, high, j, d: d >= 0 and d % stride == 0,
        "both": lambda low, high, j, d: d >= 0 and (d < stride or d % stride == 0),
    }
    for part, rule in rules.items():
        mask = target.strided(n, m, stride=stride, part=part, tile=tile, align=align)
        assert_lists(mask, size, align, rule)
        assert_no_future(mask, n, m, align)


@suite.property(FIXED, size=sizes, align=alignments,
    shape=st.sampled_from([(3, 1), (4, 2), (1, 1), (5, 5)]))  # fmt: skip
def fixed_lists_blocks_and_their_summaries(target, size, align, shape):
    """Eq. 10.15 tile by tile, with d of Eq. 10.9; pairs in the future are not kept."""
    n, m, tile = size
    block, summary = shape
    rules = {
        "block": lambda low, high, j, d: d >= 0 and j // block >= low // block,
        "summary": lambda low, high, j, d: d >= 0 and j % block >= block - summary,
    }
    rules["both"] = lambda *at: rules["block"](*at) or rules["summary"](*at)
    for part, rule in rules.items():
        mask = target.fixed(n, m, block=block, summary=summary, part=part, tile=tile, align=align)
        assert_lists(mask, size, align, rule)
        assert_no_future(mask, n, m, align)


@suite.property(LOG, size=sizes, align=alignments)
def log_sparse_lists_powers_of_two(target, size, align):
    """Eq. 10.16 tile by tile, with d of Eq. 10.9; pairs in the future are not kept."""
    n, m, tile = size
    mask = target.log_sparse(n, m, tile=tile, align=align)
    powers = {0, *(2**k for k in range(10))}
    assert_lists(mask, size, align, lambda low, high, j, d: d in powers)
    assert_no_future(mask, n, m, align)


@suite.property(LOG, n=st.sampled_from([64, 5, 33]))
def log_sparse_reaches_everything_in_log_layers(target, n):
    """Eq. 10.16 with tiles of one pair: 385, 2049, 9977 pairs for n = 64, 256, 1000; and as many
    layers as a number below n can have ones reach every earlier token, not one fewer."""
    for length, pairs in ((64, 385), (256, 2049), (1000, 9977)):
        mask = target.log_sparse(length, length, tile=1, align="lower_right")
        assert len(mask.columns) == pairs, f"{len(mask.columns)} pairs at {length}, not {pairs}"
    hop = to_dense(target.log_sparse(n, n, tile=1, align="lower_right")).astype(int)
    reached, layers = hop, 1
    while not np.array_equal(reached > 0, np.tri(n, dtype=np.bool_)):
        reached, layers = ((reached @ hop) > 0).astype(int), layers + 1
        assert layers <= 10, "ten layers do not reach everything"
    assert layers == max(d.bit_count() for d in range(n)), f"{layers} layers"


# ---- with chance ---------------------------------------------------------------------------------


def chosen_by_the_law(draw: Draw, layer: int, s: int, i: int, candidates: list[int], k: int):
    """Eq. 10.12 on Python's own integers."""
    n, numbers = len(candidates), set()
    words = random_bits(draw, Stream.PATTERN, layer, np.array(s), np.array(i), np.arange(k))
    for t, u in enumerate(words.tolist()):
        x = u * (n - k + t + 1) >> 32
        numbers.add(n - k + t if x in numbers else x)
    return {candidates[x] for x in numbers}


def assert_drawn(mask, size, align, causal, draw, layer, certain, count) -> None:
    """Row by row: what is `certain(low, high, j, d)` and not in the future, and then `count(low,
    high)` of the rest, by the law."""
    n, m, tile = size
    columns = -(-m // of_pair(tile)[1])
    for s, rows in enumerate(tiles_of(mask)):
        for i, (low, high) in enumerate(diagonal(n, m, tile, align)):
            may = [j for j in range(columns) if not causal or distance(low, high, j) >= 0]
            sure = {j for j in may if certain(low, high, j, distance(low, high, j))}
            rest = [j for j in may if j not in sure]
            k = min(count(low, high), len(rest))
            assert sure <= rows[i], f"row {i} lacks {sure - rows[i]}"
            assert len(rows[i]) == len(sure) + k, (
                f"row {i} lists {len(rows[i])} tiles, expected {len(sure)} and {k} random ones"
            )
            expected = sure | chosen_by_the_law(draw, layer, s, i, rest, k)
            assert rows[i] == expected, f"row {i} of layout {s}: {rows[i]}, expected {expected}"


@suite.property(BIGBIRD, size=sizes, align=alignments, causal=st.booleans(), draw=draws,
    counts=st.sampled_from([(1, 1, 3), (0, 0, 2), (2, 0, 1), (1, 2, 50), (0, 1, 0)]),
    leading=st.sampled_from([(), (2,), (2, 3), (0,)]))  # fmt: skip
def bigbird_is_window_ends_and_exactly_so_many_random(
    target, size, align, causal, draw, counts, leading
):
    """Eq. 10.11, and Eq. 10.12 from the words of the mask law: random tiles are never one of the
    others, never twice the same, never in the future, and as many as asked while there are any.

    https://github.com/google-research/bigbird/issues/35
    """
    n, m, tile = size
    window, ends, random = counts
    mask = target.bigbird(n, m, draw=draw, layer=3, window=window, ends=ends, random=random,
        causal=causal, leading=leading, tile=tile, align=align)  # fmt: skip
    assert mask.leading == leading
    columns = -(-m // of_pair(tile)[1])
    at_ends = {j for j in range(columns) if j < ends or j >= columns - ends}

    def is_global(low, high):
        return any(low <= j <= high for j in at_ends)

    def certain(low, high, j, d):
        return abs(d) <= window or j in at_ends or is_global(low, high)

    assert_drawn(mask, size, align, causal, draw, 3, certain,
        lambda low, high: 0 if is_global(low, high) else random)  # fmt: skip
    if causal:
        assert_no_future(mask, n, m, align)
    else:
        assert (mask.pattern == -1).all(), "a tile is not whole"


@suite.property(RANDOM, size=sizes, align=alignments, causal=st.booleans(), draw=draws,
    random=st.sampled_from([None, 2, 0, 100]),
    leading=st.sampled_from([(), (3,), (2, 1)]))  # fmt: skip
def random_log_is_the_diagonal_and_the_logarithm(
    target, size, align, causal, draw, random, leading
):
    """Eq. 10.13, and Eq. 10.12 from the words of the mask law: ⌈log₂ M⌉ tiles beside those of the
    diagonal, or as many as asked."""
    n, m, tile = size
    mask = target.random_log(n, m, draw=draw, layer=1, random=random, causal=causal,
        leading=leading, tile=tile, align=align)  # fmt: skip
    k = (math.ceil(math.log2(m)) if m else 0) if random is None else random
    assert_drawn(mask, size, align, causal, draw, 1, lambda low, high, j, d: d == 0,
        lambda low, high: k)  # fmt: skip
    if causal:
        assert_no_future(mask, n, m, align)


@suite.property(RANDOM, seed=seeds)
def random_log_grows_like_n_log_n(target, seed):
    """Eq. 10.13 counted: n + n ⌈log₂ n⌉ pairs with tiles of one pair, and with tiles of any fixed
    size as many tiles a row."""
    for n in (64, 256, 1000):
        mask = target.random_log(n, n, draw=Draw(seed), tile=1, align="lower_right")
        assert len(mask.columns) == n + n * math.ceil(math.log2(n)), f"{len(mask.columns)} at {n}"


@suite.property(BIGBIRD, RANDOM, seed=seeds)
def every_tile_is_as_likely(target, seed):
    """Eq. 10.12 chooses among all candidates alike, the last ones too: over 4000 draws each comes
    up k/n of the time, within five standard deviations.

    https://github.com/google-research/bigbird/issues/18
    """
    given = {"leading": (4000,), "tile": 4, "align": "upper_left", "draw": Draw(seed)}
    masks = {  # one row of 20 tiles, its own the first
        "bigbird": (target.bigbird(4, 80, ends=0, random=3, **given), {0, 1}, 3),
        "random_log": (target.random_log(4, 80, random=4, **given), {0}, 4),
    }
    for name, (mask, sure, k) in masks.items():
        counts = np.bincount(mask.columns, minlength=20)
        share = k / (20 - len(sure))
        bound = 5 * math.sqrt(4000 * share * (1 - share))
        for j in set(range(20)) - sure:
            assert abs(counts[j] - 4000 * share) < bound, (
                f"{name}: tile {j} is drawn {counts[j]} times of 4000, expected {4000 * share:.0f}"
            )


@suite.property(BIGBIRD, RANDOM, seed=seeds, step=st.integers(0, 99), layer=st.integers(0, 99))
def every_place_draws_its_own(target, seed, step, layer):
    """The same draw gives the same tiles, in training and in evaluation; another seed, step, layer,
    batch row or head others.

    https://github.com/huggingface/transformers/issues/23055
    """
    for pattern in (target.bigbird, target.random_log):

        def tiles(draw, layer, pattern=pattern):
            mask = pattern(256, 256, draw=draw, layer=layer, random=5, leading=(2, 2), tile=4,
                align="lower_right")  # fmt: skip
            return to_dense(mask)

        first = tiles(Draw(seed, step), layer)
        assert np.array_equal(first, tiles(Draw(seed, step), layer)), "the same draw differs"
        calm = tiles(Draw(seed, step, training=False), layer)
        assert np.array_equal(first, calm), "evaluation draws another pattern"
        others = [
            first,
            tiles(Draw(seed ^ 1, step), layer),
            tiles(Draw(seed, step + 1), layer),
            tiles(Draw(seed, step), layer + 1),
            first[::-1],
            first[:, ::-1],
        ]
        for a in range(len(others)):
            for b in range(a):
                assert not np.array_equal(others[a], others[b]), "two places draw alike"


# ---- all of them ---------------------------------------------------------------------------------


def patterns_of(target, n: int, m: int, tile, align: str, seed: int, causal: bool):
    """One of each, by name."""
    given = {"tile": tile, "align": align}
    drawn = {**given, "draw": Draw(seed), "leading": (2,), "causal": causal}
    return {
        "longformer": target.longformer(n, m, window=2, tokens=(0,) if m else (), causal=causal,
            **given),
        "bigbird": target.bigbird(n, m, random=2, **drawn),
        "random_log": target.random_log(n, m, random=2, **drawn),
        "strided": target.strided(n, m, stride=3, **given),
        "fixed": target.fixed(n, m, block=3, summary=1, **given),
        "log_sparse": target.log_sparse(n, m, **given),
    }  # fmt: skip


ALL = (LONGFORMER, BIGBIRD, RANDOM, STRIDED, FIXED, LOG)


@suite.property(*ALL, size=sizes, align=alignments, seed=seeds, causal=st.booleans())
def attention_over_a_pattern_is_dense_under_its_mask(target, size, align, seed, causal):
    """Tile by tile, forward and backward: no pair is counted twice and none is left out, whatever
    parts of a pattern overlap.

    https://github.com/google-research/bigbird/issues/35
    """
    n, m, tile = size
    q, k, v = normal((2, n, 3), seed), normal((2, m, 3), seed ^ 1), normal((2, m, 2), seed ^ 2)
    for name, mask in patterns_of(target, n, m, tile, align, seed, causal).items():
        keep = np.broadcast_to(to_dense(mask), (2, n, m))
        out, cache = tiled_attention_forward(q, k, v, mask)
        expected, whole = dense.attention_forward(q, k, v, keep=keep)
        assert_close(out, expected, what=f"out of {name}")
        dout = cotangent(out, seed)
        grads = tiled_attention_backward(dout, cache)
        exact = dense.attention_backward(dout, whole)
        for x in ("q", "k", "v"):
            assert_close(
                getattr(grads, x), getattr(exact, x), GRADIENT, what=f"gradient of {x} of {name}"
            )


@suite.property(*ALL, size=sizes, align=alignments, seed=seeds, causal=st.booleans())
def every_token_reads_itself(target, size, align, seed, causal):
    """d = 0 is in every pattern (Eq. 10.9): a query that is one of the keys keeps that key."""
    n, m, tile = size
    o = offset_of(n, m, align)
    rows = np.array([i for i in range(n) if 0 <= i + o < m], dtype=np.int64)
    for name, mask in patterns_of(target, n, m, tile, align, seed, causal).items():
        assert to_dense(mask)[..., rows, rows + o].all(), f"{name}: a token may not read itself"
