"""Which conventions does a function follow? One small question for each, asked with each answer.

An answer is detected if the function agrees with it and with no other. If it agrees with several,
the question does not concern it (it has no such option); if with none, something else is wrong.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from minitransformer.attention.dense import attention_forward
from minitransformer.attention.masks import causal
from minitransformer.attention.softmax import softmax_forward
from minitransformer.checks import tolerances
from minitransformer.checks.conventions import CONVENTIONS
from minitransformer.checks.gradients import assert_close
from minitransformer.checks.strategies import normal
from minitransformer.nn.activations import gelu_forward
from minitransformer.positions.rope import rope_forward, rope_tables
from minitransformer.positions.t5_bias import t5_bias_forward

Probe = Callable[[Any, str], None]  # raises unless the target follows the answer


def _attention(target: Any, heads: int, groups: int, n: int, m: int, **options: Any) -> Any:
    """Ask, and compare with the reference; the target's cache."""
    q, k, v = (normal(s, i) for i, s in enumerate([(1, heads, n, 4), *2 * [(1, groups, m, 4)]]))
    expected, _ = attention_forward(q, k, v, **options)
    out, cache = target.attention_forward(q, k, v, **options)
    assert_close(out, expected)
    return cache


def _layout(target: Any, answer: str) -> None:
    _attention(target, 2, 2, 3, 5)


def _mask(target: Any, answer: str) -> None:
    keep = np.array([[1, 0, 1, 0, 0], [0, 1, 1, 0, 1], [1, 1, 0, 0, 1]], np.bool_)
    _attention(target, 2, 2, 3, 5, keep=keep)


def _groups(target: Any, answer: str) -> None:
    _attention(target, 4, 2, 3, 5)


def _causal(target: Any, answer: str) -> None:
    keep = causal(2, 4, align=answer).dense()  # type: ignore[arg-type]
    _attention(target, 2, 2, 2, 4, keep=keep)


def _dead_row(target: Any, answer: str) -> None:
    if not hasattr(target, "attention_forward"):
        scores = np.array([[-np.inf, -np.inf], [0.0, 1.0]])
        out, _ = target.softmax_forward(scores)
        assert_close(out, softmax_forward(scores)[0])
        return
    keep = np.array([[0, 0, 0, 0, 0], [0, 1, 1, 0, 1], [1, 1, 0, 0, 1]], np.bool_)
    _attention(target, 2, 2, 3, 5, keep=keep)


def _lse(target: Any, answer: str) -> None:
    q, k, v = normal((1, 2, 3, 4), 0), normal((1, 2, 5, 4), 1), normal((1, 2, 5, 4), 2)
    expected = attention_forward(q, k, v)[1].lse
    assert_close(target.attention_forward(q, k, v)[1].lse, expected)


def _empty(target: Any, answer: str) -> None:
    q, empty = normal((1, 2, 3, 4), 0), np.zeros((1, 2, 0, 4))
    try:
        out, _ = target.attention_forward(q, empty, empty)
        answered = out.shape == q.shape
    except Exception:
        answered = False
    assert answered == (answer == "answered")


def _gelu(target: Any, answer: str) -> None:
    x = normal((9,), 0, 2.0)
    assert_close(target.gelu_forward(x, form=answer)[0], gelu_forward(x, form=answer)[0])


def _rope(target: Any, answer: str) -> None:
    x, tables = normal((2, 3, 8), 0), rope_tables(np.arange(3), 8)
    out, _ = target.rope_forward(x, *tables, layout=answer)
    assert_close(out, rope_forward(x, *tables, layout=answer)[0])


def _t5(target: Any, answer: str) -> None:
    table, positions = normal((32, 2), 0), np.arange(7)
    given = {"bidirectional": answer == "bidirectional"}
    out, _ = target.t5_bias_forward(table, positions, positions, **given)
    assert_close(out, t5_bias_forward(table, positions, positions, **given)[0])


# in this order: a later question is asked with the answers to the earlier ones
PROBES: dict[str, dict[str, Probe]] = {
    "attention": {
        "layout": _layout,
        "mask": _mask,
        "groups": _groups,
        "causal": _causal,
        "dead_row": _dead_row,
        "lse": _lse,
        "empty": _empty,
    },
    "softmax": {"dead_row": _dead_row},
    "gelu": {"gelu": _gelu},
    "rope": {"rope": _rope},
    "t5_bias": {"t5": _t5},
}


def detect(
    make: Callable[[Mapping[str, str]], Any], operation: str, declared: Iterable[str], dtype: str
) -> dict[str, str]:
    """The answers that probes found, of conventions that are not declared. `make` gives the target
    under the answers found so far."""
    found: dict[str, str] = {}
    for key, probe in PROBES.get(operation, {}).items():
        if key in declared:
            continue
        agreeing = [
            answer
            for answer in CONVENTIONS[key].answers
            if _agrees(probe, make({**found, key: answer}), answer, dtype)
        ]
        if key == "empty" and agreeing == ["answered"]:
            continue  # nothing to say
        if len(agreeing) == 1:
            found[key] = agreeing[0]
    return found


def _agrees(probe: Probe, target: Any, answer: str, dtype: str) -> bool:
    try:
        with tolerances.working_in(dtype), np.errstate(all="ignore"):
            probe(target, answer)
    except Exception:  # whatever it is, it is not agreement
        return False
    return True
