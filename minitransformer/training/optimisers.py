"""AdamW, and clipping of the whole gradient.

    m = β1 m + (1 - β1) g,   s = β2 s + (1 - β2) g²  (Eq. 16.20)
    θ = θ (1 - η λ) - η m̂ / (√ŝ + ε),   m̂ = m / (1 - β1ᵗ),   ŝ = s / (1 - β2ᵗ)  (Eq. 16.21)

t counts updates from 1. Weight decay λ acts on the weight and not through the gradient, where it
would be divided by √ŝ; biases, norms and embeddings have none. arXiv:1412.6980, arXiv:1711.05101.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from minitransformer.arrays import Array, compute_dtype, require_array
from minitransformer.nn.module import Parameter


class AdamWUpdate(NamedTuple):
    value: Float[Array, "..."]
    mean: Float[Array, "..."]
    square: Float[Array, "..."]


def adamw_update(
    value: Float[Array, "..."],
    grad: Float[Array, "..."],
    mean: Float[Array, "..."],
    square: Float[Array, "..."],
    *,
    step: int,
    rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    eps: float = 1e-8,
) -> AdamWUpdate:
    """One update of one array  (Eq. 16.20, Eq. 16.21); nothing is changed in place.

    Raises
    ------
    TypeError, ValueError
        If an argument is no floating array, the shapes differ, `step` is not counted from 1, or a
        number is out of range.
    """
    require_array("value", value)
    for name, x in (("grad", grad), ("mean", mean), ("square", square)):
        require_array(name, x)
        if x.shape != value.shape:
            raise ValueError(f"{name} has shape {x.shape}, value {value.shape}: they must agree")
    if step < 1:
        raise ValueError(f"step must be counted from 1, got {step}: the bias correction needs it")
    _require_settings(betas, weight_decay, eps)
    _require_rate(rate)
    beta1, beta2 = betas
    mean = beta1 * mean + (1 - beta1) * grad
    square = beta2 * square + (1 - beta2) * grad * grad
    unbiased = math.sqrt(1 - beta2**step)
    change = mean / (np.sqrt(square) / unbiased + eps)
    value = value * (1 - rate * weight_decay) - (rate / (1 - beta1**step)) * change
    # a number is an array without axes: NumPy's arithmetic made it a scalar
    return AdamWUpdate(np.asarray(value), np.asarray(mean), np.asarray(square))


def _require_settings(betas: tuple[float, float], weight_decay: float, eps: float) -> None:
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {beta}: at 1 nothing is ever learned")
    for name, x in (("weight_decay", weight_decay), ("eps", eps)):
        if not 0 <= x < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {x}")


def _require_rate(rate: float) -> None:
    if not 0 <= rate < math.inf:
        raise ValueError(f"rate must be finite and at least 0, got {rate}")


class AdamW:
    """The optimiser of a model: two moments for each parameter, and one count of updates.

    A parameter that is stored in float16 or bfloat16 has a master of float32 here, which learns and
    is rounded into it: most updates are smaller than half a unit of the narrow number and would be
    lost. Moments are never narrow.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ):
        _require_settings(betas, weight_decay, eps)
        self.parameters = dict(parameters)
        self.betas, self.weight_decay, self.eps = betas, weight_decay, eps
        self.updates = 0
        wide = {name: compute_dtype(p.value) for name, p in self.parameters.items()}
        self.master = {
            name: p.value.astype(wide[name])
            for name, p in self.parameters.items()
            if p.value.dtype.itemsize == 2
        }
        self.mean = {name: np.zeros(p.value.shape, wide[name]) for name, p in parameters.items()}
        self.square = {name: np.zeros(p.value.shape, wide[name]) for name, p in parameters.items()}

    def step(self, rate: float) -> None:
        """Update every parameter by its gradient, in the array that it has.

        Raises
        ------
        ValueError
            If `rate` is negative or not finite: nothing is changed then.
        """
        _require_rate(rate)
        self.updates += 1
        for name, p in self.parameters.items():
            new = adamw_update(
                self.master.get(name, p.value),
                p.grad,
                self.mean[name],
                self.square[name],
                step=self.updates,
                rate=rate,
                betas=self.betas,
                weight_decay=self.weight_decay if p.decay else 0.0,
                eps=self.eps,
            )
            p.value[...] = new.value  # a narrow one is rounded
            if name in self.master:
                self.master[name] = new.value
            self.mean[name], self.square[name] = new.mean, new.square

    def state(self) -> dict[str, Array]:
        """Everything the next update depends on, besides the parameters, and the masters of those
        that are narrow."""
        means = {f"mean.{name}": x for name, x in self.mean.items()}
        squares = {f"square.{name}": x for name, x in self.square.items()}
        masters = {f"master.{name}": x for name, x in self.master.items()}
        return {"step": np.array(self.updates), **means, **squares, **masters}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Continue from what `state()` gave.

        Raises
        ------
        ValueError
            If it lacks an array, or one has another shape: nothing is changed then.
        """
        for key, x in self.state().items():
            if key not in state:
                raise ValueError(f"state lacks {key!r}: it is that of another model")
            if state[key].shape != x.shape:
                raise ValueError(f"state[{key!r}] has shape {state[key].shape}, expected {x.shape}")
        self.updates = int(state["step"])
        for name, p in self.parameters.items():  # copies: what was read stays as it is
            self.mean[name] = np.array(state[f"mean.{name}"], dtype=compute_dtype(p.value))
            self.square[name] = np.array(state[f"square.{name}"], dtype=compute_dtype(p.value))
            if name in self.master:
                self.master[name] = np.array(state[f"master.{name}"], dtype=compute_dtype(p.value))
                p.value[...] = self.master[name]


def gradient_norm(parameters: Mapping[str, Parameter]) -> float:
    """The Euclidean norm of all gradients taken together, accumulated in float64."""
    total = 0.0
    for p in parameters.values():
        g = p.grad.ravel().astype(np.float64, copy=False)
        total += float(g @ g)
    return math.sqrt(total)


def clip(parameters: Mapping[str, Parameter], limit: float) -> float:
    """Scale all gradients by min(1, limit / (norm + 1e-6)) and return the norm before  (Eq. 16.22)

    One factor for all of them keeps the direction. `limit` 0 means no limit. A norm that is not
    finite leaves the gradients alone: the caller skips the step and counts it. arXiv:1211.5063.
    """
    if not limit >= 0:
        raise ValueError(f"limit must be at least 0 (0: no limit), got {limit}")
    norm = gradient_norm(parameters)
    if limit and math.isfinite(norm) and norm > limit:
        for p in parameters.values():
            p.grad *= min(1.0, limit / (norm + 1e-6))
    return norm
