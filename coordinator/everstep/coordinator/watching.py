"""Applies the rules of silence and standstill to one job. Decides nothing, only finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.coordinator import cases
from everstep.coordinator.silence import Loss, Seen, SilentNode, Standstill, lost, standstill

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from everstep.coordinator.incidents import Clue
    from everstep.coordinator.job import Job

_VANISHED_S = 0.5
_LEAST_PATIENCE_S, _STALL_FACTOR = 35.0, 5.0


def losses(job: Job, silent: Sequence[str], now_s: float) -> Iterator[Loss]:
    """Yield which of the members that are not heard are lost by what is known now."""
    book = job.book
    if not silent or book.over is not None or not job.nodes.listening(now_s):
        return
    clues = _clues(job, now_s)
    if not clues and _first_moves(job, now_s, job.config.silence.standing_s):
        return  # nobody bears witness, however many are silent
    peers = list(job.ranks(now_s))
    known = {c.node for c in clues if c.kind == "lost"}  # whatever was decided about them
    others = [c for c in clues if c.kind != "lost"]
    expected = _expected(job, set(silent))
    for node in silent:
        if node in known or not _still_ours(job, node):
            continue
        loss = lost(
            _silent(job, node, now_s),
            peers,
            others,
            expected_peers=expected,
            now_s=now_s,
            rules=job.config.silence,
        )
        if loss is not None:
            yield loss


def stands(job: Job, now_s: float) -> Standstill | None:
    """Return that a job stands still, unless a failure of it is being dealt with anyway."""
    book = job.book
    if book.over is not None or book.replan is not None or len(book.started) < len(book.members):
        return None
    patience_s = min(job.config.silence.hang_s, job.config.silence.standing_s)
    if _first_moves(job, now_s, patience_s) or cases.of_generation(job) is not None:
        return None
    ranks: list[Seen] = list(job.ranks(now_s))
    return standstill(ranks, expected=book.world_size, now_s=now_s, rules=job.config.silence)


def _still_ours(job: Job, node: str) -> bool:
    seat = job.book.seats.get(node)
    present = seat is not None and seat.left_at_s is None
    return present and node not in job.book.done and job.books.node(node).state == "healthy"


def _silent(job: Job, node: str, now_s: float) -> SilentNode:
    away_s = job.nodes.away_since(node, now_s)
    since_s = now_s if away_s is None else away_s
    session = job.nodes.connected(node)
    return SilentNode(
        node=node,
        since_s=since_s,
        heard_at_s=since_s if session is None else min(session.heard_at_s, since_s),
        closed=session is None,
        pause_s=0.0 if session is None else session.pause_s,
        ranks=job.last_ranks(node),
        snapshot_patience_s=_snapshot_patience_s(job),
    )


def _snapshot_patience_s(job: Job) -> float | None:
    stalls_s = [taken.stall_s for taken in job.book.snapshots.values()]
    return max(_LEAST_PATIENCE_S, _STALL_FACTOR * max(stalls_s)) if stalls_s else None


def _clues(job: Job, now_s: float) -> list[Clue]:
    incident = cases.of_generation(job)
    told = list(incident.clues) if incident is not None else []
    unsaid = [c for c in job.hearsay if c.rank not in job.book.down]
    # A process that its agent saw end, while its launcher has not said how, explains others; not
    # at once, for what it says may well be that its connection broke.
    return told + [c for c in unsaid if c.kind == "broken" or now_s - c.at_s > _VANISHED_S]


def _expected(job: Job, silent: set[str]) -> int:
    seats = job.book.seats
    return sum(seats[n].local_world_size for n in job.book.members if n not in silent)


def _first_moves(job: Job, now_s: float, limit_s: float) -> bool:
    """Return whether the first rank that can be seen moves: the cheap look at a healthy job."""
    first = next(job.ranks(now_s), None)
    return first is None or first.progress.standing_s < limit_s
