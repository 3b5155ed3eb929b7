"""Tier a: slots in this node's memory, filled by this rank's predecessor or by itself."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from everstep.snapshots.marker import Marker, SnapshotError
from everstep.trainer.snapshot.source import (
    Request,
    Source,
    check_complete,
    copy_overlap,
    replicated,
    together,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from everstep.trainer.snapshot.layout import Part, Piece
    from everstep.trainer.snapshot.slot import Slot
    from everstep.wire.ids import SnapshotId


class Memory:
    """The slots that are at hand; those of another job or of another rank's shards are not."""

    name = "memory"

    def __init__(self, slots: Sequence[Slot], *, job: str, rank: int, world_size: int) -> None:
        self._slots = slots
        self._job, self._rank, self._world_size = job, rank, world_size

    def open(self, id_: SnapshotId) -> Source | None:
        """Return the snapshot where a slot holds all of it that this rank needs."""
        for slot in self._slots:
            sealed = slot.sealed
            if sealed is None or (sealed.facts.id, sealed.facts.job) != (str(id_), self._job):
                continue
            found = SlotSource(slot)
            same = (sealed.rank, sealed.facts.world_size) == (self._rank, self._world_size)
            if same or replicated(found):
                return found
        return None


class SlotSource:
    """A sealed slot (`Source`)."""

    def __init__(self, slot: Slot) -> None:
        """Raise SnapshotError when it is not sealed or its table is damaged."""
        sealed = slot.sealed
        if sealed is None:
            raise SnapshotError("the slot is not sealed")
        table = slot.table()
        self._slot = slot
        self._pieces: dict[str, Piece] = {piece.part.name: piece for piece in table.pieces}
        self._sums = (
            (table.file_start, table.file_bytes, sealed.file_xxh3),
            (table.memory_start, table.memory_bytes, sealed.memory_xxh3),
        )
        self.marker: Marker = sealed.facts

    @property
    def parts(self) -> Mapping[str, Sequence[Part]]:
        """The boxes, one for each name."""
        return {name: (piece.part,) for name, piece in self._pieces.items()}

    def peek(self, name: str) -> torch.Tensor:
        """Return a tensor of the slot's own memory."""
        return self._slot.view(self._pieces[name])

    def load(self, requests: Sequence[Request]) -> None:
        """Check both regions while others copy out of them."""
        check_complete(self, requests)
        checks = [partial(self._check, *one) for one in self._sums]
        copies = [partial(self._copy, request) for request in requests]
        together([*checks, *copies])

    def _copy(self, request: Request) -> None:
        piece = self._pieces[request.name]
        copy_overlap(piece.part, self._slot.view(piece), request)

    def _check(self, start: int, size_bytes: int, xxh3: str) -> None:
        if self._slot.checksum(start, size_bytes) != xxh3:
            raise SnapshotError("the slot's memory is damaged: its checksum does not fit")
