"""Verdicts and budgets: who is to blame, and when going on is pointless."""

from __future__ import annotations

import signal

import pytest
from tests.coordinator.world import BROKEN, World

from everstep.coordinator.config import CoordinatorConfig, SilenceConfig
from everstep.coordinator.facts import FailureCounted, SnapshotSuspected
from everstep.wire.messages import RankEnded, SnapshotCommitted, SnapshotRejected

IMPORT_ERROR = 'Traceback (most recent call last):\n  File "t.py", line 1\nImportError: no torchx'


def running(names: str = "abc", *, config: CoordinatorConfig | None = None) -> World:
    world = World(list(names), config=config)
    world.launch_all(list(names), nnodes=(2, 3))
    world.until(world.training)
    return world


# ----------------------------------------------------------------------------------- restarts


def test_a_killed_rank_means_the_same_nodes_and_a_new_generation_at_once() -> None:
    world = running("abcd")
    world.run(5)
    world.kill_rank(1)
    assert world.job().generation == 2, "no clock had to tick for that"
    assert world.members() == ["a", "b", "c"]
    world.until(world.training)
    world.run(2)
    (incident,) = world.failures()
    assert incident.root is not None
    assert (incident.root.rank, incident.root.category) == (1, "killed")
    assert incident.root.summary == "rank 1 on b was killed by SIGKILL"
    assert incident.decision.what == "restart"
    assert incident.committed_at_s is not None
    assert incident.resumed_at_s is not None
    assert incident.closed_at_s is not None
    assert incident.steps_lost is not None
    assert incident.steps_lost > 5, "nothing was saved: all of them"


def test_witnesses_that_speak_first_are_not_taken_for_the_cause() -> None:
    world = running()
    world.end_rank(2, sig=signal.SIGSEGV, peers_first=True)
    world.until(lambda: world.job().generation == 2)
    root = world.failures()[0].root
    assert root is not None
    assert (root.rank, root.category, root.layer) == (2, "crash", "software")
    assert world.failures()[0].witnesses == ["a", "b"]


def test_three_ranks_that_blame_a_node_do_not_make_it_the_culprit() -> None:
    # marin 7869: peers counted 15 errors against a node whose only fault was to fail second.
    world = running("abc")
    launcher, _ = world.rank(2)
    world.end_rank(0, code=1, error="ValueError: bad batch", peers_first=True)
    world.until(lambda: world.job().generation == 2)
    root = world.failures()[0].root
    assert root is not None
    assert (root.node, root.rank, root.layer) == ("a", 0, "user")
    assert launcher.node.name in world.members()


def test_without_any_cause_of_its_own_the_verdict_is_unknown_after_half_a_second() -> None:
    world = running()
    for launcher, _ in world.group(world.job().id, 1):
        world._break(launcher)
    took_s = world.until(lambda: world.job().generation == 2)
    assert 0.25 <= took_s <= 1.0
    root = world.failures()[0].root
    assert root is not None
    assert root.layer == "unknown"


def test_the_cause_is_taken_in_even_when_it_comes_late() -> None:
    world = running()
    launcher, _ = world.rank(2)
    world.nodes["c"].cut = True  # of the node whose rank dies: its launcher cannot tell
    world.run(30)
    world.end_rank(2, sig=signal.SIGKILL, peers_first=True)
    world.until(lambda: world.job().generation == 2, within=15)
    assert world.facts(FailureCounted)[-1].failure == "unknown"
    world.nodes["c"].cut = False
    world.break_connection("c")
    world.run(1)
    root = world.failures()[0].root
    assert root is not None
    assert (root.rank, root.category) == (2, "killed")
    assert world.job().failures[-1].failure == "killed"
    assert launcher.over is None


def test_ranks_that_a_launcher_stopped_for_a_newer_plan_are_no_failure() -> None:
    world = running()
    launcher, rank = world.rank(0)
    ended = RankEnded(
        nonce=world.job().id,
        generation=1,
        rank=0,
        local_rank=0,
        pid=rank.pid,
        exit_code=None,
        signal=9,
        at_s=world.now_s,
        expected=True,
    )
    world.post(launcher, ended)
    world.run(2)
    assert world.job().generation == 1
    assert not world.failures()


def test_siblings_that_torchrun_stops_are_not_the_cause() -> None:
    world = World(["a", "b"])
    world.launch_all(["a", "b"], nnodes=(2, 2), nproc=2)
    world.until(world.training)
    launcher, rank = world.rank(1)
    sibling = world.rank(0)[1]
    world.rank(0)[0].binds = False
    world._end(launcher, rank, sig=None, code=3, error="ValueError: of rank 1")
    world.now_s += 0.2
    world._end(launcher, sibling, sig=signal.SIGTERM, code=None, error=None)
    incident = world.failures()[0]
    assert incident.root is not None
    assert (incident.root.rank, incident.root.exit_code) == (1, 3)
    kinds = {c.rank: c.kind for c in incident.clues}
    assert kinds == {1: "error", 0: "stopped"}


# ------------------------------------------------------------------------------------ budgets


def test_a_script_that_raises_at_once_is_stopped_after_two_cycles_with_its_own_code() -> None:
    world = World(["a", "b"])
    launchers = world.launch_all(["a", "b"], nnodes=(2, 2))
    for _ in range(2):
        world.run(0.5)
        if world.job().over is None:
            world.end_rank(0, code=3, error=IMPORT_ERROR)
    over = world.job().over
    assert over is not None
    assert world.job().generation == 2
    assert (over.outcome, over.exit_code) == ("failed", 3)
    assert over.error == IMPORT_ERROR
    assert "ImportError" in over.why
    assert all(la.over and la.over.error == IMPORT_ERROR for la in launchers)


def test_the_same_error_on_another_rank_is_the_same_cause() -> None:
    world = running()
    world.end_rank(0, code=1, error=IMPORT_ERROR)
    world.run(0.5)
    world.end_rank(2, code=1, error=IMPORT_ERROR)
    assert world.job().over is not None


def test_an_error_that_comes_back_after_progress_is_met_with_another_restart() -> None:
    world = running()
    for _ in range(6):
        world.until(world.training)
        world.run(5 + 3 * world.job().generation)
        world.end_rank(0, code=1, error="RuntimeError: a flaky one")
    assert world.job().over is None


def test_a_new_snapshot_is_progress_too() -> None:
    world = running()
    for i in range(6):
        world.until(world.training)
        launcher, _ = world.rank(0)
        world.commit_snapshot(launcher, 2 + i, world.job().generation)
        world.end_rank(0, code=1, error="RuntimeError: a flaky one")
    assert world.job().over is None


def test_three_different_errors_without_progress_end_with_93() -> None:
    world = running()
    for error in ("ValueError: 1", "KeyError: 2", "TypeError: 3"):
        world.end_rank(0, code=1, error=error)
        world.run(0.25)
    over = world.job().over
    assert over is not None
    assert over.exit_code == 93
    assert over.error == "TypeError: 3"


def test_ten_preemptions_cost_nothing_and_one_import_error_stops_the_job_in_two_cycles() -> None:
    # ray 41285: preemptions must not eat the failure budget; a bug must fail fast.
    world = running("abc")
    for i in range(10):
        world.run(0.5)
        launcher, _ = world.rank(i % 3)
        name = launcher.node.name
        world.leave(launcher)
        world.run(1)
        world.launch(name, nnodes=(2, 3))
        world.until(lambda: world.job().replan is None)
    assert world.job().over is None
    for _ in range(2):
        assert world.job().over is None
        world.run(0.25)
        world.end_rank(0, code=1, error=IMPORT_ERROR)
    assert world.job().over is not None


def test_a_rank_killed_again_and_again_at_the_same_place_is_a_bug_in_the_end() -> None:
    world = running()
    for _ in range(6):
        assert world.job().over is None
        world.run(0.25)
        world.kill_rank(1)
    over = world.job().over
    assert over is not None
    assert over.exit_code == 128 + signal.SIGKILL
    assert "memory" in over.why


def test_random_kills_during_every_start_end_only_at_the_larger_ledger() -> None:
    world = running()
    kills = 0
    while world.job().over is None:
        world.run(0.25)
        world.kill_rank(kills % 3)
        kills += 1
        assert kills < 100
    over = world.job().over
    assert over is not None
    assert kills == 20
    assert over.exit_code == 93


def test_budgets_are_not_reset_by_a_restart_of_the_coordinator() -> None:
    # kubeflow 3779.
    world = World(["a", "b"])
    world.launch_all(["a", "b"], nnodes=(2, 2))
    world.end_rank(0, code=3, error=IMPORT_ERROR)
    world.restart_coordinator()
    world.run(0.5)
    world.end_rank(0, code=3, error=IMPORT_ERROR)
    assert world.job().over is not None


def test_a_failed_job_stays_failed_whatever_is_restarted() -> None:
    world = World(["a", "b"])
    launchers = world.launch_all(["a", "b"], nnodes=(2, 2))
    world.end_rank(0, code=3, error=IMPORT_ERROR)
    world.end_rank(0, code=3, error=IMPORT_ERROR)
    nonce = world.job().id
    world.restart_coordinator()
    world.run(10)
    assert list(world.cluster.books.jobs) == [nonce]
    assert world.job().over is not None
    assert not world.cluster.jobs
    assert all(la.over for la in launchers)


def test_a_flapping_launcher_spends_a_budget_that_is_durable() -> None:
    # pytorch 147064: quick exit and rejoin reset the count, so it restarted for ever.
    world = World(["a", "b"])
    world.launch_all(["a", "b"], nnodes=(2, 2))
    world.run(0.5)
    for i in range(40):
        if world.job().over is not None:
            break
        world.kill_launcher(world.nodes["b"].launchers[0])
        if i % 5 == 4:
            world.restart_coordinator()
        world.run(0.5)
        world.launch("b", nnodes=(2, 2))
        world.run(1.5)
        if world.training():
            for _, rank in world.group(world.job().id, world.job().generation):
                rank.step = 0
    over = world.job().over
    assert over is not None
    assert over.exit_code == 93
    assert 19 <= len(world.job().failures) <= 21


def test_observe_goes_on_and_says_that_it_would_have_stopped() -> None:
    world = World(["a", "b"], config=CoordinatorConfig(mode="observe"))
    world.launch_all(["a", "b"], nnodes=(2, 2))
    for _ in range(3):
        world.until(lambda: world.job().replan is None, within=70)
        world.end_rank(0, code=3, error=IMPORT_ERROR)
    assert world.job().over is None
    decisions = [(i.decision.what, i.decision.status) for i in world.failures()]
    assert decisions[1:] == [("stop", "would")] * 2


def test_approve_stops_when_a_person_says_so() -> None:
    world = World(["a", "b"], config=CoordinatorConfig(mode="approve"))
    world.launch_all(["a", "b"], nnodes=(2, 2))
    for _ in range(2):
        world.end_rank(0, code=3, error=IMPORT_ERROR)
    incident = world.failures()[-1]
    assert incident.decision.status == "pending"
    ops = world.operator()
    ops.approve(incident.id, "a bug, really")
    world.ask(ops)
    over = world.job().over
    assert over is not None
    assert (over.exit_code, over.error) == (3, IMPORT_ERROR)


# ---------------------------------------------------------------------------------- snapshots


def test_a_snapshot_after_which_the_run_fails_at_once_twice_is_suspect() -> None:
    # scr 174: the same bad checkpoint, retried for ever.
    world = running()
    launcher, _ = world.rank(0)
    world.commit_snapshot(launcher, 10, 1)
    world.commit_snapshot(launcher, 20, 1)
    world.kill_rank(1)
    for _ in range(2):
        world.run(1)
        world.end_rank(0, code=1, error="RuntimeError: NaN in the first step")
    assert [s.id for s in world.facts(SnapshotSuspected)] == ["s000020-g1"]
    plan = world.job().plan
    assert plan is not None
    assert plan.resume == ["s000010-g1"]
    assert world.job().over is None
    world.until(world.training)


def test_an_error_that_has_nothing_to_do_with_the_snapshot_still_stops_the_job() -> None:
    world = running()
    launcher, _ = world.rank(0)
    world.commit_snapshot(launcher, 10, 1)
    world.commit_snapshot(launcher, 20, 1)
    world.kill_rank(1)
    for _ in range(3):
        assert world.job().over is None
        world.run(1)
        world.end_rank(0, code=1, error="RuntimeError: whatever is loaded")
    assert world.job().over is not None
    assert len(world.facts(SnapshotSuspected)) == 1


def test_a_rejected_snapshot_is_never_named_again() -> None:
    world = running()
    launcher, _ = world.rank(0)
    world.commit_snapshot(launcher, 10, 1)
    world.commit_snapshot(launcher, 20, 1)
    rejected = SnapshotRejected(nonce=world.job().id, id="s000020-g1", why="checksum")
    world.post(launcher, rejected)
    world.kill_rank(1)
    world.restart_coordinator()
    world.run(4)
    world.kill_rank(1)
    plan = world.job().plan
    assert plan is not None
    assert plan.resume == ["s000010-g1"]


@pytest.mark.parametrize(
    ("name", "step", "generation"),
    [("s000010-g9", 10, 9), ("rubbish", 10, 1), ("s000010-g1", 11, 1)],
)
def test_a_snapshot_that_cannot_be_is_acknowledged_and_not_believed(
    name: str, step: int, generation: int
) -> None:
    world = running()
    launcher, _ = world.rank(0)
    bad = SnapshotCommitted(
        nonce=world.job().id,
        id=name,
        step=step,
        generation=generation,
        path="/p",
        world_size=3,
        bytes=1,
        write_s=0.1,
    )
    world.post(launcher, bad)
    assert not world.job().snapshots
    assert world.cluster.refused
    assert bad not in launcher.outbox.values()


# -------------------------------------------------------------------------------------- hangs


def test_one_stopped_rank_is_restarted_in_place_and_nobody_is_evicted() -> None:
    world = running("abcd")
    world.run(5)
    stopped_s = world.now_s
    world.stop_rank(1)
    world.until(lambda: world.job().generation == 2, within=10)
    assert 4 <= world.now_s - stopped_s <= 6.5
    assert world.members() == ["a", "b", "c"]
    (incident,) = world.failures()
    assert incident.kind == "hang"
    assert not world.evicted()
    world.until(world.training)


def test_the_rank_that_is_behind_is_named() -> None:
    world = running()
    world.run(5)
    _, rank = world.rank(2)
    rank.stopped = True
    for _, other in world.group(world.job().id, 1):
        if other is not rank:
            other.step += 1
    world.until(lambda: world.job().generation == 2, within=10)
    root = world.failures()[0].root
    assert root is not None
    assert (root.node, root.rank) == ("c", 2)


def test_the_same_node_behind_twice_without_progress_is_evicted() -> None:
    world = running("abcd")
    for _ in range(2):
        world.until(world.training)
        world.run(3)
        launcher, rank = world.rank(2)
        rank.stopped = True
        for _, other in world.group(world.job().id, world.job().generation):
            other.step = 9 if other is not rank else 8
        generation = world.job().generation
        world.until(lambda g=generation: world.job().generation > g, within=10)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        assert launcher.node.name == "c"
    assert world.evicted() == ["c"]
    assert world.members() == ["a", "b", "d"]


def test_a_stall_after_a_recovery_is_a_second_incident() -> None:
    # FlagScale 1243: the second stall of the same process was silent.
    world = running()
    for generation in (2, 3):
        world.until(world.training)
        world.run(4 * generation)
        world.stop_rank(1)
        world.until(lambda g=generation: world.job().generation == g, within=12)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
    assert len(world.incidents("hang")) == 2


def test_all_that_is_known_of_standing_ends_with_the_generation() -> None:
    # dlrover 1749: a worker restarted in the middle of a save left an alarm behind for ever.
    world = running()
    world.set_phase("snapshot", ranks=[0])
    world.run(3)
    world.kill_rank(0)
    world.until(world.training)
    generation = world.job().generation
    world.run(1000)
    assert world.job().generation == generation


def test_a_stall_in_another_phase_is_caught_in_the_end() -> None:
    config = CoordinatorConfig(silence=SilenceConfig(stall_s=300))
    world = running(config=config)
    world.set_phase("eval")
    world.run(290)
    assert world.job().generation == 1
    world.until(lambda: world.job().generation == 2, within=20)


def test_with_an_agent_away_a_hang_is_called_one_only_after_a_minute() -> None:
    world = running()
    world.run(5)
    world.kill_agent("a")
    world.run(10)
    world.set_phase("snapshot", ranks=[0])  # nobody can see that, and the others wait for it
    world.run(30)
    assert world.job().generation == 1
    world.set_phase("step")
    world.run(3)
    world.stop_rank(1)
    world.until(lambda: world.job().generation == 2, within=90)


def test_broken_is_what_gloo_says_in_this_world() -> None:
    assert "gloo/transport" in BROKEN
