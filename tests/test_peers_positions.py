"""Agreement with PyTorch of the positions that learn: tables through its embedding and attention.

Without PyTorch these tests are skipped and say so: `make verify-peers` gets it.
"""

import math

import numpy as np
import pytest

from minitransformer.attention.dense import attention_backward, attention_forward
from minitransformer.checks.gradients import assert_close, cotangent
from minitransformer.checks.strategies import normal
from minitransformer.positions.learned import learned_backward, learned_forward
from minitransformer.positions.t5_bias import t5_bias_backward, t5_bias_forward, t5_buckets

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make verify-peers gets it")
F = torch.nn.functional


def leaf(x):
    """A tensor that collects a gradient."""
    return torch.tensor(np.array(x), requires_grad=True)


@pytest.mark.parametrize("shared", [True, False])
def test_peer_learned_positions(shared):
    """x + embedding(positions), for positions of the whole batch and of each row."""
    x, table = normal((3, 5, 4), 1), normal((9, 4), 2)
    positions = np.random.default_rng(3).integers(0, 9, (5,) if shared else (3, 5))
    out, cache = learned_forward(x, table, positions)
    dout = cotangent(out, 4)
    grads = learned_backward(dout, cache)
    leaves = {"x": leaf(x), "table": leaf(table)}
    peer = leaves["x"] + F.embedding(torch.tensor(positions), leaves["table"])
    peer.backward(torch.tensor(dout))
    assert_close(out, peer.detach().numpy())
    for name, theirs in leaves.items():
        assert_close(getattr(grads, name), theirs.grad.numpy(), what=f"gradient of {name}")


@pytest.mark.parametrize("bidirectional", [True, False])
def test_peer_t5_bias_through_attention(bidirectional):
    """The whole way: buckets, a table, unscaled attention, and its gradient back to the table."""
    q, k, v = (normal((2, 3, 20, 5), seed, 0.5) for seed in (1, 2, 3))
    table, positions = normal((32, 3), 4), np.arange(20)
    bias, learned = t5_bias_forward(table, positions, positions, bidirectional=bidirectional)
    keep = None if bidirectional else np.tri(20, dtype=np.bool_)
    out, attention = attention_forward(q, k, v, bias=bias, keep=keep, scale=1.0)
    dout = cotangent(out, 5)
    grads = attention_backward(dout, attention)

    theirs = leaf(table)
    buckets = t5_buckets(positions - positions[:, None], bidirectional=bidirectional)
    added = F.embedding(torch.tensor(buckets), theirs).permute(2, 0, 1)
    if keep is not None:
        added = added.masked_fill(torch.tensor(~keep), -math.inf)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        peer = F.scaled_dot_product_attention(
            *(torch.tensor(x) for x in (q, k, v)), attn_mask=added[None], scale=1.0
        )
    peer.backward(torch.tensor(dout))
    assert_close(out, peer.detach().numpy())
    dtable = t5_bias_backward(grads.bias, learned)
    assert_close(dtable, theirs.grad.numpy(), what="gradient of the table")


@pytest.mark.parametrize("side", [16, 32])
def test_peer_buckets_in_float32(side):
    """What `t5_buckets` promises: with T5's numbers a logarithm in float32, as the authors have it,
    gives the same bucket for every distance of a long text."""
    n = torch.arange(8192)
    exact = side // 2
    share = torch.log(n.clamp(min=exact).float() / exact) / math.log(128 / exact)
    far = exact + (share * (side - exact)).to(torch.long)
    theirs = torch.where(n < exact, n, far.clamp(max=side - 1)).numpy()
    ours = t5_buckets(-np.arange(8192), 32, bidirectional=side == 16)
    assert np.array_equal(ours, theirs)
