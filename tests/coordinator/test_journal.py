"""The journal by itself: whole turns, durable before anybody hears, patient with the disk."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.coordinator.world import World

from everstep.coordinator import facts
from everstep.coordinator.books import Books, replay
from everstep.coordinator.journal import Journal, JournalError


class Committed:
    """What the writer said is durable."""

    def __init__(self) -> None:
        self.seq = 0
        self._changed = threading.Condition()

    def __call__(self, seq: int) -> None:
        with self._changed:
            self.seq = seq
            self._changed.notify_all()

    def wait(self, seq: int, *, within: float = 20.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.seq >= seq, within)


@pytest.fixture
def committed() -> Committed:
    return Committed()


@pytest.fixture
def journal(tmp_path: Path, committed: Committed) -> Iterator[Journal]:
    opened = Journal(tmp_path, committed)
    yield opened
    opened.close()


def wait_for(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def started(epoch: int) -> facts.CoordinatorStarted:
    return facts.CoordinatorStarted(at_s=float(epoch), epoch=epoch)


def test_facts_come_back_in_order_with_their_numbers(
    journal: Journal, committed: Committed
) -> None:
    assert journal.append([started(1), started(2)]) == 2
    assert journal.append([started(3)]) == 3
    committed.wait(3)
    assert [(e.seq, e.fact) for e in journal.read()] == [
        (1, started(1)),
        (2, started(2)),
        (3, started(3)),
    ]
    assert [e.seq for e in journal.read(since=1, limit=1)] == [2]


def test_a_number_is_never_used_twice_after_a_restart(tmp_path: Path) -> None:
    first = Journal(tmp_path, Committed())
    first.append([started(1)])
    first.close()
    committed = Committed()
    second = Journal(tmp_path, committed)
    assert second.last == 1
    assert second.append([started(2)]) == 2
    committed.wait(2)
    second.close()


def test_what_is_told_to_be_durable_can_be_read_by_others(
    journal: Journal, committed: Committed
) -> None:
    seq = journal.append([started(7)])
    committed.wait(seq)
    with closing(sqlite3.connect(journal.path)) as database:
        ((count,),) = database.execute("select count(*) from facts")
    assert count == 1


def test_a_disk_that_refuses_is_asked_again_and_nothing_is_lost(
    journal: Journal, committed: Committed
) -> None:
    with closing(sqlite3.connect(journal.path, isolation_level=None)) as database:
        database.execute("begin immediate")  # nobody else may write now
        seq = journal.append([started(1)])
        wait_for(lambda: journal.error is not None)
        assert "tried again" in (journal.error or "")
        assert committed.seq == 0, "what is not durable is not told"
        more = journal.append([started(2)])
        database.execute("rollback")
    committed.wait(more)
    wait_for(lambda: journal.error is None)
    assert [e.seq for e in journal.read()] == [seq, more]


def test_a_fact_of_a_newer_version_is_an_error_that_says_so(
    journal: Journal, committed: Committed
) -> None:
    committed.wait(journal.append([started(1)]))
    with closing(sqlite3.connect(journal.path)) as database:
        database.execute("update facts set body = replace(body, 'Started', 'Flew')")
        database.commit()
    with pytest.raises(JournalError, match=r"fact 1 .*newer"):
        journal.read()


def test_jobs_that_ended_long_ago_are_forgotten_and_nodes_are_not(
    journal: Journal, committed: Committed
) -> None:
    world = World(["a", "b", "c"])
    launchers = world.launch_all(["a", "b", "c"], nnodes=(2, 2))
    world.until(world.training)
    world.kill_node("a")
    world.until(lambda: "a" not in world.members())
    world.succeed(launchers[1])
    world.succeed(launchers[2])
    assert world.job().over is not None
    committed.wait(journal.append(world.journal))
    assert journal.forget_jobs(ended_before_s=world.now_s - 60) == 0
    assert journal.forget_jobs(ended_before_s=world.now_s + 1) == 1
    books = replay([e.fact for e in journal.read()])
    assert not books.jobs
    assert books.nodes["a"].state == "evicted"


def test_the_books_come_out_of_the_file_as_they_went_in(
    journal: Journal, committed: Committed
) -> None:
    world = _eventful_world()
    committed.wait(journal.append(world.journal))
    assert replay([e.fact for e in journal.read()]) == world.cluster.books


@given(st.integers(0, 10_000))
def test_books_are_the_same_whether_replayed_at_once_or_with_a_restart_at_any_point(
    cut: int,
) -> None:
    journaled = _EVENTFUL.journal
    cut %= len(journaled)
    books = replay(list(journaled[:cut]))
    for fact in journaled[cut:]:
        books.apply(fact)
    assert books == _EVENTFUL.cluster.books


def test_every_kind_of_fact_survives_its_way_through_json() -> None:
    encoder, decoder = msgspec.json.Encoder(), msgspec.json.Decoder(facts.AnyFact)
    for fact in _EVENTFUL.journal:
        assert decoder.decode(encoder.encode(fact)) == fact


def test_books_pass_over_facts_of_jobs_that_were_forgotten() -> None:
    books = Books()
    books.apply(facts.RanksUp(at_s=0, job="gone", node="a", generation=1, ranks=[0], pids=[1]))
    assert books == Books()


def _eventful_world() -> World:
    """Return a world in which nearly everything has happened once."""
    world = World(["a", "b", "c", "d"])
    world.launch_all(["a", "b", "c", "d"], nnodes=(2, 3))
    world.snapshot_every = 4
    world.until(world.training)
    world.run(5)
    world.kill_rank(1)
    world.until(world.training)
    world.run(5)
    world.freeze("c")
    world.until(lambda: "d" in world.members())
    world.restart_coordinator()
    world.run(5)
    world.kill_launcher(world.rank(0)[0])
    world.until(world.training, within=30)
    operator = world.operator()
    operator.cordon("a", "later")
    world.ask(operator)
    world.end_rank(0, code=1, error="ValueError: x")
    world.until(world.training, within=30)
    world.ask_stop()
    return world


_EVENTFUL = _eventful_world()
