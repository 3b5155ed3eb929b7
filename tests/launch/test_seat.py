from __future__ import annotations

from everstep.launch.seat import Leave, Parked, Seat, Train, order_for
from everstep.wire.messages import Evicted, JobOver, Member, Plan


def plan(generation: int, *members: str, evicted: tuple[str, ...] = ()) -> Plan:
    return Plan(
        job="n",
        run_id="run",
        generation=generation,
        epoch=1,
        members=[Member(node=m, address="", local_world_size=1) for m in members],
        evicted=[Evicted(node=e, why="silent") for e in evicted],
    )


def test_a_member_trains_at_its_place_in_the_plan() -> None:
    order = order_for(plan(3, "a", "b"), "b", after=2, on_evict="park")
    assert order == Train(plan(3, "a", "b"), 1)


def test_nobody_takes_the_same_generation_twice() -> None:
    assert isinstance(order_for(plan(3, "a"), "a", after=3, on_evict="park"), Parked)


def test_a_surplus_node_and_an_evicted_one_are_parked() -> None:
    the_plan = plan(1, "a", evicted=("c",))
    spare = order_for(the_plan, "b", after=0, on_evict="park")
    evicted = order_for(the_plan, "c", after=0, on_evict="park")
    assert isinstance(spare, Parked)
    assert "spare" in spare.why
    assert isinstance(evicted, Parked)
    assert "silent" in evicted.why


def test_an_evicted_node_leaves_with_75_when_it_was_asked_to() -> None:
    order = order_for(plan(1, "a", evicted=("c",)), "c", after=0, on_evict="exit")
    assert isinstance(order, Leave)
    assert order.exit_code == 75


def test_an_older_plan_is_no_news() -> None:
    seat = Seat("park")
    assert seat.is_news(plan(5, "a"))
    seat.committed(plan(5, "a"))
    assert not seat.is_news(plan(4, "b"))
    assert not seat.is_news(plan(5, "b"))
    assert seat.is_news(plan(6, "b"))


def test_ranks_are_outdated_by_a_newer_plan_or_the_jobs_end_only() -> None:
    seat = Seat("park")
    seat.joined("n", "a", "")
    seat.committed(plan(1, "a"))
    seat.take(1)
    assert not seat.outdated
    seat.committed(plan(2, "a"))
    assert seat.outdated


def test_a_stopped_job_stops_ranks_of_the_newest_plan_too() -> None:
    seat = Seat("park")
    seat.joined("n", "a", "")
    seat.committed(plan(2, "a"))
    seat.take(2)
    seat.job_over(JobOver(nonce="n", outcome="stopped", exit_code=76, why="stop"))
    assert seat.outdated
    assert seat.order() == Leave(76, "stop")
