"""What linear attention must do: be the weighted mean that its kernel defines, in every form and
from every state, and read neither the future nor a key that is left out."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.attention.dense import SHAPES, folded
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes, entries
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import BACKWARD as GRADIENT
from minitransformer.checks.tolerances import at_least, of_dtype

suite = Suite("attention.linear")

MAP, MAP_BACK = "elu_plus_one_forward", "elu_plus_one_backward"
FORWARD, BACKWARD = "linear_attention_forward", "linear_attention_backward"
STATE, MERGED = "LinearState", "merged"

FORMS = ("chunked", "recurrent", "parallel")
ALIGNMENTS = ("lower_right", "upper_left")


# ---- cases ---------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One call: the arrays, and options that are left out where they are None."""

    q: Array
    k: Array
    v: Array
    options: dict
    start: tuple[Array, Array] | None = None  # S and z of the text before

    @property
    def shape(self) -> tuple[int, ...]:
        """(*B, H, N, M)"""
        q, k, v = self.q.shape, self.k.shape, self.v.shape
        return (*np.broadcast_shapes(q[:-3], k[:-3], v[:-3]), *q[-3:-1], k[-2])

    @property
    def keep(self) -> Array:
        """The keys (*B, G, M) that exist."""
        *leading, _, _, m = self.shape
        to = (*leading, self.k.shape[-3], 1, m)
        return np.broadcast_to(self.options.get("keep", True), to)[..., 0, :]

    @property
    def pairs(self) -> Array:
        """Who may read whom, (*B, H, N, M)."""
        *_, heads, n, m = self.shape
        kept = np.repeat(self.keep, heads // self.k.shape[-3], axis=-2)[..., None, :]
        offset = m - n if self.options.get("align") == "lower_right" else 0
        causal = self.options.get("causal", False)
        return kept & np.tri(n, m, offset if causal else m, dtype=np.bool_)

    @property
    def alive(self) -> Array:
        """The rows (*B, H, N) that read something."""
        return np.asarray(self.pairs.any(axis=-1) | (self.start is not None))

    def of(self, target, **changed):
        options = {**self.options, **changed}
        if self.start is not None and "state" not in options:
            options["state"] = target.LinearState(*self.start)
        return target.linear_attention_forward(self.q, self.k, self.v, **options)


KEYS = ("some", "all", "padded left", "none in the first row")


def keys_of(kind: str, shape: tuple[int, ...], groups: int, seed: int) -> Array | None:
    rng = np.random.default_rng([seed, 13])
    *leading, _, _, m = shape
    if kind == "all":
        return None
    if kind == "padded left":
        return np.arange(m)[None] >= rng.integers(0, m + 1, (*leading, 1, 1, 1))
    kept = rng.random((*leading, groups, 1, m)) < 0.6
    if kind == "none in the first row" and leading:
        kept[:1] = False
    return kept


@st.composite
def cases(draw, *, keys=KEYS, causal=(True, False), states=(False, True), magnitude=(1.0, 8.0)):
    """Any shape in any form, causal or not, with keys left out and a text before."""
    leading_q, leading_k, leading_v, h, g, n, m, d, e = draw(st.sampled_from(SHAPES))
    seed, size = draw(seeds), draw(st.sampled_from(magnitude))
    q = normal((*leading_q, h, n, d), seed, size)
    k = normal((*leading_k, g, m, d), seed ^ 1, size)
    v = normal((*leading_v, g, m, e), seed ^ 2)
    case = Case(q, k, v, {})
    options = {
        "causal": draw(st.sampled_from(causal)),
        "align": draw(st.sampled_from(ALIGNMENTS)),
        "keep": keys_of(draw(st.sampled_from(keys)), case.shape, g, seed),
        "form": draw(st.sampled_from(FORMS)),
        "chunk": draw(st.sampled_from([2, 1, 3, 64])),
    }
    options = {name: x for name, x in options.items() if x is not None}
    start = None
    if draw(st.sampled_from(states)):
        start = normal((g, d, e), seed ^ 3), 0.1 + np.abs(normal((g, d), seed ^ 4))
    return case._replace(options=options, start=start)


def phi(x: Array) -> Array:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def by_definition(case: Case) -> Array:
    """The output, one row and one key at a time (Eq. 13.2)."""
    shape = case.shape
    *leading, heads, _, _ = shape
    q, k, v = (
        np.broadcast_to(x, (*leading, *x.shape[-3:])).astype(np.float64)
        for x in (case.q, case.k, case.v)
    )
    pairs, out = case.pairs, np.zeros((*shape[:-1], v.shape[-1]))
    for row in np.ndindex(shape[:-1]):
        *b, h, _ = row
        g = h // (heads // k.shape[-3])
        above, below = np.zeros(v.shape[-1]), 0.0
        if case.start is not None:
            above, below = phi(q[row]) @ case.start[0][g], float(phi(q[row]) @ case.start[1][g])
        for j in np.flatnonzero(pairs[row]):
            weight = float(phi(q[row]) @ phi(k[(*b, g, j)]))
            above, below = above + weight * v[(*b, g, j)], below + weight
        out[row] = above / below if below else 0
    return out


def gradients(target, case: Case, dout: Array, **changed) -> tuple:
    return target.linear_attention_backward(dout, case.of(target, **changed)[1])


# ---- features ------------------------------------------------------------------------------------


@suite.property(MAP, seed=seeds, size=st.sampled_from([1.0, 30.0, 1e4]))
def features_are_elu_plus_one(target, seed, size):
    """Eq. 13.1 entry by entry, 0 among them, without an overflow where x is large."""
    x = np.append(normal((4, 3), seed, size), [[0.0, 1000.0, -1000.0]], axis=0)
    with np.errstate(over="raise"):
        got, _ = target.elu_plus_one_forward(x)
    expected = [[e + 1 if e > 0 else np.exp(e) for e in row] for row in x]
    assert_close(got, np.array(expected))
    assert (got >= 0).all() and (got[x > -700] > 0).all(), "a feature is not positive"


@suite.property(MAP, MAP_BACK, seed=seeds, shape=st.sampled_from([(5,), (2, 3), (0, 2), ()]))
def feature_backward_is_the_derivative(target, seed, shape):
    """Eq. 13.9 against the complex step; at 0 both sides have the slope 1."""
    x = normal(shape, seed, 2.0)
    out, cache = target.elu_plus_one_forward(x)
    dout = cotangent(out, seed)
    assert_gradients(
        lambda x: target.elu_plus_one_forward(x)[0],
        {"x": target.elu_plus_one_backward(dout, cache)},
        {"x": x},
        dout,
    )
    edge = np.array([0.0, 1e-9, -1e-9, 40.0])
    slope = target.elu_plus_one_backward(np.ones(4), target.elu_plus_one_forward(edge)[1])
    assert_close(slope, np.ones(4), 1e-8, what="slope around 0")


@suite.property(MAP, MAP_BACK, seed=seeds, dtype=dtypes)
def narrow_features_are_rounded_once(target, seed, dtype):
    """Features and their gradients have the dtype of x and are rounded once."""
    x = entries((3, 4), seed, 2.0).astype(DTYPES[dtype])
    wide = x.astype(np.float64)
    out, cache = target.elu_plus_one_forward(x)
    assert_rounded_once(out, phi(wide), dtype, what="features")
    dout = np.ones_like(x)
    expected = np.where(wide > 0, 1, np.exp(np.minimum(wide, 0)))
    assert_rounded_once(target.elu_plus_one_backward(dout, cache), expected, dtype, what="slope")


# ---- the definition ------------------------------------------------------------------------------


@suite.property(FORWARD, case=cases())
def the_output_is_the_definition(target, case):
    """Eq. 13.2 pair by pair, in every form, from any state, under any alignment."""
    expected = by_definition(case)
    for form in FORMS:
        assert_close(case.of(target, form=form)[0], expected, what=f"out ({form})")


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds)
def the_three_forms_agree(target, case, seed):
    """Eq. 13.2 - 13.4 are one function: output, state and gradients of parallel, recurrent and
    chunked forms (Eq. 13.6 - 13.8) are the same, for any length of chunk."""
    results = []
    for form, chunk in (("parallel", 1), ("recurrent", 1), ("chunked", 2), ("chunked", 5)):
        out, cache = case.of(target, form=form, chunk=chunk)
        grads = target.linear_attention_backward(cotangent(out, seed), cache)
        arrays = (out, *cache.state, grads.q, grads.k, grads.v, *(grads.state or ()))
        results.append(((form, chunk), arrays))
    _, first = results[0]
    for (form, chunk), arrays in results[1:]:
        for name, got, expected in zip("o S z q k v S z".split(), arrays, first, strict=False):
            assert_close(got, expected, GRADIENT, what=f"{name} ({form}, chunks of {chunk})")


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
    q, k = normal((heads, 4, 2), seed), normal((groups, 4, 2), seed ^ 1)
    v = np.broadcast_to(np.arange(groups, dtype=np.float64)[:, None, None], (groups, 4, 2)).copy()
    out, _ = target.linear_attention_forward(q, k, v, causal=causal)
    expected = np.broadcast_to((np.arange(heads) // repeat)[:, None, None], out.shape)
    assert_close(out, expected.astype(np.float64))


@suite.property(FORWARD, case=cases(states=(False,)), seed=seeds)
def the_output_lies_among_the_values(target, case, seed):
    """Weights are positive and sum to one: every output is between the least and the greatest
    value, and v + c gives out + c, except in a dead row."""
    constant = normal((case.v.shape[-1],), seed, 100.0)
    out, _ = case.of(target)
    moved, _ = case._replace(v=case.v + constant).of(target)
    assert_close(moved, out + np.where(case.alive[..., None], constant, 0), what="out of v + c")
    least, most = case.v.min(initial=0), case.v.max(initial=0)
    slack = at_least(1e-9) * max(1.0, most, -least)
    assert ((out >= least - slack) & (out <= most + slack)).all(), "outside the values"


# ---- the state -----------------------------------------------------------------------------------


@suite.property(FORWARD, case=cases())
def the_state_is_the_sum_over_keys(target, case):
    """S and z of Eq. 13.3 as a loop over all keys that exist, whoever may read them."""
    state = case.of(target)[1].state
    *leading, groups, m = case.keep.shape
    k, v = (np.broadcast_to(x, (*leading, *x.shape[-3:])) for x in (case.k, case.v))
    s = np.zeros((*leading, groups, k.shape[-1], v.shape[-1]))
    z = np.zeros(s.shape[:-1])
    if case.start is not None:
        s, z = s + case.start[0], z + case.start[1]
    for index in np.ndindex(*leading, groups, m):
        if case.keep[index]:
            s[index[:-1]] += np.outer(phi(k[index]), v[index])
            z[index[:-1]] += phi(k[index])
    assert_close(np.broadcast_to(state.s, s.shape), s, what="S")
    assert_close(np.broadcast_to(state.z, z.shape), z, what="z")


@suite.property(
    FORWARD,
    STATE,
    seed=seeds,
    cuts=st.sampled_from([(3,), (1, 2), (1, 2, 3, 4, 5, 6), (0, 7)]),
    form=st.sampled_from(FORMS),
)
def a_text_read_in_parts_is_the_text(target, seed, cuts, form):
    """A causal text cut anywhere, the state carried over (Eq. 13.3): the same output, also token by
    token, padding included."""
    q, k, v = (normal((2, h, 7, 3), seed ^ h) for h in (4, 2, 2))
    keep = np.arange(7) >= np.array([0, 2])[:, None, None, None]
    whole, cache = target.linear_attention_forward(q, k, v, causal=True, keep=keep, form=form)
    state, parts = None, []
    for i, j in zip((0, *cuts), (*cuts, 7), strict=True):
        out, part = target.linear_attention_forward(
            q[..., i:j, :], k[..., i:j, :], v[..., i:j, :], causal=True, keep=keep[..., i:j],
            state=state, form=form, chunk=2,
        )  # fmt: skip
        state = part.state
        parts.append(out)
    assert_close(np.concatenate(parts, axis=-2), whole, what="out")
    assert_close(state.s, cache.state.s, what="S")
    assert_close(state.z, cache.state.z, what="z")


@suite.property(FORWARD, STATE, MERGED, seed=seeds, cut=st.sampled_from([2, 0, 1, 5]))
def states_of_two_texts_add_up(target, seed, cut):
    """Without a mask the order of keys does not matter: the states (Eq. 13.3) of two parts, merged
    either way round, answer as the whole."""
    q, k, v = (normal((2, 5, 3), seed ^ n) for n in range(3))
    whole, _ = target.linear_attention_forward(q, k, v)
    nobody, nothing = q[:, :0], k[:, :0]
    first, second = (
        target.linear_attention_forward(nobody, k[:, part], v[:, part])[1].state
        for part in (np.s_[:cut], np.s_[cut:])
    )
    for state in (target.merged(first, second), target.merged(second, first)):
        assert_close(target.linear_attention_forward(q, nothing, nothing, state=state)[0], whole)


# ---- what may not be read ------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, seed=seeds, form=st.sampled_from(FORMS), t=st.integers(1, 5))
def nothing_comes_from_the_future(target, seed, form, t):
    """Under a causal mask, other and far larger keys and values from t on change no output before
    t, nor the gradient of a query before t (Eq. 13.6): a state got by subtracting what came later
    would keep its rounding."""
    q, k, v = (normal((2, 6, 3), seed ^ n) for n in range(3))
    late = np.arange(6)[:, None] >= t

    def ask(k, v):
        out, cache = target.linear_attention_forward(q, k, v, causal=True, form=form, chunk=2)
        dout = cotangent(out, seed)
        return out[:, :t], target.linear_attention_backward(dout, cache).q[:, :t]

    before, after = ask(k, v), ask(np.where(late, 1e6 * np.abs(k), k), np.where(late, -3 * v, v))
    for name, was, now in zip(("output", "gradient"), before, after, strict=True):
        assert_close(now, was, what=f"{name} before the edit")


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds)
def a_key_left_out_might_as_well_not_exist(target, case, seed):
    """NaN or infinity in its key or value is not felt, and its gradients are exactly 0 (Eq. 13.7).

    Zeroing the key is not enough, φ(0) = 1, nor is zeroing the value, whose weight would still
    count: https://github.com/fla-org/flash-linear-attention/issues/1263
    """
    gone_k, gone_v = ~folded(case.keep, case.k), ~folded(case.keep, case.v)

    def holding(entry):
        k = np.where(gone_k[..., None], entry, case.k)
        return case._replace(k=k, v=np.where(gone_v[..., None], entry, case.v))

    clean, _ = holding(0.0).of(target)
    assert_close(clean, by_definition(case), what="out without the keys")
    for entry in (np.nan, -np.inf, 1e200):
        out, cache = holding(entry).of(target)
        assert np.array_equal(out, clean), "a key that is left out changed the output"
        grads = target.linear_attention_backward(cotangent(out, seed), cache)
        assert all(np.isfinite(g).all() for g in grads[:3]), "a key left out spoils a gradient"
        assert (grads.k[gone_k] == 0).all(), "gradient flows to a key that is left out"
        assert (grads.v[gone_v] == 0).all(), "gradient flows to a value that is left out"


@suite.property(FORWARD, BACKWARD, case=cases(states=(False,)), seed=seeds)
def a_row_with_no_key_is_zero(target, case, seed):
    """A query that reads nothing has output 0 and gradient 0, and a NaN in it or in its cotangent
    leaks nowhere."""
    dead = ~case.alive
    dead_query = ~folded(~dead, case.q)
    out, cache = case._replace(q=np.where(dead_query[..., None], np.nan, case.q)).of(target)
    assert (out[dead] == 0).all(), "the output of a dead row is not 0"
    dout = np.where(dead[..., None], np.nan, cotangent(out, seed))
    grads = target.linear_attention_backward(dout, cache)
    assert all(np.isfinite(g).all() for g in grads[:3]), "a dead row leaks NaN"
    assert (grads.q[dead_query] == 0).all(), "gradient flows to the query of a dead row"


# ---- the gradient --------------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, case=cases(magnitude=(1.0, 4.0)), seed=seeds)
def linear_attention_backward_is_the_derivative(target, case, seed):
    """Eq. 13.5 - 13.8 against the complex step: q, k, v and the state before, from cotangents of
    the output and of the state after."""
    out, cache = case.of(target)
    dout = cotangent(out, seed)
    dstate = target.LinearState(*(cotangent(x, seed ^ n) for n, x in enumerate(cache.state, 1)))
    grads = target.linear_attention_backward(dout, cache, dstate=dstate)
    inputs = {"q": case.q, "k": case.k, "v": case.v}
    claimed = {name: getattr(grads, name) for name in inputs}
    if case.start is not None:
        inputs |= dict(zip("sz", case.start, strict=True))
        claimed |= dict(zip("sz", grads.state, strict=True))
    else:
        assert grads.state is None, "a gradient of a state that was not given"

    def forward(q, k, v, s=None, z=None):
        start = None if s is None else (s, z)
        out, cache = Case(q, k, v, case.options, start).of(target)
        return np.concatenate([x.ravel() for x in (out, *cache.state)])

    both = np.concatenate([x.ravel() for x in (dout, *dstate)])
    assert_gradients(forward, claimed, inputs, both)


@suite.property(
    FORWARD, BACKWARD, STATE, seed=seeds, cut=st.sampled_from([3, 0, 1]), causal=st.booleans()
)
def gradients_pass_through_the_state(target, seed, cut, causal):
    """A text trained in two parts, U_1 of the second handed to the first (Eq. 13.7), has the
    gradients of the whole."""
    q, k, v = (normal((h, 5, 3), seed ^ h) for h in (4, 2, 2))
    q = q if causal else np.where(np.arange(5)[:, None] < cut, 0, q)
    early, late = np.s_[..., :cut, :], np.s_[..., cut:, :]
    dout = cotangent(q, seed)
    if not causal:  # only the second part's queries read all keys
        dout[early] = 0
    _, cache = target.linear_attention_forward(q, k, v, causal=causal)
    whole = target.linear_attention_backward(dout, cache)
    _, first = target.linear_attention_forward(q[early], k[early], v[early], causal=causal)
    _, second = target.linear_attention_forward(
        q[late], k[late], v[late], causal=causal, state=first.state
    )
    after = target.linear_attention_backward(dout[late], second)
    before = target.linear_attention_backward(dout[early], first, dstate=after.state)
    for name in "qkv":
        joined = np.concatenate([getattr(before, name), getattr(after, name)], axis=-2)
        assert_close(joined, getattr(whole, name), GRADIENT, what=f"gradient of {name}")


# ---- numbers and memory --------------------------------------------------------------------------


@suite.property(FORWARD, BACKWARD, seed=seeds, dtype=dtypes, form=st.sampled_from(FORMS))
def narrow_numbers_are_rounded_once(target, seed, dtype, form):
    """Output and gradients have the dtype of the inputs; 300 keys are summed in at least float32,
    and the state keeps that."""
    q, k, v = (normal((2, 300, 4), seed ^ n).astype(DTYPES[dtype]) for n in range(3))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    out, cache = target.linear_attention_forward(q, k, v, causal=True, form=form)
    exact, reference = target.linear_attention_forward(*wide, causal=True, form="parallel")
    weights = np.tril(phi(wide[0]) @ np.swapaxes(phi(wide[1]), -1, -2))
    assert_close(exact, weights @ wide[2] / weights.sum(axis=-1, keepdims=True), what="float64")
    assert_rounded_once(out, exact, dtype, what="out")
    assert cache.state.s.dtype.itemsize >= 4, f"a state in {cache.state.s.dtype}"
    limit = of_dtype("float64" if dtype == "float64" else "float32")
    assert_close(cache.state.z.astype(np.float64), reference.state.z, limit, what="z")
    dout = normal(out.shape, seed ^ 9).astype(DTYPES[dtype])
    grads = target.linear_attention_backward(dout, cache)
    expected = target.linear_attention_backward(dout.astype(np.float64), reference)
    for name in "qkv":
        assert_rounded_once(getattr(grads, name), getattr(expected, name), dtype, what=f"d{name}")


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds)
def arguments_are_left_alone(target, case, seed):
    """No array of the caller is modified, forward or backward: a state can be gone on from
    twice."""
    arrays = [case.q, case.k, case.v, *(case.start or ())]
    before = [x.copy() for x in arrays]
    out, cache = case.of(target)
    dout = cotangent(out, seed)
    arrays, before = [*arrays, dout, *cache.state], [*before, dout.copy()]
    before += [x.copy() for x in cache.state]
    target.linear_attention_backward(dout, cache)
    assert all(map(np.array_equal, arrays, before)), "an argument was modified"
