"""What a place of snapshots can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

if TYPE_CHECKING:
    from everstep.snapshots.marker import FileSum

LATEST = "latest"
OWNER = ".owner-"
WRITING = ".writing-"
PARTIAL = ".partial"
_ASIDE = ".aside"


class Space(NamedTuple):
    """A file system's size and what of it an ordinary user may still fill, in bytes."""

    total: int
    free: int


class Place(Protocol):
    """One run's snapshots. Everything raises OSError when the disk or the store does.

    What `write` and `put` have returned from is durable. A reader sees a whole small file or
    none.
    """

    where: str

    def names(self) -> list[str]:
        """Return the names of all folders: snapshots, and what else there is; [] where none."""

    def files(self, id_: str) -> list[str]:
        """Return the names of one snapshot's files; [] when it is not there."""

    def size(self, id_: str, name: str) -> int:
        """Return a file's size. Raises FileNotFoundError."""

    def read(self, id_: str, name: str) -> bytes:
        """Return a small file. Raises FileNotFoundError."""

    def open(self, id_: str, name: str) -> BinaryIO:
        """Return a stream of a large file, which can seek."""

    def claim(self, id_: str, job: str, rank: int) -> None:
        """Make room for one part of a snapshot of `job`; what another job left there makes way.

        Any number of ranks may do so at the same time. Raises TakenError when a complete one of
        this very job is there, or another process writes this rank's part.
        """

    def write(self, id_: str, name: str, data: memoryview) -> FileSum:
        """Write a large file, replacing an unfinished one; return the sum of what was written."""

    def put(self, id_: str, name: str, data: bytes, *, new: bool = False) -> None:
        """Put down a small file at once. With `new` it raises FileExistsError if there is one."""

    def remove_file(self, id_: str, name: str) -> None:
        """Delete one file, if it is there."""

    def remove(self, id_: str) -> None:
        """Delete a snapshot, its marker first, so that half of one is never believed."""

    def latest(self) -> str | None:
        """Return the id that `latest` names, None where it does not exist."""

    def point_latest(self, id_: str) -> None:
        """Let `latest` name this snapshot, at once."""

    def space(self) -> Space | None:
        """Return how much fits; None where nobody knows."""


def is_aside(name: str) -> bool:
    """Return whether a folder is what an earlier job had left under a new snapshot's name."""
    return _ASIDE in name


def aside_name(id_: str, tag: str) -> str:
    """Return the name under which it is put aside.

    >>> aside_name("s000120-g7", "815")
    's000120-g7.aside-815'
    """
    return f"{id_}{_ASIDE}-{tag}"
