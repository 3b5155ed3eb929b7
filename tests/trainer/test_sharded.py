"""Sharded state: any layout is saved, read by plain torch, and loaded into any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.trainer.ranks import StartRanks
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from everstep.trainer.snapshot import planning

SCRIPT = Path(__file__).parent / "sharded_ranks.py"


def run(start_ranks: StartRanks, world: int, mode: str, folder: Path, do: str) -> None:
    ranks = start_ranks(world, SCRIPT, mode, folder, do)
    assert ranks.wait() == [0] * world, ranks.log()


def read_plainly(snapshot: Path) -> dict[str, torch.Tensor]:
    """Read every tensor as somebody would who has never heard of everstep."""
    metadata = FileSystemReader(snapshot).read_metadata()
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=snapshot, no_dist=True)
    return tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("mode", "world", "others"),
    [
        ("ddp", 2, [1, 3]),
        ("fsdp", 2, [1, 3]),
        ("fsdp", 3, [2]),
        ("tp", 2, [2, 1]),
        ("2d", 4, []),
    ],
)
def test_what_is_saved_is_read_by_plain_torch_and_by_any_other_world(
    mode: str, world: int, others: list[int], tmp_path: Path, start_ranks: StartRanks
) -> None:
    run(start_ranks, world, mode, tmp_path, "save")
    expected = torch.load(tmp_path / f"{mode}-0.pt")
    found = read_plainly(tmp_path / "snapshots" / "s000002-g1")
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for other in [world, *others]:
        run(start_ranks, other, mode, tmp_path, "load")


def test_stages_of_a_pipeline_keep_apart_what_is_called_alike(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    run(start_ranks, 3, "pp", tmp_path, "save")
    run(start_ranks, 3, "pp", tmp_path, "load")


def test_state_counts_as_replicated_only_where_no_rank_has_anything_of_its_own() -> None:
    same = ({"weight": "a", "mean": "b"}, {"everstep.state": (8, "c")})
    other = ({"weight": "a", "mean": "x"}, {"everstep.state": (8, "c")})
    fewer = ({"weight": "a"}, {"everstep.state": (8, "c")})
    for ranks, expected in (([same, same], True), ([same, other], False), ([same, fewer], False)):
        assert [alike for _, _, alike in planning._name(ranks)] == [expected] * 2


def test_a_rank_that_has_nothing_is_given_replicated_state_by_one_that_has_it(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    run(start_ranks, 3, "ddp", tmp_path, "hand")


def test_where_one_rank_lost_its_shards_all_fall_to_what_is_on_disk_and_say_so(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    run(start_ranks, 3, "fsdp", tmp_path, "fall")
