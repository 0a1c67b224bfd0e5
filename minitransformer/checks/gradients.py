"""Is a backward pass the derivative of its forward pass?

Take a random cotangent dy and look at the scalar L(x) = Σ dy ⊙ f(x). The backward pass claims
dL/dx. Two ways to know:

    complex step         dL/dx_k = Im L(x + i·h·e_k) / h,   h = 1e-30           exact to rounding, f
    must be analytic
    six-point difference dL/dx_k = Σ_s w_s L(x + s·h·e_k) / h                    error O(h⁶), any
    smooth f

A random cotangent, because the loss Σ softmax(x) has gradient zero and would let any mistake pass;
every index, because a mistake at the border hides from a sample. Errors are relative to the norm of
the whole array. Squire & Trapp, SIAM Review 40 (1998).
"""

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from minitransformer.arrays import Array
from minitransformer.checks import tolerances
from minitransformer.checks.suite import NotApplicable

# weights of f(x + s·h) for the sixth-order first derivative
SIX_POINT = ((1, 45 / 60), (2, -9 / 60), (3, 1 / 60))


class Observation(NamedTuple):
    """One gradient that was checked: whose, how wrong, how wrong it may be."""

    name: str
    error: float
    limit: float


_observer: contextvars.ContextVar[list[Observation] | None] = contextvars.ContextVar(
    "observer", default=None
)


@contextlib.contextmanager
def observed() -> Iterator[list[Observation]]:
    """Collect what every `assert_gradients` inside the block measures: the rows of a table."""
    found: list[Observation] = []
    token = _observer.set(found)
    try:
        yield found
    finally:
        _observer.reset(token)


def cotangent(like: Array, seed: int) -> Array:
    """Random standard normal numbers in the shape of `like`."""
    return np.random.default_rng([seed, 0xC07]).standard_normal(np.shape(like))


def complex_step(loss: Callable[[Array], Any], x: Array, *, h: float = 1e-30) -> Array:
    """The gradient of an analytic scalar function at `x`, index by index."""
    gradient = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        moved = x.astype(np.complex128)
        moved[index] += 1j * h
        gradient[index] = np.imag(loss(moved)) / h
    return gradient


def central_difference(loss: Callable[[Array], Any], x: Array, *, h: float = 2e-3) -> Array:
    """The gradient of a smooth scalar function at `x` by six-point differences, index by index."""
    gradient = np.zeros(x.shape)
    for index in np.ndindex(x.shape):
        for s, weight in SIX_POINT:
            for sign in (1, -1):
                moved = x.copy()
                moved[index] += sign * s * h
                gradient[index] += sign * weight * loss(moved) / h
    return gradient


def relative_error(got: Array, expected: Array, *, floor: float = 1.0) -> float:
    """‖got - expected‖ / max(‖expected‖, floor): entry by entry means nothing beside a saturated
    softmax."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, f"got shape {got.shape}, expected {expected.shape}"
    if got.size == 0:
        return 0.0
    norm = float(
        np.linalg.norm(np.asarray(expected, dtype=np.result_type(expected, np.float64)).ravel())
    )
    return float(np.linalg.norm((got - expected).ravel())) / max(norm, floor)


def gradient_errors(
    forward: Callable[..., Array],
    gradients: Mapping[str, Array],
    inputs: Mapping[str, Array],
    dout: Array,
    *,
    analytic: bool = True,
) -> dict[str, float]:
    """The relative error of each claimed gradient.

    `forward(**inputs)` returns the output alone; `gradients` maps the names of the inputs to what
    the backward pass says. `analytic=False` uses six-point differences: for targets that do not
    take complex arrays.
    """
    numeric = numerical_gradients(forward, gradients, inputs, dout, analytic=analytic)
    return {name: relative_error(gradients[name], expected) for name, expected in numeric.items()}


def numerical_gradients(
    forward: Callable[..., Array],
    names: Iterable[str],
    inputs: Mapping[str, Array],
    dout: Array,
    *,
    analytic: bool = True,
) -> dict[str, Array]:
    """The gradient of (dout · forward(**inputs)).sum() for each named input, index by index."""
    found = {}
    for name in names:

        def loss(x: Array, name: str = name) -> Any:
            return (dout * forward(**{**inputs, name: x})).sum()

        found[name] = (complex_step if analytic else central_difference)(loss, inputs[name])
    return found


def assert_gradients(
    forward: Callable[..., Array],
    gradients: Mapping[str, Array],
    inputs: Mapping[str, Array],
    dout: Array,
) -> None:
    """Raise an AssertionError naming each input whose gradient is wrong.

    The complex step is used where the target takes complex arrays; else, six-point differences with
    their own tolerance. A target that computes in less than float64 cannot be asked.
    """
    if tolerances.working_dtype() != "float64":
        raise NotApplicable("a numerical derivative needs float64")
    limit = tolerances.BACKWARD
    try:
        numeric = numerical_gradients(forward, gradients, inputs, dout)
    except (TypeError, np.exceptions.ComplexWarning):
        numeric = numerical_gradients(forward, gradients, inputs, dout, analytic=False)
        limit = tolerances.BACKWARD_DIFFERENCES
    wrong = []
    for name, expected in numeric.items():
        error = relative_error(gradients[name], expected)
        _observe(name, error, limit)
        if not error <= limit:
            worst = _worst(np.asarray(gradients[name]), expected)
            wrong.append(
                f"gradient of {name}: {worst}relative error {error:.1e}, allowed {limit:.0e}"
            )
    assert not wrong, "; ".join(wrong)


def _worst(got: Array, expected: Array) -> str:
    """The entry that is furthest off, in words."""
    far = np.abs(got - expected)
    place = np.unravel_index(np.argmax(np.where(np.isnan(far), np.inf, far)), far.shape)
    at = tuple(int(i) for i in place)
    return f"at index {at} got {got[at]:.6g}, expected {expected[at]:.6g}; "


def assert_parameter_gradients(
    loss: Callable[[], Any], parameters: Mapping[str, Any], seed: int
) -> None:
    """Raise an AssertionError naming each parameter array whose `.grad` is not the derivative of
    `loss()` with respect to its `.value`, along a random direction of unit length.

    Every index would be too many for a whole model. By complex step where the loss comes out
    complex, else by six-point differences with their own tolerance; the values are moved and put
    back. Errors are relative to what a random direction sees of the gradient, ‖g‖/√n.
    """
    wrong = []
    for number, (name, parameter) in enumerate(parameters.items()):
        value, grad = parameter.value, parameter.grad
        if not value.size:
            continue
        direction = np.random.default_rng([seed, number]).standard_normal(value.shape)
        direction /= np.linalg.norm(direction)
        numeric, limit = _along_by_complex_step(loss, parameter, direction), tolerances.MODEL
        if numeric is None:
            numeric = _along_by_differences(loss, parameter, direction)
            limit = tolerances.MODEL_DIFFERENCES
        seen = max(float(np.linalg.norm(grad)) / np.sqrt(value.size), 1e-3)
        error = abs(float((grad * direction).sum()) - numeric) / seen
        _observe(name, error, limit)
        if not error <= limit:
            wrong.append(f"gradient of {name}: relative error {error:.1e}, allowed {limit:.0e}")
    assert not wrong, "; ".join(wrong)


def _along_by_complex_step(
    loss: Callable[[], Any], parameter: Any, direction: Array, h: float = 1e-30
) -> float | None:
    """None if the loss does not take a complex value of this parameter."""
    start = parameter.value
    parameter.value = start + 1j * h * direction
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", np.exceptions.ComplexWarning)
            moved = loss()
    except (TypeError, np.exceptions.ComplexWarning):
        return None
    finally:
        parameter.value = start
    return float(np.imag(moved)) / h if np.iscomplexobj(moved) else None


def _along_by_differences(
    loss: Callable[[], Any], parameter: Any, direction: Array, h: float = 2e-3
) -> float:
    value, start, numeric = parameter.value, parameter.value.copy(), 0.0
    for s, weight in SIX_POINT:
        for sign in (1, -1):
            value[...] = start + sign * s * h * direction
            numeric += sign * weight * float(loss()) / h
    value[...] = start
    return numeric


def _observe(name: str, error: float, limit: float) -> None:
    found = _observer.get()
    if found is not None:
        found.append(Observation(name, error, limit))


class Disagreement(AssertionError):
    """Two arrays differ: where most, by how much, in how many entries."""

    def __init__(self, what: str, at: tuple[int, ...], got: Array, expected: Array, wrong: Array):
        super().__init__(
            f"{what}: at index {at} got {got[at]}, expected {expected[at]} "
            f"({wrong.sum()} of {wrong.size} entries differ)"
        )
        self.what, self.at, self.wrong = what, at, wrong
        self.got, self.expected = got[at], expected[at]

    @property
    def ulps(self) -> float:
        """The difference in units of the last place of the working dtype at the expected value."""
        unit = float(ml_dtypes.finfo(tolerances.working_dtype()).eps)
        return abs(float(self.got) - float(self.expected)) / (unit * max(abs(self.expected), unit))


def assert_close(
    got: Array, expected: Array, tolerance: float = tolerances.FORWARD, what: str = "result"
) -> None:
    """Raise an AssertionError that shows the worst entry. Equal infinities agree; NaN agrees with
    nothing."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, f"{what}: got shape {got.shape}, expected {expected.shape}"
    same_infinity = np.isinf(expected) & (got == expected)
    difference = np.where(
        same_infinity,
        0,
        np.abs(np.where(same_infinity, 0, got) - np.where(same_infinity, 0, expected)),
    )
    scale = max(1.0, float(np.abs(np.where(np.isfinite(expected), expected, 0)).max(initial=0)))
    bad = ~(difference <= tolerances.at_least(tolerance) * scale)
    if bad.any():
        at = tuple(
            int(i)
            for i in np.unravel_index(
                np.argmax(np.where(np.isnan(difference), np.inf, difference)), got.shape
            )
        )
        raise Disagreement(what, at, got, expected, bad)
