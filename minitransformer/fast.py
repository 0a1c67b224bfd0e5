"""Numba twins of hot loops: the same numbers as the readable NumPy, sooner.

A twin adds no mechanism and is not a place to learn one: each names the function it repeats, and
`tests/test_fast.py` holds the two together. The module is imported on use only, because it imports
Numba.
"""

import math

import numba
import numpy as np
from numba.extending import overload

from minitransformer import philox
from minitransformer.arrays import Array, require_in_range

# ---- random bits: twins of philox.random_bits, bit for bit (Eq. 4.1, Eq. 4.2) --------------------

_M0, _M1 = (np.uint64(m) for m in philox.MULTIPLIERS)
_W0, _W1 = (np.uint64(w) for w in philox.WEYL)
_LOW, _32 = philox.LOW, np.uint64(32)


@numba.njit(nogil=True, cache=True, inline="always")
def _words(c0, c1, c2, c3, k0, k1):
    """Ten rounds on one counter; every variable is a uint64 that holds 32 bits."""
    for _ in range(10):
        a, b = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (b >> _32) ^ c1 ^ k0, b & _LOW, (a >> _32) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@numba.njit(nogil=True, cache=True, parallel=True)
def _fill_bits(out, key, step, heads, rows, columns):
    # each thread owns whole rows: the result does not depend on how many threads there are
    for r in numba.prange(heads.size * rows.size):
        line = out[r]
        head, row = heads[r // rows.size], rows[r % rows.size]
        c = 0
        while c < columns.size:
            quad = columns[c] >> np.uint64(2)
            words = _words(quad, row, head, step, key[0], key[1])
            while c < columns.size and columns[c] >> np.uint64(2) == quad:
                line[c] = words[columns[c] & np.uint64(3)]
                c += 1


@numba.njit(nogil=True, cache=True, parallel=True)
def _fill_keep(out, key, step, heads, rows, columns, thresholds):
    for r in numba.prange(heads.size * rows.size):
        line, least = out[r], thresholds[r // rows.size]
        head, row = heads[r // rows.size], rows[r % rows.size]
        c = 0
        while c < columns.size:
            quad = columns[c] >> np.uint64(2)
            words = _words(quad, row, head, step, key[0], key[1])
            while c < columns.size and columns[c] >> np.uint64(2) == quad:
                line[c] = words[columns[c] & np.uint64(3)] >= least
                c += 1


def _law(draw: philox.Draw, stream: int, layer: int, *vectors: Array) -> tuple:
    key = np.array(philox.key_of(draw, stream, layer), dtype=np.uint64)
    return key, np.uint64(draw.step), *(np.ascontiguousarray(v, dtype=np.uint64) for v in vectors)


def philox_bits(
    draw: philox.Draw, stream: int, layer: int, heads: Array, rows: Array, columns: Array
) -> Array:
    """`philox.random_bits` on the grid of three index vectors: (heads, rows, columns), uint32."""
    out = np.empty((heads.size, rows.size, columns.size), dtype=np.uint32)
    _fill_bits(
        out.reshape(heads.size * rows.size, columns.size),
        *_law(draw, stream, layer, heads, rows, columns),
    )
    return out


def bernoulli_keep(
    draw: philox.Draw,
    stream: int,
    layer: int,
    heads: Array,
    rows: Array,
    columns: Array,
    thresholds: Array,
) -> Array:
    """`philox.random_bits(...) >= T` on the same grid, with T of each entry of `heads`."""
    require_in_range("thresholds", thresholds, 0, 2**32)
    out = np.empty((heads.size, rows.size, columns.size), dtype=np.bool_)
    _fill_keep(
        out.reshape(heads.size * rows.size, columns.size),
        *_law(draw, stream, layer, heads, rows, columns, np.broadcast_to(thresholds, heads.shape)),
    )
    return out


# ---- the exponential ----------------------------------------------------------------------------


# Sums may be taken in any order, so that they vectorise; NaN and infinity keep their meaning. The
# exponential is compiled without it: its two subtractions must stay two.
_SUMS = {"reassoc", "contract", "nsz"}


def _exp(x):
    """e^x; in float32 by a polynomial that compilers turn into vector instructions."""
    raise NotImplementedError  # replaced below, by the dtype of x


@numba.njit(cache=True)
def _exp32(x):
    # x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial is e^r to a rounding or two
    given = x
    x = min(max(x, np.float32(-87.3)), np.float32(88.3))
    n = math.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    e = p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return e if given == given else given  # NaN stays NaN


@overload(_exp)
def _choose_exp(x):
    return _exp32_of if x == numba.float32 else _exp64_of


def _exp32_of(x):
    return _exp32(x)


def _exp64_of(x):
    return math.exp(x)


def _flat(*arrays: Array) -> list[Array]:
    """Contiguous one-dimensional views (copies where there is no other way)."""
    return [np.ascontiguousarray(a).reshape(-1) for a in arrays]


def _require_real(name: str, *arrays: Array) -> None:
    for a in arrays:
        if a.dtype not in (np.float32, np.float64):
            raise TypeError(f"{name} has a twin for float32 and float64, got {a.dtype}")


# ---- twins of attention.dense: softmax of scaled, masked scores (Eq. 2.1, Eq. 2.4) ---------------


@numba.njit(nogil=True, cache=True, parallel=True, fastmath=_SUMS)
def _softmax_rows(scores, scale, keep, lse):
    batches, heads, rows, columns = scores.shape
    for r in numba.prange(batches * heads * rows):
        b, h, i = r // (heads * rows), r // rows % heads, r % rows
        line, allowed = scores[b, h, i], keep[b, h, i]
        largest = line.dtype.type(-np.inf)
        for j in range(columns):
            s = line[j] * scale if allowed[j] else line.dtype.type(-np.inf)
            line[j] = s
            largest = max(largest, s)
        if largest == -np.inf:
            line[:] = 0
            lse[b, h, i] = -np.inf
            continue
        for j in range(columns):
            e = _exp(line[j] - largest)
            line[j] = e if allowed[j] else line.dtype.type(0)
        total = line.dtype.type(0)
        for j in range(columns):
            total += line[j]
        for j in range(columns):
            line[j] /= total
        lse[b, h, i] = largest + math.log(total)


@numba.njit(nogil=True, cache=True, parallel=True, fastmath=_SUMS)
def _softmax_backward_rows(dweights, weights, scale):
    batches, heads, rows, columns = weights.shape
    for r in numba.prange(batches * heads * rows):
        b, h, i = r // (heads * rows), r // rows % heads, r % rows
        d, p = dweights[b, h, i], weights[b, h, i]
        total = d.dtype.type(0)
        for j in range(columns):
            total += d[j] * p[j]
        for j in range(columns):
            d[j] = p[j] * (d[j] - total) * scale


def masked_softmax(scores: Array, scale: float, keep: Array | None) -> tuple[Array, Array]:
    """Weights and log-sum-exp of `scale · scores` where `keep`, else -inf. Overwrites `scores`,
    which the caller has just made."""
    _require_real("masked_softmax", scores)
    allowed = np.broadcast_to(np.True_ if keep is None else keep, scores.shape)
    lse = np.empty(scores.shape[:-1], scores.dtype)
    four = (math.prod(scores.shape[:-3]), *scores.shape[-3:])
    _softmax_rows(
        scores.reshape(four), scores.dtype.type(scale), allowed.reshape(four), lse.reshape(four[:3])
    )
    return scores, lse


def softmax_backward(dweights: Array, weights: Array, scale: float) -> Array:
    """`scale · P ⊙ (dP - rowsum(P ⊙ dP))`. Overwrites `dweights`."""
    _require_real("softmax_backward", dweights, weights)
    four = (math.prod(weights.shape[:-3]), *weights.shape[-3:])
    _softmax_backward_rows(dweights.reshape(four), weights.reshape(four), weights.dtype.type(scale))
    return dweights


# ---- twins of nn: GELU in its tanh form (Eq. 16.9), LayerNorm (Eq. 16.4, Eq. 16.5) ---------------

_ROOT2, _CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


@numba.njit(nogil=True, cache=True, parallel=True, fastmath=_SUMS)
def _gelu(x, out, slope):
    one = x.dtype.type(1)
    root, cube = x.dtype.type(_ROOT2), x.dtype.type(_CUBE)
    three = x.dtype.type(3 * _CUBE)
    for i in numba.prange(x.size):
        # ½ (1 + tanh u) is the logistic function of 2u
        square = x[i] * x[i]
        share = one / (one + _exp(-root * x[i] * (one + cube * square)))
        out[i] = x[i] * share
        slope[i] = share + x[i] * share * (one - share) * root * (one + three * square)


def gelu(x: Array) -> tuple[Array, Array]:
    """GELU by tanh, and its slope."""
    _require_real("gelu", x)
    out, slope = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    _gelu(*_flat(x), out.reshape(-1), slope.reshape(-1))
    return out, slope


@numba.njit(nogil=True, cache=True, parallel=True, fastmath=_SUMS)
def _layer_norm(x, gamma, beta, eps, out, normalised, inverse):
    rows, width = x.shape
    for r in numba.prange(rows):
        mean = x.dtype.type(0)
        for j in range(width):
            mean += x[r, j]
        mean /= x.dtype.type(width)
        square = x.dtype.type(0)
        for j in range(width):
            square += (x[r, j] - mean) * (x[r, j] - mean)
        total = square / x.dtype.type(width) + eps
        inverse[r] = 1 / math.sqrt(total) if total > 0 else 0
        for j in range(width):
            normalised[r, j] = (x[r, j] - mean) * inverse[r]
            out[r, j] = normalised[r, j] * gamma[j] + beta[j]


@numba.njit(nogil=True, cache=True, parallel=True, fastmath=_SUMS)
def _layer_norm_backward(dout, normalised, inverse, gain, dx):
    rows, width = dout.shape
    for r in numba.prange(rows):
        mean, along = dout.dtype.type(0), dout.dtype.type(0)
        for j in range(width):
            g = dout[r, j] * gain[j]
            mean += g
            along += g * normalised[r, j]
        mean /= dout.dtype.type(width)
        along /= dout.dtype.type(width)
        for j in range(width):
            dx[r, j] = inverse[r] * (dout[r, j] * gain[j] - mean - normalised[r, j] * along)


def layer_norm(x: Array, gamma: Array, beta: Array, eps: float) -> tuple[Array, Array, Array]:
    """LayerNorm: its result, x̂ and r (with a last axis of 1)."""
    _require_real("layer_norm", x, gamma, beta)
    out, normalised = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
    inverse, two = np.empty((*x.shape[:-1], 1), x.dtype), (math.prod(x.shape[:-1]), x.shape[-1])
    _layer_norm(
        np.ascontiguousarray(x).reshape(two), gamma, beta, x.dtype.type(eps), out.reshape(two),
        normalised.reshape(two), inverse.reshape(-1),
    )  # fmt: skip
    return out, normalised, inverse


def layer_norm_backward(dout: Array, normalised: Array, inverse: Array, gain: Array) -> Array:
    """The gradient of LayerNorm's x."""
    _require_real("layer_norm_backward", dout, normalised)
    dx, two = np.empty(dout.shape, dout.dtype), (math.prod(dout.shape[:-1]), dout.shape[-1])
    _layer_norm_backward(
        np.ascontiguousarray(dout).reshape(two), normalised.reshape(two), inverse.reshape(-1), gain,
        dx.reshape(two),
    )  # fmt: skip
    return dx
