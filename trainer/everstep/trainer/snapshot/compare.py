"""Whether two snapshots hold the same state, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from everstep.snapshots import catalogue, marker
from everstep.trainer.snapshot.restore import load_tensors

if TYPE_CHECKING:
    from pathlib import Path


def differences(left: Path, right: Path) -> list[str]:
    """Return what is not the same in two snapshot folders; empty when every bit is.

    Compares the place in the run (step, samples, seed, skipped windows) and every tensor:
    parameters, optimizer, random states, hooks' states. Raises SnapshotError when one is damaged.
    """
    a, b = marker.verify(left), marker.verify(right)
    out = [
        f"{name}: {getattr(a, name)} and {getattr(b, name)}"
        for name in ("step", "samples", "seed", "skip_windows")
        if getattr(a, name) != getattr(b, name)
    ]
    ours, theirs = load_tensors(left, _all_of_them), load_tensors(right, _all_of_them)
    out += [f"{name}: only in one of them" for name in sorted(ours.keys() ^ theirs.keys())]
    out += [
        f"{name}: differs"
        for name in sorted(ours.keys() & theirs.keys())
        if not _same(ours, theirs, name)
    ]
    return out


def newest(snapshots: Path) -> Path | None:
    """Return the finished snapshot with the highest step in a run's folder, None without one."""
    finished = [entry.id for entry in catalogue.entries(snapshots) if entry.committed]
    return snapshots / str(max(finished)) if finished else None


def _all_of_them(_: str) -> bool:
    return True


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], name: str) -> bool:
    a, b = ours[name], theirs[name]
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # As bytes: a NaN equals itself then, and -0.0 is not 0.0.
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
