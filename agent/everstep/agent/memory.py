"""Memory that outlives the rank which filled it: the agent holds the descriptors, and no more.

It never maps or reads what it holds, so holding costs it a descriptor and a line in a table. What
is held belongs to a user and a job, and goes when the job is over or nobody of it is left.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from everstep.wire.errors import MemoryRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

log = logging.getLogger(__name__)

_MAX_SLOTS_PER_USER, _MAX_SLOTS_IN_ALL = 256, 1024
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_GIB = 1024.0**3


class Owner(NamedTuple):
    """Whose memory it is; `job` None means that the client has not said yet."""

    uid: int
    job: str | None


class Place(NamedTuple):
    """A rank's place in a user's job."""

    uid: int
    job: str
    rank: int

    @property
    def owner(self) -> Owner:
        """Whose it is."""
        return Owner(self.uid, self.job)


class Slot(NamedTuple):
    """One memory file and its size in bytes, of which `allocated` are taken up already."""

    fd: int
    size: int
    allocated: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be held: shares of the memory that is free when nothing is."""

    user_share: float
    share: float


class Memory:
    """All that is held on this node. `free_bytes` is what the host could give now."""

    def __init__(
        self,
        limits: Limits,
        *,
        grace_s: float,
        dispose: Callable[[int], None],
        free_bytes: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._grace_s = grace_s
        self._dispose = dispose
        self._free_bytes = free_bytes
        self._clock = clock
        self._held: dict[Place, list[Slot]] = {}
        self._seen_s: dict[Owner, float] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, place: Place, fds: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Hold these from now on, in place of what that rank handed over before.

        The descriptors are this object's from here on, unless it raises MemoryRefusedError.
        Returns the sizes held.
        """
        if len(fds) != len(sizes):
            raise MemoryRefusedError(
                f"{len(sizes)} memory files were announced and {len(fds)} descriptors came: at "
                "most eight travel with one Hello, on its first byte"
            )
        slots = [_checked(fd, size) for fd, size in zip(fds, sizes, strict=True)]
        self._admit(place, slots)
        self._drop(place)
        self._held[place] = slots
        self._seen_s[place.owner] = self._clock()
        return [slot.size for slot in slots]

    def slots(self, place: Place) -> list[Slot]:
        """Return what is held of a place, nothing when there is nothing."""
        return list(self._held.get(place, ()))

    def job_over(self, owner: Owner) -> None:
        """Drop all of a job."""
        self._drop_job(owner, "the job is over")

    def sweep(self, connected: Collection[Owner]) -> None:
        """Drop the jobs of which nobody has been connected for too long.

        A launcher that has not said which job it belongs to may belong to any of its user's.
        """
        now_s = self._clock()
        for owner in {place.owner for place in self._held}:
            if owner in connected or Owner(owner.uid, None) in connected:
                self._seen_s[owner] = now_s
            elif now_s - self._seen_s[owner] >= self._grace_s:
                self._drop_job(owner, f"nobody of it was connected for {self._grace_s:g} s")

    def bytes_by_owner(self) -> dict[Owner, int]:
        """Return how many bytes are held of each job."""
        held: Counter[Owner] = Counter()
        for place, slots in self._held.items():
            held[place.owner] += sum(slot.size for slot in slots)
        return dict(held)

    def facts(self) -> list[dict[str, object]]:
        """Return what is held, job by job, for people."""
        return [
            {
                "job": owner.job,
                "uid": owner.uid,
                "bytes": size,
                "slots": sum(len(s) for p, s in self._held.items() if p.owner == owner),
                "ranks": sorted(p.rank for p in self._held if p.owner == owner),
            }
            for owner, size in sorted(self.bytes_by_owner().items(), key=str)
        ]

    def close(self) -> None:
        """Let go of everything."""
        for place in list(self._held):
            self._drop(place)

    def _admit(self, place: Place, slots: Sequence[Slot]) -> None:
        others = {p: s for p, s in self._held.items() if p != place}
        self._count(place, slots, others)
        own = sum(s.size for p, held in others.items() if p.uid == place.uid for s in held)
        every = sum(s.size for held in others.values() for s in held)
        new = sum(s.size for s in slots)
        # What they take up already is no longer free.
        taken = sum(s.allocated for held in (slots, *others.values()) for s in held)
        room = self._free_bytes() + taken
        _fits(own + new, room * self._limits.user_share, f"user {place.uid}", "memory_user_share")
        _fits(every + new, room * self._limits.share, "all users", "memory_share")

    def _count(self, place: Place, slots: Sequence[Slot], others: dict[Place, list[Slot]]) -> None:
        own = len(slots) + sum(len(s) for p, s in others.items() if p.uid == place.uid)
        every = len(slots) + sum(len(s) for s in others.values())
        if own > _MAX_SLOTS_PER_USER or every > _MAX_SLOTS_IN_ALL:
            raise MemoryRefusedError(
                f"the agent holds at most {_MAX_SLOTS_PER_USER} memory files of one user and "
                f"{_MAX_SLOTS_IN_ALL} in all: fewer jobs at once, or snapshots without memory"
            )

    def _drop_job(self, owner: Owner, why: str) -> None:
        places = [place for place in self._held if place.owner == owner]
        if places:
            size = sum(slot.size for place in places for slot in self._held[place])
            facts = {"job": owner.job, "uid": owner.uid, "bytes": size, "why": why}
            log.info("memory of a job dropped", extra=facts)
        for place in places:
            self._drop(place)
        self._seen_s.pop(owner, None)

    def _drop(self, place: Place) -> None:
        for slot in self._held.pop(place, ()):
            self._dispose(slot.fd)


def _fits(wanted: int, limit: float, who: str, option: str) -> None:
    if wanted > limit:
        raise MemoryRefusedError(
            f"{who} would have {wanted / _GIB:.2f} GiB of snapshots held in memory, and "
            f"{limit / _GIB:.2f} GiB is the limit by [agent] {option} and the memory that is free: "
            "they live with the rank alone then; free memory, or raise the share"
        )


def _checked(fd: int, size: int) -> Slot:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise MemoryRefusedError("not a memory file: hand over what memfd_create made") from exc
    if seals & _SEALS != _SEALS:
        raise MemoryRefusedError(
            "not sealed against shrinking and growing (F_SEAL_SHRINK | F_SEAL_GROW): seal it once "
            "it has its size"
        )
    stat = os.fstat(fd)
    if stat.st_size != size or size <= 0:
        raise MemoryRefusedError(f"announced with {size} bytes, and it has {stat.st_size}")
    return Slot(fd, size, min(size, stat.st_blocks * 512))


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how much memory the kernel says is available without swapping, in bytes."""
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return 0
