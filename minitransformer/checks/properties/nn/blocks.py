"""What a residual block does: where the norm stands, what is added to what, and its derivative."""

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
from minitransformer.nn.activations import gelu_forward
from minitransformer.philox import Draw
from minitransformer.stochastic.samplers import RandomMask

suite = Suite("nn.blocks")

placements = st.sampled_from(["pre", "post"])
norms = st.sampled_from(["layer", "rms"])
activations = st.sampled_from(["gelu", "swiglu"])
WIDTH, EVALUATION = 4, Draw(0, training=False)


def shaken(module, seed):
    """The module with every parameter moved, so that no gain is 1 and no bias 0."""
    for number, parameter in enumerate(module.parameters().values()):
        parameter.value += 0.3 * normal(parameter.value.shape, seed ^ number)
    return module


def block_of(target, seed, **options):
    made = target.DecoderBlock(
        WIDTH, 2, rng=np.random.default_rng(seed), layer=0, layers=2, hidden=6, **options
    )
    return shaken(made, seed)


@suite.property("DecoderBlock", seed=seeds, placement=placements, norm=norms)
def the_residual_goes_round_the_norm_or_through_it(target, seed, placement, norm):
    """pre: x + f(norm(x)) (Eq. 16.31); post: norm(x + f(x)) (Eq. 16.32); twice, with attention and
    then the feed-forward part."""
    block, x = block_of(target, seed, placement=placement, norm=norm), normal((2, 3, WIDTH), seed)
    parts = (
        (block.attention_norm, lambda h: block.attention.forward(h, draw=EVALUATION)[0]),
        (block.feed_forward_norm, lambda h: block.feed_forward.forward(h)[0]),
    )
    expected = x
    for normalise, part in parts:
        if placement == "pre":
            expected = expected + part(normalise.forward(expected)[0])
        else:
            expected = normalise.forward(expected + part(expected))[0]
    assert_close(block.forward(x, draw=EVALUATION)[0], expected)


@suite.property("FeedForward", seed=seeds, activation=activations, n=st.integers(0, 3))
def feed_forward_is_two_layers_at_each_position(target, seed, activation, n):
    """gelu(x W_1 + b_1) W_2 + b_2, or silu(x W_g + b_g) ⊙ (x W_1 + b_1) in between (Eq. 16.33)."""
    made = target.FeedForward(WIDTH, 5, rng=np.random.default_rng(seed), activation=activation)
    part, x = shaken(made, seed), normal((2, n, WIDTH), seed)
    up = x @ part.up.weight.value + part.up.bias.value
    if activation == "gelu":
        hidden = gelu_forward(up)[0]
    else:
        gate = x @ part.gate.weight.value + part.gate.bias.value
        hidden = gate / (1 + np.exp(-gate)) * up
    expected = hidden @ part.down.weight.value + part.down.bias.value
    assert_close(part.forward(x)[0], expected)


@suite.property("DecoderBlock", seed=st.just(3), placement=placements, norm=norms,
    activation=activations)  # fmt: skip
def block_backward_is_the_derivative(target, seed, placement, norm, activation):
    """The gradient of x, of the bias and of every parameter, random masks drawn."""
    options = {"placement": placement, "norm": norm, "activation": activation}
    block = block_of(target, seed, random_mask=RandomMask("element", 0.5), **options)
    x, draw = normal((1, 3, WIDTH), seed), Draw(seed, 1)
    keep = np.tri(3, dtype=np.bool_)

    bias = normal((2, 3, 3), seed)

    def forward(x, bias=bias):
        return block.forward(x, draw=draw, keep=keep, bias=bias)[0]

    out, cache = block.forward(x, draw=draw, keep=keep, bias=bias)
    dout = cotangent(out, seed)
    block.zero_grad()
    grads = block.backward(dout, cache)
    assert_gradients(forward, grads._asdict(), {"x": x, "bias": bias}, dout)
    assert_parameter_gradients(lambda: (dout * forward(x)).sum(), block.parameters(), seed)


@suite.property("DecoderBlock", seed=seeds, rate=st.sampled_from([0.0, 1.0]))
def the_drop_rate_of_the_call_is_the_one_that_counts(target, seed, rate):
    """`drop_rate` reaches the attention: 0 keeps every pair, 1 only the protected diagonal."""
    block = block_of(target, seed, random_mask=RandomMask("element", 0.5))
    x = normal((2, 5, WIDTH), seed)
    _, cache = block.forward(x, draw=Draw(seed, 1), drop_rate=rate)
    weights = cache.attention.attention.weights
    expected = np.eye(5, dtype=np.bool_) if rate else np.ones((5, 5), np.bool_)
    assert np.array_equal(weights > 0, np.broadcast_to(expected, weights.shape))
