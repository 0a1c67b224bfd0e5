"""How a head is doing, read from its attention map P: how spread, how far, how loud.

    H_i = -Σ_j P_ij log P_ij,   0 log 0 = 0: from 0 to log n, n the keys row i may read  (Eq. 14.1)
    support e^{H_i}: how many keys, spread evenly, would have this entropy  (Eq. 14.3)
    relative entropy H_i / log n: 1 is flat, 0 is one key  (Eq. 14.4)
    ‖P‖ = sqrt(Σ_ij P_ij²): √N where each row picks one key, √(N / M) where all are flat  (Eq. 14.5)
    distance Σ_j P_ij |i + o - j|, in positions, o the offset of the queries  (Eq. 14.6)
    output (1/N) Σ_i ‖o_i‖, or of o_i W_O: what the head adds to the residual stream  (Eq. 14.7)
    overlap (1/N) Σ_ij min(P_aij, P_bij): the share of attention that two heads give to the same
    keys  (Eq. 14.27)
    CKA ‖Y_aᵀ Y_b‖² / (‖Y_aᵀ Y_a‖ ‖Y_bᵀ Y_b‖), rows of Y the outputs less their mean: 1 if one head
    is the other turned, scaled and moved  (Eq. 14.28)

P is softmax's, at evaluation or before a multiplier: inverted weights are no distribution and their
entropy means nothing. A row that may read nothing has entropy, support and distance 0, and counts
in no mean. None of this is importance: a flat head may matter and a sharp one be idle. Entropy that
falls to 0 goes with diverging runs, arXiv:2303.06296; distance, arXiv:1906.04284; norms beside
weights, arXiv:2004.10102.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Inexact

from minitransformer.arrays import (
    Array,
    compute_dtype,
    require_array,
    require_bool,
    require_broadcastable,
)

# How far a row's sum may be from 1: float16 weights of a long row lose a few thousandths.
ROW_SUM = 1e-2


class EntropyCache(NamedTuple):
    weights: Inexact[Array, "*B H N M"]
    log: Inexact[Array, "*B H N M"]  # log P, and 0 where P is 0
    entropy: Inexact[Array, "*B H N"]


# ---- rows ----------------------------------------------------------------------------------------


def live_rows(weights: Inexact[Array, "*B H N M"]) -> Bool[Array, "*B H N"]:
    """Rows that read anything: the ones that a mean counts."""
    return np.asarray(_distributions(weights).any(axis=-1))


def mean_over_rows(
    measure: Inexact[Array, "*B H N"], rows: Bool[Array, "..."] | None = None
) -> Inexact[Array, "*B H"]:
    """The mean of a measure over the rows that count; 0 for a head without one.

    `rows` is boolean, True = counts, and broadcasts to (*B, H, N): `live_rows`, without those of
    padding. None counts every row. Whatever stands in a row that does not count has no influence.

    Raises
    ------
    TypeError, ValueError
        If an argument is no array of the right kind, or `rows` does not broadcast.
    """
    require_array("measure", measure, min_ndim=2)
    x = measure.astype(compute_dtype(measure), copy=False)
    if rows is None:
        return x.sum(axis=-1) / max(x.shape[-1], 1)
    require_bool("rows", rows)
    require_broadcastable("rows", rows.shape, x.shape)
    rows = np.broadcast_to(rows, x.shape)
    count = np.maximum(rows.sum(axis=-1), 1).astype(x.dtype)
    return np.where(rows, x, 0).sum(axis=-1) / count


def _distributions(weights: Array) -> Array:
    """The weights in the dtype to compute in, if their rows are distributions (or dead)."""
    require_array("weights", weights, min_ndim=3)
    weights = weights.astype(compute_dtype(weights), copy=False)
    sums = weights.real.sum(axis=-1)
    if (weights.real < 0).any() or ((sums != 0) & (np.abs(sums - 1) > ROW_SUM)).any():
        raise ValueError(
            "weights must be attention weights, each row >= 0 with sum 1 (or all 0): these are not;"
            " take them before any multiplier"
        )
    return weights


# ---- entropy -------------------------------------------------------------------------------------


def attention_entropy_forward(
    weights: Inexact[Array, "*B H N M"],
) -> tuple[Inexact[Array, "*B H N"], EntropyCache]:
    """The entropy of each row, in nats  (Eq. 14.1); 0 for a row that reads nothing.

    The result is never narrower than float32.

    Raises
    ------
    TypeError, ValueError
        Here and below: if `weights` is no floating array with a head axis, or a row is neither a
        distribution nor all 0.
    """
    p = _distributions(weights)
    log = np.log(p, out=np.zeros_like(p), where=p.real > 0)
    entropy = 0 - (p * log).sum(axis=-1)  # 0 - x: one key has entropy 0, not -0
    return entropy, EntropyCache(p, log, entropy)


def attention_entropy_backward(
    dentropy: Inexact[Array, "*B H N"], cache: EntropyCache
) -> Inexact[Array, "*B H N M"]:
    """dS = -P ⊙ (log P + H) · dH: the gradient with respect to the *scores*  (Eq. 14.2)

    Not to P, where it would be -(log P + 1) and infinite at a masked key: through softmax the two
    infinities cancel, and a masked key gets exactly 0.

    Raises
    ------
    ValueError
        If `dentropy` does not have the shape of the entropy.
    """
    if dentropy.shape != cache.entropy.shape:
        raise ValueError(
            f"dentropy has shape {dentropy.shape}, the forward pass gave {cache.entropy.shape}"
        )
    return -cache.weights * (cache.log + cache.entropy[..., None]) * dentropy[..., None]


def effective_support(weights: Float[Array, "*B H N M"]) -> Float[Array, "*B H N"]:
    """How many keys a row reads: e^H  (Eq. 14.3); 0 for a row that reads nothing."""
    entropy, cache = attention_entropy_forward(weights)
    return np.where(cache.weights.any(axis=-1), np.exp(entropy), 0)


def relative_entropy(
    weights: Float[Array, "*B H N M"], keep: Bool[Array, "..."] | None = None
) -> Float[Array, "*B H N"]:
    """H / log n, n the keys that `keep` allows the row  (Eq. 14.4); 0 where n is 0 or 1.

    Rows of a causal map may read 1, 2, 3 .. keys: only this compares them.

    Raises
    ------
    TypeError, ValueError
        Also if `keep` is not boolean, does not broadcast, or forbids a pair that has weight.
    """
    entropy, cache = attention_entropy_forward(weights)
    keys = np.full(entropy.shape, weights.shape[-1])
    if keep is not None:
        require_bool("keep", keep)
        require_broadcastable("keep", keep.shape, weights.shape)
        if ((cache.weights != 0) & ~keep).any():
            raise ValueError("keep forbids a pair that has weight: it is not the mask of these")
        keys = np.broadcast_to(keep, weights.shape).sum(axis=-1)
    most = np.log(np.maximum(keys, 2)).astype(entropy.dtype)
    return np.where(keys > 1, entropy / most, 0)


# ---- concentration, distance, output -------------------------------------------------------------


def weight_norm(weights: Float[Array, "*B H N M"]) -> Float[Array, "*B H"]:
    """The Frobenius norm of each head's map  (Eq. 14.5)"""
    return np.linalg.norm(_distributions(weights), axis=(-2, -1))


def mean_distance(weights: Float[Array, "*B H N M"], *, offset: int) -> Float[Array, "*B H N"]:
    """How far each row looks, in positions  (Eq. 14.6); 0 for a row that reads nothing.

    Row i stands at key position i + offset: 0 if both start together, M - N if the last query is
    the newest key.

    Raises
    ------
    TypeError, ValueError
        Also if `offset` is no whole number.
    """
    if not isinstance(offset, int | np.integer) or isinstance(offset, bool):
        raise TypeError(f"offset must be a whole number of positions, got {offset!r}")
    p = _distributions(weights)
    positions, keys = np.arange(p.shape[-2]) + offset, np.arange(p.shape[-1])
    distance = np.abs(positions[:, None] - keys).astype(p.dtype)
    return (p * distance).sum(axis=-1)


def head_output_norm(
    out: Float[Array, "*B H N E"],
    *,
    rows: Bool[Array, "..."] | None = None,
    projection: Float[Array, "HE W"] | None = None,
) -> Float[Array, "*B H"]:
    """The mean over rows of the norm of what a head gives  (Eq. 14.7)

    With `projection`, the output matrix W_O (H·E, W), of what it adds to the residual stream: a
    loud head may be one that W_O does not listen to. `rows` as in `mean_over_rows`.

    Raises
    ------
    TypeError, ValueError
        If an argument is no floating array, or `projection` does not have H·E rows.
    """
    require_array("out", out, min_ndim=3)
    x = out.astype(compute_dtype(out), copy=False)
    if projection is not None:
        require_array("projection", projection)
        heads, width = out.shape[-3], out.shape[-1]
        if projection.ndim != 2 or len(projection) != heads * width:
            raise ValueError(
                f"projection has shape {projection.shape}, expected {heads * width} rows:"
                f" {heads} heads of width {width}"
            )
        # a head's rows of W_O are consecutive
        x = x @ projection.reshape(heads, width, projection.shape[1])
    return mean_over_rows(np.linalg.norm(x, axis=-1), rows)


# ---- two heads -----------------------------------------------------------------------------------


def pairwise_overlap(
    weights: Float[Array, "*B H N M"], rows: Bool[Array, "..."] | None = None
) -> Float[Array, "*B H H"]:
    """How much two heads read the same keys  (Eq. 14.27): 1 if their maps agree, 0 if no key is
    read by both. `rows` as in `mean_over_rows`, but (*B, N) or less: both heads have the same.

    The first rows of a causal map agree whatever the heads do: leave them out.

    Raises
    ------
    TypeError, ValueError
        Also if `rows` is not boolean or does not broadcast.
    """
    p = _distributions(weights)
    *leading, heads, queries, _ = p.shape
    if rows is not None:
        require_bool("rows", rows)
        require_broadcastable("rows", rows.shape, (*leading, queries))
    found = np.zeros((*leading, heads, heads), p.dtype)
    for a in range(heads):  # all pairs at once would be H maps larger
        both = np.minimum(p[..., a : a + 1, :, :], p).sum(axis=-1)
        found[..., a, :] = mean_over_rows(both, None if rows is None else rows[..., None, :])
    return found


def output_cka(out: Float[Array, "*B H N E"]) -> Float[Array, "H H"]:
    """How alike two heads' outputs are, up to a rotation, a factor and a constant  (Eq. 14.28),
    over all rows of all examples; 0 for a head that gives the same everywhere.

    Raises
    ------
    TypeError, ValueError
        If `out` is no floating array with a head axis.
    """
    require_array("out", out, min_ndim=3)
    heads, width = out.shape[-3], out.shape[-1]
    y = np.moveaxis(out.astype(compute_dtype(out), copy=False), -3, 0)
    y = y.reshape(heads, y[0].size // max(width, 1), width)
    rounding = 8 * np.finfo(y.dtype).eps * np.abs(y).max(axis=(1, 2), keepdims=True, initial=0)
    y = y - y.mean(axis=1, keepdims=True) if y.size else y
    size = np.abs(y).max(axis=(1, 2), keepdims=True, initial=0)
    # fourth powers of small numbers vanish; what rounding leaves of a constant is none
    y = np.where(size > rounding, y / np.where(size > 0, size, 1), 0)
    products = y[:, None].mT @ y[None]  # (H, H, E, E)
    squares = (products * products).sum(axis=(-2, -1))
    own = np.sqrt(np.diagonal(squares))
    norm = own[:, None] * own
    return np.where(norm > 0, squares / np.where(norm > 0, norm, 1), 0)
