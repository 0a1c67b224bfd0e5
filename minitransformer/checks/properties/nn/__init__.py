"""What the properties of this floor share: awkward views, storage dtypes, one rounding."""

import numpy as np
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from minitransformer.arrays import Array
from minitransformer.checks import tolerances
from minitransformer.checks.strategies import normal

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": bfloat16}
dtypes = st.sampled_from(list(DTYPES))


def entries(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Array:
    """Normal numbers in a view whose memory is not in the order of its axes."""
    return normal(shape[::-1], seed, scale).T


def assert_rounded_once(got: Array, expected: Array, dtype: str, what: str = "result") -> None:
    """Raise an AssertionError unless `got` has that dtype and is what float32 (or float64) gives,
    stored narrow once: half a unit of each entry, beside the error of the wider arithmetic."""
    assert got.dtype == DTYPES[dtype], f"{what}: got dtype {got.dtype}, expected {dtype}"
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 0.0)
    wide = tolerances.at_least(tolerances.of_dtype("float64" if dtype == "float64" else "float32"))
    largest = max(1.0, float(np.abs(expected).max(initial=0)))
    error = np.abs(got.astype(np.float64) - expected)
    assert (error <= unit * np.abs(expected) + wide * largest).all(), (
        f"{what} in {dtype}: an error of {error.max():.1e} is more than one rounding"
    )
