"""The norm of all gradients together, whole ones and shards."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

_Spread = tuple["DeviceMesh", tuple[int, ...]]
"""A mesh and those of its dimensions that a gradient is cut up along."""


def total_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Return the 2-norm of all gradients, whatever their own precision.

    Of shards it is the norm of the whole, for which every rank of their mesh must call this: one
    number is added up over the ranks for each way in which gradients are cut up.
    """
    parts: dict[_Spread | None, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        spread, part = _spread(gradient)
        parts[spread].append(part)
    squares = [_square(some, spread) for spread, some in parts.items()]
    return math.sqrt(sum(squares))


def mine(gradient: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of it, to be changed in place."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _spread(gradient: torch.Tensor) -> tuple[_Spread | None, torch.Tensor]:
    if not isinstance(gradient, DTensor):
        return None, gradient
    if any(p.is_partial() for p in gradient.placements):
        gradient = gradient.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in gradient.placements]
        )
    cut = tuple(d for d, p in enumerate(gradient.placements) if not p.is_replicate())
    return ((gradient.device_mesh, cut) if cut else None), mine(gradient)


def _square(parts: Sequence[torch.Tensor], spread: _Spread | None) -> float:
    # One fused pass instead of a small kernel for each parameter, as torch's own clipping does.
    norms = torch._foreach_norm(list(parts), 2, dtype=torch.float32)  # noqa: SLF001  see above
    stacked = torch.stack([n.to(norms[0].device) for n in norms])
    square = torch.linalg.vector_norm(stacked).double().square()
    if spread is not None:
        mesh, cut = spread
        for dimension in cut:
            dist.all_reduce(square, group=mesh.get_group(dimension))
    return float(square)
