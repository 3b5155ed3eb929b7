"""What torch puts around a tensor's numbers in a file of DCP's: the same for the same shape.

A tensor in such a file is a `torch.save` archive. With checksums inside the archive off, all of it
but the numbers depends on type and shape alone, so it is made once and later only the numbers
change. Our own checksum covers the whole file.
"""

from __future__ import annotations

import functools
import io
import threading
from typing import NamedTuple

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from everstep.snapshots.marker import SnapshotError

_NUMBERS = 64 * 1024
"""What is handed over in one piece of more than this is numbers, never frame."""

_crc32_lock = threading.Lock()


class Frame(NamedTuple):
    """The archive of a tensor: `head`, its numbers in C order, `tail`."""

    head: bytes
    numbers_bytes: int
    tail: bytes

    @property
    def bytes(self) -> int:
        """Size of the archive."""
        return len(self.head) + self.numbers_bytes + len(self.tail)


@functools.lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """Return the frame that `torch.load` accepts for any numbers of this type and shape.

    Raises SnapshotError when this torch writes its archives in a way not known here.
    """
    numbers = torch.empty(shape, dtype=dtype)
    sink = _Sink()
    with _crc32_lock:
        before = get_crc32_options()
        set_crc32_options(False)
        try:
            torch.save(numbers, sink)  # type: ignore[arg-type]  # all that it asks for is `write`
        finally:
            set_crc32_options(before)
    size = numbers.numel() * numbers.element_size()
    head, tail = sink.around(size)
    made = Frame(head, size, tail)
    if made.bytes != sink.size:
        raise SnapshotError(f"torch {torch.__version__} writes archives in an unknown way")
    return made


class _Sink:
    """Keeps what is written but for numbers, which are only counted: they may be large."""

    def __init__(self) -> None:
        self.size = 0
        self._before: list[bytes] = []
        self._after: list[bytes] = []
        self._begin: int | None = None

    def write(self, data: bytes | memoryview) -> int:
        length = memoryview(data).nbytes
        if length > _NUMBERS:
            self._begin = self.size if self._begin is None else self._begin
        else:
            (self._before if self._begin is None else self._after).append(bytes(data))
        self.size += length
        return length

    def flush(self) -> None:
        pass

    def around(self, numbers_bytes: int) -> tuple[bytes, bytes]:
        before, after = b"".join(self._before), b"".join(self._after)
        if self._begin is not None:
            return before, after
        # Small enough to have been kept whole: the archive's own index says where they begin.
        reader = torch._C.PyTorchFileReader(io.BytesIO(before))  # noqa: SLF001  torch has no other
        begin: int = reader.get_record_offset("data/0") if numbers_bytes else len(before)  # type: ignore[attr-defined]  # not in its stubs
        return before[:begin], before[begin + numbers_bytes :]
