"""Shapes, dtypes, and the errors that name the argument.

Glossary of axes, used in every signature of the library:

    B  batch          H  query heads     G  key/value heads (H is a multiple of G)
    N  queries        M  keys            D  key width           E  value width

`*B` stands for any number of leading axes. Query head h reads key/value head h // (H // G).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray


def is_inexact(dtype: np.dtype) -> bool:
    """True for float16, bfloat16, float32, float64 and their complex forms (NumPy does not know
    bfloat16)."""
    return np.issubdtype(dtype, np.inexact) or dtype.name == "bfloat16"


def compute_dtype(*arrays: Array) -> np.dtype:
    """The dtype to compute in: the widest of the arrays, and never narrower than float32.

    float16 and bfloat16 are storage formats here: narrow in memory, float32 in arithmetic, rounded
    once at the end.
    """
    widened = [np.dtype(np.float32) if a.dtype.itemsize == 2 else a.dtype for a in arrays]
    return np.result_type(*widened)


def common_dtype(*arrays: Array | None) -> np.dtype:
    """The dtype that the inputs (None left out) have in common; of several, the one to compute
    in."""
    given = [x for x in arrays if x is not None]
    dtypes = {x.dtype for x in given}
    return dtypes.pop() if len(dtypes) == 1 else compute_dtype(*given)


def narrowed(out: Array, like: Array) -> Array:
    """`out` rounded to the dtype of `like`, if that is a narrow storage format."""
    return out.astype(like.dtype) if like.dtype.itemsize == 2 else out


def require_array(name: str, x: Any, *, min_ndim: int = 0) -> None:
    """Raise a TypeError unless `x` is a NumPy array of a floating (or complex) dtype."""
    if not isinstance(x, np.ndarray):
        raise TypeError(
            f"{name} must be a NumPy array, got {type(x).__name__}: try np.asarray({name})"
        )
    if not is_inexact(x.dtype):
        raise TypeError(f"{name} must hold floating-point numbers, got dtype {x.dtype}")
    if x.ndim < min_ndim:
        raise ValueError(f"{name} needs at least {min_ndim} axes, got shape {x.shape}")


def require_integers(name: str, x: Any) -> None:
    """Raise a TypeError unless `x` is a NumPy array of integers."""
    if not isinstance(x, np.ndarray) or not np.issubdtype(x.dtype, np.integer):
        got = f"dtype {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(f"{name} must be an array of integers, got {got}")


def require_cotangent(name: str, x: Any, shape: Sequence[int]) -> None:
    """Raise a ValueError unless `x` has the shape of what the forward pass returned: one that
    merely broadcasts would be summed wrongly, without a word."""
    if np.shape(x) != tuple(shape):
        raise ValueError(f"{name} has shape {np.shape(x)}, the forward pass gave {tuple(shape)}")


def require_whole(least: int, **values: Any) -> None:
    """Raise a TypeError or ValueError, under its own name, for a value that is no whole number or
    below `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value < least:
            hint = " (-1: no limit)" if least == -1 else ""
            raise ValueError(f"{name} must be at least {least}{hint}, got {value}")


def require_bool(name: str, x: Any) -> None:
    """Raise a TypeError unless `x` is a boolean array: a float mask has two meanings, a boolean one
    has one."""
    if not isinstance(x, np.ndarray) or x.dtype != np.bool_:
        got = f"dtype {x.dtype}" if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(f"{name} must be a boolean array (True = may attend), got {got}")


def require_broadcastable(name: str, shape: Sequence[int], to: Sequence[int]) -> None:
    """Raise a ValueError unless `shape` broadcasts to exactly `to`."""
    fits = len(shape) <= len(to) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {tuple(shape)}, which does not broadcast to {tuple(to)}"
        )


def require_in_range(name: str, value: Any, low: float, high: float) -> None:
    """Raise a ValueError unless every entry of `value` lies in the closed interval [low, high]."""
    v = np.asarray(value)
    if not np.all((v >= low) & (v <= high)):  # NaN fails as well
        raise ValueError(f"{name} must lie in [{low}, {high}], got {value}")


def require_logits(name: str, x: Array) -> None:
    """Raise a ValueError if `x` holds NaN or +inf. -inf is legal: it means "masked"."""
    bad = np.isnan(x) | np.isposinf(x.real)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{name} holds NaN or +inf (first at index {where}): softmax has no limit there"
        )


def require_finite(name: str, x: Array) -> None:
    """Raise a ValueError if `x`, what some query may read, holds NaN or infinity."""
    bad = ~np.isfinite(x)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{name} holds NaN or infinity at index {where}, where a query may read it: mask it, "
            "or pass check_finite=False to let it spread"
        )


def unbroadcast(grad: Array, shape: Sequence[int]) -> Array:
    """Sum `grad` over the axes along which an array of `shape` was broadcast: the adjoint of
    broadcasting."""
    extra = grad.ndim - len(shape)
    grad = grad.sum(axis=tuple(range(extra))) if extra else grad
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and grad.shape[i] != 1)
    return grad.sum(axis=stretched, keepdims=True) if stretched else grad
