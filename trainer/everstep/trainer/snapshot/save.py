"""One save, the same on every rank: DCP writes, checksums are gathered, rank 0 puts the marker."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.trainer.snapshot import catalogue, marker
from everstep.trainer.snapshot.files import HashedFiles, writer
from everstep.trainer.snapshot.marker import FileSum, SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from everstep.trainer.snapshot.marker import Marker
    from everstep.wire.ids import SnapshotId


class Request(NamedTuple):
    """What to write: host tensors that nobody changes until it is done, and the marker's facts."""

    id: SnapshotId
    tensors: dict[str, torch.Tensor]
    marker: Marker
    stall_s: float


class Saver:
    """Writes snapshots below `folder`, together with the same object on all ranks of `group`.

    `stale` tells why this generation must not write any more, or None; rank 0 asks it just before
    the marker. `files` makes the edge to the disk.
    """

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup,
        *,
        stale: Callable[[], str | None],
        clock: Callable[[], float],
        files: Callable[[], HashedFiles] = HashedFiles,
    ) -> None:
        self.folder = folder
        self._group = group
        self._first = dist.get_rank(group) == 0
        self._stale = stale
        self._clock = clock
        self._files = files

    def save(self, request: Request) -> Marker:
        """Return the marker once it is durable; every rank returns or every rank raises.

        Raises SnapshotError when it could not be written: rank 0 has then removed what there was.
        """
        folder = self.folder / str(request.id)
        try:
            self._together(lambda: self._make_room(folder) if self._first else None)
            sums = self._together(lambda: self._write(folder, request))
            whole = {name: s for part in sums for name, s in part.items()}
            markers = self._together(lambda: self._seal(folder, request.marker, whole))
        except SnapshotError:
            if self._first:
                with contextlib.suppress(OSError):
                    catalogue.remove(folder)
            raise
        result: Marker = markers[0]
        return result

    def _make_room(self, folder: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            catalogue.set_aside(folder)

    def _write(self, folder: Path, request: Request) -> dict[str, FileSum]:
        files = self._files()
        save(
            request.tensors,
            storage_writer=writer(folder, files),
            process_group=self._group,
        )
        marker.sync_folder(folder)
        return files.written

    def _seal(self, folder: Path, facts: Marker, files: dict[str, FileSum]) -> Marker | None:
        if not self._first:
            return None
        if why := self._stale():
            raise SnapshotError(why)
        whole = marker.completed(facts, files, at_s=self._clock())
        marker.write(folder, whole)
        return whole

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Do `work` on every rank and return all results; raise on all when it failed on any."""
        value, why = None, None
        try:
            value = work()
        except CheckpointException as exc:
            why = _first_failure(exc)
        except (OSError, SnapshotError, ValueError) as exc:
            why = _plain(exc)
        outcomes: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(outcomes, (value, why), group=self._group)
        for rank, (_, failed) in enumerate(outcomes):
            if failed:
                raise SnapshotError(f"rank {rank}: {failed}" if len(outcomes) > 1 else failed)
        return [value for value, _ in outcomes]


def _first_failure(exc: CheckpointException) -> str:
    rank, (cause, _) = min(exc.failures.items())
    return f"rank {rank} failed first: {_plain(cause)}"


def _plain(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.strerror}" + (f": {exc.filename}" if exc.filename else "")
    return f"{type(exc).__name__}: {exc}" if not isinstance(exc, SnapshotError) else str(exc)
