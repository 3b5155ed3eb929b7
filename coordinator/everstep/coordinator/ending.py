"""How a job ends, and how its launchers hear of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.coordinator import cases, facts, timing
from everstep.wire.messages import JobOver

if TYPE_CHECKING:
    from everstep.coordinator.books import JobBook
    from everstep.coordinator.job import Job
    from everstep.coordinator.turn import Turn


def end(
    turn: Turn,
    job: Job,
    outcome: facts.Outcome,
    exit_code: int,
    why: str,
    *,
    error: str | None = None,
) -> None:
    """End a job for good and tell its launchers."""
    book = job.book
    timing.put_down(turn, job)
    turn.record(
        facts.JobEnded(
            at_s=turn.now_s,
            job=book.id,
            outcome=outcome,
            exit_code=exit_code,
            why=why,
            error=error,
        )
    )
    job.proposal = None
    for generation in list(book.incidents):
        incident = cases.of_generation(job, generation)
        if incident is not None and incident.closed_at_s is None:
            cases.close(turn, incident)
    for node in list(job.attached):
        job.tell(turn, node, job_over(book))


def job_over(book: JobBook) -> JobOver:
    """Return how an ended job is told to a launcher. Raises ValueError for one that is not over."""
    over = book.over
    if over is None:
        raise ValueError(f"job {book.id} is not over")
    return JobOver(
        nonce=book.id,
        outcome=over.outcome,
        exit_code=over.exit_code,
        why=over.why,
        error=over.error,
    )
