"""The main job: prove every gradient, train a dense and a stochastic model on the same text, and
write a page that shows what happened.

Both models start from the same weights and see the same batches in the same order; only the random
mask differs. Whatever the page says was computed in this run.
"""

import base64
import html
import io
import math
import time
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from minitransformer.arrays import Array
from minitransformer.attention.masks import causal
from minitransformer.checks.proof import ProofRow, prove
from minitransformer.checks.suite import suites
from minitransformer.display import TrainingDisplay
from minitransformer.philox import Draw
from minitransformer.plots.attention import attention_strip, head_measure_figure
from minitransformer.plots.masks import random_mask_figure
from minitransformer.plots.schedules import schedule_figure
from minitransformer.plots.training import fluctuation_figure, loss_figure
from minitransformer.runs import BASELINES, build_model
from minitransformer.stochastic.samplers import RandomMask, resolve
from minitransformer.tasks.generate import generate
from minitransformer.tasks.text import (
    Corpus,
    TextTask,
    bits_per_character,
    ngram_bits,
)
from minitransformer.training.checkpoints import write_atomically
from minitransformer.training.config import Config, from_flat, to_flat
from minitransformer.training.loop import Record, Trainer, watched
from minitransformer.training.monitor import Monitor

PROMPT = "\n"
SAMPLE_LENGTH = 300
SHOWN = 48  # positions in the pictures of masks and attention


class Arm(NamedTuple):
    """One of the two trainings."""

    records: list[Record]
    bits: float  # per character of the whole validation part
    seconds: float
    snapshots: dict[str, Array]  # weights of one head on one text, (N, N), by step
    sample: str


class Result(NamedTuple):
    """Everything that the page shows."""

    config: Config
    corpus: Corpus
    proof: list[ProofRow]
    arms: dict[str, Arm]
    baselines: dict[str, float]

    @property
    def verdict(self) -> str:
        """Which of the two did better, whatever one had hoped."""
        dense, stochastic = (self.arms[name].bits for name in ("dense", "stochastic"))
        how = "better" if stochastic < dense else "worse"
        return (
            f"After {self.config.training.steps} steps the stochastic model is "
            f"{abs(stochastic - dense):.3f} bits per character {how} than the dense one "
            f"({stochastic:.3f} against {dense:.3f}). One seed, one text, one small model: an "
            "example, not a verdict on the method."
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "gradients": [row._asdict() for row in self.proof],
            "bits_per_character": {
                **{name: arm.bits for name, arm in self.arms.items()},
                **self.baselines,
            },
            "seconds": {name: arm.seconds for name, arm in self.arms.items()},
            "steps": self.config.training.steps,
            "text": {"source": self.corpus.source, "sha256": self.corpus.sha256},
        }


def run_demo(folder: Path, config: Config, corpus: Corpus, console: Console) -> Result:
    """Do all of it and write `folder`; a page that was there before is replaced.

    Raises
    ------
    RunError
        If the disk refuses.
    """
    console.rule("1  every gradient, against a numerical one")
    proof = prove_gradients(console)
    console.print(gradient_table(proof))

    console.rule("2  the same model, dense and stochastic")
    dense = from_flat(to_flat(config) | {"stochastic.kind": "none"})
    arms = {}
    for name, settings in {"dense": dense, "stochastic": config}.items():
        console.print(f"{name}: {config.training.steps} steps on {corpus.source}", markup=False)
        arms[name] = train_arm(settings, corpus, console)
    bits = dict(zip(BASELINES, ngram_bits(corpus), strict=True))
    result = Result(config, corpus, proof, arms, bits)
    console.print(bits_table(result))
    console.print(result.verdict, markup=False)

    console.rule("3  the page")
    write_page(folder, result)
    return result


# ---- 1: the proof --------------------------------------------------------------------------------


def prove_gradients(console: Console) -> list[ProofRow]:
    """A row for each mechanism that has a backward pass."""
    rows = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        found = list(suites())
        task = progress.add_task("proving", total=len(found))
        for suite in found:
            progress.update(task, description=suite.mechanism)
            rows.append(prove(suite))
            progress.advance(task)
    return [row for row in rows if row.statements]


def gradient_table(rows: list[ProofRow]) -> Table:
    """The rows as a table: the worst relative error of each mechanism, and what is allowed."""
    table = Table("mechanism", "gradients", "worst error", "allowed", "")
    for row in rows:
        right = row.failure == "" and row.worst <= row.limit
        table.add_row(
            row.mechanism,
            str(row.compared),
            f"{row.worst:.1e}",
            f"{row.limit:.0e}",
            "proved" if right else f"[red]WRONG[/] {row.failure}",
        )
    return table


# ---- 2: two trainings ----------------------------------------------------------------------------


def train_arm(config: Config, corpus: Corpus, console: Console) -> Arm:
    """Train one model and look at one of its heads on the way."""
    training = config.training
    task = TextTask(corpus, config.model.context, training.batch, training.seed)
    model = build_model(config, len(corpus.vocabulary))
    trainer = Trainer(model, task, training)
    monitor = Monitor(model, task, training.band)
    text = task.quick_validation()[0][:1, :SHOWN]
    wanted = sorted({1, *(round(training.steps * share) for share in (0.05, 0.2, 0.5, 1.0))})

    start, records, snapshots = time.perf_counter(), [], {}
    with TrainingDisplay(console, training.steps) as display:
        for record in watched(trainer, monitor):
            records.append(record)
            display.show(record)
            if record["step"] in wanted:
                _, cache = model.forward(text, draw=Draw(0, training=False))
                snapshots[f"step {record['step']}"] = cache.attentions[-1].weights[0, 0]
    tokens = generate(
        model,
        corpus.vocabulary.encode(PROMPT if PROMPT in corpus.vocabulary.characters else "e"),
        SAMPLE_LENGTH,
        context=config.model.context,
        temperature=0.8,
        seed=training.seed,
    )
    sample = corpus.vocabulary.decode(np.array(list(tokens)))
    bits = bits_per_character(records[-1]["validation"])
    return Arm(records, bits, time.perf_counter() - start, snapshots, sample)


def bits_table(result: Result) -> Table:
    """Both models among the baselines, best first."""
    table = Table("model", "bits per character", "seconds", title="on text never trained on")
    rows = [(f"{name} Transformer", arm.bits, f"{arm.seconds:.0f}") for name, arm in
            result.arms.items()]  # fmt: skip
    rows += [(f"{name}, interpolated", bits, "") for name, bits in result.baselines.items()]
    for name, bits, seconds in sorted(rows, key=lambda row: row[1]):
        table.add_row(name, f"{bits:.3f}", seconds)
    return table


# ---- 3: the page ---------------------------------------------------------------------------------


def figures(result: Result) -> dict[str, tuple[Figure, str]]:
    """Every picture of the page with the sentence under it, by file name."""
    config, arms = result.config, result.arms
    records = {name: arms[name].records for name in ("stochastic", "dense")}
    nats = {name: bits * math.log(2) for name, bits in result.baselines.items()}
    rates = np.array([r["drop_rates"] for r in records["stochastic"]]).T
    entropy = np.array(records["stochastic"][-1]["look"]["heads"]["entropy"], dtype=float)
    band = config.training.band
    return {
        "masks": (
            mask_pictures(config),
            "A fresh mask is drawn for every layer, head and step. Single pairs (top) leave no "
            "tile empty, so they save no work; tiles (bottom) can be skipped whole. The diagonal "
            "is protected: a character always sees itself.",
        ),
        "schedule": (
            schedule_figure(rates),
            "The rate rises over the warm-up and decreases with depth.",
        ),
        "loss": (
            loss_figure(records, baselines=nats, band=band),
            "Thin: the training loss of each step. Thick: the loss on one fixed batch with full "
            "attention. The stochastic model's training loss is higher than its probe's because "
            "it is measured under masks.",
        ),
        "fluctuation": (
            fluctuation_figure(records, band=band),
            "The training loss fluctuates because batches differ; the fixed probe shows how much "
            "of that is the model itself.",
        ),
        "attention": (
            attention_strip(
                arms["stochastic"].snapshots, title="One head of the last layer, while it learns"
            ),
            "The same text at every step, full attention.",
        ),
        "entropy": (
            head_measure_figure(
                entropy, measure="nats", title="Attention entropy of each head at the end"
            ),
            "0: the head looks at one character. High: it averages over many.",
        ),
    }


def mask_pictures(config: Config) -> Figure:
    """What the element and the block law leave of each layer, at the full rate."""
    layers = config.model.layers
    rates = build_model(config, 2).drop_rates(config.training.steps)
    keep = causal(SHOWN, SHOWN, align="lower_right").dense()

    def drawn(mask: RandomMask) -> list[Array]:
        return [
            resolve(
                mask, Draw(0), layer, (1, 1, SHOWN, SHOWN), keep=keep, drop_rate=rates[layer]
            ).keep[0, 0]
            for layer in range(layers)
        ]

    titles = [f"layer {layer}: drop {np.mean(rates[layer]):.2f}" for layer in range(layers)]
    rows = {
        "element": drawn(RandomMask("element")),
        "block of 8": drawn(RandomMask("block", tile=8)),
    }
    return random_mask_figure(rows, keep, titles)


def _png(drawn: Figure) -> bytes:
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=140)
    return buffer.getvalue()


def _rows(cells: Iterable[tuple[str, ...]]) -> str:
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in cells)
    return "\n".join(f"<tr>{line}</tr>" for line in lines)


def write_page(folder: Path, result: Result) -> Path:
    """Write index.html, which needs no other file, and the pictures as PNGs beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, (drawn, caption) in figures(result).items():
        png = _png(drawn)
        write_atomically(folder / f"{name}.png", png)
        data = base64.b64encode(png).decode()
        alt = html.escape(caption)
        pictures.append(
            f'<figure id="{name}"><img src="data:image/png;base64,{data}" alt="{alt}">'
            f"<figcaption>{alt}</figcaption></figure>"
        )
    models = [(f"{name} Transformer", f"{arm.bits:.3f}") for name, arm in result.arms.items()]
    models += [(f"{name}, interpolated", f"{bits:.3f}") for name, bits in result.baselines.items()]
    proof = [
        (r.mechanism, str(r.compared), f"{r.worst:.1e}", f"{r.limit:.0e}") for r in result.proof
    ]
    page = PAGE.substitute(
        verdict=html.escape(result.verdict),
        models=_rows(sorted(models, key=lambda row: row[1])),
        proof=_rows(proof),
        pictures="\n".join(pictures),
        dense=html.escape(result.arms["dense"].sample),
        stochastic=html.escape(result.arms["stochastic"].sample),
        source=html.escape(result.corpus.source),
        digest=result.corpus.sha256[:16],
        layers=result.config.model.layers,
        width=result.config.model.width,
        rate=result.config.stochastic.rate,
    )
    write_atomically(folder / "index.html", page.encode())
    return folder / "index.html"


PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>minitransformer: the demo</title>
<style>
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2933; background: #fff; max-width: 54rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2rem 1.4rem .2rem 0;
       border-bottom: 1px solid #e4e7eb; font-variant-numeric: tabular-nums; }
figure { margin: 1.6rem 0; } img { max-width: 100%; } figcaption { color: #52606d; }
pre { background: #f5f7fa; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.verdict { border-left: 4px solid #e8871e; padding-left: 1rem; }
</style>
</head>
<body>
<h1>A random Transformer learns from real text</h1>
<p>Two models with $layers layers of width $width, the same first weights, the same batches. One
attends to everything; the other drops attention at random, $rate in the first layer and less
above. Text: $source (SHA-256 $digest…).</p>
<p class="verdict">$verdict</p>
<h2>Bits per character, on text never trained on</h2>
<table><tr><th>model</th><th>bits</th></tr>
$models
</table>
<h2>What happened</h2>
$pictures
<h2>What they write</h2>
<h3>dense</h3><pre>$dense</pre>
<h3>stochastic</h3><pre>$stochastic</pre>
<h2>Every gradient, against a numerical one</h2>
<p>Random cotangents, every index, relative to the norm of the array.</p>
<table><tr><th>mechanism</th><th>compared</th><th>worst error</th><th>allowed</th></tr>
$proof
</table>
<h2>Next</h2>
<p><code>minitransformer train</code> trains the larger default model; <code>minitransformer sample
RUN</code> lets it write; <code>minitransformer train --help</code> explains the rest.</p>
</body>
</html>
""")
