"""The processes and files of one case, and what can be seen of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.snapshots import damage
from tests.chaos.snapshots.cases import KEEP, Case
from tests.chaos.snapshots.judge import Truth
from tests.chaos.snapshots.rank import Brief
from tests.chaos.snapshots.stage import (
    Child,
    RankChild,
    StageError,
    start_rank,
    start_writer,
    until,
)

from everstep.coordinator.resuming import Piece
from everstep.snapshots import catalogue
from everstep.trainer.place import Seat
from everstep.wire.ids import SnapshotId


@dataclass
class Scene:
    """What a case has started: the first generation, its writers, and where everything lies."""

    case: Case
    folder: Path
    short: Path
    agents: tuple[Path, Path]
    writers: dict[int, Child] = field(default_factory=dict)
    ranks: list[RankChild] = field(default_factory=list)
    old: list[Child] = field(default_factory=list)
    spoilt: set[SnapshotId] = field(default_factory=set)
    flipped: set[tuple[int, SnapshotId]] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    hit: bool = False

    def __post_init__(self) -> None:
        self.rng = self.case.rng()
        self.run_dir = self.folder / "run"
        self.place = self.run_dir / "snapshots"
        self.run_dir.mkdir(parents=True)
        self.job = f"chaos-{self.folder.name}-{self.short.name}"

    # ------------------------------------------------------------------------- processes

    def writer_of(self, rank: int) -> int:
        return rank if self.case.apart else 0

    def start_writers(self, count: int, faults: Sequence[str] = ()) -> None:
        """Start those that do not run."""
        for number in range(count):
            fault = faults[number] if number < len(faults) else ""
            if number not in self.writers or not self.writers[number].alive:
                self.writers[number] = self._writer(number, fault)

    def _writer(self, number: int, fault: str) -> Child:
        path = self.short / f"w{number}"
        return start_writer(path, self.folder / f"writer-{number}.log", fault)

    def start_ranks(
        self, world: int, *, generation: int, resume: Sequence[SnapshotId] | None
    ) -> list[RankChild]:
        made = []
        for rank in range(world):
            seat = Seat(
                rank=rank,
                world_size=world,
                local_rank=rank,
                local_world_size=world,
                job=self.job,
                generation=generation,
                resume=None if resume is None else tuple(resume),
                socket=self.agents[rank in self.moved],
                writer=self.short / f"w{self.writer_of(rank)}",
            )
            brief = Brief(
                seed=self.case.seed,
                numbers=self.case.numbers,
                own=self.case.own,
                keep=KEEP,
                run_dir=str(self.run_dir),
                seat=seat,
            )
            made.append(start_rank(brief, self.folder / f"rank-{rank}-g{generation}.log"))
        for child in made:
            self._await(child, lambda c=child: c.told("ready"), "its start")  # type: ignore[misc]
        return made

    def _await(self, child: Child, true: Callable[[], object], what: str) -> None:
        until(lambda: true() or not child.alive, f"{what}, of process {child.pid}: {child.log}")
        if not true():
            raise StageError(f"{what}: process {child.pid} has ended ({child.code}): {child.log}")

    def kill_ranks(self) -> None:
        for child in self.ranks:
            child.end()
            child.hang_up()

    def end(self) -> None:
        """Leave nothing behind."""
        for child in (*self.ranks, *self.writers.values(), *self.old):
            child.end()
        for rank in self.ranks:
            rank.hang_up()

    # ---------------------------------------------------------------------------- saving

    def save(self, step: int, *, disk: bool = True, races: bool = False) -> None:
        for child in self.ranks:
            child.say("save", step=step, disk=disk, races=races)

    def settle(self, step: int, generation: int = 1) -> None:
        """Wait until a save is whole, in memory and on disk. Raises StageError when it fails."""
        id_ = str(SnapshotId(step, generation))
        for child in self.ranks:
            self._await(child, lambda c=child: c.told("held", id=id_), f"{id_} in memory")  # type: ignore[misc]
            self._await(child, lambda c=child: c.told("part", id=id_), f"{id_} on disk")  # type: ignore[misc]
        lead = self.ranks[0]
        self._await(lead, lambda: lead.told("done", id=id_), f"{id_} committed")
        if why := lead.told("done", id=id_)[0]["why"]:
            raise StageError(f"{id_} was not committed: {why}")

    def answered(self, step: int) -> bool:
        """Say whether all that is to be heard of a save has been."""
        id_ = str(SnapshotId(step, 1))
        there = [c for c in self.ranks if c.alive]
        if not all(c.told("taken", step=step) and c.told("part", id=id_) for c in there):
            return False
        # With a part missing the lead goes on waiting, for as long as its deadline allows.
        everybody = len(there) == len(self.ranks) and all(w.alive for w in self.writers.values())
        return not everybody or bool(self.ranks[0].told("done", id=id_))

    def wait_answered(self, step: int) -> None:
        until(lambda: self.answered(step), f"answers to step {step}")

    # ----------------------------------------------------------------------------- truth

    def committed(self) -> list[SnapshotId]:
        said = [e["id"] for e in self.ranks[0].told("done", why=None)]
        return sorted(map(SnapshotId.parse, said))

    def held(self) -> dict[int, list[Piece]]:
        return {
            c.rank: [Piece(SnapshotId.parse(e["id"]), e["replicated"]) for e in c.told("held")]
            for c in self.ranks
        }

    def on_disk(self) -> frozenset[SnapshotId]:
        return frozenset(e.id for e in catalogue.entries(self.place) if e.committed)

    def damaged(self) -> frozenset[SnapshotId]:
        return frozenset(i for i in self.spoilt if not damage.is_whole(self.place / str(i)))

    def in_memory(self, rank: int) -> frozenset[SnapshotId]:
        return damage.sealed_ids(self.agents[rank in self.moved], self.job, rank)

    def truth(self, in_memory: dict[int, frozenset[SnapshotId]], said: Truth | None) -> Truth:
        return Truth(
            committed=said.committed if said else self.committed(),
            held=said.held if said else self.held(),
            on_disk=self.on_disk(),
            in_memory=in_memory,
            damaged=self.damaged(),
            flipped=frozenset(self.flipped),
            replicated=not (self.case.own and self.case.world > 1),
            world=self.case.world,
            world_after=self.case.world_after,
        )
