"""Mistakes people make with key/value caches."""

import numpy as np

from minitransformer.attention import kv_cache as right
from minitransformer.attention.dense import attention_forward
from minitransformer.checks.properties.attention.kv_cache import suite

CHUNKS = "any_chunks_give_what_one_pass_gives"
READS = "a_chunk_reads_by_position_not_by_slot"
RING = "a_ring_never_grows"
GO_ON = "positions_go_on_from_the_last_token"
TURNED = "turned_keys_are_cached_as_they_are"
BIASES = "biases_follow_the_positions_of_the_slots"
PADDING = "padding_has_no_position"
UNLIKE = "rows_of_unlike_length_decode_as_if_alone"
OLDER = "an_older_cache_goes_on_from_where_it_was"
BEAM = "a_beam_goes_on_from_its_own_past"
SAME = "a_key_is_the_same_number_now_and_later"
COSTS = "a_token_costs_its_keys_and_values"
MEMORY = "a_memory_is_projected_once_and_read_whole"
STEPS = "steps_give_what_one_pass_gives"
WINDOW = "steps_through_a_window_read_the_last_tokens"
SCALE = "a_step_takes_the_scale_it_is_given"
HEADS = "in_a_step_query_head_h_reads_key_head_h_over_the_group_size"
NO_PART = "padding_takes_no_part_in_a_step"
ALONE = "a_step_leaves_the_older_cache_and_its_arguments_alone"


def _reading(change):
    """A mutant of `extend` in which only what is read is wrong: `change(read, p, cache)`."""

    def made(cache, k, v, *, positions=None):
        read, after = right.extend(cache, k, v, positions=positions)
        p = read.positions[..., read.positions.shape[-1] - k.shape[-2] :]
        return change(read, p, cache), after

    made.__name__ = change.__name__
    return made


def _masked(read, keep):
    return read._replace(keep=np.broadcast_to(keep, read.keep.shape).copy())


# ---- reading -------------------------------------------------------------------------------------


@suite.mutant(
    "extend",
    "row i of a chunk reads keys 0 … i, as if nothing came before:"
    " https://github.com/pytorch/pytorch/issues/144858",
    killed_by=(CHUNKS, READS, TURNED, BIASES, OLDER, SAME),
)
@_reading
def causal_mask_at_the_upper_left(read, p, cache):
    n, m = read.keep.shape[-2:]
    return _masked(read, (np.arange(m) <= np.arange(n)[:, None]) & (read.positions >= 0)[
        ..., None, None, :
    ])  # fmt: skip


@suite.mutant("extend", "a single token needs no mask; a chunk does", killed_by=(CHUNKS, READS))
@_reading
def chunk_reads_its_own_future(read, p, cache):
    return _masked(read, (read.positions >= 0)[..., None, None, :])


@suite.mutant(
    "extend",
    "W back and oneself are W + 1 keys: https://github.com/huggingface/transformers/issues/39408",
    killed_by=(CHUNKS, READS, TURNED, BIASES),
)
@_reading
def window_of_one_too_many(read, p, cache):
    window = None if cache.window is None else cache.window + 1
    return _masked(read, right._visible(p, read.positions, window)[..., None, :, :])


@suite.mutant(
    "extend", "the ring limits what is held, not what a chunk reads", killed_by=(CHUNKS, READS)
)
@_reading
def window_not_applied_within_a_chunk(read, p, cache):
    return _masked(read, right._visible(p, read.positions, None)[..., None, :, :])


@suite.mutant(
    "extend",
    "the last W slots are not the last W positions:"
    " https://github.com/ikawrakow/ik_llama.cpp/issues/2186",
    killed_by=(CHUNKS, READS),
)
@_reading
def window_counted_in_slots(read, p, cache):
    if cache.window is None:
        return read
    n, m = read.keep.shape[-2:]
    distance = np.arange(m - n, m)[:, None] - np.arange(m)
    recent = (distance >= 0) & (distance < cache.window)
    return _masked(read, recent & (read.positions >= 0)[..., None, None, :])


@suite.mutant(
    "extend", "an empty slot is a key of zeros, and takes its share", killed_by=(CHUNKS, READS)
)
@_reading
def empty_slots_are_read(read, p, cache):
    return _masked(read, read.keep | (read.positions < 0)[..., None, None, :])


@suite.mutant(
    "extend", "the slot's number handed to ALiBi as the key's position", killed_by=(READS, BIASES)
)
@_reading
def slots_called_positions(read, p, cache):
    slots = np.arange(read.positions.shape[-1])
    return read._replace(positions=np.broadcast_to(slots, read.positions.shape).copy())


@suite.mutant(
    "extend",
    "what was held, then what came; their own chunk reads the new keys before they are rounded",
    killed_by=SAME,
)
def new_keys_read_wide(cache, k, v, *, positions=None):
    read, after = right.extend(cache, k, v, positions=positions)
    old_k, old_v = (x.astype(np.float64) for x in (cache.k, cache.v))
    return read._replace(
        k=np.concatenate([old_k, k], axis=-2), v=np.concatenate([old_v, v], axis=-2)
    ), after


# ---- keeping -------------------------------------------------------------------------------------


@suite.mutant(
    "extend", "written into the cache, then concatenated with it", killed_by=(CHUNKS, READS, OLDER)
)
def new_keys_read_twice(cache, k, v, *, positions=None):
    read, after = right.extend(cache, k, v, positions=positions)
    n = k.shape[-2]
    keep = np.concatenate([read.keep, read.keep[..., read.keep.shape[-1] - n :]], axis=-1)
    places = np.concatenate(
        [read.positions, read.positions[..., read.positions.shape[-1] - n :]], axis=-1
    )
    twice = (np.concatenate([a, b.astype(a.dtype)], axis=-2) for a, b in ((read.k, k), (read.v, v)))
    return right.Read(*twice, places, keep), after


@suite.mutant(
    "extend",
    "the ring is written before the chunk reads: its first queries miss their oldest keys",
    killed_by=(CHUNKS, READS, TURNED, BIASES),
)
def overwritten_before_it_is_read(cache, k, v, *, positions=None):
    read, after = right.extend(cache, k, v, positions=positions)
    if cache.window is None:
        return read, after
    p = read.positions[..., read.positions.shape[-1] - k.shape[-2] :]
    keep = right._visible(p, after.positions, cache.window)[..., None, :, :]
    return right.Read(after.k, after.v, after.positions, keep), after


@suite.mutant(
    "extend",
    "the window hides old keys, nobody throws them away: memory grows with the text",
    killed_by=RING,
)
def ring_that_only_masks(cache, k, v, *, positions=None):
    read, _ = right.extend(cache, k, v, positions=positions)
    return read, right.KVCache(read.k, read.v, read.positions, cache.window)


@suite.mutant(
    "extend",
    "the newcomer needs W - 1 beside itself; one less is kept",
    killed_by=(CHUNKS, RING),
)
def ring_of_one_too_few(cache, k, v, *, positions=None):
    read, after = right.extend(cache, k, v, positions=positions)
    if cache.window is None:
        return read, after
    last = after.positions.max(axis=-1, initial=-1, keepdims=True)
    old = after.positions <= last - cache.window + 2
    return read, after._replace(positions=np.where(old, -1, after.positions))


@suite.mutant(
    "extend",
    "a ring of the last W columns: padding at the end of a row pushes its tokens out",
    killed_by=UNLIKE,
)
def padding_takes_slots(cache, k, v, *, positions=None):
    read, after = right.extend(cache, k, v, positions=positions)
    if cache.window is None:
        return read, after
    w = cache.window
    return read, right.KVCache(
        read.k[..., -w:, :], read.v[..., -w:, :], read.positions[..., -w:], w
    )


@suite.mutant("extend", "saves a copy, and beams write over each other", killed_by=OLDER)
def ring_written_in_place(cache, k, v, *, positions=None):
    read, after = right.extend(cache, k, v, positions=positions)
    if cache.window is None:
        return read, after
    for old, new in zip(cache[:3], after[:3], strict=True):
        old[...] = new
    return read, cache


@suite.mutant("extend", "the first chunk is the cache: no copy", killed_by=OLDER)
def first_chunk_kept_by_reference(cache, k, v, *, positions=None):
    read, after = right.extend(cache, k, v, positions=positions)
    if cache.window is None and not cache.k.shape[-2]:
        after = after._replace(k=k, v=v)
    return read, after


@suite.mutant("extend", "both halves of a pair, from one variable", killed_by=(CHUNKS, OLDER, SAME))
def values_of_the_past_forgotten(cache, k, v, *, positions=None):
    read, after = right.extend(cache, k, v, positions=positions)
    return read, after._replace(v=np.zeros_like(after.v))


# ---- positions -----------------------------------------------------------------------------------


@suite.mutant(
    "next_positions", "every step of decoding is at position 0", killed_by=(GO_ON, TURNED, BIASES)
)
def positions_start_again(cache, tokens):
    return right.next_positions(cache, tokens) * 0 + np.arange(tokens)


@suite.mutant(
    "next_positions",
    "the number of slots: a ring stands still at W, padding counts as text:"
    " https://github.com/rajveer43/VeloxQuant-MLX/issues/389",
    killed_by=(GO_ON, TURNED, BIASES, UNLIKE),
)
def number_of_slots_for_the_length(cache, tokens):
    p = right.next_positions(cache, tokens)
    return np.broadcast_to(cache.k.shape[-2] + np.arange(tokens), p.shape)


@suite.mutant(
    "next_positions",
    "the prompt's length is added once more: https://github.com/skyzh/tiny-llm/pull/46",
    killed_by=(GO_ON, TURNED),
)
def prompt_counted_again(cache, tokens):
    p = right.next_positions(cache, tokens)
    return p + (cache.positions.max(axis=-1, initial=-1, keepdims=True) + 1)


@suite.mutant(
    "next_positions",
    "one position for the batch, that of its longest row:"
    " https://github.com/unslothai/unsloth/issues/3699",
    killed_by=UNLIKE,
)
def longest_row_speaks_for_all(cache, tokens):
    p = right.next_positions(cache, tokens)
    return np.broadcast_to(p.max(axis=tuple(range(p.ndim - 1)), initial=0), p.shape)


@suite.mutant(
    "next_positions", "the last position, not the one after it", killed_by=(GO_ON, UNLIKE)
)
def next_token_on_top_of_the_last(cache, tokens):
    return np.maximum(right.next_positions(cache, tokens) - 1, 0)


@suite.mutant(
    "padded_positions", "columns of the batch: short rows start late", killed_by=(PADDING, UNLIKE)
)
def columns_for_positions(real):
    return np.where(real, np.arange(real.shape[-1]), -1)


@suite.mutant(
    "padded_positions",
    "clipped at 0, as for a table: the padding stands where the first token does",
    killed_by=PADDING,
)
def padding_at_position_zero(real):
    return np.maximum(right.padded_positions(real), 0)


@suite.mutant("padded_positions", "counts from 1", killed_by=(PADDING, UNLIKE))
def first_token_at_one(real):
    return np.where(real, np.cumsum(real, axis=-1), -1)


# ---- beams ---------------------------------------------------------------------------------------


@suite.mutant(
    "reorder", "from whom each beam came is not where each beam goes", killed_by=BEAM, crashes=True
)
def beams_moved_the_other_way(cache, rows):
    return right.reorder(cache, np.argsort(rows))


@suite.mutant(
    "reorder", "a search of five beams forgets that caches exist", killed_by=(BEAM, MEMORY)
)
def cache_not_reordered(cache, rows):
    return right.reorder(cache, np.arange(len(rows)) % len(cache.k))


@suite.mutant("reorder", "the values of another beam", killed_by=(BEAM, MEMORY))
def keys_alone_reordered(cache, rows):
    moved = right.reorder(cache, rows)
    return moved._replace(v=cache.v[np.arange(len(rows)) % len(cache.v)])


@suite.mutant("reorder", "rows padded differently swap pasts, not lengths", killed_by=BEAM)
def positions_stay_behind(cache, rows):
    moved = right.reorder(cache, rows)
    if isinstance(cache, right.MemoryCache):
        return moved
    return moved._replace(positions=cache.positions[np.arange(len(rows)) % len(cache.k)])


@suite.mutant("reorder", "who was padded stays where it was", killed_by=MEMORY)
def padding_stays_behind(cache, rows):
    moved = right.reorder(cache, rows)
    if isinstance(cache, right.KVCache):
        return moved
    return moved._replace(keep=cache.keep[np.arange(len(rows)) % len(cache.k)])


@suite.mutant(
    "reorder", "the axis of the heads: as many as beams, and nothing is said", killed_by=BEAM
)
def heads_reordered(cache, rows):
    moved = right.reorder(cache, np.arange(len(rows)) % len(cache.k))
    order = rows % cache.k.shape[-3]
    if len(rows) < cache.k.shape[-3]:
        return moved
    order = order[: cache.k.shape[-3]]
    return moved._replace(k=moved.k[:, order], v=moved.v[:, order])


# ---- storage -------------------------------------------------------------------------------------


@suite.mutant("bytes_per_token", "keys, and what about values?", killed_by=COSTS)
def keys_alone_counted(layers, groups, width, value_width=None, *, dtype=np.float32):
    return right.bytes_per_token(layers, groups, width, 0, dtype=dtype)


@suite.mutant("bytes_per_token", "4 bytes, however it is stored", killed_by=COSTS)
def always_four_bytes(layers, groups, width, value_width=None, *, dtype=np.float32):
    return right.bytes_per_token(layers, groups, width, value_width, dtype=np.float32)


@suite.mutant("bytes_per_token", "values are not always as wide as keys", killed_by=COSTS)
def values_as_wide_as_keys(layers, groups, width, value_width=None, *, dtype=np.float32):
    return right.bytes_per_token(layers, groups, width, dtype=dtype)


@suite.mutant(
    "empty_cache", "the default of the library, not of the model", killed_by=(SAME, COSTS)
)
def cache_always_in_float64(leading, groups, width, value_width=None, *, window=None, dtype=None):
    return right.empty_cache(leading, groups, width, value_width, window=window)


@suite.mutant(
    "empty_cache",
    "zeros for positions: an empty slot looks like token 0",
    killed_by=(CHUNKS, GO_ON),
)
def empty_slots_at_position_zero(
    leading, groups, width, value_width=None, *, window=None, dtype=np.float64
):
    cache = right.empty_cache(leading, groups, width, value_width, window=window, dtype=dtype)
    return cache._replace(positions=np.zeros_like(cache.positions))


# ---- cross-attention -----------------------------------------------------------------------------


@suite.mutant("memory_cache", "k from one call, v from another", killed_by=MEMORY)
def projected_twice(memory, project, *, keep=None):
    project(memory)
    return right.memory_cache(memory, project, keep=keep)


@suite.mutant("memory_cache", "a memory is all text, padding too", killed_by=MEMORY)
def padding_of_the_memory_read(memory, project, *, keep=None):
    return right.memory_cache(memory, project)


@suite.mutant("read_memory", "the decoder's own causal mask, left on", killed_by=MEMORY)
def memory_masked_causally(cache, queries):
    read = right.read_memory(cache, queries)
    keys = read.keep.shape[-1]
    return read._replace(keep=read.keep & (np.arange(keys) <= np.arange(queries)[:, None]))


@suite.mutant(
    "read_memory",
    "the decoder's window cuts the memory: https://github.com/huggingface/transformers/pull/46111",
    killed_by=MEMORY,
)
def memory_cut_to_a_window(cache, queries):
    read = right.read_memory(cache, queries)
    keys = read.keep.shape[-1]
    return read._replace(keep=read.keep & (np.arange(keys) >= keys - 2))


# ---- a step as one function ----------------------------------------------------------------------


def _step(extend):
    """A mutant of `decode_step` that is `extend` gone wrong."""

    def made(q, k, v, cache, *, positions=None, scale=None):
        read, after = extend(cache, k, v, positions=positions)
        out, _ = attention_forward(
            q, read.k, read.v, keep=read.keep, scale=scale, check_finite=False
        )
        return out, after

    made.__name__ = f"step_with_{extend.__name__}"
    return made


for _extend, _why, _killers in (
    (causal_mask_at_the_upper_left, "i <= j in a chunk, and in the text", (STEPS, SCALE, ALONE)),
    (chunk_reads_its_own_future, "no mask: one token needs none", (STEPS, SCALE, ALONE)),
    (window_of_one_too_many, "W back and oneself", WINDOW),
    (window_not_applied_within_a_chunk, "the ring is the window, it was thought", WINDOW),
    (new_keys_read_twice, "written into the cache, then concatenated with it", (STEPS, ALONE)),
    (overwritten_before_it_is_read, "write, then read", WINDOW),
    (values_of_the_past_forgotten, "both halves of a pair, from one variable", (STEPS, HEADS)),
    (first_chunk_kept_by_reference, "the first chunk is the cache", ALONE),
):
    suite.mutant("decode_step", _why, killed_by=_killers)(_step(_extend))


@suite.mutant("decode_step", "the caller's scale serves the prompt only", killed_by=SCALE)
def step_that_forgets_the_scale(q, k, v, cache, *, positions=None, scale=None):
    given = scale if cache.positions.shape[-1] == 0 else None
    return right.decode_step(q, k, v, cache, positions=positions, scale=given)


@suite.mutant(
    "decode_step",
    "tile for repeat, in the path that decodes: https://github.com/onnx/onnx/pull/7274",
    killed_by=(HEADS, STEPS),
)
def step_with_heads_tiled(q, k, v, cache, *, positions=None, scale=None):
    repeat = q.shape[-3] // k.shape[-3]
    order = np.arange(q.shape[-3]) % k.shape[-3] * repeat + np.arange(q.shape[-3]) // k.shape[-3]
    out, after = right.decode_step(
        q[..., np.argsort(order), :, :], k, v, cache, positions=positions, scale=scale
    )
    return out[..., order, :, :], after


@suite.mutant("decode_step", "padding of the prompt is a token", killed_by=NO_PART)
def step_that_reads_padding(q, k, v, cache, *, positions=None, scale=None):
    return right.decode_step(q, k, v, cache, scale=scale, check_finite=False)


@suite.mutant("decode_step", "what was returned is not what was extended", killed_by=STEPS)
def step_that_returns_the_cache_it_got(q, k, v, cache, *, positions=None, scale=None):
    return right.decode_step(q, k, v, cache, positions=positions, scale=scale)[0], cache


@suite.mutant("decode_step", "the new queries scaled where they stand", killed_by=ALONE)
def step_that_scales_in_place(q, k, v, cache, *, positions=None, scale=None):
    q *= q.shape[-1] ** -0.5 if scale is None else scale
    return right.decode_step(q, k, v, cache, positions=positions, scale=1.0)
