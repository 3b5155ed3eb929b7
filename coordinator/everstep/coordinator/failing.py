"""What goes wrong in a job, one function for each way in which it shows."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from everstep.coordinator import cases, ending, facts, planning, reckoning
from everstep.coordinator.incidents import MAX_ERROR_CHARS, Clue, Decision
from everstep.coordinator.verdict import judge, kind_of_end, said_last, signal_name
from everstep.wire.exit_codes import STOPPED

if TYPE_CHECKING:
    from everstep.coordinator.incidents import ClueKind, Incident, IncidentKind
    from everstep.coordinator.job import Job
    from everstep.coordinator.nodes import Session
    from everstep.coordinator.silence import Loss, Standstill
    from everstep.coordinator.turn import Turn
    from everstep.wire.messages import RankEnded

_LATE_EVIDENCE_S = 60.0
_CASCADE_CHARS = 1000
_WHAT_CHARS = 200
_RANK = re.compile(r"^\[rank\d+\]:\s*")


def rank_ended(turn: Turn, job: Job, session: Session, ended: RankEnded) -> None:
    """A launcher says that one of its ranks ended."""
    book, node = job.book, session.node
    if book.over is not None or ended.expected or ended.exit_code == 0 or node in book.done:
        return
    at_s, error_s = session.to_ours(ended.at_s, turn.now_s)
    if ended.generation != book.generation:
        _late_evidence(turn, job, ended, _clue_of(node, ended, at_s, error_s))
        return
    if node not in book.members or ended.rank in book.down:
        return
    job.reached()  # while its last progress is still at hand
    turn.record(
        facts.RankDown(
            at_s=turn.now_s,
            job=book.id,
            node=node,
            generation=ended.generation,
            rank=ended.rank,
            pid=ended.pid,
            exit_code=ended.exit_code,
            signal=ended.signal,
            ended_at_s=at_s,
        )
    )
    _fail(turn, job, _clue_of(node, ended, at_s, error_s))


def launcher_gone(turn: Turn, job: Job, node: str, why: str, *, said: bool) -> None:
    """A launcher ended or took its leave: its node left the job."""
    book = job.book
    seat = book.seats[node]
    if seat.left_at_s is not None and not (said and not seat.told):
        return
    turn.record(
        facts.LauncherLeft(
            at_s=turn.now_s, job=book.id, node=node, pid=seat.pid, why=why, said=said
        )
    )
    job.attached.pop(node, None)
    job.detached_s.pop(node, None)
    if said:  # one that only died may be back before its agent lets go of the memory
        job.held.forget(node)
    if book.over is not None:
        return
    if not job.present() and book.generation == 0:
        why = "every launcher left before the first generation"
        ending.end(turn, job, "stopped", STOPPED, why)
        return
    if node in book.members and node not in book.done:
        job.reached()
        kind: ClueKind = "left" if said else "launcher"
        _fail(turn, job, Clue(at_s=turn.now_s, kind=kind, node=node, what=f"{node}: {why}"))


def ranks_gone(turn: Turn, job: Job, node: str) -> None:
    """A launcher joins again without the ranks that it had: they ended unheard."""
    what = f"the ranks of {node} ended while it was not heard"
    _fail(turn, job, Clue(at_s=turn.now_s, kind="unknown", node=node, what=what))


def node_lost(turn: Turn, job: Job, loss: Loss) -> bool:
    """Silence and a second witness: return whether the node is to be evicted for it."""
    job.reached()
    at_s = min((e.at_s for e in loss.evidence), default=turn.now_s)
    clue = Clue(at_s=at_s, kind="lost", node=loss.node, what=f"{loss.node} is lost: {loss.why}")
    incident = cases.add_clue(turn, job, clue)
    evict = _decide_eviction(turn, job, incident, loss.node, loss.why)
    planning.ask(turn, job, clue.what, asked_by=f"incident {incident.id}", incident=incident)
    return evict


def stands_still(turn: Turn, job: Job, stand: Standstill) -> str | None:
    """All ranks stand: restart them; return the node to evict when the same one did it before."""
    if cases.of_generation(job) is not None:
        return None  # another failure of this generation is being dealt with
    job.reached()
    node = stand.node or ""
    clue = Clue(at_s=stand.since_s, kind="hang", node=node, what=stand.why, rank=stand.rank)
    incident = cases.add_clue(turn, job, clue, kind="hang")
    evict = None
    if node and _hung_before(job, node) and _decide_eviction(turn, job, incident, node, stand.why):
        evict = node
    planning.ask(turn, job, stand.why, asked_by=f"incident {incident.id}", incident=incident)
    return evict


def node_evicted(turn: Turn, job: Job, node: str, why: str, *, kind: IncidentKind) -> None:
    """A node was shut out for whatever reason: a job that has it goes on without it."""
    job.held.forget(node)
    if node not in job.book.members or node in job.book.done or job.book.over is not None:
        return
    replan = job.book.replan
    if replan is None or replan.incident is None:
        clue = Clue(at_s=turn.now_s, kind="evicted", node=node, what=f"{node} evicted: {why}")
        incident = cases.add_clue(turn, job, clue, kind=kind)
        cases.decide(turn, incident, Decision(what="evict", why=why, node=node, evicted=[node]))
        planning.ask(turn, job, clue.what, asked_by=f"incident {incident.id}", incident=incident)


def _fail(turn: Turn, job: Job, clue: Clue) -> None:
    incident = cases.add_clue(turn, job, clue)
    why = incident.root.summary if incident.root else clue.what
    planning.ask(turn, job, why, asked_by=f"incident {incident.id}", incident=incident)


def _late_evidence(turn: Turn, job: Job, ended: RankEnded, clue: Clue) -> None:
    """An agent that was away delivers the cause of a failure already recovered from."""
    incident = cases.of_generation(job, ended.generation)
    if incident is None or ended.generation > job.book.generation:
        return
    unknown = incident.root is None or incident.root.layer == "unknown"
    if not unknown or turn.now_s - incident.detected_at_s > _LATE_EVIDENCE_S:
        return
    if any(c.rank == clue.rank for c in incident.clues) or clue.kind == "broken":
        return
    incident = cases.add_clue(turn, job, clue, generation=ended.generation)
    if any(f.generation == incident.generation for f in job.book.failures):
        reckoning.count(turn, job, incident, judge(incident.clues))


def _decide_eviction(turn: Turn, job: Job, incident: Incident, node: str, why: str) -> bool:
    status, but, systemic = reckoning.may_evict(turn, job)
    if systemic:
        incident = cases.rewrite(turn, incident, kind="systemic")
        cases.decide(turn, incident, Decision(what="none", why=but, node=node))
        return False
    text = f"{why} ({but})" if but else why
    evicted = [node] if status == "done" else []
    decision = Decision(what="evict", why=text, status=status, node=node, evicted=evicted)
    cases.decide(turn, incident, decision)
    return status == "done"


def _hung_before(job: Job, node: str) -> bool:
    last = job.book.failures[-1] if job.book.failures else None
    if last is None or job.top_step > last.max_step:
        return False  # it got somewhere in between
    return last.failure == "hang" and last.node == node


def _clue_of(node: str, ended: RankEnded, at_s: float, error_s: float) -> Clue:
    if ended.signal is not None:
        how = f"was killed by {signal_name(ended.signal)}"
    elif ended.exit_code is None:
        how = "ended, nobody knows how"
    else:
        how = f"failed with exit code {ended.exit_code}"
    # Who gets SIGKILL cannot say why: its last line is about something else.
    unsaid = ended.signal == signal.SIGKILL and not ended.error
    text = "" if unsaid else said_last(ended.error, ended.stderr_tail)
    last = next((line.strip() for line in text.splitlines() if line.strip()), "")
    last = _RANK.sub("", last)[:_WHAT_CHARS]
    what = f"rank {ended.rank} on {node} {how}" + (f": {last}" if last else "")
    full = ended.error or "\n".join(ended.stderr_tail)
    kind = kind_of_end(ended)
    limit = _CASCADE_CHARS if kind == "broken" else MAX_ERROR_CHARS
    return Clue(
        at_s=at_s,
        error_s=error_s,
        kind=kind,
        node=node,
        what=what,
        rank=ended.rank,
        exit_code=ended.exit_code,
        signal=ended.signal,
        error=full[-limit:] or None,
    )
