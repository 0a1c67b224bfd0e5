"""The course: stubs are the library's, judges are fair, and a learner's folder survives."""

import json
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

from minitransformer.checks.suite import GATE, reference, suite
from minitransformer.course import check, stubs, workspace
from minitransformer.course.hints import LEVELS, hints_of
from minitransformer.course.judge import WIDTH, judge_file, report
from minitransformer.course.tasks import (
    CHAPTERS,
    TASKS,
    mutants,
    named_target,
    statements,
    target_of,
)
from minitransformer.course.workspace import CourseError, chapters_folder

# whether a solution passes at all; that it passes every draw is what the suite's own tests show
FEW = settings(GATE, max_examples=6)
ROOT = Path(__file__).resolve().parent.parent
chapters = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.folder)
tasks = pytest.mark.parametrize("task", TASKS.values(), ids=lambda t: t.number)
cutting = pytest.mark.parametrize(
    "task", [t for t in TASKS.values() if t.cut], ids=lambda t: t.number
)
stating = pytest.mark.parametrize(
    "task", [t for t in TASKS.values() if not t.cut], ids=lambda t: t.number
)


def committed(chapter, name: str) -> str:
    return (ROOT / "chapters" / chapter.folder / name).read_text(encoding="utf-8")


def chapter_with(task):
    return next(c for c in CHAPTERS if task in c.tasks)


# ---- gates: the chapters as they are committed ---------------------------------------------------


@chapters
def test_a_stub_is_the_generated_one(chapter):
    """If not: python -m minitransformer.course.stubs"""
    assert committed(chapter, "exercise.py") == stubs.exercise(chapter)


@chapters
def test_solving_only_adds_lines(chapter):
    stub, solved = stubs.exercise(chapter), stubs.exercise(chapter, solved=True)
    left = iter(solved.splitlines())
    for line in stub.splitlines():
        assert "your lines" in line or line in left, f"{line!r} is not in the solution"


@chapters
def test_a_chapter_imports_only_what_came_before(chapter):
    """The foundation, the chapters before this one, and what this chapter itself builds."""
    built = {"arrays", *chapter.mechanisms}
    for earlier in CHAPTERS[: CHAPTERS.index(chapter)]:
        built.update(earlier.mechanisms)
    found = re.findall(
        r"^from minitransformer\.(\S+) import", committed(chapter, "exercise.py"), re.M
    )
    assert found, "an exercise that stands on nothing"
    assert set(found) <= built


@chapters
def test_a_chapter_has_enough_tasks_and_a_property_to_state(chapter):
    assert len(chapter.tasks) >= 4
    assert sum(not task.cut for task in chapter.tasks) == 1
    assert not chapter.tasks[-1].cut


@chapters
def test_a_readme_lists_its_tasks_and_its_links_lead_somewhere(chapter):
    text = committed(chapter, "README.md")
    rows = re.findall(r"^\| (\d\d\.\d+) \| (.+?) \| (\d+) \| `(.+?)` \|$", text, re.M)
    assert rows == [(t.number, t.title, str(t.minutes), t.file) for t in chapter.tasks]
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "chapters" / chapter.folder / link).exists(), link


@chapters
def test_hints_name_their_tasks_and_equations_that_exist(chapter):
    hints = tomllib.loads(committed(chapter, "hints.toml"))
    assert list(hints) == [task.number for task in chapter.tasks]
    code = "".join(stubs._source(mechanism) for mechanism in chapter.mechanisms)
    for task in chapter.tasks:
        levels = hints_of(task)
        assert len(levels) == LEVELS
        assert all(text.strip() for text in levels)
        assert "?" in levels[0], "the first hint is a question"
        for tag in re.findall(r"Eq\. (\d+\.\d+)", levels[1]):
            assert tag in code, f"Eq. {tag} is not in this chapter's code"


@cutting
def test_a_task_has_something_to_judge_it(task):
    assert statements(task.number)
    assert mutants(task)


@cutting
def test_the_solution_passes_and_is_begun(task, tmp_path, own_errors):
    chapter = chapter_with(task)
    path = tmp_path / "exercise.py"
    path.write_text(stubs.exercise(chapter, solved=True), encoding="utf-8")
    judged = named_target(str(path), task.number)
    for statement in statements(task.number):
        statement.run(judged, FEW)
    assert stubs.is_begun(task, path.read_text(encoding="utf-8"))


@cutting
def test_the_stub_fails_and_is_not_begun(task, own_errors):
    chapter = chapter_with(task)
    path = ROOT / "chapters" / chapter.folder / "exercise.py"
    judged = named_target(str(path), task.number)
    with pytest.raises(AssertionError, match="returned None"):
        for statement in statements(task.number):
            statement.run(judged, FEW)
    assert not stubs.is_begun(task, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("mechanism", sorted({t.mechanism for t in TASKS.values()}))
def test_every_mutant_fails_some_task(mechanism):
    """By the properties that the suite declares to kill it, which the suite's own tests run."""
    here = [t.number for t in TASKS.values() if t.mechanism == mechanism and t.cut]
    asked = {p.name for number in here for p in statements(number)}
    missed = [m.name for m in suite(mechanism).mutants if not set(m.killed_by) & asked]
    assert [name for name in missed if name not in LATER.get(mechanism, ())] == []


# what a later chapter will ask for
LATER = {
    "steps": [m.name for m in suite("steps").mutants if m.replaces.startswith("cross_entropy")]
}


@stating
def test_the_librarys_own_properties_pass_and_the_template_does_not(task, own_errors):
    known = suite(task.mechanism)
    stated = [p for p in known.properties if set(p.needs) <= set(task.public)][:4]
    judged = SimpleNamespace(suite=SimpleNamespace(properties=stated))
    for statement in statements(task.number):
        statement.run(judged, FEW)
    path = chapters_folder() / chapter_with(task).folder / "properties.py"
    with pytest.raises(AssertionError, match="no property is stated"):
        statements(task.number)[0].run(named_target(str(path), task.number), FEW)


@stating
def test_the_example_alone_is_true_and_not_enough(task, tmp_path, own_errors):
    text = committed(chapter_with(task), "properties.py")
    path = tmp_path / "properties.py"
    path.write_text(re.sub(r"^# (?=@|def|    )", "", text, flags=re.M), encoding="utf-8")
    judged = named_target(str(path), task.number)
    true, catches = statements(task.number)
    true.run(judged, FEW)
    with pytest.raises(AssertionError, match="are asked for"):
        catches.run(judged, FEW)


# ---- what a learner gets wrong -------------------------------------------------------------------

RIGHT = """    y = cache.weights
    return y * (dweights - (y * dweights).sum(axis=cache.axis, keepdims=True))
"""


def with_backward(tmp_path, body: str) -> Path:
    """Chapter 01 with these lines for task 01.3 and nothing else."""
    path = tmp_path / "exercise.py"
    text = stubs.exercise(CHAPTERS[0])
    path.write_text(text.replace("    # 01.3: your lines\n", body), encoding="utf-8")
    return path


def verdict_on(tmp_path, body: str) -> str:
    outcome = judge_file(TASKS["01.3"], with_backward(tmp_path, body), tell=lambda text: None)
    assert not outcome.passed
    lines = report(TASKS["01.3"], outcome)
    assert all(len(line) <= WIDTH for line in lines)
    return " ".join(" ".join(lines).split())


def test_a_right_function_passes_beside_unsolved_ones(tmp_path):
    told = []
    outcome = judge_file(TASKS["01.3"], with_backward(tmp_path, RIGHT), tell=told.append)
    assert outcome.passed
    assert outcome.of == 1
    assert "✓" in told[0]


def test_a_known_mistake_is_named_with_the_smallest_case(tmp_path):
    text = verdict_on(tmp_path, "    return cache.weights * dweights\n")
    assert "behaves exactly like a known mistake" in text
    assert "smallest case found: scores = float64[" in text


@pytest.mark.parametrize(
    "body, said",
    [
        ("    return dweights[\n", "SyntaxError"),
        ("    return dweight\n", "NameError: name 'dweight' is not defined (exercise.py, line"),
        ("    y = cache.weights\n", "softmax_backward returned None: is a `return` missing?"),
        ("    import os; os._exit(0)\n", "the process ended itself with exit code 0"),
        ("    import ctypes; ctypes.string_at(0)\n", "the process died of SIGSEGV"),
        ("    raise SystemExit\n", "the process ended itself"),
        ("    return dweights[..., :1]\n", "at index"),
        ("    print('x' * 10**8); return dweights * np.nan\n", "nan"),
        ("    return np.zeros(2**40)\n", "MemoryError"),
        ("    return 'a string'\n", "Error"),
    ],
)
def test_ten_ways_to_fail_are_each_a_message(tmp_path, body, said):
    assert said in verdict_on(tmp_path, body)


def test_an_endless_loop_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("minitransformer.course.judge.SECONDS", 2.0)
    assert "no answer within 2 seconds" in verdict_on(tmp_path, "    while True: pass\n")


# ---- the folder ----------------------------------------------------------------------------------


def learn(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "minitransformer", "learn", *words],
        cwd=cwd, capture_output=True, text=True, encoding="utf-8", timeout=120,
    )  # fmt: skip


@pytest.fixture
def course(tmp_path) -> Path:
    workspace.init(tmp_path / "course")
    return tmp_path / "course"


def solve(course: Path, number: str) -> Path:
    task = TASKS[number]
    chapter = chapter_with(task)
    path = course / chapter.folder / task.file
    path.write_text(stubs.exercise(chapter, solved=True), encoding="utf-8")
    return path


def test_init_copies_and_leaves_work_alone(course):
    path = solve(course, "01.1")
    before = path.read_text(encoding="utf-8")
    (course / "02_attention" / "exercise.py").unlink()
    said = workspace.init(course)
    assert path.read_text(encoding="utf-8") == before
    assert (course / "02_attention" / "exercise.py").exists()
    assert "kept as it is" in said[0]


def test_the_way_of_a_learner(course):
    answer = learn("check", cwd=course)
    assert answer.returncode == 1
    assert "to write: _exponentials, softmax_forward" in answer.stdout
    assert "?" in learn("hint", cwd=course).stdout
    assert "Eq. 1.1" in learn("hint", cwd=course).stdout
    answer = learn("solution", cwd=course)
    assert answer.returncode == 2
    assert "not passed yet" in answer.stderr
    solve(course, "01.1")
    answer = learn("check", cwd=course / "01_softmax")  # from inside a chapter too
    assert answer.returncode == 0, answer.stdout
    assert "passed: all 7 properties hold" in answer.stdout
    assert "✓ 01.1" in learn("list", cwd=course).stdout
    assert "def softmax_forward" in learn("solution", "01.1", cwd=course).stdout
    assert max(map(len, learn("list", cwd=course).stdout.splitlines())) <= 80


def test_reset_of_a_task_keeps_the_others_and_a_copy(course):
    path = solve(course, "01.1")
    before = path.read_text(encoding="utf-8")
    kept = workspace.reset(workspace.find(course), "01.3")
    assert kept.read_text(encoding="utf-8") == before
    text = path.read_text(encoding="utf-8")
    assert not stubs.is_begun(TASKS["01.3"], text)
    assert stubs.is_begun(TASKS["01.1"], text)
    workspace.reset(workspace.find(course), "01")
    assert path.read_text(encoding="utf-8") == stubs.exercise(CHAPTERS[0])
    assert kept.read_text(encoding="utf-8") == before, "an older copy was overwritten"


def test_reset_of_a_task_in_a_broken_file_says_what_to_do(course):
    path = course / "01_softmax" / "exercise.py"
    path.write_text("def softmax_forward(:\n", encoding="utf-8")
    with pytest.raises(CourseError, match="no Python any more"):
        workspace.reset(workspace.find(course), "01.1")
    assert path.read_text(encoding="utf-8") == "def softmax_forward(:\n"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"passed": 3, "hints": {}}', "\0\0\0"])
def test_a_damaged_state_is_kept_aside(course, damage):
    (course / workspace.STATE).write_text(damage, encoding="utf-8")
    found = workspace.find(course)
    assert "could not be read" in found.notice
    assert (course / f"{workspace.STATE}.damaged-1").read_text(encoding="utf-8") == damage
    assert not workspace.find(course).notice


def test_outside_a_course_the_way_in_is_named(tmp_path):
    answer = learn("list", cwd=tmp_path)
    assert answer.returncode == 2
    assert "minitransformer learn init DIR" in answer.stderr


def test_an_unknown_task_is_answered_with_a_near_one(course):
    answer = learn("check", "01.33", cwd=course)
    assert answer.returncode == 2
    assert "did you mean 01.3?" in answer.stderr


def test_watching_judges_what_is_saved_and_survives_a_kill(course):
    watching = subprocess.Popen(
        [sys.executable, "-u", "-m", "minitransformer", "learn"],
        cwd=course, stdout=subprocess.PIPE, text=True, encoding="utf-8",
    )  # fmt: skip
    assert watching.stdout is not None
    seen = ""
    for line in watching.stdout:
        seen += line
        if "stuck?" in line:
            break
    solve(course, "01.1")
    for line in watching.stdout:
        seen += line
        if "01.8" in line:
            break
    watching.send_signal(signal.SIGKILL)
    watching.wait()
    watching.stdout.close()
    assert "passed: all 7 properties hold" in seen
    state = json.loads((course / workspace.STATE).read_text(encoding="utf-8"))
    assert state["passed"]["01.7"]


# ---- in a notebook -------------------------------------------------------------------------------


def test_check_in_a_notebook(capsys):
    assert check("01.3", reference("attention.softmax").softmax_backward)
    assert not check("01.3", lambda dweights, cache: cache.weights * dweights)
    said = capsys.readouterr().out
    assert "passed: all 1 properties hold" in said
    assert "known mistake" in said
    with pytest.raises(ValueError, match="merge_backward is missing"):
        check("01.5", reference("attention.softmax").merge_forward)


def test_functions_of_other_tasks_are_the_librarys():
    written = SimpleNamespace(softmax_backward=lambda *_: None, softmax_forward=None)
    target_of(TASKS["01.3"], written)
    assert written.softmax_forward is reference("attention.softmax").softmax_forward
