"""Every second of a job has one kind, whatever order the moments come in."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.coordinator import accounts
from everstep.coordinator.accounts import KINDS, History, Kind, Span, Stint, spans, totals
from everstep.coordinator.times import (
    GenerationTimes,
    Marks,
    Series,
    at_step,
    merged,
)
from everstep.wire.messages import Tally

moments = st.floats(0, 1000, allow_nan=False)
maybe = st.none() | moments
steps = st.integers(0, 200)
tallies = st.lists(
    st.builds(Tally, steps, moments, st.floats(0, 2000), st.floats(0, 2000)), max_size=6
)
marks = st.builds(
    Marks,
    from_step=st.none() | steps,
    began_at_s=maybe,
    opened_at_s=maybe,
    grouped_at_s=maybe,
    restored_at_s=maybe,
    stepped_at_s=maybe,
    saved_at_s=maybe,
)
times = st.builds(
    GenerationTimes,
    marks=marks,
    up_at_s=maybe,
    tallies=tallies.map(lambda found: merged(found, [])),
    ended_at_s=maybe,
    detected_at_s=maybe,
)
stints = st.builds(
    Stint,
    number=st.integers(1, 9),
    proposed_at_s=moments,
    committed_at_s=moments,
    from_step=steps,
    times=times,
    awaited_at_s=maybe,
)
histories = st.builds(
    History,
    created_at_s=moments,
    stints=st.lists(stints, max_size=4).map(tuple),
    over_at_s=maybe,
    done=st.booleans(),
    kept_step=steps,
    awaited_at_s=maybe,
    proposed_at_s=maybe,
    adopted=st.booleans(),
)


@given(histories, moments)
def test_the_kinds_tile_a_job_without_gap_or_overlap(history: History, now_s: float) -> None:
    found = spans(history, now_s)
    end_s = now_s if history.over_at_s is None else history.over_at_s
    wall_s = max(0.0, end_s - history.created_at_s)
    assert sum(totals(found).values()) == pytest.approx(wall_s)
    assert all(s.start_s < s.end_s and s.kind in KINDS for s in found)
    assert all(a.end_s == b.start_s and a.kind != b.kind for a, b in pairwise(found))
    if found:
        assert (found[0].start_s, found[-1].end_s) == (history.created_at_s, end_s)


@given(histories, moments, st.integers(0, 200))
def test_work_that_is_not_kept_is_never_productive(
    history: History, over_at_s: float, less: int
) -> None:
    failed = replace(history, over_at_s=over_at_s, done=False)
    worse = replace(failed, kept_step=max(0, failed.kept_step - less))
    best, least = totals(spans(failed, 0.0)), totals(spans(worse, 0.0))
    assert least["lost_work"] >= best["lost_work"] - 1e-6
    assert least["productive"] <= best["productive"] + 1e-6


def kinds(history: History, now_s: float) -> dict[Kind, float]:
    """Return the kinds that took any time, rounded to a millisecond."""
    return {k: round(s, 3) for k, s in totals(spans(history, now_s)).items() if s}


def first() -> Stint:
    """Return a generation of 1 s steps: committed at 3, first step at 10, told of up to step 50."""
    return Stint(
        number=1,
        proposed_at_s=2.0,
        committed_at_s=3.0,
        from_step=0,
        times=GenerationTimes(
            marks=Marks(
                from_step=0,
                began_at_s=3.5,
                opened_at_s=6.0,
                grouped_at_s=7.0,
                restored_at_s=8.0,
                stepped_at_s=10.0,
            ),
            tallies=[Tally(11, 20.0, 1.1, 0.5), Tally(51, 60.0, 5.1, 2.5)],
        ),
    )


def failed(stint: Stint, ended_s: float, detected_s: float) -> Stint:
    """Return a generation that ended with a failure."""
    ended = {"ended_at_s": ended_s, "detected_at_s": detected_s}
    known = {f: getattr(stint.times, f) for f in stint.times.__struct_fields__}
    return replace(stint, times=GenerationTimes(**{**known, **ended}))


def second(from_step: int) -> Stint:
    """Return the generation after a failure at 60.5, with one step a second again."""
    return Stint(
        number=2,
        proposed_at_s=64.0,
        committed_at_s=64.5,
        from_step=from_step,
        awaited_at_s=62.0,
        times=GenerationTimes(
            marks=Marks(
                from_step=from_step,
                began_at_s=65.0,
                opened_at_s=67.0,
                grouped_at_s=67.5,
                restored_at_s=68.0,
                stepped_at_s=69.0,
            ),
            tallies=[Tally(from_step + 11, 79.0)],
        ),
    )


def test_a_job_that_runs_waits_starts_and_steps() -> None:
    assert kinds(History(0.0, (first(),)), 60.0) == {
        "waiting": 2.0,
        "decision": 1.0,
        "start": 3.0,
        "rendezvous": 1.0,
        "load": 1.0,
        "warm_up": 1.0,
        "data_wait": 5.1,
        "snapshot_stall": 2.5,
        "productive": 43.4,
    }


def test_a_failure_costs_its_recovery_and_the_steps_since_the_snapshot() -> None:
    history = History(0.0, (failed(first(), 60.5, 61.0), second(41)))
    assert kinds(history, 79.0) == {
        "waiting": 2.0 + 2.0,
        "decision": 1.0 + 1.0 + 0.5,
        "start": 3.0 + 2.0,
        "rendezvous": 1.0 + 0.5,
        "load": 1.0 + 0.5,
        "warm_up": 1.0,
        "detection": 0.5,
        "teardown": 0.5,
        "lost_work": 10.5,  # steps 42 to 51, and the one in flight
        "data_wait": 4.1,
        "snapshot_stall": 2.0,
        "productive": (50.0 - 9.0 - 4.1 - 2.0) + 11.0,
    }


def test_steps_beyond_the_last_that_was_heard_of_are_kept_when_they_were_resumed_from() -> None:
    """A heartbeat is up to a second old: what was resumed from proves that it was reached."""
    ended = failed(first(), 62.3, 62.4)
    found = kinds(History(0.0, (ended, replace(second(53), awaited_at_s=None))), 79.0)
    assert found["lost_work"] == 0.3


def test_the_worst_resume_counts_for_all_that_came_before_it() -> None:
    third = Stint(3, 90.0, 91.0, from_step=0, times=GenerationTimes(marks=Marks(from_step=0)))
    history = History(0.0, (failed(first(), 60.5, 61.0), failed(second(41), 80.0, 85.0), third))
    assert "productive" not in kinds(history, 95.0)


def test_a_job_that_failed_keeps_what_its_snapshots_hold() -> None:
    over = History(0.0, (failed(first(), 60.5, 61.0),), over_at_s=70.0, kept_step=41)
    assert kinds(over, 99.0)["lost_work"] == 10.5
    assert kinds(replace(over, done=True, stints=(first(),)), 99.0)["teardown"] == 10.0


def test_a_running_job_that_is_not_heard_of_is_unknown_until_it_is() -> None:
    assert "unknown" not in kinds(History(0.0, (first(),)), 69.0)
    assert kinds(History(0.0, (first(),)), 100.0)["unknown"] == 30.0


def test_ranks_that_tell_nothing_are_unknown_from_when_they_were_up() -> None:
    mute = Stint(1, 2.0, 3.0, 0, GenerationTimes(up_at_s=4.0))
    assert kinds(History(0.0, (mute,)), 50.0) == {
        "waiting": 2.0,
        "decision": 1.0,
        "start": 1.0,
        "unknown": 46.0,
    }


def test_a_planned_change_of_nodes_has_no_detection_and_no_decision() -> None:
    grown = replace(second(51), awaited_at_s=None)
    found = kinds(History(0.0, (first(), grown)), 79.0)
    assert "detection" not in found
    assert found["decision"] == 1.0


def test_ratios_are_shares_of_the_wall() -> None:
    sums = totals([Span("productive", 0, 6), Span("data_wait", 6, 8), Span("start", 8, 10)])
    assert accounts.goodput(sums) == 0.6
    assert accounts.ettr(sums) == 0.8
    assert accounts.goodput(totals([])) is None


@given(st.lists(st.tuples(steps, moments), max_size=400))
def test_a_series_stays_short_and_in_order(seen: list[tuple[int, float]]) -> None:
    series = Series()
    for step, at_s in seen:
        series.add(Tally(step, at_s))
    assert len(series.tallies) <= 128
    assert all(a.step < b.step and a.at_s <= b.at_s for a, b in pairwise(series.tallies))
    assert len(series.told()) <= 25
    assert series.told()[-1:] == series.tallies[-1:]


def test_a_step_between_two_known_ones_is_found() -> None:
    known = [Tally(10, 100.0, 1.0), Tally(20, 110.0, 3.0)]
    assert at_step(known, 20) == known[1]
    assert at_step(known, 21) is None
    assert at_step([], 1) is None
