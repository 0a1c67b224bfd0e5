"""What `verify` found, for a person, for a browser, for a build server and for a program."""

import html
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from minitransformer.checks.verify import STATUSES, Verdict

SHOWN = 4  # named mistakes that a person reads


class Report(NamedTuple):
    """One run of `verify`."""

    target: str
    operation: str
    settings: Mapping[str, str]  # versions, dtype, conventions, profile, seed
    command: str  # which repeats it
    verdicts: Sequence[Verdict]

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(v.status for v in self.verdicts)
        return {status: found[status] for status in STATUSES}

    @property
    def failed(self) -> bool:
        return self.counts["fail"] > 0

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "operation": self.operation,
            "settings": dict(self.settings),
            "command": self.command,
            "counts": self.counts,
            "verdicts": [v.to_json() for v in self.verdicts],
        }


# ---- failures that are known ---------------------------------------------------------------------


def read_xfails(path: Path) -> dict[str, str]:
    """The properties of a file that are expected to fail, and why: `name  # reason` in each line.

    Raises
    ------
    OSError
        If the file cannot be read.
    """
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, reason = line.partition("#")
        if name.strip():
            found[name.strip()] = reason.strip()
    return found


def expecting(verdict: Verdict, xfails: Mapping[str, str]) -> Verdict:
    """A failure that was expected is known; one that was expected and did not come is a failure."""
    if verdict.statement not in xfails:
        return verdict
    if verdict.status == "fail":
        return replace(verdict, status="known", message=xfails[verdict.statement])
    if verdict.status == "pass":
        message = "expected to fail, and passes: take it off the list of known failures"
        return replace(verdict, status="fail", message=message)
    return verdict


# ---- for a person --------------------------------------------------------------------------------

MARKS = {"pass": "ok", "fail": "FAIL", "not applicable": "-", "known": "known"}


def lines(verdict: Verdict) -> list[str]:
    """One line of a verdict, and what helps to mend a failure."""
    first = f"{MARKS[verdict.status]:<6} {verdict.statement}"
    if verdict.status in ("not applicable", "known") and verdict.message:
        first += f"  ({verdict.message})"
    return [first, *("       " + text for text in details(verdict))]


def details(verdict: Verdict) -> list[str]:
    """What should be true, what was found, for which input, and whose mistake it looks like."""
    if verdict.status != "fail":
        return []
    found = [f"should be  {verdict.says}", f"found      {verdict.message}"]
    if verdict.ulps is not None and verdict.ulps < 1e15:
        found.append(f"off by     {verdict.ulps:.3g} units in the last place")
    found += [f"for        {name} = {text}" for name, text in verdict.example.items()]
    if verdict.same_as:
        more = len(verdict.same_as) - SHOWN
        text = " or ".join(verdict.same_as[:SHOWN]) + (f" or {more} more" if more > 0 else "")
        found.append(f"just like  {text}")
    return found


def summary(report: Report) -> str:
    return ", ".join(f"{count} {status}" for status, count in report.counts.items() if count)


# ---- for a build server --------------------------------------------------------------------------


def junit(report: Report) -> str:
    """JUnit XML: one test case for each property."""
    counts = report.counts
    suite = ET.Element(
        "testsuite",
        name=f"{report.target} as {report.operation}",
        tests=str(len(report.verdicts)),
        failures=str(counts["fail"]),
        skipped=str(counts["not applicable"] + counts["known"]),
        time=f"{sum(v.seconds for v in report.verdicts):.3f}",
    )
    for v in report.verdicts:
        case = ET.SubElement(
            suite, "testcase", classname=report.operation, name=v.statement, time=f"{v.seconds:.3f}"
        )
        if v.status == "fail":
            failure = ET.SubElement(case, "failure", message=_printable(v.message))
            failure.text = _printable("\n".join(details(v)))
        elif v.status != "pass":
            ET.SubElement(case, "skipped", message=_printable(f"{v.status}: {v.message}"))
    ET.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suite, encoding="unicode")


def _printable(text: str) -> str:
    """XML forbids control characters, even escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


# ---- for a browser -------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --line: #8884; --bad: #c62828; --good: #2e7d32; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 0.85rem/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; }
section { border-top: 1px solid var(--line); padding: 0.6rem 0; }
.status { font-weight: 600; display: inline-block; min-width: 7.5rem; }
.fail { color: var(--bad); } .pass { color: var(--good); }
@media (prefers-color-scheme: dark) { :root { --bad: #ef9a9a; --good: #a5d6a7; } }
figure { display: inline-block; margin: 0.5rem 1.5rem 0.5rem 0; vertical-align: top; }
figcaption { font-size: 0.85rem; }
""".strip()


def page(report: Report) -> str:
    """A self-contained HTML page; nothing in it is loaded from elsewhere."""
    title = html.escape(f"{report.target} as {report.operation}")
    settings = " · ".join(html.escape(f"{k} {v}") for k, v in report.settings.items() if v)
    order = sorted(report.verdicts, key=lambda v: STATUSES.index(v.status) if v.status != "fail"
        else -1)  # fmt: skip
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{title}</title>\n<style>{STYLE}</style>",
            f"<h1>{title}</h1>\n<p>{html.escape(summary(report))}</p>\n<p>{settings}</p>",
            f"<pre>{html.escape(report.command)}</pre>",
            *(_section(v) for v in order),
            "</html>\n",
        ]
    )


def _section(v: Verdict) -> str:
    mark = f'<span class="status {v.status.split()[0]}">{v.status}</span>'
    body = "".join(f"{html.escape(text)}\n" for text in details(v))
    note = f"<p>{html.escape(v.message)}</p>" if v.status != "fail" and v.message else ""
    pictures = "".join(_picture(name, rows) for name, rows in v.pictures.items())
    return (
        f"<section>{mark} <code>{html.escape(v.statement)}</code>"
        + (f"\n<pre>{body}</pre>" if body else f"\n<p>{html.escape(v.says)}</p>{note}")
        + f"{pictures}</section>"
    )


def _picture(name: str, rows: list[list[int]], size: int = 10) -> str:
    """Rows of 0 and 1 as squares, -1 as nothing; a description for those who do not see them."""
    height, width = len(rows), len(rows[0])
    squares_of = [value for row in rows for value in row if value >= 0]
    filled = f"{sum(squares_of)} of {len(squares_of)} squares filled"
    said = html.escape(f"{name}: {filled}, one block for each head")
    squares = "".join(
        f'<rect x="{x * size}" y="{y * size}" width="{size - 1}" height="{size - 1}"'
        f' fill-opacity="{0.85 if value else 0.12}"/>'
        for y, row in enumerate(rows)
        for x, value in enumerate(row)
        if value >= 0
    )
    return (
        f'<figure><svg role="img" aria-label="{said}" width="{width * size}" '
        f'height="{height * size}" fill="currentColor">{squares}</svg>'
        f"<figcaption>{html.escape(name)}</figcaption></figure>"
    )
