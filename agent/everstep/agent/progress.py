"""What the ranks of this node are doing, read from their progress pages.

A look at a page that has not changed costs two microseconds; only new records are unpacked. What
costs is to wake up, so nobody looks more often than is of use: for each heartbeat, and at the very
moment at which a rank would have stood for too long (`Progress.due_ns`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from everstep.agent.peer import is_stopped
from everstep.wire.messages import Peer, RankProgress, Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.wire.page import PageReader, State, StepRecord

STANDSTILL_S = 2.0
STANDSTILL_STEPS = 3.0
REPEAT_S = 0.5
LONGEST_STEP_S = 7 * 86400.0
_MOST_S = 1e11
_MOST_STEPS = 2**53


class StepTimes:
    """The 99th percentile of the last durations, kept sorted so that a new one costs little.

    >>> times = StepTimes(keep=100)
    >>> for ms in range(1, 201):
    ...     times.add(ms / 1000)
    >>> times.p99_s()
    0.199
    """

    def __init__(self, *, keep: int = 500) -> None:
        self._sorted: list[float] = []
        self._in_order: deque[float] = deque()
        self._keep = keep

    def add(self, step_s: float) -> None:
        """Take in one duration; what is no duration is left out."""
        if not is_duration(step_s):
            return
        insort(self._sorted, step_s)
        self._in_order.append(step_s)
        if len(self._in_order) > self._keep:
            del self._sorted[bisect_left(self._sorted, self._in_order.popleft())]

    def p99_s(self) -> float | None:
        """Return the 99th percentile, None when there is no duration yet."""
        if not self._sorted:
            return None
        return self._sorted[math.ceil(0.99 * len(self._sorted)) - 1]


@dataclass(frozen=True, slots=True)
class Seen:
    """One page at the last look; replaced as a whole, so any thread may read it."""

    state: State
    changed_ns: int
    record: StepRecord | None
    p99_s: float | None
    first_step_s: float | None


class RankPage:
    """Follows one page. Times are CLOCK_MONOTONIC in nanoseconds, by the agent's own clock."""

    def __init__(self, peer: Peer, reader: PageReader) -> None:
        self.peer = peer
        self.place = reader.place
        self.seen: Seen | None = None
        self.told_ns: int | None = None
        self._reader = reader
        self._times = StepTimes()
        self._first_step_s: float | None = None
        self._looked_ns: int | None = None

    def look(self, now_ns: int) -> None:
        """Read the page. A rank that wrote nonsense is shown with nonsense, and harms nobody."""
        looked_ns, self._looked_ns = self._looked_ns, now_ns
        state = self._reader.state()
        old = self.seen
        if state is None or (old is not None and state == old.state):
            return
        # Its own time of the change, within the bounds of what was seen from here: a clock of
        # another time namespace, or a lie, shifts it by one look at most.
        changed_ns = min(now_ns, max(state.changed_mono_ns, looked_ns or 0))
        record = old.record if old else None
        if state.records != (old.state.records if old else 0):
            record = self._new_records(old.state.records if old else 0) or record
        self.seen = Seen(state, changed_ns, record, self._times.p99_s(), self._first_step_s)

    def _new_records(self, after: int) -> StepRecord | None:
        record: StepRecord | None = None
        for number, record in self._reader.records(after):
            # The first step of a process compiles and warms up: it is no measure of the next.
            if number == 1:
                self._first_step_s = record.step_s if is_duration(record.step_s) else None
            else:
                self._times.add(record.step_s)
        return record

    def close(self) -> None:
        """Unmap the page."""
        self._reader.close()


def standing_ns(seen: Seen, now_ns: int, anew_ns: int) -> int:
    """Return how long a rank has stood; what was before `anew_ns` is not held against it."""
    return max(0, now_ns - max(seen.changed_ns, anew_ns))


def patience_ns(seen: Seen) -> int | None:
    """Return how long a rank may stand before its own steps no longer explain it.

    None for ever: in any phase but `step`, and before the first step. Before the second only the
    first is known, which is longer than those to come.
    """
    basis_s = seen.first_step_s if seen.p99_s is None else seen.p99_s
    if seen.state.phase != "step" or basis_s is None:
        return None
    return int(max(STANDSTILL_S, STANDSTILL_STEPS * min(basis_s, LONGEST_STEP_S)) * 1e9)


class Progress:
    """All pages of the node, by client. `is_stopped` asks the kernel about a pid."""

    def __init__(self, is_stopped: Callable[[int], bool] = is_stopped) -> None:
        self._is_stopped = is_stopped
        self._pages: dict[str, RankPage] = {}
        self._now_ns = 0
        self._anew_ns = 0

    def add(self, client: str, peer: Peer, reader: PageReader) -> None:
        """Follow a client's page from now on."""
        self._pages[client] = RankPage(peer, reader)

    def drop(self, client: str) -> None:
        """Stop following a client's page, if it has one."""
        if page := self._pages.pop(client, None):
            page.close()

    def last_words(self, client: str, now_ns: int) -> RankProgress | None:
        """Read a page once more after its writer is gone; None for a client without one."""
        page = self._pages.get(client)
        if page is None:
            return None
        page.look(now_ns)
        if page.seen is None:
            return None
        return _told(page, page.seen, standing_ns(page.seen, now_ns, self._anew_ns), stopped=False)

    def close(self) -> None:
        """Stop following all pages."""
        for client in list(self._pages):
            self.drop(client)

    def start_anew(self, now_ns: int) -> None:
        """Count every standstill from now: this process itself was not running."""
        self._anew_ns = now_ns

    def look(self, now_ns: int) -> bool:
        """Read all pages; True when a standstill must be told at once.

        That is when one has just begun, and every `REPEAT_S` while it lasts.
        """
        tell = False
        self._now_ns = now_ns
        for page in self._pages.values():
            page.look(now_ns)
            tell |= self._must_tell(page, now_ns)
        return tell

    def due_ns(self) -> int | None:
        """Return when a standstill must be told next unless its rank moves, None for never."""
        dues = (self._due_ns(page) for page in self._pages.values())
        return min((due for due in dues if due is not None), default=None)

    def _must_tell(self, page: RankPage, now_ns: int) -> bool:
        begins_ns = self._begins_ns(page)
        if begins_ns is None or now_ns < begins_ns:
            page.told_ns = None
            return False
        if now_ns < (self._due_ns(page) or 0):
            return False
        page.told_ns = now_ns
        return True

    def _due_ns(self, page: RankPage) -> int | None:
        begins_ns = self._begins_ns(page)
        if begins_ns is None or page.told_ns is None:
            return begins_ns
        return max(begins_ns, page.told_ns + int(REPEAT_S * 1e9))

    def _begins_ns(self, page: RankPage) -> int | None:
        """Return when the page's standstill begins, or has begun, as far as is seen now."""
        if page.seen is None or (patience := patience_ns(page.seen)) is None:
            return None
        return max(page.seen.changed_ns, self._anew_ns) + patience

    def ranks(self) -> list[RankProgress]:
        """Return every rank as of the last look; safe to call from any thread.

        Of two pages of one user for one place the later one counts: the rank has connected again.
        """
        places = {(*p.place[:3], p.peer.uid): p for p in list(self._pages.values())}
        now_ns, anew_ns = self._now_ns, self._anew_ns
        return [
            self._told(page, seen, standing_ns(seen, now_ns, anew_ns))
            for _, page in sorted(places.items())
            if (seen := page.seen) is not None
        ]

    def _told(self, page: RankPage, seen: Seen, stands_ns: int) -> RankProgress:
        long = stands_ns >= STANDSTILL_S * 1e9
        return _told(page, seen, stands_ns, stopped=long and self._is_stopped(page.peer.pid))

    def count(self, uid: int) -> int:
        """Return how many pages of one user are followed."""
        return sum(page.peer.uid == uid for page in self._pages.values())

    def __len__(self) -> int:
        return len(self._pages)


def _told(page: RankPage, seen: Seen, stands_ns: int, *, stopped: bool) -> RankProgress:
    record = seen.record
    return RankProgress(
        job=page.place.job,
        generation=page.place.generation,
        rank=page.place.rank,
        pid=page.peer.pid,
        uid=page.peer.uid,
        phase=seen.state.phase,
        step=seen.state.step,
        standing_s=stands_ns / 1e9,
        p99_step_s=seen.p99_s,
        loss=measured(record.loss) if record else None,
        grad_norm=measured(record.grad_norm) if record else None,
        tokens=record.tokens if record else 0,
        lr=measured(record.lr) if record else None,
        step_s=measured(record.step_s) if record else None,
        tally=_tally(seen.state, record) if record else None,
        stopped=stopped,
    )


def _tally(state: State, record: StepRecord) -> Tally | None:
    """Return the last finished step with the sums so far, None for numbers that cannot be."""
    times = (record.wall_at_s, state.data_s or 0.0, state.snapshot_s or 0.0)
    if abs(record.step) > _MOST_STEPS or not all(0 <= t <= _MOST_S for t in times):
        return None
    return Tally(record.step, *times)


def is_duration(value: float) -> bool:
    """Return whether a number off a page can be one: pages are written by strangers."""
    return math.isfinite(value) and value >= 0


def measured(value: float) -> float | None:
    """Return the value, None where the page says that it was not measured."""
    return None if math.isnan(value) else value
