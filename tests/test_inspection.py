"""Inspection finds the heads that were planted, and what it measures is what it says."""

import io
import json

import numpy as np
import pytest

from minitransformer.checks.gradients import assert_close, central_difference
from minitransformer.inspection import (
    EVALUATION,
    Thresholds,
    gated,
    head_importances,
    inspect_model,
)
from minitransformer.models.language_model import LanguageModel
from minitransformer.nn.losses import cross_entropy_forward
from minitransformer.plots.heads import heads_figure
from minitransformer.runs import Trained
from minitransformer.tasks.text import Vocabulary
from minitransformer.training.config import Config

VOCABULARY, LENGTH = 7, 12


@pytest.fixture
def model():
    """Two layers of four heads, in float64, whose heads all matter."""
    made = LanguageModel(
        VOCABULARY, layers=2, width=16, heads=4, context=LENGTH, dtype=np.float64, seed=1
    )
    rng = np.random.default_rng(2)
    for parameter in made.parameters().values():
        parameter.value += 0.4 * rng.standard_normal(parameter.value.shape)
    return made


@pytest.fixture
def batch():
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (5, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def report_of(model, batch, **thresholds):
    trained = Trained(model, Vocabulary("abcdefg"), Config(), 3)
    return inspect_model(trained, batch, Thresholds(**thresholds), run="somewhere")


def loss_of(model, batch):
    inputs, targets = batch
    logits, _ = model.forward(inputs, draw=EVALUATION)
    return float(cross_entropy_forward(logits, targets)[0])


def columns(head, width=4):
    return np.s_[..., head * width : (head + 1) * width]


def test_importance_is_the_mean_of_the_derivatives_by_a_gate(model, batch):
    expected = np.zeros((2, 4))
    for layer in range(2):
        for b in range(5):
            one = tuple(x[b : b + 1] for x in batch)

            def loss(gates, one=one, layer=layer):
                with gated(model, layer, gates):
                    return LENGTH * loss_of(model, one)

            expected[layer] += np.abs(central_difference(loss, np.ones(4))) / 5
    assert_close(head_importances(model, batch), expected, 1e-8)


def test_a_gate_is_gone_when_its_context_ends(model, batch):
    before = loss_of(model, batch)
    with gated(model, 1, np.zeros(4)):
        assert loss_of(model, batch) != before
    with pytest.raises(RuntimeError), gated(model, 0, np.zeros(4)):
        raise RuntimeError
    assert loss_of(model, batch) == before


def test_a_dead_head_is_found(model, batch):
    model.blocks[1].attention.output.weight.value[8:12] *= 1e-3
    report = report_of(model, batch)
    assert [f.heads for f in report.findings if f.kind == "dead"] == [[(1, 2)]]
    head = next(h for h in report.heads if (h.layer, h.head) == (1, 2))
    assert head.importance < 0.1 and abs(head.bits_without) < 1e-2
    strict = report_of(model, batch, dead=0.0)
    assert not [f for f in strict.findings if f.kind == "dead"]
    assert report.to_json()["thresholds"] == {"dead": 0.1, "alike": 0.9}


def test_twins_are_found(model, batch):
    attention = model.blocks[0].attention
    for part in (attention.query, attention.key, attention.value):
        for array in (part.weight.value, part.bias.value):
            array[columns(3)] = array[columns(1)]
    report = report_of(model, batch)
    assert [f.heads for f in report.findings if f.kind == "alike"] == [[(0, 1), (0, 3)]]
    heads = {(h.layer, h.head): h for h in report.heads}
    assert heads[0, 1].like == 3 and heads[0, 3].like == 1
    assert heads[0, 1].overlap == pytest.approx(1) and heads[0, 1].cka == pytest.approx(1)


def test_flat_and_fixed_heads_are_found(model, batch):
    attention = model.blocks[0].attention
    attention.query.weight.value[columns(0)] = 0
    attention.query.bias.value[columns(0)] = 0
    attention.query.weight.value[columns(1)] *= 1e6
    found = {f.kind: f.heads for f in report_of(model, batch).findings}
    assert found["flat"] == [(0, 0)]
    assert found["fixed"] == [(0, 1)]


def test_what_is_lost_without_a_head_is_measured(model, batch):
    report, whole = report_of(model, batch), loss_of(model, batch)
    for h in report.heads:
        with gated(model, h.layer, (np.arange(4) != h.head).astype(float)):
            lost = (loss_of(model, batch) - whole) / np.log(2)
        assert h.bits_without == pytest.approx(lost, abs=1e-9)
    harmful = [(h.layer, h.head) for h in report.heads if h.bits_without < 0]
    assert [f.heads for f in report.findings if f.kind == "harmful"] == [harmful] * bool(harmful)


def test_a_report_can_be_written_and_drawn(model, batch):
    report = report_of(model, batch, dead=0.9)
    assert json.loads(json.dumps(report.to_json()))["windows"] == [5, LENGTH]
    fig = heads_figure(
        {"importance": report.table("importance"), "entropy": report.table("entropy")},
        {"keys": report.overlap, "outputs": report.similarity},
        named={(0, 1): "dead"},
    )
    importance, entropy, depth = fig.axes[:3]
    assert np.array_equal(importance.images[0].get_array(), report.table("importance"))
    assert np.array_equal(entropy.images[0].get_array(), report.table("entropy"))
    assert any("dead" in text.get_text() for text in importance.texts)
    assert list(depth.lines[0].get_ydata()) == report.overlap
    fig.savefig(io.BytesIO(), format="png")


def test_one_head_has_no_other(batch):
    model = LanguageModel(VOCABULARY, layers=1, width=8, heads=1, context=LENGTH)
    report = report_of(model, batch)
    assert report.heads[0].like is None and report.overlap == [None]
    fig = heads_figure({"importance": report.table("importance")}, {"keys": report.overlap})
    fig.savefig(io.BytesIO(), format="png")
