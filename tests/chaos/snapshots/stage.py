"""The processes of a case: forks of one that has imported everything, so that each costs little."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from tests.chaos.snapshots import rank as ranks
from tests.chaos.snapshots.rank import Brief

from everstep.launch.warm import birth
from everstep.snapshots.faults import FAULT_VARIABLE
from everstep.snapshots.writer.child import listen

DEADLINE_S = 90.0
_POLL_S = 0.002


class StageError(AssertionError):
    """Something did not happen that should have."""


class Child:
    """A forked process; its end and its stops are seen by `look`."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.stopped = False
        self.code: int | None = None

    @property
    def alive(self) -> bool:
        self.look()
        return self.code is None

    def look(self) -> None:
        """Take note of what became of it."""
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                self.stopped = True
            elif os.WIFCONTINUED(status):
                self.stopped = False
            else:
                self.code = os.waitstatus_to_exitcode(status)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is still there."""
        if self.alive:
            os.kill(self.pid, number)

    def end(self) -> int:
        """Kill it, if it has not ended, and return its code."""
        self.send(signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        """Return its code. Raises StageError when it does not end."""
        until(lambda: not self.alive, f"the end of process {self.pid}, see {self.log}")
        assert self.code is not None
        return self.code


class RankChild(Child):
    """A rank, and everything that it has told so far."""

    def __init__(self, pid: int, log: Path, control: socket.socket, seat_rank: int) -> None:
        super().__init__(pid, log)
        self.rank = seat_rank
        self.events: list[dict[str, Any]] = []
        self._control = control
        self._rest = b""
        control.setblocking(False)

    def say(self, do: str, **more: Any) -> None:
        """Have it do something."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.sendall(json.dumps({"do": do, **more}).encode() + b"\n")

    def hear(self) -> None:
        """Read what it has told meanwhile."""
        if self._control.fileno() < 0:
            return
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while data := self._control.recv(1 << 16):
                *lines, self._rest = (self._rest + data).split(b"\n")
                self.events += map(json.loads, lines)

    def told(self, event: str, **more: Any) -> list[dict[str, Any]]:
        """Return what it has told of one kind, with these values."""
        self.hear()
        wanted = {"event": event, **more}.items()
        return [e for e in self.events if wanted <= e.items()]

    def hang_up(self) -> None:
        """Close the line; everything that was told has been read."""
        if self._control.fileno() >= 0:
            self.hear()
            self._control.close()


def until(true: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll until it holds. Raises StageError when it does not come."""
    end_s = time.monotonic() + deadline_s
    while not (value := true()):
        if time.monotonic() > end_s:
            raise StageError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(_POLL_S)
    return value


def start_rank(brief: Brief, log: Path) -> RankChild:
    """Fork a rank."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        ranks.main(theirs, brief)

    pid = _fork(run, log, keep=[theirs.fileno()])
    theirs.close()
    return RankChild(pid, log, ours, brief.seat.rank)


def start_writer(path: Path, log: Path, fault: str = "") -> Child:
    """Fork a snapshot writer: the same module that a launcher runs, in a process that has it."""
    listener, me = listen(path), os.pidfd_open(os.getpid())

    def run() -> None:
        os.environ[FAULT_VARIABLE] = fault
        options = ["--socket", path, "--fd", listener.fileno(), "--parent", me, "--grace", 60]
        sys.argv = ["everstep.snapshots.writer", *map(str, options)]
        runpy.run_module("everstep.snapshots.writer", run_name="__main__", alter_sys=True)

    pid = _fork(run, log, keep=[listener.fileno(), me])
    listener.close()
    os.close(me)
    return Child(pid, log)


def _fork(run: Callable[[], None], log: Path, keep: Collection[int]) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        birth.die_with_parent(parent)
        os.setsid()
        _only(keep, log)
        run()
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:  # noqa: BLE001  as the interpreter does at the end of a script
        traceback.print_exc()
    finally:
        # What is cleaned up at the end is the parent's.
        os._exit(code)


def _only(keep: Collection[int], log: Path) -> None:
    """Have these descriptors and a log; all others are the parent's."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target in (1, 2):
        os.dup2(out, target)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  numbers, no paths
        if int(name) > 2 and int(name) not in keep:
            try:
                os.close(int(name))
            except OSError as exc:
                if exc.errno != errno.EBADF:
                    raise
