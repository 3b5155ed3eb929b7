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

from everstep.wire.codec import Decoder, Frames, encode, frame
from everstep.wire.errors import FrameError, MalformedMessageError
from everstep.wire.messages import Ack, AgentMessage, Link, Numbered, Welcome
from everstep.wire.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from everstep.wire.messages import ClientMessage, Hello

log = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_OPEN_S, _CLOSE_S = 5.0, 1.0
_MAX_QUEUED_BYTES = 8 * 1024 * 1024
_MAX_POSTED_BYTES = 2 * 1024 * 1024  # half of what an agent takes from a client
_live: weakref.WeakSet[AgentLink] = weakref.WeakSet()


class AgentLink:
    """Keeps one connection to the agent, for as long as its owner lives.

    `hello` opens every connection, with `page_fd` and `fds` on its first byte. `greeting` gives
    what must be said each time a coordinator becomes reachable (a launcher's Join). `on_message`
    is called on the link's thread with everything but Ack; what it or `greeting` raises is logged
    and costs that one message.
    """

    def __init__(
        self,
        path: Path,
        hello: Hello,
        *,
        on_message: Callable[[AgentMessage], None],
        greeting: Callable[[], Sequence[ClientMessage]] = tuple,
        page_fd: int | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        self.path = path
        self.connected = False
        self.coordinator_up = False
        self.last_error: str | None = None
        self._hello = hello
        self._fds = [*fds] if page_fd is None else [page_fd, *fds]
        self._on_message = on_message
        self._greeting = greeting
        self._decoder: Decoder[AgentMessage] = Decoder(AgentMessage)
        self._outbox: Outbox[ClientMessage] = Outbox()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._overrun = False
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._first_connection = threading.Event()
        # Socket objects, not bare descriptors: a wake-up after the end hits nobody else's file.
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.settimeout(0)
        self._wake_w.settimeout(0)
        self._wait_s = _FIRST_RETRY_S
        self._closed_at: float | None = None
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
        """Send, and send again after each reconnect until the coordinator acknowledges it.

        One that no agent takes is logged and dropped: kept, it would come back for ever.
        """
        size = len(encode(message))
        if size > _MAX_POSTED_BYTES:
            facts = {"kind": type(message).__name__, "bytes": size, "most": _MAX_POSTED_BYTES}
            log.error("message to the agent dropped: too large", extra=facts)
            return
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
        if not self._thread.is_alive():
            self._close_wakers()
        elif self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _enqueue(self, message: ClientMessage | Numbered) -> None:
        data = frame(message)
        with self._lock:
            # An agent that does not read is left; what was posted is repeated to the next.
            self._overrun |= self._queued_bytes + len(data) > _MAX_QUEUED_BYTES
            if not self._overrun:
                self._queue.append(data)
                self._queued_bytes += len(data)
        self._wake()

    def _wake(self) -> None:
        # When the buffer is full the thread is about to wake anyway.
        with contextlib.suppress(OSError):
            self._wake_w.send(b"x")

    def _close_wakers(self) -> None:
        self._wake_r.close()
        self._wake_w.close()

    def _run(self) -> None:
        rng = random.Random()
        while not self._closing.is_set():
            try:
                # Known from the first moment on, so that a fork in between closes it too.
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as self._socket:
                    self._open(self._socket)
                    self._talk(self._socket)
            except (OSError, FrameError) as exc:
                self.last_error = f"{self.path}: {exc}"
            finally:
                self.connected = self.coordinator_up = False
                self._socket = None
            self._closing.wait(self._wait_s * rng.uniform(0.5, 1.0))
            self._wait_s = min(_LAST_RETRY_S, self._wait_s * 2)
        self._close_wakers()

    def _open(self, sock: socket.socket) -> None:
        sock.settimeout(_OPEN_S)
        sock.connect(str(self.path))
        if self._closing.is_set():  # its descriptors may not be ours to send any more
            raise ConnectionAbortedError("closed")
        self._take_queue()  # it was meant for the connection before
        hello = frame(self._hello)
        sent = socket.send_fds(sock, [hello], self._fds)
        if rest := hello[sent:]:  # of nothing, it would fail where the answer is a hang-up
            sock.sendall(rest)
        sock.settimeout(0)
        self.connected = True
        self.last_error = None
        self._first_connection.set()

    def _talk(self, sock: socket.socket) -> None:
        frames = Frames()
        out = b""
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        while not self._is_done(out):
            out = out or self._take_queue()
            poll.register(sock, select.POLLIN | (select.POLLOUT if out else 0))
            for fd, events in poll.poll(1000):
                if fd == self._wake_r.fileno():
                    self._wake_r.recv(4096)
                    continue
                if events & select.POLLOUT and out:
                    with contextlib.suppress(BlockingIOError):
                        out = out[sock.send(out) :]
                if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._hear(sock, frames)

    def _is_done(self, out: bytes) -> bool:
        if self._overrun:
            raise ConnectionResetError("the agent does not read what it is sent")
        if not self._closing.is_set():
            return False
        self._closed_at = self._closed_at or time.monotonic()
        late = time.monotonic() - self._closed_at > _CLOSE_S
        return late or not (out or self._queue)

    def _hear(self, sock: socket.socket, frames: Frames) -> None:
        data = sock.recv(65536)
        if not data:
            raise ConnectionResetError("the agent hung up")
        for body in frames.feed(data):
            self._take(body)

    def _take_queue(self) -> bytes:
        with self._lock:
            data = b"".join(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            self._overrun = False
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
        if isinstance(message, Welcome):
            self._wait_s = _FIRST_RETRY_S
        try:
            if isinstance(message, Link):
                self._set_up(up=message.up)
            self._on_message(message)
        except Exception:  # the owner's bug must not take the rank's only line to the agent
            log.exception("message from the agent mishandled: %s", type(message).__name__)

    def _set_up(self, *, up: bool) -> None:
        if not up:
            self.coordinator_up = False
            return
        greeting = [frame(m) for m in self._greeting()]
        with self._lock:
            self._queue.clear()
            again = [frame(Numbered(seq=s, body=m)) for s, m in self._outbox.pending()]
            self._queue.extend(greeting + again)
            self._queued_bytes = sum(map(len, self._queue))
            self.coordinator_up = True
        self._wake()

    def _forget_in_child(self) -> None:
        # A forked DataLoader worker must not keep the agent's connection open after the rank. The
        # link's thread is not there to let go of a lock, nor to send anything.
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._closing.set()
        self.connected = self.coordinator_up = False
        self._close_wakers()
        if self._socket is not None:
            self._socket.close()


def _after_fork_in_child() -> None:
    for link in list(_live):
        link._forget_in_child()  # noqa: SLF001  this module's own class
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
