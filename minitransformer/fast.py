"""Numba twins of hot loops: the same numbers as the readable NumPy, sooner.

A twin adds no mechanism and is not a place to learn one: each names the function it repeats, and
`tests/test_fast.py` holds the two together. The module is imported on use only, because it imports
Numba.
"""

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
