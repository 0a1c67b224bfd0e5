"""What a measure of likeness must say of heads: of pairs, copies, right angles, and of nothing."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.attention.softmax import softmax_forward
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, dtypes, entries
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype

suite = Suite("heads.diversity")

ALIKE, ALIKE_D = "output_similarity_forward", "output_similarity_backward"
OVERLAP, OVERLAP_D = "map_overlap_forward", "map_overlap_backward"
RIGHT, RIGHT_D = "orthogonality_forward", "orthogonality_backward"

# (*B, H, N, E) or (*B, H, N, M)
SHAPES = (
    (2, 3, 5, 4),
    (4, 2, 3),
    (2, 3, 1, 2, 5),
    (2, 1, 3, 2),
    (1, 2, 1, 1),
    (2, 5, 3, 2),
    (2, 2, 3, 0),
    (2, 3, 0, 4),
    (0, 2, 3, 2),
)
shapes = st.sampled_from(SHAPES)
# (*B, R, C)
MATRICES = ((3, 5), (2, 4, 4), (5, 2), (2, 3, 1, 3), (4, 1), (0, 3, 2), (2, 0, 3), (3, 2, 0))
matrices = st.sampled_from(MATRICES)


def heads_of(shape, seed: int, idle: bool) -> Array:
    """Outputs, some of them 0: heads with nothing to read in a row."""
    out = entries(shape, seed)
    if idle:
        out = np.where(np.random.default_rng([seed, 3]).random(shape[:-1])[..., None] < 0.4, 0, out)
    return out


def over_pairs(x: Array, product) -> Array:
    """(1/H²) Σ_ab product(x_a, x_b), row by row, pair by pair."""
    *leading, heads, rows, _ = x.shape
    found = np.zeros((*leading, rows))
    for *b, i in np.ndindex(*leading, rows):
        vectors = [x[(*b, a, i)] for a in range(heads)]
        found[(*b, i)] = math.fsum(product(u, w) for u in vectors for w in vectors) / heads**2
    return found


def cosine(u: Array, w: Array) -> float:
    lengths = math.hypot(*u.tolist()) * math.hypot(*w.tolist())
    return math.fsum((u * w).tolist()) / lengths if lengths else 0.0


# ---- outputs -------------------------------------------------------------------------------------


@suite.property(ALIKE, shape=shapes, seed=seeds, idle=st.booleans())
def similarity_is_the_mean_cosine_of_all_pairs(target, shape, seed, idle):
    """Eq. 14.13 pair by pair, a head with itself included; a head that gives 0 is like nobody."""
    out = heads_of(shape, seed, idle)
    got, _ = target.output_similarity_forward(out)
    assert_close(got, over_pairs(out, cosine))
    assert (got >= 0).all() and (got <= 1 + 1e-12).all()


@suite.property(ALIKE, OVERLAP, seed=seeds, heads=st.sampled_from([1, 2, 3, 4]))
def copies_and_right_angles_are_known(target, seed, heads):
    """By Eq. 14.13 copies are alike by 1, heads at right angles by 1/H, a head and its opposite by
    0; by Eq. 14.14 heads that all read one key overlap by 1, heads that read one each by 1/H."""
    copies = np.repeat(normal((2, 1, 3, 4), seed) + 5, heads, axis=1)
    assert_close(target.output_similarity_forward(copies)[0], np.ones((2, 3)), what="copies")
    axes = np.eye(4)[:heads, None] * np.array([3.0, 0.1, 20])[:, None]  # (H, N, E)
    apart = np.full(3, 1 / heads)
    assert_close(target.output_similarity_forward(axes)[0], apart, what="right angles")
    opposite = np.concatenate([copies, -2 * copies], axis=1)
    assert_close(target.output_similarity_forward(opposite)[0], np.zeros((2, 3)), what="opposites")
    one, each = np.zeros((heads, 3, 4)), (axes > 0).astype(float)
    one[..., 1] = 1
    assert_close(target.map_overlap_forward(one)[0], np.ones(3), what="one key for all")
    assert_close(target.map_overlap_forward(each)[0], apart, what="one key for each")


@suite.property(
    ALIKE, ALIKE_D, seed=seeds, size=st.sampled_from([1e-3, 1.0, 1e150, 1e-150, 1e-200])
)
def directions_count_lengths_do_not(target, seed, size):
    """A head that is louder or quieter is as like the others as before (Eq. 14.13), and its
    gradient stands at right angles to it, inversely as large (Eq. 14.16)."""
    out = normal((2, 3, 4, 5), seed)
    factors = np.array([1.0, size, 2.0])[:, None, None]
    similarity, cache = target.output_similarity_forward(out)
    louder, loud_cache = target.output_similarity_forward(out * factors)
    assert_close(louder, similarity, what="similarity")
    dout = cotangent(similarity, seed)
    dy = target.output_similarity_backward(dout, cache)
    assert_close((dy * out).sum(axis=-1), np.zeros((2, 3, 4)), what="gradient along the output")
    dloud = target.output_similarity_backward(dout, loud_cache)
    assert_close(dloud * factors, dy, what="gradient times size")


@suite.property(ALIKE, ALIKE_D, shape=shapes, seed=seeds, idle=st.booleans())
def similarity_backward_is_the_derivative(target, shape, seed, idle):
    """Eq. 14.16 against the complex step; exactly 0 for a head that gives 0."""
    out = heads_of(shape, seed, idle)
    similarity, cache = target.output_similarity_forward(out)
    dout = cotangent(similarity, seed)
    dy = target.output_similarity_backward(dout, cache)
    dead = ~out.any(axis=-1)
    assert (dy[dead] == 0).all(), "a head that gives 0 has a gradient"
    assert_gradients(
        lambda out: target.output_similarity_forward(out)[0],
        {"out": dy},
        {"out": out},
        dout,
    )


# ---- maps ----------------------------------------------------------------------------------------


@suite.property(OVERLAP, shape=shapes, seed=seeds, dead=st.booleans())
def overlap_is_the_mean_product_of_all_pairs(target, shape, seed, dead):
    """Eq. 14.14 pair by pair, a head with itself included; between 0 and 1 for attention weights,
    0 for a row in which nobody reads."""
    weights = softmax_forward(normal(shape, seed, 2.0))[0]
    if dead:
        weights[..., ::2, :] = 0
    got, _ = target.map_overlap_forward(weights)
    assert_close(got, over_pairs(weights, lambda u, w: math.fsum((u * w).tolist())))
    assert (got >= 0).all() and (got <= 1 + 1e-12).all()


@suite.property(OVERLAP, OVERLAP_D, shape=shapes, seed=seeds)
def overlap_backward_is_the_derivative(target, shape, seed):
    """Eq. 14.17 against the complex step, of the weights."""
    weights = softmax_forward(normal(shape, seed, 2.0))[0]
    overlap, cache = target.map_overlap_forward(weights)
    dout = cotangent(overlap, seed)
    assert_gradients(
        lambda weights: target.map_overlap_forward(weights)[0],
        {"weights": target.map_overlap_backward(dout, cache)},
        {"weights": weights},
        dout,
    )


# ---- orthogonality -------------------------------------------------------------------------------


@suite.property(RIGHT, shape=matrices, seed=seeds)
def penalty_is_the_square_of_what_is_too_much(target, shape, seed):
    """Eq. 14.15 product by product, of every pair of rows and every row with itself; never below
    R - C."""
    a = entries(shape, seed)
    got, _ = target.orthogonality_forward(a)
    *leading, rows, columns = shape
    expected = np.zeros(leading)
    for b in np.ndindex(*leading):
        expected[b] = math.fsum(
            (math.fsum((a[b][i] * a[b][j]).tolist()) - (i == j)) ** 2
            for i in range(rows)
            for j in range(rows)
        )
    assert_close(got, expected)
    assert (got >= rows - columns - 1e-12).all(), "more rows than columns were orthonormal"


@suite.property(
    RIGHT, RIGHT_D, seed=seeds, shape=st.sampled_from([(1, 1), (2, 5), (3, 3), (1, 4), (0, 2)])
)
def orthonormal_rows_cost_nothing(target, seed, shape):
    """Eq. 14.15 and its gradient, Eq. 14.18, are 0 where the rows are orthonormal; turning the
    columns changes nothing, doubling the rows costs (4 - 1)² each."""
    rows, columns = shape
    a = np.linalg.qr(normal((columns, columns), seed) + 3 * np.eye(columns))[0][:rows]
    penalty, cache = target.orthogonality_forward(a)
    assert_close(penalty, np.array(0.0), what="penalty of orthonormal rows")
    gradient = target.orthogonality_backward(np.array(1.0), cache)
    assert_close(gradient, np.zeros(shape), what="gradient at orthonormal rows")
    assert_close(target.orthogonality_forward(2 * a)[0], np.array(9.0 * rows), what="doubled")
    turn = np.linalg.qr(normal((columns, columns), seed ^ 1) + 3 * np.eye(columns))[0]
    b = normal(shape, seed ^ 2)
    here, there = (target.orthogonality_forward(x)[0] for x in (b, b @ turn))
    assert_close(there, here, what="turned columns")


@suite.property(RIGHT, RIGHT_D, shape=matrices, seed=seeds)
def orthogonality_backward_is_the_derivative(target, shape, seed):
    """Eq. 14.18 against the complex step."""
    a = normal(shape, seed)
    penalty, cache = target.orthogonality_forward(a)
    dout = cotangent(penalty, seed)
    assert_gradients(
        lambda a: target.orthogonality_forward(a)[0],
        {"a": target.orthogonality_backward(np.asarray(dout), cache)},
        {"a": a},
        np.asarray(dout),
    )


# ---- all of them ---------------------------------------------------------------------------------


@suite.property(ALIKE, ALIKE_D, OVERLAP, OVERLAP_D, RIGHT, RIGHT_D, seed=seeds)
def a_step_down_makes_heads_less_alike(target, seed):
    """Each is a penalty, added to the loss: a small step against its gradient lowers it (Eq. 14.13
    to Eq. 14.18)."""
    x = normal((3, 4, 5), seed) + 1  # alike, but no copies
    for forward, backward in (
        (target.output_similarity_forward, target.output_similarity_backward),
        (target.map_overlap_forward, target.map_overlap_backward),
        (target.orthogonality_forward, target.orthogonality_backward),
    ):
        before, cache = forward(x)
        step = backward(np.ones_like(before), cache)
        after, _ = forward(x - 1e-4 * step)
        assert after.sum() < before.sum(), f"{forward.__name__} went up"


@suite.property(ALIKE, ALIKE_D, OVERLAP, OVERLAP_D, shape=shapes, seed=seeds)
def the_order_of_heads_does_not_matter(target, shape, seed):
    """Likeness is symmetric (Eq. 14.13, Eq. 14.14): heads in another order give the same, and their
    gradients in that order."""
    x = softmax_forward(normal(shape, seed))[0]
    order = np.random.default_rng(seed).permutation(shape[-3])
    for forward, backward in (
        (target.output_similarity_forward, target.output_similarity_backward),
        (target.map_overlap_forward, target.map_overlap_backward),
    ):
        (here, cache), (there, moved) = forward(x), forward(x[..., order, :, :])
        assert_close(there, here, what="likeness")
        dout = cotangent(here, seed)
        expected = backward(dout, cache)[..., order, :, :]
        assert_close(backward(dout, moved), expected, what="gradient")


@suite.property(ALIKE, ALIKE_D, OVERLAP, OVERLAP_D, RIGHT, RIGHT_D, seed=seeds, dtype=dtypes)
def narrow_arrays_are_measured_wide(target, seed, dtype):
    """As exact as float32 is about narrow heads; the gradient goes back as narrow as they came."""
    wide = "float64" if dtype == "float64" else "float32"
    x = softmax_forward(normal((2, 3, 4, 300), seed))[0].astype(DTYPES[dtype])
    for forward, backward in (
        (target.output_similarity_forward, target.output_similarity_backward),
        (target.map_overlap_forward, target.map_overlap_backward),
        (target.orthogonality_forward, target.orthogonality_backward),
    ):
        found, cache = forward(x)
        assert found.dtype == wide, f"{dtype} is measured in {found.dtype}"
        exact, exact_cache = forward(x.astype(np.float64))
        # sums of 300 products, and near 1 - 1 for the penalty
        assert_close(found.astype(np.float64), exact, of_dtype(wide), what="value")
        dout = cotangent(exact, seed)
        got = backward(dout.astype(found.dtype), cache)
        assert got.dtype == DTYPES[dtype], f"the gradient of {dtype} is {got.dtype}"
        expected = backward(dout, exact_cache)
        assert_close(got.astype(np.float64), expected, of_dtype(dtype), what="gradient")


@suite.property(ALIKE, ALIKE_D, OVERLAP, OVERLAP_D, RIGHT, RIGHT_D, shape=shapes, seed=seeds)
def arguments_are_left_alone(target, shape, seed):
    """No array of the caller is modified, one cache serves twice, and a gradient may be written
    to."""
    for forward, backward in (
        (target.output_similarity_forward, target.output_similarity_backward),
        (target.map_overlap_forward, target.map_overlap_backward),
        (target.orthogonality_forward, target.orthogonality_backward),
    ):
        x = normal(shape, seed)
        before = x.copy()
        found, cache = forward(x)
        dout = cotangent(found, seed)
        untouched = dout.copy()
        once = backward(dout, cache)
        kept = once.copy()
        once += 1.0
        assert np.array_equal(backward(dout, cache), kept), "the second backward differs"
        assert np.array_equal(x, before), "what was measured was modified"
        assert np.array_equal(dout, untouched), "the cotangent was modified"
