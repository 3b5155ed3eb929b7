"""One rank's part: from its slot to the disk, and a note about it for the lead."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import time
from typing import TYPE_CHECKING

from everstep.snapshots import marker, part
from everstep.snapshots.faults import Faults, Point
from everstep.snapshots.marker import Part
from everstep.snapshots.part import Note
from everstep.snapshots.sealed import SnapshotError
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.snapshots.orders import Write
    from everstep.snapshots.places import Place

METADATA = ".metadata"

_RESERVE_BYTES, _RESERVE_SHARE = 64 * 1024 * 1024, 0.01
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check(order: Write) -> None:
    """Raise SnapshotError when an order makes no sense; nothing has been touched then."""
    try:
        SnapshotId.parse(order.id)
    except ValueError as exc:
        raise SnapshotError(str(exc)) from exc
    if not _FILE.fullmatch(order.file) or order.file == marker.NAME or part.is_name(order.file):
        raise SnapshotError(f"{order.file!r} is no name for a part's file")
    if not order.place:
        raise SnapshotError("the order names no place")
    if order.id != order.facts.id:
        raise SnapshotError(f"the order is for {order.id}, its facts are of {order.facts.id}")


def write_part(
    order: Write,
    data: memoryview,
    place: Place,
    *,
    faults: Faults,
    clock: Callable[[], float] = time.time,
) -> Note:
    """Write one part and its note, and return that once both are durable.

    Raises SnapshotError with the reason when it cannot be: as far as the disk allows a note says
    why, so that the lead does not wait for it, and the space is given back.
    """
    begin = time.monotonic()
    where = f"{place.where.rstrip('/')}/{order.id}"
    try:
        check_space(place, order.size_bytes)
        place.claim(order.id, order.facts.job, order.rank)
        place.remove_file(order.id, part.file_name(order.rank))
    except OSError as exc:
        raise SnapshotError(plain(exc, where)) from exc
    noted = False
    try:
        if order.missing:
            raise SnapshotError(order.missing)  # noqa: TRY301  told as any other failure is
        xxh3 = _write_file(order, data, place)
        facts = _facts(order, xxh3, write_s=time.monotonic() - begin, at_s=clock())
        note = _note(order, facts)
        faults.at(Point.BEFORE_PART)
        try:
            place.put(order.id, part.file_name(order.rank), part.to_bytes(note))
        except OSError as exc:
            # A full disk shows before the note has its name, anything else perhaps after that.
            noted = exc.errno not in _FULL
            raise
        noted = True
        faults.at(Point.AFTER_PART)
    except (OSError, SnapshotError) as exc:
        why = plain(exc, f"{where}/{order.file}")
        _leave_word(order, place, why, keep=noted, at_s=clock())
        raise SnapshotError(why) from exc
    return note


def _write_file(order: Write, data: memoryview, place: Place) -> str:
    """Return the checksum of what was written."""
    written = place.write(order.id, order.file, data)
    if order.xxh3 and written.xxh3 != order.xxh3:
        raise SnapshotError(
            f"{order.file} was not written as rank {order.rank} had sealed it: the checksum is "
            f"{written.xxh3}, the order says {order.xxh3}. Its memory was changed meanwhile, or "
            "is bad"
        )
    return written.xxh3


def _facts(order: Write, xxh3: str, *, write_s: float, at_s: float) -> Part:
    return Part(
        rank=order.rank,
        file=order.file,
        bytes=order.size_bytes,
        xxh3=xxh3,
        write_s=write_s,
        written_at_s=at_s,
        host=socket.gethostname(),
    )


def _note(order: Write, part_: Part, *, why: str = "") -> Note:
    return Note(id=order.id, job=order.facts.job, attempt=order.attempt, part=part_, why=why)


def _leave_word(order: Write, place: Place, why: str, *, keep: bool, at_s: float) -> None:
    """Give the space back, then say in a note that this part will not come.

    `keep`: the lead may have read a good note already, and be about to count the file in.
    """
    note = _note(order, _facts(order, order.xxh3, write_s=0.0, at_s=at_s), why=why)
    with contextlib.suppress(OSError):
        if not keep:
            place.remove_file(order.id, order.file)
        place.put(order.id, part.file_name(order.rank), part.to_bytes(note))


def check_space(place: Place, size_bytes: int) -> None:
    """Raise SnapshotError when so much does not fit, before a byte of it is written."""
    space = place.space()
    if space is None:
        return
    reserve = reserve_bytes(space.total)
    if space.free < size_bytes + reserve:
        raise SnapshotError(
            f"No space left on device: {place.where} has {size_text(space.free)} free, "
            f"{size_text(size_bytes)} are to be written and {size_text(reserve)} stay in reserve"
        )


def reserve_bytes(total: int) -> int:
    """Return what is left alone of a file system, for logs and for whoever has to tidy up."""
    return min(_RESERVE_BYTES, int(total * _RESERVE_SHARE))


def size_text(size_bytes: float) -> str:
    """Return a size for people.

    >>> size_text(1234), size_text(5_600_000_000)
    ('1.2 kB', '5.6 GB')
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "bytes" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def plain(exc: Exception, where: str) -> str:
    """Return an error of a disk or a store in the words of a person, with what it was about."""
    if isinstance(exc, SnapshotError):
        return str(exc)
    if isinstance(exc, FileNotFoundError) and exc.filename:
        return f"{exc.filename}: the snapshot's folder was deleted while it was written"
    text = getattr(exc, "strerror", None) or f"{type(exc).__name__}: {exc}"
    advice = ""
    if isinstance(exc, OSError) and exc.errno in _FULL:
        advice = ". Make room there, keep fewer snapshots, or set a budget"
    return f"{text}: {getattr(exc, 'filename', None) or where}{advice}"
