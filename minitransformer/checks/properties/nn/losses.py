"""What a cross-entropy must do: the mean surprise in nats, over the targets that count."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, dtypes, entries
from minitransformer.checks.strategies import held, normal, reachable, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype

suite = Suite("nn.losses")

shapes = st.sampled_from([(2, 3, 5), (7, 3), (3, 7, 2), (7,), (2, 5, 3), (4, 1), (0, 3), (2, 0, 7)])
smoothings = st.sampled_from([0.0, 0.1, 1.0])
ignored = st.sampled_from([0.5, 0.0, 0.3, 1.0])  # the share of the targets that do not count
markers = st.sampled_from([-100, 0])  # a number outside the classes, and a class


def case(shape, seed, share, marker, scale=3.0):
    """Logits, targets, and the options that make a share of the targets not count."""
    rng = np.random.default_rng([seed, 5])
    targets = rng.integers(0, shape[-1], shape[:-1])
    targets = np.where(rng.random(shape[:-1]) < share, marker, np.asarray(targets))
    return entries(shape, seed, scale), targets, {"ignore_index": marker} if share else {}


def by_loops(logits, targets, label_smoothing=0.0, ignore_index=None):
    """The loss, class by class: what each class costs, times how much of a target it is."""
    costs, classes = [], logits.shape[-1]
    for index in np.ndindex(targets.shape):
        if ignore_index is not None and targets[index] == ignore_index:
            continue
        row = [float(a) for a in logits[index]]
        lse = max(row) + math.log(math.fsum(math.exp(a - max(row)) for a in row))
        share = [label_smoothing / classes] * classes
        share[targets[index]] += 1 - label_smoothing
        costs.append(math.fsum(t * (lse - a) for t, a in zip(share, row, strict=True)))
    return np.asarray(math.fsum(costs) / len(costs) if costs else 0.0)


# ---- the loss: Eq. 16.15 -------------------------------------------------------------------------


@suite.property(
    "cross_entropy_forward", shape=shapes, seed=seeds, share=ignored, marker=markers,
    smoothing=smoothings, scale=st.sampled_from([3.0, 0.5, 30.0, 1e4]),
)  # fmt: skip
def loss_is_the_mean_cost_of_the_targets_that_count(
    target, shape, seed, share, marker, smoothing, scale
):
    """Eq. 16.15 by loops and exact sums, for logits as large as 1e4; with nothing to count, 0."""
    logits, targets, options = case(shape, seed, share, marker, scale)
    loss, _ = target.cross_entropy_forward(logits, targets, label_smoothing=smoothing, **options)
    expected = by_loops(logits, targets, smoothing, options.get("ignore_index"))
    assert_close(loss, expected, what="loss")
    if share == 1:
        assert loss == 0, "nothing counts, and yet it costs"


@suite.property(
    "cross_entropy_forward", shape=shapes, seed=seeds, smoothing=smoothings,
    shift=st.floats(-1000, 1000),
)  # fmt: skip
def a_common_shift_of_a_row_changes_nothing(target, shape, seed, smoothing, shift):
    """L(z + c) = L(z), with a c of its own for every row."""
    logits, targets, _ = case(shape, seed, 0.0, -100)
    c = held(shift * normal((*shape[:-1], 1), seed ^ 1))
    above = held(logits + c)  # a narrow sum is rounded already
    loss, _ = target.cross_entropy_forward(above - c, targets, label_smoothing=smoothing)
    moved, _ = target.cross_entropy_forward(above, targets, label_smoothing=smoothing)
    assert_close(moved, loss, tolerance=1e-11, what="L(z + c)")


@suite.property("cross_entropy_forward", seed=seeds, far=st.sampled_from([1e3, 1e4, 1e300]))
def a_target_far_below_costs_its_distance(target, seed, far):
    """With one logit d above all others the cost of any other class is d: finite, and exact."""
    rng = np.random.default_rng(seed)
    logits, targets, far = normal((4, 5), seed), rng.integers(1, 5, 4), reachable(far)
    logits[:, 0] = far
    expected = far - logits[np.arange(4), targets].mean()
    assert_close(target.cross_entropy_forward(logits, targets)[0], np.asarray(expected), what="d")


@suite.property("cross_entropy_forward", shape=shapes, seed=seeds, smoothing=smoothings)
def a_uniform_guess_costs_log_v(target, shape, seed, smoothing):
    """Logits that know nothing cost log V nats, whatever comes and however smooth; and a smoothing
    of 1 asks for nothing else."""
    logits, targets, _ = case(shape, seed, 0.0, -100)
    flat, _ = target.cross_entropy_forward(np.full(shape, 7.0), targets, label_smoothing=smoothing)
    assert_close(flat, np.asarray(math.log(shape[-1]) if targets.size else 0.0), what="log V")
    here, there = (
        target.cross_entropy_forward(logits, t, label_smoothing=1.0)[0]
        for t in (targets, np.asarray((targets + 1) % shape[-1]))
    )
    assert_close(here, there, what="loss with a smoothing of 1")


@suite.property(
    "cross_entropy_forward", "cross_entropy_backward", shape=shapes, seed=seeds, share=ignored,
    marker=markers, smoothing=smoothings, garbage=st.sampled_from([1e300, np.nan, np.inf, -np.inf]),
)  # fmt: skip
def ignored_rows_have_no_influence(target, shape, seed, share, marker, smoothing, garbage):
    """The loss is that of the other rows alone, whatever stands in an ignored one; its gradient is
    exactly 0 there."""
    logits, targets, options = case(shape, seed, share, marker)
    options["label_smoothing"] = smoothing
    counts = (targets != marker) | (not share)
    spoilt = np.where(counts[..., None], logits, garbage)
    loss, cache = target.cross_entropy_forward(spoilt, targets, **options)
    alone, other = target.cross_entropy_forward(
        logits[counts], targets[counts], label_smoothing=smoothing
    )
    assert_close(loss, alone, what="loss beside ignored rows")
    dlogits = target.cross_entropy_backward(1.5, cache)
    assert (dlogits[~counts] == 0).all(), "gradient flows to an ignored row"
    assert_close(dlogits[counts], target.cross_entropy_backward(1.5, other), what="gradient")


@suite.property(
    "cross_entropy_forward", "cross_entropy_backward", shape=shapes, seed=seeds, share=ignored,
    marker=markers, smoothing=smoothings, scale=st.sampled_from([3.0, 0.5, 30.0]),
)  # fmt: skip
def cross_entropy_backward_is_the_derivative(target, shape, seed, share, marker, smoothing, scale):
    """Eq. 16.16 against the complex step, for a cotangent that is not 1."""
    logits, targets, options = case(shape, seed, share, marker, scale)
    options["label_smoothing"] = smoothing
    loss, cache = target.cross_entropy_forward(logits, targets, **options)
    dloss = cotangent(loss, seed)
    assert_gradients(
        lambda logits: target.cross_entropy_forward(logits, targets, **options)[0],
        {"logits": target.cross_entropy_backward(dloss, cache)},
        {"logits": logits},
        dloss,
    )


# ---- numbers and memory --------------------------------------------------------------------------


@suite.property("cross_entropy_forward", seed=seeds, dtype=dtypes, smoothing=smoothings)
def the_loss_is_never_narrower_than_float32(target, seed, dtype, smoothing):
    """Narrow logits, many classes, many rows: the loss is summed in float32 at least."""
    logits = normal((40, 300), seed, 4.0).astype(DTYPES[dtype])
    targets = np.random.default_rng(seed).integers(0, 300, 40)
    loss, _ = target.cross_entropy_forward(logits, targets, label_smoothing=smoothing)
    wide = "float64" if dtype == "float64" else "float32"
    assert loss.dtype == wide, f"the loss of {dtype} logits has dtype {loss.dtype}"
    expected = by_loops(logits.astype(np.float64), targets, smoothing)
    assert_close(loss.astype(np.float64), expected, of_dtype(wide), what="loss")


@suite.property(
    "cross_entropy_forward", "cross_entropy_backward", shape=shapes, seed=seeds, share=ignored,
    smoothing=smoothings,
)  # fmt: skip
def arguments_are_left_alone(target, shape, seed, share, smoothing):
    """No array of the caller is modified, and one cache serves twice."""
    logits, targets, options = case(shape, seed, share, -100)
    before = logits.copy(), targets.copy()
    _, cache = target.cross_entropy_forward(logits, targets, label_smoothing=smoothing, **options)
    first, second = (target.cross_entropy_backward(1.0, cache) for _ in range(2))
    assert np.array_equal(logits, before[0]), "logits were modified"
    assert np.array_equal(targets, before[1]), "targets were modified"
    assert np.array_equal(first, second), "the second backward differs from the first"
