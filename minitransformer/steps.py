"""Backward passes one line at a time: nothing is fused, and every value on the way has a gradient.

Write a forward pass as lines that do one thing each:

    softmax        m = max x,  s = x - m,  e = exp s,  z = Σ e,  r = 1/z,  y = e · r  (Eq. 1.11)
    attention      R = Q Kᵀ,   S = scale · R where keep, else -inf,   P = softmax S,
                   O = P V  (Eq. 2.7)
    renormalise    a = P ⊙ Z,   c = Σ a,   r = 1/c, or 0 for c = 0,   W = a · r  (Eq. 4.14)
    cross-entropy  m = max x,   s = x - m,   e = exp s,   z = Σ e,   l = log z,   ℓ = s - l,
                   t = ℓ at the target,   L = -mean t  (Eq. 16.17)

Then go back through them, last line first. A line c = f(a, b) sends dc · ∂f/∂a to da and
dc · ∂f/∂b to db; a value that two lines read is sent two parts, which add up; a value that was
broadcast collects the sum. Each `_backward` returns the gradient of every value under its own name.
What algebra then makes of these lines, fused, stands beside each mechanism.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Inexact, Integer

from minitransformer.arrays import Array
from minitransformer.attention.softmax import SoftmaxCache, softmax_backward, softmax_forward


def _first_largest(x: Array) -> Array:
    """1 at the first largest entry of each row, 0 elsewhere: where a maximum comes from."""
    return np.arange(x.shape[-1]) == x.real.argmax(axis=-1)[..., None]


# ---- softmax -------------------------------------------------------------------------------------


class SoftmaxSteps(NamedTuple):
    """The values of Eq. 1.11, or their gradients."""

    scores: Inexact[Array, "*B M"]
    maximum: Inexact[Array, "*B 1"]
    shifted: Inexact[Array, "*B M"]
    exponentials: Inexact[Array, "*B M"]
    total: Inexact[Array, "*B 1"]
    inverse: Inexact[Array, "*B 1"]
    weights: Inexact[Array, "*B M"]


def softmax_steps_forward(scores: Inexact[Array, "*B M"]) -> SoftmaxSteps:
    """Softmax of finite rows with at least one entry, line by line  (Eq. 1.11)"""
    m = np.where(_first_largest(scores), scores, 0).sum(axis=-1, keepdims=True)
    s = scores - m
    e = np.exp(s)
    z = e.sum(axis=-1, keepdims=True)
    r = 1 / z
    return SoftmaxSteps(scores, m, s, e, z, r, e * r)


def softmax_steps_backward(dweights: Inexact[Array, "*B M"], steps: SoftmaxSteps) -> SoftmaxSteps:
    """The gradient of every value of Eq. 1.11, last line first.

    `exponentials` are read by two lines, and so are `scores`. The maximum belongs to the first
    largest score; its gradient comes out as 0, which is why the fused form does not know it.
    """
    # y = e · r
    de = dweights * steps.inverse
    dr = (dweights * steps.exponentials).sum(axis=-1, keepdims=True)
    # r = 1/z
    dz = -dr * steps.inverse**2
    # z = Σ e, the second line that reads e
    de = de + dz
    # e = exp s
    ds = de * steps.exponentials
    # s = x - m
    dx = ds
    dm = -ds.sum(axis=-1, keepdims=True)
    # m = max x
    dx = dx + dm * _first_largest(steps.scores)
    return SoftmaxSteps(dx, dm, ds, de, dz, dr, dweights)


# ---- attention -----------------------------------------------------------------------------------


class AttentionSteps(NamedTuple):
    """The values of Eq. 2.7, or their gradients."""

    q: Inexact[Array, "*B N D"]
    k: Inexact[Array, "*B M D"]
    v: Inexact[Array, "*B M E"]
    products: Inexact[Array, "*B N M"]
    scores: Inexact[Array, "*B N M"]
    weights: Inexact[Array, "*B N M"]
    out: Inexact[Array, "*B N E"]


def attention_steps_forward(
    q: Inexact[Array, "*B N D"],
    k: Inexact[Array, "*B M D"],
    v: Inexact[Array, "*B M E"],
    *,
    scale: float,
    keep: Bool[Array, "N M"],
) -> AttentionSteps:
    """Attention without heads or options, line by line  (Eq. 2.7)"""
    products = q @ np.swapaxes(k, -1, -2)
    scores = np.where(keep, scale * products, -np.inf)
    weights, _ = softmax_forward(scores)
    return AttentionSteps(q, k, v, products, scores, weights, weights @ v)


def attention_steps_backward(
    dout: Inexact[Array, "*B N E"],
    steps: AttentionSteps,
    *,
    scale: float,
    keep: Bool[Array, "N M"],
) -> AttentionSteps:
    """The gradient of every value of Eq. 2.7, last line first.

    A product C = A B sends dC Bᵀ to A and Aᵀ dC to B: the shapes leave no other choice. A score
    that was masked is a constant.
    """
    # O = P V
    dweights = dout @ np.swapaxes(steps.v, -1, -2)
    dv = np.swapaxes(steps.weights, -1, -2) @ dout
    # P = softmax S, undone by its own fused backward
    dscores = softmax_backward(dweights, SoftmaxCache(steps.weights, -1))
    # S = scale · R where keep, else -inf
    dproducts = scale * np.where(keep, dscores, 0)
    # R = Q Kᵀ
    dq = dproducts @ steps.k
    dk = np.swapaxes(dproducts, -1, -2) @ steps.q
    return AttentionSteps(dq, dk, dv, dproducts, dscores, dweights, dout)


# ---- renormalised weights ------------------------------------------------------------------------


class RenormaliseSteps(NamedTuple):
    """The values of Eq. 4.14, or their gradients."""

    weights: Inexact[Array, "*B M"]
    kept: Inexact[Array, "*B M"]
    total: Inexact[Array, "*B 1"]
    inverse: Inexact[Array, "*B 1"]
    renormalised: Inexact[Array, "*B M"]


def renormalise_steps_forward(
    weights: Inexact[Array, "*B M"], keep: Bool[Array, "*B M"]
) -> RenormaliseSteps:
    """Weights of which some were dropped, made to sum to 1 again, line by line  (Eq. 4.14)"""
    a = weights * keep
    c = a.sum(axis=-1, keepdims=True)
    r = np.where(c == 0, 0, 1 / np.where(c == 0, 1, c))
    return RenormaliseSteps(weights, a, c, r, a * r)


def renormalise_steps_backward(
    drenormalised: Inexact[Array, "*B M"], steps: RenormaliseSteps, keep: Bool[Array, "*B M"]
) -> RenormaliseSteps:
    """The gradient of every value of Eq. 4.14, last line first.

    The denominator is a value like any other: to hold it constant is another mechanism.
    """
    # W = a · r
    da = drenormalised * steps.inverse
    dr = (drenormalised * steps.kept).sum(axis=-1, keepdims=True)
    # r = 1/c, and constant where nothing was kept
    dc = -dr * steps.inverse**2
    # c = Σ a, the second line that reads a
    da = da + dc
    # a = P ⊙ Z
    return RenormaliseSteps(da * keep, da, dc, dr, drenormalised)


# ---- cross-entropy -------------------------------------------------------------------------------


class CrossEntropySteps(NamedTuple):
    """The values of Eq. 16.17, or their gradients."""

    logits: Inexact[Array, "R V"]
    maximum: Inexact[Array, "R 1"]
    shifted: Inexact[Array, "R V"]
    exponentials: Inexact[Array, "R V"]
    total: Inexact[Array, "R 1"]
    log_total: Inexact[Array, "R 1"]
    log_probabilities: Inexact[Array, "R V"]
    picked: Inexact[Array, "R"]
    loss: Inexact[Array, ""]


def cross_entropy_steps_forward(
    logits: Inexact[Array, "R V"], targets: Integer[Array, "R"]
) -> CrossEntropySteps:
    """The mean cost of the targets of at least one row, line by line  (Eq. 16.17)"""
    m = np.where(_first_largest(logits), logits, 0).sum(axis=-1, keepdims=True)
    s = logits - m
    e = np.exp(s)
    z = e.sum(axis=-1, keepdims=True)
    log_z = np.log(z)
    log_p = s - log_z
    picked = log_p[np.arange(len(targets)), targets]
    loss = np.asarray(-picked.mean())
    return CrossEntropySteps(logits, m, s, e, z, log_z, log_p, picked, loss)


def cross_entropy_steps_backward(
    dloss: float | Inexact[Array, ""], steps: CrossEntropySteps, targets: Integer[Array, "R"]
) -> CrossEntropySteps:
    """The gradient of every value of Eq. 16.17, last line first.

    `shifted` is read by two lines: by the exponential, and by the logarithm's own row.
    """
    dloss = np.asarray(dloss)
    # L = -mean t
    dpicked = np.full(steps.picked.shape, -dloss / len(targets))
    # t = ℓ at the target: everything else was not read
    dlog_p = np.zeros_like(steps.log_probabilities)
    dlog_p[np.arange(len(targets)), targets] = dpicked
    # ℓ = s - l
    ds = dlog_p
    dlog_z = -dlog_p.sum(axis=-1, keepdims=True)
    # l = log z
    dz = dlog_z / steps.total
    # z = Σ e
    de = np.broadcast_to(dz, steps.exponentials.shape)
    # e = exp s, the second line that reads s
    ds = ds + de * steps.exponentials
    # s = x - m
    dx = ds
    dm = -ds.sum(axis=-1, keepdims=True)
    # m = max x
    dx = dx + dm * _first_largest(steps.logits)
    return CrossEntropySteps(dx, dm, ds, de, dz, dlog_z, dlog_p, dpicked, dloss)
