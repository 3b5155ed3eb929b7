"""Who writes a part: one process at a time, and a dead one's place can be taken."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from everstep.snapshots.sealed import SnapshotError


class TakenError(SnapshotError):
    """Somebody else has written this or is about to; nothing of it may be touched."""


def take(path: Path) -> None:
    """Make the lock file, or take it over from a process that is surely dead, or from oneself.

    Raises TakenError when its owner lives, or may live on another machine; OSError.
    """
    mine = _identity(os.getpid())
    for _ in range(3):
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with os.fdopen(fd, "w") as stream:
                stream.write(mine)
            return
        owner = _owner(path)
        if owner == mine:
            return
        if not _is_dead(owner):
            raise TakenError(
                f"{path.parent} is being written by another process ({owner or 'unknown'})"
            )
        path.unlink(missing_ok=True)
    raise TakenError(f"{path.parent} is wanted by several processes at once")


def _owner(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""


def _identity(pid: int) -> str:
    """Return a process's name that no other has: machine's boot, pid namespace, pid, start."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if state in "ZX":  # ended; its parent has not looked yet
        raise ProcessLookupError(pid)
    return f"boot {boot} ns {namespace} pid {pid} start {rest[18]}"


def _is_dead(owner: str) -> bool:
    words = owner.split()
    if len(words) != 8 or not words[5].isdigit():
        return False
    if words[:4] != _identity(os.getpid()).split()[:4]:
        return False
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _identity(int(words[5])) != owner
    return True
