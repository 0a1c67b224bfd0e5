"""What block-sparse attention must do: equal dense attention under the expanded mask, forward and
backward, and never look at a tile that is not listed."""

import tracemalloc
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.attention import dense
from minitransformer.attention.softmax import Partial, merge_forward
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.attention.dense import SHAPES, folded
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes
from minitransformer.checks.properties.sparse.block_mask import keep_of
from minitransformer.checks.strategies import normal, reachable, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import BACKWARD as GRADIENT
from minitransformer.sparse.block_mask import from_dense, to_dense

suite = Suite("sparse.tiled")

FORWARD, BACKWARD = "tiled_attention_forward", "tiled_attention_backward"

tiles = st.sampled_from([(2, 3), 1, (3, 2), 2, (1, 4), 8])
KINDS = ("tiles", "shared tiles", "causal", "keys", "dead rows", "random", "full", "empty")


# the complex step asks every index: two shapes will do, where dense attention was asked all
FEW = (((), (), (), 2, 1, 3, 4, 2, 1), ((2,), (1,), (), 2, 2, 2, 3, 1, 2))


class Case(NamedTuple):
    q: Array
    k: Array
    v: Array
    keep: Array  # with the leading axes of the layouts
    tile: int | tuple[int, int]
    options: dict

    @property
    def shape(self) -> tuple[int, ...]:
        """(*B, H, N, M)"""
        return dense.score_shape(self.q, self.k, self.v)

    @property
    def allowed(self) -> Array:
        """Who may attend to whom, (*B, H, N, M)."""
        return np.broadcast_to(self.keep, self.shape)

    def of(self, target):
        mask = from_dense(self.keep, tile=self.tile)
        return target.tiled_attention_forward(*self[:3], mask, **self.options)

    def by_dense(self):
        return dense.attention_forward(*self[:3], keep=self.allowed, **self.options)


def mask_of(kind: str, shape: tuple[int, ...], tile, seed: int) -> Array:
    """A keep-mask with the leading axes that its layouts have."""
    *leading, heads, n, m = shape
    if kind == "keys":  # padding: one layout for each batch row, all heads
        kept = np.random.default_rng([seed, 21]).random((*leading, 1, 1, m)) < 0.6
        return np.broadcast_to(kept, (*leading, 1, n, m)).copy()
    if kind in ("shared tiles", "causal", "full", "empty"):
        return keep_of(kind.split()[-1], ((), n, m), tile, seed)
    kept = keep_of("random" if kind == "random" else "tiles", ((*leading, heads), n, m), tile, seed)
    if kind == "dead rows":
        kept[..., ::2, :] = False
    return kept


@st.composite
def cases(draw, *, kinds=KINDS, magnitude=(1.0, 4.0), softcaps=(None, 3), shapes=SHAPES):
    """Any shape with any list of tiles, scale and soft-cap."""
    leading_q, leading_k, leading_v, h, g, n, m, d, e = draw(st.sampled_from(shapes))
    seed, size = draw(seeds), draw(st.sampled_from(magnitude))
    q = normal((*leading_q, h, n, d), seed, size)
    k = normal((*leading_k, g, m, d), seed ^ 1, size)
    v = normal((*leading_v, g, m, e), seed ^ 2)
    tile = draw(tiles)
    shape = (*np.broadcast_shapes(leading_q, leading_k, leading_v), h, n, m)
    keep = mask_of(draw(st.sampled_from(kinds)), shape, tile, seed)
    options = {
        "scale": draw(st.sampled_from([None, 0.7])),
        "softcap": draw(st.sampled_from(softcaps)),
    }
    given = {name: x for name, x in options.items() if x is not None}
    return Case(q, k, v, keep, tile, given)


# ---- equal to the definition ---------------------------------------------------------------------


@suite.property(FORWARD, case=cases())
def the_output_is_that_of_dense_attention(target, case):
    """Eq. 11.1 - 11.3 under the expanded mask, along the lists of Eq. 10.2: full, partial, missing
    tiles, ragged ends, one layout or one for each head.

    https://github.com/pytorch/pytorch/issues/141126
    """
    assert_close(case.of(target)[0], case.by_dense()[0], what="out")


@suite.property(FORWARD, case=cases())
def the_lse_is_that_of_dense_attention(target, case):
    """L = m + log l of Eq. 11.3; -inf where no key may be read."""
    assert_close(case.of(target)[1].lse, case.by_dense()[1].lse, what="lse")


def assert_same_gradients(got, expected) -> None:
    for name in ("q", "k", "v"):
        assert_close(getattr(got, name), getattr(expected, name), GRADIENT, f"gradient of {name}")


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds, with_lse=st.booleans())
def the_gradients_are_those_of_dense_attention(target, case, seed, with_lse):
    """Eq. 11.4 - 11.7 under the expanded mask, along the lists of Eq. 10.2 and Eq. 10.3, for a
    cotangent of the output and of the LSE; what was broadcast is summed.

    https://github.com/pytorch/pytorch/issues/153799,
    https://github.com/Dao-AILab/flash-attention/issues/2552
    """
    (out, cache), (_, whole) = case.of(target), case.by_dense()
    dout = cotangent(out, seed)
    dlse = cotangent(whole.lse, seed ^ 1) if with_lse else None
    got = target.tiled_attention_backward(dout, cache, dlse=dlse)
    assert got.bias is None
    assert_same_gradients(got, dense.attention_backward(dout, whole, dlse=dlse))


@suite.property(FORWARD, BACKWARD, case=cases(magnitude=(1.0,), shapes=FEW), seed=seeds)
def the_backward_is_the_derivative(target, case, seed):
    """Eq. 11.4 - 11.7 against the complex step."""
    out, cache = case.of(target)
    dout = cotangent(out, seed)
    grads = target.tiled_attention_backward(dout, cache)
    inputs = {"q": case.q, "k": case.k, "v": case.v}
    assert_gradients(
        lambda q, k, v: case._replace(q=q, k=k, v=v).of(target)[0],
        {name: getattr(grads, name) for name in inputs},
        inputs,
        dout,
    )


@suite.property(FORWARD, BACKWARD, case=cases(shapes=FEW, kinds=("tiles", "dead rows")),
    seed=seeds)  # fmt: skip
def the_lse_has_a_gradient_too(target, case, seed):
    """dL enters Eq. 11.5 beside D: the derivative of the LSE of rows that have a key."""
    out, cache = case.of(target)
    alive = case.allowed.any(axis=-1)
    dlse = np.where(alive, cotangent(alive, seed), 0)
    grads = target.tiled_attention_backward(np.zeros_like(out), cache, dlse=dlse)

    def lse(q, k):
        found = case._replace(q=q, k=k).of(target)[1].lse
        return np.where(alive, found, 0)

    assert_gradients(lse, {"q": grads.q, "k": grads.k}, {"q": case.q, "k": case.k}, dlse)


# ---- how it is cut does not matter ---------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, case=cases(), other=tiles, seed=seeds)
def the_size_of_the_tiles_does_not_matter(target, case, other, seed):
    """The same pairs in other tiles give the same output (Eq. 11.2) and gradients (Eq. 11.6,
    11.7), up to rounding."""
    out, cache = case.of(target)
    moved, moved_cache = case._replace(tile=other).of(target)
    assert_close(moved, out, what="out")
    dout = cotangent(out, seed)
    assert_same_gradients(
        target.tiled_attention_backward(dout, moved_cache),
        target.tiled_attention_backward(dout, cache),
    )


@suite.property(FORWARD, case=cases(kinds=("random", "tiles", "causal")), seed=seeds)
def disjoint_layouts_merge_into_their_union(target, case, seed):
    """Keys split between two lists, joined by the online merge: what the state of Eq. 1.8 does from
    tile to tile in Eq. 11.2."""
    first = np.random.default_rng(seed).random(case.keep.shape) < 0.5
    parts = [case._replace(keep=case.keep & side).of(target) for side in (first, ~first)]
    merged, _ = merge_forward(*(Partial(out, cache.lse) for out, cache in parts))
    out, cache = case.of(target)
    assert_close(merged.out, out, what="out")
    assert_close(merged.lse, cache.lse, what="lse")


@suite.property(FORWARD, seed=seeds, far=st.sampled_from([1e4, 300.0, 1e300]),
    place=st.integers(0, 8))  # fmt: skip
def huge_scores_pick_the_largest_wherever_it_is(target, seed, far, place):
    """Eq. 11.2 on the scale of the largest so far: nothing overflows, and what was carried loses
    its weight when a larger one comes, in the first tile or in the last."""
    q, far = np.array([[[1.0]]]), reachable(far)
    rest = -np.random.default_rng(seed).random(9)
    rest[place] = 1.0
    v = normal((1, 9, 2), seed)
    mask = from_dense(np.ones((1, 9), np.bool_), tile=(1, 2))
    out, cache = target.tiled_attention_forward(q, (rest * far)[None, :, None], v, mask, scale=1.0)
    assert_close(out[0, 0], v[0, place])
    assert_close(cache.lse / far, np.ones((1, 1)), what="lse / largest score")


# ---- heads and layouts ---------------------------------------------------------------------------


@suite.property(FORWARD, seed=seeds, groups=st.sampled_from([2, 1, 3]),
    repeat=st.sampled_from([2, 1, 3]))  # fmt: skip
def query_head_h_reads_key_head_h_over_the_group_size(target, seed, groups, repeat):
    """Values that carry the number of their head show which one a query head read, and each head
    its own list."""
    heads = groups * repeat
    q, k = normal((heads, 3, 2), seed), normal((groups, 4, 2), seed ^ 1)
    v = 10.0 * np.arange(groups)[:, None, None] + np.arange(4)[:, None]
    keep = np.arange(4) == (np.arange(heads) % 4)[:, None, None]  # head h reads key h mod 4 alone
    mask = from_dense(np.broadcast_to(keep, (heads, 3, 4)).copy(), tile=2)
    out, _ = target.tiled_attention_forward(q, k, v, mask)
    expected = 10.0 * (np.arange(heads) // repeat) + np.arange(heads) % 4
    assert_close(out, np.broadcast_to(expected[:, None, None], out.shape))


# ---- what may not be read ------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds,
    poison=st.sampled_from(["nan", "inf", "big"]))  # fmt: skip
def what_nobody_may_read_changes_nothing(target, case, seed, poison):
    """NaN or infinity in a key or value that no query reads, in a tile that is not listed or behind
    its bits: the same bits come out, and its gradient is exactly 0 (Eq. 11.7)."""
    keep, groups = case.allowed, case.k.shape[-3]
    *leading, heads, n, m = case.shape
    read = keep.reshape(*leading, groups, heads // groups * n, m).any(axis=-2)
    value = {"nan": np.nan, "inf": -np.inf, "big": 1e200}[poison]
    unread_k, unread_v = ~folded(read, case.k), ~folded(read, case.v)

    def holding(entry):
        k = np.where(unread_k[..., None], entry, case.k)
        return case._replace(k=k, v=np.where(unread_v[..., None], entry, case.v))

    out, cache = holding(value).of(target)
    assert np.array_equal(out, holding(0.0).of(target)[0]), "an unread key or value was felt"
    grads = target.tiled_attention_backward(cotangent(out, seed), cache)
    assert all(np.isfinite(g).all() for g in grads[:3]), "an unread entry spoils a gradient"
    assert (grads.k[unread_k] == 0).all(), "gradient flows to a key that nobody may read"
    assert (grads.v[unread_v] == 0).all(), "gradient flows to a value that nobody may read"


@suite.property(FORWARD, BACKWARD, case=cases(kinds=("random", "causal", "tiles")), seed=seeds)
def a_nan_reaches_its_readers_alone(target, case, seed):
    """With check_finite off, a NaN in one key and value leaves every query that may not attend to
    it as it was, in the same tile too, and so the gradients of those queries (Eq. 11.6)."""
    m = case.shape[-1]
    if not m:
        return
    j = int(np.random.default_rng(seed).integers(m))
    k, v = case.k.copy(), case.v.copy()
    k[..., j, :], v[..., j, :] = np.nan, np.nan
    spoilt = case._replace(k=k, v=v, options={**case.options, "check_finite": False})
    (out, cache), (clean, clean_cache) = spoilt.of(target), case.of(target)
    apart = ~case.allowed[..., j]
    assert_close(out[apart], clean[apart], what="out of a query that may not attend to the NaN")
    dout = cotangent(out, seed)
    dq, expected = (target.tiled_attention_backward(dout, c).q for c in (cache, clean_cache))
    mine = ~folded(~apart, case.q)
    assert_close(dq[mine], expected[mine], GRADIENT, what="gradient of such a query")


@suite.property(FORWARD, BACKWARD, case=cases(kinds=("dead rows", "empty", "causal")), seed=seeds)
def dead_rows_are_zero_and_leak_nothing(target, case, seed):
    """A query with no key, in an empty row of tiles or behind bits, has output 0 and L = -inf (Eq.
    11.3); a NaN in it or in its cotangent reaches no gradient, and its own is 0 (Eq. 11.5)."""
    dead = ~case.allowed.any(axis=-1)
    dead_query = ~folded(~dead, case.q)
    q = np.where(dead_query[..., None], np.nan, case.q)
    out, cache = case._replace(q=q).of(target)
    assert (out[dead] == 0).all(), "the output of a dead row is not 0"
    assert (cache.lse[dead] == -np.inf).all(), "the LSE of a dead row is not -inf"
    dout = np.where(dead[..., None], np.nan, cotangent(out, seed))
    grads = target.tiled_attention_backward(dout, cache)
    assert all(np.isfinite(g).all() for g in grads[:3]), "a dead row leaks NaN"
    assert (grads.q[dead_query] == 0).all(), "gradient flows to the query of a dead row"


# ---- numbers and memory --------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, seed=seeds, dtype=dtypes)
def narrow_numbers_are_rounded_once(target, seed, dtype):
    """Stored narrow, computed in float32 over all the tiles of Eq. 11.2, rounded at the end; the
    LSE stays wide."""
    q, k, v = (normal((2, 40, 4), seed ^ n).astype(DTYPES[dtype]) for n in range(3))
    mask = from_dense(keep_of("random", ((2,), 40, 40), 4, seed), tile=4)
    out, cache = target.tiled_attention_forward(q, k, v, mask)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    exact, whole = dense.attention_forward(*wide, keep=to_dense(mask))
    assert_rounded_once(out, exact, dtype, what="out")
    assert cache.lse.dtype.itemsize >= 4, f"LSE in {cache.lse.dtype}: narrower than float32"
    dout = cotangent(out, seed).astype(DTYPES[dtype])
    grads = target.tiled_attention_backward(dout, cache)
    expected = dense.attention_backward(dout.astype(np.float64), whole)
    for name in ("q", "k", "v"):
        got = getattr(grads, name)
        assert_rounded_once(got, getattr(expected, name), dtype, what=f"gradient of {name}")


@suite.property(FORWARD, BACKWARD, n=st.sampled_from([512, 700]))
def nothing_of_the_size_of_the_scores_is_made(target, n):
    """Beyond inputs and outputs O(N): forward and backward together never hold even a boolean of
    N x M, in which Eq. 11.2 would be one line."""
    q, k, v = (normal((1, n, 2), n ^ i) for i in range(3))
    keep = np.zeros((n, n), np.bool_)
    keep[:8], keep[np.arange(n), np.arange(n)] = True, True
    mask = from_dense(keep, tile=16)
    tracemalloc.start()
    try:
        out, cache = target.tiled_attention_forward(q, k, v, mask)
        target.tiled_attention_backward(out, cache)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.8 * n * n, f"a peak of {peak} bytes for {n} x {n} pairs"


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds)
def arguments_are_left_alone(target, case, seed):
    """No array of the caller is modified, and one cache serves twice, to the bit.

    https://github.com/Dao-AILab/flash-attention/issues/429
    """
    before = [x.copy() for x in case[:3]]
    out, cache = case.of(target)
    dout = cotangent(out, seed)
    given = dout.copy()
    once, again = (target.tiled_attention_backward(dout, cache) for _ in range(2))
    assert all(map(np.array_equal, once[:3], again[:3])), "the second backward differs"
    assert all(map(np.array_equal, case[:3], before)), "an argument was modified"
    assert np.array_equal(dout, given), "the cotangent was modified"
