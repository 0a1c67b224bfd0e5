"""Every hand-derived gradient against a numerical one: the table that the demo prints."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from minitransformer.checks.gradients import observed
from minitransformer.checks.suite import GATE, Suite, reference, suites


class ProofRow(NamedTuple):
    """The gradients of one mechanism: how many were compared, and the worst of them."""

    mechanism: str
    statements: int  # properties that compare gradients
    compared: int  # gradients of whole arrays, over all draws
    worst: float  # relative error, in units of the norm of the array
    limit: float  # what it may be
    seconds: float
    failure: str  # empty if every gradient is right


def prove(suite: Suite) -> ProofRow:
    """Compare every gradient of one mechanism; a wrong one is reported, not raised."""
    start = time.perf_counter()
    statements = [p for p in suite.properties if "derivative" in p.name]
    failure = ""
    with observed() as found:
        for statement in statements:
            try:
                statement.run(reference(suite.mechanism), GATE)
            except AssertionError as error:
                failure = failure or f"{statement.name}: {str(error).splitlines()[0]}"
    worst = max(found, key=lambda o: o.error / o.limit, default=None)
    return ProofRow(
        suite.mechanism,
        len(statements),
        len(found),
        worst.error if worst else 0.0,
        worst.limit if worst else 0.0,
        time.perf_counter() - start,
        failure,
    )


def prove_all() -> Iterator[ProofRow]:
    """One row for each mechanism that has a backward pass."""
    for suite in suites():
        row = prove(suite)
        if row.statements:
            yield row
