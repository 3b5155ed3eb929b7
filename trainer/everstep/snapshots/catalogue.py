"""The snapshots folder of a run: what is in it, what to resume from, what may be deleted."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, NamedTuple

from everstep.snapshots import marker
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_ASIDE = ".aside"


class Entry(NamedTuple):
    """One folder; `job` is None while it has no readable marker."""

    id: SnapshotId
    committed: bool
    job: str | None = None
    committed_at_s: float = 0.0

    @property
    def place(self) -> tuple[int, int]:
        """Sorts oldest first within a job: a later generation's is newer, whatever its step."""
        return (self.id.generation, self.id.step)


def entries(folder: Path) -> list[Entry]:
    """Return every snapshot folder; names that are none are left alone."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        with contextlib.suppress(ValueError):
            found.append(_entry(path, SnapshotId.parse(path.name)))
    return found


def _entry(path: Path, id_: SnapshotId) -> Entry:
    try:
        found = marker.read(path)
    except marker.SnapshotError:
        # A damaged marker is no reason to hide the folder: it is told when it is tried.
        return Entry(id_, committed=(path / marker.NAME).exists())
    return Entry(id_, committed=True, job=found.job, committed_at_s=found.committed_at_s)


def candidates(
    found: Iterable[Entry], *, job: str, named: Sequence[SnapshotId] | None
) -> list[SnapshotId]:
    """Return the ids to try, newest first.

    A plan that names some decides. Where nobody decides (`named` None) everything committed is
    tried. A plan that names none means "this job has no snapshot": then those that an earlier job
    left in this folder are tried, so that a job submitted again goes on where it ended.
    """
    if named:
        return list(named)
    committed = [e for e in found if e.committed]
    if named is None:
        return [e.id for e in sorted(committed, key=lambda e: e.place, reverse=True)]
    others = [e for e in committed if e.job != job]
    return [e.id for e in sorted(others, key=lambda e: e.committed_at_s, reverse=True)]


def doomed(
    found: Iterable[Entry], *, job: str, generation: int, keep: int, newest: SnapshotId
) -> list[SnapshotId]:
    """Return what retention may delete after this job's `newest` was committed, oldest first.

    Kept are the newest `keep` of this job, always `newest` itself, and every unfinished one that
    may still be written. Those of earlier jobs go once this job has `keep` of its own. A writer
    that finds a newer generation's snapshot is itself the stale one and deletes nothing.
    """
    found = list(found)
    mine = sorted((e for e in found if e.job == job), key=lambda e: e.place)
    if mine and mine[-1].id.generation > generation:
        return []
    kept = {newest, *(e.id for e in mine[-keep:])}
    unfinished = {e.id for e in found if not e.committed and e.id.generation >= generation}
    others = {e.id for e in found if e.committed and e.job != job} if len(mine) < keep else set()
    gone = [e for e in found if e.id not in kept | unfinished | others]
    return [e.id for e in sorted(gone, key=lambda e: e.place)]


def remove(folder: Path) -> None:
    """Delete one snapshot; the marker goes first, so that half of one is never believed."""
    (folder / marker.NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: Path) -> None:
    """Move what an earlier job left under a new snapshot's name out of the way."""
    target = folder.with_name(folder.name + _ASIDE)
    if target.exists():
        remove(target)
    folder.rename(target)
