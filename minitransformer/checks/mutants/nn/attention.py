"""Mistakes people make in the layer around attention."""

import numpy as np

from minitransformer.checks.properties.nn.attention import suite
from minitransformer.nn import attention as right
from minitransformer.nn.attention import MultiHeadAttention, join_heads, split_heads

HEADS = "each_head_attends_with_its_own_columns"
SPLIT = "heads_are_contiguous_columns_and_join_undoes_split"
DERIVATIVE = "multi_head_backward_is_the_derivative"
PLACES = "positions_turn_queries_and_keys_and_shift_scores"


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
        found = super().backward(dout, cache)
        if found.memory is not None:
            return found
        grads = right.stochastic_attention_backward(
            split_heads(dout @ self.output.weight.value.T, self.heads), cache.attention
        )
        return found._replace(x=join_heads(grads.q) @ self.query.weight.value.T)


@suite.mutant("MultiHeadAttention", "the memory is read twice: keys, and values",
    killed_by=DERIVATIVE)  # fmt: skip
class MemoryGradientFromTheValuesOnly(MultiHeadAttention):
    def backward(self, dout, cache):
        found = super().backward(dout, cache)
        if found.memory is None:
            return found
        grads = right.stochastic_attention_backward(
            split_heads(dout @ self.output.weight.value.T, self.heads), cache.attention
        )
        return found._replace(memory=join_heads(grads.v) @ self.value.weight.value.T)


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


@suite.mutant("MultiHeadAttention", "values turned like keys", killed_by=PLACES)
class ValuesTurned(MultiHeadAttention):
    def forward(self, x, *, rotation=None, **options):
        if rotation is None:
            return super().forward(x, **options)
        kept, self.value = self.value, Turned(self.value, rotation, self.groups)
        try:
            return super().forward(x, rotation=rotation, **options)
        finally:
            self.value = kept


class Turned:
    """A projection whose heads are turned as well."""

    def __init__(self, part, rotation, heads):
        self.part, self.rotation, self.heads = part, rotation, heads

    def forward(self, x):
        out, cache = self.part.forward(x)
        return join_heads(self.rotation.forward(split_heads(out, self.heads))[0]), cache


@suite.mutant("MultiHeadAttention", "positions made and not passed on", killed_by=PLACES)
class PositionsIgnored(MultiHeadAttention):
    def forward(self, x, *, rotation=None, bias=None, **options):
        return super().forward(x, **options)


@suite.mutant("MultiHeadAttention", "a turned query is undone by turning it on", killed_by=PLACES)
class TurnedOnInTheBackward(MultiHeadAttention):
    def backward(self, dout, cache):
        if cache.turned is None:
            return super().backward(dout, cache)
        rotation, *caches = cache.turned
        wrong = [c._replace(sin=-c.sin) for c in caches]
        return super().backward(dout, cache._replace(turned=(rotation, *wrong)))


@suite.mutant("MultiHeadAttention", "a bias that nobody hands back does not learn",
    killed_by=PLACES)  # fmt: skip
class BiasGradientHalved(MultiHeadAttention):
    def backward(self, dout, cache):
        found = super().backward(dout, cache)
        return found if found.bias is None else found._replace(bias=found.bias / len(dout))
