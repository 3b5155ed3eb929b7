"""The agents: who is connected, who is heard, and how a node that was lost comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.coordinator import facts
from everstep.wire.codec import check_schema
from everstep.wire.errors import SchemaMismatchError
from everstep.wire.messages import CoordinatorRefusal, CoordinatorWelcome

if TYPE_CHECKING:
    from collections.abc import Collection

    from everstep.coordinator.books import Books, NodeBook
    from everstep.coordinator.config import CoordinatorConfig
    from everstep.coordinator.turn import Turn
    from everstep.wire.messages import AgentHello, Heartbeat, RankProgress

_TAKE_OVER_S = 30.0  # another machine may have a hung one's name only after this
_RETRY_S = 2.0
_FADES = 0.95  # a heartbeat


@dataclass(slots=True, eq=False)
class Session:
    """One connection of one agent. Heartbeats touch nothing but this."""

    node: str
    connection: int
    hello: AgentHello
    since_s: float
    heard_at_s: float
    listened_s: float = 0.0  # its silence counts from here: not while we ourselves did not listen
    pause_s: float = 0.0  # the longest between two heartbeats of late, fading
    closed_at_s: float | None = None
    beat: Heartbeat | None = None
    beat_at_s: float = 0.0
    beats: int = 0
    ranks: list[RankProgress] = field(default_factory=list)  # of the last beat that had any
    silent: bool = False

    def take(self, beat: Heartbeat, now_s: float) -> None:
        """Take a heartbeat: no fact, no decision, as cheap as can be."""
        if self.beats:
            self.pause_s = max(now_s - self.beat_at_s, self.pause_s * _FADES)
        self.heard_at_s = self.beat_at_s = now_s
        self.beat = beat
        self.beats += 1
        if beat.ranks:
            self.ranks = beat.ranks

    def to_ours(self, at_s: float, now_s: float) -> tuple[float, float]:
        """Return a time of the node's clock by our clock, and its error bound."""
        if self.beat is None or self.beat.offset_s is None:
            return min(at_s, now_s), 1.0
        return min(at_s + self.beat.offset_s, now_s), self.beat.error_s or 0.0


class Nodes:
    """All sessions, the last one of each node."""

    def __init__(self, books: Books, config: CoordinatorConfig, now_s: float) -> None:
        self.sessions: dict[str, Session] = {}
        self._books = books
        self._config = config
        self._silence = config.silence
        self._judges_from_s = now_s + config.silence.start_grace_s

    # ------------------------------------------------------------------------ coming and going

    def connect(
        self, turn: Turn, connection: int, hello: AgentHello
    ) -> CoordinatorWelcome | CoordinatorRefusal:
        """Take an agent in, or say why not."""
        try:
            check_schema(hello.schema, who=f"the agent of {hello.node} ({hello.version})")
        except SchemaMismatchError as exc:
            return CoordinatorRefusal(why=str(exc))
        before = self.sessions.get(hello.node)
        if before is not None and before.closed_at_s is None:
            if (why := self._taken(before, hello, turn.now_s)) is not None:
                return CoordinatorRefusal(why=why, retry_s=_RETRY_S)
            turn.hang_up(before.connection, "a newer connection of the same agent took over")
        session = Session(hello.node, connection, hello, turn.now_s, turn.now_s)
        session.silent = self._books.node(hello.node).silent_since_s is not None
        if before is not None:
            session.ranks, session.silent = before.ranks, before.silent
        self.sessions[hello.node] = session
        self._enter(turn, hello)
        return CoordinatorWelcome(epoch=self._books.epoch)

    def closed(self, turn: Turn, connection: int, node: str) -> bool:
        """Note that a connection ended; False when another one has taken over already."""
        session = self.sessions.get(node)
        if session is None or session.connection != connection:
            return False
        session.closed_at_s = turn.now_s
        return True

    def cut(self, turn: Turn, node: str, why: str) -> None:
        """Hang up on a node's agent: what it still holds back is from before."""
        session = self.sessions.get(node)
        if session is not None and session.closed_at_s is None:
            turn.hang_up(session.connection, why)

    def connected(self, node: str) -> Session | None:
        """Return the session of a node that is not closed, silent or not."""
        session = self.sessions.get(node)
        return session if session is not None and session.closed_at_s is None else None

    def _taken(self, before: Session, hello: AgentHello, now_s: float) -> str | None:
        theirs, ours = before.hello, hello
        if theirs.epoch == ours.epoch:
            return None
        silent_s = now_s - before.heard_at_s
        same_boot = (theirs.machine_id, theirs.boot_id) == (ours.machine_id, ours.boot_id)
        if silent_s > (self._silence.silent_s if same_boot else _TAKE_OVER_S):
            return None
        return (
            f"the name {hello.node!r} is held by a live agent at {theirs.address or 'unknown'} "
            f"(boot {theirs.boot_id}, heard {silent_s:.1f} s ago); give this one a name of its "
            "own: `node = ...` in its table [agent], or stop the other"
        )

    def _enter(self, turn: Turn, hello: AgentHello) -> None:
        book = self._books.node(hello.node)
        known = (book.epoch, book.machine_id, book.boot_id, book.address)
        restarted = book.epoch != hello.epoch
        if known != (hello.epoch, hello.machine_id, hello.boot_id, hello.address):
            turn.record(
                facts.AgentSeen(
                    at_s=turn.now_s,
                    node=hello.node,
                    epoch=hello.epoch,
                    machine_id=hello.machine_id,
                    boot_id=hello.boot_id,
                    address=hello.address,
                    version=hello.version,
                )
            )
        if restarted and book.state == "evicted" and book.returns:
            self.move(turn, hello.node, "testing", "its agent was started anew", "coordinator")

    # ------------------------------------------------------------------------ silence

    def renew(self, now_s: float) -> None:
        """Start the silence timers anew: it was we who did not listen."""
        for session in self.sessions.values():
            session.listened_s = now_s

    def listening(self, now_s: float) -> bool:
        """Return whether this coordinator has been up long enough to judge anybody's silence."""
        return now_s >= self._judges_from_s

    def away_since(self, node: str, now_s: float) -> float | None:
        """Return since when a node's agent is away, None while it is heard."""
        session = self.sessions.get(node)
        if session is None:
            return self._judges_from_s  # not heard since our start: it counts from the grace's end
        if session.closed_at_s is not None:
            return session.closed_at_s
        since_s = max(session.heard_at_s, session.listened_s)
        if now_s - since_s < self._silence.silent_s or not self.listening(now_s):
            return None
        return since_s

    def watch(self, turn: Turn, engaged: Collection[str]) -> tuple[list[str], list[str]]:
        """Note silence and its end; return the nodes that fell silent and those heard again.

        `engaged` are the nodes that belong to a live job: only their silence is worth a fact.
        """
        silenced = [n for n in engaged if n not in self.sessions and self._fell_silent(turn, n)]
        heard: list[str] = []
        for session in self.sessions.values():
            since_s = self.away_since(session.node, turn.now_s)
            silent = since_s is not None and self._long(since_s, turn.now_s)
            if silent == session.silent:
                continue
            session.silent = silent
            if not silent and self._is_heard(turn, session.node):
                heard.append(session.node)
            elif silent and session.node in engaged and self._fell_silent(turn, session.node):
                silenced.append(session.node)
        return silenced, heard

    def _fell_silent(self, turn: Turn, node: str) -> bool:
        since_s = self.away_since(node, turn.now_s)
        told = self._books.node(node).silent_since_s is not None
        if told or since_s is None or not self._long(since_s, turn.now_s):
            return False
        closed = self.connected(node) is None
        turn.record(facts.AgentSilent(at_s=turn.now_s, node=node, since_s=since_s, closed=closed))
        return True

    def _long(self, since_s: float, now_s: float) -> bool:
        return self.listening(now_s) and now_s - since_s >= self._silence.silent_s

    def _is_heard(self, turn: Turn, node: str) -> bool:
        since_s = self._books.node(node).silent_since_s
        if since_s is None:
            return False
        silent_s = turn.now_s - since_s
        turn.record(facts.AgentHeard(at_s=turn.now_s, node=node, silent_s=silent_s))
        return True

    # ------------------------------------------------------------------------ a node's life

    def move(self, turn: Turn, node: str, state: facts.NodeState, why: str, by: str) -> None:
        """Change a node's state."""
        turn.record(facts.NodeMoved(at_s=turn.now_s, node=node, state=state, why=why, by=by))

    def test(self, turn: Turn) -> list[str]:
        """Look at the nodes under test; return those that are healthy again."""
        passed = []
        for book in self._books.nodes.values():
            if book.state != "testing":
                continue
            trouble = self._trouble(book, turn.now_s)
            if trouble is None:
                self.move(turn, book.name, "healthy", "passed its tests", "coordinator")
                passed.append(book.name)
            elif turn.now_s - book.since_s > self._config.testing_s:
                why = f"failed its tests: {trouble}"
                self.move(turn, book.name, "broken", why, "coordinator")
        return passed

    def _trouble(self, book: NodeBook, now_s: float) -> str | None:
        session = self.connected(book.name)
        if session is None or self.away_since(book.name, now_s) is not None:
            return "its agent is not heard"
        if session.beat is None or session.beats < 2:
            return "too few heartbeats"
        offset_s = session.beat.offset_s
        if offset_s is None:
            offset_s = session.beat_at_s - session.beat.sent_at_s
        if abs(offset_s) > self._config.max_clock_offset_s:
            return f"its clock is {offset_s:+.1f} s off"
        if session.beat.health != "healthy":
            return f"its agent says {session.beat.health}"
        return None
