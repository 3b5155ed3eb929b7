"""One rank's part in an emergency snapshot: taken when its launcher is told to end.

All ranks must save the same step, and nobody may wait for a collective that never ends. No rank
gets past the vote of a step (`agree`) before all have voted on it; once all have, each can finish
that step alone. So the wish travels with the vote: when the step in flight ends, all ranks save it,
those of nodes that nobody told to end included. Where it does not end in time, each rank that was
asked saves the last step that it has finished, from another thread, and does not vote again.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from everstep.launch.control import Saved
from everstep.snapshots.marker import SnapshotError
from everstep.trainer.boundary import Boundary

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from everstep.trainer.boundary import Facts
    from everstep.trainer.keeper import Keeper
    from everstep.trainer.orders import Orders
    from everstep.trainer.place import Seat
    from everstep.trainer.snapshot.engine import Taken
    from everstep.trainer.snapshot.state import State

log = logging.getLogger(__name__)

_SHARE = 3
"""At most one part in so many of the grace is spent on waiting for the step in flight."""
_LATE_S = 1.0
_UNASKED_S = 10.0
"""How long a rank that nobody told to end may wait for room to save what others want saved."""


def patience_s(grace_s: float, step_s: float, since_s: float) -> float:
    """Return how long to wait for the end of a step that began `since_s` ago and takes `step_s`.

    >>> patience_s(24.0, 0.1, 0.05), patience_s(24.0, 60.0, 10.0), patience_s(24.0, 5.0, 2.0)
    (1.25, 0.0, 8.0)
    """
    most_s = grace_s / _SHARE
    left_s = max(0.0, step_s - since_s)
    return 0.0 if left_s > most_s else min(most_s, left_s + 2 * step_s + _LATE_S)


class Emergency:
    """The emergency snapshot of one session. `asked` is this rank's vote for one."""

    def __init__(
        self,
        orders: Orders,
        keeper: Keeper,
        seat: Seat,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.asked = False
        self.ending = False
        self.gate = threading.Lock()
        """Held while a step is applied and put down; a finished step's state is there outside."""
        self._orders = orders
        self._keeper = keeper
        self._boundary = Boundary(device)
        self._armed = False
        self._seat = seat
        self._clock = clock
        self._began_at = 0
        self._began_s = self._end_s = 0.0
        self._newest: Taken | None = None
        self._reported: Taken | None = None
        self._aside = False
        self._settled = threading.Event()
        self._over = threading.Event()
        self._done = threading.Event()

    def arm(self, step: int) -> None:
        """Be ready for the order; `step` is where the session begins."""
        self._began_at, self._armed = step, True
        self._orders.arm(self._seat.generation or 0, self._seat.local_rank, self.order)

    # ------------------------------------------------------------------- on the main thread

    @property
    def left_s(self) -> float:
        """Seconds of the grace that are left, or what a rank that nobody asked may take."""
        return max(0.0, self._end_s - self._clock()) if self.asked else _UNASKED_S

    def stepped(self, facts: Facts, step_s: float, look: Callable[[], State]) -> None:
        """A step that took so long has ended; call it with the gate held."""
        if self._armed:
            self._boundary.note(facts, step_s, look)

    def taken(self, taken: Taken) -> None:
        """All ranks have begun a snapshot that goes to disk."""
        self._newest = taken
        if self.asked:
            self._settled.set()

    def park(self) -> None:
        """Stand still once this rank has saved what there is: what came after would be lost.

        Its process ends meanwhile; when it doesn't, training goes on when the grace is over.
        """
        if self.asked and (self._aside or self._settled.is_set()):
            self._over.wait(self.left_s)

    def close(self) -> None:
        """The session ends, however that may be: save what there is to save first."""
        self._over.set()
        self._settled.set()
        if self.asked:
            self._done.wait(self.left_s)
        self._orders.disarm()

    # ------------------------------------------------------------------- on other threads

    def order(self, grace_s: float) -> None:
        """Take the launcher's order; returns at once."""
        if self.asked:
            return
        self._began_s = self._clock()
        self._end_s, self.asked = self._began_s + grace_s, True
        threading.Thread(
            target=self._serve, args=(grace_s,), name="everstep-emergency", daemon=True
        ).start()

    def wait_done(self) -> None:
        """Return when this process is no longer needed, or the grace is over."""
        self._done.wait(self.left_s)
        # Not in the midst of a step's end; and if others have saved that one, then so must we.
        if self.gate.acquire(timeout=self.left_s) and self._newest is not self._reported:
            self._answer()

    def _serve(self, grace_s: float) -> None:
        if not self._covered:
            since_s = time.perf_counter() - self._boundary.noted_s
            self._settled.wait(patience_s(grace_s, self._boundary.step_s, since_s))
        if self.ending:
            self._over.wait(self.left_s)
        if not self.gate.acquire(timeout=self.left_s):
            self._say(why="the step in flight does not end")
        else:
            try:
                self._answer()
            finally:
                self.gate.release()
        self._done.set()

    def _answer(self) -> None:
        """Save the last finished step where it is not saved yet, and say so; needs the gate."""
        try:
            taken = self._newest if self._covered and self._newest else self._take()
            self._keeper.hand_over(taken.id, self.left_s)
        except SnapshotError as exc:
            self._say(why=str(exc))
        except Exception as exc:  # whatever it was, the launcher must not wait for nothing
            log.exception("emergency snapshot")
            self._say(why=f"{type(exc).__name__}: {exc}")
        else:
            self._reported = taken
            self._say(taken)

    @property
    def _covered(self) -> bool:
        facts = self._boundary.facts
        return self._newest is not None and (facts is None or facts.step <= self._newest.step)

    def _take(self) -> Taken:
        """Begin a snapshot of the last finished step, on this thread."""
        facts = self._boundary.facts
        if facts is None:
            raise SnapshotError(f"no step was finished since it began at {self._began_at}")
        if not self._keeper.engine.laid_out:
            raise SnapshotError("the ranks have not settled yet who writes what")
        state = self._boundary.state()
        self._aside = True  # from here on no vote for the next step
        with self._boundary.behind():
            self._newest = self._keeper.take(
                state,
                step=facts.step,
                samples=facts.samples,
                skip=facts.skip,
                final=False,
                disk=True,
                urgent_s=self.left_s,
            )
        return self._newest

    def _say(self, taken: Taken | None = None, *, why: str = "") -> None:
        took_s = self._clock() - self._began_s
        log.warning(
            "emergency snapshot: %s",
            why if taken is None else f"{taken.id} is with the writer after {took_s:.2f} s",
        )
        self._orders.say(
            Saved(
                generation=self._seat.generation or 0,
                local_rank=self._seat.local_rank,
                id="" if taken is None else taken.id,
                step=0 if taken is None else taken.step,
                place=self._keeper.place,
                lead=self._seat.rank == 0,
                took_s=took_s,
                why=why,
            )
        )
