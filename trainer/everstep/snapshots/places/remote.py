"""Snapshots in an object store, or in whatever else fsspec can reach."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from everstep.snapshots import marker
from everstep.snapshots.faults import Faults, Point
from everstep.snapshots.places.durable import Hashing
from everstep.snapshots.places.lock import TakenError
from everstep.snapshots.places.place import LATEST, OWNER, PARTIAL, WRITING
from everstep.snapshots.sealed import SnapshotError

if TYPE_CHECKING:
    from everstep.snapshots.marker import FileSum
    from everstep.snapshots.places.place import Space

_CHUNK_BYTES = 16 * 1024 * 1024


def open_remote(where: str, faults: Faults) -> Remote:
    """Return the place behind a URL. Raises SnapshotError with what is missing."""
    try:
        import fsspec
    except ImportError as exc:
        raise SnapshotError(
            f"{where}: object stores need fsspec: pip install 'everstep[trainer]'"
        ) from exc
    try:
        files, root = fsspec.core.url_to_fs(where, use_listings_cache=False)
    except ImportError as exc:
        raise SnapshotError(f"{where}: {exc}") from exc
    except (ValueError, TypeError) as exc:
        raise SnapshotError(f"{where} is no place for snapshots: {exc}") from exc
    return Remote(where, files, root, faults)


class Remote:
    """A place (`everstep.snapshots.places.Place`) in a store whose files appear whole.

    There are no locks and no renames here: what another job left under a new snapshot's name is
    overwritten, part by part, after its marker was deleted.
    """

    def __init__(self, where: str, files: Any, root: str, faults: Faults) -> None:
        self.where = where
        self._files = files
        self._root = root.rstrip("/")
        self._faults = faults

    def names(self) -> list[str]:
        """Return the names of all folders."""
        return sorted(_name(e) for e in self._listed(self._root) if e["type"] == "directory")

    def files(self, id_: str) -> list[str]:
        """Return the names of one snapshot's files."""
        return sorted(_name(e) for e in self._listed(self._path(id_)) if e["type"] == "file")

    def size(self, id_: str, name: str) -> int:
        """Return a file's size."""
        return int(self._files.size(self._path(id_, name)))

    def read(self, id_: str, name: str) -> bytes:
        """Return a small file."""
        return cast("bytes", self._files.cat_file(self._path(id_, name)))

    def open(self, id_: str, name: str) -> BinaryIO:
        """Return a stream of a large file."""
        return cast("BinaryIO", self._files.open(self._path(id_, name), "rb"))

    def claim(self, id_: str, job: str, rank: int) -> None:  # noqa: ARG002  no locks in a store
        """Take the marker of an earlier job's snapshot away; parts are overwritten."""
        try:
            found = marker.unseal(self.read(id_, marker.NAME))
        except FileNotFoundError:
            found = None
        except SnapshotError:
            self.remove_file(id_, marker.NAME)
            found = None
        if found is not None and found.job == job:
            raise TakenError(f"{self.where}/{id_} exists already and is complete")
        if found is not None:
            self.remove_file(id_, marker.NAME)
        self._files.makedirs(self._path(id_), exist_ok=True)

    def write(self, id_: str, name: str, data: memoryview) -> FileSum:
        """Write a large file; it appears when all of it is there."""
        self._faults.at(Point.BEFORE_OPEN)
        with Hashing(data) as hashing, self._files.open(self._path(id_, name), "wb") as stream:
            half = len(data) // 2
            _pour(stream, data[:half])
            self._faults.at(Point.MID_FILE)
            _pour(stream, data[half:])
            self._faults.at(Point.BEFORE_FSYNC)
        self._faults.at(Point.AFTER_FSYNC)
        if self.size(id_, name) != len(data):
            raise SnapshotError(f"{self.where}/{id_}/{name} is not all there after its upload")
        return hashing.sum()

    def put(self, id_: str, name: str, data: bytes, *, new: bool = False) -> None:
        """Put down a small file at once; `new` leaves a moment open between two writers."""
        path = self._path(id_, name)
        if new and self._files.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if name == marker.NAME:
            self._faults.at(Point.MID_MARKER)
        self._files.pipe_file(path, data)

    def remove_file(self, id_: str, name: str) -> None:
        """Delete one file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(id_, name))

    def remove(self, id_: str) -> None:
        """Delete a snapshot, its marker first."""
        self.remove_file(id_, marker.NAME)
        self._faults.at(Point.MID_RETENTION)
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(id_), recursive=True)

    def latest(self) -> str | None:
        """Return the id that the small file `latest` names."""
        with contextlib.suppress(FileNotFoundError):
            text: bytes = self._files.cat_file(f"{self._root}/{LATEST}")
            return text.decode(errors="replace").strip()
        return None

    def point_latest(self, id_: str) -> None:
        """Let `latest` name this snapshot."""
        self._files.pipe_file(f"{self._root}/{LATEST}", f"{id_}\n".encode())

    def space(self) -> Space | None:
        """Return None: a store is never full."""
        return None

    def _path(self, id_: str, name: str = "") -> str:
        return f"{self._root}/{id_}/{name}" if name else f"{self._root}/{id_}"

    def _listed(self, path: str) -> list[dict[str, Any]]:
        # What was listed before is of no use: another node's part may have come.
        self._files.invalidate_cache()
        try:
            found = self._files.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [e for e in found if not _is_own(_name(e)) and e["name"].rstrip("/") != path]


def _pour(stream: Any, data: memoryview) -> None:
    for at in range(0, len(data), _CHUNK_BYTES):
        stream.write(data[at : at + _CHUNK_BYTES])


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _is_own(name: str) -> bool:
    return name.startswith((OWNER, WRITING)) or name.endswith(PARTIAL)
