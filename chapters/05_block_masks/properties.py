"""05.7: state what is true of every list of tiles.

`target.from_dense(keep, tile=...)` makes a BlockMask of a boolean (N, M) or (*L, N, M), and
`target.to_dense(mask)` puts it together again. Yours are judged twice: they must be true of the
library, and at least four of its known mistakes must be caught by one of them, not by crashing.

Take the comment marks off the example, run `minitransformer learn check 05.7`, and write your own.
"""

import numpy as np
from hypothesis import strategies as st

from minitransformer.checks.strategies import seeds
from minitransformer.checks.suite import Suite

suite = Suite("sparse.block_mask")

sizes = st.integers(0, 40)
tiles = st.sampled_from([1, 8, 16, (8, 33)])


def random_mask(n, m, share, seed):
    return np.random.default_rng(seed).random((n, m)) < share


# @suite.property("from_dense", n=sizes, m=sizes, tile=tiles, seed=seeds)
# def it_knows_its_size(target, n, m, tile, seed):
#     """The sizes are those of the mask, not of the tiles."""
#     mask = target.from_dense(random_mask(n, m, 0.3, seed), tile=tile)
#     assert (mask.queries, mask.keys) == (n, m)
