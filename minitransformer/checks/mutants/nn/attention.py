"""Mistakes people make in the layer around attention."""

import numpy as np

from minitransformer.checks.properties.nn.attention import suite
from minitransformer.nn import attention as right
from minitransformer.nn.attention import MultiHeadAttention, join_heads, split_heads

HEADS = "each_head_attends_with_its_own_columns"
SPLIT = "heads_are_contiguous_columns_and_join_undoes_split"
DERIVATIVE = "multi_head_backward_is_the_derivative"


@suite.mutant("split_heads", "(B, N, W) read as (B, H, N, D): positions mixed", killed_by=SPLIT)
def reshaped_without_a_transpose(x, heads):
    *leading, rows, width = x.shape
    return x.reshape(*leading, heads, rows, width // heads)


@suite.mutant("join_heads", "merged before the heads moved back", killed_by=SPLIT)
def joined_without_a_transpose(x):
    *leading, heads, rows, width = x.shape
    return x.reshape(*leading, rows, heads * width)


@suite.mutant("split_heads", "every H-th column: another layout of the weights", killed_by=SPLIT)
def columns_interleaved(x, heads):
    *leading, rows, width = x.shape
    return np.moveaxis(x.reshape(*leading, rows, width // heads, heads), -1, -3)


@suite.mutant("MultiHeadAttention", "cross-attention that reads itself", killed_by=HEADS)
class MemoryIgnored(MultiHeadAttention):
    def forward(self, x, *, memory=None, **options):
        if memory is None or memory.shape[1] == 0:
            return super().forward(x, memory=memory, **options)
        read = np.broadcast_to(x[:, :1], memory.shape)
        return super().forward(x, memory=np.ascontiguousarray(read), **options)


@suite.mutant("MultiHeadAttention", "√W for √D", killed_by=HEADS)
class ScaleOfTheWholeWidth(MultiHeadAttention):
    def forward(self, x, **options):
        factor = self.heads**-0.25
        for part in (self.query, self.key):
            part.weight.value *= factor
            part.bias.value *= factor
        try:
            return super().forward(x, **options)
        finally:
            for part in (self.query, self.key):
                part.weight.value /= factor
                part.bias.value /= factor


@suite.mutant("MultiHeadAttention", "what `keep` says is lost on the way",
    killed_by="what_the_mask_hides_does_not_reach_the_output")  # fmt: skip
class MaskNotPassedOn(MultiHeadAttention):
    def forward(self, x, *, keep=None, **options):
        return super().forward(x, **options)


@suite.mutant("MultiHeadAttention", "x reaches the keys and values as well", killed_by=DERIVATIVE)
class GradientThroughTheQueriesOnly(MultiHeadAttention):
    def backward(self, dout, cache):
        dx, dmemory = super().backward(dout, cache)
        if dmemory is not None:
            return dx, dmemory
        grads = right.stochastic_attention_backward(
            split_heads(dout @ self.output.weight.value.T, self.heads), cache.attention
        )
        return join_heads(grads.q) @ self.query.weight.value.T, None


@suite.mutant("MultiHeadAttention", "the memory is read twice: keys, and values",
    killed_by=DERIVATIVE)  # fmt: skip
class MemoryGradientFromTheValuesOnly(MultiHeadAttention):
    def backward(self, dout, cache):
        dx, dmemory = super().backward(dout, cache)
        if dmemory is None:
            return dx, None
        grads = right.stochastic_attention_backward(
            split_heads(dout @ self.output.weight.value.T, self.heads), cache.attention
        )
        return dx, join_heads(grads.v) @ self.value.weight.value.T


@suite.mutant("MultiHeadAttention", "= where += belongs",
    killed_by="a_layer_called_twice_collects_both_gradients")  # fmt: skip
class GradientsOverwritten(MultiHeadAttention):
    def backward(self, dout, cache):
        self.zero_grad()
        return super().backward(dout, cache)


@suite.mutant("MultiHeadAttention", "state kept in the layer: the last call is undone twice",
    killed_by="a_layer_called_twice_collects_both_gradients")  # fmt: skip
class CacheKeptInTheLayer(MultiHeadAttention):
    def forward(self, x, **options):
        out, self._cache = super().forward(x, **options)
        return out, self._cache

    def backward(self, dout, cache):
        return super().backward(dout, self._cache)
