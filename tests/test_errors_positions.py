"""What the position schemes say to bad input: the argument, what was expected, what came."""

import numpy as np
import pytest

from minitransformer.positions import alibi, learned, rope, sinusoidal, t5_bias

pytestmark = pytest.mark.usefixtures("own_errors")

HERE = np.arange(3)
X, SLOPES, TABLE = np.ones((2, 3, 4)), np.ones(2), np.ones((8, 2))
ROWS = np.ones((5, 4))
COS, SIN = rope.rope_tables(HERE, 4)


def assert_fails(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- RoPE ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: rope.rope_frequencies(5), ValueError, "width is 5: .* must be even"),
        (lambda: rope.rope_frequencies(0), ValueError, "width must be at least 2, got 0"),
        (lambda: rope.rope_frequencies(4.0), TypeError, "width must be a whole number, got 4.0"),
        (lambda: rope.rope_frequencies(4, base=1.0), ValueError, "base must be .* got 1.0"),
        (
            lambda: rope.rope_frequencies(4, length=9),
            ValueError,
            "length is for kind='dynamic' only",
        ),
        (
            lambda: rope.rope_frequencies(4, scaling=rope.Scaling("dynamic", 2.0, 8)),
            ValueError,
            "kind='dynamic' depends on the length",
        ),
        (
            lambda: rope.rope_frequencies(2, scaling=rope.Scaling("ntk", 2.0)),
            ValueError,
            "kind='ntk' needs a width of at least 4, got 2",
        ),
        (lambda: rope.rope_tables([0, 1], 4), TypeError, "positions must be a NumPy array"),
        (
            lambda: rope.rope_tables(HERE.astype(np.float16), 4),
            TypeError,
            "positions must be integers .* got dtype float16",
        ),
        (
            lambda: rope.rope_tables(np.array([0, np.nan]), 4),
            ValueError,
            "positions must be finite",
        ),
        (
            lambda: rope.rope_tables(HERE, 4, rotated=3),
            ValueError,
            "rotated must be even and at most width = 4, got 3",
        ),
    ],
)
def test_rope_tables_name_the_argument(call, error, message):
    assert_fails(call, error, message)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"kind": "ntk-aware"}, "kind must be one of linear, ntk, .* got 'ntk-aware'"),
        ({"factor": 0.5}, "factor must be a number of at least 1, got 0.5"),
        ({"factor": float("nan")}, "factor must be .* got nan"),
        ({"kind": "yarn"}, "kind='yarn' needs original"),
        ({"original": 16}, "original is for dynamic and yarn, not for kind='linear'"),
        ({"kind": "yarn", "original": 0}, "original must be at least 1, got 0"),
        ({"beta_slow": 64.0}, "beta_fast must be above beta_slow, .* got 32.0 and 64.0"),
        ({"attention_factor": 1.0}, "attention_factor is for yarn, not for kind='linear'"),
        (
            {"kind": "yarn", "original": 16, "attention_factor": 0.0},
            "attention_factor must be positive, got 0.0",
        ),
    ],
)
def test_a_scaling_names_the_setting(given, message):
    assert_fails(
        lambda: rope.Scaling(**{"kind": "linear", "factor": 2.0, **given}), ValueError, message
    )


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: rope.rope_forward(np.ones((3, 4), int), COS, SIN, layout="half"),
            TypeError,
            "x must hold floating-point numbers, got dtype int64",
        ),
        (
            lambda: rope.rope_forward(X, COS, SIN, layout="neox"),
            ValueError,
            "layout must be one of interleaved, half, got 'neox'",
        ),
        (
            lambda: rope.rope_forward(X, COS, SIN[:2], layout="half"),
            ValueError,
            r"sin has shape \(2, 2\), cos \(3, 2\)",
        ),
        (
            lambda: rope.rope_forward(X[..., :3], COS, SIN, layout="half"),
            ValueError,
            "cos has 2 pairs, x has 3 channels",
        ),
        (
            lambda: rope.rope_forward(X[:, :2], COS, SIN, layout="half"),
            ValueError,
            r"cos has shape \(3,\), which does not broadcast to \(2, 2\)",
        ),
        (
            lambda: rope.rope_backward(X[:1], rope.rope_forward(X, COS, SIN, layout="half")[1]),
            ValueError,
            r"dout has shape \(1, 3, 4\), the forward pass gave \(2, 3, 4\)",
        ),
        (
            lambda: rope.to_half_layout(np.ones((4, 6)), 4),
            ValueError,
            "heads is 4, which does not divide 6 channels",
        ),
        (
            lambda: rope.to_half_layout(np.ones((4, 6)), 2),
            ValueError,
            "rotary must be even and at most the head width 3, got 3",
        ),
    ],
)
def test_rope_names_the_argument(call, error, message):
    assert_fails(call, error, message)


# ---- what is added to the scores -----------------------------------------------------------------


def alibi_bias(slopes=SLOPES, i=HERE, j=HERE):
    return alibi.alibi_forward(slopes, i, j)


def t5(table=TABLE, i=HERE, j=HERE, *, bidirectional=True, max_distance=20):
    options = {"bidirectional": bidirectional, "max_distance": max_distance}
    return t5_bias.t5_bias_forward(table, i, j, **options)


@pytest.mark.parametrize("bias", [alibi_bias, t5])
@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"i": HERE + 0.5}, TypeError, "query_positions must be an array of integers, got dtype"),
        ({"j": [0, 1]}, TypeError, "key_positions must be an array of integers, got list"),
        ({"i": np.array(3)}, ValueError, r"query_positions must have shape \(\*B, length\)"),
        (
            {"i": np.zeros((2, 3), int), "j": np.zeros((3, 3), int)},
            ValueError,
            r"query_positions \(2, 3\) and key_positions \(3, 3\) differ in their leading axes",
        ),
    ],
)
def test_a_bias_names_the_positions(bias, given, error, message):
    assert_fails(lambda: bias(**given), error, message)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: alibi.alibi_slopes(0), ValueError, "heads must be at least 1, got 0"),
        (lambda: alibi.alibi_slopes(2.0), TypeError, "heads must be a whole number, got 2.0"),
        (lambda: alibi_bias([1.0]), TypeError, "slopes must be a NumPy array, got list"),
        (lambda: alibi_bias(np.ones(2, int)), TypeError, "slopes must hold floating"),
        (
            lambda: alibi_bias(np.ones((2, 1, 1))),
            ValueError,
            r"slopes must have shape \(heads,\), got \(2, 1, 1\)",
        ),
        (
            lambda: alibi.alibi_backward(np.ones((1, 3, 3)), alibi_bias()[1]),
            ValueError,
            r"dout has shape \(1, 3, 3\), the forward pass gave \(2, 3, 3\)",
        ),
    ],
)
def test_alibi_names_the_argument(call, error, message):
    assert_fails(call, error, message)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: t5_bias.t5_buckets(HERE - 0.5, bidirectional=True),
            TypeError,
            "relative must be an array of integers, got dtype float64",
        ),
        (lambda: t5([[1.0]]), TypeError, "table must be a NumPy array, got list"),
        (lambda: t5(np.ones((8, 2), int)), TypeError, "table must hold floating"),
        (
            lambda: t5(np.ones(8)),
            ValueError,
            r"table must have shape \(buckets, heads\), got \(8,\)",
        ),
        (lambda: t5(np.ones((2, 8))), ValueError, "buckets must be at least 4, got 2"),
        (
            lambda: t5(np.ones((1, 8)), bidirectional=False),
            ValueError,
            "buckets must be at least 2, got 1",
        ),
        (lambda: t5(np.ones((7, 2))), ValueError, "buckets must be even when bidirectional.*got 7"),
        (lambda: t5(max_distance=2), ValueError, "max_distance must be at least 3, got 2"),
        (lambda: t5(max_distance=20.0), TypeError, "max_distance must be a whole number, got 20.0"),
        (
            lambda: t5_bias.t5_bias_backward(np.ones((1, 2, 3, 3)), t5()[1]),
            ValueError,
            r"dout has shape \(1, 2, 3, 3\), the forward pass gave \(2, 3, 3\)",
        ),
    ],
)
def test_t5_bias_names_the_argument(call, error, message):
    assert_fails(call, error, message)


# ---- what is added to the text -------------------------------------------------------------------


def add_learned(x=X, positions=HERE, table=ROWS):
    return learned.learned_forward(x, table, positions)


@pytest.mark.parametrize("add", [sinusoidal.sinusoidal_forward, add_learned])
@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"x": [[1.0]]}, TypeError, "x must be a NumPy array, got list"),
        ({"x": X.astype(int)}, TypeError, "x must hold floating-point numbers"),
        ({"x": np.ones(4)}, ValueError, r"x needs at least 2 axes, got shape \(4,\)"),
        ({"positions": HERE * 1.0}, TypeError, "positions must be an array of integers, got dtype"),
        ({"positions": range(3)}, TypeError, "positions must be an array of integers, got range"),
        (
            {"positions": HERE[:1]},
            ValueError,
            r"positions has shape \(1,\), x \(2, 3, 4\): one for",
        ),
        (
            {"positions": np.array(2)},
            ValueError,
            r"positions has shape \(\), x .*: one for each row",
        ),
        (
            {"positions": np.zeros((3, 3), int)},
            ValueError,
            r"positions has shape \(3, 3\), which does not broadcast to \(2, 3\)",
        ),
    ],
)
def test_what_is_added_names_x_and_positions(add, given, error, message):
    assert_fails(lambda: add(**{"x": X, "positions": HERE, **given}), error, message)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: sinusoidal.sinusoidal_table(HERE / 2, 4),
            TypeError,
            "positions must be an array of integers, got dtype float64",
        ),
        (
            lambda: sinusoidal.sinusoidal_table(HERE, 0),
            ValueError,
            "width must be at least 1, got 0",
        ),
        (
            lambda: sinusoidal.sinusoidal_table(HERE, 4.0),
            TypeError,
            "width must be a whole number, got 4.0",
        ),
        (
            lambda: sinusoidal.sinusoidal_table(HERE, 4, base=1.0),
            ValueError,
            "base must be a number above 1, got 1.0",
        ),
        (
            lambda: sinusoidal.sinusoidal_backward(X[0], sinusoidal.sinusoidal_forward(X, HERE)[1]),
            ValueError,
            r"dout has shape \(3, 4\), the forward pass gave \(2, 3, 4\)",
        ),
    ],
)
def test_sinusoidal_names_the_argument(call, error, message):
    assert_fails(call, error, message)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: add_learned(table=[[1.0]]), TypeError, "table must be a NumPy array, got list"),
        (lambda: add_learned(table=ROWS.astype(int)), TypeError, "table must hold floating-point"),
        (
            lambda: add_learned(table=ROWS[:, :3]),
            ValueError,
            r"table must have shape \(positions, 4\), the width of x, got \(5, 3\)",
        ),
        (
            lambda: add_learned(table=ROWS[0]),
            ValueError,
            r"table must have shape \(positions, 4\), the width of x, got \(4,\)",
        ),
        (
            lambda: add_learned(positions=HERE + 3),
            ValueError,
            r"positions must lie in \[0, 5\), the rows of the table, got values from 3 to 5",
        ),
        (
            lambda: add_learned(positions=HERE - 1),
            ValueError,
            r"positions must lie in \[0, 5\), .* from -1 to 1",
        ),
        (
            lambda: learned.learned_backward(X[:1], add_learned()[1]),
            ValueError,
            r"dout has shape \(1, 3, 4\), the forward pass gave \(2, 3, 4\)",
        ),
    ],
)
def test_learned_names_the_argument(call, error, message):
    assert_fails(call, error, message)
