"""01.8: state what is true of every softmax, whoever wrote it.

A property is a sentence about any implementation: `target` is the one under trial, the other
arguments are drawn by Hypothesis. Yours are judged twice: they must be true of the library, and at
least three of its known mistakes must be caught by one of them, not by crashing.

Take the comment marks off the example, run `minitransformer learn check 01.8`, and write your own.
"""

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.gradients import assert_close
from minitransformer.checks.strategies import finite_rows, rows
from minitransformer.checks.suite import Suite

suite = Suite("attention.softmax")

# rows() draws scores with -inf among them, finite_rows() scores without


# @suite.property("softmax_forward", scores=rows())
# def weights_are_never_negative(target, scores):
#     """No weight is negative."""
#     weights, _ = target.softmax_forward(scores)
#     assert (weights >= 0).all()
