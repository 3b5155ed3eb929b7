"""Between a failure and the next generation: the verdict, the ledger, and whether to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from everstep.coordinator import cases, ending, facts
from everstep.coordinator.breaker import evicted_lately, holds
from everstep.coordinator.budget import Stop, since_progress, spent, suspect_snapshot
from everstep.coordinator.incidents import Decision
from everstep.coordinator.verdict import Verdict, judge

if TYPE_CHECKING:
    from everstep.coordinator.incidents import Incident, Status
    from everstep.coordinator.job import Job
    from everstep.coordinator.turn import Turn

_MAX_HOLD_S = 60.0


class Permission(NamedTuple):
    """What may be done now; `systemic` when it is the breaker that says no."""

    status: Status
    but: str = ""
    systemic: bool = False


def settled(turn: Turn, job: Job) -> bool:
    """Return whether the failure behind a new generation is judged and may be recovered from."""
    replan = job.book.replan
    if replan is None or replan.incident is None:
        return True
    incident = turn.books.incidents[replan.incident]
    if incident.kind == "operator":
        return True  # a person's wish is no failure
    verdict = judge(incident.clues)
    waited_s = turn.now_s - incident.detected_at_s
    if verdict.failure == "unknown" and waited_s < job.config.root_wait_s:
        return False  # the cause is usually on its way
    counted = _counted(job, incident)
    if counted is not None and (counted.failure, counted.cause) == (verdict.failure, verdict.cause):
        return True
    count(turn, job, incident, verdict)
    return _may_go_on(turn, job, incident)


def count(turn: Turn, job: Job, incident: Incident, verdict: Verdict) -> None:
    """Enter a failed generation into the ledger; again when its verdict has changed."""
    before = _counted(job, incident)
    root = verdict.root
    entry = facts.FailureCounted(
        at_s=turn.now_s,
        job=job.book.id,
        generation=incident.generation,
        failure=verdict.failure,
        cause=verdict.cause,
        node=root.node,
        rank=root.rank,
        exit_code=128 + root.signal if root.signal else root.exit_code or 1,
        error=root.error,
        max_step=0,
        reached=None,
        newest_snapshot=None,
    )
    if before is not None:
        entry = msgspec.structs.replace(
            entry,
            max_step=before.max_step,
            reached=before.reached,
            newest_snapshot=before.newest_snapshot,
            resumed_from=before.resumed_from,
        )
    else:
        entry = _with_progress(entry, job)
    turn.record(entry)


def _counted(job: Job, incident: Incident) -> facts.FailureCounted | None:
    same = (f for f in reversed(job.book.failures) if f.generation == incident.generation)
    return next(same, None)


def _with_progress(entry: facts.FailureCounted, job: Job) -> facts.FailureCounted:
    reached = job.reached()
    known = max((f.max_step for f in job.book.failures), default=0)
    resume = job.book.plan.resume if job.book.plan else []
    return msgspec.structs.replace(
        entry,
        max_step=max(known, job.top_step),
        reached=reached,
        newest_snapshot=next(reversed(job.book.snapshots), None),
        resumed_from=resume[0] if resume else None,
    )


def _may_go_on(turn: Turn, job: Job, incident: Incident) -> bool:
    failures = since_progress(job.book.failures)
    stop = spent(failures, job.config.budget)
    suspect = suspect_snapshot(failures)
    if suspect is not None and _has_older(job, suspect):
        why = f"the run failed at once after it, twice: {failures[-1].cause}"
        turn.record(facts.SnapshotSuspected(at_s=turn.now_s, job=job.book.id, id=suspect, why=why))
        return True
    return stop is None or not _stop(turn, job, incident, stop)


def _has_older(job: Job, snapshot: str) -> bool:
    good = job.book.resume(limit=len(job.book.snapshots))
    in_memory_only = snapshot not in job.book.snapshots
    return bool(good) and (in_memory_only or (snapshot in good and good[-1] != snapshot))


def _stop(turn: Turn, job: Job, incident: Incident, stop: Stop) -> bool:
    """Stop the job as far as the mode allows; False when it goes on, more slowly each time."""
    status = _by_mode(job)
    cases.decide(
        turn, incident, Decision(what="stop", why=stop.why, status=status, exit_code=stop.exit_code)
    )
    if status == "done":
        ending.end(turn, job, "failed", stop.exit_code, stop.why, error=stop.error)
        return True
    failed = len(since_progress(job.book.failures))
    job.hold_until_s = turn.now_s + min(_MAX_HOLD_S, 2.0**failed)
    return False


def may_evict(turn: Turn, job: Job) -> Permission:
    """Return whether a node of this job may be evicted now, and why not."""
    status = _by_mode(job)
    if status != "done":
        return Permission(status, f"mode is {job.config.mode}")
    breaker, nodes = job.config.breaker, len(job.book.seats)
    times = [at_s for at_s, _ in job.book.evictions]
    lately = evicted_lately(times, now_s=turn.now_s, config=breaker)
    if holds(lately, nodes=nodes, config=breaker):
        return Permission("done")
    why = (
        f"breaker: {lately} of {nodes} nodes evicted within {breaker.window_s:g} s; more of them "
        "look like a common cause, so nobody is evicted for it"
    )
    return Permission("would", why, systemic=True)


def _by_mode(job: Job) -> Status:
    match job.config.mode:
        case "act":
            return "done"
        case "approve":
            return "pending"
        case "observe":
            return "would"
