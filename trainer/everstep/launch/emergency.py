"""The emergency snapshot, as the launcher sees it.

When the launcher is told to end (a preempted job, a drained node), it asks its ranks to save the
last step that they have finished. Each says when its part is with the snapshot writer, a child of
the launcher that outlives the ranks. A rank that gets SIGTERM asks what it means, since torchrun
sends it at every change of membership too, and a scheduler may send it to everybody at once.
"""

from __future__ import annotations

import math
import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from everstep.launch.control import Armed, End, Saved, Signalled
from everstep.launch.control import Emergency as Order
from everstep.sdk.config import ConfigError
from everstep.snapshots import marker
from everstep.snapshots.places import open_place
from everstep.snapshots.sealed import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from everstep.launch.control import FromRank, Line

VARIABLE = "EVERSTEP_GRACE_S"
GRACE_S = 25.0
"""Below the 30 s that Slurm, Kubernetes and torchrun itself leave between SIGTERM and SIGKILL."""
_OWN_SIGNAL_S = 0.25
"""How much later than a rank the launcher may get a signal that was sent to both."""


def grace_s(environ: Mapping[str, str]) -> float:
    """Return the seconds between SIGTERM and SIGKILL; 0: no emergency snapshot is taken.

    Raises ConfigError for what is no such number.
    """
    text = environ.get(VARIABLE) or f"{GRACE_S:g}"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(
            f"environment: {VARIABLE} must be the seconds between SIGTERM and SIGKILL, or 0 for "
            f"no emergency snapshot, not {text!r}"
        )
    return value


class _Rank(NamedTuple):
    line: Line
    generation: int
    local_rank: int


class Emergency:
    """Asks the armed ranks of one launcher, once. Safe from any thread.

    `ending` says whether torchrun is ending this generation's ranks for a reason of its own.
    """

    def __init__(
        self,
        grace_s: float,
        *,
        ending: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.grace_s = grace_s
        self._ending = ending
        self._clock = clock
        self._changed = threading.Condition()
        self._armed: dict[int, _Rank] = {}
        self._end_s: float | None = None
        self._waited_for: set[int] = set()
        self._answers: dict[int, Saved] = {}
        self._aborted = False

    def heard(self, line: Line, message: FromRank | None) -> None:
        """A rank said something, or hung up (None)."""
        with self._changed:
            match message:
                case None:
                    self._armed.pop(line.pid, None)
                    self._waited_for.discard(line.pid)
                case Armed(generation=generation, local_rank=local_rank):
                    self._armed[line.pid] = _Rank(line, generation, local_rank)
                    if self._end_s is not None:
                        self._order(line.pid)
                case Signalled(generation=generation):
                    self._answer(line, generation)
                case Saved():
                    self._answers[line.pid] = message
                    self._waited_for.discard(line.pid)
                case _:
                    return
            self._changed.notify_all()

    def ask(self) -> int:
        """Ask all armed ranks for an emergency snapshot; return how many there are."""
        with self._changed:
            if not self.grace_s or self._end_s is not None:
                return 0
            self._end_s = self._clock() + self.grace_s
            for pid in list(self._armed):
                self._order(pid)
            return len(self._waited_for)

    def abort(self) -> None:
        """Wait no longer."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def wait(self) -> list[Saved]:
        """Return what the ranks have answered, in order, when all have or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or not self._waited_for, self.left_s())
            return sorted(self._answers.values(), key=lambda saved: saved.local_rank)

    def left_s(self) -> float:
        """Return how much of the grace is left."""
        if self._aborted or self._end_s is None:
            return 0.0
        return max(0.0, self._end_s - self._clock())

    def _order(self, pid: int) -> None:
        rank = self._armed[pid]
        # However long the grace, torchrun kills its ranks after 30 s.
        grace_s = min(self.left_s(), GRACE_S)
        if rank.line.send(Order(generation=rank.generation, grace_s=grace_s)):
            self._waited_for.add(pid)

    def _answer(self, line: Line, generation: int) -> None:
        if self._end_s is not None:
            return  # it has its order, or will be sent one when it is armed
        if self._ending() or not self.grace_s:
            line.send(End(generation=generation))
            return
        later = threading.Timer(_OWN_SIGNAL_S, self._end, [line, generation])
        later.daemon = True
        later.start()

    def _end(self, line: Line, generation: int) -> None:
        with self._changed:
            if self._end_s is None:
                line.send(End(generation=generation))


def outcome(answers: Sequence[Saved], asked: int, *, written_s: float, late: str) -> str:
    """Return what came of it, in one line; `late` says what the writer did not finish, if any.

    >>> saved = Saved(generation=1, local_rank=0, id="s000123-g1", step=123, took_s=0.41)
    >>> outcome([saved], 1, written_s=1.1, late="")
    'emergency snapshot of step 123: 0.4 s, written in 1.1 s (s000123-g1)'
    """
    failed = [f"local rank {a.local_rank}: {a.why}" for a in answers if not a.id]
    if len(answers) < asked:
        failed.append(f"{asked - len(answers)} of {asked} ranks ended or did not answer in time")
    ids = sorted({a.id for a in answers if a.id})
    if len(ids) > 1:
        failed.append(f"the ranks stood at different steps ({', '.join(ids)})")
    if late:
        failed.append(late)
    if failed:
        return f"no emergency snapshot: {'; '.join(failed)}. The last good one stays"
    took_s = max(a.took_s for a in answers)
    return (
        f"emergency snapshot of step {answers[0].step}: {took_s:.1f} s, written in "
        f"{written_s:.1f} s ({ids[0]})"
    )


def incomplete(answers: Sequence[Saved]) -> str:
    """Return why a snapshot whose marker this node was to put is not complete, "" when it is."""
    lead = next((a for a in answers if a.lead and a.id), None)
    if lead is None:
        return ""
    try:
        if marker.NAME in open_place(lead.place).files(lead.id):
            return ""
    except (OSError, SnapshotError) as exc:
        return f"{lead.place}/{lead.id}: {exc}"
    return f"{lead.id} is not complete, the writer says why"


def read_grace(say: Callable[[str], None]) -> float:
    """Return the grace that the environment names; say so and take the usual where it cannot be."""
    try:
        return grace_s(os.environ)
    except ConfigError as exc:
        say(f"{exc}; taking {GRACE_S:g} s")
        return GRACE_S
