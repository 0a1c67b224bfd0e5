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
from minitransformer.checks.suite import reference
from minitransformer.nn.activations import gelu_forward
from minitransformer.positions.rope import rope_forward, rope_tables
from minitransformer.positions.t5_bias import t5_bias_forward
from minitransformer.sparse.block_mask import from_dense
from minitransformer.sparse.tiled import tiled_attention_forward

Probe = Callable[[Any, str], None]  # raises unless the target follows the answer


def _attention(target: Any, heads: int, groups: int, n: int, m: int, **options: Any) -> Any:
    """Ask, and compare with the reference; the target's cache."""
    q, k, v = (normal(s, i) for i, s in enumerate([(1, heads, n, 4), *2 * [(1, groups, m, 4)]]))
    expected, _ = attention_forward(q, k, v, **options)
    out, cache = target.attention_forward(q, k, v, **options)
    assert_close(out, expected)
    return cache


def _keyed(target: Any, heads: int, groups: int, n: int, m: int, **options: Any) -> None:
    """Ask another form of attention, and compare with its reference."""
    q, k, v = (normal(s, i) for i, s in enumerate([(1, heads, n, 4), *2 * [(1, groups, m, 4)]]))
    mechanism, name = "attention.linear", "linear_attention_forward"
    more: list[Any] = []
    if hasattr(target, "favor_attention_forward"):
        mechanism, name = "attention.favor", "favor_attention_forward"
        more = [normal((5, 4), 3)]
    expected, _ = getattr(reference(mechanism), name)(q, k, v, *more, **options)
    assert_close(getattr(target, name)(q, k, v, *more, **options)[0], expected)


def _tiled(target: Any, heads: int, groups: int, keep: Any) -> None:
    n, m = keep.shape
    q, k, v = (normal(s, i) for i, s in enumerate([(1, heads, n, 4), *2 * [(1, groups, m, 4)]]))
    mask = from_dense(keep, tile=2)
    expected, _ = tiled_attention_forward(q, k, v, mask)
    assert_close(target.tiled_attention_forward(q, k, v, mask)[0], expected)


def _stepped(target: Any, heads: int, groups: int) -> Any:
    """Two steps; the cache after the first."""
    q, k, v = (normal((1, h, 3, 4), i) for i, h in enumerate((heads, groups, groups)))
    expected, _ = attention_forward(q, k, v, keep=np.tri(3, dtype=np.bool_))
    first = target.empty_cache((1,), groups, 4)
    got, held = target.decode_step(q[..., :2, :], k[..., :2, :], v[..., :2, :], first)
    assert_close(got, expected[..., :2, :])
    last = [x[..., 2:, :] for x in (q, k, v)]
    assert_close(target.decode_step(*last, held)[0], expected[..., 2:, :])
    return last, held, expected[..., 2:, :]


def _cache(target: Any, answer: str) -> None:
    last, held, expected = _stepped(target, 2, 2)
    held.spent = False
    again = target.decode_step(*last, held)[0]
    same = np.allclose(again, expected, rtol=0, atol=1e-2, equal_nan=True)
    assert same == (answer == "value")


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


KEYS = np.array([1, 0, 1, 1, 0], np.bool_)
TILES = np.repeat(np.repeat([[1, 0], [0, 1]], 2, axis=0), 2, axis=1).astype(np.bool_)
HOLES = TILES & (np.arange(4) != 3)
KEYED: dict[str, Probe] = {
    "layout": lambda target, answer: _keyed(target, 2, 2, 3, 5),
    "mask": lambda target, answer: _keyed(target, 2, 2, 3, 5, keep=KEYS),
    "groups": lambda target, answer: _keyed(target, 4, 2, 3, 5),
    "causal": lambda target, answer: _keyed(target, 2, 2, 3, 5, causal=True, align=answer),
    "dead_row": lambda target, answer: _keyed(target, 2, 2, 3, 5, keep=KEYS & False),
}

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
    "linear_attention": KEYED,
    "favor": KEYED,
    "block_sparse_attention": {
        "layout": lambda target, answer: _tiled(target, 2, 2, TILES),
        "mask": lambda target, answer: _tiled(target, 2, 2, HOLES),
        "groups": lambda target, answer: _tiled(target, 4, 2, TILES),
        "dead_row": lambda target, answer: _tiled(target, 2, 2, TILES & (np.arange(4) < 2)),
    },
    "kv_cache": {
        "layout": lambda target, answer: _stepped(target, 2, 2),
        "groups": lambda target, answer: _stepped(target, 4, 2),
        "cache": _cache,
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
