"""From which snapshots a generation may resume: those on disk, and those in its nodes' memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from everstep.coordinator.job import Job
    from everstep.wire.messages import Member, SnapshotHeld

_MOST, _ON_DISK = 4, 2
_KEPT_PER_RANK = 2  # a rank has two slots


class Piece(NamedTuple):
    """One rank's part of a snapshot; one that is `replicated` is all that is needed."""

    id: SnapshotId
    replicated: bool


@dataclass(slots=True)
class Holders:
    """Who holds a snapshot in memory now."""

    ranks: set[int] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    replicated: bool = False


class Held:
    """What each rank said last of its node's memory.

    It is never journaled: one that is lost or out of date costs no more than the steps up to the
    next older one, because ranks verify whatever a plan names.
    """

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, int], tuple[Piece, ...]] = {}

    def take(self, node: str, rank: int, piece: Piece) -> None:
        """A rank holds a new piece, in place of the one before the last."""
        before = (p for p in self._pieces.get((node, rank), ()) if p.id != piece.id)
        self._pieces[node, rank] = (piece, *before)[:_KEPT_PER_RANK]

    def forget(self, node: str) -> None:
        """A node's memory is gone, or nobody knows of it any more."""
        self._pieces = {k: v for k, v in self._pieces.items() if k[0] != node}

    def holders(self, nodes: Collection[str] | None = None) -> dict[SnapshotId, Holders]:
        """Return who holds what, on these nodes (None: on all)."""
        found: dict[SnapshotId, Holders] = {}
        for (node, rank), pieces in self._pieces.items():
            if nodes is not None and node not in nodes:
                continue
            for piece in pieces:
                holders = found.setdefault(piece.id, Holders())
                holders.ranks.add(rank)
                holders.nodes.add(node)
                holders.replicated |= piece.replicated
        return found

    def usable(
        self, nodes: Collection[str], *, ranks: int, were: Mapping[int, int]
    ) -> list[SnapshotId]:
        """Return what `ranks` ranks on these nodes can resume from; `were` is generation to ranks.

        Of a replicated one a single holder will do. Of a sharded one every piece must be there,
        and as many ranks as took it: pieces are not cut anew in memory.
        """
        return [
            id_
            for id_, holders in self.holders(nodes).items()
            if holders.replicated
            or (were.get(id_.generation) == ranks and holders.ranks >= set(range(ranks)))
        ]


def held(job: Job, node: str, said: SnapshotHeld) -> None:
    """Take note of what a rank holds; what cannot be is passed over."""
    book, id_ = job.book, SnapshotId(said.step, said.generation)
    most = book.spec.max_nodes * max(s.local_world_size for s in book.seats.values())
    possible = 0 < said.generation <= max(book.proposed, book.generation) and said.step >= 0
    if possible and str(id_) == said.id and 0 <= said.rank < most and node in book.seats:
        job.held.take(node, said.rank, Piece(id_, said.replicated))


def named(job: Job, members: Sequence[Member]) -> list[str]:
    """Return the ids that a plan with these members names, newest first."""
    book = job.book
    were = {g.number: g.ranks for g in book.generations}
    were[book.generation] = book.world_size
    in_memory = job.held.usable(
        {m.node for m in members}, ranks=sum(m.local_world_size for m in members), were=were
    )
    bad = book.suspects.keys() | book.suspects_in_memory.keys()
    return choose(
        (SnapshotId.parse(s) for s in book.resume(limit=len(book.snapshots))),
        (id_ for id_ in in_memory if str(id_) not in bad),
    )


def choose(on_disk: Iterable[SnapshotId], in_memory: Iterable[SnapshotId]) -> list[str]:
    """Return at most four ids, newest first, of which two are on disk if there are so many.

    >>> choose([SnapshotId(10, 1), SnapshotId(20, 1), SnapshotId(9, 2)], [SnapshotId(34, 1)])
    ['s000009-g2', 's000034-g1', 's000020-g1', 's000010-g1']
    """
    disk = sorted(set(on_disk), key=SnapshotId.place, reverse=True)
    memory = sorted(set(in_memory).difference(disk), key=SnapshotId.place, reverse=True)
    memory = memory[: _MOST - min(_ON_DISK, len(disk))]
    chosen = memory + disk[: _MOST - len(memory)]
    return [str(id_) for id_ in sorted(chosen, key=SnapshotId.place, reverse=True)]
