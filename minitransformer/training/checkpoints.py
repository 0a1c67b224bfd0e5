"""A run on disk: a folder that can be killed at any moment and read at any other.

    config.toml                    every setting, written last when a run starts
    environment.json               versions, threads, processor
    metrics.jsonl                  one record a step; what depends on the clock stands under "clock"
    checkpoints/step_N.safetensors weights and optimiser after step N, the last few

Whole files are written beside their place, flushed to the disk, and moved over it in one operation:
a reader sees the old or the new one, never half of one. Metrics are flushed before the checkpoint
that counts on them, and cut back to the checkpoint when the run resumes. A checkpoint is numbers
and JSON (safetensors): reading one runs no code.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as encode_safetensors

from minitransformer import __version__
from minitransformer.arrays import Array
from minitransformer.training import config as configuration
from minitransformer.training.config import Config

FORMAT = "minitransformer.checkpoint.1"
# safetensors keeps its metadata in an unordered map: one key keeps equal checkpoints equal files
METADATA = "minitransformer"


class RunError(RuntimeError):
    """What is wrong with a run on disk, as a sentence for the person who started it."""


class Checkpoint(NamedTuple):
    """Everything that a later step depends on. Batches and masks are functions of (seed, step), so
    there is no state of a random generator among it."""

    step: int
    tensors: dict[str, Array]
    about: dict[str, Any]  # the settings, the vocabulary, the hash of the text


# ---- writing -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Turn an OSError (a full disk, a folder without permission) into a sentence."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot {doing}: {error.strerror or error}") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that at any moment the old or the new one is there, whole.

    Raises
    ------
    RunError
        If the disk refuses; what was at `path` is still there.
    """
    with _explained(f"write '{path}' (what was there before is untouched)"):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        if os.name == "posix":  # the new name itself has to reach the disk too
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: arrays as lists, NaN and infinity as null."""
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.bool_ | np.integer):
        return value.item()
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


# ---- checkpoints ---------------------------------------------------------------------------------


def _digest(tensors: Mapping[str, Array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The bytes of a checkpoint file; equal checkpoints have equal bytes."""
    about = {
        "format": FORMAT,
        "step": checkpoint.step,
        "digest": _digest(checkpoint.tensors),
        **checkpoint.about,
    }
    tensors = {name: np.array(x, order="C") for name, x in checkpoint.tensors.items()}
    return encode_safetensors(tensors, {METADATA: json.dumps(about, sort_keys=True)})


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint file.

    Raises
    ------
    RunError
        If the file is missing, truncated, foreign or damaged; the message names it and the field.
    """
    try:
        with safe_open(path, "numpy") as file:
            metadata = (file.metadata() or {}).get(METADATA)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except OSError as error:
        raise RunError(f"cannot read checkpoint '{path}': {error.strerror or error}") from error
    except SafetensorError as error:
        raise RunError(f"checkpoint '{path}' is truncated or no safetensors: {error}") from error
    if metadata is None:
        raise RunError(f"checkpoint '{path}' is foreign: its metadata lacks the field {METADATA!r}")
    try:
        about = json.loads(metadata)
        found, step, digest = about.pop("format"), about.pop("step"), about.pop("digest")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RunError(f"checkpoint '{path}': the field {METADATA!r} lacks {error}") from error
    if found != FORMAT:
        raise RunError(f"checkpoint '{path}': the field 'format' is {found!r}, not {FORMAT!r}")
    if digest != _digest(tensors):
        raise RunError(
            f"checkpoint '{path}': the field 'digest' does not match, the numbers were damaged"
        )
    return Checkpoint(step, tensors, about)


def require_same(
    path: Path, what: str, found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    """Raise a RunError that names the first field in which a checkpoint differs from the run."""
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        here, there = (side.get(name, "absent") for side in (wanted, found))
        if here != there:
            raise RunError(
                f"checkpoint '{path}' does not match: {what} {name!r} is {there} in it, {here} here"
            )


def read_matching(path: Path, about: Mapping[str, Any], tensors: Mapping[str, Array]) -> Checkpoint:
    """Read a checkpoint that has to fit: the same `about`, and arrays of the same names, shapes and
    dtypes as `tensors`.

    Raises
    ------
    RunError
        If it cannot be read or does not fit; the message names the file and the field.
    """
    checkpoint = read_checkpoint(path)
    for name, wanted in about.items():
        found = checkpoint.about.get(name)
        if name == "settings" and isinstance(found, Mapping) and isinstance(wanted, Mapping):
            # a setting that did not exist then had no other value than what is now the default
            defaults = configuration.to_flat(Config()).items()
            found = {key: value for key, value in defaults if key in wanted} | dict(found)
        if isinstance(wanted, Mapping) and isinstance(found, Mapping):
            require_same(path, f"{name}:", found, wanted)
        else:
            require_same(path, "the field", {name: found}, {name: wanted})

    def shapes(arrays: Mapping[str, Array]) -> dict[str, str]:
        return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}

    require_same(path, "the array", shapes(checkpoint.tensors), shapes(tensors))
    return checkpoint


# ---- the folder ----------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """What besides the settings can change the last bit of a result."""
    packages = ("numpy", "numba", "safetensors", "ml_dtypes")
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index]
    return {
        "minitransformer": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "blas": f"{blas['name']} {blas['version']}",
        "threads": threads(),
        "processor": processor(),
        "system": platform.platform(),
    }


def threads() -> int:
    """How many threads BLAS uses: what the environment says, else one for each core."""
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class RunFolder:
    """The folder of one run, locked while it is open. The operating system holds the lock, so a
    killed process leaves none behind."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = filelock.FileLock(self.path / ".lock", timeout=0)
        self._metrics: Any = None

    # -- opening and closing --

    @classmethod
    def create(cls, path: str | Path, config: Config) -> "RunFolder":
        """A new run.

        Raises
        ------
        RunError
            If the folder exists and holds anything, is in use, or cannot be written.
        """
        run = cls(path)
        with _explained(f"create the run folder '{run.path}'"):
            run.path.mkdir(parents=True, exist_ok=True)
        if run._holds_something():
            advice = "resume it with --resume or choose" if run.config_path.exists() else "choose"
            raise RunError(f"'{run.path}' is not empty and is left alone: {advice} another folder")
        run._acquire()
        try:
            with _explained(f"create '{run.path / 'checkpoints'}'"):
                (run.path / "checkpoints").mkdir(exist_ok=True)
            about = json.dumps(environment(), indent=2) + "\n"
            write_atomically(run.path / "environment.json", about.encode())
            # last: a folder with a config.toml is a run
            write_atomically(run.config_path, configuration.to_toml(config).encode())
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """A run that was started before.

        Raises
        ------
        RunError
            If there is none, or it is in use.
        """
        run = cls(path)
        run.require_started()
        run._acquire()
        return run

    def require_started(self) -> None:
        """Raise a RunError unless a run was started here."""
        if not self.config_path.exists():
            raise RunError(f"'{self.path}' is no run folder: it has no config.toml")

    def _holds_something(self) -> bool:
        """True unless the folder is empty or holds only what a start killed half-way leaves."""
        if not self.path.is_dir():
            return True
        ours = {".lock", "environment.json", "checkpoints"}
        left = [p for p in self.path.iterdir() if p.name not in ours and p.suffix != ".tmp"]
        return bool(left) or bool(self.checkpoints())

    def _acquire(self) -> None:
        with _explained(f"lock the run folder '{self.path}'"):
            try:
                self._lock.acquire()
            except filelock.Timeout as error:
                raise RunError(f"run folder '{self.path}' is in use by another process") from error

    def close(self) -> None:
        """Close the metrics and release the lock."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what it holds --

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def config(self) -> Config:
        """The settings that the run was started with."""
        return configuration.load_config(path=self.config_path)

    def environment(self) -> dict[str, Any]:
        """The versions, threads and processor that the run was started with."""
        path = self.path / "environment.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read '{path}': {error}") from error

    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first."""
        found = (self.path / "checkpoints").glob("step_*.safetensors")
        numbered = [(p.stem.removeprefix("step_"), p) for p in found]
        return [p for _, p in sorted((int(n), p) for n, p in numbered if n.isdigit())]

    def records(self) -> list[dict[str, Any]]:
        """Every complete record of metrics.jsonl, in order."""
        return [record for record, _ in self._records()]

    def _records(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Each complete record and where in the file it ends; a torn last line is no record."""
        if not self.metrics_path.exists():
            return
        end = 0
        for number, line in enumerate(self.metrics_path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                record = json.loads(line)
                record["step"]
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(
                    f"'{self.metrics_path}', line {number}: no record ({error})"
                ) from error
            yield record, end

    # -- writing --

    def cut_back(self, step: int) -> list[dict[str, Any]]:
        """Drop the records after `step` and return those up to it: their steps will be made again.

        Raises
        ------
        RunError
            If a record up to `step` is missing.
        """
        kept, end = [], 0
        for record, position in self._records():
            if record["step"] <= step:
                kept.append(record)
                end = position
        if [record["step"] for record in kept] != list(range(1, step + 1)):
            raise RunError(
                f"'{self.metrics_path}' holds {len(kept)} records up to step {step} of the "
                f"checkpoint; the field 'step' should run from 1 to {step}"
            )
        with _explained(f"cut back '{self.metrics_path}'"):
            if self.metrics_path.exists():
                os.truncate(self.metrics_path, end)
        return kept

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record to metrics.jsonl."""
        line = (json.dumps(plain(record), allow_nan=False) + "\n").encode()
        with _explained(f"write '{self.metrics_path}'"):
            if self._metrics is None:
                self._metrics = open(self.metrics_path, "ab", buffering=0)
            while line:  # a disk that fills up takes part of a line first
                line = line[self._metrics.write(line) :]

    def save(self, checkpoint: Checkpoint, keep: int) -> Path:
        """Write a checkpoint, then delete all but the last `keep`."""
        path = self.path / "checkpoints" / f"step_{checkpoint.step}.safetensors"
        if self._metrics is not None:
            with _explained(f"write '{self.metrics_path}'"):
                os.fsync(self._metrics.fileno())
        write_atomically(path, encode_checkpoint(checkpoint))
        for old in self.checkpoints()[:-keep]:
            with _explained(f"delete '{old}'"):
                old.unlink()
        return path
