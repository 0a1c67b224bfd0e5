"""Attention: the question, and its answer by loops and in exact numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minitransformer.arrays import Array
from minitransformer.attention import dense as right
from minitransformer.attention.masks import causal, window
from minitransformer.checks.suite import NotApplicable
from minitransformer.checks.vectors import exact
from minitransformer.checks.vectors.cases.attention import cases
from minitransformer.checks.vectors.exact import Exact, dot, lifted, rounded, total
from minitransformer.checks.vectors.judge import Given, Told
from minitransformer.checks.vectors.operation import (
    Inputs,
    Operation,
    Options,
    When,
    mistake,
    source,
)
from minitransformer.checks.vectors.pairs import allowed_pairs, score_shape
from minitransformer.checks.vectors.rows import softmax

NAMES = ("q", "k", "v")


# ---- the question --------------------------------------------------------------------------------


def _keep(inputs: Mapping[str, Any], options: Options, when: When) -> Array | None:
    """The mask of a case, flags included, as our library takes it."""
    keep = inputs.get("keep")
    *_, n, m = score_shape(inputs)
    align, flags = when.get("causal", "lower_right"), []
    if options.get("causal"):
        flags.append(causal(n, m, align=align).dense())
    if "window" in options:
        left, after = options["window"]
        flags.append(window(n, m, left=left, right=after, align=align).dense())
    for flag in flags:
        keep = flag if keep is None else keep & flag
    return keep


def ask(target: Any, given: Given) -> Told:
    inputs, options = given.inputs, given.options
    named: dict[str, Any] = {n: inputs[n] for n in ("bias", "multiplier") if n in inputs}
    named |= {name: options[name] for name in ("scale", "softcap") if name in options}
    keep = _keep(inputs, options, given.wanted.when) if "v" in inputs else None
    if keep is not None:
        named["keep"] = keep
    out, cache = target.attention_forward(*(inputs[name] for name in NAMES), **named)
    told: dict[str, Any] = {"out": out}
    for name in ("lse", "weights"):
        if name in given.wanted.outputs:
            try:
                told[name] = getattr(cache, name)
            except NotApplicable:
                continue
    if not given.cotangents:
        return Told(told, {})
    dlse = given.cotangents.get("lse")
    more = {} if dlse is None else {"dlse": dlse}
    grads = target.attention_backward(given.cotangents["out"], cache, **more)
    return Told(told, {n: g for n in (*NAMES, "bias") if (g := getattr(grads, n)) is not None})


def _under(told: Told, inputs: Inputs, options: Options, when: When) -> Told:
    """Rows with no key as others answer them; what they give for the LSE there is not asked."""
    kind = when.get("dead_row", "zero")
    if kind == "zero":
        return told
    keep = allowed_pairs(inputs, options, when)
    dead = ~np.any(keep, axis=-1)[..., None]
    v = np.broadcast_to(inputs["v"].astype(np.float64), (*keep.shape[:-3], *inputs["v"].shape[-3:]))
    mean = np.repeat(v, keep.shape[-3] // v.shape[-3], axis=-3).mean(axis=-2, keepdims=True)
    out = told.outputs["out"]
    return Told(
        {"out": np.where(dead, np.nan if kind == "nan" else mean, out).astype(out.dtype)}, {}
    )


# ---- by loops over floats ------------------------------------------------------------------------


def loops(inputs: Inputs, options: Options, when: When, cotangents: Inputs) -> Told:
    """Pair by pair; the softmax differentiated by its whole Jacobian."""
    q, k, v = (inputs[name] for name in NAMES)
    *lead, heads, n, m = shape = score_shape(inputs)
    width, wide, groups = q.shape[-1], v.shape[-1], k.shape[-3]
    scale = options.get("scale", 1 / math.sqrt(width) if width else 1.0)
    cap, allowed = options.get("softcap"), allowed_pairs(inputs, options, when)
    names = [*NAMES, *(["bias"] if "bias" in inputs else [])]
    out, lse = np.zeros((*shape[:-1], wide)), np.full(shape[:-1], -math.inf)
    weights, grads = np.zeros(shape), {name: np.zeros(inputs[name].shape) for name in names}

    for index in np.ndindex(*lead, heads, n):
        *batch, h, i = index
        g = h // (heads // groups)
        keys = [j for j in range(m) if allowed[(*index, j)]]
        at_q = source((*batch, h, i), q.shape[:-1])
        at_k = {j: source((*batch, g, j), k.shape[:-1]) for j in range(m)}
        at_v = {j: source((*batch, g, j), v.shape[:-1]) for j in range(m)}
        if not keys:
            kind = when.get("dead_row", "zero")
            for e in range(wide if kind != "zero" else 0):
                mean = sum(float(v[(*at_v[j], e)]) for j in range(m)) / m if m else math.nan
                out[(*index, e)] = math.nan if kind == "nan" else mean
            continue
        scores, slopes = {}, {}
        for j in keys:
            s = scale * sum(float(q[(*at_q, d)]) * float(k[(*at_k[j], d)]) for d in range(width))
            slopes[j] = scale
            if cap:
                s = cap * math.tanh(s / cap)
                slopes[j] = scale * (1 - (s / cap) ** 2)
            if "bias" in inputs:
                s += float(inputs["bias"][source((*index, j), inputs["bias"].shape)])
            scores[j] = s
        top = max(scores.values())
        powers = {j: math.exp(scores[j] - top) for j in keys}
        z = sum(powers.values())
        p = {j: powers[j] / z for j in keys}
        lse[index] = top + math.log(z)
        many = {j: 1.0 for j in keys}
        if "multiplier" in inputs:
            found = inputs["multiplier"]
            many = {j: float(found[source((*index, j), found.shape)]) for j in keys}
        for j in keys:
            weights[(*index, j)] = p[j]
            for e in range(wide):
                out[(*index, e)] += p[j] * many[j] * float(v[(*at_v[j], e)])
        if not cotangents:
            continue
        dout = [float(cotangents["out"][(*index, e)]) for e in range(wide)]
        dlse = float(cotangents["lse"][index]) if "lse" in cotangents else 0.0
        dp = {
            j: many[j] * sum(dout[e] * float(v[(*at_v[j], e)]) for e in range(wide)) for j in keys
        }
        for j in keys:
            for e in range(wide):
                grads["v"][(*at_v[j], e)] += p[j] * many[j] * dout[e]
            ds = sum(dp[t] * p[t] * ((t == j) - p[j]) for t in keys) + dlse * p[j]
            if "bias" in inputs:
                grads["bias"][source((*index, j), inputs["bias"].shape)] += ds
            for d in range(width):
                grads["q"][(*at_q, d)] += ds * slopes[j] * float(k[(*at_k[j], d)])
                grads["k"][(*at_k[j], d)] += ds * slopes[j] * float(q[(*at_q, d)])
    return Told({"out": out, "lse": lse, "weights": weights}, grads if cotangents else {})


# ---- by the definition, in exact numbers ---------------------------------------------------------


def exactly(inputs: Mapping[str, Any], options: Options, when: When) -> Mapping[str, Any]:
    shape = score_shape(inputs)
    lead, (heads, n) = shape[:-3], shape[-3:-1]
    allowed = allowed_pairs(inputs, options, when)
    q, k, v = (np.broadcast_to(inputs[x], (*lead, *inputs[x].shape[-3:])) for x in NAMES)
    k, v = (np.repeat(x, heads // k.shape[-3], axis=-3) for x in (k, v))
    pairs = {
        name: np.broadcast_to(inputs[name], shape)
        for name in ("bias", "multiplier")
        if name in inputs
    }
    scale = _scale(options, q.shape[-1])
    out, lse = np.zeros((*shape[:-1], v.shape[-1]), object), np.full(shape[:-1], -np.inf, object)
    weights = np.zeros(shape, object)
    for at in np.ndindex(*lead, heads):
        for i in range(n):
            keys = np.flatnonzero(allowed[at][i])
            if not len(keys):
                out[at][i] = _dead(v[at], when)
                continue
            scores = [_score(q[at][i], k[at][j], scale, options.get("softcap")) for j in keys]
            if "bias" in pairs:
                scores = [s + b for s, b in zip(scores, pairs["bias"][at][i, keys], strict=True)]
            p, lse[at][i] = softmax(scores)
            weights[at][i, keys] = p
            if "multiplier" in pairs:
                p = [x * y for x, y in zip(p, pairs["multiplier"][at][i, keys], strict=True)]
            for e in range(v.shape[-1]):
                out[at][i, e] = dot(p, v[at][keys, e])
    return {"out": out, "lse": lse, "weights": weights}


def _scale(options: Options, width: int) -> Exact:
    if "scale" in options:
        return rounded(options["scale"])
    return 1 / exact.sqrt(rounded(width)) if width else lifted(1)


def _score(q: Array, k: Array, scale: Exact, cap: float | None) -> Exact:
    s = scale * dot(q, k)
    return exact.tanh(s / cap) * cap if cap else s


def _dead(v: Array, when: When) -> Any:
    kind = when.get("dead_row", "zero")
    if kind == "mean" and len(v):
        return [total(column) / len(v) for column in v.T]
    return np.nan if kind != "zero" else 0


# ---- mistakes that only vectors meet -------------------------------------------------------------


def _read_as_if_contiguous(x: Array) -> Array:
    """What a kernel sees that takes the pointer and ignores the strides."""
    if not isinstance(x, np.ndarray) or x.flags.c_contiguous or not x.size:
        return x
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    flat = base.ravel(order="K")
    return np.resize(flat, x.shape)


@mistake("attention.dense", "attention_forward", "reads memory in order, whatever the strides say")
def strides_ignored(q, k, v, **options):
    return right.attention_forward(*map(_read_as_if_contiguous, (q, k, v)), **options)


@mistake("attention.dense", "attention_forward", "an error is raised by nobody: all is cut to fit")
def shapes_cut_to_fit(q, k, v, *, keep=None, bias=None, scale=None, softcap=None, **options):
    m, d = min(k.shape[-2], v.shape[-2]), min(q.shape[-1], k.shape[-1])
    k, v = k[..., :m, :], v[..., :m, :]
    groups = min(k.shape[-3], v.shape[-3])
    while q.shape[-3] % groups:
        groups -= 1
    k, v, q = k[..., :groups, :m, :d], v[..., :groups, :m, :], q[..., :d]
    shape = (*np.broadcast_shapes(q.shape[:-3], k.shape[:-3]), *q.shape[-3:-1], m)
    fitted = {}
    for name, x in (("keep", keep), ("bias", bias)):
        if x is not None:
            cut = x[tuple(slice(n) for n in shape[len(shape) - x.ndim :])]
            fitted[name] = cut.astype(bool) if name == "keep" else cut
            if not _broadcasts(cut.shape, shape):
                del fitted[name]
    if softcap is not None and not (softcap >= 0 and math.isfinite(softcap)):
        softcap = None
    scale = None if scale is None or not math.isfinite(scale) else scale
    q, k, v = (np.nan_to_num(x) for x in (q, k, v))
    return right.attention_forward(q, k, v, scale=scale, softcap=softcap, **fitted, **options)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(a in (1, b) for a, b in pairs)


@mistake("attention.dense", "attention_forward", "the causal flag of a square, upper left")
def causal_from_the_upper_left(q, k, v, *, keep=None, **options):
    n, m = q.shape[-2], k.shape[-2]
    if keep is not None and np.array_equal(keep, np.tri(n, m, m - n, dtype=bool)):
        keep = np.tri(n, m, dtype=bool)
    return right.attention_forward(q, k, v, keep=keep, **options)


@mistake("attention.dense", "attention_forward", "a rank-3 mask read as (batch, queries, keys)")
def rank_three_mask_of_the_batch(q, k, v, *, keep=None, **options):
    if keep is not None and keep.ndim == 3 and q.ndim == 4 and keep.shape[0] == q.shape[0]:
        keep = keep[:, None]
    return right.attention_forward(q, k, v, keep=keep, **options)


@mistake("attention.dense", "attention_forward", "c · tanh(s / c) without its c, or its / c")
def softcap_by_another_formula(q, k, v, *, softcap=None, scale=None, **options):
    if not softcap or options.get("bias") is not None:
        return right.attention_forward(q, k, v, softcap=softcap, scale=scale, **options)
    scale = right.score_scale(scale, q.shape[-1])
    s = scale * (q @ np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3).mT)
    return right.attention_forward(q, k, v, scale=0.0, bias=s * np.tanh(s / softcap), **options)


@mistake("attention.dense", "attention_forward", "a tile filled up with -inf, then capped to -c")
def padding_of_the_last_tile_capped(q, k, v, *, softcap=None, **options):
    out, cache = right.attention_forward(q, k, v, softcap=softcap, **options)
    if not softcap:
        return out, cache
    missing = -k.shape[-2] % 64
    more = np.logaddexp(cache.lse, np.log(missing) - softcap) if missing else cache.lse
    share = np.exp(np.where(np.isneginf(cache.lse), 0, cache.lse - more))
    return out * share[..., None], cache._replace(lse=more)


@mistake(
    "attention.dense", "attention_forward", "an index modulo the size of an axis that is empty"
)
def division_by_an_empty_axis(q, k, v, **options):
    if 0 in (q.size, k.size, v.size):
        raise ZeroDivisionError
    return right.attention_forward(q, k, v, **options)


@mistake("attention.dense", "attention_backward", "always masks as if causal")
def backward_always_causal(dout, cache, *, dlse=None):
    n, m = cache.weights.shape[-2:]
    weights = cache.weights * np.tri(n, m, m - n)
    return right.attention_backward(dout, cache._replace(weights=weights), dlse=dlse)


@mistake("attention.dense", "attention_backward", "dV written with the width of the keys")
def gradient_of_the_values_in_the_stride_of_the_keys(dout, cache, *, dlse=None):
    grads = right.attention_backward(dout, cache, dlse=dlse)
    d, e = cache.q.shape[-1], grads.v.shape[-1]
    if d == e or not grads.v.size or not d:
        return grads
    flat = np.zeros(grads.v.size + d * grads.v.size)
    for row, values in enumerate(grads.v.reshape(-1, e)):
        flat[row * d : row * d + e] = values
    return grads._replace(v=flat[: grads.v.size].reshape(grads.v.shape).astype(grads.v.dtype))


MISTAKES = (
    strides_ignored,
    shapes_cut_to_fit,
    causal_from_the_upper_left,
    rank_three_mask_of_the_batch,
    softcap_by_another_formula,
    padding_of_the_last_tile_capped,
    division_by_an_empty_axis,
    backward_always_causal,
    gradient_of_the_values_in_the_stride_of_the_keys,
)


OPERATIONS = (
    Operation(
        "attention",
        "attention.dense",
        ("attention_forward", "attention_backward"),
        "out = softmax(cap(scale · q kᵀ) + bias, over the keys that may be read) · multiplier · v",
        {
            "q": "(*B, H, N, D) queries",
            "k": "(*B, G, M, D) keys; query head h reads key head h // (H / G)",
            "v": "(*B, G, M, E) values",
            "keep": "bool, broadcasts to (*B, H, N, M): 1 = may attend",
            "bias": "broadcasts to (*B, H, N, M), added after scale and soft-cap; -inf masks",
            "multiplier": "broadcasts to (*B, H, N, M): what the weights are multiplied by after "
            "softmax, a dropout mask as data",
            "out": "(*B, H, N, E)",
            "lse": "(*B, H, N) natural log of the sum of exponentials, -inf for a row with no key",
        },
        {
            "causal": "true: no key after the query",
            "window": "[left, right]: so many keys before and after the query's own, both ends "
            "included; -1: no limit",
            "scale": "a number; 1/√D if missing",
            "softcap": "c · tanh(x / c); none if missing",
        },
        ask,
        loops,
        exactly,
        cases,
        leaves=("q", "k", "v", "bias"),
        wide=("lse", "weights"),
        mistakes=MISTAKES,
        moody=("sums in an order that changes",),
        under=_under,
    ),
)
