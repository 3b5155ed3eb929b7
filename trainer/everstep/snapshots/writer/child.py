"""Starts the writer, as a child of a launcher (or of a rank that has none)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from everstep.snapshots.sealed import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SOCKET_NAME = "writer.sock"
GRACE_S = 120.0
END = signal.SIGUSR1
"""Ends it, from its parent. A scheduler sends SIGTERM to everybody at once: that does not mean the
process which has to finish when all others are gone."""

_BACKLOG = 256


class Writer:
    """The handle of a started writer; `path` is its Unix socket."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = path
        self.pid = process.pid
        self._process = process

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def close(self, grace_s: float) -> bool:
        """Let it finish what is in flight; kill it after `grace_s`. False when it could not."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(END)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.path.unlink(missing_ok=True)
        return self._process.returncode == 0


def start(
    folder: Path, *, environ: Mapping[str, str], grace_s: float = GRACE_S, tidy: bool = False
) -> Writer:
    """Start a writer that listens in `folder`; ranks can connect when this returns.

    It lives in a session of its own and, when this process ends however it may, finishes what is
    in flight within `grace_s` and goes; with `tidy` the folder goes with it. Raises SnapshotError
    when it cannot be started.
    """
    path = folder / SOCKET_NAME
    try:
        listener, me = listen(path), os.pidfd_open(os.getpid())
    except OSError as exc:
        raise SnapshotError(f"no snapshot writer on {path}: {exc.strerror or exc}") from exc
    try:
        options: dict[str, object] = {"--socket": path, "--grace": grace_s}
        if tidy:
            options["--tidy"] = ""
        return Writer(path, _spawn(options, listener, me, environ))
    except OSError as exc:
        path.unlink(missing_ok=True)
        raise SnapshotError(f"the snapshot writer does not start: {exc}") from exc
    finally:
        # The writer alone listens: when it is gone, that must show to who connects.
        listener.close()
        os.close(me)


def listen(path: Path) -> socket.socket:
    """Return a socket that only this user can connect to. Raises OSError."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _spawn(
    options: dict[str, object], listener: socket.socket, me: int, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    options = {"--fd": listener.fileno(), "--parent": me, **options}
    arguments = [str(word) for option in options.items() for word in option if word != ""]
    # What it is told while it starts waits until it can listen: it unblocks the signal itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {END, signal.SIGTERM})
    try:
        return subprocess.Popen(
            # -P: a `socket.py` in the job's working folder is the job's, not ours.
            [sys.executable, "-P", "-m", "everstep.snapshots.writer", *arguments],
            stdin=subprocess.DEVNULL,
            env=dict(environ),
            pass_fds=(listener.fileno(), me),
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
