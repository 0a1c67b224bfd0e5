"""Verdicts from a child process: what crashes, hangs or eats the memory there is a finding here.

The child judges one property after the other and writes a line of JSON before and after each. If it
dies or is silent for too long, the property it was at has failed, and another child goes on with
the next one. What the target prints is thrown away.
"""

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

from minitransformer.checks import verify
from minitransformer.checks.detection import detect
from minitransformer.checks.verify import Verdict

STARTING = 120.0  # seconds for the imports of a framework


@dataclass(frozen=True)
class Request:
    """What a child is asked to judge."""

    spec: str
    operation: str
    options: dict[str, Any] = field(default_factory=dict)  # of `named_target`
    names: tuple[str, ...] = ()  # of properties
    profile: str = "default"
    seed: int | None = None
    seconds: float = 60.0  # for one property
    memory: int = 4096  # MiB beyond what is in use after the imports
    detect: bool = False  # the conventions, before anything else
    judges: str = verify.__name__  # a module with `named_target` and `statement_of`


class CannotStart(Exception):
    """The target could not be loaded at all."""


def begin(request: Request) -> tuple[dict[str, Any], Iterator[Verdict]]:
    """What the child says of the target, and then the verdict of each named property, in their
    order.

    Raises
    ------
    CannotStart
        If the target cannot be loaded: no such file, a syntax error, an import that fails.
    """
    child = Child(request)
    try:
        ready = child.ready()
    except BaseException:
        child.end()
        raise
    declared = [*request.options.get("declared", ()), *_said(ready["detected"])]
    options = request.options | ({"declared": declared} if declared else {})
    return ready, _verdicts(replace(request, options=options, detect=False), child)


def _verdicts(request: Request, child: "Child") -> Iterator[Verdict]:
    left = list(request.names)
    try:
        while left:
            name = left.pop(0)
            answer = child.line(request.seconds)
            if answer is not None:
                yield Verdict(**{**answer, "same_as": tuple(answer["same_as"])})
                continue
            message = child.obituary(request.seconds)
            judges = importlib.import_module(request.judges)
            says = judges.statement_of(request.operation, name).statement
            yield Verdict(name, says, "fail", request.seconds, message)
            child.end()
            if left:  # go on in a new one
                child = Child(replace(request, names=tuple(left)))
                child.ready()
    finally:
        child.end()


def _said(answers: Mapping[str, str]) -> list[str]:
    return [f"{key}={answer}" for key, answer in answers.items()]


class Child:
    """One child and the lines that it writes."""

    def __init__(self, request: Request):
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # so that its own children end with it
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._hung = False
        with contextlib.suppress(OSError):  # it died already: there will be no line
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(asdict(request)))
            self._process.stdin.close()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def line(self, seconds: float) -> dict[str, Any] | None:
        """What it says next; None if it ended or is silent for `seconds`."""
        try:
            found = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._hung = True
            return None
        return None if found is None else json.loads(found)

    def ready(self) -> dict[str, Any]:
        """What it says of the target once that is loaded.

        Raises
        ------
        CannotStart
            If it could not be.
        """
        found = self.line(STARTING)
        if found is None:
            raise CannotStart(f"the target could not be loaded: {self.obituary(STARTING)}")
        if "refused" in found:
            raise CannotStart(found["refused"])
        return found

    def obituary(self, seconds: float) -> str:
        """Why there is no line."""
        if self._hung:
            return f"no answer within {seconds:g} seconds"
        code = self._process.wait()
        if code < 0:
            return f"the process died of {signal.Signals(-code).name}"
        return f"the process ended itself with exit code {code}"

    def end(self) -> None:
        """End it, and whatever it started."""
        with contextlib.suppress(OSError, AttributeError):  # no process groups on Windows
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


# ---- the child -----------------------------------------------------------------------------------


def main() -> None:
    """Read a request from stdin, write verdicts to what stdout was."""
    request = Request(**json.loads(sys.stdin.read()))
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # a target that prints gigabytes fills no pipe
            os.dup2(nowhere, stream)
        _work(request, out)


def _work(request: Request, out: IO[str]) -> None:
    judges = importlib.import_module(request.judges)

    def say(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    def named(declared: list[str]) -> Any:
        options = {**request.options, "declared": list(declared)} if declared else request.options
        return judges.named_target(request.spec, request.operation, **options)

    try:
        judged = named(request.options.get("declared", []))
    except (Exception, SystemExit) as error:
        text = str(error) or "it ended the program"
        known = isinstance(error, ValueError)
        say({"refused": text if known else f"{request.spec}: {type(error).__name__}: {text}"})
        return
    _limit_memory(request.memory)
    declared, found = request.options.get("declared", ()), {}
    if request.detect and hasattr(judged, "callee"):
        found = detect(
            lambda answers: named([*declared, *_said(answers)]),
            request.operation,
            {text.partition("=")[0] for text in declared},
            verify.dtype_of(judged),
        )
        judged = named([*declared, *_said(found)])
    say(
        {
            "detected": found,
            "dtype": verify.dtype_of(judged),
            "framework": judged.callee.framework if hasattr(judged, "callee") else "numpy",
            "conventions": getattr(judged, "conventions", {}),
        }
    )
    for name in request.names:
        statement = judges.statement_of(request.operation, name)
        verdict = verify.verdict(statement, judged, profile=request.profile, seed=request.seed)
        say(verdict.to_json())


def _limit_memory(mebibytes: int) -> None:
    """At most so much more than now, where the system can limit it."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        limit = used + mebibytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
