"""A decoder-only Transformer that predicts the next token, with stochastic attention in each block.

    x_0 = s E[t] + p,   x_{l+1} = block_l(x_l),   logits = norm(x_L) Eᵀ  (Eq. 16.40)

E embeds the tokens and, tied, scores them (arXiv:1608.05859): its gradient is the sum of both uses.
s = 1, but √W where p are sines, which would drown the embedding of a model that begins, as in
arXiv:1706.03762. Other schemes of positions have no p: see nn/positions.py.
A block's drop rate follows from its place and the step, by the schedule. In evaluation attention is
full. With post-norm blocks the last norm is the last block's own.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Inexact, Integer

from minitransformer.arrays import Array, require_integers, require_whole
from minitransformer.attention.masks import causal
from minitransformer.nn.blocks import BlockCache, DecoderBlock, make_norm
from minitransformer.nn.embedding import Embedding, EmbeddingCache
from minitransformer.nn.linear import Linear, linear_backward, linear_forward
from minitransformer.nn.module import Module
from minitransformer.nn.positions import Positions, Rope
from minitransformer.philox import Draw
from minitransformer.stochastic.compensation import StochasticCache
from minitransformer.stochastic.samplers import RandomMask
from minitransformer.stochastic.schedules import Schedule


class LanguageModelCache(NamedTuple):
    tokens: EmbeddingCache
    positions: Any
    bias: Any
    blocks: list[BlockCache]
    norm: Any
    head: Any
    allowed: int  # pairs of a (batch row, head) that the causal mask allows

    @property
    def attentions(self) -> list[StochasticCache]:
        """The attention of each layer: `.weights`, `.lse`, and `.keep` as it was drawn."""
        return [block.attention.attention for block in self.blocks]

    @property
    def mask_density(self) -> list[float]:
        """The share of the allowed pairs that each layer's random mask kept."""
        return [
            1.0 if a.keep is None else float(a.keep.sum(axis=(-2, -1)).mean() / self.allowed)
            for a in self.attentions
        ]


class LanguageModel(Module):
    """A stack of decoder blocks between an embedding and a score for every token.

    `steps` is the length of the training that the schedule spreads over. `fast` uses the Numba
    twins of element-wise work.

    Raises
    ------
    TypeError, ValueError
        If a size is no whole number from 1 on or does not fit (see MultiHeadAttention), or a choice
        is unknown.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        groups: int | None = None,
        context: int = 128,
        expansion: int = 4,
        positions: str = "learned",
        rope: Rope | None = None,
        buckets: int = 32,
        max_distance: int = 128,
        embedding_scale: float | None = None,
        norm: str = "layer",
        placement: str = "pre",
        activation: str = "gelu",
        tied: bool = True,
        softcap: float | None = None,
        random_mask: RandomMask | None = None,
        schedule: Schedule | None = None,
        steps: int = 1,
        seed: int = 0,
        dtype: np.typing.DTypeLike = np.float32,
        fast: bool = False,
    ):
        require_whole(1, vocabulary=vocabulary, layers=layers, width=width, heads=heads)
        require_whole(1, context=context, expansion=expansion, steps=steps)
        rng = np.random.default_rng(seed)
        self.context, self.heads, self.steps = context, heads, steps
        self.schedule = schedule if random_mask is not None else None
        self.random_mask = random_mask
        self.tokens = Embedding(vocabulary, width, rng=rng, dtype=dtype)
        if width % heads:
            raise ValueError(f"heads is {heads}, which does not divide width = {width}")
        self.positions = Positions(
            positions,
            width=width,
            heads=heads,
            context=context,
            rng=rng,
            rope=rope,
            buckets=buckets,
            max_distance=max_distance,
            dtype=dtype,
        )
        if embedding_scale is None:
            embedding_scale = math.sqrt(width) if positions == "sinusoidal" else 1.0
        self.embedding_scale = embedding_scale
        self.blocks = [
            DecoderBlock(
                width,
                heads,
                rng=rng,
                layer=layer,
                layers=layers,
                groups=groups,
                hidden=expansion * width,
                random_mask=random_mask,
                softcap=softcap,
                norm=norm,
                placement=placement,
                activation=activation,
                dtype=dtype,
                fast=fast,
            )
            for layer in range(layers)
        ]
        pre = placement == "pre"
        self.norm = make_norm(norm, width, dtype=dtype, fast=fast) if pre else None
        self.head = None if tied else Linear(width, vocabulary, rng=rng, bias=False, dtype=dtype)

    def drop_rates(self, step: int) -> list[float | Float[Array, "H"]]:
        """The drop rate of every layer at a step; 0 without a random mask."""
        if self.random_mask is None:
            return [0.0 for _ in self.blocks]
        if self.schedule is None:
            return [self.random_mask.rate for _ in self.blocks]
        count = len(self.blocks)
        return [
            self.schedule.drop_rate(layer, count, step, self.steps, self.heads)
            for layer in range(count)
        ]

    def forward(
        self, tokens: Integer[Array, "B N"], *, draw: Draw
    ) -> tuple[Inexact[Array, "B N V"], LanguageModelCache]:
        """Scores of the token after each of `tokens`  (Eq. 16.40)

        A text may be longer than the context, on which the model was trained, unless positions are
        learned.

        Raises
        ------
        TypeError, ValueError
            If the tokens are no integers in [0, V), or more than a table of positions holds.
        """
        require_integers("tokens", tokens)
        if tokens.ndim != 2:
            raise ValueError(f"tokens must have shape (B, N), got {tokens.shape}")
        length = tokens.shape[1]
        if self.positions.scheme == "learned" and length > self.context:
            raise ValueError(
                f"tokens has {length} positions, the context holds {self.context}: learned "
                "positions end there"
            )
        # pass 1: embed
        places = np.arange(length)
        x, token_cache = self.tokens.forward(tokens)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        x, position_cache = self.positions.add_forward(x, places)
        # pass 2: the blocks
        keep = causal(length, length, align="lower_right").dense()
        bias, bias_cache = self.positions.bias_forward(places, places)
        options: dict[str, Any] = {"rotation": self.positions.rotation(places, length)}
        options |= {"draw": draw, "keep": keep, "bias": bias}
        caches = []
        for block, rate in zip(self.blocks, self.drop_rates(draw.step), strict=True):
            x, cache = block.forward(x, drop_rate=rate, **options)
            caches.append(cache)
        # pass 3: score
        norm_cache = None
        if self.norm is not None:
            x, norm_cache = self.norm.forward(x)
        if self.head is None:
            logits, head_cache = linear_forward(x, self.tokens.weight.value.T)
        else:
            logits, head_cache = self.head.forward(x)
        allowed = length * (length + 1) // 2
        return logits, LanguageModelCache(
            token_cache, position_cache, bias_cache, caches, norm_cache, head_cache, allowed
        )

    def backward(self, dlogits: Inexact[Array, "B N V"], cache: LanguageModelCache) -> None:
        """Add the gradient of every parameter."""
        # undo pass 3
        if self.head is None:
            grads = linear_backward(dlogits, cache.head)
            dx = grads.x
            self.tokens.weight.grad += grads.weight.T
        else:
            dx = self.head.backward(dlogits, cache.head)
        if self.norm is not None:
            dx = self.norm.backward(dx, cache.norm)
        # undo pass 2: every layer read the bias
        dbias: Any = 0
        for block, block_cache in zip(reversed(self.blocks), reversed(cache.blocks), strict=True):
            dx, dlayer = block.backward(dx, block_cache)
            dbias = dbias if dlayer is None else dbias + dlayer
        if cache.bias is not None:
            self.positions.bias_backward(dbias, cache.bias)
        # undo pass 1
        dx = self.positions.add_backward(dx, cache.positions)
        if self.embedding_scale != 1:
            dx = dx * self.embedding_scale
        self.tokens.backward(dx, cache.tokens)


def average_probabilities(
    model: LanguageModel, tokens: Integer[Array, "B N"], *, draw: Draw, samples: Sequence[int]
) -> Inexact[Array, "B N V"]:
    """Monte-Carlo evaluation: the mean over random masks of softmax(logits)  (Eq. 16.41)

    The *probabilities* are averaged: a mean of logits is another, sharper, distribution.
    `samples` are numbers from 1 on; each has masks of its own.
    """
    from minitransformer.attention.softmax import softmax_forward

    if not samples or min(samples) < 1:
        raise ValueError(f"samples must be numbers from 1 on, got {list(samples)}")
    total: Any = 0
    for sample in samples:
        logits, _ = model.forward(tokens, draw=draw._replace(training=False, sample=sample))
        total = total + softmax_forward(logits)[0]
    return total / len(samples)
