"""The simulator computes what thread by thread would, finds what is planted, and says nothing of
kernels that are right."""

import linecache
import math

import numpy as np
import pytest
from kernel_programs import SIZE, Programs

from minitransformer.sparse.cuda.simulator import KernelError, Simulator, text_of

f32 = np.float32


def launched(make, grid, block, *arguments, seed=0, dynamic=0):
    """The report of one launch."""
    cuda = Simulator(seed)
    cuda.jit(make(cuda))[grid, block, 0, dynamic](*arguments)
    return cuda.report


# ---- the same as thread by thread ----------------------------------------------------------------


class OneByOne:
    """A `cuda` for kernels without barriers: plain Python runs each thread for itself."""

    thread = 0

    def jit(self, function=None, *, device=False):
        return (lambda f: f) if function is None else function

    def grid(self, ndim):
        return self.thread


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_threads_together_do_what_each_would_alone(first, tmp_path):
    """Random nests of branches and loops, with break, continue, return and functions."""
    for seed in range(first, first + 10):
        path, scope = tmp_path / f"kernel{seed}.py", {}
        path.write_text(Programs(seed).source(), encoding="utf-8")
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), scope)
        x = np.random.default_rng(seed).integers(-3, 9, SIZE)
        alone, together = np.zeros((2, SIZE, 3), np.int64)
        plain = OneByOne()
        kernel = scope["make"](plain)
        for plain.thread in range(SIZE):
            kernel(x.tolist(), alone)
        report = launched(scope["make"], 1, SIZE, x, together)
        assert np.array_equal(together, alone), path.read_text(encoding="utf-8")
        assert not report.findings
        linecache.clearcache()


# ---- kernels that are right ----------------------------------------------------------------------


def make_product(cuda, tile=16, bad=""):
    """out = a b in tiles of shared memory; `bad` plants a fault."""

    def product(a, b, out):
        left = cuda.shared.array((tile, tile), f32)
        right = cuda.shared.array((tile, tile), f32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        j, i = cuda.grid(2)
        total = f32(0)
        for t in range(0, a.shape[1], tile):
            left[y, x] = a[i, t + x] if i < a.shape[0] and t + x < a.shape[1] else f32(0)
            right[y, x] = b[t + y, j] if t + y < b.shape[0] and j < b.shape[1] else f32(0)
            if bad != "no first barrier":
                cuda.syncthreads()
            for k in range(tile):
                total += left[y, k] * right[k, x]
            if bad != "no second barrier":
                cuda.syncthreads()
        if i < out.shape[0] and j < out.shape[1]:
            out[i, j] = total

    return product


def random(*shape):
    return np.random.default_rng(7).standard_normal(shape).astype(f32)


@pytest.mark.parametrize("n, m, k", [(32, 32, 32), (37, 20, 41), (3, 50, 1)])
def test_a_product_in_tiles(n, m, k):
    a, b, out = random(n, k), random(k, m), np.zeros((n, m), f32)
    report = launched(make_product, (-(-m // 16), -(-n // 16)), (16, 16), a, b, out)
    assert np.abs(out - a @ b).max() < 1e-4
    assert not report.findings
    assert report.total("global", "read", "a").accesses == n * k * -(-m // 16)


def make_sums(cuda):
    """The sum of each row by one warp, and of all rows by atomics."""

    def sums(x, rows, whole):
        i, lane = cuda.blockIdx.x * 2 + cuda.threadIdx.y, cuda.laneid
        total = f32(0)
        for j in range(lane, x.shape[1], 32):
            total += x[i, j]
        total += cuda.shfl_down_sync(0xFFFFFFFF, total, 16)
        for step in range(3, -1, -1):
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 1 << step)
        if lane == 0:
            rows[i] = total
            cuda.atomic.add(whole, 0, total)

    return sums


def test_sums_by_shuffles_and_atomics():
    x, rows, whole = random(8, 75), np.zeros(8, f32), np.zeros(1, f32)
    report = launched(make_sums, 4, (32, 2), x, rows, whole)
    assert np.allclose(rows, x.sum(axis=1), atol=1e-4)
    assert np.allclose(whole[0], x.sum(), atol=1e-4)
    assert not report.findings
    assert report.total("global", "atomic").accesses == 8


def make_votes(cuda):
    def votes(x, out):
        i = cuda.grid(1)
        out[i, 0] = cuda.ballot_sync(0xFFFFFFFF, x[i] > 0)
        out[i, 1] = cuda.any_sync(0xFFFFFFFF, x[i] > 1)
        out[i, 2] = cuda.all_sync(0xFFFFFFFF, x[i] > -3)
        out[i, 3] = cuda.popc(cuda.activemask())
        out[i, 4] = cuda.shfl_sync(0xFFFFFFFF, i, 5)
        out[i, 5] = cuda.shfl_up_sync(0xFFFFFFFF, i, 3)

    return votes


def test_votes_and_shuffles():
    x, out = random(64), np.zeros((64, 6), np.int64)
    assert not launched(make_votes, 1, 64, x, out).findings
    for i in range(64):
        warp = x[i // 32 * 32 : i // 32 * 32 + 32]
        assert out[i, 0] == sum(1 << n for n in range(32) if warp[n] > 0)
        assert out[i, 1:5].tolist() == [(warp > 1).any(), (warp > -3).all(), 32, i // 32 * 32 + 5]
        assert out[i, 5] == (i if i % 32 < 3 else i - 3)


def make_within_a_warp(cuda, bad=False):
    """Each warp passes numbers on in shared memory; only its own threads must wait."""

    def pass_on(x, out):
        room = cuda.shared.array(64, f32)
        i = cuda.threadIdx.x
        room[i] = x[i]
        cuda.syncwarp()
        out[i] = room[(i // 32 * 32 + (i + 1) % 32) if not bad else (i + 1) % 64]

    return pass_on


def make_dynamic(cuda):
    """Half the threads are gone, without a barrier after that; a function leaves early."""

    @cuda.jit(device=True)
    def root(x):
        if x < 0:
            return f32(0)
        return math.sqrt(x)

    def dynamic(x, out):
        room = cuda.shared.array(0, f32)
        i = cuda.threadIdx.x
        room[i] = root(x[i])
        cuda.syncthreads()
        if i >= 16:
            return
        out[i] = room[31 - i]

    return dynamic


def test_barriers_of_a_warp_and_dynamic_shared_memory():
    x, out = random(64), np.zeros(64, f32)
    assert not launched(make_within_a_warp, 1, 64, x, out).findings
    assert np.array_equal(out.reshape(2, 32), np.roll(x.reshape(2, 32), -1, axis=1))
    out = np.zeros(32, f32)
    assert not launched(make_dynamic, 1, 32, x, out, dynamic=128).findings
    expected = np.sqrt(np.maximum(x[:32], 0))[31:15:-1]
    assert np.array_equal(out, np.concatenate([expected, np.zeros(16, f32)]))


# ---- planted faults ------------------------------------------------------------------------------


def make_past_the_end(cuda):
    def kernel(x, out):
        i = cuda.grid(1)
        out[i] = x[i]

    return kernel


def make_negative(cuda):
    def kernel(x, out):
        i = cuda.grid(1)
        if i < x.shape[0]:
            out[i] = x[i - 1]  # a wrap-around in NumPy

    return kernel


def make_unwritten_shared(cuda):
    def kernel(x, out):
        room = cuda.shared.array(32, f32)
        i = cuda.threadIdx.x
        if i < 16:
            room[i] = x[i]
        cuda.syncthreads()
        out[i] = room[i]

    return kernel


def make_unwritten_local(cuda):
    def kernel(x, out):
        mine = cuda.local.array(4, f32)
        for j in range(3):
            mine[j] = x[j]
        out[cuda.threadIdx.x] = mine[3]

    return kernel


def make_all_write_one(cuda):
    def kernel(x, out):
        out[0] = x[cuda.threadIdx.x]

    return kernel


def make_neighbour(cuda):
    def kernel(x, out):
        room = cuda.shared.array(32, f32)
        i = cuda.threadIdx.x
        room[i] = x[i]
        out[i] = room[31 - i]

    return kernel


def make_overwritten(cuda):
    def kernel(x, out):
        room = cuda.shared.array(32, f32)
        i = cuda.threadIdx.x
        room[i] = x[i]
        cuda.syncthreads()
        y = room[31 - i]
        room[i] = y * y
        out[i] = y

    return kernel


def make_blocks_collide(cuda):
    def kernel(x, out):
        i = cuda.threadIdx.x
        out[i] += x[i]  # each block adds to the same sums

    return kernel


def make_barrier_in_a_branch(cuda):
    def kernel(x, out):
        i = cuda.threadIdx.x
        if i < 20:
            cuda.syncthreads()
            out[i] = x[i]

    return kernel


def make_barrier_after_return(cuda):
    def kernel(x, out):
        i = cuda.threadIdx.x
        if i >= 20:
            return
        cuda.syncthreads()
        out[i] = x[i]

    return kernel


def make_barrier_in_a_loop(cuda):
    def kernel(x, out):
        i = cuda.threadIdx.x
        for _ in range(i % 3 + 1):
            cuda.syncthreads()
        out[i] = x[i]

    return kernel


def make_shuffle_in_a_branch(cuda):
    def kernel(x, out):
        i = cuda.threadIdx.x
        if i < 16:
            out[i] = cuda.shfl_down_sync(0xFFFFFFFF, x[i], 1)

    return kernel


def make_shuffle_from_nobody(cuda):
    def kernel(x, out):
        i = cuda.threadIdx.x
        if i < 16:
            out[i] = cuda.shfl_sync(0xFFFF, x[i], i + 8)

    return kernel


def make_too_much_shared(cuda):
    def kernel(x, out):
        room = cuda.shared.array((128, 97), f32)
        room[cuda.threadIdx.x, 0] = f32(0)

    return kernel


def make_endless(cuda):
    def kernel(x, out):
        i = 0
        while x[cuda.threadIdx.x] == x[cuda.threadIdx.x]:
            i += 1

    return kernel


def make_two_atomics_and_a_write(cuda):
    def kernel(x, out):
        i = cuda.threadIdx.x
        cuda.atomic.add(out, 0, x[i])
        if i == 7:
            out[0] = f32(0)

    return kernel


FAULTS = {
    "an index past the end": (make_past_the_end, 3, 32, "out of bounds", ["out[i] = x[i]"]),
    "an index of minus one": (make_negative, 1, 32, "out of bounds", ["x[i - 1]"]),
    "shared memory that nobody wrote": (
        make_unwritten_shared, 1, 32, "uninitialised", ["out[i] = room[i]"]
    ),
    "a register that was not set": (make_unwritten_local, 1, 4, "uninitialised", ["mine[3]"]),
    "all threads write one cell": (make_all_write_one, 1, 8, "race", ["out[0] ="]),
    "no barrier after a write": (
        make_neighbour, 1, 32, "race", ["room[i] = x[i]", "room[31 - i]"]
    ),
    "no barrier before a write": (
        make_overwritten, 1, 32, "race", ["y = room[31 - i]", "room[i] = y * y"]
    ),
    "blocks add to the same cells": (make_blocks_collide, 2, 32, "race", ["out[i] += x[i]"]),
    "a plain write beside atomics": (
        make_two_atomics_and_a_write, 1, 32, "race", ["atomic.add", "out[0] = f32(0)"]
    ),
    "a barrier of the warp for a block": (
        lambda cuda: make_within_a_warp(cuda, bad=True), 1, 64, "race",
        ["room[i] = x[i]", "out[i] = room"],
    ),
    "a barrier in a branch": (make_barrier_in_a_branch, 1, 32, "barrier", ["syncthreads"]),
    "a barrier after a return": (make_barrier_after_return, 1, 32, "barrier", ["syncthreads"]),
    "more barriers for some": (make_barrier_in_a_loop, 1, 32, "barrier", ["syncthreads"]),
    "a shuffle in a branch": (
        make_shuffle_in_a_branch, 1, 32, "divergent warp", ["shfl_down_sync"]
    ),
    "a shuffle from nobody": (make_shuffle_from_nobody, 1, 32, "divergent warp", ["shfl_sync"]),
    "too much static shared memory": (
        make_too_much_shared, 1, 32, "shared memory", ["cuda.shared.array"]
    ),
    "too many threads": (make_past_the_end, 1, 1025, "block size", ["def kernel"]),
    "a loop without an end": (make_endless, 1, 1, "endless loop", []),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_is_found_and_named(name, monkeypatch):
    monkeypatch.setattr("minitransformer.sparse.cuda.lockstep.MOST_TURNS", 100)
    make, grid, block, kind, lines = FAULTS[name]
    size = 1100 if name == "too many threads" else 64
    report = launched(make, grid, block, random(size), np.zeros(size, f32))
    assert report.kinds == {kind}, text_of(report)
    said = text_of(report)
    for line in lines:
        assert line in said, f"the report does not show {line!r}:\n{said}"


@pytest.mark.parametrize("bad", ["no first barrier", "no second barrier"])
@pytest.mark.parametrize("seed", range(3))
def test_a_forgotten_barrier_is_a_race_in_any_order(bad, seed):
    a, b, out = random(32, 32), random(32, 32), np.zeros((32, 32), f32)
    cuda = Simulator(seed)
    cuda.jit(make_product(cuda, bad=bad))[(2, 2), (16, 16)](a, b, out)
    assert cuda.report.kinds == {"race"}
    found = {(f.lines, f.text.split(" by ")[0].split("[")[0]) for f in cuda.report.findings}
    assert any("left" in text for _, text in found) and any("right" in text for _, text in found)


def test_with_raises_a_fault_is_an_error_that_shows_the_report():
    cuda = Simulator(raises=True)
    kernel = cuda.jit(make_negative(cuda))
    with pytest.raises(KernelError, match=r"read of x\[-1\], of shape \(8,\), by thread 0"):
        kernel[1, 8](random(8), np.zeros(8, f32))


def test_dynamic_shared_memory_has_a_limit():
    report = launched(make_dynamic, 1, 32, random(32), np.zeros(32, f32), dynamic=300_000)
    assert report.kinds == {"shared memory"}


def test_the_same_seed_gives_the_same_report_and_another_order_of_blocks_another_winner():
    def once(seed):
        out = np.zeros(8, f32)
        report = launched(
            lambda cuda: make_last(cuda), 6, 8, np.arange(48, dtype=f32), out, seed=seed
        )
        return out.tolist(), text_of(report)

    def make_last(cuda):
        def kernel(x, out):
            out[cuda.threadIdx.x] = x[cuda.grid(1)]

        return kernel

    assert once(1) == once(1)
    assert len({str(once(seed)[0]) for seed in range(6)}) > 1


# ---- what it counts ------------------------------------------------------------------------------


def make_copy(cuda, stride):
    def kernel(x, out):
        i = cuda.grid(1)
        out[i] = x[i * stride]

    return kernel


@pytest.mark.parametrize("stride, sectors", [(1, 4), (2, 8), (8, 32), (32, 32)])
def test_sectors_of_global_memory(stride, sectors):
    """32 floats side by side are 4 sectors of 32 bytes; far apart, each is one."""
    x, out = random(32 * 32), np.zeros(32, f32)
    report = launched(lambda cuda: make_copy(cuda, stride), 1, 32, x, out)
    read = report.total("global", "read")
    assert (read.accesses, read.requests, read.cost, read.ideal) == (32, 1, sectors, 4)
    assert report.total("global", "write", "out").cost == 4


def make_transposed(cuda, width, dtype=f32):
    def kernel(out):
        room = cuda.shared.array((32, width), dtype)
        i = cuda.threadIdx.x
        for j in range(32):
            room[i, j] = dtype(i)
        cuda.syncthreads()
        out[i] = room[0, i]

    return kernel


@pytest.mark.parametrize("width, passes", [(32, 32), (33, 1), (34, 2), (40, 8)])
def test_passes_over_the_banks(width, passes):
    """A column of a 32 x 32 tile lies in one bank; one more entry in each row spreads it."""
    report = launched(lambda cuda: make_transposed(cuda, width), 1, 32, np.zeros(32, f32))
    write, read = (report.total("shared", kind, "room") for kind in ("write", "read"))
    assert (write.accesses, write.requests, write.cost) == (32 * 32, 32, 32 * passes)
    assert (read.cost, read.ideal) == (1, 1)
    assert report.shared_bytes == 32 * width * 4


def test_wide_entries_are_served_half_a_warp_at_a_time():
    make = lambda cuda: make_transposed(cuda, 40, np.float64)  # noqa: E731
    report = launched(make, 1, 32, np.zeros(32, np.float64))
    assert report.total("shared", "read").cost == 2


def test_branches_that_divide_a_warp_are_counted():
    report = launched(make_barrier_after_return, 1, 64, random(64), np.zeros(64, f32))
    assert list(report.branches.values()) == [[2, 1]]


# ---- what a kernel may not be --------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, message",
    [
        ("[j for j in x]", "ListComp"),
        ("x[1:2]", "Slice"),
        ("a = b = 1", "one target"),
        ("for j in x:\n            pass", r"loops run over range"),
        ("try:\n            pass\n        except ValueError: pass", "Try"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(body, message, tmp_path):
    path, scope = tmp_path / "kernel.py", {}
    path.write_text(f"def make(cuda):\n    def kernel(x):\n        {body}\n    return kernel\n")
    exec(compile(path.read_text(), str(path), "exec"), scope)
    cuda = Simulator()
    with pytest.raises(SyntaxError, match=f"kernel.py:3: .*{message}"):
        cuda.jit(scope["make"](cuda))


def test_arrays_must_be_contiguous_and_indices_complete():
    cuda = Simulator()
    kernel = cuda.jit(make_past_the_end(cuda))
    with pytest.raises(TypeError, match="x must be C-contiguous"):
        kernel[1, 4](random(8)[::2], np.zeros(4, f32))
    with pytest.raises(IndexError, match="x has 2 axes, got 1"):
        kernel[1, 4](random(8, 2), np.zeros(8, f32))
