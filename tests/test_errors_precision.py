"""What narrow formats say to bad input: the argument, what was expected, what came."""

import numpy as np
import pytest

from minitransformer.attention.precision import (
    bfloat16_by_bits,
    emulated_attention,
    round_to,
    step_errors,
)

pytestmark = pytest.mark.usefixtures("own_errors")

X = np.ones((1, 2, 3))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: round_to([1.0], "float16"), TypeError, "x must be a NumPy array, got list"),
        (lambda: round_to(X, "fp8"), ValueError, "format must be one of float16, .* got 'fp8'"),
        (
            lambda: round_to(X.astype(np.float16), "bfloat16"),
            TypeError,
            "x must hold float32 or float64, got dtype float16",
        ),
        (lambda: bfloat16_by_bits(X), TypeError, "x must hold float32, .* got dtype float64"),
        (
            lambda: emulated_attention(X, X, X, formats={"softmax": "float16"}),
            ValueError,
            "formats has a step 'softmax': expected some of inputs, scores, weights, sums, out",
        ),
        (
            lambda: emulated_attention(X, X, X, formats={"out": "half"}),
            ValueError,
            "format must be one of float16, bfloat16, got 'half'",
        ),
        (
            lambda: emulated_attention(X, X[..., :2], X, formats={}),
            ValueError,
            "k has head width 2, q has 3",
        ),
        (
            lambda: emulated_attention(X, X, X, formats={}, keep=np.ones(2)),
            TypeError,
            "keep must be a boolean array",
        ),
        (
            lambda: emulated_attention(X, X, X, formats={}, keep=np.ones(3, bool)),
            ValueError,
            r"keep has shape \(3,\), which does not broadcast to \(1, 2, 2\)",
        ),
        (lambda: step_errors(X, X, X, name="int8"), ValueError, "format must be one of"),
    ],
)
def test_formats_and_steps_are_known(call, error, message):
    with pytest.raises(error, match=message):
        call()
