"""What goes right in a job: ranks start, step, leave snapshots and finish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.coordinator import cases, ending, facts, planning, timing
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from everstep.coordinator.incidents import Incident
    from everstep.coordinator.job import Job
    from everstep.coordinator.turn import Turn
    from everstep.wire.messages import RanksStarted, SnapshotCommitted, SnapshotRejected

_NO_PAGES_S = 30.0


def ranks_started(turn: Turn, job: Job, node: str, started: RanksStarted) -> None:
    """A member's launcher has its ranks up."""
    book = job.book
    if started.generation != book.generation or node not in book.members or book.over is not None:
        return
    before = book.started.get(node)
    if before is None or before.pids != started.pids:
        turn.record(
            facts.RanksUp(
                at_s=turn.now_s,
                job=book.id,
                node=node,
                generation=started.generation,
                ranks=started.ranks,
                pids=started.pids,
            )
        )


def node_done(turn: Turn, job: Job, node: str, generation: int) -> None:
    """All ranks of a node ended with 0. Once said it stays so, whatever the others do."""
    book = job.book
    was_member = any(g.number == generation and node in g.members for g in book.generations)
    if book.over is not None or node in book.done or not (was_member or book.spec.adopted):
        return
    if turn.books.node(node).state != "healthy":
        return  # what was shut out finishes nothing
    turn.record(facts.NodeDone(at_s=turn.now_s, job=book.id, node=node, generation=generation))
    left = [m for m in book.members if m not in book.done]
    if not left:
        ending.end(turn, job, "done", 0, f"all {len(book.members)} nodes finished")
    elif generation < book.generation and node in book.members:
        why = f"{node} had finished generation {generation} before"
        planning.ask(turn, job, why, asked_by="membership")
        planning.advance(turn, job)


def snapshot_taken(turn: Turn, job: Job, node: str, taken: SnapshotCommitted) -> str | None:
    """Enter a snapshot into the catalogue; return why not, None when it counts."""
    book = job.book
    try:
        said = SnapshotId.parse(taken.id)
    except ValueError as exc:
        return str(exc)
    if said != (taken.step, taken.generation):
        return f"{taken.id} is not the id of step {taken.step}, generation {taken.generation}"
    known = taken.generation in (g.number for g in book.generations)
    if not known and taken.generation != book.spec.adopted:
        return f"{taken.id}: job {book.id} has no generation {taken.generation}"
    if book.over is not None or taken.id in book.snapshots:
        return None
    fields = {name: getattr(taken, name) for name in _SNAPSHOT_FIELDS}
    tally = timing.tally_of(job, taken.step, taken.generation)
    turn.record(facts.SnapshotTaken(at_s=turn.now_s, job=book.id, node=node, tally=tally, **fields))
    job.top_step = max(job.top_step, taken.step)
    if taken.generation == book.generation and not taken.final:
        planning.consider_growth(turn, job, at_snapshot=True)
    return None


def snapshot_rejected(turn: Turn, job: Job, rejected: SnapshotRejected) -> None:
    """A snapshot, or what memory holds of it, did not load: no later plan names it."""
    book, id_, memory = job.book, rejected.id, rejected.memory
    known = book.suspects_in_memory if memory else book.suspects
    named = id_ in book.snapshots or any(id_ in g.resume for g in book.generations[-_RECENT:])
    if id_ in known or not named or book.over is not None:
        return
    turn.record(
        facts.SnapshotSuspected(
            at_s=turn.now_s, job=book.id, id=id_, why=rejected.why, memory=memory
        )
    )


def watch_resumption(turn: Turn, job: Job) -> None:
    """Close the incidents that a generation has recovered from: all its ranks step again."""
    book = job.book
    if book.plan is None or book.replan is not None or len(book.started) < len(book.members):
        return
    open_ones = [i for i in _incidents(job) if i.closed_at_s is None]
    if not open_ones:
        return
    stepped_s = timing.of(job).stepped_at_s(book.members)
    if stepped_s is not None or job.stepping(turn.now_s):
        resumed_s = turn.now_s if stepped_s is None else max(stepped_s, book.committed_at_s)
        for incident in open_ones:
            cases.close(
                turn, incident, resumed_at_s=resumed_s, steps_lost=_steps_lost(job, incident)
            )
    elif turn.now_s - book.committed_at_s > _NO_PAGES_S and not any(job.ranks(turn.now_s)):
        for incident in open_ones:  # ranks that tell nothing of their steps
            cases.close(turn, incident)


def _incidents(job: Job) -> list[Incident]:
    numbers = [g for g in job.book.incidents if g < job.book.generation]
    found = [cases.of_generation(job, g) for g in numbers[-_RECENT:]]
    return [incident for incident in found if incident is not None]


def _steps_lost(job: Job, incident: Incident) -> int | None:
    """Return how many finished steps are done again; None when nobody saw how far it was."""
    book = job.book
    counted = (f.reached for f in book.failures if f.generation == incident.generation)
    reached = [step for step in counted if step is not None]
    if (times := book.times.get(incident.generation)) is not None and times.tallies:
        reached.append(times.tallies[-1].step)
    if not reached or book.plan is None:
        return None
    from_step = timing.of(job).times(None).marks.from_step
    if from_step is None:
        from_step = SnapshotId.parse(book.plan.resume[0]).step if book.plan.resume else 0
    return max(0, max(reached) - from_step)


_RECENT = 50
_SNAPSHOT_FIELDS = (
    "id", "step", "generation", "path", "world_size", "bytes", "write_s", "stall_s", "samples",
    "final",
)  # fmt: skip
