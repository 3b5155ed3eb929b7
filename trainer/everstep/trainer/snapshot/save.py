"""One save, the same on every rank: DCP writes, checksums are gathered, rank 0 puts the marker."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.snapshots import catalogue, marker
from everstep.snapshots.marker import FileSum, SnapshotError
from everstep.trainer.snapshot.files import HashedFiles, writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from everstep.snapshots.marker import Marker
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
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._stale = stale
        self._clock = clock
        self._files = files

    def save(self, request: Request) -> Marker:
        """Return the marker once it is durable; every rank returns or every rank raises.

        Raises SnapshotError when it could not be written: rank 0 has then removed what there was.
        """
        folder = self.folder / str(request.id)
        try:
            self._together(lambda: self._make_room(folder) if self._rank == 0 else None)
            sums = self._together(lambda: self._write(folder, request))
            whole = {name: s for part in sums for name, s in part.items()}
            markers = self._together(lambda: self._seal(folder, request.marker, whole))
        except SnapshotError:
            if self._rank == 0:
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
        try:
            save(
                request.tensors,
                storage_writer=writer(folder, files),
                process_group=self._group,
            )
        except CheckpointException:
            if files.fault:
                raise files.fault from None
            raise
        marker.sync_folder(folder)
        return files.written

    def _seal(self, folder: Path, facts: Marker, files: dict[str, FileSum]) -> Marker | None:
        if self._rank:
            return None
        if why := self._stale():
            raise SnapshotError(why)
        whole = marker.completed(facts, files, at_s=self._clock())
        marker.write(folder, whole)
        return whole

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Do `work` on every rank and return all results; raise on all when it failed on any."""
        value, why, hearsay = None, None, None
        try:
            value = work()
        except CheckpointException as exc:
            failures = {rank: _plain(cause) for rank, (cause, _) in exc.failures.items()}
            why, hearsay = failures.get(self._rank), str(failures)
        except (OSError, SnapshotError, ValueError) as exc:
            why = _plain(exc)
        outcomes: list[tuple[Any, str | None, str | None]] = [(None, None, None)] * self._size
        dist.all_gather_object(outcomes, (value, why, hearsay), group=self._group)
        for rank, (_, own, _) in enumerate(outcomes):
            if own:
                raise SnapshotError(f"rank {rank}: {own}" if self._size > 1 else own)
        for _, _, heard in outcomes:
            if heard:
                raise SnapshotError(heard)
        return [value for value, _, _ in outcomes]


def _plain(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return f"{exc.strerror}" + (f": {exc.filename}" if exc.filename else "")
    return f"{type(exc).__name__}: {exc}" if not isinstance(exc, SnapshotError) else str(exc)
