"""What libraries decide differently, as data. A convention is declared, or detected by a probe; it
is never a fault.
"""

import difflib
from collections.abc import Iterable
from typing import NamedTuple


class Convention(NamedTuple):
    """A question on which libraries differ, its answers (ours first), and who answers how."""

    question: str
    answers: tuple[str, ...]


CONVENTIONS = {
    "causal": Convention(
        "where the causal flag puts N queries beside M keys: lower_right (FlashAttention since "
        "2.1, ONNX with a cache) or upper_left (PyTorch is_causal, JAX)",
        ("lower_right", "upper_left"),
    ),
    "mask": Convention(
        "what True in a boolean mask means: keep (SDPA, JAX, ONNX), ignore "
        "(torch.nn.MultiheadAttention); additive: the mask is added, -inf hides",
        ("keep", "ignore", "additive"),
    ),
    "dead_row": Convention(
        "the output of a query that may read nothing: zero (PyTorch since 2.5, ONNX), nan (plain "
        "softmax), mean (of all values: JAX)",
        ("zero", "nan", "mean"),
    ),
    "groups": Convention(
        "which key head a query head reads: repeat (h // (H / G): nearly everybody), tile (h % G)",
        ("repeat", "tile"),
    ),
    "layout": Convention(
        "the axes: bhnd (batch, head, position, width: SDPA) or bnhd (JAX, FlashAttention)",
        ("bhnd", "bnhd"),
    ),
    "lse": Convention("the base of the log-sum-exp: e, or 2 (kernels)", ("e", "2")),
    "empty": Convention(
        "an axis of length 0: answered, as by NumPy, or refused with an error (kernels)",
        ("answered", "refused"),
    ),
    "ragged": Convention(
        "a length that the tiles do not divide: answered, or refused with an error (kernels)",
        ("answered", "refused"),
    ),
    "cache": Convention(
        "what a step of decoding does with the cache it is given: value (a new one comes back, the "
        "older one may be gone on from again) or in_place (the older one is gone: static caches)",
        ("value", "in_place"),
    ),
    "gelu": Convention("the form of GELU: tanh or erf (PyTorch's default)", ("tanh", "erf")),
    "rope": Convention(
        "which channels turn together: half (i and i + r/2: NeoX, Llama in transformers) or "
        "interleaved (2i and 2i + 1: GPT-J, the paper)",
        ("half", "interleaved"),
    ),
    "t5": Convention(
        "whether later keys have buckets of their own: bidirectional (encoder) or causal (decoder)",
        ("bidirectional", "causal"),
    ),
}


def parse(declared: Iterable[str]) -> dict[str, str]:
    """The conventions of ["dead_row=nan", ...], the others as ours.

    Raises
    ------
    ValueError
        If a key or an answer is unknown.
    """
    found = {name: convention.answers[0] for name, convention in CONVENTIONS.items()}
    for text in declared:
        key, equals, answer = text.partition("=")
        if key not in CONVENTIONS or not equals:
            near = difflib.get_close_matches(key, CONVENTIONS, n=1, cutoff=0.0)
            raise ValueError(f"unknown convention {text!r}: did you mean {near[0]}=...?")
        if answer not in CONVENTIONS[key].answers:
            valid = ", ".join(CONVENTIONS[key].answers)
            raise ValueError(f"convention {key} must be one of {valid}, got {answer!r}")
        found[key] = answer
    return found
