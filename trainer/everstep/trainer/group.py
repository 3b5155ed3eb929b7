"""The ranks' process groups: one to train with, one for snapshots alone, and how they end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from pathlib import Path

    from everstep.trainer.config import SessionConfig
    from everstep.trainer.place import Seat

T = TypeVar("T")


class Groups:
    """Forms the groups; a training group that somebody else made is used and left alone."""

    def __init__(self, seat: Seat, config: SessionConfig) -> None:
        self.device = _device(seat, config)
        self._owned = not dist.is_initialized()
        if self._owned:
            _form(seat, self.device, timedelta(seconds=config.process_group_timeout_s))
        # Two threads on one group would mix up each other's collectives and stand for ever.
        self.saving = cast(
            "dist.ProcessGroup",
            dist.new_group(backend="gloo", timeout=timedelta(seconds=config.save_timeout_s)),
        )

    def close(self, timeout_s: float) -> bool:
        """Take the groups down; False when that hangs, which happens after a peer was lost."""
        closing = threading.Thread(target=self._destroy, name="everstep-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        return not closing.is_alive()

    def _destroy(self) -> None:
        if self._owned:
            dist.destroy_process_group()
        else:
            dist.destroy_process_group(self.saving)


_abandoned = threading.Event()


def leave_without_groups() -> None:
    """Let this process end without its groups' destructors: with a peer lost they can hang.

    The interpreter's exit handlers run first; the exit code is the one it would have had, as far
    as that can be known there.
    """
    _abandoned.set()


def leave_as_usual() -> None:
    """Undo `leave_without_groups`: those groups have come down after all."""
    _abandoned.clear()


@atexit.register
def _leave_if_abandoned() -> None:
    if not _abandoned.is_set():
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    logging.shutdown()
    # The interpreter has printed the traceback of what ended the program, if anything did.
    os._exit(0 if getattr(sys, "last_value", None) is None else 1)


def from_first(value: T) -> T:
    """Return rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def from_all(value: T) -> list[T]:
    """Return every rank's value, in order of rank."""
    box: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def claim_generation(run_dir: Path) -> int:
    """Return a number that no other process gets for this run's folder, above all before it."""
    folder = run_dir / "generations"
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        number = newest_generation(run_dir) + 1
        with contextlib.suppress(FileExistsError):
            (folder / str(number)).touch(exist_ok=False)
            return number


def newest_generation(run_dir: Path) -> int:
    """Return the newest number claimed, 0 when there is none."""
    folder = run_dir / "generations"
    numbers = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    return max(numbers, default=0)


def _device(seat: Seat, config: SessionConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", seat.local_rank)
    torch.cuda.set_device(device)
    return device


def _form(seat: Seat, device: torch.device, timeout: timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if seat.launched:
        dist.init_process_group(backend, timeout=timeout)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]  # public, not in its stubs
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
