"""Structural masks (being written)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minitransformer.arrays import Array


@dataclass(frozen=True)
class Mask:
    queries: int
    keys: int
    rule: Callable[[Array, Array], Array]

    def dense(self) -> Array:
        return self.rule(np.arange(self.queries)[:, None], np.arange(self.keys))


def causal(queries: int, keys: int, *, align: str) -> Mask:
    offset = keys - queries if align == "lower_right" else 0
    return Mask(queries, keys, lambda i, j: j <= i + offset)
