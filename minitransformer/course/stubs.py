"""Exercises are made from the library: what a task cuts loses its body, all it stands on is kept.

    python -m minitransformer.course.stubs      # write chapters/NN_slug/exercise.py again

A body is cut below the docstring, so solving only adds lines. The solution is the same page with
the bodies in it.
"""

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from minitransformer.checks.suite import suite
from minitransformer.course.tasks import CHAPTERS, Chapter, Task

PACKAGE = "minitransformer"
YOURS = "# {number}: your lines"


class _Item(NamedTuple):
    """A top-level statement of a mechanism's file."""

    node: ast.stmt
    text: str  # with the comments above it
    names: tuple[str, ...]  # that it binds


def exercise(chapter: Chapter, *, solved: bool = False) -> str:
    """The text of a chapter's exercise.py, or of its solution."""
    cut = {(t.mechanism, name): t for t in chapter.tasks for name in t.cut}
    parts: list[str] = []
    bound: set[str] = set()
    used: set[str] = set()
    imports: list[ast.Import | ast.ImportFrom] = []
    for mechanism in [m for m in chapter.mechanisms if any(m == key[0] for key in cut)]:
        source = _source(mechanism)
        imports += [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
        asked = {name: task for (place, name), task in cut.items() if place == mechanism}
        parts.append(f"# ==== {mechanism} {'=' * (92 - len(mechanism))}")
        for item in _needed(_items(source), {name.split(".")[0] for name in asked}):
            bound.update(item.names)
            used |= _read(item.node)
            parts.append(item.text if solved else _without_bodies(item, asked))
    head = [f'"""Chapter {chapter.number}: {chapter.title}. See README.md beside this file."""']
    above = "\n\n".join([*head, *_imports(imports, used - bound)])
    return above + "\n\n" + "\n\n\n".join(parts) + "\n"


def solution(task: Task) -> str:
    """The library's own lines for a task; of one that asks for properties, the library's own."""
    if not task.cut:
        asked = [p for p in suite(task.mechanism).properties if set(p.needs) <= set(task.public)]
        return "\n\n".join(inspect.getsource(p.check) for p in asked)
    items = _items(_source(task.mechanism))
    wanted = {name.split(".")[0] for name in task.cut}
    return "\n\n\n".join(item.text for item in items if wanted & set(item.names))


def without(task: Task, text: str) -> str:
    """A learner's file with the lines of one task cut again, everything else as it is.

    Raises
    ------
    SyntaxError
        If the file cannot be read as Python.
    """
    asked = dict.fromkeys(task.cut, task)
    wanted = {name.split(".")[0] for name in task.cut}
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in wanted:
            for function, number in reversed(list(_cut_functions(node, asked))):
                _cut(lines, function, number, 0)
    return "".join(lines)


def is_begun(task: Task, text: str) -> bool:
    """True if some function of the task has a line below its docstring, or the file is no longer
    Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return True
    asked = dict.fromkeys(task.cut, task)
    nodes = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return any(_body(f) for node in nodes for f, _ in _cut_functions(node, asked))


def line_of(task: Task, text: str) -> int:
    """Where the first function of a task begins, 1 if it is not there."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return 1
    asked = dict.fromkeys(task.cut, task)
    nodes = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return min((f.lineno for node in nodes for f, _ in _cut_functions(node, asked)), default=1)


# ---- reading a mechanism's file ------------------------------------------------------------------


def _source(mechanism: str) -> str:
    found = importlib.util.find_spec(f"{PACKAGE}.{mechanism}")
    assert found is not None and found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")


def _items(source: str) -> list[_Item]:
    """Every top-level statement but imports and the docstring; section lines stay with what follows
    them."""
    lines, found, end = source.splitlines(), [], 0
    for node in ast.parse(source).body:
        start = _first_line(node) - 1
        text = "\n".join(lines[end : node.end_lineno]).strip("\n")
        comments = "\n".join(lines[end:start]).strip("\n")
        end = node.end_lineno or start
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Expr):
            continue
        # the comment is part of the text only if it is close, or a section's line
        keep = not comments or comments.startswith("#")
        text = text if keep else "\n".join(lines[start:end])
        found.append(_Item(node, text, tuple(_bound(node))))
    return found


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name))


def _read(node: ast.AST) -> set[str]:
    """The names in a statement; those in quoted annotations too."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    for n in ast.walk(node):
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.isidentifier():
            found.add(n.value)
    return found


def _needed(items: list[_Item], wanted: set[str]) -> list[_Item]:
    """The items that bind what is wanted, and whatever those need, in the order of the file."""
    wanted, before = set(wanted), -1
    while len(wanted) > before:
        before = len(wanted)
        for item in items:
            if wanted & set(item.names):
                wanted |= _read(item.node) & {name for i in items for name in i.names}
    return [item for item in items if wanted & set(item.names)]


def _imports(found: list[ast.Import | ast.ImportFrom], used: set[str]) -> list[str]:
    """The imports that are used, each name once: other people's first."""
    lines: dict[str, set[str]] = {}
    plain = set()
    for node in found:
        for alias in node.names:
            if (alias.asname or alias.name).split(".")[0] not in used:
                continue
            text = alias.name + (f" as {alias.asname}" if alias.asname else "")
            if isinstance(node, ast.Import):
                plain.add(text)
            else:
                lines.setdefault(node.module or "", set()).add(text)
    said = [(name, f"import {name}") for name in plain]
    for module, names in lines.items():
        listed = sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
        line = f"from {module} import {', '.join(listed)}"
        if len(line) > 100:
            line = f"from {module} import (\n    " + ",\n    ".join(listed) + ",\n)"
        said.append((module, line))
    groups = ([], [], [])  # type: tuple[list[str], list[str], list[str]]
    for module, line in sorted(said, key=lambda s: (s[1].startswith("from"), s[0])):
        groups[2 if module.startswith(PACKAGE) else module.split()[0] in _THEIRS].append(line)
    return ["\n".join(group) for group in groups if group]


_THEIRS = ("numpy", "jaxtyping", "ml_dtypes")


# ---- cutting -------------------------------------------------------------------------------------


def _cut_functions(node: ast.stmt, asked: dict[str, Task]) -> Iterator[tuple[ast.FunctionDef, str]]:
    """The functions and methods of a top-level statement that are a learner's to write, each with
    its task's number."""
    if isinstance(node, ast.FunctionDef) and node.name in asked:
        yield node, asked[node.name].number
    elif isinstance(node, ast.ClassDef):
        for method in node.body:
            name = f"{node.name}.{getattr(method, 'name', '')}"
            if isinstance(method, ast.FunctionDef) and name in asked:
                yield method, asked[name].number


def _body(function: ast.FunctionDef) -> list[ast.stmt]:
    """The statements below the docstring."""
    return function.body[ast.get_docstring(function) is not None :]


def _cut(lines: list[str], function: ast.FunctionDef, number: str, before: int) -> None:
    """Replace the lines of a body, in place; `before` lines of the file are not in `lines`."""
    body = _body(function)
    if not body:
        return
    if len(body) == len(function.body):
        raise ValueError(f"{function.name} has no docstring: nothing would be left of it")
    first = (function.body[0].end_lineno or 0) - before
    indent = " " * body[0].col_offset
    lines[first : (body[-1].end_lineno or 0) - before] = [
        indent + YOURS.format(number=number) + "\n"
    ]


def _without_bodies(item: _Item, asked: dict[str, Task]) -> str:
    lines = item.text.splitlines(keepends=True)
    before = (item.node.end_lineno or 0) - len(lines)
    for function, number in reversed(list(_cut_functions(item.node, asked))):
        _cut(lines, function, number, before)
    return "".join(lines).rstrip("\n")


if __name__ == "__main__":
    from minitransformer.course.workspace import chapters_folder

    for chapter in CHAPTERS:
        path = chapters_folder() / chapter.folder / "exercise.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(exercise(chapter), encoding="utf-8")
        print(f"{chapter.folder}/exercise.py")
