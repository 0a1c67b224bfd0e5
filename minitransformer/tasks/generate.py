"""Writing text: one character after another, each drawn from the model's prediction.

    p(c) = softmax(logits / T)_c over the k most likely characters,   c = first with F(c) > u

with F the cumulative sum of p, T the temperature (0: always the most likely) and u the uniform
number of (seed, position): the same seed writes the same text.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from minitransformer.arrays import Array
from minitransformer.attention.softmax import softmax_forward
from minitransformer.philox import Draw, Stream, random_bits, uniform


def choose(logits: Array, u: float, *, temperature: float = 1.0, top_k: int = 0) -> int:
    """The token that the uniform number `u` in [0, 1) picks; `top_k` = 0 means all tokens."""
    logits = np.asarray(logits, dtype=np.float64)
    if temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    p, _ = softmax_forward((logits[order] - logits.max()) / temperature)
    place = int(np.searchsorted(np.cumsum(p), u, side="right"))
    return int(order[min(place, len(order) - 1)])  # the sum may end a rounding below 1


def generate(
    model: Any,
    prompt: Array,
    length: int,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """`length` tokens that go on after `prompt` (N,), one by one as they are drawn. The model sees
    the last `context` tokens, with full attention.

    Raises
    ------
    ValueError
        If the prompt is empty or a number is out of range.
    """
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: give at least one character to go on from")
    if not 0 <= temperature < np.inf:
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
    for name, value in {"length": length, "top_k": top_k}.items():
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    return _write(model, np.asarray(prompt), length, context, temperature, top_k, seed)


def _write(
    model: Any,
    tokens: Array,
    length: int,
    context: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    zero = np.zeros(1, dtype=np.int64)
    bits = random_bits(Draw(seed), Stream.SAMPLE, 0, zero, zero, np.arange(length))
    for u in uniform(bits).tolist():
        logits, _ = model.forward(tokens[None, -context:], draw=Draw(seed, training=False))
        token = choose(logits[0, -1], u, temperature=temperature, top_k=top_k)
        tokens = np.append(tokens, token)
        yield token
