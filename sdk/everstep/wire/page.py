"""The progress page: what one rank is doing, in a sealed memory file that the agent reads.

The rank makes a memfd, maps it, seals it and passes the descriptor over the agent's socket. From
then on writing a record is a memory copy: no system call, no lock, nothing that can block a step.

Layout, little-endian:

    0     header, 128 bytes, written once: magic, version, sizes, job, place, pid, checksum
    128   state, two slots of 64 bytes, written in turn: phase, step, time of the last change;
          behind it, with a checksum of its own, what was waited for data and snapshots so far
    256   ring of records, 128 bytes each: one finished step each

Each slot and record carries its own number and a CRC-32 over itself. The writer fills the slot
that readers are not looking at, so a reader takes the newest slot whose checksum fits: a torn
write is never seen as data, also when the writer is killed in the middle of one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import zlib
from typing import TYPE_CHECKING, NamedTuple

from everstep.wire.errors import PageRefusedError
from everstep.wire.messages import PHASES, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

_MAGIC = b"EVSP"
_VERSION = 1
# magic, version, pad, ring, size, job, generation, rank, world size, local rank, pid
_HEADER = struct.Struct("<4sHHII48sIIIII")
_STATE = struct.Struct("<QqQQB")  # count, step, changed_mono_ns, records, phase
_WAITS = struct.Struct("<dd")  # data_s, snapshot_s; a writer of before leaves zeros, checksum too
_RECORD = struct.Struct("<QqdQddddddddqd")
_CRC = struct.Struct("<I")
_HEADER_BYTES, _SLOT_BYTES, _RECORD_BYTES = 128, 64, 128
_STATE_AT, _RING_AT = 128, 256
_STATE_BYTES = _STATE.size + _CRC.size + _WAITS.size + _CRC.size
RING_RECORDS = 256
PAGE_BYTES = _RING_AT + RING_RECORDS * _RECORD_BYTES

_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE
_NEEDED_SEALS = _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034


class Place(NamedTuple):
    """Which rank of which generation of which job a page belongs to."""

    job: str
    generation: int
    rank: int
    world_size: int
    local_rank: int
    pid: int


class State(NamedTuple):
    """Where the rank is now; `changed_mono_ns` is when phase or step last changed.

    `data_s` and `snapshot_s` are sums over all records, None from a writer that does not sum.
    """

    phase: Phase
    step: int
    changed_mono_ns: int
    records: int
    data_s: float | None = None
    snapshot_s: float | None = None


class StepRecord(NamedTuple):
    """One finished optimizer step. Times in seconds, `nan` for what was not measured."""

    step: int
    wall_at_s: float
    mono_ns: int
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    update_s: float
    snapshot_s: float
    loss: float
    grad_norm: float
    tokens: int
    lr: float


class PageWriter:
    """The rank's side. Not thread-safe: only the training thread writes.

    The descriptor stays open until `close`, so that it can be passed again after the agent
    restarted.
    """

    def __init__(self, place: Place, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Make and seal the memory file. Raises OSError where the kernel has no sealed memfd."""
        job = place.job.encode()
        if len(job) > 48:
            raise ValueError(f"a job id has at most 48 bytes, not {len(job)}: {place.job!r}")
        self._clock_ns = clock_ns
        self.fd = os.memfd_create("everstep-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, PAGE_BYTES)
            self._map = mmap.mmap(self.fd, PAGE_BYTES)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(self.fd)
            raise
        header = _HEADER.pack(_MAGIC, _VERSION, 0, RING_RECORDS, PAGE_BYTES, job, *place[1:6])
        self._map[: _HEADER.size] = header
        _CRC.pack_into(self._map, _HEADER_BYTES - 4, zlib.crc32(header))
        self._count = 0
        self._records = 0
        self._phase: Phase = "start"
        self._step = 0
        self._data_s = self._snapshot_s = 0.0
        self._write_state()

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Say which phase the rank is in now."""
        self._phase = phase
        if step is not None:
            self._step = step
        self._write_state()

    def finished(self, record: StepRecord) -> None:
        """Put down one finished step and make it the current one."""
        number = self._records + 1
        at = _RING_AT + (self._records % RING_RECORDS) * _RECORD_BYTES
        body = _RECORD.pack(number, *record)
        self._map[at : at + _RECORD.size + 4] = body + _CRC.pack(zlib.crc32(body))
        self._records = number
        self._step = record.step
        if record.data_s > 0:  # not for nan
            self._data_s += record.data_s
        if record.snapshot_s > 0:
            self._snapshot_s += record.snapshot_s
        self._write_state()

    def _write_state(self) -> None:
        self._count += 1
        body = _STATE.pack(
            self._count, self._step, self._clock_ns(), self._records, PHASES.index(self._phase)
        )
        crc = zlib.crc32(body)
        waits = _WAITS.pack(self._data_s, self._snapshot_s)
        at = _STATE_AT + (self._count & 1) * _SLOT_BYTES
        self._map[at : at + _STATE_BYTES] = (
            body + _CRC.pack(crc) + waits + _CRC.pack(zlib.crc32(waits, crc))
        )

    def close(self) -> None:
        """Unmap and close; the agent's own mapping stays."""
        self._map.close()
        os.close(self.fd)


class PageReader:
    """The agent's side: maps the page read-only after checking that nobody can shrink it."""

    def __init__(self, fd: int) -> None:
        """Map the page; the caller may close `fd` then. Raises PageRefusedError with the reason.

        A page costs its reader one descriptor until `close`: Python's mmap keeps a copy.
        """
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
        except OSError as exc:
            raise PageRefusedError(f"not a memory file that can be sealed: {exc}") from exc
        if seals & _NEEDED_SEALS != _NEEDED_SEALS:
            raise PageRefusedError(
                f"seals are {seals:#x}, need shrink, grow and future-write ({_NEEDED_SEALS:#x}): "
                "its owner could truncate it under the reader"
            )
        size = os.fstat(fd).st_size
        if size != PAGE_BYTES:
            raise PageRefusedError(
                f"size is {size} bytes, a page of version {_VERSION} has {PAGE_BYTES}"
            )
        self._map = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
        try:
            self.place = self._read_place()
        except PageRefusedError:
            self._map.close()
            raise

    def _read_place(self) -> Place:
        header = bytes(self._map[: _HEADER.size])
        magic, version, _, ring, size, job, *place = _HEADER.unpack(header)
        (crc,) = _CRC.unpack_from(self._map, _HEADER_BYTES - 4)
        if magic != _MAGIC or crc != zlib.crc32(header):
            raise PageRefusedError("header is not that of a progress page")
        if version != _VERSION or ring != RING_RECORDS or size != PAGE_BYTES:
            raise PageRefusedError(f"page version {version} is not {_VERSION}")
        return Place(job.rstrip(b"\0").decode(errors="replace"), *place)

    def state(self) -> State | None:
        """Return the newest whole state, None only when both slots are torn."""
        newest: tuple[int, ...] | None = None
        behind = b""
        for slot in (0, 1):
            at = _STATE_AT + slot * _SLOT_BYTES
            raw = bytes(self._map[at : at + _STATE_BYTES])
            if _CRC.unpack_from(raw, _STATE.size)[0] != zlib.crc32(raw[: _STATE.size]):
                continue
            values = _STATE.unpack_from(raw)
            if values[0] and (newest is None or values[0] > newest[0]):
                newest, behind = values, raw[_STATE.size :]
        if newest is None or newest[4] >= len(PHASES):
            return None
        return State(PHASES[newest[4]], newest[1], newest[2], newest[3], *_waits(behind))

    def records(self, after: int) -> list[tuple[int, StepRecord]]:
        """Return the whole records with a number above `after`, oldest first.

        Records that were overwritten before they were read are missing, never wrong.
        """
        state = self.state()
        if state is None:
            return []
        first = max(after + 1, state.records - RING_RECORDS + 1, 1)
        out: list[tuple[int, StepRecord]] = []
        for number in range(first, state.records + 1):
            at = _RING_AT + ((number - 1) % RING_RECORDS) * _RECORD_BYTES
            raw = bytes(self._map[at : at + _RECORD.size + 4])
            if _CRC.unpack_from(raw, _RECORD.size)[0] != zlib.crc32(raw[: _RECORD.size]):
                continue
            got, *fields = _RECORD.unpack_from(raw)
            if got == number:
                out.append((number, StepRecord(*fields)))
        return out

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()


def _waits(behind: bytes) -> tuple[float | None, float | None]:
    """Return the sums behind a state; they continue the state's checksum, so they belong to it."""
    (crc,) = _CRC.unpack_from(behind)
    waits = behind[_CRC.size : _CRC.size + _WAITS.size]
    if _CRC.unpack_from(behind, _CRC.size + _WAITS.size)[0] != zlib.crc32(waits, crc):
        return None, None
    data_s, snapshot_s = _WAITS.unpack(waits)
    return data_s, snapshot_s
