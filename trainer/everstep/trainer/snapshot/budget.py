"""How much memory this process may still take, before it takes it: the kernel's own books."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_SYS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
_SPARE = 0.1
"""What is left alone: others need memory too, and a machine without any stands still."""


def free_bytes(*, proc: Path = _PROC, sys: Path = _SYS) -> int:
    """Return what may be allocated without the machine or this process's cgroup running out."""
    limits = [_available(proc), *_cgroups(proc, sys)]
    return int(min(limits) * (1 - _SPARE))


def slots_that_fit(slot_bytes: int, *, free: int, sharers: int, wanted: int) -> int:
    """Return how many slots to make where `sharers` ranks share what is free, at most `wanted`.

    >>> [slots_that_fit(10, free=free, sharers=2, wanted=2) for free in (100, 30, 10)]
    [2, 1, 0]
    """
    return min(wanted, free // sharers // max(1, slot_bytes))


def _available(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return _NO_LIMIT
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(next(found, _NO_LIMIT >> 10)) << 10


def _cgroups(proc: Path, sys: Path) -> list[int]:
    """Return what is left below each limit of this process's cgroup and all above it."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root, names = sys, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = sys / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        while folder == root or root in folder.parents:
            left.append(_left(folder, *names))
            folder = folder.parent
    return left


def _left(folder: Path, limit: str, used: str, cache: str) -> int:
    most, now = _number(folder / limit), _number(folder / used)
    if most is None or now is None:
        return _NO_LIMIT
    # Cached files count as used but are given up for whoever needs the memory.
    return max(0, most - now + _stat(folder / "memory.stat", cache))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(v) for n, _, v in (ln.partition(" ") for ln in lines) if n == name), 0)
