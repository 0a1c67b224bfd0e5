"""Shape checks on: every jaxtyping signature of the library is verified while the tests run."""

import os

# A busy neighbour makes two-thread BLAS four times slower; xdist already uses both cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import jaxtyping
import pytest

# The floors whose signatures carry shapes. (`checks` is full of Hypothesis types that beartype
# cannot read.)
SHAPED = (
    "arrays",
    "philox",
    "attention",
    "positions",
    "stochastic",
    "sparse",
    "heads",
    "nn",
    "models",
)
jaxtyping.install_import_hook(
    [f"minitransformer.{floor}" for floor in SHAPED], "shape_checks.checked"
)


@pytest.fixture
def own_errors():
    """Switch the shape checks off: their TypeError would hide the library's own message for bad
    input, and a mutant must fall to a property, not to them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
