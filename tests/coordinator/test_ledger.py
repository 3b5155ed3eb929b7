"""The account of a job's time, kept while things happen to it."""

from __future__ import annotations

import pytest
from tests.coordinator.world import START_S, STEP_S, TICK_S, World

from everstep.coordinator import accounts, history
from everstep.coordinator.accounts import Kind, totals
from everstep.coordinator.facts import GenerationTimed

NAMES = ["a", "b", "c"]


def running(*, offset_s: float = 0.0) -> World:
    world = World(NAMES)
    for i, node in enumerate(world.nodes.values()):
        node.offset_s = offset_s * (-1) ** i
    world.run(3)  # their clocks are known
    world.snapshot_every = 10
    world.launch_all(NAMES, nnodes=(2, 2))
    world.until(world.training)
    return world


def spent(world: World) -> dict[Kind, float]:
    """Return the account of the job, after checking that it is its wall time."""
    book = world.job()
    job = world.cluster.jobs.get(book.id)
    found = totals(accounts.spans(history.of_book(book, job), world.now_s))
    end_s = world.now_s if book.over is None else book.over.at_s
    assert sum(found.values()) == pytest.approx(end_s - book.spec.at_s)
    return found


def recoveries(world: World) -> list[history.Recovery]:
    book = world.job()
    return history.recoveries(world.cluster.books, book, world.cluster.jobs.get(book.id))


@pytest.mark.parametrize("offset_s", [0.0, 3.0, -40.0])
def test_a_killed_rank_costs_its_recovery_and_the_steps_since_the_snapshot(offset_s: float) -> None:
    world = running(offset_s=offset_s)
    world.until(lambda: world.steps() >= 13)
    before = spent(world)
    world.kill_rank(1)
    world.until(lambda: world.steps() >= 20)
    after = spent(world)
    assert before["lost_work"] == 0
    assert after["lost_work"] == pytest.approx(3 * STEP_S, abs=STEP_S)
    assert after["start"] - before["start"] == pytest.approx(START_S, abs=TICK_S)
    assert after["unknown"] == before["unknown"] == 0
    steps = after["productive"] + after["data_wait"] + after["warm_up"]
    assert steps == pytest.approx(20 * STEP_S, abs=2 * STEP_S)
    assert after["data_wait"] == pytest.approx(0.2 * steps, rel=0.15)


def test_a_recovery_is_tiled_by_its_phases() -> None:
    world = running()
    world.until(lambda: world.steps() >= 13)
    killed_s = world.now_s
    world.kill_rank(0)
    world.until(lambda: not world.failures() or world.failures()[-1].closed_at_s)
    (recovery,) = recoveries(world)
    assert recovery.began_at_s == pytest.approx(killed_s, abs=0.01)
    assert recovery.took_s == pytest.approx(START_S, abs=2 * TICK_S)
    assert sum(e - b for _, b, e in recovery.phases) == pytest.approx(recovery.took_s)
    assert recovery.incident.steps_lost == 3
    assert history.mttr_s([recovery]) == recovery.took_s
    assert recovery.incident.resumed_at_s == pytest.approx(recovery.resumed_at_s)


def test_a_restart_of_the_coordinator_changes_nothing_that_was_told() -> None:
    world = running()
    world.until(lambda: world.steps() >= 13)
    before = spent(world)
    world.restart_coordinator()
    world.run(5)
    after = spent(world)
    for kind in ("waiting", "decision", "start", "rendezvous", "load", "lost_work", "unknown"):
        assert after[kind] == pytest.approx(before[kind], abs=0.01)
    world.kill_rank(1)
    world.restart_coordinator()
    world.until(lambda: world.steps() >= 30)
    final = spent(world)
    assert final["unknown"] == 0
    lost = 23 * STEP_S - 20 * STEP_S
    assert final["lost_work"] == pytest.approx(lost, abs=2 * STEP_S)


def test_what_is_journaled_is_one_line_a_generation_and_not_one_a_heartbeat() -> None:
    world = running()
    world.run(120)
    world.kill_rank(1)
    world.until(world.training)
    world.run(120)
    told = world.facts(GenerationTimed)
    assert len(told) <= 6
    assert max(len(f.times.tallies) for f in told) <= 25


def test_an_operators_evict_has_steps_lost_and_is_no_failure_to_repair() -> None:
    world = running()
    world.until(lambda: world.steps() >= 13)
    operator = world.operator()
    operator.evict("a", "smells of smoke")
    world.ask(operator)
    world.until(lambda: world.failures()[-1].closed_at_s)
    (incident,) = world.failures()
    assert incident.steps_lost in (2, 3)  # a heartbeat is up to a second old
    (recovery,) = recoveries(world)
    assert history.mttr_s([recovery]) is None
    assert spent(world)["detection"] == 0


def test_the_first_generation_of_a_job_that_goes_on_from_another_ones_folder_lost_little() -> None:
    world = World(NAMES)
    world.resumes_from_folder = 100
    world.launch_all(NAMES, nnodes=(2, 2))
    world.until(lambda: world.steps() >= 103)
    world.kill_rank(0)
    world.until(lambda: world.failures()[-1].closed_at_s)
    assert world.failures()[-1].steps_lost == 3


def test_a_job_that_waits_for_a_node_says_so() -> None:
    world = running()
    world.until(lambda: world.steps() >= 13)
    world.kill_node("c")
    world.kill_node("b")
    world.run(60)
    waited = spent(world)
    assert waited["waiting"] > 30
    world.start_agent("b")
    world.launch("b", nnodes=(2, 2))
    world.until(world.training)
    world.run(5)
    assert spent(world)["waiting"] == pytest.approx(waited["waiting"], abs=5)
    assert spent(world)["lost_work"] > 0


def test_ranks_that_tell_no_times_are_accounted_for_by_their_steps() -> None:
    world = World(NAMES)
    world.ranks_tell_times = False
    world.launch_all(NAMES, nnodes=(2, 2))
    world.until(lambda: world.steps() >= 20)
    assert spent(world)["productive"] == pytest.approx(20 * STEP_S, abs=3 * STEP_S)
    world.kill_rank(1)
    world.until(lambda: world.steps() >= 5)
    assert spent(world)["lost_work"] == pytest.approx(20 * STEP_S, abs=3 * STEP_S)


def test_a_job_that_is_done_stops_counting() -> None:
    world = running()
    world.steps_until = 15
    world.until(lambda: world.job().over)
    first = spent(world)
    world.run(50)
    assert spent(world) == first


def test_growing_at_a_snapshot_loses_next_to_nothing_and_is_no_failure() -> None:
    world = World(NAMES)
    world.snapshot_every = 10
    world.launch_all(NAMES[:2], nnodes=(2, 3))
    world.until(world.training)
    world.launch("c", nnodes=(2, 3))
    world.until(lambda: len(world.members()) == 3)
    world.until(world.training)
    world.run(5)
    found = spent(world)
    assert found["detection"] == 0
    assert found["lost_work"] <= 2 * STEP_S
    assert recoveries(world) == []


def test_a_frozen_node_is_lost_time_from_its_last_step_on() -> None:
    world = running()
    world.until(lambda: world.steps() >= 13)
    frozen_s = world.now_s
    world.freeze(world.members()[1])
    world.until(lambda: world.failures() and world.failures()[-1].closed_at_s, within=120)
    world.run(3)
    (recovery,) = recoveries(world)
    assert recovery.began_at_s == pytest.approx(frozen_s, abs=1.5)
    assert dict.fromkeys(name for name, _, _ in recovery.phases).keys() >= {"detection", "start"}
    found = spent(world)
    assert found["detection"] == pytest.approx(
        recovery.incident.detected_at_s - recovery.began_at_s, abs=0.01
    )
    assert found["lost_work"] == pytest.approx(3 * STEP_S, abs=2 * STEP_S)


def test_a_generation_that_never_stepped_is_not_productive() -> None:
    world = running()
    world.until(lambda: world.steps() >= 13)
    world.kill_rank(0)
    world.until(lambda: world.job().generation == 2)
    world.run(TICK_S)
    world.kill_rank(0)
    world.until(world.training)
    world.run(3)
    assert world.job().generation == 3
    found = spent(world)
    assert found["start"] >= START_S
    both = recoveries(world)
    assert [r.generation for r in both] == [3, 3]
    assert both[0].resumed_at_s == both[1].resumed_at_s
    assert both[0].began_at_s < both[1].began_at_s
