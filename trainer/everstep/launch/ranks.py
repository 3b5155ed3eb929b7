"""The launcher's own eyes on its ranks: how each ended, and that none is left standing.

torchrun waits 30 s for a rank that ignores SIGTERM, and asks nobody in the meantime. So a thread
here kills the process group of every rank still alive `KILL_AFTER_S` after (a) another local rank
ended, (b) a newer plan is in force, and before torchrun's own patience ends after (c) the launcher
itself was signalled.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from everstep.launch import reaper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KILL_AFTER_S = 2.0
_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended; both None when torchrun reaped it before we could look."""

    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    at_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """One rank as torchrun started it, and who knows how it ends.

    `pid` is the rank's own; `child` is torchrun's child: the rank itself, or the shim before it.
    `wait_end` waits for the end and returns (exit code, signal), both None when nobody knows.
    """

    pid: int
    child: int
    wait_end: Callable[[], tuple[int | None, int | None]]


@dataclass(slots=True)
class _Rank:
    pid: int
    pidfd: int | None
    child: int
    child_pidfd: int | None
    ended: bool = False
    succeeded_at: float | None = None

    def kill_group(self) -> None:
        """SIGKILL the rank's process group, unless its number may be somebody else's by now."""
        if not self.ended:
            _kill_group(self.pid, self.pidfd)

    def kill_child(self) -> None:
        """SIGKILL torchrun's child: a shim that is stopped can't end as its rank has."""
        _kill_group(self.child, self.child_pidfd)

    def close(self) -> None:
        for pidfd in (self.pidfd, self.child_pidfd):
            if pidfd is not None:
                os.close(pidfd)
        self.pidfd = self.child_pidfd = None


@dataclass(slots=True)
class _Generation:
    number: int
    ranks: list[_Rank] = field(default_factory=list)
    first_end: float | None = None
    superseded: float | None = None
    signalled: float | None = None


class Ranks:
    """Watches the local ranks of the generation that runs, and ends what must not go on."""

    def __init__(
        self,
        on_end: Callable[[int, Ended], None],
        *,
        spares: Callable[[int], bool] = lambda _: False,
        signal_grace_s: float = 25.0,
    ) -> None:
        """`spares(generation)` says whether the siblings of a rank that ended are to live on."""
        self.token = secrets.token_hex(8)
        self._mark = f"EVERSTEP_LAUNCH={self.token}"
        self._on_end = on_end
        self._spares = spares
        self._signal_grace_s = signal_grace_s
        self._current: _Generation | None = None
        self._changed = threading.Condition()
        self._reaper = self._start_reaper()
        threading.Thread(target=self._kill_when_due, name="everstep-killer", daemon=True).start()

    def _start_reaper(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(reaper.__file__)), self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def started(self, generation: int, ranks: Sequence[Started]) -> None:
        """Watch the ranks that torchrun has started, in order of local rank."""
        current = _Generation(generation, [_rank(r) for r in ranks])
        self.take_along(sorted({pid for r in ranks for pid in (r.pid, r.child)}))
        with self._changed:
            self._current = current
        for local_rank, rank in enumerate(ranks):
            self._watch(current, local_rank, rank)

    def moved(self, generation: int, ranks: Sequence[Started]) -> None:
        """The same children of torchrun are in another generation now, some with other ranks."""
        with self._changed:
            current = self._current
            if current is None:
                return
            current.number, current.first_end = generation, None
            fresh = [i for i, r in enumerate(ranks) if current.ranks[i].pid != r.pid]
            for i in fresh:
                current.ranks[i].close()
                current.ranks[i] = _rank(ranks[i])
            self._changed.notify_all()
        self.take_along([ranks[i].pid for i in fresh])
        for i in fresh:
            self._watch(current, i, ranks[i])

    def end_now(self) -> None:
        """Kill what still runs, so that torchrun starts all of them again."""
        with self._changed:
            for rank in self._current.ranks if self._current else ():
                rank.kill_group()

    def _watch(self, current: _Generation, local_rank: int, rank: Started) -> None:
        threading.Thread(
            target=self._await_end,
            args=(current, local_rank, rank.wait_end),
            name=f"everstep-wait-{local_rank}",
            daemon=True,
        ).start()

    def take_along(self, pids: Sequence[int], folder: Path | None = None) -> None:
        """Have the reaper kill these process groups, and remove a folder, after our own end."""
        pipe = self._pipe()
        for pid in pids:
            pipe.write(f"+{pid}\n")
        if folder is not None:
            pipe.write(f"{folder}\n")
        pipe.flush()

    def superseded(self) -> None:
        """A newer plan is in force, or the job is over: these ranks must not go on."""
        self._note("superseded")

    def ending(self) -> bool:
        """Return whether torchrun has a reason to end these ranks."""
        with self._changed:
            current = self._current
            return current is None or bool(current.first_end or current.superseded)

    def signalled(self) -> None:
        """The launcher was told to end; its ranks get torchrun's signal and a grace."""
        self._note("signalled")

    def _note(self, what: str) -> None:
        with self._changed:
            if self._current is not None and getattr(self._current, what) is None:
                setattr(self._current, what, time.monotonic())
                self._changed.notify_all()

    def clear(self) -> bool:
        """Torchrun has stopped its ranks: kill what they left behind, and forget them.

        A grandchild in a session of its own would otherwise keep its accelerator's memory.
        Return whether they had all ended with 0 of their own accord, before they were to stop: a
        script may well end with 0 because it was told to.
        """
        with self._changed:
            current, self._current = self._current, None
        if current is None:
            return False
        for rank in current.ranks:
            rank.close()
        reaper.kill_marked(self._mark)
        until = current.superseded or math.inf
        return all(r.succeeded_at is not None and r.succeeded_at < until for r in current.ranks)

    def close(self) -> None:
        """End the reaper by closing its pipe; it takes leftovers along."""
        self._pipe().close()
        self._reaper.wait(10)

    def _pipe(self) -> IO[str]:
        if self._reaper.stdin is None:
            raise AssertionError("the reaper was started with a pipe")
        return self._reaper.stdin

    def _await_end(
        self,
        generation: _Generation,
        local_rank: int,
        wait_end: Callable[[], tuple[int | None, int | None]],
    ) -> None:
        rank = generation.ranks[local_rank]
        exit_code, killed_by = wait_end()
        ended = Ended(local_rank, rank.pid, exit_code, killed_by, time.time())
        with self._changed:
            rank.ended = True
            if exit_code == 0:
                rank.succeeded_at = time.monotonic()
            failed = exit_code != 0 and (exit_code, killed_by) != (None, None)
            if failed and generation.first_end is None:
                generation.first_end = time.monotonic()
            self._changed.notify_all()
        self._on_end(generation.number, ended)

    def _kill_when_due(self) -> None:
        with self._changed:
            while True:
                current = self._current
                due = None if current is None else self._due(current)
                now = time.monotonic()
                if current is not None and due is not None and due <= now:
                    for rank in current.ranks:
                        rank.kill_group()
                    self._changed.wait(_AGAIN_S)
                    for rank in current.ranks:
                        rank.kill_child()
                else:
                    self._changed.wait(None if due is None else due - now)

    def _due(self, current: _Generation) -> float | None:
        """Return when the ranks still alive are to be killed, None for "not foreseen"."""
        if all(rank.ended for rank in current.ranks):
            return None
        first_end = None if self._spares(current.number) else current.first_end
        times = [
            start + wait_s
            for start, wait_s in (
                (first_end, KILL_AFTER_S),
                (current.superseded, KILL_AFTER_S),
                (current.signalled, self._signal_grace_s),
            )
            if start is not None
        ]
        return min(times, default=None)


def _rank(rank: Started) -> _Rank:
    return _Rank(rank.pid, _pidfd(rank.pid), rank.child, _pidfd(rank.child))


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None  # it ended and was reaped already


def child_end(
    pid: int, returncode: Callable[[], int | None]
) -> Callable[[], tuple[int | None, int | None]]:
    """Return what waits for the end of torchrun's child, for `Started.wait_end`.

    `returncode()` is what torchrun knows of one that it reaped before we looked.
    """
    return lambda: _how_it_ended(pid) or as_ended(returncode())


def _kill_group(pid: int, pidfd: int | None) -> None:
    """SIGKILL a process group, unless its number may be somebody else's by now."""
    if pidfd is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, 0)
            reaper.kill_group(pid)


def _how_it_ended(pid: int) -> tuple[int | None, int | None] | None:
    """Wait for a child's end without taking its status from torchrun; (exit code, signal).

    None when torchrun was faster and the status is gone.
    """
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return None
    if result is None:
        return None
    if result.si_code == os.CLD_EXITED:
        return result.si_status, None
    return None, result.si_status


def as_ended(returncode: int | None) -> tuple[int | None, int | None]:
    """Split Popen's return code; unknown stays unknown and is never taken for success."""
    if returncode is None:
        return None, None
    return (returncode, None) if returncode >= 0 else (None, -returncode)


def signal_name(number: int) -> str:
    """Return the name of a signal, e.g. SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
