"""Every Numba twin repeats the NumPy function that it stands for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer import fast, philox
from minitransformer.checks.strategies import seeds, sizes_or_empty
from minitransformer.stochastic.samplers import KINDS, RandomMask, resolve

# ---- random bits ---------------------------------------------------------------------------------

positions = st.tuples(sizes_or_empty, sizes_or_empty, sizes_or_empty, seeds, st.booleans())


def grid(drawn):
    """Heads, rows and columns: a run of neighbours, or any order at all, from any start."""
    *sizes, seed, neighbours = drawn
    rng = np.random.default_rng(seed)
    if neighbours:
        return [np.arange(n) + rng.integers(0, 99) for n in sizes]
    return [rng.integers(0, 2**31, n) for n in sizes]


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(
    seed=seeds,
    step=seeds,
    sample=st.integers(0, 15),
    layer=st.integers(0, 65535),
    stream=st.sampled_from(list(philox.Stream)),
    where=positions,
)
def test_philox_bits_are_bit_equal(seed, step, sample, layer, stream, where):
    draw = philox.Draw(seed, step, True, sample)
    heads, rows, columns = grid(where)
    bits = philox.random_bits(draw, stream, layer, *np.ix_(heads, rows, columns))
    twin = fast.philox_bits(draw, stream, layer, heads, rows, columns)
    assert twin.dtype == bits.dtype
    assert np.array_equal(twin, bits)

    rates = np.random.default_rng(seed).choice([0.0, 0.3, 0.5, 1.0], heads.size)
    thresholds = philox.threshold(rates)
    keep = fast.bernoulli_keep(draw, stream, layer, heads, rows, columns, thresholds)
    assert np.array_equal(keep, bits >= thresholds[:, None, None])


def test_philox_bits_of_a_whole_layer_do_not_depend_on_the_number_of_threads():
    import numba

    draw, axes = philox.Draw(7, 3), (np.arange(8), np.arange(64), np.arange(61))
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one = fast.philox_bits(draw, 1, 0, *axes)
    finally:
        numba.set_num_threads(before)
    assert np.array_equal(one, fast.philox_bits(draw, 1, 0, *axes))
    assert np.array_equal(one, philox.random_bits(draw, 1, 0, *np.ix_(*axes)))


def test_philox_bits_refuse_what_the_law_refuses():
    with pytest.raises(ValueError, match=r"draw\.sample must lie in \[0, 15\], got 16"):
        fast.philox_bits(philox.Draw(0, sample=16), 1, 0, *[np.arange(1)] * 3)


@pytest.mark.parametrize("kind", KINDS)
def test_fast_masks_are_the_same_masks(kind):
    compensation = "renormalise" if kind in ("gumbel", "head") else "inverted"
    mask = RandomMask(kind, 0.5, tile=(3, 2), compensation=compensation)
    shape, keep = (3, 2, 7, 11), np.tri(7, 11, 4, dtype=np.bool_)
    given = {"keep": keep, "drop_rate": np.array([0.3, 0.6]), "batch_start": 5}
    slow = resolve(mask, philox.Draw(3, 4), 1, shape, **given)
    quick = resolve(mask, philox.Draw(3, 4), 1, shape, fast=True, **given)
    for a, b in zip(slow, quick, strict=True):
        assert (a is None and b is None) or np.array_equal(a, b)


def test_fast_masks_draw_empty_rows_again_as_the_readable_ones_do():
    mask = RandomMask("element", 0.9, protect_diagonal=False, min_keep=1)
    masks = [resolve(mask, philox.Draw(1), 0, (4, 2, 9, 5), fast=f).keep for f in (False, True)]
    assert np.array_equal(*masks)
    assert masks[0].any(axis=-1).all()
