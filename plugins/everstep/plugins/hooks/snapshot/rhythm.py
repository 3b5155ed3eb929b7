"""When the next snapshot is due: every so many steps, or as often as what is measured suggests."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from everstep.plugins.hooks.snapshot.interval import Choice, Limits, Measured, choose

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.sdk.hooks import Run, SnapshotTaken, Step

_STALLS, _STEPS = 5, 50
_WORTH_A_CHANGE = 0.2


class Fixed:
    """Every so many steps, on all ranks alike."""

    def __init__(self, every_steps: int) -> None:
        self._every = every_steps

    def is_due(self, number: int) -> bool:
        """Return whether one is due after this step."""
        return number % self._every == 0

    def run_start(self, run: Run) -> None:
        """Nothing to learn here."""

    def snapshot(self, taken: SnapshotTaken) -> None:
        """Nothing to learn here."""

    def after_update(self, step: Step) -> None:
        """Nothing to learn here."""


class Adaptive:
    """As often as loses the least. Rank 0 measures and asks; the vote makes it everybody's.

    `write_s` says how long the last one took to become durable; `tell` hears of each new choice.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        write_s: Callable[[], float | None],
        tell: Callable[[Choice], None],
    ) -> None:
        self._limits = limits
        self._read_write_s = write_s
        self._tell = tell
        self._leads = False
        self._mtbf_s: float | None = None
        self._every = limits.least  # the sooner the first, the sooner something is known
        self._last = self._not_before = 0
        self._warm = self._just_taken = self._chosen = False
        self._write_s: float | None = None
        self._stalls: deque[float] = deque(maxlen=_STALLS)
        self._steps: deque[float] = deque(maxlen=_STEPS)

    def run_start(self, run: Run) -> None:
        """Count from where the run stands."""
        self._leads = run.rank == 0
        self._mtbf_s = run.mtbf_s
        self._last = run.done

    def is_due(self, number: int) -> bool:
        """Return whether one is due after this step, by this rank's word."""
        due = number - self._last >= self._every and number >= self._not_before
        if not (self._leads and due):
            return False
        # Where another is still in flight this one is left out: not asked for again at once.
        self._not_before = number + max(1, self._every // 10)
        return True

    def snapshot(self, taken: SnapshotTaken) -> None:
        """One was taken: the next step says how long it held up the loop."""
        if taken.disk:
            self._last = taken.step
            self._just_taken = True

    def after_update(self, step: Step) -> None:
        """Learn from a finished step, and choose anew when there is news of a snapshot."""
        if not self._leads:
            return
        if self._just_taken:
            self._stalls.append(step.snapshot_s)
        elif self._warm:
            self._steps.append(step.step_s - step.snapshot_s)
        self._warm = True  # the first step of a process is no measure of the others
        write_s = self._read_write_s()
        if self._just_taken or write_s != self._write_s:
            self._just_taken, self._write_s = False, write_s
            self._choose()

    def _choose(self) -> None:
        if not (self._stalls and self._steps):
            return
        measured = Measured(median(self._stalls), self._write_s, median(self._steps), self._mtbf_s)
        choice = choose(measured, self._limits)
        moved = abs(choice.every_steps - self._every)
        if self._chosen and moved <= _WORTH_A_CHANGE * self._every:
            return
        self._chosen, self._every = True, choice.every_steps
        self._tell(choice)
