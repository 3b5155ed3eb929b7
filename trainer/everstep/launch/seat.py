"""A launcher's place in its job: what the coordinator last said, and what to do about it.

Filled by the link's thread, read by torchrun's main thread, which never waits for the network.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from everstep.wire.exit_codes import EVICTED

if TYPE_CHECKING:
    from everstep.wire.messages import JobOver, Plan

_POLL_S = 0.2  # so that signals are handled while parked


@dataclass(frozen=True, slots=True)
class Train:
    """Take part in this generation as group rank `group_rank`."""

    plan: Plan
    group_rank: int


@dataclass(frozen=True, slots=True)
class Leave:
    """End this launcher."""

    exit_code: int
    why: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Parked:
    """Wait: no plan names this node now."""

    why: str


Order = Train | Leave | Parked


def order_for(
    plan: Plan | None, node: str, *, after: int, on_evict: Literal["park", "exit"]
) -> Order:
    """Return what a plan asks of this node, whose ranks last ran in generation `after`."""
    if plan is None or plan.generation <= after:
        return Parked("waiting for the coordinator's plan")
    for group_rank, member in enumerate(plan.members):
        if member.node == node:
            return Train(plan, group_rank)
    for evicted in plan.evicted:
        if evicted.node == node:
            why = f"evicted from {plan.run_id}: {evicted.why}"
            return Leave(EVICTED, why) if on_evict == "exit" else Parked(why)
    return Parked(f"parked as a spare of {plan.run_id} (generation {plan.generation})")


class Seat:
    """The latest word, with a condition that wakes whoever waits for the next one."""

    def __init__(self, on_evict: Literal["park", "exit"]) -> None:
        self.nonce: str | None = None
        self.node: str | None = None
        self.address = ""
        self.last = 0
        self.training = 0
        self.succeeded = False
        self.refused: Leave | None = None
        self._on_evict = on_evict
        self._plan: Plan | None = None
        self._leave: Leave | None = None
        self._changed = threading.Condition()

    def joined(self, nonce: str, node: str, address: str) -> None:
        """The coordinator took the launcher in."""
        with self._changed:
            self.nonce, self.node, self.address = nonce, node, address
            self.refused = None
            self._changed.notify_all()

    def take(self, generation: int) -> None:
        """Ranks of this generation are about to run here."""
        self.last = self.training = generation
        self.succeeded = False

    def is_news(self, plan: Plan) -> bool:
        """Return whether a plan is newer than the one in force."""
        return self._plan is None or plan.generation > self._plan.generation

    def committed(self, plan: Plan, *, in_place: bool = False) -> None:
        """Take a newer plan.

        `in_place` says that the ranks that run are about to run under it, unrestarted.
        """
        with self._changed:
            self._plan = plan
            if in_place:
                self.last = self.training = plan.generation
            self._changed.notify_all()

    def job_over(self, over: JobOver) -> None:
        """The job ended."""
        self.must_leave(Leave(over.exit_code, over.why, over.error))

    def refuse(self, refusal: Leave) -> None:
        """The coordinator does not take this launcher: leave as soon as no rank trains."""
        with self._changed:
            self.refused = refusal
            self._changed.notify_all()

    def must_leave(self, leave: Leave) -> None:
        """There is nothing more to do here."""
        with self._changed:
            self._leave = self._leave or leave
            self._changed.notify_all()

    @property
    def plan(self) -> Plan | None:
        """The plan in force, as far as this launcher has heard."""
        return self._plan

    @property
    def outdated(self) -> bool:
        """Whether the ranks run under a plan that is no longer in force, or the job is over."""
        newer = self._plan is not None and self._plan.generation > self.last
        return newer or self._leave is not None

    def order(self) -> Order:
        """Return what to do now."""
        if self._leave is not None:
            return self._leave
        if self.refused is not None and not self.training:
            return self.refused
        if self.node is None:
            return Parked("waiting for the coordinator")
        return order_for(self._plan, self.node, after=self.last, on_evict=self._on_evict)

    def wait(self) -> None:
        """Wait for news, at most a moment: signals must get their turn."""
        with self._changed:
            self._changed.wait(_POLL_S)
