"""What the account of a job's time is made from, for one generation; all by our own clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from everstep.wire.messages import Tally

_KEPT, _THINNED = 128, 96
_TOLD_RECENT, _TOLD_BEFORE = 12, 12


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """When the ranks of a generation came up: the last node's moment of each kind.

    `from_step` is the step that they really resumed from, None while none of them has said.
    """

    from_step: int | None = None
    began_at_s: float | None = None
    opened_at_s: float | None = None
    grouped_at_s: float | None = None
    restored_at_s: float | None = None
    stepped_at_s: float | None = None
    saved_at_s: float | None = None


class GenerationTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. `ended_at_s` is the first sign of what ended it, None for no failure.

    `up_at_s` is when the last launcher said that its ranks run. `tallies` are some of its
    finished steps, in order; the newest is the last that is known of.
    """

    marks: Marks = Marks()
    up_at_s: float | None = None
    tallies: list[Tally] = []
    ended_at_s: float | None = None
    detected_at_s: float | None = None


MOMENTS = (
    "began_at_s", "opened_at_s", "grouped_at_s", "restored_at_s", "stepped_at_s", "saved_at_s",
)  # fmt: skip


def latest(one: Marks, other: Marks) -> Marks:
    """Return the later moment of each kind."""
    moments = {
        name: max((t for m in (one, other) if (t := getattr(m, name)) is not None), default=None)
        for name in MOMENTS
    }
    from_step = one.from_step if other.from_step is None else other.from_step
    return Marks(from_step=from_step, **moments)


@dataclass(slots=True)
class Series:
    """Finished steps of one generation, thinned out the older they are."""

    tallies: list[Tally] = field(default_factory=list)

    @property
    def last(self) -> Tally | None:
        """The newest step that is known of."""
        return self.tallies[-1] if self.tallies else None

    def add(self, tally: Tally) -> bool:
        """Take in a step; False for one that is not newer than the last."""
        last = self.last
        if last is not None and (tally.step <= last.step or tally.at_s < last.at_s):
            return False
        if last is not None:  # sums only grow, and a torn page has none
            waits = max(tally.data_s, last.data_s), max(tally.snapshot_s, last.snapshot_s)
            tally = Tally(tally.step, tally.at_s, *waits)
        self.tallies.append(tally)
        if len(self.tallies) > _KEPT:
            self.tallies[:_THINNED] = self.tallies[:_THINNED:2]
        return True

    def told(self) -> list[Tally]:
        """Return what is worth writing down: the newest, and every so many of those before."""
        before, recent = self.tallies[:-_TOLD_RECENT], self.tallies[-_TOLD_RECENT:]
        return before[:: max(1, -(-len(before) // _TOLD_BEFORE))] + recent


def merged(one: list[Tally], other: list[Tally]) -> list[Tally]:
    """Return the steps of both in order; of what contradicts itself the first."""
    series = Series()
    for tally in sorted([*one, *other], key=lambda t: (t.step, t.at_s)):
        series.add(tally)
    return series.tallies


def at_step(tallies: list[Tally], step: int) -> Tally | None:
    """Return when a step was finished, between the two neighbours that are known.

    None outside of what is known: before the first tally or after the last.

    >>> at_step([Tally(10, 100.0, 1.0), Tally(20, 110.0, 3.0)], 15)
    Tally(step=15, at_s=105.0, data_s=2.0, snapshot_s=0.0)
    """
    for before, after in pairwise([*tallies, *tallies[-1:]]):
        if before.step <= step <= after.step:
            return between(before, after, step)
    return None


def between(before: Tally, after: Tally, step: int) -> Tally:
    """Return a step between two, as if all of them had taken equally long."""
    part = (step - before.step) / max(1, after.step - before.step)
    return Tally(
        step,
        before.at_s + part * (after.at_s - before.at_s),
        before.data_s + part * (after.data_s - before.data_s),
        before.snapshot_s + part * (after.snapshot_s - before.snapshot_s),
    )
