"""Agreement with PyTorch's FlexAttention: the same lists of tiles, the same attention inside them.

Without PyTorch these tests are skipped and say so: `make verify-peers` gets it.
"""

import numpy as np
import pytest

from minitransformer.attention.masks import causal, window
from minitransformer.checks.gradients import assert_close, cotangent
from minitransformer.checks.strategies import normal
from minitransformer.sparse.block_mask import from_rule, listed, to_dense
from minitransformer.sparse.tiled import tiled_attention_backward, tiled_attention_forward

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make verify-peers gets it")
flex = pytest.importorskip("torch.nn.attention.flex_attention")


def near(n, m):
    return causal(n, m, align="lower_right") & window(n, m, left=20, right=0, align="lower_right")


MASKS = {"causal": lambda n, m: causal(n, m, align="lower_right"), "window": near}


def ours_and_peer(name, n, m, tile, heads):
    """The mask in our form and in theirs; head h sees one key less at the start."""
    mask = MASKS[name](n, m)
    ours = from_rule(
        lambda b, h, i, j: mask(i, j) & (j >= h), queries=n, keys=m, tile=tile, leading=(heads,)
    )
    keep = torch.from_numpy(to_dense(ours))
    peer = flex.create_block_mask(
        lambda b, h, i, j: keep[h, i, j], 1, heads, n, m, device="cpu", BLOCK_SIZE=tile
    )
    return ours, peer


def lists(peer, heads, rows):
    """Their tiles, full and partial, as a set of (h, I, J, full)."""
    found = set()
    for number, indices, full in (
        (peer.kv_num_blocks, peer.kv_indices, False),
        (peer.full_kv_num_blocks, peer.full_kv_indices, True),
    ):
        for h, i in np.ndindex(heads, rows):
            found |= {(h, i, int(j), full) for j in indices[0, h, i, : number[0, h, i]]}
    return found


@pytest.mark.parametrize("name", list(MASKS))
@pytest.mark.parametrize("n, m, tile", [(64, 64, (16, 16)), (48, 96, (8, 32)), (96, 80, (32, 16))])
def test_tiles_are_those_of_the_peer(name, n, m, tile):
    ours, peer = ours_and_peer(name, n, m, tile, heads=3)
    got = {(*t, full) for t, full in zip(listed(ours).tolist(), ours.pattern < 0, strict=True)}
    assert {(h, i, j, bool(full)) for h, i, j, full in got} == lists(peer, 3, ours.grid[0])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", list(MASKS))
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_tiled_attention_agrees_with_the_peer(name, groups):
    n, m, heads = 37, 50, 4
    ours, peer = ours_and_peer(name, n, m, (16, 8), heads)
    q, k, v = (
        normal((1, h, rows, 8), h + rows) for h, rows in ((heads, n), (groups, m), (groups, m))
    )
    plain = [torch.from_numpy(x) for x in (q, k, v)]
    expected = flex.flex_attention(*plain, block_mask=peer, enable_gqa=True)
    out, cache = tiled_attention_forward(q, k, v, ours)
    assert_close(out, expected.numpy(), 1e-12, what="out")
    # FlexAttention has no backward on the CPU: the dense product under the same mask has
    leaves = [x.clone().requires_grad_() for x in plain]
    attend = torch.nn.functional.scaled_dot_product_attention
    whole = attend(*leaves, attn_mask=torch.from_numpy(to_dense(ours)), enable_gqa=True)
    dout = cotangent(out, 3)
    grads = tiled_attention_backward(dout, cache)
    whole.backward(torch.from_numpy(dout))
    for name, leaf in zip(("q", "k", "v"), leaves, strict=True):
        assert_close(getattr(grads, name), leaf.grad.numpy(), 1e-11, what=f"gradient of {name}")
