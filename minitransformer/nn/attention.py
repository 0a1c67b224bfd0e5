"""Multi-head attention with its four projections: the layer that a Transformer is made of.

    q = split(x W_Q + b_Q),   k = split(m W_K + b_K),   v = split(m W_V + b_V)
    y = join(attend(q, k, v)) W_O + b_O  (Eq. 16.30)

m = x is self-attention, anything else cross-attention. `split` cuts the width into heads and moves
them in front of the positions, (B, N, H·D) -> (B, H, N, D); `join` is its inverse. With fewer
key/value heads than query heads W_K and W_V are narrower. Stochastic attention drops pairs by the
layer's own index, so adding a layer changes no other layer's mask. arXiv:1706.03762.

Positions that belong to heads come from outside: with RoPE the scores are of R_i q_i and R_j k_j,
turned after `split`, while values are not; ALiBi and T5 add a bias to the scores  (Eq. 16.37).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Inexact

from minitransformer.arrays import Array, require_array, require_whole
from minitransformer.nn.linear import Linear, LinearCache
from minitransformer.nn.module import Module
from minitransformer.nn.positions import Rotation
from minitransformer.philox import Draw
from minitransformer.positions.rope import RopeCache
from minitransformer.stochastic.compensation import (
    StochasticCache,
    stochastic_attention_backward,
    stochastic_attention_forward,
)
from minitransformer.stochastic.samplers import RandomMask


class MultiHeadCache(NamedTuple):
    query: LinearCache
    key: LinearCache
    value: LinearCache
    attention: StochasticCache
    output: LinearCache
    is_self: bool
    turned: tuple[Rotation, RopeCache, RopeCache] | None = None  # of queries and keys


class MultiHeadGrads(NamedTuple):
    """`memory` is None if x was its own memory, `bias` if there was none."""

    x: Inexact[Array, "*B N W"]
    memory: Inexact[Array, "*B M W"] | None
    bias: Inexact[Array, "..."] | None


def split_heads(x: Inexact[Array, "*B N W"], heads: int) -> Inexact[Array, "*B H N D"]:
    """(*B, N, H·D) -> (*B, H, N, D)"""
    *leading, rows, width = x.shape
    return np.swapaxes(x.reshape(*leading, rows, heads, width // heads), -2, -3)


def join_heads(x: Inexact[Array, "*B H N D"]) -> Inexact[Array, "*B N W"]:
    """(*B, H, N, D) -> (*B, N, H·D): heads move back *before* the axes are merged."""
    *leading, heads, rows, width = x.shape
    return np.swapaxes(x, -2, -3).reshape(*leading, rows, heads * width)


class MultiHeadAttention(Module):
    """Queries from x, keys and values from x or from a memory.

    Raises
    ------
    TypeError, ValueError
        If a size is no whole number from 1 on, the heads do not divide the width, or the key/value
        heads the heads.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rng: np.random.Generator,
        layer: int = 0,
        groups: int | None = None,
        random_mask: RandomMask | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        bias: bool = True,
        std: float = 0.02,
        output_std: float | None = None,
        dtype: np.typing.DTypeLike = np.float64,
        fast: bool = False,
    ):
        groups = heads if groups is None else groups
        require_whole(1, width=width, heads=heads, groups=groups)
        require_whole(0, layer=layer)
        if width % heads:
            raise ValueError(f"heads is {heads}, which does not divide width = {width}")
        if heads % groups:
            raise ValueError(f"groups is {groups}, which does not divide heads = {heads}")
        self.width, self.heads, self.groups, self.layer = width, heads, groups, layer
        self.random_mask, self.softcap, self.scale, self.fast = random_mask, softcap, scale, fast
        narrow = width // heads * groups
        for name, fan_out in (("query", width), ("key", narrow), ("value", narrow)):
            made = Linear(width, fan_out, rng=rng, bias=bias, std=std, dtype=dtype)
            setattr(self, name, made)
        output_std = std if output_std is None else output_std
        self.output = Linear(width, width, rng=rng, bias=bias, std=output_std, dtype=dtype)

    query: Linear
    key: Linear
    value: Linear

    def forward(
        self,
        x: Inexact[Array, "*B N W"],
        *,
        draw: Draw,
        memory: Inexact[Array, "*B M W"] | None = None,
        keep: Bool[Array, "..."] | None = None,
        drop_rate: float | Float[Array, "H"] | None = None,
        rotation: Rotation | None = None,
        bias: Inexact[Array, "..."] | None = None,
    ) -> tuple[Inexact[Array, "*B N W"], MultiHeadCache]:
        """Attend from x to `memory` (to x itself if there is none)  (Eq. 16.30). `keep` broadcasts
        to (*B, H, N, M); `drop_rate` replaces the random mask's own rate; `rotation` turns queries
        and keys, `bias` is added to the scores  (Eq. 16.37).

        Raises
        ------
        TypeError, ValueError
            If x or the memory is no floating array (*B, N, width), or an option does not fit.
        """
        for name, given in (("x", x), ("memory", memory)):
            if given is not None:
                require_array(name, given, min_ndim=2)
                if given.shape[-1] != self.width:
                    raise ValueError(
                        f"{name} has width {given.shape[-1]}, the layer takes {self.width}"
                    )
        if self.random_mask is None and drop_rate is not None and np.any(drop_rate):
            raise ValueError(
                f"drop_rate is {drop_rate}, but the layer has no random_mask: nothing would drop"
            )
        if rotation is not None and memory is not None:
            raise ValueError("rotation is of one text's positions: a memory has others, or none")
        read = x if memory is None else memory
        # pass 1: project and split
        q, query = self.query.forward(x)
        k, key = self.key.forward(read)
        v, value = self.value.forward(read)
        q, k, v = (
            split_heads(rows, heads)
            for rows, heads in ((q, self.heads), (k, self.groups), (v, self.groups))
        )
        # pass 2: turn
        turned = None
        if rotation is not None:
            q, of_queries = rotation.forward(q)
            k, of_keys = rotation.forward(k)
            turned = (rotation, of_queries, of_keys)
        # pass 3: attend
        attended, attention = stochastic_attention_forward(
            q,
            k,
            v,
            random_mask=self.random_mask,
            draw=draw,
            layer=self.layer,
            keep=keep,
            bias=bias,
            scale=self.scale,
            softcap=self.softcap,
            drop_rate=drop_rate,
            fast=self.fast,
            check_finite=False,  # a step that overflows is skipped and counted, not a crash
        )
        # pass 4: join and project
        out, output = self.output.forward(join_heads(attended))
        caches = (query, key, value, attention, output)
        return out, MultiHeadCache(*caches, is_self=memory is None, turned=turned)

    def backward(self, dout: Inexact[Array, "*B N W"], cache: MultiHeadCache) -> MultiHeadGrads:
        """Gradients of x, of the memory and of the bias. What reads itself has one gradient, of
        queries, keys and values together."""
        # undo pass 4
        dattended = split_heads(self.output.backward(dout, cache.output), self.heads)
        # undo pass 3
        grads = stochastic_attention_backward(dattended, cache.attention)
        dq, dk = grads.q, grads.k
        # undo pass 2
        if cache.turned is not None:
            rotation, of_queries, of_keys = cache.turned
            dq, dk = rotation.backward(dq, of_queries), rotation.backward(dk, of_keys)
        # undo pass 1
        dx = self.query.backward(join_heads(dq), cache.query)
        dmemory = self.key.backward(join_heads(dk), cache.key)
        dmemory = dmemory + self.value.backward(join_heads(grads.v), cache.value)
        if cache.is_self:
            return MultiHeadGrads(dx + dmemory, None, grads.bias)
        return MultiHeadGrads(dx, dmemory, grads.bias)
