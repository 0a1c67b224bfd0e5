"""What stochastic attention must do: drop, make up for it as it says, and differentiate what it
did."""

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.attention.dense import attention_backward, attention_forward
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype
from minitransformer.philox import Draw
from minitransformer.stochastic.samplers import KINDS, RandomMask, Sampled, resolve

suite = Suite("stochastic.compensation")

# (B, H, G, N, M, D, E): hostile sizes, grouped heads, more queries than keys and fewer
shapes = st.sampled_from(
    [
        (2, 4, 2, 5, 5, 3, 2),
        (1, 1, 1, 1, 1, 1, 1),
        (2, 3, 1, 7, 3, 2, 5),
        (1, 2, 2, 3, 7, 5, 3),
        (3, 2, 1, 2, 5, 1, 1),
    ]
)
structures = st.sampled_from(["everything", "causal", "random"])
rates = st.sampled_from([0.5, 0.3, 0.9, 1.0, 0.7])
magnitudes = st.sampled_from([0.5, 3.0])


def inputs(shape, seed, scale=1.0):
    """q, k and v."""
    b, h, g, n, m, d, e = shape
    return (
        normal((b, h, n, d), seed, scale),
        normal((b, g, m, d), seed ^ 1, scale),
        normal((b, g, m, e), seed ^ 2),
    )


def structural(structure, shape, seed):
    b, h, _, n, m, _, _ = shape
    if structure == "everything":
        return None
    if structure == "causal":
        return np.tri(n, m, m - n, dtype=np.bool_)
    return np.random.default_rng([seed, 3]).random((b, h, n, m)) < 0.6


def options(shape, seed, softcap=None):
    """A bias for every pair, and sometimes a soft-cap: enough to see the order of operations."""
    b, h, _, n, m, _, _ = shape
    return {"bias": normal((b, h, n, m), seed ^ 4), "softcap": softcap}


def scores_of(q, k, keep, bias, softcap=None):
    """The logits, written out: scale, cap, bias, structural mask."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    s = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    s = softcap * np.tanh(s / softcap) if softcap else s
    return s + bias if keep is None else np.where(keep, s + bias, -np.inf)


def softmax(scores):
    """Row by row in the plain way; a row with nothing allowed has weights 0."""
    top = scores.real.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(scores - np.where(top == -np.inf, 0, top))
    z = e.sum(axis=-1, keepdims=True)
    return e / np.where(z == 0, 1, z)


def apply(weights, v):
    return weights @ np.repeat(v, weights.shape[1] // v.shape[1], axis=1)


def masks(rate, compensation, *, protect=True):
    """One mask of every kind that the compensation allows."""
    for kind in KINDS:
        if not (kind == "gumbel" and compensation == "inverted"):
            proposal = "scores" if kind in ("multinomial", "gumbel") else "uniform"
            yield RandomMask(
                kind,
                rate,
                tile=2,
                proposal=proposal,
                protect_diagonal=protect,
                compensation=compensation,
            )


def proposal_scores(mask, q, k, keep, given):
    """Logits for proposal "scores": the mechanism's own."""
    return scores_of(q, k, keep, **given) if mask.proposal == "scores" else None


# ---- what the output is --------------------------------------------------------------------------


@suite.property(
    "stochastic_attention_forward",
    "stochastic_attention_backward",
    shape=shapes,
    structure=structures,
    seed=seeds,
    why=st.sampled_from(["rate 0", "evaluation", "no mask"]),
)
def nothing_dropped_is_dense_attention_bitwise(target, shape, structure, seed, why):
    """p = 0, evaluation and no random mask: the same bits as dense attention, gradients too."""
    q, k, v = inputs(shape, seed)
    keep, given = structural(structure, shape, seed), options(shape, seed)
    expected, cache = attention_forward(q, k, v, keep=keep, **given)
    dout = cotangent(expected, seed)
    gradients = attention_backward(dout, cache)
    for compensation in ("renormalise", "inverted", "stop_gradient"):
        for mask in masks(0.0 if why == "rate 0" else 0.5, compensation):
            out, cache = target.stochastic_attention_forward(
                q, k, v, random_mask=None if why == "no mask" else mask,
                draw=Draw(seed, training=why != "evaluation"), layer=1, keep=keep, **given,
            )  # fmt: skip
            assert np.array_equal(out, expected), f"{mask.kind}: {why} is not dense attention"
            for a, b in zip(
                target.stochastic_attention_backward(dout, cache), gradients, strict=True
            ):
                assert np.array_equal(a, b), f"{mask.kind}: {why} has other gradients"


@suite.property(
    "stochastic_attention_forward", shape=shapes, structure=structures, rate=rates, seed=seeds,
    scale=magnitudes, softcap=st.sampled_from([None, 2.0]),
)  # fmt: skip
def renormalised_is_softmax_of_what_is_kept(target, shape, structure, rate, seed, scale, softcap):
    """Eq. 4.10, with the mask that `resolve` draws for this layer, step, head and batch row. Rows
    sum to 1, or to 0 with nothing left; a dropped pair has no part in them."""
    q, k, v = inputs(shape, seed, scale)
    keep, given = structural(structure, shape, seed), options(shape, seed, softcap)
    probe = np.broadcast_to(np.eye(shape[4]), (*v.shape[:2], shape[4], shape[4]))
    for compensation in ("renormalise", "stop_gradient"):
        for mask in masks(rate, compensation, protect=seed % 2 == 0):
            drawn = resolve(
                mask, Draw(seed, 3), 1, (*q.shape[:3], shape[4]), keep=keep,
                scores=proposal_scores(mask, q, k, keep, given),
            )  # fmt: skip
            weights, _ = target.stochastic_attention_forward(
                q, k, probe, random_mask=mask, draw=Draw(seed, 3), layer=1, keep=keep, **given
            )
            assert (weights[~drawn.keep] == 0).all(), f"{mask.kind}: a dropped pair has a weight"
            logits = scores_of(q, k, keep, **given)
            expected = softmax(np.where(drawn.keep, logits, -np.inf))
            if mask.kind == "head":
                expected = expected * drawn.multiplier
            else:
                alive = drawn.keep.any(axis=-1)
                assert_close(weights.sum(axis=-1), alive.astype(np.float64), what="row sums")
            assert_close(weights, expected, what=f"{mask.kind}: weights")


@suite.property(
    "stochastic_attention_forward", shape=shapes, structure=structures, rate=rates, seed=seeds,
    softcap=st.sampled_from([None, 2.0]),
)  # fmt: skip
def inverted_is_full_attention_times_the_multiplier(target, shape, structure, rate, seed, softcap):
    """Eq. 4.11: dropped pairs stay in the denominator, kept ones are divided by π."""
    q, k, v = inputs(shape, seed)
    keep, given = structural(structure, shape, seed), options(shape, seed, softcap)
    for mask in masks(rate, "inverted", protect=seed % 2 == 0):
        drawn = resolve(
            mask, Draw(seed), 0, (*q.shape[:3], shape[4]), keep=keep,
            scores=proposal_scores(mask, q, k, keep, given),
        )  # fmt: skip
        out, _ = target.stochastic_attention_forward(
            q, k, v, random_mask=mask, draw=Draw(seed), layer=0, keep=keep, **given
        )
        weights = softmax(scores_of(q, k, keep, **given)) * drawn.multiplier
        assert_close(out, apply(weights, v), what=f"{mask.kind}: out")


def every_mask(allowed):
    """All keep-masks inside one row `allowed`, with the number of pairs that each keeps."""
    where = np.nonzero(allowed)[0]
    for bits in itertools.product([False, True], repeat=where.size):
        keep = np.zeros(allowed.size, dtype=np.bool_)
        keep[where] = bits
        yield keep, sum(bits)


def expectations(target, compensation, q, k, v, allowed, p):
    """E[out] and E[out²] over all 2ⁿ element masks of one query, exactly."""
    mean, square = 0.0, 0.0
    for keep, kept in every_mask(allowed):
        chance = (1 - p) ** kept * p ** (allowed.sum() - kept)
        sampled = Sampled(
            keep[None, None, None],
            (keep / (1 - p))[None, None, None] if compensation == "inverted" else None,
        )
        out, _ = target.compensated_attention_forward(
            q, k, v, sampled=sampled, compensation=compensation, keep=allowed
        )
        mean, square = mean + chance * out, square + chance * out**2
    return mean, square


one_query = {"m": st.integers(1, 6), "p": st.sampled_from([0.5, 0.3, 0.75]), "seed": seeds}


@suite.property("compensated_attention_forward", **one_query)
def inverted_is_unbiased_with_the_known_variance(target, m, p, seed):
    """E[out] over all 2ⁿ masks is dense attention (Eq. 4.11), its variance Eq. 4.12: exactly."""
    q, k, v = inputs((1, 1, 1, 1, m, 3, 2), seed, 2.0)
    allowed = np.arange(m) != 1
    full, cache = attention_forward(q, k, v, keep=allowed)
    mean, square = expectations(target, "inverted", q, k, v, allowed, p)
    assert_close(mean, full, what="E[out]")
    variance = p / (1 - p) * (cache.weights[..., None] * v[:, :, None]) ** 2
    assert_close(square - mean**2, variance.sum(axis=-2), tolerance=1e-11, what="Var[out]")


@suite.property("compensated_attention_forward", **one_query)
def renormalised_uniform_rows_lose_only_the_empty_ones(target, m, p, seed):
    """With equal weights E[out] = (1 - pⁿ) · out over all 2ⁿ masks: renormalising is unbiased but
    for the empty row."""
    q, k, v = inputs((1, 1, 1, 1, m, 3, 2), seed)
    allowed = np.ones(m, dtype=np.bool_)
    mean, _ = expectations(target, "renormalise", 0 * q, k, v, allowed, p)
    assert_close(mean, (1 - p**m) * v.mean(axis=-2, keepdims=True), what="E[out]")


@suite.property(
    "stochastic_attention_forward", shape=shapes, structure=structures, rate=rates, seed=seeds
)
def a_shift_of_the_values_shifts_renormalised_rows(target, shape, structure, rate, seed):
    """V + b gives out + b wherever a row has a key left: what inverted dropout does not do."""
    q, k, v = inputs(shape, seed)
    keep, shift = structural(structure, shape, seed), normal(v.shape[-1:], seed ^ 8)
    for mask in masks(rate, "renormalise"):
        if mask.kind != "head":
            given = {"random_mask": mask, "draw": Draw(seed), "layer": 0, "keep": keep}
            before, cache = target.stochastic_attention_forward(q, k, v, **given)
            after, _ = target.stochastic_attention_forward(q, k, v + shift, **given)
            alive = (cache.lse != -np.inf)[..., None]
            assert_close(after - before, alive * shift, tolerance=1e-11, what=mask.kind)


# ---- gradients -----------------------------------------------------------------------------------

small = st.sampled_from([(2, 2, 1, 2, 3, 2, 1), (1, 2, 2, 2, 4, 2, 1), (1, 1, 1, 5, 2, 1, 2)])


@suite.property(
    "stochastic_attention_forward", "stochastic_attention_backward", shape=small,
    structure=structures, seed=seeds, compensation=st.sampled_from(["renormalise", "inverted"]),
    rate=st.sampled_from([0.5, 0.3, 1.0]), softcap=st.sampled_from([None, 2.0]),
    kind=st.sampled_from(["element", "head", "by scores"]),
)  # fmt: skip
def stochastic_attention_backward_is_the_derivative(
    target, shape, structure, seed, compensation, rate, softcap, kind
):
    """q, k, v and bias against the complex step, the draw being the same in both passes; a proposal
    made of scores is held constant."""
    q, k, v = inputs(shape, seed)
    given = options(shape, seed, softcap)
    bias = given.pop("bias")
    if kind == "by scores":
        kind = "multinomial" if compensation == "inverted" else "gumbel"
    mask = next(m for m in masks(rate, compensation, protect=seed % 2 == 0) if m.kind == kind)

    def forward(**x):
        return target.stochastic_attention_forward(
            **x, random_mask=mask, draw=Draw(seed), layer=0,
            keep=structural(structure, shape, seed), **given,
        )  # fmt: skip

    x = {"q": q, "k": k, "v": v, "bias": bias}
    out, cache = forward(**x)
    dout = cotangent(out, seed)
    gradients = target.stochastic_attention_backward(dout, cache)._asdict()
    assert_gradients(lambda **x: forward(**x)[0], gradients, x, dout)


@suite.property(
    "stochastic_attention_forward", "stochastic_attention_backward", shape=shapes,
    structure=structures, rate=rates, seed=seeds,
)  # fmt: skip
def dropped_pairs_get_exactly_no_gradient(target, shape, structure, rate, seed):
    """Renormalised: the bias of a dropped pair has gradient 0, and so has everything in a row with
    nothing left, whatever its cotangent."""
    q, k, v = inputs(shape, seed)
    keep = structural(structure, shape, seed)
    for mask in masks(rate, "renormalise", protect=seed % 2 == 0):
        out, cache = target.stochastic_attention_forward(
            q, k, v, random_mask=mask, draw=Draw(seed), layer=0, keep=keep, **options(shape, seed)
        )
        dout = cotangent(out, seed)
        dout[cache.lse == -np.inf] = np.nan  # a row that nobody may read
        gradients = target.stochastic_attention_backward(dout, cache)
        dropped = np.broadcast_to(True if cache.keep is None else ~cache.keep, cache.weights.shape)
        assert (gradients.bias[dropped] == 0).all(), f"{mask.kind}: gradient at a dropped pair"
        assert all(np.isfinite(g).all() for g in gradients)


@suite.property(
    "stochastic_attention_forward", "stochastic_attention_backward", shape=small,
    structure=structures, seed=seeds, rate=st.sampled_from([0.5, 0.3, 1.0]),
)  # fmt: skip
def stop_gradient_is_the_derivative_with_a_constant_denominator(
    target, shape, structure, seed, rate
):
    """Eq. 4.13: the derivative of P ⊙ Z / c, c = rowsum(P ⊙ Z) being a number."""
    q, k, v = inputs(shape, seed)
    keep = structural(structure, shape, seed)
    bias = options(shape, seed)["bias"]
    mask = RandomMask("element", rate, protect_diagonal=seed % 2 == 0, compensation="stop_gradient")
    given = {"random_mask": mask, "draw": Draw(seed), "layer": 0, "keep": keep}
    out, cache = target.stochastic_attention_forward(q, k, v, bias=bias, **given)
    dout = cotangent(out, seed)
    gradients = target.stochastic_attention_backward(dout, cache)
    drawn = resolve(mask, Draw(seed), 0, (*q.shape[:3], shape[4]), keep=keep).keep
    kept = (softmax(scores_of(q, k, keep, bias)) * drawn).sum(axis=-1, keepdims=True)
    kept = np.where(kept == 0, 1, kept)

    def constant_denominator(q, k, v, bias):
        return apply(softmax(scores_of(q, k, keep, bias)) * drawn / kept, v)

    assert_gradients(
        constant_denominator, gradients._asdict(), {"q": q, "k": k, "v": v, "bias": bias}, dout
    )


# ---- hygiene -------------------------------------------------------------------------------------


@suite.property(
    "stochastic_attention_forward", "stochastic_attention_backward", rate=rates, seed=seeds,
    compensation=st.sampled_from(["renormalise", "inverted", "stop_gradient"]),
    bad=st.sampled_from([np.nan, np.inf, -np.inf]),
)  # fmt: skip
def what_nobody_may_read_changes_nothing(target, rate, seed, compensation, bad):
    """A key that the structural mask hides from all, its value, and a query with no key may hold
    NaN or infinity."""
    shape = (2, 2, 1, 3, 4, 3, 2)
    q, k, v = inputs(shape, seed)
    keep = np.ones((3, 4), dtype=np.bool_)
    keep[:, 1] = keep[2] = False
    dirty = [x.copy() for x in (q, k, v)]
    dirty[0][..., 2, :] = dirty[1][..., 1, :] = dirty[2][..., 1, :] = bad
    for mask in masks(rate, compensation):
        results = []
        for x in ((q, k, v), dirty):
            out, cache = target.stochastic_attention_forward(
                *x, random_mask=mask, draw=Draw(seed), layer=0, keep=keep
            )
            gradients = target.stochastic_attention_backward(cotangent(out, seed), cache)
            results.append((out, *gradients[:3]))
        for clean, got in zip(*results, strict=True):
            assert np.array_equal(clean, got), f"{mask.kind}: a hidden value spreads"


@suite.property(
    "stochastic_attention_forward", "stochastic_attention_backward", seed=seeds,
    compensation=st.sampled_from(["renormalise", "inverted", "stop_gradient"]),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
)  # fmt: skip
def dtype_in_is_dtype_out(target, seed, compensation, dtype):
    """float16 in, float16 out, rounded at the end; gradients likewise; inputs untouched."""
    shape = (2, 2, 1, 5, 5, 3, 2)
    x = [a.astype(dtype) for a in inputs(shape, seed)]
    before = [a.copy() for a in x]
    for mask in masks(0.5, compensation):
        if mask.proposal == "scores":
            continue  # rounded scores may draw another key
        given = {"random_mask": mask, "draw": Draw(seed), "layer": 0}
        out, cache = target.stochastic_attention_forward(*x, **given)
        gradients = target.stochastic_attention_backward(out, cache)
        exact, _ = target.stochastic_attention_forward(*(a.astype(np.float64) for a in x), **given)
        assert out.dtype == dtype and all(g.dtype == dtype for g in gradients[:3])
        assert_close(out.astype(np.float64), exact, tolerance=of_dtype(dtype), what=mask.kind)
    assert all(np.array_equal(a, b) for a, b in zip(x, before, strict=True))
