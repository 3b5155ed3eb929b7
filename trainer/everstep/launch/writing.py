"""The snapshot writer of this launcher: started once for all ranks, and again when it dies."""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING

from everstep.snapshots import writer
from everstep.snapshots.sealed import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VARIABLE = "EVERSTEP_WRITER"
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_FINISH_S = 25.0
"""Below the 30 s that service managers and torchrun itself leave between SIGTERM and SIGKILL."""
_MARK = "EVERSTEP_LAUNCH"  # what carries it is killed between two generations


class NodeWriter:
    """Outlives every rank, and finishes what they have ordered. `say` is told of its deaths."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._closing = threading.Event()
        self._writer = self._start()
        if self._writer is not None:
            threading.Thread(target=self._watch, name="everstep-writer", daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """What a rank must find in its environment; nothing where it has to start its own."""
        return {} if self._writer is None else {VARIABLE: str(self._writer.path)}

    def close(self, timeout_s: float = _FINISH_S) -> bool:
        """Let it finish what is in flight, in bounded time; False when that was too short."""
        self._closing.set()
        if self._writer is None or self._writer.close(timeout_s):
            return True
        self._say(f"the snapshot writer did not finish its last save within {timeout_s:.0f} s")
        return False

    def _start(self) -> writer.Writer | None:
        environ = {name: value for name, value in os.environ.items() if name != _MARK}
        try:
            return writer.start(self._folder, environ=environ)
        except SnapshotError as exc:
            self._say(f"{exc}; each rank starts a snapshot writer of its own")
            return None

    def _watch(self) -> None:
        pause_s = _PAUSE_S
        while self._writer is not None and not self._closing.is_set():
            _await_end(self._writer.pid)
            if self._closing.wait(pause_s) or self._writer.alive:
                return
            self._say(f"the snapshot writer (pid {self._writer.pid}) has died; starting another")
            self._writer = self._start() or self._writer
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def _await_end(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os.close(pidfd)
