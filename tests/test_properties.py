"""The reference passes every property; every mutant is killed by those it names; no property is
idle."""

import pytest

from minitransformer.checks.suite import GATE, reference, suites

SUITES = list(suites())
PROPERTIES = [(s, p) for s in SUITES for p in s.properties]
MUTANTS = [(s, m) for s in SUITES for m in s.mutants]


@pytest.mark.parametrize(
    "statement", [p for _, p in PROPERTIES], ids=[f"{s.mechanism}:{p.name}" for s, p in PROPERTIES]
)
def test_reference_passes(statement):
    target = reference(statement.mechanism)
    assert statement.applies_to(target), f"the reference lacks one of {statement.needs}"
    statement.run(target, GATE)


@pytest.mark.parametrize(
    "suite, mutant", MUTANTS, ids=[f"{s.mechanism}:{m.name.replace(' ', '_')}" for s, m in MUTANTS]
)
def test_mutant_is_killed(suite, mutant, own_errors):
    assert mutant.killed_by, "a mutant that nothing kills"
    for name in mutant.killed_by:
        assert mutant.is_killed_by(suite[name]), f"{mutant.name!r} survives {name}"


@pytest.mark.parametrize("suite", SUITES, ids=[s.mechanism for s in SUITES])
def test_no_property_is_idle(suite):
    used = {name for mutant in suite.mutants for name in mutant.killed_by}
    idle = {p.name for p in suite.properties} - used
    assert not idle, f"{suite.mechanism}: no mutant is declared to be killed by {sorted(idle)}"


@pytest.mark.parametrize("suite", SUITES, ids=[s.mechanism for s in SUITES])
def test_names_are_unique(suite):
    names = [p.name for p in suite.properties]
    assert len(set(names)) == len(names)
    names = [m.name for m in suite.mutants]
    assert len(set(names)) == len(names)
