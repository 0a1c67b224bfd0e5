"""Hypothesis strategies for shapes, values and masks.

Sizes are hostile on purpose: 0 and 1, primes, N != M, D != E. Values come from a drawn seed rather
than one by one: that is fast, and shrinking the shape is what makes a counter-example small.
"""

from typing import Any

import ml_dtypes  # so that NumPy knows bfloat16 by its name, too
import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.checks import tolerances

seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([1, 2, 3, 5, 7])
sizes_or_empty = st.sampled_from([1, 2, 3, 5, 7, 0])
leading_axes = st.sampled_from([(), (1,), (2,), (2, 3), (0,)])
# ±30 saturates softmax and still has a gradient worth checking
magnitudes = st.sampled_from([0.5, 3.0, 30.0])


def held(x: Any) -> Any:
    """A number or array rounded to what the dtype of the target can hold, in float64."""
    narrow = np.asarray(x).astype(np.dtype(tolerances.working_dtype()))
    return narrow.astype(np.float64)[()]


def reachable(far: float) -> float:
    """`far`, or what the dtype of the target holds with room to spare."""
    most = float(ml_dtypes.finfo(tolerances.working_dtype()).max) / 8
    return float(held(min(far, most)))


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Array:
    """Standard normal numbers times `scale`, rounded to three decimals so that a person can read
    them, and to what the dtype of the target can hold, so that it computes on the same numbers."""
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(held(np.round(drawn * scale, 3)))


@st.composite
def rows(draw, *, min_size: int = 0, magnitude=magnitudes) -> Array:
    """Scores of shape (*leading, M), of any magnitude, sometimes with masked (-inf) entries and
    dead rows."""
    shape = (*draw(leading_axes), draw(sizes_or_empty if min_size == 0 else sizes))
    seed = draw(seeds)
    x = normal(shape, seed, draw(magnitude))
    if draw(st.booleans()):
        masked = np.random.default_rng([seed, 1]).random(shape) < draw(
            st.sampled_from([0.3, 0.8, 1.0])
        )
        x = np.where(masked, -np.inf, x)
    return x


@st.composite
def finite_rows(draw, *, magnitude=magnitudes) -> Array:
    """Scores of shape (*leading, M), M >= 1, all finite."""
    return normal((*draw(leading_axes), draw(sizes)), draw(seeds), draw(magnitude))
