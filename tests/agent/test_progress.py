"""What is concluded from progress pages, with clocks made by hand."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from everstep.agent.peer import is_stopped
from everstep.agent.progress import Progress, RankPage, StepTimes
from everstep.wire.codec import encode
from everstep.wire.messages import PHASES, Heartbeat, Peer, Phase
from everstep.wire.page import RING_RECORDS, PageReader, PageWriter, Place, StepRecord

S = 1_000_000_000
NAN = float("nan")
ME = Peer(pid=10, uid=1000, gid=1000, start_ticks=1, boot_id="b")
OTHER = Peer(pid=11, uid=2000, gid=2000, start_ticks=2, boot_id="b")


class Rank:
    """A rank whose clock is moved by hand."""

    def __init__(self, rank: int = 0) -> None:
        self.now_s = 100.0
        self.writer = PageWriter(
            Place("j", 1, rank, 8, rank, 10), clock_ns=lambda: int(self.now_s * S)
        )

    def reader(self) -> PageReader:
        return PageReader(self.writer.fd)

    def step(self, step: int, step_s: float = 1.0, loss: float = 2.0) -> None:
        self.writer.finished(StepRecord(step, 0, 0, step_s, 0, 0, 0, 0, 0, loss, NAN, 1, NAN))


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.writer.close()


@pytest.fixture
def progress() -> Iterator[Progress]:
    progress = Progress()
    yield progress
    progress.close()


def stepping(rank: Rank, progress: Progress, step_s: float = 1.0, steps: int = 10) -> None:
    progress.add("c1", ME, rank.reader())
    rank.writer.enter("step", step=1)
    for step in range(1, steps + 1):
        rank.step(step, step_s)
    progress.look(int(rank.now_s * S))


def at(seconds: float) -> int:
    return int((100.0 + seconds) * S)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_the_percentile_is_that_of_the_last_durations(durations: list[float], keep: int) -> None:
    times = StepTimes(keep=keep)
    for duration in durations:
        times.add(duration)
    last = sorted(durations[-keep:])
    assert times.p99_s() == last[math.ceil(0.99 * len(last)) - 1]


def test_what_is_no_duration_does_not_count() -> None:
    times = StepTimes()
    for value in (NAN, math.inf, -1.0):
        times.add(value)
    assert times.p99_s() is None


def test_a_rank_that_steps_slowly_is_given_three_of_its_own_steps(
    rank: Rank, progress: Progress
) -> None:
    stepping(rank, progress, step_s=10.0)
    assert not progress.look(at(29.9))
    assert progress.look(at(30.1))
    assert progress.ranks()[0].p99_step_s == 10.0


def test_the_moment_of_the_next_standstill_is_known_beforehand(
    rank: Rank, progress: Progress
) -> None:
    assert progress.due_ns() is None
    stepping(rank, progress, step_s=10.0)
    assert progress.due_ns() == at(30)
    assert progress.look(at(30))
    assert progress.due_ns() == at(30.5)
    progress.start_anew(at(40))
    assert progress.due_ns() == at(70)
    rank.writer.enter("snapshot")
    progress.look(at(41))
    assert progress.due_ns() is None


def test_a_rank_that_steps_fast_is_given_two_seconds(rank: Rank, progress: Progress) -> None:
    stepping(rank, progress, step_s=0.01)
    assert not progress.look(at(1.9))
    assert progress.look(at(2.1))


def test_a_standstill_is_told_every_half_second_and_again_when_it_comes_back(
    rank: Rank, progress: Progress
) -> None:
    stepping(rank, progress)
    told = [t / 10 for t in range(100) if progress.look(at(t / 10))]
    assert told[0] == pytest.approx(3.0)
    assert told[1] == pytest.approx(3.5)
    assert len(told) == 14
    rank.now_s = 110.0
    rank.step(11)
    assert not progress.look(at(10.0))
    assert progress.look(at(13.2))


@pytest.mark.parametrize("phase", [p for p in PHASES if p != "step"])
def test_in_any_phase_but_step_a_rank_may_take_its_time(
    rank: Rank, progress: Progress, phase: Phase
) -> None:
    stepping(rank, progress)
    rank.writer.enter(phase)
    assert not progress.look(at(3600))
    assert progress.ranks()[0].standing_s == pytest.approx(3600)


def test_the_first_step_is_no_measure_but_bounds_the_second(rank: Rank, progress: Progress) -> None:
    stepping(rank, progress, step_s=60.0, steps=1)
    assert progress.ranks()[0].p99_step_s is None
    assert not progress.look(at(179))
    assert progress.look(at(181))
    rank.now_s = 300.0
    rank.step(2, step_s=0.5)
    progress.look(at(200))
    assert progress.ranks()[0].p99_step_s == 0.5
    assert progress.look(at(202.5))


def test_before_the_first_step_nothing_is_known(rank: Rank, progress: Progress) -> None:
    stepping(rank, progress, steps=0)
    assert not progress.look(at(10_000))


def test_after_this_process_stood_still_all_standstills_count_from_then(
    rank: Rank, progress: Progress
) -> None:
    stepping(rank, progress)
    progress.start_anew(at(60))
    assert not progress.look(at(60))
    assert progress.ranks()[0].standing_s == 0
    assert not progress.look(at(62.9))
    assert progress.look(at(63.1))


def test_a_clock_of_its_own_neither_makes_nor_hides_a_standstill(
    rank: Rank, progress: Progress
) -> None:
    stepping(rank, progress)
    rank.now_s = 5.0  # an hour behind, as in another time namespace
    rank.step(11)
    progress.look(at(1))
    assert progress.ranks()[0].standing_s <= 1.0
    rank.now_s = 1e6
    rank.step(12)
    progress.look(at(2))
    assert progress.ranks()[0].standing_s == 0.0
    assert progress.look(at(6))


ANY_FLOAT = st.floats(width=64)
ANY_INT = st.integers(-(2**63), 2**63 - 1)


@given(
    steps=st.lists(st.tuples(ANY_INT, st.lists(ANY_FLOAT, min_size=9, max_size=9)), max_size=5),
    changed_ns=st.lists(st.integers(0, 2**64 - 1), min_size=12, max_size=12),
    looks=st.lists(st.integers(0, 2**62), min_size=1, max_size=5),
)
@example(steps=[(1, [1e308] * 9)], changed_ns=[0] * 12, looks=[1])
@example(steps=[(1, [1.0] * 9), (2, [1e308] * 9)], changed_ns=[0] * 12, looks=[1])
@example(steps=[(1, [math.inf] * 9)], changed_ns=[2**64 - 1] * 12, looks=[1])
def test_a_rank_may_write_whatever_it_likes_and_harms_nobody(
    steps: list[tuple[int, list[float]]], changed_ns: list[int], looks: list[int]
) -> None:
    clock = iter(changed_ns)
    writer = PageWriter(Place("j", 1, 0, 1, 0, 1), clock_ns=lambda: next(clock))
    progress = Progress()
    progress.add("c", ME, PageReader(writer.fd))
    writer.enter("step", step=-5)
    for number, f in steps:
        writer.finished(StepRecord._make([number, f[0], abs(number), *f[1:], number, f[0]]))
        progress.look(looks[0])
    for now_ns in sorted(looks):
        progress.look(now_ns)
        progress.due_ns()
        encode(Heartbeat(seq=1, sent_at_s=1.0, ranks=progress.ranks()))
    progress.close()
    writer.close()


def test_records_that_were_overwritten_unread_are_simply_missing(
    rank: Rank, progress: Progress
) -> None:
    stepping(rank, progress, steps=RING_RECORDS * 2)
    (told,) = progress.ranks()
    assert told.step == RING_RECORDS * 2
    assert told.p99_step_s == 1.0


def test_what_was_not_measured_is_none_and_never_zero(rank: Rank, progress: Progress) -> None:
    stepping(rank, progress)
    (told,) = progress.ranks()
    assert (told.loss, told.grad_norm, told.lr) == (2.0, None, None)


def test_of_two_pages_for_one_place_the_later_counts_but_never_that_of_another_user(
    rank: Rank, progress: Progress
) -> None:
    stepping(rank, progress)
    again, strange = Rank(), Rank()
    again.writer.enter("step", step=77)
    strange.writer.enter("step", step=666)
    progress.add("c2", ME, again.reader())
    progress.add("c3", OTHER, strange.reader())
    progress.look(at(1))
    assert [(r.uid, r.step) for r in progress.ranks()] == [(1000, 77), (2000, 666)]
    progress.drop("c2")
    assert [(r.uid, r.step) for r in progress.ranks()] == [(1000, 10), (2000, 666)]
    again.writer.close()
    strange.writer.close()


def test_ranks_are_told_in_order(progress: Progress) -> None:
    ranks = [Rank(n) for n in (3, 1, 2)]
    for n, rank in enumerate(ranks):
        progress.add(f"c{n}", ME, rank.reader())
        rank.writer.close()
    progress.look(at(0))
    assert [r.rank for r in progress.ranks()] == [1, 2, 3]


def test_a_look_at_eight_pages_costs_next_to_nothing() -> None:
    ranks = [Rank(n) for n in range(8)]
    pages = [RankPage(ME, rank.reader()) for rank in ranks]
    for rank in ranks:
        rank.writer.enter("step", step=1)
    began_s = time.process_time()
    for look in range(1000):
        for page in pages:
            page.look(look)
    cost_s = (time.process_time() - began_s) / 1000
    for rank, page in zip(ranks, pages, strict=True):
        page.close()
        rank.writer.close()
    # Ten looks a second would be below one percent of a core; measured: 0.02 ms a look.
    assert cost_s < 0.001


def test_a_rank_that_a_signal_stopped_is_told_as_such_once_it_stands(rank: Rank) -> None:
    asked: list[int] = []

    def is_stopped(pid: int) -> bool:
        asked.append(pid)
        return True

    progress = Progress(is_stopped)
    stepping(rank, progress, step_s=0.01)
    progress.look(at(1.9))
    assert not progress.ranks()[0].stopped
    assert asked == []
    progress.look(at(2.1))
    assert progress.ranks()[0].stopped
    assert asked == [ME.pid]
    progress.close()


def test_the_kernel_says_who_is_stopped() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert not is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(child.pid)
        child.kill()
    assert not is_stopped(child.pid)
