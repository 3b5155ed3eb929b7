"""The decision core: events in, effects out, no clock and no socket of its own.

Time is an argument, chance (`nonce`) a parameter. What is durable is in `books`, rebuilt from the
journal; the rest is what agents and launchers say again when they reconnect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.coordinator import facts, failing, planning, progress, resuming, timing, watching
from everstep.coordinator.alarms import Alarms
from everstep.coordinator.incidents import Clue
from everstep.coordinator.job import Job
from everstep.coordinator.joining import Applicant, Door
from everstep.coordinator.nodes import Nodes, Session
from everstep.coordinator.turn import Address, Effect, Turn
from everstep.wire.messages import (
    Ack,
    ClientGone,
    CoordinatorRefusal,
    CoordinatorWelcome,
    FindingAck,
    FromClient,
    GroupSucceeded,
    Hello,
    Join,
    Leaving,
    NodeFinding,
    RankEnded,
    RankFinding,
    RanksStarted,
    RankTimeline,
    SnapshotCommitted,
    SnapshotHeld,
    SnapshotRejected,
    StoreBound,
    StoreFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from everstep.coordinator.books import Books
    from everstep.coordinator.config import CoordinatorConfig
    from everstep.coordinator.incidents import IncidentKind
    from everstep.wire.messages import AgentHello, Evidence

TICK_S = 0.1
BROKEN_CONNECTION = "connection.broken"
"""The finding with which a rank says that its connection to another one broke."""

_WATCH_NODES_S = 0.25


class Cluster:
    """Everything that the coordinator knows and decides."""

    def __init__(
        self,
        books: Books,
        config: CoordinatorConfig,
        *,
        now_s: float,
        nonce: Callable[[], str],
    ) -> None:
        self.books = books
        self.config = config
        self.nodes = Nodes(books, config, now_s)
        self.jobs: dict[str, Job] = {}
        self.refused: list[str] = []
        self.door = Door(self.jobs, nonce=nonce, open_job=self._open_job)
        self.alarms = Alarms(books)
        self._ticked_s = self._watched_s = now_s
        for book in books.live_jobs():
            self.jobs[book.id] = self._job(book.id, now_s)

    def start(self, now_s: float, version: str) -> list[Effect]:
        """Take the journal over: a new epoch."""
        turn = Turn(now_s, self.books)
        epoch = self.books.epoch + 1
        turn.record(facts.CoordinatorStarted(at_s=now_s, epoch=epoch, version=version))
        return turn.effects

    # ------------------------------------------------------------------------ agents

    def connect(
        self, now_s: float, connection: int, hello: AgentHello
    ) -> tuple[CoordinatorWelcome | CoordinatorRefusal, list[Effect]]:
        """Take an agent in, or refuse it."""
        turn = Turn(now_s, self.books)
        started_anew = self.books.node(hello.node).epoch != hello.epoch
        reply = self.nodes.connect(turn, connection, hello)
        if isinstance(reply, CoordinatorWelcome):
            for job in self._jobs_on(hello.node):
                if started_anew:
                    job.held.forget(hello.node)
                job.detach(hello.node, now_s)
                job.forget_ranks(hello.node)
                seat = job.book.seats[hello.node]
                if seat.boot_id != hello.boot_id:
                    failing.launcher_gone(
                        turn, job, hello.node, "the machine was started anew", said=False
                    )
                planning.advance(turn, job)
        return reply, turn.effects

    def closed(self, now_s: float, connection: int, node: str) -> list[Effect]:
        """An agent's connection ended, which is no reason to accuse anybody."""
        turn = Turn(now_s, self.books)
        if self.nodes.closed(turn, connection, node):
            for job in self._jobs_on(node):
                job.detach(node, now_s)
        return turn.effects

    def receive(
        self, now_s: float, session: Session, message: FromClient | ClientGone | NodeFinding
    ) -> list[Effect]:
        """Take a message of an agent in; heartbeats go to `Session.take` instead."""
        session.heard_at_s = now_s
        turn = Turn(now_s, self.books)
        match message:
            case FromClient():
                self._from_client(turn, session, message)
            case ClientGone():
                self._client_gone(turn, session, message)
            case NodeFinding(seq=seq, finding=finding, plugin=plugin):
                turn.record(
                    facts.FindingSeen(at_s=now_s, node=session.node, source=plugin, finding=finding)
                )
                turn.send(session.connection, FindingAck(seq=seq))
        return turn.effects

    # ------------------------------------------------------------------------ the clock

    def tick(self, now_s: float) -> list[Effect]:
        """Let time pass. Called every `TICK_S`; a call that comes late says so itself."""
        if now_s - self._ticked_s > TICK_S + self.config.silence.late_loop_s:
            self.nodes.renew(now_s)
        self._ticked_s = now_s
        turn = Turn(now_s, self.books)
        self.door.look(turn)
        if now_s - self._watched_s >= _WATCH_NODES_S:
            self._watched_s = now_s
            self._watch_nodes(turn)
        for job in list(self.jobs.values()):
            self._watch(turn, job)
            if job.book.over is not None:
                self.jobs.pop(job.book.id, None)
        return turn.effects

    def _watch(self, turn: Turn, job: Job) -> None:
        silent = job.silent(turn.now_s)
        for loss in list(watching.losses(job, silent, turn.now_s)):
            if failing.node_lost(turn, job, loss):
                self.evict(turn, loss.node, loss.why, job=job, evidence=loss.evidence)
        if (stand := watching.stands(job, turn.now_s)) is not None:
            node = failing.stands_still(turn, job, stand)
            if node is not None:
                self.evict(turn, node, f"again: {stand.why}", job=job, evidence=())
        self._give_up_detached(turn, job)
        planning.watch(turn, job, silent)
        planning.consider_growth(turn, job, at_snapshot=False)
        progress.watch_resumption(turn, job)
        if job.book.over is None:
            timing.sample(turn, job)

    def _give_up_detached(self, turn: Turn, job: Job) -> None:
        """A launcher that does not come back though its agent did is gone."""
        for node, since_s in list(job.detached_s.items()):
            if turn.now_s - since_s < self.config.absent_s:
                continue
            session = self.nodes.connected(node)
            seat = job.book.seats[node]
            if seat.left_at_s is not None:
                job.detached_s.pop(node)
            elif session is not None and self.nodes.away_since(node, turn.now_s) is None:
                why = f"its launcher (pid {seat.pid}) did not come back with its agent"
                failing.launcher_gone(turn, job, node, why, said=False)

    def _watch_nodes(self, turn: Turn) -> None:
        seated = {s.node for job in self.jobs.values() for s in job.present()}
        engaged = {n for n in seated if self.books.node(n).state == "healthy"}
        silenced, heard = self.nodes.watch(turn, engaged)
        self.alarms.raise_for(turn, silenced)
        self.alarms.end_for(turn, heard)
        self.nodes.test(turn)

    # ------------------------------------------------------------------------ nodes

    def evict(
        self,
        turn: Turn,
        node: str,
        why: str,
        *,
        job: Job | None,
        evidence: Sequence[Evidence] = (),
        by: str = "coordinator",
    ) -> None:
        """Shut a node out of all jobs. One that was lost may come back with a restarted agent."""
        turn.record(
            facts.NodeMoved(
                at_s=turn.now_s,
                node=node,
                state="evicted",
                why=why,
                by=by,
                returns=job is not None,
                evidence=list(evidence),
                job=job.book.id if job else None,
            )
        )
        if job is not None:
            self.nodes.cut(turn, node, f"evicted: {why}")
        kind: IncidentKind = "failure" if by == "coordinator" else "operator"
        for other in list(self.jobs.values()):
            failing.node_evicted(turn, other, node, why, kind=kind)
            planning.advance(turn, other)

    # ------------------------------------------------------------------------ clients

    def _from_client(self, turn: Turn, session: Session, message: FromClient) -> None:
        body = message.body
        if isinstance(body, Join):
            applicant = Applicant.of(session, message, body, turn.now_s)
            self.door.knock(turn, applicant)
        elif isinstance(body, Hello):
            self._rank_hello(session, message, body)
        else:
            self._about_a_job(turn, session, message)
        if message.seq:
            turn.send_client(Address(session.connection, message.client), Ack(seq=message.seq))

    def _about_a_job(self, turn: Turn, session: Session, message: FromClient) -> None:
        body = message.body
        book = self.books.jobs.get(getattr(body, "nonce", None) or "")
        if book is None or message.peer.uid not in (0, book.spec.uid):
            return
        job = self.jobs.get(book.id)
        if isinstance(body, Leaving):
            job = job or self._job(book.id, turn.now_s)
            seat = book.seats.get(session.node)
            if seat is not None and seat.is_held_by(message.peer):
                failing.launcher_gone(turn, job, session.node, body.why, said=True)
        elif job is None:
            return
        elif isinstance(body, SnapshotHeld):
            resuming.held(job, session.node, body)
        else:
            self._job_message(turn, job, session, message)
        if isinstance(body, (Leaving, RankEnded)):
            planning.advance(turn, job)

    def _job_message(self, turn: Turn, job: Job, session: Session, message: FromClient) -> None:
        node = session.node
        match message.body:
            case StoreBound() as bind:
                planning.bound(turn, job, node, bind)
            case StoreFailed(generation=generation):
                planning.unbound(turn, job, node, generation)
            case RanksStarted() as started:
                progress.ranks_started(turn, job, node, started)
            case RankEnded() as ended:
                failing.rank_ended(turn, job, session, ended)
            case GroupSucceeded(generation=generation):
                progress.node_done(turn, job, node, generation)
            case SnapshotCommitted() as taken:
                if (why := progress.snapshot_taken(turn, job, node, taken)) is not None:
                    self.refused.append(why)
            case SnapshotRejected() as rejected:
                progress.snapshot_rejected(turn, job, rejected)
            case RankTimeline() | RankFinding() as said:
                _rank_says(turn, job, session, said)
            case _:
                pass

    def _rank_hello(self, session: Session, message: FromClient, hello: Hello) -> None:
        job = self.jobs.get(hello.job or "")
        if job is None or message.peer.uid not in (0, job.book.spec.uid):
            return
        if hello.generation is not None and hello.rank is not None:
            job.rank_clients[session.node, message.client] = (hello.generation, hello.rank)
            job.came_up.add((hello.generation, session.node))

    def _client_gone(self, turn: Turn, session: Session, gone: ClientGone) -> None:
        self.door.forget(session.connection, gone.client)
        address = Address(session.connection, gone.client)
        for job in self._jobs_on(session.node):
            if job.attached.get(session.node) == address:
                if gone.died:
                    pid = gone.peer.pid
                    why = f"launcher (pid {pid}) ended without a word"
                    failing.launcher_gone(turn, job, session.node, why, said=False)
                else:
                    job.detach(session.node, turn.now_s)
                planning.advance(turn, job)
            if gone.last is not None:
                timing.last_words(turn, job, session, gone.last)
            place = job.rank_clients.pop((session.node, gone.client), None)
            if place is not None and gone.died:
                _vanish(turn, job, session.node, *place)

    def _jobs_on(self, node: str) -> list[Job]:
        return [job for job in self.jobs.values() if node in job.book.seats]

    def _job(self, nonce: str, now_s: float) -> Job:
        return Job(self.books.jobs[nonce], self.books, self.nodes, self.config, now_s)

    def _open_job(self, turn: Turn, nonce: str) -> Job:
        job = self.jobs[nonce] = self._job(nonce, turn.now_s)
        return job


def _vanish(turn: Turn, job: Job, node: str, generation: int, rank: int) -> None:
    if generation == job.book.generation and node not in job.book.done:
        what = f"the process of rank {rank} on {node} ended"
        clue = Clue(at_s=turn.now_s, kind="killed", node=node, what=what, rank=rank)
        job.hearsay.append(clue)


def _rank_says(turn: Turn, job: Job, session: Session, said: RankTimeline | RankFinding) -> None:
    if isinstance(said, RankTimeline):
        timing.told(turn, job, session, said)
    else:
        _rank_finding(turn, job, session.node, said)


def _rank_finding(turn: Turn, job: Job, node: str, found: RankFinding) -> None:
    turn.record(
        facts.FindingSeen(
            at_s=turn.now_s,
            node=node,
            source=f"job {job.book.id}",
            finding=found.finding,
            job=job.book.id,
            rank=found.rank,
        )
    )
    if found.finding.name == BROKEN_CONNECTION and node in job.book.members:
        what = f"rank {found.rank} on {node}: {found.finding.summary}"
        clue = Clue(at_s=turn.now_s, kind="broken", node=node, what=what, rank=found.rank)
        job.hearsay.append(clue)
