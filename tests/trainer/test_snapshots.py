"""Saving: isolated from later updates, verified to the bit, and no disk stops training."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.trainer.snapshot_bench import DEADLINE_S, Bench, Values, alone, bench, same

from everstep.snapshots import marker
from everstep.snapshots.marker import Marker, SnapshotError

MakeBench = Callable[..., Bench]


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of one."""
    yield alone()
    dist.destroy_process_group()


@pytest.fixture
def make(group: dist.ProcessGroup, tmp_path: Path) -> Iterator[MakeBench]:
    with ExitStack() as stack:

        def start(folder: Path | None = None, **options: Any) -> Bench:
            return stack.enter_context(bench(folder or tmp_path / "snapshots", group, **options))

        yield start


def weights(value: float) -> dict[str, Values]:
    return {"model": Values(a=torch.full((1000,), value), b=torch.tensor(value))}


def training(*, seed: int = 0, width: int = 300) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    objects = {"model": model, "optimizer": optimizer}
    train(objects)
    return objects


def train(objects: dict[str, Any]) -> None:
    model, optimizer = objects["model"], objects["optimizer"]
    model(torch.rand(4, model[0].in_features)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(objects: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{k}": v.clone() for k, v in objects["model"].state_dict().items()}
    for number, state in objects["optimizer"].state_dict()["state"].items():
        found |= {f"optimizer.{number}.{k}": v.clone() for k, v in state.items()}
    return found


def test_what_training_changes_after_the_call_is_not_in_the_snapshot(make: MakeBench) -> None:
    made = make()
    objects = training()
    before = values(objects)
    made.take(objects, 10)
    objects["model"][1].running_mean.fill_(7.0)  # a buffer changes during the next forward
    made.engine.wait_copied()
    train(objects)
    assert made.engine.wait(DEADLINE_S)
    assert any(not same(v, before[k]) for k, v in values(objects).items())

    other = training(seed=5)
    found = made.load(other, "s000010-g1")
    assert found is not None
    assert found.marker.samples == 120
    after = values(other)
    assert after.keys() == before.keys()
    assert all(same(after[k], v) for k, v in before.items())


def test_the_tensors_that_exist_are_loaded_into_and_nothing_is_copied_twice(
    make: MakeBench,
) -> None:
    made = make()
    made.save(training(), 1)
    other = training(seed=5)
    places = {k: v.data_ptr() for k, v in other["model"].state_dict().items()}
    moments = {id(p): s["exp_avg"].data_ptr() for p, s in other["optimizer"].state.items()}
    made.load(other, "s000001-g1")
    assert places == {k: v.data_ptr() for k, v in other["model"].state_dict().items()}
    assert moments == {id(p): s["exp_avg"].data_ptr() for p, s in other["optimizer"].state.items()}


def test_a_tensor_that_changes_while_it_is_copied_costs_that_snapshot_and_no_other(
    make: MakeBench,
) -> None:
    made = make()
    objects = training(width=2000)
    gate = objects["model"][0].weight
    made.engine.lay_out(lambda: made.content(objects).state({}))
    for step in range(1, 30):
        made.take(objects, step)
        with torch.no_grad():
            gate.add_(1.0)  # nobody steps, so nobody waits
        made.engine.wait_copied()
        assert made.engine.wait(DEADLINE_S)
        if made.findings:
            break
    else:
        pytest.skip("the copies were always faster than this thread")
    assert "model.0.weight changed while being copied" in made.findings[0].summary
    assert f"s{step:06d}-g1" not in made.names()

    expected = gate.detach().clone()
    made.take(objects, 99)
    with torch.no_grad():
        gate.add_(1.0)
    made.engine.wait_copied()
    assert made.engine.wait(DEADLINE_S)
    other = training(seed=5, width=2000)
    made.load(other, "s000099-g1")
    assert same(other["model"][0].weight, expected), "from then on it is copied at once"


STRANGE: dict[str, torch.Tensor] = {
    "nothing": torch.empty(0, 3),
    "one": torch.tensor(3.0),
    "bf16": torch.randn(7, 3).bfloat16(),
    "fp8": torch.randn(9).to(torch.float8_e4m3fn),
    "int": torch.arange(5),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(4, dtype=torch.complex64),
    "conj": torch.randn(4, dtype=torch.complex64).conj(),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(100_000.0)[::2],
    "channels_last": torch.randn(4, 8, 20, 20).to(memory_format=torch.channels_last),
    "expanded": torch.tensor([1.0]).expand(5),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "large": torch.randn(50_000),
}


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_tensors_of_any_kind_come_back_to_the_bit(tier: str, make: MakeBench) -> None:
    made = make()
    base = torch.arange(10.0)
    tied = {"view": base[2:5], "whole": base, "again": base}
    objects = {"odd": Values(**STRANGE, **tied, plain=[1, None, "x", b"y", {3: (4.5,)}])}
    made.save(objects, 1)
    other = {"odd": Values()}
    found = made.load(other, "s000001-g1", tiers=tier)
    assert found is not None
    assert found.tier == tier
    assert other["odd"].values["plain"] == [1, None, "x", b"y", {3: (4.5,)}]
    for name, tensor in (STRANGE | tied).items():
        assert same(other["odd"].values[name], tensor.resolve_conj()), name


def test_what_cannot_be_described_is_refused_by_name(make: MakeBench) -> None:
    made = make()
    with pytest.raises(SnapshotError, match=r"odd\.sparse is a .*sparse"):
        made.save({"odd": Values(sparse=torch.ones(3).to_sparse())}, 1)


def test_plain_torch_reads_it(make: MakeBench) -> None:
    made = make()
    model = torch.nn.Linear(3, 2)
    made.save({"model": model}, 1)

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
    file: str, fault: Callable[[Path], None], make: MakeBench
) -> None:
    made = make()
    for step in (1, 2):
        made.save(weights(float(step)), step)
    fault(made.folder / "s000002-g1" / file)

    objects = weights(0.0)
    assert made.load(objects, "s000002-g1", "s000001-g1")
    assert objects["model"].values["b"].item() == 1.0
    assert len(made.rejected) == 1
    assert file in made.rejected[0]


def test_every_single_bit_of_the_file_counts(make: MakeBench) -> None:
    made = make()
    made.save({"model": Values(a=torch.arange(3.0))}, 1)
    path = made.folder / "s000001-g1" / "__0_0.distcp"
    whole = path.read_bytes()
    for position in range(0, 8 * len(whole), 997):
        data = bytearray(whole)
        data[position // 8] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(SnapshotError, match="damaged"):
            made.load({"model": Values()}, "s000001-g1")


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


def test_when_none_is_good_it_says_what_is_wrong_with_each(make: MakeBench) -> None:
    made = make()
    made.save(weights(1.0), 1)
    truncate(made.folder / "s000001-g1" / "__0_0.distcp")
    with pytest.raises(SnapshotError) as caught:
        made.load(weights(0.0), "s000009-g4", "s000001-g1")
    assert "s000009-g4 does not exist" in str(caught.value)
    assert "bytes, " in str(caught.value)
    assert made.load(weights(0.0)) is None, "no names means: begin"


@pytest.mark.parametrize("fault", ["enospc", "eio"])
@pytest.mark.parametrize("point", ["mid-file", "before-metadata"])
def test_a_disk_error_costs_that_snapshot_only(point: str, fault: str, make: MakeBench) -> None:
    made = make(fault=f"{point}:{fault}#2")
    for step in (1, 2, 3):
        made.save(weights(float(step)), step)
        if step == 2:
            assert [f.name for f in made.findings] == ["snapshot.failed"]
            assert made.engine.last_error
            assert not (made.folder / "s000002-g1").exists(), "half of one must not eat the space"
    assert made.engine.last_error is None
    assert made.names() == ["s000001-g1", "s000003-g1"]
    objects = weights(0.0)
    assert made.load(objects, "s000003-g1")
    assert objects["model"].values["b"].item() == 3.0


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


def test_a_disk_that_is_really_full_is_survived(make: MakeBench, tiny_disk: Path) -> None:
    made = make(tiny_disk / "snapshots")
    made.save(weights(1.0), 1)
    big = {"model": Values(a=torch.ones(100_000))}
    made.take(big, 2)
    assert made.engine.misfit == "model.b is no longer in the state"
    made.save(big, 3)
    assert "No space left on device" in (made.engine.last_error or "")
    made.engine.misfit = "again"
    made.save(weights(4.0), 4)
    assert made.names() == ["s000001-g1", "s000004-g1"]


def test_state_that_grows_costs_one_snapshot_and_is_laid_out_anew(make: MakeBench) -> None:
    made = make()
    model = Values(a=torch.ones(10))
    made.save({"model": model}, 1)
    model.values["b"] = torch.ones(20)
    made.save({"model": model}, 2)
    assert made.names() == ["s000001-g1"]
    assert "model.b is new in the state" in made.findings[0].summary
    made.save({"model": model}, 3)
    model.values["text"] = "x" * 300_000
    made.save({"model": model}, 4)
    assert "outgrown" in made.findings[1].summary
    made.save({"model": model}, 5)
    assert made.names() == ["s000001-g1", "s000003-g1", "s000005-g1"]
    other = Values()
    made.load({"model": other}, "s000005-g1")
    assert len(other.values["text"]) == 300_000


def test_the_newest_whole_slot_is_never_the_one_that_is_filled(make: MakeBench) -> None:
    made = make()
    for step in range(1, 5):
        made.save(weights(float(step)), step, disk=False)
        objects = weights(0.0)
        assert made.load(objects, f"s{step:06d}-g1", tiers="memory")
        assert objects["model"].values["b"].item() == step
    held = sorted(s.sealed.facts.step for s in made.engine.slots.slots if s.sealed)
    assert held == [3, 4]
    assert made.names() == [], "nobody asked for disk"
    assert made.held == [f"s{step:06d}-g1" for step in range(1, 5)]


def test_a_damaged_slot_falls_to_the_disk_and_says_so(make: MakeBench) -> None:
    made = make()
    made.save(weights(1.0), 1)
    slot = next(s for s in made.engine.slots.slots if s.sealed)
    slot.bytes[-5000] ^= 1
    objects = weights(0.0)
    found = made.load(objects, "s000001-g1", tiers="both")
    assert found is not None
    assert found.tier == "disk"
    assert objects["model"].values["b"].item() == 1.0
    assert made.rejected == [
        "s000001-g1 memory: the slot's memory is damaged: its checksum does not fit"
    ]


def test_without_memory_there_are_no_snapshots_and_training_goes_on(make: MakeBench) -> None:
    made = make(slots=0)
    made.save(weights(1.0), 1)
    assert "no memory" in made.findings[0].summary
    assert not made.engine.busy(disk=True)


def test_one_slot_is_enough_for_the_disk(make: MakeBench) -> None:
    made = make(slots=1)
    for step in (1, 2, 3):
        made.save(weights(float(step)), step)
    assert made.names() == ["s000001-g1", "s000002-g1", "s000003-g1"]


def test_while_one_is_written_there_is_room_for_one_in_memory(make: MakeBench) -> None:
    made = make(fault="before-open:sleep=1")
    made.take(weights(1.0), 1)
    assert made.engine.wait_ready(DEADLINE_S, disk=False)
    assert made.engine.busy(disk=True)
    made.take(weights(2.0), 2, disk=False)
    assert made.engine.wait_ready(DEADLINE_S, disk=True)
    assert made.held == ["s000001-g1", "s000002-g1"]
    assert made.engine.wait(DEADLINE_S)
    assert made.names() == ["s000001-g1"]


def test_retention_keeps_the_newest(make: MakeBench) -> None:
    made = make()
    made.wishes.policy(keep=2, at_end=True, wait_when_busy=False)
    for step in range(1, 6):
        made.save(weights(float(step)), step)
    made.link.close()
    from tests.trainer.ranks import wait_until

    wait_until(lambda: made.names() == ["s000004-g1", "s000005-g1"], what="retention")
