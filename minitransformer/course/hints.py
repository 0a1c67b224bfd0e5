"""Hints: for each task a question, then where to look, then one line."""

import tomllib

from minitransformer.course.tasks import Task, chapter_of
from minitransformer.course.workspace import chapters_folder

LEVELS = 3


def hints_of(task: Task) -> list[str]:
    """The hints of a task, the gentlest first."""
    path = chapters_folder() / chapter_of(task.number).folder / "hints.toml"
    return list(tomllib.loads(path.read_text(encoding="utf-8"))[task.number])
