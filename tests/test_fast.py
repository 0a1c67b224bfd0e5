"""Every Numba twin repeats the NumPy function that it stands for."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer import fast, philox
from minitransformer.checks.gradients import assert_close, cotangent
from minitransformer.checks.strategies import normal, seeds, sizes_or_empty
from minitransformer.checks.suite import GATE, Target, reference, suites
from minitransformer.checks.tolerances import of_dtype
from minitransformer.nn.activations import gelu_forward
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
    stream=st.sampled_from([s for s in philox.Stream if s < philox.Stream.MONTE_CARLO]),
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


# ---- element-wise twins: the properties of what they stand for, pointed at them ------------------


def quick(mechanism, **options):
    """The reference with its `fast` option on."""
    module = reference(mechanism)
    names = {"attention.dense": ["attention_forward"], "nn.activations": ["gelu_forward"],
        "nn.norms": ["layer_norm_forward", "layer_norm_backward"]}[mechanism]  # fmt: skip
    made = {name: functools.partial(getattr(module, name), fast=True, **options) for name in names}
    return Target(module, **made)


QUICK = {
    "attention.dense": quick("attention.dense", check_finite=False),
    "nn.activations": quick("nn.activations"),
    "nn.norms": quick("nn.norms"),
}
STATEMENTS = [(s.mechanism, p) for s in suites() if s.mechanism in QUICK for p in s.properties]


@pytest.mark.parametrize("mechanism, statement", STATEMENTS, ids=lambda x: getattr(x, "name", x))
def test_twins_pass_the_properties_of_what_they_stand_for(mechanism, statement):
    statement.run(QUICK[mechanism], GATE)


def outcome(mechanism, name, *arrays, fast, **options):
    """What a forward and its backward return, as one list of float64 arrays."""
    module = reference(mechanism)
    out, cache = getattr(module, f"{name}_forward")(*arrays, fast=fast, **options)
    given = {"fast": fast} if name == "layer_norm" else {}
    dout = cotangent(out, 3).astype(out.dtype)
    grads = getattr(module, f"{name}_backward")(dout, cache, **given)
    arrays = [out, *(grads if isinstance(grads, tuple) else [grads])]
    return [np.asarray(a, np.float64) for a in arrays if a is not None]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize(
    "mechanism, name, shapes",
    [
        ("nn.activations", "gelu", [(7, 33)]),
        ("nn.norms", "layer_norm", [(5, 3, 33), (33,), (33,)]),
        ("attention.dense", "attention", [(2, 4, 37, 8), (2, 2, 41, 8), (2, 2, 41, 5)]),
    ],
)
def test_twins_are_close_to_numpy_in_both_widths(mechanism, name, shapes, size, dtype):
    arrays = [normal(s, n, size).astype(dtype) for n, s in enumerate(shapes)]
    options = {"check_finite": False} if name == "attention" else {}
    slow = outcome(mechanism, name, *arrays, fast=False, **options)
    quick = outcome(mechanism, name, *arrays, fast=True, **options)
    for a, b in zip(slow, quick, strict=True):
        assert_close(b, a, of_dtype(dtype))


def test_a_twin_of_a_narrow_dtype_computes_in_float32():
    x = normal((3, 8), 1).astype(np.float16)
    (slow, _), (quick, _) = (gelu_forward(x, fast=f) for f in (False, True))
    assert quick.dtype == np.float16
    assert_close(quick.astype(np.float64), slow.astype(np.float64), of_dtype("float16"))
