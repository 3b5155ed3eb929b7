"""Finds the newest snapshot that is good on every rank, and reads it."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from everstep.snapshots import marker
from everstep.snapshots.marker import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from everstep.snapshots.marker import Marker
    from everstep.wire.ids import SnapshotId

log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A snapshot's tensors by dotted path, and what its marker says."""

    id: SnapshotId
    marker: Marker
    tensors: dict[str, torch.Tensor]


def restore(
    folder: Path,
    ids: Sequence[SnapshotId],
    *,
    group: dist.ProcessGroup,
    wanted: Callable[[str], bool],
    rejected: Callable[[SnapshotId, str], None],
) -> Restored | None:
    """Return the first of `ids` that verifies and loads on all ranks; None when there are no ids.

    Call it on all ranks of `group` with the same ids. `wanted` chooses tensors by name; `rejected`
    is told of each one that is bad here. Raises SnapshotError when none is good everywhere.
    """
    reasons = []
    for id_ in ids:
        found, why = _try(folder, id_, wanted)
        if why:
            rejected(id_, why)
            reasons.append(f"{id_}: {why}")
        if _all(found is not None, group) and found is not None:
            return found
        if not why:
            reasons.append(f"{id_}: good on this rank, not on another")
    if not reasons:
        return None
    raise SnapshotError(
        f"no snapshot in {folder} can be used by all ranks: {'; '.join(reasons)}. Bring back a "
        "good copy of one of them, or start over with another run_dir"
    )


def _try(
    folder: Path, id_: SnapshotId, wanted: Callable[[str], bool]
) -> tuple[Restored | None, str]:
    try:
        found = marker.verify(folder / str(id_))
        return Restored(id_, found, load_tensors(folder / str(id_), wanted)), ""
    except (SnapshotError, OSError) as exc:
        return None, str(exc)
    except (CheckpointException, Exception) as exc:  # noqa: BLE001  a damaged pickle raises anything
        return None, f"does not load: {type(exc).__name__}: {exc}"


def load_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Read a snapshot's tensors by dotted path, without any other rank."""
    reader = FileSystemReader(folder)
    tensors = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and wanted(name)
    }
    with warnings.catch_warnings():
        # Every rank reads for itself, so that one with a bad disk cannot hang the others.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _all(good: bool, group: dist.ProcessGroup) -> bool:  # noqa: FBT001  a vote is a boolean
    votes = torch.tensor([int(good)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
