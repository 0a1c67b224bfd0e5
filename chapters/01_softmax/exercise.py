"""Chapter 01: Softmax. See README.md beside this file."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Inexact

from minitransformer.arrays import Array, compute_dtype, require_array, require_logits

# ==== attention.softmax ===========================================================================


class SoftmaxCache(NamedTuple):
    weights: Inexact[Array, "..."]
    axis: int


class LogSoftmaxCache(NamedTuple):
    weights: Inexact[Array, "..."]
    masked: Bool[Array, "..."]
    axis: int


class LogSumExpCache(NamedTuple):
    weights: Inexact[Array, "..."]
    axis: int
    keepdims: bool


def _prepare(scores: Array, axis: int, check_finite: bool) -> Array:
    require_array("scores", scores, min_ndim=1)
    if not -scores.ndim <= axis < scores.ndim:
        raise ValueError(f"axis is {axis}, but scores has {scores.ndim} axes")
    if check_finite:
        require_logits("scores", scores)
    return scores.astype(compute_dtype(scores), copy=False)


def _exponentials(x: Array, axis: int) -> tuple[Array, Array, Array]:
    """Row maximum (0 for a dead row), exp(x - m), and their sum Z: the first two thirds of Eq.
    1.1."""
    # 01.1: your lines


def softmax_forward(
    scores: Inexact[Array, "..."], *, axis: int = -1, check_finite: bool = True
) -> tuple[Inexact[Array, "..."], SoftmaxCache]:
    """Normalised exponentials along `axis` (Eq. 1.1).

    Raises
    ------
    TypeError, ValueError
        If `scores` is no floating array, `axis` is not one of its axes, or an entry is NaN or +inf.
    """
    # 01.1: your lines


def softmax_backward(dweights: Inexact[Array, "..."], cache: SoftmaxCache) -> Inexact[Array, "..."]:
    """dx = y ⊙ (dy - Σ_j y_j dy_j)  (Eq. 1.2)"""
    # 01.3: your lines


def logsumexp_forward(
    scores: Inexact[Array, "..."],
    *,
    axis: int = -1,
    keepdims: bool = False,
    check_finite: bool = True,
) -> tuple[Inexact[Array, "..."], LogSumExpCache]:
    """lse = m + log Σ_j exp(x_j - m): the log of softmax's denominator (Eq. 1.1); -inf for a dead
    row.

    The result is never narrower than float32.
    """
    # 01.4: your lines


def logsumexp_backward(dlse: Inexact[Array, "..."], cache: LogSumExpCache) -> Inexact[Array, "..."]:
    """dx = y · dlse: the gradient of log-sum-exp is softmax  (Eq. 1.3)"""
    # 01.4: your lines


def log_softmax_forward(
    scores: Inexact[Array, "..."], *, axis: int = -1, check_finite: bool = True
) -> tuple[Inexact[Array, "..."], LogSoftmaxCache]:
    """log y = x - lse  (Eq. 1.4)

    Not log(softmax(x)): that underflows to -inf where softmax underflows to 0. A masked entry, and
    every entry of a dead row, is -inf.
    """
    # 01.4: your lines


def log_softmax_backward(
    dout: Inexact[Array, "..."], cache: LogSoftmaxCache
) -> Inexact[Array, "..."]:
    """dx = dy - y · Σ_j dy_j over the entries that are not masked  (Eq. 1.5)"""
    # 01.4: your lines


# ---- the online merge: softmax of a whole from softmaxes of its parts ----------------------------


class Partial(NamedTuple):
    """Attention over some of the keys: a weighted mean of values and the log of its denominator.
    (0, -inf) is neutral."""

    out: Inexact[Array, "*B N E"]
    lse: Inexact[Array, "*B N"]


class MergeCache(NamedTuple):
    first: Partial
    second: Partial
    merged: Partial
    shares: tuple[Array, Array]


class MergeGrads(NamedTuple):
    first: Partial
    second: Partial


def merge_forward(first: Partial, second: Partial) -> tuple[Partial, MergeCache]:
    """Join attention over two disjoint sets of keys into attention over their union.

        L = log(e^{L1} + e^{L2}),   a_i = e^{L_i - L},   O = a_1 O_1 + a_2 O_2  (Eq. 1.6)

    Associative and commutative, with Partial(0, -inf) as identity: any split of the keys gives the
    same result.

    Raises
    ------
    ValueError
        If the two partials do not have the same shapes, or a lse is not its output's shape less the
        last axis.
    """
    # 01.5: your lines


def merge_backward(dmerged: Partial, cache: MergeCache) -> MergeGrads:
    """dO_i = a_i dO,   dL_i = a_i (dL + Σ_e dO (O_i - O))  (Eq. 1.7)"""
    # 01.5: your lines


class SoftmaxState(NamedTuple):
    """Softmax-weighted values before the division, as a kernel carries them from tile to tile (Eq.
    1.8)."""

    maximum: Inexact[Array, "*B N"]
    total: Inexact[Array, "*B N"]
    weighted: Inexact[Array, "*B N E"]


def state_of(scores: Inexact[Array, "*B N M"], values: Inexact[Array, "*B M E"]) -> SoftmaxState:
    """The state of one tile: (m, l, a) = (max_j s_j, Σ_j e^{s_j - m}, Σ_j e^{s_j - m} v_j)."""
    # 01.6: your lines


def merge_states(first: SoftmaxState, second: SoftmaxState) -> SoftmaxState:
    """m = max(m1, m2),   l = c1 l1 + c2 l2,   a = c1 a1 + c2 a2,   c_i = e^{m_i - m}  (Eq. 1.8)"""
    # 01.6: your lines


def finish_state(state: SoftmaxState) -> Partial:
    """Divide once, at the end: O = a / l, L = m + log l; a dead row gives (0, -inf)."""
    # 01.6: your lines


# ---- the soft-cap --------------------------------------------------------------------------------


class SoftcapCache(NamedTuple):
    slope: Inexact[Array, "..."] | None  # None: the cap is off


def softcap_forward(
    scores: Inexact[Array, "..."], cap: float | None
) -> tuple[Inexact[Array, "..."], SoftcapCache]:
    """f(x) = c · tanh(x / c): scores bounded by ±c, unchanged near 0; None or 0 turns it off  (Eq.
    1.9)

    It comes before bias and mask: tanh(-inf) = -1 would give a masked key the logit -c. Used by
    Gemma 2, arXiv:2408.00118.
    """
    # 01.7: your lines


def softcap_backward(dout: Inexact[Array, "..."], cache: SoftcapCache) -> Inexact[Array, "..."]:
    """dx = dy · (1 - tanh²(x / c))  (Eq. 1.10)"""
    # 01.7: your lines


# ==== steps =======================================================================================


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
    # 01.2: your lines


def softmax_steps_backward(dweights: Inexact[Array, "*B M"], steps: SoftmaxSteps) -> SoftmaxSteps:
    """The gradient of every value of Eq. 1.11, last line first.

    `exponentials` are read by two lines, and so are `scores`. The maximum belongs to the first
    largest score; its gradient comes out as 0, which is why the fused form does not know it.
    """
    # 01.2: your lines
