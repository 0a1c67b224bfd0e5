"""Norms, activations, cross-entropy: by loops, and in exact numbers."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from minitransformer.arrays import Array
from minitransformer.checks.vectors import exact
from minitransformer.checks.vectors.cases import nn as cases
from minitransformer.checks.vectors.exact import PI, Exact, dot, lifted, rounded, total
from minitransformer.checks.vectors.judge import Given, Told
from minitransformer.checks.vectors.operation import Inputs, Operation, Options, When, mistake
from minitransformer.checks.vectors.rows import softmax
from minitransformer.checks.vectors.simple import (
    refuses_nothing,
    simple_ask,
    stumbles_over_nothing,
)
from minitransformer.nn import norms

NORMS, ACTIVATIONS, LOSSES = "nn.norms", "nn.activations", "nn.losses"

# ---- norms ---------------------------------------------------------------------------------------


def _inverse_root(square: Exact, eps: float) -> Exact:
    """1/√(square + ε), and 0 where there is nothing to divide by."""
    whole = square + rounded(eps) if eps else square
    return 1 / exact.sqrt(whole) if whole.value else lifted(0)


def layer_norm_exactly(
    inputs: Mapping[str, Any], options: Options, when: When
) -> Mapping[str, Any]:
    x, gamma, beta = (inputs[n] for n in ("x", "gamma", "beta"))
    out = np.empty(x.shape, object)
    for row in np.ndindex(x.shape[:-1]):
        mean = total(x[row]) / x.shape[-1]
        centred = [v - mean for v in x[row]]
        inverse = _inverse_root(dot(centred, centred) / len(centred), options.get("eps", 1e-5))
        for j, c in enumerate(centred):
            out[row][j] = c * inverse * gamma[j] + beta[j]
    return {"out": out}


def layer_norm_loops(inputs: Inputs, options: Options, when: When, cotangents: Inputs) -> Told:
    """dx by the whole Jacobian of a row."""
    x, gamma, beta = (inputs[n] for n in ("x", "gamma", "beta"))
    eps, w = options.get("eps", 1e-5), x.shape[-1]
    out, dx = np.zeros(x.shape), np.zeros(x.shape)
    dgamma, dbeta = np.zeros(w), np.zeros(w)
    for row in np.ndindex(x.shape[:-1]):
        mean = sum(float(v) for v in x[row]) / w
        centred = [float(v) - mean for v in x[row]]
        whole = sum(c * c for c in centred) / w + eps
        r = 1 / math.sqrt(whole) if whole else 0.0
        for j in range(w):
            out[(*row, j)] = gamma[j] * centred[j] * r + beta[j]
        if not cotangents:
            continue
        dout = cotangents["out"][row]
        for t in range(w):
            dgamma[t] += dout[t] * centred[t] * r
            dbeta[t] += dout[t]
            for j in range(w):
                # dx̂_t/dx_j = r (δ_tj - 1/w) - x̂_t x̂_j r / w
                slope = r * ((t == j) - 1 / w) - centred[t] * r * centred[j] * r * r / w
                dx[(*row, j)] += dout[t] * gamma[t] * slope
    return Told({"out": out}, {"x": dx, "gamma": dgamma, "beta": dbeta})


def rms_norm_exactly(inputs: Mapping[str, Any], options: Options, when: When) -> Mapping[str, Any]:
    x, gamma = inputs["x"], inputs["gamma"]
    offset = options.get("offset", 0.0)
    out = np.empty(x.shape, object)
    for row in np.ndindex(x.shape[:-1]):
        square = dot(x[row], x[row]) / x.shape[-1]
        inverse = _inverse_root(square, options.get("eps", 1e-6))
        for j, v in enumerate(x[row]):
            out[row][j] = v * inverse * (gamma[j] + offset if offset else gamma[j])
    return {"out": out}


def rms_norm_loops(inputs: Inputs, options: Options, when: When, cotangents: Inputs) -> Told:
    x, gamma = inputs["x"], inputs["gamma"]
    eps, offset, w = options.get("eps", 1e-6), options.get("offset", 0.0), x.shape[-1]
    out, dx, dgamma = np.zeros(x.shape), np.zeros(x.shape), np.zeros(w)
    for row in np.ndindex(x.shape[:-1]):
        whole = sum(float(v) * float(v) for v in x[row]) / w + eps
        r = 1 / math.sqrt(whole) if whole else 0.0
        for t in range(w):
            out[(*row, t)] = (gamma[t] + offset) * x[(*row, t)] * r
            if not cotangents:
                continue
            d = float(cotangents["out"][(*row, t)])
            dgamma[t] += d * x[(*row, t)] * r
            for j in range(w):
                slope = r * (t == j) - r**3 * x[(*row, t)] * x[(*row, j)] / w
                dx[(*row, j)] += d * (gamma[t] + offset) * slope
    return Told({"out": out}, {"x": dx, "gamma": dgamma})


# ---- activations ---------------------------------------------------------------------------------


def gelu_exactly(inputs: Mapping[str, Any], options: Options, when: When) -> Mapping[str, Any]:
    x = inputs["x"]
    out = np.empty(x.shape, object)
    root = exact.sqrt(rounded(2) / rounded(PI))
    for at, v in np.ndenumerate(x):
        if options.get("form", "tanh") == "erf":
            share = exact.erf(v / exact.sqrt(rounded(2)))
        else:
            share = exact.tanh(root * (v + rounded(0.044715) * v * v * v))
        out[at] = v * ((1 + share) / 2)
    return {"out": out}


def gelu_loops(inputs: Inputs, options: Options, when: When, cotangents: Inputs) -> Told:
    x = inputs["x"]
    out, dx = np.zeros(x.shape), np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        v = float(x[at])
        if options.get("form", "tanh") == "erf":
            phi = 0.5 * math.erfc(-v / math.sqrt(2))
            slope = phi + v * math.exp(-v * v / 2) / math.sqrt(2 * math.pi)
        else:
            u = math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)
            phi = 0.5 + 0.5 * math.tanh(u)
            du = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * v * v)
            slope = phi + 0.5 * v * du / math.cosh(min(abs(u), 300)) ** 2
        out[at] = v * phi
        if cotangents:
            dx[at] = float(cotangents["out"][at]) * slope
    return Told({"out": out}, {"x": dx})


def swiglu_exactly(inputs: Mapping[str, Any], options: Options, when: When) -> Mapping[str, Any]:
    gate, up = inputs["gate"], inputs["up"]
    out = np.empty(gate.shape, object)
    for at, a in np.ndenumerate(gate):
        out[at] = a * exact.sigmoid(a) * up[at]
    return {"out": out}


def swiglu_loops(inputs: Inputs, options: Options, when: When, cotangents: Inputs) -> Told:
    gate, up = inputs["gate"], inputs["up"]
    out, dgate, dup = (np.zeros(gate.shape) for _ in range(3))
    for at in np.ndindex(gate.shape):
        a, b = float(gate[at]), float(up[at])
        s = 1 / (1 + math.exp(-a)) if a >= 0 else math.exp(a) / (1 + math.exp(a))
        out[at] = a * s * b
        if cotangents:
            d = float(cotangents["out"][at])
            dgate[at] = d * b * (s + a * s * (1 - s))
            dup[at] = d * a * s
    return Told({"out": out}, {"gate": dgate, "up": dup})


# ---- cross-entropy -------------------------------------------------------------------------------


def ask_cross_entropy(target: Any, given: Given) -> Told:
    loss, cache = target.cross_entropy_forward(
        given.inputs["logits"], given.inputs["targets"], **given.options
    )
    if not given.cotangents:
        return Told({"loss": loss}, {})
    for _ in range(given.calls):  # the last answer must be as good as the first
        dlogits = target.cross_entropy_backward(given.cotangents["loss"], cache)
    return Told({"loss": loss}, {"logits": dlogits})


def cross_entropy_exactly(
    inputs: Mapping[str, Any], options: Options, when: When
) -> Mapping[str, Any]:
    logits, targets = inputs["logits"], inputs["targets"]
    smoothing = options.get("label_smoothing", 0.0)
    costs = []
    for row in np.ndindex(targets.shape):
        target = int(targets[row])
        if target == options.get("ignore_index"):
            continue
        _, lse = softmax(list(logits[row]))
        logs = [z - lse for z in logits[row]]
        cost = -logs[target]
        if smoothing:
            even = -total(logs) / len(logs)
            cost = rounded(1 - smoothing) * cost + rounded(smoothing) * even
        costs.append(cost)
    loss = np.empty((), object)
    loss[()] = total(costs) / len(costs) if costs else 0.0
    return {"loss": loss}


def cross_entropy_loops(inputs: Inputs, options: Options, when: When, cotangents: Inputs) -> Told:
    logits, targets = inputs["logits"], inputs["targets"]
    smoothing, classes = options.get("label_smoothing", 0.0), logits.shape[-1]
    kept = [r for r in np.ndindex(targets.shape) if targets[r] != options.get("ignore_index")]
    loss, dlogits = 0.0, np.zeros(logits.shape)
    for row in kept:
        z = [float(v) for v in logits[row]]
        top = max(z)
        lse = top + math.log(sum(math.exp(v - top) for v in z))
        for c in range(classes):
            wanted = (1 - smoothing) * (c == targets[row]) + smoothing / classes
            loss -= wanted * (z[c] - lse) / len(kept)
            if cotangents:
                slope = (math.exp(z[c] - lse) - wanted) / len(kept)
                dlogits[(*row, c)] = float(cotangents["loss"]) * slope
    return Told({"loss": np.asarray(loss)}, {"logits": dlogits})


# ---- the operations ------------------------------------------------------------------------------


def _mistakes(mechanism: str, name: str, instead: Any = None) -> tuple:
    return (
        refuses_nothing(mechanism, name, instead or (np.zeros(1), None)),
        stumbles_over_nothing(mechanism, name),
    )


def _gradient_dtype(name: str, inputs: Inputs) -> str:
    floating = [x.dtype for x in inputs.values() if x.dtype.kind not in "biu"]
    return str(floating[0])


@mistake(NORMS, "rms_norm_backward", "dy ⊙ γ rounded to bfloat16; ours did, until a vector said so")
def cotangent_multiplied_in_its_own_type(dout: Array, cache: Any) -> Any:
    gain = np.asarray(cache.gain)
    narrow = (dout * gain).astype(dout.dtype)  # the gradient of γ is not what this is about
    grads = norms.rms_norm_backward(narrow, cache._replace(gain=np.ones_like(gain)))
    return norms.rms_norm_backward(dout, cache)._replace(x=grads.x)


_ROWS: dict[str, str] = {"x": "(*B, W)", "gamma": "(W,)"}

OPERATIONS = (
    Operation(
        "layer_norm",
        NORMS,
        ("layer_norm_forward", "layer_norm_backward"),
        "out = γ (x - mean x) / √(var x + ε) + β along the last axis, var the biased variance",
        {**_ROWS, "beta": "(W,)", "out": "(*B, W)"},
        {"eps": "ε, 1e-5 if missing"},
        simple_ask("layer_norm", ("x", "gamma", "beta")),
        layer_norm_loops,
        layer_norm_exactly,
        cases.layer_norm,
        leaves=("x", "gamma", "beta"),
        mistakes=_mistakes(NORMS, "layer_norm_forward"),
        dtype_of=_gradient_dtype,
    ),
    Operation(
        "rms_norm",
        NORMS,
        ("rms_norm_forward", "rms_norm_backward"),
        "out = (offset + γ) x / √(mean x² + ε) along the last axis",
        {**_ROWS, "out": "(*B, W)"},
        {"eps": "ε, 1e-6 if missing", "offset": "0 if missing; 1 in Gemma"},
        simple_ask("rms_norm", ("x", "gamma")),
        rms_norm_loops,
        rms_norm_exactly,
        cases.rms_norm,
        leaves=("x", "gamma"),
        mistakes=(
            *_mistakes(NORMS, "rms_norm_forward"),
            cotangent_multiplied_in_its_own_type,
        ),
        dtype_of=_gradient_dtype,
    ),
    Operation(
        "gelu",
        ACTIVATIONS,
        ("gelu_forward", "gelu_backward"),
        "out = x Φ(x), or ½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))",
        {"x": "any shape", "out": "the same shape"},
        {"form": "tanh or erf; tanh if missing"},
        simple_ask("gelu", ("x",)),
        gelu_loops,
        gelu_exactly,
        cases.gelu,
        leaves=("x",),
        mistakes=_mistakes(ACTIVATIONS, "gelu_forward"),
    ),
    Operation(
        "swiglu",
        ACTIVATIONS,
        ("swiglu_forward", "swiglu_backward"),
        "out = gate · σ(gate) · up",
        {"gate": "any shape", "up": "the same shape", "out": "the same shape"},
        {},
        simple_ask("swiglu", ("gate", "up")),
        swiglu_loops,
        swiglu_exactly,
        cases.swiglu,
        leaves=("gate", "up"),
        mistakes=_mistakes(ACTIVATIONS, "swiglu_forward"),
    ),
    Operation(
        "cross_entropy",
        LOSSES,
        ("cross_entropy_forward", "cross_entropy_backward"),
        "loss = the mean over the targets that are not ignored of -Σ T_c log softmax(z)_c, "
        "T = (1 - s) onehot(target) + s / V, in nats",
        {
            "logits": "(*B, V)",
            "targets": "int64, (*B)",
            "loss": "a number; 0 if every target is ignored",
        },
        {"label_smoothing": "s, 0 if missing", "ignore_index": "the target that does not count"},
        ask_cross_entropy,
        cross_entropy_loops,
        cross_entropy_exactly,
        cases.cross_entropy,
        leaves=("logits",),
        wide=("loss",),
        mistakes=_mistakes(LOSSES, "cross_entropy_forward"),
    ),
)
