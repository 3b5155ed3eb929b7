"""What must come back after a fault: decided from what was said and what is there, nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.coordinator.resuming import Held, Piece, choose
from everstep.wire.ids import SnapshotId

CORRUPT, LOST, TIER, OTHER = "corrupt_loads", "lost_last_good", "wrong_tier", "other"


@dataclass(frozen=True, slots=True)
class Truth:
    """What there is between two generations.

    `committed` and `held` (by rank, in order, each with whether it is the whole state) were said;
    `on_disk` and `in_memory` (by rank of the next generation) are there; `damaged` on disk and
    `flipped` in memory are those that the fault itself has spoilt.
    """

    committed: Sequence[SnapshotId]
    held: Mapping[int, Sequence[Piece]]
    on_disk: frozenset[SnapshotId]
    in_memory: Mapping[int, frozenset[SnapshotId]]
    damaged: frozenset[SnapshotId]
    flipped: frozenset[tuple[int, SnapshotId]]
    replicated: bool
    world: int
    world_after: int

    def memory(self, rank: int) -> frozenset[SnapshotId]:
        """Return what a rank of the next generation can load from its own node's memory."""
        if not self.replicated and self.world != self.world_after:
            return frozenset()
        found = self.in_memory.get(rank, frozenset())
        return frozenset(id_ for id_ in found if (rank, id_) not in self.flipped)

    @property
    def disk(self) -> frozenset[SnapshotId]:
        """What can be loaded from disk."""
        return self.on_disk - self.damaged

    def tier(self, rank: int, id_: SnapshotId) -> str | None:
        """Return where a rank must load an id from, None where it cannot."""
        if id_ in self.memory(rank):
            return "memory"
        if id_ in self.disk:
            return "disk"
        givers = (id_ in self.memory(r) for r in range(self.world_after))
        return "peer" if self.replicated and any(givers) else None

    def loadable(self, id_: SnapshotId) -> bool:
        """Say whether all ranks can load it."""
        return all(self.tier(rank, id_) for rank in range(self.world_after))


@dataclass(frozen=True, slots=True)
class Answer:
    """What one rank has loaded, and what it said on the way."""

    id: SnapshotId | None
    tier: str = ""
    wrong: Sequence[str] = ()
    rejected: frozenset[tuple[str, str]] = frozenset()
    """Id and tier."""


@dataclass(slots=True)
class Verdict:
    """What was wrong, each with what it counts as."""

    wrong: list[tuple[str, str]] = field(default_factory=list)
    tiers: Counter[str] = field(default_factory=Counter)

    def say(self, what: str, text: str) -> None:
        self.wrong.append((what, text))


def newest_first(ids: Iterable[SnapshotId]) -> list[SnapshotId]:
    """Return ids as a folder without a plan is tried."""
    return sorted(ids, key=SnapshotId.place, reverse=True)


def plan(truth: Truth, moved: Sequence[int]) -> list[SnapshotId]:
    """Return what a coordinator has the next generation resume from, newest first."""
    book = Held()
    for rank, pieces in truth.held.items():
        for piece in pieces:
            book.take(f"n{rank}", rank, piece)
    nodes = {f"n{rank}" for rank in range(truth.world_after) if rank not in moved}
    usable = book.usable(nodes, ranks=truth.world_after, were={1: truth.world})
    return [SnapshotId.parse(id_) for id_ in choose(truth.committed, usable)]


def keeps_what_was_said(truth: Truth, moved: Sequence[int], verdict: Verdict) -> None:
    """Check that the newest of what was said to be safe is there."""
    good = [id_ for id_ in truth.committed if id_ not in truth.damaged]
    if good and max(good) not in truth.on_disk:
        verdict.say(LOST, f"{max(good)} was committed, and is not on disk")
    for rank, pieces in truth.held.items():
        if rank in moved or rank >= truth.world_after or not pieces:
            continue
        if pieces[-1].id not in truth.in_memory[rank]:
            verdict.say(LOST, f"{pieces[-1].id} was held for rank {rank}, and is not in memory")


def resumes_rightly(
    before: Truth,
    after: Truth,
    candidates: tuple[Sequence[SnapshotId], Sequence[SnapshotId]],
    answers: Sequence[Answer],
    verdict: Verdict,
) -> None:
    """Check that all ranks loaded the newest that they can, each from the right place.

    `before` and `after`, and the certain and possible candidates, differ where an old writer was
    at work while the ranks came up.
    """
    certain, possible = candidates
    expected = next((id_ for id_ in certain if before.loadable(id_)), None)
    chosen = {answer.id for answer in answers}
    if len(chosen) != 1:
        verdict.say(CORRUPT, f"the ranks have loaded different ones: {chosen}")
        return
    (found,) = chosen
    if found is None:
        if expected is not None:
            verdict.say(LOST, f"{expected} is there, and was not loaded")
        return
    newer = possible[: possible.index(expected)] if expected else possible
    if found != expected and (found not in newer or not after.loadable(found)):
        verdict.say(LOST, f"{found} was loaded, {expected} is the newest good one")
    for rank, answer in enumerate(answers):
        verdict.tiers[answer.tier] += 1
        if answer.wrong:
            verdict.say(CORRUPT, f"rank {rank}: {found} from {answer.tier}: {answer.wrong}")
        if answer.tier not in {before.tier(rank, found), after.tier(rank, found)}:
            _judge_tier(before, answers, rank, found, verdict)
        if (rank, found) in before.flipped and (str(found), "memory") not in answer.rejected:
            verdict.say(TIER, f"rank {rank}: that {found} is damaged in memory was not said")
    _says_what_it_passes_over([c for c in certain if c in newer], found, answers, verdict)


def _judge_tier(
    truth: Truth, answers: Sequence[Answer], rank: int, found: SnapshotId, verdict: Verdict
) -> None:
    # One that is damaged on disk: who has not read the damaged file may have taken it for good,
    # as long as another has seen it and everything was handed on.
    seen = any((str(found), "disk") in answer.rejected for answer in answers)
    if found in truth.damaged and answers[rank].tier in ("disk", "peer") and seen:
        return
    expected = truth.tier(rank, found)
    verdict.say(TIER, f"rank {rank}: {found} from {answers[rank].tier}, not {expected}")


def _says_what_it_passes_over(
    newer: Sequence[SnapshotId],
    found: SnapshotId,
    answers: Sequence[Answer],
    verdict: Verdict,
) -> None:
    said = {id_ for answer in answers for id_, _ in answer.rejected}
    for id_ in newer:
        if id_.place() > found.place() and str(id_) not in said:
            verdict.say(TIER, f"{id_} was passed over for {found}, and nobody said why")
