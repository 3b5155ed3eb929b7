"""Which fault a seed stands for: a pure function, so that one number brings a case back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from everstep.snapshots.faults import Point


class Kind(StrEnum):
    """What goes wrong with a save, or with what it has left."""

    KILL_WRITER_AT_POINT = "kill-writer-at-point"
    KILL_WRITER = "kill-writer"
    KILL_RANK_AT_POINT = "kill-rank-at-point"
    KILL_RANK = "kill-rank"
    LOSE_NODE = "lose-node"
    TRUNCATE = "truncate"
    FLIP = "flip"
    FLIP_MEMORY = "flip-memory"
    ENOSPC = "enospc"
    EIO = "eio"
    FULL_DISK = "full-disk"
    DELETE_FOLDER = "delete-folder"
    SLOW_DISK = "slow-disk"
    THAWED_WRITER = "thawed-writer"


OF_A_PART = tuple(Point)[: tuple(Point).index(Point.BEFORE_METADATA)]
"""The points that the writer of each part comes by; the others are the lead's alone."""
KEEP = 2
FIRST, SECOND, HIT, LATER, AFTER = 10, 20, 30, 40, 50
"""The steps that are saved: two in peace, the one that is hit, one in memory alone, and one by the
next generation."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault and the run that it meets.

    `world` ranks with a writer each (`apart`) or one for all; `world_after` is the next
    generation's. `own` gives each rank something of its own, so that no other can stand in for it.
    `planned` has a plan name the snapshots, as a coordinator does; otherwise nobody decides.
    `hurry` starts the next generation while the writers of this one may be at work.
    """

    seed: int
    kind: Kind
    point: Point
    world: int
    world_after: int
    apart: bool
    own: bool
    planned: bool
    hurry: bool
    numbers: int
    races: bool
    in_memory_too: bool
    moved: tuple[int, ...]

    @classmethod
    def of(cls, seed: int) -> Case:
        """Return the case of a seed; any 210 seeds in a row meet every kind at every point."""
        kind = tuple(Kind)[seed % len(Kind)]
        point = tuple(Point)[seed // len(Kind) % len(Point)]
        rng = random.Random(f"case {seed}")
        world = rng.choice((1, 2, 2, 2, 3))
        own = rng.random() < 0.25
        after = world if own or rng.random() < 0.8 else rng.choice((1, 2, 3))
        return cls(
            seed=seed,
            kind=kind,
            point=point,
            world=world,
            world_after=after,
            apart=rng.random() < 0.5,
            own=own,
            planned=rng.random() < 0.7,
            hurry=rng.random() < 0.5,
            numbers=int(2 ** rng.uniform(14.5, 19)),
            races=rng.random() < 0.5,
            in_memory_too=rng.random() < 0.3,
            moved=tuple(r for r in range(3) if rng.random() < 0.3),
        )

    @property
    def parts_each(self) -> int:
        """How many parts one writer writes of a snapshot."""
        return 1 if self.apart else self.world

    def rng(self) -> random.Random:
        """Return the chance of what is done during the case."""
        return random.Random(f"done {self.seed}")

    def nth(self, rng: random.Random) -> int:
        """Return which time by the point it is that the fault happens: during the save to hit."""
        if self.point is Point.MID_RETENTION:
            return 1  # only then there is one to delete
        if self.point in OF_A_PART:
            return 2 * self.parts_each + 1 + rng.randrange(self.parts_each)
        return 3
