"""A job's book as the history that its account of time is made from, and its recoveries."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from everstep.coordinator import accounts
from everstep.coordinator.accounts import History, Stint
from everstep.coordinator.times import GenerationTimes, merged
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from everstep.coordinator.books import Books, Generation, JobBook
    from everstep.coordinator.incidents import Incident
    from everstep.coordinator.job import Job
    from everstep.wire.messages import Tally


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
    at_snapshots: dict[int, list[Tally]] = {}
    for taken in book.snapshots.values():
        if taken.tally is not None:
            at_snapshots.setdefault(taken.generation, []).append(taken.tally)
    stints = tuple(
        _stint(g, _times(book, g.number, job, at_snapshots.get(g.number, [])))
        for g in book.generations
    )
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
    course = _Course(of_book(book, job), max(i.resumed_at_s or 0.0 for i in resumed))
    found = (course.recovery(incident) for incident in resumed)
    return sorted((r for r in found if r is not None), key=lambda r: r.began_at_s)


def mttr_s(found: Sequence[Recovery]) -> float | None:
    """Return the mean time to recover from a failure; what a person asked for is none."""
    took = [r.took_s for r in found if r.incident.kind != "operator"]
    return sum(took) / len(took) if took else None


class _Course:
    """A job's generations and spans, to look recoveries up in."""

    def __init__(self, history: History, now_s: float) -> None:
        self._stints = history.stints
        self._places = {stint.number: i for i, stint in enumerate(history.stints)}
        self._spans = accounts.spans(history, now_s)
        self._stepped = [  # the places of those that got to a step
            i for i, s in enumerate(history.stints) if s.times.marks.stepped_at_s is not None
        ]

    def recovery(self, incident: Incident) -> Recovery | None:
        """Return the way back from an incident; None for one of a generation without a plan."""
        place, resumed_s = self._places.get(incident.generation), incident.resumed_at_s
        if place is None or resumed_s is None:
            return None
        restored_s, generation = resumed_s, incident.next_generation or 0
        if (back := self._back(place)) is not None:
            generation, marks = back.number, back.times.marks
            resumed_s = marks.stepped_at_s or resumed_s
            restored_s = marks.restored_at_s or resumed_s
        began_s = self._began_s(place, incident)
        resumed_s = max(resumed_s, began_s)
        phases = list(self._within(began_s, min(restored_s, resumed_s)))
        if restored_s < resumed_s:
            phases.append(("first_step", max(restored_s, began_s), resumed_s))
        return Recovery(incident, generation, began_s, resumed_s, tuple(phases))

    def _back(self, place: int) -> Stint | None:
        """Return the first later generation that got to a step."""
        at = bisect_right(self._stepped, place)
        return self._stints[self._stepped[at]] if at < len(self._stepped) else None

    def _began_s(self, place: int, incident: Incident) -> float:
        stint, after = self._stints[place], self._stints[place + 1 : place + 2]
        if stint.times.ended_at_s is None:
            return incident.detected_at_s
        latest_s = after[0].committed_at_s if after else incident.detected_at_s
        return accounts.ended_at_s(stint, latest_s)

    def _within(self, start_s: float, end_s: float) -> Iterator[Phase]:
        first = bisect_right(self._spans, start_s, key=lambda span: span.end_s)
        last = bisect_left(self._spans, end_s, key=lambda span: span.start_s)
        for span in self._spans[first:last]:
            yield span.kind, max(span.start_s, start_s), min(span.end_s, end_s)


def _stint(generation: Generation, times: GenerationTimes) -> Stint:
    planned = SnapshotId.parse(generation.resume[0]).step if generation.resume else 0
    said = times.marks.from_step
    return Stint(
        number=generation.number,
        proposed_at_s=generation.proposed_at_s,
        committed_at_s=generation.committed_at_s,
        from_step=planned if said is None else said,
        times=times,
        awaited_at_s=generation.awaited_at_s,
    )


def _times(book: JobBook, number: int, job: Job | None, taken: list[Tally]) -> GenerationTimes:
    times = book.times.get(number, GenerationTimes())
    if job is not None and job.timing is not None and job.timing.generation == number:
        live = job.timing.times(max((up.at_s for up in book.started.values()), default=None))
        times = msgspec.structs.replace(
            live, ended_at_s=times.ended_at_s, detected_at_s=times.detected_at_s
        )
    if not taken:
        return times
    return msgspec.structs.replace(times, tallies=merged(times.tallies, taken))
