"""The durable state: a fold over the journal's facts, and nothing else.

Whatever is decided is first put into the books, as a fact; after a `kill -9` the same facts give
the same books.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everstep.coordinator import facts
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.coordinator.facts import AnyFact, Fact, NodeState
    from everstep.coordinator.incidents import Incident
    from everstep.coordinator.times import GenerationTimes
    from everstep.wire.messages import Evidence, Finding, Peer, Plan

_KEPT_INCIDENTS = 2000
_KEPT_SNAPSHOTS = 256
_KEPT_FINDINGS = 100


@dataclass(slots=True)
class NodeBook:
    """What is known of a node, whoever runs on it."""

    name: str
    epoch: str = ""
    machine_id: str = ""
    boot_id: str = ""
    address: str = ""
    version: str = ""
    state: NodeState = "healthy"
    why: str = ""
    by: str = ""
    since_s: float = 0.0
    evidence: list[Evidence] = field(default_factory=list)
    returns: bool = False
    cordoned: bool = False
    silent_since_s: float | None = None
    findings: dict[tuple[str, str, str], Finding] = field(default_factory=dict)


@dataclass(slots=True)
class Seat:
    """A node's launcher in a job. The process is told apart by pid, start time and boot."""

    node: str
    pid: int
    start_ticks: int
    boot_id: str
    address: str
    local_world_size: int
    joined_at_s: float
    left_at_s: float | None = None
    left_why: str = ""
    told: bool = False

    def is_held_by(self, peer: Peer) -> bool:
        """Return whether this is the process that has the seat."""
        theirs = (peer.pid, peer.start_ticks, peer.boot_id)
        return theirs == (self.pid, self.start_ticks, self.boot_id)


@dataclass(frozen=True, slots=True)
class Replan:
    """Why the generation in force (0: none yet) must be followed by another."""

    generation: int
    why: str
    asked_by: str
    incident: int | None
    since_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """One line of a job's history."""

    number: int
    members: tuple[str, ...]
    committed_at_s: float
    why: str
    asked_by: str
    resume: tuple[str, ...]
    ranks: int
    proposed_at_s: float
    awaited_at_s: float | None


@dataclass(slots=True)
class JobBook:
    """A job's durable half."""

    spec: facts.JobCreated
    seats: dict[str, Seat] = field(default_factory=dict)
    replan: Replan | None = None
    proposed: int = 0
    plan: Plan | None = None
    members: list[str] = field(default_factory=list)  # of the generation in force, in rank order
    committed_at_s: float = 0.0
    started: dict[str, facts.RanksUp] = field(default_factory=dict)
    down: dict[int, facts.RankDown] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    generations: list[Generation] = field(default_factory=list)
    failures: list[facts.FailureCounted] = field(default_factory=list)
    evictions: list[tuple[float, str]] = field(default_factory=list)
    snapshots: dict[str, facts.SnapshotTaken] = field(default_factory=dict)
    suspects: dict[str, str] = field(default_factory=dict)
    suspects_in_memory: dict[str, str] = field(default_factory=dict)
    incidents: dict[int, int] = field(default_factory=dict)
    times: dict[int, GenerationTimes] = field(default_factory=dict)
    proposed_at_s: float | None = None  # of the plan to come
    awaited_at_s: float | None = None
    over: facts.JobEnded | None = None

    @property
    def id(self) -> str:
        """The nonce."""
        return self.spec.job

    @property
    def generation(self) -> int:
        """The generation in force, 0 before the first."""
        return self.plan.generation if self.plan else self.spec.adopted

    @property
    def world_size(self) -> int:
        """How many ranks the generation in force has."""
        if self.plan is not None:
            return sum(m.local_world_size for m in self.plan.members)
        return len(self.members) * self.spec.local_world_size

    @property
    def finishing(self) -> bool:
        """Whether a node has reported success: from then on the minimum no longer applies."""
        return bool(self.done)

    def resume(self, limit: int = 4) -> list[str]:
        """Return the ids on disk to resume from, newest first."""
        good = (SnapshotId.parse(s) for s in self.snapshots if s not in self.suspects)
        return [str(s) for s in sorted(good, key=SnapshotId.place, reverse=True)[:limit]]


@dataclass(slots=True)
class Books:
    """All of it."""

    epoch: int = 0
    nodes: dict[str, NodeBook] = field(default_factory=dict)
    jobs: dict[str, JobBook] = field(default_factory=dict)
    live: dict[tuple[int, str], str] = field(default_factory=dict)
    incidents: dict[int, Incident] = field(default_factory=dict)
    next_incident: int = 1

    def apply(self, fact: Fact) -> None:
        """Enter one fact; facts about jobs that were forgotten are passed over."""
        job = getattr(fact, "job", None)
        about_job = job is not None and type(fact) not in _NOT_THE_JOBS_OWN
        if about_job and job not in self.jobs:
            return
        if (enter := _ENTER.get(type(fact))) is not None:
            enter(self, fact)

    def node(self, name: str) -> NodeBook:
        """Return a node's book, a new one for a node never heard of."""
        return self.nodes.setdefault(name, NodeBook(name))

    def live_jobs(self) -> list[JobBook]:
        """Return the jobs that are not over."""
        return [self.jobs[job] for job in self.live.values()]


# ------------------------------------------------------------------------------- one fact, one way


def _coordinator_started(books: Books, fact: facts.CoordinatorStarted) -> None:
    books.epoch = fact.epoch


def _agent_seen(books: Books, fact: facts.AgentSeen) -> None:
    node = books.node(fact.node)
    node.epoch, node.machine_id, node.boot_id = fact.epoch, fact.machine_id, fact.boot_id
    node.address, node.version = fact.address, fact.version


def _agent_silent(books: Books, fact: facts.AgentSilent) -> None:
    books.node(fact.node).silent_since_s = fact.since_s


def _agent_heard(books: Books, fact: facts.AgentHeard) -> None:
    books.node(fact.node).silent_since_s = None


def _node_moved(books: Books, fact: facts.NodeMoved) -> None:
    node = books.node(fact.node)
    node.state, node.why, node.by, node.since_s = fact.state, fact.why, fact.by, fact.at_s
    node.returns, node.evidence = fact.returns, list(fact.evidence)
    if fact.state == "evicted" and fact.job in books.jobs:
        books.jobs[fact.job].evictions.append((fact.at_s, fact.node))


def _node_cordoned(books: Books, fact: facts.NodeCordoned) -> None:
    books.node(fact.node).cordoned = fact.cordoned


def _finding_seen(books: Books, fact: facts.FindingSeen) -> None:
    findings = books.node(fact.node).findings
    key = (fact.source, fact.finding.name, fact.finding.component)
    findings.pop(key, None)
    if not fact.finding.resolved:
        findings[key] = fact.finding
    while len(findings) > _KEPT_FINDINGS:
        del findings[next(iter(findings))]


def _job_created(books: Books, fact: facts.JobCreated) -> None:
    job = JobBook(fact, proposed=fact.adopted)
    if not fact.adopted:
        job.replan = Replan(0, "first generation", "membership", None, fact.at_s)
    books.jobs[fact.job] = job
    books.live[fact.uid, fact.run_id] = fact.job


def _launcher_joined(books: Books, fact: facts.LauncherJoined) -> None:
    seats = books.jobs[fact.job].seats
    seat = seats.get(fact.node)
    theirs = (fact.pid, fact.start_ticks, fact.boot_id)
    if seat is not None and (seat.pid, seat.start_ticks, seat.boot_id) == theirs:
        seat.address, seat.left_at_s = fact.address, None  # the same process, heard again
        return
    seats.pop(fact.node, None)  # a newcomer stands at the end of the queue
    size = fact.local_world_size
    seats[fact.node] = Seat(
        fact.node, fact.pid, fact.start_ticks, fact.boot_id, fact.address, size, fact.at_s
    )


def _launcher_left(books: Books, fact: facts.LauncherLeft) -> None:
    job = books.jobs[fact.job]
    seat = job.seats[fact.node]
    if seat.left_at_s is None:
        seat.left_at_s, seat.left_why = fact.at_s, fact.why
    seat.told = seat.told or fact.said


def _launcher_told(books: Books, fact: facts.LauncherTold) -> None:
    books.jobs[fact.job].seats[fact.node].told = True


def _replan_asked(books: Books, fact: facts.ReplanAsked) -> None:
    books.jobs[fact.job].replan = Replan(
        fact.generation, fact.why, fact.asked_by, fact.incident, fact.at_s
    )


def _nodes_awaited(books: Books, fact: facts.NodesAwaited) -> None:
    job = books.jobs[fact.job]
    if job.awaited_at_s is None:
        job.awaited_at_s = fact.at_s


def _generation_proposed(books: Books, fact: facts.GenerationProposed) -> None:
    job = books.jobs[fact.job]
    job.proposed, job.proposed_at_s = fact.generation, fact.at_s


def _plan_committed(books: Books, fact: facts.PlanCommitted) -> None:
    job, plan = books.jobs[fact.job], fact.plan
    job.plan, job.committed_at_s, job.replan = plan, fact.at_s, None
    job.started, job.down = {}, {}
    job.members = [m.node for m in plan.members]
    members, resume = tuple(job.members), tuple(plan.resume)
    proposed_s = fact.at_s if job.proposed_at_s is None else job.proposed_at_s
    job.generations.append(
        Generation(
            number=plan.generation,
            members=members,
            committed_at_s=fact.at_s,
            why=plan.why,
            asked_by=plan.asked_by,
            resume=resume,
            ranks=job.world_size,
            proposed_at_s=proposed_s,
            awaited_at_s=job.awaited_at_s,
        )
    )
    job.proposed_at_s = job.awaited_at_s = None


def _ranks_up(books: Books, fact: facts.RanksUp) -> None:
    job = books.jobs[fact.job]
    job.started[fact.node] = fact
    if job.plan is None and fact.node not in job.members:
        job.members.append(fact.node)  # of a job that was taken in as it ran


def _rank_down(books: Books, fact: facts.RankDown) -> None:
    job = books.jobs[fact.job]
    if fact.generation == job.generation:
        job.down[fact.rank] = fact


def _generation_timed(books: Books, fact: facts.GenerationTimed) -> None:
    books.jobs[fact.job].times[fact.generation] = fact.times


def _node_done(books: Books, fact: facts.NodeDone) -> None:
    books.jobs[fact.job].done[fact.node] = fact.generation


def _failure_counted(books: Books, fact: facts.FailureCounted) -> None:
    failures = books.jobs[fact.job].failures
    for i, failure in enumerate(failures):
        if failure.generation == fact.generation:
            failures[i] = fact
            return
    failures.append(fact)


def _snapshot_taken(books: Books, fact: facts.SnapshotTaken) -> None:
    snapshots = books.jobs[fact.job].snapshots
    snapshots[fact.id] = fact
    while len(snapshots) > _KEPT_SNAPSHOTS:
        del snapshots[next(iter(snapshots))]


def _snapshot_suspected(books: Books, fact: facts.SnapshotSuspected) -> None:
    job = books.jobs[fact.job]
    (job.suspects_in_memory if fact.memory else job.suspects)[fact.id] = fact.why


def _job_ended(books: Books, fact: facts.JobEnded) -> None:
    job = books.jobs[fact.job]
    job.over, job.replan = fact, None
    books.live.pop((job.spec.uid, job.spec.run_id), None)


def _incident_written(books: Books, fact: facts.IncidentWritten) -> None:
    incident = fact.incident
    books.incidents[incident.id] = incident
    books.next_incident = max(books.next_incident, incident.id + 1)
    if incident.job in books.jobs:
        books.jobs[incident.job].incidents[incident.generation] = incident.id
    while len(books.incidents) > _KEPT_INCIDENTS:
        del books.incidents[next(iter(books.incidents))]


_NOT_THE_JOBS_OWN: frozenset[type[Fact]] = frozenset(
    {
        facts.JobCreated,
        facts.NodeMoved,
        facts.FindingSeen,
        facts.IncidentWritten,
        facts.OperatorAsked,
    }
)

_ENTER: dict[type[Fact], Callable[[Books, Any], None]] = {
    facts.CoordinatorStarted: _coordinator_started,
    facts.AgentSeen: _agent_seen,
    facts.AgentSilent: _agent_silent,
    facts.AgentHeard: _agent_heard,
    facts.NodeMoved: _node_moved,
    facts.NodeCordoned: _node_cordoned,
    facts.FindingSeen: _finding_seen,
    facts.JobCreated: _job_created,
    facts.LauncherJoined: _launcher_joined,
    facts.LauncherLeft: _launcher_left,
    facts.LauncherTold: _launcher_told,
    facts.ReplanAsked: _replan_asked,
    facts.NodesAwaited: _nodes_awaited,
    facts.GenerationProposed: _generation_proposed,
    facts.PlanCommitted: _plan_committed,
    facts.RanksUp: _ranks_up,
    facts.RankDown: _rank_down,
    facts.GenerationTimed: _generation_timed,
    facts.NodeDone: _node_done,
    facts.FailureCounted: _failure_counted,
    facts.SnapshotTaken: _snapshot_taken,
    facts.SnapshotSuspected: _snapshot_suspected,
    facts.JobEnded: _job_ended,
    facts.IncidentWritten: _incident_written,
}


def replay(journaled: list[AnyFact]) -> Books:
    """Return the books after these facts."""
    books = Books()
    for fact in journaled:
        books.apply(fact)
    return books
