"""Loss scaling: gradients that float16 would round to 0 are carried through it S times larger.

    g = (1/S) ∇(S L)  (Eq. 15.6)
    a gradient that is not finite:  S ← max(S / 2, 1),  n ← 0,  and the step is skipped  (Eq. 15.7)
    else n ← n + 1;  at n = patience:  S ← min(2 S, S_max),  n ← 0  (Eq. 15.8)

float16 has nothing below 2^-24, and gradients of activations are often smaller. S is a power of
two, so scaling moves no digit; the division happens in float32, before anything looks at the
gradient's norm. S grows until something overflows and is halved then: a skipped step now and then
is part of the method. bfloat16 has the range of float32 and needs none of it. arXiv:1710.03740.
"""

import math
from typing import NamedTuple

from jaxtyping import Float

from minitransformer.arrays import Array, compute_dtype, require_array, require_whole

LARGEST = 2.0**24


class LossScale(NamedTuple):
    """S, and how many steps have been finite since it last changed."""

    scale: float = 2.0**16
    good: int = 0


def unscaled(grad: Float[Array, "*S"], scale: float) -> Float[Array, "*S"]:
    """The gradient of the loss itself, never narrower than float32  (Eq. 15.6)

    Raises
    ------
    TypeError, ValueError
        If `grad` is no floating array, or the scale is no power of two from 1 on.
    """
    require_array("grad", grad)
    _require_scale(scale)
    wide = grad.astype(compute_dtype(grad), copy=False)
    return wide * wide.dtype.type(1 / scale)


def next_scale(
    state: LossScale, finite: bool, *, patience: int = 200, largest: float = LARGEST
) -> LossScale:
    """The scale of the next step, after one whose gradient was `finite` or not  (Eq. 15.7 - 15.8)

    Raises
    ------
    TypeError, ValueError
        If the patience is no whole number from 1 on, or a scale no power of two from 1 on.
    """
    require_whole(1, patience=patience)
    _require_scale(state.scale)
    _require_scale(largest, "largest")
    if not finite:
        return LossScale(max(state.scale / 2, 1.0), 0)
    if state.good + 1 < patience:
        return LossScale(state.scale, state.good + 1)
    return LossScale(min(2 * state.scale, max(largest, state.scale)), 0)


def _require_scale(scale: float, name: str = "scale") -> None:
    if not (math.isfinite(scale) and scale >= 1 and math.frexp(scale)[0] == 0.5):
        raise ValueError(f"{name} must be a power of two from 1 on, got {scale}")
