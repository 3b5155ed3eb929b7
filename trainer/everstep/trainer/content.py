"""What a snapshot of one process holds, and how it gets back in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from everstep.sdk import ConfigError, EverstepError
from everstep.trainer import rng
from everstep.trainer.snapshot.state import State
from everstep.trainer.snapshot.tree import flatten, local

if TYPE_CHECKING:
    from collections.abc import Mapping

    from everstep.trainer.snapshot.restore import Restored
    from everstep.wire.ids import SnapshotId


class HasState(Protocol):
    """A module, an optimizer, a scheduler, or anything else with these two methods."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take it back."""
        ...


class Content:
    """The objects that make up the run's state; the same on all ranks but for random states."""

    def __init__(self, objects: Mapping[str, Any], *, rank: int) -> None:
        """Raise EverstepError for an object that cannot give its state."""
        self._rank = rank
        self._objects: dict[str, HasState] = {}
        for name, thing in objects.items():
            bare = thing.module if isinstance(thing, DistributedDataParallel) else thing
            if not (hasattr(bare, "state_dict") and hasattr(bare, "load_state_dict")):
                raise EverstepError(
                    f"snapshot_state: {name!r} is a {type(bare).__name__}, which has no "
                    "state_dict() and load_state_dict()"
                )
            self._objects[name] = bare

    def __bool__(self) -> bool:
        return bool(self._objects)

    def state(self, hooks: Mapping[str, Any]) -> State:
        """Return everything as it is: the tensors are the live ones.

        Raises SnapshotError for what snapshots cannot hold.
        """
        tensors, shape = flatten({n: thing.state_dict() for n, thing in self._objects.items()})
        return State(tensors, self._steady(tensors), shape, hooks, rng.pack())

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors by path, those that sharded optimizers make later included."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                _make_sharded_state(optimizer)
        return flatten({n: thing.state_dict() for n, thing in self._objects.items()})[0]

    @property
    def optimizers(self) -> list[Any]:
        """Those of the objects that step."""
        return [t for t in self._objects.values() if hasattr(t, "param_groups")]

    def apply(self, restored: Restored, *, world_size: int) -> dict[str, Any]:
        """Give every object its state back and return the hooks' states.

        At another world size a rank's random states have no successor: they start anew from
        (seed, step, rank). Raises ConfigError for a snapshot of something else.
        """
        self._load(restored.states, restored.id)
        facts = restored.marker
        if restored.rng is not None and facts.world_size == world_size:
            rng.unpack(restored.rng)
        else:
            rng.seed(facts.seed, step=facts.step, rank=self._rank)
        return restored.hooks

    def _steady(self, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the paths of what an optimizer's step alone changes, as far as one can know."""
        owned = {
            local(parameter).data_ptr()
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        stepping = {n for n, t in self._objects.items() if isinstance(t, torch.optim.Optimizer)}
        return frozenset(
            path
            for path, tensor in tensors.items()
            if path.split(".", 1)[0] in stepping or local(tensor).data_ptr() in owned
        )

    def _load(self, states: Mapping[str, dict[str, Any]], id_: SnapshotId) -> None:
        for name, thing in self._objects.items():
            if name not in states:
                raise ConfigError(
                    f"snapshot {id_} has no {name!r}: another program made it; use another run_dir"
                )
            try:
                thing.load_state_dict(states[name])
            except (RuntimeError, ValueError, KeyError) as exc:
                raise ConfigError(
                    f"{name!r} of snapshot {id_} does not fit the one of this run, which has "
                    f"another shape: set it as it was, or use another run_dir ({exc})"
                ) from exc


def _make_sharded_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer of DTensors make its state, which says how that is sharded here.

    As torch's own `get_optimizer_state_dict` does it: one step with gradients of zero and a
    learning rate of zero changes no parameter, and what it leaves is loaded over.
    """
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    if optimizer.state or not any(isinstance(p, DTensor) for p in parameters):
        return
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in groups:
        group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
    optimizer.step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
