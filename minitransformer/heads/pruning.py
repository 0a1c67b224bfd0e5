"""Layers with fewer heads: silence some, take them out for good, and choose which.

    y = Σ_h ξ_h o_h W_O,h,   ξ_h in {0, 1}   W_O,h the rows of W_O that read head h  (Eq. 14.19)
    dξ_h = ⟨W_O,h, dW'_h⟩,   dW_O,h = ξ_h dW'_h,   W'_h = ξ_h W_O,h  (Eq. 14.20)
    out for good: columns of W_Q and rows of W_O of every h with ξ_h = 0; columns of W_K and W_V of
    a key/value head g only when ξ_h = 0 for all h with h // (H/G) = g  (Eq. 14.21)
    M_h² = ‖W_Q,h‖² + ‖W_O,h‖² + (G/H) (‖W_K,g‖² + ‖W_V,g‖²),   g = h // (H/G)  (Eq. 14.22)
    the next to go: the smallest (score, layer, h) of a layer that has more than a least number of
    heads, one after the other  (Eq. 14.23)
    keep_{t+1} = the next e of keep_t gone, by scores measured *under* keep_t  (Eq. 14.24)
    removed by step t: ⌊R (1 - (1 - τ)³)⌋,   τ = (t - t_0) / (t_1 - t_0) within [0, 1]  (Eq. 14.25)
    by chance: u(layer, h) / 2³² of the mask law, one number for each head  (Eq. 14.26)

Silenced and removed are the same function, of which only the second is smaller and faster. The
gradient of a gate needs no gate: it is that of W_O, weighed by W_O (at ξ = 1).

Scores come from `heads.importance` (what the loss feels), from Eq. 14.22 (magnitude) or from
Eq. 14.26: without the last two nobody knows whether the first is worth its passes. Scores go stale
as soon as a head is gone, so Eq. 14.24 measures again. After training, arXiv:1905.10650; during it,
in the cubic rhythm of arXiv:1710.01878. A head is always known by its *first* number: removing 0
and then 1 leaves 2, 3 and so on.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Inexact

from minitransformer.arrays import (
    Array,
    compute_dtype,
    narrowed,
    require_array,
    require_bool,
    require_cotangent,
    require_whole,
)
from minitransformer.philox import Draw, Stream, random_bits


class HeadGateCache(NamedTuple):
    output: Inexact[Array, "HE W"]
    gates: Inexact[Array, "H"]


class HeadGateGrads(NamedTuple):
    output: Inexact[Array, "HE W"]
    gates: Inexact[Array, "H"]


class HeadProjections(NamedTuple):
    """What a layer's heads are made of: W_Q (W, H·D), W_K (W, G·D), W_V (W, G·E), W_O (H·E, W), and
    biases of the first three if there are any. The bias of W_O belongs to no head."""

    query: Inexact[Array, "..."]
    key: Inexact[Array, "..."]
    value: Inexact[Array, "..."]
    output: Inexact[Array, "..."]
    query_bias: Inexact[Array, "..."] | None = None
    key_bias: Inexact[Array, "..."] | None = None
    value_bias: Inexact[Array, "..."] | None = None


class HeadsLeft(NamedTuple):
    """A layer's projections, and which heads they are of, by their first numbers."""

    projections: HeadProjections
    heads: tuple[int, ...]
    groups: tuple[int, ...]  # key/value heads
    sizes: tuple[int, int]  # H and G of the whole layer

    @property
    def reads(self) -> tuple[int, ...]:
        """For each query head, the place among the key/value heads left of the one it reads:
        `k[..., reads, :, :]` has a key head for each query head."""
        heads, groups = self.sizes
        return tuple(self.groups.index(h // (heads // groups)) for h in self.heads)

    @property
    def is_even(self) -> bool:
        """True if head h reads h // (heads / groups), counted among those left: then grouped
        attention takes the keys as they are."""
        each, rest = divmod(len(self.heads), len(self.groups))
        return not rest and self.reads == tuple(h // each for h in range(len(self.heads)))


# ---- silenced ------------------------------------------------------------------------------------


def gate_output_forward(
    output: Inexact[Array, "HE W"], gates: Inexact[Array, "H"]
) -> tuple[Inexact[Array, "HE W"], HeadGateCache]:
    """W_O with the rows of each head times its gate  (Eq. 14.19)

    Raises
    ------
    TypeError, ValueError
        If an argument is no floating array, or the gates do not divide the rows.
    """
    require_array("output", output, min_ndim=2)
    require_array("gates", gates, min_ndim=1)
    _require_divides("output", len(output), "rows", "gates", len(gates))
    wide = compute_dtype(output, gates)
    each = np.repeat(gates.astype(wide, copy=False), len(output) // len(gates))
    return narrowed(output.astype(wide, copy=False) * each[:, None], output), HeadGateCache(
        output, gates
    )


def gate_output_backward(dout: Inexact[Array, "HE W"], cache: HeadGateCache) -> HeadGateGrads:
    """What the loss feels of each gate and of W_O behind it  (Eq. 14.20)

    With gates of 1 and `dout` the gradient of W_O that one example left behind, |dξ| is the term of
    that example in Eq. 14.10.

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    output, gates = cache
    require_cotangent("dout", dout, output.shape)
    wide = compute_dtype(dout, output, gates)
    d = dout.astype(wide, copy=False)
    felt = (d * output.astype(wide, copy=False)).sum(axis=-1)
    dgates = felt.reshape(len(gates), -1).sum(axis=-1)
    each = np.repeat(gates.astype(wide, copy=False), len(output) // len(gates))
    grads = (d * each[:, None], dgates)
    return HeadGateGrads(
        *(x.astype(y.dtype, copy=False) for x, y in zip(grads, cache, strict=True))
    )


# ---- out for good --------------------------------------------------------------------------------


def all_heads(projections: HeadProjections, heads: int, groups: int) -> HeadsLeft:
    """A layer that has all its heads, to prune from.

    Raises
    ------
    TypeError, ValueError
        If the numbers do not divide, or an array does not hold as many heads.
    """
    require_whole(1, heads=heads, groups=groups)
    if heads % groups:
        raise ValueError(f"groups is {groups}, which does not divide heads = {heads}")
    for name, x in projections._asdict().items():
        if x is None:
            continue
        require_array(name, x, min_ndim=1 if name.endswith("bias") else 2)
        axis = 0 if name == "output" else -1
        what = "heads" if name in ("query", "query_bias", "output") else "groups"
        number = heads if what == "heads" else groups
        _require_divides(name, x.shape[axis], "rows" if axis == 0 else "columns", what, number)
    return HeadsLeft(projections, tuple(range(heads)), tuple(range(groups)), (heads, groups))


def prune_heads(layer: HeadsLeft, keep: Bool[Array, "H"]) -> HeadsLeft:
    """The layer without the heads that `keep` (H,) says no to  (Eq. 14.21)

    H is the number of heads that the layer once had; a head that is gone stays gone. Arrays are
    copies, of the same dtype.

    Raises
    ------
    TypeError, ValueError
        If `keep` is not boolean and (H,), or no head would be left.
    """
    heads, groups = layer.sizes
    require_bool("keep", keep)
    if keep.shape != (heads,):
        raise ValueError(
            f"keep has shape {keep.shape}, expected ({heads},): one flag for each head that the "
            "layer once had"
        )
    left = [h for h in layer.heads if keep[h]]
    if not left:
        raise ValueError("keep leaves no head: a layer needs one, or must be left out as a whole")
    left_groups = sorted({h // (heads // groups) for h in left})
    by_head = [layer.heads.index(h) for h in left]
    by_group = [layer.groups.index(g) for g in left_groups]

    def some(name: str, x: Array | None) -> Array | None:
        if x is None:
            return None
        if name == "output":
            return x.reshape(len(layer.heads), -1, x.shape[-1])[by_head].reshape(-1, x.shape[-1])
        of_heads = name in ("query", "query_bias")
        number, wanted = (len(layer.heads), by_head) if of_heads else (len(layer.groups), by_group)
        split = x.reshape(*x.shape[:-1], number, x.shape[-1] // number)
        return split[..., wanted, :].reshape(*x.shape[:-1], -1)

    arrays = {name: some(name, x) for name, x in layer.projections._asdict().items()}
    return HeadsLeft(HeadProjections(**arrays), tuple(left), tuple(left_groups), layer.sizes)  # type: ignore[arg-type]


# ---- scores --------------------------------------------------------------------------------------


def head_magnitude(layer: HeadsLeft) -> Float[Array, "H"]:
    """The norm of what each head is made of, its share of a common key/value head among it
    (Eq. 14.22); 0 for a head that is gone. Biases do not count. Never narrower than float32."""
    heads, groups = layer.sizes
    p = layer.projections

    def squares(x: Array, number: int) -> Array:
        wide = x.astype(compute_dtype(x), copy=False)
        return (wide * wide).reshape(len(x), number, -1).sum(axis=(0, 2))

    of_groups = squares(p.key, len(layer.groups)) + squares(p.value, len(layer.groups))
    own = squares(p.query, len(layer.heads)) + squares(p.output.T, len(layer.heads))
    found = np.zeros(heads, own.dtype)
    found[list(layer.heads)] = np.sqrt(own + of_groups[list(layer.reads)] * (groups / heads))
    return found


def random_scores(draw: Draw, layers: int, heads: int) -> Float[Array, "L H"]:
    """Scores in [0, 1) that know nothing  (Eq. 14.26)

    The same for a head however many layers and heads there are beside it.
    """
    require_whole(1, layers=layers, heads=heads)
    zero = np.array(0)
    words = [
        random_bits(draw, Stream.PRUNING, layer, np.arange(heads), zero, zero)
        for layer in range(layers)
    ]
    return np.stack(words) / 2.0**32


# ---- who goes, and when --------------------------------------------------------------------------


def choose_heads(
    scores: Float[Array, "L H"], keep: Bool[Array, "L H"], remove: int, *, minimum: int = 1
) -> Bool[Array, "L H"]:
    """`keep` without `remove` more heads, those with the lowest scores  (Eq. 14.23)

    No layer goes below `minimum` heads. What stands at a head that is gone does not matter.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type or shape, a score is NaN, or there are not as many heads
        to remove.
    """
    require_array("scores", scores, min_ndim=2)
    require_bool("keep", keep)
    require_whole(0, remove=remove, minimum=minimum)
    if keep.shape != scores.shape or keep.ndim != 2:
        raise ValueError(f"keep has shape {keep.shape}, scores {scores.shape}: both are (L, H)")
    if np.isnan(scores[keep]).any():
        raise ValueError("scores holds NaN: such a head is neither important nor unimportant")
    spare = int(np.maximum(keep.sum(axis=1) - minimum, 0).sum())
    if remove > spare:
        raise ValueError(
            f"remove is {remove}, but only {spare} heads can go if each layer keeps {minimum}"
        )
    left = keep.copy()
    order = sorted(zip(*np.nonzero(keep), strict=True), key=lambda at: (scores[at], *at))
    for layer, head in order:
        if remove and left[layer].sum() > minimum:
            left[layer, head] = False
            remove -= 1
    return left


def prune_iteratively(
    measure: Callable[[Bool[Array, "L H"]], Float[Array, "L H"]],
    keep: Bool[Array, "L H"],
    left: int,
    *,
    each: int = 1,
    minimum: int = 1,
) -> Iterator[Bool[Array, "L H"]]:
    """Remove `each` heads a round until `left` are left, and yield what is kept after each round
    (Eq. 14.24). `measure` scores the heads of the model under the given `keep`; a large `each` is
    one-shot pruning.

    Raises
    ------
    TypeError, ValueError
        As `choose_heads`.
    """
    require_whole(1, each=each)
    require_whole(0, left=left)
    require_bool("keep", keep)
    while keep.sum() > left:
        scores = measure(keep.copy())
        keep = choose_heads(scores, keep, min(each, int(keep.sum()) - left), minimum=minimum)
        yield keep.copy()


def removed_by(step: int, *, total: int, start: int, end: int) -> int:
    """How many of the `total` heads to remove are gone at a step: none until `start`, all from
    `end` on, most of them early  (Eq. 14.25)

    Raises
    ------
    TypeError, ValueError
        If a number is not whole or negative, or `end` is not after `start`.
    """
    require_whole(0, step=step, total=total, start=start, end=end)
    if end <= start:
        raise ValueError(f"end is {end}, which is not after start = {start}")
    done = min(max(step - start, 0), end - start)
    span = end - start  # in whole numbers: a floor that rounding cannot move
    return total * (span**3 - (span - done) ** 3) // span**3


def _require_divides(name: str, size: int, unit: str, what: str, number: int) -> None:
    if number == 0 or size % number:
        raise ValueError(f"{name} has {size} {unit}, not a multiple of {number} {what}")
