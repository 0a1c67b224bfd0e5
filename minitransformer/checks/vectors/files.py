"""Where the vectors lie, and how they are written and read."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import minitransformer
from minitransformer.checks.vectors.vector import Vector, from_json


@functools.cache
def folder() -> Path:
    """The vectors that came with the package: inside a wheel, or beside the package in a checkout.

    Raises
    ------
    FileNotFoundError
        If there are none.
    """
    package = Path(minitransformer.__file__).resolve().parent
    for place in (package / "vectors", package.parent / "vectors"):
        if (place / "reports.json").is_file():
            return place
    raise FileNotFoundError(f"no vectors beside {package}")


def names(place: Path | None = None) -> list[str]:
    """The operations that have vectors."""
    return sorted(p.name for p in (place or folder()).iterdir() if p.is_dir())


def load(operation: str, place: Path | None = None) -> list[Vector]:
    """The vectors of one operation.

    Raises
    ------
    ValueError
        If it has none.
    """
    place = place or folder()
    if operation not in names(place):
        raise ValueError(f"operation must be one of {', '.join(names(place))}, got {operation!r}")
    found = []
    for path in sorted((place / operation).glob("*.json")):
        said = json.loads(path.read_text(encoding="utf-8"))
        found += [from_json(operation, test) for test in said["tests"]]
    return found


def load_all(place: Path | None = None) -> Iterator[Vector]:
    """Every vector, operation by operation."""
    for operation in names(place):
        yield from load(operation, place)


def reports(place: Path | None = None) -> dict[str, Mapping[str, Any]]:
    """The public bug reports that vectors answer to, by their number."""
    path = (place or folder()) / "reports.json"
    return {said["id"]: said for said in json.loads(path.read_text(encoding="utf-8"))}


# ---- JSON that a person can read and a diff can show ---------------------------------------------


def text(said: Mapping[str, Any]) -> str:
    """One file: its head, then each test with one line for each of its fields."""
    lines = ["{"]
    for name, value in said.items():
        if name != "tests":
            lines.append(f"  {_json(name)}: {_nested(value, 2)},")
    tests = [_test(test) for test in said["tests"]]
    return "\n".join([*lines, '  "tests": [', ",\n".join(tests), "  ]", "}", ""])


def _test(test: Mapping[str, Any]) -> str:
    lines = []
    for name, value in test.items():
        if name in ("inputs", "cotangents"):
            rows = [f"        {_json(n)}: {_json(v)}" for n, v in value.items()]
            body = "{\n" + ",\n".join(rows) + "\n      }" if rows else "{}"
        elif name == "answers":
            body = "[" + ", ".join(_answer(a) for a in value) + "]"
        else:
            body = _json(value)
        lines.append(f"      {_json(name)}: {body}")
    return "    {\n" + ",\n".join(lines) + "\n    }"


def _answer(answer: Mapping[str, Any]) -> str:
    parts = []
    for name, value in answer.items():
        if name == "when":
            parts.append(f'        "when": {_json(value)}')
            continue
        rows = [f"          {_json(n)}: {_json(v)}" for n, v in value.items()]
        parts.append(f"        {_json(name)}: {{\n" + ",\n".join(rows) + "\n        }")
    return "{\n" + ",\n".join(parts) + "\n      }"


def _nested(value: Any, indent: int) -> str:
    if not isinstance(value, dict) or not value:
        return _json(value)
    pad = " " * (indent + 2)
    rows = [f"{pad}{_json(n)}: {_json(v)}" for n, v in value.items()]
    return "{\n" + ",\n".join(rows) + "\n" + " " * indent + "}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
