"""What the heads of a trained model do: `minitransformer inspect`.

Every head is measured on the same windows of the validation text, with full attention: how spread
it is and how far it looks (`heads.health`), over the later half of the rows, which have enough to
choose from; what the loss feels of its gate, one example at a time, and what is lost without it
(`heads.importance`); and which head of its layer it is most like. The gate of a head is not built
in: W_O and its gradient say the same (Eq. 14.20), and a head is silenced through W_O (Eq. 14.19).

Names are given by thresholds that the report states. A head is *dead* if the loss feels less of it
than a share of what it feels of the mean head; two are *alike* if the keys they read and what they
give overlap by more than a share; a head is *flat* or *fixed* if its entropy lies within a
hundredth part of the most or of nothing. None of this proves anything: it says where to look.
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minitransformer.arrays import Array
from minitransformer.attention.masks import causal
from minitransformer.heads.diversity import output_similarity_forward
from minitransformer.heads.health import (
    head_output_norm,
    mean_distance,
    mean_over_rows,
    output_cka,
    pairwise_overlap,
    relative_entropy,
)
from minitransformer.heads.importance import head_ablation
from minitransformer.heads.pruning import gate_output_backward, gate_output_forward
from minitransformer.models.language_model import LanguageModel
from minitransformer.nn.losses import cross_entropy_backward, cross_entropy_forward
from minitransformer.philox import Draw
from minitransformer.runs import Trained, load_trained
from minitransformer.tasks.text import TextTask, bits_per_character, load_corpus
from minitransformer.training.checkpoints import RunError, write_atomically

EVALUATION = Draw(0, training=False)
EDGE = 0.01  # of the way from the least to the greatest entropy
Batch = tuple[Array, Array]


class Thresholds(NamedTuple):
    """What a head is called, and from where on."""

    dead: float = 0.1  # share of the mean head's importance
    alike: float = 0.9  # overlap of the keys, and CKA of the outputs


USUAL = Thresholds()


class Head(NamedTuple):
    """One head's measures. Overlap and CKA are with the head of its layer that it is most like."""

    layer: int
    head: int
    entropy: float  # of 1: flat
    distance: float  # characters
    output_norm: float  # of what it adds to the residual stream
    importance: float  # 1: as much as the mean head
    bits_without: float  # per character, that the model is worse without it
    like: int | None
    overlap: float | None
    cka: float | None


class Finding(NamedTuple):
    """A kind of head that was found, which heads they are, why they are called so, what to try."""

    kind: str
    heads: list[tuple[int, int]]  # layer and number
    because: str
    advice: str


class Report(NamedTuple):
    run: str
    step: int
    bits: float  # per character, on these windows
    windows: tuple[int, int]  # how many, how long
    thresholds: Thresholds
    heads: list[Head]
    overlap: list[float | None]  # of two heads of a layer, the mean, by depth
    similarity: list[float]  # of their outputs (Eq. 14.13), from 1/H: at right angles
    findings: list[Finding]

    def table(self, measure: str) -> Array:
        """A measure of every head, (layers, heads)."""
        layers = self.heads[-1].layer + 1
        return np.array([getattr(h, measure) for h in self.heads], float).reshape(layers, -1)

    def to_json(self) -> dict[str, Any]:
        """The report as plain dictionaries and lists."""
        plain = self._asdict()
        plain["thresholds"] = self.thresholds._asdict()
        plain["heads"] = [h._asdict() for h in self.heads]
        plain["findings"] = [f._asdict() for f in self.findings]
        return plain


def inspect_run(path: str | Path, thresholds: Thresholds = USUAL) -> Report:
    """Measure the heads of a run's last checkpoint on its validation text.

    Raises
    ------
    RunError
        If there is no run, no checkpoint, or its text is not the one it was trained on.
    """
    trained = load_trained(path)
    config = trained.config
    try:
        corpus = load_corpus(
            config.data.text, validation=config.data.validation, context=config.model.context
        )
    except ValueError as error:
        raise RunError(f"'{path}' cannot be measured on its text: {error}") from error
    if corpus.vocabulary != trained.vocabulary:
        raise RunError(
            f"'{path}' was trained on another text: {corpus.source} has {len(corpus.vocabulary)} "
            f"characters, the model knows {len(trained.vocabulary)}, or others"
        )
    task = TextTask(corpus, config.model.context, config.training.batch, config.training.seed)
    return inspect_model(trained, task.quick_validation(), thresholds, run=str(path))


def inspect_model(
    trained: Trained, batch: Batch, thresholds: Thresholds = USUAL, *, run: str = ""
) -> Report:
    """Measure the heads of a model on a batch of inputs and targets (B, N)."""
    model = trained.model
    importance = head_importances(model, batch)
    mean = importance.mean()
    importance = importance / (mean if mean > 0 else 1)
    loss, cache = _loss(model, batch)
    heads: list[Head] = []
    overlaps, similarities = [], []
    for layer, attention in enumerate(cache.attentions):
        measures = _layer(model, layer, attention, batch)
        overlaps.append(measures.pop("layer_overlap"))
        similarities.append(measures.pop("layer_similarity"))
        for h in range(len(importance[layer])):
            of_head = {name: values[h] for name, values in measures.items()}
            heads.append(Head(layer, h, importance=float(importance[layer, h]), **of_head))
    length = batch[0].shape
    report = Report(
        run,
        trained.step,
        bits_per_character(loss),
        (length[0], length[1]),
        thresholds,
        heads,
        overlaps,
        similarities,
        [],
    )
    return report._replace(findings=list(_findings(report)))


# ---- measuring -----------------------------------------------------------------------------------


def _loss(model: LanguageModel, batch: Batch) -> tuple[float, Any]:
    inputs, targets = batch
    logits, cache = model.forward(inputs, draw=EVALUATION)
    loss, _ = cross_entropy_forward(logits, targets)
    return float(loss), cache


def head_importances(model: LanguageModel, batch: Batch) -> Array:
    """I of every head, (layers, heads): the mean over the examples of |dL/dξ|, L the loss summed
    over an example's characters  (Eq. 14.10, from the gradient of W_O by Eq. 14.20)."""
    total: Any = 0.0
    inputs, targets = batch
    for b in range(len(inputs)):
        one = slice(b, b + 1)
        model.zero_grad()
        logits, cache = model.forward(inputs[one], draw=EVALUATION)
        _, loss_cache = cross_entropy_forward(logits, targets[one])
        model.backward(cross_entropy_backward(float(targets[one].size), loss_cache), cache)
        felt = []
        for block in model.blocks:
            weight = block.attention.output.weight
            _, gate = gate_output_forward(weight.value, np.ones(block.attention.heads))
            felt.append(gate_output_backward(weight.grad, gate).gates)
        total = total + np.abs(felt)
    model.zero_grad()
    return total / max(len(inputs), 1)


@contextlib.contextmanager
def gated(model: LanguageModel, layer: int, gates: Array) -> Iterator[None]:
    """The model with gates on the heads of a layer, as long as the context lasts."""
    weight = model.blocks[layer].attention.output.weight
    whole = weight.value
    weight.value, _ = gate_output_forward(whole, gates.astype(whole.dtype))
    try:
        yield
    finally:
        weight.value = whole


def _layer(model: LanguageModel, layer: int, attention: Any, batch: Batch) -> dict[str, Any]:
    """The measures of a layer's heads: lists of H, and two of the layer as a whole."""
    projection = model.blocks[layer].attention.output.weight.value
    weights, out = attention.weights, attention.out
    heads, length = weights.shape[1], weights.shape[2]
    later = np.arange(length) >= length // 2
    keep = causal(length, length, align="lower_right").dense()

    def loss(gates: Array) -> float:
        with gated(model, layer, gates):
            return _loss(model, batch)[0]

    def mean(rows: Array) -> list[float]:
        return mean_over_rows(rows, later).mean(axis=0).tolist()

    overlap = pairwise_overlap(weights, later).mean(axis=0)
    cka = output_cka(out[:, :, later])
    like, alike_overlap, alike_cka = [], [], []
    for h in range(heads):
        others = [a for a in range(heads) if a != h]
        most = max(others, key=lambda a: min(overlap[h, a], cka[h, a]), default=None)
        like.append(most)
        alike_overlap.append(None if most is None else float(overlap[h, most]))
        alike_cka.append(None if most is None else float(cka[h, most]))
    apart = overlap[~np.eye(heads, dtype=np.bool_)]
    similarity, _ = output_similarity_forward(out[:, :, later])
    return {
        "entropy": mean(relative_entropy(weights, keep)),
        "distance": mean(mean_distance(weights, offset=0)),
        "output_norm": head_output_norm(out, rows=later, projection=projection)
        .mean(axis=0)
        .tolist(),
        "bits_without": [bits_per_character(x) for x in head_ablation(loss, heads).tolist()],
        "like": like,
        "overlap": alike_overlap,
        "cka": alike_cka,
        "layer_overlap": float(apart.mean()) if apart.size else None,
        "layer_similarity": float(similarity.mean()),
    }


# ---- naming --------------------------------------------------------------------------------------


def _findings(report: Report) -> Iterator[Finding]:
    dead_below, alike_from = report.thresholds
    count = len({h.head for h in report.heads})
    dead = [(h.layer, h.head) for h in report.heads if h.importance < dead_below]
    if dead:
        yield Finding(
            "dead",
            dead,
            f"the loss feels less than {dead_below:.0%} of what it feels of the mean head",
            "if the run is long enough, fewer heads (model.attention.heads) or take these out "
            "(heads/pruning.py); if not, more steps, or a lower stochastic.rate",
        )
    pairs = sorted(
        {
            (h.layer, *sorted((h.head, h.like)))
            for h in report.heads
            if h.like is not None and min(h.overlap or 0, h.cka or 0) > alike_from
        }
    )
    for layer, a, b in pairs:
        yield Finding(
            "alike",
            [(layer, a), (layer, b)],
            f"the keys they read and what they give overlap by more than {alike_from:.0%}",
            f"fewer heads, key/value heads that are shared (model.attention.groups = "
            f"{1 if count % 2 else count // 2}), or a term that keeps them apart "
            "(heads/diversity.py)",
        )
    flat = [(h.layer, h.head) for h in report.heads if h.entropy > 1 - EDGE]
    if flat:
        yield Finding(
            "flat",
            flat,
            f"their entropy is more than {1 - EDGE:.0%} of the most: they read all keys evenly",
            "usual in the first steps; later, a higher training.learning_rate or more steps",
        )
    fixed = [(h.layer, h.head) for h in report.heads if h.entropy < EDGE]
    if fixed:
        yield Finding(
            "fixed",
            fixed,
            f"their entropy is less than {EDGE:.0%} of the most: each row reads one key",
            "a head that always reads its neighbour may be of use; if the loss is unsteady as "
            "well, model.attention.softcap = 30 or a lower training.learning_rate",
        )
    harmful = [(h.layer, h.head) for h in report.heads if h.bits_without < 0]
    if harmful:
        yield Finding(
            "harmful",
            harmful,
            "on these windows the model is better without them, one at a time",
            "take them out (heads/pruning.py) and measure on all of the validation text",
        )


# ---- drawing -------------------------------------------------------------------------------------


def draw_heads(report: Report, path: Path) -> None:
    """The report as a picture, a PNG file.

    Raises
    ------
    RunError
        If it cannot be written.
    """
    from minitransformer.plots.heads import heads_figure

    words: dict[tuple[int, int], str] = {}
    for found in report.findings:
        for at in found.heads:
            words.setdefault(at, found.kind)
    fig = heads_figure(
        {
            "importance, 1: the mean head": report.table("importance"),
            "bits/char lost without it": report.table("bits_without"),
            "entropy, 1: flat": report.table("entropy"),
            "mean distance, characters": report.table("distance"),
        },
        {"keys read in common": report.overlap, "outputs, mean cosine": report.similarity},
        named=words,
        title=f"Heads of {report.run} after step {report.step}, by depth",
    )
    png = io.BytesIO()
    fig.savefig(png, format="png", dpi=150)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot create '{path.parent}': {error.strerror or error}") from error
    write_atomically(path, png.getvalue())
