"""Saving: isolated from later updates, verified to the bit, and no disk stops training."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
import torch.distributed as dist

from everstep.sdk import Finding
from everstep.snapshots import catalogue, marker
from everstep.snapshots.marker import Marker, SnapshotError
from everstep.trainer.snapshot.engine import Engine, Outside, Wishes
from everstep.trainer.snapshot.files import HashedFiles
from everstep.trainer.snapshot.restore import Restored, restore
from everstep.trainer.snapshot.save import Saver
from everstep.wire.ids import SnapshotId

DEADLINE_S = 30.0
MakeFiles = Callable[[], HashedFiles]


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of one."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, not in its stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    own = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    assert own is not None
    yield own
    dist.destroy_process_group()


class Bench:
    """One engine with everything it talks to."""

    def __init__(self, folder: Path, group: dist.ProcessGroup, files: MakeFiles) -> None:
        self.folder = folder
        self.group = group
        self.findings: list[Finding] = []
        self.commits: list[Marker] = []
        self.acknowledged = True
        self.stale: str | None = None
        self.wishes = Wishes()
        saver = Saver(folder, group, stale=lambda: self.stale, clock=lambda: 5.0, files=files)
        outside = Outside(
            self.findings.append,
            lambda found, *_: self.commits.append(found),
            lambda _: self.acknowledged,
            lambda: 5.0,
        )
        self.engine = Engine(saver, outside, self.wishes, first=True)

    def take(self, tensors: dict[str, torch.Tensor], step: int, *, generation: int = 1) -> None:
        facts = Marker(
            id=str(SnapshotId(step, generation)),
            step=step,
            generation=generation,
            job="j",
            world_size=1,
            seed=0,
            samples=step * 12,
        )
        self.engine.take(tensors, facts)

    def save(self, tensors: dict[str, torch.Tensor], step: int, *, generation: int = 1) -> None:
        self.take(tensors, step, generation=generation)
        assert self.engine.wait(DEADLINE_S)

    def load(self, *ids: str) -> Restored | None:
        self.rejected: list[str] = []
        return restore(
            self.folder,
            [SnapshotId.parse(i) for i in ids],
            group=self.group,
            wanted=lambda _: True,
            rejected=lambda id_, why: self.rejected.append(f"{id_}: {why}"),
        )

    def names(self) -> list[str]:
        return [str(e.id) for e in catalogue.entries(self.folder) if e.committed]


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(group: dist.ProcessGroup, tmp_path: Path) -> Iterator[MakeBench]:
    made: list[Bench] = []

    def make(folder: Path | None = None, files: Callable[[], HashedFiles] = HashedFiles) -> Bench:
        made.append(Bench(folder or tmp_path / "snapshots", group, files))
        return made[-1]

    yield make
    for one in made:
        assert one.engine.close(DEADLINE_S)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((1000,), value), "model.b": torch.tensor(value)}


class Gated(HashedFiles):
    """Opens no file before the gate does."""

    gate = threading.Event()

    def open(self, path: Path) -> BinaryIO:
        assert self.gate.wait(DEADLINE_S)
        return super().open(path)


def test_what_training_changes_after_the_copy_is_not_in_the_snapshot(bench: MakeBench) -> None:
    Gated.gate.clear()
    made = bench(files=Gated)
    live = weights(1.0)
    made.take(live, step=10)
    for tensor in live.values():
        tensor.fill_(2.0)
    Gated.gate.set()
    assert made.engine.wait(DEADLINE_S)

    loaded = made.load("s000010-g1")
    assert loaded is not None
    assert all(torch.equal(loaded.tensors[k], v) for k, v in weights(1.0).items())
    assert loaded.marker.samples == 120
    assert [m.id for m in made.commits] == ["s000010-g1"]


def test_plain_torch_reads_it(bench: MakeBench) -> None:
    made = bench()
    model = torch.nn.Linear(3, 2)
    made.save({f"model.{k}": v for k, v in model.state_dict().items()}, step=1)

    from torch.distributed.checkpoint.state_dict_loader import load

    other = torch.nn.Linear(3, 2)
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=made.folder / "s000001-g1")
    assert torch.equal(other.weight, model.weight)


def damage_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("fault", [damage_bit, truncate, Path.unlink])
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "COMMIT.json"])
def test_any_damage_is_seen_and_the_one_before_is_taken(
    file: str, fault: Callable[[Path], None], bench: MakeBench
) -> None:
    made = bench()
    for step in (1, 2):
        made.save(weights(float(step)), step)
    fault(made.folder / "s000002-g1" / file)

    loaded = made.load("s000002-g1", "s000001-g1")
    assert loaded is not None
    assert loaded.tensors["model.b"].item() == 1.0
    assert len(made.rejected) == 1
    assert file in made.rejected[0]


def test_every_single_bit_of_the_marker_counts() -> None:
    facts = Marker(id="s000001-g1", step=1, generation=1, job="j", world_size=1, seed=0, samples=12)
    whole = marker.seal(facts)
    assert marker.unseal(whole) == facts
    for position in range(8 * len(whole)):
        data = bytearray(whole)
        data[position // 8] ^= 1 << position % 8
        try:
            assert marker.unseal(bytes(data)) == facts, "a flip that changes nothing, if any"
        except SnapshotError:
            continue


def test_when_none_is_good_it_says_what_is_wrong_with_each(bench: MakeBench) -> None:
    made = bench()
    made.save(weights(1.0), 1)
    truncate(made.folder / "s000001-g1" / "__0_0.distcp")
    with pytest.raises(SnapshotError) as caught:
        made.load("s000009-g4", "s000001-g1")
    assert "s000009-g4 does not exist" in str(caught.value)
    assert "bytes, " in str(caught.value)
    assert made.load() is None, "no names means: begin"


class Failing(HashedFiles):
    """A disk with one fault, once."""

    fault: OSError | None = None
    at = ""

    def open(self, path: Path) -> BinaryIO:
        if self.at in path.name and (fault := Failing.fault):
            Failing.fault = None
            raise fault
        return super().open(path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("at", ["distcp", "metadata"])
def test_a_disk_error_costs_that_snapshot_only(
    at: str, number: int, bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(files=Failing)
    made.save(weights(1.0), 1)
    monkeypatch.setattr(Failing, "at", at)
    monkeypatch.setattr(Failing, "fault", OSError(number, os.strerror(number)))
    made.save(weights(2.0), 2)
    assert os.strerror(number) in (made.engine.last_error or "")
    assert [f.name for f in made.findings] == ["snapshot.failed"]
    assert not (made.folder / "s000002-g1").exists(), "half of one must not eat the space"

    made.save(weights(3.0), 3)
    assert made.engine.last_error is None
    assert made.names() == ["s000001-g1", "s000003-g1"]
    loaded = made.load("s000003-g1")
    assert loaded is not None
    assert loaded.tensors["model.b"].item() == 3.0


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full_is_survived(bench: MakeBench, tiny_disk: Path) -> None:
    made = bench(tiny_disk / "snapshots")
    made.save(weights(1.0), 1)
    made.save({"model.big": torch.ones(100_000)}, 2)
    assert "No space left on device" in (made.engine.last_error or "")
    made.save(weights(3.0), 3)
    assert made.names() == ["s000001-g1", "s000003-g1"]


def test_retention_keeps_the_newest_and_deletes_nothing_unacknowledged(bench: MakeBench) -> None:
    made = bench()
    made.wishes.policy(keep=2, at_end=True, wait_when_busy=False)
    made.acknowledged = False
    for step in range(1, 5):
        made.save(weights(float(step)), step)
    assert made.names() == [f"s{n:06d}-g1" for n in range(1, 5)]
    made.acknowledged = True
    made.save(weights(5.0), 5)
    made.engine.close(DEADLINE_S)
    assert made.names() == ["s000004-g1", "s000005-g1"]


def test_a_stale_generation_neither_commits_nor_deletes(bench: MakeBench) -> None:
    made = bench()
    made.wishes.policy(keep=2, at_end=True, wait_when_busy=False)
    made.save(weights(1.0), 1)
    made.save(weights(1.0), 2, generation=2)
    made.stale = "generation 2 has taken over"
    made.save(weights(9.0), 9)
    made.stale = None
    made.save(weights(9.0), 11)
    made.save(weights(9.0), 12)
    assert made.names() == ["s000001-g1", "s000002-g2", "s000011-g1", "s000012-g1"]


def test_what_an_earlier_job_left_under_the_same_name_is_moved_aside(bench: MakeBench) -> None:
    made = bench()
    made.save(weights(1.0), 1)
    made.save(weights(2.0), 1)
    loaded = made.load("s000001-g1")
    assert loaded is not None
    assert loaded.tensors["model.b"].item() == 2.0
    assert (made.folder / "s000001-g1.aside" / marker.NAME).exists()
