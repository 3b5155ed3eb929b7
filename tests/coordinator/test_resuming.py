"""What a plan resumes from: what is on disk, and what its nodes hold in memory."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.coordinator.world import UID, World

from everstep.coordinator import views
from everstep.coordinator.facts import SnapshotSuspected
from everstep.coordinator.resuming import Held, Piece, choose
from everstep.wire.ids import SnapshotId
from everstep.wire.messages import FromClient, Peer, SnapshotHeld, SnapshotRejected

NAN = "RuntimeError: NaN in the first step"


def running(names: str = "abc", *, nnodes: tuple[int, int] = (2, 3)) -> World:
    world = World(list(names))
    world.launch_all(list(names), nnodes=nnodes)
    world.until(world.training)
    return world


def resume(world: World) -> list[str]:
    plan = world.job().plan
    assert plan is not None
    return plan.resume


def commit(world: World, *steps: int, generation: int = 1) -> None:
    launcher, _ = world.rank(0)
    for step in steps:
        world.commit_snapshot(launcher, step, generation)


def reject(world: World, id_: str, *, memory: bool) -> None:
    launcher, _ = world.rank(0)
    rejected = SnapshotRejected(nonce=world.job().id, id=id_, why="checksum", memory=memory)
    world.post(launcher, rejected)


# -------------------------------------------------------------------------- which ids are named


def test_what_all_members_hold_in_memory_comes_before_what_is_on_disk() -> None:
    world = running()
    commit(world, 10, 20, 30, 40)
    world.hold_snapshot(42, 1, ranks=[0, 1, 2])
    world.hold_snapshot(43, 1, ranks=[0, 1, 2])
    world.kill_rank(1)
    assert resume(world) == ["s000043-g1", "s000042-g1", "s000040-g1", "s000030-g1"]
    assert world.resumed_at[-1] == (2, "s000043-g1")


def test_a_sharded_snapshot_of_which_a_piece_is_missing_is_of_no_use() -> None:
    world = running()
    commit(world, 10)
    world.hold_snapshot(42, 1, ranks=[0, 1, 2])
    world.hold_snapshot(43, 1, ranks=[0, 2])  # rank 1 died in the middle of it
    world.kill_rank(1)
    assert resume(world) == ["s000042-g1", "s000010-g1"]


def test_each_rank_has_two_slots_and_what_was_in_them_before_is_gone() -> None:
    world = running()
    for step in (41, 42):
        world.hold_snapshot(step, 1, ranks=[0, 1, 2])
    world.hold_snapshot(43, 1, ranks=[0])
    world.hold_snapshot(44, 1, ranks=[0])
    world.kill_rank(1)
    assert resume(world) == []


def test_a_sharded_snapshot_is_of_no_use_to_a_plan_without_one_of_its_nodes() -> None:
    world = running("abcd")
    commit(world, 10)
    world.hold_snapshot(42, 1, ranks=[0, 1, 2])
    world.kill_node("b")
    world.until(lambda: world.job().generation > 1 and world.training())
    assert world.members() == ["a", "d", "c"]
    assert resume(world) == ["s000010-g1"]


def test_of_a_replicated_snapshot_one_holder_that_stays_is_enough() -> None:
    world = running("abcd")
    commit(world, 10)
    world.hold_snapshot(42, 1, ranks=[0, 1, 2], replicated=True)
    world.hold_snapshot(43, 1, ranks=[1], replicated=True)  # which is not to stay
    world.kill_node("b")
    world.until(lambda: world.job().generation > 1 and world.training())
    assert resume(world) == ["s000042-g1", "s000010-g1"]


def test_a_sharded_snapshot_is_not_resumed_from_with_another_number_of_ranks() -> None:
    world = running("abc", nnodes=(2, 2))
    commit(world, 10)
    world.hold_snapshot(42, 1, ranks=[0, 1])
    world.kill_rank(0)
    world.until(world.training)
    assert resume(world)[0] == "s000042-g1"

    held = Held()
    for rank in range(2):
        held.take("a", rank, Piece(SnapshotId(42, 1), replicated=False))
    assert held.usable({"a"}, ranks=2, were={1: 2}) == [SnapshotId(42, 1)]
    assert held.usable({"a"}, ranks=3, were={1: 2}) == []
    assert held.usable({"a"}, ranks=1, were={1: 2}) == []
    assert held.usable({"a"}, ranks=2, were={}) == []


@given(
    disk=st.sets(st.builds(SnapshotId, st.integers(0, 9), st.integers(1, 3)), max_size=8),
    memory=st.sets(st.builds(SnapshotId, st.integers(0, 9), st.integers(1, 3)), max_size=8),
)
def test_at_most_four_are_named_newest_first_and_two_of_them_are_on_disk(
    disk: set[SnapshotId], memory: set[SnapshotId]
) -> None:
    chosen = [SnapshotId.parse(s) for s in choose(disk, memory)]
    assert len(chosen) == min(4, len(disk | memory)) or len(chosen) == 2 + len(disk)
    assert chosen == sorted(chosen, key=SnapshotId.place, reverse=True)
    assert len(set(chosen) & disk) >= min(2, len(disk))
    if disk | memory:
        assert chosen[0] == max(disk | memory, key=SnapshotId.place)


def test_a_later_generations_snapshot_is_newer_whatever_its_step() -> None:
    world = running()
    commit(world, 40)
    world.kill_rank(0)
    world.until(world.training)
    commit(world, 30, generation=2)
    world.kill_rank(0)
    assert resume(world) == ["s000030-g2", "s000040-g1"]


# -------------------------------------------------------------------------------- for how long


def test_a_node_whose_agent_was_started_anew_holds_nothing_until_its_ranks_say_so_again() -> None:
    world = running()
    commit(world, 10)
    world.hold_snapshot(42, 1, ranks=[0, 1, 2])
    world.kill_agent("b")
    world.start_agent("b")
    world.run(1)
    world.kill_rank(0)
    assert resume(world) == ["s000010-g1"]

    world.until(world.training)
    world.hold_snapshot(50, 2, ranks=[0, 1, 2])
    world.kill_agent("b")
    world.start_agent("b")
    world.run(1)
    world.hold_snapshot(50, 2, ranks=[1])
    world.kill_rank(0)
    assert resume(world)[0] == "s000050-g2"


def test_a_connection_that_broke_takes_nobodys_memory_away() -> None:
    world = running()
    world.hold_snapshot(42, 1, ranks=[0, 1, 2])
    world.break_connection("b")
    world.run(2)
    world.kill_rank(0)
    assert resume(world) == ["s000042-g1"]


def test_a_coordinator_started_anew_knows_of_what_is_said_again_and_of_nothing_else() -> None:
    world = running()
    commit(world, 10)
    world.hold_snapshot(42, 1, ranks=[0, 1, 2])
    world.restart_coordinator()
    world.run(4)
    world.kill_rank(0)
    assert resume(world) == ["s000010-g1"]


def test_a_launcher_that_took_its_leave_takes_its_memory_along() -> None:
    world = running("abcd")
    commit(world, 10)
    world.hold_snapshot(42, 1, ranks=[1], replicated=True)
    (launcher,) = world.nodes["b"].launchers
    world.leave(launcher)
    world.launch("b", nnodes=(2, 3))
    world.until(lambda: world.job().generation > 1 and world.training())
    assert "s000042-g1" not in resume(world)


def test_what_is_held_is_not_journaled() -> None:
    world = running()
    before = len(world.journal)
    world.hold_snapshot(42, 1, ranks=[0, 1, 2])
    assert len(world.journal) == before


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("id", "s000041-g1"),
        ("id", "rubbish"),
        ("generation", 9),
        ("generation", 0),
        ("step", -1),
        ("rank", -1),
        ("rank", 3),
        ("nonce", "another"),
    ],
)
def test_what_cannot_be_held_is_passed_over(change: str, value: Any) -> None:
    world = running()
    said: dict[str, Any] = {
        "nonce": world.job().id,
        "id": "s000042-g1",
        "step": 42,
        "generation": 1,
        "rank": 0,
    }
    said |= {change: value, "replicated": True}
    if change in ("generation", "step"):
        said["id"] = f"s{said['step']:06d}-g{said['generation']}"
    launcher, _ = world.rank(0)
    world._say(launcher, SnapshotHeld(**said))
    world.kill_rank(0)
    assert resume(world) == []


def test_another_users_word_on_what_is_held_is_not_believed() -> None:
    world = running()
    launcher, _ = world.rank(0)
    held = SnapshotHeld(
        nonce=world.job().id, id="s000042-g1", step=42, generation=1, rank=0, replicated=True
    )
    peer = Peer(pid=1, uid=UID + 1, gid=1, start_ticks=1, boot_id="b")
    world._forward(launcher.node, FromClient(client="c", peer=peer, body=held))
    world.kill_rank(0)
    assert resume(world) == []


# ------------------------------------------------------------------------------------ mistrust


def test_one_in_memory_after_which_the_run_fails_at_once_twice_is_suspect() -> None:
    # Resilience case 24: it loads well, and its first step crashes.
    world = running()
    commit(world, 10, 20)
    world.hold_snapshot(25, 1, ranks=[0, 1, 2])
    world.kill_rank(1)
    for _ in range(2):
        assert resume(world)[0] == "s000025-g1"
        world.run(1)
        world.end_rank(0, code=1, error=NAN)
    assert [(s.id, s.memory) for s in world.facts(SnapshotSuspected)] == [("s000025-g1", False)]
    assert resume(world) == ["s000020-g1", "s000010-g1"]
    assert world.job().over is None
    world.until(world.training)


def test_a_bug_that_has_nothing_to_do_with_what_is_in_memory_still_stops_the_job() -> None:
    world = running()
    commit(world, 10, 20)
    world.hold_snapshot(25, 1, ranks=[0, 1, 2])
    world.kill_rank(1)
    for _ in range(3):
        assert world.job().over is None
        world.run(1)
        world.end_rank(0, code=1, error=NAN)
    assert world.job().over is not None


def test_without_one_on_disk_a_bug_is_not_taken_for_a_bad_snapshot() -> None:
    world = running()
    world.hold_snapshot(25, 1, ranks=[0, 1, 2])
    world.kill_rank(1)
    for _ in range(2):
        assert world.job().over is None
        world.run(1)
        world.end_rank(0, code=1, error=NAN)
    assert world.job().over is not None
    assert world.facts(SnapshotSuspected) == []


def test_a_replica_that_was_damaged_is_never_trusted_twice_and_its_copy_on_disk_still_is() -> None:
    # Resilience case 25, with the disk as the way out.
    world = running()
    commit(world, 10)
    world.hold_snapshot(42, 1, ranks=[0, 1, 2])
    world.kill_rank(1)
    assert resume(world)[0] == "s000042-g1"
    reject(world, "s000042-g1", memory=True)
    world.restart_coordinator()
    world.run(4)
    world.until(world.training)
    world.hold_snapshot(42, 1, ranks=[0, 1, 2])  # says a rank that does not know better
    world.kill_rank(1)
    assert resume(world) == ["s000010-g1"]
    world.until(world.training)
    commit(world, 42)  # the writer, which had taken it before the damage, is done
    world.kill_rank(1)
    assert resume(world)[0] == "s000042-g1"


def test_one_in_memory_that_is_bad_through_and_through_is_not_named_when_it_reaches_the_disk() -> (
    None
):
    world = running()
    commit(world, 10)
    world.hold_snapshot(42, 1, ranks=[0, 1, 2])
    world.kill_rank(1)
    reject(world, "s000042-g1", memory=False)
    world.until(world.training)
    commit(world, 42)
    world.kill_rank(1)
    assert resume(world) == ["s000010-g1"]


def test_what_no_plan_has_named_cannot_be_rejected() -> None:
    world = running()
    for memory in (True, False):
        reject(world, "s000042-g1", memory=memory)
    assert world.facts(SnapshotSuspected) == []


# ------------------------------------------------------------------------------- shown and paid


def test_a_job_shows_its_snapshots_with_the_tiers_they_are_in() -> None:
    world = running()
    commit(world, 10, 20)
    world.hold_snapshot(20, 1, ranks=[0, 1, 2])
    world.hold_snapshot(25, 1, ranks=[0, 2])
    shown = views.job_detail(world.cluster, world.job(), world.now_s)["snapshots"]
    assert [(s["id"], s["tiers"], s["in_memory_of"]) for s in shown] == [
        ("s000010-g1", ["disk"], []),
        ("s000020-g1", ["memory", "disk"], ["a", "b", "c"]),
        ("s000025-g1", ["memory"], ["a", "c"]),
    ]


def test_ten_thousand_of_them_cost_less_than_a_second() -> None:
    world = running()
    launcher, _ = world.rank(0)
    session = world.cluster.nodes.sessions[launcher.node.name]
    said = [
        FromClient(
            client=f"r{rank}",
            peer=launcher.peer,
            body=SnapshotHeld(
                nonce=world.job().id,
                id=f"s{step:06d}-g1",
                step=step,
                generation=1,
                rank=rank,
            ),
        )
        for step in range(5000)
        for rank in range(2)
    ]
    began_s = time.process_time()
    for message in said:
        assert world.cluster.receive(world.now_s, session, message) == []
    took_s = time.process_time() - began_s
    assert took_s < 1.0, f"{took_s / len(said) * 1e6:.1f} microseconds each"
