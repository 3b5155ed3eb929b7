"""Where a rank's slots go: the snapshot writer of its node, and the agent that holds memory."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from typing import TYPE_CHECKING

from everstep.sdk import Finding
from everstep.snapshots import writer
from everstep.snapshots.client import WriterLink
from everstep.snapshots.marker import SnapshotError
from everstep.snapshots.orders import Done, PartDone
from everstep.snapshots.writer.child import SOCKET_NAME
from everstep.trainer.snapshot.budget import free_bytes, slots_that_fit
from everstep.trainer.snapshot.slot import Slot
from everstep.wire import memory
from everstep.wire.errors import WireError
from everstep.wire.folder import private_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from everstep.snapshots.orders import FromWriter, Write
    from everstep.trainer.place import Seat
    from everstep.trainer.snapshot.wishes import Wishes

log = logging.getLogger(__name__)

_GIB = 2**30
_FETCH_S = 5.0
_MARK = "EVERSTEP_LAUNCH"
"""What carries it ends with its rank."""


class OwnWriter:
    """The writer of a rank whose launcher has none; it outlives a session."""

    def __init__(self) -> None:
        self._writer: writer.Writer | None = None
        self._folder: Path | None = None

    def path(self) -> Path:
        """Return its socket, starting it where it does not run. Raises SnapshotError."""
        if self._writer is None or not self._writer.alive:
            if self._writer is not None:
                log.error("the snapshot writer has died; starting another")
            # Not below the run's folder: a Unix socket's path must be short.
            self._folder = self._folder or private_folder(SOCKET_NAME)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            environ = {name: value for name, value in os.environ.items() if name != _MARK}
            self._writer = writer.start(self._folder, environ=environ, tidy=True)
        return self._writer.path

    def close(self, timeout_s: float) -> None:
        """End it; it may finish first for so long."""
        if self._writer is not None:
            self._writer.close(timeout_s)
            self._writer = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


_own = OwnWriter()


class Outlets:
    """The edge of the engine. `on_reply` hears the writer, on a thread of its own."""

    def __init__(self, seat: Seat, wishes: Wishes, *, report: Callable[[Finding], None]) -> None:
        self.on_reply: Callable[[FromWriter], None] = lambda _: None
        self._seat = seat
        self._wishes = wishes
        self._report = report
        self._link: WriterLink | None = None
        self._slots: Sequence[Slot] = ()
        self._keeper: memory.MemoryKeeper | None = None
        self._complained = False
        if wishes.in_memory and seat.socket and seat.job:
            self._keeper = memory.MemoryKeeper(seat.socket, seat.job, seat.rank)

    def more(self, slot_bytes: int, have: int) -> int:
        """Return how many slots of this size to make where there are some: two in all, or less."""
        wanted = max(0, (2 if self._wishes.in_memory else 1) - have)
        free = free_bytes()
        fitting = slots_that_fit(
            slot_bytes, free=free, sharers=self._seat.local_world_size, wanted=wanted
        )
        if fitting < wanted and not self._complained:
            self._complained = True
            self._report(self._short_of_memory(slot_bytes, free, fitting + have))
        return fitting

    def attach(self, slots: Sequence[Slot]) -> None:
        """Show the writer all slots, now or when it is there."""
        self._slots = slots
        if self._link is not None:
            _attach(self._link, slots)
        else:
            with contextlib.suppress(SnapshotError):  # told when there is something to write
                self._connected()

    def write(self, order: Write) -> None:
        """Hand an order to the writer; when there is none, that is the answer."""
        try:
            if self._seat.writer is None:
                _own.path()  # one of our own that has died is replaced
            self._connected().write(order)
        except SnapshotError as exc:
            self._heard(PartDone(id=order.id, slot=order.slot, write_s=0.0, why=str(exc)))
            if order.lead:
                self._heard(Done(id=order.id, write_s=0.0, why=str(exc)))

    def flush(self, timeout_s: float) -> bool:
        """Wait until the writer has all orders; False when that took longer."""
        return self._link is not None and self._link.flush(timeout_s)

    def hold(self, slots: Sequence[Slot]) -> None:
        """Have the agent hold the slots; only a pair can be relied on while one is filled."""
        if self._keeper is not None and len(slots) > 1:
            self._keeper.hold([s.fd for s in slots], [s.bytes.numel() for s in slots])

    def fetch(self) -> list[Slot]:
        """Return the slots that the agent holds of this rank; none when that cannot be had."""
        seat = self._seat
        if not (seat.socket and seat.job):
            return []
        found = []
        try:
            held = memory.fetch(seat.socket, seat.job, seat.rank, timeout_s=_FETCH_S)
        except WireError as exc:
            log.warning("no snapshot from memory: %s", exc)
            return []
        for fd in held:
            try:
                found.append(Slot.open_(fd))
            except OSError as exc:
                log.warning("a slot that the agent held cannot be mapped: %s", exc.strerror)
                os.close(fd)
        return found

    def abandon(self) -> None:
        """Hang up everywhere; what is in flight is finished without us."""
        if self._keeper is not None:
            self._keeper.close()
        if self._link is not None:
            self._link.close()

    def close(self, timeout_s: float) -> None:
        """Hang up, and end a writer of our own, which may finish first for so long."""
        self.abandon()
        _own.close(timeout_s)

    def _connected(self) -> WriterLink:
        if self._link is None:
            path = self._seat.writer or _own.path()
            self._link = WriterLink(
                path, job=self._seat.job, rank=self._seat.rank, on_reply=self._heard
            )
            _attach(self._link, self._slots)
        return self._link

    def _heard(self, reply: FromWriter) -> None:
        self.on_reply(reply)

    def _short_of_memory(self, slot_bytes: int, free: int, fitting: int) -> Finding:
        seat = self._seat
        consequence = (
            "one copy only: the newest snapshot is not kept in memory while the next is taken"
            if fitting
            else "no snapshot can be taken"
        )
        return Finding(
            name="snapshot.memory",
            component="host",
            severity="warning" if fitting else "error",
            summary=f"rank {seat.rank} needs {slot_bytes / _GIB:.2f} GiB for each copy of its "
            f"state; {free / _GIB:.2f} GiB are free on this node or in its cgroup, for "
            f"{seat.local_world_size} ranks: {consequence}. Give the job more host memory, or set "
            'memory = "off" in [hooks.snapshot]',
            at_s=time.time(),
        )


def _attach(link: WriterLink, slots: Sequence[Slot]) -> None:
    for number, slot in enumerate(slots):
        link.attach(number, slot.fd, slot.bytes.numel())
