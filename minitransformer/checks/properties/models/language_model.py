"""What a language model with stochastic attention must do: read the past only, draw its masks by
the law, and differentiate all of itself."""

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close, assert_parameter_gradients, cotangent
from minitransformer.checks.strategies import seeds
from minitransformer.checks.suite import Suite
from minitransformer.nn.positions import Rope
from minitransformer.philox import Draw
from minitransformer.stochastic.samplers import RandomMask
from minitransformer.stochastic.schedules import Schedule

suite = Suite("models.language_model")

VOCABULARY, CONTEXT = 7, 6
SIZES = {"layers": 2, "width": 8, "heads": 2, "context": CONTEXT, "expansion": 2}
ELEMENT, BLOCK = RandomMask("element", 0.5), RandomMask("block", 0.5, tile=2)
INVERTED = RandomMask("element", 0.4, compensation="inverted")
variants = st.sampled_from(
    [
        {"random_mask": ELEMENT, "schedule": Schedule(0.5, "linear")},
        {"random_mask": BLOCK, "placement": "post", "groups": 1, "softcap": 5.0},
        {"random_mask": INVERTED, "norm": "rms", "activation": "swiglu", "tied": False,
            "positions": "none", "heads": 4, "groups": 2},
        {"random_mask": ELEMENT, "positions": "t5", "buckets": 4, "max_distance": 5},
        {"random_mask": INVERTED, "positions": "alibi", "groups": 1},
        {"random_mask": BLOCK, "positions": "rope", "norm": "rms"},
        {"positions": "rope", "rope": Rope(100.0, 2, "interleaved"), "softcap": 5.0},
        {"random_mask": ELEMENT, "positions": "sinusoidal", "placement": "post"},
    ]
)  # fmt: skip
schemes = st.sampled_from(["learned", "sinusoidal", "rope", "alibi", "t5"])


def built(target, seed=0, **options):
    """A small model in float64, with weights large enough that every part matters."""
    model = target.LanguageModel(
        VOCABULARY, **{**SIZES, "seed": seed, "dtype": np.float64, "steps": 10, **options}
    )
    for number, parameter in enumerate(model.parameters().values()):
        noise = np.random.default_rng([seed, number]).standard_normal(parameter.value.shape)
        parameter.value += 0.3 * noise
    return model


def tokens_of(seed, rows=2, length=CONTEXT):
    return np.random.default_rng([seed, 1]).integers(0, VOCABULARY, (rows, length))


@suite.property("LanguageModel", options=variants)
def every_parameter_has_its_derivative(target, options):
    """Eq. 16.40, the whole of it, in a random direction of every parameter array, at a training
    step with its random masks; a second backward pass adds."""
    model, tokens, draw = built(target, 3, **options), tokens_of(3), Draw(5, 2)
    logits, cache = model.forward(tokens, draw=draw)
    dlogits = cotangent(logits, 3)
    model.zero_grad()
    model.backward(dlogits, cache)

    def loss():
        return (dlogits * model.forward(tokens, draw=draw)[0]).sum()

    assert_parameter_gradients(loss, model.parameters(), 3)
    once = {name: p.grad.copy() for name, p in model.parameters().items()}
    model.backward(dlogits, cache)
    for name, parameter in model.parameters().items():
        assert_close(parameter.grad, 2 * once[name], what=name)


@suite.property("LanguageModel", options=variants, seed=seeds, at=st.integers(1, CONTEXT - 1))
def a_later_token_changes_no_earlier_score(target, options, seed, at):
    """Another token at position t leaves the scores before t as they were, bit for bit."""
    model, tokens, draw = built(target, 1, **options), tokens_of(seed), Draw(seed, 4)
    before, _ = model.forward(tokens, draw=draw)
    changed = tokens.copy()
    changed[:, at] = (changed[:, at] + 1) % VOCABULARY
    after, _ = model.forward(changed, draw=draw)
    assert_close(after[:, :at], before[:, :at], what="scores of the past")
    assert not np.array_equal(after[:, at], before[:, at]), "a token does not matter to itself"


@suite.property("LanguageModel", scheme=schemes, seed=seeds)
def each_scheme_of_positions_tells_the_order(target, scheme, seed):
    """Two tokens of the past exchanged change the last score (Eq. 16.40); a single layer without
    positions cannot see that."""
    model = built(target, 1, layers=1, positions=scheme, buckets=4, max_distance=5)
    tokens = np.random.default_rng(seed).permutation(VOCABULARY)[None, :CONTEXT]
    draw = Draw(seed, training=False)
    before = model.forward(tokens, draw=draw)[0][:, -1]
    exchanged = tokens[:, [0, 2, 1, *range(3, CONTEXT)]]
    after = model.forward(exchanged, draw=draw)[0][:, -1]
    assert np.abs(after - before).max() > 1e-9, "the order makes no difference"


@suite.property("LanguageModel", options=variants, seed=seeds)
def evaluation_is_full_and_the_same_for_every_draw(target, options, seed):
    """Without training nothing is drawn: the model without random masks, whatever the seed."""
    model, tokens = built(target, 2, **options), tokens_of(seed)
    plain = built(target, 2, **{**options, "random_mask": None})
    draws = [Draw(seed, 0, training=False), Draw(seed ^ 1, 9, training=False)]
    for draw in draws:
        scores = model.forward(tokens, draw=draw)[0]
        assert np.array_equal(scores, plain.forward(tokens, draw=draw)[0])


@suite.property("LanguageModel", seed=seeds)
def masks_differ_by_layer_step_and_seed_and_repeat_exactly(target, seed):
    """The same (seed, step) gives the same masks; another step, seed or layer gives others; one
    more layer on top changes none below."""
    tokens = tokens_of(seed, rows=3)
    options = {"random_mask": RandomMask("element", 0.5)}

    def masks(layers, draw):
        model = built(target, layers=layers, **options)
        return [a.keep for a in model.forward(tokens, draw=draw)[1].attentions]

    first, second = masks(2, Draw(seed, 3))
    assert not np.array_equal(first, second), "two layers draw one mask"
    again = masks(3, Draw(seed, 3))
    assert np.array_equal(again[0], first)
    assert np.array_equal(again[1], second)
    assert not np.array_equal(masks(1, Draw(seed, 4))[0], first), "two steps draw one mask"
    assert not np.array_equal(masks(1, Draw(seed ^ 1, 3))[0], first), "two seeds draw one mask"


@suite.property("LanguageModel", step=st.integers(0, 12))
def drop_rates_follow_the_schedule_over_layers_and_steps(target, step):
    """The rate of a layer at a step is the schedule's, and the masks have that density."""
    schedule = Schedule(0.6, "geometric", 0.8, warmup="ramp", warmup_fraction=0.5)
    model = built(target, layers=3, random_mask=RandomMask("element", 0.6), schedule=schedule)
    expected = [schedule.drop_rate(layer, 3, step, 10, 2) for layer in range(3)]
    assert np.array_equal(model.drop_rates(step), expected)
    tokens = tokens_of(step, rows=40)
    density = model.forward(tokens, draw=Draw(1, step))[1].mask_density
    for layer, rate in enumerate(expected):
        # the diagonal is protected: 6 of the 21 pairs
        assert abs(density[layer] - (1 - np.mean(rate) * 15 / 21)) < 0.06


@suite.property("LanguageModel", "average_probabilities", seed=seeds)
def monte_carlo_evaluation_averages_probabilities(target, seed):
    """The mean of softmax(logits) over the samples (Eq. 16.41): rows sum to 1, samples differ."""
    model, tokens, draw = built(target, 4, random_mask=ELEMENT), tokens_of(seed), Draw(seed, 1)
    got = target.average_probabilities(model, tokens, draw=draw, samples=[1, 2, 3])
    expected, drawn = np.zeros_like(got), []
    for sample in (1, 2, 3):
        logits, _ = model.forward(tokens, draw=draw._replace(training=False, sample=sample))
        e = np.exp(logits - logits.max(axis=-1, keepdims=True))
        drawn.append(e / e.sum(axis=-1, keepdims=True))
        expected += drawn[-1] / 3
    assert_close(got, expected)
    assert not np.array_equal(drawn[0], drawn[1]), "two samples draw one mask"
