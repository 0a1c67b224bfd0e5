"""Narrow numbers: what float16 and bfloat16 can hold, and what each rounding does to attention.

    fl(x) = q · rint(x / q),   q = 2^(max(⌊log₂|x|⌋, e) - p + 1),   ±∞ if |fl(x)| > max  (Eq. 15.1)
    |fl(x) - x| <= 2^-p |x| where |x| >= 2^e  (Eq. 15.2)
    bfloat16 from float32: bits + 0x7FFF + (bit 16), then the lower half 0  (Eq. 15.3)
    Ŝ = fl_s(s fl_i(Q) fl_i(K)ᵀ),   P̂ = fl_p(softmax(Ŝ where keep)),
    Ô = fl_o(P̂ fl_i(V))  (Eq. 15.4)
    a_n = fl_a(a_{n-1} + fl_a(x_n y_n)): products summed in the narrow format  (Eq. 15.5)

               p    e      max
    float16    11   -14    65504         2^-11 = 0.05 %, overflows beyond 65519, loses below 2^-24
    bfloat16    8   -126   3.4 · 10^38   2^-8  = 0.4 %, the range of float32

rint rounds half to even. The library stores narrow numbers and computes in float32, so that inputs
are rounded before and results once at the end (steps `inputs` and `out`); what the others cost can
be seen here, one at a time: scores overflow in float16, weights lose digits before they meet the
values, and a sum of ones in bfloat16 ends at 256. Masked is *selected*, in every format: no number
is added to a score to hide it. arXiv:1710.03740; Eq. 15.3 is what PyTorch and TensorFlow do.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from minitransformer.arrays import Array, require_array, require_bool, require_broadcastable
from minitransformer.attention.dense import score_scale, score_shape
from minitransformer.attention.softmax import softmax_forward


class Format(NamedTuple):
    digits: int  # p, the leading 1 among them
    lowest: int  # e: below 2^e numbers are evenly spaced
    largest: float


FORMATS = {
    "float16": Format(11, -14, 65504.0),
    "bfloat16": Format(8, -126, float.fromhex("0x1.FEp127")),
}
# where attention may round: at its inputs, the scores, the weights, inside sums, at its output
STEPS = ("inputs", "scores", "weights", "sums", "out")


# ---- rounding ------------------------------------------------------------------------------------


def round_to(x: Float[Array, "*S"], name: str) -> Float[Array, "*S"]:
    """The nearest numbers that the format can hold, in the dtype of `x`  (Eq. 15.1)

    At once, and not through float32 first: two roundings may differ from one.

    Raises
    ------
    TypeError, ValueError
        If `x` is no array of float32 or float64, or the format is unknown.
    """
    _require_wide("x", x)
    digits, lowest, largest = _format(name)
    with np.errstate(invalid="ignore", over="ignore"):
        _, exponent = np.frexp(x)  # |x| = m 2^exponent, 1/2 <= m < 1
        place = np.maximum(exponent - 1, lowest) - digits + 1
        # in float64 every step of this is exact
        rounded = np.ldexp(np.rint(np.ldexp(x.astype(np.float64), -place)), place)
        rounded = np.where(np.abs(rounded) > largest, np.copysign(np.inf, rounded), rounded)
        return np.where(np.isfinite(x), rounded, x).astype(x.dtype)


def bfloat16_by_bits(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Eq. 15.1 for bfloat16, from float32, by adding to its bits  (Eq. 15.3)

    The carry of the addition is what rounds, into the next power of two or to infinity as well. NaN
    is left out: its lower bits could carry it to zero.

    Raises
    ------
    TypeError
        If `x` is no array of float32.
    """
    require_array("x", x)
    if x.dtype != np.float32:
        raise TypeError(f"x must hold float32, whose bits these are, got dtype {x.dtype}")
    bits = np.ascontiguousarray(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    nan = np.uint32(0x7FC00000) | (bits & np.uint32(0x80000000))
    return np.where(np.isnan(x), nan, rounded).view(np.float32).reshape(x.shape)


# ---- attention, step by step ---------------------------------------------------------------------


def emulated_attention(
    q: Float[Array, "*#B H N D"],
    k: Float[Array, "*#B G M D"],
    v: Float[Array, "*#B G M E"],
    *,
    formats: Mapping[str, str],
    keep: Bool[Array, "..."] | None = None,
    scale: float | None = None,
) -> Float[Array, "*B H N E"]:
    """Attention that rounds where `formats` says so, and nowhere else  (Eq. 15.4, Eq. 15.5)

    `formats` gives steps (inputs, scores, weights, sums, out) a format each. Numbers are float64,
    held on the grid of the format. With "sums" every product is added in turn: slow.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape, or a step or format is unknown.
    """
    shape = score_shape(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require_wide(name, x)
    for step, name in formats.items():
        if step not in STEPS:
            raise ValueError(f"formats has a step {step!r}: expected some of {', '.join(STEPS)}")
        _format(name)
    if keep is not None:
        require_bool("keep", keep)
        require_broadcastable("keep", keep.shape, shape)
    scale = score_scale(scale, q.shape[-1])

    def at(step: str, x: Array) -> Array:
        return round_to(x, formats[step]) if step in formats else x

    with np.errstate(invalid="ignore", over="ignore"):
        repeat = shape[-3] // k.shape[-3]
        q_, k_, v_ = (at("inputs", x.astype(np.float64)) for x in (q, k, v))
        k_, v_ = (np.repeat(x, repeat, axis=-3) for x in (k_, v_))
        allowed = np.broadcast_to(True if keep is None else keep, shape)
        scores = at("scores", _product(q_, k_.mT, formats.get("sums")) * scale)
        weights, _ = softmax_forward(np.where(allowed, scores, -np.inf), check_finite=False)
        weights = at("weights", weights)
        # a key that is masked for a row is not multiplied by 0, which NaN would survive
        seen = np.any(allowed, axis=-2)
        mixed = _product(weights, np.where(np.asarray(seen)[..., None], v_, 0), formats.get("sums"))
        return at("out", mixed)


def step_errors(
    q: Float[Array, "*#B H N D"],
    k: Float[Array, "*#B G M D"],
    v: Float[Array, "*#B G M E"],
    *,
    name: str,
    keep: Bool[Array, "..."] | None = None,
    scale: float | None = None,
) -> dict[str, float]:
    """What each step costs if it alone is in the format `name`, and "all" of them: the error of the
    output relative to its norm; infinite where something overflows.

    Raises
    ------
    TypeError, ValueError
        As `emulated_attention`.
    """
    exact = emulated_attention(q, k, v, formats={}, keep=keep, scale=scale)
    norm = float(np.linalg.norm(exact)) or 1.0
    found = {}
    for steps in (*((step,) for step in STEPS), STEPS):
        formats = dict.fromkeys(steps, name)
        out = emulated_attention(q, k, v, formats=formats, keep=keep, scale=scale)
        off = float(np.linalg.norm(out - exact)) / norm
        found[steps[0] if len(steps) == 1 else "all"] = off if math.isfinite(off) else math.inf
    return found


def _product(a: Array, b: Array, name: str | None) -> Array:
    """a @ b, summed in the format `name` in the order of the terms  (Eq. 15.5)"""
    if name is None:
        return a @ b
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
    for n in range(a.shape[-1]):
        term = round_to(a[..., :, n, None] * b[..., n, None, :], name)
        total = round_to(total + term, name)
    return total


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def _require_wide(name: str, x: Array) -> None:
    require_array(name, x)
    if x.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must hold float32 or float64, got dtype {x.dtype}")
