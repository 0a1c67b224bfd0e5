"""Test vectors: inputs and right answers in files that any language can read, each with the
mistakes that it catches.

    from minitransformer.checks import vectors

    for vector in vectors.load("attention"):
        vectors.hold(vector, target)  # an AssertionError says what is wrong

Whoever implements attention in C++ reads the JSON files themselves: docs/vectors.md describes them.
They lie in `vectors/`, one folder an operation, and are written by `minitransformer vectors export`
from the modules of `operations/`: what is asked, and the answer derived three times. `exact.py` has
numbers of 50 digits, which give the gradient and the bound on rounding as well.
"""

from minitransformer.checks.vectors.files import folder, load, load_all, names
from minitransformer.checks.vectors.judge import hold
from minitransformer.checks.vectors.vector import Answer, Expected, Vector

__all__ = ["Answer", "Expected", "Vector", "folder", "hold", "load", "load_all", "names"]
