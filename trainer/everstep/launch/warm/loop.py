"""One thread that waits for sockets, and does what other threads ask of it in between."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class Loop:
    """Calls back on its own thread; what a callback raises is logged and costs that one call."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_w.settimeout(0)
        self._calls: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.watch(self._wake_r, self._obey)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, what: Callable[[], None]) -> None:
        """Have it called on the loop's thread, soon; from any thread."""
        with self._lock:
            self._calls.append(what)
        # Full, it wakes anyway; closed, there is nothing left to do.
        with contextlib.suppress(OSError):
            self._wake_w.send(b"x")

    def call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Have it called on the loop's thread after a while; from any thread."""
        timer = threading.Timer(delay_s, self.call, [what])
        timer.daemon = True
        timer.start()

    def watch(self, sock: socket.socket, readable: Callable[[], None]) -> None:
        """Call back whenever there is something to read; on the loop's thread only."""
        self._selector.register(sock, selectors.EVENT_READ, readable)

    def drop(self, sock: socket.socket) -> None:
        """Stop watching and close it; on the loop's thread only."""
        self._selector.unregister(sock)
        sock.close()

    def end(self, last: Callable[[], None], timeout_s: float) -> None:
        """Do one last thing on the thread, then end it, and wait for that."""

        def finish() -> None:
            self._ends = True
            last()

        if not self._thread.is_alive():
            return
        self.call(finish)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._ends:
            for key, _ in self._selector.select():
                if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # sockets only
                    self._guard(key.data)
        self._selector.close()
        self._wake_r.close()
        self._wake_w.close()

    def _obey(self) -> None:
        self._wake_r.recv(4096)
        with self._lock:
            calls, self._calls = self._calls, []
        for what in calls:
            self._guard(what)

    def _guard(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception:  # the thread must outlive one mishap: ranks wait for it
            log.exception("everstep: warm pool: a call failed")
