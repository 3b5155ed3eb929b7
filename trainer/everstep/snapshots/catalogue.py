"""The snapshots of a run: what is in a place, what to resume from, what may be deleted."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from everstep.snapshots import marker
from everstep.snapshots.orders import Policy
from everstep.snapshots.places import Folder, is_aside
from everstep.snapshots.sealed import SnapshotError
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from everstep.snapshots.places import Place

_ASIDE = ".aside"
SUSPECT = "SUSPECT"
"""A file of this name in a complete snapshot: it did not load, or the run failed at once."""


class Entry(NamedTuple):
    """One folder; `job` is None while it has no readable marker."""

    id: SnapshotId
    committed: bool
    job: str | None = None
    committed_at_s: float = 0.0
    bytes: int = 0
    suspect: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Sorts oldest first within a job: a later generation's is newer, whatever its step."""
        return (self.id.generation, self.id.step)


def entries(where: Path | Place) -> list[Entry]:
    """Return every snapshot of a place; names that are none are left alone. Raises OSError."""
    place = Folder(where) if isinstance(where, Path) else where
    found = []
    for name in place.names():
        with contextlib.suppress(ValueError):
            found.append(_entry(place, SnapshotId.parse(name)))
    return found


def _entry(place: Place, id_: SnapshotId) -> Entry:
    try:
        found = marker.unseal(place.read(str(id_), marker.NAME))
    except FileNotFoundError:
        return Entry(id_, committed=False)
    except (SnapshotError, OSError):
        # A damaged marker is no reason to hide the folder: it is told when it is tried.
        return Entry(id_, committed=True)
    return Entry(
        id_,
        committed=True,
        job=found.job,
        committed_at_s=found.committed_at_s,
        bytes=found.bytes,
        suspect=SUSPECT in place.files(str(id_)),
    )


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
    found: Iterable[Entry],
    *,
    job: str,
    generation: int,
    newest: SnapshotId,
    policy: Policy = Policy(),  # noqa: B008  frozen
    suspects: Collection[str] = (),
    in_flight: Collection[str] | None = None,
) -> list[SnapshotId]:
    """Return what retention may delete after this job's `newest` was committed, oldest first.

    Kept are of this job the newest `keep`, every n-th step, always `newest` itself and the newest
    that is not suspect; and every unfinished one that may still be written (`in_flight` None: any
    of this generation). Those of earlier jobs go once this job has `keep` good ones of its own.
    The budget then takes the oldest that are left. A writer that finds a newer generation's
    snapshot is itself the stale one and deletes nothing.
    """
    found = list(found)
    mine = sorted((e for e in found if e.committed and e.job == job), key=lambda e: e.place)
    if mine and mine[-1].id.generation > generation:
        return []
    good = [e for e in mine if not e.suspect and str(e.id) not in suspects]
    others = _by_age(e for e in found if e.job != job and not e.suspect)
    last_good = {e.id for e in (good or others)[-1:]}
    never = {newest} | last_good
    kept = (
        never | {e.id for e in mine[-max(1, policy.keep) :]} | {e.id for e in _every(good, policy)}
    )
    if len(good) < policy.keep:
        kept |= {e.id for e in found if e.committed and e.job != job}
    kept |= {e.id for e in found if not e.committed and _alive(e, generation, newest, in_flight)}
    over = _over_budget([e for e in found if e.id in kept], job, never, policy.budget_bytes)
    gone = [e for e in found if e.id not in kept or e.id in over]
    return [e.id for e in sorted(gone, key=lambda e: e.place)]


def _every(good: Sequence[Entry], policy: Policy) -> list[Entry]:
    every = policy.keep_every_steps
    return [e for e in good if every and e.id.step % every == 0]


def _alive(
    entry: Entry, generation: int, newest: SnapshotId, in_flight: Collection[str] | None
) -> bool:
    """Return whether an unfinished one may still be finished."""
    if entry.id.generation != generation or in_flight is None:
        return entry.id.generation >= generation
    return entry.id.step > newest.step or str(entry.id) in in_flight


def _over_budget(
    kept: list[Entry], job: str, never: Collection[SnapshotId], budget_bytes: int
) -> set[SnapshotId]:
    """Return the oldest that do not fit, earlier jobs' before this one's."""
    if not budget_bytes:
        return set()
    others = _by_age(e for e in kept if e.job != job and e.committed)
    mine = sorted((e for e in kept if e.job == job), key=lambda e: e.place)
    total = sum(e.bytes for e in kept)
    over = set()
    for entry in (*others, *mine):
        if total > budget_bytes and entry.id not in never:
            over.add(entry.id)
            total -= entry.bytes
    return over


def _by_age(found: Iterable[Entry]) -> list[Entry]:
    return sorted((e for e in found if e.committed), key=lambda e: e.committed_at_s)


def prunable(place: Place, policy: Policy) -> list[str]:
    """Return the names that a person may have deleted, as the newest job's retention would."""
    found = entries(place)
    whole = _by_age(e for e in found if e.job is not None)
    if not whole:
        return []
    job = whole[-1].job or ""
    mine = max((e for e in whole if e.job == job), key=lambda e: e.place)
    gone = doomed(found, job=job, generation=mine.id.generation, newest=mine.id, policy=policy)
    enough = sum(e.job == job and not e.suspect for e in found) >= policy.keep
    return [*map(str, gone), *(asides(place) if enough else [])]


def asides(where: Place) -> list[str]:
    """Return what was put aside for a new snapshot of the same name."""
    return [name for name in where.names() if is_aside(name)]


def remove(folder: Path) -> None:
    """Delete one snapshot; the marker goes first, so that half of one is never believed."""
    Folder(folder.parent).remove(folder.name)


def set_aside(folder: Path) -> None:
    """Move what an earlier job left under a new snapshot's name out of the way."""
    target = folder.with_name(folder.name + _ASIDE)
    if target.exists():
        remove(target)
    folder.rename(target)
