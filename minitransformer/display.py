"""What a run looks like while it trains: a bar in a terminal, a line now and then elsewhere."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from minitransformer.inspection import Report
from minitransformer.tasks.text import bits_per_character

Record = Mapping[str, Any]


def bits(loss: float | None) -> str:
    """A loss in nats as bits per character, for a narrow column."""
    return "  – " if loss is None else f"{bits_per_character(loss):.2f}"


def drop_rates(rates: list[float]) -> str:
    """Drop rates of all layers in a few characters: ".50 .45 .41", the middle left out if many."""
    shown = [f"{rate:.2f}".removeprefix("0") for rate in rates]
    return " ".join(shown if len(shown) <= 6 else [*shown[:3], "…", *shown[-2:]])


class _Bar(Progress):
    """A bar with a line of figures below it: both in one row need more than 80 columns."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.figures)


class TrainingDisplay:
    """Shows each record of a run. Use as a context around the steps."""

    def __init__(self, console: Console, steps: int, done: int = 0):
        self.console, self.steps = console, steps
        self._validation: float | None = None
        self._outside: set[str] = set()
        self._skipping = False
        self._progress = _Bar(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=steps, completed=done)

    def __enter__(self) -> "TrainingDisplay":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, record: Record) -> None:
        """One step's record: move the bar, and say what deserves a line of its own."""
        looked = record.get("look")
        if looked is not None:
            self._validation = looked["validation"]
        text = (
            f"bits/char {bits(record['loss'])}, validation {bits(self._validation)}"
            f" · {record['clock']['tokens_per_second']:,.0f} tokens/s"
            f" · drop {drop_rates(record['drop_rates'])}"
        )
        self._progress.figures = text
        self._progress.update(self._task, completed=record["step"])
        if self._progress.disable and (looked is not None or record["step"] == self.steps):
            self.console.print(f"step {record['step']}/{self.steps}: {text}", highlight=False)
        self._warn(record)

    def _warn(self, record: Record) -> None:
        """One warning when a series leaves its band, and one when steps begin to be skipped."""
        outside = set(record["outside"])
        for name in sorted(outside - self._outside):
            self.console.print(
                f"[yellow]step {record['step']}: {NAMES[name]} fluctuates by "
                f"±{record['fluctuation'][name]:.3f} nats, outside the band[/]",
                highlight=False,
            )
        self._outside = outside
        if record["skipped"] and not self._skipping:
            self.console.print(
                f"[yellow]step {record['step']}: the gradient is not finite, step skipped "
                f"({record['skipped_so_far']} so far)[/]",
                highlight=False,
            )
        self._skipping = record["skipped"]


NAMES = {"loss": "the training loss (each step sees another batch)", "probe": "the probe's loss"}


def comparison(model: float, baselines: list[float]) -> Table:
    """The model beside the n-gram baselines, in bits per character of the validation text."""
    table = Table("model", "bits/char", title="validation", title_justify="left")
    for name, value in zip(["unigram", "bigram", "trigram"], baselines, strict=True):
        table.add_row(f"{name}, interpolated", f"{value:.3f}")
    table.add_row("[bold]this Transformer[/]", f"[bold]{model:.3f}[/]")
    return table


def verdict(model: float, baselines: list[float]) -> str:
    """What the comparison means, in a sentence."""
    names = ["unigram", "bigram", "interpolated trigram"]
    beaten = [name for name, value in zip(names, baselines, strict=True) if model < value]
    ahead = [name for name in names if name not in beaten]
    if not beaten:
        return "It beats no baseline yet: more steps, or a lower drop rate, would help."
    return f"It beats the {beaten[-1]}" + (f"; the {ahead[-1]} is better." if ahead else ".")


# ---- heads ---------------------------------------------------------------------------------------


def head_table(report: Report) -> Table:
    """A line for each head, narrow enough for 80 columns."""
    windows, length = report.windows
    title = (
        f"{report.run} after step {report.step}: {report.bits:.3f} bits/char on {windows} windows "
        f"of {length} characters"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1))
    for name in ("head", "felt", "-bits", "entropy", "far", "adds", "like", "keys", "CKA"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for h in report.heads:
        words = [f.kind for f in report.findings if (h.layer, h.head) in f.heads]
        twin = ("–", "–", "–")
        if h.like is not None:
            twin = (f"{h.layer}.{h.like}", f"{h.overlap:.2f}", f"{h.cka:.2f}")
        table.add_row(
            f"{h.layer}.{h.head}",
            f"{h.importance:.2f}",
            f"{h.bits_without:+.3f}",
            f"{h.entropy:.2f}",
            f"{h.distance:.1f}",
            f"{h.output_norm:.2f}",
            *twin,
            ", ".join(dict.fromkeys(words)),
        )
    return table


def head_findings(report: Report) -> Iterator[str]:
    """What was found, why it is called so, and what to try."""
    yield (
        "head: layer.number; felt: importance, what the loss feels of it, 1 is the mean head;\n"
        "-bits: how much worse per character without it; entropy: 1 is flat; far: mean distance\n"
        "in characters; adds: norm of what it adds; like: the head of its layer that is most\n"
        "alike, and how far they read the same keys and give the same (CKA)."
    )
    for found in report.findings:
        names = ", ".join(f"{layer}.{head}" for layer, head in found.heads)
        yield f"{found.kind}: {names}. Why: {found.because}. To try: {found.advice}."
    dead, alike = report.thresholds
    if not {"dead", "alike"} & {f.kind for f in report.findings}:
        yield (
            f"No head is dead (below {dead:.0%} of the mean importance), no two are alike (above "
            f"{alike:.0%} in keys and outputs)."
        )
