"""Finds the newest snapshot that all ranks can load, each from the nearest place that has it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from everstep.snapshots.marker import SnapshotError
from everstep.trainer.snapshot.planning import origin
from everstep.trainer.snapshot.source import Request, own, whole
from everstep.trainer.snapshot.state import STATE
from everstep.trainer.snapshot.tree import local, paths, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from everstep.snapshots.marker import Marker
    from everstep.trainer.snapshot.layout import Part
    from everstep.trainer.snapshot.source import Source, Tier
    from everstep.trainer.snapshot.tree import Node
    from everstep.wire.ids import SnapshotId

log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A snapshot that was read: the objects' states, whose tensors are live ones where possible.

    `rng` is this rank's random state, None when there is none for a rank of this number. `tier`
    says where it came from.
    """

    id: SnapshotId
    marker: Marker
    tier: str
    states: dict[str, Any]
    hooks: dict[str, Any]
    rng: bytes | None


class Live(Protocol):
    """The objects that a snapshot is loaded into."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return their tensors by path; what is put into one of these needs no copy later."""
        ...


class Rejection(NamedTuple):
    """One place could not give a snapshot. `lost`: no other could, so that it is not used."""

    id: SnapshotId
    tier: str
    why: str
    lost: bool = False


def restore(
    ids: Sequence[SnapshotId],
    tiers: Sequence[Tier],
    live: Live,
    *,
    where: str,
    group: dist.ProcessGroup,
    rejected: Callable[[Rejection], None],
) -> Restored | None:
    """Return the first of `ids` that loads on all ranks, None when there are no ids.

    Call it on all ranks of `group` with the same ids. `rejected` is told of each place that failed
    here; `where` is the snapshots' folder, for the message. Raises SnapshotError when none loads
    everywhere.
    """
    rank = dist.get_rank(group)
    reasons = []
    for id_ in ids:
        found, failures = _nearest(id_, tiers, live, rank)
        votes = _all(found, group)
        giver = next((r for r, vote in enumerate(votes) if vote == "replicated"), None)
        lost = None in votes and giver is None
        for failure in failures:
            rejected(failure._replace(lost=lost))
        if None not in votes:
            return found.restored if found else None
        if giver is not None:
            log.warning("%s: rank %d hands on what it has in memory", id_, giver)
            return _handed_on(id_, found, live, giver=giver, group=group)
        why = "; ".join(f"{f.tier}: {f.why}" for f in failures) or _missing(votes)
        log.warning("%s cannot be used by all ranks: %s", id_, why)
        reasons.append(f"{id_}: {why}")
    if not reasons:
        return None
    raise SnapshotError(
        f"no snapshot in {where} can be used by all ranks: {'; '.join(reasons)}. Bring back a good "
        "copy of one of them, or start over with another run_dir"
    )


def _missing(votes: Sequence[str | None]) -> str:
    ranks = ", ".join(str(rank) for rank, vote in enumerate(votes) if vote is None)
    return f"good on this rank, but rank {ranks} has it nowhere and no other has all of the state"


class _Found(NamedTuple):
    restored: Restored
    shape: Node
    tensors: dict[str, torch.Tensor]
    replicated: bool


def _nearest(
    id_: SnapshotId, tiers: Sequence[Tier], live: Live, rank: int
) -> tuple[_Found | None, list[Rejection]]:
    failures: list[Rejection] = []
    for tier in tiers:
        try:
            if (source := tier.open(id_)) is not None:
                return _load(id_, tier.name, source, live, rank), failures
        except (SnapshotError, OSError) as exc:
            failures.append(Rejection(id_, tier.name, str(exc)))
        except Exception as exc:  # noqa: BLE001  a damaged pickle raises anything
            why = f"does not load: {type(exc).__name__}: {exc}"
            failures.append(Rejection(id_, tier.name, why))
    return None, failures


def _load(id_: SnapshotId, tier: str, source: Source, live: Live, rank: int) -> _Found:
    mine = own(source, rank)
    names = mine.names if mine else {}
    state = whole(source, names.get(STATE, STATE))
    at_hand = live.tensors()
    targets, requests = {}, []
    for path in paths(state.shape):
        name = names.get(path, path)
        if name not in source.parts:
            raise SnapshotError(f"it has no {name}")
        target = targets[path] = _target(source.parts[name][0], at_hand.get(path))
        requests.append(Request(name, local(target), origin(target)))
    source.load(requests)
    # Only now is anything believed: what is no tensor may hold a pickle.
    states = unflatten(state.shape, targets.__getitem__)
    rng = mine.rng if mine else None
    restored = Restored(id_, source.marker, tier, states, state.hooks, rng)
    # What went into shards cannot be handed on from them.
    all_here = source.replicated and not any(isinstance(t, DTensor) for t in targets.values())
    return _Found(restored, state.shape, targets, all_here)


def _target(part: Part, live: torch.Tensor | None) -> torch.Tensor:
    """Return the live tensor itself where the numbers fit into it, else a new one."""
    size, dtype = part.size, part.torch_dtype
    if live is None or tuple(live.shape) != size:
        return torch.empty(size, dtype=dtype)
    if live.dtype != dtype:
        return torch.empty_like(live, dtype=dtype, requires_grad=False)
    expanded = any(s == 0 and n > 1 for s, n in zip(live.stride(), live.shape, strict=True))
    return torch.empty_like(live.contiguous()) if expanded else live.detach()


def _all(found: _Found | None, group: dist.ProcessGroup) -> list[str | None]:
    vote = None if found is None else "replicated" if found.replicated else "sharded"
    votes: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(votes, vote, group=group)
    return votes


def _handed_on(
    id_: SnapshotId, found: _Found | None, live: Live, *, giver: int, group: dist.ProcessGroup
) -> Restored:
    """Give the ranks that have nothing what rank `giver` has; all ranks take part."""
    box: list[Any] = [None]
    if dist.get_rank(group) == giver and found is not None:
        sizes = {p: (tuple(t.shape), t.dtype) for p, t in found.tensors.items()}
        box = [(found.restored.marker, found.shape, found.restored.hooks, sizes)]
    dist.broadcast_object_list(box, src=giver, group=group)
    marker, shape, hooks, sizes = box[0]
    at_hand = live.tensors() if found is None else found.tensors
    targets = {}
    for path, (size, dtype) in sizes.items():
        target = at_hand.get(path)
        if target is None or tuple(target.shape) != size or target.dtype != dtype:
            target = torch.empty(size, dtype=dtype)
        targets[path] = target
        _send(target, giver, group)
    if found is not None:
        return found.restored
    return Restored(id_, marker, "peer", unflatten(shape, targets.__getitem__), hooks, None)


@torch.no_grad()
def _send(target: torch.Tensor, giver: int, group: dist.ProcessGroup) -> None:
    staged = target.cpu().contiguous()
    if staged.numel():
        dist.broadcast(staged.reshape(-1).view(torch.uint8), src=giver, group=group)
    if staged.data_ptr() != target.data_ptr():
        target.copy_(staged)
