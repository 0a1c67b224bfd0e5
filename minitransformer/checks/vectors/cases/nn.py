"""Norms, activations, cross-entropy: offsets that cancel, saturated tails, padding, narrow sums."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minitransformer.checks.vectors.operation import Case, draw, integers, stored

DTYPES = ("float32", "float16", "bfloat16")


def _flag(dtype: str) -> str:
    return "ordinary" if dtype == "float32" else "narrow_dtype"


def _norm(names: Sequence[str]):
    """Cases of a norm with these parameters."""
    cases: list[Case] = []

    def add(id: str, about: str, flag: str, x: Any, *, dtype: str = "float64", **more: Any) -> None:
        x = np.asarray(x, np.float64)
        inputs = {"x": x, **{n: draw(f"{id} {n}", x.shape[-1:]) for n in names}}
        inputs |= more.pop("inputs", {})
        cotangent = more.pop("cotangent", None)
        back = draw(f"{id} dout", x.shape) if cotangent is None else cotangent
        inputs = {n: stored(v, dtype) for n, v in inputs.items()}
        cases.append(
            Case(id, about, (flag,), inputs, cotangents={"out": stored(back, dtype)}, **more)
        )

    for shape in ((5,), (3, 4), (2, 3, 7), (4, 2), (1, 13)):
        label = "x".join(map(str, shape))
        add(f"random-{label}", "random numbers", "ordinary", draw(f"norm {label}", shape))
    add("width-one", "one channel: its variance is 0", "hostile_shape", [[2.0], [-1.0]])
    add("far-from-zero", "numbers near 4096 that differ by little", "low_precision_accumulate",
        4096 + draw("far", (2, 6)))
    add("tiny", "numbers of 1e-4: ε is felt", "ordinary", draw("tiny", (2, 4)) * 2.0**-13)
    add("huge", "numbers of 1e8", "ordinary", draw("huge", (2, 4)) * 2.0**27)
    for eps in (1e-3, 1e-12, 0.25):
        add(f"eps-{eps:g}", f"ε = {eps:g}", "ordinary", draw(f"eps {eps}", (2, 5)) / 8,
            options={"eps": eps})
    add("eps-default", "small numbers and no ε given: the default", "ordinary",
        draw("default", (3, 3)) / 256)
    add("constant-row", "a constant row with the default ε", "ordinary", np.full((1, 5), 3.0))
    add("zeros", "a row of zeros", "ordinary", [[0.0, 0, 0, 0], [1, 2, 0, -1]])
    add("zeros-without-eps", "a row of zeros and ε = 0: 0, if anything", "ordinary",
        [[0.0, 0, 0], [1, 2, -1]], options={"eps": 0.0}, whens=({"constant_row": "zero"},))
    add("one-hot-cotangent", "dy = e1: a column of the Jacobian", "gradient", [[1.0, 2, 4]],
        cotangent=np.array([[0.0, 1, 0]]))
    for shape in ((0, 3), (2, 0, 4)):
        add(f"empty-{'x'.join(map(str, shape))}", "an axis of length 0", "zero_length",
            np.zeros(shape))
    for dtype in DTYPES:
        add(f"{dtype}", f"{dtype} in and out", _flag(dtype), draw("narrow norm", (4, 6)),
            dtype=dtype)
        add(f"{dtype}-squares", f"{dtype}: squares of 300 are beyond float16", _flag(dtype),
            32 * draw("square", (2, 4)) + 256 * np.array([1, -1, 1, -1.0]), dtype=dtype)
        add(f"{dtype}-300-rows", "300 rows with a cotangent of 1: a bfloat16 sum stops at 256",
            "low_precision_accumulate", np.tile([[1.0, -1.0]], (300, 1)), dtype=dtype,
            cotangent=np.ones((300, 2)))
    for memory in ("transposed", "offset"):
        add(f"memory-{memory}", f"x is a view: {memory}", "strides", draw("stride", (3, 4)),
            memory=memory)
    for name in names:
        cases.append(
            Case(f"refused-{name}", f"{name} of another width", ("input_contract",),
                 {"x": np.ones((2, 3)), **{n: np.ones(3) for n in names}, name: np.ones(2)},
                 result="invalid")
        )
    cases.append(
        Case("refused-eps", "ε below 0", ("input_contract",),
             {"x": np.ones((2, 3)), **{n: np.ones(3) for n in names}}, {"eps": -1.0},
             result="invalid")
    )
    return cases, add


def layer_norm() -> dict[str, list[Case]]:
    cases, add = _norm(("gamma", "beta"))
    add("constant-row-without-eps", "a constant row and ε = 0: β, if anything", "ordinary",
        [[3.0, 3, 3], [1, 2, -1]], options={"eps": 0.0}, whens=({"constant_row": "zero"},))
    return {"layer_norm": cases}


def rms_norm() -> dict[str, list[Case]]:
    cases, add = _norm(("gamma",))
    for offset in (1.0, 0.5):
        add(f"offset-{offset:g}", f"the gain is {offset:g} + γ", "ordinary", draw("offset", (3, 4)),
            options={"offset": offset})
    add("float16-offset", "float16, the gain is 1 + γ", "narrow_dtype", draw("offset16", (4, 5)),
        dtype="float16", options={"offset": 1.0})
    return {"rms_norm": cases}


def gelu() -> dict[str, list[Case]]:
    cases: list[Case] = []
    for form in ("tanh", "erf"):

        def add(id: str, about: str, x: Any, flag: str = "ordinary", *, form: str = form,
                dtype: str = "float64", **more: Any) -> None:
            x = stored(np.asarray(x, np.float64), dtype)
            back = {"out": stored(draw(f"{id} dout", x.shape), dtype)}
            options = more.pop("options", {"form": form})
            cases.append(Case(f"{form}-{id}", about, (flag,), {"x": x}, options, back, **more))

        add("small", "around 0, where the two forms agree", [0.0, 0.5, -0.5, 1e-4])
        add("middle", "where the two forms differ most", [2.0, -2.0, 2.75, -2.75])
        add("tails", "far out: x on one side, 0 on the other", [8.0, -8.0, 12, -12])
        add("beyond", "where an exponential overflows", [30.0, -30.0, 400, -400, 1e6])
        add("random", "random numbers", draw(f"gelu {form}", (3, 4), 4.0))
        for dtype in DTYPES:
            add(f"{dtype}", f"{dtype} in and out", draw("gelu narrow", (2, 6)), _flag(dtype),
                dtype=dtype)
        add("empty", "no entry", np.zeros((0, 2)), "zero_length")
        add("transposed", "a transposed view", draw("gelu view", (3, 4)), "strides",
            memory="transposed")
    cases.append(
        Case("form-by-default", "no form given: tanh", ("ordinary",), {"x": np.array([2.0, -2.5])})
    )
    cases.append(
        Case("refused-form", "a form that nobody knows", ("input_contract",), {"x": np.ones(2)},
             {"form": "quick"}, result="invalid")
    )
    return {"gelu": cases}


def swiglu() -> dict[str, list[Case]]:
    cases: list[Case] = []

    def add(id: str, about: str, gate: Any, flag: str = "ordinary", *, dtype: str = "float64",
            up: Any = None, **more: Any) -> None:
        gate = stored(np.asarray(gate, np.float64), dtype)
        up = stored(draw(f"{id} up", gate.shape) if up is None else np.asarray(up), dtype)
        back = {"out": stored(draw(f"{id} dout", gate.shape), dtype)}
        cases.append(Case(id, about, (flag,), {"gate": gate, "up": up}, {}, back, **more))

    add("small", "around 0", [0.0, 0.5, -0.5])
    add("middle", "where silu is lowest, and where it bends", [-1.25, -2.0, 2.0, 3.0])
    add("tails", "far out", [20.0, -20.0, 40, -40])
    add("beyond", "where e^x overflows", [710.0, -710.0, 1e4, -1e4])
    for shape in ((7,), (3, 4), (2, 1, 5)):
        label = "x".join(map(str, shape))
        add(f"random-{label}", "random numbers", draw(f"swiglu {label}", shape, 4.0))
    for dtype in DTYPES:
        add(f"{dtype}", f"{dtype} in and out", draw("swiglu narrow", (3, 8)), _flag(dtype),
            dtype=dtype)
    add("empty", "no entry", np.zeros((0, 2)), "zero_length")
    add("offset", "slices of larger arrays", draw("swiglu view", (3, 4)), "strides",
        memory="offset")
    cases.append(
        Case("refused-shapes", "gate and up of two shapes", ("input_contract",),
             {"gate": np.ones(3), "up": np.ones(2)}, result="invalid")
    )
    return {"swiglu": cases}


def cross_entropy() -> dict[str, list[Case]]:
    cases: list[Case] = []

    def add(id: str, about: str, flag: str, logits: Any, targets: Any, *, dtype: str = "float64",
            loss: float = 1.0, options: Any = None, **more: Any) -> None:
        inputs = {"logits": stored(np.asarray(logits, np.float64), dtype),
            "targets": np.asarray(targets, np.int64)}
        back = {"loss": np.asarray(loss, "float64" if dtype == "float64" else "float32")}
        cases.append(Case(id, about, (flag,), inputs, options or {}, back, **more))

    add("two-classes", "logits 1000 and 1001, the first is right", "softmax_numeric",
        [[1000.0, 1001]], [0], published={"loss": 1.313262})
    add("hopeless", "the right class 800 below: the loss is 800, and no log(0)", "softmax_numeric",
        [[0.0, 800]], [0])
    add("certain", "the right class 40 above: a loss of e^-40", "softmax_numeric", [[40.0, 0]], [0])
    add("far-below", "all logits at -1e4", "softmax_numeric", [[-1e4, -1e4 - 1, -1e4]], [2])
    for shape, classes in (((3,), 4), ((2, 3), 5), ((1,), 1), ((4,), 2)):
        label = "x".join(map(str, (*shape, classes)))
        targets = np.arange(int(np.prod(shape))).reshape(shape) % classes
        add(f"random-{label}", f"{classes} classes", "ordinary",
            draw(f"loss {label}", (*shape, classes)), targets)
        for s in (0.1, 1.0):
            add(f"smoothing-{s:g}-{label}", f"label smoothing {s:g}: s / V on every class, the "
                "right one among them", "ordinary", draw(f"smooth {label}", (*shape, classes)),
                targets, options={"label_smoothing": s})
    add("cotangent-of-three", "the loss is scaled by 3 before it is undone", "gradient",
        draw("three", (3, 4)), [0, 3, 1], loss=3.0)
    add("asked-twice", "the backward pass twice of one forward pass: the same bits", "memory",
        draw("twice", (3, 4)), [0, 3, 1], calls=2)
    ignore = {"ignore_index": -100}
    add("ignored", "two of four targets do not count: the mean is over two", "mask_dropped",
        draw("ignored", (4, 3)), [0, -100, 2, -100], options=ignore)
    add("ignored-by-class", "class 0 is the padding", "mask_dropped", draw("padded", (4, 3)),
        [0, 1, 2, 0], options={"ignore_index": 0})
    add("ignored-unevenly", "rows of unlike length: one mean over all tokens, no mean of means",
        "mask_dropped", draw("uneven", (2, 3, 4)), [[0, 1, 2], [3, -100, -100]],
        options=ignore)
    add("ignored-smoothed", "ignored and smoothed at once", "mask_combination",
        draw("both", (3, 4)), [1, -100, 3], options={**ignore, "label_smoothing": 0.2})
    add("all-ignored", "nothing counts: 0, no 0/0", "mask_dropped", draw("none", (2, 3)),
        [-100, -100], options=ignore, whens=({"all_ignored": "zero"},))
    poison = draw("poison", (3, 3))
    poison[1] = np.nan
    add("ignored-is-nan", "the logits of an ignored target are NaN", "poison", poison,
        [0, -100, 2], options=ignore)
    for dtype in DTYPES:
        add(f"{dtype}", f"{dtype} logits; the loss is float32", _flag(dtype),
            draw("narrow loss", (40, 5)), np.arange(40) % 5, dtype=dtype)
    add("empty", "no token: 0", "zero_length", np.zeros((0, 3)), np.zeros(0),
        whens=({"all_ignored": "zero"},))
    add("transposed", "logits stored (V, R)", "strides", draw("loss view", (3, 4)), [1, 2, 3],
        memory="transposed")
    base = {"logits": np.zeros((2, 3))}
    for id, about, targets, options in (
        ("class-too-large", "target 3 of 3 classes", integers(0, 3), {}),
        ("class-negative", "target -1, and nothing is ignored", integers(0, -1), {}),
        ("too-many-targets", "3 targets for 2 rows", integers(0, 1, 2), {}),
        ("smoothing", "a smoothing of 1.5", integers(0, 1), {"label_smoothing": 1.5}),
        ("targets-of-floats", "targets are integers", np.array([0.0, 1.0]), {}),
    ):
        cases.append(
            Case(f"refused-{id}", about, ("input_contract",), {**base, "targets": targets},
                 options, result="invalid")
        )
    return {"cross_entropy": cases}
