"""The full kill matrix: every mutant against every property that can be asked of it.

    python -m minitransformer.checks.matrix [MECHANISM ...]

Tests run the declared pairs only. This asks all of them, and shows what is not declared: a property
that kills more than it says, and a mutant that hangs by a single thread.
"""

import argparse
import sys
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from minitransformer.checks.suite import GATE, MANY, Suite, suites


class Row(NamedTuple):
    mutant: str
    declared: tuple[str, ...]
    kills: tuple[str, ...]


def matrix(suite: Suite, tell=lambda: None) -> list[Row]:
    """For each mutant of one mechanism, the properties that kill it."""
    rows = []
    for mutant in suite.mutants:
        kills = []
        for statement in suite.properties:
            try:
                declared = statement.name in mutant.killed_by
                killed = mutant.is_killed_by(statement, MANY if declared else GATE)
            except Exception:  # undeclared pairs may meet what the mutant cannot take: a kill too
                killed = True
            kills += [statement.name] * killed
        rows.append(Row(mutant.name, mutant.killed_by, tuple(kills)))
        tell()
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print the matrix, mechanism by mechanism; 1 if a declared kill does not happen."""
    parser = argparse.ArgumentParser(description="Every mutant against every property.")
    parser.add_argument("mechanism", nargs="*", help="for example attention.softmax; none: all")
    wanted = parser.parse_args(arguments).mechanism
    found = [s for s in suites() if not wanted or s.mechanism in wanted]
    unknown = set(wanted) - {s.mechanism for s in found}
    if unknown:
        parser.error(f"no suite of {', '.join(sorted(unknown))}")
    console, failures, total, single = Console(highlight=False), 0, 0, 0
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("mutants", total=sum(len(s.mutants) for s in found))
        for suite in found:
            console.print(f"\n{suite.mechanism}", style="bold")
            for row in matrix(suite, lambda: progress.advance(task)):
                missing = set(row.declared) - set(row.kills)
                failures, total = failures + len(missing), total + 1
                single += len(row.kills) == 1
                more = len(set(row.kills) - set(row.declared))
                line = f"  {row.mutant}: {', '.join(row.declared)}"
                line += f" and {more} more" if more else ""
                console.print(line, markup=False, soft_wrap=True)
                for name in sorted(missing):
                    console.print(f"    NOT KILLED by {name}", style="red")
    console.print(f"\n{total} mutants, {single} killed by one property only, {failures} missed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
