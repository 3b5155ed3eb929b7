"""What the hooks want of the snapshot engine."""

from __future__ import annotations

from everstep.snapshots.orders import Policy

_GB = 10**9


class Wishes:
    """Implements `everstep.sdk.hooks.Snapshots`."""

    def __init__(self) -> None:
        self.asked = False
        self.asked_memory = False
        self.write_s: float | None = None
        self.wanted = False
        self.at_end = False
        self.wait_when_busy = False
        self.in_memory = True
        self.place = ""
        self.retention = Policy()

    def ask(self, *, disk: bool = True) -> None:
        """Ask for a snapshot after this step's update; without `disk` it stays in memory."""
        self.asked |= disk
        self.asked_memory = True

    def answered(self) -> None:
        """Forget what was asked for."""
        self.asked = self.asked_memory = False

    def policy(
        self,
        *,
        keep: int,
        at_end: bool,
        wait_when_busy: bool,
        keep_every_steps: int = 0,
        budget_gb: float = 0.0,
        in_memory: bool = True,
        place: str = "",
    ) -> None:
        """Say when besides being asked, where to, and what is kept."""
        self.wanted = True
        self.at_end, self.wait_when_busy = at_end, wait_when_busy
        self.in_memory, self.place = in_memory, place
        self.retention = Policy(
            keep=keep, keep_every_steps=keep_every_steps, budget_bytes=int(budget_gb * _GB)
        )
