"""The verdict on one task: properties in their order until one is false, and how that is said."""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from minitransformer.checks import verify
from minitransformer.checks.isolation import CannotStart, Request, begin
from minitransformer.checks.suite import Suite, reference
from minitransformer.checks.verify import Verdict
from minitransformer.course import tasks
from minitransformer.course.tasks import Task, mutants, statements

WIDTH = 78
SECONDS = 10.0  # for one property: a right solution takes well under one
MEMORY = 2048  # MiB
NO_BREAK = "\u00a0"


class Outcome(NamedTuple):
    """How many properties hold, and the first that does not."""

    held: int
    of: int
    false: Verdict | None
    refused: str = ""  # why the file could not be loaded at all

    @property
    def passed(self) -> bool:
        return self.held == self.of


def judge_file(task: Task, path: Path, tell: Callable[[str], object] = print) -> Outcome:
    """Judge a learner's file in a child process, telling each property that holds."""
    names = tuple(p.name for p in statements(task.number))
    request = Request(
        str(path), task.number, {}, names, seconds=SECONDS, memory=MEMORY, judges=tasks.__name__
    )
    try:
        _, verdicts = begin(request)
    except CannotStart as error:
        return Outcome(0, len(names), None, str(error).replace(f"{path}: ", "").replace(
            "the target could not be loaded", "the file could not be loaded"))  # fmt: skip
    return _until_false(verdicts, len(names), tell)


def judge_functions(
    task: Task, given: Iterable[object], tell: Callable[[str], object] = print
) -> Outcome:
    """Judge functions of this process, as a notebook has them.

    Raises
    ------
    ValueError
        If a function of the task is missing.
    """
    from types import SimpleNamespace

    given = list(given)
    written = SimpleNamespace(
        **{name.split(".")[0]: getattr(reference(task.mechanism), name.split(".")[0])
           for name in task.cut if name.split(".")[0] not in task.public}
    )  # fmt: skip
    for x in given:
        name = "suite" if isinstance(x, Suite) else getattr(x, "__name__", "")
        if len(given) == 1 and len(task.public) == 1 and callable(x):
            name = task.public[0]
        setattr(written, name, x)
    wanted = list(dict.fromkeys(n.split(".")[0] for n in task.cut)) or ["suite"]
    if missing := [name for name in wanted if not hasattr(written, name)]:
        raise ValueError(
            f"task {task.number} asks for {', '.join(wanted)}: {', '.join(missing)} is missing"
        )
    asked = statements(task.number)
    judged = tasks.target_of(task, written)
    return _until_false((verify.verdict(p, judged) for p in asked), len(asked), tell)


def _until_false(verdicts: Iterator[Verdict], of: int, tell: Callable[[str], object]) -> Outcome:
    held = 0
    for verdict in verdicts:
        if verdict.status != "pass":
            return Outcome(held, of, verdict)
        held += 1
        tell(f"  ✓ {textwrap.shorten(verdict.says, WIDTH - 4, placeholder=' …')}")
    return Outcome(held, of, None)


# ---- how it is said ------------------------------------------------------------------------------


def headline(task: Task) -> str:
    return f"{task.number}  {task.title}  ({task.minutes} min)"


def report(task: Task, outcome: Outcome) -> list[str]:
    """The verdict in lines of at most 78 characters."""
    if outcome.passed:
        return [f"passed: all {outcome.of} properties hold"]
    if outcome.refused:
        return [*_wrapped("The file could not be used: ", outcome.refused)]
    verdict = outcome.false
    assert verdict is not None
    lines = [f"not yet: {outcome.held} of {outcome.of} properties hold so far", ""]
    lines += _wrapped("  false:  ", verdict.says)
    lines += _wrapped("  found:  ", verdict.message)
    if verdict.example:
        lines += ["", "  smallest case found:"]
        for name, value in verdict.example.items():
            lines += _wrapped(f"    {name} = ", _by_rows(value))
    why = {m.name: m.why for m in mutants(task)}
    known = [name for name in verdict.same_as if name in why]
    if known:
        lines += ["", "  It behaves exactly like a known mistake:"]
        lines += [line for name in known[:2] for line in _wrapped(f"    {name}: ", why[name])]
    return lines


def _by_rows(value: str) -> str:
    """An array as text that is broken between rows, not inside them."""
    return re.sub(r"\[[^\[\]]*\]", lambda row: row[0].replace(" ", NO_BREAK), value)


def _wrapped(head: str, text: str) -> list[str]:
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * min(len(head), 10),
        break_on_hyphens=False,
    ) or [head]  # fmt: skip
    return [line.replace(NO_BREAK, " ") for line in lines]
