"""What the API shows: plain values made from the books and the live state. Reads, never changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from everstep.coordinator import accounts, history
from everstep.coordinator.budget import since_progress
from everstep.coordinator.membership import Ready
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from everstep.coordinator.books import JobBook, NodeBook
    from everstep.coordinator.cluster import Cluster
    from everstep.coordinator.incidents import Incident
    from everstep.coordinator.job import Job
    from everstep.coordinator.journal import Entry
    from everstep.wire.messages import Finding, RankProgress

View = dict[str, Any]

_SHOWN_RECOVERIES = 20


def job_state(book: JobBook, job: Job | None) -> str:
    """Return `forming`, `running`, `recovering`, or how the job ended."""
    if book.over is not None:
        return book.over.outcome
    if book.generation == 0:
        return "forming"
    proposed = job is not None and job.proposal is not None
    return "recovering" if book.replan is not None or proposed else "running"


def node_state(cluster: Cluster, node: NodeBook, now_s: float) -> str:
    """Return the node's state, `silent` or `away` before `cordoned` before `healthy`."""
    if node.state != "healthy":
        return node.state
    if cluster.nodes.connected(node.name) is None:
        return "away"
    if cluster.nodes.away_since(node.name, now_s) is not None:
        return "silent"
    return "cordoned" if node.cordoned else "healthy"


def job_summary(cluster: Cluster, book: JobBook, now_s: float) -> View:
    """Return one line about a job."""
    job = cluster.jobs.get(book.id)
    ranks = _progress(job, now_s)
    spec = book.spec
    standing = {r.phase for r in ranks}
    return {
        "id": book.id,
        "run_id": spec.run_id,
        "uid": spec.uid,
        "state": job_state(book, job),
        "waiting_for": job.waiting if job is not None and book.over is None else "",
        "generation": book.generation,
        "members": book.members,
        "spares": _spares(cluster, book, now_s),
        "world_size": book.world_size,
        "min_nodes": spec.min_nodes,
        "max_nodes": spec.max_nodes,
        "local_world_size": spec.local_world_size,
        "step": min((r.step for r in ranks), default=None),
        "phase": standing.pop() if len(standing) == 1 else ("mixed" if standing else None),
        "loss": next((r.loss for r in ranks if r.loss is not None), None),
        "newest_snapshot": next(iter(book.resume(1)), None),
        "open_incidents": [i.id for i in _incidents(cluster, book) if i.closed_at_s is None],
        "created_at_s": spec.at_s,
        "over": None if book.over is None else _over(book),
    }


def job_detail(cluster: Cluster, book: JobBook, now_s: float) -> View:
    """Return everything about a job."""
    job = cluster.jobs.get(book.id)
    return {
        **job_summary(cluster, book, now_s),
        "command": book.spec.command,
        "join_timeout_s": book.spec.join_timeout_s,
        "plan": None if book.plan is None else msgspec.to_builtins(book.plan),
        "replan": None if book.replan is None else book.replan.why,
        "ranks": rank_views(job, now_s),
        "seats": [_seat(cluster, book, name, now_s) for name in book.seats],
        "finished": list(book.done),
        "snapshots": _snapshots(book, job),
        "findings": _findings(cluster, book),
        "generations": generation_views(book),
        "failures_since_progress": [_plain(f) for f in since_progress(book.failures)],
        "incidents": [incident_summary(i) for i in _incidents(cluster, book)],
        "time": time_view(cluster, book, now_s),
    }


def time_view(cluster: Cluster, book: JobBook, now_s: float) -> View:
    """Return where a job's time went, in seconds, and its last recoveries, oldest first."""
    job = cluster.jobs.get(book.id)
    sums = accounts.totals(accounts.spans(history.of_book(book, job), now_s))
    found = history.recoveries(cluster.books, book, job)
    return {
        "wall_s": sum(sums.values()),
        "kinds": dict(sums),
        "goodput": accounts.goodput(sums),
        "ettr": accounts.ettr(sums),
        "mttr_s": history.mttr_s(found),
        "recoveries": [_recovery(r) for r in found[-_SHOWN_RECOVERIES:]],
    }


def _snapshots(book: JobBook, job: Job | None) -> list[View]:
    """Return what can be resumed from: `tiers` are `disk`, `memory` or both."""
    held = {} if job is None else job.held.holders()
    in_memory = {str(id_): sorted(holders.nodes) for id_, holders in held.items()}
    only = [id_ for id_ in sorted(held, key=SnapshotId.place) if str(id_) not in book.snapshots]
    return [
        *(
            {**_plain(s), **_tiers(book, s.id, in_memory.get(s.id, []), disk=True)}
            for s in book.snapshots.values()
        ),
        *(
            {
                "id": str(id_),
                "step": id_.step,
                "generation": id_.generation,
                **_tiers(book, str(id_), in_memory[str(id_)], disk=False),
            }
            for id_ in only
        ),
    ]


def _findings(cluster: Cluster, book: JobBook) -> list[View]:
    """Return what the job's ranks found and has not passed, the newest of each kind."""
    newest: dict[tuple[str, str], Finding] = {}
    for name in book.seats:
        for (source, *_), finding in cluster.books.node(name).findings.items():
            key = (finding.name, finding.component)
            before = newest.get(key)
            if source == f"job {book.id}" and (before is None or before.at_s <= finding.at_s):
                newest[key] = finding
    return [_plain(finding) for finding in sorted(newest.values(), key=lambda f: f.at_s)]


def _tiers(book: JobBook, id_: str, nodes: list[str], *, disk: bool) -> View:
    return {
        "tiers": ["memory"] * bool(nodes) + ["disk"] * disk,
        "in_memory_of": nodes,
        "suspect": book.suspects.get(id_),
        "suspect_in_memory": book.suspects_in_memory.get(id_),
    }


def rank_views(job: Job | None, now_s: float) -> list[View]:
    """Return the progress of every rank that is seen now."""
    if job is None:
        return []
    return [
        {**_plain(s.progress), "node": s.node, "heard_s_ago": round(now_s - s.heard_at_s, 3)}
        for s in job.ranks(now_s)
    ]


def generation_views(book: JobBook) -> list[View]:
    """Return the history of a job's plans, oldest first."""
    return [
        {
            "job": book.id,
            "generation": g.number,
            "members": list(g.members),
            "committed_at_s": g.committed_at_s,
            "why": g.why,
            "asked_by": g.asked_by,
            "resume": list(g.resume),
        }
        for g in book.generations
    ]


def node_view(cluster: Cluster, node: NodeBook, now_s: float) -> View:
    """Return everything about a node."""
    session = cluster.nodes.sessions.get(node.name)
    beat = session.beat if session else None
    return {
        "name": node.name,
        "state": node_state(cluster, node, now_s),
        "cordoned": node.cordoned,
        "why": node.why,
        "by": node.by,
        "since_s": node.since_s,
        "evidence": [_plain(e) for e in node.evidence],
        "connected": cluster.nodes.connected(node.name) is not None,
        "heard_s_ago": round(now_s - session.heard_at_s, 3) if session else None,
        "address": node.address,
        "machine_id": node.machine_id,
        "boot_id": node.boot_id,
        "agent_epoch": node.epoch,
        "version": node.version,
        "clock_offset_s": beat.offset_s if beat else None,
        "clock_error_s": beat.error_s if beat else None,
        "health": beat.health if beat else None,
        "jobs": [j.book.id for j in cluster.jobs.values() if node.name in j.book.seats],
        "findings": [_plain(f) for f in node.findings.values()],
    }


def incident_summary(incident: Incident) -> View:
    """Return an incident without its clues."""
    plain = _plain(incident)
    plain.pop("clues")
    if plain["root"] is not None:
        plain["root"].pop("error")
    return plain


def incident_detail(incident: Incident) -> View:
    """Return an incident with all its clues; `evidence` is the same in one line each."""
    evidence = [
        {"at_s": c.at_s, "error_s": c.error_s, "node": c.node, "role": c.role, "what": c.what}
        for c in incident.clues
    ]
    return {**_plain(incident), "evidence": evidence}


def event_view(entry: Entry) -> View:
    """Return one fact of the journal as an event."""
    return {"seq": entry.seq, **_plain(entry.fact)}


def _recovery(recovery: history.Recovery) -> View:
    root = recovery.incident.root
    return {
        "incident": recovery.incident.id,
        "generation": recovery.generation,
        "decision": recovery.decision,
        "node": root.node if root else None,
        "rank": root.rank if root else None,
        "began_at_s": recovery.began_at_s,
        "took_s": recovery.took_s,
        "steps_lost": recovery.incident.steps_lost,
        "phases": [{"phase": name, "s": end - begin} for name, begin, end in recovery.phases],
    }


def _over(book: JobBook) -> View:
    over = book.over
    if over is None:
        return {}
    return {
        "outcome": over.outcome,
        "exit_code": over.exit_code,
        "why": over.why,
        "error": over.error,
        "at_s": over.at_s,
    }


def _seat(cluster: Cluster, book: JobBook, name: str, now_s: float) -> View:
    seat, job = book.seats[name], cluster.jobs.get(book.id)
    standing = None if job is None else type(job.standing(seat, now_s)).__name__.lower()
    return {
        "node": name,
        "pid": seat.pid,
        "address": seat.address,
        "joined_at_s": seat.joined_at_s,
        "left_at_s": seat.left_at_s,
        "left_why": seat.left_why,
        "standing": standing,
        "reachable": job is not None and name in job.attached,
    }


def _spares(cluster: Cluster, book: JobBook, now_s: float) -> list[str]:
    job = cluster.jobs.get(book.id)
    if job is None:
        return []
    ready = (n for n, s in job.standings(now_s).items() if isinstance(s, Ready))
    return [n for n in ready if n not in book.members]


def _progress(job: Job | None, now_s: float) -> list[RankProgress]:
    return [] if job is None else [s.progress for s in job.ranks(now_s)]


def _incidents(cluster: Cluster, book: JobBook) -> list[Incident]:
    found = (cluster.books.incidents.get(number) for number in book.incidents.values())
    return [incident for incident in found if incident is not None]


def _plain(value: msgspec.Struct) -> View:
    plain: View = msgspec.to_builtins(value)
    return plain
