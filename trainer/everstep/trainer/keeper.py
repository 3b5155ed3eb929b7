"""The snapshots of one process: which to begin from, when to take one, and the one at the end."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everstep.sdk import ConfigError, Finding
from everstep.snapshots import catalogue
from everstep.snapshots.marker import Marker, SnapshotError
from everstep.trainer.group import claim_generation, from_all, from_first
from everstep.trainer.snapshot.disk import Disk
from everstep.trainer.snapshot.engine import Engine, Outside, Taken
from everstep.trainer.snapshot.memory import Memory
from everstep.trainer.snapshot.ordering import Ordering, Target
from everstep.trainer.snapshot.outlets import Outlets
from everstep.trainer.snapshot.restore import restore
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.trainer.config import SessionConfig
    from everstep.trainer.content import Content
    from everstep.trainer.group import Groups
    from everstep.trainer.order import Range
    from everstep.trainer.place import Seat
    from everstep.trainer.presence import Presence
    from everstep.trainer.snapshot.restore import Rejection, Restored
    from everstep.trainer.snapshot.state import State
    from everstep.trainer.snapshot.wishes import Wishes

log = logging.getLogger(__name__)

_FINAL_TRIES, _FINAL_PAUSE_S = 3, 1.0
_ANSWER_S = 10.0
"""How much later than its deadline the writer's own word on a snapshot may come."""


class Keeper:
    """Keeps the snapshots below `<run_dir>/snapshots`; the same calls on every rank."""

    def __init__(
        self,
        run_dir: Path,
        seat: Seat,
        config: SessionConfig,
        groups: Groups,
        presence: Presence,
        wishes: Wishes,
    ) -> None:
        self.wishes = wishes
        self.place = wishes.place or str(run_dir.absolute() / "snapshots")
        self.generation = _generation(run_dir, seat)
        self._seat = seat
        self._config = config
        self._presence = presence
        self._group = groups.saving
        self._saved_step = 0
        self._outlets = Outlets(seat, wishes, report=presence.report)
        outside = Outside(
            report=presence.report,
            held=presence.held,
            durable=lambda write_s: setattr(wishes, "write_s", write_s),
            attach=self._outlets.attach,
            write=self._outlets.write,
            hold=self._outlets.hold,
            more=self._outlets.more,
            clock=time.time,
        )
        # Under a coordinator an older generation's commit is refused there, by its number.
        claims = "" if seat.generation is not None else str(run_dir.absolute() / "generations")
        target = Target(
            place=self.place,
            agent_socket=str(seat.socket or ""),
            generations=claims,
            deadline_s=config.save_timeout_s,
        )
        ordering = Ordering(target, seat.rank, seat.world_size, lambda: wishes.retention)
        self.engine = Engine(groups.saving, outside, ordering)
        self._outlets.on_reply = self.engine.heard
        # Whoever calls `step`: from here on the live state changes.
        self._guard = register_optimizer_step_pre_hook(lambda *_: self.engine.wait_copied())

    def restore(self, content: Content) -> Restored | None:
        """Return the snapshot to begin from, agreed by all ranks; None to begin at the beginning.

        Raises SnapshotError when some were named or found and none is good, ConfigError when the
        one found belongs to a run with another seed.
        """
        seat = self._seat
        self.engine.wait_copied()
        ids = from_first(
            catalogue.candidates(
                catalogue.entries(Path(self.place)), job=seat.job, named=seat.resume
            )
        )
        here = {"rank": seat.rank, "world_size": seat.world_size}
        slots = self._outlets.fetch() if ids else []
        found = restore(
            ids,
            [Memory(slots, job=seat.job, **here), Disk(Path(self.place), **here)],
            content,
            where=self.place,
            group=self._group,
            rejected=self._rejected,
        )
        self.engine.inherit(slots, found.id if found else None)
        if found is None:
            return None
        if found.marker.seed != self._config.seed:
            raise ConfigError(
                f"{self.place}/{found.id} was made with seed {found.marker.seed}, this run "
                f"has seed {self._config.seed}: the order of samples would change in mid-run. "
                f"Set seed = {found.marker.seed}, or use another run_dir"
            )
        self._saved_step = found.marker.step
        log.info("resumed from %s (%s)", found.id, found.tier)
        return found

    def lay_out(self, look: Callable[[], State]) -> None:
        """Settle who writes what, and get the memory for it, while all ranks are here."""
        self.engine.lay_out(look)

    def take(
        self,
        state: State,
        *,
        step: int,
        samples: int,
        skip: list[Range],
        final: bool,
        disk: bool,
        urgent_s: float | None = None,
    ) -> Taken:
        """Begin a snapshot of the state as it is now; `samples` is the next index.

        With `urgent_s` it does not wait for the one before to be written, and for nothing longer
        than that: it fails then, like any other. Raises SnapshotError when a writer hangs.
        """
        urgent = urgent_s is not None
        patience_s = self._config.save_timeout_s + _ANSWER_S if urgent_s is None else urgent_s
        ready = self.engine.wait_ready(patience_s, disk=disk and not urgent)
        if not ready and not urgent:
            raise SnapshotError(self._hanging())
        facts = Marker(
            id=str(SnapshotId(step, self.generation)),
            step=step,
            generation=self.generation,
            job=self._seat.job,
            world_size=self._seat.world_size,
            seed=self._config.seed,
            samples=samples,
            skip_windows=skip,
            final=final,
        )
        return self.engine.take(state, facts, disk=disk, urgent=urgent)

    def hand_over(self, id_: str, timeout_s: float) -> None:
        """Return when this process is no longer needed for its part of a snapshot it has begun.

        Raises SnapshotError when that is not so in time.
        """
        end_s = time.monotonic() + timeout_s
        if not self.engine.wait_ordered(id_, timeout_s):
            raise SnapshotError(f"{id_} could not be copied, or not in time")
        if not self._outlets.flush(max(0.0, end_s - time.monotonic())):
            raise SnapshotError(f"the snapshot writer did not take the order for {id_}")

    def finish(
        self, step: int, look: Callable[[], State], take: Callable[[], object] | None
    ) -> None:
        """Wait for what is in flight and, where `take` is given, see to it that `step` is on disk.

        `look` says what there is, where that must be laid out anew. Raises SnapshotError when it
        cannot be done.
        """
        newest, error = 0, None
        for attempt in range(_FINAL_TRIES + 1):
            newest, error = self._settled()
            if take is None or newest == step:
                return
            if attempt == _FINAL_TRIES:
                break
            if attempt:
                time.sleep(_FINAL_PAUSE_S)
            if any(from_all(bool(self.engine.misfit))):
                self.lay_out(look)
            take()
        raise SnapshotError(
            f"the training is done, but its last snapshot could not be written to {self.place}: "
            f"{error}. Mend that and start the job again: it resumes from step {newest}"
        )

    def close(self, timeout_s: float) -> None:
        """Let go of the writer and the memory; what is in flight is finished without us."""
        self._guard.remove()
        self._outlets.close(timeout_s)
        self.engine.abandon()

    def abandon(self) -> None:
        """Let go at once; a writer of our own finishes by itself when this process has ended."""
        self._guard.remove()
        self._outlets.abandon()
        self.engine.abandon()

    def _settled(self) -> tuple[int, str | None]:
        """Wait for what is in flight; return what the lead knows: newest step, last error."""
        engine = self.engine
        engine.wait_copied()
        in_time = engine.wait(self._config.save_timeout_s + _ANSWER_S)
        why = "" if in_time else self._hanging()
        newest = engine.newest.step if engine.newest else self._saved_step
        box = [(newest, engine.last_error, why)]
        # Not among the votes of a step, so the group that only snapshots use.
        dist.broadcast_object_list(box, src=0, group=self._group)
        newest, error, lead_why = box[0]
        if why or lead_why:
            raise SnapshotError(why or lead_why)
        return newest, error

    def _hanging(self) -> str:
        return (
            f"a snapshot in {self.place} is not on disk after {self._config.save_timeout_s} s "
            "and its writer does not come back: is that disk or share hanging?"
        )

    def _rejected(self, rejection: Rejection) -> None:
        tier = rejection.tier
        self._presence.report(
            Finding(
                name="snapshot.rejected",
                component="job",
                severity="error" if rejection.lost else "warning",
                summary=f"{rejection.id} cannot be used from {tier} by rank {self._seat.rank}: "
                f"{rejection.why}",
                at_s=time.time(),
            )
        )
        if rejection.lost or tier == "memory":
            self._presence.rejected(rejection.id, rejection.why, memory=tier == "memory")


def _generation(run_dir: Path, seat: Seat) -> int:
    if seat.generation is not None:
        return seat.generation
    number, why = from_first(_claimed(run_dir) if seat.rank == 0 else (0, ""))
    if why:
        raise ConfigError(f"run_dir {run_dir}: {why}")
    return number


def _claimed(run_dir: Path) -> tuple[int, str]:
    try:
        return claim_generation(run_dir), ""
    except OSError as exc:
        return 0, f"{exc.filename} cannot be made: {exc.strerror}"
