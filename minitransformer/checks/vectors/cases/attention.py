"""Attention: masks that can be read off the output, heads, ramps of logits, poison, gradients."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minitransformer.arrays import Array
from minitransformer.attention.masks import packed, padding
from minitransformer.checks.vectors.operation import (
    Case,
    Options,
    When,
    draw,
    drawn_mask,
    integers,
    stored,
)
from minitransformer.checks.vectors.pairs import allowed_pairs


def _probe(n: int, m: int, batch: Sequence[int] = (1,), heads: int = 1) -> dict[str, Array]:
    """q = k = 0 and V = I: row i of the output *is* row i of the weights. With many keys, V holds
    three random numbers for each."""
    eye = np.eye(m) if m <= 20 else draw(f"probe {m}", (m, 3))
    eye = np.broadcast_to(eye, (*batch, heads, *eye.shape)).copy()
    return {"q": np.zeros((*batch, heads, n, 2)), "k": np.zeros((*batch, heads, m, 2)), "v": eye}


def _whens(options: Options, n: int, m: int) -> tuple[When, ...]:
    """The conventions that change the answer of a flag or of a row with no key."""
    flags = options.get("causal") or "window" in options
    found: list[When] = []
    for align in ("lower_right", "upper_left") if flags and n != m else ("",):
        when = {"causal": align} if align else {}
        allowed = allowed_pairs(_probe(n, m), options, when)
        dead = bool(n and not allowed.any(axis=-1).all())
        kinds = ("zero", "nan", "mean") if dead and m else ("",)
        found += [{**when, "dead_row": kind} if kind else when for kind in kinds]
    return tuple(found)


SHAPES = ((1, 1), (4, 4), (5, 5), (2, 5), (5, 2), (1, 8), (8, 1), (3, 7), (33, 33), (31, 65))


def _flags() -> list[Case]:
    """Masks by a word: what it means is a convention where N != M."""
    cases = []
    options: dict[str, Any]
    known: dict[Any, tuple[str, ...]] = {
        (2, 5): ("B012", "B014"), (5, 2): ("B014",), (1, 4): ("B016",), (1, 8): ("B012",),
        (4, 4): ("B019",), (5, 5, 1, 0): ("B038", "B040", "B042"), (8, 8, 0, 0): ("B021",),
        (8, 8, 0, 31): ("B021",),
    }
    for n, m in (*SHAPES, (1, 4), (2, 2), (65, 64), (0, 3), (3, 0), (0, 0)):
        flags = ["causal_alignment"] if n != m else ["mask_dropped"]
        flags += ["zero_length"] * (0 in (n, m)) + ["kernel_tail"] * (max(n, m) > 30)
        options = {"causal": True}
        cases.append(
            Case(
                f"causal-{n}x{m}", f"the causal flag with {n} queries and {m} keys", tuple(flags),
                _probe(n, m), options, whens=_whens(options, n, m),
                reports=known.get((n, m), ()),
            )
        )
    for n, m, left, after in (
        (5, 5, 1, 0), (8, 8, 0, 0), (5, 5, 2, 1), (6, 6, -1, 0), (6, 6, 0, -1), (3, 6, 1, 0),
        (6, 3, 1, 1), (7, 7, 3, 2), (33, 33, 7, 0), (5, 5, -1, -1), (4, 9, 0, 0), (9, 4, 2, 2),
        (1, 7, 2, 0), (5, 5, 4, 0), (5, 5, 5, 0), (8, 8, 0, 31),
    ):
        options = {"window": [left, after]}
        flag = "window_dropped" if -1 in (left, after) else "window_off_by_one"
        cases.append(
            Case(
                f"window-{left}-{after}-{n}x{m}".replace("--1", "-all"),
                f"a window of {left} keys before and {after} behind the query's own, both ends "
                "included; -1 is no limit", (flag,),
                _probe(n, m), options, whens=_whens(options, n, m),
                reports=known.get((n, m, left, after), ()),
            )
        )
    both = {"causal": True, "window": [2, -1]}
    cases.append(
        Case("causal-and-window", "a causal flag and a window that looks ahead: both hold",
            ("mask_combination",), _probe(6, 6), both)
    )
    return cases


def _masks() -> list[Case]:
    """Masks as arrays."""
    cases = []

    def add(
        id: str, about: str, flags: str, keep: Array, *, reports: Sequence[str] = (), **more: Any
    ):
        n, m = keep.shape[-2:] if "n" not in more else (more.pop("n"), keep.shape[-1])
        batch, heads = more.pop("batch", (1,)), more.pop("heads", 1)
        inputs = {**_probe(n, m, batch, heads), "keep": keep, **more}
        whole = np.broadcast_to(keep, (*batch, heads, n, m))
        dead = bool(n and m and not whole.any(axis=-1).all())
        whens = tuple({"dead_row": k} for k in ("zero", "nan", "mean")) if dead else ({},)
        cases.append(
            Case(id, about, tuple(flags.split()), inputs, whens=whens, reports=tuple(reports))
        )

    tri = np.tri(3, dtype=bool)
    add("lower-triangle", "True is `may attend`: tril", "mask_polarity", tri, reports=["B029"])
    add("upper-triangle", "True is `may attend`: triu", "mask_polarity", tri.T, reports=["B029"])
    add("all-true", "a mask that hides nothing", "mask_polarity", np.ones((3, 4), bool))
    add("all-false", "a mask that hides everything", "fully_masked_row", np.zeros((3, 4), bool))
    half = np.zeros((8, 8), bool)
    half[:4, :4] = True
    add("four-dead-rows", "the upper left quarter may be read, rows 4 to 7 nothing",
        "fully_masked_row", half, reports=["B001"])
    first = np.ones((4, 4), bool)
    first[0] = False
    add("first-row-dead", "row 0 may read nothing: no NaN, here or in a comparison",
        "fully_masked_row", first, reports=["B005"])
    for key in range(5):
        one = np.zeros((2, 5), bool)
        one[:, key] = True
        add(f"key-{key}-alone", f"every query reads key {key} and no other", "ordinary", one)
    lengths = integers([2, 4, 1])
    pad = padding(lengths, queries=4, keys=4).dense()
    add("padded-keys", "three rows of unlike length; keys are hidden, not queries",
        "mask_broadcast", pad, batch=(3,), reports=["B032"])
    add("padded-keys-two-heads", "the same, two heads", "mask_broadcast", pad, batch=(3,), heads=2)
    left = padding(integers([2, 3]), queries=3, keys=3).dense()[..., ::-1].copy()
    add("padded-on-the-left", "padding before the text", "left_padding_positions", left, batch=(2,))
    ones = np.tri(4, dtype=bool) & np.ones((1, 1, 1, 4), bool)
    add("causal-and-no-padding", "causal, and a padding mask of ones: it changes nothing",
        "mask_combination", ones, reports=["B024"])
    behind = np.tri(5, dtype=bool) & np.array([0, 0, 0, 1, 1], bool)
    add("causal-and-left-padding", "causal, the first three keys are padding: rows 0 to 2 have no "
        "key", "mask_combination fully_masked_row", behind, reports=["B026"])
    segments = integers([[0, 0, 0, 1, 1, 1]])
    documents = packed(segments, segments).dense() & np.tri(6, dtype=bool)
    add("two-documents", "two documents of three tokens, causal inside each", "packing_leak",
        documents, reports=["B028"])
    segments = integers([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
    documents = packed(segments, segments).dense() & np.tri(5, dtype=bool)
    add("documents-differ-by-row", "two rows, packed otherwise", "packing_leak", documents,
        batch=(2,), reports=["B052"])
    segments = integers([[1, 0, 2, 0, 1]])
    add("documents-interleaved", "segments in no order", "packing_leak",
        packed(segments, segments).dense())
    by_head = np.array([[[1, 0], [1, 1]], [[0, 1], [1, 0]]], bool)
    add("rank-three-is-heads", "(H, N, M) with B = H: the first axis is the heads'",
        "mask_broadcast", by_head, batch=(2,), heads=2, reports=["B034"])
    add("another-mask-each-head", "a mask of its own for each head", "mask_broadcast",
        drawn_mask("heads", (1, 3, 4, 5)), heads=3)
    add("another-mask-each-row", "a mask of its own for each batch row", "mask_broadcast",
        drawn_mask("rows", (3, 1, 4, 5)), batch=(3,), heads=2)
    add("another-mask-each", "a mask of its own for each batch row and head", "mask_broadcast",
        drawn_mask("both", (2, 3, 3, 4)), batch=(2,), heads=3)
    add("keys-for-all", "(M,): one row of keys for everybody", "mask_broadcast",
        np.array([1, 0, 1, 1], bool), n=3, batch=(2,), heads=2)
    two = np.array([[[[1], [0], [1]]]], bool) & np.ones((1, 1, 3, 4), bool)
    add("whole-query-hidden", "the middle query may read nothing", "fully_masked_row", two)
    for n, m in ((7, 11), (16, 17), (33, 65), (1, 1), (13, 5)):
        add(f"random-{n}x{m}", f"a random mask, {n} queries and {m} keys", "ordinary",
            drawn_mask(f"random{n}{m}", (n, m)))
    return cases


def _rules() -> list[Case]:
    """Numbers that the rules of this page give by hand."""
    cases: list[Case] = []
    heads = np.arange(2.0).reshape(1, 2, 1, 1)
    one = np.zeros((1, 4, 1, 1))
    cases.append(
        Case("repeat-not-tile", "4 query heads, 2 key heads, V of head h is h: 0 0 1 1",
            ("gqa_head_order",), {"q": one, "k": np.zeros((1, 2, 1, 1)), "v": heads},
            reports=("B065",), published={"out": [0, 0, 1, 1]}, cotangents={"out": one + 1})
    )
    for h, g in ((6, 2), (6, 3), (8, 1), (4, 4), (6, 1), (3, 3), (12, 4)):
        value = 1000 * np.arange(2.0).reshape(2, 1, 1, 1) + np.arange(float(g)).reshape(1, g, 1, 1)
        v = np.broadcast_to(value, (2, g, 3, 2)).copy()
        cases.append(
            Case(f"head-id-{h}-over-{g}",
                f"V[b, g] is 1000 b + g everywhere: {h} query heads show which of {g} they read",
                ("gqa_head_order", "head_layout"),
                {"q": draw(f"id{h}{g}", (2, h, 2, 3)), "k": draw(f"idk{h}{g}", (2, g, 3, 3)),
                 "v": v})
        )
    x = np.arange(1.0, 25.0).reshape(1, 2, 3, 4).transpose(0, 2, 1, 3) / 8
    cases.append(
        Case("heads-not-reshaped", "(B, N, H, D) seen as (B, H, N, D): head h of token t is "
             "x[t, h]", ("head_layout",),
             {"q": np.zeros((1, 3, 2, 4)), "k": np.zeros((1, 3, 2, 4)), "v": x.copy(),
              "keep": np.eye(2, dtype=bool)}, reports=("B070",))
    )
    cases.append(
        Case("queries-not-reduced", "4 query heads with queries of their own over 2 key heads",
             ("gqa_head_order",),
             {"q": draw("own", (1, 4, 2, 2)), "k": draw("two", (1, 2, 3, 2)),
              "v": draw("twov", (1, 2, 3, 2))}, reports=("B067",),
             cotangents={"out": draw("owno", (1, 4, 2, 2))})
    )

    def ramp(id, about, flag, scores, *, reports=(), options=None, published=None, width=1, **more):
        """One query of e0, keys a_j e0, V = I: the output is softmax of a ramp of logits."""
        m = len(scores)
        k = np.zeros((1, 1, m, width))
        k[0, 0, :, 0] = scores
        q = np.zeros((1, 1, 1, width))
        q[..., 0] = more.pop("query", 1.0)
        inputs = {"q": q, "k": k, "v": np.eye(m)[None, None].copy(), **more.pop("inputs", {})}
        cases.append(
            Case(id, about, (flag,), inputs, options or {}, reports=tuple(reports),
                 published={"out": published} if published else {}, **more)
        )

    ramp("thousand", "logits 1000 and 1001", "softmax_numeric", [1000, 1001], reports=["B134"],
         published=[0.268941, 0.731059])
    for top in (50, 100, 710, 20000, -20000, -745):
        ramp(f"logit-{top}", f"logits 0 and {top}", "softmax_numeric", [0, top])
    ramp("spread", "logits from -60 to 60", "softmax_numeric", [-60, -30, 0, 30, 60])
    ramp("scale-of-the-head", "D = 4 of a model of 16: softmax([8, 0] / 2)", "scale", [8, 0],
         width=4, reports=["B071"], published=[0.982014, 0.017986])
    ramp("scale-of-64", "D = 64: 1/√D is 1/8", "scale", [8, 0, 4], width=64, reports=["B073"])
    ramp("scale-given", "a scale of 1 where 1/√D is 1/2", "scale", [2, 0, 1], width=4,
         options={"scale": 1.0})
    ramp("scale-zero", "a scale of 0: all keys alike", "scale", [2, 0, 1], options={"scale": 0.0})
    ramp("scale-negative", "a negative scale turns the order round", "scale", [2, 0, 1],
         options={"scale": -0.5})
    ramp("scale-odd", "a scale that is no power of two", "scale", [2, 0, 1], width=4,
         options={"scale": 0.3})
    ramp("softcap-100-at-50", "50 · tanh(2) = 48.2014, not 96.4", "softcap_formula", [100, 48],
         options={"softcap": 50.0}, reports=["B076"])
    ramp("softcap-both-signs", "logits ±100 under a cap of 50", "softcap_dropped",
         [100, -100, 98], options={"softcap": 50.0}, reports=["B077"])
    for cap in (1.0, 2.0, 30.0):
        ramp(f"softcap-{cap:g}", f"a cap of {cap:g} over logits from -4 to 4", "softcap_formula",
             [-4, -1, 0, 1, 4], options={"softcap": cap})
    keep = np.array([1, 0, 1, 1], bool)
    bias = np.array([0.0, 5.0, -1.0, 2.0])
    ramp("softcap-then-mask", "a masked key under a cap: -inf is not capped", "softcap_formula",
         [3, 9, -2, 4], options={"softcap": 2.0}, inputs={"keep": keep})
    ramp("softcap-then-bias", "the bias is added after the cap", "softcap_formula", [3, 9, -2, 4],
         options={"softcap": 2.0}, inputs={"bias": bias})
    ramp("scale-then-bias", "the bias is not scaled", "scale", [3, 9, -2, 4], width=4,
         inputs={"bias": bias})
    ramp("order-of-all", "scale, cap, bias, mask: in this order", "softcap_formula",
         [3, 9, -2, 4], width=4, options={"softcap": 2.0, "scale": 0.7},
         inputs={"bias": bias, "keep": keep})
    ramp("zero-bias", "a float mask of zeros is added, not multiplied", "mask_polarity", [1, 3],
         inputs={"bias": np.zeros(2)}, reports=["B031"])
    ramp("minus-infinity-in-the-bias", "-inf in the bias masks", "mask_value_overflow", [1, 3, 2],
         inputs={"bias": np.array([0.0, -np.inf, 1.0])})
    ramp("minus-a-billion-is-no-mask", "a bias of -1e9 for every key shifts all alike: the row is "
         "not dead", "mask_value_overflow", [1, 3, 2],
         inputs={"bias": np.full(3, -1e9)})
    ramp("masked-key-of-ten-thousand", "a masked key whose logit is 1e4: no fill may be larger",
         "mask_value_overflow", [1, 10000, 2],
         inputs={"keep": np.array([1, 0, 1], bool)})
    ramp("all-but-masked-at-minus-1e5", "the only key that may be read has the logit -1e5",
         "mask_value_overflow", [-100000, 0, 1],
         inputs={"keep": np.array([1, 0, 0], bool)})
    lowest = float(np.finfo(np.float32).min)
    cases.append(
        Case("finfo-min-is-no-mask",
             "float32: a row of the bias is finfo.min. The scores vanish in it, so all keys weigh "
             "alike; in exact arithmetic they would not",
             ("fully_masked_row",),
             {"q": np.zeros((1, 1, 1, 2)), "k": np.zeros((1, 1, 4, 2)),
              "v": draw("lowest", (1, 1, 4, 3)), "bias": np.full(4, lowest)},
             reports=("B003",))
    )
    tri = np.tri(4)
    cases.append(
        Case("mask-of-ones-added",
             "the mask was tril(1) with -inf above, and added: 1 on every allowed score changes "
             "nothing, softmax does not feel a shift", ("mask_value_overflow",),
             {**_probe(4, 4), "bias": np.where(tri == 1, 1.0, -np.inf)}, reports=("B037",))
    )
    return cases


# ---- cases: random numbers, gradients, poison ----------------------------------------------------


def _random(
    id: str, shape: Sequence[int], *, lead: Sequence[Sequence[int]] = ((2,), (2,), (2,)),
    spread: float = 2.0, keep: Sequence[int] | None = None, share: float = 0.6,
    bias: Sequence[int] | None = None, multiplier: bool = False, dlse: bool = True,
    dtype: str = "float64", options: Options | None = None, **more: Any,
) -> Case:
    """Random numbers of (H, G, N, M, D, E), with a random cotangent."""
    h, g, n, m, d, e = shape
    inputs = {
        "q": draw(f"{id} q", (*lead[0], h, n, d), spread),
        "k": draw(f"{id} k", (*lead[1], g, m, d), spread),
        "v": draw(f"{id} v", (*lead[2], g, m, e), spread),
    }
    batch = np.broadcast_shapes(*lead)
    if bias is not None:
        inputs["bias"] = draw(f"{id} bias", bias, spread)
    if multiplier:
        inputs["multiplier"] = 2.0 * drawn_mask(f"{id} multiplier", (*batch, h, n, m), 0.5)
    inputs = {name: stored(x, dtype) for name, x in inputs.items()}
    dead = False
    if keep is not None:
        inputs["keep"] = drawn_mask(f"{id} keep", keep, share)
        whole = np.broadcast_to(inputs["keep"], (*batch, h, n, m))
        dead = not whole.any(axis=-1).all()
    cotangents = {"out": stored(draw(f"{id} dout", (*batch, h, n, e), spread), dtype)}
    if dlse:
        wide = "float32" if np.dtype(dtype).itemsize < 8 else dtype
        cotangents["lse"] = stored(draw(f"{id} dlse", (*batch, h, n), spread), wide)
    whens = tuple({"dead_row": k} for k in ("zero", "nan", "mean")) if dead and m else ({},)
    about = more.pop("about", "random numbers: " + ", ".join(
        f"{a} = {b}" for a, b in zip("HGNMDE", shape, strict=True)))
    return Case(
        id, about, tuple(more.pop("flags", ("ordinary",))), inputs, options or {}, cotangents,
        whens=whens, **more,
    )


def _randoms() -> list[Case]:
    cases = []
    for shape in (
        (1, 1, 1, 1, 1, 1), (1, 1, 3, 3, 2, 2), (2, 2, 3, 5, 4, 3), (4, 2, 5, 3, 2, 3),
        (3, 1, 2, 7, 3, 1), (6, 3, 1, 4, 5, 2), (2, 1, 7, 2, 1, 5), (5, 5, 2, 2, 3, 7),
        (4, 1, 3, 4, 7, 2),
    ):
        label = "-".join(map(str, shape))
        flags = ("ordinary", "hostile_shape")
        cases.append(_random(f"plain-{label}", shape, flags=flags))
        n, m, h = shape[2], shape[3], shape[0]
        cases.append(_random(f"masked-{label}", shape, keep=(2, h, n, m), flags=flags))
    base = (4, 2, 3, 5, 3, 2)
    cases += [
        _random("bias-whole", base, bias=(2, 4, 3, 5), keep=(2, 4, 3, 5)),
        _random("bias-of-heads", base, bias=(4, 3, 5), flags=("gradient",)),
        _random("bias-of-pairs", base, bias=(3, 5), flags=("gradient",)),
        _random("bias-of-keys", base, bias=(5,), flags=("gradient",)),
        _random("bias-of-queries", base, bias=(3, 1), flags=("gradient",)),
        _random("bias-of-the-batch", base, bias=(2, 1, 1, 1), flags=("gradient",)),
        _random("multiplier", base, multiplier=True, flags=("dropout_rng",),
                about="a dropout mask as data: kept weights doubled, the denominator as it was"),
        _random("multiplier-and-mask", base, multiplier=True, keep=(3, 5), flags=("dropout_rng",)),
        _random("softcap", base, options={"softcap": 1.5}, flags=("softcap_formula",)),
        _random("softcap-and-mask", base, options={"softcap": 1.5}, keep=(2, 1, 3, 5),
                flags=("softcap_formula",)),
        _random("all-options", base, bias=(4, 3, 5), multiplier=True, keep=(2, 4, 3, 5),
                options={"softcap": 3.0, "scale": 0.8}, flags=("ordinary",)),
        _random("scale", base, options={"scale": 1.25}, flags=("scale",)),
        _random("queries-shared", base, lead=((), (2,), (2,)), flags=("gradient",),
                about="one batch row of queries for two of keys: its gradient is a sum"),
        _random("keys-shared", base, lead=((2,), (1,), (1,)), flags=("gradient",),
                about="one batch row of keys for two of queries: its gradient is a sum"),
        _random("two-leading-axes", (2, 1, 2, 3, 2, 2), lead=((2, 1), (1, 3), (2, 3)),
                flags=("hostile_shape",)),
        _random("no-batch-axis", base, lead=((), (), ()), flags=("hostile_shape",)),
        _random("large-logits", base, spread=8.0, flags=("softmax_numeric",),
                about="scores up to ±100: saturated rows"),
        _random("large-logits-masked", base, spread=8.0, keep=(2, 4, 3, 5),
                flags=("softmax_numeric",)),
        _random("tail-33-of-65", (1, 1, 33, 65, 2, 1), lead=((), (), ()), dlse=False,
                flags=("kernel_tail",), reports=("B018",),
                about="not as many queries as keys, neither a multiple of a tile"),
        _random("tail-65-of-33", (1, 1, 65, 33, 2, 1), lead=((), (), ()), dlse=False,
                flags=("kernel_tail",), reports=("B018",)),
        _random("tail-causal-bias", (1, 1, 37, 37, 1, 1), lead=((), (), ()), bias=(37, 37),
                options={"causal": True}, flags=("bwd_tail",), reports=("B110",),
                about="a bias, a causal mask and a ragged end at once, gradients included"),
        _random("backward-without-causal", (1, 1, 5, 5, 3, 2), flags=("bwd_mask",),
                reports=("B108",), about="no mask: the backward pass must not have one either"),
        _random("value-width-96", (1, 1, 2, 3, 8, 6), flags=("bwd_layout",), reports=("B109",),
                about="D = 8, E = 6: dV = Pᵀ dO has the width of the values"),
        _random("value-width-above", (2, 2, 2, 3, 2, 5), flags=("bwd_layout",)),
        _random("cross-attention", (2, 2, 2, 5, 4, 2), flags=("cross_attention",),
                reports=("B128",), about="values of another width than keys"),
        _random("asked-twice", base, calls=2, keep=(3, 5), flags=("nondeterminism",),
                reports=("B138",), about="the same call twice: the same bits"),
    ]
    for dtype in ("float32", "float16", "bfloat16"):
        for name, more in {
            "plain": {},
            "masked": {"keep": (2, 4, 3, 5)},
            "large": {"spread": 8.0},
            "bias": {"bias": (4, 3, 5), "keep": (3, 5)},
        }.items():
            flag = "narrow_dtype" if dtype != "float32" else "ordinary"
            cases.append(
                _random(f"{dtype}-{name}", base, dtype=dtype, flags=(flag,), dlse=False,
                        about=f"{dtype} in, {dtype} out; the LSE is float32", **more)  # type: ignore[arg-type]
            )
    for memory in ("transposed", "heads_inside", "offset"):
        cases.append(
            _random(f"memory-{memory.replace('_', '-')}", (4, 2, 3, 5, 4, 3), memory=memory,
                    flags=("strides", "memory"), reports=("B058", "B060"),
                    about=f"the arrays are views: {memory.replace('_', ' ')}")
        )
    for shape in ((0, 1, 3, 4, 2, 2), (2, 2, 0, 3, 2, 2), (2, 2, 3, 0, 2, 2), (2, 1, 3, 4, 2, 0)):
        label = "-".join(map(str, shape))
        cases.append(
            _random(f"empty-{label}", shape, flags=("zero_length",), reports=("B063",),
                    about="an axis of length 0 has an answer too, of the right shape")
        )
    cases.append(
        _random("empty-batch", (2, 1, 3, 4, 2, 2), lead=((0,), (0,), (0,)), reports=("B063",),
                flags=("zero_length",), about="no batch row: an empty answer, no crash")
    )
    return cases


def _gradients() -> list[Case]:
    cases = [
        Case("two-query-heads-add-up", "p = 1 and dO = [1, 1]: dV = 2, a sum and no mean",
             ("gqa_gradient",),
             {"q": np.ones((1, 2, 1, 1)), "k": np.ones((1, 1, 1, 1)), "v": np.ones((1, 1, 1, 1))},
             cotangents={"out": np.ones((1, 2, 1, 1))}, reports=("B068",)),
    ]
    for key in range(3):
        dout = np.zeros((1, 1, 1, 3))
        dout[..., key] = 1
        cases.append(
            Case(f"one-hot-cotangent-{key}",
                 f"V = I and dO = e{key}: dS_j = p_j (δ_j{key} - p_{key})", ("gradient",),
                 {"q": np.ones((1, 1, 1, 1)), "k": np.array([0.0, 1.0, 2.0]).reshape(1, 1, 3, 1),
                  "v": np.eye(3)[None, None].copy()}, cotangents={"out": dout})
        )
    keep = np.ones((2, 1, 4, 4), bool)
    keep[1, :, 3, :2], keep[1, :, :, 2:] = False, False
    dout = draw("dead", (2, 1, 4, 4))
    dead = {"q": draw("dq", (2, 1, 4, 4)), "k": draw("dk", (2, 1, 4, 4)),
        "v": draw("dv", (2, 1, 4, 4)), "keep": keep}
    dout[1, :, 3] = 0
    cases.append(
        Case("dead-row-out-of-the-loss", "row 3 of sample 1 sees only padded keys, the loss leaves "
             "it out: all gradients finite, its part 0", ("bwd_nan", "fully_masked_row"), dead,
             cotangents={"out": dout}, reports=("B008",),
             whens=tuple({"dead_row": k} for k in ("zero", "nan", "mean")))
    )
    poisoned = dout.copy()
    poisoned[1, :, 3] = np.nan
    cases.append(
        Case("nan-cotangent-of-a-dead-row", "where(row_ok, p, 0) does not stop a NaN on its way "
             "back: a dead row lets nothing through", ("bwd_nan", "poison"), dead,
             cotangents={"out": poisoned}, reports=("B010",), whens=({"dead_row": "zero"},),
             result="acceptable")
    )
    for what, value in (("nan", np.nan), ("inf", np.inf), ("large", 1e4)):
        inputs = {"q": draw("pq", (1, 2, 3, 2)), "k": draw("pk", (1, 2, 5, 2)),
            "v": draw("pv", (1, 2, 5, 2)), "keep": np.array([1, 1, 0, 1, 0], bool)}
        inputs["k"][..., [2, 4], :] = value
        inputs["v"][..., [2, 4], :] = value
        cases.append(
            Case(f"unread-keys-are-{what}", f"keys and values that nobody may read are {value}",
                 ("poison",), inputs, cotangents={"out": draw("pdo", (1, 2, 3, 2))})
        )
        inputs = {"q": draw("rq", (1, 1, 3, 2)), "k": draw("rk", (1, 1, 4, 2)),
            "v": draw("rv", (1, 1, 4, 2)), "keep": np.ones((3, 4), bool)}
        inputs["keep"][1] = False
        inputs["q"][..., 1, :] = value
        cases.append(
            Case(f"dead-query-is-{what}", f"the query that may read nothing is {value}",
                 ("poison",), inputs, cotangents={"out": draw("rdo", (1, 1, 3, 2))},
                 whens=({"dead_row": "zero"}, {"dead_row": "mean"}))
        )
    cases.append(
        Case("padding-of-a-tile-under-a-cap", "65 keys, tiles of 64, cap 2, V of ones: every "
             "output is 1. Padded before the cap it would be 0.884", ("kernel_tail",),
             {"q": np.zeros((1, 1, 1, 1)), "k": np.zeros((1, 1, 65, 1)),
              "v": np.ones((1, 1, 65, 1))}, {"softcap": 2.0}, reports=("B055",),
             published={"out": [1.0]})
    )
    wide = np.zeros((1, 1, 5, 5))
    cases.append(
        Case("encoder-keys-are-all-read", "2 queries of a decoder with a window of 2, 5 encoder "
             "keys: all 5 are read, there is no mask", ("cross_attention",),
             {"q": np.zeros((1, 1, 2, 5)), "k": wide.copy(), "v": np.eye(5)[None, None].copy()},
             reports=("B044",))
    )
    v = draw("enc", (1, 1, 4, 2))
    full = {"q": draw("dec", (1, 1, 3, 2)), "k": draw("enck", (1, 1, 4, 2)), "v": v,
        "keep": np.array([1, 1, 0, 0], bool)}
    cases.append(
        Case("encoder-padding", "an encoder of 4 with 2 keys of padding", ("mask_dropped",), full,
             cotangents={"out": draw("enco", (1, 1, 3, 2))}, reports=("B023",))
    )
    short = {n: x[..., :2, :].copy() if n in "kv" else x for n, x in full.items() if n != "keep"}
    cases.append(
        Case("encoder-cut", "the same encoder, cut to its 2 keys: the same answer as with padding",
             ("mask_dropped",), short, cotangents={"out": draw("enco", (1, 1, 3, 2))},
             reports=("B023",))
    )
    return cases


def _invalid() -> list[Case]:
    def made(id, about, **inputs):
        options = inputs.pop("options", {})
        reports = inputs.pop("reports", ())
        base = {"q": draw("iq", (1, 2, 3, 4)), "k": draw("ik", (1, 2, 5, 4)),
            "v": draw("iv", (1, 2, 5, 4))}
        return Case(f"refused-{id}", about, ("input_contract",), {**base, **inputs}, options,
            result="invalid", reports=reports)

    nan = draw("ik", (1, 2, 5, 4))
    nan[0, 0, 0, 0] = np.nan
    return [
        made("more-values-than-keys", "5 keys and 6 values", v=draw("x", (1, 2, 6, 4)),
             reports=("B057",)),
        made("fewer-values-than-keys", "5 keys and 4 values", v=draw("x", (1, 2, 4, 4))),
        made("widths-differ", "queries of width 4, keys of width 3", k=draw("x", (1, 2, 5, 3))),
        made("heads-not-divisible", "3 query heads over 2 key heads", q=draw("x", (1, 3, 3, 4))),
        made("heads-of-values", "2 key heads and 1 value head", v=draw("x", (1, 1, 5, 4))),
        made("mask-too-long", "a mask of 6 keys for 5", keep=np.ones((3, 6), bool)),
        made("mask-of-floats", "keep is boolean: a float mask has two meanings",
             keep=np.ones((3, 5))),
        made("bias-too-long", "a bias for 4 queries, there are 3", bias=np.zeros((4, 5))),
        made("negative-softcap", "a soft-cap below 0", options={"softcap": -2.0}),
        made("nan-that-is-read", "a NaN in a key that may be read", k=nan),
    ]


def cases() -> dict[str, list[Case]]:
    return {
        "flags": _flags(),
        "masks": _masks(),
        "rules": _rules(),
        "random": _randoms(),
        "gradients": _gradients(),
        "invalid": _invalid(),
    }
