"""What the measures of a head must say: of maps with a known answer, of any map by loops, and
nothing of a row that reads nothing."""

import math
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.attention.softmax import logsumexp_forward, softmax_forward
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.strategies import magnitudes, normal, seeds, sizes
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype

suite = Suite("heads.health")

ENTROPY, BACKWARD = "attention_entropy_forward", "attention_entropy_backward"


# ---- cases ---------------------------------------------------------------------------------------


class Map(NamedTuple):
    """Scores (*B, H, N, M), what is allowed of them, and their softmax."""

    scores: Array  # -inf where not allowed
    keep: Array
    weights: Array

    @property
    def live(self) -> Array:
        return np.asarray(self.keep.any(axis=-1))


# leading axes, then H, N, M
SHAPES = (
    ((2,), 3, 5, 4),
    ((), 2, 3, 7),
    ((2, 3), 1, 2, 5),
    ((1,), 1, 1, 1),
    ((3,), 2, 7, 2),
    ((1,), 3, 2, 0),
    ((0,), 2, 3, 2),
    ((2,), 2, 0, 3),
)


@st.composite
def maps(draw, magnitude=magnitudes) -> Map:
    """Attention of any shape, sharp or flat, whole or masked, some rows with nothing to read."""
    leading, heads, n, m = draw(st.sampled_from(SHAPES))
    shape, seed = (*leading, heads, n, m), draw(seeds)
    scores = normal(shape, seed, draw(magnitude))
    rng = np.random.default_rng([seed, 7])
    keep = rng.random(shape) < draw(st.sampled_from([0.6, 1.0, 0.3]))
    if draw(st.booleans()):
        keep[..., ::2, :] = False
    scores = np.where(keep, scores, -np.inf)
    return Map(scores, keep, softmax_forward(scores)[0])


def one_key(shape: tuple[int, ...], keys: Array) -> Array:
    """The map whose row i reads only keys[i]."""
    weights = np.zeros(shape)
    np.put_along_axis(weights, keys[..., None], 1.0, axis=-1)
    return weights


def entropy_of(row: Array) -> float:
    """Eq. 14.1 term by term, of the terms that there are."""
    return math.fsum(-p * math.log(p) for p in row.tolist() if p > 0)


def by_row(measure, weights: Array) -> Array:
    """A function of one row, of every row."""
    found = np.zeros(weights.shape[:-1])
    for row in np.ndindex(found.shape):
        found[row] = measure(weights[row])
    return found


# ---- entropy -------------------------------------------------------------------------------------


@suite.property(ENTROPY, case=maps())
def entropy_is_the_lse_minus_the_mean_score(target, case):
    """Eq. 14.1: log P = S - lse, so H = lse - Σ_j P_ij S_ij; exactly 0 for a row that reads
    nothing."""
    entropy, _ = target.attention_entropy_forward(case.weights)
    lse, _ = logsumexp_forward(case.scores)
    mean = (case.weights * np.where(case.keep, case.scores, 0)).sum(axis=-1)
    assert_close(entropy, np.where(case.live, np.where(case.live, lse, 0) - mean, 0))
    assert (entropy[~case.live] == 0).all(), "a row that reads nothing has an entropy"


@suite.property(ENTROPY, case=maps())
def entropy_lies_between_nothing_and_the_log_of_the_keys(target, case):
    """0 <= H <= log n, n the keys a row may read: the largest only if all are read alike."""
    entropy, _ = target.attention_entropy_forward(case.weights)
    keys = case.keep.sum(axis=-1)
    most = np.log(np.maximum(keys, 1))
    assert (entropy >= -1e-12).all() and (entropy <= most + 1e-12).all()
    flat = case.keep / np.maximum(keys, 1)[..., None]
    assert_close(target.attention_entropy_forward(flat)[0], most, what="flat rows")


@suite.property(ENTROPY, seed=seeds, n=sizes, m=sizes)
def independent_choices_add_their_entropies(target, seed, n, m):
    """Reading a pair of keys, one by P and one by Q, has the entropy H(P) + H(Q)."""
    p = softmax_forward(normal((2, n, m), seed, 2.0))[0]
    q = softmax_forward(normal((2, n, 3), seed ^ 1, 2.0))[0]
    pairs = (p[..., :, None] * q[..., None, :]).reshape(2, n, 3 * m)
    h = [target.attention_entropy_forward(x)[0] for x in (p, q, pairs)]
    assert_close(h[2], h[0] + h[1])


@suite.property(ENTROPY, BACKWARD, case=maps(), seed=seeds)
def entropy_backward_is_the_derivative(target, case, seed):
    """Eq. 14.2 against the complex step, of the scores; a masked one and a dead row get 0."""
    entropy, cache = target.attention_entropy_forward(case.weights)
    dentropy = cotangent(entropy, seed)
    dscores = target.attention_entropy_backward(dentropy, cache)
    assert (dscores[~case.keep] == 0).all(), "gradient flows to a masked score"
    assert_gradients(
        lambda scores: target.attention_entropy_forward(softmax_forward(scores)[0])[0],
        {"scores": dscores},
        {"scores": case.scores},
        dentropy,
    )


@suite.property(
    ENTROPY, seed=seeds, dtype=st.sampled_from(["float16", "float32"]), m=st.sampled_from([200, 1])
)
def entropy_of_narrow_weights_is_computed_wide(target, seed, dtype, m):
    """Stored narrow, measured in float32: as exact as float32 is about the stored weights."""
    weights = softmax_forward(normal((2, 3, m), seed, 2.0))[0].astype(dtype)
    entropy, _ = target.attention_entropy_forward(weights)
    assert entropy.dtype == np.float32
    exact = by_row(entropy_of, weights.astype(np.float64))
    assert_close(entropy.astype(np.float64), exact, of_dtype("float32"))


@suite.property("effective_support", case=maps())
def effective_support_counts_keys(target, case):
    """Eq. 14.3: n for a row that reads n keys alike, e^H for any other, 0 for one that reads
    none."""
    keys = case.keep.sum(axis=-1)
    flat = case.keep / np.maximum(keys, 1)[..., None]
    assert_close(target.effective_support(flat), keys.astype(np.float64), what="flat rows")
    expected = np.where(case.live, np.exp(by_row(entropy_of, case.weights)), 0)
    assert_close(target.effective_support(case.weights), expected)


@suite.property("relative_entropy", case=maps())
def relative_entropy_compares_rows_with_unlike_numbers_of_keys(target, case):
    """Eq. 14.4: 1 for a row that is flat over the keys it may read, however few; 0 if it has no
    choice. Without a mask every key is allowed."""
    keys = case.keep.sum(axis=-1)
    flat = case.keep / np.maximum(keys, 1)[..., None]
    got = target.relative_entropy(flat, case.keep)
    assert_close(got, np.where(keys > 1, 1.0, 0.0), what="flat rows")
    h, m = by_row(entropy_of, case.weights), case.weights.shape[-1]
    expected = np.where(keys > 1, h / np.log(np.maximum(keys, 2)), 0)
    assert_close(target.relative_entropy(case.weights, case.keep), expected)
    assert_close(target.relative_entropy(case.weights), h / math.log(m) if m > 1 else 0 * h)


# ---- concentration, distance, output -------------------------------------------------------------


@suite.property("weight_norm", case=maps())
def weight_norm_is_the_root_of_the_sum_of_squares(target, case):
    """Eq. 14.5, each head for itself; between √(n / M) and √n, n the rows that read anything."""
    norm = target.weight_norm(case.weights)
    *heads, _, m = case.weights.shape
    expected = np.zeros(heads)
    for head in np.ndindex(*heads):
        expected[head] = math.sqrt(math.fsum(p * p for p in case.weights[head].ravel().tolist()))
    assert_close(norm, expected)
    rows = case.live.sum(axis=-1)
    assert (norm**2 >= rows / max(m, 1) - 1e-12).all() and (norm**2 <= rows + 1e-12).all()


@suite.property("mean_distance", seed=seeds, n=sizes, m=sizes, o=st.sampled_from([0, 2, -3, None]))
def a_row_that_reads_one_key_looks_as_far_as_that_key(target, seed, n, m, o):
    """|i + o - j|: the same on either side of the query, which stands at i + o."""
    o = m - n if o is None else o
    keys = np.random.default_rng(seed).integers(0, m, (2, 3, n))
    got = target.mean_distance(one_key((2, 3, n, m), keys), offset=o)
    assert_close(got, np.abs(np.arange(n) + o - keys).astype(np.float64))


@suite.property("mean_distance", case=maps(), offset=st.sampled_from([0, 2, -3]))
def distance_is_the_mean_of_the_distances(target, case, offset):
    """Eq. 14.6 term by term; 0 for a row that reads nothing."""
    got = target.mean_distance(case.weights, offset=offset)
    expected = np.zeros(case.weights.shape[:-1])
    for row in np.ndindex(expected.shape):
        i = row[-1] + offset
        expected[row] = math.fsum(p * abs(i - j) for j, p in enumerate(case.weights[row].tolist()))
    assert_close(got, expected)


@suite.property("head_output_norm", case=maps(), seed=seeds, e=sizes, counted=st.booleans())
def output_norm_is_the_mean_length_of_the_rows(target, case, seed, e, counted):
    """Eq. 14.7, of the rows that count, each row's length taken before the mean."""
    out = normal((*case.weights.shape[:-1], e), seed)
    rows = case.live if counted else np.ones_like(case.live)
    got = target.head_output_norm(out, rows=case.live) if counted else target.head_output_norm(out)
    *heads, n, _ = out.shape
    expected = np.zeros(heads)
    for head in np.ndindex(*heads):
        lengths = [math.hypot(*out[head][i].tolist()) for i in range(n) if rows[head][i]]
        expected[head] = math.fsum(lengths) / len(lengths) if lengths else 0
    assert_close(got, expected)


@suite.property("head_output_norm", seed=seeds, heads=sizes, e=sizes, width=sizes)
def a_projected_head_is_what_the_output_loses_without_it(target, seed, heads, e, width):
    """With W_O, Eq. 14.7 measures join(o) W_O less the same with the head set to zero."""
    out, w = normal((2, heads, 3, e), seed), normal((heads * e, width), seed ^ 1)

    def joined(x):
        return np.swapaxes(x, -2, -3).reshape(2, 3, heads * e) @ w

    expected = np.zeros((2, heads))
    for h in range(heads):
        without = out.copy()
        without[:, h] = 0
        expected[:, h] = np.linalg.norm(joined(out) - joined(without), axis=-1).mean(axis=-1)
    assert_close(target.head_output_norm(out, projection=w), expected)


# ---- all of them ---------------------------------------------------------------------------------


@suite.property("mean_over_rows", "live_rows", case=maps(), seed=seeds, poison=st.booleans())
def rows_that_read_nothing_count_in_no_mean(target, case, seed, poison):
    """A mean is over the rows that read something, whatever stands in the others, NaN too."""
    live = target.live_rows(case.weights)
    assert live.dtype == np.bool_ and np.array_equal(live, case.live)
    measure = normal(live.shape, seed)
    given = np.where(live, measure, np.nan if poison else 1e3)
    got = target.mean_over_rows(given, live)
    expected = np.zeros(live.shape[:-1])
    for head in np.ndindex(expected.shape):
        counted = measure[head][live[head]]
        expected[head] = math.fsum(counted.tolist()) / len(counted) if len(counted) else 0
    assert_close(got, expected)


@suite.property("mean_over_rows", seed=seeds, n=sizes, real=st.integers(0, 7))
def padding_is_left_out_of_a_mean(target, seed, n, real):
    """One row of flags for all heads will do: the mean over the first rows is that of the cut
    map."""
    real = min(real, n)
    measure = normal((2, 3, n), seed)
    got = target.mean_over_rows(measure, np.arange(n) < real)
    assert_close(got, measure[..., :real].mean(axis=-1) if real else np.zeros((2, 3)))
    assert_close(target.mean_over_rows(measure), measure.mean(axis=-1))


@suite.property(
    ENTROPY,
    "effective_support",
    "weight_norm",
    "mean_distance",
    "head_output_norm",
    case=maps(),
    seed=seeds,
)
def a_head_is_measured_by_itself(target, case, seed):
    """Heads in another order have their measures in that order: none looks at its neighbour."""
    order = np.random.default_rng(seed).permutation(case.weights.shape[-3])
    out = normal((*case.weights.shape[:-1], 3), seed)

    def measures(weights, out):
        rows = {
            "entropy": target.attention_entropy_forward(weights)[0],
            "support": target.effective_support(weights),
            "distance": target.mean_distance(weights, offset=1),
        }
        heads = {"norm": target.weight_norm(weights), "output": target.head_output_norm(out)}
        return rows, heads

    rows, heads = measures(case.weights, out)
    moved_rows, moved_heads = measures(case.weights[..., order, :, :], out[..., order, :, :])
    for name, x in rows.items():
        assert_close(moved_rows[name], x[..., order, :], what=name)
    for name, x in heads.items():
        assert_close(moved_heads[name], x[..., order], what=name)


# ---- two heads -----------------------------------------------------------------------------------


@suite.property("pairwise_overlap", case=maps(), seed=seeds)
def overlap_is_what_two_heads_read_in_common(target, case, seed):
    """Eq. 14.27 row by row, over the rows that count: 1 for a map with itself, 0 for heads that
    read no key in common; symmetric."""
    *leading, heads, n, m = case.weights.shape
    rows = np.random.default_rng(seed).random((*leading, n)) < 0.7
    got = target.pairwise_overlap(case.weights, rows)
    expected = np.zeros((*leading, heads, heads))
    for *b, a, c in np.ndindex(expected.shape):
        counted = [
            math.fsum(min(x, y) for x, y in zip(one.tolist(), other.tolist(), strict=True))
            for one, other, wanted in zip(
                case.weights[(*b, a)], case.weights[(*b, c)], rows[tuple(b)], strict=True
            )
            if wanted
        ]
        expected[(*b, a, c)] = math.fsum(counted) / len(counted) if counted else 0
    assert_close(got, expected)
    whole = target.pairwise_overlap(case.weights)
    assert_close(whole, np.swapaxes(whole, -1, -2), what="the other way round")
    if m >= 2 and n:
        apart = one_key((2, n, m), np.broadcast_to(np.array([[0], [1]]), (2, n)))
        assert_close(target.pairwise_overlap(apart), np.eye(2), what="heads with nothing in common")


@suite.property("output_cka", seed=seeds, e=sizes, n=st.sampled_from([5, 2, 1]), b=sizes)
def cka_knows_a_head_that_was_turned(target, seed, e, n, b):
    """Eq. 14.28 entry by entry of centred outputs; 1 for a head that was turned, scaled and moved;
    0 for one that gives the same everywhere; symmetric, between 0 and 1."""
    out = normal((b, 4, n, e), seed)
    turn, _ = np.linalg.qr(normal((e, e), seed ^ 1))
    out[:, 1] = 1e-3 * out[:, 0] @ turn + normal((e,), seed ^ 2)
    out[:, 2] = normal((e,), seed ^ 3)
    got = target.output_cka(out)
    y = [x.reshape(b * n, e) - x.reshape(b * n, e).mean(axis=0) for x in np.moveaxis(out, 1, 0)]

    def squares(p, q):
        total = 0.0
        for i, j in np.ndindex(e, e):
            total += math.fsum((p[:, i] * q[:, j]).tolist()) ** 2
        return total

    alive = [b * n > 1, b * n > 1, False, b * n > 1]
    for a, c in np.ndindex(4, 4):
        if alive[a] and alive[c]:
            expected = squares(y[a], y[c]) / math.sqrt(squares(y[a], y[a]) * squares(y[c], y[c]))
            assert abs(got[a, c] - expected) < 1e-9, f"heads {a}, {c}: {got[a, c]}, not {expected}"
        else:
            assert got[a, c] < 1e-9, f"a constant head is like another: {got[a, c]}"
    if b * n > 1:
        assert abs(got[0, 1] - 1) < 1e-9, f"a head that was turned is alike by {got[0, 1]}"
    assert_close(got, got.T, what="the other way round")
    assert (got > -1e-12).all() and (got < 1 + 1e-9).all()
    tiny = np.array([0.5, 2, 3, 4])[:, None, None] * out
    assert_close(target.output_cka(tiny), got, 1e-9, what="of heads scaled")
