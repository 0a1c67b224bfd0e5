"""06.5: state what is true of every schedule of drop rates.

`target.Schedule(rate=..., schedule=..., warmup=..., ...)` offers `drop_rate(layer, layers, step,
steps)`. Yours are judged twice: they must be true of the library, and at least five of its known
mistakes must be caught by one of them, not by crashing.

Take the comment marks off the example, run `minitransformer learn check 06.5`, and write your own.
"""

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.suite import Suite

suite = Suite("stochastic.schedules")

names = st.sampled_from(["constant", "linear", "geometric", "cosine", "increasing"])
rates = st.sampled_from([0.0, 0.3, 0.5, 1.0])
depths = st.integers(1, 12)


# @suite.property("Schedule", name=names, rate=rates, layers=depths)
# def no_rate_is_larger_than_that_asked_for(target, name, rate, layers):
#     """The rate is the largest there is."""
#     schedule = target.Schedule(rate=rate, schedule=name, warmup="none")
#     assert all(0 <= schedule.drop_rate(l, layers, 5, 10) <= rate for l in range(layers))
