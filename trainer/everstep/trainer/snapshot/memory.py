"""Tier a: slots in this node's memory, filled by this rank's predecessor or by itself."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from everstep.snapshots.marker import Marker, SnapshotError
from everstep.trainer.snapshot.source import (
    Request,
    Source,
    check_complete,
    copy_overlap,
    takes_whole,
    together,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from everstep.trainer.snapshot.layout import Part, Piece
    from everstep.trainer.snapshot.slot import Slot
    from everstep.wire.ids import SnapshotId


_CHUNK_BYTES = 4 * 1024 * 1024
"""Fits into a cache, and keeps threads from taking turns on the interpreter's lock too often."""


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
            if same or found.replicated:
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
        self._regions = list(zip(table.regions(), sealed.sums, strict=True))
        self.marker: Marker = sealed.facts
        # Not to be seen from the names in here: what others have of their own is not here.
        self.replicated = sealed.replicated

    @property
    def parts(self) -> Mapping[str, Sequence[Part]]:
        """The boxes, one for each name."""
        return {name: (piece.part,) for name, piece in self._pieces.items()}

    def peek(self, name: str) -> torch.Tensor:
        """Return a tensor of the slot's own memory."""
        return self._slot.view(self._pieces[name])

    def load(self, requests: Sequence[Request]) -> None:
        """Check all regions, several at once; what is checked is copied while it is in a cache."""
        check_complete(self, requests)
        plain: list[tuple[Piece, Request]] = []
        others: list[tuple[Piece, Request]] = []
        for request in requests:
            piece = self._pieces[request.name]
            (plain if takes_whole(piece.part, request) else others).append((piece, request))
        plain.sort(key=lambda pair: pair[0].offset)
        spans = [Span(p.offset, p.part.bytes, r.target.data_ptr()) for p, r in plain]
        together(partial(self._region, *region, xxh3, spans) for region, xxh3 in self._regions)
        for piece, request in others:
            copy_overlap(piece.part, self._slot.view(piece), request)

    def _region(self, start: int, size_bytes: int, xxh3: int, spans: Sequence[Span]) -> None:
        digest = xxhash.xxh3_64()
        here = self._slot.bytes.data_ptr()
        first = bisect_right(spans, start, key=lambda span: span.end)
        for at in range(start, start + size_bytes, _CHUNK_BYTES):
            end = min(at + _CHUNK_BYTES, start + size_bytes)
            digest.update(self._slot.range(at, end - at))
            for span in islice(spans, first, None):
                if span.start >= end:
                    break
                low, high = max(at, span.start), min(end, span.end)
                if low < high:
                    ctypes.memmove(span.target + low - span.start, here + low, high - low)
        if digest.intdigest() != xxh3:
            raise SnapshotError("the slot's memory is damaged: its checksum does not fit")


class Span(NamedTuple):
    """Numbers in the slot and the address that they are copied to."""

    start: int
    bytes: int
    target: int

    @property
    def end(self) -> int:
        """Where they end."""
        return self.start + self.bytes
