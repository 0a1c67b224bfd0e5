"""The one table of tolerances. Each has a reason; none is loosened to make a check pass."""

import contextlib
import contextvars
from collections.abc import Iterator

# float64, forward: a few hundred roundings of 1.1e-16, relative to the norm of the array.
FORWARD = 1e-12
# float64, backward against the complex step, which has no truncation error (1e-15 was measured).
BACKWARD = 1e-10
# float64, backward against six-point central differences, for targets that do not take complex
# numbers (1e-11 measured).
BACKWARD_DIFFERENCES = 1e-8
# float64, a whole two-layer model in random directions by complex step: many more roundings, one
# projection (1e-13 measured); and by six-point differences.
MODEL = 1e-10
MODEL_DIFFERENCES = 1e-8
# float32 against float64, relative to the norm: 6e-8 a rounding, sums of up to a few thousand
# terms.
FLOAT32 = 1e-5
# float16 and bfloat16: one rounding of the result, u = 2⁻¹¹ and 2⁻⁸, and rounded inputs.
FLOAT16 = 2e-3
BFLOAT16 = 1.6e-2


def of_dtype(name: str) -> float:
    """The forward tolerance of a storage dtype, by its name."""
    return {
        "float64": FORWARD,
        "float32": FLOAT32,
        "float16": FLOAT16,
        "bfloat16": BFLOAT16,
    }[name]


# ---- targets that compute in another dtype -------------------------------------------------------

# What a third party's function may be off by, relative to the largest expected entry, if all it has
# is this dtype: scores reach ±100 and amplify a rounding of 6e-8 by as much; float16 and bfloat16
# targets compute in float32 and round inputs (which are drawn representable) and result.
WORKING = {"float64": 0.0, "float32": 1e-4, "float16": 2 * FLOAT16, "bfloat16": 2 * BFLOAT16}

_working: contextvars.ContextVar[str] = contextvars.ContextVar("working", default="float64")


@contextlib.contextmanager
def working_in(dtype: str) -> Iterator[None]:
    """Judge targets that compute in `dtype`: tolerances are never below what it allows."""
    token = _working.set(dtype)
    try:
        yield
    finally:
        _working.reset(token)


def working_dtype() -> str:
    """The dtype that targets compute in: float64 unless `working_in` says otherwise."""
    return _working.get()


def at_least(tolerance: float) -> float:
    """`tolerance`, or what the working dtype allows if that is more."""
    return max(tolerance, WORKING[_working.get()])
