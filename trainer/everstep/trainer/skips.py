"""Ends a run that applies nothing any more."""

from __future__ import annotations

from everstep.sdk import EverstepError


class TrainingStoppedError(EverstepError):
    """The run ended before its last step, on all ranks alike: who stopped it and why."""


class Skips:
    """Counts updates that were skipped in a row; the same on all ranks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_a_row = 0

    def count(self, step: int, *, applied: bool, finite: bool) -> None:
        """Take a finished step. Raises TrainingStoppedError when too many were skipped."""
        self._in_a_row = 0 if applied else self._in_a_row + 1
        if self._in_a_row < self._most:
            return
        why = "loss or gradients are not finite" if not finite else "hooks skip every update"
        raise TrainingStoppedError(
            f"{self._in_a_row} updates in a row were skipped, up to step {step}: {why}. Resume "
            "from a snapshot before that, with a lower learning rate or other data"
        )
