"""Every chapter and its tasks: what the learner writes, and which suite judges it.

A task cuts functions (or methods, "Schedule.drop_rate") out of a mechanism's file. It is judged by
the properties of that mechanism that ask for something of this task and for nothing of a later one.
Its last task asks for properties instead, and the mechanism's mutants judge those.
"""

import difflib
import functools
import importlib.util
import inspect
import typing
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from minitransformer.checks import verify
from minitransformer.checks.suite import GATE, Mutant, Property, Suite, reference, suite


@dataclass(frozen=True)
class Task:
    """One thing to write. `cut` are names in the mechanism's file; `judged` are the public names
    through which they are seen, if those are not the same."""

    number: str  # "01.2": the second task of chapter 01
    title: str
    minutes: int
    mechanism: str  # "attention.softmax"
    cut: tuple[str, ...] = ()  # none: the task is to state properties
    judged: tuple[str, ...] = ()
    catch: int = 0  # of a task that asks for properties: mutants to catch

    @property
    def chapter(self) -> str:
        return self.number.split(".")[0]

    @property
    def public(self) -> tuple[str, ...]:
        """The names a property may need from this task."""
        return self.judged or tuple(dict.fromkeys(name.split(".")[0] for name in self.cut))

    @property
    def file(self) -> str:
        return "exercise.py" if self.cut else "properties.py"


@dataclass(frozen=True)
class Chapter:
    number: str
    slug: str
    title: str
    tasks: tuple[Task, ...]

    @property
    def folder(self) -> str:
        return f"{self.number}_{self.slug}"

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task.mechanism for task in self.tasks))


def _chapter(number: str, slug: str, title: str, *tasks: tuple[Any, ...]) -> Chapter:
    """Tasks are (title, minutes, mechanism, cut, judged), numbered in their order."""
    return Chapter(
        number, slug, title, tuple(Task(f"{number}.{n}", *task) for n, task in enumerate(tasks, 1))
    )


def _state(mechanism: str, *, of: tuple[str, ...], catch: int) -> tuple[Any, ...]:
    return ("State a property", 20, mechanism, (), of, catch)


CHAPTERS = (
    _chapter(
        "01",
        "softmax",
        "Softmax",
        ("Softmax that never overflows", 15, "attention.softmax",
         ("_exponentials", "softmax_forward"), ("softmax_forward",)),
        ("Softmax, line by line, and back", 25, "steps",
         ("softmax_steps_forward", "softmax_steps_backward")),
        ("The backward pass in one line", 10, "attention.softmax", ("softmax_backward",)),
        ("Log-sum-exp and log-softmax", 25, "attention.softmax",
         ("logsumexp_forward", "logsumexp_backward", "log_softmax_forward",
          "log_softmax_backward")),
        ("Join two softmaxes", 25, "attention.softmax", ("merge_forward", "merge_backward")),
        ("The state a kernel carries", 15, "attention.softmax",
         ("state_of", "merge_states", "finish_state")),
        ("The soft-cap", 10, "attention.softmax", ("softcap_forward", "softcap_backward")),
        _state("attention.softmax", of=("softmax_forward",), catch=3),
    ),
    _chapter(
        "02",
        "attention",
        "Attention",
        ("Attention without heads, line by line", 15, "steps", ("attention_steps_forward",)),
        ("Back through every line", 25, "steps", ("attention_steps_backward",)),
        ("Attention", 40, "attention.dense", ("attention_forward",)),
        ("The backward pass, fused", 40, "attention.dense", ("attention_backward",)),
        _state("attention.dense", of=("attention_forward",), catch=5),
    ),
    _chapter(
        "03",
        "masks",
        "Masks",
        ("Where the queries stand, and causal", 10, "attention.masks", ("offset", "causal"),
         ("causal",)),
        ("Windows, dilated or not", 15, "attention.masks", ("window", "dilated")),
        ("The two masks of the sparse Transformer", 20, "attention.masks", ("strided", "fixed")),
        ("Global tokens, padding, packed documents", 20, "attention.masks",
         ("global_tokens", "padding", "packed")),
        _state("attention.masks", of=("causal", "window"), catch=4),
    ),
    _chapter(
        "04",
        "random_masks",
        "Random masks and renormalisation",
        ("From a rate to a threshold", 10, "philox",
         ("threshold", "inclusion_probability", "uniform")),
        ("Random bits that depend on where you stand", 20, "philox", ("philox", "random_bits")),
        ("Renormalised weights, line by line, and back", 25, "steps",
         ("renormalise_steps_forward", "renormalise_steps_backward")),
        ("One word for each pair, key or head", 20, "stochastic.samplers",
         ("_element", "_column", "_head"), ("resolve",)),
        ("A number of keys for each query", 30, "stochastic.samplers",
         ("_smallest", "_fixed_k", "_multinomial", "_gumbel"), ("resolve",)),
        ("How likely is a pair to stay?", 20, "stochastic.samplers", ("_inclusion",),
         ("resolve", "inclusion_probabilities")),
        ("Two ways to make up for what is gone", 25, "stochastic.compensation",
         ("compensated_attention_forward",),
         ("compensated_attention_forward", "stochastic_attention_forward")),
        ("The backward pass, fused, and one that is no derivative", 25, "stochastic.compensation",
         ("stochastic_attention_backward",)),
        _state("stochastic.compensation", of=("stochastic_attention_forward",), catch=3),
    ),
    _chapter(
        "05",
        "block_masks",
        "Block-wise randomness",
        ("One word for each tile", 10, "stochastic.samplers", ("_block",), ("resolve",)),
        ("Thirty-two pairs in a word", 15, "sparse.block_mask", ("_packed", "_unpacked"),
         ("from_dense", "to_dense")),
        ("Which tiles exist, and what is in them", 30, "sparse.block_mask",
         ("from_dense", "_asked"), ("from_dense", "from_rule", "from_tiles")),
        ("A list by rows", 20, "sparse.block_mask", ("_pointers", "listed"),
         ("from_dense", "listed")),
        ("Back to pairs", 20, "sparse.block_mask", ("to_dense", "pairs", "layout_of")),
        ("How much work is left, and how much memory", 15, "sparse.block_mask",
         ("tile_density", "pair_density", "memory")),
        _state("sparse.block_mask", of=("from_dense", "to_dense"), catch=4),
    ),
    _chapter(
        "06",
        "schedules",
        "Schedules and warm-up",
        ("Over the layers", 15, "stochastic.schedules", ("Schedule._over_layers",)),
        ("Over training", 10, "stochastic.schedules", ("Schedule._over_training",)),
        ("Layers and heads that join one by one", 20, "stochastic.schedules",
         ("Schedule.drop_rate", "Schedule._reached")),
        ("The learning rate", 15, "training.rates", ("cosine_rate", "inverse_root_rate")),
        _state("stochastic.schedules", of=("Schedule",), catch=5),
    ),
)  # fmt: skip

TASKS = {task.number: task for chapter in CHAPTERS for task in chapter.tasks}


def find_task(number: str) -> Task:
    """A task by its number.

    Raises
    ------
    ValueError
        If there is none.
    """
    if number not in TASKS:
        near = difflib.get_close_matches(number, TASKS, n=1, cutoff=0.0)
        raise ValueError(f"there is no task {number!r}: did you mean {near[0]}?")
    return TASKS[number]


def chapter_of(number: str) -> Chapter:
    """A chapter by its number, or by that of one of its tasks.

    Raises
    ------
    ValueError
        If there is none.
    """
    for chapter in CHAPTERS:
        if chapter.number == number.split(".")[0]:
            return chapter
    raise ValueError(f"there is no chapter {number!r}: there are {CHAPTERS[0].number} to "
                     f"{CHAPTERS[-1].number}")  # fmt: skip


# ---- how a task is judged ------------------------------------------------------------------------


def statements(number: str) -> list[Property]:
    """The properties that judge a task: the library's own."""
    task = find_task(number)
    if not task.cut:
        return _of_properties(task)
    later = {
        name
        for other in TASKS.values()
        if other.mechanism == task.mechanism and other.number > task.number and other.cut
        for name in other.public
    } - set(task.public)
    return [
        p
        for p in suite(task.mechanism).properties
        if set(p.needs) & set(task.public) and not set(p.needs) & later
    ]


def statement_of(number: str, name: str) -> Property:
    """One of them, by its name."""
    return next(p for p in statements(number) if p.name == name)


def mutants(task: Task) -> list[Mutant]:
    """The mistakes that a task is about."""
    return [m for m in suite(task.mechanism).mutants if m.replaces in task.public]


def _of_properties(task: Task) -> list[Property]:
    """What is asked of properties that a learner states."""

    def your_properties_are_true(target: Any) -> None:
        """Your properties are true of the library."""
        stated = _stated(target)
        for statement in stated:
            try:
                statement.run(reference(task.mechanism), verify.PROFILES["default"])
            except Exception as error:
                raise AssertionError(
                    f"{statement.name} says that the library is wrong: {error}"
                ) from None

    def your_properties_catch_mistakes(target: Any) -> None:
        """Your properties catch mistakes, and not by crashing."""
        stated = _stated(target)
        caught: list[Mutant] = []
        missed: list[Mutant] = []
        for mutant in mutants(task):
            (caught if any(_catches(p, mutant) for p in stated) else missed).append(mutant)
            if len(caught) == task.catch:
                return
        names = ", ".join(m.name for m in caught) or "none"
        raise AssertionError(
            f"they catch {len(caught)} known mistakes ({names}), {task.catch} are asked for; "
            f"not caught is, say, '{missed[0].name}': {missed[0].why}"
        )

    checks = (your_properties_are_true, your_properties_catch_mistakes)
    return [Property(task.mechanism, check, {}, ("suite",)) for check in checks]


def _stated(target: Any) -> list[Property]:
    found: Suite = target.suite
    assert found.properties, "no property is stated yet: take the comment marks off the example"
    return found.properties


def _catches(statement: Property, mutant: Mutant) -> bool:
    try:
        return mutant.is_killed_by(statement, GATE)
    except Exception:  # a crash tells nothing
        return False


# ---- a learner's file as a target ----------------------------------------------------------------


def target_of(task: Task, written: ModuleType | SimpleNamespace) -> Any:
    """The reference with this task's functions replaced by those in `written`.

    Everything else in `written` becomes the library's own, so one mistake fails one task.
    """
    if not task.cut:
        return written
    mine = {name.split(".")[0] for name in task.cut}
    for mechanism in chapter_of(task.number).mechanisms:
        for name, x in vars(reference(mechanism)).items():
            if hasattr(written, name) and name not in mine and not name.startswith("__"):
                setattr(written, name, x)
    module = reference(task.mechanism)
    return _with(module, {n: _written(task, n, getattr(written, n), module) for n in mine})


def _written(task: Task, name: str, x: Any, module: ModuleType) -> Any:
    """A function of the learner's; or the library's class with the methods that this task asks
    for."""
    methods = [cut.split(".")[1] for cut in task.cut if cut.startswith(f"{name}.")]
    if not methods:
        return _returning(x)
    return type(name, (getattr(module, name),), {m: _returning(vars(x)[m]) for m in methods})


def _returning(function: Any) -> Any:
    """A function that says so if it comes back with nothing, and should not."""
    said = function.__annotations__.get("return")
    if said is None or type(None) in typing.get_args(said):
        return function

    @functools.wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        assert result is not None, f"{function.__name__} returned None: is a `return` missing?"
        return result

    return checked


def _with(module: ModuleType, replaced: dict[str, Any]) -> SimpleNamespace:
    """A copy of a module whose functions call each other's replacements."""
    names = dict(vars(module))
    for name, decorated in vars(module).items():
        x = inspect.unwrap(decorated) if isinstance(decorated, FunctionType) else None
        if isinstance(x, FunctionType) and x.__globals__ is vars(module):
            copy = FunctionType(x.__code__, names, x.__name__, x.__defaults__, x.__closure__)
            copy.__kwdefaults__ = x.__kwdefaults__
            names[name] = copy
    names.update(replaced)
    return SimpleNamespace(**{k: v for k, v in names.items() if not k.startswith("__")})


def named_target(spec: str, number: str) -> Any:
    """The target of a task in the file `spec`.

    Raises
    ------
    ValueError
        If a function of the task is gone from the file.
    """
    task = find_task(number)
    made = importlib.util.spec_from_file_location("learner", spec)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    for name in {name.split(".")[0] for name in task.cut} or {"suite"}:
        if not hasattr(module, name):
            raise ValueError(f"{task.file} has no {name} any more: `reset {number}` puts it back")
    return target_of(task, module)
