"""Targets to try: what PyTorch and JAX ship, as plain functions with our names of the options.

Each is what its documentation says it computes; what it cannot express raises NotApplicable.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from minitransformer.checks.suite import NotApplicable


class Builtin(NamedTuple):
    make: Callable[[], Callable]  # imports the framework, returns the function
    framework: str
    conventions: tuple[str, ...] = ()
    returns: tuple[str, ...] = ("out",)
    differentiable: bool = True
    dtype: str = "float64"


def _sdpa() -> Callable:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def sdpa(
        q: Any, k: Any, v: Any, *, keep: Any = None, bias: Any = None, scale: Any = None,
        causal: bool = False,
    ) -> Any:  # fmt: skip
        if causal and bias is not None:
            raise NotApplicable("SDPA takes is_causal or attn_mask, not both")
        mask = keep
        if bias is not None:
            mask = bias if keep is None else bias.masked_fill(~keep, -torch.inf)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, is_causal=causal, enable_gqa=True
        )

    return sdpa


def _multihead() -> Callable:
    import torch

    def multihead(q: Any, k: Any, v: Any, *, keep: Any = None) -> Any:
        """The layer with identity projections: what its own attention does is what is seen."""
        batch, heads, n, width = q.shape
        if k.shape[1] != heads or v.shape[-1] != width:
            raise NotApplicable(
                "MultiheadAttention has as many key heads as query heads, and D = E"
            )
        layer = torch.nn.MultiheadAttention(heads * width, heads, batch_first=True, dtype=q.dtype)
        eye = torch.eye(heads * width, dtype=q.dtype)
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.cat([eye, eye, eye]))
            layer.out_proj.weight.copy_(eye)
            layer.in_proj_bias.zero_()
            layer.out_proj.bias.zero_()
        rows = [x.transpose(1, 2).reshape(batch, -1, heads * width) for x in (q, k, v)]
        mask = None if keep is None else keep.reshape(batch * heads, n, -1)
        out, _ = layer(*rows, attn_mask=mask, need_weights=False)
        return out.view(batch, n, heads, width).transpose(1, 2)

    return multihead


def _flex() -> Callable:
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def flex(
        q: Any, k: Any, v: Any, *, keep: Any = None, bias: Any = None, scale: Any = None,
        softcap: Any = None,
    ) -> Any:  # fmt: skip
        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if softcap:
                score = softcap * torch.tanh(score / softcap)
            if bias is not None:
                score = score + bias[b, h, i, j]
            return score if keep is None else torch.where(keep[b, h, i, j], score, -torch.inf)

        out, aux = flex_attention(
            q, k, v, score_mod=score_mod, scale=scale, enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse

    return flex


def _jax_attention() -> Callable:
    import jax

    def attention(
        q: Any, k: Any, v: Any, *, keep: Any = None, bias: Any = None, scale: Any = None,
        causal: bool = False, window: Any = None,
    ) -> Any:  # fmt: skip
        if q.shape[-1] != v.shape[-1]:
            raise NotApplicable("jax.nn.dot_product_attention needs D = E")
        if window is not None and -1 in window:
            raise NotApplicable("a JAX window has no open side")
        return jax.nn.dot_product_attention(
            q, k, v, mask=keep, bias=bias, scale=scale, is_causal=causal, local_window_size=window
        )

    return attention


def _torch_softmax() -> Callable:
    import torch

    return lambda x, dim=-1: torch.softmax(x, dim)


def _torch_log_softmax() -> Callable:
    import torch

    return lambda x, dim=-1: torch.log_softmax(x, dim)


def _torch_logsumexp() -> Callable:
    import torch

    return lambda x, dim=-1, keepdim=False: torch.logsumexp(x, dim, keepdim)


def _torch_layer_norm() -> Callable:
    from torch.nn.functional import layer_norm

    return lambda x, gamma, beta, eps=1e-5: layer_norm(x, x.shape[-1:], gamma, beta, eps)


def _torch_rms_norm() -> Callable:
    from torch.nn.functional import rms_norm

    return lambda x, gamma, eps=1e-6: rms_norm(x, x.shape[-1:], gamma, eps)


def _torch_gelu() -> Callable:
    from torch.nn.functional import gelu

    def call(x: Any, form: str = "tanh") -> Any:
        return gelu(x, approximate={"erf": "none", "tanh": "tanh"}[form])

    return call


def _torch_cross_entropy() -> Callable:
    from torch.nn.functional import cross_entropy

    def call(
        logits: Any, targets: Any, label_smoothing: float = 0.0, ignore_index: int | None = None
    ) -> Any:
        ignored = -100 if ignore_index is None else ignore_index
        return cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1),
            label_smoothing=label_smoothing, ignore_index=ignored,
        )  # fmt: skip

    return call


BUILTIN: dict[tuple[str, str], Builtin] = {
    ("torch:sdpa", "attention"): Builtin(_sdpa, "torch", ("causal=upper_left",)),
    ("torch:multihead", "attention"): Builtin(_multihead, "torch", ("mask=ignore",)),
    ("torch:flex", "attention"): Builtin(
        _flex, "torch", ("empty=refused",), ("out", "lse"), differentiable=False
    ),
    ("jax:dot_product_attention", "attention"): Builtin(
        _jax_attention,
        "jax",
        ("causal=upper_left", "dead_row=mean", "layout=bnhd"),
        dtype="float32",  # its softmax is of float32 whatever comes in
    ),
    ("torch:softmax", "softmax"): Builtin(_torch_softmax, "torch", ("dead_row=nan",)),
    ("torch:log_softmax", "log_softmax"): Builtin(_torch_log_softmax, "torch", ("dead_row=nan",)),
    ("torch:logsumexp", "logsumexp"): Builtin(_torch_logsumexp, "torch"),
    ("torch:layer_norm", "layer_norm"): Builtin(_torch_layer_norm, "torch"),
    ("torch:rms_norm", "rms_norm"): Builtin(_torch_rms_norm, "torch"),
    ("torch:gelu", "gelu"): Builtin(_torch_gelu, "torch"),
    ("torch:cross_entropy", "cross_entropy"): Builtin(_torch_cross_entropy, "torch"),
}
