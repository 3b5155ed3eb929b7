"""The snapshots of one process: which to begin from, when to take one, and the one at the end."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from everstep.sdk import ConfigError
from everstep.snapshots import catalogue
from everstep.snapshots.marker import Marker, SnapshotError
from everstep.trainer.group import claim_generation, from_first, newest_generation
from everstep.trainer.snapshot.engine import Engine, Outside, Taken, Wishes
from everstep.trainer.snapshot.restore import restore
from everstep.trainer.snapshot.save import Saver
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from everstep.trainer.config import SessionConfig
    from everstep.trainer.content import Content
    from everstep.trainer.group import Groups
    from everstep.trainer.order import Range
    from everstep.trainer.place import Seat
    from everstep.trainer.presence import Presence
    from everstep.trainer.snapshot.restore import Restored

log = logging.getLogger(__name__)

_FINAL_TRIES, _FINAL_PAUSE_S = 3, 1.0


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
        self.folder = run_dir / "snapshots"
        self.wishes = wishes
        self.generation = _generation(run_dir, seat)
        self._run_dir = run_dir
        self._seat = seat
        self._config = config
        self._presence = presence
        self._group = groups.saving
        self._saved_step = 0
        saver = Saver(self.folder, groups.saving, stale=self._stale, clock=time.time)
        outside = Outside(
            presence.report,
            lambda m, write_s, stall_s: presence.committed(
                m, self.folder, write_s=write_s, stall_s=stall_s
            ),
            presence.acknowledged,
            time.time,
        )
        self.engine = Engine(saver, outside, wishes, first=seat.rank == 0)

    def restore(self, content: Content) -> Restored | None:
        """Return the snapshot to begin from, agreed by all ranks; None to begin at the beginning.

        Raises SnapshotError when some were named or found and none is good, ConfigError when the
        one found belongs to a run with another seed.
        """
        seat = self._seat
        ids = from_first(
            catalogue.candidates(catalogue.entries(self.folder), job=seat.job, named=seat.resume)
        )
        found = restore(
            self.folder,
            ids,
            group=self._group,
            wanted=content.wanted,
            rejected=self._presence.rejected,
        )
        if found is None:
            return None
        if found.marker.seed != self._config.seed:
            raise ConfigError(
                f"{self.folder / str(found.id)} was made with seed {found.marker.seed}, this run "
                f"has seed {self._config.seed}: the order of samples would change in mid-run. "
                f"Set seed = {found.marker.seed}, or use another run_dir"
            )
        self._saved_step = found.marker.step
        log.info("resumed from %s", found.id)
        return found

    def warm(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Allocate the host memory while nobody waits for it."""
        self.engine.warm(tensors)

    def take(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        step: int,
        samples: int,
        skip: list[Range],
        final: bool,
    ) -> Taken:
        """Copy the tensors as they are now and have them written; `samples` is the next index."""
        self._wait()
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
        return self.engine.take(tensors, facts)

    def finish(self, step: int, take: Callable[[], object] | None) -> None:
        """Wait for what is in flight and, where `take` is given, see to it that `step` is on disk.

        Raises SnapshotError when that cannot be done.
        """
        for attempt in range(_FINAL_TRIES + 1):
            self._wait()
            if take is None or self._newest_step() == step:
                return
            if attempt == _FINAL_TRIES:
                break
            if attempt:
                time.sleep(_FINAL_PAUSE_S)
            take()
        raise SnapshotError(
            f"the training is done, but its last snapshot could not be written to {self.folder}: "
            f"{self.engine.last_error}. Mend that and start the job again: it resumes from step "
            f"{self._newest_step()}"
        )

    def _newest_step(self) -> int:
        newest = self.engine.newest
        return newest.step if newest else self._saved_step

    def _wait(self) -> None:
        if not self.engine.wait(self._config.save_timeout_s):
            raise SnapshotError(
                f"a snapshot in {self.folder} is not on disk after {self._config.save_timeout_s} s "
                "and its writer does not come back: is that disk or share hanging?"
            )

    def _stale(self) -> str | None:
        # Under a coordinator an older generation's commit is refused there, by its number.
        if self._seat.generation is not None:
            return None
        newest = newest_generation(self._run_dir)
        if newest == self.generation:
            return None
        return f"generation {newest} has taken over this run's folder; this is {self.generation}"


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
