"""One job: its book, and what a restart of the coordinator may forget of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.coordinator.membership import Away, Gone, Out, Ready, Standing
from everstep.coordinator.resuming import Held
from everstep.coordinator.silence import Seen
from everstep.wire.messages import Evicted, Member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from everstep.coordinator.books import Books, JobBook, Seat
    from everstep.coordinator.config import CoordinatorConfig
    from everstep.coordinator.incidents import Clue
    from everstep.coordinator.nodes import Nodes
    from everstep.coordinator.timing import Timing
    from everstep.coordinator.turn import Address, Turn
    from everstep.wire.messages import AgentMessage, RankProgress

_BEFORE_STEPS = frozenset({"start", "restore", "first_step"})


@dataclass(frozen=True, slots=True)
class Proposal:
    """A generation whose store is being bound by its first member."""

    generation: int
    members: tuple[Member, ...]
    spares: tuple[str, ...]
    deadline_s: float

    @property
    def first(self) -> str:
        """The node that is to bind the store."""
        return self.members[0].node


@dataclass(slots=True, eq=False)
class Job:
    """The live half of a job; `book` is the durable one."""

    book: JobBook
    books: Books
    nodes: Nodes
    config: CoordinatorConfig
    since_s: float  # when this coordinator took it up
    attached: dict[str, Address] = field(default_factory=dict)
    detached_s: dict[str, float] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    proposal: Proposal | None = None
    waiting: str = ""
    joined_s: float = 0.0
    hold_until_s: float = 0.0
    unbound: list[str] = field(default_factory=list)
    rank_clients: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    came_up: set[tuple[int, str]] = field(default_factory=set)  # generation and node
    top_step: int = 0
    furthest: dict[int, int] = field(default_factory=dict)
    hearsay: list[Clue] = field(default_factory=list)  # of ranks whose launcher has said nothing
    ready_to_grow_s: float | None = None
    timing: Timing | None = None
    held: Held = field(default_factory=Held)  # snapshots in memory

    # ------------------------------------------------------------------------ launchers

    def attach(self, node: str, address: Address) -> None:
        """A launcher speaks to us."""
        self.attached[node] = address
        self.detached_s.pop(node, None)
        self.stuck.discard(node)

    def detach(self, node: str, now_s: float) -> None:
        """A launcher cannot be reached, which says nothing about its ranks.

        Its time to come back starts anew whenever its agent does.
        """
        self.attached.pop(node, None)
        self.detached_s[node] = now_s

    def forget_ranks(self, node: str) -> None:
        """A node's agent reconnected: its ranks introduce themselves anew."""
        self.rank_clients = {k: v for k, v in self.rank_clients.items() if k[0] != node}

    def tell(self, turn: Turn, node: str, body: AgentMessage) -> None:
        """Send to a node's launcher, if it can be reached."""
        if (address := self.attached.get(node)) is not None:
            turn.send_client(address, body)

    def present(self) -> list[Seat]:
        """Return the seats whose launcher has not left."""
        return [s for s in self.book.seats.values() if s.left_at_s is None]

    # ------------------------------------------------------------------------ standing

    def standings(self, now_s: float) -> dict[str, Standing]:
        """Return what each node that joined is good for now, in the order of joining."""
        return {seat.node: self.standing(seat, now_s) for seat in self.book.seats.values()}

    def standing(self, seat: Seat, now_s: float) -> Standing:
        """Return what one node is good for now."""
        node = self.books.node(seat.node)
        if seat.node in self.book.done:
            return Out("its ranks are done")
        if node.state != "healthy":
            return Out(f"{node.state}: {node.why}")
        if seat.left_at_s is not None:
            return Gone(seat.left_at_s + self.config.rejoin_s, f"{seat.node}: {seat.left_why}")
        if (away_s := self.nodes.away_since(seat.node, now_s)) is not None:
            return self._away(seat.node, away_s, now_s)
        if seat.node not in self.attached:
            since_s = self.detached_s.get(seat.node, self.since_s)
            return Away(since_s + self.config.absent_s, f"launcher of {seat.node} is not heard")
        if seat.node in self.stuck:
            return Out("held up the start")
        if node.cordoned and seat.node not in self.book.members:
            return Out("cordoned")
        return Ready(
            Member(node=seat.node, address=seat.address, local_world_size=seat.local_world_size)
        )

    def _away(self, node: str, away_s: float, now_s: float) -> Standing:
        until_s = away_s + self.config.absent_s
        why = f"agent of {node} is not heard"
        # Its own ranks or launcher failed and then its agent went: no need to wait with a spare.
        if node == self._culprit() and now_s - away_s >= self.config.silence.silent_s:
            return Gone(until_s, why)
        return Away(until_s, why)

    def _culprit(self) -> str | None:
        incident = self.books.incidents.get(self.book.incidents.get(self.book.generation, 0))
        return incident.root.node if incident is not None and incident.root is not None else None

    def evicted(self) -> list[Evicted]:
        """Return the nodes of this job that are shut out, for the plan."""
        shut = [
            self.books.node(name)
            for name in self.book.seats
            if self.books.node(name).state in ("evicted", "broken")
        ]
        return [Evicted(node=n.name, why=n.why, evidence=n.evidence) for n in shut]

    def silent(self, now_s: float) -> list[str]:
        """Return the members whose agent is not heard."""
        away_since = self.nodes.away_since
        return [node for node in self.book.members if away_since(node, now_s) is not None]

    # ------------------------------------------------------------------------ progress

    def ranks(self, now_s: float, *, generation: int | None = None) -> Iterator[Seen]:
        """Yield the ranks of the generation in force that are seen now, member by member."""
        wanted = self.book.generation if generation is None else generation
        for node in self.book.members:
            session = self.nodes.sessions.get(node)
            if session is None or self.nodes.away_since(node, now_s) is not None:
                continue
            for progress in session.beat.ranks if session.beat else ():
                if self.owns(progress) and progress.generation == wanted:
                    yield Seen(node, session.beat_at_s, progress)

    def last_ranks(self, node: str) -> tuple[RankProgress, ...]:
        """Return what a node's agent last said of this job's ranks there."""
        session = self.nodes.sessions.get(node)
        ranks = session.ranks if session else []
        return tuple(r for r in ranks if self.owns(r) and r.generation == self.book.generation)

    def owns(self, progress: RankProgress) -> bool:
        """Return whether a page is of this job and of its user."""
        return progress.job == self.book.id and progress.uid in (-1, 0, self.book.spec.uid)

    def reached(self) -> int | None:
        """Return the highest step seen in the generation in force, None if no rank came up."""
        generation = self.book.generation
        seen = [r.step for node in self.book.members for r in self.last_ranks(node)]
        if (before := self.furthest.get(generation)) is not None:
            seen.append(before)
        if not seen and not any(g == generation for g, _ in self.came_up):
            return None
        step = max(seen, default=0)
        self.furthest = {generation: step}
        self.top_step = max(self.top_step, step)
        return step

    def stepping(self, now_s: float) -> bool:
        """Return whether every rank of the generation in force has taken a step in it."""
        seen = [s.progress for s in self.ranks(now_s)]
        done = {p.rank for p in seen if p.phase not in _BEFORE_STEPS}
        return len(done) >= self.book.world_size > 0

    def waits_for_first_step(self, now_s: float) -> bool:
        """Return whether ranks are seen, and none of them past its first step."""
        phases = {s.progress.phase for s in self.ranks(now_s)}
        return bool(phases) and phases <= _BEFORE_STEPS
