"""What pruning must do: a head that is silenced and one that is taken out are the same loss to the
layer, and who goes is decided as it is said."""

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.arrays import Array
from minitransformer.attention.dense import attention_backward, attention_forward
from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes, entries
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.checks.tolerances import FLOAT32, FORWARD
from minitransformer.heads.pruning import HeadProjections, HeadsLeft
from minitransformer.philox import Draw, Stream, random_bits

suite = Suite("heads.pruning")

GATE, GATE_BACK = "gate_output_forward", "gate_output_backward"
ALL, PRUNE, MAGNITUDE = "all_heads", "prune_heads", "head_magnitude"
RANDOM, CHOOSE = "random_scores", "choose_heads"
ITERATE, RHYTHM = "prune_iteratively", "removed_by"

WIDTH, D, E = 5, 3, 2  # of the residual stream, of keys, of values
sharing = st.sampled_from([(4, 2), (3, 3), (6, 2), (3, 1), (8, 4), (1, 1)])  # H, G
keeps = st.sampled_from([0.5, 0.2, 0.8, 1.0])


def projections(heads: int, groups: int, seed: int, *, bias: bool = True) -> HeadProjections:
    shapes = (
        (WIDTH, heads * D), (WIDTH, groups * D), (WIDTH, groups * E), (heads * E, WIDTH),
        (heads * D,), (groups * D,), (groups * E,),
    )  # fmt: skip
    drawn = [normal(shape, seed ^ i) for i, shape in enumerate(shapes)]
    return HeadProjections(*drawn[: 7 if bias else 4])


def kept(heads: int, share: float, seed: int) -> Array:
    """Flags (H,), at least one of them True."""
    rng = np.random.default_rng([seed, 14])
    keep = rng.random(heads) < share
    keep[rng.integers(heads)] = True
    return keep


def split(x: Array, heads: int) -> Array:
    return np.swapaxes(x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads), -2, -3)


def run(layer: HeadsLeft, x: Array, output: Array | None = None):
    """What the layer adds to the residual stream for x (B, N, W), and attention's cache."""
    p = layer.projections
    q, k, v = (
        x @ w if b is None else x @ w + b
        for w, b in ((p.query, p.query_bias), (p.key, p.key_bias), (p.value, p.value_bias))
    )
    q = split(q, len(layer.heads))
    k, v = (split(y, len(layer.groups)) for y in (k, v))
    if not layer.is_even:
        k, v = (y[..., list(layer.reads), :, :] for y in (k, v))
    out, cache = attention_forward(q, k, v)
    joined = np.swapaxes(out, -2, -3).reshape(*x.shape[:-1], -1)
    return joined @ (p.output if output is None else output), cache


# ---- silenced ------------------------------------------------------------------------------------


@suite.property(GATE, heads=st.sampled_from([3, 1, 4]), seed=seeds)
def a_gate_scales_the_rows_of_its_head(target, heads, seed):
    """Eq. 14.19 row by row; a gate of 1 leaves every bit, one of 0 leaves nothing."""
    output, gates = entries((heads * E, WIDTH), seed), normal((heads,), seed ^ 1)
    got, _ = target.gate_output_forward(output, gates)
    expected = [[gates[i // E] * x for x in row] for i, row in enumerate(output)]
    assert_close(got, np.array(expected))
    assert np.array_equal(target.gate_output_forward(output, np.ones(heads))[0], output)
    assert (target.gate_output_forward(output, np.zeros(heads))[0] == 0).all()


@suite.property(GATE, GATE_BACK, heads=st.sampled_from([3, 1, 4]), seed=seeds)
def gate_backward_is_the_derivative(target, heads, seed):
    """Eq. 14.20 against the complex step."""
    output, gates = normal((heads * E, WIDTH), seed), normal((heads,), seed ^ 1)
    out, cache = target.gate_output_forward(output, gates)
    dout = cotangent(out, seed)
    grads = target.gate_output_backward(dout, cache)
    assert_gradients(
        lambda **x: target.gate_output_forward(**x)[0],
        {"output": grads.output, "gates": grads.gates},
        {"output": output, "gates": gates},
        dout,
    )


@suite.property(ALL, GATE, GATE_BACK, sizes=sharing, seed=seeds)
def the_gradient_of_the_weights_says_what_a_head_is_worth(target, sizes, seed):
    """Eq. 14.20 at gates of 1 is ⟨o_h, do_h⟩, the term of one example in Eq. 14.10: no layer needs
    a gate of its own."""
    heads, groups = sizes
    layer = target.all_heads(projections(heads, groups, seed), heads, groups)
    x = normal((1, 4, WIDTH), seed ^ 9)
    y, cache = run(layer, x)
    dy = cotangent(y, seed)
    joined = np.swapaxes(cache.out, -2, -3).reshape(4, heads * E)
    _, gate = target.gate_output_forward(layer.projections.output, np.ones(heads))
    felt = target.gate_output_backward(joined.T @ dy[0], gate).gates
    dout = split(dy @ layer.projections.output.T, heads)
    assert_close(felt, (cache.out * dout).sum(axis=(0, 2, 3)))


# ---- out for good --------------------------------------------------------------------------------


@suite.property(ALL, PRUNE, GATE, sizes=sharing, share=keeps, seed=seeds, bias=st.booleans())
def removed_is_silenced(target, sizes, share, seed, bias):
    """The layer without the heads (Eq. 14.21) is the layer with their gates at 0 (Eq. 14.19), for
    uneven groups as well."""
    heads, groups = sizes
    whole = target.all_heads(projections(heads, groups, seed, bias=bias), heads, groups)
    keep, x = kept(heads, share, seed), normal((2, 4, WIDTH), seed ^ 9)
    silent, _ = target.gate_output_forward(whole.projections.output, keep.astype(float))
    expected, _ = run(whole, x, silent)
    got, _ = run(target.prune_heads(whole, keep), x)
    assert_close(got, expected, what="output")


@suite.property(ALL, PRUNE, GATE, sizes=sharing, share=keeps, seed=seeds)
def what_is_left_learns_as_before(target, sizes, share, seed):
    """The gradients of queries, keys and values that are left are those of the silenced layer
    (Eq. 14.20, Eq. 14.21); what goes has none: that is why it may."""
    heads, groups = sizes
    whole = target.all_heads(projections(heads, groups, seed), heads, groups)
    keep, x = kept(heads, share, seed), normal((2, 4, WIDTH), seed ^ 9)
    few = target.prune_heads(whole, keep)
    silent, _ = target.gate_output_forward(whole.projections.output, keep.astype(float))
    y, cache = run(whole, x, silent)
    _, small = run(few, x)
    dy = cotangent(y, seed)

    def gradients(layer, cache, output):
        grads = attention_backward(split(dy @ output.T, len(layer.heads)), cache)
        dk = np.zeros((2, len(layer.groups), 4, D))
        if layer.is_even:
            dk += grads.k
        else:
            np.add.at(dk, (slice(None), list(layer.reads)), grads.k)
        return grads.q, dk

    dq, dk = gradients(whole, cache, silent)
    got_q, got_k = gradients(few, small, few.projections.output)
    assert_close(got_q, dq[:, list(few.heads)], 1e-10, what="dq")
    assert_close(got_k, dk[:, list(few.groups)], 1e-10, what="dk")
    gone = [g for g in range(groups) if g not in few.groups]
    assert (dk[:, gone] == 0).all(), "a key head was removed that somebody reads"


@suite.property(ALL, PRUNE, sizes=sharing, share=keeps, seed=seeds, bias=st.booleans())
def a_key_head_goes_with_its_last_reader(target, sizes, share, seed, bias):
    """Eq. 14.21 column by column: whose columns and rows are left, of which head each is, and that
    nothing else is left."""
    heads, groups = sizes
    p = projections(heads, groups, seed, bias=bias)
    keep, size = kept(heads, share, seed), heads // groups
    few = target.prune_heads(target.all_heads(p, heads, groups), keep)
    left = [h for h in range(heads) if keep[h]]
    read = [g for g in range(groups) if any(keep[g * size : (g + 1) * size])]
    assert few.heads == tuple(left) and few.groups == tuple(read)
    assert [few.groups[place] for place in few.reads] == [h // size for h in left]
    columns = np.concatenate([np.arange(h * D, (h + 1) * D) for h in left])
    rows = np.concatenate([np.arange(h * E, (h + 1) * E) for h in left])
    keys = np.concatenate([np.arange(g * D, (g + 1) * D) for g in read])
    values = np.concatenate([np.arange(g * E, (g + 1) * E) for g in read])
    expected = (
        p.query[:, columns], p.key[:, keys], p.value[:, values], p.output[rows],
        *((p.query_bias[columns], p.key_bias[keys], p.value_bias[values]) if bias else [None] * 3),
    )  # fmt: skip
    for name, got, wanted in zip(p._fields, few.projections, expected, strict=True):
        if wanted is None:
            assert got is None, f"{name} out of nothing"
        else:
            assert np.array_equal(got, wanted), f"{name} holds other columns"


@suite.property(ALL, PRUNE, sizes=sharing, share=keeps, seed=seeds)
def heads_keep_their_first_numbers(target, sizes, share, seed):
    """Removing some and then others is removing all of them at once, each by the number that it had
    at first (Eq. 14.21).

    https://github.com/huggingface/transformers/pull/4904
    """
    heads, groups = sizes
    whole = target.all_heads(projections(heads, groups, seed), heads, groups)
    first = kept(heads, share, seed)
    second = kept(heads, share, seed ^ 1)
    second[np.flatnonzero(first)[0]] = True
    twice = target.prune_heads(target.prune_heads(whole, first), second)
    once = target.prune_heads(whole, first & second)
    assert twice.heads == once.heads and twice.groups == once.groups
    assert twice.reads == once.reads and twice.is_even == once.is_even
    for name, a, b in zip(twice.projections._fields, *(twice[0], once[0]), strict=True):
        assert np.array_equal(a, b), f"{name} holds other columns"
    same = target.prune_heads(whole, np.ones(heads, np.bool_))
    assert all(map(np.array_equal, same.projections, whole.projections)), "all kept is not all"


@suite.property(ALL, PRUNE, sizes=sharing, share=keeps, seed=seeds)
def even_groups_are_said_to_be_even(target, sizes, share, seed):
    """If so, grouped attention reads the right key heads without a copy; if not, it does not."""
    heads, groups = sizes
    whole = target.all_heads(projections(heads, groups, seed), heads, groups)
    few = target.prune_heads(whole, kept(heads, share, seed))
    count, of = len(few.heads), len(few.groups)
    shared = count % of == 0 and [few.groups[h // (count // of)] for h in range(count)]
    right = shared == [h // (heads // groups) for h in few.heads]
    assert few.is_even == right, f"heads {few.heads} read {few.reads} of {few.groups}"


# ---- scores --------------------------------------------------------------------------------------


@suite.property(ALL, PRUNE, MAGNITUDE, sizes=sharing, share=keeps, seed=seeds)
def magnitude_is_what_a_head_is_made_of(target, sizes, share, seed):
    """Eq. 14.22 number by number; the squares of a layer that has all heads add up to those of its
    arrays; a head that is gone has none. While its key head is there, a head's does not change."""
    heads, groups = sizes
    p, size = projections(heads, groups, seed), heads // groups
    whole = target.all_heads(p, heads, groups)
    got = target.head_magnitude(whole)
    expected = []
    for h in range(heads):
        g = h // size
        own = [*p.query[:, h * D : (h + 1) * D].ravel(), *p.output[h * E : (h + 1) * E].ravel()]
        shared = [*p.key[:, g * D : (g + 1) * D].ravel(), *p.value[:, g * E : (g + 1) * E].ravel()]
        total = math.fsum(x * x for x in own) + math.fsum(x * x for x in shared) / size
        expected.append(math.sqrt(total))
    assert_close(got, np.array(expected))
    total = sum(float((x * x).sum()) for x in p[:4])
    assert_close((got * got).sum(), np.array(total), what="sum of squares")
    keep = kept(heads, share, seed)
    few = target.head_magnitude(target.prune_heads(whole, keep))
    assert_close(few, np.where(keep, got, 0), what="after pruning")


@suite.property(
    RANDOM, seed=seeds, layers=st.sampled_from([2, 1, 5]), heads=st.sampled_from([4, 1])
)
def chance_is_the_law(target, seed, layers, heads):
    """Eq. 14.26 word by word: another seed, another order, the same for a head whoever stands
    beside it."""
    got = target.random_scores(Draw(seed, step=3), layers, heads)
    expected = np.zeros((layers, heads))
    zero = np.array([0])
    for layer, h in np.ndindex(layers, heads):
        word = random_bits(Draw(seed, 3), Stream.PRUNING, layer, np.array(h), zero, zero)
        expected[layer, h] = int(word[0]) / 2**32
    assert_close(got, expected, FORWARD)
    other = target.random_scores(Draw(seed ^ 1, step=3), layers, heads)
    assert not np.array_equal(other, got)


# ---- who goes, and when --------------------------------------------------------------------------


@st.composite
def choices(draw):
    """Scores with ties, flags, how many to remove, how many to leave in each layer."""
    layers, heads = draw(st.sampled_from([(2, 4), (3, 2), (1, 3), (4, 1)]))
    seed, minimum = draw(seeds), draw(st.sampled_from([1, 0, 2]))
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (layers, heads)) / 4 - draw(st.sampled_from([0.0, 2.0]))
    keep = rng.random((layers, heads)) < 0.8
    spare = int(np.maximum(keep.sum(axis=1) - minimum, 0).sum())
    return scores, keep, draw(st.integers(0, spare)), minimum


@suite.property(CHOOSE, given=choices())
def the_lowest_go_first(target, given):
    """Eq. 14.23 one head after the other: of all layers that may lose one, the smallest score; of
    equals the first; what is gone has no score, whatever number stands there."""
    scores, keep, remove, minimum = given
    spoiled = np.where(keep, scores, np.nan)
    got = target.choose_heads(spoiled, keep, remove, minimum=minimum)
    expected = keep.copy()
    for _ in range(remove):
        able = [
            (scores[at], *at)
            for at in itertools.product(*map(range, keep.shape))
            if expected[at] and expected[at[0]].sum() > minimum
        ]
        _, layer, head = min(able)
        expected[layer, head] = False
    assert got.dtype == np.bool_ and np.array_equal(got, expected), f"{got} is not {expected}"


@suite.property(ITERATE, given=choices(), each=st.sampled_from([1, 2, 100]))
def scores_are_measured_again_each_round(target, given, each):
    """Eq. 14.24: what is kept before a round is what it is measured under, and what goes is the
    lowest of that round; a head whose twin went becomes the highest. The last round removes no
    more than is asked."""
    scores, keep, remove, minimum = given
    asked = []

    def measure(keep):
        asked.append(keep.copy())
        gone = keep.size - int(keep.sum())
        return scores * (-1) ** gone + np.arange(keep.size).reshape(keep.shape) * 1e-3

    left = int(keep.sum()) - remove
    rounds = [
        x.copy() for x in target.prune_iteratively(measure, keep, left, each=each, minimum=minimum)
    ]
    asked_then = [x.copy() for x in asked]
    assert len(rounds) == math.ceil(remove / each), f"{len(rounds)} rounds"
    assert len(asked_then) == len(rounds), f"measured {len(asked_then)} times"
    before = keep
    for measured, after in zip(asked_then, rounds, strict=True):
        assert np.array_equal(measured, before), "measured under other heads"
        expected, now = before.copy(), measure(before)
        for _ in range(min(each, int(before.sum()) - left)):
            able = [
                (now[at], *at)
                for at in itertools.product(*map(range, keep.shape))
                if expected[at] and expected[at[0]].sum() > minimum
            ]
            _, layer, head = min(able)
            expected[layer, head] = False
        assert np.array_equal(after, expected), "other heads went"
        before = after
    if rounds:
        assert rounds[-1].sum() == left, "not as many are left as were asked for"


@suite.property(
    RHYTHM,
    total=st.sampled_from([12, 0, 1, 7, 144]),
    start=st.sampled_from([0, 3]),
    span=st.sampled_from([1, 10, 27, 1000]),
)
def heads_go_in_a_cubic_rhythm(target, total, start, span):
    """Eq. 14.25: none until the start, all from the end on, never fewer than before, and the floor
    of the formula between; half the way removes seven eighths."""
    end = start + span
    found = [target.removed_by(t, total=total, start=start, end=end) for t in range(end + 5)]
    assert found[: start + 1] == [0] * (start + 1), "heads go before the start"
    assert found[end:] == [total] * 5, "heads are left after the end"
    for t, got in enumerate(found):
        tau = min(max(t - start, 0), span) / span
        exact = total * (1 - (1 - tau) ** 3)
        assert isinstance(got, int) and exact - 1 - 1e-9 < got <= exact + 1e-9, f"{got} at step {t}"
    assert found == sorted(found), "a head came back"
    if span % 2 == 0:
        assert found[start + span // 2] == total * 7 // 8


# ---- numbers -------------------------------------------------------------------------------------


@suite.property(ALL, PRUNE, GATE, GATE_BACK, MAGNITUDE, seed=seeds, dtype=dtypes)
def narrow_weights_stay_as_they_are(target, seed, dtype):
    """What is left has the bits and the dtype that it had; gates round once; magnitudes and the
    gradient of a gate are summed wide."""
    p = HeadProjections(*(x.astype(DTYPES[dtype]) for x in projections(4, 2, seed)))
    keep = np.array([True, False, True, True])
    few = target.prune_heads(target.all_heads(p, 4, 2), keep)
    for name, x in few.projections._asdict().items():
        assert x.dtype == DTYPES[dtype], f"{name} in {x.dtype}"
    magnitude = target.head_magnitude(target.all_heads(p, 4, 2))
    wide = HeadProjections(*(x.astype(np.float64) for x in p))
    exact = target.head_magnitude(target.all_heads(wide, 4, 2))
    assert magnitude.dtype.itemsize >= 4, f"magnitudes in {magnitude.dtype}"
    assert_close(magnitude.astype(np.float64), exact, FLOAT32, what="magnitude")
    output, dout = ((1 + normal((4, 800), seed ^ n, 0.1)).astype(DTYPES[dtype]) for n in range(2))
    gates = (1 + normal((2,), seed, 0.1)).astype(DTYPES[dtype])
    got, cache = target.gate_output_forward(output, gates)
    each = np.repeat(gates.astype(np.float64), 2)[:, None]
    assert_rounded_once(got, output.astype(np.float64) * each, dtype, what="gated")
    felt = (output.astype(np.float64) * dout.astype(np.float64)).reshape(2, -1).sum(axis=1)
    grads = target.gate_output_backward(dout, cache)
    assert_rounded_once(grads.gates, felt, dtype, what="gradient of the gates")


@suite.property(ALL, PRUNE, GATE, GATE_BACK, MAGNITUDE, CHOOSE, ITERATE, sizes=sharing, seed=seeds)
def arguments_are_left_alone(target, sizes, seed):
    """No array of the caller is modified, and what is left shares no memory with what was there."""
    heads, groups = sizes
    p = projections(heads, groups, seed)
    keep, scores = kept(heads, 0.5, seed), normal((2, heads), seed ^ 8)
    flags = np.ones((2, heads), np.bool_)
    gates, dout = normal((heads,), seed ^ 9), normal(p.output.shape, seed ^ 10)
    given = [*p, keep, scores, flags, gates, dout]
    before = [x.copy() for x in given]
    whole = target.all_heads(p, heads, groups)
    few = target.prune_heads(whole, keep)
    _, cache = target.gate_output_forward(p.output, gates)
    target.gate_output_backward(dout, cache)
    target.head_magnitude(whole)
    target.choose_heads(scores, flags, heads - 1)
    for left in target.prune_iteratively(lambda _: scores, flags, heads + 1):
        left[...] = False
        break
    assert all(map(np.array_equal, given, before)), "an argument was modified"
    shared = [np.shares_memory(a, b) for a, b in zip(few.projections, p, strict=True)]
    assert not any(shared), "the pruned layer writes into the whole one"
