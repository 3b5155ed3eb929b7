"""`python -m everstep.snapshots.writer --socket PATH`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from everstep.sdk.config import ConfigError
from everstep.snapshots import faults
from everstep.snapshots.writer.child import END, GRACE_S, listen
from everstep.snapshots.writer.server import Server
from everstep.wire.exit_codes import USAGE

_NICE = 5
"""The ranks' steps come first where a core is short."""

log = logging.getLogger("everstep.snapshots.writer")


def main() -> None:
    """Serve until the parent says so or has ended; without one, until SIGTERM."""
    parser = argparse.ArgumentParser(prog="everstep.snapshots.writer", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="where it listens")
    parser.add_argument("--fd", type=int, help="a socket that listens there already")
    parser.add_argument("--parent", type=int, help="pidfd of the process it ends after")
    parser.add_argument("--grace", type=float, default=GRACE_S, help="to finish, in seconds")
    parser.add_argument("--tidy", action="store_true", help="remove the socket's folder at the end")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="everstep writer: %(message)s")
    try:
        planned = faults.from_text(os.environ.get(faults.FAULT_VARIABLE, ""))
    except ConfigError as exc:
        log.error("%s", exc)  # noqa: TRY400  the message says it all
        sys.exit(USAGE)
    if type(planned) is not faults.Faults:
        log.warning("a fault is planned: %s", planned)
    listener = socket.socket(fileno=asked.fd) if asked.fd is not None else listen(asked.socket)
    os.nice(_NICE)
    # A terminal's Ctrl-C and a session's end go to the job; the writer is told by its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    server = Server(listener, faults=planned, parent=asked.parent, grace_s=asked.grace)
    signal.set_wakeup_fd(server.wake_fd, warn_on_full_buffer=False)
    for number in (END, signal.SIGTERM) if asked.parent is None else (END,):
        signal.signal(number, lambda *_: server.stop("it was told to end"))
    if asked.parent is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {END, signal.SIGTERM})
    finished = server.run()
    if asked.tidy:
        with contextlib.suppress(OSError):
            asked.socket.unlink(missing_ok=True)
            asked.socket.parent.rmdir()
    # Not `sys.exit`: a thread that hangs in a dead disk must not keep the process.
    logging.shutdown()
    os._exit(0 if finished else 1)


main()
