"""A rank that was forked, as its launcher sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading


class WarmRank:
    """A rank forked by the pool, living or ended, and the shim that torchrun takes for it."""

    def __init__(self, local_rank: int, shim: int, pid: int, pidfd: int) -> None:
        self.local_rank = local_rank
        self.shim = shim
        self.pid = pid
        self.code: int | None = None
        self._pidfd = pidfd
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def wait_end(self) -> int:
        """Wait until it has ended; return its exit code, or its signal's number, negated.

        -SIGKILL when it went down with its nursery, which alone could have told.
        """
        self._ended.wait()
        return -signal.SIGKILL if self.code is None else self.code

    def send(self, number: int) -> None:
        """Send a signal to its process group; nothing happens when it has ended."""
        with self._lock:
            if self.code is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, 0)
                    os.killpg(self.pid, number)

    def end(self, code: int) -> None:
        """Put down how it has ended; the pool's own."""
        with self._lock:
            self.code = code
            os.close(self._pidfd)
        self._ended.set()

    def share(self) -> int:
        """Return its pidfd, to be passed on at once; the pool's own."""
        return self._pidfd
