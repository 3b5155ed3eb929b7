"""A job's book as the history that its account of time is made from, and its recoveries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from everstep.coordinator import accounts
from everstep.coordinator.accounts import History, Span, Stint
from everstep.coordinator.times import GenerationTimes, merged
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from everstep.coordinator.books import Books, Generation, JobBook
    from everstep.coordinator.incidents import Incident
    from everstep.coordinator.job import Job


Phase = tuple[str, float, float]


@dataclass(frozen=True, slots=True)
class Recovery:
    """From the first sign of a failure to the first new step of all ranks.

    `phases` tile it; their last one is the first step.
    """

    incident: Incident
    generation: int
    began_at_s: float
    resumed_at_s: float
    phases: tuple[Phase, ...]

    @property
    def decision(self) -> str:
        """What was done."""
        return self.incident.decision.what

    @property
    def took_s(self) -> float:
        """How long it took."""
        return self.resumed_at_s - self.began_at_s


def of_book(book: JobBook, job: Job | None = None) -> History:
    """Return a job's history; `job` is its live half, which knows of steps not journaled yet."""
    stints = tuple(_stint(book, g, job) for g in book.generations)
    over = book.over
    newest = next(iter(book.resume(1)), None)
    kept = SnapshotId.parse(newest).step if newest else 0
    if not newest and stints:
        kept = stints[-1].from_step
    return History(
        created_at_s=book.spec.at_s,
        stints=stints,
        over_at_s=None if over is None else over.at_s,
        done=over is not None and over.outcome == "done",
        kept_step=kept,
        awaited_at_s=book.awaited_at_s,
        proposed_at_s=book.proposed_at_s,
        adopted=bool(book.spec.adopted),
    )


def recoveries(books: Books, book: JobBook, job: Job | None = None) -> list[Recovery]:
    """Return the recoveries that have come to their end, oldest first."""
    its_own = (books.incidents.get(number) for number in book.incidents.values())
    incidents = [i for i in its_own if i is not None]
    return recoveries_from(incidents, book, job)


def recoveries_from(
    incidents: Sequence[Incident], book: JobBook, job: Job | None = None
) -> list[Recovery]:
    """Return the recoveries from some incidents of a job, as far as they have come to an end."""
    resumed = [i for i in incidents if i.resumed_at_s is not None]
    if not resumed:
        return []
    history = of_book(book, job)
    tiled = accounts.spans(history, max(i.resumed_at_s or 0.0 for i in resumed))
    found = (_recovery(history, tiled, incident) for incident in resumed)
    return sorted((r for r in found if r is not None), key=lambda r: r.began_at_s)


def mttr_s(found: Sequence[Recovery]) -> float | None:
    """Return the mean time to recover from a failure; what a person asked for is none."""
    took = [r.took_s for r in found if r.incident.kind != "operator"]
    return sum(took) / len(took) if took else None


def _recovery(history: History, tiled: Sequence[Span], incident: Incident) -> Recovery | None:
    before = next((s for s in history.stints if s.number == incident.generation), None)
    after = [s for s in history.stints if s.number > incident.generation]
    back = next((s for s in after if s.times.marks.stepped_at_s is not None), None)
    resumed_s = incident.resumed_at_s
    if before is None or resumed_s is None:
        return None
    restored_s = resumed_s
    if back is not None and back.times.marks.stepped_at_s is not None:
        resumed_s = back.times.marks.stepped_at_s
        restored_s = back.times.marks.restored_at_s or resumed_s
    began_s = incident.detected_at_s
    if before.times.ended_at_s is not None:
        began_s = accounts.ended_at_s(before, after[0].committed_at_s if after else resumed_s)
    resumed_s = max(resumed_s, began_s)
    phases = [*_within(tiled, began_s, min(restored_s, resumed_s))]
    if restored_s < resumed_s:
        phases.append(("first_step", restored_s, resumed_s))
    generation = back.number if back is not None else incident.next_generation or 0
    return Recovery(incident, generation, began_s, resumed_s, tuple(phases))


def _within(tiled: Sequence[Span], start_s: float, end_s: float) -> Iterator[Phase]:
    for span in tiled:
        begin, end = max(span.start_s, start_s), min(span.end_s, end_s)
        if begin < end:
            yield span.kind, begin, end


def _stint(book: JobBook, generation: Generation, job: Job | None) -> Stint:
    number = generation.number
    times = _times(book, number, job)
    planned = SnapshotId.parse(generation.resume[0]).step if generation.resume else 0
    said = times.marks.from_step
    return Stint(
        number=number,
        proposed_at_s=generation.proposed_at_s,
        committed_at_s=generation.committed_at_s,
        from_step=planned if said is None else said,
        times=times,
        awaited_at_s=generation.awaited_at_s,
    )


def _times(book: JobBook, number: int, job: Job | None) -> GenerationTimes:
    times = book.times.get(number, GenerationTimes())
    if job is not None and job.timing is not None and job.timing.generation == number:
        live = job.timing.times(max((up.at_s for up in book.started.values()), default=None))
        times = msgspec.structs.replace(
            live, ended_at_s=times.ended_at_s, detected_at_s=times.detected_at_s
        )
    taken = [s.tally for s in book.snapshots.values() if s.generation == number and s.tally]
    if not taken:
        return times
    return msgspec.structs.replace(times, tallies=merged(times.tallies, taken))
