"""The same promises in a folder, in fsspec's memory and in a folder through fsspec."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import xxhash
from fsspec.implementations.local import LocalFileSystem
from tests.snapshots.ranks import contents, order

from everstep.snapshots import catalogue, marker, verify
from everstep.snapshots.faults import Faults, from_text
from everstep.snapshots.marker import Marker
from everstep.snapshots.places import Folder, Place, TakenError, open_place
from everstep.snapshots.places.remote import Remote
from everstep.snapshots.sealed import SnapshotError
from everstep.snapshots.writer.commit import Commit
from everstep.snapshots.writer.write import write_part

KINDS = ("folder", "memory", "fsspec-local")


class Places:
    """Opens one and the same place with different faults."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.url = f"memory://{uuid.uuid4().hex}/run"

    def open(self, faults: Faults) -> Place:
        if self.kind == "folder":
            return Folder(self.path, faults)
        if self.kind == "memory":
            return open_place(self.url, faults=faults)
        return Remote(f"fsspec:{self.path}", LocalFileSystem(), str(self.path), faults)


@pytest.fixture(params=KINDS)
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    made = Places(request.param, tmp_path / "run")
    yield made
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def save(places: Places, step: int, *, parts: int = 1, fault: str = "", job: str = "j") -> Marker:
    """Write all parts and the marker, in this process."""
    faults = from_text(fault)
    place = places.open(faults)
    for rank in reversed(range(parts)):
        one = order(place.where, step, rank=rank, parts=parts, job=job, deadline_s=1.0)
        write_part(one, memoryview(contents(rank, step)), place, faults=faults)
    lead = order(place.where, step, parts=parts, job=job, deadline_s=1.0)
    return Commit(
        lead, b"planned", place, faults=faults, pause=lambda _: None, give_up=lambda: None
    ).run()


def test_what_was_saved_is_listed_read_and_verified(places: Places) -> None:
    place = places.open(Faults())
    assert (place.names(), place.latest()) == ([], None)
    save(places, 1, parts=2)
    save(places, 2)
    assert place.names() == ["s000001-g1", "s000002-g1"]
    assert place.latest() == "s000002-g1"
    files = ["__0_0.distcp", "__1_0.distcp", ".metadata", "part-00000.json", "part-00001.json"]
    assert set(place.files("s000001-g1")) == {*files, "COMMIT.json"}
    found = verify.read_marker(place, "s000001-g1")
    assert verify.damages(place, "s000001-g1", found, threads=2) == []
    assert place.size("s000001-g1", ".metadata") == 7
    with place.open("s000001-g1", "__1_0.distcp") as stream:
        stream.seek(1000)
        assert stream.read(5) == contents(1, 1)[1000:1005]
    assert [(str(e.id), e.committed, e.job) for e in catalogue.entries(place)] == [
        ("s000001-g1", True, "j"),
        ("s000002-g1", True, "j"),
    ]


def test_nothing_that_is_missing_looks_as_if_it_were_there(places: Places) -> None:
    place = places.open(Faults())
    assert place.files("s000001-g1") == []
    save(places, 1)
    with pytest.raises(FileNotFoundError):
        place.read("s000001-g1", "nothing")
    with pytest.raises(FileNotFoundError):
        place.size("s000009-g1", "COMMIT.json")
    place.remove_file("s000001-g1", "nothing")
    with pytest.raises(SnapshotError, match="has no s000009-g1"):
        verify.read_marker(place, "s000009-g1")


def test_of_what_is_removed_the_marker_goes_first(places: Places) -> None:
    save(places, 1)
    planned = from_text("mid-retention:eio")
    place = places.open(planned)
    with pytest.raises(OSError, match="injected"):
        place.remove("s000001-g1")
    assert "COMMIT.json" not in place.files("s000001-g1")
    assert "__0_0.distcp" in place.files("s000001-g1")
    place.remove("s000001-g1")
    assert place.files("s000001-g1") == []
    place.remove("s000001-g1")


def test_what_a_thawed_writer_puts_down_meanwhile_is_removed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "s000001-g1"
    folder.mkdir()
    (folder / "__0_0.distcp").touch()
    real, calls = shutil.rmtree, []

    def meanwhile(path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:  # it has looked what there is, then a marker comes
            (path / "__0_0.distcp").unlink()
            (path / marker.NAME).touch()
            path.rmdir()
        real(path)

    monkeypatch.setattr(shutil, "rmtree", meanwhile)
    Folder(tmp_path).remove(folder.name)
    assert not folder.exists()


@pytest.mark.parametrize(
    "point", ["before-open", "mid-file", "before-part", "before-metadata", "before-marker"]
)
def test_an_error_anywhere_leaves_no_marker_and_can_be_tried_again(
    places: Places, point: str
) -> None:
    save(places, 1)
    with pytest.raises(SnapshotError, match="injected"):
        save(places, 2, fault=f"{point}:eio")
    place = places.open(Faults())
    assert "COMMIT.json" not in place.files("s000002-g1")
    assert place.latest() == "s000001-g1"
    save(places, 2)
    found = verify.read_marker(place, "s000002-g1")
    assert verify.damages(place, "s000002-g1", found, threads=1) == []


def test_a_complete_one_is_never_written_over(places: Places) -> None:
    save(places, 1)
    with pytest.raises(TakenError, match="exists already"):
        save(places, 1)


def test_an_earlier_jobs_snapshot_of_that_name_makes_way(places: Places) -> None:
    save(places, 1, parts=2, job="before")
    save(places, 1, job="now")
    place = places.open(Faults())
    found = verify.read_marker(place, "s000001-g1")
    assert (found.job, set(found.files)) == ("now", {"__0_0.distcp", ".metadata"})
    assert verify.damages(place, "s000001-g1", found, threads=1) == []


def test_every_damage_is_found_not_only_the_first(tmp_path: Path) -> None:
    places = Places("folder", tmp_path)
    found = save(places, 1, parts=4)
    place = places.open(Faults())
    folder = tmp_path / "s000001-g1"
    (folder / "__0_0.distcp").unlink()
    with (folder / "__1_0.distcp").open("r+b") as stream:
        stream.write(b"?")
    with (folder / "__2_0.distcp").open("ab") as stream:
        stream.write(b"?")
    assert verify.damages(place, "s000001-g1", found, threads=4) == [
        "__0_0.distcp is missing",
        "__1_0.distcp is damaged: its checksum does not fit",
        "__2_0.distcp has 300001 bytes, 300000 were written",
    ]
    assert verify.quick_look(place, "s000001-g1", found) == [
        "__0_0.distcp is missing",
        "__2_0.distcp has 300001 bytes, 300000 were written",
    ]


def test_a_url_that_nothing_here_understands_says_what_to_install() -> None:
    with pytest.raises(SnapshotError, match="s3fs"):
        open_place("s3://bucket/run")
    with pytest.raises(SnapshotError, match="nonsense"):
        open_place("nonsense://x")
    assert isinstance(open_place("file:///tmp/x"), Folder)


def test_the_first_format_is_still_read() -> None:
    old = (
        b'{"xxh3":"%s","marker":{"id":"s000001-g1","step":1,"generation":1,"job":"j",'
        b'"world_size":1,"seed":0,"samples":12,"files":{},"committed_at_s":5.0,"skip_windows":[],'
        b'"final":false,"format":1}}'
    )
    body = old.partition(b'"marker":')[2][:-1]
    found = marker.unseal(old % xxhash.xxh3_64_hexdigest(body).encode())
    assert (found.format, found.parts, found.samples) == (1, [], 12)
    newer = body.replace(b'"format":1', b'"format":9')
    sealed = b'{"xxh3":"%s","marker":%s}' % (xxhash.xxh3_64_hexdigest(newer).encode(), newer)
    with pytest.raises(SnapshotError, match="format 9"):
        marker.unseal(sealed)
