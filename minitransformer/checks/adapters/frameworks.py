"""Arrays of NumPy, PyTorch and JAX: in, out, and the gradients of a call.

A framework calls `function(*leaves, **constants)` on its own arrays and returns NumPy arrays and a
`pull`, which turns cotangents of the outputs into gradients of the leaves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  # so that NumPy knows bfloat16 by its name
import numpy as np

from minitransformer.arrays import Array
from minitransformer.checks.suite import NotApplicable

NO_GRADIENT = "the target has no gradient: give its backward"
FRAMEWORKS = ("numpy", "torch", "jax")
Pull = Callable[[Sequence[Array | None]], list[Array]]


class Called(NamedTuple):
    outputs: list[Array]
    pull: Pull


def outputs_of(result: Any) -> list[Any]:
    """A function's results as a list."""
    return list(result) if isinstance(result, tuple | list) else [result]


def call_numpy(
    function: Callable,
    leaves: Sequence[Array],
    constants: Mapping[str, Any],
    dtype: str,
    differentiate: bool,
) -> Called:
    """Call on NumPy arrays of `dtype`; there is no gradient but the target's own."""
    with np.errstate(over="ignore"):  # what the dtype cannot hold is infinite
        given = [x.astype(np.dtype(dtype)) for x in leaves]
        held = {name: _narrow(x, dtype) for name, x in constants.items()}
    before = [x.copy() for x in given]
    outputs = outputs_of(function(*given, **held))
    for number, (x, copy) in enumerate(zip(given, before, strict=True)):
        assert np.array_equal(x, copy, equal_nan=True), f"argument {number} was modified"
    for number, out in enumerate(outputs):
        kind = type(out).__name__
        assert isinstance(out, np.ndarray | np.generic), f"result {number} is a {kind}, no array"

    wrong = {str(x.dtype) for x in outputs[:1]} - {dtype}
    assert not wrong, f"the result is {wrong.pop()}, the arguments were {dtype}"

    def pull(cotangents: Sequence[Array | None]) -> list[Array]:
        raise NotApplicable(NO_GRADIENT)

    return Called([np.asarray(x).astype(np.float64) for x in outputs], pull)


def _narrow(x: Any, dtype: str) -> Any:
    floating = isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating)
    return x.astype(np.dtype(dtype)) if floating else x


def call_torch(
    function: Callable,
    leaves: Sequence[Array],
    constants: Mapping[str, Any],
    dtype: str,
    differentiate: bool,
) -> Called:
    """Call on CPU tensors that require gradients."""
    import torch

    kind = getattr(torch, dtype)

    def tensor(x: Array) -> Any:
        made = torch.from_numpy(np.ascontiguousarray(x))
        return made.to(kind) if made.is_floating_point() else made

    given = [tensor(x).requires_grad_(differentiate) for x in leaves]
    held = {n: tensor(x) if isinstance(x, np.ndarray) else x for n, x in constants.items()}
    before = [x.detach().clone() for x in given]
    outputs = outputs_of(function(*given, **held))
    for number, (x, copy) in enumerate(zip(given, before, strict=True)):
        same = torch.equal(torch.nan_to_num(x.detach()), torch.nan_to_num(copy))
        assert same, f"argument {number} was modified"
    wrong = [str(x.dtype) for x in outputs[:1] if x.dtype != kind]
    assert not wrong, f"the result is {wrong[0]}, the arguments were {dtype}"

    def pull(cotangents: Sequence[Array | None]) -> list[Array]:
        if not differentiate:
            raise NotApplicable(NO_GRADIENT)
        asked = [(o, c) for o, c in zip(outputs, cotangents, strict=False) if c is not None]
        seeds = [torch.from_numpy(np.array(c)).to(o.dtype) for o, c in asked]
        grads = torch.autograd.grad(
            [o for o, _ in asked], given, seeds, allow_unused=True, retain_graph=True
        )
        pairs = zip(grads, leaves, strict=True)
        return [np.zeros(x.shape) if g is None else _wide(g) for g, x in pairs]

    def _wide(x: Any) -> Array:
        return x.detach().to(torch.float64).numpy()

    return Called([_wide(x) for x in outputs], pull)


def call_jax(
    function: Callable,
    leaves: Sequence[Array],
    constants: Mapping[str, Any],
    dtype: str,
    differentiate: bool,
) -> Called:
    """Call on JAX arrays through `jax.vjp`."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp

    kind = jnp.dtype(dtype)

    def array(x: Any) -> Any:
        made = jnp.asarray(x)
        return made.astype(kind) if jnp.issubdtype(made.dtype, jnp.floating) else made

    held = {n: array(x) if isinstance(x, np.ndarray) else x for n, x in constants.items()}
    given = [array(x) for x in leaves]

    def called(*xs: Any) -> tuple:
        return tuple(outputs_of(function(*xs, **held)))

    outputs, vjp = jax.vjp(called, *given) if differentiate else (called(*given), None)
    assert outputs[0].dtype == kind, f"the result is {outputs[0].dtype}, the arguments were {dtype}"

    def pull(cotangents: Sequence[Array | None]) -> list[Array]:
        if vjp is None:
            raise NotApplicable(NO_GRADIENT)
        full = [
            jnp.zeros_like(o) if c is None else jnp.asarray(c).astype(o.dtype)
            for o, c in zip(outputs, [*cotangents, *[None] * len(outputs)], strict=False)
        ]
        return [np.asarray(g, dtype=np.float64) for g in vjp(tuple(full))]

    return Called([np.asarray(x, dtype=np.float64) for x in outputs], pull)


CALLS = {"numpy": call_numpy, "torch": call_torch, "jax": call_jax}
