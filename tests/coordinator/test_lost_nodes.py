"""Silence is not death: what makes a node lost, and all that does not."""

from __future__ import annotations

import signal

import msgspec
import pytest
from tests.coordinator.world import START_S, STEP_S, World

from everstep.coordinator.config import BreakerConfig, CoordinatorConfig
from everstep.coordinator.facts import NodeMoved, OperatorAsked
from everstep.wire.messages import Finding, RankFinding

NAMES = ["a", "b", "c", "d"]


def running(
    *, members: int = 3, config: CoordinatorConfig | None = None, names: list[str] | None = None
) -> World:
    """A job of `members` with the rest as spares, in the middle of its steps."""
    names = names or NAMES
    world = World(names, config=config)
    world.launch_all(names, nnodes=(2, members))
    world.snapshot_every = 4
    world.until(world.training)
    world.run(6)
    assert world.training()
    return world


def decided(world: World) -> float:
    """Return when the last plan was put in force."""
    return world.job().committed_at_s


# --------------------------------------------------------------------------------- it is lost


def test_a_node_killed_with_its_agent_is_replaced_within_three_seconds_and_a_step() -> None:
    world = running()
    killed_s = world.now_s
    world.kill_node("b")
    world.until(lambda: world.members() == ["a", "d", "c"], within=10)
    assert decided(world) - killed_s <= 3 + STEP_S
    assert world.evicted() == ["b"]
    (incident,) = world.failures()
    assert incident.root is not None
    assert (incident.root.category, incident.root.node) == ("lost", "b")
    assert incident.root.summary.count("the agent of b is silent") == 1
    assert incident.witnesses == ["a", "c"]
    assert (incident.decision.what, incident.decision.evicted) == ("evict", ["b"])
    times = [clue.at_s for clue in incident.clues]
    assert times == sorted(times)
    world.until(world.training)


def test_the_plan_tells_everybody_who_was_evicted_and_on_what_evidence() -> None:
    world = running()
    world.kill_node("b")
    world.until(lambda: "d" in world.members())
    plan = world.job().plan
    assert plan is not None
    (evicted,) = plan.evicted
    assert evicted.node == "b"
    assert len(evicted.evidence) >= 2, "silence, and a second witness"
    assert any("Connection closed by peer" in e.what for e in evicted.evidence)


def test_a_frozen_node_is_lost_when_all_its_peers_stand() -> None:
    world = running()
    frozen_s = world.now_s
    world.freeze("c")
    world.until(lambda: world.members() == ["a", "b", "d"], within=10)
    assert decided(world) - frozen_s <= 3 + STEP_S
    assert world.evicted() == ["c"]
    (incident,) = world.failures()
    assert incident.root is not None
    assert "stand" in incident.root.summary
    world.until(world.training)
    assert world.job().plan is not None


def test_a_thawed_node_can_harm_nothing_and_is_not_taken_back_by_itself() -> None:
    world = running()
    world.freeze("c")
    world.until(lambda: "d" in world.members())
    world.until(world.training)
    generation = world.job().generation
    (launcher,) = world.nodes["c"].launchers
    world.thaw("c")
    world.run(120)
    assert world.job().generation == generation
    assert launcher.running == 0, "told the newer plan it stopped its ranks and parks"
    assert launcher.over is None
    assert world.cluster.books.nodes["c"].state == "evicted"
    assert not launcher.outbox, "its old news is acknowledged and dropped"


def test_a_thawed_node_is_taken_back_when_an_operator_readmits_it() -> None:
    world = running(names=["a", "b", "c"])
    world.freeze("c")
    world.until(lambda: world.members() == ["a", "b"])
    world.thaw("c")
    world.run(5)
    ops = world.operator()
    ops.readmit("c", "was only swapping")
    world.ask(ops)
    assert world.cluster.books.nodes["c"].state == "testing"
    world.until(lambda: world.members() == ["a", "b", "c"], within=60)
    (asked,) = world.facts(OperatorAsked)
    assert asked.reason == "was only swapping"


def test_a_lost_node_that_comes_back_with_a_new_agent_is_tested_and_taken_back() -> None:
    world = running(names=["a", "b", "c"])
    world.kill_node("c")
    world.until(lambda: world.members() == ["a", "b"])
    world.run(5)
    world.start_agent("c")
    assert world.cluster.books.nodes["c"].state == "testing"
    world.launch("c", nnodes=(2, 3))
    world.until(lambda: world.members() == ["a", "b", "c"], within=60)
    moves = [(f.node, f.state) for f in world.facts(NodeMoved)]
    assert moves == [("c", "evicted"), ("c", "testing"), ("c", "healthy")]


@pytest.mark.parametrize("trouble", ["clock", "health", "silent"])
def test_a_node_that_fails_its_tests_is_broken_and_stays_out(trouble: str) -> None:
    world = running(names=["a", "b", "c"])
    world.kill_node("c")
    world.until(lambda: world.members() == ["a", "b"])
    world.nodes["c"].offset_s = 60.0 if trouble == "clock" else 0.0
    world.nodes["c"].health = "gpu lost" if trouble == "health" else "healthy"
    world.start_agent("c")
    world.nodes["c"].cut = trouble == "silent"
    world.launch("c", nnodes=(2, 3))
    world.run(90)
    assert world.cluster.books.nodes["c"].state == "broken"
    assert world.members() == ["a", "b"]


def test_a_rank_that_reports_a_broken_connection_is_a_witness_before_it_has_ended() -> None:
    world = running()
    killed_s = world.now_s
    world.kill_agent("b")
    for _, rank in world.group(world.job().id, 1):
        rank.stopped = True  # all of b is dead, and the others take their time to end
    broken = Finding(
        name="connection.broken",
        component="rank:0",
        severity="error",
        summary="connection closed by peer",
        at_s=world.now_s,
    )
    launcher, _ = world.rank(0)
    found = RankFinding(nonce=world.job().id, rank=0, step=9, finding=broken)
    world.post(launcher, found)
    world.until(lambda: "d" in world.members(), within=5)
    assert decided(world) - killed_s <= 3
    assert world.evicted() == ["b"]


# ------------------------------------------------------------------------------- it is not lost


def test_a_killed_agent_alone_changes_nothing() -> None:
    world = running()
    world.kill_agent("b")
    steps = world.steps()
    world.run(120)
    assert world.job().generation == 1
    assert world.steps() > steps + 100
    assert not world.evicted()
    assert [i.node for i in world.incidents("silence")] == ["b"], "an alarm, and no more"
    world.start_agent("b")
    world.run(5)
    assert world.incidents("silence")[0].closed_at_s is not None
    assert world.job().generation == 1


def test_a_launcher_has_time_to_find_an_agent_that_was_away_for_long() -> None:
    world = running()
    world.greet_after_s = 2.0
    world.kill_agent("b")
    world.run(60)
    world.start_agent("b")
    world.run(15)
    assert world.job().generation == 1
    assert not world.failures()


def test_a_cut_connection_changes_nothing_however_long_it_lasts() -> None:
    # skypilot 10155: 25 failed status calls, 24 recoveries of a healthy job.
    world = running()
    world.nodes["a"].cut = True
    world.run(600)
    world.nodes["a"].cut = False
    world.break_connection("a")
    world.run(10)
    assert world.job().generation == 1
    assert not world.failures()


def test_all_agents_cut_at_once_change_nothing() -> None:
    world = running()
    for name in NAMES:
        world.nodes[name].cut = True
    world.run(60)
    for name in NAMES:
        world.nodes[name].cut = False
    world.run(5)
    assert world.job().generation == 1
    assert not world.evicted()


def test_a_killed_agent_and_independently_a_killed_rank_evict_nobody() -> None:
    world = running()
    world.kill_agent("b")
    world.run(0.5)
    world.kill_rank(2)
    killed_s = world.now_s
    world.run(3)
    assert world.job().generation == 1, "the plan waits for the agent, spare or no spare"
    world.start_agent("b")
    world.until(lambda: world.job().generation == 2, within=3)
    assert world.members() == ["a", "b", "c"]
    assert world.now_s - killed_s < 10
    assert not world.evicted()


def test_an_agent_that_stays_away_is_left_out_as_absent_and_not_evicted() -> None:
    world = running()
    world.kill_agent("b")
    away_s = world.now_s
    world.run(0.5)
    world.kill_rank(2)
    world.until(lambda: world.job().generation == 2, within=20)
    assert 9.5 <= world.now_s - away_s <= 11
    assert world.members() == ["a", "d", "c"]
    assert not world.evicted()
    world.start_agent("b")
    world.run(3)
    (launcher,) = world.nodes["b"].launchers
    assert launcher.running == 0, "its ranks of the older generation were stopped"
    world.until(world.training)


def test_an_old_silence_proves_nothing_about_a_new_failure() -> None:
    world = running()
    world.kill_agent("b")
    world.run(300)
    for launcher, rank in world.group(world.job().id, 1):
        if rank.rank == 2:  # a network flap between a and c: nobody has a cause of its own
            world._break(launcher)
    world.run(1)
    world.until(lambda: world.job().generation == 2, within=20)
    assert not world.evicted()


def test_a_long_snapshot_and_a_long_first_step_alarm_nobody() -> None:
    world = running()
    world.set_phase("snapshot", ranks=[0])
    world.run(30)
    world.set_phase("step")
    world.run(5)
    world.set_phase("first_step")
    world.run(60)
    world.set_phase("step")
    world.run(5)
    assert world.job().generation == 1
    assert not world.failures()


def test_peers_that_wait_for_a_silent_node_in_its_snapshot_are_no_witnesses() -> None:
    world = running()
    world.set_phase("snapshot", ranks=[1])
    world.run(1.5)
    world.nodes["b"].cut = True
    world.run(30)
    world.nodes["b"].cut = False
    world.set_phase("step")
    world.run(3)
    assert world.job().generation == 1
    assert not world.evicted()


def test_a_rank_whose_user_is_another_says_nothing_about_the_job() -> None:
    world = running()
    job = world.cluster.jobs[world.job().id]
    page = next(iter(job.ranks(world.now_s))).progress
    assert job.owns(page)
    assert not job.owns(msgspec.structs.replace(page, uid=4711))


# ------------------------------------------------------------------- after a start, when late


def test_after_its_own_start_a_coordinator_waits_before_it_calls_anybody_silent() -> None:
    world = running()
    for name in NAMES:
        world.nodes[name].reconnect_s = world.now_s + 2.5
    world.kill_coordinator()
    world.run(60)
    for name in NAMES:
        world.nodes[name].reconnect_s = world.now_s + 2.5
    world.start_coordinator()
    world.run(30)
    assert world.job().generation == 1
    assert not world.incidents("silence")
    assert not world.failures()


def test_a_coordinator_that_stood_still_itself_starts_all_timers_anew() -> None:
    world = running()
    world.now_s += 30  # SIGSTOP of the coordinator: nothing was read, the sockets are full
    world._carry_out(world.cluster.tick(world.now_s))
    assert not world.incidents("silence")
    world.run(10)
    assert not world.incidents("silence")
    assert world.job().generation == 1


def test_a_coordinator_that_stood_still_while_a_node_froze_still_finds_it() -> None:
    world = running()
    world.freeze("c")
    world.now_s += 4
    world.until(lambda: world.members() == ["a", "b", "d"], within=10)
    assert world.evicted() == ["c"]


def test_a_node_whose_last_heartbeat_before_it_froze_was_late_is_found_all_the_same() -> None:
    world = running()
    node = world.nodes["c"]
    for late_s in (1.4, 2.4):
        node.beat_s = world.now_s + late_s - 1.0  # as a busy machine sends them
        world.run(late_s + 0.1)
    node.beat_s = world.now_s + 1e9
    world.run(2.8)
    world.freeze("c")
    world.until(lambda: world.members() == ["a", "b", "d"], within=10)
    assert world.evicted() == ["c"]


# ----------------------------------------------------------------------------------- launchers


def test_a_killed_launcher_is_replaced_by_a_spare_at_once() -> None:
    world = running()
    world.kill_launcher(world.rank(1)[0])
    assert world.members() == ["a", "d", "c"]
    assert not world.evicted()
    root = world.failures()[0].root
    assert root is not None
    assert (root.category, root.node) == ("launcher", "b")


def test_without_a_spare_a_killed_launcher_is_waited_for() -> None:
    world = running(names=["a", "b", "c"])
    world.kill_launcher(world.rank(1)[0])
    world.run(4)
    assert world.job().generation == 1
    world.launch("b", nnodes=(2, 3))
    world.until(lambda: world.job().generation == 2, within=1)
    assert world.members() == ["a", "b", "c"], "it has its place back"


def test_without_a_spare_the_job_shrinks_when_the_launcher_stays_away() -> None:
    world = running(names=["a", "b", "c"])
    killed_s = world.now_s
    world.kill_launcher(world.rank(1)[0])
    world.until(lambda: world.members() == ["a", "c"], within=15)
    assert 9.5 <= world.now_s - killed_s <= 11


def test_below_the_minimum_the_job_waits_and_then_ends_with_69() -> None:
    world = running(names=["a", "b"], members=2)
    world.kill_launcher(world.rank(1)[0])
    world.run(300)
    assert world.job().over is None
    world.until(lambda: world.job().over, within=400)
    over = world.job().over
    assert over is not None
    assert over.exit_code == 69
    assert "b" in over.why


def test_an_exception_in_one_launcher_does_not_close_the_job_for_the_others() -> None:
    # NVRx 421.
    world = running()
    world.leave(world.rank(0)[0], code=1)
    world.until(world.training)
    assert world.members() == ["d", "b", "c"]
    assert world.job().over is None


def test_a_launcher_that_does_not_come_back_with_its_agent_is_gone() -> None:
    world = running()
    world.kill_agent("b")
    (launcher,) = world.nodes["b"].launchers
    launcher.alive = False
    world.nodes["b"].launchers.clear()
    world.run(1)
    world.start_agent("b")
    world.until(lambda: world.job().generation == 2, within=15)
    assert world.members() == ["a", "d", "c"]
    assert not world.evicted()


def test_a_machine_that_was_started_anew_has_no_launcher_left() -> None:
    world = running()
    world.kill_agent("b")
    world.nodes["b"].launchers.clear()
    world.nodes["b"].boot = "boot-b-2"
    world.start_agent("b")
    assert world.members() == ["a", "d", "c"]


def test_a_node_that_dies_before_its_ranks_are_up_is_left_out() -> None:
    world = World(NAMES)
    for name in ("a", "b", "d"):
        world.launch(name, nnodes=(2, 3))
    late = world.launch("c", nnodes=(2, 3))
    world.until(world.training)
    world.kill_rank(0)
    launcher, _ = world.rank(1)
    launcher.starts = False
    world.kill_rank(0)
    world.kill_agent("b")
    world.until(lambda: late.running, within=15)
    assert world.members() == ["a", "c", "d"]
    assert not world.evicted()


def test_its_own_dead_rank_and_then_its_agent_are_no_reason_to_wait_with_a_spare() -> None:
    # A whole node was killed, its ranks first: the report of the first one still got out.
    world = running()
    killed_s = world.now_s
    world.rank(0)[0].binds = False
    launcher, rank = world.rank(1)
    world._end(launcher, rank, sig=signal.SIGKILL, code=None, error=None)
    world.kill_node("b")
    world.rank(0)[0].binds = True
    world.until(lambda: world.members() == ["a", "d", "c"], within=20)
    assert world.now_s - killed_s <= 3
    assert not world.evicted(), "its agent lived to tell: that is no silence"


def test_a_node_that_dies_while_the_others_wait_for_its_first_step_is_left_out_in_the_end() -> None:
    world = running()
    world.kill_rank(1)
    assert world.job().generation == 2
    world.run(0.25)
    world.kill_node("b")
    world.run(60)
    assert world.job().generation == 2, "a first step may take long, an agent may be away"
    world.until(lambda: world.job().generation == 3, within=100)
    assert world.members() == ["a", "d", "c"]
    assert not world.evicted()


def test_a_node_that_dies_before_a_rank_of_it_was_seen_holds_the_others_up_for_less() -> None:
    world = running()
    world.ranks_say_hello = False
    world.kill_rank(1)
    world.kill_node("b")
    took_s = world.until(lambda: world.job().generation == 3, within=20)
    assert 9.5 <= took_s <= 11
    assert world.members() == ["a", "d", "c"]


def test_a_node_left_out_of_a_start_is_a_spare_again_as_soon_as_it_is_heard() -> None:
    world = running()
    world.kill_rank(1)
    world.freeze("b")
    world.until(lambda: world.members() == ["a", "d", "c"], within=150)
    world.until(world.training)
    world.thaw("b")
    world.run(3)
    world.kill_launcher(world.rank(0)[0])
    world.until(lambda: world.members() == ["b", "d", "c"], within=5)


def test_a_launcher_that_never_starts_its_ranks_is_left_out_when_its_time_is_up() -> None:
    world = World(NAMES)
    for name in ("a", "b", "c"):
        world.launch(name, nnodes=(2, 3), join_timeout_s=60).starts = name != "b"
    world.run(1)
    assert world.job().generation == 1
    world.launch("d", nnodes=(2, 3), join_timeout_s=60)
    world.until(lambda: world.job().generation == 2, within=70)
    assert world.members() == ["a", "d", "c"]
    world.run(100)
    assert world.members() == ["a", "d", "c"], "it is not tried again before it joins anew"
    assert not world.evicted()


# ------------------------------------------------------------------- the breaker, and the modes


def test_two_nodes_of_five_may_be_evicted_and_a_third_at_once_may_not() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    config = CoordinatorConfig(breaker=BreakerConfig(share=0.35, window_s=300))
    world = running(names=names, members=4, config=config)
    world.kill_node("a")
    world.until(lambda: "a" not in world.members())
    world.until(world.training)
    world.run(3)
    world.kill_node("b")
    world.until(lambda: "b" not in world.members())
    world.until(world.training)
    world.run(3)
    world.kill_node("c")
    world.until(lambda: "c" not in world.members(), within=20)
    assert world.evicted() == ["a", "b"]
    (systemic,) = world.incidents("systemic")
    assert "breaker" in systemic.decision.why
    assert systemic.decision.what == "none"
    assert world.cluster.books.nodes["c"].state == "healthy", "absent, not evicted"


def test_observe_says_what_it_would_evict_and_restarts_all_the_same() -> None:
    world = running(config=CoordinatorConfig(mode="observe"))
    world.kill_node("b")
    world.until(lambda: "d" in world.members(), within=15)
    assert not world.evicted()
    (incident,) = world.failures()
    assert (incident.decision.what, incident.decision.status) == ("evict", "would")
    world.until(world.training)


def test_approve_waits_for_a_person_and_then_evicts() -> None:
    world = running(config=CoordinatorConfig(mode="approve"))
    world.kill_node("b")
    world.until(lambda: "d" in world.members(), within=15)
    assert not world.evicted()
    (incident,) = world.failures()
    assert incident.decision.status == "pending"
    ops = world.operator()
    ops.approve(incident.id, "yes, it smokes")
    world.ask(ops)
    assert world.evicted() == ["b"]
    assert world.failures()[0].decision.status == "done"


def test_a_mass_of_secondary_errors_evicts_nobody() -> None:
    # NVSentinel 1629: one job crash, 77 healthy nodes flagged by its echo.
    world = running()
    world.end_rank(0, code=1, error="ValueError: user's own", peers_first=True)
    world.run(30)
    assert not world.evicted()
    incident = world.failures()[0]
    assert incident.root is not None
    assert (incident.root.rank, incident.root.layer) == (0, "user")
    assert incident.witnesses == ["b", "c"]


def test_start_takes_a_while_in_this_world() -> None:
    assert START_S > 0, "or the tests of nodes that die early prove nothing"
