"""Is this installation sound, and are these settings usual? Findings for `minitransformer doctor`.

Nothing here forbids: a setting outside the common ranges is an experiment, and the doctor says so.
"""

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from minitransformer.training.checkpoints import environment
from minitransformer.training.config import Config, advice

DISTRIBUTION = "minitransformer"
ENABLES = {
    "test": "the tests: make test",
    "notebook": "the notebooks: make lab",
    "book": "building the documentation",
    "gpu": "the CUDA kernels, on a machine with an NVIDIA GPU",
    "data": "the tasks on scikit-learn's data",
    "dev": "linting: make lint",
}


class Finding(NamedTuple):
    """`state` is "ok", "note" (works, but know this), "absent" (optional) or "wrong"."""

    topic: str
    state: str
    text: str


def _versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    state = "ok" if sys.version_info >= (3, 11) else "wrong"
    yield Finding("python", state, f"{python} (3.11 or newer is needed)")
    for requirement in importlib.metadata.requires(DISTRIBUTION) or []:
        name, extra = _parse(requirement)
        if extra is None:
            version = _version(name)
            yield Finding(
                name, "ok" if version else "wrong", version or f"is missing: pip install {name}"
            )


def _extras() -> Iterator[Finding]:
    missing: dict[str, list[str]] = {}
    for requirement in importlib.metadata.requires(DISTRIBUTION) or []:
        name, extra = _parse(requirement)
        if extra is not None:
            missing.setdefault(extra, []).extend([] if _version(name) else [name])
    for extra, absent in missing.items():
        enables = ENABLES.get(extra, extra)
        if absent:
            how = f"pip install '{DISTRIBUTION}[{extra}]' ({', '.join(absent)})"
            yield Finding(f"[{extra}]", "absent", f"would enable {enables}: {how}")
        else:
            yield Finding(f"[{extra}]", "ok", f"enables {enables}")


def _parse(requirement: str) -> tuple[str, str | None]:
    """Name and extra of a requirement as packages declare it: "x>=1; extra == 'test'"."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", requirement)
    return name, extra and extra.group(1)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numba() -> Finding:
    """Compile a function and run it: an import alone proves nothing."""
    try:
        import numba

        double = numba.njit(lambda x: 2.0 * x)
        works = double(21.0) == 42.0
    except Exception as error:  # a broken compiler raises whatever it likes
        first = str(error).strip().partition("\n")[0]
        return Finding("compiler", "wrong", f"Numba does not compile: {first}")
    return Finding("compiler", "ok" if works else "wrong", "Numba compiles and runs a function")


def _processor() -> Iterator[Finding]:
    here = environment()
    cores = os.cpu_count() or 1
    yield Finding("processor", "ok", f"{here['processor']}, {cores} cores")
    yield Finding("blas", "ok", here["blas"])
    used = here["threads"]
    if used > cores:
        text = f"BLAS uses {used} threads on {cores} cores: set OPENBLAS_NUM_THREADS={cores}"
        yield Finding("threads", "note", text)
    else:
        text = f"{used} for BLAS (a run resumes bit for bit at the same number)"
        yield Finding("threads", "ok", text)


def examine_installation() -> list[Finding]:
    """Versions, compiler, threads, and what the optional packages would enable."""
    return [*_versions(), _numba(), *_processor(), *_extras()]


def examine_settings(config: Config) -> list[Finding]:
    """The settings against the ranges that are common for the method."""
    unusual = [Finding("settings", "note", sentence) for sentence in advice(config)]
    return unusual or [Finding("settings", "ok", "all in the ranges common for the method")]
