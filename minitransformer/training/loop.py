"""Training: one step at a time, each a function of the state before it and of (seed, step).

    g_t = ∇ loss(θ_t; batch(seed, t), masks(seed, t)),   θ_{t+1} = AdamW(θ_t, clip(g_t), rate(t))

Batches and masks are looked up by (seed, t) and not drawn from a generator, so the state of a run
is its weights, its optimiser and a step number. That is why a run resumed from a checkpoint ends
bit for bit where one that was never interrupted ends.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from minitransformer.arrays import Array
from minitransformer.nn.losses import cross_entropy_backward, cross_entropy_forward
from minitransformer.philox import Draw
from minitransformer.training.checkpoints import Checkpoint, RunError, RunFolder, read_matching
from minitransformer.training.config import TrainingSettings
from minitransformer.training.monitor import Monitor
from minitransformer.training.optimisers import AdamW, clip
from minitransformer.training.rates import cosine_rate

Batch = tuple[Array, Array]
Record = dict[str, Any]


class Task(Protocol):
    """Real data in: what a training loop asks of a task."""

    def batch(self, step: int) -> Batch: ...

    def probe(self) -> Batch: ...

    def quick_validation(self) -> Batch: ...

    def validation(self) -> Iterator[Batch]: ...


def evaluate(model: Any, batches: Iterable[Batch]) -> float:
    """Mean cross-entropy in nats over all targets, with full attention."""
    total, count = 0.0, 0
    with np.errstate(over="ignore", invalid="ignore"):
        for inputs, targets in batches:
            logits, _ = model.forward(inputs, draw=Draw(0, training=False))
            loss, _ = cross_entropy_forward(logits, targets)
            total += float(loss) * targets.size
            count += targets.size
    return total / count


class Trainer:
    """A model, a task and an optimiser: steps in memory, nothing on disk."""

    def __init__(self, model: Any, task: Task, settings: TrainingSettings):
        self.model, self.task, self.settings = model, task, settings
        self.optimiser = AdamW(
            model.parameters(),
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        self.step = 0  # updates done

    def advance(self) -> Record:
        """Do one step and say how it went. A step whose gradient is not finite changes no weight:
        it is counted, and the next one sees another batch and other masks."""
        settings, started = self.settings, time.perf_counter()
        inputs, targets = self.task.batch(self.step)
        rate = cosine_rate(
            self.step,
            peak=settings.learning_rate,
            steps=settings.steps,
            warmup=settings.warmup,
            final_fraction=settings.final_fraction,
        )
        with np.errstate(over="ignore", invalid="ignore"):  # reported as a skipped step
            self.model.zero_grad()
            logits, cache = self.model.forward(inputs, draw=Draw(settings.seed, self.step))
            loss, loss_cache = cross_entropy_forward(logits, targets)
            self.model.backward(cross_entropy_backward(1.0, loss_cache), cache)
            norm = clip(self.model.parameters(), settings.clip)
        skipped = not math.isfinite(norm)
        if not skipped:
            self.optimiser.step(rate)
        drop_rates = self.model.drop_rates(self.step)
        self.step += 1
        seconds = time.perf_counter() - started
        return {
            "step": self.step,
            "loss": float(loss),
            "gradient_norm": float(norm),
            "learning_rate": float(rate),
            "drop_rates": [float(np.mean(p)) for p in drop_rates],
            "mask_density": [float(x) for x in cache.mask_density],  # kept / allowed, as drawn
            "skipped": skipped,
            "clock": {"seconds": seconds, "tokens_per_second": targets.size / seconds},
        }

    @property
    def is_done(self) -> bool:
        return self.step >= self.settings.steps

    def state(self) -> dict[str, Array]:
        """Copies of everything that later steps depend on, by name."""
        weights = {f"model.{name}": p.value for name, p in self.model.parameters().items()}
        moments = {f"optimiser.{name}": x for name, x in self.optimiser.state().items()}
        return {name: np.array(x) for name, x in {**weights, **moments}.items()}

    def load_state(self, step: int, state: Mapping[str, Array]) -> None:
        """Continue from what `state()` gave after `step` steps."""
        for name, parameter in self.model.parameters().items():
            parameter.value[...] = state[f"model.{name}"]
        self.optimiser.load_state(
            {
                name.removeprefix("optimiser."): x
                for name, x in state.items()
                if name.startswith("optimiser.")
            }
        )
        self.step = step


def watched(trainer: Trainer, monitor: Monitor) -> Iterator[Record]:
    """Do the steps that are left; the record of each, with what the monitor has to say of it, and
    in the last one the loss on the whole validation text."""
    while not trainer.is_done:
        record = trainer.advance()
        if trainer.step % trainer.settings.look_every == 0 or trainer.is_done:
            record["look"] = monitor.look()
        if trainer.is_done:
            record["validation"] = evaluate(trainer.model, trainer.task.validation())
        record |= monitor.follow(record)
        yield record


class Run:
    """A trainer and the folder it writes to. Iterating does the steps that are left, and yields the
    record of each after it was written."""

    def __init__(self, trainer: Trainer, folder: RunFolder, about: Mapping[str, Any]):
        self.trainer, self.folder = trainer, folder
        self.about = dict(about)  # what a checkpoint has to agree with: settings, vocabulary, text
        self.monitor = Monitor(trainer.model, trainer.task, trainer.settings.band)

    def restore(self) -> None:
        """Continue from the last checkpoint, or from the start if there is none.

        Raises
        ------
        RunError
            If the checkpoint cannot be read or belongs to another run.
        """
        paths, step = self.folder.checkpoints(), 0
        if paths:
            checkpoint = self._read(paths)
            step = checkpoint.step
            self.trainer.load_state(step, checkpoint.tensors)
        for record in self.folder.cut_back(step):
            self.monitor.follow(record)

    def _read(self, paths: list[Path]) -> Checkpoint:
        try:
            return read_matching(paths[-1], self.about, self.trainer.state())
        except RunError as error:
            if len(paths) == 1:
                raise
            raise RunError(
                f"{error}; delete it to resume from '{paths[-2].name}' instead"
            ) from error

    @property
    def is_done(self) -> bool:
        return self.trainer.is_done

    def __iter__(self) -> Iterator[Record]:
        for record in watched(self.trainer, self.monitor):
            self.folder.append(record)
            if self.trainer.step % self.trainer.settings.save_every == 0 or self.is_done:
                self.save()
            yield record

    def save(self) -> Path:
        """Write a checkpoint of the step just done."""
        checkpoint = Checkpoint(self.trainer.step, self.trainer.state(), self.about)
        return self.folder.save(checkpoint, self.trainer.settings.keep)
