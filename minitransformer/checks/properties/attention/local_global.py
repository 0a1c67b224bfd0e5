"""What local-global attention must do: one softmax over the keys near by and the means of the
blocks far off, dense attention wherever the two cannot differ, and no word from the future."""

import math
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.attention.dense import attention_backward, attention_forward
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.attention.dense import SHAPES, folded
from minitransformer.checks.properties.attention.linear import ALIGNMENTS, KEYS, keys_of
from minitransformer.checks.properties.attention.linear import Case as Keys
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes, entries
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import BACKWARD as GRADIENT
from minitransformer.checks.tolerances import FLOAT32, of_dtype

suite = Suite("attention.local_global")

POOL, POOL_BACK = "pool_blocks_forward", "pool_blocks_backward"
FORWARD, BACKWARD = "local_global_attention_forward", "local_global_attention_backward"

blocks = st.sampled_from([2, 3, 1, 4, 100])


# ---- summaries -----------------------------------------------------------------------------------

POOLED = (((2, 7, 3), (7,)), ((3, 2, 5, 1), (3, 1, 5)), ((4, 2), None), ((0, 2), (0,)))


@suite.property(POOL, given=st.sampled_from(POOLED), block=blocks, seed=seeds)
def a_summary_is_the_mean_of_what_exists(target, given, block, seed):
    """Eq. 13.21 row by row, NaN in a row that does not exist; how many there were is told; a block
    without any has the summary 0."""
    (*leading, rows, width), kept = given
    x = normal((*leading, rows, width), seed)
    exists = None if kept is None else np.random.default_rng(seed).random(kept) < 0.5
    there = np.broadcast_to(True if exists is None else exists, (*leading, rows))
    x = np.where(there[..., None], x, np.nan)
    got, cache = target.pool_blocks_forward(x, block, exists=exists)
    expected = np.zeros((*leading, math.ceil(rows / block), width))
    assert got.shape == expected.shape, f"summaries of shape {got.shape}"
    for c in np.ndindex(expected.shape[:-1]):
        *b, number = c
        members = [j for j in range(number * block, min((number + 1) * block, rows))]
        members = [j for j in members if there[(*b, j)]]
        assert np.broadcast_to(cache.counts, expected.shape[:-1])[c] == len(members)
        if members:
            expected[c] = sum(x[(*b, j)] for j in members) / len(members)
    assert_close(got, expected)


@suite.property(POOL, POOL_BACK, given=st.sampled_from(POOLED), block=blocks, seed=seeds)
def pool_backward_is_the_derivative(target, given, block, seed):
    """Eq. 13.25 against the complex step; a row that does not exist gets exactly 0."""
    shape, kept = given
    x = normal(shape, seed)
    exists = None if kept is None else np.random.default_rng(seed).random(kept) < 0.5
    out, cache = target.pool_blocks_forward(x, block, exists=exists)
    dout = cotangent(out, seed)
    dx = target.pool_blocks_backward(dout, cache)
    assert_gradients(
        lambda x: target.pool_blocks_forward(x, block, exists=exists)[0], {"x": dx}, {"x": x}, dout
    )
    if exists is not None:
        assert (dx[~np.broadcast_to(exists, shape[:-1])] == 0).all(), "a gradient for nothing"


# ---- cases ---------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One call: the arrays, and options that are left out where they are None."""

    q: Array
    k: Array
    v: Array
    options: dict

    @property
    def read(self) -> Keys:
        """The same arrays with what decides who may read whom."""
        known = {name: x for name, x in self.options.items() if name in ("causal", "align", "keep")}
        return Keys(self.q, self.k, self.v, known)

    def of(self, target, **changed):
        options = {**self.options, **changed}
        return target.local_global_attention_forward(self.q, self.k, self.v, **options)


@st.composite
def cases(draw, *, keys=KEYS, causal=(True, False), lengths=blocks, magnitude=(1.0, 8.0)):
    """Any shape, causal or not, aligned either way, with keys left out, in blocks of any length."""
    leading_q, leading_k, leading_v, h, g, n, m, d, e = draw(st.sampled_from(SHAPES))
    seed, size = draw(seeds), draw(st.sampled_from(magnitude))
    case = Case(
        normal((*leading_q, h, n, d), seed, size),
        normal((*leading_k, g, m, d), seed ^ 1, size),
        normal((*leading_v, g, m, e), seed ^ 2),
        {"block": draw(lengths)},
    )
    options = {
        "causal": draw(st.sampled_from(causal)),
        "align": draw(st.sampled_from(ALIGNMENTS)),
        "keep": keys_of(draw(st.sampled_from(keys)), case.read.shape, g, seed),
        "scale": draw(st.sampled_from([None, 0.3])),
    }
    case.options.update({name: x for name, x in options.items() if x is not None})
    return case


def by_definition(case: Case) -> tuple[Array, Array]:
    """Output and log-sum-exp, one row at a time, each key alone or in its block's mean."""
    shape, b = case.read.shape, case.options["block"]
    *leading, heads, n, m = shape
    q, k, v = (
        np.broadcast_to(x, (*leading, *x.shape[-3:])).astype(np.float64)
        for x in (case.q, case.k, case.v)
    )
    exists, causal = case.read.keep, case.options.get("causal", False)
    offset = m - n if case.options.get("align") == "lower_right" else 0
    scale = case.options.get("scale") or 1 / math.sqrt(q.shape[-1])
    out, lse = np.zeros((*shape[:-1], v.shape[-1])), np.full(shape[:-1], -np.inf)
    for row in np.ndindex(shape[:-1]):
        *at, h, i = row
        head = (*at, h // (heads // k.shape[-3]))
        p = i + offset
        scores, values = [], []
        for start in range(0, m, b):
            members = [j for j in range(start, min(start + b, m)) if exists[(*head, j)]]
            if start // b == p // b:
                for j in members:
                    if j <= p or not causal:
                        scores.append(scale * q[row] @ k[(*head, j)])
                        values.append(v[(*head, j)])
            elif members and (start // b < p // b or not causal):
                mean_k, mean_v = (
                    sum(x[(*head, j)] for j in members) / len(members) for x in (k, v)
                )
                scores.append(scale * q[row] @ mean_k + math.log(len(members)))
                values.append(mean_v)
        if scores:
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            lse[row] = top + math.log(sum(weights))
            out[row] = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
    return out, lse


def dense(case: Case) -> tuple[Array, Array]:
    out, cache = attention_forward(
        case.q, case.k, case.v, keep=case.read.pairs, scale=case.options.get("scale")
    )
    return out, cache.lse


# ---- the definition ------------------------------------------------------------------------------


@suite.property(FORWARD, case=cases())
def the_output_is_the_definition(target, case):
    """Eq. 13.21 - 13.24 pair by pair, for any length of a block and any place of the queries."""
    out, cache = case.of(target)
    expected, lse = by_definition(case)
    assert_close(out, expected, what="out")
    assert_close(cache.lse, lse, what="lse")


@suite.property(FORWARD, BACKWARD, case=cases(lengths=st.sampled_from([1, 100])), seed=seeds)
def one_block_or_blocks_of_one_are_dense(target, case, seed):
    """With nothing to average (Eq. 13.22) nothing is lost: output, log-sum-exp and gradients."""
    out, cache = case.of(target)
    expected, lse = dense(case)
    assert_close(out, expected, what="out")
    assert_close(cache.lse, lse, what="lse")
    dout = cotangent(out, seed)
    grads = target.local_global_attention_backward(dout, cache)
    _, exact = attention_forward(
        case.q, case.k, case.v, keep=case.read.pairs, scale=case.options.get("scale")
    )
    for name, got, wanted in zip("qkv", grads, attention_backward(dout, exact), strict=False):
        assert_close(got, wanted, GRADIENT, what=f"d{name}")


@suite.property(FORWARD, case=cases())
def keys_alike_within_blocks_are_dense(target, case):
    """A summary has the weight of all that it stands for (Eq. 13.23): if the keys of each block
    agree, the values need not."""
    b, m = case.options["block"], case.k.shape[-2]
    alike = case._replace(k=case.k[..., np.arange(m) // b * b, :])
    out, cache = alike.of(target)
    expected, lse = dense(alike)
    assert_close(out, expected, what="out")
    assert_close(cache.lse, lse, what="lse")


@suite.property(FORWARD, case=cases())
def a_summary_never_weighs_more_than_its_keys(target, case):
    """The exponential is convex: the log-sum-exp of Eq. 13.24 is at most dense attention's."""
    _, cache = case.of(target)
    _, lse = dense(case)
    alive = lse != -np.inf
    assert ((cache.lse != -np.inf) == alive).all(), "a row lost all its keys, or found some"
    assert (cache.lse[alive] <= lse[alive] + 1e-9).all(), "more weight than there is"


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
    q, k = normal((heads, 5, 2), seed), normal((groups, 5, 2), seed ^ 1)
    v = np.broadcast_to(np.arange(groups, dtype=np.float64)[:, None, None], (groups, 5, 2)).copy()
    out, _ = target.local_global_attention_forward(q, k, v, block=2, causal=causal)
    expected = np.broadcast_to((np.arange(heads) // repeat)[:, None, None], out.shape)
    assert_close(out, expected.astype(np.float64))


# ---- what may not be read ------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, seed=seeds, t=st.integers(1, 6), block=blocks)
def no_word_comes_from_the_future(target, seed, t, block):
    """Other keys and values from t on change no output and no query's gradient before t: not
    through the mean of the own block either (Eq. 13.22)."""
    q, k, v = (normal((2, 7, 3), seed ^ n) for n in range(3))
    late = np.arange(7)[:, None] >= t

    def answers(k, v):
        out, cache = target.local_global_attention_forward(q, k, v, block=block, causal=True)
        dout = np.where(late, 0, cotangent(out, seed))
        grads = target.local_global_attention_backward(dout, cache)
        assert (grads.k[:, t:] == 0).all() and (grads.v[:, t:] == 0).all(), "a gradient goes ahead"
        return out[:, :t], grads.q[:, :t]

    before, after = answers(k, v), answers(np.where(late, 20 * k, k), np.where(late, -3 * v, v))
    for name, was, now in zip(("output", "gradient"), before, after, strict=True):
        assert_close(now, was, what=f"{name} before the edit")


@suite.property(FORWARD, seed=seeds, new=st.integers(1, 7), block=blocks)
def the_last_queries_of_a_text_stand_in_their_own_blocks(target, seed, new, block):
    """With the text before in a cache: the last rows alone, aligned to the lower right (Eq. 13.22),
    are those of the whole; the first rows alone likewise, aligned to the upper left."""
    q, k, v = (normal((2, 7, 3), seed ^ n) for n in range(3))
    for causal in (True, False):
        options = {"block": block, "causal": causal}
        whole, _ = target.local_global_attention_forward(q, k, v, **options)
        for align, rows in (("lower_right", np.s_[:, 7 - new :]), ("upper_left", np.s_[:, :new])):
            got, _ = target.local_global_attention_forward(q[rows], k, v, align=align, **options)
            assert_close(got, whole[rows], what=align)


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds)
def a_key_left_out_might_as_well_not_exist(target, case, seed):
    """NaN or infinity in its key or value is not felt, alone or in a mean, and its gradients are
    exactly 0 (Eq. 13.26)."""
    gone_k, gone_v = ~folded(case.read.keep, case.k), ~folded(case.read.keep, case.v)

    def holding(entry):
        k = np.where(gone_k[..., None], entry, case.k)
        return case._replace(k=k, v=np.where(gone_v[..., None], entry, case.v))

    clean, _ = holding(0.0).of(target)
    assert_close(clean, by_definition(holding(0.0))[0], what="out without the keys")
    for entry in (np.nan, -np.inf, 1e200):
        out, cache = holding(entry).of(target)
        assert np.array_equal(out, clean), "a key that is left out changed the output"
        grads = target.local_global_attention_backward(cotangent(out, seed), cache)
        assert all(np.isfinite(g).all() for g in grads), "a key left out spoils a gradient"
        assert (grads.k[gone_k] == 0).all(), "gradient flows to a key that is left out"
        assert (grads.v[gone_v] == 0).all(), "gradient flows to a value that is left out"


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds)
def a_row_with_no_key_is_zero(target, case, seed):
    """A query that reads nothing has output 0, log-sum-exp -inf and gradient 0, and a NaN in it or
    in its cotangent leaks nowhere."""
    dead = ~case.read.alive
    dead_query = ~folded(~dead, case.q)
    spoiled = case._replace(q=np.where(dead_query[..., None], np.nan, case.q))
    out, cache = spoiled.of(target)
    assert (out[dead] == 0).all(), "the output of a dead row is not 0"
    assert (cache.lse[dead] == -np.inf).all(), "a dead row has a log-sum-exp"
    dout = np.where(dead[..., None], np.nan, cotangent(out, seed))
    grads = target.local_global_attention_backward(dout, cache)
    assert all(np.isfinite(g).all() for g in grads), "a dead row leaks NaN"
    assert (grads.q[dead_query] == 0).all(), "gradient flows to the query of a dead row"


# ---- the gradient, numbers, memory ---------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, case=cases(magnitude=(1.0, 3.0)), seed=seeds)
def local_global_attention_backward_is_the_derivative(target, case, seed):
    """Eq. 13.26 against the complex step, for a cotangent of the output alone and of the
    log-sum-exp as well: a key is read as itself and in its block's mean."""
    out, cache = case.of(target)
    dout, inputs = cotangent(out, seed), {"q": case.q, "k": case.k, "v": case.v}
    alive = cache.lse != -np.inf
    dlse = np.where(alive, cotangent(cache.lse, seed ^ 1), 0)

    def both(**x):
        out, cache = case._replace(**x).of(target)
        lse = np.where(alive, cache.lse, 0)
        return np.concatenate([out, lse[..., None]], axis=-1)

    grads = target.local_global_attention_backward(dout, cache)
    assert_gradients(
        lambda **x: case._replace(**x).of(target)[0],
        {name: getattr(grads, name) for name in inputs},
        inputs,
        dout,
    )
    grads = target.local_global_attention_backward(dout, cache, dlse=dlse)
    assert_gradients(
        both,
        {name: getattr(grads, name) for name in inputs},
        inputs,
        np.concatenate([dout, dlse[..., None]], axis=-1),
    )


@suite.property(POOL, FORWARD, BACKWARD, seed=seeds, dtype=dtypes, causal=st.booleans())
def narrow_numbers_are_rounded_once(target, seed, dtype, causal):
    """Summaries, output and gradients have the dtype of the inputs, rounded once; the log-sum-exp
    is never narrower than float32."""
    q, k, v = (normal((2, 40, 4), seed ^ n).astype(DTYPES[dtype]) for n in range(3))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    pooled, _ = target.pool_blocks_forward(1000 + k, 16)
    rows = (1000 + k).astype(np.float64)
    means = np.stack([rows[:, i : i + 16].mean(axis=1) for i in (0, 16, 32)], axis=1)
    assert_rounded_once(pooled, means, dtype, what="summaries")
    options = {"block": 16, "causal": causal}
    out, cache = target.local_global_attention_forward(q, k, v, **options)
    assert_rounded_once(out, by_definition(Case(*wide, options))[0], dtype, what="out")
    assert cache.lse.dtype.itemsize >= 4, "a narrow log-sum-exp"
    _, exact = target.local_global_attention_forward(*wide, **options)
    dout = normal(out.shape, seed ^ 9).astype(DTYPES[dtype])
    grads = target.local_global_attention_backward(dout, cache)
    right = target.local_global_attention_backward(dout.astype(np.float64), exact)
    for name, got, reference in zip("qkv", grads, right, strict=True):
        assert got.dtype == DTYPES[dtype], f"d{name} in {got.dtype}"
        limit = max(of_dtype(dtype), FLOAT32 if dtype != "float64" else 0)
        assert_close(got.astype(np.float64), reference, limit, what=f"d{name}")


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds)
def arguments_are_left_alone(target, case, seed):
    """No array of the caller is modified, forward or backward, and one cache serves twice."""
    case = case._replace(q=entries(case.q.shape, seed))
    out, cache = case.of(target)
    dout = cotangent(out, seed)
    arrays = [case.q, case.k, case.v, dout]
    before = [x.copy() for x in arrays]
    _, cache = case.of(target)
    once, again = (target.local_global_attention_backward(dout, cache) for _ in range(2))
    assert all(map(np.array_equal, arrays, before)), "an argument was modified"
    assert all(map(np.array_equal, once, again)), "the second backward differs from the first"
