"""Mistakes people make with cross-entropy."""

import numpy as np

from minitransformer.checks.properties.nn.losses import suite
from minitransformer.nn import losses as right

LOSS = "loss_is_the_mean_cost_of_the_targets_that_count"
FAR = "a_target_far_below_costs_its_distance"
SHIFT = "a_common_shift_of_a_row_changes_nothing"
UNIFORM = "a_uniform_guess_costs_log_v"
IGNORED = "ignored_rows_have_no_influence"
DERIVATIVE = "cross_entropy_backward_is_the_derivative"
NARROW = "the_loss_is_never_narrower_than_float32"
ALONE = "arguments_are_left_alone"


def _kept(targets, ignore_index):
    return np.ones(targets.shape, bool) if ignore_index is None else targets != ignore_index


def _costs(logits, targets, label_smoothing, ignore_index):
    """What each target costs, 0 for one that is ignored, by the right loss of each row alone."""
    kept = _kept(targets, ignore_index)
    costs = np.zeros(targets.shape, logits.dtype)
    for index in np.argwhere(kept):
        one = tuple(index)
        costs[one] = right.cross_entropy_forward(
            logits[one][None], targets[one].reshape(1), label_smoothing=label_smoothing
        )[0]
    return costs, kept


# ---- the row -------------------------------------------------------------------------------------


@suite.mutant(
    "cross_entropy_forward", "exp overflows at 710: the maximum stayed", killed_by=(FAR, SHIFT)
)
def maximum_not_subtracted(logits, targets, *, label_smoothing=0.0, ignore_index=None):
    loss, cache = right.cross_entropy_forward(
        logits, targets, label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    if not cache.kept.any():
        return loss, cache
    z, t = logits.reshape(-1, logits.shape[-1])[cache.kept], cache.targets[cache.kept]
    lse = np.log(np.exp(z).sum(axis=-1))
    right_class, average = lse - z[np.arange(len(t)), t], lse - z.mean(axis=-1)
    costs = (1 - label_smoothing) * right_class + label_smoothing * average
    return np.asarray(costs.mean()), cache


@suite.mutant("cross_entropy_forward", "log(0) where softmax underflows", killed_by=FAR)
def logarithm_of_softmax(logits, targets, *, label_smoothing=0.0, ignore_index=None):
    loss, cache = right.cross_entropy_forward(
        logits, targets, label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    if label_smoothing or not cache.kept.any():
        return loss, cache
    p = cache.probabilities[np.arange(len(cache.targets)), cache.targets][cache.kept]
    return np.asarray(-np.log(p).mean()), cache


@suite.mutant(
    "cross_entropy_forward",
    "an epsilon inside the logarithm: no target costs more than 20.7",
    killed_by=FAR,
)
def epsilon_in_the_logarithm(logits, targets, *, label_smoothing=0.0, ignore_index=None):
    loss, cache = right.cross_entropy_forward(
        logits, targets, label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    if label_smoothing or not cache.kept.any():
        return loss, cache
    p = cache.probabilities[np.arange(len(cache.targets)), cache.targets][cache.kept]
    return np.asarray(-np.log(p + 1e-9).mean()), cache


@suite.mutant("cross_entropy_forward", "bits for nats", killed_by=(LOSS, UNIFORM))
def logarithm_to_base_two(logits, targets, **options):
    loss, cache = right.cross_entropy_forward(logits, targets, **options)
    return loss / np.log(2), cache


@suite.mutant(
    "cross_entropy_forward",
    "-z_t alone: without log Z nothing keeps the logits small",
    killed_by=(LOSS, SHIFT, UNIFORM),
)
def normaliser_forgotten(logits, targets, **options):
    loss, cache = right.cross_entropy_forward(logits, targets, **options)
    z = logits.reshape(len(cache.targets), logits.shape[-1])
    top = z.max(axis=-1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(axis=-1))
    lse = np.where(cache.kept, lse, 0)
    return loss - lse.sum() / max(int(cache.kept.sum()), 1), cache


# ---- smoothing -----------------------------------------------------------------------------------


@suite.mutant(
    "cross_entropy_forward",
    "ε over the V - 1 wrong classes is another convention: the right one loses its part",
    killed_by=(LOSS, UNIFORM),
)
def smoothing_over_the_wrong_classes(logits, targets, *, label_smoothing=0.0, ignore_index=None):
    # (1 - ε) onehot + ε (1 - onehot)/(V - 1) is the mixture with ε V/(V - 1), to the letter
    classes = logits.shape[-1]
    options = {"ignore_index": ignore_index}
    plain, cache = right.cross_entropy_forward(logits, targets, **options)
    even, _ = right.cross_entropy_forward(logits, targets, label_smoothing=1.0, **options)
    weight = label_smoothing * classes / max(classes - 1, 1)
    return plain + weight * (even - plain), cache._replace(label_smoothing=label_smoothing)


@suite.mutant(
    "cross_entropy_forward",
    "onehot + ε/V sums to 1 + ε: the right class must give up ε",
    killed_by=(LOSS, UNIFORM),
)
def smoothing_only_added(logits, targets, *, label_smoothing=0.0, ignore_index=None):
    options = {"ignore_index": ignore_index}
    plain, _ = right.cross_entropy_forward(logits, targets, **options)
    even, _ = right.cross_entropy_forward(logits, targets, label_smoothing=1.0, **options)
    cache = right.cross_entropy_forward(
        logits, targets, label_smoothing=label_smoothing, **options
    )[1]
    return plain + label_smoothing * even, cache


@suite.mutant(
    "cross_entropy_forward",
    "ε on every class, not ε/V: V times too smooth",
    killed_by=(LOSS, UNIFORM),
)
def smoothing_not_divided_by_the_classes(
    logits, targets, *, label_smoothing=0.0, ignore_index=None
):
    options = {"ignore_index": ignore_index}
    plain, _ = right.cross_entropy_forward(logits, targets, **options)
    even, _ = right.cross_entropy_forward(logits, targets, label_smoothing=1.0, **options)
    cache = right.cross_entropy_forward(
        logits, targets, label_smoothing=label_smoothing, **options
    )[1]
    return (1 - label_smoothing) * plain + label_smoothing * logits.shape[-1] * even, cache


@suite.mutant(
    "cross_entropy_forward", "the option is read and forgotten", killed_by=(LOSS, UNIFORM)
)
def smoothing_ignored(logits, targets, *, label_smoothing=0.0, ignore_index=None):
    return right.cross_entropy_forward(logits, targets, ignore_index=ignore_index)


# ---- the mean over what counts -------------------------------------------------------------------


@suite.mutant("cross_entropy_forward", "the loss grows with the batch", killed_by=(LOSS, UNIFORM))
def sum_for_the_mean(logits, targets, **options):
    loss, cache = right.cross_entropy_forward(logits, targets, **options)
    return loss * cache.kept.sum(), cache


@suite.mutant(
    "cross_entropy_forward",
    "padding cheapens the batch: a zero was averaged in for each ignored target",
    killed_by=(LOSS, IGNORED),
)
def ignored_rows_counted_in_the_mean(logits, targets, **options):
    loss, cache = right.cross_entropy_forward(logits, targets, **options)
    return loss * (cache.kept.mean() if cache.kept.size else 1), cache


@suite.mutant(
    "cross_entropy_forward",
    "a mean of means: a token in a short sequence weighs more",
    killed_by=(LOSS, IGNORED),
)
def mean_of_each_sequence_first(logits, targets, *, label_smoothing=0.0, ignore_index=None):
    loss, cache = right.cross_entropy_forward(
        logits, targets, label_smoothing=label_smoothing, ignore_index=ignore_index
    )
    if targets.ndim < 2 or not targets.size:
        return loss, cache
    costs, kept = _costs(np.nan_to_num(logits), targets, label_smoothing, ignore_index)
    means = costs.sum(axis=-1) / np.maximum(kept.sum(axis=-1), 1)
    return np.asarray(means.sum() / max(int(kept.any(axis=-1).sum()), 1)), cache


@suite.mutant(
    "cross_entropy_forward",
    "0/0 with every target ignored: NaN, and the run is over",
    killed_by=(LOSS, IGNORED),
)
def nothing_left_not_guarded(logits, targets, **options):
    loss, cache = right.cross_entropy_forward(logits, targets, **options)
    return loss * (np.float64(cache.kept.sum()) / cache.kept.sum()), cache


@suite.mutant(
    "cross_entropy_forward",
    "0 · NaN is NaN: an ignored cost is left out, not multiplied away",
    killed_by=IGNORED,
)
def ignored_costs_multiplied_by_zero(logits, targets, **options):
    loss, cache = right.cross_entropy_forward(logits, targets, **options)
    return loss + 0 * logits.sum(), cache


@suite.mutant(
    "cross_entropy_forward",
    "clipped into the range of the classes, the marker becomes class 0",
    killed_by=(LOSS, IGNORED),
)
def ignored_rows_scored_as_class_zero(logits, targets, *, label_smoothing=0.0, ignore_index=None):
    if ignore_index is not None:
        targets = np.where(targets == ignore_index, 0, targets)
    return right.cross_entropy_forward(logits, targets, label_smoothing=label_smoothing)


@suite.mutant(
    "cross_entropy_forward",
    "in float16 a mean of forty costs keeps three digits",
    killed_by=NARROW,
)
def loss_as_narrow_as_the_logits(logits, targets, **options):
    loss, cache = right.cross_entropy_forward(logits, targets, **options)
    return loss.astype(logits.dtype), cache


@suite.mutant("cross_entropy_forward", "saves an array, corrupts the caller's", killed_by=ALONE)
def shifted_in_place(logits, targets, **options):
    result = right.cross_entropy_forward(logits, targets, **options)
    logits -= logits.real.max(axis=-1, keepdims=True)
    return result


# ---- the backward --------------------------------------------------------------------------------


@suite.mutant(
    "cross_entropy_backward", "softmax minus one-hot, per row: 1/K fell out", killed_by=DERIVATIVE
)
def mean_forgotten_in_the_backward(dloss, cache):
    return right.cross_entropy_backward(dloss, cache) * max(int(cache.kept.sum()), 1)


@suite.mutant(
    "cross_entropy_backward",
    "divided by all rows, not by those that count",
    killed_by=(DERIVATIVE, IGNORED),
)
def gradient_divided_by_every_row(dloss, cache):
    share = cache.kept.mean() if cache.kept.size else 1
    return right.cross_entropy_backward(dloss, cache) * share


@suite.mutant(
    "cross_entropy_backward", "a loss is scaled before it is undone", killed_by=DERIVATIVE
)
def cotangent_ignored(dloss, cache):
    return right.cross_entropy_backward(1.0, cache)


@suite.mutant("cross_entropy_backward", "the smoothed target is no one-hot", killed_by=DERIVATIVE)
def smoothing_forgotten_in_the_backward(dloss, cache):
    return right.cross_entropy_backward(dloss, cache._replace(label_smoothing=0.0))


@suite.mutant("cross_entropy_backward", "uphill: T - P", killed_by=DERIVATIVE)
def one_hot_minus_softmax(dloss, cache):
    return -right.cross_entropy_backward(dloss, cache)


@suite.mutant(
    "cross_entropy_backward",
    "padding teaches: an ignored row pulls towards class 0",
    killed_by=(DERIVATIVE, IGNORED),
)
def gradient_flows_to_ignored_rows(dloss, cache):
    count = max(int(cache.kept.sum()), 1)
    everything = cache._replace(kept=np.ones_like(cache.kept))
    return right.cross_entropy_backward(dloss, everything) * (len(cache.kept) / count)


@suite.mutant(
    "cross_entropy_backward",
    "subtracts from the cache itself: a second call differs",
    killed_by=ALONE,
)
def one_hot_subtracted_in_place(dloss, cache):
    grads = right.cross_entropy_backward(dloss, cache)
    cache.probabilities[np.arange(len(cache.targets)), cache.targets] -= 1
    return grads
