"""What a plan says on how long the job will train between two failures."""

from __future__ import annotations

import pytest
from tests.coordinator.world import World

from everstep.coordinator.config import CoordinatorConfig
from everstep.coordinator.mtbf import expected_s

HOUR_S = 3600.0


def mtbf_s(world: World) -> float:
    plan = world.job().plan
    assert plan is not None
    assert plan.mtbf_s is not None
    return plan.mtbf_s


def test_without_a_failure_it_is_the_nodes_prior_and_shorter_with_more_of_them() -> None:
    alone, many = World(["a"]), World(list("abcd"))
    alone.launch_all(["a"], nnodes=(1, 1))
    many.launch_all(list("abcd"), nnodes=(4, 4))
    for world in (alone, many):
        world.until(world.training)
    assert mtbf_s(alone) == pytest.approx(2500 * HOUR_S)
    assert mtbf_s(many) == pytest.approx(625 * HOUR_S)


def test_failures_make_it_shorter_and_quiet_hours_longer_again() -> None:
    world = World(list("ab"))
    world.launch_all(list("ab"), nnodes=(2, 2))
    world.until(world.training)
    world.kill_rank(0)
    world.until(world.training)
    after_one = mtbf_s(world)
    assert after_one < 200 * HOUR_S
    world.kill_rank(0)
    world.until(world.training)
    after_two = mtbf_s(world)
    assert after_two < 0.6 * after_one
    world.restart_coordinator()
    world.run(4)
    world.now_s += 1000 * HOUR_S
    world.run(4)
    world.kill_rank(0)
    world.until(world.training)
    assert mtbf_s(world) > after_one


def test_the_prior_is_the_operators() -> None:
    world = World(["a"], config=CoordinatorConfig(mtbf_prior_h=10.0, mtbf_prior_weight=1.0))
    world.launch_all(["a"], nnodes=(1, 1))
    world.until(world.training)
    assert mtbf_s(world) == pytest.approx(10 * HOUR_S)
    world.kill_rank(0)
    assert mtbf_s(world) == pytest.approx(5 * HOUR_S, rel=0.01)


def test_with_much_evidence_the_prior_no_longer_matters() -> None:
    day_s = 86400.0
    for prior_s in (day_s, 1000 * day_s):
        found_s = expected_s(500, 64 * 100 * day_s, nodes=64, prior_node_s=prior_s, weight=0.1)
        assert found_s == pytest.approx(0.2 * day_s, rel=0.05)
