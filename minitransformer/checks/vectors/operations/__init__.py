"""The operations that have vectors: one module each, with its cases and two derivations of the
answer. The third is the library."""

import importlib
import pkgutil
from functools import cache

from minitransformer.checks.vectors.operation import Operation


@cache
def operations() -> dict[str, Operation]:
    """All of them, by name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        for made in getattr(loaded, "OPERATIONS", ()):
            found[made.name] = made
    return dict(sorted(found.items()))


def operation(name: str) -> Operation:
    """One of them.

    Raises
    ------
    ValueError
        If there is none of this name.
    """
    if name not in operations():
        raise ValueError(f"operation must be one of {', '.join(operations())}, got {name!r}")
    return operations()[name]
