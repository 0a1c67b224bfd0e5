"""Numba twins of hot loops: the same numbers as the readable NumPy, sooner.

A twin adds no mechanism and is not a place to learn one: each names the function it repeats, and
`tests/test_fast.py` holds the two together. The module is imported on use only, because it imports
Numba.
"""

import math

import numba
import numpy as np

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


@numba.njit(nogil=True, cache=True)
def _fill_bits(out, key, step, heads, rows, columns):
    # one thread: a second one would fight over the cores with those of the matrix products
    for r in range(heads.size * rows.size):
        line = out[r]
        head, row = heads[r // rows.size], rows[r % rows.size]
        c = 0
        while c < columns.size:
            quad = columns[c] >> np.uint64(2)
            words = _words(quad, row, head, step, key[0], key[1])
            while c < columns.size and columns[c] >> np.uint64(2) == quad:
                line[c] = words[columns[c] & np.uint64(3)]
                c += 1


@numba.njit(nogil=True, cache=True)
def _fill_keep(out, key, step, heads, rows, columns, thresholds):
    for r in range(heads.size * rows.size):
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


# ---- what follows surrounds NumPy's own exponential, which is as fast as it gets -----------------

# Sums may be taken in any order, so that they vectorise; NaN and infinity keep their meaning.
_SUMS = {"reassoc", "contract", "nsz"}


def _require_real(name: str, *arrays: Array) -> None:
    for a in arrays:
        if a.dtype not in (np.float32, np.float64):
            raise TypeError(f"{name} has a twin for float32 and float64, got {a.dtype}")


# ---- twins of attention.dense: softmax of scaled, masked scores (Eq. 2.1, Eq. 2.4) ---------------


@numba.njit(nogil=True, cache=True)
def _shift_rows(scores, scale, keep, maxima):
    batches, heads, rows, columns = scores.shape
    for b in range(batches):
        for h in range(heads):
            for i in range(rows):
                line, allowed = scores[b, h, i], keep[b, h, i]
                largest = line.dtype.type(-np.inf)
                for j in range(columns):
                    line[j] = line[j] * scale if allowed[j] else line.dtype.type(-np.inf)
                    largest = max(largest, line[j])
                largest = line.dtype.type(0) if largest == -np.inf else largest
                for j in range(columns):
                    line[j] -= largest
                maxima[b, h, i] = largest


@numba.njit(nogil=True, cache=True, fastmath=_SUMS)
def _normalise_rows(exponentials, lse):
    rows, columns = exponentials.shape
    for r in range(rows):
        line = exponentials[r]
        total = line.dtype.type(0)
        for j in range(columns):
            total += line[j]
        if total == 0:
            lse[r] = -np.inf
        else:
            share = 1 / total
            for j in range(columns):
                line[j] *= share
            lse[r] += math.log(total)


@numba.njit(nogil=True, cache=True, fastmath=_SUMS)
def _softmax_backward_rows(dweights, weights, scale):
    rows, columns = weights.shape
    for r in range(rows):
        d, p = dweights[r], weights[r]
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
    _shift_rows(
        scores.reshape(four), scores.dtype.type(scale), allowed.reshape(four), lse.reshape(four[:3])
    )
    np.exp(scores, out=scores)
    _normalise_rows(scores.reshape(lse.size, scores.shape[-1]), lse.reshape(-1))
    return scores, lse


def softmax_backward(dweights: Array, weights: Array, scale: float) -> Array:
    """`scale · P ⊙ (dP - rowsum(P ⊙ dP))`. Overwrites `dweights`."""
    _require_real("softmax_backward", dweights, weights)
    two = (math.prod(weights.shape[:-1]), weights.shape[-1])
    _softmax_backward_rows(dweights.reshape(two), weights.reshape(two), weights.dtype.type(scale))
    return dweights


# ---- twins of nn: GELU in its tanh form (Eq. 16.9), LayerNorm (Eq. 16.4, Eq. 16.5) ---------------

_ROOT2, _CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


@numba.njit(nogil=True, cache=True)
def _gelu_exponents(x, exponent):
    one, root, cube = x.dtype.type(1), x.dtype.type(_ROOT2), x.dtype.type(_CUBE)
    for i in range(x.size):
        u = root * x[i] * (one + cube * x[i] * x[i])
        exponent[i] = -u if u > x.dtype.type(-80) else x.dtype.type(80)  # e^80 is all but infinite


@numba.njit(nogil=True, cache=True)
def _gelu(x, exponential, out):
    one, root, three = x.dtype.type(1), x.dtype.type(_ROOT2), x.dtype.type(3 * _CUBE)
    for i in range(x.size):
        # ½ (1 + tanh u/2) is the logistic function of u
        share = one / (one + exponential[i])
        out[i] = x[i] * share
        exponential[i] = share + out[i] * (one - share) * root * (one + three * x[i] * x[i])


def gelu(x: Array) -> tuple[Array, Array]:
    """GELU by tanh, and its slope."""
    _require_real("gelu", x)
    flat, work = np.ascontiguousarray(x).reshape(-1), np.empty(x.size, x.dtype)
    _gelu_exponents(flat, work)
    np.exp(work, out=work)
    out = np.empty(x.size, x.dtype)
    _gelu(flat, work, out)
    return out.reshape(x.shape), work.reshape(x.shape)


@numba.njit(nogil=True, cache=True, fastmath=_SUMS)
def _layer_norm(x, gamma, beta, eps, out, normalised, inverse):
    rows, width = x.shape
    for r in range(rows):
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


@numba.njit(nogil=True, cache=True, fastmath=_SUMS)
def _layer_norm_backward(dout, normalised, inverse, gain, dx):
    rows, width = dout.shape
    for r in range(rows):
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
