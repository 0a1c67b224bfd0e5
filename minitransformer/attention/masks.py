"""Structural masks: who may attend to whom, as a rule over a query row i and a key j.

A rule, not an array: `dense()` evaluates it on all of (N, M), a kernel on one tile, and both see
the same mask. True = may attend. With N queries and M keys, row i stands at the absolute position

    i + o,   o = M - N for align="lower_right",   o = 0 for align="upper_left"  (Eq. 3.1)

Lower right is right with a cache, where the last query is the newest token; with N > M its first
rows stand before every key. The two agree only for N = M, so `align` is asked for wherever it
matters. Masks combine with `&` (all of them) and `|` (any: local or global).
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Integer

from minitransformer.arrays import Array, require_whole

ALIGNMENTS = ("lower_right", "upper_left")


@dataclass(frozen=True)
class Mask:
    """A rule over N queries and M keys. `mask(i, j)` asks it of rows i (n, 1) and keys j (m,)."""

    queries: int
    keys: int
    rule: Callable[[Array, Array], Array]

    def __call__(self, i: Integer[Array, "..."], j: Integer[Array, "..."]) -> Bool[Array, "..."]:
        return np.asarray(self.rule(i, j))

    def dense(self) -> Bool[Array, "*B N M"]:
        """The whole mask; a rule that differs by batch row gives it leading axes (*B, 1)."""
        kept = self(np.arange(self.queries)[:, None], np.arange(self.keys))
        return np.array(np.broadcast_to(kept, (*kept.shape[:-2], self.queries, self.keys)))

    def __and__(self, other: "Mask") -> "Mask":
        """Pairs that both masks allow."""
        return self._with(other, operator.and_)

    def __or__(self, other: "Mask") -> "Mask":
        """Pairs that either mask allows."""
        return self._with(other, operator.or_)

    def _with(self, other: "Mask", join: Callable[[Array, Array], Array]) -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        if (other.queries, other.keys) != (self.queries, self.keys):
            raise ValueError(
                f"the masks have {self.queries} x {self.keys} and {other.queries} x {other.keys} "
                "pairs: the two must agree"
            )
        return Mask(self.queries, self.keys, lambda i, j: join(self(i, j), other(i, j)))


# ---- by distance ---------------------------------------------------------------------------------


def causal(queries: int, keys: int, *, align: str) -> Mask:
    """No key after the query: j <= i + o  (Eq. 3.2)

    Raises
    ------
    TypeError, ValueError
        Here and below: if a size is no whole number or too small, or `align` is neither of the two.
    """
    o = offset(queries, keys, align)
    return Mask(queries, keys, lambda i, j: j <= i + o)


def window(queries: int, keys: int, *, left: int, right: int, align: str) -> Mask:
    """i + o - left <= j <= i + o + right, both ends included; -1 is no limit  (Eq. 3.3)

    A "sliding window of W keys", the query's own among them, is left = W - 1, right = 0.
    """
    o = offset(queries, keys, align)
    require_whole(-1, left=left, right=right)

    def rule(i: Array, j: Array) -> Array:
        after = True if left == -1 else j >= i + o - left
        before = True if right == -1 else j <= i + o + right
        return after & before & (i == i) & (j == j)  # no limit at all still has a shape

    return Mask(queries, keys, rule)


def dilated(queries: int, keys: int, *, width: int, dilation: int, align: str) -> Mask:
    """Every `dilation`-th key, `width` of them on either side: |i + o - j| <= width · dilation and
    |i + o - j| mod dilation = 0  (Eq. 3.4). arXiv:2004.05150.
    """
    o = offset(queries, keys, align)
    require_whole(0, width=width)
    require_whole(1, dilation=dilation)

    def rule(i: Array, j: Array) -> Array:
        distance = np.abs(i + o - j)
        return (distance <= width * dilation) & (distance % dilation == 0)

    return Mask(queries, keys, rule)


# ---- sparse Transformer, arXiv:1904.10509 --------------------------------------------------------


def strided(queries: int, keys: int, *, stride: int, part: str = "both", align: str) -> Mask:
    """d = i + o - j >= 0 and, for "local", d < stride, for "stride", d mod stride = 0  (Eq. 3.5)

    The paper gives the two parts to different heads or layers: two hops then reach everything
    before. "both" is their union in one mask.
    """
    o = offset(queries, keys, align)
    require_whole(1, stride=stride)
    _require_choice("part", part, ("local", "stride", "both"))

    def rule(i: Array, j: Array) -> Array:
        distance = i + o - j
        near, far = distance < stride, distance % stride == 0
        return (distance >= 0) & {"local": near, "stride": far, "both": near | far}[part]

    return Mask(queries, keys, rule)


def fixed(
    queries: int, keys: int, *, block: int, summary: int, part: str = "both", align: str
) -> Mask:
    """j <= i + o and, for "block", ⌊(i + o) / block⌋ = ⌊j / block⌋, for "summary",
    j mod block >= block - summary  (Eq. 3.6)

    The last `summary` positions of each block speak for it to all later ones.
    """
    o = offset(queries, keys, align)
    require_whole(1, block=block, summary=summary)
    _require_choice("part", part, ("block", "summary", "both"))
    if summary > block:
        raise ValueError(f"summary is {summary}, more than block = {block}")

    def rule(i: Array, j: Array) -> Array:
        position = i + o
        same, spokesman = position // block == j // block, j % block >= block - summary
        return (j <= position) & {"block": same, "summary": spokesman, "both": same | spokesman}[
            part
        ]

    return Mask(queries, keys, rule)


# ---- by token ------------------------------------------------------------------------------------


def global_tokens(queries: int, keys: int, *, tokens: Sequence[int], align: str) -> Mask:
    """Tokens that see and are seen by all: i + o ∈ tokens or j ∈ tokens  (Eq. 3.7)

    Combine with a local mask by `|`, and that with `causal` by `&`. arXiv:2004.05150.
    """
    o = offset(queries, keys, align)
    chosen = np.asarray(tokens)
    if chosen.size == 0:
        chosen = chosen.astype(np.int64)
    if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
        raise TypeError(f"tokens must be a list of key positions, got {tokens!r}")
    if chosen.size and not (0 <= chosen.min() and chosen.max() < keys):
        raise ValueError(f"tokens must be positions in [0, {keys}), got {chosen.tolist()}")
    return Mask(queries, keys, lambda i, j: np.isin(i + o, chosen) | np.isin(j, chosen))


def padding(lengths: Integer[Array, "*B"], *, queries: int, keys: int) -> Mask:
    """Keys that exist: j < length of the batch row, for every query  (Eq. 3.8)

    Dense, it is (*B, 1, N, M): an axis for the heads is left free. Query rows are not masked: a
    padded query has an output, and its loss is set to zero.
    """
    require_whole(0, queries=queries, keys=keys)
    if not isinstance(lengths, np.ndarray) or not np.issubdtype(lengths.dtype, np.integer):
        raise TypeError(f"lengths must be an array of integers, got {lengths!r}")
    if lengths.size and not (0 <= lengths.min() and lengths.max() <= keys):
        raise ValueError(f"lengths must lie in [0, {keys}], got {lengths.tolist()}")
    length = lengths[..., None, None, None]  # (*B, head, query, key)
    return Mask(queries, keys, lambda i, j: (j < length) & (i == i))


def packed(query_segments: Integer[Array, "*#B N"], key_segments: Integer[Array, "*#B M"]) -> Mask:
    """Several documents in one row: each reads only itself, segment(i) = segment(j)  (Eq. 3.9)

    Dense, it is (*B, 1, N, M). Combine with `causal` by `&`.
    """
    for name, segments in (("query_segments", query_segments), ("key_segments", key_segments)):
        if not isinstance(segments, np.ndarray) or not np.issubdtype(segments.dtype, np.integer):
            raise TypeError(f"{name} must be an array of integers, got {segments!r}")
        if segments.ndim < 1:
            raise ValueError(f"{name} must have shape (*B, length), got {segments.shape}")
    try:
        np.broadcast_shapes(query_segments.shape[:-1], key_segments.shape[:-1])
    except ValueError:
        raise ValueError(
            f"query_segments {query_segments.shape} and key_segments {key_segments.shape} differ "
            "in their leading axes"
        ) from None

    def rule(i: Array, j: Array) -> Array:
        i, j = np.broadcast_arrays(i, j)  # the same axes behind those of the segments
        return query_segments[..., None, i] == key_segments[..., None, j]

    return Mask(query_segments.shape[-1], key_segments.shape[-1], rule)


# ---- where the queries stand ---------------------------------------------------------------------


def offset(queries: int, keys: int, align: str) -> int:
    """The position of query row 0  (Eq. 3.1)"""
    require_whole(0, queries=queries, keys=keys)
    _require_choice("align", align, ALIGNMENTS)
    return keys - queries if align == "lower_right" else 0


def _require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
