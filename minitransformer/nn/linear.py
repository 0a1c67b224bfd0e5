"""The affine map: every row times one matrix.

    y = x W + b  (Eq. 16.1)

A weight is (in, out), so that y = x W reads as it is written.
"""

import math
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


class LinearCache(NamedTuple):
    x: Inexact[Array, "*B I"]
    weight: Inexact[Array, "I O"]
    has_bias: bool


class LinearGrads(NamedTuple):
    x: Inexact[Array, "*B I"]
    weight: Inexact[Array, "I O"]
    bias: Inexact[Array, "O"] | None


def linear_forward(
    x: Inexact[Array, "*B I"],
    weight: Inexact[Array, "I O"],
    bias: Inexact[Array, "O"] | None = None,
) -> tuple[Inexact[Array, "*B O"], LinearCache]:
    """y = x W + b  (Eq. 16.1)

    Raises
    ------
    TypeError, ValueError
        If an argument is no floating array, or the widths disagree.
    """
    require_array("x", x, min_ndim=1)
    require_array("weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"weight must have shape (in, out), got {weight.shape}")
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x has width {x.shape[-1]}, weight takes {weight.shape[0]}")
    dtype = compute_dtype(x, weight)
    rows = _rows(x).astype(dtype, copy=False)  # one product, however many leading axes
    out = rows @ weight.astype(dtype, copy=False)
    if bias is not None:
        require_array("bias", bias)
        if bias.shape != weight.shape[1:]:
            raise ValueError(f"bias has shape {bias.shape}, weight gives {weight.shape[1:]}")
        out = out + bias
    out = narrowed(out.reshape(*x.shape[:-1], weight.shape[1]), x)
    return out, LinearCache(x, weight, bias is not None)


def linear_backward(dout: Inexact[Array, "*B O"], cache: LinearCache) -> LinearGrads:
    """dx = dy Wᵀ,   dW = xᵀ dy,   db = Σ_rows dy  (Eq. 16.2); dx is stored as x is, sums over rows
    are never narrow"""
    require_cotangent("dout", dout, (*cache.x.shape[:-1], cache.weight.shape[1]))
    dtype = compute_dtype(dout, cache.weight)
    rows, drows = _rows(cache.x).astype(dtype, copy=False), _rows(dout).astype(dtype, copy=False)
    dx = narrowed((drows @ cache.weight.T).reshape(cache.x.shape), cache.x)
    return LinearGrads(dx, rows.T @ drows, drows.sum(axis=0) if cache.has_bias else None)


def _rows(x: Array) -> Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class Linear(Module):
    """An affine map that owns W and b; W starts as N(0, std²), b as 0."""

    def __init__(
        self,
        fan_in: int,
        fan_out: int,
        *,
        rng: np.random.Generator,
        bias: bool = True,
        std: float = 0.02,
        dtype: np.typing.DTypeLike = np.float64,
    ):
        require_whole(1, fan_in=fan_in, fan_out=fan_out)
        weight = rng.standard_normal((fan_in, fan_out)) * std
        self.weight = Parameter(weight.astype(dtype), decay=True)
        self.bias = Parameter(np.zeros(fan_out, dtype), decay=False) if bias else None

    def forward(self, x: Inexact[Array, "*B I"]) -> tuple[Inexact[Array, "*B O"], LinearCache]:
        return linear_forward(x, self.weight.value, self.bias.value if self.bias else None)

    def backward(self, dout: Inexact[Array, "*B O"], cache: LinearCache) -> Inexact[Array, "*B I"]:
        grads = linear_backward(dout, cache)
        self.weight.grad += grads.weight
        if self.bias is not None:
            self.bias.grad += grads.bias
        return grads.x
