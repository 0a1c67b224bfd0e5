"""What the schemes that add to the scores are asked in."""

from hypothesis import strategies as st

# leading axes of the queries' and the keys' positions, H, N, M
SHAPES = (
    ((), (), 3, 5, 5),
    ((2,), (2,), 4, 3, 7),
    ((2,), (), 1, 1, 6),
    ((), (3,), 5, 4, 2),
    ((1, 2), (3, 1), 2, 2, 3),
    ((), (), 2, 0, 3),
    ((2,), (2,), 3, 2, 0),
    ((0,), (), 2, 3, 3),
    ((), (), 1, 1, 1),
)
integers = st.sampled_from(["int64", "int32", "uint8", "uint32"])
