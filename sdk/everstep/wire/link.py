"""A rank's or launcher's connection to its node's agent: one thread, never in the way of a step.

All sending is a hand-over to the link's thread; an agent that is stopped, gone or not there yet
costs its client nothing. What must arrive goes through `post`, is numbered, and is repeated after
every reconnect until the coordinator has journaled it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import socket
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from everstep.wire.codec import Decoder, Frames, frame
from everstep.wire.errors import FrameError, MalformedMessageError
from everstep.wire.messages import Ack, AgentMessage, Link, Numbered
from everstep.wire.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from everstep.wire.messages import ClientMessage, Hello

log = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_live: weakref.WeakSet[AgentLink] = weakref.WeakSet()


class AgentLink:
    """Keeps one connection to the agent, for as long as its owner lives.

    `hello` opens every connection, with the descriptor `page_fd` on its first byte. `greeting`
    gives what must be said each time a coordinator becomes reachable (a launcher's Join).
    `on_message` is called on the link's thread with everything but Ack.
    """

    def __init__(
        self,
        path: Path,
        hello: Hello,
        *,
        on_message: Callable[[AgentMessage], None],
        greeting: Callable[[], Sequence[ClientMessage]] = tuple,
        page_fd: int | None = None,
    ) -> None:
        self.path = path
        self.connected = False
        self.coordinator_up = False
        self.last_error: str | None = None
        self._hello = hello
        self._page_fd = page_fd
        self._on_message = on_message
        self._greeting = greeting
        self._decoder: Decoder[AgentMessage] = Decoder(AgentMessage)
        self._outbox: Outbox[ClientMessage] = Outbox()
        self._queue: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._first_connection = threading.Event()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="everstep-link", daemon=True)
        _live.add(self)

    def start(self) -> None:
        """Start the thread; returns at once, connected or not."""
        self._thread.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until an agent took the connection; False when the time passed first."""
        return self._first_connection.wait(timeout_s)

    def send(self, message: ClientMessage) -> None:
        """Send if connected to an agent that reaches a coordinator, else forget it."""
        if self.coordinator_up:
            self._enqueue(message)

    def post(self, message: ClientMessage) -> None:
        """Send, and send again after each reconnect until the coordinator acknowledges it."""
        with self._lock:
            seq = self._outbox.put(message)
        if self.coordinator_up:
            self._enqueue(Numbered(seq=seq, body=message))

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything posted is acknowledged; False when the deadline passed first."""
        end = time.monotonic() + deadline_s
        with self._drained:
            while len(self._outbox):
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._drained.wait(left)
        return True

    def close(self, *, flush_s: float = 0.0) -> None:
        """Flush for at most `flush_s`, then hang up and end the thread."""
        if flush_s and self._thread.is_alive():
            self.flush(flush_s)
        self._closing.set()
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _enqueue(self, message: ClientMessage | Numbered) -> None:
        with self._lock:
            self._queue.append(frame(message))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_w, b"x")

    def _run(self) -> None:
        wait_s = _FIRST_RETRY_S
        rng = random.Random()
        while not self._closing.is_set():
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    self._open(sock)
                    wait_s = _FIRST_RETRY_S
                    self._talk(sock)
            except (OSError, FrameError) as exc:
                self.last_error = f"{self.path}: {exc}"
            finally:
                self.connected = self.coordinator_up = False
                self._socket = None
            self._closing.wait(wait_s * rng.uniform(0.5, 1.0))
            wait_s = min(_LAST_RETRY_S, wait_s * 2)

    def _open(self, sock: socket.socket) -> None:
        sock.settimeout(5.0)
        sock.connect(str(self.path))
        self._socket = sock
        with self._lock:
            self._queue.clear()
        hello = frame(self._hello)
        fds = [] if self._page_fd is None else [self._page_fd]
        sent = socket.send_fds(sock, [hello], fds)
        sock.sendall(hello[sent:])
        sock.settimeout(0)
        self.connected = True
        self.last_error = None
        self._first_connection.set()

    def _talk(self, sock: socket.socket) -> None:
        frames = Frames()
        out = b""
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        while not (self._closing.is_set() and not self._queue and not out):
            out += self._take_queue()
            poll.register(sock, select.POLLIN | (select.POLLOUT if out else 0))
            for fd, events in poll.poll(1000):
                if fd == self._wake_r:
                    os.read(self._wake_r, 4096)
                    continue
                if events & select.POLLOUT and out:
                    out = out[sock.send(out) :]
                if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    data = sock.recv(65536)
                    if not data:
                        raise ConnectionResetError("the agent hung up")
                    for body in frames.feed(data):
                        self._take(body)

    def _take_queue(self) -> bytes:
        with self._lock:
            data = b"".join(self._queue)
            self._queue.clear()
        return data

    def _take(self, body: bytes) -> None:
        try:
            message = self._decoder.decode(body)
        except MalformedMessageError as exc:
            log.warning("message from the agent skipped", extra={"error": str(exc)})
            return
        if isinstance(message, Ack):
            with self._drained:
                self._outbox.ack(message.seq)
                self._drained.notify_all()
            return
        if isinstance(message, Link):
            self._set_up(up=message.up)
        self._on_message(message)

    def _set_up(self, *, up: bool) -> None:
        if not up:
            self.coordinator_up = False
            return
        greeting = [frame(m) for m in self._greeting()]
        with self._lock:
            self._queue.clear()
            again = [frame(Numbered(seq=s, body=m)) for s, m in self._outbox.pending()]
            self._queue.extend(greeting + again)
            self.coordinator_up = True
        self._wake()

    def _forget_in_child(self) -> None:
        # A forked DataLoader worker must not keep the agent's connection open after the rank.
        for fd in (self._wake_r, self._wake_w):
            with contextlib.suppress(OSError):
                os.close(fd)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                os.close(self._socket.detach())


def _after_fork_in_child() -> None:
    for link in list(_live):
        link._forget_in_child()  # noqa: SLF001  this module's own class
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
