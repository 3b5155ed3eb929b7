"""What psutil and the kernel say about a host, as readings: pure, no input or output."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, NamedTuple

from everstep.sdk import Reading

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_CPU_MODES = {
    "user": ("user",),
    "nice": ("nice",),
    "system": ("system",),
    "idle": ("idle",),
    "iowait": ("iowait",),
    "interrupt": ("irq", "softirq"),
    "steal": ("steal",),
}


class Filesystem(NamedTuple):
    """One mounted file system, sizes in bytes. `free` is what an ordinary user may still use."""

    device: str
    mount: str
    type: str
    total: int
    used: int
    free: int


class KernelClock(NamedTuple):
    """What the kernel says of its wall clock, in seconds."""

    synchronized: bool
    offset_s: float
    max_error_s: float


def cpu(
    times: Mapping[str, float], before: Mapping[str, float] | None, *, count: int
) -> list[Reading]:
    """Return processor time per mode, and its shares since `before`."""
    now = _by_mode(times)
    out = [
        Reading(
            name="system.cpu.time",
            value=seconds,
            unit="s",
            attributes={"cpu.mode": mode},
            counter=True,
        )
        for mode, seconds in now.items()
    ]
    out.append(Reading(name="system.cpu.logical.count", value=count, unit="{cpu}"))
    if before is None:
        return out
    # The kernel's idle and iowait times step back now and then: a share is never below zero.
    spent = {mode: max(0.0, s - _by_mode(before)[mode]) for mode, s in now.items()}
    total = sum(spent.values())
    if total > 0:
        out += [
            Reading(
                name="system.cpu.utilization",
                value=round(seconds / total, 6),
                attributes={"cpu.mode": mode},
            )
            for mode, seconds in spent.items()
        ]
    return out


def _by_mode(times: Mapping[str, float]) -> dict[str, float]:
    return {mode: sum(times.get(k, 0.0) for k in keys) for mode, keys in _CPU_MODES.items()}


def load(one: float, five: float, fifteen: float) -> list[Reading]:
    """Return the load averages."""
    return [
        Reading(
            name="everstep.host.load",
            value=value,
            unit="{thread}",
            attributes={"everstep.window": window},
        )
        for window, value in (("1m", one), ("5m", five), ("15m", fifteen))
    ]


def memory(ram: Mapping[str, float], swap: Mapping[str, float]) -> list[Reading]:
    """Return where the memory is, and the paging space."""
    cached, buffers, free = ram["cached"], ram["buffers"], ram["free"]
    used = max(0.0, ram["total"] - free - buffers - cached)
    places = {"used": used, "free": free, "buffers": buffers, "cached": cached}
    return [
        Reading(name="system.memory.limit", value=ram["total"], unit="By"),
        Reading(name="system.memory.linux.available", value=ram["available"], unit="By"),
        *(
            _bytes("system.memory.usage", size, {"system.memory.state": state})
            for state, size in places.items()
        ),
        *(
            _bytes("system.paging.usage", swap[state], {"system.paging.state": state})
            for state in ("used", "free")
        ),
    ]


def filesystems(mounted: Iterable[Filesystem]) -> list[Reading]:
    """Return the size of each file system and what is used of it."""
    out: list[Reading] = []
    for fs in mounted:
        where = {
            "system.device": fs.device,
            "system.filesystem.mountpoint": fs.mount,
            "system.filesystem.type": fs.type,
        }
        reserved = max(0, fs.total - fs.used - fs.free)
        out.append(_bytes("system.filesystem.limit", fs.total, where))
        for state, size in (("used", fs.used), ("free", fs.free), ("reserved", reserved)):
            out.append(
                _bytes("system.filesystem.usage", size, {**where, "system.filesystem.state": state})
            )
    return out


def disks(io: Mapping[str, Mapping[str, float]]) -> list[Reading]:
    """Return the traffic of each whole disk."""
    out: list[Reading] = []
    for device, counts in io.items():
        where = {"system.device": device}
        for way in ("read", "write"):
            at = {**where, "disk.io.direction": way}
            out.append(_count("system.disk.io", counts[f"{way}_bytes"], "By", at))
            out.append(_count("system.disk.operations", counts[f"{way}_count"], "{operation}", at))
        if "busy_time" in counts:
            out.append(_count("system.disk.io_time", counts["busy_time"] / 1000, "s", where))
    return out


def network(io: Mapping[str, Mapping[str, float]]) -> list[Reading]:
    """Return the traffic of each interface and what went wrong on it."""
    out: list[Reading] = []
    for interface, counts in io.items():
        for way, keys in (
            ("receive", ("bytes_recv", "packets_recv", "errin", "dropin")),
            ("transmit", ("bytes_sent", "packets_sent", "errout", "dropout")),
        ):
            at = {"network.interface.name": interface, "network.io.direction": way}
            size, packets, errors, dropped = (counts[key] for key in keys)
            out += [
                _count("system.network.io", size, "By", at),
                _count("system.network.packet.count", packets, "{packet}", at),
                _count("system.network.errors", errors, "{error}", at),
                _count("system.network.packet.dropped", dropped, "{packet}", at),
            ]
    return out


def clock(
    wall_s: float, boot_s: float, kernel: KernelClock | None, gap_before_s: float | None
) -> list[Reading]:
    """Return uptime, boot time, the step of the wall clock, and the kernel's own opinion of it.

    The wall clock less the time since boot stays the same however the clock is slewed, and changes
    only when it is set: `gap_before_s` is that difference at the look before.
    """
    gap_s = wall_s - boot_s
    out = [
        Reading(name="system.uptime", value=boot_s, unit="s"),
        Reading(name="everstep.host.boot.time", value=round(gap_s, 3), unit="s"),
        Reading(
            name="everstep.host.clock.synchronized",
            value=float(kernel.synchronized) if kernel else None,
        ),
        Reading(
            name="everstep.host.clock.offset", value=kernel.offset_s if kernel else None, unit="s"
        ),
        Reading(
            name="everstep.host.clock.max_error",
            value=kernel.max_error_s if kernel else None,
            unit="s",
        ),
    ]
    if gap_before_s is not None:
        step_s = round(gap_s - gap_before_s, 6)
        out.append(Reading(name="everstep.host.clock.step", value=step_s, unit="s"))
    return out


def unseen(failures: Mapping[str, int], left_out: Mapping[str, int]) -> list[Reading]:
    """Return how often each part could not be read, and how many devices were one too many."""
    return [
        *(
            _count("everstep.host.read.errors", count, "{error}", {"everstep.part": part})
            for part, count in failures.items()
        ),
        *(
            Reading(
                name="everstep.host.devices.left_out",
                value=count,
                unit="{device}",
                attributes={"everstep.part": part},
            )
            for part, count in left_out.items()
        ),
    ]


def wanted(names: Iterable[str], *, skip: Sequence[str]) -> list[str]:
    """Return the names that no pattern skips, sorted."""
    return sorted(n for n in names if not any(fnmatch(n, pattern) for pattern in skip))


def _bytes(name: str, size: float, attributes: dict[str, str]) -> Reading:
    return Reading(name=name, value=size, unit="By", attributes=attributes)


def _count(name: str, value: float, unit: str, attributes: dict[str, str]) -> Reading:
    return Reading(name=name, value=value, unit=unit, attributes=attributes, counter=True)
