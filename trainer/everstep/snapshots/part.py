"""What the writer of one rank's file says about it, for the lead that waits: `part-00003.json`."""

from __future__ import annotations

import msgspec

from everstep.snapshots.marker import Part
from everstep.snapshots.sealed import seal, unseal

_KEY = "part"


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One part of snapshot `id` of `job` is durable, or `why` it never will be."""

    id: str
    job: str
    part: Part
    attempt: int = 0
    why: str = ""


def file_name(rank: int) -> str:
    """Return the note's file name.

    >>> file_name(3)
    'part-00003.json'
    """
    return f"part-{rank:05d}.json"


def is_name(text: str) -> bool:
    """Return whether a file is a note."""
    return text.startswith("part-") and text.endswith(".json")


def to_bytes(note: Note) -> bytes:
    """Return the file's bytes."""
    return seal(_KEY, note)


def from_bytes(data: bytes, *, name: str) -> Note:
    """Return the note in a file's bytes. Raises SnapshotError when it is damaged."""
    return unseal(data, _KEY, Note, name=name)
