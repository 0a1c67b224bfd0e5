"""One operation: what can be asked of it, and three ways to the answer."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  # so that NumPy knows bfloat16 by its name
import numpy as np

from minitransformer.arrays import Array, compute_dtype
from minitransformer.checks.suite import Mutant, suite
from minitransformer.checks.vectors.judge import Ask, Told
from minitransformer.philox import philox

OURS: Mapping[str, str] = {}  # the conventions of an answer that needs none


@dataclass(frozen=True)
class Case:
    """A question without its answer."""

    id: str
    about: str
    flags: tuple[str, ...]
    inputs: Mapping[str, Array]
    options: Mapping[str, Any] = field(default_factory=dict)
    cotangents: Mapping[str, Array] = field(default_factory=dict)
    result: str = "valid"
    whens: tuple[Mapping[str, str], ...] = (OURS,)  # one answer for each
    memory: str = "contiguous"
    calls: int = 1
    reports: tuple[str, ...] = ()
    # outputs that a report states as numbers, and to how many decimals
    published: Mapping[str, Any] = field(default_factory=dict)
    decimals: int = 6


Inputs = Mapping[str, Array]
Options = Mapping[str, Any]
When = Mapping[str, str]
# a definition in exact numbers: the outputs; their gradients come by themselves
Exactly = Callable[[Mapping[str, Any], Options, When], Mapping[str, Any]]
# loops over floats: outputs, and the gradients for the cotangents
Loops = Callable[[Inputs, Options, When, Inputs], Told]


def _as_inputs(name: str, inputs: Inputs) -> str:
    """The dtype of an output: that of the floating inputs, or what they are computed in."""
    floating = [x for x in inputs.values() if x.dtype.kind not in "biu"]
    dtypes = {x.dtype for x in floating}
    if not dtypes:
        return "float64"
    return str(dtypes.pop() if len(dtypes) == 1 else compute_dtype(*floating))


@dataclass(frozen=True)
class Operation:
    name: str
    mechanism: str  # whose mutants it meets, as far as they replace one of `functions`
    functions: tuple[str, ...]
    about: str
    arrays: Mapping[str, str]  # inputs and outputs: shape and meaning
    options: Mapping[str, str]
    ask: Ask
    loops: Loops
    exactly: Exactly
    cases: Callable[[], Mapping[str, Sequence[Case]]]  # by file
    leaves: tuple[str, ...] = ()  # inputs that have a gradient
    wide: tuple[str, ...] = ()  # outputs that are never narrower than float32
    mistakes: tuple[Mutant, ...] = ()  # of what no property asks: bad input, memory
    # mutants that answer otherwise the next time: for vectors that are asked more than once
    moody: tuple[str, ...] = ()
    # our library's answer, as it reads under other conventions
    under: Callable[[Told, Inputs, Options, When], Told] | None = None
    dtype_of: Callable[[str, Inputs], str] = _as_inputs

    def mutants(self) -> list[Mutant]:
        """The named mistakes that its vectors must catch."""
        found = [m for m in suite(self.mechanism).mutants if m.replaces in self.functions]
        return [*found, *self.mistakes]

    def dtype(self, name: str, inputs: Inputs) -> str:
        found = self.dtype_of(name, inputs)
        return "float32" if name in self.wide and np.dtype(found).itemsize == 2 else found


def mistake(mechanism: str, replaces: str, why: str, *, crashes: bool = False) -> Callable:
    """A mutant that only vectors meet."""

    def made(function: Callable) -> Mutant:
        name = function.__name__.strip("_").replace("_", " ")
        return Mutant(mechanism, name, why, replaces, function, (), crashes)

    return made


# ---- inputs --------------------------------------------------------------------------------------


def draw(key: str, shape: Sequence[int], spread: float = 3.0, grid: int = 16) -> Array:
    """Numbers in [-spread, spread] on a grid of 1/16, which every floating dtype holds exactly: the
    same on every machine, by Philox under the checksum of `key`."""
    count = int(np.prod(shape))
    words = philox(
        (np.arange(count), np.zeros(1), np.zeros(1), np.zeros(1)), (zlib.crc32(key.encode()), 0)
    )[:, 0]
    steps = int(2 * spread * grid) + 1
    each = (words.astype(np.uint64) * np.uint64(steps)) >> np.uint64(32)
    return (each.astype(np.float64) / grid - spread).reshape(shape)


def drawn_mask(key: str, shape: Sequence[int], share: float = 0.6) -> Array:
    """Each entry True with this probability."""
    return draw(key, shape, 1.0, 1 << 12) < 2 * share - 1


def stored(x: Array, dtype: str) -> Array:
    """`x` in another dtype, if that holds it exactly."""
    made = x.astype(np.dtype(dtype))
    assert np.array_equal(made.astype(np.float64), x, equal_nan=True), f"{dtype} cannot hold it"
    return made


def integers(*values: Any) -> Array:
    return np.array(values[0] if len(values) == 1 else values, dtype=np.int64)


# ---- loops ---------------------------------------------------------------------------------------


def source(index: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Where an entry of a broadcast array came from."""
    tail = tuple(index)[len(index) - len(shape) :]
    return tuple(0 if n == 1 else i for i, n in zip(tail, shape, strict=True))
