"""From cases to files: the answer three times, the mistakes that each vector catches, and the text.

    exactly    the definition in numbers of 50 digits: what the files hold, rounded to float64
    loops      float64, index by index, the gradient derived by hand
    library    what our own function gives

Whoever differs by more than rounding stops the build, as does a number that a public report states.
"""

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minitransformer.checks.suite import Mutant, NotApplicable, reference
from minitransformer.checks.vectors import exact
from minitransformer.checks.vectors.files import reports as read_reports
from minitransformer.checks.vectors.files import text
from minitransformer.checks.vectors.flags import notes
from minitransformer.checks.vectors.judge import Given, agree, hold
from minitransformer.checks.vectors.operation import Case, Operation
from minitransformer.checks.vectors.vector import (
    FORMAT,
    Answer,
    Expected,
    Vector,
    from_json,
    to_json,
)

# a mistake counts as caught if it is this many times further off than an answer may be: whether it
# is does not hang on the last digits of a machine
CLEARLY = 4.0


class Disagreed(AssertionError):
    """Two derivations of one answer differ."""


def answered(operation: Operation, case: Case) -> Vector:
    """The vector of a case, before anybody looked at mutants.

    Raises
    ------
    Disagreed
        If a derivation, or a public report, says otherwise.
    """
    links = tuple(read_reports()[number]["url"] for number in case.reports)
    result = case.result
    if result == "valid" and any(case.whens):
        result = "acceptable"
    vector = Vector(
        operation.name, case.id, case.about, case.flags, result, case.inputs, case.options,
        case.cotangents, (), case.memory, case.calls, links,
    )  # fmt: skip
    if result == "invalid":
        return vector
    answers = tuple(
        _answer(operation, case, when, number) for number, when in enumerate(case.whens)
    )
    vector = replace(vector, answers=answers)
    _same_as_published(case, answers[0])
    for answer in answers:
        _same_as_loops(operation, case, answer)
    _same_as_library(operation, vector)
    return vector


def _answer(operation: Operation, case: Case, when: Mapping[str, str], number: int) -> Answer:
    cotangents = case.cotangents if number == 0 else {}  # one gradient is enough
    with exact.digits(derivatives=bool(cotangents)):
        inputs: dict[str, Any] = {
            name: exact.leaves(x) if x.dtype.kind not in "biu" else x
            for name, x in case.inputs.items()
        }
        outputs = operation.exactly(inputs, case.options, when)
        leaves = {name: inputs[name] for name in operation.leaves if name in inputs}
        derived = exact.gradients(outputs, cotangents, leaves) if cotangents else {}
    found = {}
    for name, x in outputs.items():
        if name not in operation.arrays or (number and name in operation.wide):
            continue
        if not isinstance(x, np.ndarray) or x.dtype.kind in "biu":
            found[name] = Expected(np.asarray(x), 0.0, str(np.asarray(x).dtype))
            continue
        value, error = exact.floats(x) if x.dtype == object else (x, np.zeros(x.shape))
        found[name] = Expected(value + 0.0, error, operation.dtype(name, case.inputs))
    gradients = {
        name: Expected(value + 0.0, error, str(case.inputs[name].dtype))
        for name, (value, error) in derived.items()
    }
    return Answer(when, found, gradients)


def _same_as_loops(operation: Operation, case: Case, answer: Answer) -> None:
    wide = {n: _widened(x) for n, x in case.inputs.items()}
    pulled = {n: _widened(x) for n, x in case.cotangents.items()} if answer.gradients else {}
    told = operation.loops(wide, case.options, answer.when, pulled)
    for part in ("outputs", "gradients"):
        for name, right in getattr(answer, part).items():
            got = getattr(told, part)[name]
            wanted = replace(right, dtype="float64") if right.value.dtype.kind == "f" else right
            _compare(case, f"loops, {part}, {name}", np.asarray(got), wanted)


def _compare(case: Case, what: str, got: Any, right: Expected) -> None:
    try:
        agree(got, right, what, right.dtype)
    except AssertionError as error:
        raise Disagreed(f"{case.id}: {error}") from None


def _widened(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind in "biu" else x.astype(np.float64)


def _same_as_library(operation: Operation, vector: Vector) -> None:
    """The first answer by the library as it is, the others as they read from it."""
    target = reference(operation.mechanism)
    for answer in vector.answers:

        def ask(asked: Any, given: Given) -> Any:
            told = operation.ask(asked, given)
            if operation.under is None:
                return told
            return operation.under(told, given.inputs, given.options, given.wanted.when)

        alone = replace(vector, answers=(answer,))
        try:
            hold(alone, target, ask)
        except AssertionError as error:
            raise Disagreed(f"{vector.id}: library, {error}") from None


def _same_as_published(case: Case, answer: Answer) -> None:
    for name, said in case.published.items():
        got = answer.outputs[name].value
        each = np.asarray(said, dtype=np.float64)
        if not np.allclose(got.ravel(), each.ravel(), rtol=0, atol=0.6 * 10.0**-case.decimals):
            raise Disagreed(f"{case.id}: the report says {name} = {said}, derived {got.ravel()}")


# ---- the mistakes that a vector catches ----------------------------------------------------------


def caught(operation: Operation, vector: Vector, mutant: Mutant, slack: float = 1.0) -> bool:
    """True if the mutant gives another answer, or none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a wrong formula may well divide by zero
        try:
            with np.errstate(all="ignore"):
                hold(vector, mutant.target, operation.ask, slack=slack)
        except NotApplicable:
            return False
        except Exception:
            return True
    return False


def with_kills(operation: Operation, vector: Vector) -> Vector:
    met = [m for m in operation.mutants() if vector.calls > 1 or m.name not in operation.moody]
    found = [m.name for m in met if caught(operation, vector, m, CLEARLY)]
    return replace(vector, kills=tuple(found))


# ---- files ---------------------------------------------------------------------------------------


def built(
    operation: Operation, known: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, list[Vector]]:
    """The vectors of an operation, by file. Of those that are `known`, what they catch is not
    found out again."""
    found: dict[str, list[Vector]] = {}
    seen: set[str] = set()
    for name, cases in operation.cases().items():
        found[name] = []
        for case in cases:
            if case.id in seen:
                raise ValueError(f"{operation.name} has two vectors {case.id!r}")
            seen.add(case.id)
            vector = answered(operation, case)
            if known is not None and case.id in known:
                found[name].append(replace(vector, kills=known[case.id]))
            else:
                found[name].append(with_kills(operation, vector))
    return found


def written(
    operation: Operation, known: Mapping[str, tuple[str, ...]] | None = None
) -> dict[str, str]:
    """The files of an operation, by their place below the vectors' folder."""
    why = {m.name: m.why for m in operation.mutants()}
    files = {}
    for name, vectors in built(operation, known).items():
        flags = {flag for v in vectors for flag in v.flags}
        kills = {kill for v in vectors for kill in v.kills}
        said = {
            "format": FORMAT,
            "operation": operation.name,
            "about": operation.about,
            "arrays": dict(operation.arrays),
            "options": dict(operation.options),
            "flags": notes(flags, read_reports()),
            "mutants": {n: w for n, w in why.items() if n in kills},
            "tests": [to_json(v) for v in vectors],
        }
        files[f"{operation.name}/{name}.json"] = text(said)
    return files


def differences(operation: Operation, files: Mapping[str, str], place: Path) -> list[str]:
    """Which files below `place` are not these, one sentence each."""
    found = []
    for where, content in files.items():
        path = place / where
        if not path.is_file():
            found.append(f"{where} is missing")
        elif (there := path.read_text(encoding="utf-8")) != content:
            pairs = zip(there.splitlines(), content.splitlines(), strict=False)
            line = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), "its end")
            found.append(f"{where} differs from line {line} on")
    for path in sorted((place / operation.name).glob("*.json")):
        if f"{operation.name}/{path.name}" not in files:
            found.append(f"{operation.name}/{path.name} is not made any more")
    return found


def read(files: Mapping[str, str], name: str) -> list[Vector]:
    """The vectors in the text of files."""
    return [from_json(name, test) for said in files.values() for test in json.loads(said)["tests"]]


def export(operation: Operation, place: Path) -> int:
    """Write the files of an operation, delete those that it no longer has; how many vectors."""
    files = written(operation)
    (place / operation.name).mkdir(parents=True, exist_ok=True)
    for path in (place / operation.name).glob("*.json"):
        if f"{operation.name}/{path.name}" not in files:
            path.unlink()
    for where, content in files.items():
        (place / where).write_text(content, encoding="utf-8", newline="\n")
    return sum(content.count('      "result": ') for content in files.values())


def idle(operation: Operation, vectors: Iterable[Vector]) -> list[str]:
    """What makes a set of vectors weak: mistakes that none catches, vectors that catch none."""
    vectors = list(vectors)
    all_caught = {kill for v in vectors for kill in v.kills}
    found = [
        f"no vector catches: {m.name}" for m in operation.mutants() if m.name not in all_caught
    ]
    return found + [f"{v.id} catches no mistake" for v in vectors if not v.kills]
