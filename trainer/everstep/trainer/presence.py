"""How a rank is seen from outside: its progress page, its line to the agent, its findings."""

from __future__ import annotations

import logging
import os
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from everstep.launch.warm import reporter
from everstep.trainer.timeline import Timeline, work_began_at_s
from everstep.wire.link import AgentLink
from everstep.wire.messages import (
    Hello,
    RankFinding,
    Refused,
    SnapshotHeld,
    SnapshotRejected,
)
from everstep.wire.page import PageWriter, Place, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from everstep.sdk.hooks import Step
    from everstep.snapshots.marker import Marker
    from everstep.trainer.place import Seat
    from everstep.trainer.timeline import Moment
    from everstep.wire.ids import SnapshotId
    from everstep.wire.messages import AgentMessage, ClientMessage, Finding, Phase

log = logging.getLogger(__name__)

_SEVERITIES = {"info": logging.INFO, "warning": logging.WARNING}


class Presence:
    """Page and link of one rank. Without an agent there is no link and findings are only logged."""

    def __init__(self, seat: Seat, *, clock: Callable[[], float] = time.time) -> None:
        reporter.step_aside()
        self._clock = clock
        self._job = seat.job
        self._rank = seat.rank
        self._page = _page(seat)
        self._timeline = _timeline(seat, clock)
        self._newest_held: SnapshotHeld | None = None
        self._link = _link(seat, seat.socket, self._page, self._again) if seat.socket else None
        self._written = 0
        self.phase: Phase = "start"

    @property
    def connected(self) -> bool:
        """Whether an agent listens now."""
        return self._link is not None and self._link.connected

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Say what this rank is doing now."""
        self.phase = phase
        if step is not None:
            self._written = step
        if self._page:
            self._page.enter(phase, step=step)
        if self._timeline and self._timeline.enter(phase, step):
            self._tell_timeline(self._timeline)

    def mark(self, moment: Moment) -> None:
        """Say that a moment of this rank's start has come that no phase begins with."""
        if self._timeline and self._timeline.mark(moment):
            self._tell_timeline(self._timeline)

    def _tell_timeline(self, timeline: Timeline) -> None:
        if self._link:
            self._link.send(timeline.told)

    def finished(self, step: Step) -> None:
        """Put down the finished step (hook `progress`)."""
        self._written = step.number
        if self._page:
            self._page.finished(
                StepRecord(
                    step.number,
                    self._clock(),
                    time.monotonic_ns(),
                    step.step_s,
                    step.data_s,
                    step.forward_s,
                    step.backward_s,
                    step.update_s,
                    step.snapshot_s,
                    step.loss,
                    step.grad_norm,
                    step.tokens,
                    step.lr,
                )
            )

    def at_least(self, step: int) -> None:
        """Move the step counter where no hook has: a counter that stands looks like a hang."""
        if self._written < step:
            self.enter(self.phase, step=step)

    def report(self, finding: Finding) -> None:
        """Log a finding and send it to the coordinator. Safe from any thread."""
        level = _SEVERITIES.get(finding.severity, logging.ERROR)
        log.log(level, "%s: %s", finding.name, finding.summary)
        if self._link:
            self._link.post(
                RankFinding(nonce=self._job, rank=self._rank, step=self._written, finding=finding)
            )

    def held(self, marker: Marker, replicated: bool) -> None:  # noqa: FBT001  a callback's form
        """Tell the coordinator that a snapshot is whole in this node's memory; from any thread."""
        self._newest_held = SnapshotHeld(
            nonce=self._job,
            id=marker.id,
            step=marker.step,
            generation=marker.generation,
            rank=self._rank,
            replicated=replicated,
        )
        if self._link:
            self._link.send(self._newest_held)

    def rejected(self, id_: SnapshotId, why: str, *, memory: bool) -> None:
        """Tell everybody that a snapshot cannot be used, or (`memory`) not from memory."""
        if self._link:
            self._link.post(SnapshotRejected(nonce=self._job, id=str(id_), why=why, memory=memory))

    def _again(self) -> list[ClientMessage]:
        """Return what a coordinator that is reached anew must be told again."""
        told = self._timeline.told if self._timeline else None
        return [message for message in (told, self._newest_held) if message]

    def close(self, *, flush_s: float) -> None:
        """Flush for at most so long, hang up and drop the page."""
        if self._link:
            self._link.close(flush_s=flush_s)
        if self._page:
            self._page.close()
            self._page = None


def _page(seat: Seat) -> PageWriter | None:
    place = Place(
        seat.job,
        seat.generation or 0,
        seat.rank,
        seat.world_size,
        seat.local_rank,
        os.getpid(),
    )
    try:
        return PageWriter(place)
    except OSError as exc:
        log.warning("no progress page: this kernel has no sealed memory files", exc_info=exc)
        return None


def _timeline(seat: Seat, clock: Callable[[], float]) -> Timeline | None:
    if seat.local_rank or not seat.job:
        return None  # one of a node is enough: its ranks come up together
    return Timeline(
        job=seat.job,
        generation=seat.generation or 0,
        rank=seat.rank,
        began_at_s=work_began_at_s(),
        clock=clock,
    )


def _link(
    seat: Seat, socket: Path, page: PageWriter | None, again: Callable[[], list[ClientMessage]]
) -> AgentLink:
    hello = Hello(
        role="rank",
        version=version("everstep"),
        job=seat.job or None,
        generation=seat.generation,
        rank=seat.rank,
        local_rank=seat.local_rank,
        world_size=seat.world_size,
        page=page is not None,
    )
    link = AgentLink(
        socket,
        hello,
        on_message=_heard,
        greeting=lambda: [hello, *again()],
        page_fd=page.fd if page else None,
    )
    link.start()
    return link


def _heard(message: AgentMessage) -> None:
    if isinstance(message, Refused):
        log.warning("the agent refused this rank: %s", message.why)
