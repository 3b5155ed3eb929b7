"""A reader of a progress page sees whole records or none, and nobody can pull it away."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire import page_writer
from tests.wire.page_writer import record

from everstep.wire import page as page_module
from everstep.wire.errors import PageRefusedError
from everstep.wire.messages import PHASES
from everstep.wire.page import PAGE_BYTES, RING_RECORDS, PageReader, PageWriter, Place

PLACE = Place("job-1", generation=3, rank=2, world_size=8, local_rank=1, pid=4711)
STATE, RING = 128, 256  # as the layout in everstep.wire.page has it
SLOT, RECORD = 64, 128
_F_ADD_SEALS = 1033


@pytest.fixture
def writer() -> Iterator[PageWriter]:
    with closing(PageWriter(PLACE, clock_ns=lambda: 77)) as page:
        yield page


@pytest.fixture
def reader(writer: PageWriter) -> Iterator[PageReader]:
    with closing(PageReader(writer.fd)) as page:
        yield page


def test_a_new_page_says_whose_it_is_and_that_its_rank_is_starting(reader: PageReader) -> None:
    state = reader.state()
    assert reader.place == PLACE
    assert state == page_module.State("start", 0, 77, records=0, data_s=0.0, snapshot_s=0.0)
    assert reader.records(0) == []


def test_phase_and_step_are_seen_as_they_change(writer: PageWriter, reader: PageReader) -> None:
    for phase in PHASES:
        writer.enter(phase, step=9)
        state = reader.state()
        assert state is not None
        assert (state.phase, state.step) == (phase, 9)


def test_finished_steps_are_read_once_each_and_in_order(
    writer: PageWriter, reader: PageReader
) -> None:
    for step in range(1, 6):
        writer.finished(record(step))
    assert reader.records(0) == [(n, record(n)) for n in range(1, 6)]
    assert reader.records(3) == [(4, record(4)), (5, record(5))]
    assert reader.records(5) == []


def test_a_reader_that_is_late_misses_the_oldest_and_gets_the_rest(
    writer: PageWriter, reader: PageReader
) -> None:
    last = 3 * RING_RECORDS + 5
    for step in range(1, last + 1):
        writer.finished(record(step))
    got = reader.records(2)
    assert got == [(n, record(n)) for n in range(last - RING_RECORDS + 1, last + 1)]


def test_a_step_that_is_done_again_after_a_rollback_is_a_record_of_its_own(
    writer: PageWriter, reader: PageReader
) -> None:
    for step in (1, 2, 1):
        writer.finished(record(step))
    assert [(n, r.step) for n, r in reader.records(0)] == [(1, 1), (2, 2), (3, 1)]


def test_what_was_waited_for_data_and_snapshots_is_summed(
    writer: PageWriter, reader: PageReader
) -> None:
    for data_s, snapshot_s in ((0.25, 0.0), (float("nan"), 2.0), (0.5, float("nan"))):
        writer.finished(record(1)._replace(data_s=data_s, snapshot_s=snapshot_s))
    state = reader.state()
    assert state is not None
    assert (state.data_s, state.snapshot_s) == (0.75, 2.0)


def test_a_page_outlives_its_writer() -> None:
    with closing(PageWriter(PLACE)) as gone:
        gone.finished(record(1))
        reader = PageReader(gone.fd)
    with closing(reader):
        assert reader.records(0) == [(1, record(1))]


# ------------------------------------------------------------------------------ torn writes


def _before_and_after(writer: PageWriter, steps: int) -> tuple[bytes, bytes]:
    for step in range(1, steps + 1):
        writer.finished(record(step))
    before = bytes(writer._map)
    writer.finished(record(steps + 1))
    return before, bytes(writer._map)


@pytest.mark.parametrize("steps", [1, 2, RING_RECORDS, RING_RECORDS + 1])
def test_a_write_that_stops_after_any_byte_is_not_seen_as_data(
    writer: PageWriter, reader: PageReader, steps: int
) -> None:
    before, after = _before_and_after(writer, steps)
    record_at = RING + (steps % RING_RECORDS) * RECORD
    whole = {n: record(n) for n in range(1, steps + 2)}
    for at, size in ((record_at, RECORD), (STATE, 2 * SLOT)):
        for cut in range(size + 1):
            writer._map[:] = before
            if at == STATE:  # the record is written before the state that announces it
                writer._map[record_at : record_at + RECORD] = after[record_at:][:RECORD]
            writer._map[at : at + cut] = after[at : at + cut]
            got = reader.records(0)
            state = reader.state()
            assert state is not None
            assert state.records in {steps, steps + 1}
            assert all(whole[n] == r for n, r in got)
            missing = set(range(max(1, state.records - RING_RECORDS + 1), state.records + 1))
            # Only the oldest, whose place the new record takes, may be away.
            assert missing - {n for n, _ in got} <= {steps + 1 - RING_RECORDS}


@given(data=st.data())
def test_a_write_whose_bytes_landed_in_any_order_is_not_seen_as_data(data: st.DataObject) -> None:
    with (
        closing(PageWriter(PLACE, clock_ns=lambda: 77)) as writer,
        closing(PageReader(writer.fd)) as reader,
    ):
        before, after = _before_and_after(writer, data.draw(st.sampled_from([1, RING_RECORDS])))
        changed = [n for n in range(PAGE_BYTES) if before[n] != after[n]]
        landed = data.draw(st.sets(st.sampled_from(changed)))
        writer._map[:] = before
        for n in landed:
            writer._map[n : n + 1] = after[n : n + 1]
        assert all(r == record(n) for n, r in reader.records(0))


@contextmanager
def hammering() -> Iterator[tuple[subprocess.Popen[bytes], PageReader]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.wire.page_writer", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parents[2],
        )
        try:
            ours.settimeout(60)
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            reader = PageReader(fds[0])
            os.close(fds[0])
            with closing(reader):
                yield child, reader
        finally:
            child.kill()
            child.wait()


def _assert_whole(reader: PageReader, after: int) -> int:
    """Look once and return the number of the newest record."""
    state = reader.state()
    if state is not None:
        assert state.phase == PHASES[state.step % len(PHASES)]
        assert state.records in {state.step - 1, state.step}
    for number, got in reader.records(after):
        assert got == record(number)
        after = number
    return after


def test_a_reader_beside_a_writer_in_full_flight_never_sees_parts_of_two() -> None:
    with hammering() as (child, reader):
        newest = looks = 0
        end = time.monotonic() + 2.0
        while time.monotonic() < end or newest < 1000:
            newest = _assert_whole(reader, newest)
            looks += 1
            assert child.poll() is None
        assert looks > 100


def test_a_writer_that_is_killed_in_the_middle_leaves_a_page_that_can_be_read() -> None:
    rng = random.Random(7)
    for _ in range(8):
        with hammering() as (child, reader):
            newest = 0
            end = time.monotonic() + 30
            while newest < 100 + rng.randrange(5000) and time.monotonic() < end:
                newest = _assert_whole(reader, newest)
            child.kill()
            child.wait()
            state = reader.state()
            assert state is not None
            assert _assert_whole(reader, 0) in {state.records, state.records - 1}


# --------------------------------------------------------------- pages that are not to be read


def _memfd(size: int = PAGE_BYTES, *, seals: int = 0x16, content: bytes = b"") -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, content, 0)
    fcntl.fcntl(fd, _F_ADD_SEALS, seals)
    return fd


@contextmanager
def _open(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def sound(writer: PageWriter) -> bytes:
    return bytes(writer._map)


def test_a_page_of_a_writer_that_does_not_sum_is_read_all_the_same(writer: PageWriter) -> None:
    writer.finished(record(5))
    page = bytearray(writer._map)
    for slot in (0, 1):  # a state and its checksum; zeros behind
        at = STATE + slot * SLOT
        page[at + 37 : at + SLOT] = bytes(SLOT - 37)
    with _open(_memfd(content=bytes(page))) as fd, closing(PageReader(fd)) as reader:
        state = reader.state()
    assert state == page_module.State("start", 5, 77, records=1)


@pytest.mark.parametrize("missing", [0x2, 0x4, 0x10], ids=["shrink", "grow", "future write"])
def test_a_page_without_one_of_the_seals_is_refused(sound: bytes, missing: int) -> None:
    with (
        _open(_memfd(seals=0x16 & ~missing, content=sound)) as fd,
        pytest.raises(PageRefusedError, match="its owner could truncate it under the reader"),
    ):
        PageReader(fd)


def test_a_page_without_any_seal_is_refused(sound: bytes) -> None:
    with (
        _open(_memfd(seals=0, content=sound)) as fd,
        pytest.raises(PageRefusedError, match="seals are 0x0, need shrink, grow and future-write"),
    ):
        PageReader(fd)


@pytest.mark.parametrize("size", [0, 4096, PAGE_BYTES - 1, PAGE_BYTES + 1, 1 << 30])
def test_a_page_of_another_size_is_refused(sound: bytes, size: int) -> None:
    with (
        _open(_memfd(size, content=sound[:size])) as fd,
        pytest.raises(PageRefusedError, match=f"size is {size} bytes"),
    ):
        PageReader(fd)


def test_a_memory_file_of_something_else_is_refused() -> None:
    with (
        _open(_memfd(content=b"\x7fELF" * 1000)) as fd,
        pytest.raises(PageRefusedError, match="header is not that of a progress page"),
    ):
        PageReader(fd)


def test_a_page_of_another_version_is_refused(sound: bytes) -> None:
    header = sound[:4] + struct.pack("<H", 2) + sound[6 : page_module._HEADER.size]
    crc = struct.pack("<I", zlib.crc32(header))
    content = header + bytes(124 - len(header)) + crc + sound[128:]
    with (
        _open(_memfd(content=content)) as fd,
        pytest.raises(PageRefusedError, match="page version 2 is not 1"),
    ):
        PageReader(fd)


def test_a_header_with_any_byte_changed_is_refused(sound: bytes) -> None:
    for at in (*range(page_module._HEADER.size), *range(124, 128)):
        broken = bytearray(sound)
        broken[at] ^= 0x41
        with _open(_memfd(content=bytes(broken))) as fd, pytest.raises(PageRefusedError):
            PageReader(fd)


def test_what_is_no_memory_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(bytes(PAGE_BYTES))
    read, write = os.pipe()
    with (tmp_path / "page").open("r+b") as file, _open(read), _open(write):
        for fd in (file.fileno(), read):
            with pytest.raises(PageRefusedError):
                PageReader(fd)


def test_no_descriptor_is_left_whether_a_page_is_taken_or_refused(sound: bytes) -> None:
    before = _descriptors()
    with _open(_memfd(content=sound)) as fd, closing(PageReader(fd)):
        pass
    with _open(_memfd()) as fd, pytest.raises(PageRefusedError):
        PageReader(fd)
    assert _descriptors() == before


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


# --------------------------------------------------------------- what nobody can do to a page


def test_the_owner_cannot_take_memory_away_from_under_the_reader(
    writer: PageWriter, reader: PageReader
) -> None:
    for size in (0, 4096, PAGE_BYTES * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(writer.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(writer.fd, _F_ADD_SEALS, 0x20)  # not even more seals
    with pytest.raises(OSError, match=r"Operation not permitted|Permission denied"):
        writer._map.madvise(mmap.MADV_REMOVE)
    assert reader.state() is not None


def test_the_receiver_cannot_write_into_the_page(writer: PageWriter, reader: PageReader) -> None:
    before = bytes(writer._map)
    with pytest.raises(PermissionError):
        os.pwrite(writer.fd, b"forged", STATE)
    with pytest.raises(PermissionError):
        mmap.mmap(writer.fd, PAGE_BYTES)
    with _open(os.open(f"/proc/self/fd/{writer.fd}", os.O_RDWR)) as again:
        with pytest.raises(PermissionError):
            os.pwrite(again, b"forged", STATE)
        with pytest.raises(PermissionError):
            mmap.mmap(again, PAGE_BYTES)
    with pytest.raises(TypeError):
        reader._map[STATE : STATE + 6] = b"forged"
    assert bytes(writer._map) == before
    writer.finished(record(1))
    assert reader.records(0) == [(1, record(1))]


@given(data=st.data())
def test_a_rank_that_lies_with_valid_checksums_harms_nobody(data: st.DataObject) -> None:
    with closing(PageWriter(PLACE)) as writer, closing(PageReader(writer.fd)) as reader:
        big = st.integers(0, 2**64 - 1)
        body = page_module._STATE.pack(
            data.draw(big),
            data.draw(st.integers(-(2**63), 2**63 - 1)),
            data.draw(big),
            data.draw(big),
            data.draw(st.integers(0, 255)),
        )
        lie = body + struct.pack("<I", zlib.crc32(body))
        for slot in (STATE, STATE + SLOT):
            writer._map[slot : slot + len(lie)] = lie
        writer._map[RING:] = data.draw(st.binary(min_size=RECORD, max_size=RECORD)) * RING_RECORDS
        state = reader.state()
        assert state is None or state.phase in PHASES
        assert len(reader.records(data.draw(big))) <= RING_RECORDS


def test_a_job_id_that_does_not_fit_is_refused_before_anything_is_made() -> None:
    before = _descriptors()
    with pytest.raises(ValueError, match="a job id has at most 48 bytes, not 49"):
        PageWriter(PLACE._replace(job="x" * 49))
    assert _descriptors() == before


def test_whose_page_it_is_comes_over_a_socket_with_it() -> None:
    with hammering() as (child, reader):
        assert reader.place == Place(page_writer.JOB, 1, 2, 4, 0, child.pid)
