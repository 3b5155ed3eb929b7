"""Where everything is in a slot: made once for a shape of the state, the same for every save.

    [records][table][file: frames and numbers of what this rank writes][what others write]

The file part is, byte for byte, this rank's file of the snapshot in torch's DCP format. The part
after it holds what this rank needs to go on but another rank puts on disk. The table says what is
where, so that another process can read a slot without knowing the state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import torch
import xxhash

from everstep.trainer.snapshot.frame import frame

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

PAGE = 4096
RECORD_BYTES = 256 * 1024
TABLE_START = 2 * RECORD_BYTES
REGION_BYTES = 64 * 1024 * 1024
"""Small enough to share the work among threads, large enough for few checksums."""
_NUMBERS_ALIGNMENT = 64
"""torch aligns numbers so within an archive; a whole archive therefore begins so, too."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one rank holds of one tensor: a box of `shape` at `origin` in a whole of `size`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: tuple[int, ...]
    origin: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the numbers. Raises ValueError for one that torch has not."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{self.name}: torch has no numbers of type {self.dtype!r}")  # noqa: TRY004  it is the slot's value that is wrong
        return found

    @property
    def bytes(self) -> int:
        """Size of the numbers."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A part and where in the slot its numbers begin."""

    part: Part
    offset: int


class Table(msgspec.Struct, frozen=True, array_like=True):
    """What a slot's table says: the file part's pieces come first, `filed` of them."""

    pieces: tuple[Piece, ...]
    filed: int
    file_start: int
    file_bytes: int
    memory_start: int
    memory_bytes: int

    @property
    def size_bytes(self) -> int:
        """Size of the slot."""
        return _up(self.memory_start + self.memory_bytes, PAGE)

    def regions(self) -> Iterator[tuple[int, int]]:
        """Yield start and size of what has a checksum each: the whole, in parts of a fixed size."""
        end = self.memory_start + self.memory_bytes
        for start in range(self.file_start, end, REGION_BYTES):
            yield start, min(REGION_BYTES, end - start)

    def archive(self, piece: Piece) -> tuple[int, int]:
        """Return offset within the file and size of the archive around a filed piece."""
        around = frame(piece.part.torch_dtype, piece.part.shape)
        return piece.offset - len(around.head) - self.file_start, around.bytes

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yield what stands around the numbers of the file, and where in the slot."""
        for piece in self.pieces[: self.filed]:
            around = frame(piece.part.torch_dtype, piece.part.shape)
            yield piece.offset - len(around.head), around.head
            yield piece.offset + around.numbers_bytes, around.tail


class Layout:
    """A table with its bytes; two slots of equal `fingerprint` are filled alike."""

    def __init__(self, table: Table, encoded: bytes) -> None:
        self.table = table
        self.encoded = encoded
        self.fingerprint = xxhash.xxh3_64_hexdigest(encoded)


def build(parts: Iterable[Part], filed: Collection[str]) -> Layout:
    """Lay out the parts; those whose names are in `filed` make up this rank's file."""
    parts = list(parts)
    ours = [p for p in parts if p.name in filed]
    others = [p for p in parts if p.name not in filed]
    # The table's size moves everything behind it: its offsets are put down as of a start of 0.
    length = len(msgspec.msgpack.encode([Piece(p, 1 << 40) for p in parts]))
    start = at = _up(TABLE_START + length + 128, PAGE)
    pieces = []
    for part in ours:
        around = frame(part.torch_dtype, part.shape)
        pieces.append(Piece(part, at + len(around.head)))
        at = _up(at + around.bytes, _NUMBERS_ALIGNMENT)
    file_bytes = at - start
    memory = at = _up(at, PAGE)
    for part in others:
        pieces.append(Piece(part, at))
        at = _up(at + part.bytes, _NUMBERS_ALIGNMENT)
    table = Table(tuple(pieces), len(ours), start, file_bytes, memory, at - memory)
    return Layout(table, msgspec.msgpack.encode(table))


def _up(value: int, to: int) -> int:
    return -(-value // to) * to
