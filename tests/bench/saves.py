"""One rank of `snapshot.py`: saves from a loop whose forward and backward take two copies' time.

Started by torchrun; rank 0 prints one JSON line with what each save cost the rank worst off. All
times are taken side by side in this process: the copy into warm buffers, the raw write with fsync,
the steps without a save and those around one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.peers.snapshot_everstep import Everstep
from tests.bench.peers.snapshot_loop import Training, sync

_STEPS = 20
_CHUNK = 8 * 2**20


@dataclass(frozen=True)
class Cost:
    """One save, in seconds; `copy_s` and `raw_write_s` were measured just before it."""

    copy_s: float
    raw_write_s: float
    blocked_s: float
    lost_s: float
    durable_s: float
    consistent: bool


class Loop(Training):
    """Steps of a chosen length."""

    def fit(self, compute_s: float) -> None:
        """Make forward and backward take so long."""
        self._products = 20
        product_s = median_of(self.compute) / self._products
        slowest = torch.tensor([product_s])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self._products = max(1, round(compute_s / slowest.item()))


class Measure:
    """All of it, on one rank."""

    def __init__(self, size_gb: float, folder: Path) -> None:
        self.loop = Loop(size_gb)
        self.folder = folder
        self._warm = {name: torch.ones_like(t) for name, t in self.loop.state.items()}
        self.loop.fit(2 * together(self.copy()))
        self.before = memory_bytes()
        self.extra_bytes = 0
        self.saver = Everstep(self.loop, folder / "saves")

    def copy(self) -> float:
        """Return how long it takes to copy the state into warm buffers."""
        pairs = [(self._warm[name], tensor) for name, tensor in self.loop.state.items()]

        def all_of_it() -> None:
            for target, source in pairs:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

        return median_of(all_of_it)

    def raw_write(self) -> float:
        """Return how long it takes to write the state into a file, fsync included."""
        path = self.folder / f"raw-{self.loop.rank}"
        dist.barrier()
        begin = time.monotonic()
        with path.open("wb", buffering=0) as file:
            for tensor in self.loop.state.values():
                raw = tensor.view(torch.uint8).numpy().data
                for start in range(0, len(raw), _CHUNK):
                    file.write(raw[start : start + _CHUNK])
            os.fsync(file.fileno())
        took_s = time.monotonic() - begin
        path.unlink()
        return together(took_s)

    def save(self, number: int) -> Cost:
        """Save once, in the middle of 20 steps, and compare these with 20 others."""
        copy_s, raw_write_s = together(self.copy()), self.raw_write()
        before_s = self._steps(None)
        expected = self.loop.expected()
        saving = _Saving(self.saver, number)
        with_save_s = self._steps(saving)
        while not self.loop.agreed(self.saver.done()):
            self.loop.step()
            saving.look()
        after_s = self._steps(None)
        self.extra_bytes = memory_bytes() - self.before
        sync(self.saver.files(number))
        loaded = self.saver.load(number)
        consistent = all(torch.equal(loaded[name], expected) for name in self.loop.state)
        dist.barrier()
        if self.loop.rank == 0:
            shutil.rmtree(self.saver.files(number))
        dist.barrier()
        return Cost(
            copy_s,
            raw_write_s,
            saving.blocked_s,
            with_save_s - (before_s + after_s) / 2,
            saving.durable_s,
            consistent,
        )

    def _steps(self, saving: _Saving | None) -> float:
        dist.barrier()
        begin = time.monotonic()
        for number in range(_STEPS):
            if saving and number == 0:
                saving.start()
            self.loop.compute()
            if saving:
                saving.staged()
            self.loop.update()
            self.loop.agreed(True)
            if saving:
                saving.look()
        return time.monotonic() - begin


class _Saving:
    """A save that is under way, and its times."""

    def __init__(self, saver: Everstep, number: int) -> None:
        self._saver, self._number = saver, number
        self.blocked_s = self.durable_s = 0.0

    def start(self) -> None:
        self._begin = time.monotonic()
        self._saver.start(self._number)
        self.blocked_s = time.monotonic() - self._begin

    def staged(self) -> None:
        begin = time.monotonic()
        self._saver.staged()
        self.blocked_s += time.monotonic() - begin

    def look(self) -> None:
        ended_s = self._saver.ended_s()
        if ended_s is not None:
            self.durable_s = ended_s - self._begin


def together(value: float) -> float:
    """Return the largest of all ranks' values."""
    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box.item())


def median_of(call: Callable[[], None]) -> float:
    """Return the median time of a few calls."""
    times = []
    for _ in range(7):
        begin = time.monotonic()
        call()
        times.append(time.monotonic() - begin)
    return statistics.median(times)


def memory_bytes() -> int:
    """Return what this process has in memory, the slots that its writer maps too included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size-gb", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    measure = Measure(asked.size_gb, asked.folder)
    measure.save(0)  # pays for what is set up once
    costs = [asdict(measure.save(number)) for number in range(1, asked.repeats + 1)]
    extra = measure.extra_bytes / sum(t.nbytes for t in measure.loop.state.values())
    mine = {"costs": costs, "extra": extra, "step_s": measure.loop.step()}
    everybodys: list[dict[str, object]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    measure.saver.close()
    if dist.get_rank() == 0:
        print(json.dumps(everybodys), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
