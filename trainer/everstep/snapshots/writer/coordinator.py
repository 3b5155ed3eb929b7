"""What the coordinator must know of snapshots, told through the node's agent."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from everstep.wire.link import AgentLink
from everstep.wire.messages import (
    Finding,
    Hello,
    RankFinding,
    Refused,
    Severity,
    SnapshotCommitted,
)

if TYPE_CHECKING:
    from everstep.snapshots.marker import Marker
    from everstep.snapshots.orders import Write
    from everstep.wire.messages import AgentMessage, ClientMessage

log = logging.getLogger(__name__)


class _Run(NamedTuple):
    socket: str
    job: str


class Coordinator:
    """One line for each job; what is told is kept until it is acknowledged."""

    def __init__(self) -> None:
        self._links: dict[_Run, AgentLink] = {}
        self._lock = threading.Lock()

    def committed(self, order: Write, marker: Marker, write_s: float) -> None:
        """Tell that a marker is durable."""
        self._post(
            order,
            SnapshotCommitted(
                nonce=order.facts.job,
                id=marker.id,
                step=marker.step,
                generation=marker.generation,
                path=f"{order.place.rstrip('/')}/{marker.id}",
                world_size=marker.world_size,
                bytes=marker.bytes,
                write_s=write_s,
                stall_s=order.stall_s,
                samples=marker.samples,
                final=marker.final,
            ),
        )

    def failed(self, order: Write, why: str) -> None:
        """Tell that a snapshot could not be written and its rank is not there to say so."""
        self.report(
            order,
            name="snapshot.failed",
            severity="error",
            summary=f"{order.id} in {order.place}: {why}. The one before is kept",
        )

    def report(
        self, order: Write, *, name: str, severity: Severity, summary: str, resolved: bool = False
    ) -> None:
        """Send a finding about the run's snapshots."""
        finding = Finding(
            name=name,
            component="job",
            severity=severity,
            summary=summary,
            at_s=time.time(),
            resolved=resolved,
        )
        log.warning("%s: %s", name, summary)
        facts = order.facts
        self._post(
            order,
            RankFinding(nonce=facts.job, rank=order.rank, step=facts.step, finding=finding),
        )

    def acknowledged(self, order: Write, wait_s: float) -> bool:
        """Return whether the coordinator has journaled all that was told; True where none is."""
        link = self._link(order)
        return link is None or link.flush(wait_s)

    def close(self, *, flush_s: float) -> None:
        """Wait for so long, for all lines together, until everything is acknowledged; hang up."""
        end_s = time.monotonic() + flush_s
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close(flush_s=max(0.01, end_s - time.monotonic()))

    def _post(self, order: Write, message: ClientMessage) -> None:
        link = self._link(order)
        if link is not None:
            link.post(message)

    def _link(self, order: Write) -> AgentLink | None:
        if not order.agent_socket:
            return None
        run = _Run(order.agent_socket, order.facts.job)
        with self._lock:
            if run not in self._links:
                self._links[run] = _connect(run)
            return self._links[run]


def _connect(run: _Run) -> AgentLink:
    # Only here: the writer must start at once.
    from importlib.metadata import version

    # Without rank and generation: that this process ends says nothing about any rank.
    hello = Hello(role="rank", version=version("everstep"), job=run.job or None)
    link = AgentLink(Path(run.socket), hello, on_message=_heard)
    link.start()
    return link


def _heard(message: AgentMessage) -> None:
    if isinstance(message, Refused):
        log.warning("the agent refused the snapshot writer: %s", message.why)
