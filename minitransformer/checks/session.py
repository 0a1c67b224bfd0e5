"""One run of `minitransformer verify`: what was asked for, who answers, and the report."""

import importlib.metadata
import platform
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from minitransformer.checks import conventions, tolerances, verify
from minitransformer.checks.adapters.builtin import BUILTIN
from minitransformer.checks.adapters.call import ALIASES
from minitransformer.checks.adapters.frameworks import FRAMEWORKS
from minitransformer.checks.adapters.program import Program
from minitransformer.checks.isolation import Request, begin
from minitransformer.checks.report import Report, expecting, lines, summary


def require(name: str, value: Any, valid: Iterable[str]) -> None:
    """Raise a ValueError that lists what is valid."""
    valid = list(valid)
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}, got {value!r}")


def request(
    spec: str,
    operation: str,
    *,
    command: bool = False,
    framework: str | None = None,
    dtype: str | None = None,
    declared: Iterable[str] = (),
    renamed: Iterable[str] = (),
    returns: str | None = None,
    backward: str | None = None,
    only: Iterable[str] = (),
    profile: str = "default",
    seed: int | None = None,
    seconds: float = 60.0,
    memory: int = 4096,
) -> Request:
    """The request of a command line.

    Raises
    ------
    ValueError
        Naming the option that makes no sense.
    """
    require("--as", operation, verify.OPERATIONS)
    require("--profile", profile, verify.PROFILES)
    options: dict[str, Any] = {}
    if command:
        require("--dtype", dtype or "float64", ("float64", "float32", "float16"))
        for name, value in (("--framework", framework), ("--backward", backward)):
            if value is not None:
                raise ValueError(f"{name} is for functions, not for --command")
        if operation == "kv_cache":
            raise ValueError("--command cannot hand a cache on: --as kv_cache is for functions")
        Program(spec, operation, ())
        options["command"] = True
    elif ":" not in spec:
        raise ValueError(f"target {spec!r} must be module:function or path/file.py:function")
    elif spec.split(":")[0] in FRAMEWORKS and "." not in spec and spec != "numpy:reference":
        if (spec, operation) not in BUILTIN:
            known = [name for name, op in BUILTIN if op == operation]
            raise ValueError(
                f"there is no built-in {spec!r} for --as {operation}: "
                f"there are {', '.join([*known, 'numpy:reference'])}"
            )
    if framework is not None:
        require("--framework", framework, FRAMEWORKS)
        options["framework"] = framework
    if dtype is not None:
        require("--dtype", dtype, tolerances.WORKING)
        options["dtype"] = dtype
    declared = list(declared)
    conventions.parse(declared)
    if declared:
        options["declared"] = declared
    if renamed := list(renamed):
        pairs = dict(_pair(text) for text in renamed)
        for ours in pairs:
            require("--rename", ours, ALIASES)
        options["renamed"] = pairs
    if returns is not None:
        names = tuple(name.strip() for name in returns.split(","))
        for name in names:
            require("--returns", name, ("out", "lse", "weights", "s", "z"))
        options["returns"] = names
    if backward is not None:
        options["backward"] = backward
    if not seconds > 0 or memory < 1:
        raise ValueError("--timeout and --memory must be positive")
    chosen = tuple(verify.statement_of(operation, name).name for name in only)
    names = chosen or tuple(p.name for p in verify.statements(operation))
    return Request(spec, operation, options, names, profile, seed, seconds, memory)


def _pair(text: str) -> tuple[str, str]:
    ours, equals, theirs = text.partition("=")
    if not equals or not ours or not theirs:
        raise ValueError(f"--rename must be OURS=THEIRS, got {text!r}")
    return ours, theirs


def run(
    asked: Request,
    xfails: Mapping[str, str],
    *,
    detect: bool = False,
    tell: Callable[[str], object] = print,
) -> Report:
    """Judge, telling each verdict as it comes.

    Raises
    ------
    CannotStart
        If the target cannot be loaded.
    """
    ready, judged = begin(replace(asked, detect=detect))
    detected = ready["detected"]
    if detected:  # so that the report's command repeats what was asked
        declared = [*asked.options.get("declared", ()), *(f"{k}={a}" for k, a in detected.items())]
        asked = replace(asked, options=asked.options | {"declared": declared})
    settings = {
        "dtype": ready["dtype"],
        "conventions": _conventions(ready["conventions"], detected),
        "profile": asked.profile,
        "seed": "fixed" if asked.seed is None else str(asked.seed),
        **versions(ready["framework"]),
    }
    tell(f"{asked.spec} as {asked.operation}")
    tell("  " + " · ".join(f"{name} {value}" for name, value in settings.items() if value))
    verdicts = []
    for verdict in judged:
        verdicts.append(expecting(verdict, xfails))
        for text in lines(verdicts[-1]):
            tell(text)
    report = Report(asked.spec, asked.operation, settings, command(asked), verdicts)
    tell(summary(report))
    if report.failed:
        tell(f"again: {report.command}")
    return report


def _conventions(answers: Mapping[str, str], detected: Mapping[str, str]) -> str:
    """Those that differ from ours, and those that were found out."""
    ours = conventions.parse(())
    return ", ".join(
        f"{key}={answer}" + (" (detected)" if key in detected else "")
        for key, answer in answers.items()
        if answer != ours[key] or key in detected
    )


def versions(framework: str) -> dict[str, str]:
    """The versions that the answers may depend on."""
    found = {"Python": platform.python_version()}
    for package in dict.fromkeys(("numpy", framework, "minitransformer")):
        found[package] = importlib.metadata.version(package)
    return found


def command(asked: Request) -> str:
    """The words that repeat a request."""
    options = asked.options
    place = ["--command", asked.spec] if "command" in options else [asked.spec]
    words = ["minitransformer", "verify", *place, "--as", asked.operation]
    for name in ("framework", "dtype", "backward"):
        if name in options:
            words += [f"--{name}", options[name]]
    for text in options.get("declared", ()):
        words += ["--convention", text]
    for ours, theirs in options.get("renamed", {}).items():
        words += ["--rename", f"{ours}={theirs}"]
    if "returns" in options:
        words += ["--returns", ",".join(options["returns"])]
    if asked.profile != "default":
        words += ["--profile", asked.profile]
    if asked.seed is not None:
        words += ["--seed", str(asked.seed)]
    return shlex.join(words)


def overview() -> str:
    """What can be asked: operations, targets to try, and conventions."""
    found = ["operations (--as):"]
    for name in verify.OPERATIONS:
        found.append(f"  {name:<22} {len(verify.statements(name))} properties")
    found += ["", "built-in targets:", "  numpy:reference               any operation"]
    found += [f"  {spec:<29} {operation}" for spec, operation in BUILTIN]
    found += ["", "conventions (--convention KEY=ANSWER; the first answer is the default):"]
    for key, convention in conventions.CONVENTIONS.items():
        found += [
            f"  {key:<9} {' | '.join(convention.answers)}",
            f"            {convention.question}",
        ]
    return "\n".join(found)
