"""What a notebook shows: the library's source, pictures, pictures behind sliders, a named mistake
before the properties.

Notebooks define no mechanism of their own. The right one comes from the library, the wrong ones are
its named mutants.
"""

import base64
import html
import importlib
import inspect
import io
import itertools
import json
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
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


class Slider:
    """Pictures behind sliders, as HTML that needs neither a kernel nor another file.

    `names` are the sliders; `frames` maps a label of each of them, (str, ...) in the order of
    `names`, to a figure, and holds every combination. Whoever reads without scripts sees nothing
    move: put a static picture beside it.

    Raises
    ------
    ValueError
        If a combination is missing.
    """

    def __init__(
        self,
        names: Sequence[str],
        frames: Mapping[tuple[str, ...], Figure],
        text: str,
        *,
        dpi: int = 70,
        colours: int = 64,
    ):
        self.names, self.text = list(names), text
        self.labels = [
            list(dict.fromkeys(key[axis] for key in frames)) for axis in range(len(names))
        ]
        wanted = list(itertools.product(*self.labels))
        if missing := [key for key in wanted if key not in frames]:
            raise ValueError(f"frames has no picture for {missing[0]}")
        self.pictures = [_small_png(frames[key], dpi, colours) for key in wanted]

    def _repr_html_(self) -> str:
        pictures = [base64.b64encode(picture).decode() for picture in self.pictures]
        name = f"slider-{zlib.crc32(''.join([self.text, *pictures]).encode()):08x}"
        sliders = "".join(
            f'<label style="display:block">{html.escape(slider)} <input type="range" min="0" '
            f'max="{len(labels) - 1}" value="0" style="vertical-align:middle"> '
            f"<output>{html.escape(labels[0])}</output></label>"
            for slider, labels in zip(self.names, self.labels, strict=True)
        )
        return (
            f'<div id="{name}">{sliders}<img alt="{html.escape(self.text)}" '
            f'src="data:image/png;base64,{pictures[0]}" style="max-width:100%"></div>'
            "<script>(() => {"
            f'const box = document.getElementById("{name}"), labels = {_script(self.labels)}, '
            f"pictures = {_script(pictures)}, inputs = [...box.querySelectorAll('input')];"
            "const show = () => { let at = 0; inputs.forEach((input, n) => {"
            "at = at * labels[n].length + Number(input.value);"
            "input.nextElementSibling.textContent = labels[n][input.value]; });"
            "box.querySelector('img').src = 'data:image/png;base64,' + pictures[at]; };"
            "inputs.forEach(input => input.addEventListener('input', show));"
            "})()</script>"
        )

    def __repr__(self) -> str:
        return f"Slider over {' and '.join(self.names)}: {self.text}"


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


def _small_png(figure: Figure, dpi: int, colours: int) -> bytes:
    """A PNG of few colours: a slider carries many."""
    from PIL import Image

    drawn, file = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi)
    picture = Image.open(drawn).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    picture.save(file, format="png", optimize=True)
    return file.getvalue()


def _script(x: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(x).replace("<", "\\u003c")


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
    """The first line, with numbers of four digits and nothing that a table would trip over. Bytes
    in use differ by a few from run to run: of them two digits."""
    line = message.split("\n")[0]
    line = re.sub(r"-?\d+\.\d+(e[-+]?\d+)?", lambda m: f"{float(m[0]):.4g}", line)
    line = re.sub(r"(\d{5,})(?= bytes)", lambda m: f"about {float(m[0]):.2g}", line)
    return line.replace("|", "\\|")
