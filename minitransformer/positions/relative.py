"""How far each key stands from each query: what the schemes that add to the scores start from."""

import numpy as np
from jaxtyping import Integer

from minitransformer.arrays import Array, require_integers


def relative_positions(
    query_positions: Integer[Array, "*#B N"], key_positions: Integer[Array, "*#B M"]
) -> Integer[Array, "*B N M"]:
    """The key's position minus the query's: negative for the past. Unsigned positions may be given.

    Raises
    ------
    TypeError, ValueError
        If the positions are no arrays of integers, or their leading axes do not broadcast.
    """
    for name, positions in (
        ("query_positions", query_positions),
        ("key_positions", key_positions),
    ):
        require_integers(name, positions)
        if positions.ndim < 1:
            raise ValueError(f"{name} must have shape (*B, length), got ()")
    try:
        np.broadcast_shapes(query_positions.shape[:-1], key_positions.shape[:-1])
    except ValueError:
        raise ValueError(
            f"query_positions {query_positions.shape} and key_positions {key_positions.shape} "
            "differ in their leading axes"
        ) from None
    queries, keys = (p.astype(np.int64) for p in (query_positions, key_positions))
    return keys[..., None, :] - queries[..., None]
