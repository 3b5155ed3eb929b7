"""The edge between DCP and the disk: every byte that goes out is hashed on its way."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from everstep.snapshots.marker import FileSum

if TYPE_CHECKING:
    import io
    import os
    from collections.abc import Generator


class HashedFiles(FileSystem):
    """DCP's local files, remembering size and checksum of what was handed to the kernel.

    Taken from memory, not read back: what the disk or the page cache later makes of it shows.
    """

    def __init__(self) -> None:
        self.written: dict[str, FileSum] = {}
        self.fault: OSError | None = None
        """The first error of the disk: torch's archive writer hides it behind one of its own."""

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open one file; a name that exists already is an error, not something to overwrite."""
        if mode != "wb":
            with super().create_stream(path, mode) as plain:
                yield plain
            return
        name = Path(path).name
        with self.open(Path(path)) as raw:
            stream = _Hashing(raw)
            try:
                yield cast("io.IOBase", stream)
            finally:
                self.fault = self.fault or stream.fault
            self.written[name] = FileSum(stream.size, stream.digest.hexdigest())

    def open(self, path: Path) -> BinaryIO:
        """Open the real file."""
        return path.open("xb")

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename, and carry the checksum along."""
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _Hashing:
    """A write-only stream that counts and hashes."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.digest = xxhash.xxh3_64()
        self.size = 0
        self.closed = False
        self.fault: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        try:
            return self._raw.write(data)
        except OSError as exc:
            self.fault = exc
            raise

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        # DCP asks for it to fsync, which must not leave anything in our buffer.
        self._raw.flush()
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()
        self.closed = True


def writer(folder: Path, files: HashedFiles) -> FileSystemWriter:
    """Return DCP's writer for a folder that goes through `files`."""
    made = FileSystemWriter(folder, sync_files=True, overwrite=False)
    made.fs = files
    return made
