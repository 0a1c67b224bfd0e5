"""From many key/value heads to few and back: MHA <-> GQA <-> MQA, by their projections.

    fewer   W'_g = (G/H) Σ_{h // (H/G) = g} W_h,   b'_g likewise  (Eq. 8.9)
    more    W_h = W'_{h // (H/G)},   b_h likewise  (Eq. 8.10)

The mean is the shared head that lies nearest to its group, and it changes nothing if the heads of a
group agree; otherwise the model is another one, and is trained on for a while (5 % of the original
steps in the paper). More heads than before change nothing, ever. Keys *and* values, weights *and*
biases; queries and the output stay as they are. Heads that share a rotation (RoPE) may be averaged
before it. Outputs may not be averaged instead: softmax lies between. arXiv:2305.13245.

A weight is (in, heads · D) here; PyTorch's is the transpose of it.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Inexact

from minitransformer.arrays import (
    Array,
    compute_dtype,
    narrowed,
    require_array,
    require_cotangent,
    require_whole,
)


class GroupingCache(NamedTuple):
    heads: int  # how many there were before
    after: int
    shape: tuple[int, ...]
    dtype: np.dtype


class KeyValueProjections(NamedTuple):
    """W_K, W_V (in, heads · width), and their biases (heads · width,) if there are any."""

    key: Inexact[Array, "..."]
    value: Inexact[Array, "..."]
    key_bias: Inexact[Array, "..."] | None = None
    value_bias: Inexact[Array, "..."] | None = None


# ---- fewer heads ---------------------------------------------------------------------------------


def pool_heads_forward(
    weight: Inexact[Array, "... HD"], heads: int, groups: int
) -> tuple[Inexact[Array, "... GD"], GroupingCache]:
    """The mean of each `heads // groups` neighbours, of a projection or its bias  (Eq. 8.9)

    Raises
    ------
    TypeError, ValueError
        Here and below: if `weight` is no floating array, or the numbers do not divide.
    """
    split = _split(weight, heads, groups, "groups")
    wide = compute_dtype(weight)
    # the group's heads are neighbours: (…, G, H/G, D)
    size = heads // groups
    members = split.reshape(*split.shape[:-2], groups, size, split.shape[-1])
    mean = members.astype(wide, copy=False).sum(axis=-2) / size
    out = narrowed(mean.reshape(*weight.shape[:-1], groups * split.shape[-1]), weight)
    return out, GroupingCache(heads, groups, weight.shape, weight.dtype)


def pool_heads_backward(
    dout: Inexact[Array, "... GD"], cache: GroupingCache
) -> Inexact[Array, "... HD"]:
    """dW_h = (G/H) dW'_{h // (H/G)}  (Eq. 8.11)

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    _require_cotangent(dout, cache)
    out, _ = expand_heads_forward(dout, cache.after, cache.heads)
    return (out / (cache.heads // cache.after)).astype(cache.dtype, copy=False)


# ---- more heads ----------------------------------------------------------------------------------


def expand_heads_forward(
    weight: Inexact[Array, "... GD"], groups: int, heads: int
) -> tuple[Inexact[Array, "... HD"], GroupingCache]:
    """Each head `heads // groups` times, its copies side by side  (Eq. 8.10)

    Query head h then finds under h what it read under h // (H/G).
    """
    require_whole(1, heads=heads, groups=groups)
    if heads % groups:
        raise ValueError(f"groups is {groups}, which does not divide heads = {heads}")
    split = _split(weight, groups, groups, "groups")
    out = np.repeat(split, heads // groups, axis=-2)
    out = out.reshape(*weight.shape[:-1], weight.shape[-1] * (heads // groups))
    return out, GroupingCache(groups, heads, weight.shape, weight.dtype)


def expand_heads_backward(
    dout: Inexact[Array, "... HD"], cache: GroupingCache
) -> Inexact[Array, "... GD"]:
    """dW'_g = Σ_{h // (H/G) = g} dW_h: what is shared collects from everybody  (Eq. 8.12)

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    _require_cotangent(dout, cache)
    wide = compute_dtype(dout)
    size = cache.after // cache.heads
    copies = dout.reshape(*dout.shape[:-1], cache.heads, size, cache.shape[-1] // cache.heads)
    total = copies.astype(wide, copy=False).sum(axis=-2)
    return total.reshape(cache.shape).astype(cache.dtype, copy=False)


# ---- a whole layer -------------------------------------------------------------------------------


def regroup(projections: KeyValueProjections, heads: int, after: int) -> KeyValueProjections:
    """The projections of a layer with `heads` key/value heads, for one with `after` of them: fewer
    by Eq. 8.9, more by Eq. 8.10.

    Raises
    ------
    TypeError, ValueError
        Also if neither number divides the other.
    """
    require_whole(1, heads=heads, after=after)
    if heads % after and after % heads:
        raise ValueError(f"after is {after}, heads {heads}: one of the two must divide the other")

    def one(name: str, x: Array | None) -> Array | None:
        if x is None:
            return None
        require_array(name, x, min_ndim=1)
        if x.shape[-1] % heads:
            raise ValueError(f"{name} has {x.shape[-1]} channels, not a multiple of {heads} heads")
        change = pool_heads_forward if after <= heads else expand_heads_forward
        return change(x, heads, after)[0]

    return KeyValueProjections(*(one(name, x) for name, x in projections._asdict().items()))  # type: ignore[arg-type]


def grouping_distance(weight: Inexact[Array, "... HD"], heads: int, groups: int) -> float:
    """Σ_h ‖W_h - W'_{h // (H/G)}‖², the least that any shared heads could have  (Eq. 8.13)

    0 means that the conversion changes nothing. Biases are asked about like weights.
    """
    pooled, _ = pool_heads_forward(weight, heads, groups)
    shared, _ = expand_heads_forward(pooled, groups, heads)
    wide = compute_dtype(weight)
    difference = weight.astype(wide, copy=False) - shared.astype(wide, copy=False)
    return float((difference * difference).sum())


# ---- inside --------------------------------------------------------------------------------------


def _split(weight: Array, heads: int, groups: int, name: str) -> Array:
    """(…, H·D) as (…, H, D)"""
    require_array("weight", weight, min_ndim=1)
    require_whole(1, heads=heads, groups=groups)
    if heads % groups:
        raise ValueError(f"{name} is {groups}, which does not divide heads = {heads}")
    if weight.shape[-1] % heads:
        raise ValueError(f"weight has {weight.shape[-1]} channels, not a multiple of {heads} heads")
    return weight.reshape(*weight.shape[:-1], heads, weight.shape[-1] // heads)


def _require_cotangent(dout: Array, cache: GroupingCache) -> None:
    width = cache.shape[-1] // cache.heads
    require_cotangent("dout", dout, (*cache.shape[:-1], cache.after * width))
