"""Who is ordered, who is replaced and when, with a clock made by hand and no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from everstep.launch.control import Heard, Line, Ready, Reform, Released, ToRank
from everstep.launch.inplace import ENDED_S, HEARD_S, RELEASED_S, InPlace

NOBODY = 2**22 + 1  # above every pid: nothing real is ever killed here


class FakeLine(Line):
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.orders: list[ToRank] = []
        self.open = True

    def send(self, order: ToRank) -> bool:
        self.orders.append(order)
        return self.open


class World:
    """Everything around `InPlace`."""

    pool = True

    def able(self, local_rank: int) -> bool:
        return self.pool and local_rank < 2

    def __init__(self) -> None:
        self.now_s = 0.0
        self.forked: list[tuple[int, Mapping[str, str]]] = []
        self.changes: list[tuple[int, Sequence[int]]] = []
        self.gave_up: list[str] = []
        self.said: list[str] = []
        self.broken = False
        self.lines: dict[int, FakeLine] = {}
        self.it = InPlace(
            self,
            changed=lambda g, pids: self.changes.append((g, pids)),
            gave_up=lambda _, why: self.gave_up.append(why),
            say=self.said.append,
            clock=lambda: self.now_s,
        )

    def replace(self, local_rank: int, environment: Mapping[str, str]) -> int:
        if self.broken:
            raise OSError("the nursery is gone")
        self.forked.append((local_rank, environment))
        return NOBODY + 100 + len(self.forked)

    def ready(self, pid: int, generation: int, local_rank: int) -> FakeLine:
        line = self.lines.setdefault(pid, FakeLine(pid))
        self.it.heard(line, Ready(generation=generation, local_rank=local_rank, pid=pid))
        return line


@pytest.fixture
def world() -> World:
    world = World()
    world.it.started(1, [NOBODY, NOBODY + 1])
    for local_rank in (0, 1):
        world.ready(NOBODY + local_rank, 1, local_rank)
    return world


PLACES: list[dict[str, str]] = [{"RANK": "0"}, {"RANK": "1"}]


def test_ranks_that_live_are_ordered_and_one_that_ended_is_forked_anew(world: World) -> None:
    assert world.it.why_not(1) is None
    world.it.ended(NOBODY + 1)
    world.it.order(2, PLACES)
    assert world.lines[NOBODY].orders == [Reform(generation=2, environment=PLACES[0])]
    assert world.forked == [(1, PLACES[1])]
    assert world.changes == [(2, [NOBODY, NOBODY + 101])]
    assert world.gave_up == []


def test_a_rank_that_does_not_answer_is_replaced(world: World) -> None:
    world.it.order(2, PLACES)
    world.it.heard(world.lines[NOBODY], Heard(generation=2))
    assert world.it.tick() is not None
    world.now_s = HEARD_S
    world.it.tick()
    assert world.forked == [], "its end is awaited"
    world.it.ended(NOBODY + 1)
    assert world.forked == [(1, PLACES[1])]
    assert world.it.absorbs(NOBODY + 1), "nobody may take its end for a failure"
    assert "local rank 1 did not answer" in world.said[0]
    assert world.changes[-1] == (2, [NOBODY, NOBODY + 101])


def test_a_rank_that_answers_but_stays_where_it_is_is_replaced_later(world: World) -> None:
    world.it.order(2, PLACES)
    for line in world.lines.values():
        world.it.heard(line, Heard(generation=2))
    world.it.heard(world.lines[NOBODY], Released(generation=2))
    world.now_s = RELEASED_S - 0.01
    world.it.tick()
    assert world.forked == []
    world.now_s = RELEASED_S
    world.it.tick()
    world.it.ended(NOBODY + 1)
    assert world.forked == [(1, PLACES[1])]
    assert world.it.tick() is None, "nobody is waited for any more"


def test_a_rank_that_dies_on_its_way_is_replaced_and_one_that_had_joined_is_not(
    world: World,
) -> None:
    world.it.order(2, PLACES)
    world.it.heard(world.lines[NOBODY], Heard(generation=2))
    world.it.ended(NOBODY)
    assert world.forked == [(0, PLACES[0])]
    world.it.heard(world.lines[NOBODY + 1], Heard(generation=2))
    world.it.heard(world.lines[NOBODY + 1], Released(generation=2))
    world.it.ended(NOBODY + 1)
    assert len(world.forked) == 1, "its peers have met it: that is the next generation's business"


def test_a_rank_that_had_finished_when_the_order_came_is_forked_anew(world: World) -> None:
    world.it.order(2, PLACES)
    world.it.heard(world.lines[NOBODY], Heard(generation=2))
    assert not world.it.finished(NOBODY), "its shim waits for the fresh one"
    assert world.forked == [(0, PLACES[0])]
    assert world.changes[-1] == (2, [NOBODY + 101, NOBODY + 1])
    world.now_s = RELEASED_S + ENDED_S
    world.it.heard(world.lines[NOBODY + 1], Released(generation=2))
    assert world.it.tick() is None
    assert world.gave_up == []


def test_a_rank_that_finishes_between_the_plan_and_the_order_is_forked_anew(world: World) -> None:
    assert world.it.reserve(1)
    assert not world.it.finished(NOBODY)
    assert world.forked == []
    world.it.order(2, PLACES)
    assert world.forked == [(0, PLACES[0])]
    assert world.lines[NOBODY].orders == []


def test_what_has_finished_before_any_plan_came_is_not_formed_anew(world: World) -> None:
    assert world.it.finished(NOBODY)
    assert not world.it.reserve(1)
    assert world.it.finished(NOBODY + 7), "not known here"


def test_answers_to_an_older_order_count_for_nothing(world: World) -> None:
    world.it.order(2, PLACES)
    world.it.order(3, PLACES)
    for line in world.lines.values():
        world.it.heard(line, Released(generation=2))
    world.now_s = HEARD_S
    world.it.tick()
    assert len(world.said) == 2


def why_not(**changes: Any) -> str | None:
    world = World()
    world.it.started(1, [NOBODY])
    if changes.get("ready_in"):
        world.ready(NOBODY, changes["ready_in"], 0)
    if changes.get("hung_up"):
        world.it.heard(world.lines[NOBODY], None)
    return world.it.why_not(changes.get("generation", 1))


def test_what_cannot_be_done_in_place_is_said_beforehand() -> None:
    assert why_not(ready_in=1) is None
    assert why_not() == "local rank 0 cannot be formed anew"
    assert why_not(ready_in=1, hung_up=True) == "local rank 0 cannot be formed anew"
    assert why_not(ready_in=1, generation=2) == "its ranks are not known yet"


def test_a_rank_that_was_ready_before_its_start_was_known_counts(world: World) -> None:
    world.ready(NOBODY + 7, 4, 0)
    world.it.started(4, [NOBODY + 7])
    assert world.it.why_not(4) is None


def test_without_fresh_processes_it_gives_up_and_says_so(world: World) -> None:
    world.broken = True
    world.it.ended(NOBODY + 1)
    world.it.order(2, PLACES)
    assert world.gave_up == ["local rank 1: no fresh process: the nursery is gone"]
    assert world.changes == []


def test_a_killed_rank_that_does_not_go_away_makes_it_give_up(world: World) -> None:
    world.it.order(2, PLACES)
    world.now_s = HEARD_S
    world.it.tick()
    world.now_s += ENDED_S
    world.it.tick()
    assert "was killed 5 s ago and is still there" in world.gave_up[0]


def test_without_a_pool_nobody_is_killed_who_cannot_be_replaced(world: World) -> None:
    world.pool = False
    world.it.order(2, PLACES)
    world.now_s = HEARD_S
    world.it.tick()
    assert world.gave_up[0] == (
        "local rank 0 did not answer within 0.7 s, and no shim stands before it"
    )
    assert not world.it.absorbs(NOBODY + 9)
