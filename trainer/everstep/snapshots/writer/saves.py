"""The saves in flight: one thread each, so that a slow or failing one holds up nobody."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from everstep.snapshots.orders import Done, PartDone, Write
from everstep.snapshots.places import TakenError, open_place
from everstep.snapshots.sealed import SnapshotError
from everstep.snapshots.writer.commit import Commit, clear
from everstep.snapshots.writer.coordinator import Coordinator
from everstep.snapshots.writer.retention import Retention
from everstep.snapshots.writer.write import check, write_part
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from everstep.snapshots.faults import Faults
    from everstep.snapshots.marker import Marker
    from everstep.snapshots.places import Place
    from everstep.snapshots.writer.connection import Connection

log = logging.getLogger(__name__)

_FLUSH_S = 5.0


class _Key(NamedTuple):
    place: str
    id: str
    rank: int


class _Save(NamedTuple):
    """One order, who gave it and the memory that it is about; `begin_s` is monotonic."""

    order: Write
    connection: Connection
    data: memoryview
    metadata: bytes
    begin_s: float

    @property
    def key(self) -> _Key:
        return _Key(self.order.place, self.order.id, self.order.rank)

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.begin_s


class Saves:
    """Starts saves and knows which are in flight."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._changed = threading.Condition()
        self._in_flight: set[_Key] = set()
        self._taken: set[_Key] = set()  # until the last answer: who has it may order the same again
        self._committed: dict[tuple[str, str], tuple[int, int]] = {}
        self._ending: str | None = None
        self._coordinator = Coordinator()
        self._retention = Retention(faults, self._coordinator)

    def begin(self, connection: Connection, order: Write) -> None:
        """Start one; what cannot be started is answered at once."""
        try:
            check(order)
            data, metadata = _ordered(connection, order)
            save = _Save(order, connection, data, metadata, time.monotonic())
            self._admit(save.key)
        except SnapshotError as exc:
            _refuse(connection, order, str(exc))
            return
        name = f"everstep-save-{order.id}-{order.rank}"
        threading.Thread(target=self._run, args=(save,), name=name, daemon=True).start()

    def _admit(self, key: _Key) -> None:
        with self._changed:
            if self._ending is not None:
                raise SnapshotError(f"the snapshot writer ends: {self._ending}")
            if key in self._taken:
                raise SnapshotError(f"{key.id} of rank {key.rank} is being written already")
            self._taken.add(key)
            self._in_flight.add(key)

    def _free(self, key: _Key) -> None:
        with self._changed:
            self._taken.discard(key)

    def ending(self, why: str) -> None:
        """Take no more."""
        with self._changed:
            self._ending = why

    def wait(self, timeout_s: float) -> list[str]:
        """Wait until nothing is in flight and the coordinator knows; return what is unfinished."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight, timeout_s)
            left = [f"{key.id} of rank {key.rank}" for key in sorted(self._in_flight)]
        self._coordinator.close(flush_s=min(_FLUSH_S, max(0.0, end_s - time.monotonic())))
        return left

    # ------------------------------------------------------------------------------------

    def _run(self, save: _Save) -> None:
        try:
            order = save.order
            place, why = self._part(order, save.data)
            save.data.release()
            done = PartDone(id=order.id, slot=order.slot, write_s=save.took_s, why=why)
            if not order.lead:
                self._free(save.key)
            self._answer(save, done)
            with self._changed:
                self._changed.notify_all()
            if order.lead:
                self._lead(save, place, why)
        finally:
            with self._changed:
                self._taken.discard(save.key)
                self._in_flight.discard(save.key)
                self._changed.notify_all()

    def _answer(self, save: _Save, reply: PartDone | Done) -> None:
        if not save.connection.send(reply) and reply.why:
            self._coordinator.failed(save.order, reply.why)

    def _part(self, order: Write, data: memoryview) -> tuple[Place | None, str | None]:
        place = None
        try:
            place = open_place(order.place, faults=self._faults)
            write_part(order, data, place, faults=self._faults)
        except SnapshotError as exc:
            log.error("%s of rank %d: %s", order.id, order.rank, exc)  # noqa: TRY400  no bug
            if order.lead and place is not None and not isinstance(exc, TakenError):
                clear(place, order.id)
            return place, str(exc)
        except Exception as exc:  # a bug in here, or of a store's library, costs this save alone
            log.exception("%s of rank %d", order.id, order.rank)
            return place, f"{type(exc).__name__}: {exc}"
        return place, None

    def _lead(self, save: _Save, place: Place | None, why: str | None) -> None:
        order, found = save.order, None
        if place is not None and why is None:
            found, why = self._commit(save, place)
        if found is not None:
            self._coordinator.committed(order, found, save.took_s)
        self._free(save.key)
        self._answer(save, Done(id=order.id, write_s=save.took_s, why=why, marker=found))
        if found is not None and place is not None:
            with self._changed:
                in_flight = {k.id for k in self._in_flight if k.place == order.place}
            self._retention.apply(order, found, place, in_flight - {order.id})

    def _commit(self, save: _Save, place: Place) -> tuple[Marker | None, str | None]:
        order = save.order
        commit = Commit(
            order,
            save.metadata,
            place,
            faults=self._faults,
            pause=self._pause,
            give_up=lambda: self._overtaken(order),
        )
        try:
            found = commit.run()
        except SnapshotError as exc:
            log.error("%s: %s", order.id, exc)  # noqa: TRY400  no bug
            return None, str(exc)
        except Exception as exc:  # a bug in here, or of a store's library, costs this save alone
            log.exception("%s", order.id)
            return None, f"{type(exc).__name__}: {exc}"
        with self._changed:
            run = (order.place, order.facts.job)
            self._committed[run] = max(self._committed.get(run, (0, 0)), _age(order))
        return found, None

    def _pause(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait(timeout_s)

    def _overtaken(self, order: Write) -> str | None:
        with self._changed:
            newest = self._committed.get((order.place, order.facts.job), (0, 0))
        if newest > _age(order):
            return f"a newer snapshot is complete: {SnapshotId(newest[1], newest[0])}"
        return None


def _ordered(connection: Connection, order: Write) -> tuple[memoryview, bytes]:
    """Return what is to be written, and `.metadata`. Raises SnapshotError when it is not there."""
    if order.missing:
        return memoryview(b""), b""
    slot = connection.slot(order.slot)
    data = slot.range(order.start, order.size_bytes)
    if order.metadata_bytes:
        return data, bytes(slot.range(order.metadata_start, order.metadata_bytes))
    return data, order.metadata


def _age(order: Write) -> tuple[int, int]:
    return (order.facts.generation, order.facts.step)


def _refuse(connection: Connection, order: Write, why: str) -> None:
    log.error("%s of rank %d is refused: %s", order.id, order.rank, why)
    connection.send(PartDone(id=order.id, slot=order.slot, write_s=0.0, why=why))
    if order.lead:
        connection.send(Done(id=order.id, write_s=0.0, why=why))
