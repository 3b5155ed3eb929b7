"""A rank's line to the snapshot writer of its node: one thread, never in the way of a step."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from everstep.snapshots.orders import Attach, Done, FromWriter, PartDone, Write
from everstep.wire.codec import Decoder, Frames, frame
from everstep.wire.errors import FrameError, MalformedMessageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
_CONNECT_S = 5.0
_live: weakref.WeakSet[WriterLink] = weakref.WeakSet()


class _Slot(NamedTuple):
    fd: int
    size_bytes: int


class WriterLink:
    """Attaches slots, sends orders and hands on what comes of them.

    Each order is answered by exactly one PartDone and, for the lead, one Done, in this order and
    on the link's thread: by the writer, or by the link itself when the writer is gone. When a new
    writer listens on the same path, the slots are attached to it.
    """

    def __init__(
        self, path: Path, *, job: str, rank: int, on_reply: Callable[[FromWriter], None]
    ) -> None:
        self.path = path
        self.connected = False
        self._job = job
        self._rank = rank
        self._on_reply = on_reply
        self._decoder: Decoder[FromWriter] = Decoder(FromWriter)
        self._lock = threading.Lock()
        self._sent = threading.Condition(self._lock)
        self._sending = False
        self._slots: dict[int, _Slot] = {}
        self._fresh: deque[int] = deque()
        self._queue: deque[tuple[float, Write]] = deque()
        self._in_flight: list[tuple[Write, bool]] = []
        self._closing = threading.Event()
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.settimeout(0)
        self._wake_w.settimeout(0)
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="everstep-writer-link", daemon=True)
        _live.add(self)
        self._thread.start()

    def attach(self, slot: int, fd: int, size_bytes: int) -> None:
        """Let the writer see a slot's memory; `fd` may be closed afterwards."""
        own = os.dup(fd)
        with self._lock:
            before = self._slots.get(slot)
            self._slots[slot] = _Slot(own, size_bytes)
            self._fresh.append(slot)
        if before is not None:
            os.close(before.fd)
        self._wake()

    def write(self, order: Write) -> None:
        """Have a sealed slot written. Returns at once."""
        with self._lock:
            self._queue.append((time.monotonic() + _CONNECT_S, order))
        self._wake()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the writer has been sent all orders; False when that took longer."""
        with self._sent:
            return self._sent.wait_for(lambda: not self._queue and not self._sending, timeout_s)

    def close(self) -> None:
        """Hang up; the writer finishes what it was ordered, and nobody is told of it."""
        self._closing.set()
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)

    # ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is about to wake anyway
            self._wake_w.send(b"x")

    def _run(self) -> None:
        wait_s = _FIRST_RETRY_S
        while True:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as self._socket:
                    self._socket.settimeout(_CONNECT_S)
                    self._socket.connect(os.fspath(self.path))
                    wait_s = _FIRST_RETRY_S
                    self._talk(self._socket)
                    why = ""
            except (OSError, FrameError, MalformedMessageError) as exc:
                why = f"{self.path}: {getattr(exc, 'strerror', None) or exc}"
            finally:
                self.connected = False
                self._socket = None
            if self._closing.is_set():
                break  # only here: what was ordered last gets its chance
            self._lost(f"this node's snapshot writer is gone ({why})")
            self._closing.wait(wait_s)
            wait_s = min(_LAST_RETRY_S, 2 * wait_s)
        self._put_away()

    def _talk(self, sock: socket.socket) -> None:
        with self._lock:
            self._fresh = deque(self._slots)
        self.connected = True
        frames = Frames()
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        poll.register(self._wake_r, select.POLLIN)
        while not self._closing.is_set():
            self._send_all(sock)
            for fd, _ in poll.poll():
                if fd == self._wake_r.fileno():
                    self._wake_r.recv(4096)
                else:
                    self._hear(sock, frames)
        self._send_all(sock)  # what was ordered just before the end

    def _send_all(self, sock: socket.socket) -> None:
        while True:
            with self._lock:
                slot = self._fresh.popleft() if self._fresh else None
                order = self._queue.popleft()[1] if slot is None and self._queue else None
                self._sending = order is not None
                if order is not None:
                    self._in_flight.append((order, False))
                elif slot is None:
                    self._sent.notify_all()
                # Sent under the lock: nobody closes the descriptor meanwhile.
                if slot is not None and slot in self._slots:
                    self._send_slot(sock, slot, self._slots[slot])
            if order is not None:
                sock.sendall(frame(order))
            elif slot is None:
                return

    def _send_slot(self, sock: socket.socket, number: int, slot: _Slot) -> None:
        attach = Attach(job=self._job, rank=self._rank, slot=number, size_bytes=slot.size_bytes)
        data = frame(attach)
        sent = socket.send_fds(sock, [data], [slot.fd])
        sock.sendall(data[sent:])

    def _hear(self, sock: socket.socket, frames: Frames) -> None:
        data = sock.recv(65536)
        if not data:
            raise ConnectionResetError("it has hung up")
        for body in frames.feed(data):
            self._take(self._decoder.decode(body))

    def _take(self, reply: FromWriter) -> None:
        for at, (order, written) in enumerate(self._in_flight):
            if isinstance(reply, PartDone) and order.id == reply.id and not written:
                self._in_flight[at : at + 1] = [(order, True)] if order.lead else []
                break
            if isinstance(reply, Done) and order.id == reply.id and written:
                del self._in_flight[at]
                break
        self._tell(reply)

    def _tell(self, reply: FromWriter) -> None:
        try:
            self._on_reply(reply)
        except Exception:  # the owner's bug must not take the rank's only line to the writer
            log.exception("reply of the snapshot writer mishandled: %s", type(reply).__name__)

    def _lost(self, why: str) -> None:
        """Answer what the writer has not, and what has waited too long for one."""
        now = time.monotonic()
        with self._lock:
            lost, self._in_flight = self._in_flight, []
            while self._queue and self._queue[0][0] <= now:
                lost.append((self._queue.popleft()[1], False))
        for order, written in lost:
            if not written:
                self._tell(PartDone(id=order.id, slot=order.slot, write_s=0.0, why=why))
            if order.lead:
                self._tell(Done(id=order.id, write_s=0.0, why=why))

    def _put_away(self) -> None:
        with self._lock:
            slots, self._slots = self._slots, {}
        for slot in slots.values():
            os.close(slot.fd)
        self._wake_r.close()
        self._wake_w.close()

    def _forget_in_child(self) -> None:
        # A forked DataLoader worker must not keep the line open after the rank.
        self._lock = threading.Lock()
        self._closing.set()
        self._put_away()
        if self._socket is not None:
            self._socket.close()


def _after_fork_in_child() -> None:
    for link in list(_live):
        link._forget_in_child()  # noqa: SLF001  this module's own class
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
