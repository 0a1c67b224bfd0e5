"""Mistakes people make when they put the parts together."""

import numpy as np

from minitransformer.checks.properties.models.language_model import suite
from minitransformer.models import language_model as right
from minitransformer.models.language_model import LanguageModel
from minitransformer.philox import Draw

DERIVATIVE = "every_parameter_has_its_derivative"
MASKS = "masks_differ_by_layer_step_and_seed_and_repeat_exactly"


@suite.mutant(
    "LanguageModel", "the embedding scores too: half of its gradient is missing",
    killed_by=DERIVATIVE,
)  # fmt: skip
class TiedScoresHaveNoGradient(LanguageModel):
    def backward(self, dlogits, cache):
        super().backward(dlogits, cache)
        if self.head is None:
            x = cache.head.x
            self.tokens.weight.grad -= np.einsum("bnv,bnw->vw", dlogits, x)


@suite.mutant("LanguageModel", "= where += belongs", killed_by=DERIVATIVE)
class GradientsOverwrittenByTheNextPass(LanguageModel):
    def backward(self, dlogits, cache):
        self.zero_grad()
        super().backward(dlogits, cache)


@suite.mutant(
    "LanguageModel", "a position is shared by the batch: its gradients add up",
    killed_by=DERIVATIVE,
)  # fmt: skip
class GradientOfPositionsAveragedOverTheBatch(LanguageModel):
    def backward(self, dlogits, cache):
        super().backward(dlogits, cache)
        if self.positions.scheme == "learned":
            self.positions.weight.grad /= len(dlogits)


@suite.mutant(
    "LanguageModel", "every layer reads T5's table, every layer teaches it", killed_by=DERIVATIVE
)
class BiasLearnsFromTheFirstLayerOnly(LanguageModel):
    def backward(self, dlogits, cache):
        first, collect = self.blocks[0], self.positions.bias_backward
        undo, seen = first.backward, []
        first.backward = lambda d, c: (seen.append(undo(d, c)), seen[0])[1]
        self.positions.bias_backward = lambda d, c: collect(seen[0].bias, c)
        try:
            super().backward(dlogits, cache)
        finally:
            del first.backward, self.positions.bias_backward


@suite.mutant("LanguageModel", "√W goes forward and not back", killed_by=DERIVATIVE)
class ScaleOfTheEmbeddingForgottenInTheBackward(LanguageModel):
    def backward(self, dlogits, cache):
        kept, self.embedding_scale = self.embedding_scale, 1.0
        try:
            super().backward(dlogits, cache)
        finally:
            self.embedding_scale = kept


@suite.mutant("LanguageModel", "the backward pass draws a mask of its own", killed_by=DERIVATIVE)
class MaskDrawnAgainInTheBackward(LanguageModel):
    def forward(self, tokens, *, draw):
        self._tokens, self._draw = tokens, draw
        return super().forward(tokens, draw=draw)

    def backward(self, dlogits, cache):
        other = self._draw._replace(seed=self._draw.seed ^ 1)
        super().backward(dlogits, super().forward(self._tokens, draw=other)[1])


@suite.mutant(
    "LanguageModel", "inputs and targets confused: position t is given token t + 1",
    killed_by="a_later_token_changes_no_earlier_score",
)  # fmt: skip
class TokensShiftedTheWrongWay(LanguageModel):
    def forward(self, tokens, *, draw):
        return super().forward(np.roll(tokens, -1, axis=1), draw=draw)


@suite.mutant(
    "LanguageModel", "masks are for training",
    killed_by="evaluation_is_full_and_the_same_for_every_draw",
)  # fmt: skip
class MasksDrawnInEvaluation(LanguageModel):
    def forward(self, tokens, *, draw):
        return super().forward(tokens, draw=draw._replace(training=True))


@suite.mutant(
    "LanguageModel", "the order is never told", killed_by="each_scheme_of_positions_tells_the_order"
)
class OrderNeverTold(LanguageModel):
    def __init__(self, *arguments, positions="learned", rope=None, **options):
        super().__init__(*arguments, positions="none", **options)


@suite.mutant("LanguageModel", "one mask for the whole training", killed_by=MASKS)
class StepLeftOutOfTheDraw(LanguageModel):
    def forward(self, tokens, *, draw):
        return super().forward(tokens, draw=Draw(draw.seed, 0, draw.training, draw.sample))


@suite.mutant("LanguageModel", "every layer believes it is layer 0", killed_by=MASKS)
class LayersShareOneMask(LanguageModel):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        for block in self.blocks:
            block.attention.layer = 0


@suite.mutant(
    "LanguageModel", "layers counted from 1: the first is already decayed",
    killed_by="drop_rates_follow_the_schedule_over_layers_and_steps",
)  # fmt: skip
class ScheduleCountsLayersFromOne(LanguageModel):
    def drop_rates(self, step):
        if self.schedule is None:
            return super().drop_rates(step)
        count = len(self.blocks)
        return [
            self.schedule.drop_rate(min(layer + 1, count - 1), count, step, self.steps, self.heads)
            for layer in range(count)
        ]


@suite.mutant(
    "LanguageModel", "a warm-up that never begins: the step is not passed on",
    killed_by="drop_rates_follow_the_schedule_over_layers_and_steps",
)  # fmt: skip
class ScheduleStandsStill(LanguageModel):
    def drop_rates(self, step):
        return super().drop_rates(self.steps)


@suite.mutant(
    "average_probabilities", "the softmax of the mean of logits is sharper than the mean",
    killed_by="monte_carlo_evaluation_averages_probabilities",
)  # fmt: skip
def logits_averaged(model, tokens, *, draw, samples):
    logits = [
        model.forward(tokens, draw=draw._replace(training=False, sample=s))[0] for s in samples
    ]
    mean = np.mean(logits, axis=0)
    e = np.exp(mean - mean.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@suite.mutant(
    "average_probabilities", "one draw, counted many times",
    killed_by="monte_carlo_evaluation_averages_probabilities",
)  # fmt: skip
def same_sample_every_time(model, tokens, *, draw, samples):
    return right.average_probabilities(model, tokens, draw=draw, samples=[samples[0]])
