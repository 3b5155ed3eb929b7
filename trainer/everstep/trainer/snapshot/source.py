"""A snapshot that can be read, wherever it lies."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch

from everstep.snapshots.marker import SnapshotError
from everstep.trainer.snapshot.state import STATE, Own, Whole, rank_name, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from everstep.snapshots.marker import Marker
    from everstep.trainer.snapshot.layout import Part
    from everstep.wire.ids import SnapshotId

T = TypeVar("T")
_THREADS = 4


class Request(NamedTuple):
    """Wanted: the numbers of the box of `target`'s shape at `origin` in the whole of `name`."""

    name: str
    target: torch.Tensor
    origin: tuple[int, ...]


class Source(Protocol):
    """One snapshot in one place."""

    @property
    def marker(self) -> Marker:
        """What the snapshot says of itself."""
        ...

    @property
    def parts(self) -> Mapping[str, Sequence[Part]]:
        """The boxes that each tensor is there in, by name."""
        ...

    @property
    def replicated(self) -> bool:
        """Whether every rank's state is the same, and all of it is here."""
        ...

    def peek(self, name: str) -> torch.Tensor:
        """Return a tensor that is there in one piece; nobody has checked yet that it is whole."""
        ...

    def load(self, requests: Sequence[Request]) -> None:
        """Fill all targets and check everything that was read, `peek` included.

        Raises SnapshotError when something is damaged or missing; the targets are spoilt then.
        """
        ...


class Tier(Protocol):
    """A kind of place."""

    @property
    def name(self) -> str:
        """What it is called in findings."""
        ...

    def open(self, id_: SnapshotId) -> Source | None:
        """Return the snapshot, None when it is not there; SnapshotError says what is wrong."""
        ...


def own(source: Source, rank: int) -> Own | None:
    """Return what belongs to this rank alone, None when there was no such rank."""
    name = rank_name(rank)
    return _decode(source, name, Own) if name in source.parts else None


def whole(source: Source, name: str = STATE) -> Whole:
    """Return what there is beside tensors. Raises SnapshotError when it is not there."""
    return _decode(source, name, Whole)


def together(tasks: Iterable[Callable[[], Any]]) -> None:
    """Do all of it in a few threads; raise the first error, in order, when all have ended."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="everstep-restore") as pool:
        futures = [pool.submit(task) for task in tasks]
    for future in futures:
        future.result()


def check_complete(source: Source, requests: Iterable[Request]) -> None:
    """Raise SnapshotError for a request that is not all there."""
    for request in requests:
        boxes = [overlap(part, request) for part in source.parts.get(request.name, ())]
        there = sum(math.prod(s.stop - s.start for s in box[0]) for box in boxes if box)
        if there != request.target.numel():
            missing = request.target.numel() - there
            raise SnapshotError(f"{missing} numbers of {request.name} are missing")


def overlap(part: Part, request: Request) -> tuple[list[slice], list[slice]] | None:
    """Return where in the part, and where in the target, lies what both have; None for nothing."""
    wanted = request.target.shape
    if len(part.origin) != len(wanted):
        raise SnapshotError(f"{part.name} has {len(part.origin)} dimensions, not {len(wanted)}")
    theirs, ours = [], []
    for begin, length, at, size in zip(
        part.origin, part.shape, request.origin, wanted, strict=True
    ):
        low, high = max(begin, at), min(begin + length, at + size)
        if low >= high:
            return None
        theirs.append(slice(low - begin, high - begin))
        ours.append(slice(low - at, high - at))
    return theirs, ours


def takes_whole(part: Part, request: Request) -> bool:
    """Say whether the request wants just the part's bytes, one after the other."""
    target = request.target
    same = tuple(target.shape) == part.shape and request.origin == part.origin
    fits = target.dtype == part.torch_dtype and not target.is_conj() and not target.is_neg()
    return same and fits and target.device.type == "cpu" and target.is_contiguous()


@torch.no_grad()
def copy_overlap(part: Part, numbers: torch.Tensor, request: Request) -> None:
    """Copy what the request wants of the part's numbers."""
    if boxes := overlap(part, request):
        theirs, ours = boxes
        request.target[tuple(ours)].copy_(numbers[tuple(theirs)])


def _decode(source: Source, name: str, type_: type[T]) -> T:
    if name not in source.parts:
        raise SnapshotError(f"it has no {name}")
    try:
        return msgspec.msgpack.decode(unpack(source.peek(name)), type=type_)
    except msgspec.DecodeError as exc:
        raise SnapshotError(f"{name} is damaged: {exc}") from exc
