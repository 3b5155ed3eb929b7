"""Takes snapshots of one rank: copies in the training thread, writes in a thread of its own.

One copy at a time. While one is being written the next that is due is left out or waited for, as
the policy says; which of the two is agreed by all ranks before anything is copied.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from everstep.sdk import Finding
from everstep.snapshots import catalogue
from everstep.snapshots.marker import Marker, SnapshotError
from everstep.snapshots.orders import Policy
from everstep.trainer.snapshot.host import HostBuffers
from everstep.trainer.snapshot.save import Request
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from everstep.trainer.snapshot.save import Saver

log = logging.getLogger(__name__)

_ACK_WAIT_S = 0.5


class Taken(msgspec.Struct, frozen=True):
    """A snapshot that was copied out; writing goes on."""

    id: str
    step: int
    stall_s: float
    final: bool


@dataclass(frozen=True)
class Outside:
    """Whom the engine tells: findings, commits, and whether commits so far are acknowledged.

    `committed` is called on rank 0 with the marker, the seconds it took to write and the seconds
    the loop stood still. `acknowledged` waits at most so many seconds.
    """

    report: Callable[[Finding], None]
    committed: Callable[[Marker, float, float], None]
    acknowledged: Callable[[float], bool]
    clock: Callable[[], float]


class Wishes:
    """What the hooks want of the engine (`everstep.sdk.hooks.Snapshots`)."""

    def __init__(self) -> None:
        self.asked = False
        self.write_s: float | None = None
        self.keep = 3
        self.at_end = False
        self.wait_when_busy = False

    def ask(self) -> None:
        """Ask for a snapshot after this step's update."""
        self.asked = True

    def policy(self, *, keep: int, at_end: bool, wait_when_busy: bool) -> None:
        """Say how many to keep, whether to take one at the end, and what when one is in flight."""
        self.keep, self.at_end, self.wait_when_busy = keep, at_end, wait_when_busy


class Engine:
    """The same on every rank; `first` is the one that deletes old snapshots and reports commits."""

    def __init__(self, saver: Saver, outside: Outside, wishes: Wishes, *, first: bool) -> None:
        self.newest: SnapshotId | None = None
        self.last_error: str | None = None
        self._saver = saver
        self._outside = outside
        self._wishes = wishes
        self._first = first
        self._host = HostBuffers()
        self._idle = threading.Event()
        self._idle.set()
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="everstep-snapshots", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written."""
        return not self._idle.is_set()

    def warm(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Allocate the host memory that a snapshot needs."""
        self._host.warm(tensors)

    def take(self, tensors: Mapping[str, torch.Tensor], facts: Marker) -> Taken:
        """Copy the tensors as they are now and hand them to the writer.

        Call it on all ranks at the same step, with no snapshot in flight.
        """
        self._idle.clear()
        begin = time.perf_counter()
        copied = self._host.copy(tensors)
        stall_s = time.perf_counter() - begin
        id_ = SnapshotId(facts.step, facts.generation)
        self._requests.put(Request(id_, copied, facts, stall_s))
        return Taken(facts.id, facts.step, stall_s, facts.final)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is in flight; False when that took longer."""
        return self._idle.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the thread; False when it is stuck, which the caller must not wait for."""
        self._requests.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._save(request)
            finally:
                self._idle.set()
            if self._first and self.newest is not None:
                self._retain(request.marker, self.newest)

    def _save(self, request: Request) -> None:
        begin = time.perf_counter()
        try:
            marker = self._saver.save(request)
        except SnapshotError as exc:
            self._failed(request.id, str(exc))
        except RuntimeError as exc:
            # The group is broken: a rank is gone, and so are we in a moment.
            self._failed(request.id, f"the ranks lost each other while writing: {exc}")
        else:
            self.last_error = None
            self.newest = request.id
            if self._first:
                write_s = self._wishes.write_s = time.perf_counter() - begin
                self._outside.committed(marker, write_s, request.stall_s)

    def _failed(self, id_: SnapshotId, why: str) -> None:
        self.last_error = why
        log.error("snapshot failed", extra={"snapshot": str(id_), "error": why})
        if self._first:
            self._outside.report(
                Finding(
                    name="snapshot.failed",
                    component="job",
                    severity="error",
                    summary=f"{id_} in {self._saver.folder}: {why}. Training goes on; the one "
                    f"before is kept, the next is tried as usual. Check space and health of "
                    f"that disk",
                    at_s=self._outside.clock(),
                )
            )

    def _retain(self, last: Marker, newest: SnapshotId) -> None:
        # What the coordinator has not journaled it cannot name; until then nothing is deleted.
        if not self._outside.acknowledged(_ACK_WAIT_S):
            return
        folder = self._saver.folder
        try:
            gone = catalogue.doomed(
                catalogue.entries(folder),
                job=last.job,
                generation=last.generation,
                policy=Policy(keep=self._wishes.keep),
                newest=newest,
            )
            for id_ in gone:
                catalogue.remove(folder / str(id_))
        except OSError as exc:
            log.warning("old snapshots stay", extra={"folder": str(folder), "error": str(exc)})
