"""Softmax and its relatives: by loops, and in exact numbers."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from minitransformer.arrays import Array
from minitransformer.attention import softmax as right
from minitransformer.checks.suite import Mutant
from minitransformer.checks.vectors import exact
from minitransformer.checks.vectors.cases import softmax as cases
from minitransformer.checks.vectors.exact import Exact, dot, lifted, total
from minitransformer.checks.vectors.judge import Given, Told
from minitransformer.checks.vectors.operation import Inputs, Operation, Options, When, mistake
from minitransformer.checks.vectors.rows import softmax
from minitransformer.checks.vectors.simple import (
    refuses_nothing,
    simple_ask,
    stumbles_over_nothing,
)

MECHANISM = "attention.softmax"


# ---- softmax, log-softmax, log-sum-exp -----------------------------------------------------------


def _rows(x: Array, axis: int) -> list[tuple[int, ...]]:
    return list(np.ndindex(np.moveaxis(x, axis, -1).shape[:-1]))


def _masked(x: Any) -> bool:
    return not isinstance(x, Exact) and float(x) == -math.inf


def _dead(kind: str, when: When) -> float:
    if when.get("dead_row") == "nan" and kind != "logsumexp":
        return math.nan
    return 0.0 if kind == "softmax" else -math.inf


def _exactly(kind: str) -> Callable:
    def exactly(inputs: Mapping[str, Any], options: Options, when: When) -> Mapping[str, Any]:
        axis = options.get("axis", -1)
        x = np.moveaxis(inputs["scores"], axis, -1)
        out = np.full(x.shape if kind != "logsumexp" else x.shape[:-1], _dead(kind, when), object)
        for row in np.ndindex(x.shape[:-1]):
            keys = [j for j, s in enumerate(x[row]) if not _masked(s)]
            if not keys:
                continue
            p, lse = softmax([x[row][j] for j in keys])
            if kind == "logsumexp":
                out[row] = lse
                continue
            out[row] = -np.inf if kind == "log_softmax" else 0
            if kind == "log_softmax":
                p = [x[row][j] - lse for j in keys]
            out[row][keys] = p
        if kind != "logsumexp":
            return {"out": np.moveaxis(out, -1, axis)}
        return {"out": np.expand_dims(out, axis) if options.get("keepdims") else out}

    return exactly


def _loops(kind: str) -> Callable:
    def loops(inputs: Inputs, options: Options, when: When, cotangents: Inputs) -> Told:
        axis = options.get("axis", -1)
        x = np.moveaxis(inputs["scores"], axis, -1)
        dx, m = np.zeros(x.shape), x.shape[-1]
        out = np.full(x.shape if kind != "logsumexp" else x.shape[:-1], _dead(kind, when))
        dout: Any = cotangents.get("out")
        if dout is not None and kind != "logsumexp":
            dout = np.moveaxis(dout, axis, -1)
        elif dout is not None and options.get("keepdims"):
            dout = np.squeeze(dout, axis)
        for row in np.ndindex(x.shape[:-1]):
            keys = [j for j in range(m) if x[(*row, j)] != -math.inf]
            if not keys:
                continue
            top = max(float(x[(*row, j)]) for j in keys)
            z = sum(math.exp(float(x[(*row, j)]) - top) for j in keys)
            p = {j: math.exp(float(x[(*row, j)]) - top) / z for j in keys}
            if kind == "logsumexp":
                out[row] = top + math.log(z)
            for j in range(m if kind != "logsumexp" else 0):
                if kind == "softmax":
                    out[(*row, j)] = p.get(j, 0.0)
                else:
                    there = j in p
                    out[(*row, j)] = x[(*row, j)] - top - math.log(z) if there else -math.inf
            for j in keys if dout is not None else ():
                if kind == "logsumexp":
                    dx[(*row, j)] = p[j] * dout[row]
                elif kind == "softmax":
                    dx[(*row, j)] = sum(dout[(*row, t)] * p[t] * ((t == j) - p[j]) for t in keys)
                else:
                    dx[(*row, j)] = sum(dout[(*row, t)] * ((t == j) - p[j]) for t in keys)
        if kind != "logsumexp":
            out = np.moveaxis(out, -1, axis)
        elif options.get("keepdims"):
            out = np.expand_dims(out, axis)
        return Told({"out": out}, {"scores": np.moveaxis(dx, -1, axis)})

    return loops


def _under(told: Told, inputs: Inputs, options: Options, when: When) -> Told:
    if when.get("dead_row") != "nan":
        return told
    scores, axis = inputs["scores"].astype(np.float64), options.get("axis", -1)
    dead = np.isneginf(scores).all(axis=axis, keepdims=True)
    out = told.outputs["out"]
    return Told({"out": np.where(dead, np.nan, out).astype(out.dtype)}, {})


def _in_base_two(name: str) -> Mutant:
    def logarithm_to_base_two(scores: Array, **options: Any) -> Any:
        out, cache = getattr(right, name)(scores, **options)
        return (out / math.log(2)).astype(out.dtype), cache

    return mistake(MECHANISM, name, "bits for nats")(logarithm_to_base_two)


@mistake(MECHANISM, "log_softmax_forward", "-inf - (-inf) is NaN: a dead row needs a guard")
def dead_row_not_guarded(scores: Array, *, axis: int = -1, **options: Any) -> Any:
    out, cache = right.log_softmax_forward(scores, axis=axis, **options)
    dead = np.isneginf(out.astype(np.float64)).all(axis=axis, keepdims=True)
    return np.where(dead, np.nan, out).astype(out.dtype), cache


def _of_scores(name: str, about: str, wide: tuple[str, ...] = ()) -> Operation:
    options = {"axis": "the axis; the last if missing"}
    forward = f"{name}_forward"
    mistakes = [
        refuses_nothing(MECHANISM, forward, (np.zeros(1), None)),
        stumbles_over_nothing(MECHANISM, forward),
    ]
    if name != "softmax":
        mistakes.append(_in_base_two(forward))
    if name == "log_softmax":
        mistakes.append(dead_row_not_guarded)
    if name == "logsumexp":
        options["keepdims"] = "true: the axis stays, with length 1"
    return Operation(
        name,
        MECHANISM,
        (f"{name}_forward", f"{name}_backward"),
        about,
        {"scores": "any shape; -inf: masked", "out": "the same shape, or without the axis"},
        options,
        simple_ask(name, ("scores",)),
        _loops(name),
        _exactly(name),
        lambda: cases.of_scores(name),
        leaves=("scores",),
        wide=wide,
        mistakes=tuple(mistakes),
        under=_under,
    )


# ---- the merge of two parts ----------------------------------------------------------------------

_NOTHING = np.zeros(1)


@mistake(MECHANISM, "merge_forward", "an index modulo the size of an axis that is empty")
def division_by_an_empty_axis(first: Any, second: Any) -> Any:
    if 0 in (first.out.size, first.lse.size):
        raise ZeroDivisionError
    return right.merge_forward(first, second)


PARTS = ("first_out", "first_lse", "second_out", "second_lse")


def _partials(inputs: Mapping[str, Any]) -> list[Any]:
    return [right.Partial(inputs[f"{x}_out"], inputs[f"{x}_lse"]) for x in ("first", "second")]


def _ask_merge(target: Any, given: Given) -> Told:
    merged, cache = target.merge_forward(*_partials(given.inputs))
    told = {"out": merged.out, "lse": merged.lse}
    if not given.cotangents:
        return Told(told, {})
    back = right.Partial(given.cotangents["out"], given.cotangents["lse"])
    grads = target.merge_backward(back, cache)
    found = [grads.first.out, grads.first.lse, grads.second.out, grads.second.lse]
    return Told(told, dict(zip(PARTS, found, strict=True)))


def _merge_exactly(inputs: Mapping[str, Any], options: Options, when: When) -> Mapping[str, Any]:
    (o1, l1), (o2, l2) = _partials(inputs)
    out, lse = np.zeros(o1.shape, object), np.full(l1.shape, -np.inf, object)
    for row in np.ndindex(l1.shape):
        parts = [(o[row], x[row]) for o, x in ((o1, l1), (o2, l2)) if not _masked(x[row])]
        if parts:
            shares, lse[row] = softmax([x for _, x in parts])
            for e in range(o1.shape[-1]):
                out[row][e] = dot(shares, [o[e] for o, _ in parts])
    return {"out": out, "lse": lse}


def _merge_loops(inputs: Inputs, options: Options, when: When, cotangents: Inputs) -> Told:
    (o1, l1), (o2, l2) = _partials(inputs)
    out, lse = np.zeros(o1.shape), np.full(l1.shape, -math.inf)
    grads = {name: np.zeros(inputs[name].shape) for name in PARTS}
    for row in np.ndindex(l1.shape):
        a, b = float(l1[row]), float(l2[row])
        top = max(a, b)
        if top == -math.inf:
            continue
        weight = [math.exp(a - top), math.exp(b - top)]
        z = weight[0] + weight[1]
        lse[row] = top + math.log(z)
        share = [w / z for w in weight]
        for e in range(o1.shape[-1]):
            out[(*row, e)] = share[0] * o1[(*row, e)] + share[1] * o2[(*row, e)]
        if not cotangents:
            continue
        for n, (mine, other, name) in enumerate(((o1, o2, "first"), (o2, o1, "second"))):
            moved = 0.0
            for e in range(o1.shape[-1]):
                d = float(cotangents["out"][(*row, e)])
                grads[f"{name}_out"][(*row, e)] = share[n] * d
                # the share moves with its LSE: a' = a (1 - a)
                moved += d * share[n] * share[1 - n] * (mine[(*row, e)] - other[(*row, e)])
            grads[f"{name}_lse"][row] = moved + share[n] * float(cotangents["lse"][row])
    return Told({"out": out, "lse": lse}, grads)


# ---- the same, as a kernel carries it ------------------------------------------------------------


def _ask_states(target: Any, given: Given) -> Told:
    tiles = sorted(name[7:] for name in given.inputs if name.startswith("scores_"))
    pairs = [(given.inputs[f"scores_{t}"], given.inputs[f"values_{t}"]) for t in tiles]
    state = target.state_of(*pairs[0])
    for pair in pairs[1:]:
        state = target.merge_states(state, target.state_of(*pair))
    done = target.finish_state(state)
    return Told({"out": done.out, "lse": done.lse}, {})


def _joined(inputs: Mapping[str, Any]) -> tuple[Array, Array]:
    tiles = sorted(name[7:] for name in inputs if name.startswith("scores_"))
    scores = np.concatenate([inputs[f"scores_{t}"] for t in tiles], axis=-1)
    return scores, np.concatenate([inputs[f"values_{t}"] for t in tiles], axis=-2)


def _states_exactly(inputs: Mapping[str, Any], options: Options, when: When) -> Mapping[str, Any]:
    """All keys at once: how they were cut must not matter."""
    scores, values = _joined(inputs)
    shape = scores.shape[:-1]
    out, lse = np.zeros((*shape, values.shape[-1]), object), np.full(shape, -np.inf, object)
    for row in np.ndindex(shape):
        keys = [j for j, s in enumerate(scores[row]) if not _masked(s)]
        if keys:
            p, lse[row] = softmax([scores[row][j] for j in keys])
            for e in range(values.shape[-1]):
                out[row][e] = dot(p, [values[row[:-1]][j, e] for j in keys])
    return {"out": out, "lse": lse}


def _states_loops(inputs: Inputs, options: Options, when: When, cotangents: Inputs) -> Told:
    """One key after the other."""
    scores, values = _joined(inputs)
    shape = scores.shape[:-1]
    out, lse = np.zeros((*shape, values.shape[-1])), np.full(shape, -math.inf)
    for row in np.ndindex(shape):
        top, z, sums = -math.inf, 0.0, [0.0] * values.shape[-1]
        for j in range(scores.shape[-1]):
            s = float(scores[(*row, j)])
            if s == -math.inf:
                continue
            new = max(top, s)
            shrink = math.exp(top - new) if top > -math.inf else 0.0
            z = z * shrink + math.exp(s - new)
            for e in range(len(sums)):
                sums[e] = sums[e] * shrink + math.exp(s - new) * values[(*row[:-1], j, e)]
            top = new
        if z:
            lse[row] = top + math.log(z)
            for e in range(len(sums)):
                out[(*row, e)] = sums[e] / z
    return Told({"out": out, "lse": lse}, {})


# ---- the soft-cap --------------------------------------------------------------------------------


def _ask_softcap(target: Any, given: Given) -> Told:
    out, cache = target.softcap_forward(given.inputs["scores"], given.options["cap"])
    if not given.cotangents:
        return Told({"out": out}, {})
    return Told({"out": out}, {"scores": target.softcap_backward(given.cotangents["out"], cache)})


def _softcap_exactly(inputs: Mapping[str, Any], options: Options, when: When) -> Mapping[str, Any]:
    x, cap = inputs["scores"], options["cap"]
    out = np.empty(x.shape, object)
    for at, s in np.ndenumerate(x):
        out[at] = exact.tanh(s / lifted(cap)) * cap if cap else total([s])
    return {"out": out}


def _softcap_loops(inputs: Inputs, options: Options, when: When, cotangents: Inputs) -> Told:
    x, cap = inputs["scores"], options["cap"]
    out, dx = np.zeros(x.shape), np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        s = float(x[at])
        out[at] = cap * math.tanh(s / cap) if cap else s
        if cotangents:
            slope = 1 / math.cosh(min(abs(s / cap), 300)) ** 2 if cap else 1.0
            dx[at] = float(cotangents["out"][at]) * slope
    return Told({"out": out}, {"scores": dx})


@mistake(MECHANISM, "softcap_forward", "none given means the cap of some model")
def cap_that_cannot_be_switched_off(scores: Array, cap: float | None) -> Any:
    return right.softcap_forward(scores, 50.0 if cap is None else cap)


OPERATIONS = (
    _of_scores("softmax", "out_j = exp(x_j) / Σ exp(x) along an axis"),
    _of_scores("log_softmax", "out_j = x_j - log Σ exp(x) along an axis"),
    _of_scores("logsumexp", "out = log Σ exp(x) along an axis", wide=("out",)),
    Operation(
        "merge",
        MECHANISM,
        ("merge_forward", "merge_backward"),
        "attention over two sets of keys joined into attention over their union: "
        "lse = log(e^lse1 + e^lse2), out = Σ e^(lse_i - lse) out_i",
        {
            "first_out": "(*B, N, E) a weighted mean of values; second_out likewise",
            "first_lse": "(*B, N) the natural log of its denominator, -inf if there are no keys",
            "second_out": "(*B, N, E)",
            "second_lse": "(*B, N)",
            "out": "(*B, N, E)",
            "lse": "(*B, N)",
        },
        {},
        _ask_merge,
        _merge_loops,
        _merge_exactly,
        cases.merge,
        leaves=PARTS,
        mistakes=(
            refuses_nothing(MECHANISM, "merge_forward", (right.Partial(_NOTHING, _NOTHING), None)),
            division_by_an_empty_axis,
        ),
    ),
    Operation(
        "online_softmax",
        MECHANISM,
        ("state_of", "merge_states", "finish_state"),
        "softmax-weighted values, tile after tile: the answer is that of all tiles at once",
        {
            "scores_1": "(*B, N, M1) of the first tile, scores_2 of the second ...; -inf: masked",
            "values_1": "(*B, M1, E)",
            "out": "(*B, N, E)",
            "lse": "(*B, N)",
        },
        {},
        _ask_states,
        _states_loops,
        _states_exactly,
        cases.states,
    ),
    Operation(
        "softcap",
        MECHANISM,
        ("softcap_forward", "softcap_backward"),
        "out = c · tanh(x / c)",
        {"scores": "any shape", "out": "the same shape"},
        {"cap": "c; null or 0: no cap"},
        _ask_softcap,
        _softcap_loops,
        _softcap_exactly,
        cases.softcap,
        leaves=("scores",),
        mistakes=(
            refuses_nothing(MECHANISM, "softcap_forward", (np.zeros(1), None)),
            cap_that_cannot_be_switched_off,
        ),
    ),
)
