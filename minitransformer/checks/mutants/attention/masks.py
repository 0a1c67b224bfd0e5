"""Mistakes people make with structural masks."""

import numpy as np

from minitransformer.attention import masks as correct
from minitransformer.attention.masks import Mask, offset
from minitransformer.checks.properties.attention.masks import suite

CAUSAL = "causal_allows_the_past_and_oneself"
WINDOW = "window_includes_both_ends"


# ---- causal and window ---------------------------------------------------------------------------


@suite.mutant("causal", "a token that cannot see itself: < for <=", killed_by=CAUSAL)
def strictly_before(queries, keys, *, align):
    o = offset(queries, keys, align)
    return Mask(queries, keys, lambda i, j: j < i + o)


@suite.mutant("causal", "one look ahead: tril(k=1)", killed_by=CAUSAL)
def the_next_token_is_visible(queries, keys, *, align):
    o = offset(queries, keys, align)
    return Mask(queries, keys, lambda i, j: j <= i + o + 1)


@suite.mutant(
    "causal",
    "with a cache the newest token sees only the oldest",
    killed_by=(CAUSAL, "the_alignments_agree_only_when_square"),
)
def always_aligned_at_the_upper_left(queries, keys, *, align):
    return correct.causal(queries, keys, align="upper_left")


@suite.mutant(
    "causal",
    "o = N - M",
    killed_by=(CAUSAL, "the_alignments_agree_only_when_square"),
)
def offset_with_the_wrong_sign(queries, keys, *, align):
    o = -offset(queries, keys, align)
    return Mask(queries, keys, lambda i, j: j <= i + o)


@suite.mutant("causal", "True where a pair is to be ignored", killed_by=CAUSAL)
def polarity_reversed(queries, keys, *, align):
    kept = correct.causal(queries, keys, align=align)
    return Mask(queries, keys, lambda i, j: ~kept(i, j))


class _Local(Mask):
    def __call__(self, i, j):
        return super().__call__(i - i.min(initial=i.max(initial=0)), j - j.min(initial=j.max()))


@suite.mutant(
    "causal",
    "rows and keys counted from the corner of the tile",
    killed_by="a_tile_is_a_slice",
)
def positions_local_to_the_tile(queries, keys, *, align):
    kept = correct.causal(queries, keys, align=align)
    local = _Local(queries, keys, kept.rule)
    return local if queries and keys else kept


class _Either(Mask):
    __and__ = Mask.__or__


@suite.mutant("causal", "& read as `or`", killed_by="masks_combine_pair_by_pair")
def one_mask_is_enough(queries, keys, *, align):
    return _Either(queries, keys, correct.causal(queries, keys, align=align).rule)


@suite.mutant("window", "left and right counted without the end", killed_by=WINDOW)
def ends_excluded(queries, keys, *, left, right, align):
    o = offset(queries, keys, align)

    def rule(i, j):
        after = True if left == -1 else j > i + o - left
        return after & (True if right == -1 else j < i + o + right) & (i == i) & (j == j)

    return Mask(queries, keys, rule)


@suite.mutant("window", "-1 taken as a distance", killed_by=WINDOW)
def no_limit_taken_literally(queries, keys, *, left, right, align):
    o = offset(queries, keys, align)
    return Mask(queries, keys, lambda i, j: (j >= i + o - left) & (j <= i + o + right))


@suite.mutant("window", "row i taken for position i", killed_by=WINDOW)
def window_without_the_offset(queries, keys, *, left, right, align):
    return correct.window(queries, keys, left=left, right=right, align="upper_left")


@suite.mutant(
    "dilated", "width counts positions, not steps", killed_by="dilated_window_takes_every_nth_key"
)
def width_not_stretched_by_the_dilation(queries, keys, *, width, dilation, align):
    o = offset(queries, keys, align)

    def rule(i, j):
        distance = np.abs(i + o - j)
        return (distance <= width) & (distance % dilation == 0)

    return Mask(queries, keys, rule)


@suite.mutant(
    "dilated",
    "multiples of the dilation counted from key 0, not from the query",
    killed_by="dilated_window_takes_every_nth_key",
)
def grid_anchored_at_the_first_key(queries, keys, *, width, dilation, align):
    o = offset(queries, keys, align)

    def rule(i, j):
        return (np.abs(i + o - j) <= width * dilation) & (j % dilation == 0)

    return Mask(queries, keys, rule)


# ---- the sparse Transformer ----------------------------------------------------------------------


@suite.mutant(
    "strided",
    "-2 mod 2 is 0 as well",
    killed_by="strided_is_the_last_few_and_every_nth_before",
)
def multiples_of_the_stride_ahead(queries, keys, *, stride, part="both", align):
    o = offset(queries, keys, align)

    def rule(i, j):
        distance = i + o - j
        near, far = (distance >= 0) & (distance < stride), distance % stride == 0
        return {"local": near, "stride": far, "both": near | far}[part]

    return Mask(queries, keys, rule)


@suite.mutant(
    "strided",
    "half the stride leaves gaps that the second hop does not close",
    killed_by=(
        "strided_is_the_last_few_and_every_nth_before",
        "two_hops_reach_everything_before",
    ),
)
def local_part_of_half_the_stride(queries, keys, *, stride, part="both", align):
    o = offset(queries, keys, align)

    def rule(i, j):
        distance = i + o - j
        near, far = distance < max(stride // 2, 1), distance % stride == 0
        return (distance >= 0) & {"local": near, "stride": far, "both": near | far}[part]

    return Mask(queries, keys, rule)


@suite.mutant(
    "fixed",
    "the first positions of a block cannot have read it",
    killed_by=(
        "fixed_is_the_own_block_and_the_ends_of_blocks",
        "two_hops_reach_everything_before",
    ),
)
def summary_at_the_start_of_the_block(queries, keys, *, block, summary, part="both", align):
    o = offset(queries, keys, align)

    def rule(i, j):
        same, start = (i + o) // block == j // block, j % block < summary
        return (j <= i + o) & {"block": same, "summary": start, "both": same | start}[part]

    return Mask(queries, keys, rule)


@suite.mutant(
    "fixed",
    "blocks of rows, though the rows stand later than row 0",
    killed_by="fixed_is_the_own_block_and_the_ends_of_blocks",
)
def block_of_the_row_not_of_the_position(queries, keys, *, block, summary, part="both", align):
    o = offset(queries, keys, align)

    def rule(i, j):
        same, end = i // block == j // block, j % block >= block - summary
        return (j <= i + o) & {"block": same, "summary": end, "both": same | end}[part]

    return Mask(queries, keys, rule)


# ---- by token ------------------------------------------------------------------------------------


@suite.mutant(
    "global_tokens",
    "all see the token, which itself stays local",
    killed_by="global_tokens_see_and_are_seen_by_all",
)
def global_columns_without_their_rows(queries, keys, *, tokens, align):
    return Mask(queries, keys, lambda i, j: np.isin(j, tokens) & (i == i))


@suite.mutant(
    "global_tokens",
    "only pairs of two global tokens: & for |",
    killed_by="global_tokens_see_and_are_seen_by_all",
)
def both_must_be_global(queries, keys, *, tokens, align):
    o = offset(queries, keys, align)
    return Mask(queries, keys, lambda i, j: np.isin(i + o, tokens) & np.isin(j, tokens))


@suite.mutant(
    "padding", "the mask laid over the query axis", killed_by="padding_hides_keys_and_no_queries"
)
def padding_on_the_queries(lengths, *, queries, keys):
    length = lengths[..., None, None, None]
    return Mask(queries, keys, lambda i, j: (i < length) & (j == j))


@suite.mutant(
    "padding", "the first padded key stays visible", killed_by="padding_hides_keys_and_no_queries"
)
def one_padded_key_too_many(lengths, *, queries, keys):
    return correct.padding(np.minimum(lengths + 1, keys), queries=queries, keys=keys)


@suite.mutant(
    "padding",
    "one mask for the batch: its longest row",
    killed_by="padding_hides_keys_and_no_queries",
)
def longest_length_for_every_row(lengths, *, queries, keys):
    longest = np.full_like(lengths, lengths.max(initial=0))
    return correct.padding(longest, queries=queries, keys=keys)


@suite.mutant(
    "packed",
    "documents must come in order: <= for ==",
    killed_by="packed_documents_do_not_read_each_other",
)
def earlier_documents_are_visible(query_segments, key_segments):
    def rule(i, j):
        i, j = np.broadcast_arrays(i, j)
        return query_segments[..., None, i] >= key_segments[..., None, j]

    return Mask(query_segments.shape[-1], key_segments.shape[-1], rule)
