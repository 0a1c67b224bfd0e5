"""What a head is worth: a gate on each, and how much the loss feels it.

    õ_h = ξ_h o_h,   ξ_h = 1   o_h what head h gives before the output projection  (Eq. 14.8)
    dξ_h = ⟨o_h, dõ_h⟩,   do_h = ξ_h dõ_h  (Eq. 14.9)
    I_h = (1/B) Σ_units |Σ_{rows of the unit} ⟨o_h, do_h⟩|  (Eq. 14.10)
    Î_lh = I_lh / ‖I_l‖₂: heads of unlike layers beside each other  (Eq. 14.11)
    Δ_h = L(ξ_h = 0) - L: what the gradient estimates, at a forward pass for each head  (Eq. 14.12)

Everything depends on where |·| stands, and published code differs: the unit is one example in the
paper, one token in the authors' program, one batch in a well-known library, where examples that
need a head and examples that it harms cancel. All are divided by the number of *examples* B here,
so that a larger unit never gives more: batch <= example <= token.

`dout` belongs to a loss that is a *sum* over examples, in evaluation: a mean over tokens weighs a
long text less, and a random mask would be blamed on the head. arXiv:1905.10650.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Inexact

from minitransformer.arrays import (
    Array,
    compute_dtype,
    narrowed,
    require_array,
    require_broadcastable,
    require_cotangent,
    require_whole,
    unbroadcast,
)

GRANULARITIES = ("token", "example", "batch")


class GateCache(NamedTuple):
    out: Inexact[Array, "*B H N E"]
    gates: Inexact[Array, "..."]


class GateGrads(NamedTuple):
    out: Inexact[Array, "*B H N E"]
    gates: Inexact[Array, "..."]


# ---- gates ---------------------------------------------------------------------------------------


def gate_heads_forward(
    out: Inexact[Array, "*B H N E"], gates: Inexact[Array, "..."]
) -> tuple[Inexact[Array, "*B H N E"], GateCache]:
    """Each head times its gate  (Eq. 14.8). `gates` is (H,), or broadcasts to (*B, H).

    Raises
    ------
    TypeError, ValueError
        If an argument is no floating array, or the gates do not broadcast.
    """
    require_array("out", out, min_ndim=3)
    require_array("gates", gates, min_ndim=1)
    require_broadcastable("gates", gates.shape, out.shape[:-2])
    wide = compute_dtype(out, gates)
    gated = out.astype(wide, copy=False) * gates.astype(wide, copy=False)[..., None, None]
    return narrowed(gated, out), GateCache(out, gates)


def gate_heads_backward(dout: Inexact[Array, "*B H N E"], cache: GateCache) -> GateGrads:
    """dξ_h = ⟨o_h, dõ_h⟩ over all that the gate is shared by,   do_h = ξ_h dõ_h  (Eq. 14.9)

    Raises
    ------
    ValueError
        If `dout` does not have the shape of what the forward pass returned.
    """
    out, gates = cache
    require_cotangent("dout", dout, out.shape)
    wide = compute_dtype(dout, out, gates)
    d = dout.astype(wide, copy=False)
    dgates = unbroadcast((out.astype(wide, copy=False) * d).sum(axis=(-2, -1)), gates.shape)
    dx = d * gates.astype(wide, copy=False)[..., None, None]
    return GateGrads(dx.astype(out.dtype, copy=False), dgates.astype(gates.dtype, copy=False))


# ---- importance ----------------------------------------------------------------------------------


def head_importance(
    out: Float[Array, "*B H N E"], dout: Float[Array, "*B H N E"], *, granularity: str
) -> Float[Array, "H"]:
    """How much the loss feels each head's gate  (Eq. 14.10), from what the heads gave and the
    gradient of that. Never narrower than float32.

    The unit of |·| is one "token", one "example" (of the paper) or the whole "batch". Several
    batches: the mean, weighted by their examples, but for "batch", which depends on how the
    data was cut.

    Raises
    ------
    TypeError, ValueError
        If an argument is no floating array, the shapes differ, or the granularity is unknown.
    """
    require_array("out", out, min_ndim=3)
    require_array("dout", dout, min_ndim=3)
    require_cotangent("dout", dout, out.shape)
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}"
        )
    wide = compute_dtype(out, dout)
    felt = (out.astype(wide, copy=False) * dout.astype(wide, copy=False)).sum(axis=-1)
    if granularity == "token":
        felt = np.abs(felt)
    felt = felt.sum(axis=-1)  # (*B, H)
    if granularity == "example":
        felt = np.abs(felt)
    examples = tuple(range(felt.ndim - 1))
    count = max(felt.size // max(felt.shape[-1], 1), 1)
    return np.abs(felt.sum(axis=examples)) / count


def normalised_importance(importance: Float[Array, "*L H"]) -> Float[Array, "*L H"]:
    """Each layer's importances, divided by their norm  (Eq. 14.11); 0 where none of them is felt.

    Raises
    ------
    TypeError, ValueError
        If `importance` is no floating array, or negative somewhere.
    """
    require_array("importance", importance, min_ndim=1)
    x = importance.astype(compute_dtype(importance), copy=False)
    if (x < 0).any():
        raise ValueError("importance must not be negative: these are gradients, take |·| per unit")
    largest = x.max(axis=-1, keepdims=True, initial=0)
    x = x / np.where(largest > 0, largest, 1)  # squares of tiny gradients would vanish
    norm = np.sqrt((x * x).sum(axis=-1, keepdims=True))
    return x / np.where(norm > 0, norm, 1)


def head_ablation(loss: Callable[[Float[Array, "H"]], float], heads: int) -> Float[Array, "H"]:
    """Δ_h = L(ξ_h = 0) - L(1): how much worse it is without the head  (Eq. 14.12)

    `loss` takes the gates (H,). Exact where the gradient is a first guess: -dξ_h if the loss is
    linear in the gate. Negative: the head did harm.

    Raises
    ------
    TypeError, ValueError
        If `heads` is no whole number or below 1.
    """
    require_whole(1, heads=heads)
    whole = loss(np.ones(heads))
    return np.array([loss(1 - np.eye(heads)[h]) - whole for h in range(heads)], dtype=np.float64)
