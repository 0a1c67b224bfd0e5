"""What several definitions share, in exact numbers."""

from collections.abc import Sequence

from minitransformer.checks.vectors import exact
from minitransformer.checks.vectors.exact import Exact, total


def softmax(scores: Sequence[Exact]) -> tuple[list[Exact], Exact]:
    """Weights and LSE. The maximum is a constant: it cancels, but whoever subtracts it rounds."""
    top = max(scores, key=lambda s: s.value)
    shifted = [s - Exact(top.value, top.error) for s in scores]
    powers = [exact.exp(s) for s in shifted]
    z = total(powers)
    return [x / z for x in powers], Exact(top.value, top.error) + exact.log(z)
