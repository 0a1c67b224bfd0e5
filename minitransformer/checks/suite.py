"""Target, property, mutant: the three words that every check of the project is made of."""

import functools
import importlib
import pkgutil
import re
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import seed as with_seed
from hypothesis.errors import Flaky, Unsatisfiable

# A gate asks only whether: few draws, no shrinking, the same ones every time. A person gets the
# smallest counter-example.
_QUIET: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "report_multiple_bugs": False,
}
GATE = settings(
    max_examples=25, derandomize=True, phases=(Phase.explicit, Phase.generate), **_QUIET
)
# Which cases Hypothesis draws depends on the modules that are loaded: a mistake must not hang on 25
# of them. The first that shows it ends the search.
MANY = settings(GATE, max_examples=300)
PERSON = settings(max_examples=100, derandomize=True, **_QUIET)
THOROUGH = settings(max_examples=500, **_QUIET)

REFUSALS = 40  # cases in a row that a target cannot express before it is not asked any more
# after the first failure: a small counter-example, not the smallest of a slow target
SHRINKS, SHRINK_SECONDS = 100, 4.0


class NotApplicable(Exception):
    """The target does not offer what the property asks for: a name, an option, a result."""


class Target:
    """A mechanism's public names, some of them replaced."""

    def __init__(self, base: Any, **replaced: Any):
        self._base = base
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


@dataclass(frozen=True)
class Property:
    """A statement about any target. Stored undecorated; Hypothesis is bound to a fresh wrapper for
    each run."""

    mechanism: str  # "attention.softmax"
    check: Callable[..., None]
    draws: dict[str, Any]
    needs: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.check.__name__

    @property
    def statement(self) -> str:
        """The docstring's first sentence, or the name read as one."""
        doc = (self.check.__doc__ or self.name.replace("_", " ")).strip()
        first = " ".join(doc.split("\n\n")[0].split())
        return re.split(r"(?<!Eq\.)(?<=\.) ", first)[0]

    def applies_to(self, target: Any) -> bool:
        return all(getattr(target, name, None) is not None for name in self.needs)

    def run(self, target: Any, profile: settings = PERSON, seed: int | None = None) -> None:
        """Raise an AssertionError if the statement is false of `target`, NotApplicable if it cannot
        be asked. Without a seed the draws are the same every time."""
        missing = [name for name in self.needs if getattr(target, name, None) is None]
        if missing:
            raise NotApplicable(f"{self.name} needs {', '.join(missing)}")
        if not self.draws:
            self.check(target)
            return

        asked = refused = later = 0
        failure: Exception | None = None
        enough, reasons = 0.0, Counter[str]()

        @functools.wraps(self.check)
        def once(**drawn: Any) -> None:
            nonlocal asked, refused, later, failure, enough
            later += failure is not None
            if later > SHRINKS or (later and time.monotonic() > enough):
                # the one exception that ends a run of Hypothesis at once
                raise unittest.SkipTest("enough")
            try:
                self.check(target, **drawn)
            except NotApplicable as reason:  # to these arguments; others may do
                refused += 1
                reasons[str(reason)] += 1
                if not asked and refused >= REFUSALS:
                    raise unittest.SkipTest("enough") from None
                reject()
            except Exception as error:
                error.drawn = drawn  # type: ignore[attr-defined]  # the counter-example
                enough = enough or time.monotonic() + SHRINK_SECONDS
                failure, asked = error, asked + 1
                raise
            asked += 1

        del (
            once.__wrapped__
        )  # Hypothesis must see the keywords of the draws, not those of the check
        try:
            asked_of = profile(given(**self.draws)(once))
            (asked_of if seed is None else with_seed(seed)(asked_of))()
        except Unsatisfiable:
            pass
        except (unittest.SkipTest, Flaky):  # flaky: the target failed, and not when asked again
            if failure is not None:
                raise failure from None
        if not asked:
            usual = reasons.most_common(1)
            raise NotApplicable(usual[0][0] if usual else "no case of it was drawn")


@dataclass(frozen=True)
class Mutant:
    """A mistake with a name: a target in which `replaces` is wrong, and the properties that say
    so."""

    mechanism: str
    name: str
    why: str
    replaces: str
    function: Callable[..., Any]
    killed_by: tuple[str, ...]
    crashes: bool = False  # it raises on legal input, and that counts as being caught

    @property
    def target(self) -> Target:
        return Target(reference(self.mechanism), **{self.replaces: self.function})

    def is_killed_by(self, statement: Property, profile: settings = MANY) -> bool:
        """True if `statement` is false of this mutant."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a wrong formula may well divide by zero
                statement.run(self.target, profile)
        except AssertionError:
            return True
        except NotApplicable:
            return False
        except Exception:
            if self.crashes:
                return True
            raise
        return False


@dataclass
class Suite:
    """The properties and mutants of one mechanism, filled by decorators."""

    mechanism: str
    properties: list[Property] = field(default_factory=list)
    mutants: list[Mutant] = field(default_factory=list)

    def property(self, *needs: str, **draws: Any) -> Callable:
        """Register a statement: the names it `needs` from a target, and the strategies of its
        arguments."""

        def register(check: Callable[..., None]) -> Callable[..., None]:
            self.properties.append(Property(self.mechanism, check, draws, needs))
            return check

        return register

    def mutant(
        self, replaces: str, why: str, *, killed_by: str | tuple[str, ...], crashes: bool = False
    ) -> Callable:
        """Register a wrong implementation of `replaces`; its name is the function's name, read as a
        phrase."""
        killers = (killed_by,) if isinstance(killed_by, str) else killed_by

        def register(function: Callable) -> Callable:
            name = function.__name__.strip("_").replace("_", " ")
            if isinstance(function, type):  # TiedScoresHaveNoGradient
                name = re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()
            self.mutants.append(
                Mutant(self.mechanism, name, why, replaces, function, killers, crashes)
            )
            return function

        return register

    def __getitem__(self, name: str) -> Property:
        for statement in self.properties:
            if statement.name == name:
                return statement
        raise KeyError(f"{self.mechanism} has no property {name!r}")


def reference(mechanism: str) -> ModuleType:
    """The library module that is the reference of `mechanism`, for example "attention.softmax"."""
    return importlib.import_module(f"minitransformer.{mechanism}")


def suite(mechanism: str) -> Suite:
    """The suite of one mechanism, its mutants included."""
    found = importlib.import_module(f"minitransformer.checks.properties.{mechanism}").suite
    importlib.import_module(f"minitransformer.checks.mutants.{mechanism}")
    return found


def suites() -> Iterator[Suite]:
    """Every suite of the project, in alphabetical order of its mechanism."""
    from minitransformer.checks import properties

    prefix = properties.__name__ + "."
    for module in sorted(pkgutil.walk_packages(properties.__path__, prefix), key=lambda m: m.name):
        if not module.ispkg:
            yield suite(module.name.removeprefix(prefix))
