"""A rank's place in its job, as torchrun and everstep's launcher put it into the environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from everstep.sdk.config import ConfigError
from everstep.trainer.order import Range
from everstep.wire.ids import SnapshotId

if TYPE_CHECKING:
    from collections.abc import Mapping


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Who this rank is. Without everstep around it, `job` is empty and `generation` is None.

    `resume` None means that nobody chose: the newest good snapshot in the run's folder is taken.
    `writer` is the socket of the launcher's snapshot writer; without one the rank starts its own.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False
    job: str = ""
    generation: int | None = None
    resume: tuple[SnapshotId, ...] | None = None
    skip: tuple[Range, ...] = ()
    socket: Path | None = None
    mtbf_s: float | None = None
    writer: Path | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Seat:
        """Read it. Raises ConfigError naming the variable that makes no sense."""
        resume = environ.get("EVERSTEP_RESUME")
        socket = environ.get("EVERSTEP_SOCKET")
        writer = environ.get("EVERSTEP_WRITER")
        return cls(
            rank=_number(environ, "RANK") or 0,
            world_size=_number(environ, "WORLD_SIZE") or 1,
            local_rank=_number(environ, "LOCAL_RANK") or 0,
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE") or 1,
            launched="RANK" in environ and "MASTER_ADDR" in environ,
            job=environ.get("EVERSTEP_JOB", ""),
            generation=_number(environ, "EVERSTEP_GENERATION"),
            resume=None if resume is None else _ids(resume),
            skip=_windows(environ.get("EVERSTEP_SKIP", "")),
            socket=Path(socket) if socket else None,
            mtbf_s=_number(environ, "EVERSTEP_MTBF_S") or None,
            writer=Path(writer) if writer else None,
        )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError as exc:
        raise ConfigError(f"environment: {name} must be a whole number, not {text!r}") from exc


def _ids(text: str) -> tuple[SnapshotId, ...]:
    try:
        return tuple(SnapshotId.parse(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as exc:
        raise ConfigError(f"environment: EVERSTEP_RESUME: {exc}") from exc


def _windows(text: str) -> tuple[Range, ...]:
    windows = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        start, dash, stop = part.partition("-")
        if not (dash and start.isdigit() and stop.isdigit() and int(start) < int(stop)):
            raise ConfigError(
                f"environment: EVERSTEP_SKIP: {part!r} is not a window of sample indices such as "
                "1200-1260 (first, and one past the last)"
            )
        windows.append((int(start), int(stop)))
    return tuple(sorted(windows))
