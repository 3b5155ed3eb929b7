"""Closes what strangers handed over, in a thread: a close can block, the daemon must not."""

from __future__ import annotations

import contextlib
import os
import queue
import threading


class Disposal:
    """Closes descriptors one after the other.

    The last close of somebody else's socket may linger, and that of a file on a dead network mount
    may never return. Then everything after it waits in the queue: that costs descriptors, which
    the limit on clients bounds, and nothing else.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="disposal", daemon=True)
        self._thread.start()

    def close(self, fd: int) -> None:
        """Close the descriptor soon; it must not be used again."""
        self._queue.put(fd)

    def end(self) -> None:
        """Let the thread end once the queue is empty; at most half a second is spent waiting."""
        self._queue.put(None)
        self._thread.join(0.5)

    def _serve(self) -> None:
        while (fd := self._queue.get()) is not None:
            with contextlib.suppress(OSError):
                os.close(fd)
