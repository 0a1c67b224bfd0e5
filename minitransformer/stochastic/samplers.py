"""What chance keeps: seven laws for a random keep-mask inside a structural one.

A row's candidates are the n pairs that the structural mask allows and nothing protects. u is the
word of Eq. 4.1 in the kind's own stream, T the threshold of Eq. 4.2, Z_ij = 1 for a kept pair, and
π_ij = E[Z_ij] its inclusion probability.

    element      Z_ij = 1[u(h, i, j) >= T]                      π = 1 - p  (Eq. 4.3)
    column       Z_ij = 1[u(0, 0, j) >= T], for all h and i     π = 1 - p  (Eq. 4.4)
    head         Z_ij = 1[u(h, 0, 0) >= T], for all i and j     π = 1 - p  (Eq. 4.5)
    block        Z_ij = 1[u(h, ⌊i/r⌋, ⌊j/c⌋) >= T]              π = 1 - p  (Eq. 5.1)
    fixed_k      the k candidates with the smallest (u, j)      π = min(k, n) / n  (Eq. 4.6)
    multinomial  k draws with replacement from a proposal ρ     π = 1 - (1 - ρ_ij)^k  (Eq. 4.7)
    gumbel       the k largest log ρ_ij - log(-log u)           no closed form  (Eq. 4.8)

A pair that is protected and allowed is always kept: π = 1. `min_keep=1` draws an empty row of an
element mask again until it holds something, and then

    π = (1 - p) / (1 - pⁿ)  (Eq. 4.9)

Element and column dropping of attention: arXiv:1907.11065, arXiv:2208.02646; heads:
arXiv:2004.13342; Gumbel-top-k: arXiv:1903.06059. This departs from those in one point: sampling
happens among the candidates, never before the structural mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from minitransformer.arrays import (
    Array,
    require_array,
    require_bool,
    require_broadcastable,
    require_in_range,
)
from minitransformer.attention.softmax import softmax_forward
from minitransformer.philox import Draw, Stream, random_bits, threshold, uniform

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


class Sampled(NamedTuple):
    """What is left of the structural mask.

    `multiplier` is what the weights are multiplied by: Z/π or c/(kρ) if the compensation is
    inverted, the share of a kept head for kind "head"; None if nothing is to be multiplied.
    """

    keep: Bool[Array, "*S N M"]
    multiplier: Float[Array, "*S N M"] | None


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


def is_active(random_mask: RandomMask | None, draw: Draw, drop_rate: float | Array | None) -> bool:
    """False if nothing can be dropped: no mask, evaluation, or rate 0 in every head."""
    if random_mask is None or not (draw.training or draw.sample):
        return False
    return bool(np.any(threshold(random_mask.rate if drop_rate is None else drop_rate) > 0))


def resolve(
    random_mask: RandomMask,
    draw: Draw,
    layer: int,
    shape: Sequence[int],
    *,
    keep: Bool[Array, "..."] | None = None,
    drop_rate: float | Float[Array, "H"] | None = None,
    scores: Float[Array, "..."] | None = None,
    offset: int | None = None,
    batch_start: int = 0,
    row_start: int = 0,
    column_start: int = 0,
    fast: bool = False,
) -> Sampled:
    """Draw the mask of one layer at one step, for weights of `shape` (*B, H, N, M).

    `keep` is the structural mask; `drop_rate` replaces the mask's own rate, one for all heads or
    one for each, and a head with rate 0 is left alone whatever the kind. `scores` are the logits of
    proposal "scores". Query i and key i + `offset` are the same token; by default M - N, queries
    being the last rows. The starts say where a part of a batch, or a tile, lies in the whole: for
    element, column, block and head a tile is the slice of the whole. `fast` takes the bits from
    Numba: the same bits.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type, shape or range, or a tile is asked for that the kind
        cannot draw on its own.
    """
    site = _site(
        random_mask, shape, keep, drop_rate, scores, offset, batch_start, row_start, column_start
    )
    if not is_active(random_mask, draw, drop_rate):
        return Sampled(site.allowed.reshape(shape), None)
    # pass 1: how often each candidate is drawn; only the multinomial draws one twice
    counts = _law(random_mask.kind)(site, _Source(draw, layer, fast))
    # pass 2: what is protected, and heads whose rate is 0, are kept
    sure = site.protected | (site.thresholds == 0)
    kept = site.allowed & ((counts > 0) | sure)
    # pass 3: what the kept weights are multiplied by
    multiplier = None
    if random_mask.compensation == "inverted":
        each = site.k * _proposal(site) if random_mask.kind == "multinomial" else _inclusion(site)
        scale = counts / np.where(each > 0, each, 1)
        multiplier = np.where(sure, 1.0, scale) * site.allowed
    elif random_mask.kind == "head":
        multiplier = np.broadcast_to(_head_shares(site, counts), site.allowed.shape)
    return Sampled(kept.reshape(shape), None if multiplier is None else multiplier.reshape(shape))


def inclusion_probabilities(
    random_mask: RandomMask,
    shape: Sequence[int],
    *,
    keep: Bool[Array, "..."] | None = None,
    drop_rate: float | Float[Array, "H"] | None = None,
    scores: Float[Array, "..."] | None = None,
    offset: int | None = None,
    row_start: int = 0,
    column_start: int = 0,
) -> Float[Array, "*S N M"]:
    """π of every pair: 0 where the structural mask forbids it, 1 where it is protected.

    Raises
    ------
    TypeError, ValueError
        As `resolve`, and for kind "gumbel", which has no closed form.
    """
    site = _site(random_mask, shape, keep, drop_rate, scores, offset, 0, row_start, column_start)
    sure = site.protected | (site.thresholds == 0)
    return (np.where(sure, 1.0, _inclusion(site)) * site.allowed).reshape(shape)


def _site(
    mask: RandomMask,
    shape: Sequence[int],
    keep: Array | None,
    drop_rate: float | Array | None,
    scores: Array | None,
    offset: int | None,
    batch_start: int,
    row_start: int,
    column_start: int,
) -> _Site:
    if len(shape) < 2:
        raise ValueError(f"shape must be (*B, H, N, M), got {tuple(shape)}")
    *leading, h, n, m = (1, *shape) if len(shape) == 2 else shape
    b = int(np.prod(leading, dtype=np.int64))

    if offset is None and (row_start or column_start):
        raise ValueError("a tile does not know the size of the whole: give offset (M - N, say)")
    if column_start and (mask.kind in COUNTED or mask.min_keep):
        raise ValueError(f"kind={mask.kind!r} looks at whole rows: column_start must be 0")
    offset = m - n if offset is None else offset

    def spread(name: str, x: Array) -> Array:
        require_broadcastable(name, x.shape, shape)
        return np.broadcast_to(x, shape).reshape(b, h, n, m)

    if keep is not None:
        require_bool("keep", keep)
    allowed = spread("keep", np.ones((), dtype=np.bool_) if keep is None else keep)
    if scores is not None:
        require_array("scores", scores)
        scores = spread("scores", scores.real)
    elif mask.proposal == "scores":
        raise ValueError("proposal='scores' needs scores, the logits to draw the keys by")

    rate = np.asarray(mask.rate if drop_rate is None else drop_rate)
    if rate.shape not in ((), (h,)):
        raise ValueError(f"drop_rate must be a number or have shape ({h},), got shape {rate.shape}")
    require_in_range("drop_rate", rate, 0.0, 1.0)

    rows, columns = row_start + np.arange(n), column_start + np.arange(m)
    distance = (rows + offset)[:, None] - columns
    protected = np.zeros((n, m), dtype=np.bool_)
    if mask.kind == "block":
        r, c = mask.tiles
        tile_row, tile_column = rows[:, None] // r, columns // c
        if mask.protect_diagonal:
            # the tile's first query on the diagonal, if it has one: not past its last
            first = np.maximum(tile_row * r, tile_column * c - offset)
            protected |= first <= np.minimum(tile_row * r + r, tile_column * c + c - offset) - 1
        protected |= np.isin(tile_column, [j // c for j in mask.protect_columns])
    elif mask.kind != "head":
        if mask.protect_diagonal:
            protected |= distance == 0
        protected |= np.isin(columns, mask.protect_columns)
    return _Site(
        mask,
        allowed,
        protected,
        allowed & ~protected,
        np.broadcast_to(threshold(rate), (h,))[:, None, None],
        (batch_start * h + np.arange(b * h)).reshape(b, h),
        rows,
        columns,
        distance,
        scores,
    )


# ---- the seven laws: how often each candidate is drawn (what they say of other pairs is not read)


def _element(site: _Site, source: _Source) -> Array:
    """One word for each pair  (Eq. 4.3)"""
    if source.fast:
        from minitransformer import fast

        b, h = site.heads.shape
        least = np.broadcast_to(site.thresholds.ravel(), (b, h)).ravel()
        drawn = fast.bernoulli_keep(
            source.draw,
            Stream.ELEMENT,
            source.layer,
            site.heads.ravel(),
            site.rows,
            site.columns,
            least,
        ).reshape(site.allowed.shape)
    else:
        bits = source.bits(Stream.ELEMENT, site.heads, site.rows, site.columns)
        drawn = bits >= site.thresholds
    return _drawn_again(site, source, drawn & site.candidates) if site.mask.min_keep else drawn


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
    first = site.heads[:, :1]  # b·H + 0
    bits = source.bits(Stream.COLUMN, first, np.zeros(1, dtype=np.int64), site.columns)
    return bits >= site.thresholds


def _head(site: _Site, source: _Source) -> Array:
    """One word for each head  (Eq. 4.5)"""
    origin = np.zeros(1, dtype=np.int64)
    bits = source.bits(Stream.HEAD, site.heads, origin, origin)
    return bits >= site.thresholds


def _block(site: _Site, source: _Source) -> Array:
    """One word for each tile, cropped where the mask ends  (Eq. 5.1)"""
    r, c = site.mask.tiles
    tile_rows, row_of = np.unique(site.rows // r, return_inverse=True)
    tile_columns, column_of = np.unique(site.columns // c, return_inverse=True)
    bits = source.bits(Stream.BLOCK, site.heads, tile_rows, tile_columns)
    return (bits >= site.thresholds)[..., row_of[:, None], column_of]


def _smallest(site: _Site, value: Array) -> Array:
    """The k candidates of each row with the smallest value, ties going to the first key."""
    order = np.argsort(value, axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(value.shape[-1]), rank.shape), -1)
    return (rank < site.k) & site.candidates


def _fixed_k(site: _Site, source: _Source) -> Array:
    """A uniform subset of k candidates, or all if there are fewer  (Eq. 4.6)"""
    bits = source.bits(Stream.FIXED_K, site.heads, site.rows, site.columns)
    return _smallest(site, np.where(site.candidates, bits.astype(np.float64), np.inf))


def _multinomial(site: _Site, source: _Source) -> Array:
    """k draws with replacement; draw t of a row uses the word at j = t  (Eq. 4.7)"""
    k, total = site.k, _proposal(site).cumsum(axis=-1)
    reached = total / np.where(total[..., -1:] > 0, total[..., -1:], 1)
    draws = np.arange(k.max(initial=0))
    u = uniform(source.bits(Stream.MULTINOMIAL, site.heads, site.rows, draws))
    counts = np.zeros(site.allowed.shape, dtype=np.int64)
    for t in range(draws.size):
        chosen = (reached <= u[..., t : t + 1]).sum(axis=-1, keepdims=True)
        counts += (chosen == np.arange(site.columns.size)) & (t < k)
    return counts


def _gumbel(site: _Site, source: _Source) -> Array:
    """The k largest perturbed log-probabilities: k draws without replacement  (Eq. 4.8)"""
    bits = source.bits(Stream.GUMBEL, site.heads, site.rows, site.columns)
    noise = -np.log(-np.log(uniform(bits) + 2.0**-25))  # u in the open interval (0, 1)
    perturbed = np.where(site.candidates, _log_proposal(site) + noise, -np.inf)
    return _smallest(site, -perturbed)


def _law(kind: str) -> Callable[[_Site, _Source], Array]:
    return {
        "element": _element,
        "column": _column,
        "fixed_k": _fixed_k,
        "multinomial": _multinomial,
        "gumbel": _gumbel,
        "block": _block,
        "head": _head,
    }[kind]


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
    kind, p, n = site.mask.kind, site.dropped, site.n
    if kind == "gumbel":
        raise ValueError("kind='gumbel' has no closed-form inclusion probability")
    if kind == "fixed_k":
        return np.minimum(site.k, n) / np.maximum(n, 1)
    if kind == "multinomial":
        return -np.expm1(site.k * np.log1p(-np.minimum(_proposal(site), 1 - 2.0**-53)))
    if site.mask.min_keep:
        # (1 - p) / (1 - pⁿ) = 1 / (1 + p + ... + pⁿ⁻¹), which also knows the limit p = 1
        powers = np.arange(site.columns.size)
        total = np.where(powers < n, p**powers, 0).sum(axis=-1, keepdims=True)
        protected = (site.allowed & site.protected).any(axis=-1, keepdims=True)
        return np.where(protected, 1 - p, 1 / np.maximum(total, 1))
    return 1 - p


def _head_shares(site: _Site, counts: Array) -> Array:
    """A kept head speaks for the dropped ones: (heads that may be dropped) / (those kept)."""
    may = site.thresholds > 0
    kept = may & (counts > 0)
    share = may.sum() / np.maximum(kept.sum(axis=1, keepdims=True), 1)
    return np.where(may, kept * share, 1.0)
