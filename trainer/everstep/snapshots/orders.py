"""What a rank and the writer of its node say to each other, over a Unix socket.

Framed as on the agent's socket (`everstep.wire.codec`). The rank copies its state into a slot, a
memory file of fixed layout whose first bytes are, byte for byte, the file that is to be written;
the writer holds the same memory, so it can finish when the rank is gone.
"""

from __future__ import annotations

import msgspec

from everstep.snapshots.marker import Marker


class Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """Root of both directions; the class name is the `kind`."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What stays: the newest `keep`, every `keep_every_steps`-th step (0: none), within a budget.

    `budget_bytes` 0 is no limit. Whatever the numbers say, the newest good one is never deleted.
    """

    keep: int = 3
    keep_every_steps: int = 0
    budget_bytes: int = 0


class Attach(Order, frozen=True, kw_only=True):
    """Rank -> writer: here is one slot of my memory; its descriptor rides on this frame."""

    job: str
    rank: int
    slot: int
    size_bytes: int


class Write(Order, frozen=True, kw_only=True):
    """Rank -> writer: put this slot on disk, as one part of a snapshot of `parts` files.

    `place` is the folder of the run's snapshots, a path or an fsspec URL. The part's file is the
    slot's bytes from `start` on, `size_bytes` of them, whose XXH3-64 is `xxh3` ("": not known yet;
    the writer takes its own). Rank 0 sends DCP's `.metadata` along and is the
    `lead`: its writer waits for all parts and puts the marker.
    """

    id: str
    slot: int
    place: str
    file: str
    start: int
    size_bytes: int
    xxh3: str
    rank: int
    parts: int
    facts: Marker
    lead: bool = False
    metadata: bytes = b""
    policy: Policy = Policy()
    deadline_s: float = 1800.0
    stall_s: float = 0.0
    agent_socket: str = ""
    generations: str = ""
    """Folder of claimed generation numbers: a newer one there means that this writer is stale."""
    attempt: int = 0
    """Counts up when the same id is tried again; parts of an earlier attempt do not count."""
    suspects: list[str] = []
    """Ids that did not load or failed at once: retention does not count them as good."""
    metadata_start: int = 0
    metadata_bytes: int = 0
    """Where in the slot `.metadata` lies, for one that is too large for a message."""
    missing: str = ""
    """Why this rank has no part to give: no slot is read, and the lead need not wait for it."""


class PartDone(Order, frozen=True, kw_only=True):
    """Writer -> rank: this rank's file is durable, or `why` it is not. The slot is free again."""

    id: str
    slot: int
    write_s: float
    why: str | None = None


class Done(Order, frozen=True, kw_only=True):
    """Writer -> lead: the marker is durable, or `why` there will be none."""

    id: str
    write_s: float
    why: str | None = None
    marker: Marker | None = None


class Refused(Order, frozen=True, kw_only=True):
    """Writer -> rank: this slot is not taken, and why; orders for it will fail."""

    slot: int
    why: str


ToWriter = Attach | Write
FromWriter = PartDone | Done | Refused
