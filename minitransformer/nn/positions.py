"""How a model is told the order: one scheme, at one of three places.

    added to the embedding     x_n = e_n + p_n,   learned or sinusoidal  (Eq. 16.34)
    turned into each head      q_n, k_n by the angles of n, RoPE  (Eq. 16.35)
    added to all scores        S_ij + b(j - i), ALiBi or T5  (Eq. 16.36)

`none` does nothing: a causal mask alone tells an order, arXiv:2203.16634. The formulas are those of
`minitransformer/positions`; what is decided here is who calls them, and that a bias is made once
and read by every layer, so that its gradient is the sum over layers, as in T5. Only a learned table
has an end.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Inexact, Integer

from minitransformer.arrays import Array, require_whole
from minitransformer.nn.module import Module, Parameter
from minitransformer.positions.alibi import alibi_forward, alibi_slopes
from minitransformer.positions.learned import LearnedCache, learned_backward, learned_forward
from minitransformer.positions.rope import (
    LAYOUTS,
    RopeCache,
    RopeTables,
    Scaling,
    rope_backward,
    rope_forward,
    rope_frequencies,
    rope_tables,
)
from minitransformer.positions.sinusoidal import (
    SinusoidalCache,
    sinusoidal_backward,
    sinusoidal_forward,
)
from minitransformer.positions.t5_bias import T5BiasCache, t5_bias_backward, t5_bias_forward

SCHEMES = ("learned", "none", "sinusoidal", "rope", "alibi", "t5")
OF_PAIRS = ("alibi", "t5")  # they say something of a pair (i, j), which linear attention cannot


@dataclass(frozen=True)
class Rope:
    """How far heads turn: the base of the angles, how many channels of each head (None: all), the
    pairs, and what is done for longer texts."""

    base: float = 10000.0
    width: int | None = None
    layout: str = "half"
    scaling: Scaling | None = None


class Rotation(NamedTuple):
    """The angles of some positions, and which channels are a pair."""

    tables: RopeTables
    layout: str

    def forward(self, x: Inexact[Array, "*B N D"]) -> tuple[Inexact[Array, "*B N D"], RopeCache]:
        return rope_forward(x, *self.tables, layout=self.layout)

    def backward(
        self, dout: Inexact[Array, "*B N D"], cache: RopeCache
    ) -> Inexact[Array, "*B N D"]:
        return rope_backward(dout, cache)


class Positions(Module):
    """One scheme for a whole model; `weight` is its table, None for one that learns nothing.

    Raises
    ------
    TypeError, ValueError
        If the scheme is unknown, or a setting of it cannot be (see minitransformer/positions).
    """

    def __init__(
        self,
        scheme: str,
        *,
        width: int,
        heads: int,
        context: int,
        rng: np.random.Generator,
        rope: Rope | None = None,
        buckets: int = 32,
        max_distance: int = 128,
        std: float = 0.02,
        dtype: np.typing.DTypeLike = np.float64,
    ):
        if scheme not in SCHEMES:
            raise ValueError(f"positions must be one of {', '.join(SCHEMES)}, got {scheme!r}")
        require_whole(1, width=width, heads=heads, context=context)
        if rope is not None and scheme != "rope":
            raise ValueError(f"rope is for positions='rope', not for {scheme!r}")
        self.scheme, self.context, self.max_distance = scheme, context, max_distance
        self.rope = rope or Rope()
        self.turned = width // heads if self.rope.width is None else self.rope.width
        shape: tuple[int, int] | None = None
        if scheme == "rope":
            _require_rope(self.rope, self.turned, width // heads)
        elif scheme == "alibi":
            self.slopes = alibi_slopes(heads).astype(dtype)
        elif scheme == "learned":
            shape = (context, width)
        elif scheme == "t5":
            shape = (buckets, heads)
            t5_bias_forward(np.zeros(shape), *2 * [np.arange(1)], **self._t5)  # or its own error
        self.weight = None
        if shape is not None:
            table = rng.standard_normal(shape) * std
            self.weight = Parameter(table.astype(dtype), decay=False)

    @property
    def _t5(self) -> dict:
        return {"bidirectional": False, "max_distance": self.max_distance}

    # -- added to the embedding --

    def add_forward(
        self, x: Inexact[Array, "*B N W"], positions: Integer[Array, "..."]
    ) -> tuple[Inexact[Array, "*B N W"], LearnedCache | SinusoidalCache | None]:
        """x + p for learned and sinusoidal positions, x itself for all others  (Eq. 16.34)"""
        if self.scheme == "learned":
            assert self.weight is not None
            return learned_forward(x, self.weight.value, positions)
        if self.scheme == "sinusoidal":
            return sinusoidal_forward(x, positions)
        return x, None

    def add_backward(
        self, dout: Inexact[Array, "*B N W"], cache: LearnedCache | SinusoidalCache | None
    ) -> Inexact[Array, "*B N W"]:
        """dx = dy; a learned table collects it over the batch  (Eq. 16.34)"""
        if isinstance(cache, LearnedCache):
            assert self.weight is not None
            grads = learned_backward(dout, cache)
            self.weight.grad += grads.table
            return grads.x
        if isinstance(cache, SinusoidalCache):
            return sinusoidal_backward(dout, cache)
        return dout

    # -- turned into each head --

    def rotation(
        self, positions: Integer[Array, "*B N"], length: int | None = None
    ) -> Rotation | None:
        """The angles of these positions for RoPE, None for all others  (Eq. 16.35). `length`, of
        the whole text, is asked for by dynamic scaling only."""
        if self.scheme != "rope":
            return None
        scaling = self.rope.scaling
        dynamic = scaling is not None and scaling.kind == "dynamic"
        tables = rope_tables(
            positions,
            self.turned,
            base=self.rope.base,
            scaling=scaling,
            length=length if dynamic else None,
        )
        return Rotation(tables, self.rope.layout)

    # -- added to the scores --

    def bias_forward(
        self, queries: Integer[Array, "*#B N"], keys: Integer[Array, "*#B M"]
    ) -> tuple[Inexact[Array, "*B H N M"] | None, T5BiasCache | None]:
        """What ALiBi and T5 add to the scores of these positions; None for all others
        (Eq. 16.36)"""
        if self.scheme == "alibi":
            return alibi_forward(self.slopes, queries, keys)[0], None
        if self.scheme == "t5":
            assert self.weight is not None
            return t5_bias_forward(self.weight.value, queries, keys, **self._t5)
        return None, None

    def bias_backward(self, dbias: Inexact[Array, "*B H N M"], cache: T5BiasCache | None) -> None:
        """Add the gradient of T5's table, from that of the bias summed over layers; slopes are
        fixed  (Eq. 16.36)"""
        if cache is not None:
            assert self.weight is not None
            self.weight.grad += t5_bias_backward(dbias, cache)


def _require_rope(rope: Rope, turned: int, head_width: int) -> None:
    if rope.layout not in LAYOUTS:
        raise ValueError(f"rope.layout must be one of {', '.join(LAYOUTS)}, got {rope.layout!r}")
    if rope.width is None and head_width % 2:
        raise ValueError(
            f"positions='rope' turns channels in pairs, and a head has {head_width}: give an even "
            "rope.width or another head width"
        )
    require_whole(2, **{"rope.width": turned})
    if turned > head_width or turned % 2:
        raise ValueError(
            f"rope.width must be even and at most the head width {head_width}, got {turned}"
        )
    dynamic = rope.scaling is not None and rope.scaling.kind == "dynamic"
    rope_frequencies(
        turned, base=rope.base, scaling=rope.scaling, length=1 if dynamic else None
    )  # or its own error
