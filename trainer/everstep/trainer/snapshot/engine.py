"""Takes snapshots of one rank: copied into a slot while training goes on, written by the writer.

A save asks nothing of other ranks: what each writes was settled with the layout. Only when the
state has another shape than at the last layout must all ranks lay it out anew (`misfit`).
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from everstep.sdk import Finding
from everstep.snapshots.marker import SnapshotError
from everstep.snapshots.orders import Done, PartDone, Refused, Write
from everstep.trainer.snapshot.capture import Capture, await_all, pin
from everstep.trainer.snapshot.fitting import Fitting
from everstep.trainer.snapshot.ordering import NO_SLOT
from everstep.trainer.snapshot.slot import Slot
from everstep.trainer.snapshot.slots import Slots
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from everstep.snapshots.marker import Marker
    from everstep.snapshots.orders import FromWriter
    from everstep.trainer.snapshot.ordering import Ordering
    from everstep.trainer.snapshot.state import State

log = logging.getLogger(__name__)


class Taken(msgspec.Struct, frozen=True):
    """A snapshot that is being copied out; copying and writing go on."""

    id: str
    step: int
    stall_s: float
    final: bool
    disk: bool


@dataclass(frozen=True)
class Outside:
    """Whom the engine tells, and what it needs of the world.

    `held` hears of each snapshot that is whole in memory, and whether that is the whole state;
    `durable`, on the lead, how long one took. `attach` shows the writer all slots,
    `write` has a sealed one written, `hold` has the slots outlive this process;
    `more` says how many to make (of what size, and how many there are).
    """

    report: Callable[[Finding], None]
    held: Callable[[Marker, bool], None]
    durable: Callable[[float], None]
    attach: Callable[[Sequence[Slot]], None]
    write: Callable[[Write], None]
    hold: Callable[[Sequence[Slot]], None]
    more: Callable[[int, int], int]
    clock: Callable[[], float]


class _Order(NamedTuple):
    number: int
    facts: Marker
    disk: bool


class Engine:
    """The same on every rank of `group`, whose rank 0 is the lead: it learns of every commit."""

    def __init__(self, group: dist.ProcessGroup, outside: Outside, ordering: Ordering) -> None:
        self.newest: SnapshotId | None = None
        self.last_error: str | None = None
        self.ordered = ""
        self.misfit = ""
        self.slots = Slots()
        self._group = group
        self._outside = outside
        self._ordering = ordering
        self._fitting: Fitting | None = None
        self._found: list[Slot] = []
        self._resumed = ""
        self._are_held = self._abandoned = False
        self._hasty: set[str] = set()
        self._capture: Capture | None = None
        self._stall_s = self._waited_s = 0.0
        self._answered: SnapshotId | None = None
        self._pending: set[str] = set()
        self._attempt = ("", 0)
        self._commits = threading.Condition()

    @property
    def laid_out(self) -> bool:
        """Whether `lay_out` has been called."""
        return self._fitting is not None

    def busy(self, *, disk: bool) -> bool:
        """Say whether a snapshot could not be taken now for others in flight."""
        return bool(self.slots.slots) and not self.slots.ready(disk=disk)

    def inherit(self, found: Sequence[Slot], resumed: SnapshotId | None) -> None:
        """Take over slots that a predecessor filled; those that suit are used again.

        What they hold counts no more, but for the snapshot that was resumed from.
        """
        self._found += found
        self._resumed = str(resumed)

    def abandon(self) -> None:
        """Give the memory up; a copy that is under way ends by itself."""
        self._abandoned = True
        for slot in (*self._found, *self.slots.slots):
            slot.close()
        self._found = []

    # ------------------------------------------------------------------------ on all ranks

    def lay_out(self, look: Callable[[], State]) -> None:
        """Settle with all ranks who writes what, and make the slots; call it on all of them.

        Raises SnapshotError on all of them when the state is not one that can be saved.
        """
        self.wait_copied()
        self.slots.wait_idle(self._ordering.target.deadline_s)
        self._fitting = Fitting.settle(look, self._group, rank=self._ordering.rank)
        self.misfit = ""
        self._make_slots(self._fitting)

    def take(self, state: State, facts: Marker, *, disk: bool, urgent: bool = False) -> Taken:
        """Begin to copy the state as it is now; have it written to disk, or only held in memory.

        Call it on all ranks at the same step, after `lay_out`, while not busy; an `urgent` one
        does not wait for the one before to be written. When it cannot be done the snapshot fails,
        and training goes on.
        """
        assert self._fitting is not None, "snapshots come after the layout"
        self._stall_s, begin = 0.0, time.perf_counter()
        if disk and self._ordering.rank == 0:
            with self._commits:
                self._pending.add(facts.id)
        try:
            number = self._claim(self._fitting, state, in_turn=disk and not urgent)
        except SnapshotError as exc:
            self._give_up(facts, str(exc), disk=disk)
        else:
            self._fill(self._fitting, state, _Order(number, facts, disk))
        self._stall_s = time.perf_counter() - begin
        return Taken(facts.id, facts.step, self._stall_s, facts.final, disk)

    # -------------------------------------------------------------------------- on one rank

    def wait_copied(self) -> None:
        """Return when the live state may be changed again; call it before any optimizer's step."""
        if self._capture is not None:
            begin = time.perf_counter()
            self._capture.wait()
            self._capture = None
            self._waited_s += time.perf_counter() - begin

    def wait_ordered(self, id_: str, timeout_s: float) -> bool:
        """Wait until what is being copied is whole; say whether `id_` has been ordered since."""
        return await_all(timeout_s) and self.ordered == id_

    def waited(self) -> float:
        """Return how many seconds `wait_copied` has waited since this was last asked."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def wait_ready(self, timeout_s: float, *, disk: bool) -> bool:
        """Wait until a snapshot can be taken; False when that took longer."""
        return not self.slots.slots or self.slots.wait_ready(timeout_s, disk=disk)

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight, commits included; False when that took longer."""
        end = time.monotonic() + timeout_s
        if not self.slots.wait_idle(timeout_s):
            return False
        with self._commits:
            return self._commits.wait_for(lambda: not self._pending, end - time.monotonic())

    def heard(self, reply: FromWriter) -> None:
        """Take what the writer says; called on its link's thread."""
        match reply:
            case PartDone():
                if reply.slot != NO_SLOT:
                    self.slots.written(reply.slot)
                if reply.why and self._ordering.rank:
                    log.error("snapshot failed", extra={"snapshot": reply.id, "error": reply.why})
            case Done():
                self._committed(reply)
            case Refused():
                log.error("the snapshot writer refused slot %d: %s", reply.slot, reply.why)

    # ------------------------------------------------------------------------------ inside

    def _make_slots(self, fitting: Fitting) -> None:
        await_all()  # an abandoned session of this process may still fill one
        made = self._adopted(fitting)
        try:
            for _ in range(self._outside.more(fitting.slot_bytes, len(made))):
                made.append(Slot.create(fitting.layout, appended=fitting.metadata))
        except OSError as exc:
            log.warning("memory for a snapshot: %s", exc.strerror)
        self.slots = Slots(made)
        self._are_held = False
        self._outside.attach(made)
        warming = (made, fitting.on_device)
        threading.Thread(target=_warm, args=warming, name="everstep-warm", daemon=True).start()

    def _adopted(self, fitting: Fitting) -> list[Slot]:
        """Return the inherited slots that suit, and close all others."""
        suit = [s for s in self._found if s.adopt(fitting.layout, appended=fitting.metadata)]
        for slot in (*self._found, *self.slots.slots):
            if slot not in suit:
                slot.close()
            elif slot.sealed and slot.sealed.facts.id != self._resumed:
                slot.begin()
        self._found = []
        return suit

    def _claim(self, fitting: Fitting, state: State, *, in_turn: bool) -> int:
        self.misfit = fitting.misfit(state)
        if self.misfit:
            raise SnapshotError(f"{self.misfit}; the next one will have it")
        if not self.slots.slots:
            raise SnapshotError("there is no memory for a copy of the state")
        number = self.slots.claim(disk=in_turn)
        if number is None:
            raise SnapshotError("no slot is free")
        return number

    def _fill(self, fitting: Fitting, state: State, order: _Order) -> None:
        slots = self.slots
        slot = slots.slots[order.number]

        def done(changed: list[str], error: str, waited_s: float) -> None:
            why = error or self._torn(changed)
            self._captured(slots, fitting, order, why=why, waited_s=waited_s)

        slot.begin()
        fitting.pack(state, slot)
        self._capture = Capture(fitting.copies(state, slot, hasty=self._hasty), done)

    def _torn(self, changed: list[str]) -> str:
        if not changed:
            return ""
        # Whoever changes it between two steps does so every time: from now on it is copied while
        # the loop stands still.
        self._hasty |= set(changed)
        names = ", ".join(sorted(changed)[:3])
        return f"{names} changed while being copied, outside of an optimizer's step"

    def _captured(
        self, slots: Slots, fitting: Fitting, order: _Order, *, why: str, waited_s: float
    ) -> None:
        """Hand the slot on and seal it; called on the capture's thread."""
        number, facts, disk = order
        if why:
            slots.filled(number, whole=False)
            self._give_up(facts, why, disk=disk)
            return
        if disk and not self._abandoned:
            slots.writing(number)
            stall_s = self._stall_s + waited_s
            self._write(self._ordering.part(number, facts, fitting, stall_s=stall_s))
            self.ordered = facts.id
        try:
            fitting.seal(slots.slots[number], facts)
        except SnapshotError as exc:
            slots.filled(number, whole=False)
            self._report(facts.id, f"it is not kept in memory: {exc}")
            return
        slots.filled(number, whole=True)
        if self._abandoned:
            return
        if not self._are_held:
            # Not before there is something in them: what is held so far may be all there is.
            self._are_held = True
            self._outside.hold(slots.slots)
        self._outside.held(facts, fitting.replicated)

    def _write(self, order: Write) -> None:
        # All ranks try alike, so they count alike.
        same = self._attempt[0] == order.id
        self._attempt = (order.id, self._attempt[1] + 1 if same else 0)
        self._outside.write(msgspec.structs.replace(order, attempt=self._attempt[1]))

    def _give_up(self, facts: Marker, why: str, *, disk: bool) -> None:
        """Let the lead know that this rank's part will not come."""
        log.error("snapshot failed", extra={"snapshot": facts.id, "error": why})
        if disk:
            self._write(self._ordering.missing(facts, why))
        else:
            self._report(facts.id, why)

    def _committed(self, reply: Done) -> None:
        id_ = SnapshotId.parse(reply.id)
        # Two may be in flight, and end in any order.
        if self._answered is None or id_ >= self._answered:
            self._answered, self.last_error = id_, reply.why
        if reply.why:
            self._report(reply.id, reply.why)
        else:
            self.newest = max(id_, self.newest or id_)
            self._outside.durable(reply.write_s)
        with self._commits:
            self._pending.discard(reply.id)
            self._commits.notify_all()

    def _report(self, id_: str, why: str) -> None:
        place = self._ordering.target.place
        self._outside.report(
            Finding(
                name="snapshot.failed",
                component="job",
                severity="error",
                summary=f"{id_} in {place}: {why}. Training goes on; the one before is kept, "
                "the next is tried as usual",
                at_s=self._outside.clock(),
            )
        )


def _warm(slots: Sequence[Slot], on_device: bool) -> None:  # noqa: FBT001  a thread's target
    for slot in slots:
        slot.warm()
        if on_device and not pin(slot.bytes):
            log.warning("the slots cannot be pinned: copies from the device take longer")
