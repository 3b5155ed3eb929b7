"""Where a job's time went: spans that tile it from its creation to now. Pure.

A cursor moves from the job's creation to its end and never goes back; whatever the moments are, in
whatever order clocks and late messages put them, there is no gap and no overlap. docs/ledger.md
says what each kind means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from everstep.coordinator.times import GenerationTimes, between
from everstep.wire.messages import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Kind = Literal[
    "productive", "data_wait", "snapshot_stall", "warm_up", "lost_work", "detection", "decision",
    "waiting", "teardown", "start", "rendezvous", "load", "unknown",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

_PATIENCE_S, _PATIENCE_STEPS = 10.0, 5.0


class Span(NamedTuple):
    """One stretch of a job's time."""

    kind: Kind
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Stint:
    """One generation: how it came about, and its times.

    `from_step` is the step that it resumed from, by its own word or else by its plan.
    """

    number: int
    proposed_at_s: float
    committed_at_s: float
    from_step: int
    times: GenerationTimes = field(default_factory=GenerationTimes)
    awaited_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class History:
    """A job. `kept_step` is the newest step that a later generation could resume from.

    `awaited_at_s` and `proposed_at_s` are of the generation to come. `done` tells that it ended
    well; `adopted` that its beginning is not known.
    """

    created_at_s: float
    stints: tuple[Stint, ...] = ()
    over_at_s: float | None = None
    done: bool = False
    kept_step: int = 0
    awaited_at_s: float | None = None
    proposed_at_s: float | None = None
    adopted: bool = False


@dataclass(slots=True)
class _Tape:
    """Spans from a start on; the cursor only moves forward, and never past `limit_s`."""

    cursor_s: float
    limit_s: float
    spans: list[Span] = field(default_factory=list)

    def to(self, kind: Kind, until_s: float | None) -> None:
        """Give what lies between the cursor and a moment to a kind."""
        if until_s is None:
            return
        until_s = min(until_s, self.limit_s)
        if until_s <= self.cursor_s:
            return
        if self.spans and self.spans[-1].kind == kind:
            self.spans[-1] = Span(kind, self.spans[-1].start_s, until_s)
        else:
            self.spans.append(Span(kind, self.cursor_s, until_s))
        self.cursor_s = until_s


def spans(history: History, now_s: float) -> list[Span]:
    """Return what a job's time went into, from its creation to its end, or to now.

    Inside a generation's steps, the kinds stand one after the other for their sums; everything
    else stands where it was.
    """
    end_s = now_s if history.over_at_s is None else history.over_at_s
    tape = _Tape(history.created_at_s, max(end_s, history.created_at_s))
    before: Kind = "unknown" if history.adopted else "waiting"
    stints, kept = history.stints, _kept(history)
    for i, stint in enumerate(stints):
        after = stints[i + 1] if i + 1 < len(stints) else None
        if i == 0:
            tape.to(before, stint.proposed_at_s)
        else:
            _between(tape, stint.awaited_at_s, stint.proposed_at_s)
        tape.to("decision", stint.committed_at_s)
        latest_s = tape.limit_s if after is None else after.committed_at_s
        _stint(tape, stint, ended_at_s(stint, latest_s), kept[i], history, first=i == 0)
        tape.to("detection", stint.times.detected_at_s)
    if stints:
        _between(tape, history.awaited_at_s, history.proposed_at_s)
    else:
        tape.to(before, history.proposed_at_s or tape.limit_s)
    tape.to("decision", tape.limit_s)
    return tape.spans


def totals(found: Iterable[Span]) -> dict[Kind, float]:
    """Return the seconds of every kind."""
    sums = dict.fromkeys(KINDS, 0.0)
    for span in found:
        sums[span.kind] += span.end_s - span.start_s
    return sums


def goodput(sums: dict[Kind, float]) -> float | None:
    """Return the share of steps that count, without waiting for data or snapshots."""
    return _share(sums, "productive")


def ettr(sums: dict[Kind, float]) -> float | None:
    """Return the effective training time ratio: goodput, and what was waited for data."""
    return _share(sums, "productive", "data_wait")


def _share(sums: dict[Kind, float], *kinds: Kind) -> float | None:
    wall_s = sum(sums.values())
    return sum(sums[k] for k in kinds) / wall_s if wall_s > 0 else None


# ------------------------------------------------------------------------------------ a generation


def _kept(history: History) -> list[int | None]:
    """Return up to which step each generation's work was kept; None for all of it."""
    last = history.stints[-1] if history.stints else None
    over = history.over_at_s is not None
    failed = not history.done if over else last is not None and last.times.ended_at_s is not None
    limit = history.kept_step if failed else None
    kept: list[int | None] = []
    for stint in reversed(history.stints):
        kept.append(limit)
        limit = stint.from_step if limit is None else min(limit, stint.from_step)
    return kept[::-1]


def ended_at_s(stint: Stint, latest_s: float) -> float:
    """Return when a generation's ranks stopped working: no sooner than their last step.

    `latest_s` is when the next plan was in force: without a failure they worked until then.
    """
    ended_s = stint.times.ended_at_s
    if ended_s is None:
        return latest_s
    last = stint.times.tallies[-1].at_s if stint.times.tallies else ended_s
    return min(latest_s, max(ended_s, last))


def _between(tape: _Tape, awaited_s: float | None, proposed_s: float | None) -> None:
    """After a failure and before the next plan: decide, and wait for nodes if it needs some."""
    if awaited_s is not None:
        tape.to("decision", awaited_s)
        tape.to("waiting", tape.limit_s if proposed_s is None else proposed_s)


def _stint(
    tape: _Tape, stint: Stint, end_s: float, kept: int | None, history: History, *, first: bool
) -> None:
    marks, whole = stint.times.marks, tape.limit_s
    tape.limit_s = max(tape.cursor_s, min(end_s, whole))
    if not first:
        tape.to("teardown", _first(marks.began_at_s, stint.times.up_at_s, marks.opened_at_s))
    for kind, moment_s in _coming_up(stint, first=first):
        if moment_s is None:
            tape.to(kind, tape.limit_s)
            break
        tape.to(kind, moment_s)
    else:
        _steps(tape, stint, kept, live=history.over_at_s is None and end_s >= whole)
    tape.limit_s = whole


def _first(*moments: float | None) -> float | None:
    return next((m for m in moments if m is not None), None)


def _coming_up(stint: Stint, *, first: bool) -> list[tuple[Kind, float | None]]:
    """Return the stages before the first step, with their ends, None for one not ended yet."""
    marks, tallies = stint.times.marks, stint.times.tallies
    if marks.restored_at_s is not None:
        return [
            ("start", marks.opened_at_s),
            ("rendezvous", marks.grouped_at_s or marks.opened_at_s),
            ("load", marks.restored_at_s),
        ]
    if tallies:  # steps, and no word of how it came to them
        return [("start", tallies[0].at_s)]
    if marks.opened_at_s is not None:
        return [("start", marks.opened_at_s), ("rendezvous", marks.grouped_at_s), ("load", None)]
    if stint.times.up_at_s is not None:
        return [("start", stint.times.up_at_s), ("unknown", None)]
    return [("start" if first else "teardown", None)]


def _steps(tape: _Tape, stint: Stint, kept: int | None, *, live: bool) -> None:
    curve = _curve(stint, tape.cursor_s)
    last = curve[-1]
    if kept is None:
        _spend(tape, stint, curve, last)
        if live and len(curve) == 1:
            tape.to("warm_up", tape.limit_s)
        elif live:
            step_s = _step_s(curve)
            tape.to("productive", last.at_s + max(_PATIENCE_S, _PATIENCE_STEPS * step_s))
            tape.to("unknown", tape.limit_s)
        else:
            tape.to("snapshot_stall", stint.times.marks.saved_at_s)
            tape.to("teardown", tape.limit_s)
        return
    if kept > stint.from_step:
        _spend(tape, stint, curve, _reached(curve, kept))
    tape.to("lost_work", tape.limit_s)


def _curve(stint: Stint, begin_s: float) -> Sequence[Tally]:
    """Return what is known of the steps, the beginning and the first step in front."""
    curve = [Tally(stint.from_step, begin_s)]
    later = [t for t in stint.times.tallies if t.step > stint.from_step and t.at_s >= begin_s]
    stepped_s = stint.times.marks.stepped_at_s
    if stepped_s is not None and stepped_s > begin_s:
        first = Tally(stint.from_step + 1, stepped_s)
        if later and later[0].step > first.step and later[0].at_s >= stepped_s:
            waits = between(curve[0], later[0], first.step)
            curve.append(Tally(first.step, stepped_s, waits.data_s, waits.snapshot_s))
        elif not later:
            curve.append(first)
    return curve + later


def _reached(curve: Sequence[Tally], step: int) -> Tally:
    """Return a step on the curve, or beyond it as if it went on like that."""
    for before, after in pairwise(curve):
        if before.step <= step <= after.step:
            return between(before, after, step)
    last = curve[-1]
    at_s = last.at_s + (step - last.step) * _step_s(curve)
    return Tally(step, at_s, last.data_s, last.snapshot_s)


def _step_s(curve: Sequence[Tally]) -> float:
    """Return the mean step after the first, which is longer; 0 while there is none."""
    first, last = curve[min(1, len(curve) - 1)], curve[-1]
    return (last.at_s - first.at_s) / max(1, last.step - first.step)


def _spend(tape: _Tape, stint: Stint, curve: Sequence[Tally], upto: Tally) -> None:
    """Divide the time up to a step among what it was spent on."""
    begin_s = tape.cursor_s
    stepped_s = stint.times.marks.stepped_at_s
    if stepped_s is not None:
        tape.to("warm_up", min(upto.at_s, stepped_s - _step_s(curve)))
    left_s = max(0.0, upto.at_s - tape.cursor_s)
    snapshot_s = min(left_s, max(0.0, upto.snapshot_s))
    data_s = min(left_s - snapshot_s, max(0.0, upto.data_s))
    tape.to("snapshot_stall", tape.cursor_s + snapshot_s)
    tape.to("data_wait", tape.cursor_s + data_s)
    tape.to("productive", max(begin_s, upto.at_s))
