"""Memory that outlives the rank which filled it: handed to the node's agent, and fetched back."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

from everstep.wire.codec import Decoder, Frames, frame
from everstep.wire.errors import WireError
from everstep.wire.link import AgentLink
from everstep.wire.messages import AgentMessage, Fetch, Held, Hello, Refused, Welcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

_MAX_FDS = 8
_live: weakref.WeakSet[MemoryKeeper] = weakref.WeakSet()


class MemoryKeeper:
    """Has a rank's memory files held by its node's agent, and by the next one after a restart.

    `on_refused` is called, on a thread of its own, with why the agent holds nothing and what to
    do; once for each reason. Nothing here waits for the agent.
    """

    def __init__(
        self,
        path: Path,
        job: str,
        rank: int,
        *,
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        self._path = path
        self._job = job
        self._rank = rank
        self._on_refused = on_refused
        self._fds: list[int] = []
        self._link: AgentLink | None = None
        self._held = threading.Event()
        self._refusal = ""
        _live.add(self)

    @property
    def held(self) -> bool:
        """Whether the agent has what was handed over last, as far as is known here."""
        return self._held.is_set() and self._link is not None and self._link.connected

    def hold(self, fds: Sequence[int], sizes: Sequence[int]) -> None:
        """Hand over these sealed memory files, in place of those before. Returns at once.

        The caller's descriptors stay its own. Raises ValueError for more than the agent takes.
        """
        if len(fds) != len(sizes) or not 0 < len(fds) <= _MAX_FDS:
            raise ValueError(f"{len(fds)} descriptors with {len(sizes)} sizes: 1 to {_MAX_FDS} fit")
        self.close()
        self._fds = [os.dup(fd) for fd in fds]
        hello = Hello(role="memory", job=self._job, rank=self._rank, slots=list(sizes))
        self._link = AgentLink(self._path, hello, on_message=self._take, fds=self._fds)
        self._link.start()

    def wait_held(self, timeout_s: float) -> bool:
        """Wait until the agent has it; False when the time passed first."""
        return self._held.wait(timeout_s)

    def close(self) -> None:
        """Hang up; the agent goes on holding."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._held.clear()
        self._close_fds()

    def _take(self, message: AgentMessage) -> None:
        match message:
            case Welcome():
                self._held.clear()  # it may be another agent than before
            case Held():
                self._refusal = ""
                self._held.set()
            case Refused(why=why):
                self._refused(why)
            case _:
                pass

    def _refused(self, why: str) -> None:
        self._held.clear()
        if why == self._refusal:
            return
        self._refusal = why
        log.warning("the agent does not hold this rank's memory: %s", why)
        if self._on_refused is not None:
            self._on_refused(why)

    def _close_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _forget_in_child(self) -> None:
        # A forked worker must not keep gigabytes from going when the rank and the agent let go.
        self._link = None
        self._held = threading.Event()
        self._close_fds()


def fetch(path: Path, job: str, rank: int, *, timeout_s: float = 5.0) -> list[int]:
    """Return descriptors of what the agent holds for a rank of this user's job, in order.

    They are the caller's to close; an empty list means that it holds nothing. Raises WireError
    when the agent cannot be asked within the time.
    """
    deadline_s = time.monotonic() + timeout_s
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            _set_timeout(sock, deadline_s)
            sock.connect(str(path))
            hello = Hello(role="memory", job=job, rank=rank)
            sock.sendall(frame(hello) + frame(Fetch()))
            _await_answer(sock, fds, deadline_s)
    except (OSError, WireError) as exc:
        for fd in fds:
            os.close(fd)
        raise WireError(f"{path}: the memory held for rank {rank} cannot be had: {exc}") from exc
    return fds


def _await_answer(sock: socket.socket, fds: list[int], deadline_s: float) -> None:
    """Put descriptors into `fds` as they come, so that they are there whatever happens next."""
    frames, decoder = Frames(), Decoder[AgentMessage](AgentMessage)
    while True:
        _set_timeout(sock, deadline_s)
        data, came, _, _ = socket.recv_fds(sock, 65536, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        fds += came
        if not data:
            raise WireError("the agent hung up; one of another version holds no memory")
        for body in frames.feed(data):
            match decoder.decode(body):
                case Held(sizes=sizes):
                    if len(sizes) != len(fds):
                        raise WireError(f"{len(sizes)} memory files are held, {len(fds)} came")
                    return
                case Refused(why=why):
                    raise WireError(why)
                case _:
                    pass


def _set_timeout(sock: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the agent did not answer in time")
    sock.settimeout(left_s)


def _after_fork_in_child() -> None:
    for keeper in list(_live):
        with contextlib.suppress(OSError):
            keeper._forget_in_child()  # noqa: SLF001  this module's own class
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
