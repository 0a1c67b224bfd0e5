"""Stochastic attention: drop pairs at random, and make up for what is gone.

Z_ij is 1 for a kept pair, π_ij the probability of that, P the full attention weights.

    renormalise    W = P ⊙ Z / rowsum(P ⊙ Z) = softmax(S where kept, else -inf)  (Eq. 4.10)
    inverted       W = P ⊙ Z / π;   E[W] = P  (Eq. 4.11)
                   Var[o] = Σ_j (1 - π_j)/π_j · P_j² v_j²,  pairs drawn independently  (Eq. 4.12)

Renormalised rows sum to 1 (or to 0 if nothing is left) and commute with a shift of V; they are
biased towards flat. Inverted rows are unbiased and do not sum to 1. In both, the gradient is that
of dense attention with the mask as data, and evaluation is full attention. `stop_gradient` has the
forward pass of `renormalise` and treats its denominator as a constant: not the derivative of
anything, never the default. arXiv:1907.11065, arXiv:2208.02646.

A dropped head leaves no row to renormalise: there the kept heads of a batch row make up for it, as
in arXiv:2004.13342.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Inexact

from minitransformer.arrays import Array
from minitransformer.attention.dense import (
    AttentionCache,
    AttentionGrads,
    attention_backward,
    attention_forward,
    score_shape,
)
from minitransformer.philox import Draw
from minitransformer.stochastic.samplers import (
    COMPENSATIONS,
    RandomMask,
    Sampled,
    is_active,
    resolve,
)


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


def stochastic_attention_forward(
    q: Inexact[Array, "*#B H N D"],
    k: Inexact[Array, "*#B G M D"],
    v: Inexact[Array, "*#B G M E"],
    *,
    random_mask: RandomMask | None,
    draw: Draw,
    layer: int,
    keep: Bool[Array, "..."] | None = None,
    bias: Inexact[Array, "..."] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    drop_rate: float | Float[Array, "H"] | None = None,
    offset: int | None = None,
    batch_start: int = 0,
    fast: bool = False,
    check_finite: bool = True,
) -> tuple[Inexact[Array, "*B H N E"], StochasticCache]:
    """Draw a mask inside `keep`, attend, compensate  (Eq. 4.10, Eq. 4.11)

    `random_mask=None`, rate 0 and evaluation are dense attention, bit for bit. The arguments of the
    draw are those of `resolve`, the others those of `attention_forward`.

    Raises
    ------
    TypeError, ValueError
        As `resolve` and `attention_forward`.
    """
    given: dict[str, Any] = {
        "bias": bias,
        "scale": scale,
        "softcap": softcap,
        "check_finite": check_finite,
        "fast": fast,
    }
    if random_mask is None or not is_active(random_mask, draw, drop_rate):
        out, cache = attention_forward(q, k, v, keep=keep, **given)
        return out, StochasticCache(cache, None, None)
    shape = score_shape(q, k, v)
    scores = None
    if random_mask.proposal == "scores":
        # detached: the choice of keys carries no gradient, so only the real part takes part in it
        real = {**given, "bias": None if bias is None else _real(bias)}
        _, probe = attention_forward(_real(q), _real(k), _real(v), keep=keep, **real)
        with np.errstate(divide="ignore"):
            scores = np.log(probe.weights)
    sampled = resolve(
        random_mask,
        draw,
        layer,
        shape,
        keep=keep,
        drop_rate=drop_rate,
        scores=scores,
        offset=offset,
        batch_start=batch_start,
        fast=fast,
    )
    return compensated_attention_forward(
        q, k, v, sampled=sampled, compensation=random_mask.compensation, keep=keep, **given
    )


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
    if compensation not in COMPENSATIONS:
        raise ValueError(
            f"compensation must be one of {', '.join(COMPENSATIONS)}, got {compensation!r}"
        )
    given: dict[str, Any] = {
        "bias": bias,
        "scale": scale,
        "softcap": softcap,
        "check_finite": check_finite,
        "fast": fast,
    }
    full = None
    if compensation == "inverted":
        # dropped pairs stay in the denominator: only the multiplier removes them
        if sampled.multiplier is None:
            raise ValueError(
                "sampled.multiplier is None, inverted needs Z/π: draw it with "
                "compensation='inverted'"
            )
        out, cache = attention_forward(q, k, v, keep=keep, multiplier=sampled.multiplier, **given)
    else:
        out, cache = attention_forward(
            q, k, v, keep=sampled.keep, multiplier=sampled.multiplier, **given
        )
        if compensation == "stop_gradient":
            _, full = attention_forward(q, k, v, keep=keep, **given)
    return out, StochasticCache(cache, sampled.keep, full)


def stochastic_attention_backward(
    dout: Inexact[Array, "*B H N E"], cache: StochasticCache
) -> AttentionGrads:
    """The gradient of dense attention under the mask that was drawn.

    With the denominator held constant (`stop_gradient`), D = rowsum(dO ⊙ O) meets P, not W:

        dS = W ⊙ dW - P · D   instead of   dS = W ⊙ dW - W · D  (Eq. 4.13)

    so a dropped logit gets a gradient too.
    """
    if cache.full is None:
        return attention_backward(dout, cache.attention)
    # W ⊙ dW: a cotangent D of the LSE cancels the second term; -P · D: that of the full LSE
    kept, full = cache.attention, cache.full
    moved = (dout.astype(kept.out.dtype, copy=False) * kept.out).sum(axis=-1)
    moved = np.where(kept.lse == -np.inf, 0, moved)  # nobody reads the cotangent of an empty row
    first = attention_backward(dout, kept, dlse=moved)
    second = attention_backward(np.zeros_like(dout), full, dlse=-moved)
    bias = None if first.bias is None else first.bias + second.bias
    return AttentionGrads(first.q + second.q, first.k + second.k, first.v + second.v, bias)


def _real(x: Array) -> Array:
    return x.real if np.iscomplexobj(x) else x
