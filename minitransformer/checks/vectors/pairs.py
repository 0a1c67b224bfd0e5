"""Who may attend to whom, pair by pair, from the words of a case: no mask of the library has a part
in it."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from minitransformer.arrays import Array
from minitransformer.checks.vectors.exact import Exact
from minitransformer.checks.vectors.operation import Options, When, source


def score_shape(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """(*B, H, N, M)"""
    q, k, v = (np.shape(inputs[name]) for name in "qkv")
    return (*np.broadcast_shapes(q[:-3], k[:-3], v[:-3]), q[-3], q[-2], k[-2])


def allowed_pairs(inputs: Mapping[str, Any], options: Options, when: When) -> Array:
    """(*B, H, N, M), True = may attend."""
    shape = score_shape(inputs)
    n, m = shape[-2:]
    o = m - n if when.get("causal", "lower_right") == "lower_right" else 0
    left, after = options.get("window", (-1, -1))
    allowed = np.ones(shape, bool)
    for index in np.ndindex(shape):
        i, j = index[-2] + o, index[-1]
        allowed[index] = not (
            (options.get("causal") and j > i)
            or (left >= 0 and i - j > left)
            or (after >= 0 and j - i > after)
            or ("keep" in inputs and not inputs["keep"][source(index, inputs["keep"].shape)])
            or ("bias" in inputs and _hidden(inputs["bias"][source(index, inputs["bias"].shape)]))
        )
    return allowed


def _hidden(bias: Any) -> bool:
    return not isinstance(bias, Exact) and float(bias) == -math.inf
