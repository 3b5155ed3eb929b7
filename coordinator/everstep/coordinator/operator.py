"""What a person may ask for: every request has a reason and is journaled with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from everstep.coordinator import cases, ending, facts
from everstep.coordinator.turn import Turn
from everstep.sdk.errors import EverstepError
from everstep.wire.exit_codes import STOPPED

if TYPE_CHECKING:
    from everstep.coordinator.books import NodeBook
    from everstep.coordinator.cluster import Cluster
    from everstep.coordinator.incidents import Incident
    from everstep.coordinator.turn import Effect


class OperatorError(EverstepError):
    """The request makes no sense now: what is wrong and what would."""

    status = 409


class NoSuchThingError(OperatorError):
    """The node, job or incident is not known."""

    status = 404


class Operator:
    """Carries out one person's requests."""

    def __init__(self, cluster: Cluster, now_s: float, by: str) -> None:
        self._cluster = cluster
        self._turn = Turn(now_s, cluster.books)
        self._by = by

    @property
    def effects(self) -> list[Effect]:
        """What came of it."""
        return self._turn.effects

    def cordon(self, name: str, reason: str) -> None:
        """Let a node take no new part in any job."""
        self._set_cordon(name, reason, cordoned=True)

    def uncordon(self, name: str, reason: str) -> None:
        """Let a node take part again."""
        self._set_cordon(name, reason, cordoned=False)

    def evict(self, name: str, reason: str) -> None:
        """Shut a node out until it is readmitted."""
        node = self._node(name)
        if node.state in ("evicted", "broken"):
            raise OperatorError(f"{name} is {node.state} already: {node.why}")
        self._log("evict", name, reason, node=name)
        self._cluster.evict(self._turn, name, reason, job=None, by=self._by)

    def readmit(self, name: str, reason: str) -> None:
        """Put a node that was shut out under test; healthy it takes part again."""
        node = self._node(name)
        if node.state not in ("evicted", "broken"):
            raise OperatorError(f"{name} is {node.state}: there is nothing to readmit")
        self._log("readmit", name, reason, node=name)
        self._cluster.nodes.move(self._turn, name, "testing", reason, self._by)

    def stop(self, job_id: str, reason: str) -> None:
        """Stop a job for good."""
        job = self._cluster.jobs.get(job_id)
        if job is None or job.book.over is not None:
            book = self._cluster.books.jobs.get(job_id)
            if book is None or book.over is None:
                raise NoSuchThingError(f"no job {job_id}; `everstep jobs` lists them")
            raise OperatorError(f"job {job_id} is over already: {book.over.why}")
        self._log("stop", job_id, reason, job=job_id)
        why = f"stopped by {self._by}: {reason}"
        ending.end(self._turn, job, "stopped", STOPPED, why)

    def approve(self, number: int, reason: str) -> None:
        """Carry out what an incident's decision proposes."""
        incident = self._cluster.books.incidents.get(number)
        if incident is None:
            raise NoSuchThingError(f"no incident {number}; `everstep incidents` lists them")
        decision = incident.decision
        if decision.status != "pending":
            raise OperatorError(f"incident {number} waits for nobody: {decision.status}")
        self._log("approve", str(number), reason, job=incident.job)
        evicted = [decision.node] if decision.what == "evict" and decision.node else []
        done = msgspec.structs.replace(decision, status="done", evicted=evicted)
        cases.decide(self._turn, incident, done)
        self._carry_out(incident)

    def _carry_out(self, incident: Incident) -> None:
        decision = incident.decision
        job = self._cluster.jobs.get(incident.job or "")
        if decision.what == "evict" and decision.node is not None:
            self._cluster.evict(self._turn, decision.node, decision.why, job=job)
        elif decision.what == "stop" and job is not None and job.book.over is None:
            error = incident.root.error if incident.root else None
            code = 1 if decision.exit_code is None else decision.exit_code
            ending.end(self._turn, job, "failed", code, decision.why, error=error)

    def _set_cordon(self, name: str, reason: str, *, cordoned: bool) -> None:
        if self._node(name).cordoned == cordoned:
            raise OperatorError(f"{name} is {'' if cordoned else 'not '}cordoned already")
        self._log("cordon" if cordoned else "uncordon", name, reason, node=name)
        self._turn.record(
            facts.NodeCordoned(
                at_s=self._turn.now_s, node=name, cordoned=cordoned, why=reason, by=self._by
            )
        )

    def _node(self, name: str) -> NodeBook:
        node = self._cluster.books.nodes.get(name)
        if node is None:
            raise NoSuchThingError(f"no node {name!r} was ever heard; `everstep nodes` lists them")
        return node

    def _log(
        self,
        verb: str,
        target: str,
        reason: str,
        *,
        job: str | None = None,
        node: str | None = None,
    ) -> None:
        self._turn.record(
            facts.OperatorAsked(
                at_s=self._turn.now_s,
                verb=verb,
                target=target,
                reason=reason,
                by=self._by,
                job=job,
                node=node,
            )
        )
