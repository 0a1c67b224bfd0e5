"""Chapter 03: Masks. See README.md beside this file."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Integer

from minitransformer.arrays import Array, require_whole

# ==== attention.masks =============================================================================


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
    # 03.1: your lines


def window(queries: int, keys: int, *, left: int, right: int, align: str) -> Mask:
    """i + o - left <= j <= i + o + right, both ends included; -1 is no limit  (Eq. 3.3)

    A "sliding window of W keys", the query's own among them, is left = W - 1, right = 0.
    """
    # 03.2: your lines


def dilated(queries: int, keys: int, *, width: int, dilation: int, align: str) -> Mask:
    """Every `dilation`-th key, `width` of them on either side: |i + o - j| <= width · dilation and
    |i + o - j| mod dilation = 0  (Eq. 3.4). arXiv:2004.05150.
    """
    # 03.2: your lines


# ---- sparse Transformer, arXiv:1904.10509 --------------------------------------------------------


def strided(queries: int, keys: int, *, stride: int, part: str = "both", align: str) -> Mask:
    """d = i + o - j >= 0 and, for "local", d < stride, for "stride", d mod stride = 0  (Eq. 3.5)

    The paper gives the two parts to different heads or layers: two hops then reach everything
    before. "both" is their union in one mask.
    """
    # 03.3: your lines


def fixed(
    queries: int, keys: int, *, block: int, summary: int, part: str = "both", align: str
) -> Mask:
    """j <= i + o and, for "block", ⌊(i + o) / block⌋ = ⌊j / block⌋, for "summary",
    j mod block >= block - summary  (Eq. 3.6)

    The last `summary` positions of each block speak for it to all later ones.
    """
    # 03.3: your lines


# ---- by token ------------------------------------------------------------------------------------


def global_tokens(queries: int, keys: int, *, tokens: Sequence[int], align: str) -> Mask:
    """Tokens that see and are seen by all: i + o ∈ tokens or j ∈ tokens  (Eq. 3.7)

    Combine with a local mask by `|`, and that with `causal` by `&`. arXiv:2004.05150.
    """
    # 03.4: your lines


def padding(lengths: Integer[Array, "*B"], *, queries: int, keys: int) -> Mask:
    """Keys that exist: j < length of the batch row, for every query  (Eq. 3.8)

    Dense, it is (*B, 1, N, M): an axis for the heads is left free. Query rows are not masked: a
    padded query has an output, and its loss is set to zero.
    """
    # 03.4: your lines


def packed(query_segments: Integer[Array, "*#B N"], key_segments: Integer[Array, "*#B M"]) -> Mask:
    """Several documents in one row: each reads only itself, segment(i) = segment(j)  (Eq. 3.9)

    Dense, it is (*B, 1, N, M). Combine with `causal` by `&`.
    """
    # 03.4: your lines


# ---- where the queries stand ---------------------------------------------------------------------


def offset(queries: int, keys: int, align: str) -> int:
    """The position of query row 0  (Eq. 3.1)"""
    # 03.1: your lines


def _require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
