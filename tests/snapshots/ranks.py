"""Ranks without torch: memory that is sealed as theirs is, and a line to the writer."""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from everstep.snapshots.client import WriterLink
from everstep.snapshots.marker import Marker
from everstep.snapshots.orders import Done, FromWriter, PartDone, Write
from everstep.wire.ids import SnapshotId

DEADLINE_S = 30.0
JOB = "job-1"


def memory(data: bytes, *, seals: int = 0x2 | 0x4) -> int:
    """Return a memfd that holds `data`, its size sealed."""
    fd = os.memfd_create("slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, len(data))
    with mmap.mmap(fd, len(data)) as mapped:
        mapped[:] = data
    fcntl.fcntl(fd, 1033, seals)
    return fd


def contents(rank: int, step: int, size_bytes: int = 300_000) -> bytes:
    return random.Random(1000 * step + rank).randbytes(size_bytes)


def facts(step: int, *, generation: int = 1, parts: int = 1, job: str = JOB) -> Marker:
    return Marker(
        id=str(SnapshotId(step, generation)),
        step=step,
        generation=generation,
        job=job,
        world_size=parts,
        seed=0,
        samples=step * 12,
    )


def order(
    place: Path | str,
    step: int,
    *,
    rank: int = 0,
    parts: int = 1,
    generation: int = 1,
    job: str = JOB,
    data: bytes | None = None,
    **more: Any,
) -> Write:
    """Return the order to write `contents(rank, step)`."""
    data = contents(rank, step) if data is None else data
    about = facts(step, generation=generation, parts=parts, job=job)
    given: dict[str, Any] = {
        "slot": 0,
        "place": str(place),
        "file": f"__{rank}_0.distcp",
        "start": 0,
        "size_bytes": len(data),
        "xxh3": xxhash.xxh3_64_hexdigest(data),
        "lead": rank == 0,
        "metadata": b"planned" if rank == 0 else b"",
        "deadline_s": DEADLINE_S,
    }
    return Write(id=about.id, rank=rank, parts=parts, facts=about, **(given | more))


class Rank:
    """One rank at a writer; replies wait in a queue."""

    def __init__(self, path: Path, rank: int = 0, *, job: str = JOB) -> None:
        self.rank = rank
        self.job = job
        self.replies: queue.Queue[FromWriter] = queue.Queue()
        self.link = WriterLink(path, job=job, rank=rank, on_reply=self.replies.put)

    def attach(self, data: bytes, *, slot: int = 0, seals: int = 0x2 | 0x4) -> None:
        fd = memory(data, seals=seals)
        self.link.attach(slot, fd, len(data))
        os.close(fd)

    def order(self, place: Path | str, step: int, **more: Any) -> Write:
        """Put `contents` into the slot and order to write it."""
        data = contents(self.rank, step)
        self.attach(data, slot=more.get("slot", 0))
        made = order(place, step, rank=self.rank, **({"job": self.job} | more))
        self.link.write(made)
        return made

    def part(self) -> PartDone:
        reply = self.replies.get(timeout=DEADLINE_S)
        assert isinstance(reply, PartDone), reply
        return reply

    def done(self) -> Done:
        reply = self.replies.get(timeout=DEADLINE_S)
        assert isinstance(reply, Done), reply
        return reply

    def save(self, place: Path | str, step: int, **more: Any) -> Done:
        """Order and wait until it is finished (rank 0)."""
        self.order(place, step, **more)
        self.part()
        return self.done()

    def close(self) -> None:
        self.link.close()


MakeRank = Callable[..., Rank]
