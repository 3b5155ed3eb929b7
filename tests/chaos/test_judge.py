"""The verdict of `python -m tests.chaos snapshots` finds what it is there to find."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from tests.chaos.snapshots import judge
from tests.chaos.snapshots.judge import CORRUPT, LOST, TIER, Answer, Truth, Verdict

from everstep.coordinator.resuming import Piece
from everstep.wire.ids import SnapshotId

OLD, NEW = SnapshotId(20, 1), SnapshotId(30, 1)
BOTH = frozenset({OLD, NEW})
CALM = Truth(
    committed=[OLD, NEW],
    held={rank: [Piece(OLD, replicated=True), Piece(NEW, replicated=True)] for rank in (0, 1)},
    on_disk=BOTH,
    in_memory={0: BOTH, 1: BOTH},
    damaged=frozenset(),
    flipped=frozenset(),
    replicated=True,
    world=2,
    world_after=2,
)
REJECTED = frozenset({(str(NEW), "memory")})


def but(**changes: Any) -> Truth:
    return dataclasses.replace(CALM, **changes)


def verdict(truth: Truth, *answers: Answer) -> set[str]:
    found = Verdict()
    judge.keeps_what_was_said(truth, [], found)
    ids: Sequence[SnapshotId] = [NEW, OLD]
    judge.resumes_rightly(truth, truth, (ids, ids), answers, found)
    return {what for what, _ in found.wrong}


GOOD = Answer(NEW, "memory")


def test_two_ranks_that_load_the_newest_from_their_memory_are_right() -> None:
    assert verdict(CALM, GOOD, GOOD) == set()


@pytest.mark.parametrize(
    ("truth", "answer", "what"),
    [
        (CALM, Answer(NEW, "memory", wrong=["model.large"]), CORRUPT),
        (CALM, Answer(OLD, "memory"), CORRUPT),
        (CALM, Answer(NEW, "disk"), TIER),
        (CALM, Answer(NEW, "peer"), TIER),
    ],
)
def test_one_rank_that_differs_is_found(truth: Truth, answer: Answer, what: str) -> None:
    assert what in verdict(truth, GOOD, answer)


def test_what_was_said_to_be_safe_and_is_gone_is_found() -> None:
    on_disk = but(on_disk=frozenset({OLD}))
    assert LOST in verdict(on_disk, GOOD, GOOD)
    in_memory = but(in_memory={0: BOTH, 1: frozenset()})
    assert LOST in verdict(in_memory, GOOD, Answer(NEW, "disk"))
    spoilt = but(on_disk=frozenset({OLD}), damaged=frozenset({NEW}))
    assert verdict(spoilt, GOOD, GOOD) == set(), "the fault itself has damaged it"


def test_an_older_one_is_wrong_while_the_newest_is_good() -> None:
    older = Answer(OLD, "memory")
    assert LOST in verdict(CALM, older, older)
    assert LOST in verdict(CALM, Answer(None), Answer(None))


def test_a_damaged_slot_must_be_told_and_the_disk_read() -> None:
    flipped = but(flipped=frozenset({(1, NEW)}))
    assert verdict(flipped, GOOD, Answer(NEW, "disk", rejected=REJECTED)) == set()
    assert TIER in verdict(flipped, GOOD, Answer(NEW, "disk"))
    assert TIER in verdict(flipped, GOOD, Answer(NEW, "memory", rejected=REJECTED))
