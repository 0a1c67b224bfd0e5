"""Somebody else's softmax, norm, activation or loss as a target: one forward, one backward, options
by name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from minitransformer.arrays import Array
from minitransformer.checks.adapters.call import Callee
from minitransformer.checks.suite import NotApplicable, Target, reference


class Operation(NamedTuple):
    """How a mechanism names one function: its leaves have gradients, its constants have none."""

    mechanism: str
    name: str  # name_forward, name_backward
    leaves: tuple[str, ...]
    constants: tuple[str, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()  # options that may be left out at this value
    others: tuple[str, ...] = ()  # what is judged, where that is not name_forward, name_backward
    ours: tuple[str, ...] = ()  # properties of how we compute, which nobody else owes

    @property
    def judged(self) -> set[str]:
        return set(self.others) or {f"{self.name}_forward", f"{self.name}_backward"}


DEAD_ROWS = {"softmax": 0.0, "log_softmax": -np.inf}  # what we answer where nothing is allowed


def operation_target(operation: Operation, callee: Callee, dead_row: str = "zero") -> Any:
    """The target in which this function, forward and backward, is somebody else's."""
    defaults = {"check_finite": True, "fast": False, **dict(operation.defaults)}

    def forward(*arrays: Any, **options: Any) -> tuple[Array, Any]:
        count = len(operation.leaves)
        leaves, rest = list(arrays[:count]), arrays[count:]
        named = dict(zip(operation.constants, rest, strict=False))
        for name in operation.leaves[len(leaves) :]:
            leaves.append(options.pop(name))
        if any(np.iscomplexobj(x) for x in leaves):
            raise TypeError("complex arrays are not for third parties")
        if any(x.dtype != np.float64 for x in leaves):
            raise NotApplicable("the dtype of a target is chosen for the whole run")
        for name, value in options.items():
            if name in ("check_finite", "fast"):
                continue
            given = callee.name_of(name)
            if given is None and (name not in defaults or value != defaults[name]):
                raise NotApplicable(f"the target has no option for {name}")
            if given is not None:
                named[name] = value
        renamed = {**callee.renamed, **{name: name for name in operation.constants}}
        positional = [named.pop(name) for name in operation.constants if name in named]
        called = _positional(callee, renamed, leaves, positional, named)
        out = called.outputs[0]
        if dead_row == "nan" and operation.name in DEAD_ROWS:
            axis = options.get("axis", -1)
            dead = np.isneginf(leaves[0]).all(axis=axis, keepdims=True) & (
                leaves[0].shape[axis] > 0
            )
            dead = np.broadcast_to(dead, out.shape)
            if dead.any():
                assert np.isnan(out[dead]).all(), "dead_row=nan is declared, but one is no NaN"
                return np.where(dead, DEAD_ROWS[operation.name], out), None
        return out, called

    def backward(dout: Any, cache: Any, **options: Any) -> Any:
        if cache is None:
            raise NotApplicable("the gradient of a dead row that is NaN")
        dout = np.asarray(dout, dtype=np.float64)
        grads = cache.pull([dout])
        if len(operation.leaves) == 1:
            return grads[0]
        return _Grads(dict(zip(operation.leaves, grads, strict=True)))

    names = {f"{operation.name}_forward": forward, f"{operation.name}_backward": backward}
    conventions = {"dead_row": dead_row} if operation.name in DEAD_ROWS else {}
    return Target(reference(operation.mechanism), **names, callee=callee, conventions=conventions)


def _positional(callee: Callee, renamed: Any, leaves: list, positional: list, named: dict) -> Any:
    """Constants such as targets come after the leaves, by position."""
    if not positional:
        return callee.call(leaves, named)
    function: Callable = callee.function
    keys = [f"constant_{n}" for n in range(len(positional))]

    def ordered(*xs: Any, **rest: Any) -> Any:
        constants = [rest.pop(key) for key in keys]
        return function(*xs, *constants, **rest)

    names = {o: n for o in named if (n := callee.name_of(o)) is not None}
    names |= {key: key for key in keys}
    backward = callee.backward

    def ordered_backward(dout: Any, *xs: Any, **rest: Any) -> Any:
        assert backward is not None
        return backward(dout, *xs, *[rest.pop(key) for key in keys], **rest)

    wrapped = dataclasses.replace(
        callee,
        function=ordered,
        renamed=names,
        backward=None if backward is None else ordered_backward,
    )
    return wrapped.call(leaves, {**named, **dict(zip(keys, positional, strict=True))})


class _Grads(tuple):
    """Gradients in the order of the inputs, and by their names."""

    _names: dict[str, Array]

    def __new__(cls, named: dict[str, Array]) -> "_Grads":
        made = super().__new__(cls, named.values())
        made._names = named
        return made

    def __getattr__(self, name: str) -> Array:
        try:
            return self._names[name]
        except KeyError:
            raise AttributeError(name) from None
