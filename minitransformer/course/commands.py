"""`minitransformer learn`: copy the chapters out, watch a file, judge, hint."""

import contextlib
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from minitransformer.course.tasks import Chapter, Task
    from minitransformer.course.workspace import Workspace

FAILED, BAD_USAGE = 1, 2
LOOK_EVERY = 0.25  # seconds between two looks at the files

app = typer.Typer(add_completion=False, rich_markup_mode=None)

Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="The course folder, if you are not inside it."),
]
Number = Annotated[
    str | None, typer.Argument(metavar="[TASK]", help="For example 01.2. Without: the next one.")
]


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    from minitransformer.course.workspace import CourseError

    try:
        yield
    except (CourseError, ValueError) as error:
        typer.echo(f"minitransformer: {error}", err=True)
        raise typer.Exit(BAD_USAGE) from None


def _open(folder: Path | None) -> "Workspace":
    from minitransformer.course.workspace import find

    workspace = find(folder)
    if workspace.notice:
        typer.echo(f"{workspace.notice}\n", err=True)
    return workspace


def _asked(workspace: "Workspace", number: str | None) -> "Task":
    """The task of that number, or the next one.

    Raises
    ------
    ValueError, CourseError
        If there is none.
    """
    from minitransformer.course.tasks import find_task
    from minitransformer.course.workspace import CourseError

    if number is not None:
        return find_task(number)
    task = workspace.current()
    if task is None:
        raise CourseError("every task is passed: name one to look at it again, say 01.1")
    return task


# ---- watch ---------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def learn(context: typer.Context, folder: Folder = None) -> None:
    """Solve the chapters' exercises; the library's own properties judge them.

    Without a command: watch your files, and judge the next task whenever you save.

    \b
    minitransformer learn init course      copy the chapters into course/
    cd course
    minitransformer learn                  watch, judge, go on
    minitransformer learn hint             a question first, then more
    minitransformer learn list             what is done and what is not

    In a notebook: from minitransformer.course import check; check("01.3", softmax_backward)
    """
    if context.invoked_subcommand is not None:
        return
    with _telling():
        workspace = _open(folder)
        task = workspace.current()
        if task is None:
            typer.echo("Every task is passed. `minitransformer learn list` shows them.")
            return
        typer.echo("Watching. Save a file and it is judged; Ctrl-C ends, nothing is lost.\n")
        with contextlib.suppress(KeyboardInterrupt):
            _watch(workspace, task)
    typer.echo()


def _watch(workspace: "Workspace", task: "Task | None") -> None:
    from minitransformer.course.tasks import CHAPTERS

    while task is not None:
        chapter = next(c for c in CHAPTERS if c.number == task.chapter)
        if not workspace.is_begun(task):
            _introduce(workspace, task)
        elif _judge(workspace, task):
            task = workspace.current(chapter) or workspace.current()
            continue
        before = _stamps(workspace)
        while not (changed := _stamps(workspace).items() ^ before.items()):
            time.sleep(LOOK_EVERY)
        saved = {path.parent.name for path, _ in changed}
        if chapter.folder not in saved:  # another chapter is being worked on
            chapter = next(c for c in CHAPTERS if c.folder in saved)
            task = workspace.current(chapter) or task
        task = _begun(workspace, chapter, task, {path.name for path, _ in changed})
    typer.echo("Every task is passed. Well done.")


def _begun(workspace: "Workspace", chapter: "Chapter", task: "Task", files: set[str]) -> "Task":
    """The task that was worked on: the first that is open and begun in a file that was saved."""
    open_tasks = [t for t in chapter.tasks if not workspace.passed.get(t.number)]
    worked_on = [t for t in open_tasks if t.file in files and workspace.is_begun(t)]
    return next(iter(worked_on), task)


def _stamps(workspace: "Workspace") -> dict[Path, int]:
    from minitransformer.course.tasks import CHAPTERS

    files = [
        workspace.folder / chapter.folder / name
        for chapter in CHAPTERS
        for name in ("exercise.py", "properties.py")
    ]
    found = {}
    for path in files:
        with contextlib.suppress(OSError):  # an editor may be replacing it just now
            found[path] = path.stat().st_mtime_ns
    return found


def _introduce(workspace: "Workspace", task: "Task") -> None:
    from minitransformer.course.judge import headline
    from minitransformer.course.stubs import line_of

    path = workspace.file(task)
    place = f"{path.parent.name}/{path.name}"
    typer.secho(headline(task), bold=True)
    if task.cut:
        typer.echo(f"  to write: {', '.join(task.cut)}")
        typer.echo(f"  in {place}, line {line_of(task, workspace.text(task))}")
    else:
        typer.echo(f"  to write: properties that catch {task.catch} known mistakes, in {place}")
    typer.echo("  stuck?    minitransformer learn hint\n")


def _judge(workspace: "Workspace", task: "Task") -> bool:
    from minitransformer.course.judge import headline, judge_file, report

    typer.secho(headline(task), bold=True)
    outcome = judge_file(task, workspace.file(task), tell=typer.echo)
    first, *rest = report(task, outcome)
    typer.secho(first, fg="green" if outcome.passed else "yellow", bold=True)
    for line in rest:
        typer.echo(line)
    if not outcome.passed:
        typer.echo(f"\n  stuck?  minitransformer learn hint {task.number}")
    typer.echo()
    if workspace.passed.get(task.number, False) != outcome.passed:
        workspace.passed[task.number] = outcome.passed
        workspace.save()
    return outcome.passed


# ---- the other verbs -----------------------------------------------------------------------------


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made if need be.")]) -> None:
    """Copy the chapters into DIR. Run it again to add new ones: what is yours is left alone."""
    from minitransformer.course import workspace

    with _telling():
        said = workspace.init(folder)
    typer.echo(f"{folder}:")
    typer.echo("\n".join(said))
    typer.echo(f"\nNext:\n  cd {folder}\n  minitransformer learn")


@app.command()
def check(
    number: Number = None,
    every: Annotated[bool, typer.Option("--all", help="Every task that is begun.")] = False,
    folder: Folder = None,
) -> None:
    """Judge one task now. Exit code 0: passed; 1: not yet."""
    from minitransformer.course.tasks import TASKS

    with _telling():
        workspace = _open(folder)
        if every:
            asked = [t for t in TASKS.values() if workspace.is_begun(t)]
        else:
            asked = [_asked(workspace, number)]
            if not workspace.is_begun(asked[0]):
                _introduce(workspace, asked[0])
                raise typer.Exit(FAILED)
        passed = [_judge(workspace, task) for task in asked]
        if every:
            typer.echo(f"{sum(passed)} of {len(passed)} begun tasks are passed")
    if not all(passed):
        raise typer.Exit(FAILED)


@app.command()
def hint(number: Number = None, folder: Folder = None) -> None:
    """Show the next hint: a question, then where to look, then one line."""
    from minitransformer.course.hints import hints_of
    from minitransformer.course.judge import WIDTH, headline

    with _telling():
        workspace = _open(folder)
        task = _asked(workspace, number)
        hints = hints_of(task)
        shown = min(workspace.hints.get(task.number, 0) + 1, len(hints))
        typer.secho(headline(task), bold=True)
        for n, text in enumerate(hints[:shown], 1):
            typer.echo(
                textwrap.fill(text, WIDTH, initial_indent=f"  {n}  ", subsequent_indent="     ")
            )
        if shown < len(hints):
            typer.echo(f"\n  ({len(hints) - shown} more: ask again)")
        workspace.hints[task.number] = shown
        workspace.save()


@app.command("list")
def list_tasks(folder: Folder = None) -> None:
    """Show every task, and which are passed."""
    from minitransformer.course.tasks import CHAPTERS

    with _telling():
        workspace = _open(folder)
        following = workspace.current()
    for chapter in CHAPTERS:
        done = sum(workspace.passed.get(t.number, False) for t in chapter.tasks)
        title = f"{chapter.number}  {chapter.title}"
        typer.secho(f"{title:<60} {done} of {len(chapter.tasks)}", bold=True)
        for task in chapter.tasks:
            mark = "✓" if workspace.passed.get(task.number) else "→" if task is following else " "
            typer.echo(f"  {mark} {task.number}  {task.title:<58} {task.minutes:>3} min")


@app.command()
def reset(
    number: Annotated[str, typer.Argument(metavar="TASK|CHAPTER", help="01.2, or 01 for all.")],
    folder: Folder = None,
) -> None:
    """Make an exercise new again. A copy of your work is kept."""
    from minitransformer.course import workspace

    with _telling():
        kept = workspace.reset(_open(folder), number)
    typer.echo(f"{number} is new again; your work is in {kept.parent.name}/{kept.name}")


@app.command()
def solution(
    number: Number = None,
    now: Annotated[bool, typer.Option("--now", help="Before it is passed.")] = False,
    folder: Folder = None,
) -> None:
    """Show how the library does it, once you have passed the task."""
    from minitransformer.course.stubs import solution as lines_of
    from minitransformer.course.workspace import CourseError

    with _telling():
        workspace = _open(folder)
        task = _asked(workspace, number)
        if not (now or workspace.passed.get(task.number)):
            raise CourseError(
                f"{task.number} is not passed yet: a hint may do (`minitransformer learn hint "
                f"{task.number}`), or add --now"
            )
        typer.echo(lines_of(task))
