"""Make the notebooks from their sources: make notebooks

    python notebooks/build.py [NAME ...]            execute and write NAME.ipynb; no name: all
    python notebooks/build.py --check [NAME ...]    execute and compare with what is committed

A source is Python in jupytext's percent format. Cells tagged `peer` ask PyTorch and JAX; where
those are not installed, what the cells print is not compared.
"""

import argparse
import importlib.util
import os
import re
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).resolve().parent
SECONDS, BYTES = 60, 400_000
MACHINE = re.compile(
    r"/(?:home|root|tmp|Users|opt)/|[A-Z]:\\\\|"
    + "|".join(re.escape(str(p)) for p in (HERE.parent, Path.home(), Path(sys.prefix)))
)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute the notebooks' sources.")
    parser.add_argument("name", nargs="*", help="for example 01_softmax; none: all")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    arguments = parser.parse_args()
    known = sorted(p.stem for p in HERE.glob("[0-9][0-9]_*.py"))
    names = [Path(n).stem for n in arguments.name] or known
    if unknown := set(names) - set(known):
        parser.error(f"no notebook {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    # as the tests run: more threads than cores only get in each other's way
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return max(make(name, check=arguments.check) for name in names)


def make(name: str, *, check: bool) -> int:
    """Execute one source, write or compare its notebook, say so in a line; 1 if something is
    wrong."""
    path = HERE / f"{name}.ipynb"
    start = time.perf_counter()
    try:
        notebook = executed(HERE / f"{name}.py")
    except CellExecutionError as error:
        print(f"{name}: FAILS\n{error}")
        return 1
    seconds = time.perf_counter() - start
    text = nbformat.writes(notebook) + "\n"
    if not check:
        path.write_text(text, encoding="utf-8")
    faults = differences(notebook, path) if check else []
    size = max(len(text.encode()), path.stat().st_size if path.exists() else 0)
    if size > BYTES:
        faults.append(f"{size:,} bytes, allowed are {BYTES:,}")
    if seconds > SECONDS:
        faults.append(f"{seconds:.0f} s, allowed are {SECONDS}")
    faults += [f"names a place on this machine: {found}" for found in machine_paths(notebook)]
    verdict = "; ".join(faults) or ("as committed" if check else "written")
    print(f"{name}: {verdict} ({seconds:.0f} s, {size / 1000:.0f} kB)", flush=True)
    return bool(faults)


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook of a source, executed, with nothing in it that differs from run to run."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = nbformat.from_dict(
            {"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {}
        )
    NotebookClient(
        notebook,
        timeout=2 * SECONDS,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(HERE)}},
    ).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs: list) -> list:
    """Lines that were printed in several pieces, in one: where it is cut depends on the clock."""
    found: list = []
    for output in outputs:
        before = found[-1] if found else {}
        if output.output_type == "stream" and output.get("name") == before.get("name"):
            before["text"] += output["text"]
        else:
            found.append(output)
    return found


def differences(notebook: nbformat.NotebookNode, path: Path) -> list[str]:
    """Where the committed notebook says something else."""
    if not path.exists():
        return ["there is no notebook yet"]
    committed = nbformat.read(path, as_version=4)
    if len(committed.cells) != len(notebook.cells):
        return [f"the source has {len(notebook.cells)} cells, the notebook {len(committed.cells)}"]
    peers = all(importlib.util.find_spec(name) for name in ("torch", "jax"))
    found = []
    for number, (new, old) in enumerate(zip(notebook.cells, committed.cells, strict=True)):
        if (new.cell_type, new.source) != (old.cell_type, old.source):
            found.append(f"cell {number} has another source")
        elif new.cell_type == "code" and (peers or "peer" not in new.metadata.get("tags", [])):
            for ours, theirs in zip(
                printed(new).split("\n"), printed(old).split("\n"), strict=False
            ):
                if ours != theirs:
                    found.append(f"cell {number} prints {ours!r}, committed is {theirs!r}")
                    break
    return found


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell says in words; pictures differ by a font or a version and are not compared."""
    said = []
    for output in cell.outputs:
        data = output.get("data", {})
        said += [output.get("text", ""), data.get("text/markdown", data.get("text/plain", ""))]
    return "".join(said)


def machine_paths(notebook: nbformat.NotebookNode) -> list[str]:
    """Places of this machine that an output names."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return sorted({found for cell in cells for found in MACHINE.findall(printed(cell))})


if __name__ == "__main__":
    sys.exit(main())
