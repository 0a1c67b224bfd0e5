"""Every setting of a run in one value: five tables, each key with a default, a meaning, a range.

A configuration is a preset, changed by a TOML file, changed by `--set table.key=value`. What comes
out is written in full to the run folder, so a run can be read without knowing the defaults of the
release that made it. An unknown key is answered with the nearest valid one.
"""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from minitransformer.nn.positions import SCHEMES, Rope
from minitransformer.stochastic.samplers import COMPENSATIONS, KINDS, RandomMask
from minitransformer.stochastic.schedules import OVER_LAYERS, OVER_TRAINING, Schedule

VERSION = 1  # of the file format; a file of another version is refused


def setting(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that knows what it means and which values it takes."""
    return field(
        default=default,
        metadata={"meaning": meaning, "low": low, "high": high, "choices": choices},
    )


@dataclass(frozen=True)
class AttentionSettings:
    heads: int = setting(4, "query heads; must divide model.width", low=1)
    groups: int = setting(
        0, "key/value heads; 0: as many as heads, 1: multi-query, between: grouped", low=0
    )
    softcap: float = setting(0.0, "scores are bent to stay within ±softcap; 0: off", low=0)


@dataclass(frozen=True)
class ModelSettings:
    layers: int = setting(4, "decoder blocks, one above the other", low=1, high=2**16 - 1)
    width: int = setting(128, "numbers per character", low=1)
    context: int = setting(128, "characters the model sees at once", low=8)
    expansion: int = setting(4, "hidden width of the feed-forward part, in units of width", low=1)
    positions: str = setting("learned", "how the model knows the order", choices=SCHEMES)
    rope_base: float = setting(10000.0, "rope: base of the angles", low=1)
    rope_width: int = setting(0, "rope: channels of each head that turn; 0: all", low=0)
    t5_buckets: int = setting(32, "t5: numbers that each head learns", low=2)
    t5_max_distance: int = setting(128, "t5: from here on all distances share one", low=2)
    norm: str = setting("layer", "what normalises", choices=("layer", "rms"))
    placement: str = setting(
        "pre", "where: before each part, or after its residual", choices=("pre", "post")
    )
    activation: str = setting("gelu", "of the feed-forward part", choices=("gelu", "swiglu"))
    tied: bool = setting(True, "one array embeds the characters and scores them")
    dtype: str = setting("float32", "of weights and arithmetic", choices=("float32", "float64"))
    fast: bool = setting(True, "Numba twins of element-wise work; false: the readable NumPy")
    attention: AttentionSettings = field(default_factory=AttentionSettings)


@dataclass(frozen=True)
class StochasticSettings:
    kind: str = setting("element", "what is dropped together", choices=("none", *KINDS))
    rate: float = setting(0.5, "probability of dropping, in the first layer", low=0, high=1)
    compensation: str = setting(
        "renormalise", "how the kept weights make up for it", choices=COMPENSATIONS
    )
    schedule: str = setting("geometric", "over the layers", choices=OVER_LAYERS)
    decay: float = setting(0.9, "geometric: rate of a layer / rate of the one below", low=0, high=1)
    decrement: float = setting(0.1, "linear: how much less each layer drops", low=0, high=1)
    warmup: str = setting(
        "ramp", "over the first steps: low and then full, or rising", choices=OVER_TRAINING
    )
    warmup_fraction: float = setting(0.1, "of all steps that the warm-up takes", low=0, high=1)
    low: float = setting(0.1, "hold: share of the rate that the warm-up drops", low=0, high=1)
    first_layers: int = setting(1, "start local: layers that drop at the first step", low=1)
    first_heads: int = setting(1, "start local: heads of each that drop at the first step", low=1)
    widen_fraction: float = setting(
        0.0, "start local: of all steps until every layer and head drops; 0: at once", low=0, high=1
    )
    tile: int = setting(16, "block: positions on a side of a tile", low=1)
    protect_diagonal: bool = setting(True, "a character always attends to itself")


@dataclass(frozen=True)
class TrainingSettings:
    steps: int = setting(1200, "updates of the weights", low=1, high=2**32 - 1)
    batch: int = setting(16, "windows of text per step", low=1)
    seed: int = setting(0, "fixes weights, batches and masks", low=0, high=2**32 - 1)
    learning_rate: float = setting(3e-3, "at its highest", low=0)
    final_fraction: float = setting(0.1, "of it that is left at the end", low=0, high=1)
    warmup: int = setting(100, "steps over which the learning rate rises", low=0)
    weight_decay: float = setting(0.1, "of matrices, not of biases and norms", low=0)
    beta1: float = setting(0.9, "memory of AdamW's mean of gradients", low=0, high=0.9999)
    beta2: float = setting(0.99, "memory of AdamW's mean of squares", low=0, high=0.9999)
    clip: float = setting(1.0, "largest norm of the whole gradient; 0: no limit", low=0)
    look_every: int = setting(50, "steps between two looks at the probe and validation", low=1)
    band: float = setting(0.05, "nats the loss may fluctuate by without a warning", low=0)
    save_every: int = setting(100, "steps between two checkpoints", low=1)
    keep: int = setting(3, "checkpoints that are kept", low=1)


@dataclass(frozen=True)
class DataSettings:
    text: str = setting("", "a UTF-8 file; empty: Python's own documentation")
    validation: float = setting(
        0.1, "of the text, at its end, that is never trained on", low=0, high=1
    )


@dataclass(frozen=True)
class Config:
    """All settings of a run; `Config()` is what `train` does by default."""

    model: ModelSettings = field(default_factory=ModelSettings)
    stochastic: StochasticSettings = field(default_factory=StochasticSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    data: DataSettings = field(default_factory=DataSettings)

    def __post_init__(self) -> None:
        for key in FIELDS:
            _check(key, get(self, key))
        attention, training = self.model.attention, self.training
        if self.model.width % attention.heads:
            raise ValueError(
                f"model.width is {self.model.width}, which model.attention.heads = "
                f"{attention.heads} does not divide"
            )
        if attention.groups and attention.heads % attention.groups:
            raise ValueError(
                f"model.attention.heads is {attention.heads}, which model.attention.groups = "
                f"{attention.groups} does not divide"
            )
        if training.warmup > training.steps:
            raise ValueError(
                f"training.warmup is {training.warmup}, more than training.steps = {training.steps}"
            )
        random_mask(self.stochastic)  # raises if its settings do not go together
        _check_positions(self.model)
        if self.data.validation in (0, 1):
            raise ValueError(
                f"data.validation is {self.data.validation:g}: both parts need some text"
            )


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "demo": {
        "model.layers": 2,
        "model.width": 64,
        "stochastic.rate": 0.3,
        "training.learning_rate": 6e-3,
        "training.steps": 800,
    },
}


# ---- what goes together --------------------------------------------------------------------------


def _check_positions(model: ModelSettings) -> None:
    head = model.width // model.attention.heads
    if model.positions == "rope":
        turned = model.rope_width or head
        if turned % 2 or turned > head:
            raise ValueError(
                f"model.positions = 'rope' turns channels in pairs: model.rope_width = "
                f"{model.rope_width} (0: all) has to be even and at most {head}, model.width / "
                "model.attention.heads"
            )
        if model.rope_base == 1:
            raise ValueError("model.rope_base is 1: no channel would turn slower than another")
    elif model.positions == "t5" and model.t5_max_distance <= model.t5_buckets // 2:
        raise ValueError(
            f"model.t5_max_distance is {model.t5_max_distance}, but half of model.t5_buckets = "
            f"{model.t5_buckets} have one distance each: it has to lie beyond them"
        )


# ---- what the model is given ---------------------------------------------------------------------


def rope(settings: ModelSettings) -> Rope | None:
    """How heads turn; None: they do not."""
    if settings.positions != "rope":
        return None
    return Rope(base=settings.rope_base, width=settings.rope_width or None)


def random_mask(settings: StochasticSettings) -> RandomMask | None:
    """What to drop; None: nothing."""
    if settings.kind == "none":
        return None
    return RandomMask(
        kind=settings.kind,
        rate=settings.rate,
        tile=settings.tile,
        protect_diagonal=settings.protect_diagonal,
        compensation=settings.compensation,
    )


def drop_schedule(settings: StochasticSettings) -> Schedule:
    """How much to drop in which layer, head and step."""
    names = [f.name for f in dataclasses.fields(Schedule)]
    return Schedule(**{name: getattr(settings, name) for name in names})


# ---- keys ----------------------------------------------------------------------------------------


TABLES: dict[str, type] = {
    "model": ModelSettings,
    "model.attention": AttentionSettings,
    "stochastic": StochasticSettings,
    "training": TrainingSettings,
    "data": DataSettings,
}
FIELDS: dict[str, dataclasses.Field] = {
    f"{table}.{f.name}": f
    for table, settings in TABLES.items()
    for f in dataclasses.fields(settings)
    if f"{table}.{f.name}" not in TABLES
}


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def to_flat(config: Config) -> dict[str, Any]:
    """Every dotted key with its value."""
    return {key: get(config, key) for key in FIELDS}


def _nearest(key: str) -> str:
    """The valid key that looks most like `key`, which may be a full name or its last part."""
    leaf = key.rpartition(".")[2]

    def likeness(valid: str) -> float:
        name = valid.rpartition(".")[2]
        if leaf == "".join(word[0] for word in name.split("_")):  # lr for learning_rate
            return 1.0
        return max(
            difflib.SequenceMatcher(None, key, valid).ratio(),
            0.95 * difflib.SequenceMatcher(None, leaf, name).ratio(),
        )

    return max(FIELDS, key=likeness)


_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
}


def _check(key: str, value: Any) -> None:
    """Raise a ValueError that names the key unless `value` has its type and lies in its range."""
    f = FIELDS[key]
    low, high, choices = (f.metadata[name] for name in ("low", "high", "choices"))
    if type(value) is not f.type:
        raise ValueError(f"{key} must be {_NAMES[f.type]}, got {value!r}")
    if choices and value not in choices:
        close = difflib.get_close_matches(value, choices, 1)
        hint = f": did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{key} must be one of {', '.join(choices)}, got {value!r}{hint}")
    if f.type is float and not math.isfinite(value):
        raise ValueError(f"{key} must be finite, got {value!r}")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise ValueError(f"{key} must be {bounds}, got {value!r}")


# ---- reading and writing -------------------------------------------------------------------------


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        key = prefix + name
        if isinstance(value, Mapping) and key not in FIELDS:
            yield from _flatten(value, key + ".")
        else:
            yield key, value


def from_flat(values: Mapping[str, Any]) -> Config:
    """The configuration with these dotted keys changed from the defaults.

    Raises
    ------
    ValueError
        If a key is unknown (the message names the nearest), or a value has the wrong type or range.
    """
    tables: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    for key, value in values.items():
        if key not in FIELDS:
            raise ValueError(f"unknown setting {key!r}: did you mean {_nearest(key)!r}?")
        whole_for_real = FIELDS[key].type is float and type(value) is int
        table, _, name = key.rpartition(".")
        tables[table][name] = float(value) if whole_for_real else value
    attention = AttentionSettings(**tables["model.attention"])
    return Config(
        model=ModelSettings(**tables["model"], attention=attention),
        stochastic=StochasticSettings(**tables["stochastic"]),
        training=TrainingSettings(**tables["training"]),
        data=DataSettings(**tables["data"]),
    )


def read_toml(path: str | Path) -> dict[str, Any]:
    """The dotted keys of a TOML file.

    Raises
    ------
    ValueError
        If the file cannot be read, is not TOML, or is of another version.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not TOML: {error}") from error
    version = tables.pop("version", VERSION)
    if version != VERSION:
        raise ValueError(f"{str(path)!r} has version {version!r}, this release reads {VERSION}")
    return dict(_flatten(tables))


def parse_assignment(text: str) -> tuple[str, Any]:
    """The key and value of `--set key=value`; a value that is not TOML is a string, so that
    `--set stochastic.kind=block` needs no quotes.

    Raises
    ------
    ValueError
        If there is no `=`.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ValueError(f"--set takes table.key=value, got {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def load_config(
    preset: str = "default", path: str | Path | None = None, assignments: Iterable[str] = ()
) -> Config:
    """A preset, changed by a TOML file, changed by assignments `table.key=value`."""
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: there are {', '.join(PRESETS)}")
    values = dict(PRESETS[preset])
    values |= read_toml(path) if path is not None else {}
    values |= dict(parse_assignment(text) for text in assignments)
    return from_flat(values)


def to_toml(config: Config) -> str:
    """The whole configuration as TOML, each key with a comment that says what it means."""
    lines = tomli_w.dumps({"version": VERSION, **dataclasses.asdict(config)}).splitlines()
    table, commented = "", []
    for line in lines:
        key = f"{table}.{line.partition(' = ')[0]}"
        table = line.strip("[]") if line.startswith("[") else table
        commented.append(f"{line}  # {describe(key)}" if key in FIELDS else line)
    return "\n".join(commented) + "\n"


def describe(key: str) -> str:
    """What a key means and which values it takes."""
    f = FIELDS[key]
    choices = f.metadata["choices"]
    return f.metadata["meaning"] + (f" ({' | '.join(choices)})" if choices else "")


# ---- the common ranges of the method -------------------------------------------------------------


def advice(config: Config) -> list[str]:
    """One sentence for each setting outside the ranges that are common for the method. Nothing is
    forbidden: an experiment outside them is how one learns why they are common."""
    s = config.stochastic
    if s.kind == "none":
        return []
    common = {
        "stochastic.rate": (s.rate, 0.3, 0.6, True),
        "stochastic.decay": (s.decay, 0.8, 0.95, s.schedule == "geometric"),
        "stochastic.tile": (s.tile, 8, 32, s.kind == "block"),
    }
    return [
        f"{key} is {value:g}; {low:g} to {high:g} is common"
        for key, (value, low, high, used) in common.items()
        if used and not low <= value <= high
    ]
