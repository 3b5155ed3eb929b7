"""The daemons that are measured: started in a folder of their own, watched from outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class Daemon:
    """One `everstep` process; `close` ends it."""

    def __init__(
        self, arguments: Sequence[str], log: Path, environ: Mapping[str, str] = {}
    ) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "everstep.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **environ},
            )
        self.pid = self._process.pid
        self._log = log

    def wait_until(self, true: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
        """Poll until it is true. Raises RuntimeError, with the log's end, when it does not come."""
        end_s = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > end_s or self._process.poll() is not None:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"not within {timeout_s:.0f} s: {what}\n{tail}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait(10)

    def close(self) -> None:
        """End it, politely at first."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def cpu_s(self) -> float:
        """Return the CPU time of all its threads so far, ended ones included."""
        # What clock_getcpuclockid(3) makes of a pid: /proc/PID/stat in nanoseconds, not ticks.
        return time.clock_gettime((~self.pid << 3) | 2)

    def rss_mib(self) -> float:
        """Return its resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def start_coordinator(folder: Path, port: int) -> Daemon:
    """Start a coordinator, or start it again on the same journal."""
    arguments = ["coordinator", "--listen", f"127.0.0.1:{port}", "--state-dir"]
    return Daemon([*arguments, str(folder / "state")], folder / "coordinator.log")


def listens(port: int) -> bool:
    """Return whether somebody accepts connections on this port of this machine."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
