"""Who is at the other end of a Unix socket, by the kernel's word and nobody else's."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from everstep.wire.errors import WireError
from everstep.wire.messages import Peer

if TYPE_CHECKING:
    from collections.abc import Callable

_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it yet


class PeerGoneError(WireError):
    """The process ended before it could be looked at."""


class PeerUnknownError(WireError):
    """The kernel does not let this process see who is at the other end: why, and what to do."""


class Identity(NamedTuple):
    """A peer and a pidfd of its process, which becomes readable when the process has ended."""

    peer: Peer
    pidfd: int


def identify(
    sock: socket.socket, *, open_pidfd: Callable[[socket.socket, int], int] | None = None
) -> Identity:
    """Return who is connected. Raises PeerGoneError or PeerUnknownError."""
    pid, uid, gid = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if pid <= 0:
        raise PeerUnknownError(
            "the agent cannot see your process: it is in another PID namespace; run the container "
            "with the host's PIDs (hostPID: true, --pid=host)"
        )
    before = start_ticks(pid)
    pidfd = (open_pidfd or _open_pidfd)(sock, pid)
    try:
        after = start_ticks(pid)
        # Compared after opening: a pid that was handed to another process has another start time.
        if after != before or has_ended(pidfd):
            raise PeerGoneError(f"process {pid} ended while it was looked at")
    except WireError:
        os.close(pidfd)
        raise
    return Identity(Peer(pid=pid, uid=uid, gid=gid, start_ticks=after, boot_id=boot_id()), pidfd)


def _open_pidfd(sock: socket.socket, pid: int) -> int:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as exc:
        if exc.errno == errno.ENOPROTOOPT:
            return pidfd_by_number(sock, pid)
        raise PeerGoneError(f"process {pid} ended before it could be watched") from exc


def pidfd_by_number(sock: socket.socket, pid: int) -> int:
    """Open a pidfd the old way; only the start time tells whether it is the same process."""
    del sock
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as exc:
        raise PeerGoneError(f"process {pid} ended before it could be watched") from exc


def has_ended(pidfd: int) -> bool:
    """Return whether the process of a pidfd has ended (reaped or not)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot.

    Raises PeerGoneError when there is no such process and PeerUnknownError when /proc hides it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, PermissionError) as exc:
        if _alive(pid):
            raise PeerUnknownError(
                f"/proc/{pid} is hidden from the agent (hidepid): mount /proc with gid= of the "
                "agent's group, or run the agent as root"
            ) from exc
        raise PeerGoneError(f"process {pid} has ended") from exc
    except ProcessLookupError as exc:
        raise PeerGoneError(f"process {pid} has ended") from exc
    # The name in parentheses may hold spaces and parentheses of its own; field 22 is the start.
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process (a debugger is another thing)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :].startswith(b"T")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def boot_id() -> str:
    """Return the id of this boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def machine_id() -> str:
    """Return the machine's id, empty where it has none (some containers)."""
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
