"""What a vector is, in memory and as JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  # so that NumPy knows bfloat16 by its name
import numpy as np

from minitransformer.arrays import Array

FORMAT = 1
RESULTS = ("valid", "acceptable", "invalid")


@dataclass(frozen=True)
class Expected:
    """A right answer, and how many roundings its computation takes, entry by entry."""

    value: Array  # of the dtype that is expected; narrow ones hold the unrounded number in float64
    roundings: Array | float = 0.0
    dtype: str = "float64"


@dataclass(frozen=True)
class Answer:
    """What is right under some conventions; under all if `when` is empty."""

    when: Mapping[str, str]
    outputs: Mapping[str, Expected]
    gradients: Mapping[str, Expected]


@dataclass(frozen=True)
class Vector:
    """One question, and its right answers. `invalid` ones have none: they must be refused."""

    operation: str
    id: str
    about: str
    flags: tuple[str, ...]
    result: str
    inputs: Mapping[str, Array]
    options: Mapping[str, Any] = field(default_factory=dict)
    cotangents: Mapping[str, Array] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    memory: str = "contiguous"  # or another layout of the inputs: see `laid_out`
    calls: int = 1  # 2: ask twice, the answers must be the same bits
    links: tuple[str, ...] = ()  # the public reports that it answers to
    kills: tuple[str, ...] = ()

    def answer(self, conventions: Mapping[str, str]) -> Answer | None:
        """The first answer that agrees with these conventions; a key that is not given agrees."""
        for answer in self.answers:
            if all(conventions.get(key, said) == said for key, said in answer.when.items()):
                return answer
        return None


# ---- JSON ----------------------------------------------------------------------------------------


def encoded(x: Array) -> dict[str, Any]:
    """An array: numbers in C order, the shortest decimals that give the same float64 back."""
    data = [_number(v) for v in np.asarray(x).ravel().tolist()]
    return {"dtype": str(x.dtype), "shape": list(x.shape), "data": data}


def decoded(said: Mapping[str, Any]) -> Array:
    dtype = np.dtype(said["dtype"])
    wide = np.float64 if dtype.kind not in "biu" else dtype
    data = np.array([float(v) if isinstance(v, str) else v for v in said["data"]], wide)
    return data.reshape(said["shape"]).astype(dtype)


def _number(v: Any) -> Any:
    if isinstance(v, bool):
        return int(v)
    if isinstance(v, int):
        return v
    if not math.isfinite(v):
        return "nan" if math.isnan(v) else "inf" if v > 0 else "-inf"
    return int(v) if v == int(v) and abs(v) < 1e15 else v


def _encoded_answer(answer: Answer) -> dict[str, Any]:
    said: dict[str, Any] = {"when": dict(answer.when)}
    for part in ("outputs", "gradients"):
        found = {}
        for name, e in getattr(answer, part).items():
            made = encoded(e.value)
            made["dtype"] = e.dtype
            if e.value.dtype.kind == "f":
                made["roundings"] = _roundings(e.roundings)
            found[name] = made
        if found:
            said[part] = found
    return said


def _roundings(x: Array | float) -> Any:
    """Two digits, rounded up; one number if all entries have the same."""
    each = np.asarray(x, dtype=np.float64)
    if not each.ndim:
        return _number(_up(float(each)))
    said = [_number(_up(v)) for v in each.ravel().tolist()]
    return said[0] if said and all(v == said[0] for v in said) else said if said else 0


def _up(v: float) -> float:
    if v == 0:
        return 0.0
    power = math.floor(math.log10(v)) - 1
    return float(f"{math.ceil(v / 10.0**power * (1 - 1e-12))}e{power}")


def _decoded_answer(said: Mapping[str, Any]) -> Answer:
    parts = []
    for part in ("outputs", "gradients"):
        found = {}
        for name, e in said.get(part, {}).items():
            dtype = np.dtype(e["dtype"])
            held = "float64" if dtype.kind not in "biu" else e["dtype"]
            value = decoded({**e, "dtype": held})
            roundings = e.get("roundings", 0)
            if isinstance(roundings, list):
                roundings = np.array(roundings, np.float64).reshape(value.shape)
            found[name] = Expected(value, roundings, e["dtype"])
        parts.append(found)
    return Answer(said["when"], *parts)


def to_json(vector: Vector) -> dict[str, Any]:
    said: dict[str, Any] = {
        "id": vector.id,
        "about": vector.about,
        "flags": list(vector.flags),
        "result": vector.result,
        "options": dict(vector.options),
        "inputs": {name: encoded(x) for name, x in vector.inputs.items()},
    }
    if vector.memory != "contiguous":
        said["memory"] = vector.memory
    if vector.calls != 1:
        said["calls"] = vector.calls
    if vector.cotangents:
        said["cotangents"] = {name: encoded(x) for name, x in vector.cotangents.items()}
    if vector.answers:
        said["answers"] = [_encoded_answer(a) for a in vector.answers]
    if vector.links:
        said["links"] = list(vector.links)
    said["kills"] = list(vector.kills)
    return said


def from_json(operation: str, said: Mapping[str, Any]) -> Vector:
    return Vector(
        operation,
        said["id"],
        said["about"],
        tuple(said["flags"]),
        said["result"],
        {name: decoded(x) for name, x in said["inputs"].items()},
        said["options"],
        {name: decoded(x) for name, x in said.get("cotangents", {}).items()},
        tuple(_decoded_answer(a) for a in said.get("answers", ())),
        said.get("memory", "contiguous"),
        said.get("calls", 1),
        tuple(said.get("links", ())),
        tuple(said["kills"]),
    )


# ---- the same numbers, stored otherwise ----------------------------------------------------------

MEMORY = {
    "contiguous": "one after the other, the last axis first",
    "transposed": "the last two axes stored in the other order: the innermost stride is not 1",
    "heads_inside": "stored as (batch, positions, heads, width), seen as (batch, heads, ...)",
    "offset": "a slice out of a larger array, with other numbers before and behind",
    "broadcast": "the first axis stored once: a stride of 0",
}


def laid_out(x: Array, memory: str) -> Array:
    """`x` under another layout of its memory."""
    if memory == "transposed" and x.ndim >= 2:
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if memory == "heads_inside" and x.ndim >= 3:
        return np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)
    if memory == "offset" and x.ndim:
        larger = np.ones(tuple(n + 2 for n in x.shape), x.dtype)
        inside = larger[tuple(slice(1, n + 1) for n in x.shape)]
        inside[...] = x
        return inside
    if memory == "broadcast" and x.ndim and x.shape[0] > 1:
        return np.broadcast_to(x[:1], x.shape)
    return x.copy()
