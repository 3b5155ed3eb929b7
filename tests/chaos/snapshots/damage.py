"""What is done to files and memory, and what is seen in memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from pathlib import Path

from everstep.snapshots import marker
from everstep.snapshots.sealed import SnapshotError
from everstep.trainer.snapshot.layout import TABLE_START
from everstep.trainer.snapshot.slot import Slot
from everstep.wire import memory
from everstep.wire.ids import SnapshotId

_FILLER = "filler"


def spoil(folder: Path, rng: random.Random, *, cut: bool) -> None:
    """Damage one file of a snapshot, if there is one yet."""
    files = sorted(p for p in folder.glob("*") if p.stat().st_size)
    if not files:
        return
    path = rng.choice(files)
    size = path.stat().st_size
    if cut:
        os.truncate(path, rng.randrange(size))
    else:
        with path.open("r+b") as stream:
            _flip(stream.fileno(), rng.randrange(8 * size))


def is_whole(folder: Path) -> bool:
    """Say whether every byte of a snapshot is what its marker says: a file that was spoilt may be
    one that does not count, or have been written anew."""
    try:
        marker.verify(folder)
    except SnapshotError:
        return False
    return True


def _flip(fd: int, bit: int) -> None:
    (byte,) = os.pread(fd, 1, bit // 8)
    os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), bit // 8)
    os.fsync(fd)


def fill(folder: Path) -> None:
    """Leave no room on a file system."""
    with (folder / _FILLER).open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(bytes(1 << 20))


def make_room(folder: Path) -> None:
    """Undo `fill`."""
    (folder / _FILLER).unlink(missing_ok=True)


def sealed_ids(agent: Path, job: str, rank: int) -> frozenset[SnapshotId]:
    """Return the snapshots that an agent holds whole of a rank."""
    found = set()
    for fd in memory.fetch(agent, job, rank, timeout_s=30):
        slot = Slot.open_(fd)
        if slot.sealed is not None:
            found.add(SnapshotId.parse(slot.sealed.facts.id))
        slot.close()
    return frozenset(found)


def flip_slot(agent: Path, job: str, rank: int, id_: SnapshotId, rng: random.Random) -> None:
    """Turn a bit over in what an agent holds of a snapshot: its table, frames or numbers."""
    for fd in memory.fetch(agent, job, rank, timeout_s=30):
        slot = Slot.open_(fd)
        if slot.sealed is not None and slot.sealed.facts.id == str(id_):
            spans = [*slot.table().regions()]
            assert slot.record is not None
            if rng.random() < 0.1:
                spans = [(TABLE_START, slot.record.table_bytes)]
            start, size = rng.choice(spans)
            at = start + rng.randrange(size)
            with mmap.mmap(slot.fd, slot.bytes.numel()) as mapped:
                mapped[at] ^= 1 << rng.randrange(8)
        slot.close()
