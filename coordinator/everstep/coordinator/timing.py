"""Keeps the times of the generation in force: what its ranks say of them, and when it ended.

One rank stands for the job, for ranks go in step: the one that waits longest for its data, looked
for among all of them now and then. Nothing here decides anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from everstep.coordinator import cases, facts
from everstep.coordinator.times import (
    MOMENTS,
    GenerationTimes,
    Marks,
    Series,
    at_step,
    latest,
    merged,
)
from everstep.wire.messages import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

    from everstep.coordinator.incidents import Incident
    from everstep.coordinator.job import Job
    from everstep.coordinator.nodes import Session
    from everstep.coordinator.turn import Turn
    from everstep.wire.messages import RankProgress, RankTimeline

_SAMPLE_S, _LOOK_AT_ALL_S = 1.0, 10.0
_SEEN_FROM_OUTSIDE = frozenset({"silent", "finding", "note"})


class Timing:
    """The live half of one generation's times; a restart of the coordinator takes up the book's."""

    def __init__(self, job: Job, generation: int) -> None:
        book = job.book
        self.generation = generation
        self.base = book.times.get(generation, GenerationTimes())
        self.marks = self.base.marks
        self.stepped: dict[str, float] = {}
        taken = (s.tally for s in book.snapshots.values() if s.generation == generation)
        self.series = Series(merged(self.base.tallies, [t for t in taken if t is not None]))
        self.due_s = self.all_due_s = 0.0
        self.stands_for: tuple[str, int] | None = None

    def times(self, up_at_s: float | None) -> GenerationTimes:
        """Return what is known by now."""
        return msgspec.structs.replace(
            self.base,
            marks=self.marks,
            tallies=self.series.told(),
            up_at_s=self.base.up_at_s if up_at_s is None else up_at_s,
        )

    def told(self, node: str, marks: Marks) -> None:
        """Take in when a node came up; it says all of it each time."""
        self.marks = latest(self.marks, marks)
        if marks.stepped_at_s is not None:
            self.stepped[node] = marks.stepped_at_s

    def stepped_at_s(self, members: list[str]) -> float | None:
        """Return when the last node finished its first step, None while one has not."""
        if len(self.stepped) < len(members) or not self.stepped.keys() >= set(members):
            return None  # the cheap look first: a thousand nodes come up one by one
        return max((self.stepped[node] for node in members), default=None)


def of(job: Job) -> Timing:
    """Return the times of the generation in force."""
    if job.timing is None or job.timing.generation != job.book.generation:
        job.timing = Timing(job, job.book.generation)
    return job.timing


def told(turn: Turn, job: Job, session: Session, said: RankTimeline) -> None:
    """A node's first rank says when it came up."""
    if said.generation != job.book.generation or job.book.over is not None:
        return
    moments = {
        name: session.to_ours(at_s, turn.now_s)[0]
        for name in MOMENTS
        if (at_s := getattr(said, name)) is not None
    }
    timing = of(job)
    timing.told(session.node, Marks(from_step=said.from_step, **moments))
    if timing.stepped_at_s(job.book.members) is not None:
        put_down(turn, job)


def sample(turn: Turn, job: Job) -> None:
    """Note how far the ranks are; called by the clock, looks once a second."""
    timing = of(job)
    if turn.now_s < timing.due_s or not job.book.generation:
        return
    timing.due_s = turn.now_s + _SAMPLE_S
    if timing.stands_for is None or turn.now_s >= timing.all_due_s:
        timing.all_due_s = turn.now_s + _LOOK_AT_ALL_S
        timing.stands_for = _waits_longest(job)
    if timing.stands_for is None:
        return
    node, rank = timing.stands_for
    for progress in job.last_ranks(node):
        if progress.rank == rank:
            _add(timing.series, job.nodes.sessions[node], progress, turn.now_s)


def last_words(turn: Turn, job: Job, session: Session, last: RankProgress) -> None:
    """A rank is gone, and this is what its page says: where it got to, exactly."""
    if not job.owns(last):
        return
    if last.generation == job.book.generation:
        if _add(of(job).series, session, last, turn.now_s) and job.book.replan is not None:
            put_down(turn, job)
    elif (times := job.book.times.get(last.generation)) is not None:
        _amend(turn, job, session, last, times)


def _amend(
    turn: Turn, job: Job, session: Session, last: RankProgress, times: GenerationTimes
) -> None:
    """The next plan was quicker than the last word of a rank that it replaces."""
    series = Series(list(times.tallies))
    if not _add(series, session, last, turn.now_s):
        return
    better = msgspec.structs.replace(times, tallies=series.told())
    turn.record(
        facts.GenerationTimed(
            at_s=turn.now_s, job=job.book.id, generation=last.generation, times=better
        )
    )


def tally_of(job: Job, step: int, generation: int) -> Tally | None:
    """Return what is known of a step of the generation in force."""
    if generation != job.book.generation:
        return None
    return at_step(of(job).series.tallies, step)


def put_down(turn: Turn, job: Job) -> None:
    """Journal the times of the generation in force as far as they are known, if that is news."""
    book = job.book
    if not book.generation:
        return
    timing = of(job)
    ended_s, detected_s = _end(cases.of_generation(job))
    ups = [up.at_s for up in book.started.values()]
    up_s = max(ups) if ups and len(ups) >= len(book.members) else None
    times = msgspec.structs.replace(
        timing.times(up_s), ended_at_s=ended_s, detected_at_s=detected_s
    )
    if times != book.times.get(book.generation):
        turn.record(
            facts.GenerationTimed(
                at_s=turn.now_s, job=book.id, generation=book.generation, times=times
            )
        )


def _end(incident: Incident | None) -> tuple[float | None, float | None]:
    """Return the first sign of a failure, and when it was known; None for no failure."""
    if incident is None or incident.kind == "operator":
        return None, None
    signs = [c.at_s for c in incident.clues if c.role == "root"]
    signs = signs or [c.at_s for c in incident.clues if c.kind not in _SEEN_FROM_OUTSIDE]
    first_s = min(signs, default=incident.detected_at_s)
    return min(first_s, incident.detected_at_s), incident.detected_at_s


def _waits_longest(job: Job) -> tuple[str, int] | None:
    seen = list(_all_ranks(job))
    if not seen:
        return None
    node, progress = max(seen, key=lambda s: s[1].tally.data_s if s[1].tally else -1.0)
    return node, progress.rank


def _all_ranks(job: Job) -> Iterator[tuple[str, RankProgress]]:
    for node in job.book.members:
        for progress in job.last_ranks(node):
            yield node, progress


def _add(series: Series, session: Session, progress: RankProgress, now_s: float) -> bool:
    tally = progress.tally
    if tally is None:
        return _add_unsummed(series, session, progress)
    at_s, _ = session.to_ours(tally.at_s, now_s)
    return series.add(Tally(tally.step, at_s, tally.data_s, tally.snapshot_s))


def _add_unsummed(series: Series, session: Session, progress: RankProgress) -> bool:
    """An older agent, or a page without records: the step, and when it last changed."""
    if progress.phase != "step" or progress.step <= 0:
        return False
    at_s = session.beat_at_s - progress.standing_s
    return series.add(Tally(progress.step, at_s))
