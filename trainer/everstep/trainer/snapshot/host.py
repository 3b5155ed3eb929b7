"""Buffers in host memory that a snapshot is copied into, allocated once and kept warm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping


class HostBuffers:
    """One copy's worth of memory, reused by every snapshot: allocating costs more than copying."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def warm(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Allocate and touch what the next copy will need."""
        self._buffers = {name: self._fitting(name, t) for name, t in tensors.items()}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors' values of now; the result is valid until the next call."""
        self.warm(tensors)
        on_device = False
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor, non_blocking=True)
            on_device |= tensor.is_cuda
        if on_device:
            torch.cuda.synchronize()
        return self._buffers

    def _fitting(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        have = self._buffers.get(name)
        if have is not None and have.shape == tensor.shape and have.dtype == tensor.dtype:
            return have
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
