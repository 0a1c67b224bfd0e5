"""What the random bits must be: the published generator, at the counter that the mask law names."""

import itertools

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close
from minitransformer.checks.strategies import seeds
from minitransformer.checks.suite import Suite
from minitransformer.philox import Draw, Stream

suite = Suite("philox")

ONES = 2**32 - 1
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
# (counter, key, rounds, words): from the known-answer file of the authors' Random123 library
KNOWN = (
    ((0, 0, 0, 0), (0, 0), 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES,) * 4, (ONES,) * 2, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (PI[:4], PI[4:], 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ((0, 0, 0, 0), (0, 0), 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
)


def philox_naive(counter, key):
    """Ten rounds on Python's own integers, which never overflow."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & ONES, (a >> 32) ^ c3 ^ k1, a & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return c0, c1, c2, c3


draws = st.builds(
    Draw, seeds, seeds, st.booleans(), st.integers(0, 15)
)  # seed, step, training, sample
# MONTE_CARLO is the distance between the streams of two samples, and no stream itself
streams = st.sampled_from([s for s in Stream if s < Stream.MONTE_CARLO])
layers = st.sampled_from([0, 1, 2, 65535])


@suite.property("philox", known=st.sampled_from(KNOWN))
def known_answers_of_the_authors(target, known):
    """Philox4x32 gives the words that its authors publish, with 10 rounds and with 7."""
    counter, key, rounds, words = known
    got = target.philox(tuple(np.asarray(c) for c in counter), key, rounds=rounds)
    assert got.dtype == np.uint32
    assert " ".join(f"{w:08x}" for w in got) == words


@suite.property("philox", seed=seeds, key=st.tuples(seeds, seeds))
def ten_rounds_is_the_default(target, seed, key):
    """Without being told, ten rounds: over random counters, against plain integers."""
    counter = np.random.default_rng(seed).integers(0, 2**32, (4, 5))
    got = target.philox(tuple(counter), key)
    assert got.shape == (5, 4)
    expected = [philox_naive([int(c) for c in column], key) for column in counter.T]
    assert np.array_equal(got, expected)


@suite.property("random_bits", draw=draws, stream=streams, layer=layers, seed=seeds)
def bits_follow_the_mask_law(target, draw, stream, layer, seed):
    """Eq. 4.1: the key holds seed, stream and layer; the counter j >> 2, i, b·H + h and step."""
    rng = np.random.default_rng(seed)
    heads, rows, columns = rng.integers(0, 1000, (3, 7))
    got = target.random_bits(draw, stream, layer, heads, rows, columns)
    key = (draw.seed, (int(stream) + 0x1000 * draw.sample) << 16 | layer)
    for g, h, i, j in zip(got, heads, rows, columns, strict=True):
        assert g == philox_naive((int(j) >> 2, int(i), int(h), draw.step), key)[int(j) & 3]


@suite.property("random_bits", draw=draws, cut=st.tuples(*[st.integers(0, 6)] * 3), seed=seeds)
def a_tile_is_the_slice_of_the_whole(target, draw, cut, seed):
    """Any tile, any part of the batch, in any order, equals that part of the whole (Eq. 4.1)."""
    sizes = (5, 6, 11)
    whole = target.random_bits(draw, Stream.ELEMENT, 3, *np.ix_(*(np.arange(n) for n in sizes)))
    rng = np.random.default_rng(seed)
    parts = [rng.permutation(n)[min(c, n) :] for n, c in zip(sizes, cut, strict=True)]
    tile = target.random_bits(draw, Stream.ELEMENT, 3, *np.ix_(*parts))
    assert np.array_equal(tile, whole[np.ix_(*parts)])


@suite.property("random_bits", seed=seeds, step=st.integers(0, 2**31))
def every_coordinate_changes_the_bits(target, seed, step):
    """Another seed, step, sample, stream, layer, head, row or column: other bits."""
    first = Draw(seed, step, True, 0)
    cases = [
        (draw, stream, layer, head)
        for draw in (first, first._replace(step=step + 1), first._replace(sample=1))
        for stream in (Stream.ELEMENT, Stream.DROPOUT)
        for layer in (0, 1)
        for head in (0, 1)
    ]
    cases.append((first._replace(seed=seed ^ 1), Stream.ELEMENT, 0, 0))
    i, j = np.ix_(np.arange(4), np.arange(8))
    blocks = [
        target.random_bits(d, stream, layer, np.asarray(head), i, j)
        for d, stream, layer, head in cases
    ]
    for a, b in itertools.combinations(blocks, 2):
        assert (a != b).mean() > 0.9, "two different places share their bits"
    assert len(np.unique(blocks[0])) == blocks[0].size, "rows or columns share their bits"


@suite.property("random_bits", seed=seeds)
def bytes_are_uniform(target, seed):
    """Each of the 256 values of each of the 4 bytes is as frequent: chi-square within 6 sigma."""
    bits = target.random_bits(Draw(seed), Stream.ELEMENT, 0, *np.ix_([0], range(64), range(128)))
    for byte in bits.view(np.uint8).reshape(-1, 4).T:
        counts = np.bincount(byte, minlength=256)
        expected = byte.size / 256
        chi = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi - 255) < 6 * np.sqrt(2 * 255), f"chi-square {chi:.0f} with 255 degrees"


rates = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, 0.1, 0.25, 2.0**-33, 1 - 2.0**-33]), st.floats(0, 1)
)


@suite.property("threshold", "inclusion_probability", rate=rates)
def threshold_is_the_rounded_rate(target, rate):
    """Eq. 4.2: T = round(p · 2³²) without wrapping at p = 1, and π counts the words u32 >= T."""
    t = int(target.threshold(rate))
    assert t == round(rate * 2**32)
    assert float(target.inclusion_probability(rate)) == (2**32 - t) / 2**32
    words = np.array([0, max(t - 1, 0), min(t, ONES), ONES], dtype=np.uint32)
    kept = words >= target.threshold(rate)
    assert kept.tolist() == [int(w) >= t for w in words]


@suite.property("threshold", "inclusion_probability", seed=seeds)
def every_head_has_its_own_threshold(target, seed):
    """Eq. 4.2 entry by entry."""
    rates = np.random.default_rng(seed).random((2, 3))
    got = target.threshold(rates)
    assert got.shape == rates.shape
    assert got.tolist() == [[round(p * 2**32) for p in row] for row in rates.tolist()]
    assert_close(target.inclusion_probability(rates), 1 - rates, tolerance=2.0**-32)


@suite.property("uniform", seed=seeds)
def uniform_numbers_lie_in_the_half_open_interval(target, seed):
    """[0, 1) on a grid of 2⁻²⁴, exact in float32, and in the order of the words."""
    words = np.random.default_rng(seed).integers(0, 2**32, 50, dtype=np.uint32)
    words = np.sort(np.append(words, np.array([0, ONES], dtype=np.uint32)))
    u = target.uniform(words)
    assert u[0] == 0
    assert u[-1] == 1 - 2.0**-24
    assert np.array_equal(u, u.astype(np.float32))
    assert np.array_equal(u * 2**24, words >> 8)
