"""What a notebook shows: the library's source, pictures, a named mistake before the properties.

Notebooks define no mechanism of their own. The right one comes from the library, the wrong ones are
its named mutants.
"""

import importlib
import inspect
import io
import re
import warnings
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure

from minitransformer.checks.suite import GATE, Mutant, NotApplicable, Property, Target
from minitransformer.checks.suite import suite as suite_of


class Page:
    """Markdown that a notebook renders as its output."""

    def __init__(self, text: str):
        self.text = text

    def _repr_markdown_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text


class Picture:
    """A figure as a PNG, with a sentence for those who do not see it."""

    def __init__(self, figure: Figure, text: str, *, dpi: int = 90):
        self.figure, self.text, self.dpi = figure, text, dpi

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=self.dpi)
        return file.getvalue()

    def __repr__(self) -> str:
        return f"Picture: {self.text}"


def source(*things: Any) -> Page:
    """The library's own code of functions or classes."""
    blocks = []
    for thing in things:
        place = thing.__module__.replace(".", "/") + ".py"
        blocks.append(f"`{place}`\n```python\n{inspect.getsource(thing).rstrip()}\n```")
    return Page("\n\n".join(blocks))


def mutant(mechanism: str, name: str) -> Mutant:
    """The mistake of that name.

    Raises
    ------
    KeyError
        If the mechanism has no such mutant; the message lists those it has.
    """
    found = {m.name: m for m in suite_of(mechanism).mutants}
    if name not in found:
        raise KeyError(f"{mechanism} has no mutant {name!r}, but: {', '.join(found)}")
    return found[name]


def wrong(mechanism: str, name: str) -> Target:
    """The mechanism with that mistake in it."""
    return mutant(mechanism, name).target


def trial(mechanism: str, name: str) -> Page:
    """One mistake before every property that could notice it: who does, and what it says."""
    accused = mutant(mechanism, name)
    rows = []
    for statement in suite_of(mechanism).properties:
        if accused.replaces in statement.needs:
            said = _verdict(accused, statement)
            rows.append(f"| `{statement.name}` | {said} |")
    head = f"**{name}**: {accused.why}\n\n| property | verdict |\n|---|---|\n"
    return Page(head + "\n".join(rows))


def peer(name: str) -> ModuleType | None:
    """Another library, if it is installed here."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{name} is not installed: make verify-peers gets it")
        return None


def _verdict(accused: Mutant, statement: Property) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a wrong formula may well divide by zero
            statement.run(accused.target, GATE)  # the same draws every time, nothing shrunk
    except AssertionError as error:
        said = _readable(str(error))
        return f"**caught**: {said}" if said else "**caught**"
    except NotApplicable:
        return "passes"
    except Exception as error:  # a pair that nobody declared may meet what the mutant cannot take
        return f"**caught**: it crashes, {type(error).__name__}"
    return "passes"


def _readable(message: str) -> str:
    """The first line, with numbers of four digits and nothing that a table would trip over."""
    line = message.split("\n")[0]
    line = re.sub(r"-?\d+\.\d+(e[-+]?\d+)?", lambda m: f"{float(m[0]):.4g}", line)
    return line.replace("|", "\\|")
