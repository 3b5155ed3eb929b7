"""Every message between rank, launcher, agent, coordinator and the command line.

A message is a MessagePack map with its `kind`. Versions grow by adding fields with defaults; a
field that is no longer needed stays one version longer. Times are seconds: `*_at_s` is wall clock
(Unix), `*_mono_s` is CLOCK_MONOTONIC of the host that wrote it, other `*_s` are durations.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from everstep.wire.codec import SCHEMA


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """Root of all messages; the class name is the `kind`."""


# What a message says is journaled as JSON, which has neither NaN nor infinity, and later shown as
# dates. So both are refused at the door, and no whole number outgrows its column.
Moment = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
Duration = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]


# ---------------------------------------------------------------- what everybody hands around


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value, e.g. `hw.gpu.temperature` of one GPU.

    `value` None means "this device does not support it", which is never the same as zero.
    """

    name: str
    value: float | None
    unit: str = "1"
    attributes: dict[str, str] = {}
    counter: bool = False


Severity = Literal["info", "warning", "error", "fatal"]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One observed fact, with its time and where it was seen."""

    at_s: Moment
    what: str
    source: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that an operator would want to know about one component.

    `component` is `host`, `gpu:<uuid>`, `port:<name>`, `disk:<mount>`, `rank:<n>` or `job`.
    """

    name: str
    component: str
    severity: Severity
    summary: str
    at_s: Moment
    evidence: list[Evidence] = []
    suggested_action: str | None = None
    resolved: bool = False


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Who is at the other end of a Unix socket, as the kernel says it."""

    pid: Whole
    uid: Whole
    gid: Whole
    start_ticks: Whole
    boot_id: str


Phase = Literal["start", "restore", "first_step", "step", "snapshot", "eval", "end"]
PHASES: tuple[Phase, ...] = ("start", "restore", "first_step", "step", "snapshot", "eval", "end")


class Tally(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A finished step: when it was finished, and what had been waited by then.

    `data_s` and `snapshot_s` are sums over all steps of this generation. One comes with every rank
    of every heartbeat, so it is an array, and passed over by the garbage collector.
    """

    step: Whole
    at_s: Moment
    data_s: Duration = 0.0
    snapshot_s: Duration = 0.0


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent reads from one progress page, sent with each heartbeat.

    `standing_s` is the time since the rank last changed step or phase; `p99_step_s` is its own
    99th percentile over the steps of this generation, None before the second step. `pid` and `uid`
    are the kernel's word on who passed the page: another user's page says nothing about a job.
    `tally` is of the last finished step, by the node's clock.
    `stopped` is the kernel's word too: the process stands because a signal stopped it.
    """

    job: str
    generation: int
    rank: int
    pid: int
    phase: Phase
    step: int
    standing_s: float
    p99_step_s: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    lr: float | None = None
    step_s: float | None = None
    uid: int = -1
    tally: Tally | None = None
    stopped: bool = False


# ------------------------------------------------------------------------------------- plans


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A node that trains in a generation; its place in the plan's list is its group rank."""

    node: str
    address: str
    local_world_size: int


class Evicted(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was put out of the job, with the reason and what was seen, oldest first."""

    node: str
    why: str
    evidence: list[Evidence] = []


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Who trains in one generation, where its store is and from what it resumes.

    `resume` lists snapshot ids, newest first; the ranks agree on the first that verifies on all
    of them. An empty list means "from the beginning".
    """

    job: str
    run_id: str
    generation: int
    epoch: int
    members: list[Member]
    spares: list[str] = []
    evicted: list[Evicted] = []
    store_address: str = ""
    store_port: int = 0
    resume: list[str] = []
    skip_windows: list[tuple[int, int]] = []
    asked_by: str = ""
    why: str = ""
    mtbf_s: Duration | None = None
    """How long this job is expected to train between two failures, None when not known."""


# ------------------------------------------------ launcher and rank -> agent (-> coordinator)


class Hello(Message, frozen=True, kw_only=True):
    """First message of every client on the agent's socket.

    A launcher opens with role `launcher`; a rank with role `rank`, its place and the descriptor
    of its progress page (None of it is believed before the page's seals and header agree). Role
    `memory` hands over the memory files of a job's rank, one for each of `slots`, their sizes in
    bytes; the agent holds them and answers `Held`. Without `slots` it is about to `Fetch` them.
    """

    role: Literal["launcher", "rank", "cli", "memory"]
    schema: Whole = SCHEMA
    version: str = ""
    job: str | None = None
    generation: Whole | None = None
    rank: Whole | None = None
    local_rank: Whole | None = None
    world_size: Whole | None = None
    page: bool = False
    slots: list[Whole] = []


class Join(Message, frozen=True, kw_only=True):
    """A launcher asks to take part in a run; sent again, with the nonce, after every reconnect.

    `running_generation` is the generation whose ranks it runs now, 0 for none. `succeeded` tells
    that its ranks of that generation all ended with 0.
    """

    run_id: str
    nonce: str | None
    min_nodes: Whole
    max_nodes: Whole
    local_world_size: Whole
    address: str | None = None
    join_timeout_s: Duration = 600.0
    on_evict: Literal["park", "exit"] = "park"
    running_generation: Whole = 0
    succeeded: bool = False
    command: str = ""
    torch_version: str = ""


class StoreBound(Message, frozen=True, kw_only=True):
    """The first member's launcher listens for the ranks of a proposed generation."""

    nonce: str
    generation: Whole
    address: str
    port: Whole


class StoreFailed(Message, frozen=True, kw_only=True):
    """The store of a proposed generation could not be bound; another first member is needed."""

    nonce: str
    generation: Whole
    why: str


class RanksStarted(Message, frozen=True, kw_only=True):
    """The pids of the local ranks of one generation, in order of local rank."""

    nonce: str
    generation: Whole
    pids: list[Whole]
    ranks: list[Whole]


class RankEnded(Message, frozen=True, kw_only=True):
    """A local rank ended. `exit_code` and `signal` are both None when it is not known how."""

    nonce: str
    generation: Whole
    rank: Whole
    local_rank: Whole
    pid: Whole
    exit_code: Whole | None
    signal: Whole | None
    at_s: Moment
    expected: bool = False
    error: str | None = None
    stderr_tail: list[str] = []


class GroupSucceeded(Message, frozen=True, kw_only=True):
    """All local ranks of this generation ended with 0."""

    nonce: str
    generation: Whole


class Leaving(Message, frozen=True, kw_only=True):
    """The launcher goes; the code and the reason that its user sees."""

    nonce: str | None
    exit_code: Whole
    why: str


class SnapshotCommitted(Message, frozen=True, kw_only=True):
    """A snapshot's marker is durable. Kept and repeated by the rank until it is acknowledged."""

    nonce: str
    id: str
    step: Whole
    generation: Whole
    path: str
    world_size: Whole
    bytes: Whole
    write_s: Duration
    stall_s: Duration = 0.0
    samples: Whole = 0
    final: bool = False


class SnapshotHeld(Message, frozen=True, kw_only=True):
    """A rank's newest snapshot in this node's memory; each rank says so, as often as it takes one.

    `replicated` means that this piece alone is the whole state (but for what is the rank's own).
    It is never journaled nor acknowledged; it is said again when a coordinator is reached anew.
    """

    nonce: str
    id: str
    step: Whole
    generation: Whole
    rank: Whole
    replicated: bool = False


class SnapshotRejected(Message, frozen=True, kw_only=True):
    """A snapshot that a plan named did not load; no later plan names it again.

    `memory` means that only its pieces in memory are no good (damaged, or not there any more): a
    copy on disk still counts.
    """

    nonce: str
    id: str
    why: str
    memory: bool = False


class RankFinding(Message, frozen=True, kw_only=True):
    """A finding made inside a rank, e.g. a loss spike or a disk that is full."""

    nonce: str
    rank: Whole
    step: Whole
    finding: Finding


class Fetch(Message, frozen=True, kw_only=True):
    """A client of role `memory` asks for what is held of its place; `Held` answers."""


class RankTimeline(Message, frozen=True, kw_only=True):
    """When a rank came up, as far as it has got, by its node's clock.

    Sent by the first rank of each node at every new moment, and again after each reconnect.
    `began`: the process, or its work for this generation, began; `opened`: imports are done;
    `grouped`: the process group is formed; `restored`: the state is there and the first step
    begins; `stepped`: the first step is finished; `saved`: the last snapshot is durable.
    """

    nonce: str
    generation: Whole
    rank: Whole
    from_step: Whole | None = None
    began_at_s: Moment | None = None
    opened_at_s: Moment | None = None
    grouped_at_s: Moment | None = None
    restored_at_s: Moment | None = None
    stepped_at_s: Moment | None = None
    saved_at_s: Moment | None = None


class Ask(Message, frozen=True, kw_only=True):
    """The command line asks the local agent: `status` or `plugins`."""

    what: Literal["status", "plugins"]


ClientMessage = (
    Hello
    | Join
    | StoreBound
    | StoreFailed
    | RanksStarted
    | RankEnded
    | GroupSucceeded
    | Leaving
    | SnapshotCommitted
    | SnapshotHeld
    | SnapshotRejected
    | RankFinding
    | Fetch
    | RankTimeline
    | Ask
)


class Numbered(Message, frozen=True, kw_only=True):
    """A client's message with its number; it is repeated until `Ack` covers the number."""

    seq: Whole
    body: ClientMessage


# ----------------------------------------------------------------- (coordinator ->) agent -> client


class Welcome(Message, frozen=True, kw_only=True):
    """The agent's answer to Hello."""

    node: str
    schema: int = SCHEMA
    version: str = ""
    coordinator: bool = False


class Link(Message, frozen=True, kw_only=True):
    """Whether the agent reaches a coordinator now.

    Clients repeat what was not acknowledged when `up` turns true; a launcher joins again.
    """

    up: bool


class Joined(Message, frozen=True, kw_only=True):
    """The coordinator took the launcher in; `nonce` names the job from now on.

    `address` is what other nodes will be told to connect to; "" leaves it to the launcher.
    """

    nonce: str
    node: str
    address: str = ""


class BindStore(Message, frozen=True, kw_only=True):
    """Bind the store of the proposed generation and answer StoreBound within 2 s."""

    nonce: str
    generation: int


class Committed(Message, frozen=True, kw_only=True):
    """The plan in force; sent to every launcher of the job, members, spares and evicted alike."""

    plan: Plan


class JobOver(Message, frozen=True, kw_only=True):
    """The job ended. The launcher shows `why` and leaves with `exit_code`."""

    nonce: str
    outcome: Literal["done", "failed", "stopped"]
    exit_code: int
    why: str
    error: str | None = None


class Refused(Message, frozen=True, kw_only=True):
    """The request cannot be met: what is wrong and what to do. The client leaves with the code."""

    why: str
    exit_code: int = 69


class Ack(Message, frozen=True, kw_only=True):
    """The coordinator has journaled everything of this client up to and including `seq`."""

    seq: int


class Held(Message, frozen=True, kw_only=True):
    """What the agent holds of a place: sizes in bytes, in the order in which it was handed over.

    As the answer to `Fetch` the descriptors ride along.
    """

    sizes: list[int] = []


class Facts(Message, frozen=True, kw_only=True):
    """The agent's answer to Ask, as JSON text."""

    json: str


AgentMessage = (
    Welcome | Link | Joined | BindStore | Committed | JobOver | Refused | Ack | Held | Facts
)


# ------------------------------------------------------------------------- agent -> coordinator


class AgentHello(Message, frozen=True, kw_only=True):
    """First message on the WebSocket. `epoch` is new with every start of the agent process."""

    node: str
    epoch: str
    machine_id: str
    boot_id: str
    address: str
    token: str = ""
    schema: Whole = SCHEMA
    version: str = ""
    abilities: list[str] = []


class Heartbeat(Message, frozen=True, kw_only=True):
    """Once a second, and at once when a rank comes to a standstill.

    `sent_at_s` and the reply give the node's clock offset. `offset_s`/`error_s` are what the agent
    learned from the reply before.
    """

    seq: int
    sent_at_s: float
    ranks: list[RankProgress] = []
    offset_s: float | None = None
    error_s: float | None = None
    health: str = "healthy"


class FromClient(Message, frozen=True, kw_only=True):
    """A client's message, with who sent it by the kernel's word.

    `client` is unique within the agent's epoch. `seq` is the client's number, 0 for a message that
    needs no acknowledgement.
    """

    client: str
    peer: Peer
    body: ClientMessage
    seq: Whole = 0


class ClientGone(Message, frozen=True, kw_only=True):
    """A client's process ended or hung up. `died` is true when the pidfd says the process ended.

    `last` is what its progress page says after that: where exactly the rank got to.
    """

    client: str
    peer: Peer
    died: bool
    at_s: Moment
    last: RankProgress | None = None


class NodeFinding(Message, frozen=True, kw_only=True):
    """A finding of one of the agent's own plugins; repeated until acknowledged."""

    seq: Whole
    finding: Finding
    plugin: str


AgentToCoordinator = AgentHello | Heartbeat | FromClient | ClientGone | NodeFinding


# ------------------------------------------------------------------------- coordinator -> agent


class CoordinatorWelcome(Message, frozen=True, kw_only=True):
    """The coordinator takes the agent in. `epoch` grows with every start of the coordinator.

    The agent forgets `holding` clients' acknowledgements and tells its clients `Link(up=True)`.
    """

    epoch: int
    schema: int = SCHEMA
    version: str = ""


class CoordinatorRefusal(Message, frozen=True, kw_only=True):
    """The agent is not taken in (token, name taken, schema): it says so, waits and tries again."""

    why: str
    retry_s: float = 5.0


class HeartbeatReply(Message, frozen=True, kw_only=True):
    """Received and sent times by the coordinator's clock, for the node's clock offset."""

    seq: int
    received_at_s: float
    sent_at_s: float


class ToClient(Message, frozen=True, kw_only=True):
    """A message for one of the agent's clients."""

    client: str
    body: AgentMessage


class FindingAck(Message, frozen=True, kw_only=True):
    """Every NodeFinding up to and including `seq` is journaled."""

    seq: int


CoordinatorToAgent = (
    CoordinatorWelcome | CoordinatorRefusal | HeartbeatReply | ToClient | FindingAck
)
