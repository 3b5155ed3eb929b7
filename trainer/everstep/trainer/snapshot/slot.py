"""Slots: sealed memory files of one layout that a rank's state is copied into.

Each begins with two records that are written in turn, each with a checksum of its own: "being
filled" before the first byte of a new state, "sealed", with id and checksums, after the last one.
Whoever finds the memory later can therefore tell what is in it, whenever its rank died.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

import msgspec
import torch
import xxhash

from everstep.snapshots.marker import Marker, SnapshotError
from everstep.trainer.snapshot.layout import RECORD_BYTES, TABLE_START, Layout, Piece, Table

_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # seal, shrink, grow: it can never be cut off under a reader
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole slot says of itself; `sums` are the XXH3-64 of the table's regions.

    `replicated`: every rank's state is the same, so that this one will do for any.
    """

    facts: Marker
    rank: int
    sums: list[int]
    replicated: bool = False


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One state of a slot; the readable record with the highest `turn` counts."""

    turn: int
    table_bytes: int
    table_xxh3: str
    sealed: Sealed | None = None


class Slot:
    """One slot, mapped. Made by `create`, or found again by `open_`."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Take over the descriptor. Raises OSError when it cannot be mapped."""
        self.fd = fd
        self._map = mmap.mmap(fd, size_bytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._turn = 0
        self.record = self._read()
        if self.record:
            self._turn = self.record.turn

    @classmethod
    def create(cls, layout: Layout, *, appended: bytes = b"") -> Slot:
        """Make one with its table and frames put down, and `appended` behind the layout's end.

        All of its memory is there from now on. Raises OSError when there is no room.
        """
        end = layout.table.size_bytes
        fd = os.memfd_create("everstep-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, end + len(appended))
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            made = cls(fd, end + len(appended))
        except BaseException:
            os.close(fd)
            raise
        made._put_down(layout)
        made._map[end : end + len(appended)] = appended
        return made

    @classmethod
    def open_(cls, fd: int) -> Slot:
        """Map one that another process filled; takes over the descriptor. Raises OSError."""
        try:
            return cls(fd, os.fstat(fd).st_size)
        except ValueError as exc:
            raise OSError(errno.EINVAL, f"a slot's memory cannot be mapped: {exc}") from exc

    def adopt(self, layout: Layout, *, appended: bytes) -> bool:
        """Use it for `layout` if it was made for just that; what it holds stays. False if not."""
        end = layout.table.size_bytes
        if self.record is None or self.bytes.numel() != end + len(appended):
            return False
        if self.record.table_xxh3 != layout.fingerprint:
            return False
        self._map[end : end + len(appended)] = appended
        return True

    @property
    def sealed(self) -> Sealed | None:
        """What it holds; None while it is being filled or was never whole."""
        return self.record.sealed if self.record else None

    def table(self) -> Table:
        """Return what is where. Raises SnapshotError when that is damaged."""
        if self.record is None:
            raise SnapshotError("neither record of the slot can be read")
        raw = bytes(self._map[TABLE_START : TABLE_START + self.record.table_bytes])
        if xxhash.xxh3_64_hexdigest(raw) != self.record.table_xxh3:
            raise SnapshotError("the slot's table is damaged: its checksum does not fit")
        try:
            return msgspec.msgpack.decode(raw, type=Table)
        except msgspec.DecodeError as exc:
            raise SnapshotError(f"the slot's table is damaged: {exc}") from exc

    def view(self, piece: Piece) -> torch.Tensor:
        """Return the numbers of a piece as a tensor of the slot's own memory."""
        part = piece.part
        if not part.bytes:
            return torch.empty(part.shape, dtype=part.torch_dtype)
        raw = self.bytes[piece.offset : piece.offset + part.bytes]
        return raw.view(part.torch_dtype).view(part.shape)

    def begin(self) -> None:
        """Say that what it held is gone; call it before anything in it is changed."""
        self._write(None)

    def seal(self, sealed: Sealed) -> None:
        """Say that it is whole. Raises SnapshotError when `sealed` is too long to be put down."""
        self._write(sealed)

    def checksum(self, start: int, size_bytes: int) -> int:
        """Return the XXH3-64 of a range, as it is now; the interpreter's lock is released."""
        return int(xxhash.xxh3_64_intdigest(self.range(start, size_bytes)))

    def range(self, start: int, size_bytes: int) -> memoryview:
        """Return some of its bytes."""
        return self.bytes[start : start + size_bytes].numpy().data

    def warm(self) -> None:
        """Map every page for writing, so that the first copy is as fast as the others."""
        # Not mmap.madvise: it holds the interpreter's lock for as long as that takes.
        _libc.madvise(
            ctypes.c_void_p(self.bytes.data_ptr()),
            ctypes.c_size_t(self.bytes.numel()),
            _MADV_POPULATE_WRITE,
        )

    def close(self) -> None:
        """Give up the descriptor; the mapping goes with the last tensor that shows it."""
        os.close(self.fd)

    def _put_down(self, layout: Layout) -> None:
        for offset, raw in (*layout.table.frames(), (TABLE_START, layout.encoded)):
            self._map[offset : offset + len(raw)] = raw
        self.record = Record(turn=0, table_bytes=len(layout.encoded), table_xxh3=layout.fingerprint)
        self._write(None)

    def _write(self, sealed: Sealed | None) -> None:
        assert self.record is not None, "only a slot that was laid out is written"
        self._turn += 1
        record = msgspec.structs.replace(self.record, turn=self._turn, sealed=sealed)
        body = msgspec.msgpack.encode(record)
        raw = len(body).to_bytes(4, "little") + xxhash.xxh3_64_digest(body) + body
        if len(raw) > RECORD_BYTES:
            raise SnapshotError(
                f"its record needs {len(raw)} bytes, there is room for {RECORD_BYTES}: too many "
                "skipped windows?"
            )
        start = (self._turn % 2) * RECORD_BYTES
        self._map[start : start + len(raw)] = raw
        self.record = record

    def _read(self) -> Record | None:
        found = [self._read_one(start) for start in (0, RECORD_BYTES)]
        return max((r for r in found if r), key=lambda r: r.turn, default=None)

    def _read_one(self, start: int) -> Record | None:
        length = int.from_bytes(self._map[start : start + 4], "little")
        if not 0 < length <= RECORD_BYTES - 12:
            return None
        body = self._map[start + 12 : start + 12 + length]
        if xxhash.xxh3_64_digest(body) != self._map[start + 4 : start + 12]:
            return None
        try:
            return msgspec.msgpack.decode(body, type=Record)
        except msgspec.DecodeError:
            return None
