"""One connection on the agent's socket, and everything its other end may get wrong.

Nothing that a client does blocks or ends the daemon: it reads in small portions, holds back who
talks too fast, hangs up on who does not listen, and closes descriptors that do not belong.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from everstep.agent.allowance import Allowance
from everstep.agent.peer import Identity, has_ended
from everstep.wire.codec import Decoder, Frames, frame
from everstep.wire.errors import FrameError, MalformedMessageError
from everstep.wire.messages import AgentMessage, ClientMessage, Hello, Numbered, Refused

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from everstep.agent.disposal import Disposal

log = logging.getLogger(__name__)

_CHUNK = 64 * 1024
_MAX_FDS = 253  # the kernel's own limit a message: none of them is left for it to close in our name
_MAX_HELLO_FDS = 8  # as many memory files as a rank may hand over at once
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_MAX_BYTES_BEFORE_HELLO = 64 * 1024
_MAX_MESSAGE_BYTES = 4 * 1024 * 1024  # with room for what is put round it on the way up
_MAX_UNREAD_BYTES = 8 * 1024 * 1024
_MAX_FAULTS = 100
_MALFORMED, _MISPLACED = "malformed message", "descriptor where none belongs"
_LAST_PORTIONS = 64
_HELLO_S, _FLUSH_S, _GRACE_S = 10.0, 2.0, 0.2
_BURST, _PER_S = 2000, 200
_BIG_BYTES, _ALL_BYTES = 1024 * 1024, 64 * 1024 * 1024

_decoder: Decoder[ClientMessage | Numbered] = Decoder(ClientMessage | Numbered)


class Owner(Protocol):
    """Who the clients belong to."""

    def heard(self, client: Client, message: ClientMessage | Numbered) -> None:
        """Take one message of a client, its Hello included."""
        ...

    def gone(self, client: Client, *, died: bool) -> None:
        """Take note that a client ended (`died`) or hung up; called once for each."""
        ...


class Shared:
    """What all clients share: the loop, the disposal, the counts and the room in the log."""

    def __init__(self, loop: asyncio.AbstractEventLoop, disposal: Disposal) -> None:
        self.loop = loop
        self.disposal = disposal
        self.pending_bytes = 0
        self.faults: Counter[str] = Counter()
        self._lines = Allowance(loop.time(), burst=100, per_s=1)

    def may_log(self) -> bool:
        """Return whether one more line about clients fits: who reconnects all day fills no disk."""
        return self._lines.spend(1, now_s=self.loop.time()) >= 0


class Client:
    """A connected client; `id` is unique within the agent's life."""

    def __init__(
        self, id_: str, sock: socket.socket, identity: Identity, owner: Owner, shared: Shared
    ) -> None:
        self.id = id_
        self.peer = identity.peer
        self.hello: Hello | None = None
        self.faults: Counter[str] = Counter()
        self._pidfd = identity.pidfd
        self._sock = sock
        self._owner = owner
        self._shared = shared
        self._loop = shared.loop
        self._frames = Frames()
        self._pending = 0
        self._first = True
        self.job: str | None = None
        """The job that it belongs to, as far as it has said, or was told by the coordinator."""
        self.fetched = False
        self._hello_fds: list[int] = []
        self._out = bytearray()
        self._writing = False
        self._ended = self._leaving = False
        self._allowance = Allowance(shared.loop.time(), burst=_BURST, per_s=_PER_S)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Listen to the socket and watch the process."""
        self._sock.settimeout(0)
        self._loop.add_reader(self._pidfd, self._died)
        self._loop.add_reader(self._sock, self._readable)
        self._later("hello", _HELLO_S, self._no_hello)

    def send(self, message: AgentMessage) -> None:
        """Send a message; a client that does not read its messages is hung up on."""
        if self._ended or self._leaving or not self._put(message):
            return
        if len(self._out) > _MAX_UNREAD_BYTES:
            self.fault("does not read", f"{len(self._out)} bytes unread")
            self.hang_up()
        elif not self._writing:
            self._flush()

    def send_with(self, message: AgentMessage, fds: Sequence[int]) -> None:
        """Send a message on which copies of descriptors ride, or hang up when that fails now."""
        if self._ended or self._leaving or not self._put(message):
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            sent = self._sock.sendmsg([self._out], rights, _SEND_FLAGS)
        except OSError as exc:
            self.fault("descriptors not sent", str(exc))
            self.hang_up()
            return
        del self._out[:sent]
        self._watch_writable(bool(self._out))

    def _put(self, message: AgentMessage) -> bool:
        try:
            self._out += frame(message)
        except FrameError as exc:
            self.fault("message for it too large", str(exc))
            return False
        return True

    def refuse(self, why: str, *, exit_code: int = 69) -> None:
        """Say why not, and hang up once that is sent."""
        self.send(Refused(why=why, exit_code=exit_code))
        if self._ended:
            return
        self._leaving = True
        self._loop.remove_reader(self._sock)
        if self._out:
            self._later("flush", _FLUSH_S, self.hang_up)
        else:
            self.hang_up()

    def hang_up(self) -> None:
        """Close the connection now."""
        if self._ended:
            return
        self._ended = True
        died = has_ended(self._pidfd)
        self._let_go()
        self._owner.gone(self, died=died)

    def take_fds(self) -> list[int]:
        """Return the descriptors that came with the first byte; the caller disposes of them."""
        fds, self._hello_fds = self._hello_fds, []
        return fds

    def fault(self, kind: str, detail: str = "") -> None:
        """Count something that the client got wrong; the first of each kind is logged."""
        self.faults[kind] += 1
        self._shared.faults[kind] += 1
        if self.faults[kind] == 1 and self._shared.may_log():
            facts = {"client": self.id, "pid": self.peer.pid, "uid": self.peer.uid}
            log.warning("client: %s", kind, extra={**facts, "detail": detail})

    # ------------------------------------------------------------------------------- reading

    def _readable(self) -> None:
        if self._allowance.spend(0, now_s=self._loop.time()) < 1:
            self._hold_back()
        else:
            self._read()

    def _read(self) -> bool:
        """Read one portion; False when there is nothing more."""
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _CHUNK, _MAX_FDS, flags)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data, fds = b"", []
        self._sort(fds)
        if not data:
            self._hung_up()
            return False
        self._feed(data)
        return not (self._ended or self._leaving)

    def _sort(self, fds: list[int]) -> None:
        # Only the first byte of a connection may carry some, which Hello then claims.
        if self._first:
            self._hello_fds, fds = fds[:_MAX_HELLO_FDS], fds[_MAX_HELLO_FDS:]
        self._first = False
        for fd in fds:
            self._shared.disposal.close(fd)
            self.fault(_MISPLACED)

    def _feed(self, data: bytes) -> None:
        try:
            bodies = self._frames.feed(data)
        except FrameError as exc:
            self.fault("broken stream", str(exc))
            self.hang_up()
            return
        self._allowance.spend(len(bodies), now_s=self._loop.time())
        for body in bodies:
            self._take(body)
            if self._ended or self._leaving:
                return
        self._weigh()

    def _take(self, body: bytes) -> None:
        if len(body) > _MAX_MESSAGE_BYTES:
            self.fault("message too large", f"{len(body)} bytes")
            return
        try:
            message = _decoder.decode(body)
        except MalformedMessageError as exc:
            self.fault(_MALFORMED, str(exc))
        else:
            self._owner.heard(self, message)
        if self.faults[_MALFORMED] + self.faults[_MISPLACED] > _MAX_FAULTS and not self._ended:
            self.fault("too many faults", "hung up on")
            self.hang_up()

    def _weigh(self) -> None:
        pending = self._frames.pending
        self._shared.pending_bytes += pending - self._pending
        self._pending = pending
        greedy = self._shared.pending_bytes > _ALL_BYTES and pending > _BIG_BYTES
        if greedy or (self.hello is None and pending > _MAX_BYTES_BEFORE_HELLO):
            self.fault("frame too large", f"{pending} bytes and not complete")
            self.hang_up()

    def _hold_back(self) -> None:
        self.fault("talks too fast", f"over {self._allowance.per_s:g} messages a second: held back")
        self._loop.remove_reader(self._sock)
        self._later("held back", self._allowance.wait_s(), self._listen_again)

    def _listen_again(self) -> None:
        if not (self._ended or self._leaving):
            self._loop.add_reader(self._sock, self._readable)

    # ------------------------------------------------------------------------------- writing

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._out, _SEND_FLAGS)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._out.clear()  # the reader sees the end of the connection too, and says so
            sent = 0
        del self._out[:sent]
        self._watch_writable(bool(self._out))
        if self._leaving and not self._out:
            self.hang_up()

    def _watch_writable(self, wanted: bool) -> None:  # noqa: FBT001  the state itself
        if wanted and not self._writing:
            self._loop.add_writer(self._sock, self._flush)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._sock)
        self._writing = wanted

    # ---------------------------------------------------------------------------- the end

    def _hung_up(self) -> None:
        if self._leaving or has_ended(self._pidfd):
            self.hang_up()
            return
        # A process that ends closes its sockets a moment before its pidfd says so.
        self._loop.remove_reader(self._sock)
        self._later("grace", _GRACE_S, self.hang_up)

    def _died(self) -> None:
        for _ in range(_LAST_PORTIONS):  # what it said before it died still counts
            if self._ended or self._leaving or not self._read():
                break
        self.hang_up()

    def _no_hello(self) -> None:
        if self.hello is None:
            self.fault("no Hello", f"silent for {_HELLO_S:.0f} s")
            self.hang_up()

    def _later(self, why: str, delay_s: float, then: Callable[[], None]) -> None:
        self._timers[why] = self._loop.call_later(delay_s, then)

    def _let_go(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._sock)
        self._watch_writable(wanted=False)
        self._shared.pending_bytes -= self._pending
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # the close itself happens in another thread
        for fd in (*self.take_fds(), self._pidfd, self._sock.detach()):
            self._shared.disposal.close(fd)
