"""Is somebody else's attention right? The library's own properties, asked of any function.

    from minitransformer.checks import verify

    mine = verify.target(my_attention, "attention", framework="torch")

    @pytest.mark.parametrize("statement", verify.statements("attention"), ids=lambda s: s.name)
    def test_my_attention(statement):
        verify.hold(statement, mine)

The command `minitransformer verify` does the same in a child process and writes a report.
"""

import difflib
import importlib
import importlib.util
import sys
import time
import traceback
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings

from minitransformer.checks import conventions, tolerances
from minitransformer.checks.adapters.attention import Attention
from minitransformer.checks.adapters.builtin import BUILTIN
from minitransformer.checks.adapters.call import ALIASES, FLAGS, Callee
from minitransformer.checks.adapters.frameworks import FRAMEWORKS
from minitransformer.checks.adapters.functions import Operation, operation_target
from minitransformer.checks.adapters.others import FORMS
from minitransformer.checks.adapters.program import program
from minitransformer.checks.diagnosis import Recorder, diagnose
from minitransformer.checks.gradients import Disagreement
from minitransformer.checks.suite import PERSON, NotApplicable, Property, reference, suite

# what can be verified, and the suite that judges it
OPERATIONS = {
    "attention": Operation("attention.dense", "attention", ("q", "k", "v")),
    "linear_attention": Operation("attention.linear", "linear_attention", ("q", "k", "v")),
    "favor": Operation("attention.favor", "favor_attention", ("q", "k", "v"), ("projection",)),
    "block_sparse_attention": Operation(
        "sparse.tiled", "tiled_attention", ("q", "k", "v"),
        ours=("nothing_of_the_size_of_the_scores_is_made", "a_nan_reaches_its_readers_alone"),
    ),
    "kv_cache": Operation(
        "attention.kv_cache", "decode_step", ("q", "k", "v"), others=("decode_step",)
    ),
    "softmax": Operation("attention.softmax", "softmax", ("scores",), (), (("axis", -1),)),
    "log_softmax": Operation("attention.softmax", "log_softmax", ("scores",), (), (("axis", -1),)),
    "logsumexp": Operation(
        "attention.softmax", "logsumexp", ("scores",), (), (("axis", -1), ("keepdims", False))
    ),
    "layer_norm": Operation(
        "nn.norms", "layer_norm", ("x", "gamma", "beta"), (), (("eps", 1e-5),)
    ),
    "rms_norm": Operation(
        "nn.norms", "rms_norm", ("x", "gamma"), (), (("eps", 1e-6), ("offset", 0.0))
    ),
    "gelu": Operation("nn.activations", "gelu", ("x",)),
    "swiglu": Operation("nn.activations", "swiglu", ("gate", "up")),
    "cross_entropy": Operation(
        "nn.losses", "cross_entropy", ("logits",), ("targets",),
        (("label_smoothing", 0.0), ("ignore_index", None)),
    ),
    "rope": Operation("positions.rope", "rope", ("x",), ("cos", "sin")),
    "alibi": Operation(
        "positions.alibi", "alibi", ("slopes",), ("query_positions", "key_positions")
    ),
    "t5_bias": Operation(
        "positions.t5_bias", "t5_bias", ("table",), ("query_positions", "key_positions")
    ),
}  # fmt: skip

PROFILES = {
    "quick": settings(PERSON, max_examples=10),
    "default": settings(PERSON, max_examples=40),
    "thorough": settings(PERSON, max_examples=400),
}
STATUSES = ("pass", "fail", "not applicable", "known")


@dataclass(frozen=True)
class Verdict:
    """What one property says of a target."""

    statement: str  # the property's name
    says: str  # its sentence
    status: str  # one of STATUSES
    seconds: float = 0.0
    message: str = ""  # of a failure: what was found; else why it was not asked
    example: Mapping[str, str] = field(default_factory=dict)  # the smallest counter-example
    ulps: float | None = None  # how far off, in units of the last place of the working dtype
    same_as: tuple[str, ...] = ()  # named mistakes that behave identically
    pictures: Mapping[str, list[list[int]]] = field(default_factory=dict)  # of 0 and 1; -1: a gap

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def target(
    function: Callable,
    operation: str,
    *,
    framework: str = "numpy",
    dtype: str = "float64",
    declared: Iterable[str] = (),
    renamed: Mapping[str, str] | None = None,
    returns: Iterable[str] = ("out",),
    backward: Callable | None = None,
    differentiable: bool = True,
) -> Any:
    """A function as a target. `declared` are conventions ("dead_row=nan"), `renamed` maps our names
    of options to the function's, `returns` names its results, `backward` gives gradients where the
    framework does not: (dout, *inputs, **options) -> gradients.

    Raises
    ------
    ValueError
        If the operation, framework, dtype or a convention is unknown.
    """
    for name, value, valid in (
        ("operation", operation, OPERATIONS),
        ("framework", framework, FRAMEWORKS),
        ("dtype", dtype, tolerances.WORKING),
    ):
        if value not in valid:
            raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")
    answers = conventions.parse(declared)
    callee = Callee(function, framework, dtype, dict(renamed or {}), backward, differentiable)
    if operation == "attention":
        return Attention(callee, answers, tuple(returns))
    if operation in FORMS:
        return FORMS[operation](callee, answers, tuple(returns))
    found = OPERATIONS[operation]
    by_convention = {
        "gelu": (("form", answers["gelu"]),),
        "rope": (("layout", answers["rope"]),),
        "t5_bias": (("bidirectional", answers["t5"] == "bidirectional"), ("max_distance", 128)),
    }
    found = found._replace(defaults=by_convention.get(operation, found.defaults))
    return operation_target(found, callee, answers["dead_row"])


def statements(operation: str) -> list[Property]:
    """The properties that judge an operation."""
    if operation not in OPERATIONS:
        raise ValueError(f"operation must be one of {', '.join(OPERATIONS)}, got {operation!r}")
    found = OPERATIONS[operation]
    asked = [p for p in suite(found.mechanism).properties if set(p.needs) & found.judged]
    return [p for p in asked if p.name not in found.ours]


def statement_of(operation: str, name: str) -> Property:
    """One property of an operation, by its name.

    Raises
    ------
    ValueError
        If it has no such property.
    """
    found = {p.name: p for p in statements(operation)}
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1, cutoff=0.0)
        raise ValueError(f"{operation} has no property {name!r}: did you mean {near[0]}?")
    return found[name]


def dtype_of(judged: Any) -> str:
    """The dtype that a target computes in."""
    callee = getattr(judged, "callee", None)
    return "float64" if callee is None else callee.dtype


def hold(statement: Property, judged: Any, *, profile: str = "default") -> None:
    """Raise an AssertionError if the statement is false of the target, SkipTest if it cannot be
    asked: pytest and unittest show that as skipped, with the reason."""
    with tolerances.working_in(dtype_of(judged)):
        try:
            statement.run(judged, PROFILES[profile])
        except NotApplicable as reason:
            raise unittest.SkipTest(str(reason)) from None


def verdict(
    statement: Property, judged: Any, *, profile: str = "default", seed: int | None = None
) -> Verdict:
    """Ask one property, whatever the target does."""
    start = time.perf_counter()

    def said(status: str, message: str = "", **more: Any) -> Verdict:
        seconds = time.perf_counter() - start
        return Verdict(statement.name, statement.statement, status, seconds, message, **more)

    watched = Recorder(judged)
    with tolerances.working_in(dtype_of(judged)):
        try:
            statement.run(watched, PROFILES[profile], seed)
        except NotApplicable as reason:
            return said("not applicable", str(reason))
        except Exception as error:
            found = str(error).strip().splitlines()
            message = found[0] if found else type(error).__name__
            if not isinstance(error, AssertionError):
                message = f"{type(error).__name__}: {message}{_where(error)}"
            ulps = error.ulps if isinstance(error, Disagreement) else None
            drawn = getattr(error, "drawn", {})
            example = {n: shown(x) for n, x in drawn.items()}
            names = tuple(diagnose(statement.mechanism, watched.calls, statement.name))
            return said(
                "fail", message, example=example, ulps=ulps, same_as=names,
                pictures=_pictures(drawn, error),
            )  # fmt: skip
    return said("pass")


def _where(error: Exception) -> str:
    """The last line of somebody else's file that an exception passed through."""
    ours = Path(__file__).resolve().parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        if frame.lineno is not None
        and not Path(frame.filename).is_relative_to(ours)
        and "site-packages" not in frame.filename
        and Path(frame.filename).is_file()
    ]
    return f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""


def _pictures(drawn: Mapping[str, Any], error: Exception) -> dict[str, list[list[int]]]:
    """The mask of a counter-example and where the answer is wrong, as rows of 0 and 1: one plane
    for each head, side by side, with a column of -1 between them."""
    found = {}
    options = getattr(drawn.get("case"), "options", {})
    if "keep" in options:
        found["may attend"] = options["keep"]
    if isinstance(error, Disagreement) and error.wrong.ndim:
        found[f"{error.what}: wrong entries"] = error.wrong
    return {name: _planes(np.asarray(x)) for name, x in found.items() if x.size and x.ndim}


def _planes(x: np.ndarray, most: int = 8, longest: int = 64) -> list[list[int]]:
    planes = np.atleast_2d(x).astype(int)
    planes = planes.reshape(-1, *planes.shape[-2:])[:most, :longest, :longest]
    gap = np.full((planes.shape[1], 1), -1)
    parts = [part for plane in planes for part in (gap, plane)][1:]
    return np.concatenate(parts, axis=1).tolist()


def shown(x: Any, entries: int = 12) -> str:
    """An argument in a line or two: shape, and values if they are few."""
    if isinstance(x, np.ndarray):
        values = np.array2string(x, precision=3, separator=", ").replace("\n", "")
        return f"{x.dtype}{list(x.shape)}" + (f" {values}" if x.size <= entries else "")
    if hasattr(x, "_asdict"):
        return ", ".join(f"{n}: {shown(v, entries)}" for n, v in x._asdict().items())
    if isinstance(x, dict):
        return "{" + ", ".join(f"{n}: {shown(v, entries)}" for n, v in x.items()) + "}"
    return repr(x)


# ---- targets by name -----------------------------------------------------------------------------


def load(spec: str) -> Callable:
    """The function of "package.module:function" or "path/file.py:function".

    Raises
    ------
    ValueError
        If there is no such module, file or function.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"target {spec!r} must be module:function or path/file.py:function")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ValueError(f"target {spec!r}: there is no file '{place}'")
        made = importlib.util.spec_from_file_location(path.stem, path)
        assert made is not None and made.loader is not None
        module = importlib.util.module_from_spec(made)
        sys.modules[path.stem] = module
        sys.path.insert(0, str(path.resolve().parent))
        made.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise ValueError(f"target {spec!r}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        near = [n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")]
        raise ValueError(f"target {spec!r}: no function {name!r}; there are {', '.join(near[:8])}")
    return function


def named_target(spec: str, operation: str, *, command: bool = False, **options: Any) -> Any:
    """The target of a command line: a built-in one, a function by its place, or, as a `command`, a
    program."""
    if command:
        called = OPERATIONS[operation]
        forward, pulled = program(spec, operation, (*called.leaves, *called.constants))
        names = {name: name for name in ALIASES if name not in FLAGS}
        renamed = {**names, **options.pop("renamed", {})}
        options.setdefault("returns", ("out", "lse"))
        return target(forward, operation, backward=pulled, renamed=renamed, **options)
    if spec == "numpy:reference":
        if options.get("declared"):
            raise ValueError("numpy:reference follows our conventions: declare none")
        return reference(OPERATIONS[operation].mechanism)
    if (spec, operation) in BUILTIN:
        found = BUILTIN[spec, operation]
        declared = [*found.conventions, *options.pop("declared", ())]
        options |= {"framework": found.framework, "returns": found.returns, "declared": declared}
        options["differentiable"] = found.differentiable
        options.setdefault("dtype", found.dtype)
        return target(found.make(), operation, **options)
    backward = options.pop("backward", None)
    loaded = load(backward) if isinstance(backward, str) else backward
    return target(load(spec), operation, backward=loaded, **options)


def judge(judged: Any, operation: str, *, profile: str = "default") -> Iterator[Verdict]:
    """The verdict of every property, one by one, in this process."""
    for statement in statements(operation):
        yield verdict(statement, judged, profile=profile)
