"""Which named mistake is it? Replay what a target was asked on every mutant, and name those that
answer the same.

    watched = Recorder(target)
    statement.run(watched)                      # fails
    diagnose("attention.dense", watched.calls)  # ["key heads tiled instead of repeated"]

A mutant is named if it agrees with the target on every recorded call, exceptions included. If the
reference does so too, the calls do not tell right from wrong and nobody is named.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from minitransformer.checks import tolerances
from minitransformer.checks.suite import NotApplicable, reference, suite

AGREE = 1e-9  # of the largest entry: a mistake is far larger, another order of sums far smaller
MOST = 300  # calls that are kept


class _Marker:
    """Stands for a cache among recorded arguments."""


class Call(NamedTuple):
    """One call of a public name, and what came of it."""

    name: str
    arguments: tuple
    options: dict[str, Any]
    cache_of: int | None  # the call whose cache stands where the marker is
    outcome: list[Any] | type  # what could be seen, or the type of an error


class Recorder:
    """A target that writes down what it is asked and what it answers."""

    def __init__(self, target: Any):
        self._target = target
        self.calls: list[Call] = []
        self._caches: dict[int, tuple[Any, int]] = {}  # the cache is held: its id stays its own

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found) or isinstance(found, type):
            return found

        def watched(*arguments: Any, **options: Any) -> Any:
            places = [self._caches[id(a)][1] for a in arguments if id(a) in self._caches]
            marked = tuple(_Marker if id(a) in self._caches else a for a in arguments)
            kept = (name, _copied(marked), _copied(options), places[0] if places else None)
            try:
                result = found(*arguments, **options)
            except NotApplicable:
                raise
            except Exception as error:
                self._keep(Call(*kept, type(error)))
                raise
            held = _held(name, result)
            if held is not None:
                self._caches[id(held)] = (held, len(self.calls))
            self._keep(Call(*kept, [*_seen(name, result), _modified(marked, kept[1])]))
            return result

        return watched

    def _keep(self, call: Call) -> None:
        if len(self.calls) < MOST:
            self.calls.append(call)


def diagnose(mechanism: str, calls: Sequence[Call], statement: str = "") -> list[str]:
    """The names of the mutants that answer every call as the target did; those alone that
    `statement`, the property that failed, is declared to catch, if there are any."""
    if not calls or _answers_alike(reference(mechanism), calls):
        return []
    alike = [m for m in suite(mechanism).mutants if _answers_alike(m.target, calls)]
    declared = [m for m in alike if statement in m.killed_by]
    return [m.name for m in declared or alike]


def _answers_alike(target: Any, calls: Sequence[Call]) -> bool:
    pairs = zip(_replayed(target, calls), calls, strict=True)
    return all(_same(answer, call.outcome) for answer, call in pairs)


def _replayed(target: Any, calls: Sequence[Call]) -> Iterator[list[Any] | type]:
    """The target's answers, one by one, so that a comparison can stop at the first that differs."""
    caches: dict[int, Any] = {}
    for place, call in enumerate(calls):
        arguments, options = _copied(call.arguments), _copied(call.options)
        given = arguments
        if call.cache_of is not None:
            cache = caches.get(call.cache_of)
            arguments = tuple(cache if a is _Marker else a for a in arguments)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a wrong formula may well divide by zero
                result = getattr(target, call.name)(*arguments, **options)
                seen = _seen(call.name, result)
        except Exception as error:
            yield type(error)
            continue
        caches[place] = _held(call.name, result)
        yield [*seen, _modified(given, call.arguments)]


def _modified(now: tuple, before: tuple) -> Any:
    """Did the call change an array that it was given?"""
    pairs = [(x, y) for x, y in zip(now, before, strict=True) if isinstance(x, np.ndarray)]
    return np.array(any(not np.array_equal(x, y, equal_nan=x.dtype.kind in "fc") for x, y in pairs))


def _is_forward(name: str, result: Any) -> bool:
    last = name.endswith("_forward") or name == "decode_step"
    return last and isinstance(result, tuple) and len(result) == 2


def _held(name: str, result: Any) -> Any:
    """The cache that a call gives, to be handed to another call."""
    if name == "empty_cache":
        return result
    return result[1] if _is_forward(name, result) else None


def _seen(name: str, result: Any) -> list[Any]:
    """The arrays of an answer; caches are opaque but for the LSE and the weights they offer."""
    if name == "empty_cache":
        return []
    if not _is_forward(name, result):
        return _leaves(result)
    seen = _leaves(result[0])
    for offered in ("lse", "weights"):
        try:
            seen.append(np.array(getattr(result[1], offered)))
        except (NotApplicable, AttributeError):
            seen.append(None)
    return seen


def _leaves(x: Any) -> list[Any]:
    if isinstance(x, tuple | list):
        return [leaf for y in x for leaf in _leaves(y)]
    if callable(dense := getattr(x, "dense", None)):  # a structural mask
        return [np.array(dense())]
    return [] if x is None else [np.array(x)]


def _copied(x: Any) -> Any:
    """Arrays copied: a target may modify its arguments."""
    if isinstance(x, np.ndarray):
        return x.copy()
    if isinstance(x, dict):
        return {name: _copied(y) for name, y in x.items()}
    return tuple(_copied(y) for y in x) if type(x) is tuple else x


def _same(a: list[Any] | type, b: list[Any] | type) -> bool:
    if isinstance(a, type) or isinstance(b, type):
        return a is b
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x is not None and y is not None]
    return len(a) == len(b) and all(_close(x, y) for x, y in pairs)


def _close(a: Any, b: Any) -> bool:
    if a.shape != b.shape:
        return False
    if not np.issubdtype(b.dtype, np.number) and b.dtype.name != "bfloat16":
        return bool(np.array_equal(a, b))
    a, b = a.astype(np.complex128), b.astype(np.complex128)
    within = tolerances.at_least(AGREE)
    within *= max(1.0, float(np.abs(np.where(np.isfinite(b), b, 0)).max(initial=0)))
    return bool(np.allclose(a, b, rtol=0, atol=within, equal_nan=True))
