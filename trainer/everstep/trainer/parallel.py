"""How a model is spread over the ranks: a copy on each (DDP), or a shard on each (FSDP2)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from everstep.trainer.replicate import detach, replicate
from everstep.trainer.shard import shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch
    from torch import nn


class Models:
    """The models of one session."""

    def __init__(self, how: str, device: torch.device) -> None:
        self._how = how
        self._device = device
        self._replicated: list[DistributedDataParallel] = []

    def wrap(
        self,
        model: nn.Module,
        *,
        example: tuple[Any, ...] | None = None,
        blocks: Iterable[nn.Module] | None = None,
        ddp: Mapping[str, Any] | None = None,
        fsdp: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Return the model on the device and spread over the ranks: see `Session.wrap`."""
        model = model.to(self._device)
        if self._how == "fsdp":
            return shard(model, device=self._device, blocks=blocks, **(fsdp or {}))
        wrapped = replicate(model, example=example, **(ddp or {}))
        self._replicated.append(wrapped)
        return wrapped

    def detach(self) -> None:
        """Untie the models from the process group; nothing is trained any more."""
        for model in self._replicated:
            detach(model)


@contextlib.contextmanager
def accumulating(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Run one of several backwards here: gradients add up, and the `last` one has them reduced.

    A model that is neither DDP nor FSDP2 is left alone.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    yield
