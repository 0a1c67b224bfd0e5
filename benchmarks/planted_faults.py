"""Faults planted in a PyTorch attention: does `verify` find each, and does it say which it is?

    python benchmarks/planted_faults.py [--profile quick]

One function, one wrong line at a time. A fault is found if a property fails, and rightly named if
the mistake that is named is the one that was planted.
"""

import argparse
import inspect
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from minitransformer.checks import verify

INF = -torch.inf
SLOW = "attention_backward_is_the_derivative"  # gradients_agree_with_the_reference asks the same


def attention(
    q: Any, k: Any, v: Any, *, keep: Any = None, bias: Any = None, scale: Any = None,
    softcap: Any = None, multiplier: Any = None, fault: str = "",
) -> Any:  # fmt: skip
    """Attention in plain PyTorch, right but for one fault."""
    heads, groups, width, m = q.shape[1], k.shape[1], q.shape[-1], k.shape[2]
    repeat = heads // groups
    if fault == "cotangent of the keys cut":
        k = k.detach()
    if fault == "cotangent of the values cut":
        v = v.detach()
    if fault == "heads tiled":
        k, v = k.repeat(1, repeat, 1, 1), v.repeat(1, repeat, 1, 1)
    elif fault == "first group for all":
        k, v = (x[:, :1].expand(-1, heads, -1, -1) for x in (k, v))
    else:
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    usual = {"scale by width": 1 / width, "scale missing": 1.0}.get(fault, 1 / math.sqrt(width))
    if fault == "scale of the value width":
        usual = 1 / math.sqrt(v.shape[-1])
    scale = usual if scale is None else scale
    if fault == "scale twice":
        scale = scale * scale
    if fault == "scale ignored":
        scale = 1 / math.sqrt(width)
    s = q @ k.transpose(-1, -2) * scale
    if softcap and fault == "bias before the soft-cap" and bias is not None:
        s, bias = softcap * torch.tanh((s + bias) / softcap), None
    elif softcap and fault != "soft-cap missing":
        s = softcap * torch.tanh(s / (1 if fault == "soft-cap not divided" else softcap))
    if bias is not None and fault == "bias subtracted":
        s = s - bias
    elif bias is not None and fault == "bias scaled":
        s = s + bias * scale
    elif bias is not None and fault != "bias missing":
        s = s + (bias.detach() if fault == "cotangent of the bias cut" else bias)
    keep = torch.ones_like(s, dtype=torch.bool) if keep is None else keep
    if fault == "polarity reversed":
        keep = ~keep
    if fault == "mask of the first batch row":
        keep = keep[:1].expand_as(keep)
    if fault == "mask of the first head":
        keep = keep[:, :1].expand_as(keep)
    if fault == "mask one key late":
        keep = keep.roll(1, dims=-1)
    if fault == "last key dropped" and m > 1:
        keep = keep & (torch.arange(m) < m - 1)
    if fault == "mask missing":
        keep = torch.ones_like(keep)
    if fault == "mask multiplied into the scores":
        s = s * keep
    elif fault == "minus ten thousand":
        s = s.masked_fill(~keep, -1e4)
    elif fault == "mask added as one":
        s = s - (~keep).to(s.dtype)
    elif fault != "mask after the softmax":
        s = s.masked_fill(~keep, INF)
    if fault == "softmax over queries":
        p = torch.softmax(s, -2).nan_to_num()
    elif fault == "no maximum":
        e = s.exp()
        p = (e / e.sum(-1, keepdim=True)).nan_to_num()
    elif fault == "epsilon in the sum":
        e = (s - s.amax(-1, keepdim=True).nan_to_num(neginf=0) if m else s).exp()
        p = e / (e.sum(-1, keepdim=True) + 1e-6)
    elif fault == "dead rows are NaN":
        p = torch.softmax(s, -1)
    elif fault == "softmax in float16":
        p = torch.softmax(s.half(), -1).nan_to_num().to(s.dtype)
    else:
        p = torch.softmax(s, -1).nan_to_num()
    if fault == "mask after the softmax":
        p = p * keep
    if multiplier is not None and fault != "multiplier missing":
        p = p * multiplier
        if fault == "multiplier renormalised":
            p = p / p.sum(-1, keepdim=True).clamp_min(1e-30)
    out = p @ v
    if fault == "reshaped without a transpose":
        out = out.transpose(1, 2).reshape(out.shape)
    return out * 0.99 if fault == "one per cent" else out


# the fault, and the name that it should be given; "" if no mutant of ours is this mistake
FAULTS = {
    "heads tiled": "key heads tiled instead of repeated",
    "first group for all": "first group for all",
    "scale by width": "scale applied twice",  # 1/√D twice is 1/D
    "scale missing": "scale missing",
    "scale twice": "scale applied twice",
    "scale ignored": "scale argument ignored",
    "scale of the value width": "scale from the value width",
    "bias before the soft-cap": "softcap after the bias",
    "soft-cap missing": "softcap ignored",
    "soft-cap not divided": "",
    "bias subtracted": "bias subtracted",
    "bias scaled": "bias scaled with the product",
    "bias missing": "bias ignored",
    "polarity reversed": "mask polarity reversed",
    "mask of the first batch row": "mask of the first batch row",
    "mask of the first head": "mask of the first head",
    "mask one key late": "mask one key late",
    "last key dropped": "last key dropped",
    "mask missing": "mask ignored",
    "mask multiplied into the scores": "logits multiplied by the mask",
    "minus ten thousand": "minus ten thousand for minus infinity",
    "mask added as one": "mask added as one",
    "mask after the softmax": "mask applied after softmax",
    "softmax over queries": "softmax over queries",
    "no maximum": "maximum not subtracted",
    "epsilon in the sum": "epsilon in the sum",
    "dead rows are NaN": "dead row not guarded",
    "softmax in float16": "",
    "multiplier missing": "multiplier ignored",
    "multiplier renormalised": "multiplier inside the denominator",
    "reshaped without a transpose": "heads merged without a transpose",
    "one per cent": "",
    "cotangent of the keys cut": "keys without a gradient",
    "cotangent of the values cut": "values without a gradient",
    "cotangent of the bias cut": "bias without a gradient",
}


def planted(fault: str) -> Callable:
    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention(q, k, v, **options, fault=fault)

    wrong.__signature__ = inspect.signature(attention)  # type: ignore[attr-defined]
    return wrong


def judged(fault: str, profile: str) -> list[verify.Verdict]:
    target = verify.target(planted(fault), "attention", framework="torch")
    asked = [s for s in verify.statements("attention") if s.name != SLOW]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a wrong formula may well divide by zero
        return [verify.verdict(s, target, profile=profile) for s in asked]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="quick", choices=list(verify.PROFILES))
    parser.add_argument("faults", nargs="*", help="some of them; none: all")
    asked = parser.parse_args()
    faults = asked.faults or list(FAULTS)
    table = Table("planted", "failed by", "just like", "", title="faults in a PyTorch attention")
    found = named = 0
    control = {v.statement for v in judged("", asked.profile) if v.status == "fail"}
    for fault in track(faults, console=Console(stderr=True), description="faults"):
        wrong = [v for v in judged(fault, asked.profile) if v.status == "fail"]
        wrong = [v for v in wrong if v.statement not in control]
        names = {name for v in wrong for name in v.same_as}
        right = FAULTS[fault] in names
        found, named = found + bool(wrong), named + right
        table.add_row(
            fault, f"{len(wrong)} properties" if wrong else "NOT FOUND",
            "; ".join(sorted(names)), "named" if right else "",
        )  # fmt: skip
    out = Console(width=140)
    out.print(table)
    out.print(f"without a fault: fails {', '.join(sorted(control)) or 'nothing'}")
    out.print(f"{found} of {len(faults)} found, {named} rightly named")
    return 0 if found == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
