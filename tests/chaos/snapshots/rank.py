"""One rank: the real engine behind a socket that says what to do next and hears what happened."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from tests.chaos.snapshots.state import Held, stored
from tests.trainer.snapshot_bench import same

from everstep.sdk import Finding
from everstep.snapshots import catalogue
from everstep.snapshots.marker import Marker, SnapshotError
from everstep.snapshots.orders import Done, FromWriter
from everstep.trainer.config import SessionConfig
from everstep.trainer.content import Content
from everstep.trainer.group import Groups
from everstep.trainer.keeper import Keeper
from everstep.trainer.place import Seat
from everstep.trainer.presence import Presence
from everstep.trainer.snapshot import compare
from everstep.trainer.snapshot.wishes import Wishes
from everstep.wire.ids import SnapshotId

SAVE_S = 20.0
Tell = Callable[..., None]


class Brief(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told when it is forked."""

    seed: int
    numbers: int
    own: bool
    keep: int
    run_dir: str
    seat: Seat


class Told(Presence):
    """A rank's presence, of which the conductor hears everything as well."""

    def __init__(self, seat: Seat, tell: Tell) -> None:
        self._tell = tell
        super().__init__(seat)

    def report(self, finding: Finding) -> None:
        self._tell("finding", name=finding.name, summary=finding.summary)
        super().report(finding)

    def held(self, marker: Marker, replicated: bool) -> None:
        super().held(marker, replicated)
        self._tell("held", id=marker.id, replicated=replicated)


def main(control: socket.socket, brief: Brief) -> None:
    """Serve until told to close, or until the conductor hangs up."""
    lock = threading.Lock()

    def tell(event: str, **more: Any) -> None:
        with lock:
            control.sendall(json.dumps({"event": event, **more}).encode() + b"\n")

    rank = Rank(brief, tell)
    tell("ready")
    for line in control.makefile("r", encoding="utf-8"):
        command = json.loads(line)
        if command["do"] == "close":
            break
        getattr(rank, command.pop("do"))(**command)
    rank.close()
    tell("closed")


class Rank:
    """What can be asked of a rank."""

    def __init__(self, brief: Brief, tell: Tell) -> None:
        seat = brief.seat
        self._brief, self._tell, self._seat = brief, tell, seat
        run_dir = Path(brief.run_dir)
        torch.set_num_threads(1)
        path = str(run_dir / f"store-{seat.generation}")
        store = dist.FileStore(path, seat.world_size)  # type: ignore[attr-defined]  # public, not in its stubs
        dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.world_size)
        config = SessionConfig(
            run_dir=brief.run_dir, seed=brief.seed, device="cpu", save_timeout_s=SAVE_S
        )
        wishes = Wishes()
        wishes.policy(keep=brief.keep, at_end=False, wait_when_busy=True)
        self._presence = Told(seat, tell)
        self._groups = Groups(seat, config)
        self._keeper = Keeper(run_dir, seat, config, self._groups, self._presence, wishes)
        self._keeper._outlets.on_reply = self._heard
        self._held = Held(brief.seed, brief.numbers, rank=seat.rank, own=brief.own)
        self._content = Content(self._held.objects, rank=seat.rank)

    def save(self, step: int, *, disk: bool, races: bool) -> None:
        """Take a snapshot of a step, and (`races`) go on to the next at once."""
        self._held.turn(step)
        if not self._keeper.engine.laid_out:
            self._keeper.lay_out(lambda: self._content.state({}))
        self._keeper.take(
            self._content.state({}),
            step=step,
            samples=step * 12,
            skip=[],
            final=False,
            disk=disk,
        )
        self._tell("taken", step=step)
        if races:
            self._held.turn(step + 1)

    def restore(self) -> None:
        """Bring back the newest that all ranks can load, and look whether it is what it was."""
        try:
            found = self._keeper.restore(self._content)
        except SnapshotError as exc:
            self._tell("restored", id=None, why=str(exc))
            return
        if found is None:
            self._tell("restored", id=None, why="there is none")
            return
        self._content.apply(found, world_size=self._seat.world_size)
        wrong = self._held.differences(found.id.step)
        if found.marker.samples != found.id.step * 12:
            wrong.append(f"samples {found.marker.samples}")
        self._tell("restored", id=str(found.id), tier=found.tier, wrong=wrong)

    def read_all(self) -> None:
        """Read every snapshot on disk that claims to be whole, and compare each with its step."""
        folder = Path(self._keeper.place)
        ids = [entry.id for entry in catalogue.entries(folder) if entry.committed]
        read = {str(id_): self._read(folder / str(id_), id_) for id_ in ids}
        # What the writer has deleted meanwhile was no longer to be kept.
        there = {str(entry.id) for entry in catalogue.entries(folder) if entry.committed}
        self._tell("read", read={id_: wrong for id_, wrong in read.items() if id_ in there})

    def _read(self, folder: Path, id_: SnapshotId) -> list[str] | None:
        """Return which tensors are wrong, None where it is refused as damaged."""
        try:
            _, tensors = compare.read(folder)
        except Exception:  # noqa: BLE001  a damaged one may raise anything, and must raise something
            return None
        expected = stored(self._brief.seed, id_.step, self._brief.numbers)
        return [name for name, t in expected.items() if not same(tensors[name], t)]

    def close(self) -> None:
        """End as a session does."""
        self._keeper.close(5.0)
        self._presence.close(flush_s=5.0)
        self._groups.close(5.0)

    def _heard(self, reply: FromWriter) -> None:
        self._keeper.engine.heard(reply)
        kind = "done" if isinstance(reply, Done) else "part"
        self._tell(kind, id=getattr(reply, "id", ""), why=reply.why)
