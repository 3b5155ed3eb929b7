"""What a rank orders of its writer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from everstep.snapshots.orders import Policy, Write
from everstep.trainer.snapshot.planning import file_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.snapshots.marker import Marker
    from everstep.trainer.snapshot.fitting import Fitting

NO_SLOT = -1


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where snapshots go and by whose leave."""

    place: str
    agent_socket: str = ""
    generations: str = ""
    deadline_s: float = 1800.0


class Ordering(NamedTuple):
    """Makes the orders of one rank; rank 0's writer is the lead."""

    target: Target
    rank: int
    world_size: int
    policy: Callable[[], Policy]

    def part(self, number: int, facts: Marker, fitting: Fitting, *, stall_s: float) -> Write:
        """Order the file part of a slot to be written, which may not be sealed yet."""
        table = fitting.layout.table
        return msgspec.structs.replace(
            self.missing(facts, ""),
            slot=number,
            start=table.file_start,
            size_bytes=table.file_bytes,
            metadata_start=table.size_bytes if fitting.metadata else 0,
            metadata_bytes=len(fitting.metadata),
            stall_s=stall_s,
        )

    def missing(self, facts: Marker, why: str) -> Write:
        """Have the lead told that this rank's part will not come."""
        return Write(
            id=facts.id,
            slot=NO_SLOT,
            place=self.target.place,
            file=file_name(self.rank),
            start=0,
            size_bytes=0,
            xxh3="",
            rank=self.rank,
            parts=self.world_size,
            facts=facts,
            lead=self.rank == 0,
            policy=self.policy(),
            deadline_s=self.target.deadline_s,
            agent_socket=self.target.agent_socket,
            generations=self.target.generations,
            missing=why,
        )
