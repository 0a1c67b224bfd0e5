"""Which pairs a structural mask allows, pair by pair, and that a tile of it is a slice of it."""

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.strategies import seeds
from minitransformer.checks.suite import Suite

suite = Suite("attention.masks")

lengths = st.sampled_from([5, 1, 2, 7, 0])
alignments = st.sampled_from(["lower_right", "upper_left"])
reaches = st.sampled_from([1, 0, 2, -1])


def by_pairs(queries, keys, align, allowed):
    """The mask as loops: `allowed(p, j)` of the query's absolute position p and the key j."""
    o = keys - queries if align == "lower_right" else 0
    kept = [[bool(allowed(i + o, j)) for j in range(keys)] for i in range(queries)]
    return np.array(kept, dtype=np.bool_).reshape(queries, keys)


def assert_same_pairs(got, expected):
    """Equal shape, equal dtype, and the first pair that differs named."""
    assert got.shape == expected.shape, f"got shape {got.shape}, expected {expected.shape}"
    assert got.dtype == np.bool_, f"got dtype {got.dtype}, expected bool"
    wrong = np.argwhere(got != expected)
    if len(wrong):
        at = tuple(int(n) for n in wrong[0])
        raise AssertionError(f"pair {at}: got {got[at]}, expected {expected[at]}")


def reaches_everything_before(first, second):
    """Two hops, each free to stay where it is, reach every position up to one's own."""
    stay = np.eye(len(first), dtype=np.int64)
    hops = (second + stay) @ (first + stay)
    return np.array_equal(hops > 0, np.tri(len(first), dtype=np.bool_))


# ---- by distance ---------------------------------------------------------------------------------


@suite.property("causal", n=lengths, m=lengths, align=alignments)
def causal_allows_the_past_and_oneself(target, n, m, align):
    """j <= i + o (Eq. 3.2), with the offset o of the alignment (Eq. 3.1)."""
    expected = by_pairs(n, m, align, lambda p, j: j <= p)
    assert_same_pairs(target.causal(n, m, align=align).dense(), expected)


@suite.property("causal", n=st.integers(1, 7), m=st.integers(1, 7))
def the_alignments_agree_only_when_square(target, n, m):
    """The last query sees every key at the lower right, the first sees one at the upper left."""
    lower = target.causal(n, m, align="lower_right").dense()
    upper = target.causal(n, m, align="upper_left").dense()
    assert np.array_equal(lower, upper) == (n == m)
    assert lower[-1].all()
    assert upper[0].sum() == 1


@suite.property("window", n=lengths, m=lengths, left=reaches, right=reaches, align=alignments)
def window_includes_both_ends(target, n, m, left, right, align):
    """i + o - left <= j <= i + o + right, and -1 is no limit (Eq. 3.3)."""

    def allowed(p, j):
        return (left == -1 or p - left <= j) and (right == -1 or j <= p + right)

    mask = target.window(n, m, left=left, right=right, align=align)
    assert_same_pairs(mask.dense(), by_pairs(n, m, align, allowed))


@suite.property(
    "dilated",
    n=lengths,
    m=lengths,
    width=st.sampled_from([1, 0, 2]),
    dilation=st.sampled_from([2, 1, 3]),
    align=alignments,
)
def dilated_window_takes_every_nth_key(target, n, m, width, dilation, align):
    """The keys at p, p ± dilation, ..., p ± width · dilation (Eq. 3.4)."""

    def allowed(p, j):
        return j in [p + step * dilation for step in range(-width, width + 1)]

    mask = target.dilated(n, m, width=width, dilation=dilation, align=align)
    assert_same_pairs(mask.dense(), by_pairs(n, m, align, allowed))


# ---- the sparse Transformer ----------------------------------------------------------------------


@suite.property(
    "strided",
    n=lengths,
    m=lengths,
    stride=st.sampled_from([2, 1, 3]),
    part=st.sampled_from(["both", "local", "stride"]),
    align=alignments,
)
def strided_is_the_last_few_and_every_nth_before(target, n, m, stride, part, align):
    """Eq. 3.5, pair by pair, in its parts and their union."""

    def allowed(p, j):
        near = j in range(p - stride + 1, p + 1)
        far = j in range(p, -1, -stride)
        return {"local": near, "stride": far, "both": near or far}[part]

    mask = target.strided(n, m, stride=stride, part=part, align=align)
    assert_same_pairs(mask.dense(), by_pairs(n, m, align, allowed))


@suite.property(
    "fixed",
    n=lengths,
    m=lengths,
    block=st.sampled_from([3, 2, 1]),
    summary=st.integers(1, 3),
    part=st.sampled_from(["both", "block", "summary"]),
    align=alignments,
)
def fixed_is_the_own_block_and_the_ends_of_blocks(target, n, m, block, summary, part, align):
    """Eq. 3.6, pair by pair, in its parts and their union."""
    summary = min(summary, block)

    def allowed(p, j):
        start = p - p % block
        own = j in range(start, p + 1)
        end = j <= p and j % block in range(block - summary, block)
        return {"block": own, "summary": end, "both": own or end}[part]

    mask = target.fixed(n, m, block=block, summary=summary, part=part, align=align)
    assert_same_pairs(mask.dense(), by_pairs(n, m, align, allowed))


@suite.property("strided", "fixed", n=st.integers(1, 13), size=st.integers(1, 4))
def two_hops_reach_everything_before(target, n, size):
    """One part, then the other, with the residual path between: the point of the factorisation."""
    options = {"align": "lower_right"}
    local = target.strided(n, n, stride=size, part="local", **options).dense()
    far = target.strided(n, n, stride=size, part="stride", **options).dense()
    assert reaches_everything_before(far, local), "strided: a position cannot be reached"
    own = target.fixed(n, n, block=size, summary=1, part="block", **options).dense()
    ends = target.fixed(n, n, block=size, summary=1, part="summary", **options).dense()
    assert reaches_everything_before(own, ends), "fixed: a position cannot be reached"


# ---- by token ------------------------------------------------------------------------------------


@suite.property("global_tokens", n=lengths, m=lengths, seed=seeds, align=alignments)
def global_tokens_see_and_are_seen_by_all(target, n, m, seed, align):
    """The rows and the columns of the chosen tokens, and nothing else (Eq. 3.7)."""
    tokens = np.flatnonzero(np.random.default_rng(seed).random(m) < 0.4).tolist()
    expected = by_pairs(n, m, align, lambda p, j: p in tokens or j in tokens)
    assert_same_pairs(target.global_tokens(n, m, tokens=tokens, align=align).dense(), expected)


@suite.property("padding", n=lengths, m=lengths, batch=st.sampled_from([(2,), (), (3, 1), (0,)]),
    seed=seeds)  # fmt: skip
def padding_hides_keys_and_no_queries(target, n, m, batch, seed):
    """Batch row b reads its first lengths[b] keys (Eq. 3.8); the shape leaves an axis for heads."""
    given = np.random.default_rng(seed).integers(0, m + 1, size=batch)
    expected = np.zeros((*batch, 1, n, m), np.bool_)
    for b in np.ndindex(batch):
        expected[b][..., : given[b]] = True
    assert_same_pairs(target.padding(np.asarray(given), queries=n, keys=m).dense(), expected)


@suite.property("packed", n=lengths, m=lengths, batch=st.sampled_from([(2,), (), (3, 2)]),
    seed=seeds)  # fmt: skip
def packed_documents_do_not_read_each_other(target, n, m, batch, seed):
    """Pairs of the same document (Eq. 3.9), in whatever order the documents come."""
    rng = np.random.default_rng(seed)
    query, key = rng.integers(0, 3, (*batch, n)), rng.integers(0, 3, (*batch, m))
    expected = np.zeros((*batch, 1, n, m), np.bool_)
    for index in np.ndindex(*batch, n, m):
        *b, i, j = index
        expected[(*b, 0, i, j)] = query[(*b, i)] == key[(*b, j)]
    assert_same_pairs(target.packed(query, key).dense(), expected)


# ---- together ------------------------------------------------------------------------------------


@suite.property("causal", "window", "padding", n=lengths, m=lengths, seed=seeds, align=alignments)
def masks_combine_pair_by_pair(target, n, m, seed, align):
    """`&` allows what both allow, `|` what either does; a batch axis stays."""
    given = np.random.default_rng(seed).integers(0, m + 1, size=(2,))
    padded = target.padding(given, queries=n, keys=m)
    past = target.causal(n, m, align=align)
    near = target.window(n, m, left=1, right=1, align=align)
    both = past.dense() & near.dense()
    assert_same_pairs((past & near).dense(), both)
    assert_same_pairs((past & near & padded).dense(), both & padded.dense())
    assert_same_pairs((near | past).dense(), near.dense() | past.dense())


@suite.property("causal", "global_tokens", "strided", "padding", "packed", n=st.integers(2, 7),
    m=st.integers(2, 7), seed=seeds)  # fmt: skip
def a_tile_is_a_slice(target, n, m, seed):
    """A rule asked of one tile gives that part of the whole mask: what kernels rely on."""
    rng = np.random.default_rng(seed)
    i, j = np.arange(rng.integers(1, n), n), np.arange(rng.integers(1, m), m)
    options = {"align": "lower_right"}
    segments = rng.integers(0, 2, (2, n)), rng.integers(0, 2, (2, m))
    for mask in (
        target.causal(n, m, **options),
        target.global_tokens(n, m, tokens=[m - 1], **options),
        target.strided(n, m, stride=2, **options),
        target.padding(rng.integers(0, m + 1, (2,)), queries=n, keys=m),
        target.packed(*segments),
    ):
        assert_same_pairs(mask(i[:, None], j), mask.dense()[..., i[:, None], j])
