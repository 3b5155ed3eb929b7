"""Where snapshots lie: a folder, or any store that fsspec knows."""

from __future__ import annotations

from everstep.snapshots.faults import Faults
from everstep.snapshots.places.folder import Folder
from everstep.snapshots.places.lock import TakenError
from everstep.snapshots.places.place import LATEST, Place, Space, is_aside

__all__ = ["LATEST", "Folder", "Place", "Space", "TakenError", "is_aside", "open_place"]

_NO_FAULTS = Faults()


def open_place(where: str, *, faults: Faults = _NO_FAULTS) -> Place:
    """Return the place that a path or a URL (`s3://`, `gs://`, `memory://`, `file://`) names.

    Raises SnapshotError for a URL that nothing here understands, with what to install.
    """
    scheme, mark, rest = where.partition("://")
    if not mark:
        return Folder(where, faults)
    if scheme in ("file", "local"):
        return Folder(rest, faults)
    # Only here: fsspec takes longer to import than everything else of the writer.
    from everstep.snapshots.places.remote import open_remote

    return open_remote(where, faults)
