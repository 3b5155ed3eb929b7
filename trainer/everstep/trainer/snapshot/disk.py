"""Tier c: snapshots in a folder, in DCP's format, read in one pass that checks as it goes.

Files are read, not mapped: a file that is cut short, or a disk that fails, under a mapping would
end the process with a signal; here it is an error like any other and the next snapshot is tried.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from everstep.snapshots import marker as markers
from everstep.snapshots.marker import SnapshotError
from everstep.trainer.snapshot.frame import frame
from everstep.trainer.snapshot.layout import Part
from everstep.trainer.snapshot.source import (
    Request,
    Source,
    check_complete,
    copy_overlap,
    overlap,
    takes_whole,
    together,
)
from everstep.trainer.snapshot.state import OWN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

    from everstep.snapshots.marker import FileSum
    from everstep.wire.ids import SnapshotId

_METADATA = ".metadata"
_CHUNK_BYTES = 8 * 1024 * 1024
_AHEAD = 4


class Disk:
    """The snapshots folder of a run.

    Each rank checks the files that it reads, and every `world_size`-th of the others, so that
    together they check all.
    """

    name = "disk"

    def __init__(self, folder: Path, *, rank: int, world_size: int) -> None:
        self._folder = folder
        self._rank, self._world_size = rank, world_size

    def open(self, id_: SnapshotId) -> Source:
        """Return the snapshot. Raises SnapshotError when it is not there or not whole."""
        folder = self._folder / str(id_)
        return FolderSource(folder, rank=self._rank, world_size=self._world_size)


class Stored(NamedTuple):
    """One box and the archive that it lies in."""

    part: Part
    file: str
    offset: int
    bytes: int

    @property
    def numbers(self) -> int:
        """Where in the file its numbers begin."""
        return self.offset + len(frame(self.part.torch_dtype, self.part.shape).head)


class Wanted(NamedTuple):
    """A box of a file and who wants numbers of it."""

    stored: Stored
    request: Request


class FolderSource:
    """A snapshot's folder (`Source`)."""

    def __init__(self, folder: Path, *, rank: int = 0, world_size: int = 1) -> None:
        """Raise SnapshotError when there is no marker or `.metadata` is not as it says."""
        self.marker = markers.read(folder)
        if _METADATA not in self.marker.files:
            raise SnapshotError(f"{folder} has no {_METADATA}")
        self._files = {
            name: _File(folder / name, expected) for name, expected in self.marker.files.items()
        }
        # A pickle: nothing of it may be looked at before its checksum fits.
        self._files[_METADATA].read(())
        self._stored = self._boxes(FileSystemReader(folder).read_metadata(), folder)
        self._checked = set(sorted(self._files)[rank::world_size])

    @property
    def parts(self) -> Mapping[str, Sequence[Part]]:
        """The boxes by name."""
        return {name: [one.part for one in boxes] for name, boxes in self._stored.items()}

    @property
    def replicated(self) -> bool:
        """Whether no rank has anything of its own."""
        return all(
            not name.startswith(OWN) and all(one.part.shape == one.part.size for one in boxes)
            for name, boxes in self._stored.items()
        )

    def peek(self, name: str) -> torch.Tensor:
        """Read a tensor that is there in one piece."""
        stored = self._stored[name][0]
        self._checked.add(stored.file)
        return self._files[stored.file].peek(stored)

    def load(self, requests: Sequence[Request]) -> None:
        """Read what is wanted, and check it, file by file."""
        check_complete(self, requests)
        wanted: dict[str, list[Wanted]] = defaultdict(list)
        for request in requests:
            for stored in self._stored[request.name]:
                if overlap(stored.part, request):
                    wanted[stored.file].append(Wanted(stored, request))
        names = sorted((wanted.keys() | self._checked) - {_METADATA})
        together(partial(self._files[name].read, wanted[name]) for name in names)

    def _boxes(self, metadata: Metadata, folder: Path) -> dict[str, list[Stored]]:
        found: dict[str, list[Stored]] = defaultdict(list)
        for index, place in metadata.storage_data.items():
            entry = metadata.state_dict_metadata[index.fqn]
            if (
                not isinstance(entry, TensorStorageMetadata)
                or place.relative_path not in self._files
            ):
                raise SnapshotError(f"{folder}: {index.fqn} is stored in a way not known here")
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            shape = next(tuple(c.sizes) for c in entry.chunks if c.offsets == index.offset)
            part = Part(index.fqn, dtype, shape, tuple(entry.size), tuple(index.offset))
            found[index.fqn].append(Stored(part, place.relative_path, place.offset, place.length))
        return dict(found)


class _File:
    """One file of a snapshot and what the marker says of it."""

    def __init__(self, path: Path, expected: FileSum) -> None:
        self._path = path
        self._expected = expected

    def peek(self, stored: Stored) -> torch.Tensor:
        """Return the numbers of one box. Raises SnapshotError when they cannot be read."""
        with self._open() as stream:
            if not self._is_known(stream.fileno(), stored):
                self.read(())  # an archive is not opened before its checksum fits
            return self._archive(stream.fileno(), stored)

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Read all of it, once: numbers go where they are wanted, everything is checked.

        Raises SnapshotError when it is not as the marker says.
        """
        with self._open() as stream:
            fd = stream.fileno()
            size = os.fstat(fd).st_size
            if size != self._expected.bytes:
                raise SnapshotError(
                    f"{self._path} has {size} bytes, {self._expected.bytes} were written"
                )
            known = [one for one in wanted if self._is_known(fd, one.stored)]
            spans = [_Span.of(one) for one in sorted(known, key=lambda one: one.stored.offset)]
            if self._pass(fd, size, spans) != self._expected.xxh3:
                raise SnapshotError(f"{self._path} is damaged: its checksum does not fit")
            for span in spans:
                span.hand_over()
            for one in (w for w in wanted if w not in known):
                copy_overlap(one.stored.part, self._archive(fd, one.stored), one.request)

    def _pass(self, fd: int, size: int, spans: Sequence[_Span]) -> str:
        """Read everything in order, each chunk hashed by another thread while the next is read."""
        digest = xxhash.xxh3_64()
        running: deque[Future[None]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="everstep-check") as hasher:
            for offset, chunk in _chunks(size, spans):
                self._read_at(fd, chunk, offset)
                running.append(hasher.submit(digest.update, chunk))
                if len(running) > _AHEAD:
                    running.popleft().result()
        return str(digest.hexdigest())

    def _is_known(self, fd: int, stored: Stored) -> bool:
        """Say whether numbers lie where this torch would have put them."""
        around = frame(stored.part.torch_dtype, stored.part.shape)
        if stored.bytes != around.bytes:
            return False
        head = bytearray(len(around.head))
        self._read_at(fd, memoryview(head), stored.offset)
        return head == around.head

    def _archive(self, fd: int, stored: Stored) -> torch.Tensor:
        if self._is_known(fd, stored):
            numbers = torch.empty(stored.part.shape, dtype=stored.part.torch_dtype)
            self._read_at(fd, _raw(numbers), stored.numbers)
            return numbers
        archive = bytearray(stored.bytes)
        self._read_at(fd, memoryview(archive), stored.offset)
        found: torch.Tensor = torch.load(io.BytesIO(archive), weights_only=True)
        return found

    def _open(self) -> io.FileIO:
        try:
            return io.FileIO(self._path)
        except OSError as exc:
            raise SnapshotError(f"{self._path} cannot be read: {exc.strerror}") from exc

    def _read_at(self, fd: int, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(fd, [target[done:]], offset + done)
            except OSError as exc:
                raise SnapshotError(f"{self._path} cannot be read: {exc.strerror}") from exc
            if count == 0:
                raise SnapshotError(f"{self._path} ends at byte {offset + done}")
            done += count


class _Span:
    """The numbers of one box: where they are in the file, and the memory they are read into."""

    def __init__(self, wanted: Wanted, *, direct: bool) -> None:
        part = wanted.stored.part
        self._wanted = wanted
        self._numbers = (
            wanted.request.target if direct else torch.empty(part.shape, dtype=part.torch_dtype)
        )
        self._direct = direct
        self.start = wanted.stored.numbers
        self.memory = _raw(self._numbers)

    @classmethod
    def of(cls, wanted: Wanted) -> _Span:
        """Read straight into the target where it takes the whole box as it is."""
        return cls(wanted, direct=takes_whole(wanted.stored.part, wanted.request))

    def hand_over(self) -> None:
        """Copy to the target what was not read into it."""
        if not self._direct:
            copy_overlap(self._wanted.stored.part, self._numbers, self._wanted.request)


def _chunks(size: int, spans: Sequence[_Span]) -> Iterator[tuple[int, memoryview]]:
    """Yield where to read what into, from the first byte to the last."""
    at = 0
    for span in spans:
        yield from _pieces(at, memoryview(bytearray(span.start - at)))
        yield from _pieces(span.start, span.memory)
        at = span.start + len(span.memory)
    while at < size:
        # What nobody wants is read in pieces, to be checked and forgotten.
        chunk = memoryview(bytearray(min(_CHUNK_BYTES, size - at)))
        yield at, chunk
        at += len(chunk)


def _pieces(offset: int, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
    for start in range(0, len(memory), _CHUNK_BYTES):
        yield offset + start, memory[start : start + _CHUNK_BYTES]


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
