"""One rank's engine with a real writer, for tests."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from everstep.sdk import Finding
from everstep.snapshots import catalogue, writer
from everstep.snapshots.client import WriterLink
from everstep.snapshots.marker import Marker
from everstep.snapshots.orders import FromWriter, Write
from everstep.trainer.content import Content
from everstep.trainer.snapshot.disk import Disk
from everstep.trainer.snapshot.engine import Engine, Outside
from everstep.trainer.snapshot.memory import Memory
from everstep.trainer.snapshot.ordering import Ordering, Target
from everstep.trainer.snapshot.restore import Restored, restore
from everstep.trainer.snapshot.slot import Slot
from everstep.trainer.snapshot.source import Tier
from everstep.trainer.snapshot.state import State
from everstep.trainer.snapshot.wishes import Wishes
from everstep.wire.ids import SnapshotId

DEADLINE_S = 30.0


class Values:
    """An object with state of any kind."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.values = dict(state_dict)


class Bench:
    """One engine with everything it talks to."""

    def __init__(self, folder: Path, group: dist.ProcessGroup, path: Path, *, slots: int) -> None:
        self.folder = folder
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.findings: list[Finding] = []
        self.held: list[str] = []
        self.rejected: list[str] = []
        self.orders: list[Write] = []
        self.wishes = Wishes()
        self.durable_at_s = 0.0
        self.link = WriterLink(path, job="j", rank=self.rank, on_reply=self._heard)
        outside = Outside(
            report=self.findings.append,
            held=lambda marker, _: self.held.append(marker.id),
            durable=self._durable,
            attach=self._attach,
            write=self._write,
            hold=lambda _: None,
            more=lambda _, have: slots - have,
            clock=lambda: 5.0,
        )
        target = Target(place=str(folder), deadline_s=DEADLINE_S)
        ordering = Ordering(target, self.rank, self.world_size, lambda: self.wishes.retention)
        self.engine = Engine(group, outside, ordering)

    def content(self, objects: Mapping[str, Any]) -> Content:
        return Content(objects, rank=self.rank)

    def take(
        self, objects: Mapping[str, Any], step: int, *, disk: bool = True, **more: Any
    ) -> None:
        """Begin a snapshot; the first one lays out."""
        content = self.content(objects)

        def look() -> State:
            return content.state({})

        if self.engine.misfit or not self.engine.laid_out:
            self.engine.lay_out(look)
        assert self.engine.wait_ready(DEADLINE_S, disk=disk)
        generation = more.pop("generation", 1)
        facts = Marker(
            id=str(SnapshotId(step, generation)),
            step=step,
            generation=generation,
            job="j",
            world_size=self.world_size,
            seed=0,
            samples=step * 12,
            **more,
        )
        self.engine.take(look(), facts, disk=disk)

    def save(self, objects: Mapping[str, Any], step: int, **more: Any) -> None:
        self.take(objects, step, **more)
        self.engine.wait_copied()
        assert self.engine.wait(DEADLINE_S)

    def load(self, objects: Mapping[str, Any], *ids: str, tiers: str = "disk") -> Restored | None:
        """Bring the first good one back into the objects; `rejected` says what was wrong."""
        self.rejected.clear()
        here = {"rank": self.rank, "world_size": self.world_size}
        memory = Memory(self.engine.slots.slots, job="j", **here)
        chosen: dict[str, list[Tier]] = {
            "disk": [Disk(self.folder, **here)],
            "memory": [memory],
            "both": [memory, Disk(self.folder, **here)],
        }
        content = self.content(objects)
        found = restore(
            [SnapshotId.parse(i) for i in ids],
            chosen[tiers],
            content,
            where=str(self.folder),
            group=self.group,
            rejected=lambda r: self.rejected.append(f"{r.id} {r.tier}: {r.why}"),
        )
        if found is not None:
            content.apply(found, world_size=self.world_size)
        return found

    def names(self) -> list[str]:
        return [str(e.id) for e in catalogue.entries(self.folder) if e.committed]

    def _durable(self, write_s: float) -> None:
        assert write_s > 0
        self.durable_at_s = time.monotonic()

    def _attach(self, slots: Sequence[Slot]) -> None:
        for number, slot in enumerate(slots):
            self.link.attach(number, slot.fd, slot.bytes.numel())

    def _heard(self, reply: FromWriter) -> None:
        self.engine.heard(reply)

    def _write(self, order: Write) -> None:
        self.orders.append(order)
        self.link.write(order)


@contextmanager
def bench(
    folder: Path, group: dist.ProcessGroup, *, fault: str = "", slots: int = 2
) -> Iterator[Bench]:
    """Start a writer and an engine; both are gone at the end."""
    short = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp"))
    environ = {**os.environ, "EVERSTEP_FAULT": fault} if fault else dict(os.environ)
    process = writer.start(short, environ=environ)
    made = Bench(folder, group, process.path, slots=slots)
    try:
        yield made
    finally:
        made.link.close()
        process.close(0.0 if fault else DEADLINE_S)
        shutil.rmtree(short, ignore_errors=True)


def alone() -> dist.ProcessGroup:
    """Form a process group of one, with another for snapshots."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, not in its stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
    assert group is not None
    return group


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare to the bit."""
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
