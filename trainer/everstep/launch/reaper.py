"""Outlives a killed launcher by a second, to take its ranks along. Standard library only.

Started by the launcher as `python -I -S reaper.py NAME=VALUE` with a pipe as standard input. The
launcher writes `+PID` for each rank that it starts, and the path of a folder that it has made. At
the end of the pipe, however the launcher ended, the ranks' process groups and every process whose
environment has an entry that begins with this mark are killed, and the folder is removed: ranks
live in sessions of their own and would otherwise train on alone.
"""

import os
import shutil
import signal
import sys
import time

SHIM = "everstep-shim"
_ROUNDS, _PAUSE_S = 5, 0.1


def marked(mark: str) -> list[int]:
    """Return the pids, but our own, whose environment has an entry that begins with the mark."""
    needle = mark.encode()
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208  no pathlib: this process must start fast
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123  as above
                entries = file.read().split(b"\0")
        except OSError:
            continue
        if any(entry.startswith(needle) for entry in entries):
            found.append(int(name))
    return found


def kill_group(pid: int) -> None:
    """SIGKILL the process group that `pid` leads, or led."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123  as above
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def is_shim(pid: int) -> bool:
    """Return whether this process only stands in for a rank: both have the rank's environment."""
    try:
        with open(f"/proc/{pid}/comm") as file:  # noqa: PTH123  as above
            return file.read().strip() == SHIM
    except OSError:
        return False


def kill_session(sid: int) -> None:
    """SIGKILL every process of the session that `sid` leads, or led."""
    kill_group(sid)
    for name in os.listdir("/proc"):  # noqa: PTH208  as above
        if not name.isdigit():
            continue
        try:
            if os.getsid(int(name)) == sid:
                os.kill(int(name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def kill_marked(mark: str) -> int:
    """SIGKILL what carries the mark until nothing is left; return how many were killed.

    A process between fork and exec still shows its parent's environment, hence the rounds.
    """
    killed = 0
    for _ in range(_ROUNDS):
        pids = marked(mark)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
            killed += 1
        if not pids:
            break
        time.sleep(_PAUSE_S)
    return killed


def forget_reaped(leaders: dict[int, int]) -> None:
    """Close the pidfds of those that are gone: their numbers may be somebody else's by now."""
    for pid, pidfd in list(leaders.items()):
        try:
            signal.pidfd_send_signal(pidfd, 0)
        except ProcessLookupError:
            os.close(pidfd)
            del leaders[pid]


def main(mark: str) -> None:
    """Wait for the launcher's end, then kill."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    leaders: dict[int, int] = {}
    folders = []
    for line in sys.stdin:
        if not line.startswith("+"):
            folders.append(line.removesuffix("\n"))
            continue
        forget_reaped(leaders)
        pid = int(line[1:])
        if pid in leaders:
            continue  # the same one: it has not been reaped
        try:
            leaders[pid] = os.pidfd_open(pid)
        except OSError:
            continue
    forget_reaped(leaders)
    for pid in leaders:
        kill_group(pid)
    time.sleep(_PAUSE_S)
    kill_marked(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
