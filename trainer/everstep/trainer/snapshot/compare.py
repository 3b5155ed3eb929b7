"""Whether two snapshots hold the same state, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from everstep.snapshots import catalogue
from everstep.trainer.snapshot.disk import FolderSource
from everstep.trainer.snapshot.source import Request
from everstep.trainer.snapshot.state import is_packed, unpack

if TYPE_CHECKING:
    from pathlib import Path

    from everstep.snapshots.marker import Marker


def differences(left: Path, right: Path) -> list[str]:
    """Return what is not the same in two snapshot folders; empty when every bit is.

    Compares the place in the run (step, samples, seed, skipped windows) and every tensor:
    parameters, optimizer, random states, hooks' states. Raises SnapshotError when one is damaged.
    """
    (a, ours), (b, theirs) = read(left), read(right)
    out = [
        f"{name}: {getattr(a, name)} and {getattr(b, name)}"
        for name in ("step", "samples", "seed", "skip_windows")
        if getattr(a, name) != getattr(b, name)
    ]
    out += [f"{name}: only in one of them" for name in sorted(ours.keys() ^ theirs.keys())]
    out += [
        f"{name}: differs"
        for name in sorted(ours.keys() & theirs.keys())
        if not _same(ours, theirs, name)
    ]
    return out


def read(folder: Path) -> tuple[Marker, dict[str, torch.Tensor]]:
    """Return a snapshot's marker and all its tensors, whole. Raises SnapshotError for damage.

    What is packed with room to grow comes without the room.
    """
    source = FolderSource(folder)
    tensors = {
        name: torch.empty(parts[0].size, dtype=parts[0].torch_dtype)
        for name, parts in source.parts.items()
    }
    source.load([Request(name, t, (0,) * t.dim()) for name, t in tensors.items()])
    for name in filter(is_packed, tensors):
        raw = bytearray(unpack(tensors[name]))
        tensors[name] = torch.frombuffer(raw, dtype=torch.uint8)
    return source.marker, tensors


def newest(snapshots: Path) -> Path | None:
    """Return the finished snapshot with the highest step in a run's folder, None without one."""
    finished = [entry.id for entry in catalogue.entries(snapshots) if entry.committed]
    return snapshots / str(max(finished)) if finished else None


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], name: str) -> bool:
    a, b = ours[name], theirs[name]
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # As bytes: a NaN equals itself then, and -0.0 is not 0.0.
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
