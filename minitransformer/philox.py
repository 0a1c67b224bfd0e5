"""Counter-based random bits: the same mask on every backend, for any tile, with nothing stored.

Philox4x32-10 (Salmon et al., SC'11) is a keyed bijection from a 128-bit counter to four 32-bit
words. A random mask is therefore a *function* of where you stand, not a sequence to be consumed in
order:

    key     = (seed, stream << 16 | layer)
    counter = (j >> 2, i, b·H + h, step)
    u32     = philox(key, counter)[j & 3]  (Eq. 4.1)
    keep   iff u32 >= T,   T = round(p · 2³²),   π = (2³² - T) / 2³²  (Eq. 4.2)

i, j are absolute query and key positions, b the global batch row, h the query head. Any tile of a
mask equals the slice of the whole mask, bit for bit. This is the mask law of the project; it does
not change between releases.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt32

from minitransformer.arrays import Array, require_in_range

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)


class Stream(IntEnum):
    """What the bits are for. Two uses never share a stream; the numbers are part of the mask
    law."""

    ELEMENT = 1
    COLUMN = 2
    BLOCK = 3
    HEAD = 4
    FIXED_K = 5
    MULTINOMIAL = 6
    GUMBEL = 7
    REDRAW = 8  # draw r of a re-draw uses REDRAW + r, so the streams from here to 0x7F are taken
    DROPOUT = 0x80
    INITIALISATION = 0x81
    BATCH = 0x82
    SAMPLE = 0x83
    PATTERN = 0x84  # the random tiles of a sparse pattern
    FEATURES = 0x85  # the projection of FAVOR+
    PRUNING = 0x86  # heads that are removed by chance, as a baseline
    MONTE_CARLO = 0x1000  # evaluation sample s of stream t uses MONTE_CARLO · s + t


class Draw(NamedTuple):
    """When a random decision is made. With a layer's own index it fixes every mask.

    `seed` and `step` lie in [0, 2³²). `training=False` means evaluation: nothing is dropped, unless
    `sample` >= 1 asks for the mask of a Monte-Carlo sample.
    """

    seed: int
    step: int = 0
    training: bool = True
    sample: int = 0

    def stream(self, stream: int) -> int:
        """The stream of this draw: the plain one in training, one of its own for each Monte-Carlo
        sample."""
        return int(stream) + int(Stream.MONTE_CARLO) * self.sample


def philox(
    counter: tuple[Array, Array, Array, Array], key: tuple[int, int], *, rounds: int = 10
) -> UInt32[Array, "*S 4"]:
    """Philox4x32: four random words for each 128-bit counter.

    `counter` holds four arrays of integers in [0, 2³²) that broadcast together, `key` two such
    integers. The known answers of the authors' Random123 library are tests of ours.
    """
    for i, word in enumerate(key):
        require_in_range(f"key[{i}]", word, 0, 2**32 - 1)
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(c, dtype=np.uint64) for c in counter))
    k0, k1 = key
    for _ in range(rounds):
        # two widening products; their high halves are mixed with the neighbours and the key
        a, b = np.uint64(MULTIPLIERS[0]) * c0, np.uint64(MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (
            (b >> 32) ^ c1 ^ np.uint64(k0),
            b & LOW,
            (a >> 32) ^ c3 ^ np.uint64(k1),
            a & LOW,
        )
        # the key is bumped between rounds, never before the first
        k0, k1 = (k0 + WEYL[0]) % 2**32, (k1 + WEYL[1]) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def key_of(draw: Draw, stream: int, layer: int) -> tuple[int, int]:
    """The key of Eq. 4.1.

    Raises
    ------
    ValueError
        If seed, step, sample or layer is outside the range that the law gives it.
    """
    require_in_range("draw.seed", draw.seed, 0, 2**32 - 1)
    require_in_range("draw.step", draw.step, 0, 2**32 - 1)
    require_in_range("draw.sample", draw.sample, 0, 2**16 // Stream.MONTE_CARLO - 1)
    require_in_range("layer", layer, 0, 2**16 - 1)
    return draw.seed, draw.stream(stream) << 16 | layer


def random_bits(
    draw: Draw, stream: int, layer: int, heads: Array, rows: Array, columns: Array
) -> UInt32[Array, "*S"]:
    """The word u32 of Eq. 4.1 at (b·H + h, i, j); the three index arrays broadcast together."""
    key = key_of(draw, stream, layer)
    heads, rows, columns = np.broadcast_arrays(heads, rows, columns)
    words = philox((columns >> 2, rows, heads, np.asarray(draw.step)), key)
    return np.take_along_axis(words, (columns & 3)[..., None], axis=-1)[..., 0]


def threshold(drop_rate: float | Array) -> Array:
    """T = round(p · 2³²) as uint64 (Eq. 4.2): 0 keeps everything, 2³² drops everything."""
    require_in_range("drop_rate", drop_rate, 0.0, 1.0)
    return np.asarray(np.rint(np.asarray(drop_rate, dtype=np.float64) * 2.0**32), dtype=np.uint64)


def inclusion_probability(drop_rate: float | Array) -> Array:
    """π = (2³² - T) / 2³²: the exact probability of being kept (Eq. 4.2)."""
    return np.asarray((2.0**32 - threshold(drop_rate).astype(np.float64)) / 2.0**32)


def uniform(bits: UInt32[Array, "*S"]) -> Array:
    """Floats in [0, 1) on a grid of 2⁻²⁴, exact in float32."""
    return (bits >> np.uint32(8)).astype(np.float64) * 2.0**-24
