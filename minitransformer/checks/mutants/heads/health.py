"""Mistakes people make when they measure a head."""

import numpy as np

from minitransformer.checks.properties.heads.health import suite
from minitransformer.heads import health as right


def _cached(p, log, entropy):
    return entropy, right.EntropyCache(p, log, entropy)


def _log(p):
    return np.log(p, out=np.zeros_like(p), where=p.real > 0)


# ---- entropy -------------------------------------------------------------------------------------


@suite.mutant(
    "attention_entropy_forward",
    "0 · log 0 is 0 · -inf = NaN, and every masked map has zeros",
    killed_by=(
        "entropy_is_the_lse_minus_the_mean_score",
        "entropy_lies_between_nothing_and_the_log_of_the_keys",
    ),
)
def logarithm_of_zero(weights):
    log = np.log(weights)
    return _cached(weights, log, -(weights * log).sum(axis=-1))


@suite.mutant(
    "attention_entropy_forward",
    "an epsilon against log 0 moves every entropy",
    killed_by=(
        "entropy_is_the_lse_minus_the_mean_score",
        "entropy_lies_between_nothing_and_the_log_of_the_keys",
        "independent_choices_add_their_entropies",
    ),
)
def epsilon_in_the_logarithm(weights):
    log = np.log(weights + 1e-9)
    return _cached(weights, log, -(weights * log).sum(axis=-1))


@suite.mutant(
    "attention_entropy_forward",
    "bits where nats are promised: log 2 too large",
    killed_by=(
        "entropy_is_the_lse_minus_the_mean_score",
        "entropy_lies_between_nothing_and_the_log_of_the_keys",
        "entropy_of_narrow_weights_is_computed_wide",
    ),
)
def entropy_in_bits(weights):
    entropy, cache = right.attention_entropy_forward(weights)
    return entropy / np.log(entropy.dtype.type(2)), cache


@suite.mutant(
    "attention_entropy_forward",
    "Σ P log P is never positive",
    killed_by="entropy_lies_between_nothing_and_the_log_of_the_keys",
)
def minus_forgotten(weights):
    entropy, cache = right.attention_entropy_forward(weights)
    return -entropy, cache


@suite.mutant(
    "attention_entropy_forward",
    "1 - Σ P² also grows as a row flattens, and does not add over independent choices",
    killed_by=(
        "independent_choices_add_their_entropies",
        "entropy_is_the_lse_minus_the_mean_score",
    ),
)
def gini_impurity(weights):
    _, cache = right.attention_entropy_forward(weights)
    live = weights.any(axis=-1)
    return np.where(live, 1 - (weights * weights).sum(axis=-1), 0), cache


@suite.mutant(
    "attention_entropy_forward",
    "a sum of many float16 terms loses what each term adds",
    killed_by="entropy_of_narrow_weights_is_computed_wide",
)
def computed_in_the_storage_dtype(weights):
    log = _log(weights)
    return _cached(weights, log, -(weights * log).sum(axis=-1))


@suite.mutant(
    "attention_entropy_forward",
    "in units of the first head: what a head does seems to depend on its neighbour",
    killed_by="a_head_is_measured_by_itself",
)
def measured_against_the_first_head(weights):
    entropy, cache = right.attention_entropy_forward(weights)
    return entropy / np.maximum(entropy[..., :1, :].real, 1), cache


@suite.mutant(
    "attention_entropy_backward",
    "-(log P + 1) is the gradient with respect to P, not to the scores",
    killed_by="entropy_backward_is_the_derivative",
)
def gradient_of_the_weights(dentropy, cache):
    return -(cache.log + 1) * dentropy[..., None]


@suite.mutant(
    "attention_entropy_backward",
    "the weights' gradient times P: softmax's sum is missing",
    killed_by="entropy_backward_is_the_derivative",
)
def gradient_without_the_sum(dentropy, cache):
    return -cache.weights * (cache.log + 1) * dentropy[..., None]


@suite.mutant(
    "attention_entropy_backward",
    "the sign turned: a regulariser that should sharpen flattens",
    killed_by="entropy_backward_is_the_derivative",
)
def gradient_with_the_wrong_sign(dentropy, cache):
    return -right.attention_entropy_backward(dentropy, cache)


@suite.mutant(
    "effective_support",
    "e^0 = 1: a row that reads nothing seems to read one key",
    killed_by="effective_support_counts_keys",
)
def nothing_counts_as_one_key(weights):
    return np.exp(right.attention_entropy_forward(weights)[0])


@suite.mutant(
    "effective_support",
    "1 / Σ P² agrees on flat rows and is smaller on all others",
    killed_by="effective_support_counts_keys",
)
def participation_ratio(weights):
    squares = (weights * weights).sum(axis=-1)
    return np.where(squares > 0, 1 / np.where(squares > 0, squares, 1), 0)


@suite.mutant(
    "relative_entropy",
    "log M for every row: the first rows of a causal map can never be flat",
    killed_by="relative_entropy_compares_rows_with_unlike_numbers_of_keys",
)
def every_key_thought_allowed(weights, keep=None):
    return right.relative_entropy(weights)


@suite.mutant(
    "relative_entropy",
    "log 1 = 0: a row with one key is 0 / 0",
    killed_by="relative_entropy_compares_rows_with_unlike_numbers_of_keys",
)
def one_key_divides_by_zero(weights, keep=None):
    keep = np.ones(weights.shape, dtype=bool) if keep is None else keep
    return right.attention_entropy_forward(weights)[0] / np.log(keep.sum(axis=-1))


# ---- concentration, distance, output -------------------------------------------------------------


@suite.mutant(
    "weight_norm",
    "NumPy's norm of order 2 of a matrix is its largest singular value",
    killed_by="weight_norm_is_the_root_of_the_sum_of_squares",
)
def spectral_norm(weights):
    if 0 in weights.shape:
        return right.weight_norm(weights)
    return np.linalg.norm(weights, 2, axis=(-2, -1))


@suite.mutant(
    "weight_norm",
    "the mean of the squares: a longer text has another norm for the same map",
    killed_by="weight_norm_is_the_root_of_the_sum_of_squares",
)
def norm_of_a_mean_row(weights):
    return right.weight_norm(weights) / np.sqrt(max(weights.shape[-2], 1))


@suite.mutant(
    "weight_norm",
    "all heads in one norm, handed to each",
    killed_by="weight_norm_is_the_root_of_the_sum_of_squares",
)
def one_norm_for_the_layer(weights):
    norm = np.sqrt((weights * weights).sum(axis=(-3, -2, -1)))
    return np.broadcast_to(norm[..., None], weights.shape[:-2])


@suite.mutant(
    "mean_distance",
    "rows counted from the first key: with a cache, the newest token seems to stand there",
    killed_by=(
        "a_row_that_reads_one_key_looks_as_far_as_that_key",
        "distance_is_the_mean_of_the_distances",
    ),
)
def offset_ignored(weights, *, offset):
    return right.mean_distance(weights, offset=0)


@suite.mutant(
    "mean_distance",
    "before and after cancel: a head that looks far both ways seems to look nowhere",
    killed_by=(
        "a_row_that_reads_one_key_looks_as_far_as_that_key",
        "distance_is_the_mean_of_the_distances",
    ),
)
def distance_with_a_sign(weights, *, offset):
    i, j = np.arange(weights.shape[-2]) + offset, np.arange(weights.shape[-1])
    return (weights * (i[:, None] - j)).sum(axis=-1)


@suite.mutant(
    "mean_distance",
    "the distance to the mean position: right for a row that reads one key",
    killed_by="distance_is_the_mean_of_the_distances",
)
def distance_to_the_centre(weights, *, offset):
    i, j = np.arange(weights.shape[-2]) + offset, np.arange(weights.shape[-1])
    centre = (weights * j).sum(axis=-1)
    return np.where(weights.any(axis=-1), np.abs(i - centre), 0)


@suite.mutant(
    "head_output_norm",
    "opposite rows cancel: the length of the mean is not the mean length",
    killed_by="output_norm_is_the_mean_length_of_the_rows",
)
def length_of_the_mean_row(out, *, rows=None, projection=None):
    if rows is not None or projection is not None or not out.shape[-2]:
        return right.head_output_norm(out, rows=rows, projection=projection)
    return np.linalg.norm(out.mean(axis=-2), axis=-1)


@suite.mutant(
    "head_output_norm",
    "the zeros of rows that read nothing pull the mean down",
    killed_by="output_norm_is_the_mean_length_of_the_rows",
)
def every_row_counted_in_the_output(out, *, rows=None, projection=None):
    return right.head_output_norm(out, projection=projection)


@suite.mutant(
    "head_output_norm",
    "columns of W_O belong to the stream, its rows to the heads",
    killed_by="a_projected_head_is_what_the_output_loses_without_it",
)
def heads_interleaved_in_the_projection(out, *, rows=None, projection=None):
    if projection is not None:
        heads, width = out.shape[-3], out.shape[-1]
        projection = projection.reshape(width, heads, -1).swapaxes(0, 1)
        projection = projection.reshape(heads * width, -1)
    return right.head_output_norm(out, rows=rows, projection=projection)


@suite.mutant(
    "head_output_norm",
    "the head's own output, whether W_O listens to it or not",
    killed_by="a_projected_head_is_what_the_output_loses_without_it",
)
def projection_ignored(out, *, rows=None, projection=None):
    return right.head_output_norm(out, rows=rows)


# ---- means ---------------------------------------------------------------------------------------


@suite.mutant(
    "mean_over_rows",
    "a mean over all rows, those of padding and those that read nothing too",
    killed_by=("rows_that_read_nothing_count_in_no_mean", "padding_is_left_out_of_a_mean"),
)
def every_row_counted(measure, rows=None):
    return right.mean_over_rows(measure)


@suite.mutant(
    "mean_over_rows",
    "the sum is over the rows that count, the number is that of all",
    killed_by=("rows_that_read_nothing_count_in_no_mean", "padding_is_left_out_of_a_mean"),
)
def divided_by_the_number_of_all_rows(measure, rows=None):
    kept = measure if rows is None else np.where(rows, measure, 0)
    return kept.sum(axis=-1) / max(measure.shape[-1], 1)


@suite.mutant(
    "mean_over_rows",
    "0 · NaN is NaN: a row is left out by selecting, not by multiplying",
    killed_by="rows_that_read_nothing_count_in_no_mean",
)
def left_out_by_multiplying(measure, rows=None):
    if rows is None:
        return right.mean_over_rows(measure)
    rows = np.broadcast_to(rows, measure.shape)
    return (measure * rows).sum(axis=-1) / np.maximum(rows.sum(axis=-1), 1)


@suite.mutant(
    "live_rows",
    "a sharp row is called dead: its one weight is taken for a missing one",
    killed_by="rows_that_read_nothing_count_in_no_mean",
)
def one_key_called_dead(weights):
    return (weights > 0).sum(axis=-1) > 1


# ---- two heads -----------------------------------------------------------------------------------

OVERLAP = "overlap_is_what_two_heads_read_in_common"
TURNED = "cka_knows_a_head_that_was_turned"


@suite.mutant("pairwise_overlap", "the cosine of two maps: flat rows count less", killed_by=OVERLAP)
def cosine_of_the_maps(weights, rows=None):
    if rows is not None:
        weights = np.where(rows[..., None, :, None], weights, 0)
    flat = weights.reshape(*weights.shape[:-2], -1)
    norm = np.sqrt((flat * flat).sum(axis=-1, keepdims=True))
    unit = flat / np.where(norm > 0, norm, 1)
    return unit @ np.swapaxes(unit, -1, -2)


@suite.mutant("pairwise_overlap", "rows that do not count are zeros in the mean", killed_by=OVERLAP)
def overlap_divided_by_all_rows(weights, rows=None):
    if rows is not None:
        weights = np.where(rows[..., None, :, None], weights, 0)
    return right.pairwise_overlap(weights)


@suite.mutant("pairwise_overlap", "the product, not the smaller", killed_by=OVERLAP)
def product_of_the_weights(weights, rows=None):
    products = np.einsum("...anm,...cnm->...acn", weights, weights)
    flags = None if rows is None else rows[..., None, None, :]
    return right.mean_over_rows(products, flags)


@suite.mutant("output_cka", "without taking the mean away", killed_by=TURNED)
def outputs_not_centred(out):
    y = np.moveaxis(out, -3, 0).reshape(out.shape[-3], -1, out.shape[-1])
    squares = ((y[:, None].mT @ y[None]) ** 2).sum(axis=(-2, -1))
    own = np.sqrt(np.diagonal(squares))
    norm = own[:, None] * own
    return squares / np.where(norm > 0, norm, 1)


@suite.mutant("output_cka", "the root of it", killed_by=TURNED)
def norms_instead_of_squares(out):
    return np.sqrt(right.output_cka(out))


@suite.mutant(
    "output_cka", "cosines of the outputs as they are: turned is unlike", killed_by=TURNED
)
def cosine_of_the_outputs(out):
    y = np.moveaxis(out, -3, 0).reshape(out.shape[-3], -1)
    norm = np.linalg.norm(y, axis=-1, keepdims=True)
    unit = y / np.where(norm > 0, norm, 1)
    return np.abs(unit @ unit.T)


@suite.mutant("output_cka", "each example for itself, then the mean", killed_by=TURNED)
def examples_compared_one_by_one(out):
    each = [right.output_cka(x) for x in out.reshape(-1, *out.shape[-3:])]
    return np.mean(each, axis=0) if each else right.output_cka(out)
