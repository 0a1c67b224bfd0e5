"""What loss scaling says to bad input: the argument, what was expected, what came."""

import numpy as np
import pytest

from minitransformer.training.loss_scale import LossScale, next_scale, unscaled

pytestmark = pytest.mark.usefixtures("own_errors")

GRAD = np.ones(3)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: unscaled([1.0], 2.0), TypeError, "grad must be a NumPy array, got list"),
        (lambda: unscaled(GRAD, 3.0), ValueError, "scale must be a power of two from 1 on, got 3"),
        (lambda: unscaled(GRAD, 0.5), ValueError, "scale must be a power of two from 1 on"),
        (lambda: unscaled(GRAD, np.inf), ValueError, "scale must be a power of two .*, got inf"),
        (
            lambda: next_scale(LossScale(), True, patience=0),
            ValueError,
            "patience must be at least 1, got 0",
        ),
        (
            lambda: next_scale(LossScale(), True, largest=100.0),
            ValueError,
            "largest must be a power of two from 1 on, got 100",
        ),
    ],
)
def test_scales_are_powers_of_two(call, error, message):
    with pytest.raises(error, match=message):
        call()
