"""02.5: state what is true of every attention, whoever wrote it.

`target.attention_forward(q, k, v, keep=..., bias=..., scale=..., softcap=...)` returns the output
and a cache that offers `weights` and `lse`. Yours are judged twice: they must be true of the
library, and at least five of its known mistakes must be caught by one of them, not by crashing.

Take the comment marks off the example, run `minitransformer learn check 02.5`, and write your own.
"""

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close
from minitransformer.checks.strategies import normal, seeds
from minitransformer.checks.suite import Suite

suite = Suite("attention.dense")

# normal(shape, seed) makes an array; q is (B, H, N, D), k (B, G, M, D), v (B, G, M, E)


# @suite.property("attention_forward", seed=seeds, keys=st.integers(1, 5))
# def equal_values_come_out_unchanged(target, seed, keys):
#     """If all values are the same, so is the output: the weights sum to 1."""
#     q, k = normal((1, 2, 3, 4), seed), normal((1, 2, keys, 4), seed ^ 1)
#     out, _ = target.attention_forward(q, k, np.ones((1, 2, keys, 5)))
#     assert_close(out, np.ones((1, 2, 3, 5)))
