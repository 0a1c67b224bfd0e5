"""A learner's folder: copies of the chapters, and one JSON file that remembers what was passed."""

import json
import shutil
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from minitransformer.course import stubs
from minitransformer.course.tasks import CHAPTERS, TASKS, Chapter, Task, chapter_of
from minitransformer.training.checkpoints import write_atomically

STATE = ".minitransformer-learn.json"
COPIED = ("README.md", "exercise.py", "properties.py")


class CourseError(Exception):
    """What a learner can mend, in one sentence."""


def chapters_folder() -> Path:
    """The chapters as they came: beside the package in a clone, inside it when installed."""
    package = Path(str(files("minitransformer")))
    for place in (package.parent / "chapters", package / "course" / "chapters"):
        if (place / CHAPTERS[0].folder).is_dir():
            return place
    raise CourseError("the chapters are missing from this installation: install it again")


@dataclass
class Workspace:
    """A learner's folder and what it remembers."""

    folder: Path
    passed: dict[str, bool] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)  # how many of a task's were shown
    notice: str = ""  # what happened to the state file, if anything did

    def file(self, task: Task) -> Path:
        return self.folder / chapter_of(task.number).folder / task.file

    def text(self, task: Task) -> str:
        """What the learner has written.

        Raises
        ------
        CourseError
            If the file is gone or no text.
        """
        path = self.file(task)
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CourseError(
                f"{path} is gone: `minitransformer learn reset {task.chapter}` makes it again"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CourseError(f"cannot read {path}: {error}") from None

    def current(self, chapter: Chapter | None = None) -> Task | None:
        """The first task that is not passed."""
        tasks = chapter.tasks if chapter else tuple(TASKS.values())
        return next((t for t in tasks if not self.passed.get(t.number)), None)

    def is_begun(self, task: Task) -> bool:
        """True if there is something to judge."""
        text = self.text(task)
        if task.cut:
            return stubs.is_begun(task, text)
        return text != (chapters_folder() / chapter_of(task.number).folder / task.file).read_text(
            encoding="utf-8"
        )

    def save(self) -> None:
        """Write the state, whole or not at all."""
        state = {"version": 1, "passed": self.passed, "hints": self.hints}
        write_atomically(self.folder / STATE, (json.dumps(state, indent=1) + "\n").encode())


def init(folder: Path) -> list[str]:
    """Copy the chapters into a folder; the lines to show. What is there already is left alone.

    Raises
    ------
    CourseError
        If the folder cannot be written.
    """
    said = []
    try:
        for chapter in CHAPTERS:
            place = folder / chapter.folder
            place.mkdir(parents=True, exist_ok=True)
            missing = [name for name in COPIED if not (place / name).exists()]
            for name in missing:
                shutil.copyfile(chapters_folder() / chapter.folder / name, place / name)
            tasks = f"{len(chapter.tasks)} tasks"
            kept = "" if len(missing) == len(COPIED) else "  (yours, kept as it is)"
            said.append(f"  {chapter.folder:<20} {tasks:<9}{kept}")
        if not (folder / STATE).exists():
            Workspace(folder).save()
    except OSError as error:
        raise CourseError(f"cannot write into '{folder}': {error.strerror or error}") from None
    return said


def find(folder: Path | None = None) -> Workspace:
    """The workspace of a folder, or of the nearest one above the current folder.

    Raises
    ------
    CourseError
        If there is none.
    """
    here = (folder or Path.cwd()).resolve()
    for place in [here] if folder else [here, *here.parents]:
        if (place / STATE).exists():
            return _opened(place)
    raise CourseError(
        f"'{here}' is no course folder: make one with `minitransformer learn init DIR`, "
        "then work inside it or name it with --dir"
    )


def _opened(folder: Path) -> Workspace:
    path = folder / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return Workspace(folder, _known(state["passed"], bool), _known(state["hints"], int))
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        aside = _free(path.with_name(path.name + ".damaged"))
        path.replace(aside)
        fresh = Workspace(folder)
        fresh.save()
        fresh.notice = (
            f"The progress file could not be read ({type(error).__name__}). It is kept as "
            f"{aside.name}, your work is untouched, and `minitransformer learn check --all` "
            "finds out again what you have solved."
        )
        return fresh


def _known(x: dict[str, Any], kind: type) -> dict[str, Any]:
    return {str(name): kind(value) for name, value in x.items()}


def reset(workspace: Workspace, number: str) -> Path:
    """Make a task's, or a chapter's, exercise new again; the copy of what was there.

    Raises
    ------
    ValueError, CourseError
        If there is no such task or chapter; if the file of a task can no longer be read as Python.
    """
    chapter = chapter_of(number)
    tasks = [t for t in chapter.tasks if number in (t.number, chapter.number)]
    if not tasks:
        raise ValueError(f"there is no task {number!r} in chapter {chapter.number}")
    kept = Path()
    for name in dict.fromkeys(task.file for task in tasks):
        path = workspace.folder / chapter.folder / name
        original = (chapters_folder() / chapter.folder / name).read_text(encoding="utf-8")
        fresh = original
        if number != chapter.number and tasks[0].cut:
            try:
                fresh = stubs.without(tasks[0], workspace.text(tasks[0]))
            except SyntaxError as error:
                raise CourseError(
                    f"{name} is no Python any more (line {error.lineno}), so one task cannot be "
                    f"cut out of it: `minitransformer learn reset {chapter.number}` renews all"
                ) from None
        if path.exists():
            kept = _free(path.with_suffix(".kept"))
            shutil.copyfile(path, kept)
        write_atomically(path, fresh.encode("utf-8"))
    for task in tasks:
        workspace.passed.pop(task.number, None)
    workspace.save()
    return kept


def _free(path: Path) -> Path:
    """The path with the first number that is not taken."""
    n = 1
    while (found := path.with_name(f"{path.name}-{n}")).exists():
        n += 1
    return found
