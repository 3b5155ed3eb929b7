"""The rank's end of the launcher's line: takes its orders, whatever the training loop does."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING

from everstep.launch.control import (
    VARIABLE,
    Armed,
    Emergency,
    End,
    Heard,
    Ready,
    Reform,
    Released,
    Saved,
    Signalled,
    ToRank,
    in_place_wanted,
)
from everstep.wire.codec import Decoder, Frames, frame
from everstep.wire.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from everstep.launch.control import FromRank

log = logging.getLogger(__name__)

_MEANING_S = 1.0
"""How long a launcher may take to say what SIGTERM means; it kills a rank that stays for 2 s."""


class Orders:
    """Keeps the line open in a daemon thread. `release` is called there when an order came in.

    Without a launcher that listens, no order ever comes.
    """

    def __init__(self, environ: Mapping[str, str], release: Callable[[], None]) -> None:
        self._release = release
        self._order: Reform | None = None
        self._taken = 0
        self._generation = 0
        self._save: Callable[[float], None] | None = None
        self._emergency = self._end = False
        self._news = threading.Condition()
        self._saying = threading.Lock()
        self._in_place = in_place_wanted(environ)
        self._sock = _connect(environ.get(VARIABLE))
        if self._sock is not None:
            threading.Thread(target=self._listen, name="everstep-orders", daemon=True).start()

    @property
    def possible(self) -> bool:
        """Whether anybody could order this rank into another generation."""
        return self._in_place and self._sock is not None

    @property
    def connected(self) -> bool:
        """Whether a launcher listens."""
        return self._sock is not None

    def arm(self, generation: int, local_rank: int, save: Callable[[float], None]) -> None:
        """Say that an emergency snapshot can be asked of this rank: `save(grace_s)`."""
        with self._news:
            self._generation, self._save = generation, save
            self._emergency = self._end = False
        self.say(Armed(generation=generation, local_rank=local_rank))

    def disarm(self) -> None:
        """From now on there is nothing to save."""
        with self._news:
            self._save = None

    def means_all(self) -> bool:
        """Ask what SIGTERM means; True when the whole launcher is to end, and asks for a save."""
        self.say(Signalled(generation=self._generation))
        with self._news:
            self._news.wait_for(lambda: self._emergency or self._end or not self._sock, _MEANING_S)
            return self._emergency

    def close(self) -> None:
        """Hang up."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def ready(self, generation: int, local_rank: int) -> None:
        """Say that this process trains in `generation` and can leave it in place."""
        self._taken = generation
        self.say(Ready(generation=generation, local_rank=local_rank, pid=os.getpid()))

    def released(self, generation: int) -> None:
        """Say that the old generation is left, and `generation` about to be joined."""
        self.say(Released(generation=generation))

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

    def say(self, message: FromRank) -> None:
        """Tell the launcher, if there is one; from any thread."""
        sock = self._sock
        if sock is not None:
            with self._saying, contextlib.suppress(OSError):  # the thread notices the end
                sock.sendall(frame(message))

    def _listen(self) -> None:
        sock = self._sock
        if sock is None:
            return
        frames, decoder = Frames(), Decoder[ToRank](ToRank)
        with sock, contextlib.suppress(OSError, WireError):
            while data := sock.recv(65536):
                for body in frames.feed(data):
                    self._heard(decoder.decode(body))
        with self._news:
            self._sock = None
            self._news.notify_all()

    def _heard(self, order: ToRank) -> None:
        match order:
            case Reform():
                self._ordered(order)
            case Emergency(grace_s=grace_s):
                self._asked(order, grace_s)
            case End():
                with self._news:
                    self._end = True
                    self._news.notify_all()

    def _asked(self, order: Emergency, grace_s: float) -> None:
        save = self._save
        if save is not None:
            save(grace_s)
        else:
            why = "no session is open"
            self.say(Saved(generation=order.generation, local_rank=-1, why=why))
        with self._news:
            self._emergency, self._end = save is not None, save is None
            self._news.notify_all()

    def _ordered(self, order: Reform) -> None:
        self.say(Heard(generation=order.generation))
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
