"""One slot of a rank's memory, as the writer sees it: read-only and of a size that is sealed."""

from __future__ import annotations

import fcntl
import mmap
import os

from everstep.snapshots.sealed import SnapshotError

_SEAL_SHRINK, _SEAL_GROW = 0x2, 0x4
_NEEDED_SEALS = _SEAL_SHRINK | _SEAL_GROW
_F_GET_SEALS = 1034


class Slot:
    """A mapped slot; it stays mapped for as long as somebody holds a view of it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map the memory; the caller may close `fd` then.

        Raises SnapshotError with the reason when it is no memory file whose size is sealed: its
        owner could shrink it under the reader, which would kill that.
        """
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
        except OSError as exc:
            raise SnapshotError(f"not a memory file that can be sealed: {exc.strerror}") from exc
        if seals & _NEEDED_SEALS != _NEEDED_SEALS:
            raise SnapshotError(
                f"its seals are {seals:#x}, need shrink and grow ({_NEEDED_SEALS:#x})"
            )
        size = os.fstat(fd).st_size
        if size != size_bytes or size == 0:
            raise SnapshotError(f"it has {size} bytes, {size_bytes} were announced")
        try:
            self._view = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
        except OSError as exc:
            raise SnapshotError(f"it cannot be mapped: {exc.strerror}") from exc

    def range(self, start: int, size_bytes: int) -> memoryview:
        """Return the bytes of one range. Raises SnapshotError when it does not lie inside."""
        if start < 0 or size_bytes < 0 or start + size_bytes > len(self._view):
            raise SnapshotError(
                f"bytes {start} to {start + size_bytes} are not in a slot of {len(self._view)}"
            )
        return self._view[start : start + size_bytes]
