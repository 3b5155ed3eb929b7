"""Is a snapshot what its marker says? A quick look at sizes, or a look at every byte."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

from everstep.snapshots import marker
from everstep.snapshots.sealed import SnapshotError

if TYPE_CHECKING:
    from everstep.snapshots.marker import FileSum, Marker
    from everstep.snapshots.places import Place

_CHUNK_BYTES = 4 * 1024 * 1024


def read_marker(place: Place, id_: str) -> Marker:
    """Return a snapshot's marker. Raises SnapshotError when there is none that can be read."""
    try:
        return marker.unseal(place.read(id_, marker.NAME))
    except FileNotFoundError as exc:
        if place.files(id_):
            raise SnapshotError(f"{id_} was never finished: it has no {marker.NAME}") from exc
        raise SnapshotError(f"{place.where} has no {id_}") from exc
    except OSError as exc:
        raise SnapshotError(f"{place.where}/{id_}/{marker.NAME} cannot be read: {exc}") from exc


def quick_look(place: Place, id_: str, found: Marker) -> list[str]:
    """Return which files are missing or of another size, [] when all look right."""
    return [why for name, s in sorted(found.files.items()) if (why := _size(place, id_, name, s))]


def damages(place: Place, id_: str, found: Marker, *, threads: int) -> list[str]:
    """Read every byte and return what is wrong with which file, [] when all is as written."""
    with ThreadPoolExecutor(threads, thread_name_prefix="everstep-verify") as pool:
        names = sorted(found.files)
        reasons = pool.map(lambda name: _read(place, id_, name, found.files[name]), names)
        return [why for why in reasons if why]


def _size(place: Place, id_: str, name: str, expected: FileSum) -> str | None:
    try:
        size = place.size(id_, name)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as exc:
        return f"{name} cannot be read: {exc.strerror or exc}"
    if size != expected.bytes:
        return f"{name} has {size} bytes, {expected.bytes} were written"
    return None


def _read(place: Place, id_: str, name: str, expected: FileSum) -> str | None:
    if why := _size(place, id_, name, expected):
        return why
    digest = xxhash.xxh3_64()
    try:
        with place.open(id_, name) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as exc:
        return f"{name} cannot be read: {exc.strerror or exc}"
    if digest.hexdigest() != expected.xxh3:
        return f"{name} is damaged: its checksum does not fit"
    return None
