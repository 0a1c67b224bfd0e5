"""What every function of q, k and v has in common: its axes, its order of heads, its dead rows."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from minitransformer.arrays import Array, unbroadcast
from minitransformer.attention.dense import score_shape
from minitransformer.checks.adapters.call import Callee
from minitransformer.checks.adapters.frameworks import Called
from minitransformer.checks.gradients import assert_close
from minitransformer.checks.suite import NotApplicable


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
        return self._swapped(self.flat(x, (*self.leading, *x.shape[-3:])))

    def inward(self, x: Array, shape: tuple[int, ...]) -> Array:
        """The way back, to `shape`."""
        return self.unflat(self._swapped(x) if x.ndim == 4 else x, shape)

    def flat(self, x: Array, shape: tuple[int, ...]) -> Array:
        """What has no rows to swap, such as a mask of pairs: broadcast to `shape`, (*B, heads, …),
        one batch axis, their order of heads."""
        n = len(self.leading)
        whole = np.ascontiguousarray(np.broadcast_to(x, shape))
        return whole.reshape(math.prod(self.leading), *shape[n:])[:, self._order(shape[n])]

    def unflat(self, x: Array, shape: tuple[int, ...]) -> Array:
        """The way back, to `shape`."""
        n = len(self.leading)
        expected = (math.prod(self.leading), *shape[n:])
        assert x.shape == expected, f"got shape {x.shape}, expected {expected}"
        return x[:, np.argsort(self._order(shape[n]))].reshape(shape)

    def _swapped(self, x: Array) -> Array:
        return np.swapaxes(x, 1, 2) if self.layout == "bnhd" else x

    def _order(self, heads: int) -> Array:
        """Our head at each of their places."""
        places = np.arange(heads)
        if not self.tiled or heads != self.shape[-3]:
            return places
        repeat = heads // self.groups
        return places % self.groups * repeat + places // self.groups


class Leaf(NamedTuple):
    """An array that has a gradient: its own shape, and the one in which it was handed over."""

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    rows: bool  # its rows and heads may be swapped: q, k and v


class HeadsCache:
    """What a call leaves for the backward pass. It offers what else the target returns."""

    def __init__(
        self, adapter: "Heads", called: Called, axes: Axes, leaves: dict[str, Leaf], dead: Array
    ):
        self.adapter, self.called, self.axes = adapter, called, axes
        self.leaves, self.dead = leaves, dead

    def place_of(self, name: str) -> int:
        returns = self.adapter.returns
        if name not in returns or len(self.called.outputs) <= returns.index(name):
            raise NotApplicable(f"the target returns no {name}")
        return returns.index(name)

    def returned(self, name: str, shape: tuple[int, ...]) -> Array:
        """A result beside the output, (*B, heads, …), in our order of heads."""
        return self.axes.unflat(self.called.outputs[self.place_of(name)], shape)

    @property
    def lse(self) -> Array:
        return self.returned("lse", self.axes.shape[:-1]) * self.adapter.lse_unit

    @property
    def weights(self) -> Array:
        return self.returned("weights", self.axes.shape)


class Heads:
    """A function of q, k and v that is called in its own conventions."""

    def __init__(
        self, callee: Callee, conventions: Mapping[str, str], returns: tuple[str, ...] = ("out",)
    ):
        self.callee, self.conventions, self.returns = callee, conventions, returns
        self.lse_unit = math.log(2) if conventions["lse"] == "2" else 1.0

    def axes(self, q: Array, k: Array, v: Array, *more: Array | None) -> Axes:
        """How these arrays travel; refuses what nobody else can be asked."""
        arrays = [x for x in (q, k, v, *more) if x is not None]
        if any(np.iscomplexobj(x) for x in arrays):
            raise TypeError("complex arrays are not for third parties")
        if any(x.dtype != np.float64 for x in arrays):
            raise NotApplicable("the dtype of a target is chosen for the whole run")
        shape, tiled = score_shape(q, k, v), self.conventions["groups"] == "tile"
        if self.conventions["empty"] == "refused" and 0 in (*shape, q.shape[-1], v.shape[-1]):
            raise NotApplicable("the target declares empty=refused")
        return Axes(shape, k.shape[-3], self.conventions["layout"], tiled)

    def call(
        self,
        axes: Axes,
        rows: Mapping[str, Array],
        given: Mapping[str, Any],
        named: Mapping[str, Array] | None = None,
        constants: tuple[Array, ...] = (),
    ) -> tuple[Called, dict[str, Leaf]]:
        """Call with `rows` (q, k, v) and `constants` by position, options by name; `named` are
        options that have gradients too, flat already."""
        leaves = {
            name: Leaf(x.shape, (*axes.leading, *x.shape[-3:]), True) for name, x in rows.items()
        }
        outward = [axes.outward(x) for x in rows.values()]
        callee, extra = self.callee, dict(named or {})
        if callee.backward is not None or not callee.differentiable:
            given, extra = {**given, **extra}, {}
        keys = [f"constant_{n}" for n in range(len(constants))]
        names = {option: callee.required_name_of(option) for option in (*given, *extra)}
        function, backward, first = callee.function, callee.backward, len(outward)

        def positional(*xs: Any, **rest: Any) -> Any:
            fixed = [rest.pop(key) for key in keys]
            more = zip(extra, xs[first:], strict=True)
            return function(*xs[:first], *fixed, **{names[o]: x for o, x in more}, **rest)

        def backward_of(dout: Any, *xs: Any, **rest: Any) -> Any:
            assert backward is not None
            return backward(dout, *xs, *[rest.pop(key) for key in keys], **rest)

        made = dataclasses.replace(
            callee,
            function=positional,
            renamed={o: n for o, n in names.items() if o in given} | {key: key for key in keys},
            backward=None if backward is None else backward_of,
        )
        options = {**given, **dict(zip(keys, constants, strict=True))}
        return made.call([*outward, *extra.values()], options), leaves

    def said(self, keep: Array) -> Array:
        """A mask in the words of the target."""
        if self.conventions["mask"] == "additive":
            return np.where(keep, 0.0, -np.inf)
        return ~keep if self.conventions["mask"] == "ignore" else keep

    def settled(self, called: Called, axes: Axes, v: Array, dead: Array) -> Array:
        """The output in our axes. A row with no key is held to what the target declares of it; then
        the 0 is written there that we would."""
        out = axes.inward(called.outputs[0], (*axes.shape[:-1], v.shape[-1]))
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

    def pulled(
        self, cache: HeadsCache, dout: Array, others: Mapping[str, Array | None] | None = None
    ) -> dict[str, Array]:
        """The gradient of each leaf, from cotangents of the output and of `others` by their
        names."""
        if self.conventions["dead_row"] != "zero" and cache.dead.any():
            raise NotApplicable("the gradient of a dead row that is not zero")
        axes, found = cache.axes, {}
        cotangents: list[Array | None] = [axes.outward(dout), *[None] * len(self.returns)]
        for name, x in (others or {}).items():
            if x is not None:
                unit = self.lse_unit if name == "lse" else 1.0
                cotangents[cache.place_of(name)] = axes.flat(x, x.shape) * unit
        pulled = cache.called.pull(cotangents)
        for (name, leaf), g in zip(cache.leaves.items(), pulled, strict=False):
            whole = (axes.inward if leaf.rows else axes.unflat)(g, leaf.whole)
            found[name] = unbroadcast(whole, leaf.shape)
        for name in cache.leaves:
            if name not in found:
                raise NotApplicable(f"the target has no gradient of its {name}")
        return found
