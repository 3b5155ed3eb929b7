"""What the kernel offers, and what it lets this user do."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import socket
from pathlib import Path

from everstep.cli.doctor.checks import Found, Patient

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1
_SO_PEERPIDFD = 77  # Linux 6.5

KERNEL_LOG = Path("/dev/kmsg")
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def memfd_sealing(_: Patient) -> Found:
    """Try what every rank does with its progress page."""
    try:
        fd = os.memfd_create("everstep-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        finally:
            os.close(fd)
    except OSError as exc:
        return Found("missing", f"refused: {exc.strerror}", _newer("5.1"), broken=True)
    return Found("ok", "memory files can be sealed")


def pidfd(_: Patient) -> Found:
    """Try to hold on to a process."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as exc:
        return Found("missing", f"refused: {exc.strerror}", _newer("5.3"), broken=True)
    return Found("ok", "processes can be held on to")


def peer_pidfd(_: Patient) -> Found:
    """Ask a socket for its peer's process."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError as exc:
            if exc.errno != errno.ENOPROTOOPT:
                raise
            text = f"Linux {platform.release()} has none: start times are compared instead"
            return Found("warn", text, "nothing; Linux 6.5 and later close the gap")
    return Found("ok", "a socket names its peer's process")


def kernel_log(_: Patient) -> Found:
    """Open the kernel's log as a reader would."""
    try:
        os.close(os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError:
        return Found("warn", f"there is no {KERNEL_LOG}", "pass it into the container")
    except PermissionError:
        advice = "give the agent CAP_SYSLOG, or set kernel.dmesg_restrict=0"
        return Found("warn", f"{KERNEL_LOG} may not be read", advice)
    return Found("ok", f"{KERNEL_LOG} can be read")


def ptrace_scope(patient: Patient) -> Found:
    """Read who may look into a process."""
    try:
        scope = int(PTRACE_SCOPE.read_text(encoding="ascii"))
    except FileNotFoundError:
        return Found("ok", "no Yama: the same user may look into its processes")
    if scope <= 1 or (scope == 2 and patient.root):
        return Found("ok", f"ptrace_scope is {scope}: a launcher may look into its ranks")
    text = f"ptrace_scope is {scope}: nobody but an administrator may look into a rank"
    return Found("warn", text, "sysctl kernel.yama.ptrace_scope=1")


def _newer(version: str) -> str:
    return f"a kernel from Linux {version} on, and a sandbox that allows it; see seccomp"
