"""One rank at the writer's socket: frames and descriptors come in, replies go out."""

from __future__ import annotations

import array
import contextlib
import logging
import os
import socket
import struct
import threading
from collections import deque
from typing import TYPE_CHECKING

from everstep.snapshots.memory import Slot
from everstep.snapshots.orders import Attach, FromWriter, Refused, ToWriter, Write
from everstep.snapshots.sealed import SnapshotError
from everstep.wire.codec import Decoder, Frames, frame
from everstep.wire.errors import FrameError, MalformedMessageError, UnknownMessageError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
_RECEIVE_BYTES = 1024 * 1024
_MOST_DESCRIPTORS = 16
_SEND_S = 5

_decoder: Decoder[ToWriter] = Decoder(ToWriter)


class Connection:
    """Owns the socket and the slots that were attached over it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._socket = sock
        self._frames = Frames()
        self._descriptors: deque[int] = deque()
        self._sending = threading.Lock()
        self._slots: dict[int, Slot] = {}
        self.open = True

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 when it is closed."""
        return self._socket.fileno()

    def peer_uid(self) -> int:
        """Return the user at the other end, as the kernel says it."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        return int(uid)

    def slot(self, number: int) -> Slot:
        """Return an attached slot. Raises SnapshotError when there is none of that number."""
        if number not in self._slots:
            raise SnapshotError(f"slot {number} was not attached to this node's snapshot writer")
        return self._slots[number]

    def orders(self) -> Iterator[Write]:
        """Yield the orders that have arrived; slots are attached on the way.

        Does not wait. Raises OSError and everstep's wire errors when the line is of no use any
        more, ConnectionResetError among them when the peer has hung up.
        """
        while True:
            try:
                data, descriptors = _receive(self._socket)
            except BlockingIOError:
                return
            self._descriptors.extend(descriptors)
            if not data:
                raise ConnectionResetError("the rank has hung up")
            for body in self._frames.feed(data):
                yield from self._order(body)
            if len(self._descriptors) > _MOST_DESCRIPTORS:
                raise FrameError("descriptors come without an Attach")

    def _order(self, body: bytes) -> Iterator[Write]:
        try:
            order = _decoder.decode(body)
        except UnknownMessageError as exc:  # of a newer version, which can do without
            log.warning("order skipped: %s", exc)
            return
        if isinstance(order, Attach):
            self._attach(order)
        else:
            yield order

    def _attach(self, attach: Attach) -> None:
        self._slots.pop(attach.slot, None)
        if not self._descriptors:
            self.send(Refused(slot=attach.slot, why="no descriptor came with it"))
            return
        fd = self._descriptors.popleft()
        try:
            self._slots[attach.slot] = Slot(fd, attach.size_bytes)
        except SnapshotError as exc:
            self.send(Refused(slot=attach.slot, why=str(exc)))
        finally:
            os.close(fd)

    def send(self, reply: FromWriter) -> bool:
        """Send a reply from any thread; False when nobody is there to read it."""
        with self._sending:
            if not self.open:
                return False
            try:
                self._socket.sendall(frame(reply))
            except (OSError, FrameError):
                # Half a frame may be out: the rank gets no second one that it would misread.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                self.open = False
        return self.open

    def close(self) -> None:
        """Hang up and let go of the slots; what is being written keeps its own."""
        with self._sending:
            self.open = False
            self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._slots.clear()


def _receive(sock: socket.socket) -> tuple[bytes, array.array[int]]:
    # `socket.recv_fds` does not hand its flags on (Python 3.11).
    room = socket.CMSG_LEN(_MOST_DESCRIPTORS * array.array("i").itemsize)
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    data, ancillary, _, _ = sock.recvmsg(_RECEIVE_BYTES, room, flags)
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) // 4 * 4])
    return data, descriptors


BROKEN = (OSError, FrameError, MalformedMessageError)
"""What ends a connection."""
