"""A forked child becomes the rank: everything that a process takes from its parent, from the shim.

What Python itself reads only once, when it starts, is the nursery's: it was started with the same
command and environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from everstep.launch.warm.frames import Message

_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP = 1, 35, 14
_MM_MAP = struct.Struct("=12QII")
_PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; end now if it has ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def become(
    ask: Message, environ: Mapping[bytes, bytes], close: Iterable[int], *, parent: int
) -> None:
    """Make this process the rank that the shim asked for. Signals are blocked until the end.

    `close` are the nursery's descriptors. Raises OSError or ValueError.
    """
    os.setsid()
    die_with_parent(parent)
    for fd in close:
        os.close(fd)
    _take_files(ask.fds)
    os.umask(ask.number("umask"))
    _take_limits(ask.numbers("limits"))
    os.sched_setaffinity(0, ask.numbers("cpus"))
    _take_environment(environ)
    _show([os.fsencode(sys.orig_argv[0]), *ask.fields["argv"]], environ)
    argv = [os.fsdecode(word) for word in ask.fields["argv"]]
    sys.argv[1:] = argv[3:] if argv[1] == "-m" else argv[2:]
    sys.orig_argv[1:] = argv
    _start_anew()
    _take_signals(set(ask.numbers("ignored")), ask.numbers("blocked"))


def _take_files(fds: list[int]) -> None:
    *streams, cwd = fds
    os.fchdir(cwd)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)


def _take_limits(numbers: list[int]) -> None:
    names = sorted({getattr(resource, n) for n in dir(resource) if n.startswith("RLIMIT_")})
    for name, soft, hard in zip(names, numbers[::2], numbers[1::2], strict=True):
        if resource.getrlimit(name) != (soft, hard):
            resource.setrlimit(name, (soft, hard))


def _take_environment(environ: Mapping[bytes, bytes]) -> None:
    for name in list(os.environb):
        if name not in environ:
            del os.environb[name]
    for name, value in environ.items():
        os.environb[name] = value


def _show(argv: Sequence[bytes], environ: Mapping[bytes, bytes]) -> None:
    """Let /proc/PID/cmdline and environ show the rank's own: what looks for it looks there.

    Kernels without CONFIG_CHECKPOINT_RESTORE refuse; then both show the nursery's.
    """
    words = b"".join(word + b"\0" for word in argv)
    variables = b"".join(name + b"=" + value + b"\0" for name, value in environ.items())
    # Private memory, never freed: the kernel reads it for as long as this process lives.
    room = mmap.mmap(-1, len(words) + len(variables), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.write(words + variables)
    _kept.append(room)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    between = start + len(words)
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    code_and_data = [int(stat[number - 3]) for number in (26, 27, 45, 46, 47)]
    start_stack = int(stat[28 - 3])
    _libc.sbrk.restype = ctypes.c_void_p
    places = [*code_and_data, _libc.sbrk(0), start_stack, start, between, between]
    layout = _MM_MAP.pack(*places, between + len(variables), 0, 0, 0xFFFFFFFF)
    _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout)), 0)


_kept: list[mmap.mmap] = []


def _start_anew() -> None:
    """Forget what must not be alike in two ranks, or tells of the nursery's time."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # from the kernel's entropy, as at import; `random` does it itself
    sys.modules["torch"].default_generator.seed()  # likewise, as when torch is loaded
    logging._startTime = time.time()  # type: ignore[attr-defined]  # noqa: SLF001  no other way
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(Path(sys.executable).name[:15])


def _take_signals(ignored: set[int], blocked: list[int]) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        keep = signal.SIG_IGN if number in ignored else signal.SIG_DFL
        signal.signal(number, keep)
    for number in _PYTHONS:
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
