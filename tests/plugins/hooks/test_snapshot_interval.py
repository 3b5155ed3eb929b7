"""The interval that loses the least, and a hook that keeps to it while the run teaches it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plugins.hooks.steps import FakeRun, FakeStep

from everstep.plugins.hooks.snapshot import Snapshot, SnapshotConfig
from everstep.plugins.hooks.snapshot.interval import Limits, Measured, choose, daly_s
from everstep.sdk import Finding

HOUR_S = 3600.0
WIDE = Limits(1, 10**9)


def cost(interval_s: float, stall_s: float, mtbf_s: float) -> float:
    """Return how much longer than undisturbed a run takes with failures at random (Daly's T)."""
    return mtbf_s * math.expm1((interval_s + stall_s) / mtbf_s) / interval_s


@given(stall_s=st.floats(1e-3, 100), mtbf_h=st.floats(0.5, 1000))
def test_no_other_interval_would_lose_noticeably_less(stall_s: float, mtbf_h: float) -> None:
    chosen_s = daly_s(stall_s, mtbf_h * HOUR_S)
    others_s = (chosen_s * 1.2**i for i in range(-12, 13))
    least = min(cost(s, stall_s, mtbf_h * HOUR_S) for s in others_s)
    assert cost(chosen_s, stall_s, mtbf_h * HOUR_S) <= least * 1.0005


def test_where_failures_come_faster_than_snapshots_it_is_the_time_between_them() -> None:
    assert daly_s(100.0, 40.0) == 40.0
    assert 0 < daly_s(100.0, 51.0) < 110.0


def test_it_is_young_where_failures_are_rare() -> None:
    assert daly_s(0.1, 1e6) == pytest.approx(math.sqrt(2 * 0.1 * 1e6), rel=0.01)


@pytest.mark.parametrize(
    ("measured", "limits", "every", "told"),
    [
        (
            Measured(0.02, 3.1, 0.7, 5.3 * HOUR_S),
            WIDE,
            39,
            "stall 0.02 s, write 3.1 s, MTBF 5.3 h, Young/Daly says 28 s",
        ),
        (Measured(0.02, 60.0, 0.7, 5.3 * HOUR_S), WIDE, 86, "; the one before must be written"),
        (Measured(0.02, 3.1, 0.7, 5.3 * HOUR_S), Limits(50, 99), 50, "; min_every_steps is more"),
        (Measured(0.02, 3.1, 0.7, 5.3 * HOUR_S), Limits(1, 30), 30, "; max_every_steps is less"),
        (Measured(0.02, 60.0, 0.7, 5.3 * HOUR_S), Limits(1, 30), 30, "; max_every_steps is less"),
        (Measured(2.0, None, 10.0, 3 * HOUR_S), WIDE, 21, "not written yet"),
        (Measured(0.5, 1.0, 1.0, None), WIDE, 294, "MTBF 24.0 h (assumed)"),
        (Measured(0.0, 0.0, 1.0, HOUR_S), WIDE, 1, "says 0 s"),
        (Measured(1.0, 1.0, 0.0, HOUR_S), Limits(1, 500), 500, "max_every_steps"),
    ],
)
def test_the_choice_in_steps_and_the_reason_that_people_read(
    measured: Measured, limits: Limits, every: int, told: str
) -> None:
    choice = choose(measured, limits)
    assert choice.every_steps == every
    assert told in choice.why


@given(
    stall_s=st.floats(0, 1e6),
    write_s=st.none() | st.floats(0, 1e6),
    step_s=st.floats(0, 1e6),
    mtbf_s=st.none() | st.floats(1e-3, 1e9),
    least=st.integers(1, 1000),
    more=st.integers(0, 1000),
)
def test_the_users_limits_hold_whatever_is_measured(
    stall_s: float,
    write_s: float | None,
    step_s: float,
    mtbf_s: float | None,
    least: int,
    more: int,
) -> None:
    limits = Limits(least, least + more)
    choice = choose(Measured(stall_s, write_s, step_s, mtbf_s), limits)
    assert limits.least <= choice.every_steps <= limits.most
    assert choice.why


# ------------------------------------------------------------------------------ the hook itself


@dataclass
class Taken:
    step: int
    stall_s: float = 0.0
    id: str = ""
    final: bool = False
    disk: bool = True


class FakeSnapshots:
    def __init__(self) -> None:
        self.asked = False
        self.write_s: float | None = None

    def ask(self, *, disk: bool = True) -> None:
        self.asked |= disk

    def policy(self, *, keep: int, at_end: bool, wait_when_busy: bool, **more: object) -> None:
        pass


class Loop:
    """A training loop of one rank, as far as this hook sees it."""

    def __init__(
        self,
        *,
        rank: int = 0,
        done: int = 0,
        mtbf_s: float | None = HOUR_S,
        min_every_steps: int = 10,
    ) -> None:
        self.snapshots = FakeSnapshots()
        self.findings: list[Finding] = []
        settings = SnapshotConfig(every_steps="auto", min_every_steps=min_every_steps)
        self.hook = Snapshot(settings, self.snapshots, self.findings.append, lambda: 5.0)
        self.hook.run_start(FakeRun(rank=rank, done=done, mtbf_s=mtbf_s))
        self.number = done
        self.asked_at: list[int] = []
        self._stall_s = 0.0

    def run(
        self,
        steps: int,
        *,
        step_s: float = 1.0,
        stall_s: float = 0.1,
        write_s: float = 2.0,
        busy: Callable[[int], bool] = lambda _: False,
        others_ask: Callable[[int], bool] = lambda _: False,
    ) -> None:
        for _ in range(steps):
            self.number += 1
            step = FakeStep(self.number, step_s=step_s + self._stall_s, snapshot_s=self._stall_s)
            self._stall_s = 0.0
            self.snapshots.asked = False
            self.hook.before_update(step)
            if self.snapshots.asked:
                self.asked_at.append(self.number)
            self.hook.after_update(step)
            wanted = self.snapshots.asked or others_ask(self.number)
            if wanted and not busy(self.number):
                self.hook.snapshot(Taken(self.number))
                self._stall_s, self.snapshots.write_s = stall_s, write_s


def test_the_first_comes_after_the_least_and_the_rest_as_often_as_is_best() -> None:
    loop = Loop(min_every_steps=5)
    loop.run(100)
    every = round(daly_s(0.1, HOUR_S))
    assert loop.asked_at == [5, 5 + every, 5 + 2 * every, 5 + 3 * every]
    (found,) = loop.findings
    assert (found.name, found.component, found.severity) == ("snapshot.interval", "job", "info")
    assert found.summary.startswith(f"every {every} steps: stall 0.1 s, write 2 s, MTBF 60.0 min")
    assert found.at_s == 5.0


def test_only_the_first_rank_asks_and_the_vote_makes_it_everybodys() -> None:
    loop = Loop(rank=1, min_every_steps=5)
    loop.run(100, others_ask=lambda number: number % 27 == 0)
    assert loop.asked_at == []
    assert loop.findings == []


def test_it_counts_from_where_the_run_was_resumed_and_from_what_others_asked_for() -> None:
    resumed = Loop(done=1000, min_every_steps=10)
    resumed.run(25)
    assert resumed.asked_at == [1010]
    taught = Loop(done=1000, min_every_steps=10)
    taught.run(40, others_ask=lambda number: number == 1004)
    assert taught.asked_at == [1004 + round(daly_s(0.1, HOUR_S))]


def test_a_longer_stall_makes_them_rarer_and_says_so_and_a_small_change_does_not() -> None:
    loop = Loop(min_every_steps=5)
    loop.run(200)
    assert len(loop.findings) == 1
    loop.run(200, stall_s=0.11)
    assert len(loop.findings) == 1
    loop.run(2000, stall_s=1.0)
    assert len(loop.findings) > 1
    last = loop.asked_at[-1] - loop.asked_at[-2]
    assert last == pytest.approx(daly_s(1.0, HOUR_S), rel=0.2)


def test_one_slow_snapshot_among_many_changes_nothing() -> None:
    loop = Loop(min_every_steps=5)
    loop.run(300)
    loop.run(30, stall_s=30.0)
    loop.run(300)
    assert len(loop.findings) == 1


def test_one_that_is_left_out_is_asked_for_again_but_not_at_every_step() -> None:
    loop = Loop(min_every_steps=20)
    loop.run(60, busy=lambda number: number < 26)
    assert loop.asked_at[:4] == [20, 22, 24, 26]


def test_writing_takes_its_time_and_the_next_one_waits_for_it() -> None:
    loop = Loop(min_every_steps=5)
    loop.run(300, write_s=60.0)
    assert loop.asked_at[-1] - loop.asked_at[-2] == 60
    assert "the one before must be written first" in loop.findings[-1].summary


def test_without_a_coordinators_word_a_day_between_failures_is_assumed() -> None:
    loop = Loop(min_every_steps=5, mtbf_s=None)
    loop.run(500)
    assert "MTBF 24.0 h (assumed)" in loop.findings[0].summary


@pytest.mark.parametrize("least", [0, 2000])
def test_limits_that_leave_no_choice_are_refused(least: int) -> None:
    with pytest.raises(ValueError, match="min_every_steps"):
        SnapshotConfig(every_steps="auto", min_every_steps=least)
