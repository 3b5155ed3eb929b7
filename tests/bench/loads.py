"""One rank of `restore.py`: saves once, then restores over and over, from memory and from disk.

Started by torchrun; rank 0 prints one JSON line. Beside each restore from memory a plain copy of as
many bytes is timed, beside each from disk a plain read of the same files, which nobody has cached
in either case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.saves import Measure, together

_CHUNK = 8 * 2**20


class Loads:
    """The measurements of one rank, all ranks at once."""

    def __init__(self, size_gb: float, folder: Path) -> None:
        measure = Measure(size_gb, folder)
        self.loop, self.copy, self.saver = measure.loop, measure.copy, measure.saver
        self.saver.start(0)
        self.saver.staged()
        while not self.loop.agreed(self.saver.done()):
            time.sleep(0.01)
        self.expected = self.loop.expected()
        largest = max(path.stat().st_size for path in self._files())
        self._buffer = memoryview(bytearray(largest))

    def once(self) -> dict[str, float]:
        """Return the times of each kind, of the slowest rank."""
        found = {"copy_s": together(self.copy()), "memory_s": self._restore("memory")}
        self._forget()
        found["read_s"] = self._read()
        self._forget()
        found["disk_s"] = self._restore("disk")
        return found

    def _restore(self, tier: str) -> float:
        for tensor in self.loop.state.values():
            tensor.zero_()
        dist.barrier()
        begin = time.monotonic()
        self.saver.restore(0, tier)
        took_s = together(time.monotonic() - begin)
        if not all(torch.equal(t, self.expected) for t in self.loop.state.values()):
            raise RuntimeError(f"what came from {tier} is not what was saved")
        return took_s

    def _read(self) -> float:
        dist.barrier()
        begin = time.monotonic()
        for path in self._files():
            with path.open("rb", buffering=0) as file:
                at = 0
                while count := file.readinto(self._buffer[at : at + _CHUNK]):
                    at += count
        return together(time.monotonic() - begin)

    def _files(self) -> list[Path]:
        return [self.saver.files(0) / f"__{self.loop.rank}_0.distcp"]

    def _forget(self) -> None:
        dist.barrier()
        for path in self._files():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        dist.barrier()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size-gb", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    loads = Loads(asked.size_gb, asked.folder)
    loads.once()
    times = [loads.once() for _ in range(asked.repeats)]
    loads.saver.close()
    if dist.get_rank() == 0:
        print(json.dumps(_summary(times)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _summary(times: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "memory_over_copy": statistics.median(t["memory_s"] / t["copy_s"] for t in times),
        "disk_over_read": statistics.median(t["disk_s"] / t["read_s"] for t in times),
        "copy_s": statistics.median(t["copy_s"] for t in times),
        "read_s": statistics.median(t["read_s"] for t in times),
    }


if __name__ == "__main__":
    main()
