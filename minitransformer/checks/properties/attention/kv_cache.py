"""What a key/value cache must do: let a prompt, chunks and single tokens read what one pass over
the whole text reads, and no more."""

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.attention.dense import attention_forward
from minitransformer.attention.masks import window as window_mask
from minitransformer.checks.gradients import assert_close
from minitransformer.checks.properties.nn import DTYPES, dtypes
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import of_dtype
from minitransformer.positions.alibi import alibi_forward, alibi_slopes
from minitransformer.positions.rope import rope_forward, rope_tables

suite = Suite("attention.kv_cache")

EMPTY, NEXT, PADDED, EXTEND = "empty_cache", "next_positions", "padded_positions", "extend"
REORDER, BYTES, MEMORY, READ = "reorder", "bytes_per_token", "memory_cache", "read_memory"
STEP = "decode_step"

# leading axes, H, G, D, E
SHAPES = (
    ((2,), 4, 2, 4, 3),
    ((), 3, 1, 2, 4),
    ((2, 3), 2, 2, 2, 2),
    ((1,), 1, 1, 4, 1),
    ((0,), 2, 1, 2, 3),
)
shapes = st.sampled_from(SHAPES)
# prompt, chunks, single tokens: in all nine tokens
CHUNKS = ((4, 1, 1, 3), (9,), (1,) * 9, (5, 4), (2, 0, 7), (7, 2), (0, 3, 3, 3))
chunks = st.sampled_from(CHUNKS)
windows = st.sampled_from([None, 1, 2, 3, 5, 9, 20])
LENGTH = 9


def draw_text(shape, seed: int, length: int = LENGTH) -> tuple[Array, Array, Array]:
    """q, k, v of a whole text."""
    leading, heads, groups, d, e = shape
    sizes = ((heads, d), (groups, d), (groups, e))
    return tuple(  # type: ignore[return-value]
        normal((*leading, h, length, width), seed ^ i) for i, (h, width) in enumerate(sizes)
    )


def keep_of(length: int, window: int | None) -> Array:
    """The mask of one pass: causal, or the last W keys."""
    left = -1 if window is None else window - 1
    return window_mask(length, length, left=left, right=0, align="lower_right").dense()


def new_cache(target, k: Array, v: Array, **options):
    return target.empty_cache(k.shape[:-3], k.shape[-3], k.shape[-1], v.shape[-1], **options)


def decode(target, cache, q: Array, k: Array, v: Array, split, *, positions=None, attend=None):
    """Chunk by chunk through the cache: all outputs, and the cache after them."""
    outs, start = [], 0
    attend = attend or (lambda q, read, p: attention_forward(q, read.k, read.v, keep=read.keep)[0])
    for size in split:
        here = slice(start, start + size)
        given = None if positions is None else positions[..., here]
        p = target.next_positions(cache, size) if given is None else given
        read, cache = target.extend(cache, k[..., here, :], v[..., here, :], positions=given)
        outs.append(attend(q[..., here, :], read, p))
        start += size
    return np.concatenate(outs, axis=-2), cache


# ---- one pass, or many ---------------------------------------------------------------------------


@suite.property(EMPTY, NEXT, EXTEND, shape=shapes, seed=seeds, split=chunks, window=windows)
def any_chunks_give_what_one_pass_gives(target, shape, seed, split, window):
    """Eq. 8.1, Eq. 8.2 and Eq. 8.4: prefill, chunks and single steps equal the pass over the whole,
    causal or with a window, however the window and the chunks lie to each other.

    https://github.com/pytorch/pytorch/issues/144858,
    https://github.com/huggingface/transformers/issues/39408
    """
    q, k, v = draw_text(shape, seed)
    whole, _ = attention_forward(q, k, v, keep=keep_of(LENGTH, window))
    cache = new_cache(target, k, v, window=window)
    got, _ = decode(target, cache, q, k, v, split)
    assert_close(got, whole, what="output")


@suite.property(EMPTY, NEXT, EXTEND, shape=shapes, seed=seeds, split=chunks, window=windows)
def a_chunk_reads_by_position_not_by_slot(target, shape, seed, split, window):
    """Eq. 8.2 and Eq. 8.4 as sets: each query reads each position it may, once, and `positions`
    says where each key stands.

    https://github.com/ikawrakow/ik_llama.cpp/issues/2186
    """
    _, k, v = draw_text(shape, seed)
    k[..., 0] = np.arange(LENGTH)  # a key says where it stands
    cache, start = new_cache(target, k, v, window=window), 0
    for size in split:
        here = slice(start, start + size)
        read, cache = target.extend(cache, k[..., here, :], v[..., here, :])
        m = read.k.shape[-2]
        lead = k.shape[:-3]
        assert read.keep.shape == (*lead, 1, size, m) and read.positions.shape == (*lead, m)
        for *b, i in np.ndindex(*lead, size):
            seen = read.keep[(*b, 0, i)]
            p = start + i
            first = 0 if window is None else max(0, p - window + 1)
            expected = list(range(first, p + 1))
            positions = read.positions[tuple(b)][seen]
            assert sorted(positions.tolist()) == expected, f"query {p} reads {positions}"
            held = read.k[tuple(b)][:, seen, 0]
            assert (held == positions).all(), "a key does not stand where positions says"
        start += size


@suite.property(EMPTY, EXTEND, seed=seeds, split=chunks, window=st.sampled_from([1, 2, 3, 5, 20]))
def a_ring_never_grows(target, seed, split, window):
    """Eq. 8.4: W slots from the first token to the last, with the last W positions in them; without
    a window every token stays (Eq. 8.1)."""
    _, k, v = draw_text(SHAPES[0], seed)
    for w in (window, None):
        cache, start = new_cache(target, k, v, window=w), 0
        for size in split:
            here = slice(start, start + size)
            _, cache = target.extend(cache, k[..., here, :], v[..., here, :])
            start += size
            held, _ = target.extend(cache, k[..., :0, :], v[..., :0, :])  # nobody asks
            slots = start if w is None else w
            assert held.k.shape[-2] == held.v.shape[-2] == slots, f"{held.k.shape[-2]} slots"
            for row in held.positions:
                there = sorted(row[row >= 0].tolist())
                assert there == list(range(start))[-slots:] if slots else not there


# ---- positions -----------------------------------------------------------------------------------


@suite.property(EMPTY, NEXT, EXTEND, window=windows)
def positions_go_on_from_the_last_token(target, window):
    """Eq. 8.3: six tokens are 0 … 5, the next is 6, whatever a ring has forgotten since.

    https://github.com/skyzh/tiny-llm/pull/46,
    https://github.com/rajveer43/VeloxQuant-MLX/issues/389
    """
    cache, start = target.empty_cache((2,), 1, 2, window=window), 0
    for size in (6, 1, 0, 3, 1):
        p = target.next_positions(cache, size)
        expected = np.broadcast_to(start + np.arange(size), (2, size))
        assert np.array_equal(p, expected), f"got {p.tolist()}, expected {expected[0].tolist()}"
        x = np.zeros((2, 1, size, 2))
        _, cache = target.extend(cache, x, x)
        start += size


@suite.property(EMPTY, NEXT, EXTEND, seed=seeds, split=chunks, window=windows)
def turned_keys_are_cached_as_they_are(target, seed, split, window):
    """RoPE at the positions of Eq. 8.3: a chunk is turned on arrival, and what was turned stays."""
    q, k, v = draw_text(SHAPES[0], seed)

    def turned(x, p):
        tables = rope_tables(p, x.shape[-1])
        return rope_forward(x, tables.cos, tables.sin, layout="half")[0]

    places = np.arange(LENGTH)
    keep = keep_of(LENGTH, window)
    whole, _ = attention_forward(turned(q, places), turned(k, places), v, keep=keep)
    cache, outs, start = new_cache(target, k, v, window=window), [], 0
    for size in split:
        here = slice(start, start + size)
        p = target.next_positions(cache, size)[:, None]  # (B, 1, N): the same for all heads
        read, cache = target.extend(cache, turned(k[..., here, :], p), v[..., here, :])
        outs.append(
            attention_forward(turned(q[..., here, :], p), read.k, read.v, keep=read.keep)[0]
        )
        start += size
    assert_close(np.concatenate(outs, axis=-2), whole, what="output")


@suite.property(EMPTY, NEXT, EXTEND, seed=seeds, split=chunks, window=windows)
def biases_follow_the_positions_of_the_slots(target, seed, split, window):
    """ALiBi from `Read.positions`: a ring holds its keys in no order, and that is no matter (Eq.
    8.2)."""
    q, k, v = draw_text(SHAPES[0], seed)
    slopes, places = alibi_slopes(4), np.arange(LENGTH)
    bias, _ = alibi_forward(slopes, places, places)
    whole, _ = attention_forward(q, k, v, keep=keep_of(LENGTH, window), bias=bias)

    def attend(q, read, p):
        bias, _ = alibi_forward(slopes, p, read.positions)
        return attention_forward(q, read.k, read.v, keep=read.keep, bias=bias)[0]

    cache = new_cache(target, k, v, window=window)
    got, _ = decode(target, cache, q, k, v, split, attend=attend)
    assert_close(got, whole, what="output")


@suite.property(PADDED)
def padding_has_no_position(target):
    """Eq. 8.5: [pad, pad, a, b] stands at -1, -1, 0, 1, and [a, b, pad, pad] at 0, 1, -1, -1.

    https://github.com/unslothai/unsloth/issues/3699
    """
    real = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=bool)
    expected = [[-1, -1, 0, 1], [0, 1, 2, 3], [0, 1, -1, -1], [-1, -1, -1, -1]]
    got = target.padded_positions(real)
    assert np.array_equal(got, expected), f"got {got.tolist()}"
    assert target.padded_positions(real[:, :0]).shape == (4, 0)


@suite.property(
    EMPTY,
    NEXT,
    PADDED,
    EXTEND,
    seed=seeds,
    window=windows,
    left=st.booleans(),
    split=st.sampled_from([(5,), (2, 3), (1,) * 5, (4, 0, 1)]),
    poison=st.booleans(),
)
def rows_of_unlike_length_decode_as_if_alone(target, seed, window, left, split, poison):
    """Eq. 8.5 and Eq. 8.3: prompts of 5, 3, 1 and 0 tokens in one padded batch, on whose keys the
    position is written, and three more tokens each: what every row gives without the others.
    Whatever stands in the padding has no influence, NaN neither."""
    lengths, new, table = (5, 3, 1, 0), 3, normal((LENGTH, 4), seed ^ 9)
    q, k, v = draw_text(((4,), 4, 2, 4, 3), seed, 5 + new)
    real = np.arange(5) < np.array(lengths)[:, None]
    real = real[:, ::-1] if left else real
    p = target.padded_positions(real)
    here = np.clip(p, 0, LENGTH)[:, None]
    k_prompt = k[..., :5, :] + table[here]
    v_prompt = v[..., :5, :].copy()
    if poison:
        for x in (k_prompt, v_prompt):
            x[np.broadcast_to(~real[:, None], x.shape[:-1])] = np.nan
    cache = new_cache(target, k, v, window=window)
    prompt, cache = decode(target, cache, q[..., :5, :], k_prompt, v_prompt, split, positions=p)
    steps = []
    for t in range(5, 5 + new):
        place = target.next_positions(cache, 1)[:, None]
        read, cache = target.extend(
            cache, k[..., t : t + 1, :] + table[place], v[..., t : t + 1, :]
        )
        steps.append(attention_forward(q[..., t : t + 1, :], read.k, read.v, keep=read.keep)[0])
    got = np.concatenate([prompt, *steps], axis=-2)
    for b, length in enumerate(lengths):
        tokens = [*np.flatnonzero(real[b]), *range(5, 5 + new)]
        alone_q, alone_k, alone_v = (x[b][:, tokens] for x in (q, k, v))
        alone_k = alone_k + table[: length + new]
        keep = keep_of(length + new, window)
        expected, _ = attention_forward(alone_q, alone_k, alone_v, keep=keep)
        assert_close(got[b][:, tokens], expected, what=f"row with {length} tokens")
        assert (got[b][:, :5][:, ~real[b]] == 0).all(), "padding reads something"


# ---- values --------------------------------------------------------------------------------------


@suite.property(EMPTY, NEXT, EXTEND, seed=seeds, split=chunks, window=windows)
def an_older_cache_goes_on_from_where_it_was(target, seed, split, window):
    """Two continuations of one cache do not see each other, and the arrays that were given may be
    used again: nothing of them is shared, nothing of the caller's is changed."""
    q, k, v = draw_text(SHAPES[0], seed)
    other = normal(k.shape, seed ^ 7), normal(v.shape, seed ^ 8)
    expected, _ = attention_forward(q, k, v, keep=keep_of(LENGTH, window))
    cache, outs, start = new_cache(target, k, v, window=window), [], 0
    for size in split:
        here = slice(start, start + size)
        target.extend(cache, other[0][..., here, :], other[1][..., here, :])  # a fork
        buffers = k[..., here, :].copy(), v[..., here, :].copy()
        read, after = target.extend(cache, *buffers)
        outs.append(attention_forward(q[..., here, :], read.k, read.v, keep=read.keep)[0])
        assert np.array_equal(buffers[0], k[..., here, :]), "k was modified"
        assert np.array_equal(buffers[1], v[..., here, :]), "v was modified"
        for x in buffers:
            x[...] = 100.0
        cache, start = after, start + size
    assert_close(np.concatenate(outs, axis=-2), expected, what="output")


@suite.property(
    EMPTY, NEXT, EXTEND, REORDER, seed=seeds, window=windows,
    rows=st.sampled_from([(2, 0, 1), (1, 1, 0), (0, 0, 0, 0), (2,), (0, 1, 2), (1, 2, 0)]),
)  # fmt: skip
def a_beam_goes_on_from_its_own_past(target, seed, window, rows):
    """Eq. 8.6: after beams were chosen, each decodes as if it had its history from the start, keys,
    values and positions, in a prompt of unlike lengths too."""
    q, k, v = draw_text(((3,), 2, 2, 4, 3), seed, 7)
    skip = (0, 2, 1)  # padding at the start of each row
    p = np.maximum(np.arange(4) - np.array(skip)[:, None], -1)
    cache = new_cache(target, k, v, window=window)
    _, cache = target.extend(cache, k[..., :4, :], v[..., :4, :], positions=p)
    chosen = np.array(rows)
    cache = target.reorder(cache, chosen)
    q, k, v = (
        np.concatenate([x[chosen][..., :4, :], normal((len(rows), 2, 3, w), seed ^ i)], axis=-2)
        for i, (x, w) in enumerate(((q, 4), (k, 4), (v, 3)))
    )
    got, _ = decode(target, cache, q[..., 4:, :], k[..., 4:, :], v[..., 4:, :], (1, 2))
    for b, row in enumerate(rows):
        own = slice(skip[row], None)
        keep = keep_of(7 - skip[row], window)
        expected, _ = attention_forward(q[b][:, own], k[b][:, own], v[b][:, own], keep=keep)
        assert_close(got[b], expected[:, -3:], what=f"beam {b} from row {row}")


# ---- a step as one function ----------------------------------------------------------------------


def stepped(target, cache, q: Array, k: Array, v: Array, split, *, positions=None, **options):
    """Chunk by chunk through `decode_step`: all outputs, and the cache after them."""
    outs, start = [], 0
    for size in split:
        here = slice(start, start + size)
        if positions is not None:
            options["positions"] = positions[..., here]
        given = (x[..., here, :] for x in (q, k, v))
        out, cache = target.decode_step(*given, cache, **options)
        outs.append(out)
        start += size
    return np.concatenate(outs, axis=-2), cache


@suite.property(EMPTY, STEP, shape=shapes, seed=seeds, split=chunks)
def steps_give_what_one_pass_gives(target, shape, seed, split):
    """Eq. 8.1 and Eq. 8.2: prompt, chunks and single tokens, each attending to all before it and to
    itself, equal causal attention over the whole text.

    https://github.com/pytorch/pytorch/issues/144858
    """
    q, k, v = draw_text(shape, seed)
    whole, _ = attention_forward(q, k, v, keep=keep_of(LENGTH, None))
    got, _ = stepped(target, new_cache(target, k, v), q, k, v, split)
    assert_close(got, whole, what="output")


@suite.property(
    EMPTY, STEP, shape=shapes, seed=seeds, split=chunks, window=st.sampled_from([1, 2, 3, 5, 20])
)
def steps_through_a_window_read_the_last_tokens(target, shape, seed, split, window):
    """Eq. 8.4: with a window W each token attends to itself and the W - 1 before it, however the
    window and the chunks lie to each other.

    https://github.com/huggingface/transformers/issues/39408
    """
    q, k, v = draw_text(shape, seed)
    whole, _ = attention_forward(q, k, v, keep=keep_of(LENGTH, window))
    got, _ = stepped(target, new_cache(target, k, v, window=window), q, k, v, split)
    assert_close(got, whole, what="output")


@suite.property(EMPTY, STEP, seed=seeds, split=chunks, scale=st.sampled_from([0.7, 0.05]))
def a_step_takes_the_scale_it_is_given(target, seed, split, scale):
    """The same scale in every step, and it is that of one pass."""
    q, k, v = draw_text(SHAPES[0], seed)
    whole, _ = attention_forward(q, k, v, keep=keep_of(LENGTH, None), scale=scale)
    got, _ = stepped(target, new_cache(target, k, v), q, k, v, split, scale=scale)
    assert_close(got, whole, what="output")


@suite.property(
    EMPTY, STEP, seed=seeds, groups=st.sampled_from([2, 1, 3]), repeat=st.sampled_from([2, 1, 3])
)
def in_a_step_query_head_h_reads_key_head_h_over_the_group_size(target, seed, groups, repeat):
    """Values that carry the number of their head show which one a query head read, from the cache
    as well as from its own chunk."""
    heads = groups * repeat
    q, k = normal((1, heads, 4, 2), seed), normal((1, groups, 4, 2), seed ^ 1)
    v = np.broadcast_to(np.arange(groups, dtype=np.float64)[:, None, None], (1, groups, 4, 2))
    got, _ = stepped(target, new_cache(target, k, v), q, k, v, (2, 1, 1))
    expected = np.broadcast_to((np.arange(heads) // repeat)[:, None, None], got.shape)
    assert_close(got, expected.astype(np.float64))


@suite.property(EMPTY, STEP, seed=seeds, left=st.booleans(), poison=st.booleans())
def padding_takes_no_part_in_a_step(target, seed, left, poison):
    """Eq. 8.2: prompts of unlike length in one batch, padding at position -1; every real token gets
    what it gets alone, then and in the steps after, whatever stands in the padding."""
    lengths, new = (5, 3, 1), 2
    q, k, v = draw_text(((3,), 4, 2, 4, 3), seed, 5 + new)
    real = np.arange(5) < np.array(lengths)[:, None]
    real = real[:, ::-1] if left else real
    prompt = np.where(real, np.cumsum(real, axis=-1) - 1, -1)
    later = np.array(lengths)[:, None] + np.arange(new)
    given_k, given_v = k.copy(), v.copy()
    hidden = np.broadcast_to(~real[:, None], k[..., :5, 0].shape)
    for x in (given_k, given_v):
        x[..., :5, :][hidden] = np.nan if poison else 40.0
    positions = np.concatenate([prompt, later], axis=-1)
    cache = new_cache(target, k, v)
    got, _ = stepped(target, cache, q, given_k, given_v, (5, 1, 1), positions=positions)
    for b, length in enumerate(lengths):
        tokens = [*np.flatnonzero(real[b]), *range(5, 5 + new)]
        alone = (x[b][:, tokens] for x in (q, k, v))
        expected, _ = attention_forward(*alone, keep=keep_of(length + new, None))
        assert_close(got[b][:, tokens], expected, what=f"row with {length} tokens")


@suite.property(EMPTY, STEP, seed=seeds, split=chunks)
def a_step_leaves_the_older_cache_and_its_arguments_alone(target, seed, split):
    """Two continuations of one cache do not see each other; no argument is modified, and the arrays
    that were given may be used again."""
    q, k, v = draw_text(SHAPES[0], seed)
    expected, _ = attention_forward(q, k, v, keep=keep_of(LENGTH, None))
    cache, outs, start = new_cache(target, k, v), [], 0
    for size in split:
        here = slice(start, start + size)
        target.decode_step(q[..., here, :], 3 - k[..., here, :], -v[..., here, :], cache)  # a fork
        buffers = [x[..., here, :].copy() for x in (q, k, v)]
        out, cache = target.decode_step(*buffers, cache)
        for x, given in zip(buffers, (q, k, v), strict=True):
            assert np.array_equal(x, given[..., here, :]), "an argument was modified"
            x[...] = 100.0
        outs.append(out)
        start += size
    assert_close(np.concatenate(outs, axis=-2), expected, what="output")


# ---- storage -------------------------------------------------------------------------------------


@suite.property(EMPTY, NEXT, EXTEND, seed=seeds, dtype=dtypes, split=chunks, window=windows)
def a_key_is_the_same_number_now_and_later(target, seed, dtype, split, window):
    """A narrow cache rounds a key once, before its own chunk reads it: then narrow decoding is the
    narrow pass, whatever the chunks."""
    q, k, v = draw_text(SHAPES[0], seed)
    narrow = DTYPES[dtype]
    stored = k.astype(narrow).astype(np.float64), v.astype(narrow).astype(np.float64)
    expected, _ = attention_forward(q, *stored, keep=keep_of(LENGTH, window))
    cache, outs, start = new_cache(target, k, v, window=window, dtype=narrow), [], 0
    for size in split:
        here = slice(start, start + size)
        read, cache = target.extend(cache, k[..., here, :], v[..., here, :])
        assert read.k.dtype == read.v.dtype == narrow, f"read {read.k.dtype}, stored {dtype}"
        wide = read.k.astype(np.float64), read.v.astype(np.float64)
        outs.append(attention_forward(q[..., here, :], *wide, keep=read.keep)[0])
        start += size
    assert_close(np.concatenate(outs, axis=-2), expected, of_dtype("float64"), what="output")


@suite.property(
    BYTES, EMPTY, EXTEND,
    layers=st.sampled_from([1, 3]), groups=st.sampled_from([1, 2, 5]),
    widths=st.sampled_from([(4, 4), (3, 5), (4, 0)]), dtype=dtypes,
)  # fmt: skip
def a_token_costs_its_keys_and_values(target, layers, groups, widths, dtype):
    """Eq. 8.8 against the arrays that a cache holds after seven tokens. 80 layers of 8 groups of
    width 128 in 16 bits: 320 KiB a token; with 64 heads cached, eight times as much."""
    d, e = widths
    cache = target.empty_cache((1,), groups, d, e, dtype=DTYPES[dtype])
    read, _ = target.extend(cache, np.zeros((1, groups, 7, d)), np.zeros((1, groups, 7, e)))
    held = layers * (read.k.nbytes + read.v.nbytes) // 7
    got = target.bytes_per_token(layers, groups, d, e, dtype=DTYPES[dtype])
    assert got == held, f"got {got} bytes, the arrays take {held}"
    assert target.bytes_per_token(80, 8, 128, dtype=np.float16) == 320 * 1024
    assert target.bytes_per_token(80, 64, 128, dtype=np.float16) == 8 * 320 * 1024


# ---- cross-attention -----------------------------------------------------------------------------


@suite.property(
    MEMORY, READ, REORDER, seed=seeds, padded=st.booleans(), split=chunks, beams=st.booleans()
)
def a_memory_is_projected_once_and_read_whole(target, seed, padded, split, beams):
    """Eq. 8.7: one call of the projection for a whole text; every token reads every row of the
    memory that is no padding, and what stands in the padding does not matter. Beams take their
    memory with them (Eq. 8.6).

    https://github.com/huggingface/transformers/pull/46111
    """
    memory, q = normal((3, 5, 6), seed), normal((3, 4, LENGTH, 4), seed ^ 1)
    weights = normal((2, 6, 4), seed ^ 2), normal((2, 6, 3), seed ^ 3)
    keep = np.arange(5) < np.array([[5], [3], [0]]) if padded else None
    calls = []

    def project(x):
        calls.append(x)
        return tuple(x[..., None, :, :] @ w for w in weights)

    given = memory.copy()
    if padded:
        given[~keep] = 50.0
    cache = target.memory_cache(given, project, keep=keep)
    k, v = (memory[:, None] @ w for w in weights)
    mask = None if keep is None else keep[:, None, None]
    if beams:
        rows = np.array([2, 0, 0])
        cache = target.reorder(cache, rows)
        k, v, mask = k[rows], v[rows], None if mask is None else mask[rows]
    start = 0
    expected, _ = attention_forward(q, k, v, keep=mask)
    for size in split:
        here = slice(start, start + size)
        read = target.read_memory(cache, size)
        assert read.keep.shape == (3, 1, size, 5)
        got, _ = attention_forward(q[..., here, :], read.k, read.v, keep=read.keep)
        assert_close(got, expected[..., here, :], what="output")
        start += size
    assert len(calls) == 1, f"the memory was projected {len(calls)} times"
