"""What attention is: the definition as loops, what a masked pair may not do, and the derivative."""

import math
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from minitransformer.arrays import Array, unbroadcast
from minitransformer.attention.dense import attention_backward, attention_forward
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.strategies import normal, reachable, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import BACKWARD as GRADIENT
from minitransformer.checks.tolerances import of_dtype

suite = Suite("attention.dense")

FORWARD, BACKWARD = "attention_forward", "attention_backward"


# ---- cases ---------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One call: the arrays, and options that are left out where they are None."""

    q: Array
    k: Array
    v: Array
    options: dict

    @property
    def shape(self) -> tuple[int, ...]:
        """(*B, H, N, M)"""
        q, k, v = self.q.shape, self.k.shape, self.v.shape
        return (*np.broadcast_shapes(q[:-3], k[:-3], v[:-3]), *q[-3:-1], k[-2])

    @property
    def alive(self) -> Array:
        """The rows (*B, H, N) with a key to attend to."""
        keep = np.broadcast_to(self.options.get("keep", True), self.shape)
        return np.asarray(keep.any(axis=-1))

    def of(self, target):
        return target.attention_forward(self.q, self.k, self.v, **self.options)


# leading axes of q, k and v, then H, G, N, M, D, E: every two sizes differ somewhere
SHAPES = (
    ((2,), (2,), (2,), 4, 2, 5, 3, 3, 2),
    ((), (), (), 1, 1, 1, 1, 1, 1),
    ((2,), (1,), (), 3, 1, 2, 7, 1, 5),
    ((2, 1), (1, 3), (1, 1), 2, 2, 7, 5, 2, 3),
    ((1,), (1,), (1,), 6, 3, 3, 4, 5, 1),
    ((2,), (2,), (2,), 4, 4, 3, 5, 2, 2),
    ((1,), (1,), (1,), 4, 1, 4, 4, 3, 3),
    ((2,), (2,), (2,), 2, 1, 3, 0, 2, 3),
    ((0,), (0,), (0,), 2, 1, 3, 2, 2, 3),
    ((2,), (2,), (2,), 2, 2, 0, 3, 2, 3),
)
MASKS = ("random", "none", "causal", "keys", "dead rows")


def mask_of(kind: str, shape: tuple[int, ...], seed: int) -> Array | None:
    rng = np.random.default_rng([seed, 5])
    *leading, heads, n, m = shape
    if kind == "none":
        return None
    if kind == "causal":  # and broadcast over everything else
        return np.tri(n, m, m - n, dtype=np.bool_)
    if kind == "keys":  # padding: one row of keys for each batch row
        return rng.random((*leading, 1, 1, m)) < 0.6
    kept = rng.random((*leading, heads, n, m)) < 0.5
    if kind == "dead rows":
        kept[..., ::2, :] = False
    return kept


@st.composite
def cases(draw, *, masks=MASKS, magnitude=(1.0, 4.0), multiplied=(False, True), softcaps=(None, 3)):
    """Any shape with any mask, scale, soft-cap, bias (broadcast or not) and multiplier."""
    leading_q, leading_k, leading_v, h, g, n, m, d, e = draw(st.sampled_from(SHAPES))
    seed, size = draw(seeds), draw(st.sampled_from(magnitude))
    case = Case(
        normal((*leading_q, h, n, d), seed, size),
        normal((*leading_k, g, m, d), seed ^ 1, size),
        normal((*leading_v, g, m, e), seed ^ 2),
        {},
    )
    options = {
        "keep": mask_of(draw(st.sampled_from(masks)), case.shape, seed),
        "scale": draw(st.sampled_from([None, 0.7])),
        "softcap": draw(st.sampled_from(softcaps)),
        "bias": draw(st.sampled_from([None, (h, 1, m), (n, 1), case.shape])),
        "multiplier": draw(st.sampled_from(multiplied)) or None,
    }
    if options["bias"] is not None:
        options["bias"] = normal(options["bias"], seed ^ 3, 2.0)
    if options["multiplier"]:
        kept = np.random.default_rng([seed, 6]).random(case.shape) < 0.6
        options["multiplier"] = np.where(kept, 1 / 0.6, 0)
    case.options.update({name: x for name, x in options.items() if x is not None})
    return case


def by_definition(case: Case) -> tuple[Array, Array, Array]:
    """Output, weights and LSE, one row at a time (Eq. 2.1, Eq. 2.2)."""
    shape, options = case.shape, case.options
    *leading, heads, _, _ = shape
    q, k, v = (
        np.broadcast_to(x, (*leading, *x.shape[-3:])).astype(np.float64)
        for x in (case.q, case.k, case.v)
    )
    scale = options.get("scale", 1 / math.sqrt(q.shape[-1]))
    cap, bias = options.get("softcap"), np.broadcast_to(options.get("bias", 0.0), shape)
    keep = np.broadcast_to(options.get("keep", True), shape)
    multiplier = np.broadcast_to(options.get("multiplier", 1.0), shape)
    out, weights = np.zeros((*shape[:-1], v.shape[-1])), np.zeros(shape)
    lse = np.full(shape[:-1], -np.inf)
    for row in np.ndindex(shape[:-1]):
        *b, h, _ = row
        group = (*b, h // (heads // k.shape[-3]))
        allowed = [j for j in range(shape[-1]) if keep[(*row, j)]]
        scores = {}
        for j in allowed:
            r = scale * float(q[row] @ k[(*group, j)])
            scores[j] = (cap * math.tanh(r / cap) if cap else r) + float(bias[(*row, j)])
        if not allowed:
            continue
        top = max(scores.values())
        total = sum(math.exp(s - top) for s in scores.values())
        lse[row] = top + math.log(total)
        for j in allowed:
            weights[(*row, j)] = math.exp(scores[j] - top) / total
            out[row] += weights[(*row, j)] * multiplier[(*row, j)] * v[(*group, j)]
    return out, weights, lse


def folded(used: Array, x: Array) -> Array:
    """Which rows of `x` are used anywhere, where `used` is over the axes x was broadcast to."""
    used = np.any(used, axis=tuple(range(used.ndim - (x.ndim - 1))))
    stretched = tuple(a for a, n in enumerate(x.shape[:-1]) if n != used.shape[a])
    return np.any(used, axis=stretched, keepdims=True)


# ---- the definition ------------------------------------------------------------------------------


@suite.property(FORWARD, case=cases())
def the_output_is_the_definition(target, case):
    """Scale, soft-cap, bias, keep, softmax, multiplier, values, in this order (Eq. 2.1 - 2.2)."""
    assert_close(case.of(target)[0], by_definition(case)[0], what="out")


@suite.property(FORWARD, case=cases())
def weights_and_lse_are_those_of_the_definition(target, case):
    """The weights before any multiplier, and the logarithm of each row's sum (Eq. 2.2)."""
    _, cache = case.of(target)
    _, weights, lse = by_definition(case)
    assert_close(cache.lse, lse, what="lse")
    assert_close(cache.weights, weights, what="weights")


@suite.property(
    FORWARD, seed=seeds, groups=st.sampled_from([2, 1, 3]), repeat=st.sampled_from([2, 1, 3])
)
def query_head_h_reads_key_head_h_over_the_group_size(target, seed, groups, repeat):
    """Values that carry the number of their head show which one a query head read."""
    heads = groups * repeat
    q, k = normal((heads, 3, 2), seed), normal((groups, 4, 2), seed ^ 1)
    v = np.broadcast_to(np.arange(groups, dtype=np.float64)[:, None, None], (groups, 4, 2)).copy()
    out, _ = target.attention_forward(q, k, v)
    expected = np.broadcast_to((np.arange(heads) // repeat)[:, None, None], out.shape)
    assert_close(out, expected.astype(np.float64))


@suite.property(FORWARD, case=cases(multiplied=(False,)), seed=seeds)
def adding_a_constant_to_the_values_adds_it_to_the_output(target, case, seed):
    """Rows of weights sum to one: v + c gives out + c, except in a dead row, which stays 0."""
    constant = normal((case.v.shape[-1],), seed)
    out, _ = case.of(target)
    moved, _ = case._replace(v=case.v + constant).of(target)
    alive = case.alive[..., None]
    assert_close(moved, out + np.where(alive, constant, 0))


@suite.property(FORWARD, case=cases(masks=("random",)), seed=seeds)
def the_order_of_keys_does_not_matter(target, case, seed):
    """Keys, values, mask and bias permuted together give the same output."""
    order = np.random.default_rng(seed).permutation(case.shape[-1])
    options = {
        name: x[..., order] if np.ndim(x) and np.shape(x)[-1] == len(order) else x
        for name, x in case.options.items()
    }
    moved = Case(case.q, case.k[..., order, :], case.v[..., order, :], options)
    assert_close(moved.of(target)[0], case.of(target)[0])


@suite.property(FORWARD, seed=seeds, far=st.sampled_from([1e4, 1e300]))
def huge_scores_pick_the_largest(target, seed, far):
    """Scores of any size give finite weights: the key that fits best gets all of it."""
    far = reachable(far)
    q = np.array([[[1.0, 0.0]]])
    k = (np.array([-1.0, 1.0, 0.5]) * far)[None, :, None] * np.array([1.0, 0.0])
    v = normal((1, 3, 2), seed)
    assert_close(target.attention_forward(q, k, v)[0][0, 0], v[0, 1])


# ---- what may not be read ------------------------------------------------------------------------


@suite.property(
    FORWARD,
    BACKWARD,
    case=cases(masks=("keys", "causal", "none")),
    seed=seeds,
    poison=st.sampled_from(["nan", "inf", "big"]),
)
def what_nobody_may_read_changes_nothing(target, case, seed, poison):
    """NaN or infinity in an unread key or value: the same bits, and a gradient of exactly 0."""
    keep = np.broadcast_to(case.options.get("keep", True), case.shape)
    heads, groups = case.shape[-3], case.k.shape[-3]
    rows = keep.reshape(*keep.shape[:-3], groups, heads // groups * keep.shape[-2], keep.shape[-1])
    read = rows.any(axis=-2)  # (*B, G, M)
    value = {"nan": np.nan, "inf": -np.inf, "big": 1e200}[poison]

    unread_k, unread_v = ~folded(read, case.k), ~folded(read, case.v)

    def holding(entry):
        k = np.where(unread_k[..., None], entry, case.k)
        return case._replace(k=k, v=np.where(unread_v[..., None], entry, case.v))

    out, cache = holding(value).of(target)
    clean, _ = holding(0.0).of(target)
    assert np.array_equal(out, clean), "an unread key or value changed the output"
    grads = target.attention_backward(cotangent(out, seed), cache)
    assert all(np.isfinite(g).all() for g in grads[:3]), "an unread entry spoils a gradient"
    assert (grads.k[unread_k] == 0).all(), "gradient flows to a key that nobody may read"
    assert (grads.v[unread_v] == 0).all(), "gradient flows to a value that nobody may read"


@suite.property(FORWARD, case=cases(masks=("random", "causal")), seed=seeds)
def a_masked_pair_has_no_influence(target, case, seed):
    """Another key and value at j leave every query that may not attend to j as it was."""
    m = case.shape[-1]
    if not m:
        return
    j = int(np.random.default_rng(seed).integers(m))
    k, v = case.k.copy(), case.v.copy()
    k[..., j, :] += 3
    v[..., j, :] -= 5
    before, after = case.of(target)[0], case._replace(k=k, v=v).of(target)[0]
    masked = ~np.broadcast_to(case.options["keep"], case.shape)[..., j]
    assert_close(after[masked], before[masked])


@suite.property(FORWARD, case=cases(masks=("dead rows",)))
def a_row_with_no_key_is_zero(target, case):
    """A query that may read nothing has output 0."""
    out, _ = case.of(target)
    assert (out[~case.alive] == 0).all(), "the output of a dead row is not 0"


@suite.property(FORWARD, BACKWARD, case=cases(masks=("dead rows",)), seed=seeds)
def nothing_comes_out_of_a_dead_row(target, case, seed):
    """The gradient of its query is 0, and a NaN in that query or in the row's cotangent leaks
    nowhere."""
    dead = ~case.alive
    dead_query = ~folded(~dead, case.q)
    q = np.where(dead_query[..., None], np.nan, case.q)
    out, cache = case._replace(q=q).of(target)
    assert (out[dead] == 0).all(), "the output of a dead row is not 0"
    dout = np.where(dead[..., None], np.nan, cotangent(out, seed))
    grads = target.attention_backward(dout, cache)
    assert all(np.isfinite(g).all() for g in grads if g is not None), "a dead row leaks NaN"
    assert (grads.q[dead_query] == 0).all(), "gradient flows to the query of a dead row"


@suite.property(FORWARD, case=cases(masks=("random",), softcaps=(None, 3, 50)), seed=seeds)
def minus_infinity_in_the_bias_masks(target, case, seed):
    """A bias of -inf is a mask, whatever the soft-cap: the same output as `keep`."""
    keep = np.broadcast_to(case.options["keep"], case.shape)
    bias = np.broadcast_to(case.options.get("bias", 0.0), case.shape)
    as_bias = case._replace(options={**case.options, "bias": np.where(keep, bias, -np.inf)})
    del as_bias.options["keep"]
    assert_close(as_bias.of(target)[0], case.of(target)[0])


# ---- numbers and memory --------------------------------------------------------------------------

DTYPES = {"float16": np.float16, "bfloat16": bfloat16, "float32": np.float32, "float64": np.float64}


@suite.property(FORWARD, seed=seeds, dtype=st.sampled_from(list(DTYPES)))
def narrow_numbers_are_rounded_once(target, seed, dtype):
    """The dtype of the inputs comes out, as close to float64 as storage allows; dead rows stay
    exact."""
    q, k, v = (normal((2, 3, 8), seed ^ n).astype(DTYPES[dtype]) for n in range(3))
    keep = np.random.default_rng(seed).random((3, 3)) < 0.6
    keep[1] = False
    out, _ = target.attention_forward(q, k, v, keep=keep)
    assert out.dtype == q.dtype, f"got dtype {out.dtype}, expected {q.dtype}"
    wide = Case(*(x.astype(np.float64) for x in (q, k, v)), {"keep": keep})
    assert_close(out.astype(np.float64), by_definition(wide)[0], of_dtype(dtype))
    assert (out[:, 1] == 0).all(), "a dead row is not exactly 0"


@suite.property(FORWARD, seed=seeds, dtype=st.sampled_from(["float16", "bfloat16"]))
def the_lse_of_narrow_numbers_is_wide(target, seed, dtype):
    """A log-sum-exp is never narrower than float32."""
    q, k, v = (normal((2, 3, 8), seed ^ n).astype(DTYPES[dtype]) for n in range(3))
    lse = target.attention_forward(q, k, v)[1].lse
    assert lse.dtype.itemsize >= 4, f"LSE in {lse.dtype}: narrower than float32"


@suite.property(FORWARD, BACKWARD, case=cases(masks=("random",)), seed=seeds)
def arguments_are_left_alone(target, case, seed):
    """No array of the caller is modified, forward or backward."""
    arrays = [x for x in (*case[:3], *case.options.values()) if isinstance(x, np.ndarray)]
    before = [x.copy() for x in arrays]
    out, cache = case.of(target)
    dout = cotangent(out, seed)
    given = dout.copy()
    target.attention_backward(dout, cache)
    assert all(map(np.array_equal, arrays, before)), "an argument was modified"
    assert np.array_equal(dout, given), "the cotangent was modified"


@suite.property(FORWARD, case=cases(masks=("random", "none")))
def the_same_call_gives_the_same_bits(target, case):
    """Called again, with another call in between: no state is left behind, nothing is drawn."""
    once, _ = case.of(target)
    case._replace(v=2 * case.v).of(target)
    again, _ = case.of(target)
    assert np.array_equal(once, again, equal_nan=True), "the second answer differs from the first"


# ---- the derivative ------------------------------------------------------------------------------


def differentiable(case):
    """The arrays that have gradients, and the options that are left."""
    bias = {name: x for name, x in case.options.items() if name == "bias"}
    rest = {name: x for name, x in case.options.items() if name != "bias"}
    return {"q": case.q, "k": case.k, "v": case.v, **bias}, rest


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds)
def attention_backward_is_the_derivative(target, case, seed):
    """Eq. 2.3 - 2.6 against the complex step: q, k, v and the bias."""
    out, cache = case.of(target)
    dout = cotangent(out, seed)
    grads = target.attention_backward(dout, cache)
    inputs, options = differentiable(case)
    assert_gradients(
        lambda **x: target.attention_forward(**x, **options)[0],
        {name: getattr(grads, name) for name in inputs},
        inputs,
        dout,
    )


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds)
def the_lse_has_a_derivative_too(target, case, seed):
    """A cotangent of the LSE reaches q, k and the bias (Eq. 2.4), beside that of the output."""
    out, cache = case.of(target)
    dout = cotangent(out, seed)
    dlse = np.where(case.alive, cotangent(cache.lse, seed ^ 7), 0)
    grads = target.attention_backward(dout, cache, dlse=dlse)
    inputs, options = differentiable(case)

    def forward(**x):
        out, cache = target.attention_forward(**x, **options)
        return np.concatenate([out.ravel(), np.where(case.alive, cache.lse, 0).ravel()])

    gradients = {name: getattr(grads, name) for name in inputs}
    assert_gradients(forward, gradients, inputs, np.concatenate([dout.ravel(), dlse.ravel()]))


@suite.property(
    FORWARD, BACKWARD, seed=seeds, shape=st.sampled_from([(3, 1, 5), (4, 5), (5,), (2, 1, 1, 5)])
)
def a_shared_bias_collects_from_all_it_was_added_to(target, seed, shape):
    """Its gradient is that of the whole bias, summed over everybody who shares it."""
    q, k, v = (normal((2, 3, n, 2), seed ^ i) for i, n in enumerate((4, 5, 5)))
    bias, dout = normal(shape, seed ^ 3), cotangent(q, seed)

    def gradient(bias):
        return target.attention_backward(dout, target.attention_forward(q, k, v, bias=bias)[1]).bias

    whole = gradient(np.broadcast_to(bias, (2, 3, 4, 5)).copy())
    assert_close(gradient(bias), unbroadcast(whole, shape), GRADIENT, "gradient of the bias")


@suite.property(FORWARD, BACKWARD, case=cases(), seed=seeds)
def gradients_agree_with_the_reference(target, case, seed):
    """The gradients of the reference, which the complex step has proved: for targets too narrow to
    be differentiated numerically."""
    out, cache = case.of(target)
    dout = cotangent(out, seed)
    grads = target.attention_backward(dout, cache)
    expected = attention_backward(
        dout, attention_forward(case.q, case.k, case.v, **case.options)[1]
    )
    for name in differentiable(case)[0]:
        assert_close(getattr(grads, name), getattr(expected, name), GRADIENT, f"gradient of {name}")


@suite.property(FORWARD, BACKWARD, case=cases(softcaps=(None,)), seed=seeds)
def a_common_shift_of_the_keys_has_no_gradient(target, case, seed):
    """Softmax ignores a shift of its row, so the gradients of the keys of a head sum to 0: the bias
    of a key projection never learns."""
    out, cache = case.of(target)
    dk = target.attention_backward(cotangent(out, seed), cache).k
    scale = max(1.0, float(np.abs(dk).sum()))
    assert_close(dk.sum(axis=-2) / scale, np.zeros((*dk.shape[:-2], dk.shape[-1])))
