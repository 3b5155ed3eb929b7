"""What the journal holds: everything that happened, each thing once, in order.

The coordinator's durable state is a fold over these (see `books`). `at_s` is wall-clock time by
the coordinator's clock. Fields are added with defaults; a fact is never changed or reused.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.coordinator.incidents import Incident
from everstep.coordinator.times import GenerationTimes
from everstep.wire.messages import Evidence, Finding, Plan, Tally

NodeState = Literal["healthy", "evicted", "testing", "broken"]
Outcome = Literal["done", "failed", "stopped"]
FailureKind = Literal["error", "crash", "killed", "left", "lost", "hang", "unknown"]


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact", tag=True):
    """Root of all facts; the class name is the `fact` in the journal."""

    at_s: float


class CoordinatorStarted(Fact, frozen=True, kw_only=True):
    """A coordinator took over the journal; `epoch` grows with each."""

    epoch: int
    version: str = ""


# ----------------------------------------------------------------------------------------- nodes


class AgentSeen(Fact, frozen=True, kw_only=True):
    """An agent connected for the first time since its own start, or from another address."""

    node: str
    epoch: str
    machine_id: str
    boot_id: str
    address: str
    version: str = ""


class AgentSilent(Fact, frozen=True, kw_only=True):
    """An agent of a node in a live job is not heard: an alarm, and no more than that."""

    node: str
    since_s: float
    closed: bool


class AgentHeard(Fact, frozen=True, kw_only=True):
    """A silent agent is heard again."""

    node: str
    silent_s: float


class NodeMoved(Fact, frozen=True, kw_only=True):
    """A node's state changed. `returns` tells that a restarted agent may bring it back."""

    node: str
    state: NodeState
    why: str
    by: str
    returns: bool = False
    evidence: list[Evidence] = []
    job: str | None = None


class NodeCordoned(Fact, frozen=True, kw_only=True):
    """A node takes no new part in any job (or does again); what runs there goes on."""

    node: str
    cordoned: bool
    why: str
    by: str


class FindingSeen(Fact, frozen=True, kw_only=True):
    """A plugin of an agent, or a rank, found something."""

    node: str
    source: str
    finding: Finding
    job: str | None = None
    rank: int | None = None


# ------------------------------------------------------------------------------------------ jobs


class JobCreated(Fact, frozen=True, kw_only=True):
    """The first launcher of a run joined.

    `adopted` is the generation that it already ran under a coordinator whose journal is lost, 0
    for none.
    """

    job: str
    uid: int
    run_id: str
    min_nodes: int
    max_nodes: int
    local_world_size: int
    join_timeout_s: float
    command: str = ""
    adopted: int = 0


class LauncherJoined(Fact, frozen=True, kw_only=True):
    """A launcher took its node's seat in a job."""

    job: str
    node: str
    pid: int
    start_ticks: int
    boot_id: str
    address: str
    local_world_size: int


class LauncherLeft(Fact, frozen=True, kw_only=True):
    """A launcher ended or went; `said` tells that it took leave and knew why."""

    job: str
    node: str
    pid: int
    why: str
    said: bool = False


class LauncherTold(Fact, frozen=True, kw_only=True):
    """A launcher knows how its job ended."""

    job: str
    node: str


class ReplanAsked(Fact, frozen=True, kw_only=True):
    """The generation in force (0: none) must be followed by another."""

    job: str
    generation: int
    why: str
    asked_by: str
    incident: int | None = None


class NodesAwaited(Fact, frozen=True, kw_only=True):
    """The next generation cannot be formed of the nodes that are here."""

    job: str
    why: str


class GenerationProposed(Fact, frozen=True, kw_only=True):
    """A number was given out; it is never given out again."""

    job: str
    generation: int
    members: list[str]


class PlanCommitted(Fact, frozen=True, kw_only=True):
    """A plan is in force."""

    job: str
    plan: Plan


class RanksUp(Fact, frozen=True, kw_only=True):
    """A member's launcher started its ranks."""

    job: str
    node: str
    generation: int
    ranks: list[int]
    pids: list[int]


class RankDown(Fact, frozen=True, kw_only=True):
    """A rank of the generation in force ended, and not because somebody meant it to."""

    job: str
    node: str
    generation: int
    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    ended_at_s: float


class GenerationTimed(Fact, frozen=True, kw_only=True):
    """What is known of where a generation's time went; the newest one is the one that counts."""

    job: str
    generation: int
    times: GenerationTimes


class NodeDone(Fact, frozen=True, kw_only=True):
    """All ranks of a node ended with 0; it is never a member of this job again."""

    job: str
    node: str
    generation: int


class FailureCounted(Fact, frozen=True, kw_only=True):
    """A generation's failure entered the ledger; again when late evidence changed the verdict.

    `max_step` is the highest step that the job was ever seen at, `reached` the highest of this
    generation, None when no rank of it was seen at all.
    """

    job: str
    generation: int
    failure: FailureKind
    cause: str
    node: str | None
    rank: int | None
    exit_code: int
    error: str | None
    max_step: int
    reached: int | None
    newest_snapshot: str | None
    resumed_from: str | None = None


class SnapshotTaken(Fact, frozen=True, kw_only=True):
    """A snapshot counts from now on. `tally` is its step, when that was known by then."""

    job: str
    node: str
    id: str
    step: int
    generation: int
    path: str
    world_size: int
    bytes: int
    write_s: float
    stall_s: float = 0.0
    samples: int = 0
    final: bool = False
    tally: Tally | None = None


class SnapshotSuspected(Fact, frozen=True, kw_only=True):
    """No later plan names this snapshot; `memory` means what memory holds of it, and no more."""

    job: str
    id: str
    why: str
    memory: bool = False


class JobEnded(Fact, frozen=True, kw_only=True):
    """A job is over for good."""

    job: str
    outcome: Outcome
    exit_code: int
    why: str
    error: str | None = None


# ------------------------------------------------------------------------------------- the rest


class IncidentWritten(Fact, frozen=True, kw_only=True):
    """An incident was opened or changed; the newest one with an id is the one that counts."""

    incident: Incident
    job: str | None = None
    node: str | None = None


class OperatorAsked(Fact, frozen=True, kw_only=True):
    """A person asked for something through the API."""

    verb: str
    target: str
    reason: str
    by: str
    job: str | None = None
    node: str | None = None


class PluginFailed(Fact, frozen=True, kw_only=True):
    """An action or notifier did not do what it was asked; the decision stands all the same."""

    plugin: str
    why: str
    incident: int | None = None


AnyFact = (
    CoordinatorStarted
    | AgentSeen
    | AgentSilent
    | AgentHeard
    | NodeMoved
    | NodeCordoned
    | FindingSeen
    | JobCreated
    | LauncherJoined
    | LauncherLeft
    | LauncherTold
    | ReplanAsked
    | NodesAwaited
    | GenerationProposed
    | PlanCommitted
    | RanksUp
    | RankDown
    | GenerationTimed
    | NodeDone
    | FailureCounted
    | SnapshotTaken
    | SnapshotSuspected
    | JobEnded
    | IncidentWritten
    | OperatorAsked
    | PluginFailed
)
