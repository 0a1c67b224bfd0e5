"""Cross-entropy: how surprised the model is by what came.

    L = -(1/K) Σ_kept Σ_c T_c log softmax(z)_c,   T = (1 - ε) onehot(target) + ε / V  (Eq. 16.15)

in nats, over the K targets that are not ignored; with none left L = 0. Label smoothing spreads ε
over all V classes, the right one among them. arXiv:1512.00567.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Inexact, Integer

from minitransformer.arrays import (
    Array,
    compute_dtype,
    require_array,
    require_cotangent,
    require_in_range,
    require_integers,
)


class CrossEntropyCache(NamedTuple):
    probabilities: Inexact[Array, "R V"]
    targets: Integer[Array, "R"]
    kept: Array  # (R,) bool
    label_smoothing: float
    shape: tuple[int, ...]


def cross_entropy_forward(
    logits: Inexact[Array, "*B V"],
    targets: Integer[Array, "*B"],
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
) -> tuple[Inexact[Array, ""], CrossEntropyCache]:
    """The mean loss over the kept targets, never narrower than float32  (Eq. 16.15)

    Raises
    ------
    TypeError, ValueError
        If shapes disagree, a kept target is no class, or the smoothing is outside [0, 1].
    """
    require_array("logits", logits, min_ndim=1)
    require_in_range("label_smoothing", label_smoothing, 0.0, 1.0)
    require_integers("targets", targets)
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets has shape {targets.shape}, logits needs {logits.shape[:-1]}")
    classes = logits.shape[-1]
    flat = targets.reshape(-1)
    kept = np.ones(flat.shape, bool) if ignore_index is None else flat != ignore_index
    wrong = kept & ((flat < 0) | (flat >= classes))
    if wrong.any():
        raise ValueError(f"targets must lie in [0, {classes}), got {flat[wrong][0]}")

    z = logits.reshape(flat.size, classes).astype(compute_dtype(logits), copy=False)
    if not kept.all():
        z = np.where(kept[:, None], z, 0)  # whatever stood there, NaN or inf, has no part in this
    safe = np.where(kept, flat, 0)
    # pass 1: log-softmax, written out because its exponentials serve the backward
    shifted = z - z.real.max(axis=-1, keepdims=True, initial=-np.inf) if classes else z
    exponentials = np.exp(shifted)
    total = exponentials.sum(axis=-1, keepdims=True)
    log_total = np.log(total)[:, 0]
    # pass 2: what the target, and with smoothing the average class, costs
    rows = np.arange(flat.size)
    cost = log_total - shifted[rows, safe] if flat.size else log_total
    if label_smoothing:
        average = log_total - shifted.mean(axis=-1)
        cost = (1 - label_smoothing) * cost + label_smoothing * average
    # pass 3: the mean over the kept
    loss = np.where(kept, cost, 0).sum() / max(int(kept.sum()), 1)
    cache = CrossEntropyCache(exponentials / total, safe, kept, label_smoothing, logits.shape)
    return np.asarray(loss, dtype=z.dtype), cache


def cross_entropy_backward(
    dloss: float | Inexact[Array, ""], cache: CrossEntropyCache
) -> Inexact[Array, "*B V"]:
    """dz = dL (softmax(z) - T) / K for a kept row, 0 for an ignored one  (Eq. 16.16)"""
    require_cotangent("dloss", dloss, ())
    p, targets, kept, smoothing, shape = cache
    dlogits = p - smoothing / shape[-1] if smoothing else p.copy()
    dlogits[np.arange(len(targets)), targets] -= 1 - smoothing
    share = np.where(kept, dloss / max(int(kept.sum()), 1), 0).astype(p.dtype)
    return (dlogits * share[:, None]).reshape(shape)  # the share of an ignored row is 0
