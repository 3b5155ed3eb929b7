"""The writer's one loop: it takes orders and starts a thread for each."""

from __future__ import annotations

import logging
import os
import select
import socket
from typing import TYPE_CHECKING

from everstep.snapshots.writer.connection import BROKEN, Connection
from everstep.snapshots.writer.saves import Saves

if TYPE_CHECKING:
    from everstep.snapshots.faults import Faults

log = logging.getLogger(__name__)

_LAST_TURNS = 3


class Server:
    """Serves ranks of its own user until it is stopped or its parent has ended."""

    def __init__(
        self, listener: socket.socket, *, faults: Faults, parent: int | None, grace_s: float
    ) -> None:
        listener.settimeout(0)
        self._listener = listener
        self._parent = parent
        self._grace_s = grace_s
        self._saves = Saves(faults)
        self._connections: dict[int, Connection] = {}
        self._why: str | None = None
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_w.settimeout(0)
        self._poll = select.poll()
        for one in (listener, self._wake_r):
            self._poll.register(one, select.POLLIN)
        if parent is not None:
            self._poll.register(parent, select.POLLIN)

    @property
    def wake_fd(self) -> int:
        """For `signal.set_wakeup_fd`: a signal may be taken by any thread, the loop must wake."""
        return self._wake_w.fileno()

    def stop(self, why: str) -> None:
        """Take no more orders, finish what is in flight and end; for a signal's handler."""
        self._why = self._why or why

    def run(self) -> bool:
        """Serve; return whether everything in flight was finished within the grace."""
        while self._why is None:
            self._turn(self._poll.poll())
        for _ in range(_LAST_TURNS):  # what was ordered before the end still counts
            self._turn(self._poll.poll(0))
        return self._finish()

    def _turn(self, ready: list[tuple[int, int]]) -> None:
        for fd, _ in ready:
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._wake_r.fileno():
                self._wake_r.recv(64)
            elif fd == self._parent:
                self._why = self._why or "the process that it belongs to has ended"
            elif fd in self._connections:
                self._hear(fd, self._connections[fd])

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as exc:
            log.warning("no connection taken: %s", exc)
            return
        connection = Connection(sock)
        uid = connection.peer_uid()
        if uid != os.getuid():
            log.warning("a process of user %d was turned away", uid)
            connection.close()
            return
        self._connections[sock.fileno()] = connection
        self._poll.register(sock, select.POLLIN)

    def _hear(self, fd: int, connection: Connection) -> None:
        try:
            for order in connection.orders():
                self._saves.begin(connection, order)
        except BROKEN as exc:
            if not isinstance(exc, ConnectionError):
                log.warning("a rank's connection is dropped: %s", exc)
            self._poll.unregister(fd)
            del self._connections[fd]
            connection.close()

    def _finish(self) -> bool:
        log.info("ends: %s", self._why)
        self._saves.ending(str(self._why))
        left = self._saves.wait(self._grace_s)
        if left:
            log.error("unfinished after %g s: %s", self._grace_s, ", ".join(left))
        for connection in self._connections.values():
            connection.close()
        self._listener.close()
        return not left
