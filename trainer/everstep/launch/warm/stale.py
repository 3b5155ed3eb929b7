"""Whether a rank may be forked from what a nursery has loaded: pure comparisons, and one look.

A rank started cold would read its environment, its packages and its script's folder itself. Where
any of them could give it something else than the nursery has loaded, it must start cold.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_PER_RANK = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    | {"PYTHON_EXEC"}
)
_PER_RANK_PREFIXES = ("GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_OURS, _ALIKE = "EVERSTEP_", "EVERSTEP_PRELOAD"  # of ours, this one is read when a nursery loads
_MARK = b"EVERSTEP_LAUNCH"  # what carries it is killed between two generations
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/neuron", "/dev/davinci")


def shared(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the variables that all ranks of a launcher have alike.

    >>> shared({b"RANK": b"1", b"MASTER_PORT": b"2", b"EVERSTEP_JOB": b"3", b"LANG": b"C"})
    {b'LANG': b'C'}
    """
    return {name: value for name, value in environ.items() if not _is_per_rank(os.fsdecode(name))}


def of_nursery(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the environment to start a nursery in, for ranks with this one."""
    ours = {n: v for n, v in environ.items() if os.fsdecode(n).startswith(_OURS) and n != _MARK}
    return shared(environ) | ours


def _is_per_rank(name: str) -> bool:
    ours = name.startswith(_OURS) and name != _ALIKE
    return ours or name in _PER_RANK or name.startswith(_PER_RANK_PREFIXES)


def changed_variable(before: Mapping[bytes, bytes], now: Mapping[bytes, bytes]) -> str | None:
    """Return the first variable that differs between two environments, per-rank ones apart.

    >>> changed_variable({b"OMP_NUM_THREADS": b"1", b"RANK": b"0"}, {b"RANK": b"1"})
    'OMP_NUM_THREADS'
    """
    old, new = shared(before), shared(now)
    differing = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
    return os.fsdecode(differing[0]) if differing else None


def script_of(argv: Sequence[bytes]) -> tuple[bytes, ...] | None:
    """Return what torchrun has Python run: `-u`, perhaps `-m`, and the script; None for others.

    >>> script_of([b"-u", b"-m", b"my.training", b"--lr", b"1"])
    (b'-u', b'-m', b'my.training')
    >>> script_of([b"-X", b"dev", b"train.py"]) is None
    True
    """
    if not argv or argv[0] != b"-u":
        return None
    count = 3 if argv[1:2] == [b"-m"] else 2
    return tuple(argv[:count]) if len(argv) >= count else None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the nursery has read from disk, as it was then."""

    files: Mapping[str, tuple[int, int]]  # path -> time of change in ns, size
    folders: Mapping[str, int]  # package folder -> time of change in ns
    tops: Mapping[str, Sequence[str]] = field(default_factory=dict)  # module -> folders it is in

    def changed(self) -> str | None:
        """Return the first file or folder that is no longer what was read."""
        for path, told in self.files.items():
            if _stamp(path) != told:
                return path
        for path, changed_ns in self.folders.items():
            if _folder_stamp(path) != changed_ns:
                return path
        return None

    def shadowed_by(self, folder: str) -> str | None:
        """Return what in this folder a cold rank would import instead of a loaded module."""
        try:
            names = os.listdir(folder)  # noqa: PTH208  tens of thousands, where it is a data folder
        except OSError:
            return None
        for name in names:
            top, dot, _ = name.partition(".")
            homes = self.tops.get(top)
            if homes is None or folder in homes:
                continue
            path = os.path.join(folder, name)  # noqa: PTH118  as above
            if _is_module(path, homes) if dot else _is_package(path, homes):
                return path
        return None


def _is_module(path: str, _: Sequence[str]) -> bool:
    return path.endswith((".py", ".pyc", ".so"))


def _is_package(path: str, homes: Sequence[str]) -> bool:
    """Return whether a folder would be imported instead of, or as a part of, what is loaded."""
    is_folder = Path(path).is_dir()
    return is_folder and (not homes or any(Path(path).glob("__init__.*")))


def snapshot(at_start: Iterable[str]) -> Loaded:
    """Look at what this process has loaded; modules in `at_start` belong to Python's own start."""
    modules = {name: module for name, module in list(sys.modules.items()) if module is not None}
    paths = {getattr(module, "__file__", None) for module in modules.values()}
    files = {path: stamp for path in paths if path and (stamp := _stamp(path)) is not None}
    packages = [entry for entry in sys.path if entry.endswith(PACKAGE_FOLDERS)]
    early = set(at_start)
    tops = {n: _homes(m) for n, m in modules.items() if "." not in n and n not in early}
    tops.pop("__main__", None)
    return Loaded(files, {path: _folder_stamp(path) for path in packages}, tops)


def _homes(module: object) -> list[str]:
    """Return the folders that a module is in; none for a namespace, which any folder may join."""
    file = getattr(module, "__file__", None)
    if file is None:
        spec = getattr(module, "__spec__", None)
        portions = list(getattr(module, "__path__", []))
        builtin = spec is not None and spec.origin in ("built-in", "frozen")
        return [os.path.dirname(p) for p in portions] or (["", "built-in"] if builtin else [])  # noqa: PTH120  strings as they stand in sys.path
    folder = os.path.dirname(file)  # noqa: PTH120  as above
    is_package = hasattr(module, "__path__")
    return [os.path.dirname(folder) if is_package else folder]  # noqa: PTH120  as above


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116  thousands of them before each fork
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _folder_stamp(path: str) -> int:
    stamp = _stamp(path)
    return stamp[0] if stamp else 0


def unfit(*, accelerator: bool) -> str | None:
    """Return why this very process must not be forked from; `accelerator` is what torch says."""
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208  names alone
    if threads > 1:
        return f"it has {threads} threads: something that it loads starts one"
    device = next((d for d in _open_files() if d.startswith(_DEVICES)), None)
    if device is not None or accelerator:
        return f"something that it loads has opened an accelerator ({device or 'says torch'})"
    return None


def _open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  as above
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115  as above
        except OSError:
            continue  # the listing's own
    return found
