"""What a model's positions must do: speak in one place, of the place in the text, and learn."""

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.nn.positions import Rope
from minitransformer.positions.alibi import alibi_slopes
from minitransformer.positions.rope import rope_forward, rope_tables
from minitransformer.positions.sinusoidal import sinusoidal_table
from minitransformer.positions.t5_bias import t5_buckets

suite = Suite("nn.positions")

WIDTH, HEADS, CONTEXT, BUCKETS, FAR = 12, 3, 9, 5, 7
schemes = st.sampled_from(["learned", "none", "sinusoidal", "rope", "alibi", "t5"])
ropes = st.sampled_from([Rope(), Rope(500.0, 2), Rope(30.0, 4, "interleaved")])


def made(target, scheme, seed, rope=None):
    positions = target.Positions(
        scheme, width=WIDTH, heads=HEADS, context=CONTEXT, rng=np.random.default_rng(seed),
        rope=rope, buckets=BUCKETS, max_distance=FAR, std=1.0,
    )  # fmt: skip
    assert (positions.weight is not None) == (scheme in ("learned", "t5"))
    return positions


@suite.property("Positions", scheme=schemes, seed=seeds, first=st.integers(0, 4))
def what_is_added_is_the_row_of_the_position(target, scheme, seed, first):
    """x + the row of the table or of the waves (Eq. 16.34); every other scheme adds nothing."""
    positions, x = made(target, scheme, seed), normal((2, 4, WIDTH), seed)
    places = np.arange(first, first + 4)
    rows = np.zeros((4, WIDTH))
    if scheme == "learned":
        rows = positions.weight.value[places]
    elif scheme == "sinusoidal":
        rows = sinusoidal_table(places, WIDTH)
    assert_close(positions.add_forward(x, places)[0], x + rows)


@suite.property("Positions", scheme=schemes, seed=seeds, rope=ropes, shift=st.integers(1, 40))
def heads_turn_by_the_angles_of_their_place(target, scheme, seed, rope, shift):
    """Only RoPE turns, with its own base, width and pairs (Eq. 16.35), and a text that stands
    further on has the same products."""
    positions = made(target, scheme, seed, rope if scheme == "rope" else None)
    rotation = positions.rotation(np.arange(5))
    if scheme != "rope":
        assert rotation is None
        return
    q, k = (normal((HEADS, 5, WIDTH // HEADS), seed ^ i) for i in range(2))
    tables = rope_tables(np.arange(5), rope.width or WIDTH // HEADS, base=rope.base)
    expected = [rope_forward(x, *tables, layout=rope.layout)[0] for x in (q, k)]
    turned = [rotation.forward(x)[0] for x in (q, k)]
    assert_close(turned[0], expected[0])
    later = [positions.rotation(np.arange(5) + shift).forward(x)[0] for x in (q, k)]
    products = [a @ np.swapaxes(b, -1, -2) for a, b in (turned, later)]
    assert_close(products[1], products[0], 1e-11)


@suite.property("Positions", scheme=schemes, seed=seeds, first=st.integers(0, 5))
def scores_get_the_bias_of_their_distance(target, scheme, seed, first):
    """-m_h |i - j| for ALiBi, T5's number of the bucket of j - i, causal (Eq. 16.36), nothing
    else, wherever the queries begin."""
    positions = made(target, scheme, seed)
    queries, keys = np.arange(first, first + 3), np.arange(first + 3)
    bias, _ = positions.bias_forward(queries, keys)
    relative = keys - queries[:, None]
    if scheme == "alibi":
        assert_close(bias, -alibi_slopes(HEADS)[:, None, None] * np.abs(relative))
    elif scheme == "t5":
        bucket = t5_buckets(relative, BUCKETS, bidirectional=False, max_distance=FAR)
        assert_close(bias, np.moveaxis(positions.weight.value[bucket], -1, 0))
    else:
        assert bias is None


@suite.property("Positions", scheme=st.sampled_from(["learned", "sinusoidal", "t5"]), seed=seeds)
def a_table_collects_from_batch_and_layers(target, scheme, seed):
    """The gradient of what is added (Eq. 16.34) passes on, and adds up over the batch in a learned
    table; that of a bias (Eq. 16.36) adds up over the layers that read it."""
    positions, x = made(target, scheme, seed), normal((2, 4, WIDTH), seed)
    places = np.array([0, 3, 3, 8])
    parameters = positions.parameters()
    positions.zero_grad()
    if scheme == "t5":
        bias, cache = positions.bias_forward(places, places)
        layers = [cotangent(bias, seed), cotangent(bias, seed ^ 1)]
        for dbias in layers:
            positions.bias_backward(dbias, cache)
        gradients, inputs, dout = {}, {}, sum(layers)
    else:
        out, cache = positions.add_forward(x, places)
        dout = cotangent(out, seed)
        gradients, inputs = {"x": positions.add_backward(dout, cache)}, {"x": x}
    for name, parameter in parameters.items():
        gradients[name], inputs[name] = parameter.grad, parameter.value

    def forward(x=x, weight=None):
        if weight is not None:
            positions.weight.value = weight
        if scheme == "t5":
            return positions.bias_forward(places, places)[0]
        return positions.add_forward(x, places)[0]

    assert_gradients(forward, gradients, inputs, dout)
