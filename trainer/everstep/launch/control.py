"""The launcher's line to the ranks of its node.

A Unix socket in the launcher's private folder, named to the ranks by `EVERSTEP_CONTROL`. A rank
that can leave its generation in place says `Ready`; the launcher may then order it into the next
one. A rank that can take an emergency snapshot says `Armed`; the launcher asks for one when it is
to end itself. Nothing here blocks either side: what a rank does not answer is the launcher's to
judge.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
from typing import TYPE_CHECKING

import msgspec

from everstep.wire.codec import Decoder, Frames, frame
from everstep.wire.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "EVERSTEP_CONTROL"
IN_PLACE = "EVERSTEP_IN_PLACE"
_OFF = frozenset({"0", "no", "off", "false"})
_CREDENTIALS = struct.Struct("3i")


def in_place_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether ranks are to be formed anew in place where that can be done."""
    return environ.get(IN_PLACE, "1").lower() not in _OFF


class Control(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """Root of both directions; the class name is the `kind`."""

    generation: int


class Ready(Control, frozen=True, kw_only=True):
    """Rank -> launcher: I train in this generation, and can be formed anew in place."""

    local_rank: int
    pid: int


class Reform(Control, frozen=True, kw_only=True):
    """Launcher -> rank: leave what you run under, and join this generation as it says.

    `environment` is what a fresh rank would find in its environment.
    """

    environment: dict[str, str]


class Heard(Control, frozen=True, kw_only=True):
    """Rank -> launcher: the process runs and has the order; its main thread is being called."""


class Released(Control, frozen=True, kw_only=True):
    """Rank -> launcher: out of the old generation, about to join the new one."""


class Armed(Control, frozen=True, kw_only=True):
    """Rank -> launcher: I can save in an emergency, and ask you before SIGTERM ends me."""

    local_rank: int


class Signalled(Control, frozen=True, kw_only=True):
    """Rank -> launcher: I got SIGTERM, and ask whether it is your end, too."""


class Emergency(Control, frozen=True, kw_only=True):
    """Launcher -> rank: I am to end. Save the last finished step within `grace_s`."""

    grace_s: float


class End(Control, frozen=True, kw_only=True):
    """Launcher -> rank: SIGTERM was meant for you alone; nothing is to be saved."""


class Saved(Control, frozen=True, kw_only=True):
    """Rank -> launcher: my part of snapshot `id` is with the writer, or `why` nothing is.

    `lead`: this node's writer puts the marker, in `place`. `took_s` counts from the order.
    """

    local_rank: int
    id: str = ""
    step: int = 0
    place: str = ""
    lead: bool = False
    took_s: float = 0.0
    why: str = ""


FromRank = Ready | Heard | Released | Armed | Signalled | Saved
ToRank = Reform | Emergency | End


class Line:
    """One rank's connection, as the launcher sees it. `pid` is the kernel's word."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, order: ToRank) -> bool:
        """Send an order; False when the rank is gone or does not read."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(frame(order))
            return True
        return False


class ControlServer:
    """Listens at `path` in a thread of its own; `heard` is called there with what ranks say.

    Only processes of the same user are let in. `heard(line, None)` tells that a line ended.
    """

    def __init__(self, path: Path, heard: Callable[[Line, FromRank | None], None]) -> None:
        self.path = path
        self._heard = heard
        self._decoder: Decoder[FromRank] = Decoder(FromRank)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen()
        self._wake_r, self._wake_w = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="everstep-control", daemon=True)

    def start(self) -> None:
        """Let ranks in from now on."""
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody."""
        self._wake_w.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._wake_r:
            selector.register(self._wake_r, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake_r:
                        self._hang_up(selector)
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        self._read(selector, key)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as exc:
            log.warning("a rank could not be let in: %s", exc)
            return
        pid, uid, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid not in (os.getuid(), 0):
            sock.close()
            return
        sock.settimeout(1.0)  # a rank that is stopped must not stop the launcher
        selector.register(sock, selectors.EVENT_READ, (Line(sock, pid), Frames()))

    def _read(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        line, frames = key.data
        sock: socket.socket = key.fileobj  # type: ignore[assignment]  # only sockets are registered
        try:
            data = sock.recv(65536)
            messages = [self._decoder.decode(body) for body in frames.feed(data)]
        except (OSError, WireError) as exc:
            log.warning("a rank's line is cut: %s", exc)
            data, messages = b"", []
        for message in messages:
            self._tell(line, message)
        if not data:
            selector.unregister(sock)
            sock.close()
            self._tell(line, None)

    def _tell(self, line: Line, message: FromRank | None) -> None:
        try:
            self._heard(line, message)
        except Exception:  # the launcher's bug must not cut the other ranks' lines
            log.exception("what a rank said was mishandled")

    def _hang_up(self, selector: selectors.BaseSelector) -> None:
        for key in list(selector.get_map().values()):
            if key.data is not None:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered
