"""Our CUDA simulator against Numba's own: the ratio of their times on one kernel.

    python benchmarks/simulator.py [--size 64] [--pairs 3]

A matrix product in tiles of shared memory, 16 x 16 threads a block: the same source, the same
arrays, one launch each in turn. Ours looks for races, bounds and reads of nothing, and counts every
access; it is also timed without counting. Both results are held against NumPy before the times.
"""

import argparse
import os
import statistics
import time
import types
import warnings

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # read when Numba is loaded
warnings.simplefilter("ignore")  # Numba says that its simulator is deprecated

import numpy as np  # noqa: E402
from numba import cuda  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from minitransformer.sparse.cuda.simulator import Simulator  # noqa: E402

TILE = 16


def product(a, b, out):
    left = cuda.shared.array((TILE, TILE), np.float32)
    right = cuda.shared.array((TILE, TILE), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    total = np.float32(0)
    for t in range(0, a.shape[1], TILE):
        left[y, x] = a[i, t + x]
        right[y, x] = b[t + y, j]
        cuda.syncthreads()
        for k in range(TILE):
            total += left[y, k] * right[k, x]
        cuda.syncthreads()
    out[i, j] = total


def ours(counts: bool):
    simulator = Simulator(raises=True, counts=counts)
    return simulator.jit(types.FunctionType(product.__code__, {**globals(), "cuda": simulator}))


def seconds(kernel, blocks: int, a, b) -> float:
    out = np.zeros_like(a)
    start = time.perf_counter()
    kernel[(blocks, blocks), (TILE, TILE)](a, b, out)
    took = time.perf_counter() - start
    assert np.abs(out - a @ b).max() < 1e-3, "a wrong product"
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64, help="rows and columns, a multiple of 16")
    parser.add_argument("--pairs", type=int, default=3, help="launches of each")
    asked = parser.parse_args()
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, asked.size, asked.size)).astype(np.float32)
    kernels = {"ours": ours(True), "ours, no counts": ours(False), "Numba": cuda.jit(product)}
    times: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(asked.pairs):
        for name, kernel in kernels.items():
            times[name].append(seconds(kernel, asked.size // TILE, a, b))
    table = Table("simulator", "seconds a launch", "Numba's time / its time")
    for name, took in times.items():
        ratios = [theirs / mine for theirs, mine in zip(times["Numba"], took, strict=True)]
        table.add_row(name, f"{statistics.median(took):.3f}", f"{statistics.median(ratios):.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
