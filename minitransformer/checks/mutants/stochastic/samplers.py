"""Mistakes people make when they draw a random mask."""

from dataclasses import replace

import numpy as np

from minitransformer.checks.properties.stochastic.samplers import suite
from minitransformer.philox import Stream
from minitransformer.stochastic import samplers as right

BERNOULLI = ("element", "column", "head", "block")


def _inverted(mask):
    return mask.compensation == "inverted"


def _protected(mask, shape, offset=None):
    """The pairs that are kept at rate 1, by kinds that draw no number of keys."""
    if mask.kind in right.COUNTED or mask.kind == "head":
        mask = replace(mask, kind="element", k=None, proposal="uniform")
    mask = replace(mask, rate=1.0, min_keep=0, compensation="renormalise")
    return right.resolve(mask, right.Draw(0), 0, shape, offset=offset).keep


# ---- the draw ------------------------------------------------------------------------------------


@suite.mutant(
    "resolve",
    "rand < p decides what is kept, not what is dropped",
    killed_by="kept_where_the_word_reaches_the_threshold",
)
def kept_and_dropped_swapped(mask, draw, layer, shape, *, keep=None, **options):
    got = right.resolve(mask, draw, layer, shape, keep=keep, **options)
    if mask.kind not in BERNOULLI or not right.is_active(mask, draw, options.get("drop_rate")):
        return got
    allowed = np.broadcast_to(True if keep is None else keep, shape)
    return got._replace(keep=allowed & (~got.keep | _protected(mask, shape)))


@suite.mutant(
    "resolve",
    "the random mask replaces the structural one: queries see the future",
    killed_by="only_allowed_pairs_are_kept",
)
def structural_mask_forgotten(mask, draw, layer, shape, *, keep=None, **options):
    return right.resolve(mask, draw, layer, shape, **options)


@suite.mutant(
    "resolve",
    "sampled first and masked after: rows of a causal mask get fewer than k keys",
    killed_by=("fixed_k_keeps_the_smallest_words", "multinomial_counts_draws_from_the_proposal"),
)
def sampled_before_the_structural_mask(mask, draw, layer, shape, *, keep=None, **options):
    got = right.resolve(mask, draw, layer, shape, **options)
    return got._replace(keep=got.keep & (True if keep is None else keep))


@suite.mutant(
    "resolve",
    "the caller's mask is overwritten by what was drawn",
    killed_by="only_allowed_pairs_are_kept",
)
def caller_mask_edited_in_place(mask, draw, layer, shape, *, keep=None, **options):
    got = right.resolve(mask, draw, layer, shape, keep=keep, **options)
    if keep is not None and keep.shape == got.keep.shape:
        keep &= got.keep
    return got


@suite.mutant(
    "resolve", "no training flag: the model is random when it answers",
    killed_by="evaluation_keeps_everything",
)  # fmt: skip
def mask_active_in_evaluation(mask, draw, layer, shape, **options):
    return right.resolve(mask, draw._replace(training=True), layer, shape, **options)


@suite.mutant(
    "resolve", "evaluation is always full, also for a Monte-Carlo sample",
    killed_by="evaluation_keeps_everything",
)  # fmt: skip
def samples_never_drawn(mask, draw, layer, shape, **options):
    silent = draw if draw.training else draw._replace(sample=0)
    return right.resolve(mask, silent, layer, shape, **options)


@suite.mutant(
    "resolve", "one mask broadcast over the batch: every text loses the same pairs",
    killed_by=("every_place_draws_anew", "kept_where_the_word_reaches_the_threshold"),
)  # fmt: skip
def one_mask_for_the_whole_batch(mask, draw, layer, shape, *, keep=None, **options):
    if len(shape) < 4 or 0 in shape:
        return right.resolve(mask, draw, layer, shape, keep=keep, **options)
    one = (1,) * len(shape[:-3]) + tuple(shape[-3:])
    options.pop("scores", None)
    mask = replace(mask, proposal="uniform")
    drawn = right.resolve(mask, draw, layer, one, **options)
    drawn = right.Sampled(*(x if x is None else np.broadcast_to(x, shape) for x in drawn))
    return drawn._replace(keep=drawn.keep & (True if keep is None else keep))


@suite.mutant(
    "resolve",
    "a whole column is dropped where single pairs were asked for",
    killed_by="kept_where_the_word_reaches_the_threshold",
)
def columns_instead_of_elements(mask, draw, layer, shape, **options):
    if mask.kind == "element" and not mask.min_keep:
        mask = replace(mask, kind="column")
    return right.resolve(mask, draw, layer, shape, **options)


@suite.mutant(
    "resolve", "every layer drops the same pairs",
    killed_by=("every_place_draws_anew", "kept_where_the_word_reaches_the_threshold"),
)  # fmt: skip
def layer_forgotten(mask, draw, layer, shape, **options):
    return right.resolve(mask, draw, 0, shape, **options)


@suite.mutant(
    "resolve",
    "p = 0 still multiplies: the result is close to full attention, not equal",
    killed_by="rate_zero_is_the_structural_mask",
)
def rate_zero_takes_the_long_way(mask, draw, layer, shape, **options):
    got = right.resolve(mask, draw, layer, shape, **options)
    return got._replace(multiplier=np.ones(shape)) if got.multiplier is None else got


@suite.mutant(
    "resolve", "the first head's rate for all heads", killed_by="every_head_has_its_own_rate"
)
def one_rate_for_all_heads(mask, draw, layer, shape, *, drop_rate=None, **options):
    if np.ndim(drop_rate) == 1 and len(drop_rate):
        drop_rate = np.full_like(drop_rate, drop_rate[0])
    return right.resolve(mask, draw, layer, shape, drop_rate=drop_rate, **options)


@suite.mutant(
    "resolve", "the schedule is computed and forgotten", killed_by="every_head_has_its_own_rate"
)
def schedule_ignored(mask, draw, layer, shape, *, drop_rate=None, **options):
    return right.resolve(mask, draw, layer, shape, **options)


@suite.mutant(
    "resolve",
    "positions counted from the tile's corner",
    killed_by="a_tile_is_the_slice_of_the_whole",
)
def positions_local_to_the_tile(mask, draw, layer, shape, *, row_start=0, **options):
    if row_start and options.get("offset") is not None:
        options["offset"] += row_start
    return right.resolve(mask, draw, layer, shape, **options)


@suite.mutant(
    "resolve",
    "batch rows counted from the part's first: another split, other masks",
    killed_by="a_tile_is_the_slice_of_the_whole",
)
def batch_row_local_to_the_part(mask, draw, layer, shape, *, batch_start=0, **options):
    return right.resolve(mask, draw, layer, shape, **options)


# ---- protection ----------------------------------------------------------------------------------


@suite.mutant(
    "resolve",
    "j = i is the diagonal only if there are as many queries as keys",
    killed_by="protected_pairs_are_always_kept",
)
def diagonal_without_the_offset(mask, draw, layer, shape, *, offset=None, **options):
    return right.resolve(mask, draw, layer, shape, offset=0, **options)


@suite.mutant(
    "resolve",
    "protected pairs are scaled like the others",
    killed_by="protected_pairs_are_always_kept",
)
def protected_pairs_scaled(mask, draw, layer, shape, **options):
    got = right.resolve(mask, draw, layer, shape, **options)
    if not _inverted(mask) or got.multiplier is None or mask.kind not in BERNOULLI:
        return got
    sure = _protected(mask, shape) if mask.kind != "head" else np.zeros(shape, bool)
    p = mask.rate if options.get("drop_rate") is None else options["drop_rate"]
    scale = np.asarray(1 / np.maximum(1 - p, 1e-9))
    scale = scale[:, None, None] if scale.ndim else scale
    return got._replace(multiplier=np.where(sure, got.multiplier * scale, got.multiplier))


@suite.mutant(
    "resolve",
    "only the pair is kept of a tile: the kernel has no such tile",
    killed_by="protected_pairs_are_always_kept",
)
def tile_of_a_protected_pair_dropped(mask, draw, layer, shape, *, keep=None, **options):
    got = right.resolve(mask, draw, layer, shape, keep=keep, **options)
    if mask.kind != "block" or not right.is_active(mask, draw, options.get("drop_rate")):
        return got
    free = replace(mask, protect_diagonal=False, protect_columns=())
    drawn = right.resolve(free, draw, layer, shape, keep=keep, **options)
    alone = _protected(replace(mask, kind="element"), shape, options.get("offset"))
    return got._replace(keep=drawn.keep | (got.keep & alone))


@suite.mutant(
    "resolve",
    "protection that cannot be switched off",
    killed_by="protected_pairs_are_always_kept",
)
def diagonal_always_protected(mask, draw, layer, shape, **options):
    return right.resolve(replace(mask, protect_diagonal=True), draw, layer, shape, **options)


# ---- compensation --------------------------------------------------------------------------------


@suite.mutant(
    "resolve",
    "1/p instead of 1/(1 - p): right at p = 0.5 only",
    killed_by="inverted_divides_by_the_inclusion",
)
def scaled_by_one_over_the_drop_rate(mask, draw, layer, shape, **options):
    got = right.resolve(mask, draw, layer, shape, **options)
    if not _inverted(mask) or got.multiplier is None or mask.kind not in BERNOULLI:
        return got
    sure = _protected(mask, shape) if mask.kind != "head" else np.zeros(shape, bool)
    return got._replace(multiplier=np.where(sure, got.keep, got.keep / max(mask.rate, 1e-9)))


@suite.mutant(
    "resolve",
    "Z/π is 0/0 where everything is dropped",
    killed_by="inverted_divides_by_the_inclusion",
)
def zero_by_zero_at_rate_one(mask, draw, layer, shape, **options):
    got = right.resolve(mask, draw, layer, shape, **options)
    if _inverted(mask) and mask.rate == 1 and mask.kind in BERNOULLI and not mask.min_keep:
        return got._replace(multiplier=np.where(got.keep, got.multiplier, np.nan))
    return got


@suite.mutant(
    "resolve",
    "n/k with n the length of the row, though a mask allows fewer",
    killed_by="inverted_divides_by_the_inclusion",
)
def scaled_by_the_nominal_k(mask, draw, layer, shape, **options):
    got = right.resolve(mask, draw, layer, shape, **options)
    if mask.kind != "fixed_k" or not mask.k or got.multiplier is None:
        return got
    return got._replace(multiplier=got.keep * max(shape[-1] / mask.k, 1.0))


@suite.mutant(
    "resolve",
    "c/k forgets that the proposal already preferred these keys",
    killed_by="multinomial_counts_draws_from_the_proposal",
)
def proposal_not_divided_out(mask, draw, layer, shape, **options):
    got = right.resolve(mask, draw, layer, shape, **options)
    if mask.kind != "multinomial" or got.multiplier is None:
        return got
    total = np.maximum(got.multiplier.sum(axis=-1, keepdims=True), 1e-9)
    return got._replace(multiplier=got.multiplier / total)


@suite.mutant(
    "resolve",
    "a key drawn twice counts once",
    killed_by="multinomial_counts_draws_from_the_proposal",
)
def counts_cut_to_one(mask, draw, layer, shape, **options):
    got = right.resolve(mask, draw, layer, shape, **options)
    if mask.kind != "multinomial" or got.multiplier is None or not got.keep.any():
        return got
    smallest = got.multiplier[got.keep].min()
    return got._replace(multiplier=np.minimum(got.multiplier, smallest))


@suite.mutant(
    "resolve", "log ρ + log(-log u): the noise has the wrong sign",
    killed_by="gumbel_keeps_the_largest_perturbed",
)  # fmt: skip
def gumbel_noise_subtracted(mask, draw, layer, shape, *, keep=None, scores=None, **options):
    if mask.kind != "gumbel":
        return right.resolve(mask, draw, layer, shape, keep=keep, scores=scores, **options)
    site = right._site(mask, shape, keep, None, scores, options.get("offset"), 0, 0, 0)
    bits = right._Source(draw, layer, False).bits(
        Stream.GUMBEL, site.heads, site.rows, site.columns
    )
    noise = np.log(-np.log(right.uniform(bits) + 2.0**-25))
    perturbed = np.where(site.candidates, right._log_proposal(site) + noise, -np.inf)
    kept = right._smallest(site, -perturbed) | (site.allowed & site.protected)
    return right.Sampled(kept.reshape(shape), None)


@suite.mutant(
    "resolve",
    "an empty row keeps its first key instead of being drawn again",
    killed_by="inclusion_is_the_frequency",
)
def empty_rows_keep_their_first_key(mask, draw, layer, shape, *, keep=None, **options):
    if not mask.min_keep:
        return right.resolve(mask, draw, layer, shape, keep=keep, **options)
    once = replace(mask, min_keep=0)
    got = right.resolve(once, draw, layer, shape, keep=keep, **options).keep.copy()
    allowed = np.broadcast_to(True if keep is None else keep, shape)
    empty = allowed.any(axis=-1) & ~got.any(axis=-1)
    first = allowed & (allowed.cumsum(axis=-1) == 1)
    return right.Sampled(got | (first & empty[..., None]), None)


@suite.mutant(
    "resolve",
    "all rows are drawn again as soon as one is empty",
    killed_by="a_redraw_changes_empty_rows_only",
)
def full_rows_drawn_again(mask, draw, layer, shape, **options):
    got = right.resolve(mask, draw, layer, shape, **options)
    if not mask.min_keep:
        return got
    once = right.resolve(replace(mask, min_keep=0), draw, layer, shape, **options)
    if np.array_equal(once.keep, got.keep):
        return got
    return right.resolve(mask, draw._replace(step=draw.step ^ 1), layer, shape, **options)


@suite.mutant(
    "resolve",
    "1/(1 - p) for the kept heads: right on average, the sum still jumps",
    killed_by="kept_heads_speak_for_the_dropped",
)
def heads_scaled_by_their_probability(mask, draw, layer, shape, **options):
    if mask.kind == "head":
        mask = replace(mask, compensation="inverted")
    return right.resolve(mask, draw, layer, shape, **options)


@suite.mutant(
    "resolve",
    "H / #kept with the heads that are never dropped counted in",
    killed_by="kept_heads_speak_for_the_dropped",
)
def quiet_heads_counted(mask, draw, layer, shape, **options):
    got = right.resolve(mask, draw, layer, shape, **options)
    if mask.kind != "head" or got.multiplier is None or _inverted(mask):
        return got
    kept = got.keep.any(axis=(-2, -1), keepdims=True)
    share = kept.shape[-3] / np.maximum(kept.sum(axis=-3, keepdims=True), 1)
    return got._replace(multiplier=np.broadcast_to(kept * share, shape))


# ---- inclusion probabilities ---------------------------------------------------------------------

CLOSED_FORM = ("inclusion_has_the_closed_form", "inclusion_is_the_frequency")


@suite.mutant(
    "inclusion_probabilities",
    "k ρ is the expected count, not the probability of at least one",
    killed_by=CLOSED_FORM,
)
def expected_count_for_probability(mask, shape, **options):
    pi = right.inclusion_probabilities(mask, shape, **options)
    if mask.kind != "multinomial" or not mask.k:
        return pi
    return np.where(pi < 1, mask.k * -np.expm1(np.log1p(-np.minimum(pi, 1 - 1e-15)) / mask.k), pi)


@suite.mutant(
    "inclusion_probabilities",
    "re-drawing until something is kept makes every pair more likely",
    killed_by=CLOSED_FORM,
)
def redraw_ignored(mask, shape, **options):
    return right.inclusion_probabilities(replace(mask, min_keep=0), shape, **options)


@suite.mutant(
    "inclusion_probabilities",
    "k / n with n the length of the row, though a mask allows fewer",
    killed_by=CLOSED_FORM,
)
def nominal_k_over_n(mask, shape, **options):
    pi = right.inclusion_probabilities(mask, shape, **options)
    if mask.kind != "fixed_k" or not mask.k:
        return pi
    return np.where((pi > 0) & (pi <= 1), np.minimum(mask.k / shape[-1], 1), 0)


@suite.mutant(
    "inclusion_probabilities",
    "a protected pair is certain, whatever the rate",
    killed_by="inclusion_is_the_frequency",
)
def protection_ignored(mask, shape, **options):
    free = replace(mask, protect_diagonal=False, protect_columns=())
    return right.inclusion_probabilities(free, shape, **options)


@suite.mutant(
    "inclusion_probabilities",
    "the probability of being dropped",
    killed_by=CLOSED_FORM,
)
def probability_of_being_dropped(mask, shape, **options):
    return 1 - right.inclusion_probabilities(mask, shape, **options)
