"""The loop, the monitor, the display and the writing of text, on a model small enough to see
through."""

import io
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from minitransformer.checks.suite import GATE
from minitransformer.display import TrainingDisplay, drop_rates, verdict
from minitransformer.nn.module import Parameter
from minitransformer.philox import Draw, Stream, random_bits
from minitransformer.plots.training import fluctuation_figure, loss_figure
from minitransformer.tasks.generate import choose, generate
from minitransformer.tasks.text import Corpus, TextTask, Vocabulary, ngram_bits
from minitransformer.training.checkpoints import RunError, RunFolder
from minitransformer.training.config import from_flat
from minitransformer.training.loop import Run, Trainer, evaluate
from minitransformer.training.monitor import Monitor, fluctuation, head_measures

LETTERS = "abcde"


class Bigram:
    """Logits of the next character are a row of a table. In training, half the positions are
    dropped: they predict nothing. So loss and gradient depend on the masks of (seed, step), as a
    stochastic Transformer's do."""

    def __init__(self, explode_at=()):
        rng = np.random.default_rng(0)
        self.table = Parameter(rng.normal(size=(len(LETTERS),) * 2).astype(np.float32), decay=True)
        self.explode_at = explode_at
        self.draws = []

    def parameters(self):
        return {"table": self.table}

    def zero_grad(self):
        self.table.grad[...] = 0

    def drop_rates(self, step):
        return [0.5]

    def forward(self, tokens, *, draw):
        self.draws.append(draw)
        keep = np.ones(tokens.shape, dtype=bool)
        if draw.training:
            rows, columns = np.indices(tokens.shape)
            keep = random_bits(draw, Stream.ELEMENT, 0, rows * 0, rows, columns) >= 2**31
        logits = np.where(keep[..., None], self.table.value[tokens], np.float32(0))
        density = [keep.mean()]
        cache = SimpleNamespace(tokens=tokens, keep=keep, draw=draw, attentions=[])
        cache.mask_density = density
        return logits, cache

    def backward(self, dlogits, cache):
        dlogits = np.where(cache.keep[..., None], dlogits, 0)
        if cache.draw.step in self.explode_at:
            dlogits = dlogits * np.float32(np.inf)
        np.add.at(self.table.grad, cache.tokens, dlogits)


@pytest.fixture(scope="module")
def corpus():
    rng = np.random.default_rng(1)
    tokens = [0]
    for _ in range(3000):  # the next letter of the alphabet, four times in five
        step = 1 if rng.random() < 0.8 else rng.integers(5)
        tokens.append((tokens[-1] + step) % 5)
    tokens = np.array(tokens)
    return Corpus("letters", "", Vocabulary(LETTERS), tokens[:2700], tokens[2700:])


def config_of(**changes):
    small = {"steps": 30, "warmup": 5, "batch": 4, "learning_rate": 0.1, "look_every": 4}
    small |= {"save_every": 7, "keep": 9} | changes
    return from_flat({f"training.{key}": value for key, value in small.items()})


def trainer_of(corpus, model=None, **changes):
    config = config_of(**changes)
    task = TextTask(corpus, 16, config.training.batch, config.training.seed)
    return Trainer(model or Bigram(), task, config.training)


def run_of(corpus, folder, **changes):
    return Run(trainer_of(corpus, **changes), folder, {"settings": {"a": 1}, "vocabulary": LETTERS})


def without_clock(records):
    return [{k: v for k, v in record.items() if k != "clock"} for record in records]


def same_bits(a, b):
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].tobytes() == b[k].tobytes() for k in a
    )


# ---- the loop ------------------------------------------------------------------------------------


def test_it_learns_what_a_bigram_can(corpus):
    trainer = trainer_of(corpus, steps=200, learning_rate=0.2)
    for _ in range(200):
        trainer.advance()
    bits = evaluate(trainer.model, trainer.task.validation()) / math.log(2)
    unigram, bigram, _ = ngram_bits(corpus)
    assert bits < bigram + 0.05 < unigram - 0.5


@pytest.mark.parametrize("stop", [0, 1, 6, 7, 8, 14, 22, 29, 30])
@pytest.mark.parametrize("saved", [True, False], ids=["stopped", "killed"])
def test_a_resumed_run_ends_with_the_same_bits(corpus, tmp_path, stop, saved):
    config = config_of()
    with RunFolder.create(tmp_path / "whole", config) as folder:
        run = run_of(corpus, folder)
        for _ in run:
            pass
        whole, records = run.trainer.state(), folder.records()
        last = folder.checkpoints()[-1].read_bytes()

    with RunFolder.create(tmp_path / "parts", config) as folder:
        run = run_of(corpus, folder)
        run.restore()
        for step, _ in enumerate(run, start=1):
            if step == stop:
                break
        if saved and stop:
            run.save()
    with RunFolder.open(tmp_path / "parts") as folder:
        run = run_of(corpus, folder)
        run.restore()
        for _ in run:
            pass
        assert same_bits(run.trainer.state(), whole)
        assert without_clock(folder.records()) == without_clock(records)
        assert folder.checkpoints()[-1].read_bytes() == last


def test_a_step_that_is_not_finite_is_skipped_and_counted(corpus, tmp_path):
    with RunFolder.create(tmp_path / "run", config_of()) as folder:
        run = run_of(corpus, folder, model=Bigram(explode_at=(3, 9)))
        before, states = run.trainer.state(), []
        for _ in run:
            states.append(run.trainer.state())
        records = folder.records()
    assert [r["step"] for r in records if r["skipped"]] == [4, 10]
    assert records[-1]["skipped_so_far"] == 2
    assert records[3]["gradient_norm"] is None  # JSON has no infinity
    assert not same_bits(before, states[0])
    assert same_bits(states[2], states[3])  # weights and optimiser are as they were
    assert not same_bits(states[3], states[4])
    assert np.isfinite(run.trainer.model.table.value).all()


def test_evaluation_is_a_mean_over_characters_not_over_batches():
    model = Bigram()
    tokens = np.arange(12) % 5
    parts = [(tokens[None, :8], tokens[None, 1:9]), (tokens[None, 8:11], tokens[None, 9:12])]
    log_z = np.log(np.exp(model.table.value).sum(-1))
    each = log_z[tokens[:11]] - model.table.value[tokens[:11], tokens[1:12]]
    assert evaluate(model, parts) == pytest.approx(each.mean(), rel=1e-6)
    assert all(not draw.training for draw in model.draws)


def test_a_record_says_how_the_step_went(corpus):
    record = trainer_of(corpus).advance()
    assert record["step"] == 1
    assert record["drop_rates"] == [0.5]
    assert 0.2 < record["mask_density"][0] < 0.8
    assert record["gradient_norm"] > 0
    assert record["clock"]["tokens_per_second"] > 0


def test_another_checkpoint_is_offered_when_the_last_is_damaged(corpus, tmp_path):
    with RunFolder.create(tmp_path / "run", config_of()) as folder:
        for _ in run_of(corpus, folder):
            pass
        folder.checkpoints()[-1].write_bytes(b"half")
        complaint = r"step_30\.safetensors' is truncated.*delete it to resume from 'step_28\.safet"
        with pytest.raises(RunError, match=complaint):
            run_of(corpus, folder).restore()
        folder.checkpoints()[-1].unlink()
        run = run_of(corpus, folder)
        run.restore()
        assert run.trainer.step == 28


@pytest.mark.parametrize(
    "about, complaint",
    [
        ({"settings": {"a": 2}, "vocabulary": LETTERS}, "settings: 'a' is 1 in it, 2 here"),
        ({"settings": {"a": 1}, "vocabulary": "abc"}, "the field 'vocabulary' is abcde in it, abc"),
        ({"settings": {"a": 1}, "text": "x"}, "the field 'text' is None in it, x here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(corpus, tmp_path, about, complaint):
    with RunFolder.create(tmp_path / "run", config_of()) as folder:
        run_of(corpus, folder, keep=1).save()
        with pytest.raises(RunError, match=complaint):
            Run(trainer_of(corpus), folder, about).restore()


def test_a_checkpoint_of_another_shape_is_refused(corpus, tmp_path):
    model = Bigram()
    model.table = Parameter(np.zeros((4, 5), dtype=np.float32), decay=True)
    with RunFolder.create(tmp_path / "run", config_of()) as folder:
        run_of(corpus, folder).save()
        with pytest.raises(RunError, match=r"'model\.table' is float32\[5, 5\] in it, float32\[4"):
            run_of(corpus, folder, model=model).restore()


# ---- the monitor ---------------------------------------------------------------------------------


def test_looking_does_not_change_the_bits(corpus, tmp_path):
    ends = []
    for look_every in (1, 1000):
        with RunFolder.create(tmp_path / str(look_every), config_of()) as folder:
            run = run_of(corpus, folder, look_every=look_every)
            losses = [record["loss"] for record in run]
            looks = sum("look" in record for record in folder.records())
            ends.append((losses, run.trainer.state(), looks))
    (losses, state, looks), (other_losses, other_state, other_looks) = ends
    assert (looks, other_looks) == (30, 1)  # the last step is always looked at
    assert losses == other_losses
    assert same_bits(state, other_state)


def test_a_look_is_at_the_same_text_with_full_attention(corpus):
    trainer = trainer_of(corpus)
    monitor = Monitor(trainer.model, trainer.task, band=0.05)
    first, second = monitor.look(), monitor.look()
    assert first == second
    assert all(not draw.training for draw in trainer.model.draws)
    assert first["gap"] == first["validation"] - first["probe"]


def test_a_straight_line_does_not_fluctuate():
    assert fluctuation(3 - 0.1 * np.arange(50)) == pytest.approx(0, abs=1e-12)
    assert fluctuation(np.array([2.0])) == 0


def test_fluctuation_is_the_distance_from_the_line():
    t = np.arange(1000)
    assert fluctuation(0.3 * t + 0.04 * (-1.0) ** t) == pytest.approx(0.04, rel=1e-3)


@settings(GATE)
@given(
    values=st.lists(st.floats(-10, 10), min_size=2, max_size=30),
    offset=st.floats(-10, 10),
    slope=st.floats(-1, 1),
)
def test_adding_a_line_changes_no_fluctuation(values, offset, slope):
    values = np.array(values)
    line = offset + slope * np.arange(len(values))
    assert fluctuation(values + line) == pytest.approx(fluctuation(values), abs=1e-9)


def follow_all(monitor, losses):
    return [monitor.follow({"loss": x, "skipped": False}) for x in losses]


def test_a_loss_outside_its_band_is_said(corpus):
    monitor = Monitor(Bigram(), TextTask(corpus, 16, 4, 0), band=0.05)
    t = np.arange(200)
    calm, wild = 2 + 0.04 * (-1.0) ** t, 2 + 0.06 * (-1.0) ** t
    assert all(f["outside"] == [] for f in follow_all(monitor, calm))
    found = follow_all(monitor, wild)
    assert found[-1]["outside"] == ["loss"]
    assert found[-1]["fluctuation"]["loss"] == pytest.approx(0.06, rel=1e-2)


def test_a_short_series_is_not_judged(corpus):
    monitor = Monitor(Bigram(), TextTask(corpus, 16, 4, 0), band=0.0)
    found = follow_all(monitor, [1.0, 5.0] * 25)
    assert [f["fluctuation"] for f in found[:49]] == [{}] * 49
    assert found[49]["outside"] == ["loss"]


def test_a_loss_that_is_no_number_leaves_the_series_alone(corpus):
    """NaN from a step and null from metrics.jsonl are the same, or a resumed run would differ."""
    fresh, read = (Monitor(Bigram(), TextTask(corpus, 16, 4, 0), band=0.05) for _ in range(2))
    losses = np.random.default_rng(0).normal(size=80).tolist()
    a = follow_all(fresh, [math.nan if i % 7 == 0 else x for i, x in enumerate(losses)])
    b = follow_all(read, [None if i % 7 == 0 else x for i, x in enumerate(losses)])
    assert a == b


def test_heads_that_look_everywhere_and_at_one_place():
    weights = np.zeros((2, 2, 3, 4))
    weights[:, 0] = 0.25  # everywhere
    weights[:, 1, :, 2] = 1.0  # at one key
    found = head_measures(SimpleNamespace(weights=weights, out=np.ones((2, 2, 3, 9))))
    assert found["entropy"] == pytest.approx([math.log(4), 0])
    assert found["weight_norm"] == pytest.approx([math.sqrt(12 / 16), math.sqrt(3)])
    assert found["output_norm"] == pytest.approx([3, 3])


# ---- the display ---------------------------------------------------------------------------------


def shown(records, steps=10, **console):
    out = io.StringIO()
    with TrainingDisplay(Console(file=out, **{"width": 200, **console}), steps) as display:
        for record in records:
            display.show(record)
    return out.getvalue()


def record_of(step, **changes):
    record = {
        "step": step,
        "loss": math.log(2),
        "drop_rates": [0.5, 0.45],
        "skipped": False,
        "outside": [],
        "fluctuation": {"probe": 0.07},
        "clock": {"tokens_per_second": 12345.6},
    }
    return record | changes


def test_without_a_terminal_there_is_a_line_at_each_look():
    look = {"look": {"validation": 2 * math.log(2)}}
    text = shown([record_of(1), record_of(2, **look), record_of(3), record_of(10)])
    assert text.splitlines() == [
        "step 2/10: bits/char 1.00, validation 2.00 · 12,346 tokens/s · drop .50 .45",
        "step 10/10: bits/char 1.00, validation 2.00 · 12,346 tokens/s · drop .50 .45",
    ]


def test_in_a_terminal_there_is_a_bar():
    text = shown([record_of(s) for s in range(1, 11)], force_terminal=True, width=80)
    assert "10/10" in text
    assert "bits/char 1.00, validation   –  · 12,346 tokens/s · drop .50 .45" in text


def test_a_warning_is_given_when_a_series_leaves_its_band_and_not_again():
    outside = {"outside": ["probe"]}
    steps = [record_of(1), record_of(2, **outside), record_of(3, **outside), record_of(4)]
    text = shown([*steps, record_of(5, **outside)])
    assert [line.partition(":")[0] for line in text.splitlines()] == ["step 2", "step 5"]
    assert "the probe's loss fluctuates by ±0.070 nats, outside the band" in text


def test_skipped_steps_are_said_when_they_begin():
    skipped = {2: 1, 3: 2, 5: 3}
    records = [
        record_of(s, skipped=s in skipped, skipped_so_far=skipped.get(s)) for s in range(1, 6)
    ]
    assert shown(records).splitlines() == [
        "step 2: the gradient is not finite, step skipped (1 so far)",
        "step 5: the gradient is not finite, step skipped (3 so far)",
    ]


def test_many_layers_are_shown_by_the_first_and_the_last():
    assert drop_rates([0.5, 0.05, 0.0, 0.1, 0.2, 0.3, 1.0]) == ".50 .05 .00 … .30 1.00"


@pytest.mark.parametrize(
    "model, said",
    [
        (5.0, "It beats no baseline yet"),
        (3.5, "It beats the unigram; the interpolated trigram is better."),
        (2.5, "It beats the bigram; the interpolated trigram is better."),
        (1.5, "It beats the interpolated trigram."),
    ],
)
def test_the_verdict_names_what_was_beaten(model, said):
    assert verdict(model, [4.0, 3.0, 2.0]).startswith(said)


# ---- figures -------------------------------------------------------------------------------------


def test_two_runs_are_drawn_with_their_baselines_and_band():
    runs = {
        name: [
            {"step": s, "loss": x, "look": {"probe": x, "validation": None if s == 2 else x + 1}}
            for s, x in enumerate(losses, start=1)
        ]
        for name, losses in {"stochastic": [3.0, 2.0, 1.5], "dense": [3.0, 2.5, 2.2]}.items()
    }
    ax = loss_figure(runs, baselines={"bigram": 2.3}, band=0.1).axes[0]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    assert drawn["stochastic, probe (±0.1 nats)"] == [[1, 3], [2, 2], [3, 1.5]]
    assert drawn["dense, validation"] == [[1, 4], [3, 3.2]]  # a loss that was no number is left out
    assert [t.get_text() for t in ax.texts] == ["bigram"]
    low, high = ax.get_ylim()
    assert low < 1.5 < 4 < high


def test_fluctuation_is_drawn_against_its_band():
    records = [{"step": s, "fluctuation": {"loss": 0.01 * s} if s > 2 else {}} for s in range(1, 6)]
    ax = fluctuation_figure({"run": records}, band=0.02).axes[0]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    assert drawn["training loss (other batches, other masks)"] == [[3, 0.03], [4, 0.04], [5, 0.05]]
    assert ax.get_ylim()[1] > 0.05


# ---- writing text --------------------------------------------------------------------------------


def test_characters_are_drawn_as_often_as_the_model_says():
    p = np.array([0.5, 0.1, 0.0, 0.15, 0.25])
    with np.errstate(divide="ignore"):
        logits = np.log(p)
    drawn = Counter(choose(logits, (i + 0.5) / 1000) for i in range(1000))
    assert [drawn[token] for token in range(5)] == pytest.approx(1000 * p, abs=1)


def test_temperature_sharpens():
    logits = np.log([0.6, 0.4])
    drawn = Counter(choose(logits, (i + 0.5) / 1000, temperature=0.5) for i in range(1000))
    assert drawn[0] == pytest.approx(1000 * 0.36 / (0.36 + 0.16), abs=1)


def test_only_the_likeliest_are_drawn():
    logits = np.array([0.0, 3.0, 1.0, 2.0])
    assert {choose(logits, u, top_k=2) for u in np.linspace(0, 1, 100, endpoint=False)} == {1, 3}
    assert {choose(logits, u, temperature=0) for u in (0.0, 0.999)} == {1}


@settings(GATE)
@given(logits=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=9), u=st.floats(0, 1 - 2**-24))
def test_a_drawn_character_is_possible(logits, u):
    logits = np.array(logits)
    token = choose(logits, u)
    assert np.exp(logits[token] - logits.max()) > 0


def test_the_same_seed_writes_the_same_text():
    def text(seed):
        return list(generate(Bigram(), np.array([0]), 40, context=8, seed=seed))

    assert text(1) == text(1) != text(2)
    assert len(text(1)) == 40


def test_the_model_sees_the_last_characters_and_nothing_is_dropped():
    model = Bigram()
    seen = []
    forward = model.forward
    model.forward = lambda tokens, *, draw: seen.append(tokens[0]) or forward(tokens, draw=draw)
    written = [0, 1, *generate(model, np.array([0, 1]), 6, context=4)]
    assert [s.tolist() for s in seen] == [written[max(0, n - 4) : n] for n in range(2, 8)]
    assert all(draw == Draw(0, training=False) for draw in model.draws)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"prompt": np.array([], dtype=int)}, "the prompt is empty"),
        ({"temperature": -1.0}, "temperature must be finite and at least 0, got -1.0"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"length": -1}, "length must be at least 0, got -1"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_written_is_explained(changes, complaint):
    options = {"prompt": np.array([0]), "length": 5, "context": 4} | changes
    with pytest.raises(ValueError, match=complaint):
        list(generate(Bigram(), options.pop("prompt"), options.pop("length"), **options))
