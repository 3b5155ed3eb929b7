"""The rank's end of the launcher's line: takes the order to form anew, whatever the loop does."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING

from everstep.launch.control import VARIABLE, Heard, Ready, Reform, Released
from everstep.wire.codec import Decoder, Frames, frame
from everstep.wire.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from everstep.launch.control import FromRank

log = logging.getLogger(__name__)


class Orders:
    """Keeps the line open in a daemon thread. `release` is called there when an order came in.

    Without a launcher that listens, no order ever comes.
    """

    def __init__(self, environ: Mapping[str, str], release: Callable[[], None]) -> None:
        self._release = release
        self._order: Reform | None = None
        self._taken = 0
        self._news = threading.Condition()
        self._sock = _connect(environ.get(VARIABLE))
        if self._sock is not None:
            threading.Thread(target=self._listen, name="everstep-orders", daemon=True).start()

    @property
    def possible(self) -> bool:
        """Whether anybody could order this rank into another generation."""
        return self._sock is not None

    def ready(self, generation: int, local_rank: int) -> None:
        """Say that this process trains in `generation` and can leave it in place."""
        self._taken = generation
        self._say(Ready(generation=generation, local_rank=local_rank, pid=os.getpid()))

    def released(self, generation: int) -> None:
        """Say that the old generation is left, and `generation` about to be joined."""
        self._say(Released(generation=generation))

    def wait(self, timeout_s: float) -> Reform | None:
        """Return the order into a newer generation, None when none comes in time."""
        with self._news:
            self._news.wait_for(lambda: self._pending or self._sock is None, timeout_s)
            return self._order if self._pending else None

    def take(self, order: Reform) -> None:
        """Carry it out from here on: only a newer one counts."""
        self._taken = order.generation

    @property
    def _pending(self) -> bool:
        return self._order is not None and self._order.generation > self._taken

    def _say(self, message: FromRank) -> None:
        if self._sock is not None:
            with contextlib.suppress(OSError):  # the thread notices the end
                self._sock.sendall(frame(message))

    def _listen(self) -> None:
        sock = self._sock
        if sock is None:
            return
        frames, decoder = Frames(), Decoder[Reform](Reform)
        with contextlib.suppress(OSError, WireError):
            while data := sock.recv(65536):
                for body in frames.feed(data):
                    self._heard(decoder.decode(body))
        with self._news:
            self._sock = None
            self._news.notify_all()

    def _heard(self, order: Reform) -> None:
        self._say(Heard(generation=order.generation))
        with self._news:
            self._order = order
            self._news.notify_all()
            pending = self._pending
        if pending:
            self._release()


def _connect(path: str | None) -> socket.socket | None:
    if not path:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as exc:
        log.warning("no line to the launcher at %s: %s; failures restart this rank", path, exc)
        sock.close()
        return None
    os.register_at_fork(after_in_child=sock.close)  # a DataLoader worker must not keep it open
    return sock
