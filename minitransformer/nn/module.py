"""Parameters, and modules that own them.

A layer is called as `out, cache = layer.forward(x)` and undone as `dx = layer.backward(dout,
cache)`, which *adds* to the gradients of its parameters: a layer that was called three times owns
three caches and collects three gradients.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from minitransformer.arrays import Array, compute_dtype, is_inexact


class Parameter:
    """An array that learns: its value, its gradient so far, and whether weight decay applies."""

    def __init__(self, value: Array, *, decay: bool):
        if not is_inexact(value.dtype):  # an integer would round every first weight to 0
            raise TypeError(f"dtype must be a floating-point type, got {value.dtype}")
        self.value = value
        self.grad = np.zeros(value.shape, compute_dtype(value))  # a sum: never narrow
        self.decay = decay


class Module:
    """Anything whose attributes are parameters, modules, or lists of modules."""

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter under its dotted name, `blocks.0.attention.query.weight`, in the order
        of definition; one that two modules share appears once, under its first name."""
        found: dict[int, tuple[str, Parameter]] = {}
        for name, parameter in self._walk(""):
            found.setdefault(id(parameter), (name, parameter))
        return dict(found.values())

    def zero_grad(self) -> None:
        """Forget the gradients collected so far."""
        for parameter in self.parameters().values():
            parameter.grad[...] = 0

    def _walk(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        for name, value in vars(self).items():
            yield from _walk(prefix + name, value)


def _walk(name: str, value: Any) -> Iterator[tuple[str, Parameter]]:
    if isinstance(value, Parameter):
        yield name, value
    elif isinstance(value, Module):
        yield from value._walk(name + ".")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _walk(f"{name}.{i}", item)
