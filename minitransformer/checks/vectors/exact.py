"""Numbers of 50 digits that know their derivative, and how often a computer would have rounded.

A definition written down with them gives three things at once: the value to far more digits than a
float64 holds, the gradient without anybody deriving it (reverse mode, every operation with its
slope), and for both a bound on the rounding of whoever computes the same formula in floats:

    z = f(x, y):   error(z) = |f_x| error(x) + |f_y| error(y) + |z|

in units of the rounding u (2⁻⁵³ for float64). That is a running error analysis to first order
(Higham, Accuracy and Stability of Numerical Algorithms, chapter 3). Sums count n roundings of the
sum of magnitudes, so that their order does not matter. Only the standard library is used, so the
digits are the same on every machine.
"""

import contextlib
import contextvars
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Context, Decimal, localcontext
from typing import Any

import numpy as np

from minitransformer.arrays import Array

DIGITS = 50
PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899863"
)
_serial = itertools.count()

_ONE = Decimal(1)
_remembers: contextvars.ContextVar[bool] = contextvars.ContextVar("_remembers", default=True)

# a parent, the slope towards it, the slope's magnitude and its error
Edge = tuple["Exact", Decimal, float, float]


@contextlib.contextmanager
def digits(*, derivatives: bool = True) -> Iterator[None]:
    """Inside this block, 50 digits and exponents without end; without `derivatives` numbers forget
    what they were made of, which is faster."""
    with localcontext(Context(prec=DIGITS, Emin=-999999, Emax=999999)):
        token = _remembers.set(derivatives)
        try:
            yield
        finally:
            _remembers.reset(token)


class Exact:
    """One number of a computation."""

    __slots__ = ("error", "parents", "serial", "size", "value")

    def __init__(self, value: Decimal | float, error: float = 0.0, parents: Sequence[Edge] = ()):
        self.value = value if isinstance(value, Decimal) else Decimal(value)
        self.size = abs(float(self.value))
        self.error = error
        self.parents = parents if _remembers.get() else ()  # who it was made of
        self.serial = next(_serial)

    def __add__(self, other: Any) -> "Exact":
        return total([self, lifted(other)])

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Exact":
        return total([self, -lifted(other)])

    def __rsub__(self, other: Any) -> "Exact":
        return lifted(other) - self

    def __neg__(self) -> "Exact":
        return Exact(-self.value, self.error, [(self, Decimal(-1), 1.0, 0.0)])

    def __mul__(self, other: Any) -> "Exact":
        return dot([self], [lifted(other)])

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "Exact":
        y = lifted(other)
        inverse = 1 / y.value
        size, z = abs(float(inverse)), self.value / y.value
        relative, quotient = y.error * size + 1, self.size * size
        error = self.error * size + quotient * relative
        edges = [
            (self, inverse, size, size * relative),
            (y, -z * inverse, quotient * size, size * (error + quotient * relative)),
        ]
        return Exact(z, error, edges)

    def __rtruediv__(self, other: Any) -> "Exact":
        return lifted(other) / self


def lifted(x: Any) -> Exact:
    """A plain number as an exact one. Infinity and NaN are nobody's business here."""
    if isinstance(x, Exact):
        return x
    made = Exact(Decimal(x) if isinstance(x, int | Decimal) else Decimal(float(x)))
    if not made.value.is_finite():
        raise ValueError(f"{x} was read, which is no number")
    return made


def rounded(x: Any) -> Exact:
    """A constant that a float can only hold rounded, such as π."""
    made = lifted(x)
    return Exact(made.value, made.size)


# ---- sums ----------------------------------------------------------------------------------------


def total(terms: Iterable[Exact]) -> Exact:
    """Σ x"""
    terms = list(terms)
    value = sum((x.value for x in terms), Decimal(0))
    size, error = sum(x.size for x in terms), sum(x.error for x in terms)
    edges = [(x, _ONE, 1.0, 0.0) for x in terms]
    return Exact(value, error + max(len(terms) - 1, 0) * size, edges)


def dot(xs: Iterable[Exact], ys: Iterable[Exact]) -> Exact:
    """Σ x y"""
    value, size, error, count = Decimal(0), 0.0, 0.0, 0
    edges: list[Edge] = []
    remembers = _remembers.get()
    for x, y in zip(xs, ys, strict=True):
        count += 1
        if remembers:
            edges.append((x, y.value, y.size, y.error))
            edges.append((y, x.value, x.size, x.error))
        if x.size and y.size:
            value += x.value * y.value
            size += x.size * y.size
        error += x.size * y.error + y.size * x.error
    return Exact(value, error + count * size, edges)


# ---- functions -----------------------------------------------------------------------------------


def _function(x: Exact, value: Decimal, slope: Decimal, bend: Decimal, blur: float = 0.0) -> Exact:
    """f(x), its slope and the slope's slope; `blur` is what else the slope may be off by."""
    steep = abs(float(slope))
    made = Exact(value, 0.0, [(x, slope, steep, abs(float(bend)) * x.error + steep + blur)])
    made.error = steep * x.error + made.size
    return made


def exp(x: Exact) -> Exact:
    z = x.value.exp()
    return _function(x, z, z, z)


def log(x: Exact) -> Exact:
    return _function(x, x.value.ln(), 1 / x.value, 1 / (x.value * x.value))


def sqrt(x: Exact) -> Exact:
    z = x.value.sqrt()
    return _function(x, z, 1 / (2 * z), 1 / (4 * z * x.value))


def sigmoid(x: Exact) -> Exact:
    """1 / (1 + e^-x), with the rounding of ½ (1 + tanh(x / 2)), which does not overflow."""
    return (1 + tanh(x / 2)) / 2


def tanh(x: Exact) -> Exact:
    e = (2 * -abs(x.value)).exp()
    z = ((1 - e) / (1 + e)).copy_sign(x.value)
    slope = 4 * e / ((1 + e) * (1 + e))
    # everybody computes the slope as 1 - z², where most of it may cancel
    return _function(x, z, slope, 2 * z * slope, 3 * float(z * z))


def erf(x: Exact) -> Exact:
    """By its series, with digits to spare for what cancels."""
    slope = 2 / PI.sqrt() * (-x.value * x.value).exp()
    return _function(x, _erf(x.value), slope, 2 * x.value * slope)


def _erf(x: Decimal) -> Decimal:
    if abs(x) > 12:  # 1 to 60 digits
        return Decimal(1).copy_sign(x)
    with localcontext() as context:
        context.prec = 2 * DIGITS + 80
        term = result = x
        for n in itertools.count(1):
            term = -term * x * x / n
            result += term / (2 * n + 1)
            if abs(term) < Decimal(10) ** -(DIGITS + 5):
                break
        return 2 / PI.sqrt() * result


def cos(x: Exact) -> Exact:
    c, s = _circle(x.value)
    return _function(x, c, -s, -c)


def sin(x: Exact) -> Exact:
    c, s = _circle(x.value)
    return _function(x, s, c, -s)


def _circle(x: Decimal) -> tuple[Decimal, Decimal]:
    """cos x and sin x by their series, x taken to [-π, π] first."""
    with localcontext() as context:
        context.prec = DIGITS + 20
        x = x - (x / (2 * PI)).to_integral_value() * 2 * PI
        term, parts = Decimal(1), [Decimal(1), Decimal(0)]
        for n in itertools.count(1):
            term = term * x / n
            parts[n % 2] += -term if n % 4 in (2, 3) else term
            if abs(term) < Decimal(10) ** -(DIGITS + 10):
                break
        return +parts[0], +parts[1]


# ---- arrays --------------------------------------------------------------------------------------


def leaves(x: Array) -> Array:
    """An array of exact numbers; NaN and infinity stay floats, which nobody may compute with."""
    made = np.empty(x.shape, object)
    for index in np.ndindex(x.shape):
        value = float(x[index])
        made[index] = Exact(value) if np.isfinite(value) else value
    return made


def gradients(
    outputs: Mapping[str, Array], cotangents: Mapping[str, Array], inputs: Mapping[str, Array]
) -> dict[str, tuple[Array, Array]]:
    """The gradient of Σ cotangent · output for each input, and its error, as arrays of float64."""
    # of each number: its adjoint, that one's error, and the number and sum of what was added up
    adjoint: dict[int, list[Any]] = {}
    heads: dict[int, Exact] = {}
    for name, cotangent in cotangents.items():
        for index, x in np.ndenumerate(outputs[name]):
            if isinstance(x, Exact):  # an output that is a constant passes nothing on
                heads[x.serial] = x
                entry = adjoint.setdefault(x.serial, [Decimal(0), 0.0, 0, 0.0])
                entry[0] += Decimal(float(cotangent[index]))
    for node in sorted(_ancestors(heads.values()), key=lambda n: -n.serial):
        a, error, count, sizes = adjoint[node.serial]
        error, size = error + count * sizes, abs(float(a))
        adjoint[node.serial][1] = error
        for parent, slope, steep, ds in node.parents:
            entry = adjoint.setdefault(parent.serial, [Decimal(0), 0.0, 0, 0.0])
            entry[0] += a * slope
            entry[1] += size * ds + steep * error
            entry[2] += 1
            entry[3] += size * steep
    found = {}
    for name, array in inputs.items():
        value, errors = np.zeros(array.shape), np.zeros(array.shape)
        for index, x in np.ndenumerate(array):
            if isinstance(x, Exact) and x.serial in adjoint:
                value[index], errors[index] = map(float, adjoint[x.serial][:2])
        found[name] = value, errors
    return found


def _ancestors(heads: Iterable[Exact]) -> list[Exact]:
    seen, stack = {}, list(heads)
    while stack:
        node = stack.pop()
        if node.serial not in seen:
            seen[node.serial] = node
            stack += [edge[0] for edge in node.parents]
    return list(seen.values())


def floats(x: Array) -> tuple[Array, Array]:
    """Values and errors of an array of exact numbers, as float64; a plain number has error 0."""
    value, error = np.zeros(x.shape), np.zeros(x.shape)
    for index, number in np.ndenumerate(x):
        if isinstance(number, Exact):
            value[index], error[index] = float(number.value), number.error
        else:
            value[index] = number
    return value, error
