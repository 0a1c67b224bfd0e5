"""Mistakes people make when they stack attention and feed-forward."""

from minitransformer.checks.properties.nn.blocks import suite
from minitransformer.nn.activations import gelu_forward
from minitransformer.nn.blocks import DecoderBlock, FeedForward

RESIDUAL = "the_residual_goes_round_the_norm_or_through_it"
FEED_FORWARD = "feed_forward_is_two_layers_at_each_position"
DERIVATIVE = "block_backward_is_the_derivative"


@suite.mutant("DecoderBlock", "text says post-norm, code is pre-norm", killed_by=RESIDUAL)
class PostNormComputedAsPreNorm(DecoderBlock):
    def __init__(self, *arguments, placement="pre", **options):
        super().__init__(*arguments, placement="pre", **options)


@suite.mutant("DecoderBlock", "one norm for both parts", killed_by=RESIDUAL)
class NormShared(DecoderBlock):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._own = self.feed_forward_norm

    def forward(self, x, **options):
        self.feed_forward_norm = self.attention_norm
        try:
            return super().forward(x, **options)
        finally:
            self.feed_forward_norm = self._own


@suite.mutant("DecoderBlock", "f(norm(x)) without the x beside it", killed_by=RESIDUAL)
class ResidualForgotten(DecoderBlock):
    def forward(self, x, **options):
        out, cache = super().forward(x, **options)
        return out - x, cache


@suite.mutant("DecoderBlock", "the gradient goes through the branch only", killed_by=DERIVATIVE)
class ResidualForgottenInTheBackward(DecoderBlock):
    def backward(self, dout, cache):
        found = super().backward(dout, cache)
        return found._replace(x=found.x - dout)


@suite.mutant("DecoderBlock", "the rate of the schedule never arrives",
    killed_by="the_drop_rate_of_the_call_is_the_one_that_counts")  # fmt: skip
class DropRateNotPassedOn(DecoderBlock):
    def forward(self, x, *, drop_rate=None, **options):
        return super().forward(x, **options)


@suite.mutant("FeedForward", "two linear layers are one", killed_by=FEED_FORWARD)
class ActivationForgotten(FeedForward):
    def forward(self, x):
        _, cache = super().forward(x)
        up = x @ self.up.weight.value + self.up.bias.value
        return up @ self.down.weight.value + self.down.bias.value, cache


@suite.mutant("FeedForward", "silu on the wrong branch", killed_by=FEED_FORWARD)
class GateAndUpExchanged(FeedForward):
    def forward(self, x):
        if self.gate is None:
            return super().forward(x)
        self.up, self.gate = self.gate, self.up
        try:
            return super().forward(x)
        finally:
            self.up, self.gate = self.gate, self.up


@suite.mutant("FeedForward", "GELU, whatever was asked for", killed_by=FEED_FORWARD)
class GateIgnored(FeedForward):
    def forward(self, x):
        _, cache = super().forward(x)
        hidden = gelu_forward(x @ self.up.weight.value + self.up.bias.value)[0]
        return hidden @ self.down.weight.value + self.down.bias.value, cache


@suite.mutant("DecoderBlock", "the feed-forward part is undone without its norm",
    killed_by=DERIVATIVE)  # fmt: skip
class NormSkippedInTheBackward(DecoderBlock):
    def backward(self, dout, cache):
        skipped = self.feed_forward_norm.backward
        self.feed_forward_norm.backward = lambda d, c: (skipped(d, c), d)[1]
        try:
            return super().backward(dout, cache)
        finally:
            del self.feed_forward_norm.backward
