"""Who writes what, and DCP's `.metadata`: settled by all ranks together, once per shape of state.

Plain tensors are taken for replicated where all ranks that have one under that name hold the same
numbers; DCP's planner then shares them out evenly. What differs (a buffer that follows each rank's
own samples, the stages of a pipeline) is kept apart for each rank, under a name that says whose.
"""

from __future__ import annotations

import pickle  # noqa: TID251  DCP's own format of `.metadata`
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from everstep.snapshots.marker import SnapshotError
from everstep.trainer.snapshot.layout import Layout, Part, build
from everstep.trainer.snapshot.state import OWN
from everstep.trainer.snapshot.tree import local

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

T = TypeVar("T")


class Local(NamedTuple):
    """What one rank wants saved: tensors by path, and bytes with room to grow in.

    `shared` are bytes, as (room, digest) by name, of which one rank's will do for all that have
    equal digests. `own` is one tensor of bytes more, this rank's alone: its name, and its room
    once it is known which paths go by another name in the snapshot.
    """

    tensors: Mapping[str, torch.Tensor]
    shared: Mapping[str, tuple[int, str]]
    own: tuple[str, Callable[[Mapping[str, str]], int]]


class Plan(NamedTuple):
    """One rank's layout, the name in the snapshot of each of its tensors, rank 0's `.metadata`.

    `alike`: no rank has a tensor that another has not, or has otherwise.
    """

    layout: Layout
    names: dict[str, str]
    metadata: bytes
    alike: bool


def own_name(rank: int, name: str) -> str:
    """Return the name of what this rank alone holds in this way."""
    return f"{OWN}{rank}.{name}"


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_0.distcp"


def make(look: Callable[[], Local], group: dist.ProcessGroup) -> Plan:
    """Return this rank's plan; `look` says what there is to save.

    Call it on all ranks of `group`. Raises SnapshotError on all of them when it fails on any.
    """
    circle = _Circle(group)
    try:
        mine, why = look(), ""
    except SnapshotError as exc:
        mine, why = Local({}, {}, ("", lambda _: 0)), str(exc)
    names, rooms, alike = circle.settle((_digests(mine), why), _name)
    own, own_room = mine.own
    rooms |= {own: own_room({path: name for path, name in names.items() if path != name})}
    names[own] = own
    tensors = {names[path]: tensor for path, tensor in mine.tensors.items()}
    tensors |= {names[k]: torch.empty(rooms[k], dtype=torch.uint8) for k in (*mine.shared, own)}

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, is_coordinator=circle.first)
    metadata: list[Metadata] = []
    plan = circle.settle(_propose(planner), lambda plans: _global(planner, plans, metadata))
    filed = {item.index.fqn: item.index for item in plan.items}
    layout = build([_part(name, tensor) for name, tensor in tensors.items()], filed)

    stored = {
        filed[piece.part.name]: _StorageInfo(file_name(circle.rank), *layout.table.archive(piece))
        for piece in layout.table.pieces[: layout.table.filed]
    }
    everything = circle.to_first(stored)
    encoded = _encode(metadata[0], everything) if everything else b""
    return Plan(layout, names, encoded, alike)


class _Circle:
    """Objects to rank 0 and back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self.first = self.rank == 0

    def to_first(self, value: T) -> list[T]:
        """Return every rank's value on rank 0, nothing elsewhere."""
        box: list[Any] | None = [None] * self._size if self.first else None
        dist.gather_object(value, box, dst=0, group=self._group)
        return box or []

    def settle(self, value: tuple[T, str], decide: Callable[[list[T]], Sequence[Any]]) -> Any:
        """Let rank 0 decide from all values, one result for each; raise on all when it cannot."""
        answers: list[tuple[Any, str]] | None = None
        if heard := self.to_first(value):
            why = "; ".join(f"rank {r}: {w}" for r, (_, w) in enumerate(heard) if w)
            results: Sequence[Any] = [None] * self._size
            if not why:
                try:
                    results = decide([v for v, _ in heard])
                except (SnapshotError, ValueError, AssertionError) as exc:
                    why = str(exc)
            answers = [(result, why) for result in results]
        box: list[Any] = [None]
        dist.scatter_object_list(box, answers, src=0, group=self._group)
        result, why = box[0]
        if why:
            raise SnapshotError(f"the state cannot be laid out for snapshots: {why}")
        return result


def _digests(mine: Local) -> tuple[dict[str, str], dict[str, tuple[int, str]]]:
    return {path: _digest(t) for path, t in mine.tensors.items()}, dict(mine.shared)


def _digest(tensor: torch.Tensor) -> str:
    if isinstance(tensor, DTensor):
        # It says itself which parts of it are the same on which ranks of its mesh.
        ranks = tensor.device_mesh.mesh.tolist()
        return f"{ranks} {tensor.placements} {tensor.dtype} {tuple(tensor.shape)}"
    numbers = local(tensor).resolve_conj().resolve_neg().contiguous()
    raw = numbers.reshape(-1).view(torch.uint8).cpu()
    digest = xxhash.xxh3_64(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(raw.numpy().data)
    return str(digest.hexdigest())


def _name(
    all_digests: list[tuple[dict[str, str], dict[str, tuple[int, str]]]],
) -> list[tuple[dict[str, str], dict[str, int], bool]]:
    """Return for each rank the names of its tensors and shared bytes, and the latter's room.

    Also whether all ranks have the same.
    """
    room: dict[str, int] = defaultdict(int)
    everything = []
    for tensors, shared in all_digests:
        for name, (length, _) in shared.items():
            room[name] = max(room[name], length)
        everything.append(tensors | {name: digest for name, (_, digest) in shared.items()})
    keepers: dict[tuple[str, str], int] = {}
    lowest: dict[str, int] = {}
    for rank, digests in enumerate(everything):
        for name, digest in digests.items():
            lowest.setdefault(name, rank)
            keepers.setdefault((name, digest), rank)
    out = []
    alike = all(digests == everything[0] for digests in everything)
    for digests in everything:
        names = {}
        for name, digest in digests.items():
            keeper = keepers[name, digest]
            names[name] = name if keeper == lowest[name] else own_name(keeper, name)
        out.append((names, dict(room), alike))
    return out


def _propose(planner: DefaultSavePlanner) -> tuple[SavePlan, str]:
    try:
        return planner.create_local_plan(), ""
    except (RuntimeError, ValueError) as exc:
        # E.g. a DTensor of partial sums, which is no state.
        return SavePlan([]), str(exc)


def _global(
    planner: DefaultSavePlanner, plans: list[SavePlan], metadata: list[Metadata]
) -> Sequence[SavePlan]:
    shared_out, found = planner.create_global_plan(plans)
    metadata.append(found)
    return shared_out


def _part(name: str, tensor: torch.Tensor) -> Part:
    mine = local(tensor)
    dtype = str(mine.dtype).removeprefix("torch.")
    if not isinstance(tensor, DTensor):
        shape = tuple(mine.shape)
        return Part(name, dtype, shape, shape, (0,) * len(shape))
    return Part(name, dtype, tuple(mine.shape), tuple(tensor.shape), origin(tensor))


def origin(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return where this rank's part begins in the whole."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    if tensor.device_mesh.get_coordinate() is None:
        return (0,) * tensor.dim()
    (box,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # torch's gap
    return tuple(box.offsets)


def _encode(
    metadata: Metadata, everything: Sequence[Mapping[MetadataIndex, _StorageInfo]]
) -> bytes:
    metadata.storage_data = {index: info for one in everything for index, info in one.items()}
    return pickle.dumps(metadata)
