"""Whatever goes wrong in a save: the one before stays good, the reason is told, the next works."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

import pytest
from tests.snapshots.conftest import StartWriter
from tests.snapshots.ranks import DEADLINE_S, MakeRank, contents, order
from tests.snapshots.test_writer import deadline

from everstep.sdk.config import ConfigError
from everstep.snapshots import catalogue, faults, marker, part
from everstep.snapshots.faults import Action, Planned, Point
from everstep.snapshots.orders import Policy
from everstep.snapshots.part import Note
from everstep.snapshots.places import Folder
from everstep.snapshots.sealed import SnapshotError
from everstep.snapshots.writer.write import write_part

KEEP_TWO = Policy(keep=2)
AFTER_COMMIT = (
    Point.AFTER_MARKER,
    Point.BEFORE_LATEST,
    Point.AFTER_LATEST,
    Point.BEFORE_RETENTION,
    Point.MID_RETENTION,
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


def good(place: Path) -> list[str]:
    """Return all that claim to be complete; each of them must be."""
    found = [str(e.id) for e in catalogue.entries(place) if e.committed]
    for id_ in found:
        step = marker.verify(place / id_).step
        assert (place / id_ / "__0_0.distcp").read_bytes() == contents(0, step)
    return found


@pytest.mark.parametrize("point", Point)
def test_a_writer_killed_at_any_point_leaves_only_whole_snapshots(
    point: Point, start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    # The third save comes by: by then there is one to delete as well.
    nth = 1 if point is Point.MID_RETENTION else 3
    start_writer(f"{point}:kill#{nth}")
    rank = make_rank()
    for step in (1, 2):
        assert rank.save(place, step, policy=KEEP_TWO).why is None
    done = rank.save(place, 3, policy=KEEP_TWO)
    assert done.why is None or "writer is gone" in done.why
    deadline(lambda: not rank.link.connected)

    assert set(good(place)) >= {"s000002-g1"}
    if point in AFTER_COMMIT:
        assert "s000003-g1" in good(place)
    last = start_writer()
    assert (
        make_rank().save(place, 3 if done.why and "s000003-g1" not in good(place) else 4).why
        is None
    )
    assert last.close(DEADLINE_S)
    assert len(good(place)) >= 3


@pytest.mark.parametrize("action", [Action.EIO, Action.ENOSPC, Action.EROFS])
@pytest.mark.parametrize("point", [p for p in Point if p not in AFTER_COMMIT])
def test_a_disk_error_costs_that_snapshot_only_and_no_space(
    point: Point, action: Action, start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer(f"{point}:{action}#2")
    rank = make_rank()
    assert rank.save(place, 1).why is None
    why = rank.save(place, 2).why
    assert f"injected at {point}" in (why or "")
    if action is Action.ENOSPC:
        assert "Make room" in (why or "")
    assert not (place / "s000002-g1").exists(), "half of one must not eat the space"
    assert good(place) == ["s000001-g1"]
    assert (place / "latest").readlink() == Path("s000001-g1")
    assert rank.save(place, 2).why is None, "the same id can be tried again"
    assert good(place) == ["s000001-g1", "s000002-g1"]


@pytest.mark.parametrize("point", AFTER_COMMIT)
def test_a_disk_error_after_the_marker_costs_no_snapshot(
    point: Point, start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    writer = start_writer(f"{point}:eio")
    rank = make_rank()
    for step in (1, 2, 3):
        assert rank.save(place, step, policy=KEEP_TWO).why is None
    assert writer.close(DEADLINE_S)
    assert set(good(place)) >= {"s000002-g1", "s000003-g1"}


def test_a_part_that_fails_after_its_note_leaves_the_file_that_the_lead_may_count_in(
    place: Path,
) -> None:
    failing = Planned(Point.AFTER_PART, Action.EIO)
    with pytest.raises(SnapshotError, match="injected"):
        write_part(order(place, 1), memoryview(contents(0, 1)), Folder(place), faults=failing)
    folder = place / "s000001-g1"
    assert (folder / "__0_0.distcp").read_bytes() == contents(0, 1)
    note = part.from_bytes((folder / part.file_name(0)).read_bytes(), name="note")
    assert "injected" in note.why, "a lead that has not read the good note gives up at once"


def test_a_failed_part_is_known_to_the_lead_at_once(
    start_writer: StartWriter, make_rank: MakeRank, short: Path, place: Path
) -> None:
    other = short / "other-node"
    other.mkdir()
    start_writer()
    theirs = start_writer("mid-file:enospc", folder=other)
    lead, peer = make_rank(0), make_rank(1)
    peer.close()
    peer = type(peer)(theirs.path, 1)
    lead.order(place, 1, parts=2, deadline_s=3600.0)
    peer.order(place, 1, parts=2)
    assert "injected" in (peer.part().why or "")
    peer.close()
    assert lead.part().why is None
    why = lead.done().why or ""
    assert why.startswith("rank 1: No space left on device")
    assert not (place / "s000001-g1").exists()


def test_parts_that_never_come_are_named_when_the_deadline_has_passed(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    lead = make_rank()
    lead.order(place, 1, parts=4, deadline_s=0.2)
    lead.part()
    assert "3 of 4 parts are not there after 0.2 s: those of rank 1, 2, 3" in (
        lead.done().why or ""
    )


def test_one_that_waits_in_vain_ends_when_a_newer_one_is_complete(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    lead = make_rank()
    lead.order(place, 1, parts=2, deadline_s=3600.0)
    lead.part()
    lead.order(place, 2, slot=1)
    lead.part()
    replies = {lead.done().id: None, **{r.id: r.why for r in [lead.done()]}}
    assert replies["s000001-g1"] == "a newer snapshot is complete: s000002-g1"


def test_a_slow_rank_holds_up_nobody(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer("mid-file:sleep=3600", grace_s=0.1)
    slow, quick = make_rank(1), make_rank(0)
    slow.order(place, 1, parts=2)
    # The fault hits whoever gets there first, so that must be the slow one: its numbers are down.
    file = place / "s000001-g1" / "__1_0.distcp"
    deadline(lambda: file.exists() and file.read_bytes().strip(b"\0"))
    assert quick.save(place, 2).why is None


def test_memory_that_is_not_what_was_sealed_is_no_snapshot(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    rank = make_rank()
    done = rank.save(place, 1, xxh3="0123456789abcdef")
    assert "0123456789abcdef" in (done.why or "")
    assert "rank 0" in (done.why or "")
    assert not (place / "s000001-g1").exists()


def test_a_part_that_is_cut_short_on_its_way_is_no_snapshot(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    peer = make_rank(1)
    peer.order(place, 1, parts=2)
    assert peer.part().why is None
    os.truncate(place / "s000001-g1" / "__1_0.distcp", 299_999)
    done = make_rank(0).save(place, 1, parts=2)
    assert "__1_0.distcp of rank 1 has 299999 bytes, 300000 were written" in (done.why or "")


def test_the_folder_deleted_in_the_middle(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer("before-fsync:sleep=0.5")
    rank = make_rank()
    rank.order(place, 1)
    deadline((place / "s000001-g1" / "__0_0.distcp").exists)
    shutil.rmtree(place / "s000001-g1")
    assert "deleted" in (rank.part().why or "")
    assert "deleted" in (rank.done().why or "")
    assert rank.save(place, 2).why is None


def test_the_folder_replaced_while_the_lead_waits(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    lead = make_rank()
    lead.order(place, 1, parts=2, deadline_s=1.0)
    assert lead.part().why is None
    shutil.rmtree(place / "s000001-g1")
    assert lead.done().why is not None
    assert good(place) == []


def test_a_damaged_note_is_an_error_not_a_part(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    lead = make_rank()
    lead.order(place, 1, parts=2)
    lead.part()
    (place / "s000001-g1" / part.file_name(1)).write_text("{}")
    assert "part-00001.json is damaged" in (lead.done().why or "")


def test_a_disk_that_is_really_full_is_told_before_a_byte_is_written(
    start_writer: StartWriter, make_rank: MakeRank, tiny_disk: Path
) -> None:
    start_writer()
    rank = make_rank()
    place = tiny_disk / "snapshots"
    for step in (1, 2):
        assert rank.save(place, step, policy=Policy(keep=9)).why is None
    (tiny_disk / "others").write_bytes(bytes(200_000))
    why = rank.save(place, 3).why or ""
    assert why.startswith("No space left on device: ")
    assert "300.0 kB are to be written" in why
    assert good(place) == ["s000001-g1", "s000002-g1"]
    (tiny_disk / "others").unlink()
    assert rank.save(place, 3).why is None


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(bytes(4096))


def test_a_disk_that_fills_up_meanwhile_is_survived(
    start_writer: StartWriter, make_rank: MakeRank, tiny_disk: Path
) -> None:
    start_writer("before-part:sleep=0.5")
    rank = make_rank()
    place = tiny_disk / "snapshots"
    rank.order(place, 1)
    deadline((place / "s000001-g1" / "__0_0.distcp").exists)
    fill(tiny_disk / "others")
    assert "No space left on device" in (rank.part().why or "")
    assert "No space left on device" in (rank.done().why or "")
    assert good(place) == []
    (tiny_disk / "others").unlink()
    assert rank.save(place, 1).why is None


def test_a_place_that_cannot_be_made_is_told(
    start_writer: StartWriter, make_rank: MakeRank, tmp_path: Path
) -> None:
    start_writer()
    (tmp_path / "file").touch()
    why = make_rank().save(tmp_path / "file" / "snapshots", 1).why or ""
    assert "Not a directory" in why
    assert str(tmp_path / "file") in why


@pytest.mark.parametrize("text", ["before-lunch:kill", "mid-file:explode", "mid-file", "x:y=1#2"])
def test_a_fault_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="before-marker"):
        faults.from_text(text)


def test_a_planned_fault_happens_once_whoever_comes_by() -> None:
    planned = faults.from_text("mid-file:eio#3")
    met = []

    def come_by() -> None:
        try:
            planned.at(Point.MID_FILE)
        except OSError as exc:
            met.append(exc)

    threads = [threading.Thread(target=come_by) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(met) == 1


@pytest.mark.parametrize("name", ["s1-g1", "s000001", "", "../s000001-g1"])
def test_a_name_that_is_no_id_is_answered(
    name: str, start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    import msgspec

    start_writer()
    rank = make_rank()
    rank.attach(contents(0, 1))
    rank.link.write(msgspec.structs.replace(order(place, 1), id=name))
    assert "not a snapshot id" in (rank.part().why or "")
    assert not place.exists()


def test_a_note_that_is_cut_short_or_flipped_shows() -> None:
    about = marker.Part(rank=1, file="__1_0.distcp", bytes=1, xxh3="ab", write_s=0.0)
    note = Note(id="s000001-g1", job="j", part=about)
    whole = part.to_bytes(note)
    assert part.from_bytes(whole, name="n") == note
    for position in range(8 * len(whole)):
        data = bytearray(whole)
        data[position // 8] ^= 1 << position % 8
        try:
            assert part.from_bytes(bytes(data), name="n") == note
        except SnapshotError:
            continue
    for size in range(len(whole)):
        with pytest.raises(SnapshotError):
            part.from_bytes(whole[:size], name="n")
