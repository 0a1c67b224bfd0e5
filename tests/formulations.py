"""Two ways to write each operation, equal on paper, unlike in their arithmetic: a suite that fails
one of them asks for more than the definition. Plain NumPy; `FORMULATIONS` maps --as to both."""

import functools
import inspect
import math

import numpy as np

erf = np.vectorize(math.erf, otypes=[np.float64])
INF = np.inf


def in_float32(function):
    """What a careful narrow kernel does: read narrow numbers, compute in float32, round once."""

    @functools.wraps(function)
    def wide(*arrays, **options):
        def widened(x):
            floating = isinstance(x, np.ndarray) and x.dtype.kind not in "ib"
            return x.astype(np.float32) if floating else x

        stored = arrays[0].dtype
        with np.errstate(all="ignore"):
            result = function(
                *map(widened, arrays), **{name: widened(x) for name, x in options.items()}
            )
        if not isinstance(result, tuple):
            return result.astype(stored)
        return (result[0].astype(stored), *result[1:])

    wide.__signature__ = inspect.signature(function)
    return wide


def step_in_float32(function):
    """The same where a cache comes and goes: it is kept as narrow as what came."""

    @functools.wraps(function)
    def wide(q, k, v, cache, **options):
        if cache is not None:
            cache = tuple(x.astype(np.float32) if x.dtype.kind not in "ib" else x for x in cache)
        given = (x.astype(np.float32) for x in (q, k, v))
        out, after = function(*given, cache, **options)
        narrow = (x.astype(q.dtype) if x.dtype.kind not in "ib" else x for x in after)
        return out.astype(q.dtype), tuple(narrow)

    wide.__signature__ = inspect.signature(function)
    return wide


def safe(top):
    return np.where(np.isneginf(top), 0, top)


def repeated(x, heads):
    return np.repeat(x, heads // x.shape[1], axis=1)


# ---- attention -----------------------------------------------------------------------------------


def _asked(q, k, v, keep, bias):
    """Who may attend to whom, and arrays with 0 for what nobody may read."""
    shape = (*q.shape[:3], k.shape[2])
    allowed = np.ones(shape, bool) if keep is None else np.broadcast_to(keep, shape)
    if bias is not None:
        allowed = allowed & ~np.isneginf(bias)
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    groups = allowed.reshape(shape[0], k.shape[1], rows, shape[3]).any(axis=2)
    k, v = (np.where(groups[..., None], x, 0) for x in (k, v))
    return allowed, np.where(allowed.any(-1)[..., None], q, 0), k, v


def attention_with_scale_in_q_and_shifted_rows(
    q, k, v, *, keep=None, bias=None, scale=None, softcap=None, multiplier=None
):
    """The scale multiplied into the queries; and as ALiBi may count from anywhere, another constant
    added to each row."""
    allowed, q, k, v = _asked(q, k, v, keep, bias)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = q @ np.swapaxes(repeated(k, q.shape[1]), -1, -2)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    shift = np.linspace(-3, 2, s.shape[2])[:, None].astype(s.dtype)
    s = np.where(allowed, s + (0 if bias is None else bias) + shift, -INF)
    top = safe(s.max(-1, keepdims=True, initial=-INF))
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top - shift)[..., 0]
    return (p if multiplier is None else p * multiplier) @ repeated(v, q.shape[1]), lse, p


def attention_online(q, k, v, *, keep=None, bias=None, scale=None, softcap=None, multiplier=None):
    """Two keys at a time, what is known so far scaled along; divided once at the end."""
    allowed, q, k, v = _asked(q, k, v, keep, bias)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    top = np.full((*q.shape[:3], 1), -INF, q.dtype)
    total, weighted = np.zeros_like(top), np.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
    for j in range(0, k.shape[2], 2):
        here = slice(j, j + 2)
        s = scale * (q @ np.swapaxes(k[:, :, here], -1, -2))
        if softcap:
            s = softcap * np.tanh(s / softcap)
        s = s if bias is None else s + bias[..., here]
        s = np.where(allowed[..., here], s, -INF)
        after = np.maximum(top, s.max(-1, keepdims=True))
        e, shrink = np.exp(s - safe(after)), np.exp(top - safe(after))
        total, top = total * shrink + e.sum(-1, keepdims=True), after
        e = e if multiplier is None else e * multiplier[..., here]
        weighted = weighted * shrink + e @ v[:, :, here]
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + safe(top))[..., 0]
    return weighted / np.where(total == 0, 1, total), lse


# ---- linear attention ----------------------------------------------------------------------------


def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def linear_by_weights(q, k, v, *, causal=False, keep=None):
    """All weights, normalised before they meet the values."""
    n, m = q.shape[2], k.shape[2]
    if keep is not None:
        k, v = (np.where(keep[..., None], x, 0) for x in (k, v))
    fk = phi(k) if keep is None else np.where(keep[..., None], phi(k), 0)
    a = phi(q) @ np.swapaxes(repeated(fk, q.shape[1]), -1, -2)
    a = np.nan_to_num(np.tril(a, m - n) if causal else a, posinf=INF)
    total = a.sum(-1, keepdims=True)
    return a / np.where(total == 0, 1, total) @ repeated(v, q.shape[1])


def linear_by_running_sums(q, k, v, *, causal=False, keep=None):
    """Sums over keys, all at once, and each query reads the one that it may."""
    n, m = q.shape[2], k.shape[2]
    if keep is not None:
        k, v = (np.where(keep[..., None], x, 0) for x in (k, v))
    fk = phi(k) if keep is None else np.where(keep[..., None], phi(k), 0)
    outer = fk[..., :, None] * np.concatenate([v, np.ones_like(v[..., :1])], -1)[..., None, :]
    start = np.zeros_like(outer[:, :, :1].sum(axis=2, keepdims=True))
    sums = np.concatenate([start, np.cumsum(outer, axis=2)], axis=2)
    seen = np.clip(np.arange(n) + m - n + 1, 0, m) if causal else np.full(n, m)
    fq = np.where((seen > 0)[:, None], phi(q), 0)
    both = np.einsum("bhnd,bhnde->bhne", fq, repeated(sums[:, :, seen], q.shape[1]))
    total = np.nan_to_num(both[..., -1:])
    return np.where(total == 0, 0, both[..., :-1] / np.where(total == 0, 1, total))


# ---- FAVOR+ --------------------------------------------------------------------------------------


def _logs(q, k, v, projection, keep, scale, causal):
    n, m = q.shape[2], k.shape[2]
    root = q.shape[-1] ** -0.25 if scale is None else scale**0.5
    if keep is not None:
        k, v = (np.where(keep[..., None], x, 0) for x in (k, v))
    lq, lk = (root * x @ projection.T - (root * x * root * x).sum(-1, keepdims=True) / 2
              for x in (q, k))  # fmt: skip
    lk = lk if keep is None else np.where(keep[..., None], lk, -INF)
    pairs = np.tri(n, m, m - n if causal else m, dtype=bool)
    return np.nan_to_num(lq), repeated(lk, q.shape[1]), repeated(v, q.shape[1]), pairs


def favor_in_logarithms(q, k, v, projection, *, causal=False, keep=None, scale=None):
    """The logarithm of every weight, a softmax over keys and features."""
    lq, lk, v, pairs = _logs(q, k, v, projection, keep, scale, causal)
    logs = np.where(pairs[..., None], lq[..., None, :] + lk[..., None, :, :], -INF)
    top = safe(logs.max(axis=(-2, -1), keepdims=True, initial=-INF))
    e = np.exp(logs - top).sum(-1)
    total = e.sum(-1, keepdims=True)
    return e @ v / np.where(total == 0, 1, total)


def favor_key_by_key(q, k, v, projection, *, causal=False, keep=None, scale=None):
    """One key after the other, merged as an online softmax would."""
    lq, lk, v, pairs = _logs(q, k, v, projection, keep, scale, causal)
    top = np.full((*lq.shape[:3], 1), -INF, lq.dtype)
    total, weighted = np.zeros_like(top), np.zeros((*lq.shape[:3], v.shape[-1]), lq.dtype)
    for j in range(lk.shape[2]):
        logs = np.where(pairs[:, j : j + 1], lq + lk[:, :, j : j + 1], -INF)
        after = np.maximum(top, logs.max(-1, keepdims=True))
        weight = np.exp(logs - safe(after)).sum(-1, keepdims=True)
        shrink, top = np.exp(top - safe(after)), after
        total, weighted = total * shrink + weight, weighted * shrink + weight * v[:, :, j : j + 1]
    return weighted / np.where(total == 0, 1, total)


# ---- block-sparse --------------------------------------------------------------------------------


def sparse_by_expansion(q, k, v, *, layout, tile, keep=None, scale=None, softcap=None):
    """The tiles blown up to a dense mask."""
    n, m = q.shape[2], k.shape[2]
    allowed = np.repeat(np.repeat(layout, tile[0], 2), tile[1], 3)[:, :, :n, :m]
    allowed = allowed if keep is None else allowed & keep
    return attention_with_scale_in_q_and_shifted_rows(
        q, k, v, keep=allowed, scale=scale, softcap=softcap
    )[:2]


def sparse_tile_by_tile(q, k, v, *, layout, tile, keep=None, scale=None, softcap=None):
    """Each row of tiles by itself: its scores side by side, one softmax."""
    (batch, heads, n, width), m = q.shape, k.shape[2]
    keep = np.ones((batch, heads, n, m), bool) if keep is None else keep
    scale = width**-0.5 if scale is None else scale
    out, lse = np.zeros((batch, heads, n, v.shape[-1]), q.dtype), np.full(q.shape[:3], -INF)
    for b, h, i in np.ndindex(batch, heads, layout.shape[2]):
        rows = slice(i * tile[0], min((i + 1) * tile[0], n))
        columns = [j for t in np.flatnonzero(layout[b, h, i])
                   for j in range(t * tile[1], min((t + 1) * tile[1], m))]  # fmt: skip
        g = h // (heads // k.shape[1])
        here = keep[b, h, rows][:, columns]
        x, y = (np.where(here.any(0)[:, None], z[b, g, columns], 0) for z in (k, v))
        s = scale * (np.where(here.any(1)[:, None], q[b, h, rows], 0) @ x.T)
        s = softcap * np.tanh(s / softcap) if softcap else s
        s = np.where(here, s, -INF)
        top = s.max(-1, keepdims=True, initial=-INF)
        e = np.exp(s - safe(top))
        total = e.sum(-1, keepdims=True)
        out[b, h, rows] = e @ y / np.where(total == 0, 1, total)
        with np.errstate(divide="ignore"):
            lse[b, h, rows] = (np.log(total) + safe(top))[:, 0]
    return out, lse


# ---- decoding ------------------------------------------------------------------------------------


def step_that_appends(q, k, v, cache, *, window=None, positions=None, scale=None):
    """Keys in the order in which they came, with their positions."""
    p = np.zeros((len(q), 0), int) if cache is None else cache[2]
    mine = positions
    if mine is None:
        last = p.max(-1, initial=-1, keepdims=True)
        mine = last + 1 + np.arange(q.shape[2])
    if cache is not None:
        k, v = (np.concatenate(pair, axis=2) for pair in zip(cache[:2], (k, v), strict=True))
    p = np.concatenate([p, mine], axis=1)
    distance = mine[:, :, None] - p[:, None]
    keep = (distance >= 0) & (p[:, None] >= 0) & (mine[:, :, None] >= 0)
    if window is not None:
        keep &= distance < window
    whole = np.broadcast_to(keep[:, None], (*q.shape[:3], k.shape[2]))
    out, *_ = attention_with_scale_in_q_and_shifted_rows(q, k, v, keep=whole, scale=scale)
    return out, (k.copy(), v.copy(), p)


def step_that_prepends(q, k, v, cache, *, window=None, positions=None, scale=None):
    """The newest keys first: a cache is a set."""
    held = (
        None
        if cache is None
        else tuple(np.flip(x, axis=a) for x, a in zip(cache, (2, 2, 1), strict=True))
    )
    p = np.zeros((len(q), 0), int) if held is None else held[2]
    mine = positions
    if mine is None:
        mine = p.max(-1, initial=-1, keepdims=True) + 1 + np.arange(q.shape[2])
    if held is not None:
        k, v = (np.concatenate(pair, axis=2) for pair in zip((k, v), held[:2], strict=True))
    p = np.concatenate([mine, p], axis=1)
    keep = (p[:, None] <= mine[:, :, None]) & (p[:, None] >= 0)
    if window is not None:
        keep &= p[:, None] > mine[:, :, None] - window
    whole = np.broadcast_to(keep[:, None], (*q.shape[:3], k.shape[2]))
    out, _ = attention_online(q, k, v, keep=whole, scale=scale)
    after = (k, v, p)
    return out, tuple(np.flip(x, axis=a).copy() for x, a in zip(after, (2, 2, 1), strict=True))


# ---- softmax and relatives -----------------------------------------------------------------------


def softmax_by_exponentials(x, axis=-1):
    e = np.exp(x - safe(x.max(axis, keepdims=True, initial=-INF)))
    total = e.sum(axis, keepdims=True)
    return e / np.where(total == 0, 1, total)


def softmax_by_logarithms(x, axis=-1):
    """exp(x - logsumexp(x))."""
    lse = logsumexp_by_exponentials(x, axis, keepdims=True)
    return np.exp(x - safe(lse))


def log_softmax_by_shift(x, axis=-1):
    shifted = x - safe(x.max(axis, keepdims=True, initial=-INF))
    with np.errstate(divide="ignore"):
        total = np.log(np.exp(shifted).sum(axis, keepdims=True))
    return shifted - safe(total)


def log_softmax_by_lse(x, axis=-1):
    return x - safe(logsumexp_by_merging(x, axis, keepdims=True))


def logsumexp_by_exponentials(x, axis=-1, keepdims=False):
    top = x.max(axis, keepdims=True, initial=-INF)
    with np.errstate(divide="ignore"):
        out = np.log(np.exp(x - safe(top)).sum(axis, keepdims=True)) + safe(top)
    return out if keepdims else out.squeeze(axis)


def logsumexp_by_merging(x, axis=-1, keepdims=False):
    """One entry after the other: log(e^a + e^b) = max + log1p(e^-|a - b|)."""
    x = np.moveaxis(x, axis, -1)
    out = np.full(x.shape[:-1], -INF, x.dtype)
    for j in range(x.shape[-1]):
        a, b = np.maximum(out, x[..., j]), np.minimum(out, x[..., j])
        out = np.where(np.isneginf(b), a, a + np.log1p(np.exp(safe(b) - safe(a))))
    return np.expand_dims(out, axis) if keepdims else out


# ---- norms, activations, loss --------------------------------------------------------------------


def layer_norm_centred(x, gamma, beta, eps=1e-5):
    c = x - x.mean(-1, keepdims=True)
    root = np.sqrt((c * c).mean(-1, keepdims=True) + eps)
    return gamma * (c / np.where(root == 0, 1, root)) + beta


def layer_norm_with_folded_gain(x, gamma, beta, eps=1e-5):
    """A multiplication and an addition, a = γ/σ and b = β - μ a, about a first guess of the
    mean."""
    guess = x[..., :1]
    y = x - guess
    mean = y.mean(-1, keepdims=True)
    root = np.sqrt(np.square(y - mean).sum(-1, keepdims=True) / max(x.shape[-1], 1) + eps)
    a = gamma / np.where(root == 0, 1, root)
    return y * a + (beta - mean * a)


def rms_norm_by_mean(x, gamma, eps=1e-6, offset=0.0):
    root = np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    return x / np.where(root == 0, 1, root) * (offset + gamma)


def rms_norm_by_length(x, gamma, eps=1e-6, offset=0.0):
    """√W x / √(‖x‖² + W ε)."""
    width = x.shape[-1]
    length = np.sqrt(np.einsum("...w,...w->...", x, x)[..., None] + width * eps)
    return (offset + gamma) * (math.sqrt(width) * x / np.where(length == 0, 1, length))


def gelu_by_tanh(x, form="tanh"):
    if form == "erf":
        return (x * 0.5 * (1 + erf(x / math.sqrt(2)))).astype(x.dtype)
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_by_sigmoid(x, form="tanh"):
    """(1 + tanh z)/2 is the sigmoid of 2z; 1 + erf is 2 - erfc."""
    if form == "erf":
        erfc = np.vectorize(math.erfc, otypes=[np.float64])
        return (x * (0.5 * erfc(-x / math.sqrt(2)))).astype(x.dtype)
    z = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return x / (1 + np.exp(np.minimum(-z, 80)))


def swiglu_by_tanh(gate, up):
    return gate * 0.5 * (1 + np.tanh(gate / 2)) * up


def swiglu_by_exponential(gate, up):
    return up * (gate / (1 + np.exp(np.minimum(-gate, 80))))


def cross_entropy_by_log_softmax(logits, targets, label_smoothing=0.0, ignore_index=None):
    z, t = logits.reshape(targets.size, logits.shape[-1]), targets.reshape(-1)
    kept = np.ones(len(t), bool) if ignore_index is None else t != ignore_index
    logs = log_softmax_by_shift(z[kept])
    hit = logs[np.arange(kept.sum()), t[kept]]
    cost = (1 - label_smoothing) * hit + label_smoothing * logs.mean(-1)
    return np.asarray(-cost.sum() / max(kept.sum(), 1), dtype=logits.dtype)


def cross_entropy_by_lse(logits, targets, label_smoothing=0.0, ignore_index=None):
    """log Σ e^z - Σ T z, with the target distribution written out."""
    z, t = logits.reshape(targets.size, logits.shape[-1]), targets.reshape(-1)
    kept = np.ones(len(t), bool) if ignore_index is None else t != ignore_index
    z, t = z[kept], t[kept]
    wanted = np.full(z.shape, label_smoothing / max(z.shape[-1], 1), z.dtype)
    wanted[np.arange(len(t)), t] += 1 - label_smoothing
    top = z.max(-1, keepdims=True, initial=-INF)
    cost = logsumexp_by_merging(z - top) - (wanted * (z - top)).sum(-1)
    return np.asarray(cost.sum() / max(len(t), 1), dtype=logits.dtype)


# ---- positions -----------------------------------------------------------------------------------


def _over_channels(cos, sin, width, layout):
    """cos and sin for each turned channel."""
    if layout == "half":
        return np.concatenate([cos, cos], -1), np.concatenate([sin, sin], -1)
    return np.repeat(cos, 2, -1), np.repeat(sin, 2, -1)


def rope_by_partner(x, cos, sin, layout="half"):
    """x cos + partner sin, the partner of the first of a pair negated."""
    r = 2 * cos.shape[-1]
    c, s = _over_channels(cos, sin, r, layout)
    turned = x[..., :r]
    if layout == "half":
        partner = np.concatenate([-turned[..., r // 2 :], turned[..., : r // 2]], -1)
    else:
        partner = np.stack([-turned[..., 1::2], turned[..., 0::2]], -1).reshape(turned.shape)
    return np.concatenate([turned * c + partner * s, x[..., r:]], -1)


def rope_by_complex_numbers(x, cos, sin, layout="half"):
    """A pair is a complex number, and turning it a product."""
    r = 2 * cos.shape[-1]
    first, second = (
        (x[..., : r // 2], x[..., r // 2 : r])
        if layout == "half"
        else (x[..., 0:r:2], x[..., 1:r:2])
    )
    z = (first + 1j * second) * (cos + 1j * sin)
    if layout == "half":
        turned = np.concatenate([z.real, z.imag], -1)
    else:
        turned = np.stack([z.real, z.imag], -1).reshape(*z.shape[:-1], r)
    return np.concatenate([turned, x[..., r:]], -1).astype(x.dtype)


def relative(query_positions, key_positions):
    i, j = (p.astype(np.int64) for p in (query_positions, key_positions))
    return j[..., None, :] - i[..., :, None]


def alibi_by_distance(slopes, query_positions, key_positions):
    distance = np.abs(relative(query_positions, key_positions))
    return -(slopes[:, None, None] * distance[..., None, :, :]).astype(slopes.dtype)


def alibi_by_both_sides(slopes, query_positions, key_positions):
    """min(j - i, i - j) times the slope."""
    d = relative(query_positions, key_positions)
    return np.einsum("h,...nm->...hnm", slopes, np.minimum(d, -d).astype(slopes.dtype))


def _bucket(r, side, exact, far):
    d = np.maximum(r, 0)
    # no bucket's edge is a whole number unless the logarithms say so exactly
    share = np.log(np.maximum(d, 1) / exact) / math.log(far / exact)
    return np.where(d < exact, d, np.minimum(exact + np.floor(share * (side - exact)), side - 1))


def t5_by_gather(table, query_positions, key_positions, bidirectional=True, max_distance=128):
    r = relative(query_positions, key_positions)
    side = len(table) // 2 if bidirectional else len(table)
    back = np.abs(r) if bidirectional else -r
    bucket = _bucket(back, side, side // 2, max_distance).astype(int)
    bucket = bucket + side * (r > 0) if bidirectional else bucket
    return np.moveaxis(table[bucket], -1, -3)


def t5_by_one_hot(table, query_positions, key_positions, bidirectional=True, max_distance=128):
    """A product with one-hot rows."""
    r = relative(query_positions, key_positions)
    side = len(table) // 2 if bidirectional else len(table)
    back = np.abs(r) if bidirectional else -r
    bucket = _bucket(back, side, side // 2, max_distance)
    bucket = bucket + side * (r > 0) if bidirectional else bucket
    one_hot = (bucket[..., None] == np.arange(len(table))).astype(table.dtype)
    return np.moveaxis(one_hot @ table, -1, -3)


FORMULATIONS = {
    "attention": (attention_with_scale_in_q_and_shifted_rows, attention_online),
    "linear_attention": (linear_by_weights, linear_by_running_sums),
    "favor": (favor_in_logarithms, favor_key_by_key),
    "block_sparse_attention": (sparse_by_expansion, sparse_tile_by_tile),
    "kv_cache": (step_that_appends, step_that_prepends),
    "softmax": (softmax_by_exponentials, softmax_by_logarithms),
    "log_softmax": (log_softmax_by_shift, log_softmax_by_lse),
    "logsumexp": (logsumexp_by_exponentials, logsumexp_by_merging),
    "layer_norm": (layer_norm_centred, layer_norm_with_folded_gain),
    "rms_norm": (rms_norm_by_mean, rms_norm_by_length),
    "gelu": (gelu_by_tanh, gelu_by_sigmoid),
    "swiglu": (swiglu_by_tanh, swiglu_by_exponential),
    "cross_entropy": (cross_entropy_by_log_softmax, cross_entropy_by_lse),
    "rope": (rope_by_partner, rope_by_complex_numbers),
    "alibi": (alibi_by_distance, alibi_by_both_sides),
    "t5_bias": (t5_by_gather, t5_by_one_hot),
}
