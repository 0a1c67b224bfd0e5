"""What optimisers and learning rates say to bad input: the argument, what was expected, what came.
Settings and files have their own, in test_training.py."""

import math
import re

import numpy as np
import pytest

from minitransformer.nn.module import Parameter
from minitransformer.training.optimisers import AdamW, adamw_update, clip
from minitransformer.training.rates import cosine_rate, inverse_root_rate

ONES = np.ones((2, 3))


def model():
    parameter = Parameter(ONES.copy(), decay=True)
    parameter.grad[...] = 0.5
    return {"w": parameter}


# ---- AdamW ---------------------------------------------------------------------------------------

SETTINGS = [
    (
        {"betas": (1.0, 0.999)},
        r"betas[0] must lie in [0, 1), got 1.0: at 1 nothing is ever learned",
    ),
    ({"betas": (0.9, -0.1)}, "betas[1] must lie in [0, 1), got -0.1"),
    ({"betas": (0.9, math.nan)}, "betas[1] must lie in [0, 1), got nan"),
    ({"weight_decay": -0.1}, "weight_decay must be finite and at least 0, got -0.1"),
    ({"weight_decay": math.inf}, "weight_decay must be finite and at least 0, got inf"),
    ({"eps": -1e-8}, "eps must be finite and at least 0, got -1e-08"),
    ({"eps": math.nan}, "eps must be finite and at least 0, got nan"),
]


@pytest.mark.parametrize("given, message", SETTINGS)
def test_an_optimiser_names_the_setting(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AdamW(model(), **given)
    with pytest.raises(ValueError, match=re.escape(message)):
        adamw_update(ONES, ONES, ONES, ONES, step=1, rate=0.1, **given)


@pytest.mark.parametrize("rate", [-1e-3, math.nan, math.inf])
def test_a_rate_out_of_range_moves_no_weight(rate):
    parameters = model()
    optimiser = AdamW(parameters)
    with pytest.raises(ValueError, match=f"rate must be finite and at least 0, got {rate}"):
        optimiser.step(rate)
    assert optimiser.updates == 0
    assert np.array_equal(parameters["w"].value, ONES)
    with pytest.raises(ValueError, match="rate must be finite"):
        adamw_update(ONES, ONES, ONES, ONES, step=1, rate=rate)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"value": [1.0]}, TypeError, "value must be a NumPy array, got list"),
        (
            {"value": ONES.astype(int)},
            TypeError,
            "value must hold floating-point numbers, got dtype",
        ),
        ({"grad": 0.0}, TypeError, "grad must be a NumPy array, got float"),
        ({"grad": ONES[0]}, ValueError, "grad has shape (3,), value (2, 3): they must agree"),
        ({"mean": ONES.T}, ValueError, "mean has shape (3, 2), value (2, 3): they must agree"),
        (
            {"square": ONES[:1]},
            ValueError,
            "square has shape (1, 3), value (2, 3): they must agree",
        ),
        ({"step": 0}, ValueError, "step must be counted from 1, got 0"),
    ],
)
def test_an_update_names_the_argument(given, error, message):
    arrays = dict.fromkeys(("value", "grad", "mean", "square"), ONES)
    with pytest.raises(error, match=re.escape(message)):
        adamw_update(**{**arrays, "step": 1, "rate": 0.1, **given})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mean.w": None}, "state lacks 'mean.w': it is that of another model"),
        ({"step": None}, "state lacks 'step'"),
        ({"square.w": ONES.T}, "state['square.w'] has shape (3, 2), expected (2, 3)"),
        ({"square.w": ONES[0]}, "state['square.w'] has shape (3,), expected (2, 3)"),
    ],
)
def test_the_state_of_another_model_is_refused_whole(change, message):
    """A row would broadcast, and a half read state is worse than none."""
    optimiser = AdamW(model())
    optimiser.step(0.1)
    before = {name: np.array(x) for name, x in optimiser.state().items()}
    state = {name: x + 1 for name, x in before.items()} | change
    state = {name: x for name, x in state.items() if x is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        optimiser.load_state(state)
    after = optimiser.state()
    assert all(np.array_equal(after[name], x) for name, x in before.items())


# ---- clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_a_limit_below_nothing_is_refused(limit):
    parameters = model()
    with pytest.raises(ValueError, match=rf"limit must be at least 0 \(0: no limit\), got {limit}"):
        clip(parameters, limit)
    assert (parameters["w"].grad == 0.5).all()


# ---- rates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, message",
    [
        ({"step": -1}, "step must be >= 0, steps >= 1 and 0 <= warmup <= steps, got -1, 10, 2"),
        ({"step": math.nan}, "step must be >= 0"),
        ({"steps": 0}, "steps >= 1 and 0 <= warmup <= steps, got 3, 0, 2"),
        ({"warmup": 11}, "0 <= warmup <= steps, got 3, 10, 11"),
        ({"warmup": -1}, "0 <= warmup <= steps, got 3, 10, -1"),
        ({"peak": -0.1}, "peak must be finite and at least 0, got -0.1"),
        ({"peak": math.nan}, "peak must be finite and at least 0, got nan"),
        ({"peak": math.inf}, "peak must be finite and at least 0, got inf"),
        ({"final_fraction": 1.5}, "final_fraction must lie in [0, 1], got 1.5"),
        ({"final_fraction": math.nan}, "final_fraction must lie in [0, 1], got nan"),
    ],
)
def test_a_cosine_rate_names_the_argument(given, message):
    given = {"step": 3, "peak": 0.1, "steps": 10, "warmup": 2, **given}
    with pytest.raises(ValueError, match=re.escape(message)):
        cosine_rate(given.pop("step"), **given)


@pytest.mark.parametrize(
    "given, got",
    [({"step": -1}, "-1, 8, 4"), ({"width": 0}, "3, 0, 4"), ({"warmup": 0}, "3, 8, 0")],
)
def test_an_inverse_root_rate_names_the_argument(given, got):
    given = {"step": 3, "width": 8, "warmup": 4, **given}
    message = f"step must be >= 0, width and warmup >= 1, got {got}"
    with pytest.raises(ValueError, match=message):
        inverse_root_rate(given.pop("step"), **given)
