"""Somebody else's attention as a target: axes, masks and conventions translated to ours and back.

What the target can express decides what it is asked. A structural mask goes to its causal flag or
its window if it has one that means the same, else to its mask, else to its bias; a case that it
cannot express at all does not count.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from minitransformer.arrays import Array, unbroadcast
from minitransformer.attention.dense import AttentionGrads, score_shape
from minitransformer.attention.masks import causal, window
from minitransformer.checks.adapters.call import Callee
from minitransformer.checks.adapters.frameworks import Called
from minitransformer.checks.gradients import assert_close
from minitransformer.checks.suite import NotApplicable

REACHES = range(-1, 4)  # the windows that are recognised


class Axes(NamedTuple):
    """Our axes (*B, H, N, M) and G, and the way to the target's and back."""

    shape: tuple[int, ...]
    groups: int
    layout: str
    tiled: bool  # query head h reads h % G over there

    @property
    def leading(self) -> tuple[int, ...]:
        return self.shape[:-3]

    def outward(self, x: Array) -> Array:
        """(*B, H or G, rows, width), broadcast: one batch axis, their order of heads and axes."""
        whole = np.broadcast_to(x, (*self.leading, *x.shape[-3:]))
        flat = np.ascontiguousarray(whole).reshape(math.prod(self.leading), *x.shape[-3:])
        return self._swapped(flat[:, self._order(x.shape[-3])])

    def inward(self, x: Array, shape: tuple[int, ...]) -> Array:
        """The way back, to `shape`."""
        flat = self._swapped(x) if x.ndim == 4 else x
        expected = (math.prod(self.leading), *shape[-3:])
        assert flat.shape == expected, f"got shape {flat.shape}, expected {expected}"
        return flat[:, np.argsort(self._order(shape[-3]))].reshape(shape)

    def pairs_outward(self, x: Array) -> Array:
        """What stands for pairs, (*B, H, N, M): heads ordered, axes never swapped."""
        whole = np.broadcast_to(x, self.shape)
        flat = np.ascontiguousarray(whole).reshape(math.prod(self.leading), *self.shape[-3:])
        return flat[:, self._order(self.shape[-3])]

    def pairs_inward(self, x: Array, shape: tuple[int, ...]) -> Array:
        """(B, H, N, M) or (B, H, N) in our order of heads."""
        expected = (math.prod(self.leading), *shape[len(self.leading) :])
        assert x.shape == expected, f"got shape {x.shape}, expected {expected}"
        return x[:, np.argsort(self._order(self.shape[-3]))].reshape(shape)

    def _swapped(self, x: Array) -> Array:
        return np.swapaxes(x, 1, 2) if self.layout == "bnhd" else x

    def _order(self, heads: int) -> Array:
        """Our head at each of their places."""
        places = np.arange(heads)
        if not self.tiled or heads != self.shape[-3]:
            return places
        repeat = heads // self.groups
        return places % self.groups * repeat + places // self.groups


class AttentionCache:
    """What a call leaves for the backward pass. It offers the LSE if the target returns one."""

    def __init__(self, adapter: "Attention", called: Called, axes: Axes, inputs: dict, dead: Array):
        self.adapter, self.called, self.axes = adapter, called, axes
        self.inputs, self.dead = inputs, dead

    def place_of(self, name: str) -> int:
        returns = self.adapter.returns
        if name not in returns or len(self.called.outputs) <= returns.index(name):
            raise NotApplicable(f"the target returns no {name}")
        return returns.index(name)

    @property
    def lse(self) -> Array:
        found = self.called.outputs[self.place_of("lse")]
        return self.axes.pairs_inward(found, self.axes.shape[:-1]) * self.adapter.lse_unit

    @property
    def weights(self) -> Array:
        found = self.called.outputs[self.place_of("weights")]
        return self.axes.pairs_inward(found, self.axes.shape)


class Attention:
    """A target for the suite of `attention.dense`."""

    def __init__(self, callee: Callee, conventions: dict[str, str], returns: tuple[str, ...]):
        self.callee, self.conventions, self.returns = callee, conventions, returns
        self.lse_unit = math.log(2) if conventions["lse"] == "2" else 1.0

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
    ) -> tuple[Array, AttentionCache]:
        arrays = [x for x in (q, k, v, bias) if x is not None]
        if any(np.iscomplexobj(x) for x in arrays):
            raise TypeError("complex arrays are not for third parties")
        if any(x.dtype != np.float64 for x in arrays):
            raise NotApplicable("the dtype of a target is chosen for the whole run")
        shape, tiled = score_shape(q, k, v), self.conventions["groups"] == "tile"
        axes = Axes(shape, k.shape[-3], self.conventions["layout"], tiled)
        if self.conventions["empty"] == "refused" and 0 in (*shape, q.shape[-1], v.shape[-1]):
            raise NotApplicable("the target declares empty=refused")
        keep = np.broadcast_to(True if keep is None else keep, shape)
        dead = ~np.asarray(keep.any(axis=-1))

        given = {name: x for name, x in options.items() if x is not None}
        if multiplier is not None:
            given["multiplier"] = axes.pairs_outward(multiplier)
        inputs, leaves = {"q": q, "k": k, "v": v}, [axes.outward(x) for x in (q, k, v)]
        try:
            called = self._call(leaves, given | self._masks(keep, bias, axes), bias is not None)
        except NotApplicable:  # perhaps not with this flag
            plain = self._masks(keep, bias, axes, flags=False)
            called = self._call(leaves, given | plain, bias is not None)
        if bias is not None:
            inputs["bias"] = bias
        out = axes.inward(called.outputs[0], (*shape[:-1], v.shape[-1]))
        out = self._dead_rows_as_ours(out, dead, v, axes)
        return out, AttentionCache(self, called, axes, inputs, dead)

    def attention_backward(
        self, dout: Array, cache: AttentionCache, *, dlse: Array | None = None
    ) -> AttentionGrads:
        if self.conventions["dead_row"] != "zero" and cache.dead.any():
            raise NotApplicable("the gradient of a dead row that is not zero")
        axes, found = cache.axes, {}
        cotangents: list[Array | None] = [axes.outward(dout)]
        if dlse is not None:
            cotangents += [None] * cache.place_of("lse")
            order = axes._order(axes.shape[-3])
            flat = dlse.reshape(math.prod(axes.leading), *axes.shape[-3:-1])
            cotangents[cache.place_of("lse")] = flat[:, order] * self.lse_unit
        pulled = cache.called.pull(cotangents)
        for (name, x), g in zip(cache.inputs.items(), pulled, strict=False):
            if name == "bias":
                whole = axes.pairs_inward(g, axes.shape)
            else:
                whole = axes.inward(g, (*axes.leading, *x.shape[-3:]))
            found[name] = unbroadcast(whole, x.shape)
        if len(found) < len(cache.inputs):
            raise NotApplicable("the target has no gradient of its bias")
        return AttentionGrads(found["q"], found["k"], found["v"], found.get("bias"))

    # ---- the call --------------------------------------------------------------------------------

    def _call(self, leaves: list[Array], given: dict[str, Any], with_bias: bool) -> Called:
        """A bias has a gradient too: by a framework it becomes a leaf, handed on under its name."""
        if not with_bias or self.callee.backward is not None:
            return self.callee.call(leaves, given)
        option = "keep" if self.conventions["mask"] == "additive" and "keep" in given else "bias"
        name, whole, function = self.callee.name_of(option), given.pop(option), self.callee.function

        def with_leaf(q: Any, k: Any, v: Any, b: Any, **rest: Any) -> Any:
            return function(q, k, v, **{str(name): b}, **rest)

        renamed = {o: n for o in given if (n := self.callee.name_of(o)) is not None}
        made = dataclasses.replace(self.callee, function=with_leaf, renamed=renamed)
        return made.call([*leaves, whole], given)

    def _masks(
        self, keep: Array, bias: Array | None, axes: Axes, *, flags: bool = True
    ) -> dict[str, Any]:
        """The options that say who may attend to whom."""
        options = ("keep", "bias", "causal", "window")
        offers = {option: self.callee.name_of(option) is not None for option in options}
        additive = self.conventions["mask"] == "additive"
        given: dict[str, Any] = {}
        whole: Array | None = None if bias is None else np.broadcast_to(bias, axes.shape)
        if not keep.all():
            flag = self._as_flag(keep, offers) if flags else {}
            if flag:
                given |= flag
            elif offers["keep"] and not additive:
                said = ~keep if self.conventions["mask"] == "ignore" else keep
                given["keep"] = axes.pairs_outward(said)
            elif offers["bias"] or offers["keep"]:
                whole = np.where(keep, 0.0 if whole is None else whole, -np.inf)
            else:
                raise NotApplicable("the target cannot be told this mask")
        if whole is not None:
            option = "keep" if offers["keep"] and additive else "bias" if offers["bias"] else None
            if option is None:
                raise NotApplicable("the target has no option for a bias")
            given[option] = axes.pairs_outward(whole)
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

    # ---- rows with no key ------------------------------------------------------------------------

    def _dead_rows_as_ours(self, out: Array, dead: Array, v: Array, axes: Axes) -> Array:
        """Hold the target to what it declares of dead rows, then write the 0 that we would."""
        kind = self.conventions["dead_row"]
        if kind == "zero" or not dead.any():
            return out
        if kind == "nan":
            assert np.isnan(out[dead]).all(), "dead_row=nan is declared, but a dead row is no NaN"
        elif v.shape[-2]:
            whole = np.broadcast_to(v, (*axes.leading, *v.shape[-3:])).mean(axis=-2, keepdims=True)
            mean = np.repeat(whole, out.shape[-3] // v.shape[-3], axis=-3)
            mean = np.broadcast_to(mean, out.shape)
            assert_close(out[dead], mean[dead], 1e-6, what="dead rows, declared as the mean")
        return np.where(dead[..., None], 0.0, out)
