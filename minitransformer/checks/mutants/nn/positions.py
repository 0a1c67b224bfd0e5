"""Mistakes people make when they tell a model the order."""

import numpy as np

from minitransformer.checks.properties.nn.positions import suite
from minitransformer.nn.positions import Positions, Rope, Rotation
from minitransformer.positions.rope import rope_tables
from minitransformer.positions.t5_bias import t5_bias_forward

ADDED = "what_is_added_is_the_row_of_the_position"
TURNED = "heads_turn_by_the_angles_of_their_place"
BIAS = "scores_get_the_bias_of_their_distance"
COLLECTS = "a_table_collects_from_batch_and_layers"


@suite.mutant("Positions", "with a cache every chunk believes that it begins the text",
    killed_by=ADDED)  # fmt: skip
class PlacesCountedFromTheChunk(Positions):
    def add_forward(self, x, positions):
        return super().add_forward(x, positions - positions[..., :1])


@suite.mutant("Positions", "waves beside a learned table: two schemes at once", killed_by=ADDED)
class WavesWhateverTheScheme(Positions):
    def add_forward(self, x, positions):
        if self.scheme in ("none", "rope"):
            waves = Positions("sinusoidal", width=x.shape[-1], heads=1, context=1, rng=None)
            return waves.add_forward(x, positions)[0], None
        return super().add_forward(x, positions)


@suite.mutant("Positions", "a base of 10000, whatever the settings say", killed_by=TURNED)
class BaseIgnored(Positions):
    def rotation(self, positions, length=None):
        if self.scheme != "rope":
            return None
        return Rotation(rope_tables(positions, self.turned), self.rope.layout)


@suite.mutant("Positions", "the whole head turns where only a part should", killed_by=TURNED)
class PartialRotationIgnored(Positions):
    def __init__(self, scheme, **options):
        super().__init__(scheme, **options)
        self.turned = options["width"] // options["heads"]


@suite.mutant("Positions", "halves where the weights were made for neighbours, silent in training",
    killed_by=TURNED)  # fmt: skip
class LayoutIgnored(Positions):
    def __init__(self, scheme, *, rope=None, **options):
        rope = Rope(rope.base, rope.width, "half") if rope is not None else None
        super().__init__(scheme, rope=rope, **options)


@suite.mutant("Positions", "keys beyond the query have buckets in an encoder only", killed_by=BIAS)
class BucketsOfAnEncoder(Positions):
    def bias_forward(self, queries, keys):
        if self.scheme != "t5":
            return super().bias_forward(queries, keys)
        return t5_bias_forward(
            np.concatenate([self.weight.value, self.weight.value[:1]]), queries, keys,
            bidirectional=True, max_distance=self.max_distance,
        )  # fmt: skip


@suite.mutant("Positions", "far keys are rewarded", killed_by=BIAS)
class SlopesOfTheWrongSign(Positions):
    def bias_forward(self, queries, keys):
        bias, cache = super().bias_forward(queries, keys)
        return (-bias if self.scheme == "alibi" else bias), cache


@suite.mutant("Positions", "decoding forgets how many tokens are in the cache", killed_by=BIAS)
class QueriesCountedFromZero(Positions):
    def bias_forward(self, queries, keys):
        return super().bias_forward(queries - queries[..., :1], keys)


@suite.mutant("Positions", "= where += belongs: the last layer alone is heard", killed_by=COLLECTS)
class BiasOfTheLastLayerOnly(Positions):
    def bias_backward(self, dbias, cache):
        self.weight.grad[...] = 0
        super().bias_backward(dbias, cache)


@suite.mutant("Positions", "a position is shared by the batch: its gradients add up",
    killed_by=COLLECTS)  # fmt: skip
class TableAveragedOverTheBatch(Positions):
    def add_backward(self, dout, cache):
        dx = super().add_backward(dout, cache)
        if self.weight is not None:
            self.weight.grad /= len(dout)
        return dx
