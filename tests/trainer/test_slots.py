"""A slot says what is in it, whenever its rank died; memory is asked for before it is taken."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from everstep.snapshots.marker import Marker, SnapshotError
from everstep.trainer.snapshot.budget import free_bytes
from everstep.trainer.snapshot.layout import RECORD_BYTES, TABLE_START, Layout, Part, build
from everstep.trainer.snapshot.memory import SlotSource
from everstep.trainer.snapshot.slot import Sealed, Slot
from everstep.trainer.snapshot.source import Request


def part(name: str, *shape: int) -> Part:
    return Part(name, "float32", shape, shape, (0,) * len(shape))


def layout(*names: str) -> Layout:
    return build([part(name, 100) for name in names], filed=names[:1])


def facts(step: int) -> Marker:
    id_ = f"s{step:06d}-g1"
    return Marker(id=id_, step=step, generation=1, job="j", world_size=1, seed=0, samples=0)


def fill(slot: Slot, value: float) -> None:
    for piece in slot.table().pieces:
        slot.view(piece).fill_(value)


def seal(slot: Slot, step: int) -> None:
    sums = [slot.checksum(start, size) for start, size in slot.table().regions()]
    slot.seal(Sealed(facts=facts(step), rank=0, sums=sums))


def reopened(slot: Slot) -> Slot:
    return Slot.open_(os.dup(slot.fd))


def value_of(slot: Slot) -> float:
    target = torch.empty(100)
    SlotSource(slot).load([Request("b", target, (0,))])
    return target[0].item()


@pytest.fixture
def slot() -> Slot:
    made = Slot.create(layout("a", "b"))
    made.begin()
    fill(made, 1.0)
    seal(made, 1)
    return made


def test_another_process_finds_what_was_sealed(slot: Slot) -> None:
    found = reopened(slot)
    assert found.sealed == slot.sealed
    assert value_of(found) == 1.0


def test_one_that_is_being_filled_again_holds_nothing(slot: Slot) -> None:
    slot.begin()
    assert reopened(slot).sealed is None
    fill(slot, 2.0)
    assert reopened(slot).sealed is None, "its rank died before it was sealed"
    seal(slot, 2)
    found = reopened(slot)
    assert found.sealed is not None
    assert found.sealed.facts.step == 2
    assert value_of(found) == 2.0


@pytest.mark.parametrize("cut", [1, 4, 8, 12])
def test_a_record_that_was_cut_short_leaves_the_one_before(slot: Slot, cut: int) -> None:
    before = bytes(slot.bytes[: 2 * RECORD_BYTES].numpy())
    slot.begin()
    after = bytes(slot.bytes[: 2 * RECORD_BYTES].numpy())
    (start,) = [s for s in (0, RECORD_BYTES) if before[s : s + 500] != after[s : s + 500]]
    torn = bytearray(before[start : start + RECORD_BYTES])
    torn[:cut] = after[start : start + cut]
    slot.bytes[start : start + RECORD_BYTES] = torch.frombuffer(torn, dtype=torch.uint8)
    found = reopened(slot)
    assert found.sealed is not None, "nothing had been changed yet"
    assert value_of(found) == 1.0


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (lambda _: TABLE_START + 5, "table is damaged"),
        (lambda slot: slot.table().pieces[0].offset, "memory is damaged"),
        (lambda slot: slot.table().pieces[1].offset + 399, "memory is damaged"),
    ],
)
def test_damage_is_seen(slot: Slot, where: Callable[[Slot], int], words: str) -> None:
    slot.bytes[where(slot)] ^= 1
    with pytest.raises(SnapshotError, match=words):
        value_of(slot)


def test_memory_that_is_no_slot_is_told_from_one() -> None:
    fd = os.memfd_create("nothing")
    os.truncate(fd, 2 * RECORD_BYTES)
    strange = Slot.open_(fd)
    assert strange.sealed is None
    with pytest.raises(SnapshotError, match="neither record"):
        strange.table()
    empty = os.memfd_create("empty")
    with pytest.raises(OSError, match="cannot be mapped"):
        Slot.open_(empty)
    os.close(empty)


def test_a_slot_is_used_again_only_for_the_layout_that_it_was_made_for(slot: Slot) -> None:
    found = reopened(slot)
    assert found.adopt(layout("a", "b"), appended=b"")
    assert found.sealed == slot.sealed, "what it holds stays"
    assert not found.adopt(layout("a", "c"), appended=b"")
    assert not found.adopt(layout("a", "b"), appended=b"metadata")


def test_a_slot_cannot_be_cut_off_under_a_reader(slot: Slot) -> None:
    with pytest.raises(PermissionError):
        os.truncate(slot.fd, 10)


# ------------------------------------------------------------------------------ the budget


def machine(folder: Path, available_kib: int) -> Path:
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available_kib} kB\n")
    (proc / "self/cgroup").write_text("0::/a/b\n5:cpu,memory:/old\n")
    return proc


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("available_kib", "inner", "outer", "old", "expected"),
    [
        (1000, "max", "max", "9223372036854771712", 1000 * 1024),
        (1000, "500000", "max", "9223372036854771712", 500_000 - 100_000 + 50_000),
        (1000, "max", "400000", "9223372036854771712", 400_000 - 100_000 + 50_000),
        (1000, "max", "max", "300000", 300_000 - 200_000 + 20_000),
        (1000, "90000", "max", "9223372036854771712", 40_000),
    ],
)
def test_the_narrowest_limit_counts(
    available_kib: int, inner: str, outer: str, old: str, expected: int, tmp_path: Path
) -> None:
    proc, sys = machine(tmp_path, available_kib), tmp_path / "sys"
    used = {"memory__current": "100000\n", "memory__stat": "anon 5\ninactive_file 50000\n"}
    group(sys / "a/b", memory__max=inner, **used)
    group(sys / "a", memory__max=outer, **used)
    group(
        sys / "memory/old",
        memory__limit_in_bytes=old,
        memory__usage_in_bytes="200000",
        memory__stat="total_inactive_file 20000\n",
    )
    assert free_bytes(proc=proc, sys=sys) == int(expected * 0.9)


def test_a_machine_that_says_nothing_is_not_taken_for_full(tmp_path: Path) -> None:
    assert free_bytes(proc=tmp_path, sys=tmp_path) > 2**50
