"""torchrun's child: stands in for a rank, in a session of its own, and ends as the rank does.

It asks the launcher's pool for a rank and hands over everything that a process takes from its
parent. "cold" makes it become the interpreter that torchrun meant, as if it had never been there.
Otherwise it passes on each signal that it gets, and stays until the pool says how the rank ended.
Standard library only: each rank's start waits for this process.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys

from everstep.launch.warm import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

NAME = "everstep-shim"  # `reaper.is_shim` knows it by this name
_OWN = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD} | {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
}  # fmt: skip
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)  # ignored by every interpreter from its start on


def main(pool: str) -> NoReturn:
    """Stand in for a rank; `pool` is the path of the pool's socket."""
    shim = _Shim(sys.argv[1:])
    shim.run(pool)


class _Shim:
    def __init__(self, argv: list[str]) -> None:
        _name_process(NAME)
        self._argv = argv
        self._parent = os.getppid()
        self._pending: list[int] = []
        self._pid = 0
        self._pidfd = -1
        self._ignored = [n for n in signal.valid_signals() if _is_ignored(n)]
        for number in signal.valid_signals() - _OWN - set(self._ignored):
            signal.signal(number, self._signalled)

    def run(self, pool: str) -> NoReturn:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        reader = frames.Reader(sock)
        try:
            sock.connect(pool)
            self._ask(sock)
            while messages := reader.read():
                for message in messages:
                    self._take(message)
        except OSError as exc:
            sys.stderr.write(f"everstep: rank shim: {pool}: {exc}\n")
        self._orphaned()

    def _ask(self, sock: socket.socket) -> None:
        cwd = os.open(".", os.O_PATH | os.O_DIRECTORY)
        frames.send(sock, "ask", self._inheritance(), [0, 1, 2, cwd])
        os.close(cwd)

    def _inheritance(self) -> dict[str, list[bytes]]:
        mask = os.umask(0)
        os.umask(mask)
        limits = [n for name in _limits() for n in resource.getrlimit(name)]
        return {
            "argv": [os.fsencode(word) for word in self._argv],
            "environ": [k + b"=" + v for k, v in os.environb.items()],
            "ignored": frames.whole(*self._ignored),
            "blocked": frames.whole(*signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "umask": frames.whole(mask),
            "limits": frames.whole(*limits),
            "cpus": frames.whole(*os.sched_getaffinity(0)),
        }

    def _take(self, message: frames.Message) -> None:
        match message.kind:
            case "cold":
                self._become_cold()
            case "born":
                if self._pidfd >= 0:
                    os.close(self._pidfd)
                (self._pidfd,) = message.fds
                self._pid = message.number("pid")
                pending, self._pending = self._pending, []
                for number in pending:
                    self._forward(number)
            case "gone":
                self._pid = 0  # and another one may follow; what comes in between is for that one
            case _:  # "end"
                _end_as(message.number("code"))

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if self._pid:
            self._forward(number)
        elif self._pidfd >= 0 and number in _ENDING:
            _end_as(-number)  # between two ranks: there is nobody to wait for
        else:
            self._pending.append(number)

    def _forward(self, number: int) -> None:
        # To the whole group: that is whom torchrun and a terminal mean.
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
            os.killpg(self._pid, number)
        except ProcessLookupError:
            return  # it has just ended; the pool will say how

    def _become_cold(self) -> NoReturn:
        for number in self._pending:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        for number in _PYTHONS:
            signal.signal(number, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, *self._argv])

    def _orphaned(self) -> NoReturn:
        """The pool hung up: the launcher has died, or has no pool any more."""
        if self._pid:
            self._forward(signal.SIGKILL)
        elif os.getppid() == self._parent:
            self._become_cold()
        _end_as(-signal.SIGKILL)


def _limits() -> list[int]:
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return sorted({getattr(resource, name) for name in names})


def _is_ignored(number: int) -> bool:
    return number not in _PYTHONS and signal.getsignal(number) == signal.SIG_IGN


def _name_process(name: str) -> None:
    with open("/proc/self/comm", "w") as file:  # noqa: PTH123  no pathlib: it takes 5 ms to load
        file.write(name)


def _end_as(code: int) -> NoReturn:
    """End with an exit code, or by the signal of a negative one, without a core file."""
    sys.stderr.flush()
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    os._exit(128 - code)
