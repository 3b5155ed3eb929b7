"""The coordinator is killed: the journal and what launchers say again are enough to go on."""

from __future__ import annotations

import pytest
from tests.coordinator.world import World

from everstep.coordinator.books import replay
from everstep.coordinator.facts import CoordinatorStarted, NodeMoved, PlanCommitted
from everstep.wire.messages import Plan

NAMES = ["a", "b", "c", "d"]


def running(names: list[str] | None = None) -> World:
    names = names or NAMES
    world = World(names)
    world.launch_all(names, nnodes=(2, 3))
    world.snapshot_every = 4
    world.until(world.training)
    world.run(4)
    return world


def plans(world: World) -> dict[int, Plan]:
    """Return all plans ever told, by generation. Fails when one generation had two."""
    told: dict[int, Plan] = {}
    for node in world.nodes.values():
        for launcher in node.launchers:
            for plan in launcher.plans:
                assert told.setdefault(plan.generation, plan) == plan
    return told


def test_a_restart_does_not_disturb_a_running_job() -> None:
    # pytorch 67742: killing the host of the store killed every other agent.
    world = running()
    for _ in range(3):
        world.restart_coordinator()
        world.run(30)
    assert world.job().generation == 1
    assert len(world.facts(PlanCommitted)) == 1
    assert not world.failures()


def test_a_stopped_coordinator_stops_nobody() -> None:
    world = running()
    steps = world.steps()
    world.kill_coordinator()
    world.run(300)
    assert world.steps() > steps + 500
    world.start_coordinator()
    world.run(30)
    assert world.job().generation == 1
    assert not world.incidents()


def test_each_start_has_a_higher_epoch() -> None:
    world = World(["a"])
    world.restart_coordinator()
    world.restart_coordinator()
    assert [s.epoch for s in world.facts(CoordinatorStarted)] == [1, 2, 3]


def test_a_rank_that_died_while_nobody_listened_is_recovered_from() -> None:
    world = running()
    world.kill_coordinator()
    world.kill_rank(1)
    world.run(5)
    world.start_coordinator()
    world.until(lambda: world.job().generation == 2, within=5)
    world.until(world.training)
    root = world.failures()[0].root
    assert root is not None
    assert (root.rank, root.category) == (1, "killed")
    assert len(world.facts(PlanCommitted)) == 2


def test_ranks_that_are_gone_although_the_plan_says_they_run_are_started_anew() -> None:
    world = running()
    world.kill_coordinator()
    (launcher,) = world.nodes["b"].launchers
    world._clear(launcher)
    world.run(2)
    world.start_coordinator()
    world.until(lambda: world.job().generation == 2, within=5)
    world.until(world.training)
    assert world.members() == ["a", "b", "c"]


def test_a_node_that_died_meanwhile_is_left_out_and_not_accused() -> None:
    world = running()
    world.kill_coordinator()
    world.kill_node("b")
    world.run(2)
    world.start_coordinator()
    world.until(lambda: world.job().generation == 2, within=20)
    assert world.members() == ["a", "d", "c"]
    assert not world.evicted(), "nobody listened when it fell silent"


@pytest.mark.parametrize("cut", range(16))
def test_killed_at_any_moment_of_a_recovery_it_goes_on_to_the_right_plan_once(cut: int) -> None:
    world = running()
    world.crash_in = cut
    world.kill_rank(1)
    world.run(1)
    if not world.up:
        world.start_coordinator()
    world.crash_in = None
    world.until(world.training)
    world.run(20)
    told = plans(world)
    assert world.members() == ["a", "b", "c"]
    assert len(told) == 2, "one recovery, whoever remembered what"
    assert len(world.facts(PlanCommitted)) == 2
    assert replay(list(world.journal)) == world.cluster.books


@pytest.mark.parametrize("cut", range(24))
def test_killed_at_any_moment_of_a_replacement_it_replaces_exactly_once(cut: int) -> None:
    # dlrover 1562, 1544: after a failover a node already replaced was replaced again.
    world = running(["a", "b", "c", "d", "e"])
    world.crash_in = cut
    world.kill_launcher(world.rank(1)[0])
    world.run(2)
    if not world.up:
        world.start_coordinator()
    world.crash_in = None
    world.until(world.training, within=30)
    world.run(20)
    assert world.members() == ["a", "d", "c"]
    assert "e" not in {m.node for plan in plans(world).values() for m in plan.members}


@pytest.mark.parametrize("cut", range(20))
def test_killed_at_any_moment_of_an_eviction_nobody_else_is_evicted(cut: int) -> None:
    world = running(["a", "b", "c", "d", "e"])
    world.freeze("c")
    world.run(1.9)
    world.crash_in = cut
    world.run(3)
    if not world.up:
        world.start_coordinator()
    world.crash_in = None
    # Who missed the moment in which c fell silent accuses nobody: it is a hang, and c is absent.
    world.until(lambda: world.members() == ["a", "b", "d"], within=120)
    assert set(world.evicted()) <= {"c"}
    world.until(world.training)


@pytest.mark.parametrize("cut", range(14))
def test_killed_at_any_moment_of_the_first_formation_the_job_starts(cut: int) -> None:
    world = World(["a", "b", "c"])
    world.crash_in = cut
    world.launch_all(["a", "b", "c"], nnodes=(3, 3))
    world.run(1)
    if not world.up:
        world.start_coordinator()
    world.crash_in = None
    world.until(world.training, within=30)
    assert sorted(world.members()) == ["a", "b", "c"]
    plans(world)


def test_a_plan_that_was_not_journaled_was_never_sent() -> None:
    for cut in range(30):
        world = running()
        world.crash_in = cut
        world.kill_rank(1)
        if not world.up:
            world.start_coordinator()
        committed = {f.plan.generation for f in world.facts(PlanCommitted)}
        assert set(plans(world)) <= committed


def test_an_eviction_is_durable_and_the_node_cannot_come_in_by_the_back_door() -> None:
    # dlrover 1736: the replacement landed on the same bad host.
    world = running(["a", "b", "c"])
    ops = world.operator()
    ops.evict("b", "ecc errors")
    world.ask(ops)
    world.until(lambda: world.members() == ["a", "c"])
    world.restart_coordinator()
    world.kill_launcher(world.nodes["b"].launchers[0])
    world.run(2)
    world.launch("b", nnodes=(2, 3))
    world.kill_agent("b")
    world.start_agent("b")
    world.run(400)
    assert world.members() == ["a", "c"]
    assert world.cluster.books.nodes["b"].state == "evicted", "an operator's word stands"


def test_an_old_eviction_is_not_carried_out_again_after_a_restart() -> None:
    # NVSentinel 1347: a restart replayed stale events and drained a healed node.
    world = running(["a", "b", "c"])
    world.kill_node("c")
    world.until(lambda: world.members() == ["a", "b"])
    world.start_agent("c")
    world.launch("c", nnodes=(2, 3))
    world.until(lambda: "c" in world.members(), within=60)
    moved = len(world.facts(NodeMoved))
    world.restart_coordinator()
    world.run(60)
    assert len(world.facts(NodeMoved)) == moved
    assert "c" in world.members()


def test_after_healing_a_second_eviction_acts_like_the_first() -> None:
    world = running(["a", "b", "c", "d", "e"])
    for _ in range(2):
        ops = world.operator()
        ops.evict("b", "again")
        world.ask(ops)
        world.until(lambda: "b" not in world.members())
        ops = world.operator()
        ops.readmit("b", "repaired")
        world.ask(ops)
        world.until(lambda: world.cluster.books.nodes["b"].state == "healthy")
        world.kill_launcher(world.nodes[world.members()[1]].launchers[0])
        world.until(world.training)
    states = [f.state for f in world.facts(NodeMoved)]
    assert states == ["evicted", "testing", "healthy"] * 2


def test_a_job_of_a_lost_journal_is_taken_in_without_disturbing_it() -> None:
    world = running(["a", "b", "c"])
    nonce = world.job().id
    world.kill_coordinator()
    world.journal.clear()
    world.start_coordinator()
    world.run(30)
    assert world.job().id == nonce
    assert world.job().plan is None
    assert all(la.refused is None for n in world.nodes.values() for la in n.launchers)
    generation = world.nodes["a"].launchers[0].running
    newest = max(s.step for s in world.job().snapshots.values())
    world.kill_rank(1)
    world.until(world.training)
    assert world.job().generation > generation
    plan = world.job().plan
    assert plan is not None
    assert plan.resume[0] == f"s{newest:06d}-g{generation}"


def test_a_parked_launcher_of_a_lost_journal_is_sent_away_with_the_reason() -> None:
    world = World(["a", "b"])
    launcher = world.launch("a", nnodes=(2, 2))
    world.kill_coordinator()
    world.journal.clear()
    world.start_coordinator()
    world.until(lambda: launcher.refused, within=10)
    assert launcher.refused is not None
    assert "start it anew" in launcher.refused.why


def test_a_journal_older_than_the_job_never_gives_a_number_twice() -> None:
    world = running(["a", "b", "c"])
    old = list(world.journal)
    world.kill_rank(0)
    world.until(world.training)
    world.kill_rank(0)
    world.until(world.training)
    world.kill_coordinator()
    world.journal[:] = old  # restored from a backup
    world.start_coordinator()
    world.until(lambda: world.job().generation > 3, within=20)
    world.until(world.training)
