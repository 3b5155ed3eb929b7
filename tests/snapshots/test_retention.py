"""What goes after a commit, what the coordinator is told, and what waits for its word."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.snapshots.conftest import StartWriter
from tests.snapshots.ranks import MakeRank
from tests.snapshots.test_writer import deadline
from tests.trainer.fake_agent import FakeAgent

from everstep.snapshots import catalogue
from everstep.snapshots.orders import Policy
from everstep.wire.messages import RankFinding


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


@pytest.fixture(autouse=True)  # the first to come is the last to go: after the writers
def agent(short: Path) -> Iterator[FakeAgent]:
    made = FakeAgent(short)
    yield made
    made.close()


def names(place: Path) -> list[str]:
    return [str(e.id) for e in catalogue.entries(place)]


def findings(agent: FakeAgent) -> list[tuple[str, bool]]:
    heard = [m.finding for m in list(agent.heard) if isinstance(m, RankFinding)]
    return [(f.name, f.resolved) for f in heard]


def test_the_coordinator_hears_of_each_commit_what_it_needs(
    start_writer: StartWriter, make_rank: MakeRank, place: Path, agent: FakeAgent
) -> None:
    writer = start_writer()
    done = make_rank().save(place, 7, agent_socket=str(agent.path), stall_s=0.25)
    assert done.marker is not None
    deadline(agent.commits)
    (told,) = agent.commits()
    assert (told.nonce, told.id, told.step, told.generation) == ("job-1", "s000007-g1", 7, 1)
    assert told.path == f"{place}/s000007-g1"
    assert (told.bytes, told.samples, told.stall_s) == (done.marker.bytes, 84, 0.25)
    assert told.write_s > 0
    assert writer.close(20.0)


def test_a_commit_is_told_also_when_the_rank_is_gone(
    start_writer: StartWriter, make_rank: MakeRank, place: Path, agent: FakeAgent
) -> None:
    start_writer("before-open:sleep=0.3")
    rank = make_rank()
    rank.order(place, 7, agent_socket=str(agent.path))
    rank.close()
    deadline(agent.commits)


def test_a_failure_is_told_for_a_rank_that_is_gone(
    start_writer: StartWriter, make_rank: MakeRank, place: Path, agent: FakeAgent
) -> None:
    start_writer("before-fsync:sleep=0.3")
    rank = make_rank()
    rank.order(place, 7, agent_socket=str(agent.path), xxh3="0" * 16)
    rank.close()
    deadline(lambda: findings(agent))
    assert set(findings(agent)) == {("snapshot.failed", False)}


def test_the_policy_is_followed_after_each_commit(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    writer = start_writer()
    rank = make_rank()
    for step in range(1, 8):
        assert rank.save(place, step, policy=Policy(keep=2, keep_every_steps=3)).why is None
    assert writer.close(20.0)
    assert names(place) == ["s000003-g1", "s000006-g1", "s000007-g1"]


def test_nothing_is_deleted_before_the_coordinator_knows(
    start_writer: StartWriter,
    make_rank: MakeRank,
    place: Path,
    agent: FakeAgent,
) -> None:
    agent.acknowledge = False
    writer = start_writer()
    rank = make_rank()
    for step in (1, 2, 3):
        done = rank.save(place, step, policy=Policy(keep=1), agent_socket=str(agent.path))
        assert done.why is None, "the wait for the word is not the rank's"
    assert names(place) == ["s000001-g1", "s000002-g1", "s000003-g1"]
    writer.close(30.0)
    assert names(place) == ["s000001-g1", "s000002-g1", "s000003-g1"]


def test_suspects_are_marked_and_are_not_the_last_good_one(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    writer = start_writer()
    rank = make_rank()
    keep = Policy(keep=1)
    assert rank.save(place, 1, policy=keep).why is None
    suspects = ["s000002-g1", "s000003-g1"]
    for step in (2, 3):
        assert rank.save(place, step, policy=keep, suspects=suspects).why is None
    assert writer.close(20.0)
    assert names(place) == ["s000001-g1", "s000003-g1"]
    assert [e.suspect for e in catalogue.entries(place)] == [False, True]


def test_unfinished_ones_go_unless_they_are_being_written(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    writer = start_writer()
    for left in ("s000001-g0", "s000004-g1", "s000009-g1"):
        (place / left).mkdir(parents=True)
    rank = make_rank()
    rank.order(place, 5, parts=2, deadline_s=20.0)
    rank.part()
    rank.order(place, 6, slot=1)
    rank.part()
    assert {rank.done().id, rank.done().id} == {"s000005-g1", "s000006-g1"}
    assert writer.close(20.0)
    assert set(names(place)) == {"s000006-g1", "s000009-g1"}


def test_what_was_put_aside_goes_when_this_job_has_enough(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    writer = start_writer()
    assert make_rank(job="before").save(place, 1).why is None
    rank = make_rank()
    for step in (1, 2):
        assert rank.save(place, step, policy=Policy(keep=2)).why is None
    assert writer.close(20.0)
    assert sorted(p.name for p in place.iterdir()) == ["latest", "s000001-g1", "s000002-g1"]


def test_that_the_next_one_will_not_fit_is_said_beforehand_and_taken_back(
    start_writer: StartWriter, make_rank: MakeRank, tiny_disk: Path, agent: FakeAgent
) -> None:
    start_writer()
    rank = make_rank()
    keep = Policy(keep=9)
    for step in (1, 2):
        rank.save(tiny_disk, step, policy=keep, agent_socket=str(agent.path))
    assert findings(agent) == []
    rank.save(tiny_disk, 3, policy=keep, agent_socket=str(agent.path))
    deadline(lambda: findings(agent) == [("snapshot.space", False)])
    shutil.rmtree(tiny_disk / "s000001-g1")
    rank.save(tiny_disk, 4, policy=Policy(keep=1), agent_socket=str(agent.path))
    deadline(lambda: findings(agent) == [("snapshot.space", False), ("snapshot.space", True)])


def test_a_budget_that_cannot_be_kept_is_said(
    start_writer: StartWriter, make_rank: MakeRank, place: Path, agent: FakeAgent
) -> None:
    start_writer()
    rank = make_rank()
    tight = Policy(keep=3, budget_bytes=200_000)
    for step in (1, 2):
        assert rank.save(place, step, policy=tight, agent_socket=str(agent.path)).why is None
    deadline(lambda: findings(agent) == [("snapshot.space", False)])
    deadline(lambda: names(place) == ["s000002-g1"])
    roomy = Policy(keep=3, budget_bytes=700_000)
    assert rank.save(place, 3, policy=roomy, agent_socket=str(agent.path)).why is None
    deadline(lambda: findings(agent) == [("snapshot.space", False), ("snapshot.space", True)])
    assert names(place) == ["s000002-g1", "s000003-g1"]
