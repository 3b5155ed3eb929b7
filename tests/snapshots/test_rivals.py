"""Several writers want the same: two leads, an older generation, another job, an attempt before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.snapshots.conftest import StartWriter
from tests.snapshots.ranks import MakeRank, contents, order
from tests.snapshots.test_faults import good
from tests.snapshots.test_writer import deadline

from everstep.snapshots import marker, part
from everstep.snapshots.faults import Faults
from everstep.snapshots.orders import Policy
from everstep.snapshots.part import Note
from everstep.snapshots.places import Folder
from everstep.snapshots.writer.commit import Commit
from everstep.snapshots.writer.write import write_part


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


def test_a_complete_one_is_never_written_over(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    rank = make_rank()
    assert rank.save(place, 1).why is None
    assert "exists already" in (rank.save(place, 1, metadata=b"other").why or "")
    assert good(place) == ["s000001-g1"]


def test_of_two_leads_of_one_id_one_wins(
    start_writer: StartWriter, make_rank: MakeRank, short: Path, place: Path
) -> None:
    other = short / "other"
    other.mkdir()
    start_writer("before-fsync:sleep=1")
    theirs = start_writer(folder=other)
    first, second = make_rank(), type(make_rank())(theirs.path)
    first.order(place, 1)
    deadline((place / "s000001-g1" / "__0_0.distcp").exists)
    assert "being written by another process" in (second.save(place, 1).why or "")
    second.close()
    assert first.part().why is None
    assert first.done().why is None
    assert good(place) == ["s000001-g1"]


def test_two_ranks_of_one_writer_cannot_order_the_same(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer("before-fsync:sleep=0.5", grace_s=5)
    first, second = make_rank(), make_rank()
    first.order(place, 1)
    deadline((place / "s000001-g1").is_dir)
    assert "being written already" in (second.save(place, 1).why or "")
    assert first.part().why is None


@pytest.mark.parametrize("how", ["claimed", "committed"])
def test_a_thawed_writer_of_an_older_generation_puts_nothing_down(
    how: str, start_writer: StartWriter, make_rank: MakeRank, tmp_path: Path, place: Path
) -> None:
    start_writer()
    rank = make_rank()
    claims = tmp_path / "generations"
    claims.mkdir()
    assert rank.save(place, 10).why is None
    if how == "claimed":
        (claims / "2").touch()
    else:
        assert rank.save(place, 8, generation=2).why is None
    done = rank.save(place, 20, generations=str(claims), policy=Policy(keep=1))
    assert "this is 1" in (done.why or "")
    assert not (place / "s000020-g1").exists()
    assert "s000010-g1" in good(place)
    assert (place / "latest").readlink().name == (
        "s000010-g1" if how == "claimed" else "s000008-g2"
    )


class Overtaken(Folder):
    """A folder in which a newer generation commits just before `latest` is first moved."""

    overtaken = False

    def point_latest(self, id_: str) -> None:
        if not self.overtaken:
            self.overtaken = True
            put_down(self.path, 8, generation=2)
        super().point_latest(id_)


def put_down(place: Path, step: int, *, generation: int, into: Folder | None = None) -> None:
    made, folder = order(place, step, generation=generation), into or Folder(place)
    write_part(made, memoryview(contents(0, step)), folder, faults=Faults())
    Commit(made, b"", folder, faults=Faults(), pause=time.sleep, give_up=lambda: None).run()


def test_latest_never_goes_back_whenever_its_mover_was_frozen(place: Path) -> None:
    put_down(place, 20, generation=1, into=Overtaken(place))
    assert good(place) == ["s000008-g2", "s000020-g1"]
    assert (place / "latest").readlink().name == "s000008-g2"


def test_notes_of_another_job_do_not_count(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    lead = make_rank()
    lead.order(place, 1, parts=2, deadline_s=0.5)
    lead.part()
    stray = marker.Part(rank=1, file="__1_0.distcp", bytes=1, xxh3="", write_s=0.0)
    note = Note(id="s000001-g1", job="another", part=stray)
    (place / "s000001-g1" / part.file_name(1)).write_bytes(part.to_bytes(note))
    assert "those of rank 1" in (lead.done().why or "")


def test_parts_of_an_earlier_attempt_do_not_count(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    lead, peer = make_rank(), make_rank(1)
    peer.order(place, 1, parts=2)
    assert peer.part().why is None
    lead.order(place, 1, parts=2, attempt=1)
    assert lead.part().why is None
    assert lead.replies.empty()
    peer.order(place, 1, parts=2, attempt=1)
    assert peer.part().why is None
    assert lead.done().why is None
    assert good(place) == ["s000001-g1"]


def test_what_another_job_left_under_the_name_is_put_aside_by_the_first_of_all_ranks(
    start_writer: StartWriter, make_rank: MakeRank, place: Path
) -> None:
    start_writer()
    assert make_rank(job="before").save(place, 1).why is None
    ranks = [make_rank(r) for r in range(4)]
    for rank in ranks:
        rank.order(place, 1, parts=4)
    assert [rank.part().why for rank in ranks] == [None] * 4
    assert ranks[0].done().why is None
    assert marker.verify(place / "s000001-g1").world_size == 4
    (aside,) = place.glob("s000001-g1.aside-*")
    assert marker.verify(aside).job == "before"
