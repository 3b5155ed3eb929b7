"""How a job comes about, grows and ends, told with virtual nodes."""

from __future__ import annotations

import pytest
from tests.coordinator.world import World

from everstep.coordinator.config import CoordinatorConfig
from everstep.wire.messages import GroupSucceeded, Leaving, RankEnded, StoreBound


def test_a_job_starts_at_once_when_all_that_can_train_are_there() -> None:
    world = World(["a", "b", "c"])
    world.launch_all(["a", "b", "c"], nnodes=(2, 3))
    assert world.members() == ["a", "b", "c"]
    assert world.job().generation == 1


def test_with_fewer_than_the_maximum_a_job_starts_when_nobody_new_comes() -> None:
    world = World(["a", "b", "c"])
    world.launch("a", nnodes=(2, 3))
    world.run(5)
    assert world.job().generation == 0, "one is fewer than the minimum"
    world.launch("b", nnodes=(2, 3))
    assert 1.5 <= world.until(lambda: world.job().generation) <= 2.5
    assert world.members() == ["a", "b"]


def test_fewer_than_the_minimum_end_with_69_and_the_reason() -> None:
    world = World(["a"])
    launcher = world.launch("a", nnodes=(2, 2), join_timeout_s=30)
    took_s = world.until(lambda: launcher.over, within=40)
    assert launcher.over is not None
    assert 29 <= took_s <= 31
    assert (launcher.over.outcome, launcher.over.exit_code) == ("failed", 69)
    assert "1 of at least 2 nodes" in launcher.over.why
    assert "join_timeout_s" in launcher.over.why


def test_the_surplus_is_parked_and_told_so_by_the_plan() -> None:
    world = World(["a", "b", "c", "d"])
    launchers = world.launch_all(["a", "b", "c", "d"], nnodes=(2, 3))
    plan = launchers[3].plan
    assert plan is not None
    assert plan.spares == [] or plan.spares == ["d"]
    assert launchers[3].running == 0
    assert launchers[3].over is None


def test_a_worker_killed_twenty_times_never_ends_a_job_that_gets_somewhere() -> None:
    # NVRx 348: one node more than needed, all of them alive at each re-rendezvous.
    world = World(["a", "b", "c", "d", "e"])
    launchers = world.launch_all(["a", "b", "c", "d", "e"], nnodes=(4, 4))
    world.snapshot_every = 2
    for _ in range(20):
        world.until(world.training)
        world.run(2)
        world.kill_rank(2)
    world.until(world.training)
    assert world.job().generation == 21
    assert world.members() == ["a", "b", "c", "d"], "no process changed its host"
    assert launchers[4].running == 0
    assert world.job().over is None
    assert not world.evicted()


@pytest.mark.parametrize("run", ["", "none"])
def test_a_run_without_a_name_of_its_own_is_refused(run: str) -> None:
    world = World(["a"])
    launcher = world.launch("a", run)
    assert launcher.refused is not None
    assert "--rdzv-id" in launcher.refused.why
    assert launcher.refused.exit_code == 64


def test_a_launcher_with_other_terms_is_refused_with_both_written_down() -> None:
    world = World(["a", "b"])
    world.launch("a", nnodes=(2, 3))
    other = world.launch("b", nnodes=(2, 4))
    assert other.refused is not None
    assert "--nnodes=2:3" in other.refused.why
    assert "--nnodes=2:4" in other.refused.why


def test_a_second_launcher_on_a_node_is_refused_with_the_pid_of_the_first() -> None:
    world = World(["a"])
    first = world.launch("a", nnodes=(1, 1))
    second = world.launch("a", nnodes=(1, 1))
    assert second.refused is not None
    assert f"pid {first.pid}" in second.refused.why
    assert first.refused is None
    world.run(2)
    assert world.training()


def test_two_jobs_share_a_node_without_knowing_of_each_other() -> None:
    world = World(["a", "b"])
    world.launch_all(["a", "b"], "one", nnodes=(2, 2))
    world.launch_all(["a", "b"], "two", nnodes=(2, 2))
    world.until(lambda: world.training("one") and world.training("two"))
    world.kill_rank(0, "one")
    world.until(lambda: world.job("one").generation == 2)
    world.run(10)
    assert world.job("two").generation == 1


def test_everybody_hears_that_the_job_is_done() -> None:
    world = World(["a", "b", "c"])
    launchers = world.launch_all(["a", "b", "c"], nnodes=(2, 2))
    world.steps_until = 5
    world.until(lambda: world.job().over)
    assert [(la.over.outcome, la.over.exit_code) for la in launchers if la.over] == [
        ("done", 0)
    ] * 3


def test_a_store_that_cannot_be_bound_is_bound_by_another_member_under_the_next_number() -> None:
    world = World(["a", "b"])
    first = world.launch("a", nnodes=(2, 2))
    first.refuses_to_bind = True
    world.launch("b", nnodes=(2, 2))
    plan = world.job().plan
    assert plan is not None
    assert [m.node for m in plan.members] == ["b", "a"]
    assert plan.generation == 2


def test_a_first_member_that_does_not_answer_is_passed_over_after_two_seconds() -> None:
    world = World(["a", "b"])
    first = world.launch("a", nnodes=(2, 2))
    first.binds = False
    world.launch("b", nnodes=(2, 2))
    assert world.job().generation == 0
    assert 1.5 <= world.until(lambda: world.job().generation) <= 2.5
    assert world.members() == ["b", "a"]


def test_when_nobody_can_bind_it_is_tried_again_and_again() -> None:
    world = World(["a", "b"])
    one = world.launch("a", nnodes=(2, 2), refuses_to_bind=True)
    other = world.launch("b", nnodes=(2, 2), refuses_to_bind=True)
    world.run(10)
    assert world.job().generation == 0
    assert 3 < len(one.bind_orders) < 20, "again, but not in a tight circle"
    other.refuses_to_bind = False
    world.until(lambda: world.job().generation)


def test_a_bound_store_of_a_proposal_that_was_given_up_counts_for_nothing() -> None:
    # pytorch 135712: what belongs to an older attempt must not be read by a newer one.
    world = World(["a", "b"])
    first = world.launch("a", nnodes=(2, 2))
    first.binds = False
    world.launch("b", nnodes=(2, 2))
    world.until(lambda: world.job().generation == 2)
    late = StoreBound(nonce=world.job().id, generation=1, address="10.9.9.9", port=1)
    world.post(first, late)
    plan = world.job().plan
    assert plan is not None
    assert (plan.generation, plan.store_port) == (2, 29500)


def test_what_an_older_generation_says_changes_nothing() -> None:
    world = World(["a", "b"])
    launchers = world.launch_all(["a", "b"], nnodes=(2, 2))
    world.until(world.training)
    world.kill_rank(0)
    world.until(world.training)
    before = world.job().generation
    nonce = world.job().id
    ended = RankEnded(
        nonce=nonce,
        generation=1,
        rank=1,
        local_rank=0,
        pid=1,
        exit_code=1,
        signal=None,
        at_s=world.now_s,
    )
    world.post(launchers[1], ended)
    world.run(5)
    assert world.job().generation == before
    assert not launchers[1].outbox, "acknowledged all the same, or it would come for ever"


def test_a_job_that_shrank_grows_again_at_the_next_snapshot() -> None:
    world = World(["a", "b", "c"])
    launchers = world.launch_all(["a", "b", "c"], nnodes=(2, 3))
    world.snapshot_every = 10
    world.until(world.training)
    world.run(8)
    world.kill_launcher(launchers[2])
    world.until(lambda: world.members() == ["a", "b"], within=15)
    world.until(world.training)
    world.launch("c", nnodes=(2, 3))
    world.run(3)
    assert world.members() == ["a", "b"], "not at any moment: steps would be lost"
    world.until(lambda: world.members() == ["a", "b", "c"], within=40)
    plan = world.job().plan
    assert plan is not None
    newest = max(world.job().snapshots.values(), key=lambda s: (s.step, s.generation))
    assert plan.resume[0] == newest.id
    assert world.now_s - newest.at_s < 2


def test_a_job_without_snapshots_grows_only_after_a_long_wait() -> None:
    world = World(["a", "b"])
    world.launch("a", nnodes=(1, 2))
    world.until(world.training)
    world.launch("b", nnodes=(1, 2))
    world.run(200)
    assert world.members() == ["a"]
    world.until(lambda: world.members() == ["a", "b"], within=200)


def test_a_launcher_that_dies_before_the_first_generation_leaves_nothing_behind() -> None:
    # torchft 63: a dead member kept for ever, the quorum counts ghosts.
    world = World(["a", "b"])
    ghost = world.launch("a", nnodes=(2, 2))
    world.kill_launcher(ghost)
    assert world.job().over is not None
    launchers = world.launch_all(["a", "b"], nnodes=(2, 2))
    assert launchers[0].nonce == launchers[1].nonce == world.job().id
    world.until(world.training)


def test_a_ghost_among_others_is_not_counted() -> None:
    world = World(["a", "b", "c"])
    ghost = world.launch("a", nnodes=(3, 3))
    world.launch("b", nnodes=(3, 3))
    world.kill_launcher(ghost)
    world.launch("c", nnodes=(3, 3))
    world.run(5)
    assert world.job().generation == 0, "two live ones are not three"
    world.launch("a", nnodes=(3, 3))
    world.until(world.training)
    assert sorted(world.members()) == ["a", "b", "c"]


def test_a_node_that_was_not_told_how_the_job_ended_is_told_when_it_comes_back() -> None:
    world = World(["a", "b"])
    launchers = world.launch_all(["a", "b"], nnodes=(2, 2))
    world.until(world.training)
    world.succeed(launchers[0])
    world.kill_launcher(launchers[0])
    world.run(1)
    world.succeed(launchers[1])
    assert world.job().over is not None
    again = world.launch("a", nnodes=(2, 2))
    assert again.over is not None
    assert again.over.exit_code == 0
    fresh = world.launch("a", nnodes=(1, 1))
    assert fresh.over is None
    assert fresh.nonce != launchers[0].nonce, "once told, the next one starts a new job"


def test_a_launcher_that_heard_the_end_starts_a_new_job_the_next_time() -> None:
    world = World(["a"])
    first = world.launch("a")
    world.until(world.training)
    world.succeed(first)
    assert first.over is not None
    world.leave(first, code=0)
    second = world.launch("a")
    assert second.over is None
    assert second.nonce not in (None, first.nonce)


def test_a_launcher_with_an_ended_job_in_hand_hears_its_end_again() -> None:
    world = World(["a", "b"])
    launchers = world.launch_all(["a", "b"], nnodes=(2, 2))
    world.until(world.training)
    world.nodes["b"].cut = True
    for launcher in launchers:
        world.succeed(launcher)
    world.ask_stop()
    world.nodes["b"].cut = False
    world.break_connection("b")
    world.until(lambda: launchers[1].over)


def test_a_member_that_finished_is_never_a_member_again() -> None:
    world = World(["a", "b", "c"])
    launchers = world.launch_all(["a", "b", "c"], nnodes=(3, 3))
    world.until(world.training)
    world.succeed(launchers[0])
    launcher, rank = world.rank(1)
    world._end(launcher, rank, sig=9, code=None, error=None)
    world.until(lambda: world.job().generation == 2)
    assert world.members() == ["b", "c"], "below the minimum, and that is all right now"
    world.until(world.training)
    world.succeed(launchers[1])
    world.succeed(launchers[2])
    assert world.job().over is not None
    assert world.job().over.exit_code == 0  # type: ignore[union-attr]  # asserted just above


def test_success_that_arrives_after_the_next_plan_takes_the_node_out_of_it() -> None:
    world = World(["a", "b"])
    launchers = world.launch_all(["a", "b"], nnodes=(2, 2))
    world.until(world.training)
    launchers[0].starts = False
    launcher, rank = world.rank(1)
    world._end(launcher, rank, sig=9, code=None, error=None)
    assert world.job().generation == 2
    assert world.members() == ["a", "b"]
    world.post(launchers[0], GroupSucceeded(nonce=world.job().id, generation=1))
    assert world.members() == ["b"]
    assert world.job().generation == 3


def test_the_last_member_gone_with_a_final_snapshot_is_a_job_done() -> None:
    world = World(["a", "b"])
    launchers = world.launch_all(["a", "b"], nnodes=(2, 2))
    for launcher in launchers:
        assert launcher.join.join_timeout_s == 600
    world.until(world.training)
    world.commit_snapshot(launchers[0], 20, 1, final=True)
    world.succeed(launchers[0])
    world.kill_launcher(launchers[1])
    world.until(lambda: world.job().over, within=700)
    assert launchers[0].over is not None
    assert launchers[0].over.outcome == "done"


def test_a_cordoned_node_keeps_what_it_has_and_gets_nothing_new() -> None:
    world = World(["a", "b", "c"])
    world.launch_all(["a", "b", "c"], nnodes=(2, 2))
    world.until(world.training)
    for name in ("a", "c"):
        ops = world.operator()
        ops.cordon(name, "maintenance")
        world.ask(ops)
    world.kill_rank(0)
    world.until(world.training)
    assert world.members() == ["a", "b"]
    ops = world.operator()
    ops.evict("b", "smells burnt")
    world.ask(ops)
    world.run(20)
    assert "c" not in world.members(), "cordoned: no new part"


def test_a_plan_names_the_four_newest_good_snapshots() -> None:
    world = World(["a"])
    (launcher,) = world.launch_all(["a"], nnodes=(1, 1))
    world.until(world.training)
    for step in (10, 20, 30, 40, 50):
        world.commit_snapshot(launcher, step, 1)
    world.kill_rank(0)
    plan = world.job().plan
    assert plan is not None
    assert plan.resume == ["s000050-g1", "s000040-g1", "s000030-g1", "s000020-g1"]


@pytest.mark.parametrize("config", [CoordinatorConfig(grow_settle_s=30.0)])
def test_a_job_does_not_grow_twice_in_a_row(config: CoordinatorConfig) -> None:
    world = World(["a", "b", "c"], config=config)
    world.snapshot_every = 4
    world.launch("a", nnodes=(1, 3))
    world.until(world.training)
    world.run(31)
    world.launch("b", nnodes=(1, 3))
    world.until(lambda: len(world.members()) == 2)
    grown_s = world.now_s
    world.launch("c", nnodes=(1, 3))
    world.until(lambda: len(world.members()) == 3, within=60)
    assert world.now_s - grown_s >= 30


def test_the_late_goodbye_of_a_dead_launcher_does_not_take_its_successor_along() -> None:
    world = World(["a", "b"])
    launchers = world.launch_all(["a", "b"], nnodes=(2, 2))
    world.until(world.training)
    world.kill_launcher(launchers[1])
    world.launch("b", nnodes=(2, 2))
    world.until(world.training)
    generation = world.job().generation
    late = Leaving(nonce=launchers[1].nonce, exit_code=1, why="late")
    world._say(launchers[1], late)
    world.run(3)
    assert world.job().generation == generation
    assert world.training()
