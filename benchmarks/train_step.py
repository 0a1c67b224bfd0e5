"""One training step of ours against the same model in PyTorch eager: the ratio of their times.

    python benchmarks/train_step.py [--pairs 30] [--threads 2] [--preset default] [--json]

Same sizes, weights, batches, float32 and threads; each step is forward, backward, clipping
and AdamW. Two pairs are timed. `dense`: no random mask on either side, the peer with its fused
attention. `stochastic`: ours draws by the Philox law, the peer draws by `torch.rand` and applies
the mask in plain operations. Steps alternate, ours and theirs, and the ratio is the median of the
ratios of neighbours: a busy machine slows both. Before timing, loss and gradient norm of the dense
models are held together.
"""

import argparse
import json
import os
import sys
import time


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30, help="pairs of steps to time")
    parser.add_argument("--threads", type=int, default=2, help="threads of either side")
    parser.add_argument("--preset", default="default", help="settings: default or demo")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


ARGUMENTS = arguments()
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # read when NumPy is loaded
    os.environ[variable] = str(ARGUMENTS.threads)

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402

from minitransformer.runs import build_model  # noqa: E402
from minitransformer.tasks.text import TextTask, load_corpus  # noqa: E402
from minitransformer.training.config import Config, load_config  # noqa: E402
from minitransformer.training.loop import Trainer  # noqa: E402

try:
    import torch
except ImportError:
    sys.exit("the peer is PyTorch, which is not installed: make verify-peers installs it")
F = torch.nn.functional


class Peer(torch.nn.Module):
    """The decoder of models/language_model.py in PyTorch: pre-norm, GELU by tanh, tied scores."""

    def __init__(self, ours, config: Config):
        super().__init__()
        self.config, self.ours_rates = config, ours.drop_rates
        for name, parameter in ours.parameters().items():
            value = torch.nn.Parameter(torch.tensor(parameter.value))
            value.decays = parameter.decay
            self.register_parameter(name.replace(".", "_"), value)

    def part(self, name: str):
        return getattr(self, name.replace(".", "_"))

    def linear(self, x, name: str):
        return x @ self.part(f"{name}.weight") + self.part(f"{name}.bias")

    def norm(self, x, name: str):
        gamma, beta = self.part(f"{name}.gamma"), self.part(f"{name}.beta")
        return F.layer_norm(x, gamma.shape, gamma, beta, 1e-5)

    def attend(self, x, name: str, rate: float):
        batch, length, width = x.shape
        heads = self.config.model.attention.heads
        q, k, v = (
            self.linear(x, f"{name}.{part}").view(batch, length, heads, -1).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        if rate == 0:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            kept = torch.rand(batch, heads, length, length) >= rate
            kept |= torch.eye(length, dtype=torch.bool)
            kept &= torch.ones(length, length, dtype=torch.bool).tril()
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            out = scores.masked_fill(~kept, -torch.inf).softmax(-1) @ v
        return self.linear(out.transpose(1, 2).reshape(batch, length, width), f"{name}.output")

    def forward(self, tokens, step: int):
        x = F.embedding(tokens, self.part("tokens.weight"))
        x = x + self.part("positions.weight")[: tokens.shape[1]]
        for layer, rate in enumerate(self.ours_rates(step)):
            name = f"blocks.{layer}"
            h = self.norm(x, f"{name}.attention_norm")
            x = x + self.attend(h, f"{name}.attention", float(np.mean(rate)))
            h = self.norm(x, f"{name}.feed_forward_norm")
            h = F.gelu(self.linear(h, f"{name}.feed_forward.up"), approximate="tanh")
            x = x + self.linear(h, f"{name}.feed_forward.down")
        return self.norm(x, "norm") @ self.part("tokens.weight").T


class PeerTrainer:
    def __init__(self, trainer: Trainer, config: Config):
        self.model, self.task, self.settings = Peer(trainer.model, config), trainer.task, config
        groups = [
            {"params": [p for p in self.model.parameters() if p.decays == decays],
             "weight_decay": config.training.weight_decay * decays}
            for decays in (True, False)
        ]  # fmt: skip
        betas = (config.training.beta1, config.training.beta2)
        self.optimiser = torch.optim.AdamW(groups, betas=betas)
        self.step = 0

    def advance(self) -> tuple[float, float]:
        inputs, targets = (torch.from_numpy(x) for x in self.task.batch(self.step))
        self.optimiser.zero_grad()
        logits = self.model(inputs, self.step)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        limit = self.settings.training.clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimiser.step()
        self.step += 1
        return loss.item(), norm.item()


def timed(step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare(config: Config, name: str, pairs: int, console: Console) -> dict[str, float]:
    corpus = load_corpus("", validation=config.data.validation, context=config.model.context)
    task = TextTask(corpus, config.model.context, config.training.batch, config.training.seed)
    ours = Trainer(build_model(config, len(corpus.vocabulary)), task, config.training)
    peer = PeerTrainer(ours, config)
    first, (loss, norm) = ours.advance(), peer.advance()
    if name == "dense":  # the same model, or there is nothing to compare
        for what, a, b in (("loss", first["loss"], loss), ("norm", first["gradient_norm"], norm)):
            if abs(a - b) > 1e-4 * abs(b):
                sys.exit(f"the models differ: {what} is {a} here, {b} there")
    for _ in range(3):
        ours.advance(), peer.advance()
    times = [
        (timed(ours.advance), timed(peer.advance))
        for _ in track(range(pairs), f"{name}: pairs of steps", console=console)
    ]
    mine, theirs = np.array(times).T
    low, middle, high = np.quantile(mine / theirs, [0.25, 0.5, 0.75])
    return {
        "ours_seconds": float(np.median(mine)),
        "pytorch_seconds": float(np.median(theirs)),
        "ratio": float(middle),
        "ratio_quartiles": [float(low), float(high)],
    }


def main() -> None:
    torch.set_num_threads(ARGUMENTS.threads)
    console, results = Console(stderr=True), {}
    for name, changes in (("dense", ["stochastic.kind=none"]), ("stochastic", [])):
        config = load_config(ARGUMENTS.preset, assignments=changes)
        results[name] = compare(config, name, ARGUMENTS.pairs, console)
    about = {"threads": ARGUMENTS.threads, "pairs": ARGUMENTS.pairs, "torch": torch.__version__}
    if ARGUMENTS.json:
        print(json.dumps(about | results, indent=2))
        return
    print(f"one training step, {about['threads']} threads, PyTorch {torch.__version__} eager")
    for name, r in results.items():
        low, high = r["ratio_quartiles"]
        ours, theirs = r["ours_seconds"] * 1e3, r["pytorch_seconds"] * 1e3
        times = f"ours {ours:6.1f} ms   PyTorch {theirs:6.1f} ms"
        print(f"{name:<11} {times}   ratio {r['ratio']:.2f}  ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
