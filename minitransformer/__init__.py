"""minitransformer: a reference of the stochastic Transformer, every gradient derived by hand.

    attention/   exact attention          stochastic/  random masks, renormalised
    heads/       what heads do            nn/          the parts with parameters
    models/      whole networks           training/    optimisers, the loop, checkpoints
    tasks/       real data                checks/      what "correct" means

Subpackages load on first use, so that `import minitransformer` stays cheap.
"""

import importlib

__version__ = "0.1.0"

_SUBPACKAGES = (
    "arrays",
    "attention",
    "checks",
    "heads",
    "models",
    "nn",
    "philox",
    "plots",
    "stochastic",
    "tasks",
    "training",
)


def __getattr__(name: str):
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_SUBPACKAGES])
