"""The marker of a snapshot: written last, it lists every file with its size and checksum.

A folder without a marker is an unfinished save. A folder with one is good only when everything in
it is as the marker says, down to the last bit; the marker's own bit flips show too.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import xxhash

from everstep.snapshots import sealed
from everstep.snapshots.sealed import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["FORMAT", "NAME", "FileSum", "Marker", "Part", "SnapshotError"]

NAME = "COMMIT.json"
FORMAT = 2
"""Format 1 had no `parts`; it is still read."""

_KEY = "marker"
_CHUNK_BYTES = 4 * 1024 * 1024


class FileSum(msgspec.Struct, frozen=True):
    """Size and XXH3-64 of one file, taken from the bytes as they were written."""

    bytes: int
    xxh3: str


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's file: what was written, how long that took until durable, when and where."""

    rank: int
    file: str
    bytes: int
    xxh3: str
    write_s: float
    written_at_s: float = 0.0
    host: str = ""


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What `COMMIT.json` says. `samples` is the next global sample index."""

    id: str
    step: int
    generation: int
    job: str
    world_size: int
    seed: int
    samples: int
    files: dict[str, FileSum] = {}
    committed_at_s: float = 0.0
    skip_windows: list[tuple[int, int]] = []
    final: bool = False
    format: int = FORMAT
    parts: list[Part] = []

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(f.bytes for f in self.files.values())


def seal(marker: Marker) -> bytes:
    """Return the marker file's bytes."""
    return sealed.seal(_KEY, marker)


def unseal(data: bytes) -> Marker:
    """Return the marker. Raises SnapshotError when it is cut short, damaged or of another kind."""
    marker = sealed.unseal(data, _KEY, Marker, name=NAME)
    if not 1 <= marker.format <= FORMAT:
        raise SnapshotError(
            f"{NAME} has format {marker.format}, this version of everstep reads 1 to {FORMAT}: "
            "use the version that wrote it, or a newer one"
        )
    return marker


def read(folder: Path) -> Marker:
    """Return a snapshot's marker. Raises SnapshotError when there is none that can be read."""
    try:
        return unseal((folder / NAME).read_bytes())
    except FileNotFoundError as exc:
        if folder.is_dir():
            raise SnapshotError(f"{folder.name} was never finished: it has no {NAME}") from exc
        raise SnapshotError(f"{folder} does not exist") from exc
    except OSError as exc:
        raise SnapshotError(f"{folder / NAME} cannot be read: {exc.strerror}") from exc


def verify(folder: Path) -> Marker:
    """Read every byte of a snapshot and return its marker.

    Raises SnapshotError with the first file that is missing, of another size or damaged.
    """
    marker = read(folder)
    for name, expected in sorted(marker.files.items()):
        _verify_file(folder / name, expected)
    return marker


def completed(
    facts: Marker, files: dict[str, FileSum], *, at_s: float, parts: Sequence[Part] = ()
) -> Marker:
    """Return `facts` with what is known only after everything else was written."""
    return msgspec.structs.replace(
        facts, files=files, committed_at_s=at_s, parts=list(parts), format=FORMAT
    )


def write(folder: Path, marker: Marker) -> None:
    """Put the marker down, durably. Raises OSError."""
    partial = folder / f"{NAME}.partial"
    with partial.open("wb") as stream:
        stream.write(seal(marker))
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(folder / NAME)
    sync_folder(folder)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's list of names durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _verify_file(path: Path, expected: FileSum) -> None:
    digest = xxhash.xxh3_64()
    size = 0
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except OSError as exc:
        raise SnapshotError(f"{path} cannot be read: {exc.strerror}") from exc
    if size != expected.bytes:
        raise SnapshotError(f"{path} has {size} bytes, {expected.bytes} were written")
    if digest.hexdigest() != expected.xxh3:
        raise SnapshotError(f"{path} is damaged: its checksum does not fit")
