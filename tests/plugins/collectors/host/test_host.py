"""The host, from captures of /proc, from damaged ones, and from this machine."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep.plugins.collectors.host import HostCollector, collect
from everstep.sdk import Reading

CAPTURE = Path(__file__).parent / "captures" / "vm-2cpu-linux-6.18"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the capture that psutil reads in place of /proc."""
    copy = tmp_path / "proc"
    shutil.copytree(CAPTURE, copy)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(copy))
    return copy


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    """Return a folder that stands for /sys/block."""
    for name in ("vda", "zram0", "loop0", "loop1"):
        (tmp_path / "block" / name).mkdir(parents=True)
    return tmp_path / "block"


def look(collector: HostCollector) -> list[Reading]:
    return [r for r in collector.collect() if isinstance(r, Reading)]


def value(readings: list[Reading], name: str, **attributes: str) -> float | None:
    wanted = {key.replace("__", "."): text for key, text in attributes.items()}
    (found,) = (r for r in readings if r.name == name and wanted.items() <= r.attributes.items())
    return found.value


def config(**changed: Any) -> collect.HostConfig:
    return collect.HostConfig(**changed)


@pytest.mark.usefixtures("proc")
def test_a_capture_gives_the_numbers_that_stand_in_it(blocks: Path) -> None:
    readings = look(HostCollector(config(), sys_block=blocks))
    assert value(readings, "system.cpu.time", cpu__mode="user") == 464.30
    assert value(readings, "system.cpu.time", cpu__mode="interrupt") == 1.94
    assert value(readings, "system.memory.limit") == 24684092 * 1024
    assert value(readings, "system.memory.linux.available") == 24161440 * 1024
    read = {"system__device": "vda", "disk__io__direction": "read"}
    assert value(readings, "system.disk.io", **read) == 4920954 * 512
    assert value(readings, "system.disk.operations", **read) == 41179
    assert value(readings, "system.disk.io_time", system__device="vda") == 6.668
    receive = {"network__interface__name": "eth0", "network__io__direction": "receive"}
    assert value(readings, "system.network.io", **receive) == 186793189
    assert value(readings, "system.network.packet.count", **receive) == 6243


@pytest.mark.usefixtures("proc")
def test_the_states_of_memory_add_up_to_all_of_it(blocks: Path) -> None:
    readings = look(HostCollector(config(), sys_block=blocks))
    states = [r.value for r in readings if r.name == "system.memory.usage"]
    assert sum(v for v in states if v is not None) == value(readings, "system.memory.limit")


@pytest.mark.usefixtures("proc")
def test_loop_devices_and_container_interfaces_are_left_aside(blocks: Path) -> None:
    readings = look(HostCollector(config(), sys_block=blocks))
    assert _all(readings, "system.device", "system.disk.io") == {"vda", "zram0"}
    assert _all(readings, "network.interface.name", "system.network.io") == {"eth0"}


@pytest.mark.usefixtures("proc")
def test_a_partition_is_not_counted_again_beside_its_disk(blocks: Path) -> None:
    shutil.rmtree(blocks / "zram0")  # what is not in /sys/block is no whole disk
    readings = look(HostCollector(config(), sys_block=blocks))
    assert _all(readings, "system.device", "system.disk.io") == {"vda"}


@pytest.mark.usefixtures("proc")
def test_each_local_file_system_counts_once_and_a_remote_one_only_when_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[str] = []

    def statvfs(mount: str) -> Any:
        looked_at.append(mount)
        raise PermissionError(mount)

    monkeypatch.setattr(collect.os, "statvfs", statvfs)  # type: ignore[attr-defined]  # its own os
    look(HostCollector(config()))
    assert looked_at == ["/", "/dev/shm"]
    looked_at.clear()
    look(HostCollector(config(mounts=("/home",))))
    assert looked_at == ["/", "/home"]


@pytest.mark.usefixtures("proc")
def test_more_devices_than_allowed_are_counted_and_not_shown(blocks: Path) -> None:
    readings = look(HostCollector(config(skip_disks=(), most_devices=3), sys_block=blocks))
    assert _all(readings, "system.device", "system.disk.io") == {"loop0", "loop1", "vda"}
    assert value(readings, "everstep.host.devices.left_out", everstep__part="disk") == 1


def _all(readings: list[Reading], attribute: str, name: str) -> set[str]:
    return {r.attributes[attribute] for r in readings if r.name == name}


def test_shares_of_processor_time_are_those_since_the_look_before(proc: Path) -> None:
    collector = HostCollector(config())
    assert "system.cpu.utilization" not in {r.name for r in look(collector)}
    stat = (proc / "stat").read_text()
    (proc / "stat").write_text(stat.replace("cpu  46430 0 5195 440396", "cpu  46460 0 5195 440466"))
    readings = look(collector)
    assert value(readings, "system.cpu.utilization", cpu__mode="user") == 0.3
    assert value(readings, "system.cpu.utilization", cpu__mode="idle") == 0.7


def test_idle_time_that_runs_backwards_is_no_negative_share(proc: Path) -> None:
    collector = HostCollector(config())
    look(collector)
    stat = (proc / "stat").read_text()
    (proc / "stat").write_text(stat.replace("cpu  46430 0 5195 440396", "cpu  46460 0 5195 440390"))
    readings = look(collector)
    assert value(readings, "system.cpu.utilization", cpu__mode="user") == 1
    assert value(readings, "system.cpu.utilization", cpu__mode="idle") == 0


PARTS = {
    "stat": ("cpu", "system.cpu.time"),
    "meminfo": ("memory", "system.memory.usage"),
    "net/dev": ("network", "system.network.io"),
    "self/mounts": ("filesystem", "system.filesystem.usage"),
}


@pytest.mark.parametrize("file", PARTS)
def test_a_part_that_is_gone_is_counted_and_the_others_go_on(
    proc: Path, blocks: Path, file: str
) -> None:
    collector = HostCollector(config(), sys_block=blocks)
    (proc / file).unlink()
    readings = look(collector)
    names = {r.name for r in readings}
    for part, metric in PARTS.values():
        broken = part == PARTS[file][0]
        assert value(readings, "everstep.host.read.errors", everstep__part=part) == broken
        assert (metric not in names) == broken
    assert value(look(collector), "everstep.host.read.errors", everstep__part=PARTS[file][0]) == 2


@pytest.mark.parametrize("file", [*PARTS, "diskstats", "vmstat", "filesystems"])
@pytest.mark.filterwarnings("ignore:.*stats couldn't be determined:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*vmstat.*:RuntimeWarning")
def test_a_file_that_is_cut_short_anywhere_never_stops_the_look(
    proc: Path, blocks: Path, file: str
) -> None:
    whole = (proc / file).read_bytes()
    collector = HostCollector(config(), sys_block=blocks)
    for size in range(0, len(whole), max(1, len(whole) // 40)):
        (proc / file).write_bytes(whole[:size])
        names = {r.name for r in look(collector)}
        assert "system.uptime" in names


def test_a_clock_that_was_set_shows_as_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = HostCollector(config())
    now_s = [1000.0, 50.0]
    monkeypatch.setattr(collect, "_two_clocks", lambda: (now_s[0], now_s[1]))
    assert "everstep.host.clock.step" not in {r.name for r in look(collector)}
    now_s[:] = [1001.0, 51.0]
    assert value(look(collector), "everstep.host.clock.step") == 0
    now_s[:] = [1004.5, 52.0]
    readings = look(collector)
    assert value(readings, "everstep.host.clock.step") == 2.5
    assert value(readings, "system.uptime") == 52.0
    assert value(readings, "everstep.host.boot.time") == 952.5
    now_s[:] = [1005.5, 53.0]
    assert value(look(collector), "everstep.host.clock.step") == 0


def test_a_clock_that_runs_along_shows_no_step() -> None:
    collector = HostCollector(config())
    look(collector)
    assert abs(value(look(collector), "everstep.host.clock.step") or 0) < 0.05


def test_where_the_kernel_may_not_be_asked_its_clock_is_unknown_and_not_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collect, "read_kernel_clock", lambda: None)
    readings = look(HostCollector(config()))
    for name in ("synchronized", "offset", "max_error"):
        assert value(readings, f"everstep.host.clock.{name}") is None


def test_a_look_costs_next_to_nothing() -> None:
    collector = HostCollector(config())
    look(collector)
    began_s = time.process_time()
    for _ in range(50):
        look(collector)
    # About a millisecond on an idle machine; fifty leaves room for a busy one.
    assert (time.process_time() - began_s) / 50 < 0.05
