"""What is installed, how much room there is, and what time the machine thinks it is."""

from __future__ import annotations

import re
import resource
import shutil
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from everstep.cli.doctor.checks import Found, Patient
from everstep.sdk.config import ConfigError, ConfigFile
from everstep.wire.ids import agent_socket

_FEW_FILES = 4096
_GIB = 1 << 30
_LITTLE_BYTES, _TOO_LITTLE_BYTES = _GIB, _GIB // 10
_TRAINER = "pip install 'everstep[trainer]'"


def configuration(patient: Patient) -> Found:
    """Check the file, hooks apart: their modules may take seconds to import."""
    from everstep.cli import tables

    file = patient.file
    if isinstance(file, ConfigError):
        if isinstance(file.__cause__, PermissionError):
            return Found("warn", str(file), "run doctor as the user who runs the daemon")
        return Found("missing", str(file), "mend the file, or name another", broken=True)
    if file.path is None:
        return Found("ok", "no file: the built-in defaults")
    kept = {name: table for name, table in file.tables.items() if name != "hooks"}
    errors = tables.check(replace(file, tables=kept), patient.environ).errors
    if errors:
        advice = f"everstep config check {file.path}"
        return Found("missing", f"{len(errors)} mistakes in {file.path}", advice, broken=True)
    return Found("ok", f"{file.path}")


def torch(_: Patient) -> Found:
    """Compare torch's version with the oldest that is supported, without importing it."""
    oldest = oldest_torch()
    try:
        here = version("torch")
    except PackageNotFoundError:
        return Found("warn", "not installed: no job can run here", _TRAINER)
    numbers = tuple(int(part) for part in re.findall(r"\d+", here)[:2])
    if numbers < oldest:
        text = f"{here} is older than {'.'.join(map(str, oldest))}"
        return Found("missing", text, _TRAINER, broken=True)
    return Found("ok", here)


def oldest_torch() -> tuple[int, ...]:
    """Return the oldest supported version of torch, as the package itself asks for it."""
    for wanted in requires("everstep") or ():
        if found := re.match(r"torch\s*>=\s*([\d.]+)", wanted):
            return tuple(int(part) for part in found[1].split("."))
    return (0,)


def nvml(_: Patient) -> Found:
    """Open NVIDIA's library; a machine without it is a normal state."""
    from everstep.plugins.collectors.nvml.driver import Driver, DriverError
    from everstep.plugins.collectors.nvml.parse import ABSENT

    try:
        driver = Driver()
    except DriverError as exc:
        if exc.error.code in ABSENT:
            return Found("ok", f"no NVIDIA driver here, nothing to watch ({exc.error.text})")
        advice = "look at `nvidia-smi` and `dmesg`; a reboot may be needed"
        return Found("missing", f"the driver is broken: {exc.error.text}", advice, broken=True)
    gpus, lost = len(driver.handles), len(driver.unopened)
    driver.close()
    if lost:
        return Found("warn", f"{gpus} GPUs, and {lost} that cannot be opened", "see `nvidia-smi`")
    return Found("ok", f"{gpus} GPUs")


def clock(_: Patient) -> Found:
    """Ask the kernel whether somebody keeps its clock right."""
    from everstep.plugins.collectors.host.kernel_clock import read_kernel_clock

    seen = read_kernel_clock()
    if seen is None:
        return Found("warn", "the kernel does not say", "see to it outside of the container")
    if not seen.synchronized:
        return Found("warn", "nobody keeps it", "run chrony or systemd-timesyncd")
    return Found("ok", f"kept, within {seen.max_error_s:.3f} s")


def open_files(_: Patient) -> Found:
    """Look at the hard limit; the agent raises the soft one by itself."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FEW_FILES:
        return Found("warn", f"at most {hard}", "LimitNOFILE= in the unit, or `ulimit -Hn`")
    return Found("ok", "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}")


def runtime_folder(patient: Patient) -> Found:
    """Say where the agent's socket would be, and whether this user could put it there."""
    path = patient.socket or agent_socket(patient.environ)
    chosen = patient.socket or patient.environ.get("EVERSTEP_SOCKET")
    if chosen or patient.root or path.exists() or patient.environ.get("XDG_RUNTIME_DIR"):
        return Found("ok", str(path))
    advice = "set XDG_RUNTIME_DIR or EVERSTEP_SOCKET, or start the agent as root"
    return Found("warn", f"XDG_RUNTIME_DIR is not set, and {path.parent} is root's", advice)


def state_folder(patient: Patient) -> Found:
    """See how much room the coordinator's journal has."""
    from everstep.coordinator.config import CoordinatorConfig, default_state_dir

    file = patient.file if isinstance(patient.file, ConfigFile) else ConfigFile()
    chosen = file.section("coordinator", CoordinatorConfig).state_dir
    folder = Path(chosen or default_state_dir(patient.environ, root=patient.root))
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(there).free
    text = f"{folder}: {free / _GIB:.1f} GiB free"
    if free < _TOO_LITTLE_BYTES:
        return Found("missing", text, "make room, or set [coordinator] state_dir", broken=True)
    if free < _LITTLE_BYTES:
        return Found("warn", text, "make room, or set [coordinator] state_dir")
    return Found("ok", text)
