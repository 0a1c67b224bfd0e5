"""What is right passes: each operation in two formulations that are equal on paper, and in narrow
numbers computed in float32. A suite that cries wolf is not listened to."""

import itertools

import numpy as np
import pytest
from formulations import FORMULATIONS, in_float32, step_in_float32

from minitransformer.checks import verify

PAIRS = [
    pytest.param(operation, function, id=function.__name__)
    for operation, pair in FORMULATIONS.items()
    for function in pair
]
RETURNS = {"attention": ("out", "lse", "weights"), "block_sparse_attention": ("out", "lse")}


def verdicts(function, operation, dtype="float64", profile="quick", **options):
    judged = verify.target(
        function, operation, dtype=dtype, returns=RETURNS.get(operation, ("out",)), **options
    )
    with np.errstate(all="ignore"):
        return [verify.verdict(s, judged, profile=profile) for s in verify.statements(operation)]


def test_every_operation_has_two_formulations():
    assert set(FORMULATIONS) == set(verify.OPERATIONS)
    assert all(len(set(pair)) == 2 for pair in FORMULATIONS.values())


@pytest.mark.parametrize("operation, function", PAIRS)
def test_an_equal_formulation_passes(operation, function):
    found = verdicts(function, operation)
    assert {v.statement: v.message for v in found if v.status == "fail"} == {}
    assert any(v.status == "pass" for v in found)


@pytest.mark.parametrize("operation, function", PAIRS)
def test_a_narrow_one_that_computes_in_float32_passes(operation, function):
    """The first of each pair in float16, the second in bfloat16."""
    dtype = "float16" if function is FORMULATIONS[operation][0] else "bfloat16"
    wrap = step_in_float32 if operation == "kv_cache" else in_float32
    found = verdicts(wrap(function), operation, dtype)
    assert {v.statement: v.message for v in found if v.status == "fail"} == {}
    assert any(v.status == "pass" for v in found)


# ---- with gradients ------------------------------------------------------------------------------


def torch_formulations():
    """Attention twice more, for autograd: the online softmax, and two halves merged by their
    LSE."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make verify-peers")
    inf = torch.inf

    def prepared(q, k, v, keep, bias, scale):
        allowed = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool) if keep is None else keep
        if bias is not None:
            allowed = allowed & (bias != -inf)
            bias = torch.where(allowed, bias, 0)
        repeat = q.shape[1] // k.shape[1]
        folded = allowed.reshape(len(q), k.shape[1], repeat * q.shape[2], k.shape[2])
        read = folded.any(dim=2)[..., None]
        k, v = (torch.where(read, x, 0).repeat_interleave(repeat, 1) for x in (k, v))
        q = torch.where(allowed.any(-1)[..., None], q, 0)
        return q * (q.shape[-1] ** -0.5 if scale is None else scale), k, v, allowed, bias

    def part(q, k, v, allowed, bias, softcap, multiplier):
        """Weighted values before the division, their total, and the largest score."""
        s = q @ k.transpose(-1, -2)
        s = softcap * torch.tanh(s / softcap) if softcap else s
        s = torch.where(allowed, s if bias is None else s + bias, -inf)
        top = s.amax(-1, keepdim=True).detach().nan_to_num(neginf=0)
        e = torch.exp(s - top)
        return (e if multiplier is None else e * multiplier) @ v, e.sum(-1, keepdim=True), top

    def merged(parts):
        top = parts[0][2]
        for _, _, other in parts[1:]:
            top = torch.maximum(top, other)
        shrunk = [(torch.exp(t - top) * w, torch.exp(t - top) * n) for w, n, t in parts]
        weighted, total = (sum(x) for x in zip(*shrunk, strict=True))
        alive = total > 0
        return torch.where(alive, weighted / torch.where(alive, total, 1), 0)

    def in_parts(cuts):
        def attention(q, k, v, *, keep=None, bias=None, scale=None, softcap=None, multiplier=None):
            stored = q.dtype
            if stored in (torch.float16, torch.bfloat16):
                q, k, v, bias, multiplier = (
                    x if x is None else x.float() for x in (q, k, v, bias, multiplier)
                )
            q, k, v, allowed, bias = prepared(q, k, v, keep, bias, scale)
            m = k.shape[2]
            if not m:
                return (q.sum() * 0 + torch.zeros(*q.shape[:3], v.shape[-1])).to(stored)
            edges = [0, *(c for c in cuts(m) if 0 < c < m), m]
            parts = []
            for i, j in itertools.pairwise(edges):
                pairs = [x if x is None else x[..., i:j] for x in (allowed, bias, multiplier)]
                parts.append(part(q, k[:, :, i:j], v[:, :, i:j], *pairs[:2], softcap, pairs[2]))
            return merged(parts).to(stored)

        return attention

    return in_parts(lambda m: range(2, m, 2)), in_parts(lambda m: [m // 2])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("which", [0, 1], ids=["online", "halves"])
def test_peer_pytorch_formulations_have_the_right_gradients(which, dtype):
    slow = {"attention_backward_is_the_derivative"}  # gradients_agree asks the same
    judged = verify.target(torch_formulations()[which], "attention", framework="torch", dtype=dtype)
    chosen = [s for s in verify.statements("attention") if s.name not in slow]
    found = [verify.verdict(s, judged, profile="quick") for s in chosen]
    assert {v.statement: v.message for v in found if v.status == "fail"} == {}
    assert "gradients_agree_with_the_reference" in {
        v.statement for v in found if v.status == "pass"
    }
