"""The agent's Unix socket: one agent a path, and everybody who may connect is let in or told why.

asyncio's streams drop descriptors that come with a message, so this listens with `add_reader`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import socket
from typing import TYPE_CHECKING

from everstep.agent.client import Client, Owner, Shared
from everstep.agent.errors import AgentError
from everstep.agent.peer import PeerGoneError, PeerUnknownError, identify
from everstep.wire.codec import frame
from everstep.wire.messages import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from everstep.agent.peer import Identity
    from everstep.wire.messages import ClientMessage, Numbered, Peer

log = logging.getLogger(__name__)

_ACCEPTS_A_TURN = 32
_FULL_PAUSE_S = 1.0


class Listener:
    """Accepts clients and keeps count of them."""

    def __init__(self, sock: socket.socket, owner: Owner, shared: Shared, *, most: int) -> None:
        """Take over a listening socket; `most` clients are served, half of them of one user."""
        self.clients: dict[str, Client] = {}
        self._sock = sock
        self._owner = owner
        self._shared = shared
        self._most = most
        self._numbers = itertools.count(1)

    def start(self) -> None:
        """Let clients in from now on."""
        self._shared.loop.add_reader(self._sock, self._accept)

    def stop(self) -> None:
        """Let nobody in any more and hang up on everybody."""
        self._shared.loop.remove_reader(self._sock)
        for client in list(self.clients.values()):
            client.hang_up()

    def heard(self, client: Client, message: ClientMessage | Numbered) -> None:
        """Hand a message on to the owner."""
        self._owner.heard(client, message)

    def gone(self, client: Client, *, died: bool) -> None:
        """Forget the client and tell the owner."""
        self.clients.pop(client.id, None)
        self._owner.gone(client, died=died)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                self._pause(exc)
                return
            self._let_in(sock)

    def _pause(self, exc: OSError) -> None:
        # Out of descriptors or memory: the queue stays, so a reader would only spin.
        self._shared.faults["accept failed"] += 1
        log.error("no client can be let in for now", extra={"error": str(exc)})
        loop = self._shared.loop
        loop.remove_reader(self._sock)
        loop.call_later(_FULL_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self.start()

    def _let_in(self, sock: socket.socket) -> None:
        try:
            identity = identify(sock)
        except (PeerGoneError, OSError):
            sock.close()
            return
        except PeerUnknownError as exc:
            self._turn_away(sock, str(exc))
            return
        if why := self._too_many(identity.peer):
            os.close(identity.pidfd)
            self._turn_away(sock, why)
            return
        self._welcome(sock, identity)

    def _welcome(self, sock: socket.socket, identity: Identity) -> None:
        client = Client(f"c{next(self._numbers)}", sock, identity, self, self._shared)
        self.clients[client.id] = client
        client.start()

    def _too_many(self, peer: Peer) -> str | None:
        if len(self.clients) >= self._most:
            return f"the agent serves at most {self._most} clients: raise [agent] max_clients"
        own = sum(c.peer.uid == peer.uid for c in self.clients.values())
        limit = max(1, self._most // 2)
        if own >= limit:
            return f"user {peer.uid} has {own} clients here, the limit is {limit} for one user"
        return None

    def _turn_away(self, sock: socket.socket, why: str) -> None:
        self._shared.faults["turned away"] += 1
        if self._shared.may_log():
            log.warning("client turned away", extra={"why": why})
        with contextlib.suppress(OSError), sock:
            sock.settimeout(0)
            sock.send(frame(Refused(why=why)), socket.MSG_NOSIGNAL)


@contextlib.contextmanager
def bound(path: Path, *, mode: int) -> Iterator[socket.socket]:
    """Give a socket listening at `path`, and take it away at the end.

    A lock file beside it tells a live agent, which is an AgentError, from a leftover, which is
    replaced. A folder that is missing is made: 0755 where `mode` lets others in, else 0700.
    """
    _make_folder(path.parent, public=bool(mode & 0o006))
    with _only_one(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(0)
        try:
            _refuse_other_files(path)
            path.unlink(missing_ok=True)
            sock.bind(str(path))
            path.chmod(mode)  # before listen(): until then nobody can connect
        except OSError as exc:
            raise _cannot(path, exc) from exc
        sock.listen(socket.SOMAXCONN)
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def _make_folder(folder: Path, *, public: bool) -> None:
    if folder.is_dir():
        return
    try:
        folder.mkdir(parents=True)
        folder.chmod(0o755 if public else 0o700)
    except OSError as exc:
        raise _cannot(folder, exc) from exc


def _refuse_other_files(path: Path) -> None:
    if path.exists() and not path.is_socket():
        raise AgentError(f"{path} exists and is no socket: remove it or choose another --socket")


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    lock = path.with_name(path.name + ".lock")
    fd = _lock(lock, path)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(fd)


def _lock(lock: Path, path: Path) -> int:
    while True:
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise _cannot(path, exc) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(fd)
            raise AgentError(
                f"{path}: another agent is running there; stop it, or give this one a socket of "
                "its own with --socket"
            ) from exc
        if _is_still_there(lock, fd):
            return fd
        os.close(fd)  # its last owner removed it while we opened it


def _is_still_there(lock: Path, fd: int) -> bool:
    try:
        return os.path.samestat(lock.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _cannot(path: Path, exc: OSError) -> AgentError:
    hint = "choose another place with --socket or $EVERSTEP_SOCKET"
    if exc.errno in (errno.EACCES, errno.EPERM):
        hint = "run the agent as root, or " + hint
    return AgentError(f"{path}: cannot listen there: {exc.strerror}; {hint}")
