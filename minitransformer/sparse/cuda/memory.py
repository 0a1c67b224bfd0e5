"""Arrays that remember who touched them: races, reads of nothing, indices outside, and what an
access costs.

A race does not depend on the order in which the simulator runs: two threads touch a cell, one of
them writes, and no barrier stands between. Each cell keeps its last writer and reader, the barriers
so far (`when`; of the warp, `warp`), and the line.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from minitransformer.sparse.cuda.lockstep import Lanes, Threads

WARP, SECTOR, BANKS, WORD = 32, 32, 32, 4
NEVER, SEVERAL = -1, -2
TRACES = ("who", "when", "warp", "line")


class Finding(NamedTuple):
    """Something that is wrong with a kernel: what, on which lines, how often."""

    kind: str
    text: str
    lines: tuple[int, ...]
    times: int = 1


@dataclass
class Site:
    """One line's accesses to one array: of threads, in requests of warps, what they cost, and what
    they would if neighbours stood side by side: sectors of 32 bytes of global memory, passes over
    the 32 banks of shared memory."""

    accesses: int = 0
    requests: int = 0
    cost: int = 0
    ideal: int = 0


@dataclass
class Report:
    """What one launch did."""

    kernel: str
    file: str
    found: dict[tuple, Finding] = field(default_factory=dict)
    sites: dict[tuple[str, str, str, int], Site] = field(default_factory=dict)
    branches: dict[int, list[int]] = field(default_factory=dict)  # line: warps, of these divided
    warp_operations: dict[int, list[int]] = field(default_factory=dict)  # the same
    barriers: Counter = field(default_factory=Counter)  # by line, each block for itself
    shared_bytes: int = 0  # static, of one block

    @property
    def findings(self) -> list[Finding]:
        return list(self.found.values())

    @property
    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.findings}

    def total(self, space: str, kind: str, array: str | None = None) -> Site:
        """The "read"s, "write"s or "atomic"s of "global" or "shared" memory over all lines, of one
        array or of all."""
        mine = [
            site
            for (where, name, what, _), site in self.sites.items()
            if (where, what) == (space, kind) and array in (None, name)
        ]
        return Site(*(sum(getattr(s, f) for s in mine) for f in Site.__dataclass_fields__))

    def add(self, kind: str, text: str, *lines: int, count: int = 1) -> None:
        """Said once for each kind and lines; what comes again is counted."""
        first = self.found.get((kind, *lines), Finding(kind, text, lines, 0))
        self.found[kind, *lines] = first._replace(times=first.times + count)


# ---- arrays --------------------------------------------------------------------------------------


class Local:
    """An array of which every thread has its own: registers, if all goes well."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, threads: int):
        self.name, self.shape = "a local array", shape
        self.data = poison((math.prod(shape), threads), dtype)
        self.known = np.zeros(self.data.shape, np.bool_)

    def __len__(self) -> int:
        return self.shape[0]


class Memory:
    """A global or shared array."""

    def __init__(self, space: str, name: str, data: np.ndarray):
        if not data.flags.c_contiguous:
            raise TypeError(f"{name} must be C-contiguous")
        self.space, self.name, self.flat = space, name, data.reshape(-1)
        self.shape, self.ndim, self.dtype, self.size = data.shape, data.ndim, data.dtype, data.size
        self.written, self.read = ({k: np.full(self.size, NEVER) for k in TRACES} for _ in range(2))
        self.crowd = np.zeros(self.size, np.bool_)  # read by several threads since the barrier
        self.atomic = np.zeros(self.size, np.bool_)  # the last write was
        self.readers = np.full(self.size, NEVER)  # which block reads it, or SEVERAL

    def __len__(self) -> int:
        return self.shape[0]


def poison(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """What nobody has written: NaN, or a number that no index should be."""
    dtype = np.dtype(dtype)
    return np.full(shape, np.nan if dtype.kind in "fc" else np.iinfo(dtype).max // 3, dtype)


# ---- reads and writes ----------------------------------------------------------------------------


class Observed(Threads):
    """Threads of block `number` whose reads and writes are looked at."""

    def __init__(self, number: int, count: int, report: Report, *, start: int, counts: bool):
        super().__init__(count)
        self.number, self.report, self.counts = number, report, counts
        self.lanes, self.warps = np.arange(count), -(-count // WARP)
        self.who = self.lanes + number * count  # the thread in the launch
        self.now = start  # barriers so far, of all blocks
        self.warp_time = np.zeros(self.warps, np.int64)  # barriers of each warp

    def load(self, a, index, line):
        if not isinstance(a, Memory | Local):
            return a[index]  # a tuple, such as a shape
        uniform = not any(isinstance(i, Lanes) for i in as_tuple(index))
        lanes, cells = self.cells(a, index, line, "read")
        if isinstance(a, Local):
            known, values = a.known[cells, lanes], a.data[cells, lanes]
            if not known.all():
                self.report.add("uninitialised", f"{a.name} is read before it is written", line)
            return self.spread(values, lanes)
        self.note_read(a, cells, lanes, line)
        self.count_access(a, cells, lanes, line, "read")
        if uniform and len(lanes):
            return a.flat[cells[0]].item() if a.dtype.kind in "iu" else a.flat[cells[0]]
        return self.spread(a.flat[cells], lanes)

    def store(self, a, index, value, line):
        if not isinstance(a, Memory | Local):
            raise TypeError(f"line {line}: {type(a).__name__} cannot be written to")
        lanes, cells = self.cells(a, index, line, "write")
        values = value[lanes] if isinstance(value, Lanes) else value
        if isinstance(a, Local):
            a.data[cells, lanes], a.known[cells, lanes] = values, True
        else:
            a.flat[cells] = values
            self.note_write(a, cells, lanes, line)
            self.count_access(a, cells, lanes, line, "write")

    def update(self, a, index, change, line):
        self.store(a, index, change(self.load(a, index, line)), line)

    def cells(self, a, index, line, what):
        """The active threads whose index lies inside, and the cell of each."""
        index = as_tuple(index)
        if len(index) != len(a.shape):
            raise IndexError(f"line {line}: {a.name} has {len(a.shape)} axes, got {len(index)}")
        lanes = self.lanes if self.active is None else np.flatnonzero(self.active)
        cells, inside = 0, True
        for i, size in zip(index, a.shape, strict=True):
            if isinstance(i, Lanes):
                i = i[lanes]
                if len(i) and (i.min() < 0 or i.max() >= size):
                    inside = inside & (i >= 0) & (i < size)
            elif not 0 <= i < size:
                inside = np.zeros(len(lanes), np.bool_)
            cells = cells * size + i
        if not isinstance(cells, Lanes):
            cells = np.full(lanes.shape, cells)
        if inside is not True and len(lanes):
            lane = lanes[~inside][0]
            at = [int(i[lane]) if isinstance(i, Lanes) else int(i) for i in index]
            self.report.add(
                "out of bounds",
                f"{what} of {a.name}{at}, of shape {a.shape}, by {self.thread(lane)}",
                line,
                count=int((~inside).sum()),
            )
            lanes, cells = lanes[inside], cells[inside]
        return lanes, cells

    def spread(self, values, lanes):
        """`values` of the active threads as an array of all."""
        if len(lanes) == self.count:
            return values
        out = np.zeros(self.count, values.dtype)
        out[lanes] = values
        return out

    def thread(self, lane):
        return f"thread {int(lane)} of block {self.number}"

    # ---- who touched what

    def note_read(self, a, cells, lanes, line):
        who, trace = self.who[lanes], a.read
        if a.space == "shared" and (unknown := a.written["who"][cells] == NEVER).any():
            text = f"{a.name} is read before it is written, by {self.thread(lanes[unknown][0])}"
            self.report.add("uninitialised", text, line, count=int(unknown.sum()))
        self.race("write/read", a, a.written, cells, lanes, line)
        fresh = trace["when"][cells] != self.now
        others = ~fresh & (trace["who"][cells] != who)
        a.crowd[cells[fresh]] = False
        self.stamp(trace, cells, lanes, line)
        a.crowd[cells[others | (trace["who"][cells] != who)]] = True
        if a.space == "global":
            readers = a.readers[cells]
            a.readers[cells] = np.where(
                (readers == NEVER) | (readers == self.number), self.number, SEVERAL
            )

    def note_write(self, a, cells, lanes, line, atomic=False):
        self.race("write/write", a, a.written, cells, lanes, line, a.atomic if atomic else None)
        self.race("read/write", a, a.read, cells, lanes, line)
        self.stamp(a.written, cells, lanes, line)
        a.atomic[cells] = atomic
        twice = a.written["who"][cells] != self.who[lanes]  # another one wrote after it
        if twice.any() and not atomic:
            cell, lane = cells[twice][0], lanes[twice][0]
            other = a.written["who"][cell]
            self.report_race("write/write", a, cell, line, line, lane, other, int(twice.sum()))

    def stamp(self, trace, cells, lanes, line):
        trace["who"][cells], trace["when"][cells] = self.who[lanes], self.now
        trace["warp"][cells], trace["line"][cells] = self.warp_time[lanes // WARP], line

    def race(self, kind, a, trace, cells, lanes, line, forgiven=None):
        """Report another thread that touched these cells, if nothing orders it and this one."""
        other, recent = trace["who"][cells], trace["when"][cells] == self.now
        crowd = recent & a.crowd[cells] & (kind == "read/write")
        bad = recent & (other != self.who[lanes])
        if bad.any():  # a barrier of the warp orders its own threads
            mine = (other % self.count) // WARP == lanes // WARP
            bad &= ~(mine & (trace["warp"][cells] != self.warp_time[lanes // WARP]))
        bad |= crowd
        if a.space == "global":  # nothing orders two blocks
            bad |= (other != NEVER) & (other // self.count != self.number)
            if kind == "read/write":
                bad |= (a.readers[cells] != NEVER) & (a.readers[cells] != self.number)
        if forgiven is not None:
            bad &= ~forgiven[cells]
        if bad.any():
            cell, lane = cells[bad][0], lanes[bad][0]
            first = int(trace["line"][cell])
            other = trace["who"][cell]
            self.report_race(kind, a, cell, first, line, lane, other, int(bad.sum()))

    def report_race(self, kind, a, cell, first, line, lane, other, count):
        at = [int(i) for i in np.unravel_index(int(cell), a.shape)]
        block = f"thread {int(other) % self.count} of block {int(other) // self.count}"
        text = f"{kind} of {a.name}{at} by {block} and {self.thread(lane)}, unordered"
        self.report.add("race", text, first, line, count=count)

    # ---- what it costs

    def count_access(self, a, cells, lanes, line, what):
        if not self.counts or not len(lanes):
            return
        site = self.report.sites.setdefault((a.space, a.name, what, line), Site())
        size, first = a.dtype.itemsize, int(cells.min())
        start = first * size % SECTOR if a.space == "global" else 0  # all banks are alike
        requests, cost, ideal = _cost(
            a.space, size, start, (cells - first).tobytes(), lanes.tobytes()
        )
        site.accesses += len(lanes)
        site.requests += requests
        site.cost += cost
        site.ideal += ideal


@functools.lru_cache(maxsize=1 << 14)
def _cost(
    space: str, size: int, start: int, cells_of: bytes, lanes_of: bytes
) -> tuple[int, int, int]:
    """Requests of warps, what they cost and what they would at best; the same few patterns come
    again and again."""
    cells, lanes = np.frombuffer(cells_of, np.int64), np.frombuffer(lanes_of, np.int64)
    per_warp = np.bincount(lanes // WARP)
    requests = int(np.count_nonzero(per_warp))
    if space == "global":
        sectors = _distinct((lanes // WARP << 40) + (cells * size + start) // SECTOR)
        return requests, len(sectors), int((-(-per_warp * size // SECTOR)).sum())
    # entries wider than a word are served to half a warp at a time, or a quarter
    turn = lanes // (WARP * WORD // max(size, WORD))
    words = cells[:, None] * size // WORD + np.arange(max(size // WORD, 1))
    word = _distinct(((turn[:, None] << 40) + words).ravel())
    busy = np.bincount((word >> 40) * BANKS + word % BANKS, minlength=(int(turn[-1]) + 1) * BANKS)
    return requests, int(busy.reshape(-1, BANKS).max(axis=1).sum()), len(_distinct(turn))


def as_tuple(index: Any) -> tuple:
    return index if isinstance(index, tuple) else (index,)


def _distinct(x: np.ndarray) -> np.ndarray:
    x = np.sort(x)
    return x[np.concatenate([[True], x[1:] != x[:-1]])]
