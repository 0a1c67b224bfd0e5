"""A run on text, from settings to figures: what `train`, `sample` and the demo share."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minitransformer.models.language_model import LanguageModel
from minitransformer.tasks.text import Corpus, TextTask, Vocabulary
from minitransformer.training.checkpoints import (
    RunError,
    RunFolder,
    environment,
    read_checkpoint,
    write_atomically,
)
from minitransformer.training.config import Config, drop_schedule, random_mask, rope, to_flat
from minitransformer.training.loop import Run, Trainer

BASELINES = ("unigram", "bigram", "trigram")
# what `environment.json` says that can change the last bit of a sum
BITS = ("numpy", "numba", "blas", "threads", "processor")


def build_model(config: Config, vocabulary: int) -> LanguageModel:
    """The model that these settings describe."""
    model = config.model
    return LanguageModel(
        vocabulary,
        layers=model.layers,
        width=model.width,
        heads=model.attention.heads,
        groups=model.attention.groups or None,
        context=model.context,
        expansion=model.expansion,
        positions=model.positions,
        rope=rope(model),
        buckets=model.t5_buckets,
        max_distance=model.t5_max_distance,
        norm=model.norm,
        placement=model.placement,
        activation=model.activation,
        tied=model.tied,
        softcap=model.attention.softcap or None,
        random_mask=random_mask(config.stochastic),
        schedule=drop_schedule(config.stochastic),
        steps=config.training.steps,
        seed=config.training.seed,
        dtype=model.dtype,
        fast=model.fast,
    )


def build_run(config: Config, corpus: Corpus, folder: RunFolder) -> Run:
    """A run of these settings on this text, at its start."""
    training = config.training
    task = TextTask(corpus, config.model.context, training.batch, training.seed)
    trainer = Trainer(build_model(config, len(corpus.vocabulary)), task, training)
    about = {
        "settings": to_flat(config),
        "text_sha256": corpus.sha256,
        "vocabulary": corpus.vocabulary.characters,
    }
    return Run(trainer, folder, about)


def changed_since_start(folder: RunFolder) -> list[str]:
    """What is different now from when the run was started, so that the bits of the rest may be."""
    then, now = folder.environment(), environment()
    return [
        f"{name} was {then.get(name)}, is {now[name]}"
        for name in BITS
        if then.get(name) != now[name]
    ]


class Trained(NamedTuple):
    """A model read back from a run folder."""

    model: LanguageModel
    vocabulary: Vocabulary
    config: Config
    step: int


def load_trained(path: str | Path) -> Trained:
    """The model of the last checkpoint of a run, which may still be going on.

    Raises
    ------
    RunError
        If there is no run, no checkpoint yet, or it cannot be read.
    """
    folder = RunFolder(path)
    folder.require_started()
    config, paths = folder.config(), folder.checkpoints()
    if not paths:
        raise RunError(
            f"'{folder.path}' has no checkpoint yet: the first one is written after "
            f"training.save_every = {config.training.save_every} steps"
        )
    checkpoint = read_checkpoint(paths[-1])
    if not isinstance(checkpoint.about.get("vocabulary"), str):
        raise RunError(f"checkpoint '{paths[-1]}' lacks the field 'vocabulary'")
    vocabulary = Vocabulary(checkpoint.about["vocabulary"])
    model = build_model(config, len(vocabulary))
    for name, parameter in model.parameters().items():
        found = checkpoint.tensors.get(f"model.{name}")
        if found is None or found.shape != parameter.value.shape:
            there = "absent" if found is None else list(found.shape)
            raise RunError(
                f"checkpoint '{paths[-1]}' does not match: the array 'model.{name}' is {there} in "
                f"it, {list(parameter.value.shape)} here"
            )
        parameter.value[...] = found
    return Trained(model, vocabulary, config, checkpoint.step)


def write_figures(
    folder: Path, records: Sequence[Mapping[str, Any]], baselines_bits: Sequence[float], band: float
) -> list[Path]:
    """Draw what a run's records show, as PNG files in `folder`."""
    from minitransformer.plots.attention import head_measure_figure
    from minitransformer.plots.schedules import schedule_figure
    from minitransformer.plots.training import fluctuation_figure, loss_figure

    nats = {name: b * math.log(2) for name, b in zip(BASELINES, baselines_bits, strict=True)}
    figures = {
        "loss": loss_figure({"run": records}, baselines=nats, band=band),
        "fluctuation": fluctuation_figure({"run": records}, band=band),
        "schedule": schedule_figure(np.array([r["drop_rates"] for r in records]).T),
    }
    looks = [record for record in records if "look" in record]
    if looks:
        entropy = np.array(looks[-1]["look"]["heads"]["entropy"], dtype=float)
        title = f"Attention entropy of each head after step {looks[-1]['step']}"
        figures["entropy"] = head_measure_figure(entropy, measure="nats", title=title)
    folder.mkdir(exist_ok=True)
    written = []
    for name, drawn in figures.items():
        png = io.BytesIO()
        drawn.savefig(png, format="png", dpi=150)
        written.append(folder / f"{name}.png")
        write_atomically(written[-1], png.getvalue())
    return written
