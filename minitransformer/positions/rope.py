"""Rotary positions: each pair of channels of a query or key turns by an angle that grows with p.

    θ_i = base^{-2i/r},   c_i = cos(p θ_i),   s_i = sin(p θ_i),   i < r/2  (Eq. 7.1)
    y_a = x_a c_i - x_b s_i,   y_b = x_a s_i + x_b c_i  (Eq. 7.2)
    (a, b) = (2i, 2i + 1) interleaved,   (i, i + r/2) half

R_m q · R_n k depends on m - n alone. Only queries and keys turn, never values; a key is turned
before it is cached. With a rotary width r < D the channels behind r do not move. The two layouts
are one permutation of channels apart, and mixing them up is silent: `layout` has no default.
arXiv:2104.09864. Longer texts than it was trained on: linear arXiv:2306.15595, YaRN
arXiv:2309.00071.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Inexact, Num

from minitransformer.arrays import (
    Array,
    compute_dtype,
    require_array,
    require_broadcastable,
    require_cotangent,
    require_whole,
)

LAYOUTS = ("interleaved", "half")
KINDS = ("linear", "ntk", "dynamic", "yarn")


@dataclass(frozen=True)
class Scaling:
    """How to slow the rotation down for texts `factor` times as long as the `original` length.

    `attention_factor` replaces YaRN's own magnitude (Eq. 7.8); libraries that divide two such
    magnitudes, as for mscale = mscale_all_dim, mean 1.

    Raises
    ------
    TypeError, ValueError
        If the kind is unknown, a number is out of range, or belongs to another kind.
    """

    kind: str
    factor: float
    original: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _require_choice("kind", self.kind, KINDS)
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor must be a number of at least 1, got {self.factor}")
        knows = self.kind in ("dynamic", "yarn")
        if knows and self.original is None:
            raise ValueError(f"kind={self.kind!r} needs original, the length it was trained on")
        if not knows and self.original is not None:
            raise ValueError(f"original is for dynamic and yarn, not for kind={self.kind!r}")
        if self.original is not None:
            require_whole(1, original=self.original)
        if not 0 < self.beta_slow < self.beta_fast < math.inf:
            raise ValueError(
                f"beta_fast must be above beta_slow, and both positive, got {self.beta_fast} and "
                f"{self.beta_slow}"
            )
        if self.attention_factor is not None:
            if self.kind != "yarn":
                raise ValueError(f"attention_factor is for yarn, not for kind={self.kind!r}")
            if not 0 < self.attention_factor < math.inf:
                raise ValueError(f"attention_factor must be positive, got {self.attention_factor}")

    @property
    def magnitude(self) -> float:
        """m = 0.1 ln s + 1 for YaRN, else 1: both tables are times m, logits times m²  (Eq. 7.8)"""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1


class RopeTables(NamedTuple):
    """cos(p θ_i) and sin(p θ_i), in float64."""

    cos: Float[Array, "*P half"]
    sin: Float[Array, "*P half"]


class RopeCache(NamedTuple):
    cos: Inexact[Array, "..."]
    sin: Inexact[Array, "..."]
    layout: str
    shape: tuple[int, ...]
    dtype: np.dtype


# ---- the angles ----------------------------------------------------------------------------------


def rope_frequencies(
    width: int,
    *,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    length: int | None = None,
) -> Float[Array, "half"]:
    """θ_i of the r/2 pairs (Eq. 7.1), scaled by s:

        linear   θ_i / s  (Eq. 7.4)
        ntk      base · s^{r/(r-2)} for base: the first as it was, the last / s  (Eq. 7.5)
        dynamic  ntk with s L/L0 - (s - 1) for s once the length L passes L0  (Eq. 7.6)
        yarn     θ_i (1 - ramp_i) + θ_i / s · ramp_i  (Eq. 7.7)

    YaRN's ramp rises from 0 at the pair that turns `beta_fast` times within L0 (rounded down) to
    1 at the one that turns `beta_slow` times (rounded up). `dynamic` needs the length of the whole
    sequence, and another length turns the keys of a cache otherwise: compute those again.

    Raises
    ------
    TypeError, ValueError
        If the width is odd or below 2, the base not above 1, or the length missing or idle.
    """
    require_whole(2, width=width)
    if width % 2:
        raise ValueError(f"width is {width}: channels turn in pairs, so it must be even")
    if not 1 < base < math.inf:
        raise ValueError(f"base must be a number above 1, got {base}")
    dynamic = scaling is not None and scaling.kind == "dynamic"
    if length is None and dynamic:
        raise ValueError("kind='dynamic' depends on the length of the whole sequence: give length")
    if length is not None:
        if not dynamic:
            raise ValueError("length is for kind='dynamic' only: nothing else depends on it")
        require_whole(0, length=length)

    if scaling is not None and scaling.kind in ("ntk", "dynamic"):
        if width == 2:
            raise ValueError(f"kind={scaling.kind!r} needs a width of at least 4, got 2")
        s = scaling.factor
        if scaling.original is not None and length is not None:
            s = s * max(length, scaling.original) / scaling.original - (s - 1)
        base = base * s ** (width / (width - 2))
    theta = base ** -(np.arange(0, width, 2) / width)
    if scaling is None or scaling.kind in ("ntk", "dynamic"):
        return theta
    ramp = 1.0 if scaling.kind == "linear" else _ramp(scaling, width, base)
    return theta * (1 - ramp) + theta / scaling.factor * ramp


def _ramp(scaling: Scaling, width: int, base: float) -> Array:
    """0 for pairs that YaRN leaves alone, 1 for those that it slows down by the whole factor."""
    assert scaling.original is not None

    def pair_that_turns(times: float) -> float:
        """The real i with L0 θ_i = 2π · times."""
        ratio = scaling.original / (2 * math.pi * times)  # type: ignore[operator]
        return width * math.log(ratio) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(scaling.beta_slow)), width - 1)
    # the authors' guard against 0/0
    return np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0, 1)


def rope_tables(
    positions: Num[Array, "*P"],
    width: int,
    *,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    length: int | None = None,
    rotated: int | None = None,
) -> RopeTables:
    """cos and sin of p θ_i for any positions, (*P, r/2) each  (Eq. 7.1, Eq. 7.8)

    float64 throughout: an angle of a few thousand in float32 is wrong in the fourth digit, in
    bfloat16 it is noise. The rotation rounds once, at the end. `rotated` lets only so many of the
    channels turn, at the frequencies and in the pairs of the whole width ("proportional" partial
    rotation); for a head whose first r channels turn as if they were alone, give width = r.

    Raises
    ------
    TypeError, ValueError
        If positions are no finite numbers or stored in 16 bits, or an option does not fit (see
        `rope_frequencies`).
    """
    if not isinstance(positions, np.ndarray):
        raise TypeError(f"positions must be a NumPy array, got {type(positions).__name__}")
    whole = np.issubdtype(positions.dtype, np.integer)
    if not whole and positions.dtype not in (np.float32, np.float64):
        raise TypeError(
            "positions must be integers (or float32, float64: a narrower float cannot count far "
            f"enough), got dtype {positions.dtype}"
        )
    p = positions.astype(np.float64)
    if not np.isfinite(p).all():
        raise ValueError("positions must be finite")
    theta = rope_frequencies(width, base=base, scaling=scaling, length=length)
    if rotated is not None:
        require_whole(0, rotated=rotated)
        if rotated % 2 or rotated > width:
            raise ValueError(f"rotated must be even and at most width = {width}, got {rotated}")
        theta[rotated // 2 :] = 0
    angle = p[..., None] * theta
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return RopeTables(magnitude * np.cos(angle), magnitude * np.sin(angle))


# ---- the rotation --------------------------------------------------------------------------------


def rope_forward(
    x: Inexact[Array, "*B N D"],
    cos: Float[Array, "..."],
    sin: Float[Array, "..."],
    *,
    layout: str,
) -> tuple[Inexact[Array, "*B N D"], RopeCache]:
    """Turn each row of x by the angles of its position  (Eq. 7.2)

    The tables are (..., r/2) with r <= D, and broadcast to (*B, N, r/2): (N, r/2) for positions
    that all rows share, (B, 1, N, r/2) for those of each batch row, the same for all heads.

    Raises
    ------
    TypeError, ValueError
        If x is no floating array, the tables differ in shape, are wider than x or do not broadcast,
        or the layout is unknown.
    """
    require_array("x", x, min_ndim=2)
    _require_choice("layout", layout, LAYOUTS)
    for name, table in (("cos", cos), ("sin", sin)):
        require_array(name, table, min_ndim=1)
    if cos.shape != sin.shape:
        raise ValueError(f"sin has shape {sin.shape}, cos {cos.shape}: the two must agree")
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos has {cos.shape[-1]} pairs, x has {x.shape[-1]} channels: at most two for each"
        )
    require_broadcastable("cos", cos.shape[:-1], x.shape[:-1])
    # the tables in the arithmetic of x, so that float32 stays float32
    real = np.zeros(0, compute_dtype(x)).real.dtype
    c, s = cos.astype(real, copy=False), sin.astype(real, copy=False)
    return _turned(x, c, s, layout), RopeCache(c, s, layout, x.shape, x.dtype)


def rope_backward(dout: Inexact[Array, "*B N D"], cache: RopeCache) -> Inexact[Array, "*B N D"]:
    """dx_a = dy_a c_i + dy_b s_i,   dx_b = dy_b c_i - dy_a s_i: the negative angle  (Eq. 7.3)

    A rotation's transpose is its inverse; YaRN's magnitude stays, it is not divided out.

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    require_cotangent("dout", dout, cache.shape)
    return _turned(dout, cache.cos, -cache.sin, cache.layout).astype(cache.dtype, copy=False)


def _turned(x: Array, c: Array, s: Array, layout: str) -> Array:
    half = c.shape[-1]
    first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    if layout == "half":
        first, second = slice(half), slice(half, 2 * half)
    wide = compute_dtype(x)
    a, b = (x[..., part].astype(wide, copy=False) for part in (first, second))
    out = x.copy()  # the channels behind r stay what they are, bit for bit
    out[..., first], out[..., second] = a * c - b * s, a * s + b * c
    return out


# ---- from one layout to the other ----------------------------------------------------------------


def to_half_layout(
    weight: Inexact[Array, "..."], heads: int, *, rotary: int | None = None
) -> Inexact[Array, "..."]:
    """A projection (in, heads · D) or its bias (heads · D,), for rotation by halves instead of
    interleaved pairs: new channel i is old 2i, new i + r/2 is old 2i + 1, in every head  (Eq. 7.9)

    Convert the queries and the keys (with their own number of heads), not the values: then all
    scores are what they were. `rotary` is r, the whole head width D if not given.

    Raises
    ------
    TypeError, ValueError
        If the heads do not divide the last axis, or r is odd or larger than the head width.
    """
    return _permuted(weight, heads, rotary, inverse=False)


def to_interleaved_layout(
    weight: Inexact[Array, "..."], heads: int, *, rotary: int | None = None
) -> Inexact[Array, "..."]:
    """The inverse of `to_half_layout`  (Eq. 7.9); raises as that does."""
    return _permuted(weight, heads, rotary, inverse=True)


def _permuted(weight: Array, heads: int, rotary: int | None, *, inverse: bool) -> Array:
    require_array("weight", weight, min_ndim=1)
    require_whole(1, heads=heads)
    if weight.shape[-1] % heads:
        raise ValueError(f"heads is {heads}, which does not divide {weight.shape[-1]} channels")
    width = weight.shape[-1] // heads
    r = width if rotary is None else rotary
    require_whole(0, rotary=r)
    if r % 2 or r > width:
        raise ValueError(f"rotary must be even and at most the head width {width}, got {r}")
    order = np.concatenate([np.arange(0, r, 2), np.arange(1, r, 2), np.arange(r, width)])
    order = np.argsort(order) if inverse else order
    split = weight.reshape(*weight.shape[:-1], heads, width)
    return split[..., order].reshape(weight.shape)


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
