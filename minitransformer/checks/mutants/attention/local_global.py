"""Mistakes people make when they read far blocks through their means."""

import numpy as np

from minitransformer.attention import local_global as right
from minitransformer.attention.dense import attention_forward
from minitransformer.checks.properties.attention.local_global import suite

SUMMARY = "a_summary_is_the_mean_of_what_exists"
SLOPE = "pool_backward_is_the_derivative"
DEFINITION = "the_output_is_the_definition"
EXTREMES = "one_block_or_blocks_of_one_are_dense"
ALIKE = "keys_alike_within_blocks_are_dense"
CONVEX = "a_summary_never_weighs_more_than_its_keys"
GROUPS = "query_head_h_reads_key_head_h_over_the_group_size"
FUTURE = "no_word_comes_from_the_future"
LAST = "the_last_queries_of_a_text_stand_in_their_own_blocks"
LEFT_OUT = "a_key_left_out_might_as_well_not_exist"
DEAD = "a_row_with_no_key_is_zero"
DERIVATIVE = "local_global_attention_backward_is_the_derivative"
NARROW = "narrow_numbers_are_rounded_once"
ALONE = "arguments_are_left_alone"

POOL, FORWARD = "pool_blocks_forward", "local_global_attention_forward"
BACKWARD = "local_global_attention_backward"


# ---- summaries -----------------------------------------------------------------------------------


@suite.mutant(POOL, "by the length of a block, whatever it holds", killed_by=(SUMMARY, SLOPE))
def mean_divided_by_the_block(x, block, *, exists=None):
    out, cache = right.pool_blocks_forward(x, block, exists=exists)
    return out * (cache.counts / block)[..., None], cache


@suite.mutant(POOL, "padding is a row of zeros", killed_by=(SUMMARY, SLOPE))
def padding_counted_in_the_mean(x, block, *, exists=None):
    if exists is not None:
        x = np.where(exists[..., None], x, 0)
    return right.pool_blocks_forward(x, block)


@suite.mutant(POOL, "what is left at the end is forgotten", killed_by=SUMMARY)
def last_block_dropped(x, block, *, exists=None):
    out, cache = right.pool_blocks_forward(x, block, exists=exists)
    whole = x.shape[-2] // block
    return out[..., :whole, :], cache._replace(counts=cache.counts[..., :whole])


@suite.mutant(POOL, "as images are pooled", killed_by=(SUMMARY, SLOPE))
def largest_instead_of_mean(x, block, *, exists=None):
    out, cache = right.pool_blocks_forward(x, block, exists=exists)
    for c in range(out.shape[-2]):
        rows = x[..., c * block : (c + 1) * block, :]
        out[..., c, :] = rows[..., rows.real.sum(axis=(*range(rows.ndim - 2), -1)).argmax(), :]
    return out, cache


@suite.mutant(POOL, "0/0 where a block is all padding", killed_by=SUMMARY)
def empty_block_divided_by_zero(x, block, *, exists=None):
    out, cache = right.pool_blocks_forward(x, block, exists=exists)
    return np.where(cache.counts[..., None] > 0, out, np.nan), cache


@suite.mutant(POOL, "a narrow sum of a block loses its last rows", killed_by=NARROW)
def mean_summed_in_the_storage_type(x, block, *, exists=None):
    out, cache = right.pool_blocks_forward(x, block, exists=exists)
    total = np.zeros_like(out)
    for j in range(x.shape[-2]):
        there = x[..., j, :] if exists is None else np.where(exists[..., j, None], x[..., j, :], 0)
        total[..., j // block, :] = (total[..., j // block, :] + there).astype(x.dtype)
    counts = np.maximum(cache.counts, 1)[..., None]
    return (total / counts.astype(total.real.dtype)).astype(x.dtype), cache


@suite.mutant("pool_blocks_backward", "the whole, to each of them", killed_by=SLOPE)
def share_not_divided(dout, cache):
    return right.pool_blocks_backward(dout, cache._replace(counts=np.ones_like(cache.counts)))


@suite.mutant("pool_blocks_backward", "padding learns too", killed_by=SLOPE)
def padding_gets_a_share(dout, cache):
    return right.pool_blocks_backward(dout, cache._replace(exists=None))


# ---- the forward ---------------------------------------------------------------------------------


def _mean(x):
    return x.sum(axis=-2) / max(x.shape[-2], 1)


def _naive(
    q, k, v, *, block, causal=False, align=None, keep=None, scale=None,
    weight=np.log, coarse=None, fine=None, value=_mean, shift=0, **_,
):  # fmt: skip
    """The formula with a part of it replaced, all pairs at once. NaN in a key that is left out it
    takes from the right one."""
    wanted = right.local_global_attention_forward(
        q, k, v, block=block, causal=causal, align=align, keep=keep, scale=scale
    )
    (*_, n, _), m, heads = wanted[0].shape, k.shape[-2], q.shape[-3]
    offset = (m - n if align == "lower_right" else 0) + shift
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    there = np.ones((1, 1, m), bool) if keep is None else np.asarray(keep)
    there = np.broadcast_to(there, (*lead, k.shape[-3], 1, m))[..., 0, :]
    k, v = (
        np.where(there[..., None], np.broadcast_to(x, (*lead, *x.shape[-3:])), 0) for x in (k, v)
    )
    p, j, every = np.arange(n)[:, None] + offset, np.arange(m), np.arange(-(-m // block))
    keys, values, counts = [], [], []
    for c in every:
        own = there & (j // block == c)
        counts.append(own.sum(axis=-1))
        members = max(counts[-1].max(initial=0), 1)
        some = np.maximum(counts[-1], 1)[..., None]
        keys.append(np.where(own[..., None], k, 0).sum(axis=-2) / some)
        inside = np.where(own[..., None], v, 0)
        values.append(inside.sum(axis=-2) / some if value is _mean else value(inside, members))
    if len(every) == 0 or n == 0:
        return wanted
    counts = np.stack(counts, axis=-1)
    near = j // block == p // block
    near = near & (j <= p) if causal else near
    far = every < p // block if causal else every != p // block
    near = near if fine is None else fine(p, j, block, causal)
    far = far if coarse is None else coarse(p, every, block, causal)
    repeat = heads // k.shape[-3]
    allowed = np.concatenate(
        [there[..., None, :] & near, (counts > 0)[..., None, :] & far], axis=-1
    )
    bias = np.concatenate([np.zeros(there.shape), weight(np.maximum(counts, 1))], axis=-1)
    out, cache = attention_forward(
        q,
        np.concatenate([k, np.stack(keys, axis=-2)], axis=-2),
        np.concatenate([v, np.stack(values, axis=-2)], axis=-2),
        keep=np.repeat(allowed, repeat, axis=-3),
        bias=np.repeat(bias[..., None, :], repeat, axis=-3),
        scale=scale,
        check_finite=False,
    )
    return out, wanted[1]._replace(lse=cache.lse)


@suite.mutant(FORWARD, "a block weighs as much as one key", killed_by=(DEFINITION, ALIKE))
def summary_without_its_count(q, k, v, **options):
    return _naive(q, k, v, weight=np.zeros_like, **options)


@suite.mutant(
    FORWARD,
    "n_c, where its logarithm is added to a score",
    killed_by=(DEFINITION, ALIKE, CONVEX),
)
def count_added_to_the_score(q, k, v, **options):
    return _naive(q, k, v, weight=lambda n: n * 1.0, **options)


@suite.mutant(
    FORWARD,
    "the last block and padded ones count as full",
    killed_by=(DEFINITION, ALIKE, CONVEX),
)
def every_block_taken_for_full(q, k, v, *, block, **options):
    return _naive(q, k, v, block=block, weight=lambda n: 0 * n + np.log(block), **options)


@suite.mutant(
    FORWARD,
    "c <= ⌊p/b⌋: in the mean of the own block the future has a share",
    killed_by=(DEFINITION, FUTURE, EXTREMES, CONVEX),
)
def own_block_read_twice(q, k, v, **options):
    def coarse(p, c, b, causal):
        return c <= p // b if causal else c == c

    return _naive(q, k, v, coarse=coarse, **options)


@suite.mutant(
    FORWARD, "keys are causal, summaries are not", killed_by=(DEFINITION, FUTURE, EXTREMES)
)
def summaries_of_the_future(q, k, v, **options):
    return _naive(q, k, v, coarse=lambda p, c, b, causal: c != p // b, **options)


@suite.mutant(
    FORWARD, "the block is causal, the keys inside it are not", killed_by=(DEFINITION, FUTURE)
)
def own_block_read_whole(q, k, v, **options):
    return _naive(q, k, v, fine=lambda p, j, b, causal: j // b == p // b, **options)


@suite.mutant(
    FORWARD,
    "near is |p - j| < b: some keys are read twice, some never",
    killed_by=(DEFINITION, ALIKE),
)
def window_beside_blocks(q, k, v, **options):
    def fine(p, j, b, causal):
        return (j > p - b) & ((j <= p) if causal else (j < p + b))

    return _naive(q, k, v, fine=fine, **options)


@suite.mutant(
    FORWARD, "the text far off is forgotten", killed_by=(DEFINITION, EXTREMES, ALIKE, CONVEX)
)
def no_summaries_at_all(q, k, v, **options):
    return _naive(q, k, v, coarse=lambda p, c, b, causal: (c < 0) & (p < 0), **options)


@suite.mutant(FORWARD, "a value n_c times too large", killed_by=(DEFINITION, ALIKE))
def values_summed_not_averaged(q, k, v, **options):
    return _naive(q, k, v, value=lambda inside, n: inside.sum(axis=-2), **options)


@suite.mutant(FORWARD, "each query by its row in this call", killed_by=(DEFINITION, LAST))
def offset_forgotten(q, k, v, *, align=None, **options):
    if align == "lower_right":
        return _naive(q, k, v, align="upper_left", **options)
    return right.local_global_attention_forward(q, k, v, align=align, **options)


@suite.mutant(
    FORWARD,
    "near and far each with a softmax of their own, then the mean of the two",
    killed_by=(DEFINITION, ALIKE, EXTREMES),
)
def two_softmaxes(q, k, v, **options):
    near, cache = _naive(q, k, v, coarse=lambda p, c, b, causal: (c < 0) & (p < 0), **options)
    far, _ = _naive(q, k, v, fine=lambda p, j, b, causal: (j < 0) & (p < 0), **options)
    return (near + far) / 2, cache


@suite.mutant(FORWARD, "padding is read as k = 0, v = 0", killed_by=(DEFINITION, LEFT_OUT))
def padding_zeroes_the_key(q, k, v, *, keep=None, **options):
    if keep is not None:
        k, v = (np.where(np.atleast_2d(keep)[..., 0, :, None], x, 0) for x in (k, v))
    return right.local_global_attention_forward(q, k, v, **options)


@suite.mutant(FORWARD, "a scale from the caller is forgotten", killed_by=DEFINITION)
def scale_argument_ignored(q, k, v, *, scale=None, **options):
    return right.local_global_attention_forward(q, k, v, **options)


@suite.mutant(FORWARD, "0/0 where nothing is read", killed_by=(DEFINITION, DEAD))
def dead_rows_divided_by_zero(q, k, v, **options):
    out, cache = right.local_global_attention_forward(q, k, v, **options)
    return np.where(cache.lse[..., None] == -np.inf, np.nan, out), cache


@suite.mutant(FORWARD, "head h reads h % G", killed_by=(DEFINITION, GROUPS))
def key_heads_tiled_instead_of_repeated(q, k, v, **options):
    _, cache = right.local_global_attention_forward(q, k, v, **options)
    heads, groups = q.shape[-3], k.shape[-3]
    order = np.arange(heads).reshape(-1, groups).T.ravel()  # the heads that read group 0, 1, …
    tiled, _ = right.local_global_attention_forward(q[..., order, :, :], k, v, **options)
    return tiled[..., np.argsort(order), :, :], cache


@suite.mutant(FORWARD, "means stored as narrow as the values: rounded twice", killed_by=NARROW)
def summaries_rounded(q, k, v, **options):
    def value(inside, n):
        return (inside.astype(np.result_type(inside.dtype.type(0), np.float32)).sum(-2) / n).astype(
            inside.dtype
        )

    out, cache = _naive(q, k, v, value=value, **options)
    return out.astype(v.dtype), cache


# ---- the backward --------------------------------------------------------------------------------


def _without_summaries(dout, cache, **options):
    pools = tuple(p._replace(exists=np.zeros(1, bool)) for p in cache.pools)
    return right.local_global_attention_backward(dout, cache._replace(pools=pools), **options)


@suite.mutant(BACKWARD, "means are taken for constants", killed_by=DERIVATIVE)
def summaries_have_no_gradient(dout, cache, *, dlse=None):
    return _without_summaries(dout, cache, dlse=dlse)


@suite.mutant(BACKWARD, "dk̄ to each of the n_c keys", killed_by=DERIVATIVE)
def summary_gradient_not_divided(dout, cache, *, dlse=None):
    pools = tuple(p._replace(counts=np.ones_like(p.counts)) for p in cache.pools)
    return right.local_global_attention_backward(dout, cache._replace(pools=pools), dlse=dlse)


@suite.mutant(
    BACKWARD, "dk̄ = of the last block that read it, not += over all", killed_by=DERIVATIVE
)
def summary_gradient_overwritten(dout, cache, *, dlse=None):
    here, _, _ = cache.blocks[-1]
    last = np.zeros_like(dout)
    last[..., here, :] = dout[..., here, :]
    near = _without_summaries(dout, cache, dlse=dlse)
    both, own = (
        f(last, cache) for f in (right.local_global_attention_backward, _without_summaries)
    )
    return near._replace(k=near.k + both.k - own.k, v=near.v + both.v - own.v)


@suite.mutant(BACKWARD, "the log-sum-exp has no gradient", killed_by=DERIVATIVE)
def cotangent_of_the_lse_ignored(dout, cache, *, dlse=None):
    return right.local_global_attention_backward(dout, cache)


@suite.mutant(BACKWARD, "the query heads of a group averaged", killed_by=(DERIVATIVE, EXTREMES))
def group_gradients_averaged(dout, cache, *, dlse=None):
    grads = right.local_global_attention_backward(dout, cache, dlse=dlse)
    repeat = grads.q.shape[-3] // grads.k.shape[-3]
    return grads._replace(k=grads.k / repeat, v=grads.v / repeat)


@suite.mutant(BACKWARD, "0 · NaN into every value", killed_by=DEAD)
def cotangent_of_a_dead_row_let_in(dout, cache, *, dlse=None):
    grads = right.local_global_attention_backward(dout, cache, dlse=dlse)
    return grads._replace(v=grads.v + 0 * dout.sum())


@suite.mutant(BACKWARD, "a key that is left out learns from the mean", killed_by=LEFT_OUT)
def left_out_keys_learn(dout, cache, *, dlse=None):
    pools = tuple(p._replace(exists=None) for p in cache.pools)
    return right.local_global_attention_backward(dout, cache._replace(pools=pools), dlse=dlse)


@suite.mutant(BACKWARD, "dO *= 1/2, in place", killed_by=ALONE)
def cotangent_scaled_in_place(dout, cache, *, dlse=None):
    grads = right.local_global_attention_backward(dout, cache, dlse=dlse)
    dout /= 2
    return grads
