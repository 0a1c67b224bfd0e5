"""What FAVOR+ must do: draw the projection that its law says, estimate the softmax kernel without
bias, and be the mean that its features define, with no word from the future."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.attention.dense import attention_forward
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.attention.dense import SHAPES, folded
from minitransformer.checks.properties.attention.linear import ALIGNMENTS, KEYS, Case, keys_of
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import BACKWARD as GRADIENT
from minitransformer.checks.tolerances import FLOAT32, at_least, of_dtype
from minitransformer.philox import Draw, Stream, random_bits, uniform

suite = Suite("attention.favor")

PROJECTION, STATE, MERGED = "random_projection", "FavorState", "merged"
MAP, MAP_BACK = "log_features_forward", "log_features_backward"
FORWARD, BACKWARD = "favor_attention_forward", "favor_attention_backward"

feature_counts = st.sampled_from([5, 1, 3, 8])
widths = st.sampled_from([3, 1, 2, 5])


def normals(draw: Draw, layer: int, head: int, rows: int, width: int) -> Array:
    """Eq. 13.10, one number at a time."""
    found = np.zeros((rows, width))
    for i, j in np.ndindex(rows, width):
        words = random_bits(
            draw, Stream.FEATURES, layer, np.array(head), np.array(i), np.array([2 * j, 2 * j + 1])
        )
        u, angle = uniform(words) + 2.0**-25
        found[i, j] = math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * angle)
    return found


# ---- the projection ------------------------------------------------------------------------------


@suite.property(PROJECTION, seed=seeds, layer=st.integers(0, 5), features=feature_counts, d=widths)
def independent_rows_are_the_law(target, seed, layer, features, d):
    """Eq. 13.10 word by word: anybody can draw the same projection."""
    draw = Draw(seed)
    got = target.random_projection(draw, features, d, layer=layer, orthogonal=False)
    assert_close(got, normals(draw, layer, 0, features, d), what="W")


@suite.property(PROJECTION, seed=seeds, features=feature_counts, d=widths)
def rows_of_a_block_are_orthogonal(target, seed, features, d):
    """Eq. 13.11 as Gram-Schmidt by hand: each row of a block of D is what its normal row has beyond
    the rows before it, in its direction, with a χ-distributed length drawn apart."""
    got = target.random_projection(Draw(seed), features, d)
    rows, lengths = (normals(Draw(seed), 0, head, features, d) for head in (0, 1))
    expected = np.zeros_like(rows)
    for i, row in enumerate(rows):
        block = expected[i - i % d : i]
        left = row - sum((row @ w) / (w @ w) * w for w in block)
        expected[i] = left / np.linalg.norm(left) * np.linalg.norm(lengths[i])
    assert_close(got, expected, 1e-9, what="W")  # nearly parallel rows lose digits
    for i in range(0, features, d):
        products = got[i : i + d] @ got[i : i + d].T
        assert_close(products, np.diag(np.diagonal(products)), what="products of rows")


@suite.property(PROJECTION, seed=seeds)
def rows_are_as_likely_in_every_direction(target, seed):
    """Over many rows, orthogonal or not, E[w] = 0, E[w wᵀ] = 1 and Var ‖w‖² = 2 D, within 6
    standard errors (Eq. 13.10, Eq. 13.11)."""
    n, d = 3000, 3
    for orthogonal in (True, False):
        w = target.random_projection(Draw(seed), n, d, orthogonal=orthogonal)
        error = 6 / math.sqrt(n)
        assert (np.abs(w.mean(axis=0)) < error).all(), "one direction is favoured"
        assert (np.abs(w.T @ w / n - np.eye(d)) < 2 * error).all(), "the covariance is not 1"
        spread = np.square(w).sum(axis=1).var() / (2 * d)
        assert abs(spread - 1) < 3 * error, (
            f"squared lengths vary {spread:.2f} times as they should"
        )


@suite.property(PROJECTION, seed=seeds, every=st.sampled_from([3, 1, None]))
def it_is_drawn_anew_when_asked(target, seed, every):
    """The same bits until the next redraw, in training or not; other ones then, and for another
    layer, seed or sample. No data take part."""

    def at(step, seed=seed, layer=0, **kind):
        draw = Draw(seed, step=step, **kind)
        return target.random_projection(draw, 4, 3, layer=layer, every=every)

    first = at(0)
    assert np.array_equal(first, at(0)), "the same draw gave other bits"
    assert np.array_equal(first, at(0, training=False)), "evaluation has features of its own"
    for step in range(1, 8):
        same = every is None or step // every == (step - 1) // every
        assert np.array_equal(at(step), at(step - 1)) == same, f"redraw at step {step}"
    others = at(0, layer=1), at(0, seed=seed ^ 1), at(0, sample=1)
    assert not any(np.array_equal(first, x) for x in others), "layers share their features"


@suite.property(PROJECTION, seed=seeds, d=widths, orthogonal=st.booleans())
def more_features_keep_those_of_fewer(target, seed, d, orthogonal):
    """The rows of a smaller projection come first, the last block cut off; hyperbolic features
    follow with their negatives."""
    many = target.random_projection(Draw(seed), 8, d, orthogonal=orthogonal)
    for features in (1, 4, 7):
        few = target.random_projection(Draw(seed), features, d, orthogonal=orthogonal)
        assert_close(few, many[:features], 1e-9, what=f"{features} of 8 features")
    pairs = target.random_projection(Draw(seed), 8, d, orthogonal=orthogonal, hyperbolic=True)
    assert_close(pairs, np.concatenate([many[:4], -many[:4]]), 1e-9, what="hyperbolic")


# ---- features ------------------------------------------------------------------------------------


@suite.property(
    MAP, seed=seeds, scale=st.sampled_from([None, 0.3, 0.0]), size=st.sampled_from([1.0, 300.0])
)
def log_features_are_the_definition(target, seed, scale, size):
    """Eq. 13.12 entry by entry: √s on each side, s = 1/√D, and half the square that makes it a
    kernel."""
    x, w = normal((2, 3, 4), seed, size), normal((5, 4), seed ^ 1)
    got, _ = target.log_features_forward(x, w, scale=scale)
    root = math.sqrt(0.5 if scale is None else scale)
    expected = np.zeros((2, 3, 5))
    for b, i, f in np.ndindex(expected.shape):
        scaled = [root * float(e) for e in x[b, i]]
        expected[b, i, f] = sum(e * float(u) for e, u in zip(scaled, w[f], strict=True))
        expected[b, i, f] -= sum(e * e for e in scaled) / 2
    assert_close(got, expected, what="l")


@suite.property(PROJECTION, MAP, seed=seeds, d=st.sampled_from([4, 1, 3]), orthogonal=st.booleans())
def the_kernel_is_unbiased(target, seed, d, orthogonal):
    """Eq. 13.13: the mean of φ(q) · φ(k) over redraws is exp(s q · k), symmetric, within 6 standard
    errors of independent rows, which orthogonal ones do not exceed."""
    q, k = normal((2, 1, d), seed, 0.6)
    features, redraws = 16, 60
    estimates = []
    for step in range(redraws):
        w = target.random_projection(
            Draw(seed, step=step), features, d, every=1, orthogonal=orthogonal
        )
        lq, lk = (target.log_features_forward(x, w)[0] for x in (q, k))
        estimates.append(np.exp(lq + lk).mean())
    exact = math.exp(float((q @ k.T)[0, 0]) / math.sqrt(d))
    square = float(np.square(q + k).sum()) / math.sqrt(d)
    error = exact * math.sqrt(math.exp(square) * (1 - math.exp(-square)) / (features * redraws))
    off = abs(float(np.mean(estimates)) - exact)
    assert off < 6 * error + 1e-6, f"{off / error:.1f} standard errors from exp(s q · k)"


@suite.property(MAP, MAP_BACK, seed=seeds, shape=st.sampled_from([(3, 4), (2, 1, 3), (0, 2)]))
def log_features_backward_is_the_derivative(target, seed, shape):
    """Eq. 13.20 against the complex step."""
    x, w = normal(shape, seed, 2.0), normal((5, shape[-1]), seed ^ 1)
    out, cache = target.log_features_forward(x, w, scale=0.7)
    dout = cotangent(out, seed)
    assert_gradients(
        lambda x: target.log_features_forward(x, w, scale=0.7)[0],
        {"x": target.log_features_backward(dout, cache)},
        {"x": x},
        dout,
    )


# ---- cases ---------------------------------------------------------------------------------------


@st.composite
def cases(draw, *, keys=KEYS, causal=(True, False), states=(False, True), magnitude=(1.0, 4.0)):
    """Any shape, causal or not, with keys left out and a text before; and a projection."""
    leading_q, leading_k, leading_v, h, g, n, m, d, e = draw(st.sampled_from(SHAPES))
    seed, size, features = draw(seeds), draw(st.sampled_from(magnitude)), draw(feature_counts)
    q = normal((*leading_q, h, n, d), seed, size)
    k = normal((*leading_k, g, m, d), seed ^ 1, size)
    v = normal((*leading_v, g, m, e), seed ^ 2)
    case = Case(q, k, v, {})
    options = {
        "causal": draw(st.sampled_from(causal)),
        "align": draw(st.sampled_from(ALIGNMENTS)),
        "keep": keys_of(draw(st.sampled_from(keys)), case.shape, g, seed),
        "scale": draw(st.sampled_from([None, 0.3])),
        "chunk": draw(st.sampled_from([2, 1, 3, 64])),
    }
    options = {name: x for name, x in options.items() if x is not None}
    start = None
    if draw(st.sampled_from(states)):
        peak, s = normal((g, features), seed ^ 3, 3.0), normal((g, features, e), seed ^ 4)
        start = peak, s, 1 + np.abs(normal((g, features), seed ^ 5))
    return case._replace(options=options, start=start), normal((features, d), seed ^ 6)


def ask(target, case: Case, w: Array, **changed):
    options = {**case.options, **changed}
    if case.start is not None:
        options["state"] = target.FavorState(*case.start)
    return target.favor_attention_forward(case.q, case.k, case.v, w, **options)


def log_features(x: Array, w: Array, options: dict) -> Array:
    root = math.sqrt(options.get("scale", 1 / math.sqrt(x.shape[-1])))
    return root * (x @ w.T) - root**2 * np.square(x).sum(axis=-1, keepdims=True) / 2


def by_definition(case: Case, w: Array) -> Array:
    """Eq. 13.14, one row at a time: each key's weight feature by feature, in logarithms."""
    shape = case.shape
    *leading, heads, _, _ = shape
    q, k, v = (
        np.broadcast_to(x, (*leading, *x.shape[-3:])).astype(np.float64)
        for x in (case.q, case.k, case.v)
    )
    lq, lk = log_features(q, w, case.options), log_features(k, w, case.options)
    pairs, out = case.pairs, np.zeros((*shape[:-1], v.shape[-1]))
    for row in np.ndindex(shape[:-1]):
        *b, h, _ = row
        g = h // (heads // k.shape[-3])
        terms = [(lq[row] + lk[(*b, g, j)], v[(*b, g, j)], 1.0) for j in np.flatnonzero(pairs[row])]
        if case.start is not None:
            peak, s, z = (x[g] for x in case.start)
            terms.append((lq[row] + peak, s, z))
        if not terms:
            continue
        top = max(float(logs.max()) for logs, _, _ in terms)
        below = sum(float((np.exp(logs - top) * z).sum()) for logs, _, z in terms)
        above = sum(
            np.exp(logs - top) @ np.broadcast_to(x, (len(w), v.shape[-1])) for logs, x, _ in terms
        )
        out[row] = above / below
    return out


# ---- the definition ------------------------------------------------------------------------------


@suite.property(FORWARD, given=cases())
def the_output_is_the_definition(target, given):
    """Eq. 13.14 pair by pair and feature by feature, from any state, under any alignment; the state
    of Eq. 13.15 and its reading, Eq. 13.16, are only a way to compute it."""
    case, w = given
    assert_close(ask(target, case, w)[0], by_definition(case, w), what="out")


@suite.property(FORWARD, BACKWARD, given=cases(), seed=seeds)
def the_length_of_a_chunk_does_not_matter(target, given, seed):
    """Recurrent (one row), parallel (all rows) and between: output, state (Eq. 13.15) and
    gradients (Eq. 13.18, Eq. 13.19) are the same."""
    case, w = given
    first = None
    for chunk in (64, 1, 2, 5):
        out, cache = ask(target, case, w, chunk=chunk)
        grads = target.favor_attention_backward(cotangent(out, seed), cache)
        arrays = (out, *cache.state, *grads)
        first = first or arrays
        for name, got, expected in zip("o c S z q k v".split(), arrays, first, strict=True):
            assert_close(got, expected, GRADIENT, what=f"{name} in chunks of {chunk}")


@suite.property(
    FORWARD,
    seed=seeds,
    groups=st.sampled_from([2, 1, 3]),
    repeat=st.sampled_from([2, 1, 3]),
    causal=st.booleans(),
)
def query_head_h_reads_key_head_h_over_the_group_size(target, seed, groups, repeat, causal):
    """Values that carry the number of their head show which one a query head read."""
    heads = groups * repeat
    q, k, w = normal((heads, 4, 2), seed), normal((groups, 4, 2), seed ^ 1), normal((3, 2), seed)
    v = np.broadcast_to(np.arange(groups, dtype=np.float64)[:, None, None], (groups, 4, 2)).copy()
    out, _ = target.favor_attention_forward(q, k, v, w, causal=causal)
    expected = np.broadcast_to((np.arange(heads) // repeat)[:, None, None], out.shape)
    assert_close(out, expected.astype(np.float64))


@suite.property(
    FORWARD,
    BACKWARD,
    seed=seeds,
    size=st.sampled_from([1.0, 30.0, 1e3]),
    causal=st.booleans(),
    dtype=st.sampled_from(["float32", "float64"]),
)
def numbers_of_any_size_give_a_mean(target, seed, size, causal, dtype):
    """Without an ε nothing overflows and nothing is 0/0 (Eq. 13.16), though exp(l) spans thousands
    of orders of magnitude: v + c gives out + c, and gradients are finite."""
    q, k = (normal((2, 6, 4), seed ^ n, size).astype(dtype) for n in range(2))
    v, w = normal((2, 6, 3), seed ^ 2).astype(dtype), normal((8, 4), seed ^ 3)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        out, cache = target.favor_attention_forward(q, k, v, w, causal=causal, chunk=2)
        moved, _ = target.favor_attention_forward(q, k, v + 100, w, causal=causal, chunk=2)
        grads = target.favor_attention_backward(np.ones_like(out), cache)
    tolerance = of_dtype(dtype)
    assert_close(moved.astype(float), out.astype(float) + 100, tolerance, what="out of v + 100")
    slack = at_least(1e-5) * max(1.0, float(np.abs(v).max()))
    assert (out >= v.min() - slack).all() and (out <= v.max() + slack).all(), "outside the values"
    assert all(np.isfinite(g).all() for g in grads), "a gradient is not finite"


@suite.property(PROJECTION, FORWARD, seed=seeds, causal=st.booleans(), hyperbolic=st.booleans())
def many_features_come_close_to_softmax(target, seed, causal, hyperbolic):
    """With 4096 features the output (Eq. 13.14) is within a few hundredths of softmax attention's
    (the kernel of Eq. 13.13), measured by the values, and far closer than with 4."""
    q, k, v = (normal((8, 8, 4), seed ^ n, size) for n, size in enumerate((0.4, 0.4, 1.0)))
    exact, _ = attention_forward(q, k, v, keep=np.tri(8, dtype=np.bool_) if causal else None)

    def error(features):
        w = target.random_projection(Draw(seed), features, 4, hyperbolic=hyperbolic)
        out, _ = target.favor_attention_forward(q, k, v, w, causal=causal, chunk=4)
        return float(np.linalg.norm(out - exact) / np.linalg.norm(v))

    many, few = error(4096), error(4)
    assert many < 0.03, f"an error of {many:.3f} with 4096 features"
    assert many < few / 2, f"an error of {many:.3f} with 4096 features, {few:.3f} with 4"


# ---- the state -----------------------------------------------------------------------------------


@suite.property(
    FORWARD, STATE, seed=seeds, cuts=st.sampled_from([(3,), (1, 2), (1, 2, 3, 4, 5, 6), (0, 7)])
)
def a_text_read_in_parts_is_the_text(target, seed, cuts):
    """A causal text cut anywhere, state and peaks carried over (Eq. 13.15): the same output, also
    token by token, padding included, and later keys far larger."""
    q, k, v = (normal((2, h, 7, 3), seed ^ h) for h in (4, 2, 2))
    k = k * np.array([1, 1, 1, 4, 1, 10, 1])[:, None]
    w = normal((5, 3), seed)
    keep = np.arange(7) >= np.array([0, 2])[:, None, None, None]
    whole, cache = target.favor_attention_forward(q, k, v, w, causal=True, keep=keep)
    state, parts = None, []
    for i, j in zip((0, *cuts), (*cuts, 7), strict=True):
        out, part = target.favor_attention_forward(
            q[..., i:j, :], k[..., i:j, :], v[..., i:j, :], w, causal=True, keep=keep[..., i:j],
            state=state, chunk=2,
        )  # fmt: skip
        state = part.state
        parts.append(out)
    assert_close(np.concatenate(parts, axis=-2), whole, what="out")
    for name, got, expected in zip("cSz", state, cache.state, strict=True):
        assert_close(got, expected, what=name)


@suite.property(FORWARD, STATE, MERGED, seed=seeds, cut=st.sampled_from([2, 0, 1, 5]))
def states_of_two_texts_merge(target, seed, cut):
    """Without a mask the order of keys does not matter: the states (Eq. 13.15) of two parts, merged
    either way round, answer as the whole."""
    q, k, v = (normal((2, 5, 3), seed ^ n, 2.0) for n in range(3))
    w = normal((4, 3), seed)
    whole, _ = target.favor_attention_forward(q, k, v, w)
    nobody, nothing = q[:, :0], k[:, :0]
    first, second = (
        target.favor_attention_forward(nobody, k[:, part], v[:, part], w)[1].state
        for part in (np.s_[:cut], np.s_[cut:])
    )
    for state in (target.merged(first, second), target.merged(second, first)):
        out, _ = target.favor_attention_forward(q, nothing, nothing, w, state=state)
        assert_close(out, whole)


# ---- what may not be read ------------------------------------------------------------------------


@suite.property(
    FORWARD, BACKWARD, seed=seeds, t=st.integers(1, 5), chunk=st.sampled_from([64, 1, 2])
)
def no_word_comes_from_the_future(target, seed, t, chunk):
    """Keys from t on twenty times as large change no output and no query's gradient before t
    (Eq. 13.15): a stabiliser over all keys would, through its ε or by underflow."""
    q, k, v = (normal((2, 6, 3), seed ^ n) for n in range(3))
    w, late = normal((8, 3), seed), np.arange(6)[:, None] >= t

    def answers(k, v):
        out, cache = target.favor_attention_forward(q, k, v, w, causal=True, chunk=chunk)
        dq = target.favor_attention_backward(cotangent(out, seed), cache).q
        return out[:, :t], dq[:, :t]

    before, after = answers(k, v), answers(np.where(late, 20 * k, k), np.where(late, -3 * v, v))
    for name, was, now in zip(("output", "gradient"), before, after, strict=True):
        assert_close(now, was, what=f"{name} before the edit")


@suite.property(FORWARD, BACKWARD, given=cases(), seed=seeds)
def a_key_left_out_might_as_well_not_exist(target, given, seed):
    """NaN or infinity in its key or value is not felt, nor a huge one as a peak, and its gradients
    are exactly 0 (Eq. 13.18)."""
    case, w = given
    gone_k, gone_v = ~folded(case.keep, case.k), ~folded(case.keep, case.v)

    def holding(entry):
        k = np.where(gone_k[..., None], entry, case.k)
        return case._replace(k=k, v=np.where(gone_v[..., None], entry, case.v))

    clean, _ = ask(target, holding(0.0), w)
    assert_close(clean, by_definition(case, w), what="out without the keys")
    for entry in (np.nan, -np.inf, 1e200):
        out, cache = ask(target, holding(entry), w)
        assert np.array_equal(out, clean), "a key that is left out changed the output"
        grads = target.favor_attention_backward(cotangent(out, seed), cache)
        assert all(np.isfinite(g).all() for g in grads), "a key left out spoils a gradient"
        assert (grads.k[gone_k] == 0).all(), "gradient flows to a key that is left out"
        assert (grads.v[gone_v] == 0).all(), "gradient flows to a value that is left out"


@suite.property(FORWARD, BACKWARD, given=cases(states=(False,)), seed=seeds)
def a_row_with_no_key_is_zero(target, given, seed):
    """A query that reads nothing has output 0 and gradient 0, and a NaN in it or in its cotangent
    leaks nowhere."""
    case, w = given
    dead = ~case.alive
    dead_query = ~folded(~dead, case.q)
    out, cache = ask(target, case._replace(q=np.where(dead_query[..., None], np.nan, case.q)), w)
    assert (out[dead] == 0).all(), "the output of a dead row is not 0"
    dout = np.where(dead[..., None], np.nan, cotangent(out, seed))
    grads = target.favor_attention_backward(dout, cache)
    assert all(np.isfinite(g).all() for g in grads), "a dead row leaks NaN"
    assert (grads.q[dead_query] == 0).all(), "gradient flows to the query of a dead row"


# ---- the gradient, numbers, memory ---------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, given=cases(magnitude=(1.0, 3.0)), seed=seeds)
def favor_attention_backward_is_the_derivative(target, given, seed):
    """Eq. 13.17 - 13.20 against the complex step: q, k and v, the shifts taken for constants."""
    case, w = given
    out, cache = ask(target, case, w)
    dout = cotangent(out, seed)
    grads = target.favor_attention_backward(dout, cache)
    inputs = {"q": case.q, "k": case.k, "v": case.v}
    assert_gradients(
        lambda **x: ask(target, case._replace(**x), w)[0],
        {name: getattr(grads, name) for name in inputs},
        inputs,
        dout,
    )


@suite.property(MAP, FORWARD, BACKWARD, seed=seeds, dtype=dtypes, causal=st.booleans())
def narrow_numbers_are_rounded_once(target, seed, dtype, causal):
    """Features, output and gradients have the dtype of the inputs, rounded once; the state is never
    narrower than float32."""
    q, k, v = (normal((2, 40, 4), seed ^ n).astype(DTYPES[dtype]) for n in range(3))
    wide, w = [x.astype(np.float64) for x in (q, k, v)], normal((8, 4), seed)
    logs, _ = target.log_features_forward(q, w)
    assert_rounded_once(logs, log_features(wide[0], w, {}), dtype, what="l")
    out, cache = target.favor_attention_forward(q, k, v, w, causal=causal)
    expected = by_definition(Case(*wide, {"causal": causal}), w)
    assert_rounded_once(out, expected, dtype, what="out")
    assert all(x.dtype.itemsize >= 4 for x in cache.state), "a narrow state"
    _, exact = target.favor_attention_forward(*wide, w, causal=causal)
    dout = normal(out.shape, seed ^ 9).astype(DTYPES[dtype])
    grads = target.favor_attention_backward(dout, cache)
    right = target.favor_attention_backward(dout.astype(np.float64), exact)
    for name, got, reference in zip("qkv", grads, right, strict=True):
        assert got.dtype == DTYPES[dtype], f"d{name} in {got.dtype}"
        limit = max(of_dtype(dtype), FLOAT32 if dtype != "float64" else 0)
        assert_close(got.astype(np.float64), reference, limit, what=f"d{name}")


@suite.property(FORWARD, BACKWARD, given=cases(), seed=seeds)
def arguments_are_left_alone(target, given, seed):
    """No array of the caller is modified, forward or backward: a state can be gone on from
    twice."""
    case, w = given
    out, cache = ask(target, case, w)
    dout = cotangent(out, seed)
    arrays = [case.q, case.k, case.v, w, dout, *(case.start or ())]
    before = [x.copy() for x in arrays]
    out, cache = ask(target, case, w)
    arrays, before = [*arrays, *cache.state], [*before, *(x.copy() for x in cache.state)]
    target.favor_attention_backward(dout, cache)
    assert all(map(np.array_equal, arrays, before)), "an argument was modified"
