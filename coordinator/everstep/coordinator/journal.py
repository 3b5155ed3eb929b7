"""The journal: an SQLite file with every fact, in order, durable before anybody acts on it.

One thread writes. What one event led to (a turn) is written whole or not at all; turns that come in
while the disk is busy are committed together. When the disk refuses, nothing is lost and nothing
that depends on it is sent: it is tried again until it works.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sqlalchemy import (
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    delete,
    event,
    func,
    insert,
    select,
)
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from everstep.coordinator.facts import AnyFact
from everstep.sdk.errors import EverstepError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sqlalchemy import Connection, Engine

log = logging.getLogger(__name__)

SCHEMA = 1
FILE = "journal.sqlite"

_RETRY_S = 1.0
_CLOSE_S = 10.0

_meta = MetaData()
_about = Table("about", _meta, Column("key", String, primary_key=True), Column("value", String))
_facts = Table(
    "facts",
    _meta,
    Column("seq", Integer, primary_key=True),
    Column("at_s", Float, nullable=False),
    Column("fact", String, nullable=False),
    Column("job", String),
    Column("node", String),
    Column("body", Text, nullable=False),
    Index("facts_by_job", "job"),
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyFact] = msgspec.json.Decoder(AnyFact)


class JournalError(EverstepError):
    """The journal cannot be used: which file, why, and what to do."""


class Entry(NamedTuple):
    """One fact with its place in the journal."""

    seq: int
    fact: AnyFact


class Journal:
    """An open journal. `append` and `close` belong to one thread, `read` to any."""

    def __init__(self, folder: Path, on_commit: Callable[[int], None]) -> None:
        """Open or create it, and lock the folder.

        `on_commit` is called in the writer's thread with the number of the last durable fact.
        Raises JournalError.
        """
        self.path = folder / FILE
        self.error: str | None = None
        self.commit_s = 0.0
        self._on_commit = on_commit
        self._lock = _lock(folder)
        try:
            self._engine = _open(self.path)
            self.last = self._last_seq()
        except BaseException:
            os.close(self._lock)
            raise
        self._queue: queue.SimpleQueue[list[Entry] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="everstep-journal", daemon=True)
        self._thread.start()

    def append(self, facts: Sequence[AnyFact]) -> int:
        """Hand one turn's facts to the writer; return the number of the last one."""
        entries = [Entry(self.last + i, fact) for i, fact in enumerate(facts, start=1)]
        self.last += len(entries)
        self._queue.put(entries)
        return self.last

    def read(self, *, since: int = 0, limit: int | None = None) -> list[Entry]:
        """Return durable facts after number `since`. Raises JournalError for unreadable ones."""
        with self._engine.connect() as connection:
            return list(self._rows(connection, since, limit))

    def forget_jobs(self, *, ended_before_s: float) -> int:
        """Drop the facts of jobs that ended before then; return how many jobs. Call before use."""
        ended = select(_facts.c.job).where(
            _facts.c.fact == "JobEnded", _facts.c.at_s < ended_before_s
        )
        with self._engine.begin() as connection:
            jobs = [row[0] for row in connection.execute(ended)]
            for job in jobs:  # a node's state outlives the job in which it changed
                theirs = (_facts.c.job == job) & (_facts.c.fact != "NodeMoved")
                connection.execute(delete(_facts).where(theirs))
        return len(jobs)

    def close(self) -> None:
        """Write what is left, as far as the disk takes it, and let go of the folder."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        self._engine.dispose()
        os.close(self._lock)

    def _rows(self, connection: Connection, since: int, limit: int | None) -> Iterator[Entry]:
        asked = select(_facts.c.seq, _facts.c.body).where(_facts.c.seq > since)
        for seq, body in connection.execute(asked.order_by(_facts.c.seq).limit(limit)):
            try:
                yield Entry(seq, _decoder.decode(body))
            except msgspec.MsgspecError as exc:
                raise JournalError(
                    f"{self.path}: fact {seq} cannot be read ({exc}): it was written by a newer "
                    "everstep, or the file is damaged; use that version, or restore a copy"
                ) from exc

    def _last_seq(self) -> int:
        with self._engine.connect() as connection:
            return connection.execute(select(func.max(_facts.c.seq))).scalar() or 0

    # ------------------------------------------------------------------------ the writer's thread

    def _write(self) -> None:
        while (batch := self._next()) is not None:
            began_s = time.monotonic()
            if not self._commit(batch):
                return
            self.commit_s = time.monotonic() - began_s
            self._on_commit(batch[-1].seq)

    def _next(self) -> list[Entry] | None:
        """Return all whole turns that wait, None at the end."""
        first = self._queue.get()
        if first is None:
            return None
        batch = list(first)
        with contextlib.suppress(queue.Empty):
            while (more := self._queue.get_nowait()) is not None:
                batch += more
            self._queue.put(None)
        return batch

    def _commit(self, batch: list[Entry]) -> bool:
        rows = [_row(entry) for entry in batch]
        while True:
            try:
                with self._engine.begin() as connection:
                    connection.execute(insert(_facts), rows)
            except SQLAlchemyError as exc:
                why = str(getattr(exc, "orig", exc))
                if self.error is None:
                    log.error(  # noqa: TRY400  the reason is in one line, the traceback says no more
                        "journal cannot be written: nothing new is decided",
                        extra={"path": self.path, "why": why},
                    )
                self.error = f"{self.path}: {why}: free the disk, it is tried again every second"
                if self._closing.wait(_RETRY_S):
                    return False
                continue
            if self.error is not None:
                log.warning("journal is written again", extra={"path": self.path})
                self.error = None
            return True


def _row(entry: Entry) -> dict[str, Any]:
    fact = entry.fact
    return {
        "seq": entry.seq,
        "at_s": fact.at_s,
        "fact": type(fact).__name__,
        "job": getattr(fact, "job", None),
        "node": getattr(fact, "node", None),
        "body": _encoder.encode(fact).decode(),
    }


def _lock(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(folder / "coordinator.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise JournalError(
            f"{folder}: cannot be used for the journal ({exc.strerror}): name another folder with "
            "--state-dir"
        ) from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(fd)
        raise JournalError(
            f"{folder}: another coordinator uses this journal; stop it, or name another folder "
            "with --state-dir"
        ) from exc
    return fd


def _open(path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 1.0})
    event.listen(engine, "connect", _prepare)
    try:
        _check_pages(engine)
        _meta.create_all(engine)
        _check_schema(engine, path)
    except (DatabaseError, sqlite3.DatabaseError) as exc:
        engine.dispose()
        raise JournalError(
            f"{path}: not a usable journal ({getattr(exc, 'orig', exc)}): restore a copy, or move "
            "it away to start with an empty one (running jobs are taken in as they are)"
        ) from exc
    except JournalError:
        engine.dispose()
        raise
    return engine


def _prepare(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # a commit is on the disk, not only with the kernel
    cursor.close()


def _check_pages(engine: Engine) -> None:
    with engine.connect() as connection:
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok":  # found now rather than by a commit that can never succeed
        raise sqlite3.DatabaseError(f"damaged: {found}")


def _check_schema(engine: Engine, path: Path) -> None:
    with engine.begin() as connection:
        asked = select(_about.c.value).where(_about.c.key == "schema")
        found = connection.execute(asked).scalar()
        if found is None:
            connection.execute(insert(_about), {"key": "schema", "value": str(SCHEMA)})
        elif not found.isdigit() or int(found) > SCHEMA:
            raise JournalError(
                f"{path}: schema {found} is newer than this version's {SCHEMA}: upgrade everstep "
                "on the coordinator"
            )
