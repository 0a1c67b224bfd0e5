"""Mistakes people make when they ask heads to differ."""

import numpy as np

from minitransformer.checks.properties.heads.diversity import suite
from minitransformer.heads import diversity as right

COSINE = "similarity_is_the_mean_cosine_of_all_pairs"
KNOWN = "copies_and_right_angles_are_known"
DIRECTIONS = "directions_count_lengths_do_not"
ALIKE_D = "similarity_backward_is_the_derivative"
OVERLAP = "overlap_is_the_mean_product_of_all_pairs"
OVERLAP_D = "overlap_backward_is_the_derivative"
PENALTY = "penalty_is_the_square_of_what_is_too_much"
NOTHING = "orthonormal_rows_cost_nothing"
RIGHT_D = "orthogonality_backward_is_the_derivative"
DOWN = "a_step_down_makes_heads_less_alike"
ORDER = "the_order_of_heads_does_not_matter"
NARROW = "narrow_arrays_are_measured_wide"
ALONE = "arguments_are_left_alone"


def _similarity(change):
    """A mutant of C: `change(similarity, cache, out)`."""

    def made(out):
        similarity, cache = right.output_similarity_forward(out)
        return change(similarity, cache, out), cache

    made.__name__ = change.__name__
    return made


# ---- outputs -------------------------------------------------------------------------------------


@suite.mutant("output_similarity_forward", "products, not cosines", killed_by=(COSINE, DIRECTIONS))
@_similarity
def lengths_count(similarity, cache, out):
    total = out.sum(axis=-3)
    return (total * total).sum(axis=-1) / out.shape[-3] ** 2


@suite.mutant(
    "output_similarity_forward",
    "an epsilon under the root: heads that whisper are like nobody",
    killed_by=DIRECTIONS,
)
@_similarity
def epsilon_in_the_norm(similarity, cache, out):
    unit = out / np.sqrt((out * out).sum(axis=-1, keepdims=True) + 1e-12)
    total = unit.sum(axis=-3)
    return (total * total).sum(axis=-1) / out.shape[-3] ** 2


@suite.mutant("output_similarity_forward", "0/0 where a head gives 0", killed_by=(COSINE, ALIKE_D))
@_similarity
def idle_head_divided_by_zero(similarity, cache, out):
    unit = out / np.sqrt((out * out).sum(axis=-1, keepdims=True))
    total = unit.sum(axis=-3)
    return (total * total).sum(axis=-1) / out.shape[-3] ** 2


@suite.mutant(
    "output_similarity_forward", "a head is not compared with itself", killed_by=(COSINE, KNOWN)
)
@_similarity
def own_terms_left_out(similarity, cache, out):
    own = (cache.unit * cache.unit).sum(axis=(-3, -1))
    return similarity - own / out.shape[-3] ** 2


@suite.mutant("output_similarity_forward", "the sum over pairs", killed_by=(COSINE, KNOWN))
@_similarity
def pairs_summed(similarity, cache, out):
    return similarity * out.shape[-3] ** 2


@suite.mutant("output_similarity_forward", "opposites are alike too", killed_by=(COSINE, KNOWN))
@_similarity
def cosines_without_a_sign(similarity, cache, out):
    pairs = np.einsum("...ane,...bne->...nab", cache.unit, cache.unit)
    return np.abs(pairs).sum(axis=(-2, -1)) / out.shape[-3] ** 2


@suite.mutant("output_similarity_forward", "rows compared, not heads", killed_by=(COSINE, KNOWN))
def rows_for_heads(out):
    similarity, cache = right.output_similarity_forward(out)
    total = cache.unit.sum(axis=-2, keepdims=True)
    rows = max(out.shape[-2], 1)
    likeness = (total * total).sum(axis=(-3, -1)) / rows**2
    return np.broadcast_to(likeness, similarity.shape).copy(), cache


@suite.mutant(
    "output_similarity_forward", "every head against the first", killed_by=(COSINE, ORDER)
)
@_similarity
def compared_with_the_first(similarity, cache, out):
    return (cache.unit * cache.unit[..., :1, :, :]).sum(axis=(-3, -1)) / out.shape[-3]


@suite.mutant(
    "output_similarity_backward", "the length is taken for a constant",
    killed_by=(ALIKE_D, DIRECTIONS),
)  # fmt: skip
def norm_taken_for_a_constant(dout, cache):
    g = 2 / cache.unit.shape[-3] ** 2 * cache.total * dout[..., None, :, None]
    return (np.where(cache.unit.any(-1, keepdims=True), g, 0) / cache.norm / cache.scale).astype(
        cache.dtype
    )


@suite.mutant(
    "output_similarity_backward", "of the direction, not of the output",
    killed_by=(ALIKE_D, DIRECTIONS),
)  # fmt: skip
def gradient_not_divided_by_the_length(dout, cache):
    dy = right.output_similarity_backward(dout, cache)
    return (dy * cache.norm * cache.scale).astype(cache.dtype)


@suite.mutant(
    "output_similarity_backward", "maximised: heads become one", killed_by=(ALIKE_D, DOWN)
)
def similarity_rewarded(dout, cache):
    return -right.output_similarity_backward(dout, cache)


@suite.mutant("output_similarity_backward", "a pair is met twice, not once", killed_by=ALIKE_D)
def each_pair_counted_once(dout, cache):
    return right.output_similarity_backward(dout, cache) / 2


@suite.mutant("output_similarity_backward", "a head that gives 0 is pushed", killed_by=ALIKE_D)
def idle_head_pushed(dout, cache):
    dy = right.output_similarity_backward(dout, cache)
    g = 2 / cache.unit.shape[-3] ** 2 * cache.total * dout[..., None, :, None]
    return np.where(cache.unit.any(-1, keepdims=True), dy, g).astype(cache.dtype)


# ---- maps ----------------------------------------------------------------------------------------


@suite.mutant(
    "map_overlap_forward", "a head is not compared with itself", killed_by=(OVERLAP, KNOWN)
)
def own_map_left_out(weights):
    overlap, cache = right.map_overlap_forward(weights)
    own = (weights * weights).sum(axis=(-3, -1))
    return overlap - own / weights.shape[-3] ** 2, cache


@suite.mutant("map_overlap_forward", "by H, not H²", killed_by=(OVERLAP, KNOWN))
def divided_by_the_heads_once(weights):
    overlap, cache = right.map_overlap_forward(weights)
    return overlap * weights.shape[-3], cache


@suite.mutant("map_overlap_forward", "the root of the square", killed_by=(OVERLAP, OVERLAP_D))
def norm_for_its_square(weights):
    overlap, cache = right.map_overlap_forward(weights)
    return np.sqrt(overlap), cache


@suite.mutant("map_overlap_forward", "keys read by some row", killed_by=OVERLAP)
def rows_pooled(weights):
    overlap, cache = right.map_overlap_forward(weights)
    if not weights.shape[-2]:
        return overlap, cache
    mean = overlap.mean(axis=-1, keepdims=True)
    return np.broadcast_to(mean, overlap.shape).copy(), cache


@suite.mutant("map_overlap_forward", "float16 in, float16 out", killed_by=NARROW)
def overlap_in_the_storage_type(weights):
    overlap, cache = right.map_overlap_forward(weights)
    return overlap.astype(weights.dtype), cache


@suite.mutant("map_overlap_backward", "a pair is met twice", killed_by=OVERLAP_D)
def factor_two_forgotten(dout, cache):
    return right.map_overlap_backward(dout, cache) / 2


@suite.mutant("map_overlap_backward", "maximised: heads become one", killed_by=(OVERLAP_D, DOWN))
def overlap_rewarded(dout, cache):
    return -right.map_overlap_backward(dout, cache)


@suite.mutant("map_overlap_backward", "softmax is for somebody else", killed_by=OVERLAP_D)
def mean_taken_out_twice(dout, cache):
    dp = right.map_overlap_backward(dout, cache)
    return dp - dp.sum(axis=-1, keepdims=True) / max(dp.shape[-1], 1)


@suite.mutant("map_overlap_backward", "saves an array, spoils the caller's", killed_by=ALONE)
def cotangent_doubled_in_place(dout, cache):
    dp = right.map_overlap_backward(dout, cache)
    dout *= 2 / cache.shape[-3] ** 2
    return dp


# ---- orthogonality -------------------------------------------------------------------------------


@suite.mutant(
    "orthogonality_forward",
    "columns for rows: R - C off, with the same gradient",
    killed_by=PENALTY,
)
def columns_for_rows(a):
    _, cache = right.orthogonality_forward(a)
    return right.orthogonality_forward(np.swapaxes(a, -1, -2))[0], cache


@suite.mutant("orthogonality_forward", "lengths are free", killed_by=(PENALTY, NOTHING))
def diagonal_left_out(a):
    _, cache = right.orthogonality_forward(a)
    apart = cache.excess * (1 - np.eye(a.shape[-2]))
    return np.asarray((apart * apart).sum(axis=(-2, -1))), cache


@suite.mutant("orthogonality_forward", "‖·‖ for ‖·‖²", killed_by=(PENALTY, NOTHING))
def norm_not_squared(a):
    penalty, cache = right.orthogonality_forward(a)
    return np.sqrt(penalty), cache


@suite.mutant("orthogonality_forward", "the identity forgotten", killed_by=(PENALTY, NOTHING))
def pulled_to_nothing(a):
    _, cache = right.orthogonality_forward(a)
    gram = cache.a @ np.swapaxes(cache.a, -1, -2)
    return np.asarray((gram * gram).sum(axis=(-2, -1))), cache._replace(excess=gram)


@suite.mutant("orthogonality_forward", "NumPy's norm of a matrix", killed_by=(PENALTY, NOTHING))
def spectral_norm(a):
    penalty, cache = right.orthogonality_forward(a)
    if 0 in cache.excess.shape:
        return penalty, cache
    return np.asarray(np.linalg.norm(cache.excess, 2, axis=(-2, -1)) ** 2), cache


@suite.mutant("orthogonality_backward", "the square has two factors A", killed_by=RIGHT_D)
def two_for_four(dout, cache):
    return right.orthogonality_backward(dout, cache) / 2


@suite.mutant(
    "orthogonality_backward", "of the Gram matrix, not of A", killed_by=(RIGHT_D, NOTHING)
)
def identity_missing_in_the_gradient(dout, cache):
    gram = cache.excess + np.eye(cache.excess.shape[-1])
    return right.orthogonality_backward(dout, cache._replace(excess=gram))


@suite.mutant("orthogonality_backward", "maximised", killed_by=(RIGHT_D, DOWN))
def orthogonality_punished(dout, cache):
    return -right.orthogonality_backward(dout, cache)


@suite.mutant("orthogonality_backward", "as wide as it was computed", killed_by=NARROW)
def gradient_left_wide(dout, cache):
    return right.orthogonality_backward(dout, cache._replace(dtype=cache.a.dtype))
