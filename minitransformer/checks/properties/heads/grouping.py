"""What a conversion between numbers of key/value heads must do: lose nothing where nothing is to be
lost, and as little as can be elsewhere."""

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
from minitransformer.heads.grouping import KeyValueProjections
from minitransformer.nn.attention import join_heads, split_heads
from minitransformer.positions.rope import rope_forward, rope_tables

suite = Suite("heads.grouping")

POOL, POOLED = "pool_heads_forward", "pool_heads_backward"
EXPAND, EXPANDED = "expand_heads_forward", "expand_heads_backward"
REGROUP, DISTANCE = "regroup", "grouping_distance"

# leading axes of a weight, H, G, D
SHAPES = (
    ((5,), 6, 3, 2),
    ((), 4, 2, 3),  # a bias
    ((2, 3), 6, 2, 1),
    ((3,), 4, 4, 2),
    ((3,), 5, 1, 4),
    ((1,), 1, 1, 1),
    ((0,), 4, 2, 3),
    ((2,), 4, 2, 0),
)
shapes = st.sampled_from(SHAPES)
sharing = st.sampled_from([(4, 2), (6, 3), (6, 2), (3, 1), (2, 2), (8, 2)])  # H, G


def projections(heads: int, seed: int, *, width: int = 5, bias: bool = True) -> KeyValueProjections:
    """Those of a layer whose keys are 4 wide a head, and its values 3."""
    shapes = ((width, heads * 4), (width, heads * 3), (heads * 4,), (heads * 3,))
    drawn = [normal(shape, seed ^ i) for i, shape in enumerate(shapes)]
    return KeyValueProjections(*drawn[: 4 if bias else 2])


def attend(given: KeyValueProjections, heads: int, queries: Array, x: Array, output: Array):
    """A layer's output for x (B, N, W), with queries (B, H, N, 4) made elsewhere, and attention's
    cache."""
    k, v = x @ given.key, x @ given.value
    k = k if given.key_bias is None else k + given.key_bias
    v = v if given.value_bias is None else v + given.value_bias
    out, cache = attention_forward(queries, split_heads(k, heads), split_heads(v, heads))
    return join_heads(out) @ output, cache


def layer_case(heads: int, seed: int) -> tuple[Array, Array, Array]:
    """Queries, an input and an output projection."""
    return (
        normal((2, heads, 3, 4), seed ^ 11, 2.0),
        normal((2, 3, 5), seed ^ 12),
        normal((heads * 3, 4), seed ^ 13),
    )


# ---- fewer ---------------------------------------------------------------------------------------


@suite.property(POOL, shape=shapes, seed=seeds)
def a_shared_head_is_the_mean_of_its_neighbours(target, shape, seed):
    """Eq. 8.9 head by head: heads 0 … H/G - 1 become head 0, and so on; a bias like a weight."""
    leading, heads, groups, d = shape
    weight = entries((*leading, heads * d), seed)
    got, _ = target.pool_heads_forward(weight, heads, groups)
    assert got.shape == (*leading, groups * d), f"got shape {got.shape}"
    size = heads // groups
    expected = np.zeros((*leading, groups * d))
    for *at, g, c in np.ndindex(*leading, groups, d):
        members = [weight[(*at, (g * size + i) * d + c)] for i in range(size)]
        expected[(*at, g * d + c)] = math.fsum(members) / size
    assert_close(got, expected)


@suite.property(REGROUP, sizes=sharing, seed=seeds, bias=st.booleans())
def heads_that_agree_lose_nothing(target, sizes, seed, bias):
    """Eq. 8.9 is exact where the heads of a group are equal, in keys and values, weights and
    biases: the layer with fewer heads has the output of the one with all.

    https://github.com/fkodom/grouped-query-attention-pytorch/issues/5
    """
    heads, groups = sizes
    few = projections(groups, seed, bias=bias)
    many = KeyValueProjections(
        *(
            None
            if x is None
            else np.repeat(x.reshape(*x.shape[:-1], groups, -1), heads // groups, axis=-2).reshape(
                *x.shape[:-1], -1
            )
            for x in few
        )
    )
    case = layer_case(heads, seed)
    got = target.regroup(many, heads, groups)
    out, _ = attend(got, groups, *case)
    expected, _ = attend(many, heads, *case)
    assert_close(out, expected, what="output")


@suite.property(POOL, DISTANCE, shape=shapes, seed=seeds)
def no_shared_head_is_nearer_than_the_mean(target, shape, seed):
    """Eq. 8.13 term by term; any other shared heads than those of Eq. 8.9 are further away, and the
    distance is 0 if, and only if, the heads of each group agree."""
    leading, heads, groups, d = shape
    size = heads // groups
    weight = normal((*leading, heads * d), seed)
    split = weight.reshape(*leading, groups, size, d)
    pooled, _ = target.pool_heads_forward(weight, heads, groups)
    shared = pooled.reshape(*leading, groups, 1, d)
    distance = target.grouping_distance(weight, heads, groups)
    terms = ((split - shared) ** 2).ravel().tolist()
    assert_close(np.array(distance), np.array(math.fsum(terms)), what="distance")
    for scale in (1e-3, 1.0):
        other = shared + normal(shared.shape, seed ^ 5, 1.0) * scale
        assert ((split - other) ** 2).sum() >= distance - 1e-12, "another head is nearer"
    alike = np.broadcast_to(split[..., :1, :], split.shape).reshape(weight.shape)
    assert target.grouping_distance(alike, heads, groups) < 1e-20
    if size > 1 and weight.size:
        assert distance > 1e-12, "heads that differ are said to agree"


@suite.property(POOL, seed=seeds, sizes=sharing)
def averaged_keys_may_be_turned(target, seed, sizes):
    """RoPE turns the heads of a group alike: the keys of a shared head (Eq. 8.9), turned, are the
    mean of the turned keys."""
    heads, groups = sizes
    weight, x = normal((5, heads * 4), seed), normal((7, 5), seed ^ 1)
    tables = rope_tables(np.arange(7), 4)

    def turned(w, count):
        return rope_forward(split_heads(x @ w, count), tables.cos, tables.sin, layout="half")[0]

    got = turned(target.pool_heads_forward(weight, heads, groups)[0], groups)
    each = turned(weight, heads).reshape(groups, heads // groups, 7, 4)
    assert_close(got, each.mean(axis=1), what="turned keys")


# ---- more ----------------------------------------------------------------------------------------


@suite.property(EXPAND, POOL, shape=shapes, seed=seeds)
def copies_stand_side_by_side(target, shape, seed):
    """Eq. 8.10 bit for bit: head h is a copy of h // (H/G); their mean (Eq. 8.9) is where they came
    from.

    https://github.com/onnx/onnx/pull/7274
    """
    leading, heads, groups, d = shape
    weight = entries((*leading, groups * d), seed)
    got, _ = target.expand_heads_forward(weight, groups, heads)
    assert got.shape == (*leading, heads * d), f"got shape {got.shape}"
    size = heads // groups
    for h in range(heads):
        g = h // size
        copy, source = got[..., h * d : (h + 1) * d], weight[..., g * d : (g + 1) * d]
        assert np.array_equal(copy, source), f"head {h} is no copy of {g}"
    assert_close(target.pool_heads_forward(got, heads, groups)[0], weight, what="mean of copies")


@suite.property(REGROUP, sizes=sharing, seed=seeds, bias=st.booleans())
def more_heads_change_no_output(target, sizes, seed, bias):
    """Eq. 8.10: a grouped layer written out with a key/value head for every query head computes
    what it computed."""
    heads, groups = sizes
    few, case = projections(groups, seed, bias=bias), layer_case(heads, seed)
    many = target.regroup(few, groups, heads)
    assert (many.key_bias is None, many.value_bias is None) == (not bias, not bias)
    assert_close(attend(many, heads, *case)[0], attend(few, groups, *case)[0], what="output")


@suite.property(REGROUP, seed=seeds, steps=st.sampled_from([(8, 4, 2, 1), (6, 2, 1), (6, 3, 1)]))
def two_steps_are_one(target, seed, steps):
    """MHA to GQA to MQA is MHA to MQA, the mean of all heads in weights and biases: means of means
    of equal groups (Eq. 8.9). The same number of heads is no step."""
    start = given = projections(steps[0], seed)
    for heads, after in itertools.pairwise(steps):
        given = target.regroup(given, heads, after)
    direct = target.regroup(start, steps[0], steps[-1])
    same = target.regroup(start, steps[0], steps[0])
    for name in start._fields:
        x = getattr(start, name)
        mean = x.reshape(*x.shape[:-1], steps[0], -1).mean(axis=-2)
        assert_close(getattr(direct, name), mean, what=f"{name} in one step")
        assert_close(getattr(given, name), mean, what=f"{name} in {len(steps) - 1} steps")
        assert np.array_equal(getattr(same, name), getattr(start, name)), f"{name} changed"


# ---- gradients -----------------------------------------------------------------------------------


@suite.property(POOL, POOLED, shape=shapes, seed=seeds)
def pool_backward_is_the_derivative(target, shape, seed):
    """Eq. 8.11 against the complex step."""
    leading, heads, groups, d = shape
    weight = normal((*leading, heads * d), seed)
    out, cache = target.pool_heads_forward(weight, heads, groups)
    dout = cotangent(out, seed)
    assert_gradients(
        lambda weight: target.pool_heads_forward(weight, heads, groups)[0],
        {"weight": target.pool_heads_backward(dout, cache)},
        {"weight": weight},
        dout,
    )


@suite.property(EXPAND, EXPANDED, shape=shapes, seed=seeds)
def expand_backward_is_the_derivative(target, shape, seed):
    """Eq. 8.12 against the complex step."""
    leading, heads, groups, d = shape
    weight = normal((*leading, groups * d), seed)
    out, cache = target.expand_heads_forward(weight, groups, heads)
    dout = cotangent(out, seed)
    assert_gradients(
        lambda weight: target.expand_heads_forward(weight, groups, heads)[0],
        {"weight": target.expand_heads_backward(dout, cache)},
        {"weight": weight},
        dout,
    )


@suite.property(EXPAND, EXPANDED, sizes=sharing, seed=seeds)
def a_shared_head_learns_from_all_its_queries(target, sizes, seed):
    """The gradient of a grouped layer's keys and values is the one of the layer written out,
    gathered by Eq. 8.12: the sum over the copies, not their mean.

    https://github.com/marin-community/levanter/pull/449
    """
    heads, groups = sizes
    few, (queries, x, output) = projections(groups, seed), layer_case(heads, seed)
    many = KeyValueProjections(*(target.expand_heads_forward(w, groups, heads)[0] for w in few))

    def gradients(given, count):
        out, cache = attend(given, count, queries, x, output)
        dout = split_heads(cotangent(out, seed) @ output.T, heads)
        grads = attention_backward(dout, cache)
        rows = x.reshape(-1, 5)
        dk, dv = (join_heads(g).reshape(len(rows), -1) for g in (grads.k, grads.v))
        return rows.T @ dk, rows.T @ dv, dk.sum(axis=0), dv.sum(axis=0)

    for name, w, of_many, of_few in zip(
        few._fields, few, gradients(many, heads), gradients(few, groups), strict=True
    ):
        _, cache = target.expand_heads_forward(w, groups, heads)
        assert_close(target.expand_heads_backward(of_many, cache), of_few, what=f"d{name}")


# ---- numbers -------------------------------------------------------------------------------------


@suite.property(POOL, EXPAND, EXPANDED, seed=seeds, dtype=dtypes)
def narrow_weights_are_averaged_wide(target, seed, dtype):
    """512 narrow heads have a mean, rounded once, and a narrow sum of gradients too: bfloat16 ones
    stop adding up at 256."""
    weight = (1 + normal((2, 512 * 3), seed, 0.2)).astype(DTYPES[dtype])
    out, _ = target.pool_heads_forward(weight, 512, 1)
    wide = weight.astype(np.float64).reshape(2, 512, 3)
    assert_rounded_once(out, wide.mean(axis=1), dtype, what="mean")
    _, cache = target.expand_heads_forward(weight[:, :3], 1, 512)
    total = target.expand_heads_backward(weight, cache)
    assert_rounded_once(total, wide.sum(axis=1), dtype, what="gradient")


@suite.property(REGROUP, POOL, POOLED, EXPAND, EXPANDED, sizes=sharing, seed=seeds)
def arguments_are_left_alone(target, sizes, seed):
    """No array of the caller is modified, and nothing that comes back is a view of one: weights
    are written to by whoever trains on."""
    heads, groups = sizes
    many, few = projections(heads, seed), projections(groups, seed)
    for given, before, after in ((many, heads, groups), (few, groups, heads)):
        copies = KeyValueProjections(*(x.copy() for x in given))
        found = target.regroup(given, before, after)
        for x, copy, made in zip(given, copies, found, strict=True):
            assert np.array_equal(x, copy), "a weight was modified"
            made += 1.0
            assert np.array_equal(x, copy), "what came back shares memory with what was given"
    for forward, backward, start, end in (
        (target.pool_heads_forward, target.pool_heads_backward, heads, groups),
        (target.expand_heads_forward, target.expand_heads_backward, groups, heads),
    ):
        out, cache = forward(projections(start, seed).key, start, end)
        dout = cotangent(out, seed)
        untouched = dout.copy()
        once, again = backward(dout, cache).copy(), backward(dout, cache)
        assert np.array_equal(once, again), "the second backward differs from the first"
        assert np.array_equal(dout, untouched), "the cotangent was modified"
