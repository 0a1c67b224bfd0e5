"""Does a target give the right answer to a vector?

An entry may be off by SLACK roundings for each that the definition takes, a rounding being half a
unit in the last place of the arithmetic (float32 for the narrow dtypes), and by one more rounding
to a narrow result. Where the definition takes none, the answer must be exact. That is per entry:
no maximum over the array, no mean, no share of rows that may fail.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from minitransformer.arrays import Array
from minitransformer.checks.gradients import Disagreement
from minitransformer.checks.suite import NotApplicable
from minitransformer.checks.vectors.vector import Answer, Expected, Vector, laid_out

SLACK = 4.0
# what underflows may become 0: a few of the smallest normal numbers, whatever they multiply
FLOOR = 2.0**10


class Given(NamedTuple):
    """What a target is asked: the inputs by name, options, cotangents by the name of the output."""

    inputs: dict[str, Array]
    options: Mapping[str, Any]
    cotangents: dict[str, Array]
    wanted: Answer
    calls: int = 1  # more: the backward pass is asked again of the same cache, too


class Told(NamedTuple):
    """What it answers."""

    outputs: Mapping[str, Any]
    gradients: Mapping[str, Any]


Ask = Callable[[Any, Given], Told]


def hold(
    vector: Vector,
    target: Any,
    ask: Ask | None = None,
    *,
    conventions: Mapping[str, str] | None = None,
    dtype: str | None = None,
    slack: float = 1.0,
) -> None:
    """Raise an AssertionError if `target` answers wrongly, NotApplicable if it cannot be asked.

    `conventions` chooses among the answers, ours without; `dtype` is what the target computes in if
    that is not what the vector says; `slack` multiplies what it may be off by.
    """
    if ask is None:
        from minitransformer.checks.vectors.operations import operation

        ask = operation(vector.operation).ask
    if vector.result == "invalid":
        _refused(vector, target, ask)
        return
    answer = vector.answers[0] if conventions is None else vector.answer(conventions)
    if answer is None:
        raise NotApplicable("the vector has no answer under these conventions")
    told = _asked(vector, target, ask, answer)
    for name, right in answer.outputs.items():
        if name in told.outputs:
            got = _array(told.outputs[name], name)
            stored = dtype or _stored(got, right, name, exactly=True)
            agree(got, right, name, stored, slack)
    for name, right in answer.gradients.items():
        if name in told.gradients:
            what = f"gradient of {name}"
            got = _array(told.gradients[name], what)
            stored = dtype or _stored(got, right, what, exactly=False)
            agree(got, right, what, stored, slack)
    for _ in range(vector.calls - 1):
        again = _asked(vector, target, ask, answer)
        for name, x in {**told.outputs, **told.gradients}.items():
            y = {**again.outputs, **again.gradients}[name]
            assert np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), f"{name} differs next time"


def _asked(vector: Vector, target: Any, ask: Ask, answer: Answer) -> Told:
    inputs = {name: laid_out(x, vector.memory) for name, x in vector.inputs.items()}
    cotangents = {name: laid_out(x, vector.memory) for name, x in vector.cotangents.items()}
    before = {name: x.copy() for name, x in {**inputs, **cotangents}.items()}
    told = ask(target, Given(inputs, vector.options, cotangents, answer, vector.calls))
    for name, x in {**inputs, **cotangents}.items():
        same = np.array_equal(x, before[name], equal_nan=x.dtype.kind not in "biu")
        assert same, f"{name} was modified"
    return told


def _refused(vector: Vector, target: Any, ask: Ask) -> None:
    inputs = {name: x.copy() for name, x in vector.inputs.items()}
    try:
        ask(target, Given(inputs, vector.options, {}, Answer({}, {}, {})))
    except NotApplicable:
        raise
    except Exception:
        return
    raise AssertionError("accepted, though it makes no sense: it must be refused")


# ---- how far off an answer may be ----------------------------------------------------------------


def limit(right: Expected, dtype: str, slack: float = 1.0) -> Array:
    """What each entry of an answer in `dtype` may be off by; `slack` is for the arithmetic, not for
    the rounding to a narrow result."""
    narrow = np.dtype(dtype).itemsize == 2
    finfo = ml_dtypes.finfo("float32" if narrow else dtype)
    roundings = np.asarray(right.roundings)
    within = slack * SLACK * float(finfo.eps) / 2 * roundings
    within = within + slack * FLOOR * float(finfo.smallest_normal)
    if narrow:
        stored, size = ml_dtypes.finfo(dtype), np.where(np.isfinite(right.value), right.value, 0)
        within = within + np.abs(size) * float(stored.eps) / 2 * 1.001
        within = within + float(stored.smallest_subnormal)
    return np.where(roundings > 0, within, 0)


def agree(got: Any, right: Expected, what: str, dtype: str, slack: float = 1.0) -> None:
    """Raise a Disagreement, or an AssertionError about the shape, if `got`, computed in `dtype`, is
    further off than allowed."""
    value = right.value
    assert got.shape == value.shape, f"{what}: got shape {got.shape}, expected {value.shape}"
    if value.dtype.kind != "f":
        assert got.dtype.kind in "biu", f"{what}: got {got.dtype}, expected {right.dtype}"
        wrong = got != value
    else:
        got = got.astype(np.float64)
        with np.errstate(invalid="ignore"):
            near = np.abs(got - value) <= limit(right, dtype, slack)
        same = (got == value) | (np.isnan(got) & np.isnan(value))
        wrong = ~(same | (near & np.isfinite(value)))
    if wrong.any():
        with np.errstate(invalid="ignore"):
            off = np.where(wrong, np.abs(got.astype(np.float64) - value), -1)
        off = np.where(np.isnan(off), np.inf, off)
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(off)), value.shape))
        raise Disagreement(what, at, got, value, wrong)


def _array(x: Any, what: str) -> Array:
    assert isinstance(x, np.ndarray | np.generic), f"{what} is a {type(x).__name__}, no array"
    return np.asarray(x)


def _stored(x: Array, right: Expected, what: str, *, exactly: bool) -> str:
    """The dtype of an answer, if it is the one expected, or at least as wide."""
    wide_enough = x.dtype.itemsize >= np.dtype(right.dtype).itemsize and not exactly
    if right.value.dtype.kind == "f":
        assert str(x.dtype) == right.dtype or wide_enough, (
            f"{what}: got dtype {x.dtype}, expected {right.dtype}"
        )
    return str(x.dtype) if np.dtype(right.dtype).itemsize == 2 else right.dtype
