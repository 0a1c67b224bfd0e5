"""What a multi-head attention layer does: project, split, attend, join, project."""

import math

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import (
    assert_close,
    assert_gradients,
    assert_parameter_gradients,
    cotangent,
)
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.nn.positions import Rotation
from minitransformer.philox import Draw
from minitransformer.positions.rope import rope_forward, rope_tables
from minitransformer.stochastic.samplers import RandomMask

suite = Suite("nn.attention")

# heads, key/value heads, head width, queries, memory (None: the layer reads its own input)
SHAPES = ((2, 1, 3, 4, None), (3, 3, 2, 3, 5), (1, 1, 1, 1, 1), (4, 2, 1, 2, 3), (2, 2, 2, 3, 0))
shapes = st.sampled_from(SHAPES)
EVALUATION = Draw(0, training=False)


def made(target, shape, seed, **options):
    """A layer in float64 with biases that matter, its input, and its memory."""
    heads, groups, width, queries, keys = shape
    layer = target.MultiHeadAttention(
        heads * width, heads, groups=groups, rng=np.random.default_rng(seed), std=0.5, **options
    )
    for parameter in layer.parameters().values():
        if parameter.value.ndim == 1:
            parameter.value[...] = normal(parameter.value.shape, seed)
    memory = None if keys is None else normal((2, keys, heads * width), seed ^ 1)
    return layer, normal((2, queries, heads * width), seed ^ 2), memory


@suite.property("MultiHeadAttention", shape=shapes, seed=seeds)
def each_head_attends_with_its_own_columns(target, shape, seed):
    """Eq. 16.30, head by head: columns h·D to (h+1)·D of the queries, those of its group of keys
    and values, and the same rows of the output projection."""
    heads, groups, width, queries, _ = shape
    layer, x, memory = made(target, shape, seed)
    read = x if memory is None else memory

    def project(part, rows, head):
        columns = slice(head * width, (head + 1) * width)
        return rows @ part.weight.value[:, columns] + part.bias.value[columns]

    expected = np.broadcast_to(layer.output.bias.value, x.shape).copy()
    for h in range(heads):
        g = h // (heads // groups)
        q, k, v = project(layer.query, x, h), project(layer.key, read, g), project(
            layer.value, read, g
        )  # fmt: skip
        e = np.exp(q @ np.swapaxes(k, -1, -2) / math.sqrt(width))
        total = e.sum(axis=-1, keepdims=True)
        mixed = (e / np.where(total == 0, 1, total)) @ v
        expected += mixed @ layer.output.weight.value[h * width : (h + 1) * width]
    out, cache = layer.forward(x, draw=EVALUATION, memory=memory)
    assert_close(out, expected)
    assert cache.attention.weights.shape == (2, heads, queries, read.shape[1])


@suite.property("split_heads", "join_heads", seed=seeds, heads=st.integers(1, 4))
def heads_are_contiguous_columns_and_join_undoes_split(target, seed, heads):
    """split(x)[..., h, n, :] = x[..., n, h·D : (h+1)·D], and join is its inverse."""
    x = normal((2, 5, heads * 3), seed)
    split = target.split_heads(x, heads)
    assert split.shape == (2, heads, 5, 3)
    for h in range(heads):
        assert np.array_equal(split[:, h], x[..., h * 3 : h * 3 + 3])
    assert np.array_equal(target.join_heads(split), x)


@suite.property("MultiHeadAttention", shape=shapes, seed=st.sampled_from([3, 4]))
def multi_head_backward_is_the_derivative(target, shape, seed):
    """Gradients of x, of the memory, and of every parameter, with random masks drawn."""
    layer, x, memory = made(target, shape, seed, random_mask=RandomMask("element", 0.4), layer=1)
    draw = Draw(seed, 3)
    out, cache = layer.forward(x, draw=draw, memory=memory)
    dout = cotangent(out, seed)
    layer.zero_grad()
    dx, dmemory, dbias = layer.backward(dout, cache)
    assert dbias is None, "there was no bias"
    inputs, gradients = {"x": x}, {"x": dx}
    if memory is None:
        assert dmemory is None, "a layer that reads its own input has no gradient of a memory"
    else:
        inputs["memory"], gradients["memory"] = memory, dmemory
    assert_gradients(
        lambda x, memory=None: layer.forward(x, draw=draw, memory=memory)[0],
        gradients,
        inputs,
        dout,
    )

    def loss():
        return (dout * layer.forward(x, draw=draw, memory=memory)[0]).sum()

    assert_parameter_gradients(loss, layer.parameters(), seed)


@suite.property("MultiHeadAttention", shape=st.sampled_from([(2, 1, 4, 3, None),
    (3, 3, 2, 4, None)]), seed=st.sampled_from([3, 4]), rotated=st.booleans(),
    biased=st.booleans())  # fmt: skip
def positions_turn_queries_and_keys_and_shift_scores(target, shape, seed, rotated, biased):
    """R_i q_i · R_j k_j + b_ij, values as they are (Eq. 16.37), and the derivative of it all, of
    the bias too, which the batch shares."""
    heads, groups, width, rows, _ = shape
    layer, x, _ = made(target, shape, seed)
    tables = rope_tables(np.arange(rows) + 2, width)
    options = {"rotation": Rotation(tables, "half") if rotated else None}
    bias = normal((heads, rows, rows), seed ^ 5) if biased else None

    def project(part, count):
        flat = x @ part.weight.value + part.bias.value
        return np.swapaxes(flat.reshape(2, rows, count, width), 1, 2)

    def turn(rows_):
        return rope_forward(rows_, *tables, layout="half")[0] if rotated else rows_

    q, k = turn(project(layer.query, heads)), turn(project(layer.key, groups))
    v = np.repeat(project(layer.value, groups), heads // groups, axis=1)
    k = np.repeat(k, heads // groups, axis=1)
    e = np.exp(q @ np.swapaxes(k, -1, -2) / math.sqrt(width) + (0 if bias is None else bias))
    mixed = np.swapaxes(e / e.sum(axis=-1, keepdims=True) @ v, 1, 2).reshape(x.shape)
    out, cache = layer.forward(x, draw=EVALUATION, bias=bias, **options)
    assert_close(out, mixed @ layer.output.weight.value + layer.output.bias.value)

    dout = cotangent(out, seed)
    layer.zero_grad()
    grads = layer.backward(dout, cache)
    inputs, gradients = {"x": x}, {"x": grads.x}
    if biased:
        inputs["bias"], gradients["bias"] = bias, grads.bias
    assert_gradients(
        lambda x, bias=None: layer.forward(x, draw=EVALUATION, bias=bias, **options)[0],
        gradients,
        inputs,
        dout,
    )

    def loss():
        return (dout * layer.forward(x, draw=EVALUATION, bias=bias, **options)[0]).sum()

    assert_parameter_gradients(loss, layer.parameters(), seed)


@suite.property("MultiHeadAttention", shape=shapes, seed=seeds)
def a_layer_called_twice_collects_both_gradients(target, shape, seed):
    """Caches are values: two calls, undone in any order, add up in the parameters."""
    layer, x, memory = made(target, shape, seed)
    alone = []
    for scale in (1.0, -2.0):
        layer.zero_grad()
        out, cache = layer.forward(scale * x, draw=EVALUATION, memory=memory)
        layer.backward(cotangent(out, seed), cache)
        alone.append({name: p.grad.copy() for name, p in layer.parameters().items()})
    layer.zero_grad()
    calls = [layer.forward(s * x, draw=EVALUATION, memory=memory) for s in (1.0, -2.0)]
    for out, cache in calls:
        layer.backward(cotangent(out, seed), cache)
    for name, parameter in layer.parameters().items():
        assert_close(parameter.grad, alone[0][name] + alone[1][name], what=name)


@suite.property("MultiHeadAttention", shape=shapes, seed=seeds)
def what_the_mask_hides_does_not_reach_the_output(target, shape, seed):
    """`keep` of one key for everybody: its content changes no output."""
    layer, x, memory = made(target, shape, seed)
    if memory is None or memory.shape[1] < 2:
        return
    keep = np.arange(memory.shape[1]) != 1
    out, _ = layer.forward(x, draw=EVALUATION, memory=memory, keep=keep)
    other = memory.copy()
    other[:, 1] += 7
    assert_close(layer.forward(x, draw=EVALUATION, memory=other, keep=keep)[0], out)
