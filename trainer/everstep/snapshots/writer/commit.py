"""The lead's work: wait for all parts, then put `.metadata`, the marker and `latest`."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from everstep.snapshots import marker, part
from everstep.snapshots.faults import Faults, Point
from everstep.snapshots.marker import FileSum, Marker
from everstep.snapshots.sealed import SnapshotError
from everstep.snapshots.writer.write import METADATA, plain
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.snapshots.orders import Write
    from everstep.snapshots.part import Note
    from everstep.snapshots.places import Place

log = logging.getLogger(__name__)

_SETTLE_S = 5.0
"""How long another node's file may look shorter than its note says, on a share that caches."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.005, 0.5


class StaleError(SnapshotError):
    """A newer generation has taken over; this one must put nothing more down."""


class Commit:
    """One snapshot's way to its marker.

    `pause` waits for at most so many seconds, less when a part of this node is done. `give_up`
    returns why waiting makes no sense any more, None while it does.
    """

    def __init__(
        self,
        order: Write,
        metadata: bytes,
        place: Place,
        *,
        faults: Faults,
        pause: Callable[[float], object],
        give_up: Callable[[], str | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._order = order
        self._metadata = metadata
        self._place = place
        self._faults = faults
        self._pause = pause
        self._give_up = give_up
        self._clock = clock
        self._begin = time.monotonic()
        self._notes: dict[str, Note] = {}

    def run(self) -> Marker:
        """Return the marker once it is durable.

        Raises SnapshotError when there will be none; what was written of it is removed then,
        unless somebody else has finished it.
        """
        order = self._order
        where = f"{self._place.where.rstrip('/')}/{order.id}"
        try:
            notes = self._gather()
            self._check_sizes(notes)
            whole = self._put(notes)
        except FileExistsError as exc:
            raise SnapshotError(
                f"{where} was finished by another writer, which took it for its own"
            ) from exc
        except (OSError, SnapshotError) as exc:
            clear(self._place, order.id)
            raise SnapshotError(plain(exc, where)) from exc
        self._point()
        return whole

    # ------------------------------------------------------------------------------ waiting

    def _gather(self) -> list[Note]:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._check_stale()
            before = len(self._notes)
            self._read_notes()
            if len(self._notes) == self._order.parts:
                return sorted(self._notes.values(), key=lambda n: n.part.rank)
            if why := self._late() or self._give_up():
                raise SnapshotError(why)
            pause_s = _FIRST_PAUSE_S if len(self._notes) > before else pause_s * 1.5
            self._pause(min(pause_s, _LAST_PAUSE_S, self._left_s()))

    def _left_s(self) -> float:
        return max(0.0, self._order.deadline_s - (time.monotonic() - self._begin))

    def _late(self) -> str | None:
        if self._left_s() > 0:
            return None
        ranks = {note.part.rank for note in self._notes.values()}
        missing = [r for r in range(self._order.parts) if r not in ranks]
        return (
            f"{len(missing)} of {self._order.parts} parts are not there after "
            f"{self._order.deadline_s:g} s: those of rank {', '.join(map(str, missing[:8]))}"
            f"{' and others' if len(missing) > 8 else ''}. Did they end, or is their disk slow?"
        )

    def _read_notes(self) -> None:
        order = self._order
        for name in self._place.files(order.id):
            if not part.is_name(name) or name in self._notes:
                continue
            try:
                note = part.from_bytes(self._place.read(order.id, name), name=name)
            except FileNotFoundError:
                continue  # a new attempt has just begun
            if (note.job, note.id, note.attempt) != (order.facts.job, order.id, order.attempt):
                continue
            if note.why:
                raise SnapshotError(f"rank {note.part.rank}: {note.why}")
            self._notes[name] = note

    def _check_sizes(self, notes: list[Note]) -> None:
        end_s = time.monotonic() + _SETTLE_S
        for note in notes:
            while (found := self._size(note.part.file)) != note.part.bytes:
                if time.monotonic() > end_s:
                    raise SnapshotError(
                        f"{note.part.file} of rank {note.part.rank} has "
                        f"{'gone' if found is None else f'{found} bytes'}, "
                        f"{note.part.bytes} were written"
                    )
                self._pause(0.2)

    def _size(self, file: str) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return self._place.size(self._order.id, file)
        return None

    # ------------------------------------------------------------------------------ staleness

    def _check_stale(self) -> None:
        mine = self._order.facts.generation
        claimed = _newest_number(self._order.generations)
        if claimed > mine:
            raise StaleError(
                f"generation {claimed} has taken over this run's folder; this is {mine}"
            )
        for id_ in self._ids():
            if id_.generation > mine and self._is_of_this_job(str(id_)):
                raise StaleError(f"{id_} of a newer generation is there; this is {mine}")

    def _is_of_this_job(self, name: str) -> bool:
        with contextlib.suppress(OSError, SnapshotError):
            found = marker.unseal(self._place.read(name, marker.NAME))
            return found.job == self._order.facts.job
        return False

    # ------------------------------------------------------------------------------ putting

    def _put(self, notes: list[Note]) -> Marker:
        order = self._order
        files = {n.part.file: FileSum(n.part.bytes, n.part.xxh3) for n in notes}
        self._faults.at(Point.BEFORE_METADATA)
        if self._metadata:
            self._place.put(order.id, METADATA, self._metadata)
            digest = xxhash.xxh3_64_hexdigest(self._metadata)
            files[METADATA] = FileSum(len(self._metadata), digest)
        self._faults.at(Point.AFTER_METADATA)
        parts = [n.part for n in notes]
        whole = marker.completed(order.facts, files, at_s=self._clock(), parts=parts)
        self._check_stale()
        self._faults.at(Point.BEFORE_MARKER)
        self._place.put(order.id, marker.NAME, marker.seal(whole), new=True)
        return whole

    def _point(self) -> None:
        """Move `latest`; that it cannot be moved costs no snapshot."""
        order = self._order
        try:
            self._faults.at(Point.AFTER_MARKER)
            self._faults.at(Point.BEFORE_LATEST)
            self._point_at_newest()
            self._faults.at(Point.AFTER_LATEST)
        except OSError as exc:
            log.warning("`latest` does not name %s: %s", order.id, plain(exc, self._place.where))

    def _point_at_newest(self) -> None:
        # Again after it was moved: a machine may freeze between a look and what follows from it.
        pointed = ""
        while (newest := self._newest()) != pointed:
            self._place.point_latest(newest)
            pointed = newest

    def _newest(self) -> str:
        """Return the newest complete snapshot of this job, ours if there is none that is newer."""
        mine = SnapshotId(self._order.facts.step, self._order.facts.generation)
        newer = [id_ for id_ in self._ids() if id_.place() > mine.place()]
        whole = [id_ for id_ in newer if self._is_of_this_job(str(id_))]
        return str(max([mine, *whole], key=SnapshotId.place))

    def _ids(self) -> list[SnapshotId]:
        found = []
        for name in self._place.names():
            with contextlib.suppress(ValueError):
                found.append(SnapshotId.parse(name))
        return found


def clear(place: Place, id_: str) -> None:
    """Remove what was written of a snapshot that will not be finished; its other parts fail."""
    with contextlib.suppress(OSError):
        if marker.NAME not in place.files(id_):
            place.remove(id_)


def _newest_number(folder: str) -> int:
    """Return the newest claimed generation, 0 where nothing claims any."""
    if not folder:
        return 0
    with contextlib.suppress(OSError):
        return max((int(p.name) for p in Path(folder).iterdir() if p.name.isdigit()), default=0)
    return 0
