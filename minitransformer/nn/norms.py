"""Normalisation of each row: LayerNorm and RMSNorm.

    x̂ = (x - mean x) · r,   r = 1/√(mean (x - mean x)² + ε),   y = γ x̂ + β  (Eq. 16.4)
    x̂ = x · r,   r = 1/√(mean x² + ε),   y = (offset + γ) x̂  (Eq. 16.6)

The variance is the biased one and ε stands under the root. arXiv:1607.06450, arXiv:1910.07467;
Gemma's RMSNorm has offset 1.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Inexact

from minitransformer.arrays import (
    Array,
    compute_dtype,
    narrowed,
    require_array,
    require_cotangent,
    require_whole,
)
from minitransformer.nn.module import Module, Parameter


class NormCache(NamedTuple):
    normalised: Inexact[Array, "*B W"]  # x̂
    inverse: Inexact[Array, "*B 1"]  # r
    gain: Inexact[Array, "W"]  # what x̂ is multiplied by


class LayerNormGrads(NamedTuple):
    x: Inexact[Array, "*B W"]
    gamma: Inexact[Array, "W"]
    beta: Inexact[Array, "W"]


class RMSNormGrads(NamedTuple):
    x: Inexact[Array, "*B W"]
    gamma: Inexact[Array, "W"]


def layer_norm_forward(
    x: Inexact[Array, "*B W"],
    gamma: Inexact[Array, "W"],
    beta: Inexact[Array, "W"],
    *,
    eps: float = 1e-5,
    fast: bool = False,
) -> tuple[Inexact[Array, "*B W"], NormCache]:
    """Mean 0 and variance 1 along the last axis, then γ and β  (Eq. 16.4); `fast` takes the Numba
    twin.

    Raises
    ------
    TypeError, ValueError
        If an argument is no floating array, γ or β is not (W,), or ε is negative.
    """
    _require(x, eps, gamma=gamma, beta=beta)
    x_ = x.astype(compute_dtype(x, gamma, beta), copy=False)
    if fast:
        from minitransformer import fast as twins

        gamma, beta = (p.astype(x_.dtype, copy=False) for p in (gamma, beta))
        out, normalised, inverse = twins.layer_norm(x_, gamma, beta, eps)
        return narrowed(out, x), NormCache(normalised, inverse, gamma)
    centred = x_ - x_.mean(axis=-1, keepdims=True)
    inverse = _inverse_root((centred * centred).mean(axis=-1, keepdims=True), eps)
    normalised = centred * inverse
    return narrowed(normalised * gamma + beta, x), NormCache(normalised, inverse, gamma)


def layer_norm_backward(
    dout: Inexact[Array, "*B W"], cache: NormCache, *, fast: bool = False
) -> LayerNormGrads:
    """g = dy ⊙ γ,   dx = r (g - mean g - x̂ mean(g x̂)),   dγ = Σ dy x̂,   dβ = Σ dy  (Eq. 16.5)"""
    normalised, inverse, gain = cache
    require_cotangent("dout", dout, normalised.shape)
    dout = dout.astype(compute_dtype(dout, normalised), copy=False)  # sums of rows are wide
    rows = tuple(range(dout.ndim - 1))
    dgamma, dbeta = (dout * normalised).sum(axis=rows), dout.sum(axis=rows)
    if fast:
        from minitransformer import fast as twins

        return LayerNormGrads(
            twins.layer_norm_backward(dout, normalised, inverse, gain), dgamma, dbeta
        )
    g = dout * gain
    along = (g * normalised).mean(axis=-1, keepdims=True)
    dx = inverse * (g - g.mean(axis=-1, keepdims=True) - normalised * along)
    return LayerNormGrads(dx, dgamma, dbeta)


def rms_norm_forward(
    x: Inexact[Array, "*B W"],
    gamma: Inexact[Array, "W"],
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[Inexact[Array, "*B W"], NormCache]:
    """Root mean square 1 along the last axis, then offset + γ  (Eq. 16.6)

    Raises
    ------
    TypeError, ValueError
        As `layer_norm_forward`.
    """
    _require(x, eps, gamma=gamma)
    x_ = x.astype(compute_dtype(x, gamma), copy=False)
    inverse = _inverse_root((x_ * x_).mean(axis=-1, keepdims=True), eps)
    normalised, gain = x_ * inverse, gamma + offset if offset else gamma
    return narrowed(normalised * gain, x), NormCache(normalised, inverse, gain)


def rms_norm_backward(dout: Inexact[Array, "*B W"], cache: NormCache) -> RMSNormGrads:
    """g = dy ⊙ (offset + γ),   dx = r (g - x̂ mean(g x̂)),   dγ = Σ dy x̂  (Eq. 16.7)"""
    normalised, inverse, gain = cache
    require_cotangent("dout", dout, normalised.shape)
    dout = dout.astype(compute_dtype(dout, normalised), copy=False)
    g = dout * gain
    dx = inverse * (g - normalised * (g * normalised).mean(axis=-1, keepdims=True))
    return RMSNormGrads(dx, (dout * normalised).sum(axis=tuple(range(dout.ndim - 1))))


def _inverse_root(square: Array, eps: float) -> Array:
    """1/√(square + ε); a row of zeros with ε = 0 gives 0 and not infinity."""
    total = square + eps
    zero = total == 0
    return np.where(zero, 0, 1 / np.sqrt(np.where(zero, 1, total)))


def _require(x: Array, eps: float, **of_width: Array) -> None:
    require_array("x", x, min_ndim=1)
    for name, parameter in of_width.items():
        require_array(name, parameter)
        if parameter.shape != x.shape[-1:]:
            raise ValueError(f"{name} has shape {parameter.shape}, x needs {x.shape[-1:]}")
    if x.shape[-1] == 0:
        raise ValueError("x has width 0: there is nothing to normalise")
    if not 0 <= eps < np.inf:
        raise ValueError(f"eps must be at least 0 and finite, got {eps}")


class LayerNorm(Module):
    """LayerNorm that owns γ (from 1) and β (from 0)."""

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-5,
        dtype: np.typing.DTypeLike = np.float64,
        fast: bool = False,
    ):
        require_whole(1, width=width)
        self.gamma = Parameter(np.ones(width, dtype), decay=False)
        self.beta = Parameter(np.zeros(width, dtype), decay=False)
        self.eps, self.fast = eps, fast

    def forward(self, x: Inexact[Array, "*B W"]) -> tuple[Inexact[Array, "*B W"], NormCache]:
        gamma, beta = self.gamma.value, self.beta.value
        return layer_norm_forward(x, gamma, beta, eps=self.eps, fast=self.fast)

    def backward(self, dout: Inexact[Array, "*B W"], cache: NormCache) -> Inexact[Array, "*B W"]:
        grads = layer_norm_backward(dout, cache, fast=self.fast)
        self.gamma.grad += grads.gamma
        self.beta.grad += grads.beta
        return grads.x


class RMSNorm(Module):
    """RMSNorm that owns γ; with offset 1 it starts from 0, else from 1."""

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        dtype: np.typing.DTypeLike = np.float64,
    ):
        require_whole(1, width=width)
        self.gamma = Parameter(np.full(width, 1 - offset, dtype), decay=False)
        self.eps, self.offset = eps, offset

    def forward(self, x: Inexact[Array, "*B W"]) -> tuple[Inexact[Array, "*B W"], NormCache]:
        return rms_norm_forward(x, self.gamma.value, eps=self.eps, offset=self.offset)

    def backward(self, dout: Inexact[Array, "*B W"], cache: NormCache) -> Inexact[Array, "*B W"]:
        grads = rms_norm_backward(dout, cache)
        self.gamma.grad += grads.gamma
        return grads.x
