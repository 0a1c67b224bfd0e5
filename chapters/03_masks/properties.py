"""03.5: state what is true of every causal mask and every window.

`target.causal(n, m, align=...)` and `target.window(n, m, left=..., right=..., align=...)` return
rules; `.dense()` is the mask, True = may attend. Yours are judged twice: they must be true of the
library, and at least four of its known mistakes must be caught by one of them, not by crashing.

Take the comment marks off the example, run `minitransformer learn check 03.5`, and write your own.
"""

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.suite import Suite

suite = Suite("attention.masks")

# sizes to draw from: n and m need not be equal, and may be 0
few = st.integers(0, 6)
alignments = st.sampled_from(["lower_right", "upper_left"])


# @suite.property("causal", n=few, m=few, align=alignments)
# def later_queries_read_more(target, n, m, align):
#     """Each row may read at least what the row above it may."""
#     mask = target.causal(n, m, align=align).dense()
#     assert (mask[:-1] <= mask[1:]).all()
