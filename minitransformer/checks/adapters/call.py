"""How somebody else's function wants to be called: its framework, and the names of its options."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minitransformer.arrays import Array
from minitransformer.checks.adapters.frameworks import CALLS, Called
from minitransformer.checks.suite import NotApplicable

# our name of an option, and what others call it
ALIASES = {
    "keep": ("keep", "attn_mask", "attention_mask", "mask", "key_mask"),
    "padding": ("padding", "key_padding_mask"),
    "bias": ("bias", "attn_bias", "attention_bias"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "softcap": ("softcap", "soft_cap", "logits_soft_cap", "logit_cap"),
    "multiplier": ("multiplier", "dropout_mask"),
    "causal": ("causal", "is_causal"),
    "window": ("window", "window_size", "local_window_size"),
    "sliding": ("window", "sliding_window", "window_size"),
    "s": ("s", "initial_state"),
    "z": ("z", "initial_normaliser", "initial_normalizer"),
    "form": ("form", "approximate"),
    "chunk": ("chunk", "chunk_size"),
    "positions": ("positions", "position_ids"),
    "tiles": ("tiles", "layout", "block_layout"),
    "tile": ("tile", "block", "block_size"),
    "axis": ("axis", "dim"),
    "keepdims": ("keepdims", "keepdim"),
    "eps": ("eps", "epsilon"),
    "label_smoothing": ("label_smoothing",),
    "ignore_index": ("ignore_index",),
    "layout": ("layout",),
    "bidirectional": ("bidirectional",),
    "max_distance": ("max_distance",),
}
FLAGS = ("causal", "window")  # masks by a word, which not everybody takes


@dataclass(frozen=True)
class Callee:
    """A function, its framework, the dtype to call it with, and its names of our options."""

    function: Callable
    framework: str = "numpy"
    dtype: str = "float64"
    renamed: Mapping[str, str] = field(default_factory=dict)  # ours -> theirs, beyond ALIASES
    # (dout, *inputs, **options) -> gradients of the inputs, and of a bias if one is given
    backward: Callable | None = None
    differentiable: bool = True  # by its framework

    def name_of(self, option: str) -> str | None:
        """What the function calls one of our options; None if it has none."""
        if option in self.renamed:
            return self.renamed[option]
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            return None
        return next((name for name in ALIASES.get(option, ()) if name in parameters), None)

    def required_name_of(self, option: str) -> str:
        """What the function calls it.

        Raises
        ------
        NotApplicable
            If it has no such option.
        """
        name = self.name_of(option)
        if name is None:
            raise NotApplicable(f"the target has no option for {option}")
        return name

    def call(self, leaves: Sequence[Array], options: Mapping[str, Any]) -> Called:
        """Call it.

        Raises
        ------
        NotApplicable
            If it lacks one of the options, or says that it cannot (NotImplementedError).
        """
        named = {self.required_name_of(option): value for option, value in options.items()}
        differentiate = self.differentiable and self.backward is None
        try:
            called = CALLS[self.framework](self.function, leaves, named, self.dtype, differentiate)
        except NotImplementedError as reason:  # its own way to say that it was not built for this
            raise NotApplicable(f"the target cannot: {reason}") from None
        backward = self.backward
        if backward is None:
            return called

        def pull(cotangents: Sequence[Array | None]) -> list[Array]:
            if any(c is not None for c in cotangents[1:]):
                raise NotApplicable("the target's backward takes the cotangent of its output only")
            dout = cotangents[0]
            assert dout is not None
            given = [dout, *leaves]
            return CALLS[self.framework](backward, given, named, self.dtype, False).outputs

        return called._replace(pull=pull)
