"""What a snapshot of one process holds, and how it gets back in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel

from everstep.sdk import ConfigError, EverstepError
from everstep.trainer import rng
from everstep.trainer.snapshot.tree import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from everstep.trainer.snapshot.restore import Restored
    from everstep.wire.ids import SnapshotId

_STATE, _RNG = "everstep.state", "everstep.rng."


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

    def tensors(self, hooks: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return everything as flat tensors, live ones: they must be copied before the next step.

        What is no tensor is packed into one that only rank 0 brings, so that ranks whose packing
        differs in length cannot spoil it for one another.
        """
        states = {name: thing.state_dict() for name, thing in self._objects.items()}
        tensors, shape = flatten(states)
        tensors[f"{_RNG}{self._rank}"] = rng.pack()
        if self._rank == 0:
            rest = msgspec.msgpack.encode({"shape": shape, "hooks": hooks})
            tensors[_STATE] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        return tensors

    def wanted(self, name: str) -> bool:
        """Say whether this rank needs a tensor: all but other ranks' random states."""
        return not name.startswith(_RNG) or name == f"{_RNG}{self._rank}"

    def apply(self, restored: Restored, *, world_size: int) -> dict[str, Any]:
        """Give every object its state back and return the hooks' states.

        At another world size a rank's random states have no successor: they start anew from
        (seed, step, rank). Raises ConfigError for a snapshot of something else.
        """
        tensors = dict(restored.tensors)
        rest = msgspec.msgpack.decode(tensors.pop(_STATE).numpy().tobytes())
        random_states = tensors.pop(f"{_RNG}{self._rank}", None)
        self._load(unflatten(tensors, rest["shape"]), restored.id)
        if random_states is not None and restored.marker.world_size == world_size:
            rng.unpack(random_states)
        else:
            rng.seed(restored.marker.seed, step=restored.marker.step, rank=self._rank)
        hooks: dict[str, Any] = rest["hooks"]
        return hooks

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
