"""Files on a local or shared file system, written so that they are there after a power cut."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from typing import TYPE_CHECKING, Self

import xxhash

from everstep.snapshots.faults import Faults, Point
from everstep.snapshots.marker import FileSum, sync_folder
from everstep.snapshots.sealed import SnapshotError

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK_BYTES = 16 * 1024 * 1024
_BLOCK_BYTES = 4096
_INLINE_BYTES = 1024 * 1024


def write(path: Path, data: memoryview, faults: Faults) -> FileSum:
    """Write a new file and return once its bytes are on the disk. Its folder is not yet synced.

    The sum is of what lies in `data` while it is written. Raises OSError, FileExistsError among
    them, and SnapshotError when the file was taken away meanwhile.
    """
    faults.at(Point.BEFORE_OPEN)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with Hashing(data) as hashing:
            _fill(fd, data, faults)
            faults.at(Point.BEFORE_FSYNC)
            os.fsync(fd)
            faults.at(Point.AFTER_FSYNC)
        _check_still_there(path, fd)
    finally:
        os.close(fd)
    return hashing.sum()


class Hashing:
    """Hashes memory in a thread of its own, beside what its owner does with it."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._digest = xxhash.xxh3_64()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if len(self._data) > _INLINE_BYTES:
            self._thread = threading.Thread(target=self._hash, name="everstep-hash", daemon=True)
            self._thread.start()
        else:
            self._hash()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.join()

    def _hash(self) -> None:
        for at in range(0, len(self._data), _CHUNK_BYTES):
            self._digest.update(self._data[at : at + _CHUNK_BYTES])

    def sum(self) -> FileSum:
        """Return size and checksum; call it after the `with` block."""
        return FileSum(len(self._data), self._digest.hexdigest())


def _fill(fd: int, data: memoryview, faults: Faults) -> None:
    _reserve(fd, len(data))
    half = (len(data) // 2) // _BLOCK_BYTES * _BLOCK_BYTES or len(data) // 2
    _pour(fd, data, 0, half)
    faults.at(Point.MID_FILE)
    _pour(fd, data, half, len(data))


def _pour(fd: int, data: memoryview, start: int, end: int) -> None:
    """Write a range, past the page cache where the file system can: nobody reads it back soon."""
    at = start
    direct_end = end // _BLOCK_BYTES * _BLOCK_BYTES if start % _BLOCK_BYTES == 0 else start
    if direct_end > start and _direct(fd, on=True):
        try:
            at = _pwrite(fd, data, start, direct_end)
        except OSError as exc:
            # Memory or blocks are aligned otherwise here: the page cache takes anything.
            if exc.errno != errno.EINVAL:
                raise
        finally:
            _direct(fd, on=False)
    _pwrite(fd, data, at, end)


def _pwrite(fd: int, data: memoryview, start: int, end: int) -> int:
    at = start
    while at < end:
        at += os.pwrite(fd, data[at : min(end, at + _CHUNK_BYTES)], at)
    return at


def _direct(fd: int, *, on: bool) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def _reserve(fd: int, size_bytes: int) -> None:
    """Take the space beforehand: what does not fit fails now, and the blocks lie together.

    Not `os.posix_fallocate`: where the file system cannot, that writes to every block instead.
    """
    import ctypes

    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if size_bytes and fallocate(fd, 0, 0, size_bytes):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(number, os.strerror(number))


def _check_still_there(path: Path, fd: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        found, mine = path.stat(), os.fstat(fd)
        if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
            return
    raise SnapshotError(f"{path} was deleted or replaced while it was written")


def put(path: Path, data: bytes, *, new: bool = False, mid: tuple[Faults, Point] | None) -> None:
    """Put a small file down at once and durably, in a folder that exists.

    With `new` it raises FileExistsError when there is one. `mid` is come by half-way.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident():x}.partial")
    try:
        with partial.open("wb") as stream:
            stream.write(data[: len(data) // 2])
            if mid is not None:
                stream.flush()
                mid[0].at(mid[1])
            stream.write(data[len(data) // 2 :])
            stream.flush()
            os.fsync(stream.fileno())
        if new:
            _link(partial, path)
        else:
            partial.rename(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    try:
        sync_folder(path.parent)
    except OSError:
        # Whether it would outlast a power cut is not known, so it must not be there at all.
        path.unlink(missing_ok=True)
        raise


def _link(partial: Path, path: Path) -> None:
    try:
        os.link(partial, path)
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # No second names on this file system. What is left open is a moment between two leads.
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        partial.rename(path)
