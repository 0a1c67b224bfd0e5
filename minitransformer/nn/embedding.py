"""The embedding: a table of rows, looked up by token.

    y_n = E[t_n],   dE[t] = Σ_{n: t_n = t} dy_n  (Eq. 16.3)

A token that occurs twice gets both gradients: `dE[tokens] += dy` would keep only the last.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Inexact, Integer

from minitransformer.arrays import (
    Array,
    compute_dtype,
    require_array,
    require_cotangent,
    require_integers,
    require_whole,
)
from minitransformer.nn.module import Module, Parameter


class EmbeddingCache(NamedTuple):
    tokens: Integer[Array, "*B"]
    shape: tuple[int, int]
    padding_index: int | None


def embedding_forward(
    tokens: Integer[Array, "*B"],
    table: Inexact[Array, "V W"],
    *,
    padding_index: int | None = None,
) -> tuple[Inexact[Array, "*B W"], EmbeddingCache]:
    """Rows of `table`  (Eq. 16.3). The row of `padding_index` is read but never learns.

    Raises
    ------
    TypeError, ValueError
        If tokens are no integers, or lie outside [0, V): a negative one would silently wrap around.
    """
    require_array("table", table)
    if table.ndim != 2:
        raise ValueError(f"table must have shape (entries, width), got {table.shape}")
    require_integers("tokens", tokens)
    if tokens.size and not (0 <= tokens.min() and tokens.max() < len(table)):
        raise ValueError(
            f"tokens must lie in [0, {len(table)}), got values from {tokens.min()} to "
            f"{tokens.max()}"
        )
    if padding_index is not None and not 0 <= padding_index < len(table):
        raise ValueError(f"padding_index must lie in [0, {len(table)}), got {padding_index}")
    return table[tokens], EmbeddingCache(tokens, table.shape, padding_index)


def embedding_backward(
    dout: Inexact[Array, "*B W"], cache: EmbeddingCache
) -> Inexact[Array, "V W"]:
    """Scatter-add the rows back to where they were read  (Eq. 16.3)"""
    require_cotangent("dout", dout, (*cache.tokens.shape, cache.shape[1]))
    dtable = np.zeros(cache.shape, compute_dtype(dout))
    np.add.at(dtable, cache.tokens.ravel(), dout.reshape(cache.tokens.size, cache.shape[1]))
    if cache.padding_index is not None:
        dtable[cache.padding_index] = 0
    return dtable


class Embedding(Module):
    """A table that learns, starting as N(0, std²)."""

    def __init__(
        self,
        entries: int,
        width: int,
        *,
        rng: np.random.Generator,
        std: float = 0.02,
        dtype: np.typing.DTypeLike = np.float64,
    ):
        require_whole(1, entries=entries, width=width)
        table = rng.standard_normal((entries, width)) * std
        self.weight = Parameter(table.astype(dtype), decay=False)

    def forward(
        self, tokens: Integer[Array, "*B"]
    ) -> tuple[Inexact[Array, "*B W"], EmbeddingCache]:
        return embedding_forward(tokens, self.weight.value)

    def backward(self, dout: Inexact[Array, "*B W"], cache: EmbeddingCache) -> None:
        self.weight.grad += embedding_backward(dout, cache)
