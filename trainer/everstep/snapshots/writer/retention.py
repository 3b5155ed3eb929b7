"""After each commit: delete what the policy no longer keeps, and say when space runs out."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from everstep.snapshots import catalogue
from everstep.snapshots.faults import Faults, Point
from everstep.snapshots.writer.write import plain, reserve_bytes, size_text
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Collection

    from everstep.snapshots.marker import Marker
    from everstep.snapshots.orders import Write
    from everstep.snapshots.places import Place
    from everstep.snapshots.writer.coordinator import Coordinator

log = logging.getLogger(__name__)

_ACK_WAIT_S = 5.0


class Retention:
    """Applies the policies of orders, one at a time."""

    def __init__(self, faults: Faults, coordinator: Coordinator) -> None:
        self._faults = faults
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._short: set[str] = set()

    def apply(self, order: Write, newest: Marker, place: Place, in_flight: Collection[str]) -> None:
        """Delete what may go after `newest` was committed; what goes wrong is logged."""
        # What the coordinator has not journaled it cannot name; until then nothing is deleted.
        if not self._coordinator.acknowledged(order, _ACK_WAIT_S):
            log.warning("old snapshots stay: the coordinator has not acknowledged %s", newest.id)
            return
        with self._lock:
            try:
                self._faults.at(Point.BEFORE_RETENTION)
                self._delete(order, place, in_flight)
                self._look_ahead(order, newest, place)
            except Exception as exc:  # noqa: BLE001  it costs space, and no snapshot
                log.warning("old snapshots stay: %s", plain(exc, place.where))

    def _delete(self, order: Write, place: Place, in_flight: Collection[str]) -> None:
        found = catalogue.entries(place)
        facts = order.facts
        for entry in found:
            if entry.committed and not entry.suspect and str(entry.id) in order.suspects:
                place.put(str(entry.id), catalogue.SUSPECT, b"")
        gone = catalogue.doomed(
            found,
            job=facts.job,
            generation=facts.generation,
            newest=SnapshotId.parse(order.id),
            policy=order.policy,
            suspects=order.suspects,
            in_flight=in_flight,
        )
        for id_ in gone:
            place.remove(str(id_))
        mine = [e for e in found if e.job == facts.job and str(e.id) not in order.suspects]
        if len(mine) >= order.policy.keep:
            for name in catalogue.asides(place):
                place.remove(name)

    def _look_ahead(self, order: Write, newest: Marker, place: Place) -> None:
        """Say that the next one will not fit, before it does not; and when it does again."""
        why = _shortage(order, newest, place)
        if why and place.where not in self._short:
            self._short.add(place.where)
            self._coordinator.report(
                order, name="snapshot.space", severity="warning", summary=f"{place.where}: {why}"
            )
        elif not why and place.where in self._short:
            self._short.discard(place.where)
            self._coordinator.report(
                order,
                name="snapshot.space",
                severity="info",
                summary=f"{place.where}: the next snapshot fits again",
                resolved=True,
            )


def _shortage(order: Write, newest: Marker, place: Place) -> str | None:
    space = place.space()
    if space is not None and space.free < newest.bytes + reserve_bytes(space.total):
        return (
            f"the next snapshot will not fit: {size_text(space.free)} are free, one takes "
            f"{size_text(newest.bytes)}. Make room there, keep fewer, or set a budget"
        )
    budget = order.policy.budget_bytes
    if budget:
        total = sum(e.bytes for e in catalogue.entries(place) if e.committed)
        if total > budget:
            return (
                f"the budget of {size_text(budget)} is exceeded: {size_text(total)} are there, "
                "and what is left is never deleted. Raise the budget"
            )
    return None
