"""Snapshots in a folder of a local or shared file system."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import xxhash

from everstep.snapshots import marker
from everstep.snapshots.faults import Faults, Point
from everstep.snapshots.places import durable, lock
from everstep.snapshots.places.lock import TakenError
from everstep.snapshots.places.place import LATEST, OWNER, PARTIAL, WRITING, Space, aside_name
from everstep.snapshots.sealed import SnapshotError

if TYPE_CHECKING:
    from everstep.snapshots.marker import FileSum

_TRIES = 10
_NO_FAULTS = Faults()


class Folder:
    """A place (`everstep.snapshots.places.Place`) that is a folder; it is made when needed."""

    def __init__(self, where: str | Path, faults: Faults = _NO_FAULTS) -> None:
        self.path = Path(where)
        self.where = str(where)
        self._faults = faults

    def names(self) -> list[str]:
        """Return the names of all folders."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as found:
            return sorted(e.name for e in found if e.is_dir(follow_symlinks=False))
        return []

    def files(self, id_: str) -> list[str]:
        """Return the names of one snapshot's files, without our own marks."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(p.name for p in (self.path / id_).iterdir() if not _is_own(p.name))
        return []

    def size(self, id_: str, name: str) -> int:
        """Return a file's size."""
        # Opened, not only looked up: that is when a shared file system asks its server again.
        with self.open(id_, name) as stream:
            return os.fstat(stream.fileno()).st_size

    def read(self, id_: str, name: str) -> bytes:
        """Return a small file."""
        return (self.path / id_ / name).read_bytes()

    def open(self, id_: str, name: str) -> BinaryIO:
        """Return a stream of a large file."""
        return (self.path / id_ / name).open("rb")

    def claim(self, id_: str, job: str, rank: int) -> None:
        """Make the folder of a snapshot, and put aside what another job left in its place."""
        folder, mine = self.path / id_, OWNER + xxhash.xxh3_64_hexdigest(job.encode())
        for _ in range(_TRIES):
            self._make(folder)
            try:
                inode = folder.stat().st_ino
                names = {p.name for p in folder.iterdir()}
                if self._is_foreign(folder, names, mine, job):
                    self._put_aside(folder, inode)
                    continue
                if marker.NAME in names:
                    raise TakenError(f"{folder} exists already and is complete")
                (folder / mine).touch()
                lock.take(folder / f"{WRITING}{rank:05d}")
            except FileNotFoundError:
                continue  # another rank has just put it aside
            return
        raise TakenError(f"{folder} is taken by another job again and again: which one is it?")

    def _make(self, folder: Path) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            marker.sync_folder(self.path)

    def _is_foreign(self, folder: Path, names: set[str], mine: str, job: str) -> bool:
        owners = {name for name in names if name.startswith(OWNER)}
        if owners - {mine}:
            return True
        if owners or not names:
            return False
        try:  # of a version that left no owner's name
            return marker.read(folder).job != job
        except SnapshotError:
            return True

    def _put_aside(self, folder: Path, inode: int) -> None:
        # By the number of the very folder that was looked at: of two ranks that both want to put
        # it aside, the later cannot take the new folder of the earlier for the old one.
        try:
            folder.rename(folder.with_name(aside_name(folder.name, str(inode))))
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise

    def write(self, id_: str, name: str, data: memoryview) -> FileSum:
        """Write a large file, replacing an unfinished one of an earlier attempt."""
        path = self.path / id_ / name
        path.unlink(missing_ok=True)
        written = durable.write(path, data, self._faults)
        marker.sync_folder(path.parent)
        return written

    def put(self, id_: str, name: str, data: bytes, *, new: bool = False) -> None:
        """Put down a small file at once."""
        mid = (self._faults, Point.MID_MARKER) if name == marker.NAME else None
        durable.put(self.path / id_ / name, data, new=new, mid=mid)

    def remove_file(self, id_: str, name: str) -> None:
        """Delete one file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / id_ / name).unlink()

    def remove(self, id_: str) -> None:
        """Delete a snapshot, its marker first. Raises OSError when something stays."""
        folder = self.path / id_
        for left in reversed(range(_TRIES)):
            if not folder.is_dir():
                return
            # A writer that was frozen may put its files, or even a marker, down meanwhile.
            try:
                (folder / marker.NAME).unlink(missing_ok=True)
                self._faults.at(Point.MID_RETENTION)
                shutil.rmtree(folder)
            except OSError as exc:
                if exc.errno not in (errno.ENOENT, errno.ENOTEMPTY) or not left:
                    raise

    def latest(self) -> str | None:
        """Return the id that `latest` names: a link, or a file where links cannot be made."""
        link = self.path / LATEST
        with contextlib.suppress(FileNotFoundError):
            return link.readlink().name if link.is_symlink() else link.read_text().strip()
        return None

    def point_latest(self, id_: str) -> None:
        """Let `latest` name this snapshot."""
        partial = self.path / f"{LATEST}.{os.getpid()}{PARTIAL}"
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        try:
            partial.symlink_to(id_, target_is_directory=True)
        except OSError as exc:
            if exc.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            durable.put(self.path / LATEST, f"{id_}\n".encode(), mid=None)
            return
        partial.rename(self.path / LATEST)
        marker.sync_folder(self.path)

    def space(self) -> Space | None:
        """Return the file system's size and what is free of it."""
        there = next((p for p in (self.path, *self.path.parents) if p.exists()), None)
        if there is None:
            return None
        found = os.statvfs(there)
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def _is_own(name: str) -> bool:
    return name.startswith((OWNER, WRITING)) or name.endswith(PARTIAL)
