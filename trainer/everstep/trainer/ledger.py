"""Which samples were applied, and whether each exactly once, whatever failed on the way.

Every rank puts down a line per step: which samples its share of that update held. Steps that were
lost and done again stand in the files of two generations; only what the last snapshot of the chain
rests on counts, so the account follows the resumes back from the end.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from everstep.sdk.errors import EverstepError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from everstep.snapshots.marker import Marker
    from everstep.trainer.order import Range
    from everstep.trainer.place import Seat
    from everstep.trainer.step import Run


_Key = tuple[str, int]
"""Job and generation."""


class LedgerError(EverstepError):
    """The ledger's files do not tell a whole story: what is missing."""


class Chapter(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a file: one rank of one generation, and the snapshot it began from."""

    job: str
    generation: int
    rank: int
    world_size: int
    opened_at_s: float
    from_step: int = 0
    from_generation: int | None = None
    from_job: str | None = None


class Line(msgspec.Struct, frozen=True, array_like=True):
    """One step of one rank; `applied` is false where all ranks skipped the update.

    `at_s` is the wall clock when the rank had finished it, `loss` the mean over all ranks, None
    where it was not a number.
    """

    step: int
    samples: list[tuple[int, int]]
    applied: bool = True
    at_s: float = 0.0
    loss: float | None = None


def opened(run: Run, seat: Seat, begun_from: Marker | None, *, at_s: float) -> Writer:
    """Begin the file of one rank and generation; `begun_from` is the snapshot it resumed from."""
    chapter = Chapter(
        job=seat.job,
        generation=run.generation,
        rank=seat.rank,
        world_size=seat.world_size,
        opened_at_s=at_s,
        from_step=begun_from.step if begun_from else 0,
        from_generation=begun_from.generation if begun_from else None,
        from_job=begun_from.job if begun_from else None,
    )
    return Writer(run.run_dir / "ledger", chapter)


class Writer:
    """Appends one rank's lines; one write a line, so a killed rank leaves whole lines."""

    def __init__(self, folder: Path, chapter: Chapter) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        job = "".join(c if c.isalnum() else "_" for c in chapter.job) or "run"
        name = f"{job}-g{chapter.generation}-r{chapter.rank}.jsonl"
        self._fd = os.open(
            folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
        )
        self._write(chapter)

    def add(self, line: Line) -> None:
        """Put down one step."""
        self._write(line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _write(self, line: msgspec.Struct) -> None:
        os.write(self._fd, msgspec.json.encode(line) + b"\n")


class Book(msgspec.Struct, frozen=True):
    """One rank's file."""

    chapter: Chapter
    lines: list[Line]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome over all samples up to the last step."""

    applied: int
    skipped: list[tuple[int, int]]
    missing: list[tuple[int, int]]
    repeated: list[tuple[int, int]]

    @property
    def exactly_once(self) -> bool:
        """Whether nothing is missing and nothing was applied twice."""
        return not self.missing and not self.repeated


def read(folder: Path) -> list[Book]:
    """Return the files of a run; a line that a killed rank left unfinished is left out."""
    books = []
    decoder = msgspec.json.Decoder(Line)
    for path in sorted(folder.glob("*.jsonl")):
        head, *rest = path.read_bytes().split(b"\n")
        if not rest:  # made just now, or by a rank that was killed just then
            continue
        chapter = msgspec.json.decode(head, type=Chapter)
        books.append(Book(chapter, [decoder.decode(line) for line in rest[:-1]]))
    return books


def account(books: Iterable[Book], *, end: int, skip_windows: Sequence[Range] = ()) -> Account:
    """Follow the chain of resumes back from the newest generation and count every sample.

    `end` is one past the last sample that should have been used, `skip_windows` are those skipped
    on purpose by the plan. Raises LedgerError when a generation of the chain has no files.
    """
    chain = _chain(list(books))
    done = [line for book, last in chain for line in book.lines if _counts(book, line, last)]
    applied = sorted(r for line in done if line.applied for r in line.samples)
    skipped = sorted(r for line in done if not line.applied for r in line.samples)
    meant = [(max(0, a), min(b, end)) for a, b in skip_windows if a < end]
    missing, repeated = _tile(sorted(applied + skipped), meant, end)
    return Account(
        applied=sum(stop - start for start, stop in applied),
        skipped=_joined(sorted(skipped + meant)),
        missing=missing,
        repeated=repeated,
    )


def _counts(book: Book, line: Line, last: int | None) -> bool:
    return line.step > book.chapter.from_step and (last is None or line.step <= last)


def _chain(books: list[Book]) -> list[tuple[Book, int | None]]:
    """Return the books that count, each with the last step that does."""
    by_generation: dict[_Key, list[Book]] = {}
    for book in books:
        key = (book.chapter.job, book.chapter.generation)
        by_generation.setdefault(key, []).append(book)
    out: list[tuple[Book, int | None]] = []
    at, last = _newest(by_generation), None
    while at is not None:
        group = by_generation.pop(at, [])
        _check_whole(at, group)
        out += [(book, last) for book in group]
        at, last = _before(group[0].chapter), group[0].chapter.from_step
    return out


def _check_whole(key: _Key, group: list[Book]) -> None:
    if not group:
        raise LedgerError(f"the chain leads to generation {key[1]}, of which there is no file")
    ranks = group[0].chapter.world_size
    if len(group) != ranks:
        raise LedgerError(f"generation {key[1]}: {len(group)} files of {ranks} ranks")


def _before(chapter: Chapter) -> _Key | None:
    if chapter.from_generation is None:
        return None
    return (chapter.from_job or "", chapter.from_generation)


def _newest(by_generation: dict[_Key, list[Book]]) -> _Key | None:
    opened = {key: books[0].chapter.opened_at_s for key, books in by_generation.items()}
    return max(opened, key=lambda key: opened[key], default=None)


def _tile(done: list[Range], meant: list[Range], end: int) -> tuple[list[Range], list[Range]]:
    """Return the holes in [0, end) that were not meant, and the indices that stand twice."""
    missing, repeated = [], []
    at = 0
    for start, stop in done:
        if start > at:
            missing += _minus((at, start), meant)
        elif start < at:
            repeated.append((start, min(at, stop)))
        at = max(at, stop)
    if at < end:
        missing += _minus((at, end), meant)
    return missing, _joined(sorted(repeated))


def _minus(hole: Range, meant: Iterable[Range]) -> list[Range]:
    out, (start, stop) = [], hole
    for a, b in sorted(meant):
        if a < stop and b > start:
            if a > start:
                out.append((start, a))
            start = max(start, b)
    if start < stop:
        out.append((start, stop))
    return out


def _joined(ranges: Iterable[Range]) -> list[Range]:
    out: list[Range] = []
    for start, stop in ranges:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out
