"""The one table of tolerances. Each has a reason; none is loosened to make a check pass."""

# float64, forward: a few hundred roundings of 1.1e-16, relative to the norm of the array.
FORWARD = 1e-12
# float64, backward against the complex step, which has no truncation error (1e-15 was measured).
BACKWARD = 1e-10
# float64, backward against six-point central differences, for targets that do not take complex
# numbers (1e-11 measured).
BACKWARD_DIFFERENCES = 1e-8
# float64, a whole two-layer model in random directions: many more roundings, one projection.
MODEL = 1e-8
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
