"""Launchers that join: into which job, into which seat, or why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from everstep.coordinator import ending, facts, failing, planning, progress
from everstep.coordinator.turn import Address
from everstep.wire.exit_codes import EVICTED, STOPPED, USAGE
from everstep.wire.messages import Committed, Joined, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.coordinator.books import JobBook, Seat
    from everstep.coordinator.job import Job
    from everstep.coordinator.nodes import Session
    from everstep.coordinator.turn import Turn
    from everstep.wire.messages import FromClient, Join, Peer

_CLAIM_S = 3.0
_CROWD = 64
_TOLD_LATER_S = 600.0


@dataclass(frozen=True, slots=True)
class Applicant:
    """A launcher that asks to join."""

    session: Session
    client: str
    peer: Peer
    join: Join
    since_s: float

    @classmethod
    def of(cls, session: Session, message: FromClient, join: Join, now_s: float) -> Applicant:
        """Return the applicant behind a message."""
        return cls(session, message.client, message.peer, join, now_s)

    @property
    def node(self) -> str:
        """Its node."""
        return self.session.node

    @property
    def address(self) -> Address:
        """Where its answer goes."""
        return Address(self.session.connection, self.client)


class Door:
    """Lets launchers in. `jobs` are the live ones; `open_job` makes the live half of a new one."""

    def __init__(
        self,
        jobs: dict[str, Job],
        *,
        nonce: Callable[[], str],
        open_job: Callable[[Turn, str], Job],
    ) -> None:
        self._jobs = jobs
        self._nonce = nonce
        self._open_job = open_job
        self._waiting: list[Applicant] = []

    def knock(self, turn: Turn, applicant: Applicant) -> None:
        """Answer a Join, now or when it is known whether the seat is free."""
        self._waiting = [a for a in self._waiting if a.address != applicant.address]
        self._answer(turn, applicant)

    def look(self, turn: Turn) -> None:
        """Answer those that had to wait."""
        waiting, self._waiting = self._waiting, []
        for applicant in waiting:
            if applicant.session.closed_at_s is None:
                self._answer(turn, applicant)

    def forget(self, connection: int, client: str) -> None:
        """A launcher went away while it waited."""
        gone = Address(connection, client)
        self._waiting = [a for a in self._waiting if a.address != gone]

    def _answer(self, turn: Turn, applicant: Applicant) -> None:
        if (why := _impossible(applicant.join)) is not None:
            _refuse(turn, applicant, why, USAGE)
            return
        book = self._find(turn, applicant)
        if book is None:
            return
        if (why := _misfit(book, applicant)) is not None:
            _refuse(turn, applicant, why)
        elif book.over is not None:
            _tell_the_end(turn, book, applicant)
        else:
            self._seat(turn, self._jobs[book.id], applicant)

    # ------------------------------------------------------------------------ which job

    def _find(self, turn: Turn, applicant: Applicant) -> JobBook | None:
        """Return the job that is meant, a new one if need be; None when it was answered."""
        join, uid = applicant.join, applicant.peer.uid
        if join.nonce is not None:
            return turn.books.jobs.get(join.nonce) or self._adopt(turn, applicant)
        live = turn.books.live.get((uid, join.run_id))
        if live is not None:
            return self._renew(turn, self._jobs[live], applicant)
        untold = _untold(turn, applicant)
        return untold or self._create(turn, applicant, self._nonce(), adopted=0)

    def _renew(self, turn: Turn, job: Job, applicant: Applicant) -> JobBook:
        """Give a job that all launchers have left up for one with other terms."""
        if job.present() or _misfit(job.book, applicant) is None:
            return job.book
        why = "all its launchers had left, and others came with other terms"
        ending.end(turn, job, "stopped", STOPPED, why)
        return self._create(turn, applicant, self._nonce(), adopted=0)

    def _adopt(self, turn: Turn, applicant: Applicant) -> JobBook | None:
        """Take in a job that this journal does not know, without disturbing it."""
        join = applicant.join
        if join.running_generation > 0 and join.nonce is not None:
            return self._create(turn, applicant, join.nonce, adopted=join.running_generation)
        if turn.now_s - applicant.since_s < _CLAIM_S:
            self._waiting.append(applicant)  # one that runs ranks of it may come yet
            return None
        why = f"the coordinator's journal does not know job {join.nonce}; start it anew"
        _refuse(turn, applicant, why)
        return None

    def _create(self, turn: Turn, applicant: Applicant, nonce: str, *, adopted: int) -> JobBook:
        join = applicant.join
        turn.record(
            facts.JobCreated(
                at_s=turn.now_s,
                job=nonce,
                uid=applicant.peer.uid,
                run_id=join.run_id,
                min_nodes=join.min_nodes,
                max_nodes=join.max_nodes,
                local_world_size=join.local_world_size,
                join_timeout_s=join.join_timeout_s,
                command=join.command,
                adopted=adopted,
            )
        )
        return self._open_job(turn, nonce).book

    # ------------------------------------------------------------------------ which seat

    def _seat(self, turn: Turn, job: Job, applicant: Applicant) -> None:
        seat = job.book.seats.get(applicant.node)
        if seat is not None and seat.left_at_s is None and not seat.is_held_by(applicant.peer):
            if (why := _held(job, seat, applicant)) is not None:
                _refuse(turn, applicant, why)
                return
            if not _surely_dead(seat, applicant) and turn.now_s - applicant.since_s < _CLAIM_S:
                self._waiting.append(applicant)  # the one before may be about to reconnect
                return
            why = f"launcher (pid {seat.pid}) is gone, another one has come"
            failing.launcher_gone(turn, job, applicant.node, why, said=False)
        _take_in(turn, job, applicant)
        _reconcile(turn, job, applicant)
        crowd = len(job.book.seats) > _CROWD
        if not crowd or len(job.attached) == job.book.spec.max_nodes:
            planning.advance(turn, job)  # of a crowd not after each one: the clock sees to it


def _take_in(turn: Turn, job: Job, applicant: Applicant) -> None:
    join, node = applicant.join, applicant.node
    seat = job.book.seats.get(node)
    address = join.address or applicant.session.hello.address
    known = seat is not None and seat.is_held_by(applicant.peer) and seat.left_at_s is None
    if seat is None or not known or seat.address != address:
        turn.record(
            facts.LauncherJoined(
                at_s=turn.now_s,
                job=job.book.id,
                node=node,
                pid=applicant.peer.pid,
                start_ticks=applicant.peer.start_ticks,
                boot_id=applicant.peer.boot_id,
                address=address,
                local_world_size=join.local_world_size,
            )
        )
    if not known:
        job.joined_s = turn.now_s
    job.attach(node, applicant.address)
    job.tell(turn, node, Joined(nonce=job.book.id, node=node, address=address))


def _reconcile(turn: Turn, job: Job, applicant: Applicant) -> None:
    """Bring what the launcher says of its ranks and what the book says together."""
    book, join, node = job.book, applicant.join, applicant.node
    running = join.running_generation
    if running > book.proposed:  # a journal from before this generation: never below it again
        turn.record(
            facts.GenerationProposed(
                at_s=turn.now_s, job=book.id, generation=running, members=book.members
            )
        )
        planning.ask(turn, job, "the journal is older than the job", asked_by="membership")
    elif running == 0 and join.nonce is not None and _ran(job, node):
        failing.ranks_gone(turn, job, node)
    elif running == book.generation and running > 0:
        _still_running(turn, job, applicant)
    if book.plan is not None and not running and book.replan is not None:
        return  # another plan is on its way, and nobody begins under one that has failed
    if book.plan is not None:
        job.tell(turn, node, Committed(plan=book.plan))
    elif join.on_evict == "exit" and turn.books.node(node).state in ("evicted", "broken"):
        _refuse(turn, applicant, f"{node} is evicted: {turn.books.node(node).why}", EVICTED)


def _ran(job: Job, node: str) -> bool:
    """Return whether this node's ranks of the generation in force are believed to run."""
    book = job.book
    failed = book.replan is not None
    return node in book.started and node not in book.done and not failed


def _still_running(turn: Turn, job: Job, applicant: Applicant) -> None:
    book, node = job.book, applicant.node
    ours = node in book.members or book.plan is None
    if ours and node not in book.started:
        turn.record(
            facts.RanksUp(
                at_s=turn.now_s,
                job=book.id,
                node=node,
                generation=book.generation,
                ranks=[],
                pids=[],
            )
        )
    if applicant.join.succeeded:
        progress.node_done(turn, job, node, book.generation)


# ------------------------------------------------------------------------------------ refusals


def _impossible(join: Join) -> str | None:
    if join.run_id in ("", "none"):
        return (
            "the run has no name of its own (torchrun's default is shared by everyone): "
            "give it one with --rdzv-id"
        )
    if not 1 <= join.min_nodes <= join.max_nodes:
        return f"--nnodes={join.min_nodes}:{join.max_nodes} is no range of at least one node"
    if join.local_world_size < 1:
        return f"--nproc-per-node={join.local_world_size} starts no rank"
    return None


def _misfit(book: JobBook, applicant: Applicant) -> str | None:
    spec, join = book.spec, applicant.join
    if spec.uid != applicant.peer.uid:
        return f"job {book.id} belongs to user {spec.uid}, not {applicant.peer.uid}"
    ours = (spec.min_nodes, spec.max_nodes, spec.local_world_size)
    theirs = (join.min_nodes, join.max_nodes, join.local_world_size)
    if ours == theirs or book.over is not None:
        return None
    return (
        f"run {spec.run_id!r} is under way with --nnodes={ours[0]}:{ours[1]} "
        f"--nproc-per-node={ours[2]}, this launcher says --nnodes={theirs[0]}:{theirs[1]} "
        f"--nproc-per-node={theirs[2]}: use the same on all nodes, or another --rdzv-id"
    )


def _held(job: Job, seat: Seat, applicant: Applicant) -> str | None:
    attached = job.attached.get(seat.node)
    if attached is None or attached.connection != applicant.session.connection:
        return None
    if _surely_dead(seat, applicant):
        return None
    return (
        f"run {job.book.spec.run_id!r} already has a launcher on {seat.node}: pid {seat.pid}; "
        "one per node and run is enough, --nproc-per-node sets the ranks"
    )


def _surely_dead(seat: Seat, applicant: Applicant) -> bool:
    same_pid = seat.pid == applicant.peer.pid and seat.start_ticks != applicant.peer.start_ticks
    return same_pid or seat.boot_id != applicant.peer.boot_id


def _untold(turn: Turn, applicant: Applicant) -> JobBook | None:
    """Return a run that just ended and whose launcher here died before it could hear of it."""
    for book in reversed(turn.books.jobs.values()):
        if book.over is None or turn.now_s - book.over.at_s > _TOLD_LATER_S or not book.generation:
            continue
        if (book.spec.uid, book.spec.run_id) != (applicant.peer.uid, applicant.join.run_id):
            continue
        seat = book.seats.get(applicant.node)
        return book if seat is not None and not seat.told else None
    return None


def _tell_the_end(turn: Turn, book: JobBook, applicant: Applicant) -> None:
    if applicant.join.nonce is None:
        turn.record(facts.LauncherTold(at_s=turn.now_s, job=book.id, node=applicant.node))
    turn.send_client(applicant.address, ending.job_over(book))


def _refuse(turn: Turn, applicant: Applicant, why: str, exit_code: int = 69) -> None:
    turn.send_client(applicant.address, Refused(why=why, exit_code=exit_code))
