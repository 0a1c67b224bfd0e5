"""The repository's own gates: what the README and the packaging promise is true."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from minitransformer.checks.suite import suites

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def ranges(lines) -> dict[str, SpecifierSet]:
    return {canonical((r := Requirement(line)).name): r.specifier for line in lines}


def test_environment_yml_agrees_with_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    plain = [d for d in environment["dependencies"] if isinstance(d, str)]
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    conda = ranges([d for d in plain + pip if d not in ("pip", "-e .")])

    extras = PROJECT["optional-dependencies"]
    wanted = ranges(PROJECT["dependencies"] + extras["test"] + extras["notebook"])
    wanted["python"] = SpecifierSet(PROJECT["requires-python"])
    assert conda == wanted


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def test_importing_the_package_loads_neither_numba_nor_matplotlib():
    heavy = run_python(
        "import sys, minitransformer\n"
        "print([m for m in ('numba', 'matplotlib', 'hypothesis', 'torch') if m in sys.modules])"
    )
    assert heavy == "[]"


def test_importing_the_package_adds_little_to_numpy():
    """Promised: under 0.15 s beyond NumPy. The median of five, with room for a busy machine."""
    code = (
        "import numpy, time\n"
        "start = time.perf_counter()\n"
        "import minitransformer\n"
        "print(time.perf_counter() - start)"
    )
    seconds = sorted(float(run_python(code)) for _ in range(5))[2]
    assert seconds < 0.6, f"import minitransformer took {seconds:.2f} s"


EQUATION = re.compile(r"Eqs?\.\s+(\d+\.\d+)(?:\s*[-–]\s*(\d+\.\d+))?")


def equations(text: str) -> set[str]:
    """Every tag in a text; "Eq. 1.3 - 1.5" names three."""
    found = set()
    for first, last in EQUATION.findall(text):
        found.add(first)
        if last:
            chapter, start = first.split(".")
            found |= {f"{chapter}.{n}" for n in range(int(start), int(last.split(".")[1]) + 1)}
    return found


@pytest.mark.parametrize("suite", list(suites()), ids=lambda s: s.mechanism)
def test_equation_tags_of_the_code_are_judged_by_a_property(suite):
    path = suite.mechanism.replace(".", "/")
    code = equations((ROOT / f"minitransformer/{path}.py").read_text(encoding="utf-8"))
    judged = equations(
        (ROOT / f"minitransformer/checks/properties/{path}.py").read_text(encoding="utf-8")
    )
    assert code, f"{path}.py carries no equation tag"
    assert code - judged == set(), "equations that no property names"
    assert judged - code == set(), "properties name equations that the code does not have"


LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: Path(page).name)
def test_links_to_files_lead_somewhere(page):
    page = ROOT / page
    targets = [t for t in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in t]
    missing = [t for t in targets if not (page.parent / t).exists()]
    assert not missing


def test_makefile_has_every_target_the_readme_names():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", readme, re.M))
    missing = {a or b for a, b in named} - targets
    assert not missing


def test_the_readme_speaks_of_every_mechanism_that_has_a_suite():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [
        s.mechanism
        for s in suites()
        if f"minitransformer/{s.mechanism.replace('.', '/')}.py" not in readme
        and f"(minitransformer/{s.mechanism.split('.')[0]})" not in readme
        and f"{s.mechanism.split('.')[-1]}.py" not in readme
    ]
    assert not missing


def test_the_code_of_the_readme_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    mine = "def my_attention(q, k, v): ...\n"
    assert len(blocks) >= 2
    run_python(mine + "\n".join(blocks))


# ---- notebooks: everything that can be known without executing them ------------------------------

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of_source(path: Path) -> list[tuple[str, str]]:
    """Kind and text of each cell of a source in the percent format."""
    cells = []
    for part in re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
        head, _, body = part.partition("\n")
        kind = "markdown" if "[markdown]" in head else "code"
        if kind == "markdown":
            body = re.sub(r"^# ?", "", body, flags=re.M)
        cells.append((kind, body.strip("\n")))
    return cells


def cells_of_notebook(path: Path) -> list[dict]:
    return json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]


def outputs_of(cell: dict) -> str:
    """What a cell shows, pictures left out."""
    kept = [
        [output.get("text"), *(v for k, v in output.get("data", {}).items() if "image" not in k)]
        for output in cell.get("outputs", [])
    ]
    return json.dumps(kept)


@notebooks
def test_a_notebook_has_the_cells_of_its_source(path):
    """If not: make notebooks."""
    committed = [(c["cell_type"], "".join(c["source"])) for c in cells_of_notebook(path)]
    assert committed == cells_of_source(path)


@notebooks
def test_a_notebook_is_executed_small_and_names_no_machine(path):
    assert path.with_suffix(".ipynb").stat().st_size <= 400_000
    code = [c for c in cells_of_notebook(path) if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    for cell in code:
        shown = outputs_of(cell)
        assert not re.search(r"/(?:home|root|tmp|Users|opt)/|[A-Z]:\\\\", shown)
        assert str(ROOT) not in shown
        assert "is not installed" not in shown, "a peer is missing: make verify-peers"
        assert not any(o["output_type"] == "error" for o in cell["outputs"])


@notebooks
def test_equation_tags_of_a_notebook_exist_in_the_code(path):
    code = "".join(
        p.read_text(encoding="utf-8")
        for p in (ROOT / "minitransformer").rglob("*.py")
        if "checks" not in p.parts
    )
    named = equations(path.read_text(encoding="utf-8").replace("\n# ", "\n"))
    assert named, "a page without an equation tag"
    assert named - equations(code) == set()


def test_the_readme_links_every_chapter():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = sorted(p.parent.name for p in (ROOT / "chapters").glob("*/exercise.py"))
    assert found
    assert [name for name in found if f"(chapters/{name}/README.md)" not in readme] == []


@notebooks
def test_the_readme_links_every_notebook(path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"(notebooks/{path.stem}.ipynb)" in readme
