"""What counts as applied is what the last snapshot of the chain rests on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.trainer.ledger import Account, Book, Chapter, LedgerError, Line, Writer, account, read
from everstep.trainer.order import share


def generation(
    number: int,
    steps: range,
    *,
    world: int = 2,
    began: tuple[int, int] | None = None,
    job: str = "j",
    skipped: tuple[int, ...] = (),
    opened_at_s: float | None = None,
) -> list[Book]:
    """Books of ranks that did `steps`, twelve samples each."""
    books = []
    for rank in range(world):
        chapter = Chapter(
            job=job,
            generation=number,
            rank=rank,
            world_size=world,
            opened_at_s=number if opened_at_s is None else opened_at_s,
            from_step=began[0] if began else 0,
            from_generation=began[1] if began else None,
            from_job=job if began else None,
        )
        lines = [
            Line(s, share([(s * 12 - 12, s * 12)], rank, world), s not in skipped) for s in steps
        ]
        books.append(Book(chapter, lines))
    return books


def test_an_undisturbed_run_applies_everything_once() -> None:
    found = account(generation(1, range(1, 11)), end=120)
    assert found == Account(applied=120, skipped=[], missing=[], repeated=[])
    assert found.exactly_once


def test_steps_that_were_lost_and_done_again_count_once() -> None:
    books = generation(1, range(1, 9)) + generation(2, range(6, 11), world=3, began=(5, 1))
    assert account(books, end=120).exactly_once


def test_a_generation_that_nobody_went_on_from_does_not_count() -> None:
    books = generation(1, range(1, 9))
    books += generation(2, range(6, 8), began=(5, 1))
    books += generation(3, range(6, 11), began=(5, 1))
    assert account(books, end=120).exactly_once


def test_a_generation_that_only_found_the_end_counts_nothing_more() -> None:
    books = generation(1, range(1, 11)) + generation(2, range(0), began=(10, 1))
    assert account(books, end=120).exactly_once


def test_holes_and_doubles_are_named() -> None:
    books = generation(1, range(1, 5)) + generation(2, range(6, 11), began=(4, 1))
    found = account(books, end=120)
    assert found.missing == [(48, 60)]
    assert not found.exactly_once
    double = generation(1, range(1, 11))
    double[0].lines.append(Line(10, [(100, 102)]))
    assert account(double, end=120).repeated == [(100, 102)]
    assert account(generation(1, range(1, 10)), end=120).missing == [(108, 120)]


def test_what_was_skipped_on_purpose_is_listed_apart() -> None:
    found = account(generation(1, range(1, 11), skipped=(3,)), end=120)
    assert found.skipped == [(24, 36)]
    assert found.applied == 108
    assert found.exactly_once

    holes = generation(1, range(1, 11))
    for book in holes:
        book.lines.pop(4)
    assert account(holes, end=120, skip_windows=[(48, 60)]).exactly_once
    assert account(holes, end=120, skip_windows=[(48, 55)]).missing == [(55, 60)]


def test_the_chain_crosses_from_one_job_to_the_next() -> None:
    books = generation(5, range(1, 9), job="old")
    books += generation(6, range(8, 9), job="old", began=(8, 5), opened_at_s=6)
    new = [
        Book(msgspec.structs.replace(book.chapter, job="new"), book.lines)
        for book in generation(1, range(9, 11), job="old", began=(8, 5), opened_at_s=9)
    ]
    assert account(books + new, end=120).exactly_once


def test_a_file_that_is_missing_is_an_error_not_an_answer() -> None:
    with pytest.raises(LedgerError, match="1 files of 2 ranks"):
        account(generation(1, range(1, 11))[:1], end=120)
    with pytest.raises(LedgerError, match="generation 1"):
        account(generation(2, range(6, 11), began=(5, 1)), end=120)


def test_files_read_back_as_written_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    (book, _) = generation(1, range(1, 4))
    writer = Writer(tmp_path / "ledger", book.chapter)
    for line in book.lines:
        writer.add(line)
    writer.close()
    (path,) = (tmp_path / "ledger").iterdir()
    with path.open("ab") as file:
        file.write(b"[4,[[3")
    (tmp_path / "ledger" / "just-made.jsonl").touch()
    assert read(tmp_path / "ledger") == [book]
