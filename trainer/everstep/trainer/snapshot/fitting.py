"""How the state of one rank goes into its slots, as all ranks have settled it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from everstep.trainer.snapshot import planning
from everstep.trainer.snapshot.capture import Copy
from everstep.trainer.snapshot.slot import Sealed
from everstep.trainer.snapshot.state import (
    SPARE,
    STATE,
    Own,
    Whole,
    fits,
    outline,
    pack,
    rank_name,
    room,
)
from everstep.trainer.snapshot.tree import local

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import torch.distributed as dist

    from everstep.snapshots.marker import Marker
    from everstep.trainer.snapshot.planning import Plan
    from everstep.trainer.snapshot.slot import Slot
    from everstep.trainer.snapshot.state import State


class Fitting:
    """One layout and what goes where in it."""

    def __init__(self, plan: Plan, *, rank: int, on_device: bool) -> None:
        self.layout = plan.layout
        self.metadata = plan.metadata
        self.on_device = on_device
        self._rank = rank
        self._names = plan.names
        self._alike = plan.alike
        self._own_names = {path: name for path, name in plan.names.items() if path != name}
        self._pieces = {piece.part.name: piece for piece in plan.layout.table.pieces}

    @classmethod
    def settle(cls, look: Callable[[], State], group: dist.ProcessGroup, *, rank: int) -> Fitting:
        """Settle it with all ranks of `group`. Raises SnapshotError on all when it cannot be."""
        on_device = False

        def described() -> planning.Local:
            nonlocal on_device
            state = look()
            on_device = any(tensor.is_cuda for tensor in state.tensors.values())
            return _describe(state, rank)

        return cls(planning.make(described, group), rank=rank, on_device=on_device)

    @property
    def slot_bytes(self) -> int:
        """Size of a slot."""
        return self.layout.table.size_bytes + len(self.metadata)

    @property
    def replicated(self) -> bool:
        """Whether every rank's state is the same, and all of it is in this rank's slots."""
        parts = [piece.part for piece in self.layout.table.pieces]
        return self._alike and all(p.shape == p.size for p in parts)

    def misfit(self, state: State) -> str:
        """Return what of the state there is no place for, nothing when it fits."""
        if gone := self._names.keys() - state.tensors.keys() - {STATE, rank_name(self._rank)}:
            return f"{min(gone)} is no longer in the state"
        for path, tensor in state.tensors.items():
            if path not in self._names:
                return f"{path} is new in the state"
            part = self._pieces[self._names[path]].part
            if part.shape != tuple(local(tensor).shape) or part.torch_dtype != tensor.dtype:
                return f"{path} has another shape or type now"
        for name, raw in self._packed(state).items():
            if not fits(raw, self._pieces[name].part.bytes):
                return f"what is no tensor has outgrown its room: {name} has {len(raw)} bytes"
        return ""

    def pack(self, state: State, slot: Slot) -> None:
        """Put what is no tensor into the slot."""
        for name, raw in self._packed(state).items():
            pack(raw, slot.view(self._pieces[name]))

    def copies(self, state: State, slot: Slot, *, hasty: Collection[str]) -> list[Copy]:
        """Return what goes where; `hasty` names what is not to be left for later."""
        return [
            Copy(
                path,
                local(tensor),
                slot.view(self._pieces[self._names[path]]),
                path in state.steady and path not in hasty,
            )
            for path, tensor in state.tensors.items()
        ]

    def seal(self, slot: Slot, facts: Marker) -> None:
        """Take the checksums of a filled slot and seal it. Raises SnapshotError."""
        sums = [slot.checksum(start, size) for start, size in self.layout.table.regions()]
        sealed = Sealed(facts=facts, rank=self._rank, sums=sums, replicated=self.replicated)
        slot.seal(sealed)

    def _packed(self, state: State) -> dict[str, bytes]:
        own = msgspec.msgpack.encode(Own(state.rng, self._own_names))
        return {self._names[STATE]: _whole(state), rank_name(self._rank): own}


def _describe(state: State, rank: int) -> planning.Local:
    shared = {STATE: (room(_whole(state), spare=SPARE), outline(state.shape))}

    def own_room(names: Mapping[str, str]) -> int:
        return room(msgspec.msgpack.encode(Own(state.rng, dict(names))))

    return planning.Local(state.tensors, shared, (rank_name(rank), own_room))


def _whole(state: State) -> bytes:
    return msgspec.msgpack.encode(Whole(state.shape, dict(state.hooks)))
