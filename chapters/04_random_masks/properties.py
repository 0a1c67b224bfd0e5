"""04.9: state what is true of every stochastic attention.

`target.stochastic_attention_forward(q, k, v, random_mask=..., draw=..., layer=..., keep=...)`
returns the output and a cache that offers `weights` and the mask that was drawn, `keep`. Yours are
judged twice: they must be true of the library, and at least three of its known mistakes must be
caught by one of them, not by crashing.

Take the comment marks off the example, run `minitransformer learn check 04.9`, and write your own.
"""

import numpy as np
from hypothesis import strategies as st

from minitransformer.attention.dense import attention_forward
from minitransformer.checks.gradients import assert_close
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite
from minitransformer.philox import Draw
from minitransformer.stochastic.samplers import RandomMask

suite = Suite("stochastic.compensation")


def arrays(seed):
    return (normal((2, 2, 5, 4), seed ^ n) for n in range(3))


# @suite.property("stochastic_attention_forward", seed=seeds)
# def evaluation_drops_nothing(target, seed):
#     """Outside training it is dense attention."""
#     q, k, v = arrays(seed)
#     draw = Draw(seed=seed % 2**32, step=1, training=False)
#     out, _ = target.stochastic_attention_forward(
#         q, k, v, random_mask=RandomMask("element", rate=0.5), draw=draw, layer=0
#     )
#     assert_close(out, attention_forward(q, k, v)[0])
