"""The command line: reads words, calls the library, prints what it says.

What a person gets wrong is answered with one line on stderr. Exit codes: 0 done, 1 it failed,
2 the command or a setting makes no sense, 130 stopped by Ctrl-C. The result goes to stdout,
everything on the way to stderr. Whatever is slow to import is imported where it is used.
"""

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from minitransformer import __version__
from minitransformer.course import commands as course

if TYPE_CHECKING:
    from minitransformer.tasks.text import Corpus
    from minitransformer.training.checkpoints import RunFolder
    from minitransformer.training.config import Config
    from minitransformer.training.loop import Run

FAILED, BAD_USAGE, STOPPED = 1, 2, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


app.add_typer(course.app, name="learn")


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        # a terminal or file that cannot hold a character of the text gets a ? in its place
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except MemoryError as error:
        _give_up(f"not enough memory: {error or 'smaller settings need less'}")
    except OSError as error:  # what is written elsewhere has its own sentence: this was the output
        _give_up(f"cannot write the output: {error.strerror or error}")


def _give_up(message: str) -> NoReturn:
    with contextlib.suppress(OSError):  # stderr may be on the same full disk
        typer.echo(f"minitransformer: {message}", err=True)
    for stream in (sys.stdout, sys.stderr):  # or Python fails once more, flushing at its end
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(FAILED)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print it.")
    ] = False,
) -> None:
    """Train a small stochastic Transformer on text, and look at what it does.

    \b
    minitransformer demo                   prove, train, and write a page: start here
    minitransformer train                  train with the defaults, into runs/1
    minitransformer sample runs/1          let the trained model write
    minitransformer inspect runs/1         what do its heads do?
    minitransformer doctor                 is the installation sound?
    minitransformer verify                 is your own attention right?
    minitransformer vectors                right answers in files, for any language
    minitransformer learn                  solve the chapters' exercises

    Every command explains itself: minitransformer train --help
    """


# ---- errors --------------------------------------------------------------------------------------


def _fail(message: object, code: int) -> NoReturn:
    typer.echo(f"minitransformer: {message}", err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """While settings and texts are read, a ValueError is the user's."""
    try:
        yield
    except ValueError as error:
        _fail(error, BAD_USAGE)


@contextlib.contextmanager
def _running() -> Iterator[None]:
    """What a run folder or the disk refuses is a failure, and no traceback."""
    from minitransformer.training.checkpoints import RunError

    try:
        yield
    except RunError as error:
        _fail(error, FAILED)


# ---- options that several commands take ----------------------------------------------------------

Preset = Annotated[str, typer.Option(help="Settings to begin with: default or demo.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A TOML file that changes them.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one more, e.g. training.steps=500. Repeatable."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _config(
    preset: str, file: Path | None, assignments: list[str] | None, text: Path | None = None
) -> "Config":
    from minitransformer.training.config import from_flat, load_config, to_flat

    with _reading():
        config = load_config(preset, file, assignments or ())
        if text is not None:
            config = from_flat(to_flat(config) | {"data.text": str(text)})
        if config.data.text:  # a run may be resumed from another folder
            path = str(Path(config.data.text).resolve())
            config = from_flat(to_flat(config) | {"data.text": path})
        return config


# ---- train ---------------------------------------------------------------------------------------


@app.command()
def train(
    preset: Preset = "default",
    config: ConfigFile = None,
    assignments: Assignments = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A UTF-8 text. Without: Python's own documentation."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run folder. Without: the next free runs/N."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run, bit for bit.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print all settings as TOML, each explained, and stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a character Transformer with random attention masks.

    Settings are a preset, changed by a TOML file, changed by --set. The run folder keeps them, the
    metrics of every step, the last checkpoints and figures. A run that was stopped, by Ctrl-C or by
    a power cut, goes on with --resume and ends with the same bits as one that was not.

    \b
    minitransformer train --preset demo                     two layers, about a minute
    minitransformer train --text book.txt --run runs/book
    minitransformer train --set stochastic.rate=0.3 --set stochastic.kind=block
    minitransformer train --show > mine.toml                all settings; edit, then --config
    minitransformer train --run runs/book --resume
    """
    if resume:
        if run is None:
            _fail("--resume needs --run DIR: which run should go on?", BAD_USAGE)
        if config or assignments or text or preset != "default":
            _fail(
                f"--resume takes no other settings: a run keeps those in '{run}/config.toml'",
                BAD_USAGE,
            )
        with _running(), _resumed(run) as (folder, settings, corpus):
            _train(folder, settings, corpus, as_json)
        return
    settings = _config(preset, config, assignments, text)
    if show:
        from minitransformer.training.config import to_toml

        typer.echo(to_toml(settings), nl=False)
        return
    with _running(), _started(run or _next_free(Path("runs")), settings) as (folder, corpus):
        _train(folder, settings, corpus, as_json)


def _next_free(folder: Path) -> Path:
    n = 1
    while (folder / str(n)).exists():
        n += 1
    return folder / str(n)


def _corpus(config: "Config") -> "Corpus":
    from minitransformer.tasks.text import load_corpus

    data = config.data
    with _reading():
        return load_corpus(data.text, validation=data.validation, context=config.model.context)


@contextlib.contextmanager
def _started(path: Path, config: "Config") -> Iterator[tuple["RunFolder", "Corpus"]]:
    from minitransformer.training.checkpoints import RunFolder

    corpus = _corpus(config)  # first: a text that cannot serve leaves no folder behind
    with RunFolder.create(path, config) as folder:
        yield folder, corpus


@contextlib.contextmanager
def _resumed(path: Path) -> Iterator[tuple["RunFolder", "Config", "Corpus"]]:
    from minitransformer.training.checkpoints import RunFolder

    with RunFolder.open(path) as folder:
        with _reading():
            config = folder.config()
        yield folder, config, _corpus(config)


def _train(folder: "RunFolder", config: "Config", corpus: "Corpus", as_json: bool) -> None:
    from rich.console import Console

    from minitransformer.display import TrainingDisplay
    from minitransformer.runs import build_run, changed_since_start
    from minitransformer.training.config import advice

    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    run = build_run(config, corpus, folder)
    run.restore()
    for sentence in advice(config):
        aside.print(f"note: {sentence}", markup=False)
    if run.trainer.step:
        aside.print(f"going on after step {run.trainer.step}")
        for change in changed_since_start(folder):
            aside.print(f"note: not bit for bit from here: {change}", markup=False)
    aside.print(
        f"{len(corpus.train):,} characters of {corpus.source} into {folder.path}", markup=False
    )
    with (
        _polite_stop() as stop,
        TrainingDisplay(aside, config.training.steps, run.trainer.step) as display,
    ):
        for record in run:
            display.show(record)
            if stop.asked:
                break
    if not run.is_done:
        run.save()
        aside.print(
            f"stopped and saved after step {run.trainer.step}; to go on:\n"
            f"  minitransformer train --resume --run {folder.path}",
            markup=False,
        )
        raise typer.Exit(STOPPED)
    _report(run, folder, corpus, config, as_json)


class _Stop:
    """Whether Ctrl-C was pressed. The step that is going on is finished first, so that weights and
    optimiser are of the same step; a second Ctrl-C does not wait."""

    asked = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def _polite_stop() -> Iterator[_Stop]:
    stop = _Stop()
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _report(
    run: "Run", folder: "RunFolder", corpus: "Corpus", config: "Config", as_json: bool
) -> None:
    """The end of a run: the model beside the baselines, and the figures."""
    from rich.console import Console

    from minitransformer.display import comparison, verdict
    from minitransformer.runs import BASELINES, write_figures
    from minitransformer.tasks.text import bits_per_character, ngram_bits

    records, baselines = folder.records(), ngram_bits(corpus)
    figures = write_figures(folder.path / "figures", records, baselines, config.training.band)
    if records[-1]["validation"] is None:
        skipped = records[-1]["skipped_so_far"]
        _fail(
            f"the loss is not a number any more ({skipped} steps were skipped; see "
            f"'{folder.path / 'figures'}'): a lower training.learning_rate may help",
            FAILED,
        )
    bits = bits_per_character(records[-1]["validation"])
    if as_json:
        result = {
            "run": str(folder.path),
            "steps": run.trainer.step,
            "bits_per_character": {
                "model": bits,
                **dict(zip(BASELINES, baselines, strict=True)),
            },
            "skipped_steps": records[-1]["skipped_so_far"],
            "text": {"source": corpus.source, "sha256": corpus.sha256},
            "figures": [str(path) for path in figures],
        }
        typer.echo(json.dumps(result, indent=2))
        return
    out = Console(highlight=False, soft_wrap=True)
    out.print(comparison(bits, baselines))
    out.print(verdict(bits, baselines))
    out.print(f"figures: {folder.path / 'figures'}", markup=False)
    out.print(f"next: minitransformer sample {folder.path}", markup=False)


# ---- sample --------------------------------------------------------------------------------------


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    length: Annotated[int, typer.Option(help="Characters to write.")] = 400,
    prompt: Annotated[
        str | None, typer.Option(help="What to go on from. Without: a new line.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0: always the likeliest character; 1: as the model says.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(help="Draw among the k likeliest characters only; 0: all.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
) -> None:
    """Let a trained model write.

    The last checkpoint is read; the run may still be going on.

    \b
    minitransformer sample runs/1
    minitransformer sample runs/1 --prompt "The with statement" --temperature 0.5
    """
    from minitransformer.runs import load_trained
    from minitransformer.tasks.generate import generate

    with _running(), _reading():
        trained = load_trained(run)
        characters = trained.vocabulary.characters
        start = prompt if prompt is not None else ("\n" if "\n" in characters else characters[0])
        tokens = generate(
            trained.model,
            trained.vocabulary.encode(start),
            length,
            context=trained.config.model.context,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
    typer.echo(prompt or "", nl=False)
    for token in tokens:
        typer.echo(characters[token], nl=False)
    typer.echo()


# ---- inspect -------------------------------------------------------------------------------------


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    dead: Annotated[
        float,
        typer.Option(help="A head is dead below this share of the mean head's importance.", min=0),
    ] = 0.1,
    alike: Annotated[
        float,
        typer.Option(help="Two are alike if keys and outputs overlap by more than this.", max=1),
    ] = 0.9,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The picture. Without: RUN/figures/heads.png."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What do the heads of a trained model do, and which of them does it not need?

    Measures every head on the validation text: how spread it is, how far it looks, what the loss
    feels of it and loses without it, which head it is most like. Names those that are dead, alike,
    flat, fixed or harmful, by thresholds that it states, and says what to try. The run may still be
    going on.

    \b
    minitransformer inspect runs/1
    minitransformer inspect runs/1 --dead 0.25 --alike 0.8 --json
    """
    from rich.console import Console

    from minitransformer.display import head_findings, head_table
    from minitransformer.inspection import Thresholds, draw_heads, inspect_run

    path = figure or run / "figures" / "heads.png"
    with _running():
        report = inspect_run(run, Thresholds(dead, alike))
        draw_heads(report, path)
    if as_json:
        typer.echo(json.dumps({**report.to_json(), "figure": str(path)}, indent=2))
        return
    out = Console(highlight=False, soft_wrap=True)
    out.print(head_table(report))
    for sentence in head_findings(report):
        out.print(sentence, markup=False)
    out.print(f"figure: {path}", markup=False)


# ---- demo ----------------------------------------------------------------------------------------


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the page and pictures go.")
    ] = Path("demo"),
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """The main job: prove every gradient, train two models, write a page. About three minutes.

    A dense and a stochastic model start from the same weights and see the same batches. The page
    shows masks, schedule, losses, attention while it learns, and what both write.

    \b
    minitransformer demo
    minitransformer demo --out /tmp/page --set training.steps=100      a short one
    """
    from rich.console import Console

    from minitransformer.demo import run_demo
    from minitransformer.tasks.text import load_corpus

    config = _config("demo", None, assignments)
    with _reading():
        corpus = load_corpus(
            config.data.text, validation=config.data.validation, context=config.model.context
        )
    with _running():
        result = run_demo(folder, config, corpus, Console(stderr=True, highlight=False))
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        typer.echo(f"the page: {folder / 'index.html'}")
        typer.echo("next:     minitransformer train     (the default model, 5 to 15 minutes)")
    if any(row.failure for row in result.proof):
        _fail("a gradient is wrong: see the table above", FAILED)


# ---- verify --------------------------------------------------------------------------------------


@app.command()
def verify(
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="module:function, file.py:function, or a built-in."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS", help="A program instead: 'prog {input} {output}', safetensors files."
        ),
    ] = None,
    operation: Annotated[str, typer.Option("--as", metavar="OP", help="What it is.")] = "attention",
    framework: Annotated[
        str | None, typer.Option(help="Whose arrays it takes: numpy, torch or jax.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="What it computes in: float64, float32, float16, bfloat16.")
    ] = None,
    convention: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=ANSWER", help="Where libraries differ. See --list. Repeatable."),
    ] = None,
    detect: Annotated[
        bool, typer.Option("--detect", help="Find out the conventions that are not declared.")
    ] = False,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="OURS=THEIRS", help="Its name of an option, e.g. keep=visible."),
    ] = None,
    returns: Annotated[
        str | None, typer.Option(help="What it returns, in order: out,lse,weights.")
    ] = None,
    backward: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="Its own backward: (dout, q, k, v, ...) -> gradients."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Ask this property. Repeatable.")
    ] = None,
    xfail: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Properties known to fail, one a line.")
    ] = None,
    profile: Annotated[str, typer.Option(help="quick, default or thorough.")] = "default",
    seed: Annotated[
        int | None, typer.Option(help="Other draws. Without: the same every time.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each property.")] = 60.0,
    memory: Annotated[int, typer.Option(help="MiB that it may take (Linux).")] = 4096,
    as_json: AsJson = False,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with pictures.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write JUnit XML for a build server.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--list", help="List operations, built-in targets and conventions.")
    ] = False,
) -> None:
    """Is somebody's attention right, by which convention, and if not: which mistake is it?

    The function is called as f(q, k, v, ...) with arrays (batch, heads, positions, width); of the
    options keep, bias, scale, softcap, causal, window, multiplier it gets those that it has. It
    runs in a child process: a crash or a hang is a finding. Exit code 0: nothing is wrong; 1:
    something is; 2: this command makes no sense.

    \b
    minitransformer verify torch:sdpa
    minitransformer verify mine.py:attention --framework torch --detect
    minitransformer verify mine.py:softmax --as softmax --dtype float32
    minitransformer verify mine.py:attention --html report.html --xfail known.txt
    minitransformer verify --command './attention {input} {output}'    C++, Rust, anything
    """
    from minitransformer.checks import report, session
    from minitransformer.checks.isolation import CannotStart

    if show:
        typer.echo(session.overview())
        return
    if (target is None) == (command is None):
        which = "which function?" if target is None else "a TARGET or a --command, not both:"
        _fail(f"{which} minitransformer verify --list shows some to try", BAD_USAGE)
    with _reading():
        request = session.request(
            target or command or "", operation, command=command is not None,
            framework=framework, dtype=dtype, declared=convention or (), renamed=rename or (),
            returns=returns, backward=backward, only=only or (),
            profile=profile, seed=seed, seconds=timeout, memory=memory,
        )  # fmt: skip
        xfails = {} if xfail is None else _expected_failures(xfail, request.operation)
    try:
        found = session.run(
            request, xfails, detect=detect, tell=lambda text: typer.echo(text, err=as_json)
        )
    except CannotStart as error:
        _fail(error, BAD_USAGE)
    for path, text in ((page, report.page), (junit, report.junit)):
        if path is not None:
            _write(path, text(found))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    if found.failed:
        raise typer.Exit(FAILED)


def _expected_failures(path: Path, operation: str) -> dict[str, str]:
    from minitransformer.checks.report import read_xfails
    from minitransformer.checks.verify import statement_of

    try:
        xfails = read_xfails(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--xfail: cannot read '{path}': {error}") from None
    for name in xfails:
        statement_of(operation, name)
    return xfails


def _write(path: Path, text: str) -> None:
    from minitransformer.training.checkpoints import write_atomically

    with _running():
        write_atomically(path, text.encode("utf-8"))


# ---- vectors -------------------------------------------------------------------------------------

vectors = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)  # fmt: skip
app.add_typer(vectors, name="vectors")

Operations = Annotated[
    list[str] | None, typer.Argument(metavar="OP...", help="Without: all of them.")
]
VectorFolder = Annotated[
    Path | None, typer.Option("--in", metavar="DIR", help="Without: those of the package.")
]


@vectors.callback()
def about_vectors() -> None:
    """Inputs and right answers as JSON, each with the mistakes that it catches.

    For whoever tests attention in another language: read the files (docs/vectors.md describes
    them), or copy docs/examples/vectors.cpp. For Python: minitransformer.checks.vectors, or
    minitransformer verify, which asks them too.

    \b
    minitransformer vectors list                    what there is, and where
    minitransformer vectors check attention         derive all answers again, three times
    minitransformer vectors export --in mine        write the files somewhere
    """


@vectors.command("list")
def vectors_list(place: VectorFolder = None, as_json: AsJson = False) -> None:
    """What there is: vectors, mistakes that they catch, and public reports that they answer to."""
    from minitransformer.checks import vectors as package

    where = _vectors_in(place)
    rows: list[dict[str, Any]] = []
    for name in package.names(where):
        found = package.load(name, where)
        kills = {kill for v in found for kill in v.kills}
        links = {link for v in found for link in v.links}
        row = {"operation": name, "vectors": len(found), "mistakes": len(kills)}
        rows.append({**row, "reports": len(links)})
    if as_json:
        typer.echo(json.dumps({"folder": str(where), "operations": rows}, indent=2))
        return
    typer.echo(f"{where}\n\n{'operation':<24}{'vectors':>9}{'mistakes':>10}{'reports':>9}")
    for row in rows:
        typer.echo(
            f"{row['operation']:<24}{row['vectors']:>9}{row['mistakes']:>10}{row['reports']:>9}"
        )
    typer.echo(
        f"{'':<24}{sum(r['vectors'] for r in rows):>9}{sum(r['mistakes'] for r in rows):>10}"
    )


@vectors.command("export")
def vectors_export(names: Operations = None, place: VectorFolder = None) -> None:
    """Derive the answers and write the files.

    Each answer comes from the definition in numbers of 50 digits, and must agree with loops over
    floats and with the library. Then every named mistake is asked, and the file says which are
    caught. The same bytes on every machine.

    \b
    minitransformer vectors export attention        after a case was added
    minitransformer vectors export --in mine
    """
    from minitransformer.checks.vectors import build

    for operation in _vector_operations(names):
        where = place or _vectors_in(None)
        with _running():
            try:
                count = build.export(operation, where)
            except build.Disagreed as error:
                _fail(f"{operation.name}: two derivations differ: {error}", FAILED)
            except OSError as error:
                _fail(f"cannot write '{where}': {error.strerror or error}", FAILED)
        typer.echo(f"{operation.name}: {count} vectors in {where / operation.name}")


@vectors.command("check")
def vectors_check(names: Operations = None, place: VectorFolder = None) -> None:
    """Are the files right? Derive all again, compare the bytes, and ask every mistake.

    Exit code 1 if a file differs, if derivations disagree, if a mistake is caught by no vector, or
    if a vector catches none. The tests of the repository do the same with a part of the mistakes.
    """
    from minitransformer.checks.vectors import build

    where, failed = _vectors_in(place), False
    for operation in _vector_operations(names):
        try:
            files = build.written(operation)
        except build.Disagreed as error:
            _fail(f"{operation.name}: two derivations differ: {error}", FAILED)
        found = build.differences(operation, files, where)
        found += [] if found else build.idle(operation, build.read(files, operation.name))
        failed = failed or bool(found)
        for sentence in found:
            typer.echo(f"{operation.name}: {sentence}")
        if not found:
            typer.echo(f"{operation.name}: as derived")
    if failed:
        _fail("minitransformer vectors export writes them as they should be", FAILED)


def _vectors_in(place: Path | None) -> Path:
    from minitransformer.checks import vectors as package

    if place is not None:
        if not place.is_dir():
            _fail(f"there is no folder '{place}'", BAD_USAGE)
        return place
    try:
        return package.folder()
    except FileNotFoundError as error:
        _fail(error, FAILED)


def _vector_operations(names: list[str] | None) -> list[Any]:
    from minitransformer.checks.vectors.operations import operation, operations

    with _reading():
        return [operation(name) for name in names] if names else list(operations().values())


# ---- doctor --------------------------------------------------------------------------------------


@app.command()
def doctor(
    preset: Preset = "default",
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Is the installation sound, and are the settings usual?

    Looks at versions, compiles a function, counts threads, and says what optional packages would
    enable. Settings outside the common ranges are named, not forbidden.

    \b
    minitransformer doctor
    minitransformer doctor --config mine.toml --set stochastic.rate=0.9
    """
    from minitransformer.doctor import examine_installation, examine_settings

    settings = _config(preset, config, assignments)
    findings = [*examine_installation(), *examine_settings(settings)]
    if as_json:
        typer.echo(json.dumps([f._asdict() for f in findings], indent=2))
    else:
        width = max(len(f.topic) for f in findings)
        for f in findings:
            typer.echo(f"{f.state:<6}  {f.topic:<{width}}  {f.text}")
    if any(f.state == "wrong" for f in findings):
        raise typer.Exit(FAILED)
