"""Softmax: large logits, masked entries, dead rows, axes, narrow sums."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minitransformer.arrays import Array
from minitransformer.checks.vectors.operation import Case, draw, drawn_mask, stored

INF = np.inf


def of_scores(name: str) -> dict[str, list[Case]]:
    """The same questions for softmax, log-softmax and log-sum-exp."""
    cases: list[Case] = []

    def add(id: str, about: str, flag: str, x: Any, *, gradient: bool = True, **more: Any) -> None:
        x = np.asarray(x)
        x = x.astype(np.float64) if x.dtype.kind in "iu" else x
        options = more.get("options", {})
        axis = options.get("axis", -1)
        dead = np.isneginf(x.astype(np.float64)).all(axis=axis)
        shape = list(x.shape)
        if name == "logsumexp":
            shape[axis : axis + 1 or None] = [1] if options.get("keepdims") else []
        elif dead.any() and x.size:
            more["whens"] = ({"dead_row": "zero"}, {"dead_row": "nan"})
        if gradient:
            dtype = str(x.dtype)
            if name == "logsumexp" and x.dtype.itemsize == 2:
                dtype = "float32"
            more["cotangents"] = {"out": stored(draw(f"{id} dout", shape), dtype)}
        cases.append(Case(id, about, (flag,), {"scores": x}, **more))

    say = {"softmax": [0.268941, 0.731059], "log_softmax": [-1.313262, -0.313262],
        "logsumexp": 1001.313262}
    add("thousand", "1000 and 1001", "softmax_numeric", [1000, 1001], reports=("B134",),
        published={"out": say[name]})
    for top in (710, -746, 1e5, 1e300):
        add(f"top-{top:g}", f"0 and {top:g}", "softmax_numeric", [0.0, top])
    add("one-huge-row", "a row at 800 beside rows at 0: each has its own maximum",
        "softmax_numeric", [[0, 1, 2], [800, 799, 0], [-800, -799, -801]])
    add("underflow", "0 and -800: the small one is 0, its logarithm is not", "softmax_numeric",
        [0, -800, -1])
    one = name != "log_softmax"  # the logarithm of 1 is 0, whatever the mistake
    if one:
        add("alone", "a single entry", "hostile_shape", [[3.0], [-2.0]])
    add("equal", "three equal entries", "ordinary", [2, 2, 2])
    add("masked", "-inf masks an entry", "mask_value_overflow", [1, -INF, 3, -INF])
    add("masked-first", "the first entry is masked", "mask_value_overflow", [-INF, 0, 1])
    add("lowest-is-no-mask", "the lowest float64 but one entry at 0: no mask, and no NaN",
        "mask_value_overflow", [-1.7e308, 0, 1])
    add("dead-row", "a row with nothing but -inf, between two others", "fully_masked_row",
        [[0, 1, 2], [-INF, -INF, -INF], [5, -INF, 4]])
    add("all-dead", "nothing but -inf", "fully_masked_row", [[-INF, -INF], [-INF, -INF]])
    for axis in (0, 1, 2, -2):
        x = draw(f"axis {axis}", (2, 3, 4))
        add(f"axis-{axis}", f"along axis {axis}", "ordinary", x, options={"axis": axis})
    for shape in ((3, 7), (2, 3, 5), (11,), *((1, 1), (5, 1)) * one):
        label = "x".join(map(str, shape))
        add(f"random-{label}", "random numbers", "ordinary", draw(f"soft {label}", shape))
    add("random-30", "random numbers up to ±30: saturated rows", "softmax_numeric",
        draw("soft 30", (3, 5), 30.0, 4))
    mask = drawn_mask("soft mask", (4, 6), 0.5)
    add("random-masked", "random numbers, half of them masked", "ordinary",
        np.where(mask, draw("soft masked", (4, 6)), -INF))
    for shape in ((0, 3), (3, 0)):
        label = "x".join(map(str, shape))
        add(f"empty-{label}", "an axis of length 0", "zero_length", np.zeros(shape))
    if name == "logsumexp":
        add("keepdims", "the axis stays", "ordinary", draw("keep", (2, 3)),
            options={"keepdims": True})
        add("keepdims-0", "axis 0 stays", "ordinary", draw("keep", (2, 3)),
            options={"keepdims": True, "axis": 0})
    for dtype in ("float32", "float16", "bfloat16"):
        flag = "narrow_dtype" if dtype != "float32" else "ordinary"
        add(f"{dtype}", f"{dtype} in", flag, stored(draw("narrow", (3, 5)), dtype))
        wide = draw("wide narrow", (2, 5), 24.0, 1)
        add(f"{dtype}-large", f"{dtype}, logits up to 24", flag, stored(wide, dtype))
        equal = stored(np.zeros((1, 512)), dtype)
        add(f"{dtype}-512-equal", "512 equal logits: 1/512 each, a bfloat16 sum stops at 256",
            "low_precision_accumulate", equal, gradient=False,
            reports=("B135",) if dtype == "bfloat16" else ())
        many = stored(np.where(np.arange(201) == 0, 0.0, -7.75)[None], dtype)
        add(f"{dtype}-201", "a 0 and 200 logits of -7.75: a narrow sum stays at its first term",
            "low_precision_accumulate", many, gradient=False)
    for id, about, bad in (
        ("nan", "a NaN among the scores", [0.0, np.nan]),
        ("plus-infinity", "+inf: softmax has no limit there", [0.0, INF]),
    ):
        cases.append(
            Case(f"refused-{id}", about, ("input_contract",), {"scores": np.array(bad)},
                 result="invalid")
        )
    cases.append(
        Case("refused-axis", "axis 2 of two axes", ("input_contract",),
             {"scores": np.zeros((2, 3))}, {"axis": 2}, result="invalid")
    )
    return {name: cases}


def _part(id: str, shape: Sequence[int], dead: Sequence[Sequence[int]] = ()) -> dict[str, Array]:
    found = {}
    for which in ("first", "second"):
        found[f"{which}_out"] = draw(f"{id} {which}", shape)
        found[f"{which}_lse"] = draw(f"{id} {which} lse", shape[:-1])
    for number, row in dead:
        which = ("first", "second")[number]
        found[f"{which}_lse"][..., row] = -INF
        found[f"{which}_out"][..., row, :] = 0
    return found


def merge() -> dict[str, list[Case]]:
    cases: list[Case] = []

    def add(id: str, about: str, inputs: Any, *, gradient: bool = True, **more: Any) -> None:
        back = {}
        if gradient:
            back = {"out": draw(f"{id} dout", inputs["first_out"].shape),
                "lse": draw(f"{id} dlse", inputs["first_lse"].shape)}
        cases.append(Case(id, about, ("lse",), inputs, {}, back, **more))

    def two(a: float, b: float) -> dict[str, Array]:
        return {"first_out": np.array([[1.0, 0.0]]), "first_lse": np.array([float(a)]),
            "second_out": np.array([[0.0, 1.0]]), "second_lse": np.array([float(b)])}

    log3 = float(np.float64(1.0986122886681098))
    add("one-to-three", "lse 0 and ln 3: shares 1/4 and 3/4; read in base 2 they would be .32, .68",
        two(0, log3), reports=("B131",), published={"out": [0.25, 0.75]})
    nothing = two(-INF, -INF)
    nothing["first_out"] = nothing["second_out"] = np.zeros((1, 2))
    add("nothing-and-nothing", "two parts without a key: (0, -inf), no NaN", nothing,
        gradient=False, reports=("B129",), published={"out": [0, 0]})
    for number, name in enumerate(("first", "second")):
        add(f"{name}-is-empty", "one part without a key: the other is the answer",
            _part(name, (3, 2), [(number, 1)]), gradient=False)
        add(f"{name}-is-far-above", "one LSE a thousand above the other",
            two(*((1000, 0) if number == 0 else (0, 1000))))
    add("both-below", "both LSE at -2000", two(-2000, -2001))
    for shape in ((1, 1), (4, 3), (2, 3, 2), (2, 2, 2, 1), (0, 2), (3, 0)):
        label = "x".join(map(str, shape))
        add(f"random-{label}", "random numbers", _part(label, shape))
    add("equal-parts", "the same part twice: the same output, an LSE larger by ln 2", two(0.5, 0.5))
    cases.append(
        Case("refused-lse-shape", "an LSE for other rows", ("input_contract",),
             {**two(0, 0), "first_lse": np.zeros(2)}, result="invalid")
    )
    cases.append(
        Case("refused-widths", "outputs of two widths", ("input_contract",),
             {**two(0, 0), "second_out": np.zeros((2, 3))}, result="invalid")
    )
    return {"merge": cases}


def states() -> dict[str, list[Case]]:
    cases = []
    id: str
    tiles: list[list[float]]
    for id, about, tiles in (  # type: ignore[assignment]
        ("rising", "each tile has larger scores than all before", [[0, 1], [20, 21], [400, 401]]),
        ("falling", "each tile has smaller scores than all before", [[400, 1], [20, 2], [0, 1]]),
        ("small-after-large", "a tile that adds next to nothing", [[30, 0], [0, -30]]),
        ("masked-tile", "a tile in which everything is masked", [[1, 2], [-INF, -INF], [0, 3]]),
        ("masked-first", "the first tile is masked", [[-INF, -INF], [2, 1]]),
        ("all-masked", "every tile is masked: (0, -inf)", [[-INF], [-INF]]),
        ("below-zero", "all scores far below 0", [[-900, -901], [-899, -950]]),
        ("one-key-each", "tiles of one key", [[3], [1], [4], [1], [5]]),
    ):
        inputs = {}
        for number, scores in enumerate(tiles, 1):
            inputs[f"scores_{number}"] = np.array([scores], np.float64)
            inputs[f"values_{number}"] = draw(f"{id} {number}", (len(scores), 2))
        flag = "lse" if "masked" in id else "softmax_numeric"
        cases.append(Case(id, about, (flag,), inputs))
    for rows, sizes in ((3, (4, 4)), (2, (5, 1, 3))):
        inputs = {}
        for number, m in enumerate(sizes, 1):
            inputs[f"scores_{number}"] = draw(f"tile {rows} {number}", (2, rows, m), 6.0)
            inputs[f"values_{number}"] = draw(f"value {rows} {number}", (2, m, 3))
        cases.append(
            Case(f"random-{'-'.join(map(str, sizes))}", f"tiles of {sizes} keys", ("kernel_tail",),
                 inputs)
        )
    return {"online_softmax": cases}


def softcap() -> dict[str, list[Case]]:
    cases: list[Case] = []

    def add(id: str, about: str, x: Any, cap: float | None, **more: Any) -> None:
        x = np.asarray(x, np.float64)
        cases.append(
            Case(id, about, (more.pop("flag", "softcap_formula"),), {"scores": x}, {"cap": cap},
                 {"out": draw(f"{id} dout", x.shape)}, **more)
        )

    add("fifty", "50 · tanh(100 / 50) = 48.2014; x · tanh(x / 50) would be 96.4", [100, -100, 0],
        50.0, published={"out": [48.2014, -48.2014, 0]}, decimals=4, reports=("B076",))
    add("off", "null: no cap", [1e4, -3, 0.5], None, flag="softcap_dropped")
    add("zero-is-off", "0 is off too, no division", [1e4, -3], 0.0, flag="softcap_dropped")
    add("saturated", "far beyond the cap: the value is ±c, the slope 0", [1e4, -1e4, 700], 30.0)
    add("near-zero", "where the cap is not felt", [1e-3, -1e-8, 0], 30.0)
    for cap in (0.5, 1.0, 20.0):
        add(f"random-{cap:g}", f"random numbers under a cap of {cap:g}",
            draw(f"cap {cap}", (3, 4), 6.0), cap)
    for cap in (-1.0,):
        cases.append(
            Case("refused-negative", "a cap below 0", ("input_contract",),
                 {"scores": np.ones(2)}, {"cap": cap}, result="invalid")
        )
    return {"softcap": cases}
