"""Agreement with PyTorch, forward and gradients, where it has the mechanism: `make verify-peers`.

Without PyTorch these tests are skipped and say so.
"""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer.attention.dense import attention_backward, attention_forward
from minitransformer.attention.kv_cache import empty_cache, extend
from minitransformer.attention.softmax import log_softmax_forward, softmax_forward
from minitransformer.checks.gradients import assert_close, cotangent
from minitransformer.checks.properties.attention.dense import MASKS, SHAPES, mask_of
from minitransformer.checks.strategies import normal, seeds
from minitransformer.nn.activations import (
    gelu_backward,
    gelu_forward,
    swiglu_backward,
    swiglu_forward,
)
from minitransformer.nn.attention import MultiHeadAttention
from minitransformer.nn.embedding import embedding_backward, embedding_forward
from minitransformer.nn.linear import linear_backward, linear_forward
from minitransformer.nn.losses import cross_entropy_backward, cross_entropy_forward
from minitransformer.nn.module import Parameter
from minitransformer.nn.norms import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from minitransformer.philox import Draw
from minitransformer.training.optimisers import AdamW, clip

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make verify-peers gets it")
F = torch.nn.functional

PEER = settings(max_examples=60, derandomize=True, deadline=None, database=None)


def leaf(x):
    """A tensor that collects a gradient."""
    return torch.tensor(np.array(x), requires_grad=True)


def assert_agrees(out, grads, peer, leaves, dout, tolerance=1e-12):
    """Our output and gradients against the peer's, for the same cotangent."""
    assert_close(np.asarray(out), peer.detach().numpy(), tolerance, what="out")
    peer.backward(torch.tensor(dout))
    for (name, x), ours in zip(leaves.items(), grads, strict=True):
        theirs = np.zeros(x.shape) if x.grad is None else x.grad.numpy()
        assert_close(np.asarray(ours), theirs, tolerance, what=f"gradient of {name}")


@PEER
@given(
    sizes=st.sampled_from([s for s in SHAPES if len(s[0]) == 1 and 0 not in s[:3][0]]),
    mask=st.sampled_from(MASKS),
    with_bias=st.booleans(),
    seed=seeds,
)
def test_peer_scaled_dot_product_attention(sizes, mask, with_bias, seed):
    """Grouped heads, D != E, N != M, dead rows and empty axes. PyTorch's causal flag is upper left,
    so masks are given as data; its dead rows are 0 since 2.5."""
    lead_q, _, _, h, g, n, m, d, e = sizes
    q, k, v = (
        normal((*lead_q, heads, rows, width), seed ^ i)
        for i, (heads, rows, width) in enumerate([(h, n, d), (g, m, d), (g, m, e)])
    )
    shape = (*lead_q, h, n, m)
    keep, bias = mask_of(mask, shape, seed), normal(shape, seed ^ 5) if with_bias else None
    out, cache = attention_forward(q, k, v, keep=keep, bias=bias)
    dout = cotangent(out, seed)
    grads = attention_backward(dout, cache)

    leaves = {"q": leaf(q), "k": leaf(k), "v": leaf(v)}
    given = None if keep is None else torch.tensor(np.broadcast_to(keep, shape).copy())
    if bias is not None:
        leaves["bias"] = leaf(bias)
        given = leaves["bias"] if given is None else leaves["bias"].masked_fill(~given, -np.inf)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        peer = F.scaled_dot_product_attention(
            *(leaves[x] for x in "qkv"), attn_mask=given, enable_gqa=True
        )
    assert_agrees(out, [x for x in grads if x is not None], peer, leaves, dout)


@PEER
@given(seed=seeds, scale=st.sampled_from([1.0, 30.0]), n=st.integers(1, 9))
def test_peer_softmax_and_log_softmax(seed, scale, n):
    x = normal((3, n), seed, scale)
    for ours, theirs in ((softmax_forward, F.softmax), (log_softmax_forward, F.log_softmax)):
        assert_close(ours(x)[0], theirs(torch.tensor(x), dim=-1).numpy())


@PEER
@given(
    split=st.sampled_from([(4, 1, 1, 3), (2, 7), (1,) * 5]), groups=st.sampled_from([1, 2, 4]),
    seed=seeds,
)  # fmt: skip
def test_peer_decoding_with_a_cache(split, groups, seed):
    """PyTorch's `causal_lower_right` is the mask of a chunk behind a cache; `is_causal` is not."""
    from torch.nn.attention.bias import causal_lower_right

    length = sum(split)
    q, k, v = (normal((2, h, length, 8), seed ^ i) for i, h in enumerate((4, groups, groups)))
    cache, start = empty_cache((2,), groups, 8), 0
    for size in split:
        new = slice(start, start + size)
        read, cache = extend(cache, k[..., new, :], v[..., new, :])
        out, _ = attention_forward(q[..., new, :], read.k, read.v, keep=read.keep)
        start += size
        past = [np.repeat(x[..., :start, :], 4 // groups, axis=1) for x in (k, v)]
        peer = F.scaled_dot_product_attention(
            *(torch.tensor(x) for x in (q[..., new, :], *past)),
            attn_mask=causal_lower_right(size, start),
        )
        assert_close(out, peer.numpy(), what="out")


@PEER
@given(seed=seeds, width=st.sampled_from([1, 2, 7, 33]), size=st.sampled_from([1e-3, 1.0, 50.0]))
def test_peer_norms(seed, width, size):
    x, gamma, beta = normal((2, 3, width), seed, size), normal((width,), seed ^ 1), normal(
        (width,), seed ^ 2
    )  # fmt: skip
    dout = cotangent(x, seed)
    out, cache = layer_norm_forward(x, gamma, beta)
    leaves = {"x": leaf(x), "gamma": leaf(gamma), "beta": leaf(beta)}
    peer = F.layer_norm(leaves["x"], (width,), leaves["gamma"], leaves["beta"], 1e-5)
    assert_agrees(out, layer_norm_backward(dout, cache), peer, leaves, dout, 1e-10)
    out, cache = rms_norm_forward(x, gamma, eps=1e-6)
    leaves = {"x": leaf(x), "gamma": leaf(gamma)}
    peer = F.rms_norm(leaves["x"], (width,), leaves["gamma"], 1e-6)
    assert_agrees(out, rms_norm_backward(dout, cache), peer, leaves, dout, 1e-10)


@PEER
@given(seed=seeds, size=st.sampled_from([1.0, 10.0]))
def test_peer_activations(seed, size):
    x, up = normal((4, 5), seed, size), normal((4, 5), seed ^ 1)
    dout = cotangent(x, seed)
    for form, name in (("tanh", "tanh"), ("erf", "none")):
        out, cache = gelu_forward(x, form=form)
        leaves = {"x": leaf(x)}
        peer = F.gelu(leaves["x"], approximate=name)
        assert_agrees(out, [gelu_backward(dout, cache)], peer, leaves, dout)
    out, cache = swiglu_forward(x, up)
    leaves = {"gate": leaf(x), "up": leaf(up)}
    peer = F.silu(leaves["gate"]) * leaves["up"]
    assert_agrees(out, swiglu_backward(dout, cache), peer, leaves, dout)


@PEER
@given(
    seed=seeds,
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    ignored=st.sampled_from([None, 2]),
    classes=st.sampled_from([1, 3, 11]),
)
def test_peer_cross_entropy(seed, smoothing, ignored, classes):
    """Where every target is ignored PyTorch gives NaN and we give 0, so that case is left out."""
    logits = normal((6, classes), seed, 5.0)
    targets = np.random.default_rng(seed).integers(0, classes, 6)
    if ignored is not None and (targets == ignored).all():
        return
    options = {"label_smoothing": smoothing}
    loss, cache = cross_entropy_forward(logits, targets, ignore_index=ignored, **options)
    leaves = {"logits": leaf(logits)}
    given = {"ignore_index": -100 if ignored is None else ignored, **options}
    peer = F.cross_entropy(leaves["logits"], torch.tensor(targets), **given)
    assert_agrees(loss, [cross_entropy_backward(1.5, cache)], peer, leaves, np.array(1.5))


@PEER
@given(seed=seeds)
def test_peer_linear_and_embedding(seed):
    x, weight, bias = normal((2, 3, 4), seed), normal((4, 5), seed ^ 1), normal((5,), seed ^ 2)
    out, cache = linear_forward(x, weight, bias)
    dout = cotangent(out, seed)
    leaves = {"x": leaf(x), "weight": leaf(weight), "bias": leaf(bias)}
    peer = F.linear(leaves["x"], leaves["weight"].T, leaves["bias"])
    assert_agrees(out, linear_backward(dout, cache), peer, leaves, dout)
    tokens = np.random.default_rng(seed).integers(0, 4, (3, 5))
    out, cache = embedding_forward(tokens, weight)
    dout = cotangent(out, seed)
    leaves = {"table": leaf(weight)}
    peer = F.embedding(torch.tensor(tokens), leaves["table"])
    assert_agrees(out, [embedding_backward(dout, cache)], peer, leaves, dout)


@pytest.mark.parametrize("causal", [False, True])
def test_peer_multi_head_attention(causal):
    """The layer with its weights carried over. PyTorch's mask here is True = *ignore*, its weights
    are (out, in) and packed."""
    heads, width, n = 3, 12, 5
    ours = MultiHeadAttention(width, heads, rng=np.random.default_rng(1), std=0.5)
    theirs = torch.nn.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64)
    parts = [ours.query, ours.key, ours.value]
    with torch.no_grad():
        packed = np.concatenate([p.weight.value.T for p in parts])
        theirs.in_proj_weight.copy_(torch.tensor(packed))
        theirs.in_proj_bias.copy_(torch.tensor(np.concatenate([p.bias.value for p in parts])))
        theirs.out_proj.weight.copy_(torch.tensor(ours.output.weight.value.T))
        theirs.out_proj.bias.copy_(torch.tensor(ours.output.bias.value))
    x, keep = normal((2, n, width), 3), np.tri(n, dtype=np.bool_) if causal else None
    out, cache = ours.forward(x, draw=Draw(0, training=False), keep=keep)
    dout = cotangent(out, 4)
    dx = ours.backward(dout, cache).x
    given = leaf(x)
    ignore = None if keep is None else torch.tensor(~keep)
    peer, _ = theirs(given, given, given, attn_mask=ignore, need_weights=False)
    assert_agrees(out, [dx], peer, {"x": given}, dout)
    expected = theirs.in_proj_weight.grad.numpy()
    assert_close(np.concatenate([p.weight.grad.T for p in parts]), expected, what="weights")


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_peer_adamw_and_clipping(weight_decay):
    """Twenty steps on the same gradients, clipped by their norm together."""
    start = {"a": normal((3, 4), 1), "b": normal((5,), 2)}
    ours = {name: Parameter(x.copy(), decay=True) for name, x in start.items()}
    theirs = {name: leaf(x) for name, x in copy.deepcopy(start).items()}
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    optimiser = AdamW(ours, **options)
    peer = torch.optim.AdamW(theirs.values(), lr=0.01, **options)
    for step in range(20):
        for number, (name, parameter) in enumerate(ours.items()):
            parameter.grad[...] = normal(parameter.value.shape, 100 * step + number, 2.0)
            theirs[name].grad = torch.tensor(parameter.grad.copy())
        norm = clip(ours, 1.0)
        assert_close(np.array(norm), torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0).numpy())
        optimiser.step(0.01)
        peer.step()
    for name, parameter in ours.items():
        assert_close(parameter.value, theirs[name].detach().numpy(), what=name)
