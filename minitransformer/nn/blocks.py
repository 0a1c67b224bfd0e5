"""Residual blocks: attention, then a feed-forward part, each added to what it read.

    pre-norm    y = x + f(norm(x))  (Eq. 16.31)
    post-norm   y = norm(x + f(x))  (Eq. 16.32)
    feed-forward   f(x) = gelu(x W_1 + b_1) W_2 + b_2,  or  swiglu(x W_g, x W_1) W_2  (Eq. 16.33)

arXiv:1706.03762 has post-norm; pre-norm leaves a path of identities from the loss to every layer
and trains without care, arXiv:2002.04745. It is the default here.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Inexact

from minitransformer.arrays import Array, require_whole
from minitransformer.nn.activations import (
    gelu_backward,
    gelu_forward,
    swiglu_backward,
    swiglu_forward,
)
from minitransformer.nn.attention import MultiHeadAttention, MultiHeadCache
from minitransformer.nn.linear import Linear
from minitransformer.nn.module import Module
from minitransformer.nn.norms import LayerNorm, RMSNorm
from minitransformer.nn.positions import Rotation
from minitransformer.philox import Draw
from minitransformer.stochastic.samplers import RandomMask

NORMS = ("layer", "rms")
ACTIVATIONS = ("gelu", "swiglu")
PLACEMENTS = ("pre", "post")


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def make_norm(
    kind: str, width: int, *, dtype: np.typing.DTypeLike = np.float64, fast: bool = False
) -> LayerNorm | RMSNorm:
    """The norm of that name."""
    _require_choice("norm", kind, NORMS)
    if kind == "rms":
        return RMSNorm(width, dtype=dtype)
    return LayerNorm(width, dtype=dtype, fast=fast)


class FeedForwardCache(NamedTuple):
    up: Any
    gate: Any
    activation: Any
    down: Any


class FeedForward(Module):
    """The same two-layer network at every position  (Eq. 16.33)"""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        rng: np.random.Generator,
        activation: str = "gelu",
        std: float = 0.02,
        output_std: float | None = None,
        dtype: np.typing.DTypeLike = np.float64,
        fast: bool = False,
    ):
        _require_choice("activation", activation, ACTIVATIONS)
        require_whole(1, hidden=hidden)
        self.activation, self.fast = activation, fast
        self.up = Linear(width, hidden, rng=rng, std=std, dtype=dtype)
        gated = activation == "swiglu"
        self.gate = Linear(width, hidden, rng=rng, std=std, dtype=dtype) if gated else None
        output_std = std if output_std is None else output_std
        self.down = Linear(hidden, width, rng=rng, std=output_std, dtype=dtype)

    def forward(
        self, x: Inexact[Array, "*B N W"]
    ) -> tuple[Inexact[Array, "*B N W"], FeedForwardCache]:
        activation: Any
        h, up = self.up.forward(x)
        if self.gate is None:
            gate = None
            a, activation = gelu_forward(h, fast=self.fast)
        else:
            g, gate = self.gate.forward(x)
            a, activation = swiglu_forward(g, h)
        out, down = self.down.forward(a)
        return out, FeedForwardCache(up, gate, activation, down)

    def backward(
        self, dout: Inexact[Array, "*B N W"], cache: FeedForwardCache
    ) -> Inexact[Array, "*B N W"]:
        da = self.down.backward(dout, cache.down)
        if self.gate is None:
            return self.up.backward(gelu_backward(da, cache.activation), cache.up)
        grads = swiglu_backward(da, cache.activation)
        dx = self.up.backward(grads.up, cache.up)
        return dx + self.gate.backward(grads.gate, cache.gate)


class BlockCache(NamedTuple):
    norms: tuple[Any, Any]
    attention: MultiHeadCache
    feed_forward: FeedForwardCache


class BlockGrads(NamedTuple):
    x: Inexact[Array, "*B N W"]
    bias: Inexact[Array, "..."] | None  # None if there was no bias


class DecoderBlock(Module):
    """Self-attention and feed-forward, each inside a residual  (Eq. 16.31, Eq. 16.32)"""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rng: np.random.Generator,
        layer: int,
        layers: int,
        groups: int | None = None,
        hidden: int | None = None,
        random_mask: RandomMask | None = None,
        softcap: float | None = None,
        norm: str = "layer",
        placement: str = "pre",
        activation: str = "gelu",
        dtype: np.typing.DTypeLike = np.float64,
        fast: bool = False,
    ):
        _require_choice("placement", placement, PLACEMENTS)
        require_whole(1, layers=layers)
        self.placement = placement
        # every block adds two terms to the residual stream: their variances are made to sum to one
        output_std = 0.02 / (2 * layers) ** 0.5
        self.attention_norm = make_norm(norm, width, dtype=dtype, fast=fast)
        self.attention = MultiHeadAttention(
            width,
            heads,
            rng=rng,
            layer=layer,
            groups=groups,
            random_mask=random_mask,
            softcap=softcap,
            output_std=output_std,
            dtype=dtype,
            fast=fast,
        )
        self.feed_forward_norm = make_norm(norm, width, dtype=dtype, fast=fast)
        self.feed_forward = FeedForward(
            width,
            4 * width if hidden is None else hidden,
            rng=rng,
            activation=activation,
            output_std=output_std,
            dtype=dtype,
            fast=fast,
        )

    def forward(
        self,
        x: Inexact[Array, "*B N W"],
        *,
        draw: Draw,
        keep: Bool[Array, "..."] | None = None,
        drop_rate: float | Float[Array, "H"] | None = None,
        rotation: Rotation | None = None,
        bias: Inexact[Array, "..."] | None = None,
    ) -> tuple[Inexact[Array, "*B N W"], BlockCache]:
        """What the options mean: see MultiHeadAttention."""
        options: dict[str, Any] = {"draw": draw, "keep": keep, "drop_rate": drop_rate}
        options |= {"rotation": rotation, "bias": bias}
        if self.placement == "pre":
            h, first = self.attention_norm.forward(x)
            a, attention = self.attention.forward(h, **options)
            x = x + a
            h, second = self.feed_forward_norm.forward(x)
            f, feed_forward = self.feed_forward.forward(h)
            x = x + f
        else:
            a, attention = self.attention.forward(x, **options)
            x, first = self.attention_norm.forward(x + a)
            f, feed_forward = self.feed_forward.forward(x)
            x, second = self.feed_forward_norm.forward(x + f)
        return x, BlockCache((first, second), attention, feed_forward)

    def backward(self, dout: Inexact[Array, "*B N W"], cache: BlockCache) -> BlockGrads:
        """The residual hands the gradient on, and adds what comes back through the part."""
        first, second = cache.norms
        if self.placement == "pre":
            df = self.feed_forward.backward(dout, cache.feed_forward)
            dx = dout + self.feed_forward_norm.backward(df, second)
            attention = self.attention.backward(dx, cache.attention)
            return BlockGrads(dx + self.attention_norm.backward(attention.x, first), attention.bias)
        dx = self.feed_forward_norm.backward(dout, second)
        dx = dx + self.feed_forward.backward(dx, cache.feed_forward)
        dx = self.attention_norm.backward(dx, first)
        attention = self.attention.backward(dx, cache.attention)
        return BlockGrads(dx + attention.x, attention.bias)
