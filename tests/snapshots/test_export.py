"""A snapshot of any number of parts becomes whole tensors in safetensors, without torch."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from tests.snapshots.ranks import facts
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.snapshots import dcp, export, marker
from everstep.snapshots.marker import FileSum
from everstep.snapshots.places import Folder
from everstep.snapshots.sealed import SnapshotError

TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip
SAFE = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64, "F16": torch.float16}


def complete(folder: Path, step: int = 1) -> str:
    """Put a marker over what lies in a snapshot's folder."""
    sums = {
        p.name: FileSum(p.stat().st_size, xxhash.xxh3_64_hexdigest(p.read_bytes()))
        for p in folder.iterdir()
    }
    marker.write(folder, marker.completed(facts(step), sums, at_s=5.0))
    return folder.name


def plain(place: Path, state: dict[str, Any], step: int = 1) -> str:
    """Write a snapshot as torch does."""
    folder = place / f"s{step:06d}-g1"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=folder, no_dist=True)
    return complete(folder, step)


def sharded(place: Path, name: str, whole: torch.Tensor, splits: list[list[int]]) -> str:
    """Write one tensor in pieces over several files, as ranks with shards do."""
    folder = place / "s000001-g1"
    folder.mkdir(parents=True)
    chunks, stored = [], {}
    at = [0] * whole.dim()
    for number, piece in enumerate(pieces(whole, splits, at)):
        offsets, part = piece
        file = folder / f"__{number}_0.distcp"
        torch.save(part.clone(memory_format=torch.preserve_format), file)
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
        index = MetadataIndex(name, torch.Size(offsets), 0)
        stored[index] = _StorageInfo(file.name, 0, file.stat().st_size)
    properties = TensorProperties(dtype=whole.dtype)
    about = TensorStorageMetadata(properties, whole.shape, chunks)
    metadata = Metadata({name: about}, storage_data=stored, planner_data={name: (name,)})
    import pickle  # noqa: TID251  torch's own format

    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return complete(folder)


def pieces(
    whole: torch.Tensor, splits: list[list[int]], at: list[int]
) -> list[tuple[list[int], torch.Tensor]]:
    found = [(list(at), whole)]
    for dim, sizes in enumerate(splits):
        found = [
            ([*offsets[:dim], offsets[dim] + sum(sizes[:i]), *offsets[dim + 1 :]], piece)
            for offsets, part in found
            for i, piece in enumerate(torch.split(part, sizes, dim))
        ]
    return found


def read(path: Path) -> dict[str, torch.Tensor]:
    """Read safetensors as its specification says."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__")["format"] == "pt"
    found = {}
    end = 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert start == end, "no holes"
        end = stop
        raw = bytearray(data[8 + length + start : 8 + length + stop])
        dtype = SAFE[entry["dtype"]]
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(entry["shape"])
    assert 8 + length + end == len(data)
    return found


def exported(place: Path, to: Path, **options: Any) -> list[Path]:
    opened = Folder(place)
    names = export.chosen(dcp.tensors(opened, "s000001-g1"), prefix=options.get("prefix", ""))
    files = export.split(names, most_bytes=options.get("most_bytes", 10**9))
    return export.write(opened, "s000001-g1", files, to, {"format": "pt"})


def test_what_comes_out_is_what_went_in(tmp_path: Path) -> None:
    state = {
        "model.a": torch.randn(7, 5),
        "model.half": torch.randn(33).to(torch.bfloat16),
        "model.scalar": torch.tensor(3),
        "model.empty": torch.empty(0, 4),
        "model.turned": torch.randn(4, 6).t(),
        "model.view": torch.arange(100)[10:20:3],
        "optimizer.m": torch.ones(3),
        "note": "no tensor",
    }
    plain(tmp_path, state)
    (path,) = exported(tmp_path, tmp_path / "m.safetensors", prefix="model")
    found = read(path)
    assert set(found) == {"a", "half", "scalar", "empty", "turned", "view"}
    for name, value in found.items():
        expected = state[f"model.{name}"]
        assert isinstance(expected, torch.Tensor)
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_is_read_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 100, (6, 16), dtype=torch.uint8)
    value = raw.view(dtype)
    plain(tmp_path, {"x": value})
    (tensor,) = dcp.tensors(Folder(tmp_path), "s000001-g1")
    found = dcp.numbers(Folder(tmp_path), "s000001-g1", tensor)
    assert found.tobytes() == value.contiguous().view(torch.uint8).numpy().tobytes()
    assert tensor.bytes == value.numel() * value.element_size()


@pytest.mark.parametrize(
    "splits", [[[10], [6]], [[4, 6], [6]], [[10], [1, 2, 3]], [[3, 3, 4], [5, 1]], [[1] * 10]]
)
def test_shards_become_whole_again(splits: list[list[int]], tmp_path: Path) -> None:
    whole = torch.randn(10, 6)
    sharded(tmp_path, "model.w", whole, splits)
    state = {"model.w": torch.empty(10, 6)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, storage_reader=FileSystemReader(tmp_path / "s000001-g1"), no_dist=True)
    assert torch.equal(state["model.w"], whole), "torch reads what this test wrote"
    (path,) = exported(tmp_path, tmp_path / "m.safetensors", prefix="model")
    assert torch.equal(read(path)["w"], whole)


def test_many_tensors_make_many_files_and_an_index(tmp_path: Path) -> None:
    state = {f"model.{n}": torch.full((100,), float(n)) for n in range(5)}
    plain(tmp_path, state)
    *files, index = exported(tmp_path, tmp_path / "m.safetensors", prefix="model", most_bytes=900)
    assert [p.name for p in files] == [f"m-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    facts_ = json.loads(index.read_text())
    assert facts_["metadata"]["total_size"] == 2000
    for name, file in facts_["weight_map"].items():
        assert torch.equal(read(tmp_path / file)[name], state[f"model.{name}"])


def test_nothing_stands_under_its_name_before_it_is_whole(tmp_path: Path) -> None:
    plain(tmp_path, {"model.a": torch.ones(3), "model.b": torch.ones(3, dtype=torch.complex128)})
    with pytest.raises(SnapshotError, match=r"safetensors has no type for model\.b"):
        exported(tmp_path, tmp_path / "m.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["s000001-g1"]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    plain(tmp_path, {"net.a": torch.ones(3), "optimizer.b": torch.ones(3)})
    with pytest.raises(SnapshotError, match="there are those of net, optimizer"):
        exported(tmp_path, tmp_path / "m.safetensors", prefix="model")


def test_a_pickle_with_anything_else_in_it_is_refused_and_not_executed(tmp_path: Path) -> None:
    plain(tmp_path, {"model.a": torch.ones(3)})
    evil = b"cos\nsystem\n(S'touch " + os.fsencode(tmp_path / "owned") + b"'\ntR."
    (tmp_path / "s000001-g1" / ".metadata").write_bytes(evil)
    with pytest.raises(SnapshotError, match=r"it names os\.system"):
        dcp.tensors(Folder(tmp_path), "s000001-g1")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("damage", [b"", b"\x80", b"rubbish", b"\x80\x04N.", b"\x80\x04K\x05."])
def test_metadata_of_another_kind_is_an_error_that_says_so(damage: bytes, tmp_path: Path) -> None:
    plain(tmp_path, {"model.a": torch.ones(3)})
    (tmp_path / "s000001-g1" / ".metadata").write_bytes(damage)
    with pytest.raises(SnapshotError, match="not DCP's"):
        dcp.tensors(Folder(tmp_path), "s000001-g1")


def test_a_part_that_is_no_archive_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    plain(tmp_path, {"model.a": torch.ones(3)})
    file = tmp_path / "s000001-g1" / "__0_0.distcp"
    for data in (bytes(file.stat().st_size), file.read_bytes()[: file.stat().st_size // 2]):
        file.write_bytes(data)
        with pytest.raises(SnapshotError, match=r"model\.a"):
            exported(tmp_path, tmp_path / "m.safetensors")


def test_it_needs_no_torch(tmp_path: Path) -> None:
    plain(tmp_path, {"model.a": torch.ones(3)})
    code = (
        "import sys\nfrom everstep.snapshots import dcp\n"
        "from everstep.snapshots.places import Folder\n"
        f"place = Folder({str(tmp_path)!r})\n"
        "(one,) = dcp.tensors(place, 's000001-g1')\n"
        "assert dcp.numbers(place, 's000001-g1', one).tobytes()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
