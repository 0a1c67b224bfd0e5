"""Somebody else's attention as a target: axes, masks and conventions translated to ours and back.

What the target can express decides what it is asked. A structural mask goes to its causal flag or
its window if it has one that means the same, else to its mask, else to its bias; a case that it
cannot express at all does not count.
"""

from typing import Any

import numpy as np

from minitransformer.arrays import Array
from minitransformer.attention.dense import AttentionGrads
from minitransformer.attention.masks import causal, window
from minitransformer.checks.adapters.heads import Axes, Heads, HeadsCache, Leaf
from minitransformer.checks.suite import NotApplicable

REACHES = range(-1, 4)  # the windows that are recognised


class Attention(Heads):
    """A target for the suite of `attention.dense`."""

    def attention_forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        keep: Array | None = None,
        bias: Array | None = None,
        multiplier: Array | None = None,
        check_finite: bool = True,
        **options: Any,
    ) -> tuple[Array, HeadsCache]:
        axes = self.axes(q, k, v, bias)
        keep = np.broadcast_to(True if keep is None else keep, axes.shape)
        dead = ~np.asarray(keep.any(axis=-1))

        given = {name: x for name, x in options.items() if x is not None}
        if multiplier is not None:
            given["multiplier"] = axes.flat(multiplier, axes.shape)
        rows = {"q": q, "k": k, "v": v}

        def ask(masks: dict[str, Any]) -> Any:
            """A bias has a gradient too, under whatever name it travels."""
            option = "keep" if self._additive and "keep" in masks else "bias"
            named = {option: masks.pop(option)} if bias is not None else {}
            return self.call(axes, rows, given | masks, named)

        try:
            called, leaves = ask(self._masks(keep, bias, axes))
        except NotApplicable:  # perhaps not with this flag
            called, leaves = ask(self._masks(keep, bias, axes, flags=False))
        if bias is not None:
            leaves["bias"] = Leaf(bias.shape, axes.shape, False)
        return self.settled(called, axes, v, dead), HeadsCache(self, called, axes, leaves, dead)

    def attention_backward(
        self, dout: Array, cache: HeadsCache, *, dlse: Array | None = None
    ) -> AttentionGrads:
        found = self.pulled(cache, dout, {"lse": dlse})
        return AttentionGrads(found["q"], found["k"], found["v"], found.get("bias"))

    # ---- masks -----------------------------------------------------------------------------------

    @property
    def _additive(self) -> bool:
        return self.conventions["mask"] == "additive"

    def _masks(
        self, keep: Array, bias: Array | None, axes: Axes, *, flags: bool = True
    ) -> dict[str, Any]:
        """The options that say who may attend to whom."""
        options = ("keep", "bias", "causal", "window")
        offers = {option: self.callee.name_of(option) is not None for option in options}
        given: dict[str, Any] = {}
        whole: Array | None = None if bias is None else np.broadcast_to(bias, axes.shape)
        if not keep.all():
            flag = self._as_flag(keep, offers) if flags else {}
            if flag:
                given |= flag
            elif offers["keep"] and not self._additive:
                given["keep"] = axes.flat(self.said(keep), axes.shape)
            elif offers["bias"] or offers["keep"]:
                whole = np.where(keep, 0.0 if whole is None else whole, -np.inf)
            else:
                raise NotApplicable("the target cannot be told this mask")
        if whole is not None:
            option = (
                "keep" if offers["keep"] and self._additive else "bias" if offers["bias"] else None
            )
            if option is None:
                raise NotApplicable("the target has no option for a bias")
            given[option] = axes.flat(whole, axes.shape)
        return given

    def _as_flag(self, keep: Array, offers: dict[str, bool]) -> dict[str, Any]:
        n, m = keep.shape[-2:]
        align, first = self.conventions["causal"], keep.reshape(-1, n, m)
        if (first != first[0]).any():
            return {}
        if offers["causal"] and np.array_equal(first[0], causal(n, m, align=align).dense()):
            return {"causal": True}
        if offers["window"]:
            for left in REACHES:
                for right in REACHES:
                    rule = window(n, m, left=left, right=right, align=align)
                    if np.array_equal(first[0], rule.dense()):
                        return {"window": (left, right)}
        return {}
