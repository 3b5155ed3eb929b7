"""Takes SIGTERM in a thread: a Python handler runs only when the main thread's collective returns.

From `arm` on the signal does not end the process by itself; `decide` is called, in a thread, and
when it returns the process ends by the signal after all. A program that has a handler of its own,
or a wakeup descriptor, keeps them, and nothing is armed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_libc = ctypes.CDLL(None)
_armed: weakref.WeakSet[Sigterm] = weakref.WeakSet()


class Sigterm:
    """The hold on SIGTERM of one process; `arm` and `disarm` belong to the main thread."""

    def __init__(self, decide: Callable[[], None]) -> None:
        self._decide = decide
        self._write_fd = -1

    def arm(self) -> bool:
        """Take the signal from now on; False where that is not ours to do."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return False
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_fd, False)
        before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(read_fd)
            os.close(write_fd)
            return False
        self._write_fd = write_fd
        signal.signal(signal.SIGTERM, _nothing)
        signal.siginterrupt(signal.SIGTERM, False)  # noqa: FBT003  its form
        _armed.add(self)
        threading.Thread(
            target=self._watch, args=(read_fd,), name="everstep-sigterm", daemon=True
        ).start()
        return True

    def disarm(self) -> None:
        """Let the signal end the process again, as it did before `arm`."""
        _armed.discard(self)
        if self._write_fd < 0:
            return
        write_fd, self._write_fd = self._write_fd, -1
        with contextlib.suppress(ValueError):  # not the main thread: it has gone before us
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) is _nothing:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(write_fd)

    def _watch(self, read_fd: int) -> None:
        with open(read_fd, "rb", buffering=0) as signals:
            while numbers := signals.read(64):
                # A handler that the program has set since is the program's business.
                if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _nothing:
                    try:
                        self._decide()
                    finally:
                        end_by_sigterm()


def end_by_sigterm() -> None:
    """End this process by SIGTERM, from any thread."""
    _libc.signal(int(signal.SIGTERM), None)  # SIG_DFL; `signal.signal` is the main thread's
    os.kill(os.getpid(), signal.SIGTERM)


_forking = threading.local()


def _before_fork() -> None:
    # Until the child has let go of the descriptor, a signal of the child's would be told to us.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if _armed else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    # A DataLoader worker must end by its parent's signal.
    for sigterm in list(_armed):
        sigterm.disarm()
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)


def _nothing(*_: object) -> None:
    """Be a handler: without one nothing is written to the wakeup descriptor."""
