"""The rules of silence, budget and breaker by themselves: every edge of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from everstep.coordinator.breaker import evicted_lately, holds
from everstep.coordinator.budget import since_progress, spent, suspect_snapshot
from everstep.coordinator.config import BreakerConfig, BudgetConfig, SilenceConfig
from everstep.coordinator.facts import FailureCounted, FailureKind
from everstep.coordinator.incidents import Clue, ClueKind
from everstep.coordinator.silence import Seen, SilentNode, lost, standstill
from everstep.wire.messages import Phase, RankProgress

RULES = SilenceConfig()
T = 1000.0  # when the silence began
STEP_S = 0.5


def page(
    rank: int,
    *,
    phase: Phase = "step",
    standing_s: float = 0.1,
    p99: float | None = STEP_S,
    step: int = 7,
    stopped: bool = False,
) -> RankProgress:
    return RankProgress(
        job="j",
        generation=1,
        rank=rank,
        pid=rank,
        phase=phase,
        step=step,
        standing_s=standing_s,
        p99_step_s=p99,
        stopped=stopped,
    )


def seen(rank: int, now_s: float, **more: Any) -> Seen:
    return Seen(f"n{rank}", now_s, page(rank, **more))


def broken(at_s: float, *, node: str = "n1", kind: ClueKind = "broken") -> Clue:
    return Clue(at_s=at_s, kind=kind, node=node, what="rank 1: connection closed", rank=1)


def silent(*, closed: bool = False, phase: Phase = "step") -> SilentNode:
    return SilentNode("n0", T, T, closed, (page(0, phase=phase),))


def standing_since(since_s: float, now_s: float) -> list[Seen]:
    return [seen(rank, now_s, standing_s=now_s - since_s) for rank in (1, 2)]


def test_a_node_silent_in_its_snapshot_is_lost_when_no_snapshot_ever_took_so_long() -> None:
    def is_it(patience_s: float | None, after_s: float, phase: Phase = "snapshot") -> bool:
        node = replace(silent(phase=phase), snapshot_patience_s=patience_s)
        return is_lost(node, standing_since(T, T + after_s), [], now_s=T + after_s)

    assert not is_it(None, 900), "nothing is known of how long they take"
    assert not is_it(10.0, 9.9)
    assert is_it(10.0, 10.1)
    assert not is_it(150.0, 60)
    assert not is_it(10.0, 900, "first_step")
    assert is_it(10.0, 2.6, "step"), "patience is for snapshots only"


def is_lost(
    node: SilentNode, peers: list[Seen], clues: list[Clue], *, now_s: float, expected: int = 2
) -> bool:
    return lost(node, peers, clues, expected_peers=expected, now_s=now_s, rules=RULES) is not None


# ---------------------------------------------------------------------------- (a) a rank that ended


@pytest.mark.parametrize("closed", [True, False])
def test_silence_and_a_rank_that_ended_with_it_are_a_loss(closed: bool) -> None:
    clues = [broken(T + 0.1)]
    assert is_lost(silent(closed=closed), [], clues, now_s=T + 2.1)
    assert not is_lost(silent(closed=closed), [], clues, now_s=T + 1.9), "not before 2.0 s"
    assert not is_lost(silent(closed=closed), [], [], now_s=T + 900), "silence alone never"


@pytest.mark.parametrize("kind", ["broken", "exit", "unknown", "stopped"])
def test_whoever_ended_without_a_cause_of_its_own_is_a_witness(kind: ClueKind) -> None:
    assert is_lost(silent(), [], [broken(T + 0.1, kind=kind)], now_s=T + 3)


@pytest.mark.parametrize("kind", ["error", "crash", "killed", "launcher"])
def test_whoever_has_a_cause_of_its_own_is_none(kind: ClueKind) -> None:
    assert not is_lost(silent(), [], [broken(T + 0.1, kind=kind)], now_s=T + 3)


def test_a_cause_elsewhere_explains_the_witnesses() -> None:
    clues = [broken(T + 0.1), broken(T, node="n2", kind="killed")]
    assert not is_lost(silent(), [], clues, now_s=T + 3)


@pytest.mark.parametrize(
    ("at_s", "counts"),
    [(T - 3, False), (T - 0.4, True), (T, True), (T + 9, True), (T + 11, False)],
)
def test_a_witness_has_to_fall_into_the_time_of_the_silence(at_s: float, counts: bool) -> None:
    peers = [seen(1, T + 20), seen(2, T + 20)]
    assert is_lost(silent(), peers, [broken(at_s)], now_s=T + 20) == counts


def test_a_rank_of_the_silent_node_itself_is_no_second_witness() -> None:
    assert not is_lost(silent(), [], [broken(T + 0.1, node="n0")], now_s=T + 3)


# -------------------------------------------------------------------------- (b) ranks that stand


def standing(now_s: float, **more: Any) -> list[Seen]:
    stood_s = now_s - T - 0.3  # since shortly after the last word of the silent one
    return [seen(rank, now_s, **{"standing_s": stood_s, **more}) for rank in (1, 2)]


def test_silence_and_all_others_standing_are_a_loss() -> None:
    assert is_lost(silent(), standing(T + 2.6), [], now_s=T + 2.6)
    assert not is_lost(silent(), standing(T + 2.2), [], now_s=T + 2.2), "standing for 1.9 s"


def test_a_closed_socket_says_that_the_host_is_up_so_standing_does_not_count() -> None:
    assert not is_lost(silent(closed=True), standing(T + 5), [], now_s=T + 5)


@pytest.mark.parametrize("phase", ["start", "restore", "first_step", "snapshot", "eval", "end"])
def test_only_ranks_in_a_step_are_witnesses(phase: Phase) -> None:
    now_s = T + 30
    peers = standing(now_s, phase=phase)
    assert not is_lost(silent(), peers, [], now_s=now_s)


@pytest.mark.parametrize("phase", ["start", "restore", "first_step", "snapshot", "eval"])
def test_others_may_be_waiting_for_a_silent_node_that_was_not_in_a_step(phase: Phase) -> None:
    assert not is_lost(silent(phase=phase), standing(T + 5), [], now_s=T + 5)


def test_one_that_moves_or_is_not_seen_saves_the_silent_one() -> None:
    now_s = T + 5
    moving = [standing(now_s)[0], seen(2, now_s, standing_s=0.2)]
    assert not is_lost(silent(), moving, [], now_s=now_s)
    assert not is_lost(silent(), standing(now_s)[:1], [], now_s=now_s)
    stale = [standing(now_s)[0], Seen("n2", now_s - 3, page(2, standing_s=4))]
    assert not is_lost(silent(), stale, [], now_s=now_s)


def test_ranks_with_long_steps_are_given_three_of_their_own() -> None:
    now_s = T + 20
    long = [seen(rank, now_s, standing_s=19.9, p99=7.0) for rank in (1, 2)]
    assert not is_lost(silent(), long, [], now_s=now_s)
    now_s = T + 22
    long = [seen(rank, now_s, standing_s=21.9, p99=7.0) for rank in (1, 2)]
    assert is_lost(silent(), long, [], now_s=now_s)


def test_standing_that_began_at_another_time_has_another_reason() -> None:
    now_s = T + 60
    peers = [seen(rank, now_s, standing_s=10) for rank in (1, 2)]
    assert not is_lost(silent(), peers, [], now_s=now_s)


def test_a_rank_whose_steps_are_not_known_yet_is_no_witness() -> None:
    assert not is_lost(silent(), standing(T + 9, p99=None), [], now_s=T + 9)


# ------------------------------------------------------------------------------------ standstill


def stuck(ranks: list[Seen], *, expected: int = 2) -> bool:
    return standstill(ranks, expected=expected, now_s=T, rules=RULES) is not None


def test_a_job_stands_when_all_its_ranks_stand_longer_than_their_steps_explain() -> None:
    assert stuck([seen(0, T, standing_s=5.1), seen(1, T, standing_s=5.1)])
    assert not stuck([seen(0, T, standing_s=4.9), seen(1, T, standing_s=5.1)])
    assert not stuck([seen(0, T, standing_s=8, p99=3.0), seen(1, T, standing_s=9.1, p99=3.0)])


def test_with_ranks_that_nobody_sees_it_takes_a_minute() -> None:
    assert not stuck([seen(0, T, standing_s=59)])
    assert stuck([seen(0, T, standing_s=61)])
    assert not stuck([])


@pytest.mark.parametrize("phase", ["start", "restore", "first_step", "snapshot", "eval", "end"])
def test_other_phases_are_given_an_hour(phase: Phase) -> None:
    waiting = seen(1, T, standing_s=3000)
    assert not stuck([seen(0, T, phase=phase, standing_s=3000), waiting])
    assert stuck([seen(0, T, phase=phase, standing_s=3601), seen(1, T, standing_s=3601)])


def test_the_culprit_of_a_standstill_is_named_only_when_it_is_alone_behind() -> None:
    ahead = [seen(r, T, standing_s=6, step=8) for r in (0, 1)]
    found = standstill([*ahead, seen(2, T, standing_s=6, step=7)], expected=3, now_s=T, rules=RULES)
    assert found is not None
    assert (found.node, found.rank) == ("n2", 2)
    equal = standstill([*ahead, seen(2, T, standing_s=6, step=8)], expected=3, now_s=T, rules=RULES)
    assert equal is not None
    assert (equal.node, equal.rank) == (None, None)


def test_a_rank_that_a_signal_stopped_is_named_as_soon_as_the_others_stand() -> None:
    stopped = seen(1, T, standing_s=2.3, stopped=True)
    waiting = [seen(r, T, standing_s=2.1) for r in (0, 2)]
    found = standstill([*waiting, stopped], expected=3, now_s=T, rules=RULES)
    assert found is not None
    assert (found.node, found.rank) == ("n1", 1)
    assert "stopped by a signal" in found.why
    moving = [seen(0, T, standing_s=0.1), seen(2, T, standing_s=2.1)]
    assert not stuck([*moving, stopped], expected=3)
    long_steps = [seen(r, T, standing_s=2.1, p99=1.0) for r in (0, 2)]
    assert not stuck([*long_steps, stopped], expected=3)


# ---------------------------------------------------------------------------------------- budget


def failure(
    generation: int, kind: FailureKind = "error", cause: str = "ValueError:1", **more: Any
) -> FailureCounted:
    plain = FailureCounted(
        at_s=0,
        job="j",
        generation=generation,
        failure=kind,
        cause=cause,
        node="a",
        rank=0,
        exit_code=1,
        error="text",
        max_step=10,
        reached=10,
        newest_snapshot=None,
    )
    return msgspec.structs.replace(plain, **more)


def test_failures_before_the_last_progress_are_forgiven() -> None:
    failures = [failure(1), failure(2), failure(3, max_step=11), failure(4, max_step=11)]
    assert [f.generation for f in since_progress(failures)] == [3, 4]
    snapshot = [failure(1), failure(2, newest_snapshot="s000005-g1")]
    assert [f.generation for f in since_progress(snapshot)] == [2]
    assert since_progress([]) == []


def test_an_outside_fault_between_two_equal_errors_does_not_hide_them() -> None:
    failures = [failure(1), failure(2, "killed", "SIGKILL:rank 1"), failure(3)]
    stop = spent(failures, BudgetConfig())
    assert stop is not None
    assert (stop.exit_code, stop.error) == (1, "text")


def test_unknown_failures_count_with_the_larger_ledger_only() -> None:
    failures = [failure(i, "unknown", "unknown") for i in range(1, 20)]
    assert spent(failures, BudgetConfig()) is None
    assert spent([*failures, failure(20, "unknown", "unknown")], BudgetConfig()) is not None


def test_hangs_count_with_the_errors() -> None:
    failures = [failure(i, "hang", "hang:") for i in (1, 2, 3)]
    stop = spent(failures, BudgetConfig())
    assert stop is not None
    assert stop.exit_code == 93


def test_a_suspect_needs_two_failures_at_once_from_the_same_snapshot() -> None:
    first = failure(2, resumed_from="s000010-g1", reached=10)
    assert suspect_snapshot([first]) is None
    assert suspect_snapshot([first, failure(3, resumed_from="s000010-g1", reached=11)])
    assert not suspect_snapshot([first, failure(3, resumed_from="s000010-g1", reached=15)])
    assert not suspect_snapshot([first, failure(3, resumed_from="s000010-g1", reached=None)])
    assert not suspect_snapshot([first, failure(3, resumed_from="s000005-g1", reached=10)])
    assert not suspect_snapshot(
        [first, failure(3, cause="KeyError:1", resumed_from="s000010-g1", reached=10)]
    )


# ----------------------------------------------------------------------------------- the breaker


@pytest.mark.parametrize(
    ("nodes", "lately", "may"),
    [(1, 0, True), (3, 0, True), (3, 1, False), (4, 1, True), (5, 1, True), (5, 2, False)],
)
def test_half_of_a_job_may_be_evicted_and_one_always(nodes: int, lately: int, may: bool) -> None:
    assert holds(lately, nodes=nodes, config=BreakerConfig()) == may


def test_old_evictions_do_not_count() -> None:
    times = [T - 301, T - 299, T - 1]
    assert evicted_lately(times, now_s=T, config=BreakerConfig()) == 2
