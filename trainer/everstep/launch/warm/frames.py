"""What shim, pool and nursery tell one another: frames over Unix sockets, descriptors on top.

Standard library only, and little of it: the shim must start in a few milliseconds. All three are
processes of one launcher of one version, so the format needs no version of its own.

A frame is its length, the number of its descriptors and its body: names, counts and values joined
by NUL, which can stand in no argument and no variable of an environment.
"""

from __future__ import annotations

import array
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HEAD = struct.Struct("<IB")
_CHUNK, _MOST_FDS = 1 << 18, 16


class Message:
    """One frame: its kind, its fields and the descriptors that came with it."""

    __slots__ = ("fds", "fields", "kind")

    def __init__(self, kind: str, fields: Mapping[str, Sequence[bytes]], fds: list[int]) -> None:
        self.kind = kind
        self.fields = fields
        self.fds = fds

    def number(self, name: str) -> int:
        """Return the one whole number in a field."""
        return int(self.fields[name][0])

    def numbers(self, name: str) -> list[int]:
        """Return all whole numbers in a field."""
        return [int(value) for value in self.fields[name]]

    def text(self, name: str) -> str:
        """Return the one text in a field."""
        return self.fields[name][0].decode(errors="replace")


def whole(*numbers: int) -> list[bytes]:
    """Return the field that holds these numbers.

    >>> whole(3, -9)
    [b'3', b'-9']
    """
    return [str(number).encode() for number in numbers]


def encode(kind: str, fields: Mapping[str, Sequence[bytes]], fds: int = 0) -> bytes:
    """Return the frame, to be sent with so many descriptors on its first byte."""
    parts = [kind.encode()]
    for name, values in fields.items():
        parts += [name.encode(), str(len(values)).encode(), *values]
    body = b"\0".join(parts)
    return _HEAD.pack(len(body), fds) + body


def decode(body: bytes, fds: list[int]) -> Message:
    r"""Return the message in a frame's body.

    >>> message = decode(encode("ask", {"argv": [b"-u", b""], "umask": [b"18"]})[5:], [])
    >>> message.kind, message.fields
    ('ask', {'argv': [b'-u', b''], 'umask': [b'18']})
    """
    parts = body.split(b"\0")
    fields: dict[str, Sequence[bytes]] = {}
    at = 1
    while at < len(parts):
        first = at + 2
        at = first + int(parts[at + 1])
        fields[parts[first - 2].decode()] = parts[first:at]
    return Message(parts[0].decode(), fields, fds)


def environment(ask: Message) -> dict[bytes, bytes]:
    """Return the environment of the shim that asked."""
    pairs = (entry.partition(b"=") for entry in ask.fields["environ"])
    return {name: value for name, _, value in pairs}


def send(
    sock: socket.socket,
    kind: str,
    fields: Mapping[str, Sequence[bytes]] = {},
    fds: Sequence[int] = (),
) -> None:
    """Send one frame with its descriptors. Raises OSError."""
    data = memoryview(encode(kind, fields, len(fds)))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([data], rights)
    sock.sendall(data[sent:])


class Reader:
    """Puts the frames of one connection together."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()
        self._fds: list[int] = []

    def read(self) -> list[Message] | None:
        """Receive once and return the frames that are complete; None at the end. Raises OSError."""
        room = socket.CMSG_SPACE(_MOST_FDS * 4)
        data, rights, _, _ = self._sock.recvmsg(_CHUNK, room, socket.MSG_CMSG_CLOEXEC)
        for _, _, packed in rights:
            fds = array.array("i")
            fds.frombytes(packed)
            self._fds += fds
        if not data:
            return None
        self._data += data
        return self._complete()

    def read_or_end(self) -> list[Message] | None:
        """Like `read`, with a connection that broke taken for one that has ended."""
        try:
            return self.read()
        except OSError:
            return None

    def _complete(self) -> list[Message]:
        found = []
        while len(self._data) >= _HEAD.size:
            length, fds = _HEAD.unpack_from(self._data)
            end = _HEAD.size + length
            if len(self._data) < end:
                break
            found.append(decode(bytes(self._data[_HEAD.size : end]), self._fds[:fds]))
            del self._data[:end], self._fds[:fds]
        return found
