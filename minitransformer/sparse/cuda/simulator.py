"""A CUDA simulator that reports: it runs a kernel's own source on any machine, and says what a GPU
would not.

    cuda = Simulator(seed=0)
    kernel = cuda.jit(make_kernel(cuda))     # a factory receives `cuda`, here or on a GPU
    kernel[grid, block](x, y)
    print(text(cuda.report))

Blocks run one after another in an order drawn from the seed, the threads of a block together
(`lockstep`). Found and named, with the lines: indices out of bounds, reads of what nobody wrote,
races (`memory`), barriers that some threads miss, warp operations that some threads miss, loops
without end, too much shared memory and too many threads. Counted: reads and writes of each line and
what they cost, branches that divide a warp.
"""

import itertools
import linecache
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from minitransformer.sparse.cuda.lockstep import EndlessLoop, rewritten
from minitransformer.sparse.cuda.memory import (
    NEVER,
    WARP,
    Local,
    Memory,
    Observed,
    Report,
    as_tuple,
    poison,
)

MOST_THREADS, MOST_STATIC, MOST_SHARED = 1024, 48 * 1024, 227 * 1024
FULL = 0xFFFFFFFF


class KernelError(Exception):
    """A launch with findings, of a simulator that `raises`; the text is that of the report."""


class Dim3(NamedTuple):
    x: Any
    y: Any
    z: Any


class Block(Observed):
    """A block: threads with barriers, warps and shared memory."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.shared: dict[tuple, Memory] = {}
        self.static = 0  # bytes of it

    @property
    def line(self) -> int:
        return self.place[0]

    def barrier(self):
        self.report.barriers[self.line] += 1
        missing = 0 if self.active is None else self.count - int(self.active.sum())
        if missing:
            text = f"{missing} of {self.count} threads of block {self.number} do not come"
            self.report.add("barrier", text, self.line)
        self.now += 1

    def divided(self, line, yes, no):
        yes, no = self.by_warp(yes).any(axis=1), self.by_warp(no).any(axis=1)
        row = self.report.branches.setdefault(line, [0, 0])
        row[0] += int((yes | no).sum())
        row[1] += int((yes & no).sum())

    # ---- warps

    def by_warp(self, value):
        """One entry a thread, or one for all, as (warps, 32); threads that are not there have 0."""
        value = np.broadcast_to(np.asarray(value), (self.count,))
        room = np.zeros(self.warps * WARP, value.dtype)
        room[: self.count] = value
        return room.reshape(self.warps, WARP)

    def by_thread(self, value):
        return value.reshape(-1)[: self.count]

    def together(self, named):
        """Who executes a warp operation, (warps, 32); it must be those whom the mask names."""
        exist = self.by_warp(True)
        here = exist if self.active is None else self.by_warp(self.active)
        bits = np.where(here, self.by_warp(np.asarray(named, np.int64)), 0).max(axis=1)
        wanted = (bits[:, None] >> np.arange(WARP) & 1).astype(np.bool_) & exist
        some = here.any(axis=1)
        row = self.report.warp_operations.setdefault(self.line, [0, 0])
        row[0] += int(some.sum())
        row[1] += int((some & (here != exist).any(axis=1)).sum())
        if (wanted != here)[some].any():
            text = "a warp operation is not executed by exactly the threads that its mask names"
            self.report.add("divergent warp", text, self.line)
        return here

    def shuffle(self, named, value, source):
        here, source = self.together(named), self.by_warp(source(self.lanes % WARP))
        if (here & ~np.take_along_axis(here, source, axis=1)).any():
            text = "a shuffle reads from a thread that is not there"
            self.report.add("divergent warp", text, self.line)
        return self.by_thread(np.take_along_axis(self.by_warp(value), source, axis=1))

    def vote(self, named, value, decide):
        """`decide(true, here)`, both (warps, 32), gives one answer for each warp."""
        here = self.together(named)
        answer = decide(self.by_warp(value).astype(np.bool_) & here, here)
        return self.by_thread(np.repeat(answer, WARP))


def _bits(true: np.ndarray, here: np.ndarray) -> np.ndarray:
    return (true.astype(np.int64) << np.arange(WARP)).sum(axis=1)


# ---- the namespace that a factory receives -------------------------------------------------------


class Simulator:
    """What a kernel knows as `cuda`.

    `report` tells of the last launch, `reports` of all. With `raises` a launch that has findings
    raises a KernelError; with `counts=False` accesses are not counted, which is faster.
    """

    warpsize = WARP

    def __init__(self, seed: int = 0, *, raises: bool = False, counts: bool = True):
        self.seed, self.raises, self.counts = seed, raises, counts
        self.reports: list[Report] = []
        self.block: Any = None  # the one that runs
        self.threadIdx = self.blockIdx = Dim3(0, 0, 0)
        self.blockDim = self.gridDim = Dim3(1, 1, 1)
        self.dynamic = 0  # bytes of shared memory that the launch paid for
        self.shared = SimpleNamespace(array=self._shared_array)
        self.local = SimpleNamespace(array=self._local_array)
        self.atomic = SimpleNamespace(
            add=self._atomic(lambda old, x: old + x),
            sub=self._atomic(lambda old, x: old - x),
            max=self._atomic(max),
            min=self._atomic(min),
            exch=self._atomic(lambda old, x: x),
        )

    @property
    def report(self) -> Report:
        return self.reports[-1]

    def jit(self, function: Callable | None = None, *, device: bool = False, **_: Any) -> Any:
        """A kernel to launch, or with `device` a function for kernels to call. Other options are
        for compilers."""
        if function is None:
            return lambda f: self.jit(f, device=device)
        if not device:
            return Kernel(self, function)
        run = rewritten(function, self)
        return lambda *arguments: self.block.within(run, arguments)

    # ---- where a thread is

    def grid(self, ndim: int) -> Any:
        sides = zip(self.blockIdx, self.blockDim, self.threadIdx, strict=True)
        at = tuple(block * size + thread for block, size, thread in sides)
        return at[0] if ndim == 1 else at[:ndim]

    def gridsize(self, ndim: int) -> Any:
        size = tuple(g * n for g, n in zip(self.gridDim, self.blockDim, strict=True))
        return size[0] if ndim == 1 else size[:ndim]

    @property
    def laneid(self) -> Any:
        return self.block.lanes % WARP

    # ---- memory that is not an argument

    def _shared_array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Memory:
        """One for each place in the source. Shape 0: as many as the launch paid for."""
        block, place, size = self.block, self.block.place, np.dtype(dtype).itemsize
        if place in block.shared:
            return block.shared[place]
        dynamic = as_tuple(shape) == (0,)
        data = poison((self.dynamic // size,) if dynamic else as_tuple(shape), dtype)
        block.shared[place] = Memory("shared", place[2] or f"shared{place[1]}", data)
        block.static += 0 if dynamic else data.nbytes
        block.report.shared_bytes = max(block.report.shared_bytes, block.static)
        if block.static > MOST_STATIC:
            text = f"{block.static} bytes of static shared memory, at most {MOST_STATIC}"
            block.report.add("shared memory", text, place[0])
        return block.shared[place]

    def _local_array(self, shape: Any, dtype: Any) -> Local:
        return Local(as_tuple(shape), dtype, self.block.count)

    def _atomic(self, change: Callable) -> Callable:
        def operation(a: Memory, index: Any, value: Any) -> Any:
            block = self.block
            lanes, cells = block.cells(a, index, block.line, "atomic")
            if a.space == "shared" and (a.written["who"][cells] == NEVER).any():
                text = f"{a.name} is changed before it is written"
                block.report.add("uninitialised", text, block.line)
            values = np.broadcast_to(value, (block.count,))[lanes]
            old = np.zeros(len(lanes), a.dtype)
            for n in np.random.default_rng(self.seed).permutation(len(lanes)):
                old[n] = a.flat[cells[n]]
                a.flat[cells[n]] = change(old[n], values[n])
            block.note_write(a, cells, lanes, block.line, atomic=True)
            block.count_access(a, cells, lanes, block.line, "atomic")
            return block.spread(old, lanes)

        return operation

    # ---- barriers and warps

    def syncthreads(self) -> None:
        self.block.barrier()

    def syncwarp(self, mask: Any = FULL) -> None:
        self.block.warp_time[self.block.together(mask).any(axis=1)] += 1

    def activemask(self) -> Any:
        here = self.block.by_warp(self.block.active is None or self.block.active)
        return self.block.by_thread(np.repeat(_bits(here, here), WARP))

    def shfl_sync(self, mask: Any, value: Any, lane: Any) -> Any:
        return self.block.shuffle(mask, value, lambda mine: lane % WARP + mine * 0)

    def shfl_xor_sync(self, mask: Any, value: Any, bits: Any) -> Any:
        return self.block.shuffle(mask, value, lambda mine: mine ^ bits)

    def shfl_up_sync(self, mask: Any, value: Any, by: Any) -> Any:
        return self.block.shuffle(mask, value, lambda mine: np.where(mine < by, mine, mine - by))

    def shfl_down_sync(self, mask: Any, value: Any, by: Any) -> Any:
        end = WARP - by
        return self.block.shuffle(mask, value, lambda mine: np.where(mine < end, mine + by, mine))

    def all_sync(self, mask: Any, value: Any) -> Any:
        return self.block.vote(mask, value, lambda true, here: (true == here).all(axis=1))

    def any_sync(self, mask: Any, value: Any) -> Any:
        return self.block.vote(mask, value, lambda true, here: true.any(axis=1))

    def ballot_sync(self, mask: Any, value: Any) -> Any:
        return self.block.vote(mask, value, _bits)

    # ---- arithmetic

    def popc(self, x: Any) -> Any:
        return np.bitwise_count(np.asarray(x) & FULL).astype(np.int64)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return a * b + c

    def selp(self, c: Any, a: Any, b: Any) -> Any:
        return np.where(c, a, b)


# ---- launches ------------------------------------------------------------------------------------


class Kernel:
    """`kernel[grid, block](...)` launches it; a third entry is a stream, a fourth the bytes of
    dynamic shared memory."""

    def __init__(self, simulator: Simulator, function: Callable):
        self.simulator, self.py_func = simulator, function
        self.run = rewritten(function, simulator)
        self.code = self.run.__code__
        self.names = self.code.co_varnames[1 : self.code.co_argcount]

    def __getitem__(self, configuration: tuple) -> Callable:
        grid, block, _, dynamic = (
            (*configuration, None, 0)[:4] if len(configuration) < 4 else configuration
        )
        return lambda *arguments: self.launch(_dim3(grid), _dim3(block), dynamic, arguments)

    def launch(self, grid: Dim3, block: Dim3, dynamic: int, arguments: tuple) -> None:
        cuda, report = self.simulator, Report(self.code.co_name, self.code.co_filename)
        cuda.reports.append(report)
        if (threads := math.prod(block)) > MOST_THREADS:
            text = f"{threads} threads in a block, at most {MOST_THREADS}"
            report.add("block size", text, self.code.co_firstlineno)
        if dynamic > MOST_SHARED:
            text = f"{dynamic} bytes of dynamic shared memory, at most {MOST_SHARED}"
            report.add("shared memory", text, self.code.co_firstlineno)
        if not report.found:
            cuda.blockDim, cuda.gridDim, cuda.dynamic = block, grid, dynamic
            self.execute(report, threads, arguments)
        if cuda.raises and report.found:
            raise KernelError(text_of(report))

    def execute(self, report: Report, threads: int, arguments: tuple) -> None:
        cuda, now = self.simulator, 0
        named = zip(self.names, arguments, strict=True)
        given = [
            Memory("global", name, x) if isinstance(x, np.ndarray) and x.ndim else x
            for name, x in named
        ]
        z, y, x = np.indices(cuda.blockDim[::-1]).reshape(3, -1)
        cuda.threadIdx = Dim3(*(i if i.any() else 0 for i in (x, y, z)))
        blocks = list(itertools.product(*map(range, cuda.gridDim)))
        with np.errstate(all="ignore"):  # threads that are not there compute, too
            for number in np.random.default_rng(cuda.seed).permutation(len(blocks)).tolist():
                cuda.blockIdx = Dim3(*blocks[number])
                cuda.block = Block(number, threads, report, start=now, counts=cuda.counts)
                try:
                    self.run(cuda.block, *given)
                except EndlessLoop as why:
                    report.add("endless loop", str(why), cuda.block.line)
                    return
                now = cuda.block.now + 1


def _dim3(size: int | tuple[int, ...]) -> Dim3:
    return Dim3(*(*as_tuple(size), 1, 1)[:3])


def text_of(report: Report) -> str:
    """What was found, with the source lines, then what each line costs."""
    out = [f"{report.kernel}: {len(report.found)} findings"]
    for f in report.findings:
        out.append(f"{f.kind}: {f.text} ({f.times} times)")
        lines = dict.fromkeys(f.lines)
        out += [f"    line {n}: {linecache.getline(report.file, n).strip()}" for n in lines]
    for (space, name, what, n), s in sorted(report.sites.items(), key=lambda item: item[0][3]):
        unit = "sectors" if space == "global" else "passes"
        out.append(
            f"line {n}: {s.accesses} {what}s of {space} {name} in {s.requests} requests, "
            f"{s.cost} {unit}, {s.ideal} at best"
        )
    for name, table in (("branch", report.branches), ("warp operation", report.warp_operations)):
        for n, (warps, divided) in sorted(table.items()):
            out.append(f"line {n}: {name} of {warps} warps, {divided} divided")
    out.append(f"{report.shared_bytes} bytes of static shared memory")
    return "\n".join(out)
