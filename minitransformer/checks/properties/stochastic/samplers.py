"""What a sampler must do: draw inside the structural mask, by the law of its kind, from the bits of
the mask law."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from minitransformer.attention.softmax import softmax_forward
from minitransformer.checks.gradients import assert_close
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.philox import Draw, Stream, inclusion_probability, random_bits, uniform
from minitransformer.stochastic.samplers import COUNTED, KINDS, RandomMask

suite = Suite("stochastic.samplers")

CLOSED = tuple(kind for kind in KINDS if kind != "gumbel")  # these know π
shapes = st.sampled_from(
    [(2, 3, 5, 7), (1, 1, 1, 1), (3, 2, 7, 3), (1, 2, 11, 11), (2, 5, 5), (7, 5), (2, 2, 1, 3, 5)]
)
empty_or_not = st.one_of(
    shapes, st.sampled_from([(0, 2, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0), (2, 0, 3, 3)])
)
structures = st.sampled_from(["everything", "causal", "random"])
rates = st.sampled_from([0.5, 0.3, 0.9, 1.0, 0.7])


def structural(structure, shape, seed):
    """A structural mask that broadcasts to `shape`; "random" has dead rows."""
    n, m = shape[-2:]
    if structure == "everything":
        return None
    if structure == "causal":
        return np.tri(n, m, m - n, dtype=np.bool_)
    rng = np.random.default_rng([seed, 3])
    return (rng.random(shape) < 0.7) & (rng.random((n, 1)) < 0.8)


def whole(keep, shape):
    return np.broadcast_to(True if keep is None else keep, shape)


def distance(n, m):
    """i + o - j with o = M - N: 0 where query and key are the same token."""
    return np.arange(n)[:, None] + m - n - np.arange(m)


def logits(shape, seed):
    return normal(shape, seed ^ 0x5C)


# ---- what every kind promises --------------------------------------------------------------------


@suite.property("resolve", shape=empty_or_not, structure=structures, rate=rates, seed=seeds)
def only_allowed_pairs_are_kept(target, shape, structure, rate, seed):
    """keep has the whole shape, lies inside the structural mask, and leaves its inputs alone."""
    structure_mask = structural(structure, shape, seed)
    before = None if structure_mask is None else structure_mask.copy()
    for kind in KINDS:
        got = target.resolve(RandomMask(kind, rate), Draw(seed), 0, shape, keep=structure_mask)
        assert got.keep.shape == shape and got.keep.dtype == np.bool_, kind
        assert not (got.keep & ~whole(structure_mask, shape)).any(), f"{kind} re-allows a pair"
        assert before is None or np.array_equal(before, structure_mask)


@suite.property("resolve", shape=empty_or_not, structure=structures, seed=seeds)
def rate_zero_is_the_structural_mask(target, shape, structure, seed):
    """p = 0 keeps every allowed pair, bit for bit, and multiplies nothing."""
    keep = structural(structure, shape, seed)
    for kind in KINDS:
        for compensation in ("renormalise",) if kind == "gumbel" else ("renormalise", "inverted"):
            mask = RandomMask(kind, 0.0, compensation=compensation)
            got = target.resolve(mask, Draw(seed), 0, shape, keep=keep)
            assert np.array_equal(got.keep, whole(keep, shape)), kind
            assert got.multiplier is None, kind


@suite.property("resolve", seed=seeds, step=st.integers(0, 9))
def evaluation_keeps_everything(target, seed, step):
    """No mask in evaluation; a Monte-Carlo sample draws one, and not that of training."""
    shape, evaluation = (2, 2, 7, 32), Draw(seed, step, training=False)
    for kind in KINDS:
        mask = RandomMask(kind, 0.5, tile=2)
        got = target.resolve(mask, evaluation, 0, shape)
        assert got.keep.all() and got.multiplier is None, f"{kind} drops in evaluation"
        samples = [target.resolve(mask, evaluation._replace(sample=s), 0, shape) for s in (1, 2)]
        samples.append(target.resolve(mask, Draw(seed, step), 0, shape))
        if kind != "head":  # six bits may well be equal
            for a, b in ((0, 1), (0, 2), (1, 2)):
                assert not np.array_equal(samples[a].keep, samples[b].keep), kind


@suite.property("resolve", shape=shapes, rate=rates, seed=seeds)
def protected_pairs_are_always_kept(target, shape, rate, seed):
    """The diagonal i + o = j and the protected columns stay, unscaled; so do a block's tiles that
    hold them (Eq. 5.1)."""
    n, m = shape[-2:]
    pairs = (distance(n, m) == 0) | (np.arange(m) == 1)
    tiles = np.zeros((n, m), dtype=np.bool_)
    for i, j in np.argwhere(pairs):
        tiles[i // 2 * 2 : i // 2 * 2 + 2, j // 3 * 3 : j // 3 * 3 + 3] = True
    for kind in KINDS:
        if kind == "head":
            continue
        compensation = "renormalise" if kind == "gumbel" else "inverted"
        mask = RandomMask(kind, rate, tile=(2, 3), protect_columns=(1,), compensation=compensation)
        got = target.resolve(mask, Draw(seed), 0, shape)
        protected = np.broadcast_to(tiles if kind == "block" else pairs, shape)
        assert got.keep[protected].all(), f"{kind} drops a protected pair"
        if compensation == "inverted":
            assert (got.multiplier[protected] == 1).all(), f"{kind} scales a protected pair"
        if rate == 1.0 and kind not in COUNTED:
            assert not got.keep[~protected].any(), f"{kind} protects what nobody asked for"
        free = replace(mask, rate=1.0, protect_diagonal=False, protect_columns=())
        kept = target.resolve(free, Draw(seed), 0, shape).keep
        assert kind in COUNTED or not kept.any(), f"{kind} protects without being asked"


@suite.property("resolve", shape=shapes, structure=structures, rate=rates, seed=seeds)
def every_head_has_its_own_rate(target, shape, structure, rate, seed):
    """drop_rate of shape (H,) replaces the rate head by head; a head with rate 0 is left alone."""
    h = shape[-3] if len(shape) > 2 else 1
    drop_rate = np.where(np.arange(h) % 2 == 0, rate, 0.0)
    keep = structural(structure, shape, seed)
    allowed = whole(keep, shape)
    off = np.broadcast_to((drop_rate == 0)[:, None, None], _four(shape)).reshape(shape)
    for kind in KINDS:
        mask = RandomMask(kind, 0.123, protect_diagonal=False)
        got = target.resolve(mask, Draw(seed), 0, shape, keep=keep, drop_rate=drop_rate)
        assert np.array_equal(got.keep[off], allowed[off]), f"{kind} touches a head with rate 0"
        same = target.resolve(replace(mask, rate=rate), Draw(seed), 0, shape, keep=keep)
        assert np.array_equal(got.keep[~off], same.keep[~off]), f"{kind} ignores drop_rate"


@suite.property("resolve", seed=seeds, step=st.integers(0, 2**31), layer=st.integers(0, 99))
def every_place_draws_anew(target, seed, step, layer):
    """The same draw gives the same mask; another seed, step, layer, batch row or head another."""
    for kind in KINDS:
        # enough places for chance to make no two masks equal
        shape = (16, 4, 1, 1) if kind == "head" else (2, 2, 4, 32)
        mask = RandomMask(kind, 0.5, tile=2, protect_diagonal=False)
        first = target.resolve(mask, Draw(seed, step), layer, shape).keep
        assert np.array_equal(first, target.resolve(mask, Draw(seed, step), layer, shape).keep)
        others = [
            target.resolve(mask, Draw(seed ^ 1, step), layer, shape).keep,
            target.resolve(mask, Draw(seed, step + 1), layer, shape).keep,
            target.resolve(mask, Draw(seed, step), layer + 1, shape).keep,
        ]
        places = [*others, first]
        if kind != "head":
            places.append(first[::-1])
        if kind not in ("head", "column"):
            places.append(first[:, ::-1])
        for a in range(len(places)):
            for b in range(a):
                assert not np.array_equal(places[a], places[b]), f"{kind} repeats itself"


# ---- each kind's own law -------------------------------------------------------------------------


@suite.property("resolve", shape=shapes, structure=structures, rate=rates, seed=seeds)
def kept_where_the_word_reaches_the_threshold(target, shape, structure, rate, seed):
    """Which word of Eq. 4.1 decides about a pair: Eq. 4.3 - 4.5, and Eq. 5.1 for a tile."""
    keep = structural(structure, shape, seed)
    batch, h, n, m = np.ix_(*(np.arange(size) for size in _four(shape)))
    where = {
        "element": (Stream.ELEMENT, batch * h.size + h, n, m),
        "column": (Stream.COLUMN, batch * h.size + 0 * h, 0 * n, m),
        "head": (Stream.HEAD, batch * h.size + h, 0 * n, 0 * m),
        "block": (Stream.BLOCK, batch * h.size + h, n // 2, m // 3),
    }
    for kind, (stream, *place) in where.items():
        mask = RandomMask(kind, rate, tile=(2, 3), protect_diagonal=False)
        got = target.resolve(mask, Draw(seed, 5), 2, shape, keep=keep).keep
        words = random_bits(Draw(seed, 5), stream, 2, *np.broadcast_arrays(*place))
        expected = (words >= np.uint64(round(rate * 2**32))).reshape(shape)
        assert np.array_equal(got, expected & whole(keep, shape)), kind


def _four(shape):
    """(B, H, N, M) of any shape."""
    *leading, h, n, m = (1, *shape) if len(shape) == 2 else shape
    return int(np.prod(leading, dtype=int)), h, n, m


@suite.property(
    "resolve",
    rate=rates,
    seed=seeds,
    tile=st.tuples(st.integers(0, 8), st.integers(1, 5), st.integers(0, 8), st.integers(1, 5)),
    cut=st.integers(0, 3),
)
def a_tile_is_the_slice_of_the_whole(target, rate, seed, tile, cut):
    """Element, column, block and head: any tile of any part of the batch, on its own."""
    r, n, c, m = tile
    shape = (4, 2, 13, 17)
    keep = structural("causal", shape, seed)
    for kind in ("element", "column", "block", "head"):
        mask = RandomMask(kind, rate, tile=(2, 3))
        full = target.resolve(mask, Draw(seed), 0, shape, keep=keep).keep
        part = target.resolve(
            mask,
            Draw(seed),
            0,
            (4 - cut, 2, n, m),
            keep=keep[r : r + n, c : c + m],
            offset=4,
            batch_start=cut,
            row_start=r,
            column_start=c,
        ).keep
        assert np.array_equal(part, full[cut:, :, r : r + n, c : c + m]), kind


@suite.property("resolve", shape=shapes, structure=structures, k=st.integers(1, 5), seed=seeds)
def fixed_k_keeps_the_smallest_words(target, shape, structure, k, seed):
    """Eq. 4.6: min(k, n) candidates of each row, those with the smallest (u, j)."""
    keep = structural(structure, shape, seed)
    mask = RandomMask("fixed_k", k=k)
    got = target.resolve(mask, Draw(seed), 3, shape, keep=keep).keep.reshape(_four(shape))
    allowed = whole(keep, shape).reshape(_four(shape))
    b, h, n, m = _four(shape)
    on_diagonal = distance(n, m) == 0
    for at in np.ndindex(b, h, n):
        candidates = np.nonzero(allowed[at] & ~on_diagonal[at[2]])[0]
        head, row = np.asarray(at[0] * h + at[1]), np.asarray(at[2])
        words = random_bits(Draw(seed), Stream.FIXED_K, 3, head, row, candidates)
        chosen = sorted(zip(words.tolist(), candidates.tolist(), strict=True))[:k]
        expected = {j for _, j in chosen} | set(np.nonzero(allowed[at] & on_diagonal[at[2]])[0])
        assert set(np.nonzero(got[at])[0]) == expected


def _log_proposal(proposal, shape, seed):
    """The logarithm of an unnormalised proposal, as the docstring of the kinds states it."""
    if proposal == "distance":
        return np.broadcast_to(-np.log(1.0 + np.abs(distance(*shape[-2:]))), shape)
    return logits(shape, seed) if proposal == "scores" else np.zeros(shape)


proposals = st.sampled_from(["uniform", "distance", "scores"])


@suite.property(
    "resolve",
    shape=shapes,
    structure=structures,
    proposal=proposals,
    k=st.integers(1, 5),
    seed=seeds,
)
def multinomial_counts_draws_from_the_proposal(target, shape, structure, proposal, k, seed):
    """Eq. 4.7: k draws by inverse transform, each weighted by 1 / (k ρ)."""
    keep = structural(structure, shape, seed)
    mask = RandomMask(
        "multinomial", k=k, proposal=proposal, protect_diagonal=False, compensation="inverted"
    )
    scores = logits(shape, seed)
    got = target.resolve(mask, Draw(seed), 0, shape, keep=keep, scores=scores)
    allowed = whole(keep, shape)
    rho = softmax_forward(np.where(allowed, _log_proposal(proposal, shape, seed), -np.inf))[0]
    b, h, n, m = _four(shape)
    counts = np.zeros((b, h, n, m))
    for at in np.ndindex(b, h, n):
        row = rho.reshape(counts.shape)[at]
        reached = np.cumsum(row)
        if reached[-1] > 0:
            head, i = np.asarray(at[0] * h + at[1]), np.asarray(at[2])
            words = random_bits(Draw(seed), Stream.MULTINOMIAL, 0, head, i, np.arange(k))
            for u in uniform(words):
                counts[at][np.searchsorted(reached / reached[-1], u, side="right")] += 1
    counts = counts.reshape(shape)
    assert np.array_equal(got.keep, counts > 0)
    assert_close(got.multiplier * k * rho, counts, what="counts")


@suite.property(
    "resolve",
    shape=shapes,
    structure=structures,
    proposal=proposals,
    k=st.integers(1, 5),
    seed=seeds,
)
def gumbel_keeps_the_largest_perturbed(target, shape, structure, proposal, k, seed):
    """Eq. 4.8: the k largest log ρ - log(-log u) among the candidates."""
    keep = structural(structure, shape, seed)
    mask = RandomMask("gumbel", k=k, proposal=proposal, protect_diagonal=False)
    got = target.resolve(mask, Draw(seed), 0, shape, keep=keep, scores=logits(shape, seed)).keep
    b, h, n, m = np.ix_(*(np.arange(size) for size in _four(shape)))
    words = random_bits(Draw(seed), Stream.GUMBEL, 0, b * h.size + h, n, m).reshape(shape)
    u = (uniform(words) * 2**24 + 0.5) / 2**24
    perturbed = _log_proposal(proposal, shape, seed) - np.log(-np.log(u))
    perturbed = np.where(whole(keep, shape), perturbed, -np.inf)
    smallest_kept = np.sort(perturbed, axis=-1)[..., ::-1][..., min(k, m.size) - 1, None]
    assert np.array_equal(got, (perturbed >= smallest_kept) & whole(keep, shape))


@suite.property("resolve", shape=shapes, structure=structures, rate=rates, seed=seeds)
def a_redraw_changes_empty_rows_only(target, shape, structure, rate, seed):
    """Eq. 4.9: with min_keep=1 every row that has a candidate keeps one; rows that had one are
    untouched; at p = 1 it keeps exactly one."""
    keep = structural(structure, shape, seed)
    mask = RandomMask("element", rate, protect_diagonal=False)
    once = target.resolve(mask, Draw(seed), 0, shape, keep=keep).keep
    again = target.resolve(replace(mask, min_keep=1), Draw(seed), 0, shape, keep=keep).keep
    alive = whole(keep, shape).any(axis=-1)
    assert np.array_equal(again.any(axis=-1), alive), "a row is empty, or a dead row is not"
    assert not (again & ~whole(keep, shape)).any()
    full = once.any(axis=-1)
    assert np.array_equal(again[full], once[full])
    assert rate < 1 or (again.sum(axis=-1) == alive).all()


@suite.property("resolve", seed=seeds, rate=rates)
def kept_heads_speak_for_the_dropped(target, seed, rate):
    """Renormalised, the H heads that may be dropped keep their sum: H / #kept each  (Eq. 4.5)"""
    shape, drop_rate = (4, 5, 3, 3), np.array([rate, 0.0, rate, rate, rate])
    got = target.resolve(RandomMask("head"), Draw(seed), 0, shape, drop_rate=drop_rate)
    kept = got.keep.all(axis=(-2, -1))
    assert np.array_equal(kept, got.keep.any(axis=(-2, -1))), "half a head"
    assert (got.multiplier[:, 1] == 1).all(), "a head that is never dropped is scaled"
    may = [0, 2, 3, 4]
    total = (got.multiplier * got.keep)[:, may, 0, 0].sum(axis=-1)
    assert_close(total, np.where(kept[:, may].any(axis=-1), 4.0, 0.0), what="sum over heads")


# ---- inclusion probabilities ---------------------------------------------------------------------


@suite.property(
    "resolve",
    "inclusion_probabilities",
    structure=st.sampled_from(["everything", "causal"]),
    rate=st.sampled_from([0.5, 0.3, 0.8]),
    protect=st.booleans(),
    seed=seeds,
)
def inclusion_is_the_frequency(target, structure, rate, protect, seed):
    """π of Eq. 4.2 - 4.9 is how often a pair is kept: 2000 independent masks, within 5 sigma."""
    shape = (2000, 1, 4, 5)
    keep = structural(structure, shape, seed)
    scores = np.broadcast_to(logits((4, 5), seed), shape)
    masks = [RandomMask(k, rate, tile=2, protect_diagonal=protect) for k in CLOSED]
    masks.append(RandomMask("element", rate, protect_diagonal=protect, min_keep=1))
    masks.append(RandomMask("fixed_k", k=3, protect_diagonal=protect))
    masks.append(RandomMask("multinomial", k=3, proposal="scores", protect_diagonal=protect))
    for mask in masks:
        got = target.resolve(mask, Draw(seed), 0, shape, keep=keep, scores=scores).keep
        pi = target.inclusion_probabilities(mask, (1, 1, 4, 5), keep=keep, scores=scores[:1])
        sigma = np.sqrt(np.maximum(pi[0, 0] * (1 - pi[0, 0]), 1e-12) / len(got))
        frequency = got.mean(axis=(0, 1))
        assert (np.abs(frequency - pi[0, 0]) <= 5 * sigma + 1e-9).all(), (
            f"{mask}: kept with frequency {frequency}, π is {pi[0, 0]}"
        )


@suite.property(
    "resolve", "inclusion_probabilities", shape=shapes, structure=structures, rate=rates, seed=seeds
)
def inverted_divides_by_the_inclusion(target, shape, structure, rate, seed):
    """The multiplier is Z/π, so its mean is 1 wherever π > 0; at p = 1 it is 0, never 0/0."""
    keep = structural(structure, shape, seed)
    masks = [RandomMask(kind, rate, tile=2) for kind in CLOSED if kind != "multinomial"]
    masks.append(RandomMask("element", rate, protect_diagonal=False, min_keep=1))
    masks.append(RandomMask("fixed_k", k=2))
    for mask in masks:
        mask = replace(mask, compensation="inverted")
        got = target.resolve(mask, Draw(seed), 0, shape, keep=keep)
        pi = target.inclusion_probabilities(mask, shape, keep=keep)
        assert np.isfinite(got.multiplier).all()
        assert_close(got.multiplier * pi, got.keep.astype(np.float64), what=f"{mask.kind}: Z")


@suite.property("inclusion_probabilities", n=st.integers(1, 9), rate=rates, seed=seeds)
def inclusion_has_the_closed_form(target, n, rate, seed):
    """π on a row of n candidates, kind by kind (Eq. 4.2 - 4.9); a forbidden pair has 0."""
    keep = np.append(np.ones(n, dtype=np.bool_), False)
    p = 1 - float(inclusion_probability(rate))
    rho = softmax_forward(logits((n,), seed))[0]
    row = {"scores": np.append(logits((n,), seed), 9.0), "keep": keep}
    counted = {"k": 3, "protect_diagonal": False}
    cases = [
        (RandomMask("element", rate, protect_diagonal=False), 1 - p),
        (RandomMask("column", rate, protect_diagonal=False), 1 - p),
        (RandomMask("block", rate, protect_diagonal=False), 1 - p),
        (RandomMask("head", rate), 1 - p),
        (RandomMask("fixed_k", **counted), min(3, n) / n),
        (RandomMask("multinomial", proposal="scores", **counted), 1 - (1 - rho) ** 3),
        (
            RandomMask("element", rate, protect_diagonal=False, min_keep=1),
            1 / n if rate == 1 else (1 - p) / (1 - p**n),
        ),
    ]
    for mask, expected in cases:
        got = target.inclusion_probabilities(mask, (1, n + 1), **row)[0]
        assert got[n] == 0, "a forbidden pair has a probability"
        assert_close(got[:n], np.broadcast_to(expected, n), tolerance=1e-11, what=mask.kind)
