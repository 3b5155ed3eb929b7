"""FSDP2: each rank keeps a shard of every parameter, of its gradient and of the optimizer's state.

The work is torch's own `fully_shard`. Its sums need no cure as those of DDP do (replicate.py): what
is reduced together is settled when the model is wrapped, and stays so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from everstep.sdk.errors import EverstepError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch


def shard(
    model: nn.Module,
    *,
    device: torch.device,
    blocks: Iterable[nn.Module] | None = None,
    **options: Any,
) -> nn.Module:
    """Return the model, sharded over all ranks: each of `blocks` by itself, then what is left.

    All ranks begin with rank 0's numbers, as in DDP. Without `blocks` they are the members of the
    model's outermost `nn.ModuleList`s. `options` are those of `fully_shard`, for all blocks alike.
    Raises EverstepError for a model that does not say what its blocks are.
    """
    units = list(_repeated(model)) if blocks is None else list(blocks)
    _check(model, units, named=blocks is not None)
    for tensor in (*model.parameters(), *model.buffers()):
        _begin_alike(tensor.detach())
    options.setdefault("mesh", init_device_mesh(device.type, (dist.get_world_size(),)))
    for unit in units:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    return model


def _begin_alike(tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        return  # cut up along another dimension already, by somebody who knows where it comes from
    numbers = tensor.contiguous()
    dist.broadcast(numbers, src=0)
    if numbers.data_ptr() != tensor.data_ptr():
        tensor.copy_(numbers)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _repeated(child)


def _check(model: nn.Module, units: list[nn.Module], *, named: bool) -> None:
    kind = type(model).__name__
    if isinstance(model, FSDPModule):
        raise EverstepError(f"session.wrap: this {kind} is sharded already; use it as it is")
    if not (units or named):
        raise EverstepError(
            f'data_parallel = "fsdp": {kind} has no nn.ModuleList whose members could be sharded '
            "one by one. Name its repeated layers, session.wrap(model, blocks=[...]), or have it "
            "sharded in one piece with blocks=[]"
        )
    inside = set(model.modules())
    for unit in units:
        if unit not in inside:
            raise EverstepError(
                f"session.wrap: a {type(unit).__name__} among the blocks is no part of the {kind}"
            )
