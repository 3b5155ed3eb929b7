"""Reads the host through psutil and the kernel's clock call."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import psutil

from everstep.plugins.collectors.host import parse
from everstep.plugins.collectors.host.kernel_clock import read_kernel_clock
from everstep.sdk import Finding, Reading, Seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# psutil's ways of saying that a file in /proc is missing or unlike what it knows.
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AssertionError,
    NotImplementedError,
)
_REMOTE = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "fuse", "9p", "glusterfs")


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of the host is watched. `sample.toml` says it in the operator's words."""

    interval_s: Seconds = 1.0
    mounts: tuple[str, ...] = ("/", "/dev/shm")
    skip_disks: tuple[str, ...] = ("loop*", "ram*", "sr*", "fd*")
    skip_interfaces: tuple[str, ...] = (
        "lo",
        "veth*",
        "docker*",
        "br-*",
        "virbr*",
        "cni*",
        "cali*",
        "cilium*",
        "flannel*",
        "lxc*",
        "ifb*",
        "dummy*",
    )
    most_devices: Annotated[int, msgspec.Meta(ge=1)] = 64


class HostCollector:
    """Looks at every part of the host; one that cannot be read is counted, the others go on."""

    Config = HostConfig

    def __init__(self, config: HostConfig, sys_block: Path = Path("/sys/block")) -> None:
        self._config = config
        self._sys_block = sys_block
        self._cpu_before: dict[str, float] | None = None
        self._gap_before_s: float | None = None
        self._left_out: dict[str, int] = {}
        self._parts: dict[str, Callable[[], list[Reading]]] = {
            "cpu": self._cpu,
            "load": lambda: parse.load(*os.getloadavg()),
            "memory": self._memory,
            "filesystem": self._filesystems,
            "disk": self._disks,
            "network": self._network,
            "clock": self._clock,
        }
        self._failures = dict.fromkeys(self._parts, 0)

    def collect(self) -> Iterable[Reading | Finding]:
        """Return the readings of one look."""
        out: list[Reading | Finding] = []
        for name, look in self._parts.items():
            try:
                out += look()
            except _UNREADABLE:
                self._failures[name] += 1
        return out + parse.unseen(self._failures, self._left_out)

    def _cpu(self) -> list[Reading]:
        times = psutil.cpu_times()._asdict()
        before, self._cpu_before = self._cpu_before, times
        return parse.cpu(times, before, count=os.cpu_count() or 1)

    def _memory(self) -> list[Reading]:
        return parse.memory(psutil.virtual_memory()._asdict(), psutil.swap_memory()._asdict())

    def _filesystems(self) -> list[Reading]:
        looks = (_filesystem(*mount) for mount in self._mounts())
        return parse.filesystems(fs for fs in looks if fs is not None)

    def _mounts(self) -> list[tuple[str, str, str]]:
        mounts: dict[str, tuple[str, str, str]] = {}
        devices: set[str] = set()
        for part in sorted(psutil.disk_partitions(all=True), key=lambda p: len(p.mountpoint)):
            # A dead server makes statfs hang for ever: remote file systems only by name.
            local = part.device.startswith("/dev/") and not part.fstype.startswith(_REMOTE)
            if part.mountpoint in self._config.mounts or (local and part.device not in devices):
                mounts[part.mountpoint] = (part.device, part.mountpoint, part.fstype)
                devices.add(part.device)
        return [mounts[m] for m in self._first("filesystem", sorted(mounts))]

    def _disks(self) -> list[Reading]:
        io = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
        whole = [name for name in io if (self._sys_block / name.replace("/", "!")).exists()]
        names = self._first("disk", parse.wanted(whole, skip=self._config.skip_disks))
        return parse.disks({name: io[name]._asdict() for name in names})

    def _network(self) -> list[Reading]:
        io = psutil.net_io_counters(pernic=True, nowrap=False)
        names = self._first("network", parse.wanted(io, skip=self._config.skip_interfaces))
        return parse.network({name: io[name]._asdict() for name in names})

    def _first(self, part: str, names: list[str]) -> list[str]:
        most = self._config.most_devices
        self._left_out[part] = max(0, len(names) - most)
        return names[:most]

    def _clock(self) -> list[Reading]:
        wall_s, boot_s = _two_clocks()
        before, self._gap_before_s = self._gap_before_s, wall_s - boot_s
        return parse.clock(wall_s, boot_s, read_kernel_clock(), before)


def _filesystem(device: str, mount: str, fstype: str) -> parse.Filesystem | None:
    try:
        size = os.statvfs(mount)
    except OSError:
        return None  # unmounted since it was listed, or not ours to look at
    unit = size.f_frsize
    return parse.Filesystem(
        device,
        mount,
        fstype,
        total=size.f_blocks * unit,
        used=(size.f_blocks - size.f_bfree) * unit,
        free=size.f_bavail * unit,
    )


def _two_clocks() -> tuple[float, float]:
    # Being descheduled between the two would look like a step: the tightest of three counts.
    tightest: tuple[float, float, float] | None = None
    for _ in range(3):
        first_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        wall_s = time.time()
        last_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        if tightest is None or last_s - first_s < tightest[0]:
            tightest = (last_s - first_s, wall_s, (first_s + last_s) / 2)
    assert tightest is not None
    return tightest[1], tightest[2]
