"""The slots of one rank and what each is doing: the newest whole one is never the next to fill."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from everstep.trainer.snapshot.slot import Slot


class Slots:
    """Safe from any thread. A slot may be written while its checksums are still being taken."""

    def __init__(self, slots: Sequence[Slot] = ()) -> None:
        self.slots = list(slots)
        self._filling: set[int] = set()
        self._writing: set[int] = set()
        self._newest = next((n for n, slot in enumerate(slots) if slot.sealed), -1)
        self._changed = threading.Condition()

    def ready(self, *, disk: bool) -> bool:
        """Say whether a snapshot can be taken now; those for disk are written one by one."""
        return self._next(disk=disk) is not None

    def wait_ready(self, timeout_s: float, *, disk: bool) -> bool:
        """Wait until a snapshot can be taken; False when that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ready(disk=disk), timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no slot is filled or written; False when that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._filling | self._writing, timeout_s)

    def claim(self, *, disk: bool) -> int | None:
        """Return the slot to fill now, or None when there is none."""
        with self._changed:
            number = self._next(disk=disk)
            if number is not None:
                self._filling.add(number)
            return number

    def writing(self, number: int) -> None:
        """Say that the writer is about to read it."""
        with self._changed:
            self._writing.add(number)

    def filled(self, number: int, *, whole: bool) -> None:
        """Say that it is sealed, or (not `whole`) that nothing came of it."""
        with self._changed:
            self._filling.discard(number)
            if whole:
                self._newest = number
            self._changed.notify_all()

    def written(self, number: int) -> None:
        """Say that the writer reads it no more."""
        with self._changed:
            self._writing.discard(number)
            self._changed.notify_all()

    def _next(self, *, disk: bool) -> int | None:
        # While one is being filled the one before may be all that there is.
        if self._filling or (disk and self._writing):
            return None
        numbers = range(len(self.slots))
        order = [n for n in numbers if n != self._newest or len(self.slots) == 1]
        return next((n for n in order if n not in self._writing), None)
