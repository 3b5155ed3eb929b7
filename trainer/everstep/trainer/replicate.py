"""DDP whose sums come out the same in a freshly built process as in one that runs for days.

DDP lays its gradient buckets out anew after its first backward, by the order in which gradients
became ready. From three ranks up another layout adds in another order, so a process that resumes
would differ in the last bits, for one step, from one that never stopped. The cure is to throw one
forward and backward away after every construction: from then on the layout is the final one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from everstep.sdk.errors import EverstepError
from everstep.trainer import rng

if TYPE_CHECKING:
    from torch import nn


def replicate(
    model: nn.Module, *, example: tuple[Any, ...] | None = None, **options: Any
) -> DistributedDataParallel:
    """Return the model in DDP, cured with `example` now or else with its first real input.

    The discarded pass leaves parameters, buffers, gradients and random states as they were; the
    shape of the input does not matter, that it runs the same layers does. What code of the model's
    own does in forward or in gradient hooks happens once more. `options` are DDP's.
    """
    options.setdefault("gradient_as_bucket_view", True)
    ddp = DistributedDataParallel(model, **options)
    if example is not None:
        discard_one_pass(ddp, *example)
    else:
        _discard_at_first_use(ddp)
    return ddp


def discard_one_pass(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
    """Run forward and backward once and undo whatever they changed."""
    buffers = [(b, b.clone()) for b in ddp.buffers()]
    random_states = rng.pack()
    synced, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, True
    with torch.enable_grad():
        torch.autograd.backward(_anything_to_differentiate(ddp(*args, **kwargs)))
    ddp.require_backward_grad_sync = synced
    ddp.zero_grad(set_to_none=True)
    rng.unpack(random_states)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def detach(ddp: DistributedDataParallel) -> None:
    """Untie DDP from its process group, after the last backward and before the group goes down.

    Otherwise the group dies with DDP's reducer, which joins gloo's threads while it holds the
    interpreter's lock; one of them that still has a tensor to give back waits for that lock. Seen
    on torch 2.13 in a quarter of all exits on a busy machine, as a process that never ends.
    """
    ddp.__dict__.pop("logger", None)
    ddp.__dict__.pop("reducer", None)


def _discard_at_first_use(ddp: DistributedDataParallel) -> None:
    def once(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            handle.remove()
            discard_one_pass(ddp, *args, **kwargs)

    handle = ddp.register_forward_pre_hook(once, with_kwargs=True)


def _anything_to_differentiate(output: Any) -> torch.Tensor:
    found = [t.float().sum() for t in _tensors(output) if t.requires_grad]
    if not found:
        raise EverstepError(
            "the model's output holds no tensor that requires a gradient: Session.wrap needs one "
            "to settle the order in which gradients are summed"
        )
    return torch.stack(found).sum()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif hasattr(output, "__dict__"):
        with contextlib.suppress(TypeError):
            yield from _tensors(vars(output))
