"""What a daemon tells its service manager; without one, nothing happens."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def notify(state: str, environ: Mapping[str, str]) -> None:
    """Send e.g. `READY=1` to `$NOTIFY_SOCKET`. A service manager that is gone is no error."""
    address = environ.get("NOTIFY_SOCKET")
    if not address:
        return
    # A leading @ stands for the zero byte of an abstract address.
    address = "\0" + address[1:] if address[0] == "@" else address
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock,
    ):
        sock.connect(address)
        sock.send(state.encode())


def watchdog_interval_s(environ: Mapping[str, str]) -> float | None:
    """Return how often to send `WATCHDOG=1`, None when nobody waits for it from this process.

    >>> watchdog_interval_s({"WATCHDOG_USEC": "30000000"})
    15.0
    """
    # systemd names the process that it watches; a child that inherits the variable must not ping.
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        return int(environ["WATCHDOG_USEC"]) / 2e6 or None
    except (KeyError, ValueError):
        return None
