"""Functions with one forward and one backward, and how they are asked."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minitransformer.checks.suite import Mutant, reference
from minitransformer.checks.vectors.judge import Ask, Given, Told
from minitransformer.checks.vectors.operation import mistake


def simple_ask(
    name: str, leaves: Sequence[str], constants: Sequence[str] = (), output: str = "out"
) -> Ask:
    """Ask `<name>_forward(*leaves, *constants, **options)` and `<name>_backward(dout, cache)`."""

    def ask(target: Any, given: Given) -> Told:
        arrays = [given.inputs[x] for x in (*leaves, *constants)]
        out, cache = getattr(target, f"{name}_forward")(*arrays, **given.options)
        if output not in given.cotangents:
            return Told({output: out}, {})
        grads = getattr(target, f"{name}_backward")(given.cotangents[output], cache)
        if len(leaves) == 1:
            return Told({output: out}, {leaves[0]: grads})
        return Told({output: out}, {x: getattr(grads, x) for x in leaves})

    return ask


def refuses_nothing(mechanism: str, name: str, instead: Any) -> Mutant:
    """The mistake of answering anything: what `invalid` vectors catch. `instead` is the answer."""

    def nothing_refused(*arrays: Any, **options: Any) -> Any:
        right = getattr(reference(mechanism), name)
        try:
            return right(*arrays, **options)
        except (TypeError, ValueError, IndexError):
            return instead

    return mistake(mechanism, name, "an error that nobody raises: something comes out")(
        nothing_refused
    )


def stumbles_over_nothing(mechanism: str, name: str) -> Mutant:
    """The mistake that vectors with an empty axis catch."""

    def division_by_an_empty_axis(*arrays: Any, **options: Any) -> Any:
        if any(np.size(x) == 0 for x in arrays):
            raise ZeroDivisionError
        return getattr(reference(mechanism), name)(*arrays, **options)

    return mistake(mechanism, name, "an index modulo the size of an axis that is empty")(
        division_by_an_empty_axis
    )
