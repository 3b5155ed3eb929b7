"""The state of a run between the live objects and a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import xxhash

from everstep.snapshots.marker import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from everstep.trainer.snapshot.tree import Node

STATE, RANK, OWN = "everstep.state", "everstep.rank.", "everstep.own."
_LENGTH_BYTES = 8
_ROOM = 4096
SPARE = 64 * 1024
"""What hooks remember grows in the first hundreds of steps, from next to nothing."""


class State(NamedTuple):
    """What a rank has now: live tensors by path, how they hang together, and everything small.

    `steady` names the tensors that nothing but an optimizer's step changes.
    """

    tensors: Mapping[str, torch.Tensor]
    steady: frozenset[str]
    shape: Node
    hooks: Mapping[str, Any]
    rng: bytes


class Whole(msgspec.Struct, frozen=True):
    """What the whole run has beside tensors, packed as `everstep.state`."""

    shape: Any
    hooks: dict[str, Any]


class Own(msgspec.Struct, frozen=True):
    """What is one rank's own, packed as `everstep.rank.<rank>`.

    `names` are those of its tensors that are not called by their path in the snapshot.
    """

    rng: bytes
    names: dict[str, str]


def rank_name(rank: int) -> str:
    """Return the name that a rank's own things are packed under."""
    return f"{RANK}{rank}"


def is_packed(name: str) -> bool:
    """Say whether the tensor of this name in a snapshot is made by `pack`."""
    return (
        name.startswith(RANK)
        or name == STATE
        or (name.startswith(OWN) and name.endswith("." + STATE))
    )


def room(raw: bytes, *, spare: int = 0) -> int:
    """Return how much to set aside for bytes that may grow to twice their length, and `spare`."""
    return -(-(_LENGTH_BYTES + 2 * len(raw) + spare) // _ROOM) * _ROOM


def fits(raw: bytes, size_bytes: int) -> bool:
    """Say whether `pack` can put the bytes into so much room."""
    return _LENGTH_BYTES + len(raw) <= size_bytes


def pack(raw: bytes, target: torch.Tensor) -> None:
    """Put bytes that fit into a tensor of fixed size."""
    end = _LENGTH_BYTES + len(raw)
    whole = bytearray(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw)
    target[:end] = torch.frombuffer(whole, dtype=torch.uint8)
    target[end:] = 0


def unpack(packed: torch.Tensor) -> bytes:
    """Return what `pack` put there. Raises SnapshotError when that cannot be."""
    raw = packed.numpy().tobytes()
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    if length > len(raw) - _LENGTH_BYTES:
        raise SnapshotError("packed bytes are cut short")
    return raw[_LENGTH_BYTES : _LENGTH_BYTES + length]


def outline(node: Node) -> str:
    """Return a digest of which tensors there are and how they hang together, whatever else."""
    digest = xxhash.xxh3_64()
    digest.update(repr(_bare(node)).encode())
    return str(digest.hexdigest())


def _bare(node: Node) -> Any:
    kind, body = node
    match kind:
        case "dict":
            return [kind, [[repr(key), _bare(child)] for key, child in body]]
        case "list" | "tuple":
            return [kind, [_bare(child) for child in body]]
        case "tensor":
            return [kind, body]
        case _:
            return [kind]
