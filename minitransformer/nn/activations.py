"""What stands between two linear maps: GELU in both forms, and the gate of SwiGLU.

    gelu(x) = x Φ(x),   Φ the normal distribution function  (Eq. 16.8)
    gelu(x) ≈ ½ x (1 + t),   t = tanh(√(2/π) (x + 0.044715 x³))  (Eq. 16.9)
    swiglu(a, b) = silu(a) ⊙ b,   silu(a) = a σ(a)  (Eq. 16.10)

The two forms of GELU differ by up to 5e-4: a model trained with one should run with it.
arXiv:1606.08415, arXiv:2002.05202.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Inexact

from minitransformer.arrays import Array, compute_dtype, narrowed, require_array, require_cotangent

ROOT = math.sqrt(2 / math.pi)
CUBE = 0.044715
_erf = np.vectorize(math.erf, otypes=[np.float64])  # NumPy has none


class ActivationCache(NamedTuple):
    slope: Inexact[Array, "..."]  # dy/dx, entry by entry


class SwigluCache(NamedTuple):
    gate: Inexact[Array, "..."]
    up: Inexact[Array, "..."]
    sigmoid: Inexact[Array, "..."]


class SwigluGrads(NamedTuple):
    gate: Inexact[Array, "..."]
    up: Inexact[Array, "..."]


def gelu_forward(
    x: Inexact[Array, "..."], *, form: str = "tanh", fast: bool = False
) -> tuple[Inexact[Array, "..."], ActivationCache]:
    """GELU, exact (`form="erf"`, Eq. 16.8) or by tanh (Eq. 16.9); `fast` takes the Numba twin of
    the latter.

    Raises
    ------
    TypeError, ValueError
        If x is no floating array, or the form is neither.
    """
    require_array("x", x)
    if form not in ("tanh", "erf"):
        raise ValueError(f"form must be 'tanh' or 'erf', got {form!r}")
    x_ = x.astype(compute_dtype(x), copy=False)
    if fast and form == "tanh":
        from minitransformer import fast as twins

        out, slope = twins.gelu(x_)
        return narrowed(out, x), ActivationCache(slope)
    if form == "erf":
        if np.iscomplexobj(x):
            raise TypeError("x is complex: the error function is real here")
        phi = (0.5 * (1 + _erf(x_ / math.sqrt(2)))).astype(x_.dtype)
        density = np.exp(-0.5 * x_ * x_) / math.sqrt(2 * math.pi)
        return narrowed(x_ * phi, x), ActivationCache(phi + x_ * density)
    t = np.tanh(ROOT * x_ * (1 + CUBE * x_ * x_))
    slope = 0.5 * (1 + t) + 0.5 * x_ * (1 - t * t) * ROOT * (1 + 3 * CUBE * x_ * x_)
    return narrowed(0.5 * x_ * (1 + t), x), ActivationCache(slope)


def gelu_backward(dout: Inexact[Array, "..."], cache: ActivationCache) -> Inexact[Array, "..."]:
    """dx = dy (Φ(x) + x φ(x)), or dy (½(1 + t) + ½ x (1 - t²) t')  (Eq. 16.11)"""
    require_cotangent("dout", dout, cache.slope.shape)
    return dout * cache.slope


def swiglu_forward(
    gate: Inexact[Array, "..."], up: Inexact[Array, "..."]
) -> tuple[Inexact[Array, "..."], SwigluCache]:
    """silu(gate) ⊙ up  (Eq. 16.10)

    Raises
    ------
    TypeError, ValueError
        If an argument is no floating array, or the two shapes differ.
    """
    require_array("gate", gate)
    require_array("up", up)
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {gate.shape}, up {up.shape}: the two must agree")
    dtype = compute_dtype(gate, up)
    a, b = gate.astype(dtype, copy=False), up.astype(dtype, copy=False)
    sigmoid = 0.5 * (1 + np.tanh(0.5 * a))  # 1 / (1 + e^-a) without its overflow
    return narrowed(a * sigmoid * b, gate), SwigluCache(a, b, sigmoid)


def swiglu_backward(dout: Inexact[Array, "..."], cache: SwigluCache) -> SwigluGrads:
    """da = dy b σ(a) (1 + a (1 - σ(a))),   db = dy a σ(a)  (Eq. 16.12)"""
    a, b, sigmoid = cache
    require_cotangent("dout", dout, a.shape)
    return SwigluGrads(dout * b * sigmoid * (1 + a * (1 - sigmoid)), dout * a * sigmoid)
