"""What dropout of single entries must do: drop by the mask law, make up for it, and undo the same
mask."""

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close, assert_gradients, cotangent
from minitransformer.checks.properties.nn import DTYPES, assert_rounded_once, dtypes, entries
from minitransformer.checks.strategies import seeds
from minitransformer.checks.suite import Suite
from minitransformer.philox import Draw, philox

suite = Suite("nn.dropout")

shapes = st.sampled_from([(3, 11), (2, 3, 5), (7,), (5, 1), (1, 2, 2, 3), (0, 3), (2, 0)])
rates = st.sampled_from([0.3, 0.5, 0.9])
# of training, and of a Monte-Carlo sample in evaluation
training, evaluation = st.just(True), st.just(False)
draws = st.builds(Draw, seeds, seeds, training, st.just(0)) | st.builds(
    Draw, seeds, seeds, evaluation, st.integers(1, 15)
)
layers = st.integers(0, 2**16 - 1)


def mask_by_law(shape, rate, draw, layer):
    """Entry (i, j) of the rows laid end to end: keep iff the word is at least p · 2³²; the words
    of dropout have stream 128."""
    rows, width = int(np.prod(shape[:-1])), shape[-1]
    key = (draw.seed, (128 + 4096 * draw.sample) << 16 | layer)
    kept = np.empty((rows, width), bool)
    for j in range(width):
        counter = np.array([j // 4]), np.arange(rows), np.zeros(1), np.array([draw.step])
        kept[:, j] = philox(counter, key)[:, j % 4] >= round(rate * 2**32)
    return kept.reshape(shape)


@suite.property("dropout_forward", shape=shapes, seed=seeds, rate=rates, draw=draws, layer=layers)
def an_entry_is_dropped_or_scaled_up_by_the_mask_law(target, shape, seed, rate, draw, layer):
    """Eq. 16.13: the mask that the law draws for this seed, step, layer and sample; what is kept is
    divided by its probability of being kept, 1 - p."""
    x = 1 + entries(shape, seed)
    out, _ = target.dropout_forward(x, drop_rate=rate, draw=draw, layer=layer)
    expected = np.where(mask_by_law(shape, rate, draw, layer), x / (1 - rate), 0)
    # p is rounded to a multiple of 2⁻³²
    assert_close(out, expected, 2.0**-32 / (1 - rate), what="dropout")


@suite.property(
    "dropout_forward", "dropout_backward", shape=shapes, seed=seeds,
    why=st.sampled_from(["rate 0", "evaluation"]),
)  # fmt: skip
def nothing_dropped_is_the_identity_bitwise(target, shape, seed, why):
    """p = 0 and evaluation: the same bits out, and the same gradient back."""
    x, dout = entries(shape, seed), entries(shape, seed ^ 1)
    out, cache = target.dropout_forward(
        x, drop_rate=0.0 if why == "rate 0" else 0.5,
        draw=Draw(seed, training=why != "evaluation"), layer=1,
    )  # fmt: skip
    assert np.array_equal(out, x), f"{why} is not the identity"
    assert np.array_equal(target.dropout_backward(dout, cache), dout), f"{why}: another gradient"


@suite.property("dropout_forward", "dropout_backward", shape=shapes, seed=seeds)
def everything_dropped_is_zero(target, shape, seed):
    """p = 1: zeros forward and backward, no 0/0."""
    out, cache = target.dropout_forward(
        entries(shape, seed), drop_rate=1.0, draw=Draw(seed), layer=0
    )
    assert_close(out, np.zeros(shape), what="out")
    dx = target.dropout_backward(entries(shape, seed ^ 1), cache)
    assert_close(dx, np.zeros(shape), what="dx")


@suite.property("dropout_forward", seed=seeds, rate=rates, layer=layers)
def the_mean_is_left_where_it_was(target, seed, rate, layer):
    """E[y] = x: over ten thousand ones the mean is 1, and a share 1 - p is kept, within six
    standard deviations."""
    x = np.ones((100, 100))
    out, _ = target.dropout_forward(x, drop_rate=rate, draw=Draw(seed), layer=layer)
    six = 6 * np.sqrt(rate * (1 - rate) / x.size)
    assert abs((out != 0).mean() - (1 - rate)) < six, f"kept {(out != 0).mean()}"
    assert abs(out.mean() - 1) < six / (1 - rate), f"the mean of ones is {out.mean()}"


@suite.property("dropout_forward", shape=shapes, seed=seeds, rate=rates, draw=draws)
def a_slice_drops_what_the_whole_drops(target, shape, seed, rate, draw):
    """An entry's fate depends on where it stands: neither on its value, nor on how much comes after
    it, nor on what was drawn before."""
    x = 1 + entries(shape, seed)
    whole, _ = target.dropout_forward(x, drop_rate=rate, draw=draw, layer=3)
    again, _ = target.dropout_forward(2 * x, drop_rate=rate, draw=draw, layer=3)
    assert_close(again, 2 * whole, what="dropout of 2 x")
    rows = (x.reshape(int(np.prod(shape[:-1])), shape[-1]), whole.reshape(-1, max(shape[-1], 1)))
    for n, m in ((1, shape[-1]), (max(len(rows[0]) - 1, 0), max(shape[-1] - 1, 0))):
        part, _ = target.dropout_forward(rows[0][:n, :m], drop_rate=rate, draw=draw, layer=3)
        assert_close(part, rows[1][:n, :m].reshape(part.shape), what="dropout of a slice")


@suite.property("dropout_forward", seed=seeds, rate=rates, step=st.integers(0, 1000))
def seed_step_and_layer_each_draw_anew(target, seed, rate, step):
    """Another seed, another step, another layer or another sample: another mask."""
    x = np.ones((13, 17))
    masks = [
        target.dropout_forward(x, drop_rate=rate, draw=draw, layer=layer)[0] != 0
        for draw, layer in (
            (Draw(seed, step), 1),
            (Draw(seed ^ 1, step), 1),
            (Draw(seed, step + 1), 1),
            (Draw(seed, step), 2),
            (Draw(seed, step, training=False, sample=1), 1),
            (Draw(seed, step, training=False, sample=2), 1),
        )
    ]
    assert len({mask.tobytes() for mask in masks}) == len(masks), "two masks are the same"


@suite.property(
    "dropout_forward", "dropout_backward", shape=shapes, seed=seeds,
    rate=st.sampled_from([0.3, 0.9, 1.0, 0.0]), draw=draws,
)  # fmt: skip
def dropout_backward_is_the_derivative(target, shape, seed, rate, draw):
    """Eq. 16.14 against the complex step: the mask of the forward, and its scale."""
    x = entries(shape, seed)
    out, cache = target.dropout_forward(x, drop_rate=rate, draw=draw, layer=2)
    dout = cotangent(out, seed)
    assert_gradients(
        lambda x: target.dropout_forward(x, drop_rate=rate, draw=draw, layer=2)[0],
        {"x": target.dropout_backward(dout, cache)},
        {"x": x},
        dout,
    )


@suite.property("dropout_forward", "dropout_backward", seed=seeds, dtype=dtypes)
def narrow_numbers_are_rounded_once(target, seed, dtype):
    """The dtype of x comes out, and that of dy goes back; every dtype has the same mask."""
    x, dout = (1 + entries((5, 11), seed ^ n).astype(DTYPES[dtype]) for n in range(2))
    out, cache = target.dropout_forward(x, drop_rate=0.3, draw=Draw(seed), layer=0)
    factor = mask_by_law(x.shape, 0.3, Draw(seed), 0) / (1 - round(0.3 * 2**32) / 2**32)
    assert_rounded_once(out, x.astype(np.float64) * factor, dtype, "dropout")
    dx = target.dropout_backward(dout, cache)
    assert_rounded_once(dx, dout.astype(np.float64) * factor, dtype, "gradient")


@suite.property("dropout_forward", "dropout_backward", shape=shapes, seed=seeds, rate=rates)
def arguments_are_left_alone(target, shape, seed, rate):
    """No array of the caller is modified, and one cache serves twice."""
    x, dout = entries(shape, seed), entries(shape, seed ^ 1)
    before = x.copy(), dout.copy()
    _, cache = target.dropout_forward(x, drop_rate=rate, draw=Draw(seed), layer=0)
    first, second = (target.dropout_backward(dout, cache) for _ in range(2))
    assert np.array_equal(x, before[0]), "x was modified"
    assert np.array_equal(dout, before[1]), "the cotangent was modified"
    assert np.array_equal(first, second), "the second backward differs from the first"
