"""The vectors are what three derivations say, every mistake is caught by one, and none is idle."""

import pytest

from minitransformer.checks import vectors
from minitransformer.checks.vectors import build
from minitransformer.checks.vectors.flags import FLAGS
from minitransformer.checks.vectors.operations import operations

OPERATIONS = list(operations().values())
each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)


@each_operation
def test_the_files_are_what_the_derivations_give_to_the_byte(operation, own_errors):
    """The answers are derived again, three times each; `minitransformer vectors check` also finds
    out again which mistakes are caught."""
    known = {v.id: v.kills for v in vectors.load(operation.name)}
    files = build.written(operation, known)
    assert build.differences(operation, files, vectors.folder()) == []


@each_operation
def test_every_mistake_is_caught_and_every_vector_catches_one(operation, own_errors):
    mutants = {m.name: m for m in operation.mutants()}
    found = vectors.load(operation.name)
    assert build.idle(operation, found) == []
    # the rarest mistake of each vector, and a vector for each mistake that is left
    often = {name: sum(name in v.kills for v in found) for name in mutants}
    pairs = {(v.id, min(v.kills, key=often.__getitem__)) for v in found}
    for name in mutants.keys() - {name for _, name in pairs}:
        pairs.add((next(v.id for v in found if name in v.kills), name))
    by_id = {v.id: v for v in found}
    for id, name in sorted(pairs):
        assert build.caught(operation, by_id[id], mutants[name]), f"{name!r} passes {id}"


@each_operation
def test_an_id_is_used_once_and_every_flag_is_explained(operation):
    found = vectors.load(operation.name)
    assert len({v.id for v in found}) == len(found)
    assert {flag for v in found for flag in v.flags} <= FLAGS.keys()
    assert all(v.flags and v.about for v in found)


def test_every_folder_has_an_operation():
    assert vectors.names() == [operation.name for operation in OPERATIONS]
