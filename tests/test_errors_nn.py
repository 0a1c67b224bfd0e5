"""What layers and models say to bad input: the argument, what was expected, what came."""

import re

import numpy as np
import pytest

from minitransformer.models.language_model import LanguageModel, average_probabilities
from minitransformer.nn.activations import (
    gelu_backward,
    gelu_forward,
    swiglu_backward,
    swiglu_forward,
)
from minitransformer.nn.attention import MultiHeadAttention
from minitransformer.nn.blocks import DecoderBlock, FeedForward, make_norm
from minitransformer.nn.dropout import dropout_backward, dropout_forward
from minitransformer.nn.embedding import Embedding, embedding_backward, embedding_forward
from minitransformer.nn.linear import Linear, linear_backward, linear_forward
from minitransformer.nn.losses import cross_entropy_backward, cross_entropy_forward
from minitransformer.nn.norms import (
    LayerNorm,
    RMSNorm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from minitransformer.nn.positions import Positions, Rope
from minitransformer.philox import Draw
from minitransformer.stochastic.samplers import RandomMask

pytestmark = pytest.mark.usefixtures("own_errors")

X = np.ones((2, 3, 4))
WEIGHT, BIAS = np.ones((4, 5)), np.ones(5)
TABLE = np.ones((6, 4))
TOKENS = np.zeros((2, 3), int)
ONES = np.ones(4)
WHOLE = "must be a whole number, got"


def rng():
    return np.random.default_rng(0)


def raises(error, message):
    return pytest.raises(error, match=re.escape(message))


# ---- the pure pairs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"x": [1.0]}, TypeError, "x must be a NumPy array, got list: try np.asarray(x)"),
        ({"x": np.ones((2, 4), int)}, TypeError, "x must hold floating-point numbers, got dtype"),
        ({"x": np.ones(())}, ValueError, "x needs at least 1 axes, got shape ()"),
        ({"x": np.ones((2, 3))}, ValueError, "x has width 3, weight takes 4"),
        ({"weight": ONES}, ValueError, "weight must have shape (in, out), got (4,)"),
        ({"weight": [[1.0]]}, TypeError, "weight must be a NumPy array, got list"),
        ({"bias": [1.0]}, TypeError, "bias must be a NumPy array, got list"),
        ({"bias": ONES}, ValueError, "bias has shape (4,), weight gives (5,)"),
        ({"bias": np.ones((1, 5))}, ValueError, "bias has shape (1, 5), weight gives (5,)"),
    ],
)
def test_linear_names_the_argument(given, error, message):
    with raises(error, message):
        linear_forward(**{"x": X, "weight": WEIGHT, "bias": BIAS, **given})


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"table": ONES}, ValueError, "table must have shape (entries, width), got (4,)"),
        ({"table": TOKENS}, TypeError, "table must hold floating-point numbers, got dtype int64"),
        ({"tokens": [0, 1]}, TypeError, "tokens must be an array of integers, got list"),
        ({"tokens": ONES}, TypeError, "tokens must be an array of integers, got dtype float64"),
        ({"tokens": ONES > 0}, TypeError, "tokens must be an array of integers, got dtype bool"),
        (
            {"tokens": np.array([0, 6])},
            ValueError,
            "tokens must lie in [0, 6), got values from 0 to 6",
        ),
        ({"tokens": np.array([-1, 2])}, ValueError, "got values from -1 to 2"),
        ({"padding_index": 6}, ValueError, "padding_index must lie in [0, 6), got 6"),
        ({"padding_index": -1}, ValueError, "padding_index must lie in [0, 6), got -1"),
    ],
)
def test_embedding_names_the_argument(given, error, message):
    with raises(error, message):
        embedding_forward(**{"tokens": TOKENS, "table": TABLE, **given})


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"x": [1.0]}, TypeError, "x must be a NumPy array, got list"),
        ({"x": np.ones(())}, ValueError, "x needs at least 1 axes, got shape ()"),
        ({"x": np.ones((2, 3))}, ValueError, "gamma has shape (4,), x needs (3,)"),
        ({"gamma": 1.0}, TypeError, "gamma must be a NumPy array, got float"),
        ({"gamma": np.ones(1)}, ValueError, "gamma has shape (1,), x needs (4,)"),
        ({"eps": -1e-5}, ValueError, "eps must be at least 0 and finite, got -1e-05"),
        ({"eps": float("nan")}, ValueError, "eps must be at least 0 and finite, got nan"),
        ({"eps": float("inf")}, ValueError, "eps must be at least 0 and finite, got inf"),
        (
            {"x": np.ones((2, 0)), "gamma": np.ones(0), "beta": np.ones(0)},
            ValueError,
            "x has width 0: there is nothing to normalise",
        ),
    ],
)
def test_norms_name_the_argument(given, error, message):
    arguments = {"x": X, "gamma": ONES, "beta": ONES, **given}
    with raises(error, message):
        layer_norm_forward(**arguments)
    del arguments["beta"]
    with raises(error, message):
        rms_norm_forward(**arguments)


def test_layer_norm_names_beta():
    with raises(ValueError, "beta has shape (3,), x needs (4,)"):
        layer_norm_forward(X, ONES, np.ones(3))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: gelu_forward(1.0), TypeError, "x must be a NumPy array, got float"),
        (lambda: gelu_forward(TOKENS), TypeError, "x must hold floating-point numbers"),
        (lambda: gelu_forward(X, form="exact"), ValueError, "form must be 'tanh' or 'erf', got"),
        (lambda: gelu_forward(X + 0j, form="erf"), TypeError, "x is complex: the error function"),
        (lambda: swiglu_forward(1.0, X), TypeError, "gate must be a NumPy array, got float"),
        (lambda: swiglu_forward(X, TOKENS), TypeError, "up must hold floating-point numbers"),
        (
            lambda: swiglu_forward(X, X[:1]),
            ValueError,
            "gate has shape (2, 3, 4), up (1, 3, 4): the two must agree",
        ),
    ],
)
def test_activations_name_the_argument(call, error, message):
    with raises(error, message):
        call()


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"x": [1.0]}, TypeError, "x must be a NumPy array, got list"),
        ({"x": np.ones(())}, ValueError, "x needs at least 1 axes"),
        ({"drop_rate": 1.1}, ValueError, "drop_rate must lie in [0.0, 1.0], got 1.1"),
        ({"drop_rate": -0.1}, ValueError, "drop_rate must lie in [0.0, 1.0], got -0.1"),
        ({"drop_rate": float("nan")}, ValueError, "drop_rate must lie in [0.0, 1.0], got nan"),
        ({"layer": 2**16}, ValueError, "layer must lie in [0, 65535], got 65536"),
        ({"draw": Draw(-1)}, ValueError, "draw.seed must lie in [0, 4294967295], got -1"),
    ],
)
def test_dropout_names_the_argument(given, error, message):
    with raises(error, message):
        dropout_forward(**{"x": X, "drop_rate": 0.5, "draw": Draw(0), "layer": 0, **given})


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"logits": [1.0]}, TypeError, "logits must be a NumPy array, got list"),
        ({"logits": np.ones(())}, ValueError, "logits needs at least 1 axes"),
        ({"targets": [0]}, TypeError, "targets must be an array of integers, got list"),
        ({"targets": X}, TypeError, "targets must be an array of integers, got dtype float64"),
        ({"targets": TOKENS[0]}, ValueError, "targets has shape (3,), logits needs (2, 3)"),
        ({"targets": TOKENS + 4}, ValueError, "targets must lie in [0, 4), got 4"),
        ({"targets": TOKENS - 1}, ValueError, "targets must lie in [0, 4), got -1"),
        (
            {"targets": TOKENS - 100, "ignore_index": -1},
            ValueError,
            "targets must lie in [0, 4), got -100",
        ),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must lie in [0.0, 1.0], got 1.5"),
    ],
)
def test_cross_entropy_names_the_argument(given, error, message):
    with raises(error, message):
        cross_entropy_forward(**{"logits": X, "targets": TOKENS, **given})


BACKWARDS = {
    "linear": (linear_backward, linear_forward(X, WEIGHT)),
    "embedding": (embedding_backward, embedding_forward(TOKENS, TABLE)),
    "layer_norm": (layer_norm_backward, layer_norm_forward(X, ONES, ONES)),
    "rms_norm": (rms_norm_backward, rms_norm_forward(X, ONES)),
    "gelu": (gelu_backward, gelu_forward(X)),
    "swiglu": (swiglu_backward, swiglu_forward(X, X)),
    "dropout": (
        dropout_backward,
        dropout_forward(X, drop_rate=0.5, draw=Draw(0), layer=0),
    ),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_cotangent_that_merely_broadcasts_is_refused(name):
    backward, (out, cache) = BACKWARDS[name]
    for wrong in (out[:1], out[0], out[..., :1], np.ones(())):
        message = f"dout has shape {wrong.shape}, the forward pass gave {out.shape}"
        with raises(ValueError, message):
            backward(wrong, cache)
    backward(np.ones_like(out), cache)


def test_the_cotangent_of_a_loss_is_one_number():
    _, cache = cross_entropy_forward(X, TOKENS)
    with raises(ValueError, "dloss has shape (6,), the forward pass gave ()"):
        cross_entropy_backward(np.ones(6), cache)


# ---- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Linear(0, 3, rng=rng()), ValueError, "fan_in must be at least 1, got 0"),
        (lambda: Linear(3, -1, rng=rng()), ValueError, "fan_out must be at least 1, got -1"),
        (lambda: Linear(3, 2.0, rng=rng()), TypeError, f"fan_out {WHOLE} 2.0"),
        (
            lambda: Linear(3, 2, rng=rng(), dtype=np.int64),
            TypeError,
            "dtype must be a floating-point type, got int64",
        ),
        (lambda: Embedding(0, 3, rng=rng()), ValueError, "entries must be at least 1, got 0"),
        (lambda: Embedding(3, "3", rng=rng()), TypeError, f"width {WHOLE} '3'"),
        (lambda: LayerNorm(0), ValueError, "width must be at least 1, got 0"),
        (lambda: LayerNorm(True), TypeError, f"width {WHOLE} True"),
        (lambda: RMSNorm(-4), ValueError, "width must be at least 1, got -4"),
        (lambda: RMSNorm(4, dtype="int8"), TypeError, "dtype must be a floating-point type, got"),
        (lambda: make_norm("batch", 4), ValueError, "norm must be one of layer, rms, got 'batch'"),
        (lambda: FeedForward(4, 0, rng=rng()), ValueError, "hidden must be at least 1, got 0"),
        (
            lambda: FeedForward(4, 8, rng=rng(), activation="relu"),
            ValueError,
            "activation must be one of gelu, swiglu, got 'relu'",
        ),
    ],
)
def test_layers_name_the_setting(make, error, message):
    with raises(error, message):
        make()


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"heads": 3}, ValueError, "heads is 3, which does not divide width = 8"),
        ({"heads": 0}, ValueError, "heads must be at least 1, got 0"),
        ({"heads": 2.0}, TypeError, f"heads {WHOLE} 2.0"),
        ({"width": 0}, ValueError, "width must be at least 1, got 0"),
        ({"groups": 3}, ValueError, "groups is 3, which does not divide heads = 4"),
        ({"groups": 8}, ValueError, "groups is 8, which does not divide heads = 4"),
        ({"groups": 0}, ValueError, "groups must be at least 1, got 0"),
        ({"layer": -1}, ValueError, "layer must be at least 0, got -1"),
    ],
)
def test_attention_and_blocks_name_the_setting(given, error, message):
    arguments = {"width": 8, "heads": 4, "rng": rng(), "layer": 0, **given}
    with raises(error, message):
        MultiHeadAttention(**arguments)
    with raises(error, message):
        DecoderBlock(**arguments, layers=1)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"x": np.ones((1, 3, 7))}, ValueError, "x has width 7, the layer takes 8"),
        ({"x": np.ones(8)}, ValueError, "x needs at least 2 axes, got shape (8,)"),
        ({"x": [[1.0] * 8]}, TypeError, "x must be a NumPy array, got list"),
        ({"memory": np.ones((1, 3, 7))}, ValueError, "memory has width 7, the layer takes 8"),
        ({"memory": np.ones((3, 3, 8))}, ValueError, "leading axes of q (2,), k (3,) and v (3,)"),
        ({"keep": np.ones((3, 3))}, TypeError, "keep must be a boolean array"),
        (
            {"keep": np.ones((4, 4), bool)},
            ValueError,
            "keep has shape (4, 4), which does not broadcast to (2, 4, 3, 3)",
        ),
        ({"drop_rate": 2.0}, ValueError, "drop_rate must lie in [0.0, 1.0], got 2.0"),
        (
            {"drop_rate": np.full(3, 0.5)},
            ValueError,
            "drop_rate must be a number or have shape (4,), got shape (3,)",
        ),
    ],
)
def test_attention_names_the_argument(given, error, message):
    layer = MultiHeadAttention(8, 4, rng=rng(), random_mask=RandomMask("element", 0.5))
    with raises(error, message):
        layer.forward(**{"x": np.ones((2, 3, 8)), "draw": Draw(0), **given})


def test_a_memory_has_no_rotation():
    layer, x = MultiHeadAttention(8, 4, rng=rng()), np.ones((2, 3, 8))
    made = Positions("rope", width=8, heads=4, context=4, rng=rng())
    with raises(ValueError, "rotation is of one text's positions: a memory has others, or none"):
        layer.forward(x, draw=Draw(0), memory=x, rotation=made.rotation(np.arange(3)))


@pytest.mark.parametrize("scheme", ["none", "sinusoidal", "rope", "alibi", "t5"])
def test_only_learned_positions_end_with_the_context(scheme):
    tokens = np.zeros((1, 9), int)
    assert model(positions=scheme).forward(tokens, draw=Draw(0))[0].shape == (1, 9, 5)


def test_a_drop_rate_without_a_mask_to_draw_is_refused():
    layer = MultiHeadAttention(8, 4, rng=rng())
    layer.forward(np.ones((2, 3, 8)), draw=Draw(0), drop_rate=0.0)
    with raises(ValueError, "drop_rate is 0.5, but the layer has no random_mask"):
        layer.forward(np.ones((2, 3, 8)), draw=Draw(0), drop_rate=0.5)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"layers": 0}, ValueError, "layers must be at least 1, got 0"),
        ({"hidden": 0}, ValueError, "hidden must be at least 1, got 0"),
        ({"norm": "batch"}, ValueError, "norm must be one of layer, rms, got 'batch'"),
        ({"placement": "both"}, ValueError, "placement must be one of pre, post, got 'both'"),
        ({"activation": "relu"}, ValueError, "activation must be one of gelu, swiglu, got 'relu'"),
    ],
)
def test_block_names_the_setting(given, error, message):
    with raises(error, message):
        DecoderBlock(8, 4, rng=rng(), layer=0, **{"layers": 1, **given})


# ---- the model -----------------------------------------------------------------------------------


def model(**given):
    return LanguageModel(**{"vocabulary": 5, "layers": 1, "width": 8, "context": 4, **given})


@pytest.mark.parametrize(
    "name", ["vocabulary", "layers", "width", "heads", "context", "expansion", "steps"]
)
def test_every_size_of_a_model_is_a_whole_number_from_one_on(name):
    with raises(ValueError, f"{name} must be at least 1, got 0"):
        model(**{name: 0})
    with raises(TypeError, f"{name} {WHOLE} 1.5"):
        model(**{name: 1.5})


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"heads": 3}, ValueError, "heads is 3, which does not divide width = 8"),
        ({"groups": 3}, ValueError, "groups is 3, which does not divide heads = 4"),
        (
            {"positions": "late"},
            ValueError,
            "positions must be one of learned, none, sinusoidal, rope, alibi, t5, got 'late'",
        ),
        ({"rope": Rope()}, ValueError, "rope is for positions='rope', not for 'learned'"),
        (
            {"positions": "rope", "heads": 8},
            ValueError,
            "positions='rope' turns channels in pairs, and a head has 1",
        ),
        (
            {"positions": "rope", "rope": Rope(width=6)},
            ValueError,
            "rope.width must be even and at most the head width 2, got 6",
        ),
        (
            {"positions": "rope", "rope": Rope(layout="thirds")},
            ValueError,
            "rope.layout must be one of interleaved, half, got 'thirds'",
        ),
        ({"positions": "rope", "rope": Rope(base=1.0)}, ValueError, "base must be a number above"),
        ({"positions": "t5", "buckets": 1}, ValueError, "buckets must be at least 2, got 1"),
        (
            {"positions": "t5", "max_distance": 16},
            ValueError,
            "max_distance must be at least 17, got 16",
        ),
        ({"norm": "batch"}, ValueError, "norm must be one of layer, rms, got 'batch'"),
        ({"placement": "both"}, ValueError, "placement must be one of pre, post, got 'both'"),
        ({"activation": "relu"}, ValueError, "activation must be one of gelu, swiglu, got 'relu'"),
        ({"dtype": int}, TypeError, "dtype must be a floating-point type, got int64"),
    ],
)
def test_model_names_the_setting(given, error, message):
    with raises(error, message):
        model(**given)


@pytest.mark.parametrize(
    "tokens, error, message",
    [
        ([[0]], TypeError, "tokens must be an array of integers, got list"),
        (np.zeros((1, 3)), TypeError, "tokens must be an array of integers, got dtype float64"),
        (np.zeros(3, int), ValueError, "tokens must have shape (B, N), got (3,)"),
        (np.zeros((1, 5), int), ValueError, "tokens has 5 positions, the context holds 4"),
        (np.full((1, 3), 5), ValueError, "tokens must lie in [0, 5), got values from 5 to 5"),
        (np.full((1, 3), -1), ValueError, "tokens must lie in [0, 5), got values from -1 to -1"),
    ],
)
def test_model_names_the_tokens(tokens, error, message):
    with raises(error, message):
        model().forward(tokens, draw=Draw(0))


@pytest.mark.parametrize(
    "samples, message",
    [
        ([], "samples must be numbers from 1 on, got []"),
        ([0, 1], "samples must be numbers from 1 on, got [0, 1]"),
        ([16], "draw.sample must lie in [0, 15], got 16"),
    ],
)
def test_monte_carlo_names_the_samples(samples, message):
    with raises(ValueError, message):
        average_probabilities(
            model(random_mask=RandomMask("element", 0.5)),
            np.zeros((1, 3), int),
            draw=Draw(0),
            samples=samples,
        )
