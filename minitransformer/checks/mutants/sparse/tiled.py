"""Mistakes people make with attention in tiles."""

from functools import partial
from unittest.mock import patch

import numpy as np

from minitransformer.attention import dense
from minitransformer.checks.properties.sparse.tiled import suite
from minitransformer.sparse import tiled as right
from minitransformer.sparse.block_mask import from_dense, to_dense

OUT = "the_output_is_that_of_dense_attention"
LSE = "the_lse_is_that_of_dense_attention"
GRADIENTS = "the_gradients_are_those_of_dense_attention"
DERIVATIVE = "the_backward_is_the_derivative"
LSE_DERIVATIVE = "the_lse_has_a_gradient_too"
SIZE = "the_size_of_the_tiles_does_not_matter"
MERGE = "disjoint_layouts_merge_into_their_union"
HUGE = "huge_scores_pick_the_largest_wherever_it_is"
GROUPS = "query_head_h_reads_key_head_h_over_the_group_size"
UNREAD = "what_nobody_may_read_changes_nothing"
NAN = "a_nan_reaches_its_readers_alone"
DEAD = "dead_rows_are_zero_and_leak_nothing"
NARROW = "narrow_numbers_are_rounded_once"
MEMORY = "nothing_of_the_size_of_the_scores_is_made"
ALONE = "arguments_are_left_alone"


# ---- the state that is carried -------------------------------------------------------------------


def _carried(step, finish=None):
    """A forward pass whose state (m, l, a) goes on by `step(m, l, a, scores, values)`."""

    def forward(q, k, v, mask, *, check_finite=True, **options):
        out, cache = right.tiled_attention_forward(
            q, k, v, mask, check_finite=check_finite, **options
        )
        wrong, lse = np.zeros_like(cache.out), np.full_like(cache.lse, -np.inf)
        *leading, heads, queries, _ = wrong.shape
        layout, groups = right._layouts(mask, (*wrong.shape[:-1], mask.keys)), k.shape[-3]
        for at in np.ndindex(*leading, heads):
            group = (*at[:-1], at[-1] * groups // heads)
            for i in range(mask.grid[0]):
                rows = right._slice(i, mask.tile[0], queries)
                m = np.full(rows.stop - rows.start, -np.inf, wrong.dtype)
                total, a = np.zeros_like(m), np.zeros((len(m), v.shape[-1]), wrong.dtype)
                for entry, columns in right._row(mask, int(layout[at]), i):
                    scores, keep, _ = right._scores(cache, at, group, rows, columns, entry)
                    values = partial(right._product, x=cache.v[group][columns], keep=keep)
                    m, total, a = step(m, total, a, scores, values)
                divisor = np.where(total != 0, total, 1)
                wrong[at][rows] = a / divisor[:, None]
                lse[at][rows] = (finish or _lse)(m, total, divisor)
        return wrong.astype(out.dtype), cache._replace(out=wrong, lse=lse)

    forward.__name__ = step.__name__ if finish is None else finish.__name__
    return forward


def _lse(m, total, divisor):
    return np.where(total != 0, m + np.log(divisor), -np.inf)


def _finite(m):
    return np.where(m.real == -np.inf, 0, m.real)


def _right_step(m, total, a, scores, values):
    top = np.maximum(m.real, scores.real.max(axis=1))
    shrink, p = np.exp(m - _finite(top)), np.exp(scores - _finite(top)[:, None])
    return top, shrink * total + p.sum(axis=1), shrink[:, None] * a + values(p)


@suite.mutant(
    "tiled_attention_forward",
    "what was carried keeps the scale of the old maximum",
    killed_by=(OUT, SIZE, MERGE),
)
@_carried
def values_carried_without_rescaling(m, total, a, scores, values):
    top, total, right_a = _right_step(m, total, 0 * a, scores, values)
    return top, total, a + right_a


@suite.mutant(
    "tiled_attention_forward", "a is rescaled, l is not", killed_by=(OUT, LSE, SIZE, MERGE)
)
@_carried
def total_carried_without_rescaling(m, total, a, scores, values):
    top, new, a = _right_step(m, 0 * total, a, scores, values)
    return top, total + new, a


@suite.mutant(
    "tiled_attention_forward",
    "e^{m' - m} where e^{m - m'} belongs",
    killed_by=(OUT, LSE, SIZE),
)
@_carried
def rescaled_the_wrong_way(m, total, a, scores, values):
    top = np.maximum(m.real, scores.real.max(axis=1))
    grow = np.where(m.real == -np.inf, 0, np.exp(_finite(top) - _finite(m)))
    p = np.exp(scores - _finite(top)[:, None])
    return top, grow * total + p.sum(axis=1), grow[:, None] * a + values(p)


@suite.mutant(
    "tiled_attention_forward",
    "the tile's own maximum: right until a smaller one comes after a far larger",
    killed_by=HUGE,
)
@_carried
def maximum_of_the_last_tile(m, total, a, scores, values):
    top = scores.real.max(axis=1)
    top = np.where(top == -np.inf, m.real, top)
    shrink = np.where(m.real == -np.inf, 0, np.exp(_finite(m) - _finite(top)))
    p = np.exp(scores - _finite(top)[:, None])
    return top, shrink * total + p.sum(axis=1), shrink[:, None] * a + values(p)


@suite.mutant("tiled_attention_forward", "no maximum is subtracted", killed_by=HUGE)
@_carried
def exponentials_of_the_scores_themselves(m, total, a, scores, values):
    p = np.exp(scores)
    return 0 * total, total + p.sum(axis=1), a + values(p)


def _of_finish(finish):
    return _carried(_right_step, finish)


@suite.mutant("tiled_attention_forward", "L = m + l", killed_by=(LSE, MERGE, GRADIENTS))
@_of_finish
def lse_before_the_logarithm(m, total, divisor):
    return np.where(total != 0, m + total, -np.inf)


@suite.mutant("tiled_attention_forward", "L = log l", killed_by=(LSE, MERGE, GRADIENTS))
@_of_finish
def lse_without_the_maximum(m, total, divisor):
    return np.where(total != 0, np.log(divisor), -np.inf)


@suite.mutant(
    "tiled_attention_forward",
    "FlashAttention's own sign for a row with no key",
    killed_by=(LSE, DEAD),
)
@_of_finish
def lse_of_a_dead_row_plus_infinity(m, total, divisor):
    return np.where(total != 0, m + np.log(divisor), np.inf)


# ---- which tiles, which heads --------------------------------------------------------------------


def _patched(name, replacement):
    """A forward pass in which one helper of the module is another."""

    def forward(*args, **options):
        with patch.object(right, name, replacement):
            return right.tiled_attention_forward(*args, **options)

    return forward


def _forward(name, why, killed_by, crashes=False):
    """Register a mutant that replaces helper `name` during the forward pass."""

    def register(replacement):
        forward = _patched(name, replacement)
        forward.__name__ = replacement.__name__
        return suite.mutant("tiled_attention_forward", why, killed_by=killed_by, crashes=crashes)(
            forward
        )

    return register


_RIGHT = {
    name: getattr(right, name)
    for name in ("_row", "_column", "_scores", "_product", "_layouts", "_gradients")
}


@_forward("_row", "a tile that is in two patterns is read twice:"
    " https://github.com/google-research/bigbird/issues/35", (OUT, LSE, SIZE))  # fmt: skip
def last_tile_counted_twice(mask, layout, i):
    tiles = list(_RIGHT["_row"](mask, layout, i))
    yield from tiles + tiles[-1:]


@_forward("_row", "range(start, end - 1)", (OUT, LSE, SIZE))
def last_tile_left_out(mask, layout, i):
    yield from list(_RIGHT["_row"](mask, layout, i))[:-1]


@_forward("_row", "whole rows of tiles, zeros outside", (OUT, LSE, MERGE))
def tiles_that_are_not_listed_read_too(mask, layout, i):
    tiles = dict((int(mask.columns[e]), (e, c)) for e, c in _RIGHT["_row"](mask, layout, i))
    if tiles and (mask.pattern[[e for e, _ in tiles.values()]] < 0).all():
        entry = next(iter(tiles.values()))[0]
        for j in range(mask.grid[1]):
            yield tiles.get(j, (entry, right._slice(j, mask.tile[1], mask.keys)))
    else:
        yield from tiles.values()


@_forward("_layouts", "one list for all heads", (OUT, LSE, GROUPS))
def first_layout_for_every_head(mask, shape):
    return 0 * _RIGHT["_layouts"](mask, shape)


@_forward("_scores", "every listed tile is full", (OUT, LSE, GROUPS))
def bits_ignored(cache, at, group, rows, columns, entry):
    full = object.__new__(type(cache.mask))
    full.__dict__.update(cache.mask.__dict__, pattern=np.full_like(cache.mask.pattern, -1))
    return _RIGHT["_scores"](cache._replace(mask=full), at, group, rows, columns, entry)


@_forward("_scores", "tanh(-inf) = -1 gives a masked key the logit -c", (OUT, LSE))
def soft_cap_after_the_mask(cache, at, group, rows, columns, entry):
    scores, keep, slope = _RIGHT["_scores"](cache, at, group, rows, columns, entry)
    if keep is not None and cache.softcap:
        scores = np.where(keep, scores, -cache.softcap)
    return scores, keep, slope


@_forward("_scores", "-1e9 is small enough", (LSE, DEAD))
def masked_with_a_finite_number(cache, at, group, rows, columns, entry):
    scores, keep, slope = _RIGHT["_scores"](cache, at, group, rows, columns, entry)
    return np.where(scores.real == -np.inf, -1e9, scores), keep, slope


@_forward("_scores", "the ragged end is filled with zeros, which score 0", (OUT, LSE, SIZE))
def padding_of_the_last_tile_attended_to(cache, at, group, rows, columns, entry):
    scores, keep, slope = _RIGHT["_scores"](cache, at, group, rows, columns, entry)
    if columns.stop - columns.start < cache.mask.tile[1]:
        scores = np.logaddexp(scores.real, -5.0) + (scores - scores.real if np.iscomplexobj(scores)
            else 0)  # fmt: skip
    return scores, keep, slope


@_forward("_product", "0 · NaN is NaN", (UNREAD, NAN))
def masked_values_multiplied_by_zero(weights, x, keep):
    return weights @ x


@suite.mutant(
    "tiled_attention_forward", "h % G: np.tile for np.repeat", killed_by=(OUT, LSE, GROUPS)
)
def groups_interleaved(q, k, v, mask, **options):
    heads, groups = q.shape[-3], k.shape[-3]
    repeat = heads // groups
    whole_k, whole_v = (np.concatenate([x] * repeat, axis=-3) for x in (k, v))
    return right.tiled_attention_forward(q, whole_k, whole_v, mask, **options)


@suite.mutant("tiled_attention_forward", "1/√E", killed_by=(OUT, LSE, GRADIENTS))
def scaled_by_the_width_of_the_values(q, k, v, mask, *, scale=None, **options):
    scale = 1 / np.sqrt(max(v.shape[-1], 1)).item() if scale is None else scale
    return right.tiled_attention_forward(q, k, v, mask, scale=scale, **options)


@suite.mutant("tiled_attention_forward", "hides work, skips none", killed_by=MEMORY)
def dense_under_the_expanded_mask(q, k, v, mask, **options):
    keep = np.broadcast_to(to_dense(mask), dense.score_shape(q, k, v))
    out, _ = dense.attention_forward(q, k, v, keep=keep, **options)
    return out, right.tiled_attention_forward(q, k, v, mask, **options)[1]


@suite.mutant(
    "tiled_attention_forward", "the state is stored narrow between tiles", killed_by=NARROW
)
def state_in_the_storage_type(q, k, v, mask, **options):
    out, cache = right.tiled_attention_forward(q, k, v, mask, **options)
    if q.dtype.itemsize != 2:
        return out, cache
    keep = to_dense(mask)
    states = []
    for columns in range(0, mask.keys, 4 * mask.tile[1]):
        part = keep & (np.arange(mask.keys) // (4 * mask.tile[1]) == columns // (4 * mask.tile[1]))
        o, c = right.tiled_attention_forward(q, k, v, from_dense(part, tile=mask.tile), **options)
        share = np.exp(np.where(cache.lse == -np.inf, -np.inf, c.lse - _finite(cache.lse)))
        states.append(o * share[..., None].astype(q.dtype))
    total = np.zeros_like(out)
    for state in states:
        total = total + state
    return total, cache


# ---- backward ------------------------------------------------------------------------------------


def _backward(name, why, killed_by, crashes=False):
    """Register a mutant that replaces helper `name` during the backward pass."""

    def register(replacement):
        def backward(dout, cache, *, dlse=None):
            with patch.object(right, name, replacement):
                return right.tiled_attention_backward(dout, cache, dlse=dlse)

        backward.__name__ = replacement.__name__
        return suite.mutant("tiled_attention_backward", why, killed_by=killed_by, crashes=crashes)(
            backward
        )

    return register


@_backward(
    "_column",
    "the bits of another tile: entries are counted by rows, columns walk in another order",
    (GRADIENTS, DERIVATIVE, SIZE),
)
def columns_read_the_patterns_of_rows(mask, layout, j):
    for place in range(*mask.column_pointers[layout, j : j + 2].tolist()):
        yield place, right._slice(int(mask.rows[place]), mask.tile[0], mask.queries)


@_backward("_column", "range(start, end - 1)", (GRADIENTS, DERIVATIVE, SIZE))
def last_tile_of_each_column_left_out(mask, layout, j):
    yield from list(_RIGHT["_column"](mask, layout, j))[:-1]


@_backward("_column", "a layout is its own transpose", (GRADIENTS, DERIVATIVE), crashes=True)
def rows_walked_for_columns(mask, layout, j):
    for entry in range(*mask.row_pointers[layout, j : j + 2].tolist()):
        yield entry, right._slice(int(mask.columns[entry]), mask.tile[0], mask.queries)


@_backward(
    "_gradients", "e^{S - L} with L = -inf of a dead row", (GRADIENTS, DEAD)
)  # fmt: skip
def lse_of_dead_rows_used_as_it_is(cache, dout, delta, at, group, rows, columns, entry):
    p, dscores, keep = _RIGHT["_gradients"](cache, dout, delta, at, group, rows, columns, entry)
    dead = cache.lse[at][rows] == -np.inf
    p = np.where(dead[:, None], np.nan, p)
    return p, dscores, keep


@_backward("_gradients", "dS = P ⊙ dP", (GRADIENTS, DERIVATIVE, LSE_DERIVATIVE))
def delta_forgotten(cache, dout, delta, *where):
    return _RIGHT["_gradients"](cache, dout, 0 * delta, *where)


@_backward("_gradients", "straight through the tanh", (GRADIENTS, DERIVATIVE))
def soft_cap_slope_forgotten(cache, dout, delta, *where):
    with patch.object(right, "softcap_backward", lambda g, _: g):
        return _RIGHT["_gradients"](cache, dout, delta, *where)


@_backward("_gradients", "the mask is for the forward pass", (GRADIENTS, DERIVATIVE))
def backward_without_the_bits(cache, dout, delta, at, group, rows, columns, entry):
    full = object.__new__(type(cache.mask))
    full.__dict__.update(cache.mask.__dict__, pattern=np.full_like(cache.mask.pattern, -1))
    wide = cache._replace(mask=full)
    return _RIGHT["_gradients"](wide, dout, delta, at, group, rows, columns, entry)


@_backward("_product", "0 · NaN is NaN, in dK too", (UNREAD, DEAD))
def masked_pairs_multiplied_by_zero(weights, x, keep):
    return weights @ x


@suite.mutant(
    "tiled_attention_backward", "dK = dSᵀ Q without its s", killed_by=(GRADIENTS, DERIVATIVE)
)
def scale_forgotten_in_the_gradient_of_the_keys(dout, cache, *, dlse=None):
    grads = right.tiled_attention_backward(dout, cache, dlse=dlse)
    return grads._replace(k=grads.k / cache.scale)


@suite.mutant(
    "tiled_attention_backward",
    "one thread block a query head, the last to write wins",
    killed_by=(GRADIENTS, DERIVATIVE),
)
def only_one_head_of_the_group_writes(dout, cache, *, dlse=None):
    grads = right.tiled_attention_backward(dout, cache, dlse=dlse)
    repeat = cache.out.shape[-3] // cache.k.shape[-3]
    last = np.arange(cache.out.shape[-3]) % repeat == repeat - 1
    alone = right.tiled_attention_backward(
        dout * last[:, None, None],
        cache,
        dlse=None if dlse is None else np.where(last[:, None], dlse, 0),
    )
    return grads._replace(k=alone.k, v=alone.v)


@suite.mutant(
    "tiled_attention_backward", "the LSE is an output too", killed_by=(GRADIENTS, LSE_DERIVATIVE)
)
def lse_cotangent_ignored(dout, cache, *, dlse=None):
    return right.tiled_attention_backward(dout, cache)


@suite.mutant(
    "tiled_attention_backward", "D + dL, not D - dL", killed_by=(GRADIENTS, LSE_DERIVATIVE)
)
def lse_cotangent_with_the_wrong_sign(dout, cache, *, dlse=None):
    return right.tiled_attention_backward(dout, cache, dlse=None if dlse is None else -dlse)


@suite.mutant("tiled_attention_backward", "saves an array", killed_by=ALONE)
def cotangent_scaled_in_place(dout, cache, *, dlse=None):
    grads = right.tiled_attention_backward(dout, cache, dlse=dlse)
    dout *= cache.scale
    return grads


@suite.mutant("tiled_attention_backward", "accumulates into the cache", killed_by=ALONE)
def output_of_the_cache_overwritten(dout, cache, *, dlse=None):
    grads = right.tiled_attention_backward(dout, cache, dlse=dlse)
    cache.out[...] += dout
    return grads
