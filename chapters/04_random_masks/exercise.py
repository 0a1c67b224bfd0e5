"""Chapter 04: Random masks and renormalisation. See README.md beside this file."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Inexact, Int, UInt32

from minitransformer.arrays import Array, require_in_range
from minitransformer.attention.dense import (
    AttentionCache,
    AttentionGrads,
    attention_backward,
    attention_forward,
)
from minitransformer.attention.softmax import softmax_forward
from minitransformer.stochastic.samplers import Sampled

# ==== philox ======================================================================================


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
    # 04.2: your lines


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
    # 04.2: your lines


def threshold(drop_rate: float | Array) -> Array:
    """T = round(p · 2³²) as uint64 (Eq. 4.2): 0 keeps everything, 2³² drops everything."""
    # 04.1: your lines


def inclusion_probability(drop_rate: float | Array) -> Array:
    """π = (2³² - T) / 2³²: the exact probability of being kept (Eq. 4.2)."""
    # 04.1: your lines


def uniform(bits: UInt32[Array, "*S"]) -> Array:
    """Floats in [0, 1) on a grid of 2⁻²⁴, exact in float32."""
    # 04.1: your lines


# ==== steps =======================================================================================


# ---- renormalised weights ------------------------------------------------------------------------


class RenormaliseSteps(NamedTuple):
    """The values of Eq. 4.14, or their gradients."""

    weights: Inexact[Array, "*B M"]
    kept: Inexact[Array, "*B M"]
    total: Inexact[Array, "*B 1"]
    inverse: Inexact[Array, "*B 1"]
    renormalised: Inexact[Array, "*B M"]


def renormalise_steps_forward(
    weights: Inexact[Array, "*B M"], keep: Bool[Array, "*B M"]
) -> RenormaliseSteps:
    """Weights of which some were dropped, made to sum to 1 again, line by line  (Eq. 4.14)"""
    # 04.3: your lines


def renormalise_steps_backward(
    drenormalised: Inexact[Array, "*B M"], steps: RenormaliseSteps, keep: Bool[Array, "*B M"]
) -> RenormaliseSteps:
    """The gradient of every value of Eq. 4.14, last line first.

    The denominator is a value like any other: to hold it constant is another mechanism.
    """
    # 04.3: your lines


# ==== stochastic.samplers =========================================================================


KINDS = ("element", "column", "fixed_k", "multinomial", "gumbel", "block", "head")


COUNTED = ("fixed_k", "multinomial", "gumbel")  # these draw a number k of keys for each query


PROPOSALS = ("uniform", "distance", "scores")


COMPENSATIONS = ("renormalise", "inverted", "stop_gradient")


REDRAWS = Stream.DROPOUT - Stream.REDRAW


def _is_count(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


@dataclass(frozen=True)
class RandomMask:
    """What to drop, in one value.

    `rate` is the probability of dropping. The kinds that draw a number of keys take `k`, or else
    k = max(1, round((1 - rate) · n)). Protection is of places: the diagonal (query i and key i + o
    are the same token) and whole columns (absolute key positions). For blocks, every tile that
    holds a protected pair is kept; a dropped head is silent altogether, and nothing protects it.
    """

    kind: str
    rate: float = 0.5
    tile: int | tuple[int, int] = 16
    k: int | None = None
    proposal: str = "uniform"
    protect_diagonal: bool = True
    protect_columns: tuple[int, ...] = ()
    min_keep: int = 0
    compensation: str = "renormalise"

    def __post_init__(self) -> None:
        for name, valid in (
            ("kind", KINDS),
            ("proposal", PROPOSALS),
            ("compensation", COMPENSATIONS),
            ("min_keep", (0, 1)),
        ):
            if getattr(self, name) not in valid:
                listed = ", ".join(map(str, valid))
                raise ValueError(f"{name} must be one of {listed}, got {getattr(self, name)!r}")
        require_in_range("rate", self.rate, 0.0, 1.0)
        if len(self.tiles) != 2 or not all(_is_count(n) and n >= 1 for n in self.tiles):
            raise ValueError(f"tile must be one or two whole numbers >= 1, got {self.tile}")
        if self.k is not None and self.kind not in COUNTED:
            raise ValueError(f"k is for {', '.join(COUNTED)}, not for kind={self.kind!r}: use rate")
        if self.k is not None and not (_is_count(self.k) and self.k >= 1):
            raise ValueError(f"k must be a whole number >= 1, got {self.k}")
        if self.proposal != "uniform" and self.kind not in ("multinomial", "gumbel"):
            raise ValueError(
                f"proposal={self.proposal!r} is for multinomial and gumbel, not {self.kind!r}"
            )
        if not all(_is_count(j) and j >= 0 for j in self.protect_columns):
            raise ValueError(
                f"protect_columns must be key positions >= 0, got {self.protect_columns}"
            )
        if self.min_keep and self.kind != "element":
            raise ValueError(
                f"min_keep=1 draws rows again and is for kind='element', not {self.kind!r}: "
                "protect the diagonal instead"
            )
        if self.kind == "gumbel" and self.compensation == "inverted":
            raise ValueError(
                "kind='gumbel' has no closed-form inclusion probability, so it cannot be "
                "inverted: use compensation='renormalise', or kind='multinomial'"
            )

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.tile if isinstance(self.tile, tuple) else (self.tile, self.tile)


class _Site(NamedTuple):
    """Where a mask is drawn, with all leading axes but the heads in one: (B, H, N, M)."""

    mask: RandomMask
    allowed: Bool[Array, "B H N M"]
    protected: Bool[Array, "..."]
    candidates: Bool[Array, "B H N M"]
    thresholds: Array  # T of each head, (H, 1, 1)
    heads: Int[Array, "B H"]
    rows: Int[Array, "N"]
    columns: Int[Array, "M"]
    distance: Int[Array, "N M"]  # i + o - j
    scores: Array | None

    @property
    def dropped(self) -> Array:
        """p as the threshold rounds it, (H, 1, 1)."""
        return self.thresholds / 2.0**32

    @property
    def n(self) -> Array:
        """Candidates of each row, (B, H, N, 1)."""
        return self.candidates.sum(axis=-1, keepdims=True)

    @property
    def k(self) -> Array:
        """Keys to draw for each row, (B, H, N, 1): none where there is nothing to draw from."""
        wanted = self.mask.k or np.maximum(1, np.rint((1 - self.dropped) * self.n))
        return np.where(self.n == 0, 0, wanted).astype(np.int64)


class _Source(NamedTuple):
    """Where the bits come from."""

    draw: Draw
    layer: int
    fast: bool

    def bits(self, stream: int, heads: Array, rows: Array, columns: Array) -> UInt32[Array, "..."]:
        """Words on the grid (B, H, rows, columns) of three index arrays."""
        if self.fast:
            from minitransformer import fast

            grid = fast.philox_bits(self.draw, stream, self.layer, heads.ravel(), rows, columns)
            return grid.reshape(*heads.shape, rows.size, columns.size)
        return random_bits(
            self.draw, stream, self.layer, heads[..., None, None], rows[:, None], columns
        )


# ---- the seven laws: how often each candidate is drawn (what they say of other pairs is not read)


def _element(site: _Site, source: _Source) -> Array:
    """One word for each pair  (Eq. 4.3)"""
    # 04.4: your lines


def _drawn_again(site: _Site, source: _Source, drawn: Array) -> Array:
    """Rows that came out empty are drawn again, each time from another stream  (Eq. 4.9)

    After the last of 120 re-draws an empty row keeps its candidate with the largest word: the limit
    of the law for p -> 1. That shifts π by less than p^(120 n).
    """
    saved = (site.allowed & site.protected).any(axis=-1) | ~site.candidates.any(axis=-1)
    for r in range(REDRAWS):
        b, h, i = np.nonzero(~drawn.any(axis=-1) & ~saved)
        if b.size == 0:
            return drawn
        heads, rows = site.heads[b, h][:, None], site.rows[i][:, None]
        stream = Stream.REDRAW + r
        bits = random_bits(source.draw, stream, source.layer, heads, rows, site.columns)
        drawn[b, h, i] = (bits >= site.thresholds[h, 0]) & site.candidates[b, h, i]
    b, h, i = np.nonzero(~drawn.any(axis=-1) & ~saved)
    if b.size:
        words = np.where(site.candidates[b, h, i], bits[-b.size :].astype(np.int64), -1)
        drawn[b, h, i, words.argmax(axis=-1)] = True
    return drawn


def _column(site: _Site, source: _Source) -> Array:
    """One word for each key of a batch row: all heads and queries lose the same keys  (Eq. 4.4)"""
    # 04.4: your lines


def _head(site: _Site, source: _Source) -> Array:
    """One word for each head  (Eq. 4.5)"""
    # 04.4: your lines


def _smallest(site: _Site, value: Array) -> Array:
    """The k candidates of each row with the smallest value, ties going to the first key."""
    # 04.5: your lines


def _fixed_k(site: _Site, source: _Source) -> Array:
    """A uniform subset of k candidates, or all if there are fewer  (Eq. 4.6)"""
    # 04.5: your lines


def _multinomial(site: _Site, source: _Source) -> Array:
    """k draws with replacement; draw t of a row uses the word at j = t  (Eq. 4.7)"""
    # 04.5: your lines


def _gumbel(site: _Site, source: _Source) -> Array:
    """The k largest perturbed log-probabilities: k draws without replacement  (Eq. 4.8)"""
    # 04.5: your lines


# ---- proposals, probabilities, shares ------------------------------------------------------------


def _log_proposal(site: _Site) -> Array:
    """log ρ up to a constant: 0, -log(1 + |i + o - j|), or the given logits."""
    if site.mask.proposal == "distance":
        return -np.log1p(np.abs(site.distance))
    if site.mask.proposal == "scores":
        assert site.scores is not None
        return site.scores.astype(np.float64)
    return np.zeros(1)


def _proposal(site: _Site) -> Array:
    """ρ: softmax of its logarithm over the candidates, which is all it is ever asked about."""
    return softmax_forward(np.where(site.candidates, _log_proposal(site), -np.inf))[0]


def _inclusion(site: _Site) -> Array:
    """π of the candidates, by kind; broadcasts to (B, H, N, M)."""
    # 04.6: your lines


# ==== stochastic.compensation =====================================================================


class StochasticCache(NamedTuple):
    """The mask is kept, never drawn again: forward and backward cannot disagree about it."""

    attention: AttentionCache  # its `weights` and `lse` are what the output was made of
    keep: Bool[Array, "*B H N M"] | None  # what was drawn; None: nothing was dropped
    full: AttentionCache | None  # for stop_gradient: attention without the random mask

    @property
    def weights(self) -> Array:
        """The weights before any multiplier."""
        return self.attention.weights

    @property
    def lse(self) -> Array:
        return self.attention.lse

    @property
    def out(self) -> Array:
        """What each head gave, before the heads are joined."""
        return self.attention.out


def compensated_attention_forward(
    q: Inexact[Array, "*#B H N D"],
    k: Inexact[Array, "*#B G M D"],
    v: Inexact[Array, "*#B G M E"],
    *,
    sampled: Sampled,
    compensation: str,
    keep: Bool[Array, "..."] | None = None,
    bias: Inexact[Array, "..."] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    check_finite: bool = True,
    fast: bool = False,
) -> tuple[Inexact[Array, "*B H N E"], StochasticCache]:
    """Attention with what was drawn given as data; its backward is `stochastic_attention_backward`.

    Raises
    ------
    ValueError
        If the compensation is unknown, or inverted without a multiplier to invert by.
    """
    # 04.7: your lines


def stochastic_attention_backward(
    dout: Inexact[Array, "*B H N E"], cache: StochasticCache
) -> AttentionGrads:
    """The gradient of dense attention under the mask that was drawn.

    With the denominator held constant (`stop_gradient`), D = rowsum(dO ⊙ O) meets P, not W:

        dS = W ⊙ dW - P · D   instead of   dS = W ⊙ dW - W · D  (Eq. 4.13)

    so a dropped logit gets a gradient too.
    """
    # 04.8: your lines
