"""Other forms of attention as targets: linear, FAVOR+, block-sparse, and decoding with a cache."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from minitransformer.arrays import Array
from minitransformer.attention.dense import AttentionGrads
from minitransformer.attention.favor import FavorGrads
from minitransformer.attention.linear import (
    LinearGrads,
    LinearState,
    require_alignment,
    rows_alive,
)
from minitransformer.checks.adapters.call import Callee
from minitransformer.checks.adapters.heads import Axes, Heads, HeadsCache, Leaf
from minitransformer.checks.suite import NotApplicable, Target, reference
from minitransformer.sparse.block_mask import BlockMask, layout_of, listed, to_dense


class _Keyed(Heads):
    """What leaves out whole keys, not pairs, and runs causally or not."""

    def _given(
        self, axes: Axes, keep: Array | None, causal: bool, align: str | None
    ) -> tuple[dict[str, Any], str]:
        """The options that say who may read whom, and our alignment."""
        given: dict[str, Any] = {}
        *leading, _, n, m = axes.shape
        align = require_alignment(causal, align, axes.shape)
        if causal:
            if n != m and align != self.conventions["causal"]:
                raise NotApplicable(f"the target puts its causal mask {self.conventions['causal']}")
            given["causal"] = True
        elif self.callee.name_of("causal") is not None:
            given["causal"] = False
        if keep is not None and not keep.all():
            shape = (*leading, axes.groups, m)
            kept = np.broadcast_to(keep, (*shape[:-1], 1, m))[..., 0, :]
            flat = axes.flat(self.said(kept), shape)
            if self.callee.name_of("keep") is None and (flat == flat[:, :1]).all():
                given["padding"] = flat[:, 0]
            else:
                given["keep"] = flat
        return given, align

    def _dead(
        self, axes: Axes, keep: Array | None, past: Array | None, causal: bool, align: str
    ) -> Array:
        *leading, heads, n, _ = axes.shape
        alive = rows_alive(keep, past, axes.shape, causal, align)
        to = (*leading, axes.groups, heads // axes.groups, n)
        return ~np.broadcast_to(alive, to).reshape(*leading, heads, n)

    def _offered(self, **options: Any) -> dict[str, Any]:
        """How we compute, which others may do as they like."""
        return {name: x for name, x in options.items() if self.callee.name_of(name) is not None}


class LinearHeadsCache(HeadsCache):
    """It offers the state after, if the target returns `s` and `z`."""

    like: tuple[int, ...] = ()  # (D, E)

    @property
    def state(self) -> LinearState:
        shape = (*self.axes.leading, self.axes.groups, *self.like)
        return LinearState(self.returned("s", shape), self.returned("z", shape[:-1]))


class Linear(_Keyed):
    """A target for the suite of `attention.linear`."""

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool = False,
        align: str | None = None,
        keep: Array | None = None,
        state: LinearState | None = None,
        form: str = "chunked",
        chunk: int = 64,
        check_finite: bool = True,
    ) -> tuple[Array, LinearHeadsCache]:
        axes = self.axes(q, k, v, *(state or ()))
        given, align = self._given(axes, keep, causal, align)
        given |= self._offered(form=form, chunk=chunk)
        like, named, more = (q.shape[-1], v.shape[-1]), {}, {}
        if state is not None:
            whole = (*axes.leading, axes.groups, *like)
            for name, x, shape in (("s", state.s, whole), ("z", state.z, whole[:-1])):
                named[name], more[name] = axes.flat(x, shape), Leaf(x.shape, shape, False)
        past = None if state is None else (state.z != 0).any(axis=-1)
        dead = self._dead(axes, keep, past, causal, align)
        called, leaves = self.call(axes, {"q": q, "k": k, "v": v}, given, named)
        cache = LinearHeadsCache(self, called, axes, leaves | more, dead)
        cache.like = like
        return self.settled(called, axes, v, dead), cache

    def backward(
        self, dout: Array, cache: LinearHeadsCache, *, dstate: LinearState | None = None
    ) -> LinearGrads:
        found = self.pulled(cache, dout, {} if dstate is None else dstate._asdict())
        state = LinearState(found["s"], found["z"]) if "s" in found else None
        return LinearGrads(found["q"], found["k"], found["v"], state)


class Favor(_Keyed):
    """A target for the suite of `attention.favor`. Its state is its own affair: no two scale it
    alike."""

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        projection: Array,
        *,
        causal: bool = False,
        align: str | None = None,
        keep: Array | None = None,
        scale: float | None = None,
        state: Any = None,
        chunk: int = 16,
        check_finite: bool = True,
    ) -> tuple[Array, "FavorHeadsCache"]:
        axes = self.axes(q, k, v)
        if state is not None:
            raise NotApplicable("the state of FAVOR+ differs from one implementation to the next")
        given, align = self._given(axes, keep, causal, align)
        given |= self._offered(chunk=chunk)
        if scale is not None:
            given["scale"] = scale
        rows, dead = {"q": q, "k": k, "v": v}, self._dead(axes, keep, None, causal, align)
        called, leaves = self.call(axes, rows, given, constants=(projection,))
        cache = FavorHeadsCache(self, called, axes, leaves, dead)
        return self.settled(called, axes, v, dead), cache

    def backward(self, dout: Array, cache: HeadsCache) -> FavorGrads:
        return FavorGrads(**self.pulled(cache, dout))


class FavorHeadsCache(HeadsCache):
    @property
    def state(self) -> Any:
        raise NotApplicable("the state of FAVOR+ differs from one implementation to the next")


class BlockSparse(Heads):
    """A target for the suite of `sparse.tiled`. It is told which tiles exist (`tiles` of (B, H, R,
    C), true: listed; `tile`, their size), who may attend to whom (`keep`), or both; whoever is told
    the tiles alone is asked about full ones only."""

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: BlockMask,
        *,
        check_finite: bool = True,
        **options: Any,
    ) -> tuple[Array, HeadsCache]:
        axes = self.axes(q, k, v)
        *leading, heads, n, m = axes.shape
        if self.conventions["ragged"] == "refused" and (n % mask.tile[0] or m % mask.tile[1]):
            raise NotApplicable("the target declares ragged=refused")
        keep = np.broadcast_to(to_dense(mask), axes.shape)
        given = {name: x for name, x in options.items() if x is not None}
        by_tile, by_pair = (self.callee.name_of(name) is not None for name in ("tiles", "keep"))
        if not by_tile and not by_pair:
            raise NotApplicable("the target has no option for tiles, nor for a mask")
        if by_tile:
            whole = np.zeros((mask.layouts, *mask.grid), np.bool_)
            whole[tuple(listed(mask).T)] = True
            tiles = whole[layout_of(mask, (*leading, heads))]
            given["tiles"] = axes.flat(tiles, tiles.shape)
            name = self.callee.required_name_of("tile")
            square = mask.tile[0] == mask.tile[1]
            if name != "tile" and not square:
                raise NotApplicable("the target's tiles are square")
            given["tile"] = mask.tile[0] if name != "tile" else mask.tile
            if (mask.pattern >= 0).any() and not by_pair:
                raise NotApplicable("the target lists whole tiles only")
        if by_pair and not keep.all():
            given["keep"] = axes.flat(self.said(keep), axes.shape)
        called, leaves = self.call(axes, {"q": q, "k": k, "v": v}, given)
        dead = ~np.asarray(keep.any(axis=-1))
        return self.settled(called, axes, v, dead), HeadsCache(self, called, axes, leaves, dead)

    def backward(
        self, dout: Array, cache: HeadsCache, *, dlse: Array | None = None
    ) -> AttentionGrads:
        return AttentionGrads(**self.pulled(cache, dout, {"lse": dlse}), bias=None)


class Held:
    """Somebody's cache, whatever it is (None: nothing read yet), and what was asked of it."""

    def __init__(self, state: Any, window: int | None, like: tuple):
        self.state, self.window, self.like, self.spent = state, window, like, False


class Decoding(Heads):
    """A target for what the suite of `attention.kv_cache` asks of `decode_step`:
    f(q, k, v, cache, **options) -> (out, cache), the first cache being None."""

    def empty_cache(
        self,
        leading: tuple[int, ...],
        groups: int,
        width: int,
        value_width: int | None = None,
        *,
        window: int | None = None,
        dtype: Any = np.float64,
    ) -> Held:
        if np.dtype(dtype) != np.float64:
            raise NotApplicable("the dtype of a target is chosen for the whole run")
        return Held(None, window, (leading, groups))

    def decode_step(
        self,
        q: Array,
        k: Array,
        v: Array,
        cache: Held,
        *,
        positions: Array | None = None,
        scale: float | None = None,
        check_finite: bool = True,
    ) -> tuple[Array, Held]:
        if cache.spent and self.conventions["cache"] == "in_place":
            raise NotApplicable("the target declares cache=in_place: the older one is gone")
        axes, function = self.axes(q, k, v), self.callee.function
        given: dict[str, Any] = {} if scale is None else {"scale": scale}
        dead = np.zeros(axes.shape[:-1], np.bool_)
        if cache.window is not None:
            given["sliding"] = cache.window
        if positions is not None:
            shape = (*axes.leading, q.shape[-2])
            given["positions"] = np.broadcast_to(positions, shape).reshape(-1, q.shape[-2])
            dead = dead | (np.broadcast_to(positions, shape) < 0)[..., None, :]
        if dead.any() and self.conventions["dead_row"] == "mean":
            raise NotApplicable("the mean of all values is not known here")
        after: list[Any] = []

        def step(q: Any, k: Any, v: Any, **named: Any) -> Any:
            result = function(q, k, v, cache.state, **named)
            assert isinstance(result, tuple) and len(result) == 2, "a step gives (out, cache)"
            after.append(result[1])
            return result[0]

        callee = self.callee
        names = {o: n for o in given if (n := callee.name_of(o)) is not None}
        stepped = Callee(step, callee.framework, callee.dtype, names, differentiable=False)
        asked = Heads(stepped, self.conventions)
        called, _ = asked.call(axes, {"q": q, "k": k, "v": v}, given)
        cache.spent = True
        out = self.settled(called, axes, v, dead)
        return out, Held(after[0], cache.window, cache.like)


def _pair(kind: type[Heads], mechanism: str, name: str) -> Callable[..., Target]:
    def made(callee: Callee, conventions: Mapping[str, str], returns: tuple[str, ...]) -> Target:
        adapter: Any = kind(callee, conventions, returns)
        names = {f"{name}_forward": adapter.forward, f"{name}_backward": adapter.backward}
        return Target(reference(mechanism), **names, callee=callee, conventions=conventions)

    return made


def _decoding(callee: Callee, conventions: Mapping[str, str], returns: tuple[str, ...]) -> Target:
    adapter = Decoding(callee, conventions, returns)
    names: dict[str, Any] = {"empty_cache": adapter.empty_cache, "decode_step": adapter.decode_step}
    return Target(reference("attention.kv_cache"), **names, callee=callee, conventions=conventions)


FORMS = {
    "linear_attention": _pair(Linear, "attention.linear", "linear_attention"),
    "favor": _pair(Favor, "attention.favor", "favor_attention"),
    "block_sparse_attention": _pair(BlockSparse, "sparse.tiled", "tiled_attention"),
    "kv_cache": _decoding,
}
